"""Simulations whose outcome is known: other names for the same thing, and loops over torch.optim written by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tailopt

NODES, ROUNDS, STEPS = 3, 8, 4
# Where a processor has fused multiply-add, torch's `add` with alpha rounds once, as clipped steps do everywhere.
FUSED = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Bowl(nn.Module):
    """Two tensors and no layers; the loss below has all the rest."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(5)
        self.a = nn.Parameter(torch.randn(3, 4, generator=source).to(dtype))
        self.b = nn.Parameter(torch.randn(5, generator=source).to(dtype))


def batches(node: int, round: int, step: int, generator: torch.Generator) -> dict[str, Tensor]:
    """An optimum of the node's own and noise of this step, as a function of these numbers."""
    source = torch.Generator().manual_seed(1_000_000 * node + 1_000 * round + step)
    noise = {"a": torch.randn(3, 4, generator=source), "b": torch.randn(5, generator=source)}
    return {name: value * torch.exp(value) + 0.3 * node for name, value in noise.items()}


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    total = torch.sin(model.get_parameter("a")).sum()
    for name, noise in batch.items():
        p = model.get_parameter(name)
        total = total + (p - noise.to(p.dtype)).square().sum() / 2
    return total


def simulated(algo: tailopt.Algorithm, dtype: torch.dtype = torch.float64, **more: Any) -> list[Tensor]:
    given = {"nodes": NODES, "rounds": ROUNDS, "local_steps": STEPS, **more}
    result = tailopt.simulate(Bowl(dtype), algo, loss=loss, batches=batches, progress=False, **given)
    assert not any(row["excluded"] for row in result.history)
    return [p.detach() for p in result.model.parameters()]


def by_hand(
    inner: Optimizer,
    outer: Optimizer | None,
    dtype: torch.dtype,
    keep: bool,
    nodes: int = NODES,
    rounds: int = ROUNDS,
    steps: int = STEPS,
) -> list[Tensor]:
    """Rounds as one would write them with torch.optim alone; without an outer optimizer the mean is added."""
    model, none = Bowl(dtype), torch.Generator()
    x = list(model.parameters())
    server = outer(x) if outer is not None else None
    replicas = [Bowl(dtype) for _ in range(nodes)]
    optimizers = [inner(list(replica.parameters())) for replica in replicas]
    for t in range(1, rounds + 1):
        mean: list[Tensor] = []
        for i, replica in enumerate(replicas):
            replica.load_state_dict(model.state_dict())
            optimizer = optimizers[i] if keep else inner(list(replica.parameters()))
            for k in range(steps):
                optimizer.zero_grad()
                loss(replica, batches(i, t, k, none)).backward()
                optimizer.step()
            moved = [(p - q).detach() * (1 / nodes) for p, q in zip(replica.parameters(), x, strict=True)]
            mean = moved if not mean else [m + d for m, d in zip(mean, moved, strict=True)]
        for p, m in zip(x, mean, strict=True):
            p.grad = -m
        if server is None:
            with torch.no_grad():
                for p, m in zip(x, mean, strict=True):
                    p.add_(m)
        else:
            server.step()
    return [p.detach() for p in x]


def assert_equal(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b), f"{(a - b).abs().max()} apart"


def assert_near(found: Sequence[Tensor], wanted: Sequence[Tensor], close: float) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=close, atol=close)


# The same thing by another name


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-6), (torch.float64, 1e-14)], ids=str)
def test_bi2clip_without_thresholds_is_avg_sgd(dtype: torch.dtype, close: float) -> None:
    """Bit for bit where torch's own step is fused; elsewhere torch rounds it twice and ours once."""
    inf = float("inf")
    clipped = tailopt.algorithm("bi2clip", ilr=0.05, olr=1.0, i_u=inf, i_d=0.0, o_u=inf, o_d=0.0)
    found, wanted = simulated(clipped, dtype), simulated(tailopt.algorithm("avg-sgd", ilr=0.05), dtype)
    assert_near(found, wanted, close)
    if FUSED:
        assert_equal(found, wanted)


@pytest.mark.parametrize("name", ["avg-biclip", "avg-biclip-l2", "avg-l2clip"])
def test_inner_clipping_without_thresholds_is_avg_sgd(name: str) -> None:
    thresholds = {"i_u": float("inf")} | ({} if name == "avg-l2clip" else {"i_d": 0.0})
    found = simulated(tailopt.algorithm(name, ilr=0.05, **thresholds))
    assert_near(found, simulated(tailopt.algorithm("avg-sgd", ilr=0.05)), 1e-14)


