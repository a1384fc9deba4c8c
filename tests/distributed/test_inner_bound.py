"""How far a user's inner optimizer can have moved: groups that differ, weight decay, and runs of torch's optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tailopt
from tailopt.clipping.operators import compute_dtype
from tailopt.distributed.local_round import LocalRound
from tailopt.rounds.guard import Bound, check_displacement


def moved(
    kind: Callable[[Any], torch.optim.Optimizer], groups: Sequence[Mapping[str, Any]], gradients: Sequence[float]
) -> tuple[Bound, list[Tensor]]:
    """The bound and the displacement of one parameter of two zeros per group, with these gradients in turn."""
    params = [nn.Parameter(torch.zeros(2)) for _ in groups]
    optimizer = kind([{"params": [p], **group} for p, group in zip(params, groups, strict=True)])
    local = LocalRound(optimizer, params, None, keeps_state=True, can_be_excluded=False)
    for k, gradient in enumerate(gradients):
        for p in params:
            p.grad = torch.full((2,), gradient)
        local.step(1, k, None)
    return local.bound(1, 0), [p.detach() for p in params]


def within(limit: Bound, delta: Sequence[Tensor]) -> bool:
    """Whether the guard finds nothing in displacements from zeros."""
    start, names = [torch.zeros_like(d) for d in delta], [str(i) for i in range(len(delta))]
    return check_displacement(0, delta, start, names, limit, {}) is None


def test_groups_with_different_betas_have_bounds_of_their_own() -> None:
    """A list with one pair per parameter was read as one pair, and the first round ended with an error."""
    groups = [{"lr": 0.1, "betas": betas} for betas in ((0.9, 0.99), (0.9, 0.999))]
    limit, delta = moved(torch.optim.Adam, groups, [1.0, 2.0])
    alone = [moved(torch.optim.Adam, [group], [1.0, 2.0])[0] for group in groups]
    assert limit == Bound("coordinate", [b.constant for b in alone], [0.0, 0.0], 2)
    assert limit.constant[0] < limit.constant[1] and within(limit, delta)


def test_a_group_that_nothing_bounds_leaves_the_others_bounded() -> None:
    """A momentum that outlives the second moment is bounded by nothing."""
    groups = [{"lr": 0.1, "betas": betas} for betas in ((0.9, 0.81), (0.9, 0.999))]
    limit, delta = moved(torch.optim.Adam, groups, [1.0, 2.0])
    assert limit.constant[0] == math.inf and 0 < limit.constant[1] < math.inf
    assert within(limit, [100 * delta[0], delta[1]])
    assert not within(limit, [delta[0], 100 * delta[1]])
    unbounded, _ = moved(torch.optim.Adam, [{"betas": (0.9, 0.81)}, {"betas": (0.8, 0.6)}], [1.0])
    assert unbounded == Bound(None)


def test_one_norm_over_groups_with_the_same_scope() -> None:
    limit, delta = moved(tailopt.L2Clip, [{"lr": 0.1, "u": 1.0}, {"lr": 0.2, "u": 2.0}], [9.0, -9.0, 9.0])
    assert (limit.kind, limit.constant) == ("norm", pytest.approx(3 * 0.4))
    assert within(limit, delta)


@pytest.mark.parametrize("scopes", [("global", "tensor"), ("tensor", "group"), ("global", "group")])
def test_scopes_that_differ_are_bounded_by_tensor(scopes: tuple[str, str]) -> None:
    """No tensor moves farther than its scope, whichever that is."""
    groups = [{"lr": 0.1, "u": 1.0, "scope": scope} for scope in scopes]
    limit, delta = moved(tailopt.L2Clip, groups, [9.0, 9.0])
    assert (limit.kind, limit.steps) == ("tensor norm", 2)
    assert [limit.for_param(i).constant for i in range(2)] == [pytest.approx(0.2)] * 2
    assert within(limit, delta)


def test_a_scope_that_changes_in_a_round_is_bounded_by_tensor() -> None:
    """A sum of steps with different scopes is no bound on the norm over all tensors."""
    params = [nn.Parameter(torch.zeros(2)) for _ in range(4)]
    optimizer = tailopt.L2Clip(params, lr=0.1, u=1.0, scope="tensor")
    local = LocalRound(optimizer, params, None, keeps_state=True, can_be_excluded=False)
    for k, scope in enumerate(("tensor", "global")):
        optimizer.param_groups[0]["scope"] = scope
        for p in params:
            p.grad = torch.full((2,), 9.0)
        local.step(1, k, None)
    limit = local.bound(1, 0)
    assert (limit.kind, limit.constant) == ("tensor norm", pytest.approx(0.2))
    assert within(limit, [p.detach() for p in params])


def test_thresholds_of_different_shapes() -> None:
    """Tensors of two shapes cannot be compared element by element."""
    params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
    thresholds = [torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0, 3.0])]
    optimizer = tailopt.BiClip(
        [{"params": [p], "lr": 0.1, "u": u, "d": 0.0} for p, u in zip(params, thresholds, strict=True)]
    )
    local = LocalRound(optimizer, params, None, keeps_state=True, can_be_excluded=False)
    for p in params:
        p.grad = torch.full_like(p, 9.0)
    local.step(1, 0, None)
    limit = local.bound(1, 0)
    for constant, u in zip(limit.constant, thresholds, strict=True):
        torch.testing.assert_close(constant, 0.1 * u)
    assert within(limit, [p.detach() for p in params])


def test_groups_that_differ_in_weight_decay() -> None:
    groups = [{"lr": 0.1, "weight_decay": 0.0}, {"lr": 0.1, "weight_decay": 0.5}]
    limit, _ = moved(torch.optim.AdamW, groups, [1.0, 1.0])
    assert limit.slope == [0.0, pytest.approx(0.95 * 0.05 + 0.05)]
    assert limit.constant[1] == pytest.approx(limit.constant[0] * 1.95 / 2)


# ---- weight decay: part of the gradient, or a step of its own ----


@pytest.mark.parametrize(
    ("kind", "settings", "gradients"),
    [
        (torch.optim.Adam, {"betas": (0.9, 0.9)}, [1000.0] * 5),
        (torch.optim.Adagrad, {}, [1000.0 * 100.0**k for k in range(5)]),
    ],
)
def test_decay_that_is_part_of_the_gradient_does_not_shrink_the_bound(
    kind: Any, settings: Mapping[str, Any], gradients: Sequence[float]
) -> None:
    """The step takes the decay in, and moves by up to lr whatever the weights are: 0.5 here, and not 0.491."""
    limit, delta = moved(kind, [{"lr": 0.1, "weight_decay": 0.1, **settings}], gradients)
    assert delta[0].abs().max().item() == pytest.approx(0.5, rel=1e-3)
    assert (limit.constant, limit.slope) == (pytest.approx(0.5), 0.0)
    assert within(limit, delta)
    assert not within(limit, [1.01 * d for d in delta])


@pytest.mark.parametrize(
    "settings", [{"kind": torch.optim.AdamW}, {"kind": torch.optim.Adam, "decoupled_weight_decay": True}]
)
def test_decoupled_decay_is_bounded_exactly(settings: dict[str, Any]) -> None:
    """Weights of the sign in which all gradients push shrink by both: the bound is what such a node moves."""
    kind = settings.pop("kind")
    p = nn.Parameter(torch.full((3,), 2.0, dtype=torch.float64))
    optimizer = kind([p], lr=0.1, betas=(0.9, 0.9), weight_decay=0.5, **settings)
    local = LocalRound(optimizer, [p], None, keeps_state=True, can_be_excluded=False)
    start = p.detach().clone()
    for k in range(4):
        p.grad = torch.full_like(p, 1000.0)
        local.step(1, k, None)
    limit, delta = local.bound(1, 0), p.detach() - start
    assert float(limit.constant + limit.slope * 2.0) == pytest.approx(-delta[0].item(), rel=1e-6)
    assert check_displacement(0, [delta], [start], ["w"], limit, {}) is None
    assert check_displacement(0, [1.01 * delta], [start], ["w"], limit, {}) is not None


ADAM_BETAS = [(0.9, 0.999), (0.9, 0.9), (0.9, 0.82), (0.5, 0.99), (0.0, 0.9), (0.9, 0.8)]
GRADIENTS = ["constant", "growing", "shrinking", "alternating", "heavy", "huge", "tiny", "sparse", "late"]


@st.composite
def param_groups(draw: st.DrawFn, kind: type[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """The settings of one to three groups."""
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        group: dict[str, Any] = {
            "lr": draw(st.sampled_from([1e-4, 0.1, 1.0])),
            "weight_decay": draw(st.sampled_from([0.0, 0.01, 0.5, 2.0])),
        }
        if kind in (torch.optim.Adam, torch.optim.AdamW):
            group |= {"betas": draw(st.sampled_from(ADAM_BETAS)), "amsgrad": draw(st.booleans())}
        if kind is torch.optim.Adam:
            group["decoupled_weight_decay"] = draw(st.booleans())
        if kind is torch.optim.Adagrad:
            group |= {
                "lr_decay": draw(st.sampled_from([0.0, 0.1])),
                "initial_accumulator_value": draw(st.sampled_from([0.0, 0.5])),
            }
        if kind is torch.optim.SGD:
            group["momentum"] = draw(st.sampled_from([0.0, 0.9]))
        groups.append(group)
    return groups


def gradient(kind: str, p: Tensor, k: int, source: torch.Generator) -> Tensor:
    """The gradient of step k of one parameter."""
    noise = torch.randn(p.shape, generator=source, dtype=torch.float64)
    push = -torch.sign(p.detach().double() + 1e-9)
    values = {
        "constant": push,
        "growing": push * 3.0**k,
        "shrinking": push * 3.0**-k,
        "alternating": push * (-1) ** k,
        "heavy": noise * torch.exp(4 * noise.flip(0)),
        "huge": push * 1e25 ** (k % 2),
        "tiny": push * 1e-7 ** (k % 3),
        "sparse": torch.where(noise < 0, 0.0, push),
        "late": push * (1000.0 if k >= 6 else 0.0),
    }
    return values[kind].to(p.dtype)


@settings(max_examples=200, deadline=None)
@given(
    data=st.data(),
    kind=st.sampled_from([torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD]),
    gradients=st.sampled_from(GRADIENTS),
    size=st.sampled_from([0.0, 1e-3, 1.0, 300.0]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_no_honest_run_of_torch_exceeds_its_bound(
    data: st.DataObject, kind: Any, gradients: str, size: float, dtype: torch.dtype, seed: int
) -> None:
    """In two rounds, of which the second begins with the state of the first."""
    groups = data.draw(param_groups(kind))
    source = torch.Generator().manual_seed(seed)
    params = [nn.Parameter((size * torch.randn(5, generator=source)).to(dtype)) for _ in groups]
    optimizer = kind([{"params": [p], **group} for p, group in zip(params, groups, strict=True)])
    local = LocalRound(optimizer, params, None, keeps_state=True, can_be_excluded=False)
    names, step = [str(i) for i in range(len(params))], 0
    for t in (1, 2):
        start = [p.detach().clone() for p in params]
        local.clear(None)
        for _ in range(data.draw(st.integers(1, 8))):
            for p in params:
                p.grad = gradient(gradients, p, step, source)
            local.step(t, step, None)
            step += 1
        wide = compute_dtype(dtype)
        delta = [p.detach().to(wide) - x.to(wide) for p, x in zip(params, start, strict=True)]
        assert check_displacement(0, delta, start, names, local.bound(t, 0), {}) is None
