"""calibrate: the thresholds that u="auto" would choose from the same gradients, and a model that nobody touched."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tailopt
from tailopt.thresholds import CALIBRATION, Norms, Thresholds, choose


class Model(nn.Module):
    """What a forward pass can change: BatchNorm's buffers, dropout's generator; a frozen and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.1)
        self.last, self.unused = nn.Linear(8, 2), nn.Parameter(torch.ones(3))
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.tanh(self.norm(self.first(x)))))


def mean_squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def batches(n: int = CALIBRATION, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(seed)
    return [(torch.randn(5, 6, generator=source), torch.randn(5, 2, generator=source)) for _ in range(n)]


def plain() -> nn.Module:
    """A model without anything random, so that gradients can be computed again."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def gradients(model: nn.Module) -> list[list[Tensor]]:
    """By tensor, of every batch."""
    rows = [torch.autograd.grad(mean_squares(model, batch), list(model.parameters())) for batch in batches()]
    return [list(column) for column in zip(*rows, strict=True)]


def test_the_thresholds_are_those_of_auto_at_these_weights() -> None:
    chosen = tailopt.calibrate(plain(), mean_squares, batches())
    stacked = [torch.stack(column) for column in gradients(plain())]
    expected = choose(list(tailopt.count(stacked, u=1.0, d=0.0, complete=True).values()))
    assert chosen.u == pytest.approx(expected.u, rel=1e-5) and chosen.d == pytest.approx(expected.d, rel=1e-5)
    assert chosen.u == chosen.u1 and len(chosen.u) == 4 and chosen.reason.startswith("u = ")

    model = plain()
    opt = tailopt.BiClip(model.parameters(), lr=0.0, u="auto", d="auto")
    for batch in batches():
        opt.zero_grad()
        mean_squares(model, batch).backward()
        opt.step()
    assert Thresholds.from_state(opt.param_groups[0]["thresholds"]) == chosen


NORM: dict[str, dict[str, Any]] = {
    "avg-biclip-l2": {"ilr": 0.1, "i_u": 1.0, "i_d": 0.5},
    "avg-l2clip": {"ilr": 0.1, "i_u": 1.0, "scope": "tensor"},
}


@pytest.mark.parametrize("name", NORM)
def test_an_algorithm_that_clips_norms_gets_norms(name: str) -> None:
    algorithm = tailopt.algorithm(name, **NORM[name])
    chosen = tailopt.calibrate(plain(), mean_squares, batches(), algorithm=algorithm)
    each = torch.tensor([[float(g.double().norm()) for g in column] for column in gradients(plain())])
    if name == "avg-l2clip":
        expected = choose([Norms(tuple(row)) for row in each.tolist()], d=0)
    else:
        expected = choose([Norms(tuple(torch.linalg.vector_norm(each, dim=0).tolist()))])
    assert chosen.u == pytest.approx(expected.u, rel=1e-5) and chosen.d == pytest.approx(expected.d, rel=1e-5)
    assert "the median of the norm" in chosen.reason


def test_an_algorithm_that_clips_elements_gets_those_of_its_mean() -> None:
    def calibrated(**settings: Any) -> Thresholds:
        algorithm = tailopt.algorithm("avg-biclip", ilr=0.1, i_u=1.0, **settings)
        return tailopt.calibrate(plain(), mean_squares, batches(), algorithm=algorithm)

    assert calibrated(i_d=0.5) == tailopt.calibrate(plain(), mean_squares, batches())
    assert calibrated(i_d=0.0).d == (0.0,) * 4
    m, means = [torch.zeros_like(p) for p in plain().parameters()], []
    for k, rows in enumerate(zip(*gradients(plain()), strict=True), start=1):
        m = [0.9 * old + 0.1 * g for old, g in zip(m, rows, strict=True)]
        means.append([x / (1 - 0.9**k) for x in m])
    stacked = [torch.stack(column) for column in zip(*means, strict=True)]
    expected = choose(list(tailopt.count(stacked, u=1.0, d=0.0, complete=True).values()))
    assert calibrated(i_d=0.5, inner_momentum=0.9).u == pytest.approx(expected.u, rel=1e-4)


def snapshot(model: Model) -> dict[str, Any]:
    return {
        "tensors": {name: t.clone() for name, t in model.state_dict().items()},
        "buffers": [id(b) for b in model.buffers()],
        "modes": [module.training for module in model.modules()],
        "grads": [p.grad for p in model.parameters()],
        "flags": [p.requires_grad for p in model.parameters()],
        "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1]),  # noqa: NPY002
    }


def careless(model: Any, batch: Any) -> Tensor:
    """A loss that leaves a mess."""
    model.eval()
    random.random()
    np.random.rand()  # noqa: NPY002
    model.norm.train()
    model.norm.running_mean = model.norm.running_mean + 1  # another tensor in the place of the buffer
    model.last.bias.requires_grad_(True)
    return mean_squares(model, batch)


def failing(model: Any, batch: Any) -> Tensor:
    if model.norm.num_batches_tracked > 2:
        raise RuntimeError("no more memory")
    return careless(model, batch)


@pytest.mark.parametrize("loss", [mean_squares, careless, failing])
def test_nothing_is_touched(loss: Callable[[Any, Any], Tensor]) -> None:
    model = Model()
    model.norm.eval()  # frozen, while the rest is trained
    model.first.weight.grad = given = torch.full_like(model.first.weight, 7.0)
    if loss is failing:
        model.eval()
    before = snapshot(model)
    if loss is failing:
        with pytest.raises(RuntimeError, match="no more memory"):
            tailopt.calibrate(model, loss, batches())
    else:
        chosen = tailopt.calibrate(model, loss, batches())
        assert len(chosen.u) == 6 and all(u > 0 for u in chosen.u), "the unused parameter has the thresholds of all"
    after = snapshot(model)
    assert after.pop("grads") == before.pop("grads") and torch.equal(given, torch.full_like(given, 7.0))
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_training_mode_is_that_of_the_user_unless_the_model_evaluates() -> None:
    seen: list[tuple[bool, bool]] = []

    def loss(model: Any, batch: Any) -> Tensor:
        seen.append((model.training, model.norm.training))
        return mean_squares(model, batch)

    model = Model()
    model.norm.eval()
    tailopt.calibrate(model, loss, batches(1))
    tailopt.calibrate(model.eval(), loss, batches(1))
    assert seen == [(True, False), (True, True)] and not model.training


def test_fewer_batches_are_named_and_more_are_not_drawn() -> None:
    few = tailopt.calibrate(plain(), mean_squares, batches(7))
    assert few.reason.endswith(", in 7 batches.")
    many = iter(batches(60))
    assert tailopt.calibrate(plain(), mean_squares, many) == tailopt.calibrate(plain(), mean_squares, batches())
    assert len(list(many)) == 10


def linear(name: str, **settings: Any) -> tailopt.Algorithm:
    return tailopt.algorithm(name, ilr=0.1, **settings)


BAD: dict[str, Callable[[], Any]] = {
    "Invalid batches: there is none; need one or more": lambda: tailopt.calibrate(plain(), mean_squares, []),
    r"Invalid loss: a tensor of shape \(2,\); need a scalar tensor": lambda: tailopt.calibrate(
        plain(), lambda model, batch: model(batch[0]).mean(0), batches(1)
    ),
    "Invalid loss: float; need a scalar tensor": lambda: tailopt.calibrate(plain(), lambda *_: 1.0, batches(1)),
    "Invalid loss: it depends on no trainable parameter": lambda: tailopt.calibrate(
        plain(), lambda model, batch: mean_squares(model, batch).detach(), batches(1)
    ),
    "Invalid model: no parameter requires a gradient": lambda: tailopt.calibrate(
        plain().requires_grad_(False), mean_squares, batches(1)
    ),
    "none of 74 elements is nonzero and finite; u='auto' needs some": lambda: tailopt.calibrate(
        plain(), lambda model, batch: 0 * mean_squares(model, batch), batches(1)
    ),
    "Invalid loss: 1; need a function": lambda: tailopt.calibrate(plain(), 1, batches(1)),  # type: ignore[arg-type]
    "Invalid model: 'gpt2'; need a torch.nn.Module": lambda: tailopt.calibrate("gpt2", mean_squares, []),  # type: ignore[arg-type]
    "Invalid algorithm: avg-sgd, whose inner optimizer 'sgd' has no thresholds": lambda: tailopt.calibrate(
        plain(), mean_squares, batches(1), algorithm=linear("avg-sgd")
    ),
    "Invalid algorithm: 'avg-biclip'; make one with tailopt.algorithm": lambda: tailopt.calibrate(
        plain(),
        mean_squares,
        batches(1),
        algorithm="avg-biclip",  # type: ignore[arg-type]
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_said(message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        BAD[message]()