@pytest.mark.parametrize("name", ["sgd-sgd", "biclip-l2-sgd"])
def test_outer_steps_of_length_one_are_avg(name: str) -> None:
    more = {"o_u": float("inf"), "o_d": 0.0} if name == "biclip-l2-sgd" else {}
    found = simulated(tailopt.algorithm(name, ilr=0.05, olr=1.0, **more))
    assert_equal(found, simulated(tailopt.algorithm("avg-sgd", ilr=0.05)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_equal_thresholds_are_scaled_sign_descent(dtype: torch.dtype) -> None:
    """lr * (c * sign): a power of two scales without a rounding, so the bits are those of sign with ilr * c."""
    for c in (0.25, 2.0):
        found = simulated(tailopt.algorithm("avg-biclip", ilr=0.05, i_u=c, i_d=c), dtype)
        assert_equal(found, simulated(tailopt.algorithm("avg-sign", ilr=0.05 * c), dtype))


def test_equal_thresholds_are_scaled_sign_descent_for_any_number() -> None:
    found = simulated(tailopt.algorithm("avg-biclip", ilr=0.05, i_u=0.3, i_d=0.3))
    assert_near(found, simulated(tailopt.algorithm("avg-sign", ilr=0.05 * 0.3)), 1e-14)


def test_equal_thresholds_on_both_levels() -> None:
    """One node: x + olr c sign(displacement); of an odd number of equal steps none cancel."""
    model, steps = Bowl(torch.float64), 3
    for t in range(1, ROUNDS + 1):
        start = [p.detach().clone() for p in model.parameters()]
        for k in range(steps):
            model.zero_grad()
            loss(model, batches(0, t, k, torch.Generator())).backward()
            with torch.no_grad():
                for p in model.parameters():
                    assert p.grad is not None
                    p.sub_(0.1 * 2.0 * p.grad.sign())
        with torch.no_grad():
            for p, x in zip(model.parameters(), start, strict=True):
                p.copy_(x + 0.5 * 0.25 * (p - x).sign())
    algo = tailopt.algorithm("bi2clip", ilr=0.1, olr=0.5, i_u=2.0, i_d=2.0, o_u=0.25, o_d=0.25)
    assert_near(simulated(algo, nodes=1, local_steps=steps), [p.detach() for p in model.parameters()], 1e-13)


# One node, one local step

ALONE: list[tuple[str, dict[str, Any], Optimizer]] = [
    ("sgd", {"ilr": 0.05}, lambda p: torch.optim.SGD(p, lr=0.05)),
    ("adagrad", {"ilr": 0.05, "ieps": 1e-6}, lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-6)),
    ("adam", {"ilr": 0.05, "ieps": 1e-6}, lambda p: torch.optim.Adam(p, lr=0.05, eps=1e-6)),
    (
        "adam",
        {"ilr": 0.05, "ieps": 1e-6, "inner_betas": (0.5, 0.8)},
        lambda p: torch.optim.Adam(p, lr=0.05, eps=1e-6, betas=(0.5, 0.8)),
    ),
    (
        "adamw",
        {"ilr": 0.05, "ieps": 1e-6, "weight_decay": 0.3},
        lambda p: torch.optim.AdamW(p, lr=0.05, eps=1e-6, weight_decay=0.3),
    ),
    ("biclip", {"ilr": 0.05, "i_u": 0.5, "i_d": 0.1}, lambda p: tailopt.BiClip(p, lr=0.05, u=0.5, d=0.1)),
    ("l2clip", {"ilr": 0.05, "i_u": 0.5}, lambda p: tailopt.L2Clip(p, lr=0.05, u=0.5)),
]


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "anew"])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-13), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize(("name", "settings", "inner"), ALONE, ids=[f"{row[0]}-{i}" for i, row in enumerate(ALONE)])
def test_one_node_and_one_step_is_the_optimizer_itself(
    name: str, settings: dict[str, Any], inner: Optimizer, dtype: torch.dtype, close: float, keep: bool
) -> None:
    """To rounding, since x + (x' - x) is x' to one; with state kept, or torch's optimizer made anew in every step."""
    model, rounds = Bowl(dtype), 20
    params = list(model.parameters())
    optimizer = inner(params)
    for t in range(1, rounds + 1):
        if not keep:
            optimizer = inner(params)
        optimizer.zero_grad()
        loss(model, batches(0, t, 0, torch.Generator())).backward()
        optimizer.step()
    algo = tailopt.algorithm(f"avg-{name}", **settings, inner_state="keep" if keep else "reset")
    found = simulated(algo, dtype, nodes=1, rounds=rounds, local_steps=1)
    assert_near(found, [p.detach() for p in params], close)


