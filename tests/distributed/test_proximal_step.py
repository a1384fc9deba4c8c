"""Real nodes with a proximal term: any inner optimizer steps on the sum, and the user's gradients stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import tailopt
from tailopt.distributed.proximal_step import ProximalStep
from tailopt.rounds.proximal import proximal_gradient

MU, STEPS, ROUNDS = 0.7, 3, 4
Class = Callable[[Any], torch.optim.Optimizer]
INNER: dict[str, Class] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.02, weight_decay=0.1),
    "BiClip": lambda params: tailopt.BiClip(params, lr=0.05, u=0.5, d=0.01, weight_decay=0.1),
    "Clipped": lambda params: tailopt.Clipped(torch.optim.AdamW(params, lr=0.02), u=0.3, d=0.0),
}


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)


def batch(k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(k)
    return torch.randn(8, 5, generator=source).to(dtype), torch.randn(8, 1, generator=source).to(dtype)


def loss(net: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
    return (net(pair[0]) - pair[1]).square().mean()


def by_hand(make: Class, dtype: torch.dtype) -> list[Tensor]:
    """Rounds of one node: the mean displacement is its own, and so it goes on where it is."""
    net = model(dtype)
    params, optimizer = list(net.parameters()), make(net.parameters())
    x = [p.detach().to(torch.float32 if dtype == torch.bfloat16 else dtype, copy=True) for p in params]
    for t in range(ROUNDS):
        start = [p.detach().clone() for p in params]
        for k in range(STEPS):
            optimizer.zero_grad()
            loss(net, batch(STEPS * t + k, dtype)).backward()
            for p, x0 in zip(params, start, strict=True):
                p.grad = proximal_gradient(p.grad, p, x0, MU)
            optimizer.step()
        with torch.no_grad():
            for p, whole, x0 in zip(params, x, start, strict=True):
                whole.add_(p.to(whole.dtype) - x0.to(whole.dtype))
                p.copy_(whole)
    return [p.detach().clone() for p in params]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", INNER)
def test_any_inner_optimizer_steps_on_the_sum(alone: None, name: str, dtype: torch.dtype) -> None:
    net = model(dtype)
    opt = tailopt.NestedOptimizer(INNER[name](net.parameters()), local_steps=STEPS, rounds=ROUNDS, proximal=MU)
    k = 0
    while not opt.finished:
        opt.zero_grad()
        loss(net, batch(k, dtype)).backward()
        before = [(p.grad, p.grad.clone()) for p in net.parameters() if p.grad is not None]
        opt.step()
        for p, (own, value) in zip(net.parameters(), before, strict=True):
            assert p.grad is own and torch.equal(own, value), "the gradient is the user's again"
        k += 1
    for p, wanted in zip(net.parameters(), by_hand(INNER[name], dtype), strict=True):
        assert torch.equal(p.detach(), wanted)


def test_without_it_the_bits_are_those_of_before(alone: None) -> None:
    found = []
    for options in ({}, {"proximal": 0}, {"proximal": MU}):
        net = model()
        opt = tailopt.NestedOptimizer(INNER["AdamW"](net.parameters()), local_steps=2, rounds=2, **options)
        for k in range(4):
            opt.zero_grad()
            loss(net, batch(k, torch.float32)).backward()
            opt.step()
        found.append([p.detach().clone() for p in net.parameters()])
    assert all(map(torch.equal, found[0], found[1]))
    assert not any(map(torch.equal, found[0], found[2]))


def test_it_comes_after_a_grad_scaler(alone: None) -> None:
    """Gradients that were scaled by a power of two give the same steps, and a step that the scaler skips is none."""
    found = []
    for scale in (None, 1024.0):
        net = model()
        opt = tailopt.NestedOptimizer(INNER["SGD"](net.parameters()), local_steps=2, rounds=2, proximal=MU)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        for k in range(4):
            opt.zero_grad()
            scaler.scale(loss(net, batch(k, torch.float32))).backward()
            scaler.step(opt)
            scaler.update()
        assert opt.finished
        found.append([p.detach().clone() for p in net.parameters()])
    assert all(map(torch.equal, *found))


# The step alone


def parameter(value: float, start: float, mu: float = 0.5) -> tuple[nn.Parameter, ProximalStep]:
    p = nn.Parameter(torch.tensor([value]))
    return p, ProximalStep([p], mu, lambda: [torch.tensor([start])])


def test_gradients_come_back_if_the_step_fails() -> None:
    p, take = parameter(3.0, 1.0)
    own = p.grad = torch.tensor([1.0])
    seen: list[float] = []

    def failing(closure: Any) -> None:
        seen.append(p.grad.item())
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        take(failing, None)
    assert seen == [2.0] and p.grad is own


def test_a_closure_may_be_called_several_times() -> None:
    """Each time the term is added once, where the parameter then is."""
    p, take = parameter(3.0, 1.0)
    seen: list[float] = []

    def closure() -> float:
        p.grad = None
        p.square().sum().backward()
        return float(p.detach())

    def twice(given: Any) -> float:
        given()
        seen.append(p.grad.item())
        with torch.no_grad():
            p.fill_(2.0)
        value: float = given()
        seen.append(p.grad.item())
        return value

    assert take(twice, closure) == 2.0
    assert seen == [6.0 + 0.5 * 2.0, 4.0 + 0.5 * 1.0]
    assert p.grad.item() == 4.0


def test_what_the_loss_does_not_reach_has_no_gradient() -> None:
    p, take = parameter(3.0, 1.0)
    take(lambda closure: None if p.grad is None else pytest.fail("it got a gradient"), None)
    assert p.grad is None


def test_a_round_has_one_start() -> None:
    p, asked = nn.Parameter(torch.zeros(1)), []

    def start() -> list[Tensor]:
        asked.append(1)
        return [torch.zeros(1)]

    take = ProximalStep([p], 1.0, start)
    for k in range(6):
        if k % 3 == 0:
            take.begin_round()
        p.grad = torch.ones(1)
        take(lambda closure: None, None)
    assert len(asked) == 2


@pytest.mark.usefixtures("alone")
def test_released_gradients_are_refused_before_training_and_in_a_step() -> None:
    net = model()
    optimizer = tailopt.BiClip(net.parameters(), lr=0.05, u=0.5, d=0.01)
    with (
        tailopt.release_gradients(net, optimizer),
        pytest.raises(ValueError, match="Invalid proximal: 0.7"),
    ):
        tailopt.NestedOptimizer(optimizer, "avg", local_steps=STEPS, model=net, proximal=MU)
    nested = tailopt.NestedOptimizer(optimizer, "avg", local_steps=STEPS, model=net, proximal=MU)
    with tailopt.release_gradients(net, optimizer):
        loss(net, batch(0, torch.float32)).backward()
        with pytest.raises(ValueError, match="Call remove"):
            nested.step()