@pytest.mark.parametrize("name", ["adam", "adagrad"])
def test_keeping_state_is_not_the_same_as_making_it_anew(name: str) -> None:
    algos = [tailopt.algorithm(f"avg-{name}", ilr=0.05, ieps=1e-6, inner_state=s) for s in ("keep", "reset")]
    kept, anew = (simulated(algo, nodes=1, local_steps=1) for algo in algos)
    assert float((kept[0] - anew[0]).abs().max()) > 1e-3


# The proximal term


@pytest.mark.parametrize("mu", [0.5, 3.0])
def test_a_proximal_step_contracts_towards_the_start(mu: float) -> None:
    """With a constant gradient g, z steps move by -g (1 - (1 - ilr mu)^z) / mu; without the term by -g ilr z."""
    g = torch.tensor([1.0, -2.0, 4.0], dtype=torch.float64)
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    x = model.weight.detach().clone()
    found = tailopt.simulate(
        model,
        tailopt.algorithm("avg-sgd", ilr=0.1),
        loss=lambda model, batch: (model.weight[0] * batch).sum(),
        batches=lambda node, t, step, generator: g,
        nodes=2,
        rounds=3,
        local_steps=4,
        proximal=mu,
        progress=False,
    ).model.weight.detach()
    torch.testing.assert_close(found, x - 3 * g * (1 - (1 - 0.1 * mu) ** 4) / mu, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["avg-sgd", "bi2clip", "adam2", "diloco"])
def test_one_local_step_has_no_proximal_term(name: str, dtype: torch.dtype) -> None:
    """It starts where the round starts. And 0 has the bits of no such option."""
    given = {"ilr": 0.05, "i_u": 0.8, "i_d": 0.1, "olr": 0.3, "o_u": 0.3, "o_d": 0.01, "momentum": 0.5}
    given |= {"ieps": 1e-3, "oeps": 1e-3, "weight_decay": 0.1}
    with pytest.raises(ValueError, match="It needs") as error:
        tailopt.algorithm(name)
    needed = str(error.value).split("It needs ")[1].split(".")[0].split(", ")
    algo = tailopt.algorithm(name, **{key: given[key] for key in needed})
    one = [simulated(algo, dtype, local_steps=1, proximal=mu) for mu in (0.0, 2.0)]
    assert_equal(*one)
    four = [simulated(algo, dtype, proximal=mu) for mu in (0, 2.0)]
    assert_equal(four[0], simulated(algo, dtype))
    assert not any(map(torch.equal, *four))


# Loops over torch.optim by hand, bit for bit

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


@DTYPES
@pytest.mark.parametrize("keep", [True, False], ids=["kept", "anew"])
def test_diloco_is_adamw_inside_nesterov(keep: bool, dtype: torch.dtype) -> None:
    wanted = by_hand(
        lambda p: torch.optim.AdamW(p, lr=0.03, eps=1e-6, weight_decay=0.2),
        lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True),
        dtype,
        keep,
    )
    name = "diloco" if keep else "nesterov-adamw"
    algo = tailopt.algorithm(name, ilr=0.03, olr=0.7, ieps=1e-6, momentum=0.9, weight_decay=0.2)
    assert_equal(simulated(algo, dtype), wanted)


class MuonAndAdamW:
    """What one writes by hand with torch.optim: Muon on the matrix, AdamW on the rest."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        a, b = params
        self._both = (
            torch.optim.Muon([a], lr=0.05, weight_decay=0.2),
            torch.optim.AdamW([b], lr=0.03, eps=1e-6, weight_decay=0.2),
        )

    def zero_grad(self) -> None:
        for optimizer in self._both:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self._both:
            optimizer.step()


@DTYPES
@pytest.mark.parametrize("keep", [True, False], ids=["kept", "anew"])
@pytest.mark.parametrize("name", ["avg-muon", "muloco"])
def test_muon_inside_is_torchs_own(name: str, keep: bool, dtype: torch.dtype) -> None:
    inner: Any = MuonAndAdamW
    settings = {"ilr": 0.05, "ilr_adamw": 0.03, "ieps": 1e-6, "weight_decay": 0.2, "adamw_on": "b"}
    options = {"inner_state": "keep" if keep else "reset"}
    if name == "avg-muon":
        found = simulated(tailopt.algorithm(name, **settings, **options), dtype, nodes=1)
        wanted = by_hand(inner, None, dtype, keep, nodes=1)
    else:
        found = simulated(tailopt.algorithm(name, **settings, olr=0.7, momentum=0.6, **options), dtype)
        outer = lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.6, nesterov=True)  # noqa: E731
        wanted = by_hand(inner, outer, dtype, keep)
    assert_equal(found, wanted)


OUTSIDE: list[tuple[str, dict[str, Any], Optimizer]] = [
    ("sgd", {"momentum": 0.8}, lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.8)),
    ("adagrad", {"oeps": 1e-3}, lambda p: torch.optim.Adagrad(p, lr=0.3, eps=1e-3)),
    ("rmsprop", {"oeps": 1e-3}, lambda p: torch.optim.RMSprop(p, lr=0.3, eps=1e-3, alpha=0.99)),
    (
        "rmsprop",
        {"oeps": 1e-3, "outer_betas": (0.9, 0.7)},
        lambda p: torch.optim.RMSprop(p, lr=0.3, eps=1e-3, alpha=0.7),
    ),
    (
        "adam",
        {"oeps": 1e-3, "bias_correction": True},
        lambda p: torch.optim.Adam(p, lr=0.3, eps=1e-3, betas=(0.9, 0.99)),
    ),
    (
        "adam",
        {"oeps": 1e-3, "bias_correction": True, "outer_betas": (0.8, 0.999)},
        lambda p: torch.optim.Adam(p, lr=0.3, eps=1e-3, betas=(0.8, 0.999)),
    ),
    ("biclip", {"o_u": 0.2, "o_d": 0.05}, lambda p: tailopt.BiClip(p, lr=0.3, u=0.2, d=0.05)),
]


@DTYPES
@pytest.mark.parametrize(("name", "settings", "outer"), OUTSIDE, ids=[f"{row[0]}-{i}" for i, row in enumerate(OUTSIDE)])
def test_outer_optimizers_are_torchs_own(
    name: str, settings: dict[str, Any], outer: Optimizer, dtype: torch.dtype
) -> None:
    """On the negated mean displacement."""
    algo = tailopt.algorithm(f"{name}-sgd", ilr=0.05, olr=0.3, **settings)
    assert_equal(simulated(algo, dtype), by_hand(lambda p: torch.optim.SGD(p, lr=0.05), outer, dtype, keep=False))


@DTYPES
@pytest.mark.parametrize("keep", [True, False], ids=["kept", "anew"])
@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        ((torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}), (torch.optim.Adam, {"lr": 0.1, "amsgrad": True})),
        ((torch.optim.NAdam, {"lr": 0.05}), (torch.optim.RMSprop, {"lr": 0.1, "centered": True, "momentum": 0.5})),
        ((torch.optim.RMSprop, {"lr": 0.02, "momentum": 0.5}), (torch.optim.Adadelta, {"lr": 1.0})),
        ((torch.optim.RAdam, {"lr": 0.05}), (torch.optim.ASGD, {"lr": 0.5, "t0": 2})),
    ],
    ids=lambda pair: pair[0].__name__,
)
def test_a_users_pair_of_classes(
    inner: tuple[Any, dict[str, Any]], outer: tuple[Any, dict[str, Any]], keep: bool, dtype: torch.dtype
) -> None:
    """Both built once (the inner ones in every round without kept state), and neither knows of the other."""
    algo = tailopt.Algorithm(outer[0], inner[0], outer[1], inner[1], inner_state="keep" if keep else "reset")
    wanted = by_hand(lambda p: inner[0](p, **inner[1]), lambda p: outer[0](p, **outer[1]), dtype, keep)
    assert_equal(simulated(algo, dtype), wanted)


@DTYPES
@pytest.mark.parametrize(("name", "settings", "inner"), ALONE, ids=[f"{row[0]}-{i}" for i, row in enumerate(ALONE)])
def test_the_mean_of_any_inner_optimizer(
    name: str, settings: dict[str, Any], inner: Optimizer, dtype: torch.dtype
) -> None:
    algo = tailopt.algorithm(f"avg-{name}", **settings)
    assert_equal(simulated(algo, dtype), by_hand(inner, None, dtype, keep=False))


def test_clipped_adam_inside() -> None:
    """`avg-biclip+adam` is torch's Adam on clipped gradients."""

    class ClippedAdam(torch.optim.Adam):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                p.grad = tailopt.biclip(p.grad, 0.5, 0.1)
            super().step(closure)

    algo = tailopt.algorithm("avg-biclip+adam", ilr=0.05, ieps=1e-6, i_u=0.5, i_d=0.1)
    wanted = by_hand(lambda p: ClippedAdam(p, lr=0.05, eps=1e-6), None, torch.float64, keep=False)
    assert_equal(simulated(algo), wanted)
