"""The guard: no honest node is ever excluded, and a displacement 1 % beyond what is possible always is."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tailopt
from tailopt.clipping.operators import compute_dtype
from tailopt.native import library
from tailopt.rounds.guard import (
    NOT_FINITE,
    Bound,
    Exclusion,
    _farthest,
    _ulp_squares,
    bound,
    check_displacement,
    clearly_within,
)
from tailopt.rules.rule import Hyperparameters, ParamState, Rule
from tailopt.rules.table import INNER
from tailopt.rules.torch_optim import torch_rule

BOUNDED = [name for name in INNER if name not in ("sgd", "muon")]
SHAPES = [(4, 3), (5,), ()]
NAMES = ["layer.weight", "layer.bias", "scale"]
BETAS = [(0.9, 0.999), (0.9, 0.99), (0.5, 0.6), (0.0, 0.9), (0.7, 0.5)]
GRADIENTS = ["constant", "growing", "shrinking", "alternating", "heavy", "huge", "tiny", "sparse"]
TYPES = [torch.float32, torch.float64, torch.bfloat16]


def starts(seed: int, size: float, dtype: torch.dtype) -> list[Tensor]:
    """Of one size, some just below a power of two, where an outward step doubles the unit in the last place."""
    source = torch.Generator().manual_seed(seed)
    found = []
    for shape in SHAPES:
        x = size * torch.randn(shape, generator=source, dtype=torch.float64)
        edge = torch.copysign(torch.exp2(torch.frexp(x)[1].double()) * (1 - torch.finfo(dtype).eps / 2), x)
        found.append(torch.where(torch.rand(shape, generator=source) < 0.3, edge, x).to(dtype))
    return found


def gradients(kind: str, start: Sequence[Tensor], seed: int, k: int, betas: tuple[float, float]) -> list[Tensor]:
    """The gradients of step k: everything pushed outwards (or inwards), as strongly as a sequence can."""
    source = torch.Generator().manual_seed(1000 * seed + k)
    found = []
    for x in start:
        noise = torch.randn(x.shape, generator=source, dtype=torch.float64)
        outwards = -torch.sign(x.double()) * (1 if seed % 2 else -1)
        growth = betas[0] / betas[1] if betas[0] else 0.5
        g = {
            "constant": outwards,
            "growing": outwards * growth**-k,
            "shrinking": outwards * growth**k,
            "alternating": outwards * (-1) ** k,
            "heavy": noise * torch.exp(4 * torch.randn(x.shape, generator=source, dtype=torch.float64)),
            "huge": outwards * 1e30 ** (k % 2),
            "tiny": outwards * 1e-7 ** (k % 3),
            "sparse": torch.where(torch.rand(x.shape, generator=source) < 0.5, 0.0, outwards),
        }[kind]
        found.append(g.to(x.dtype))
    return found


def moved(rule: Rule, start: Sequence[Tensor], steps: Sequence[Hyperparameters], kind: str, seed: int) -> list[Tensor]:
    """What an honest node sends."""
    params, states = [x.clone() for x in start], [ParamState() for _ in start]
    for k, numbers in enumerate(steps):
        rule.step(params, gradients(kind, start, seed, k, numbers.get("betas", (0.9, 0.999))), states, numbers)
    return [(p.to(compute_dtype(p.dtype)) - x.to(compute_dtype(x.dtype))) for p, x in zip(params, start, strict=True)]


@st.composite
def rounds(draw: st.DrawFn, names: Sequence[str] = tuple(BOUNDED)) -> tuple[Rule, list[dict[str, Any]]]:
    """A rule, and its numbers in each of up to 20 local steps."""
    rule = INNER[draw(st.sampled_from(names))]
    u = draw(st.sampled_from([1e-4, 0.3, 1.0, 50.0]))
    numbers: dict[str, Any] = {
        **rule.defaults,
        "lr": draw(st.sampled_from([1e-5, 3e-3, 0.1, 1.0])),
        "eps": draw(st.sampled_from([1e-8, 1e-3])),
        "u": u,
        "d": 0.0 if rule.name == "l2clip" else u * draw(st.sampled_from([0.0, 0.3, 1.0])),
    }
    if "weight_decay" in rule.defaults:
        numbers["weight_decay"] = draw(st.sampled_from([0.0, 0.01, 0.5, 1.5]))
    if "betas" in rule.defaults:
        numbers["betas"] = draw(st.sampled_from(BETAS))
    if "scope" in rule.defaults:
        numbers["scope"] = draw(st.sampled_from(["global", "tensor"]))
    if rule.name == "biclip" and draw(st.booleans()):
        numbers["u"] = [torch.linspace(0.5, 2.0, 4)[:, None] * u, u, torch.tensor(2.0 * u)]
        numbers["d"] = [0.1 * u, torch.linspace(0.1, 0.9, 5) * u, 0.0]
    z = draw(st.integers(1, 20))
    factors = draw(st.sampled_from([lambda k: 1.0, lambda k: 1 / (k + 1), lambda k: 1.0 + k, lambda k: float(k % 2)]))
    return rule, [{**numbers, "lr": numbers["lr"] * factors(k)} for k in range(z)]


@settings(max_examples=150, deadline=None)
@given(
    what=rounds(),
    kind=st.sampled_from(GRADIENTS),
    size=st.sampled_from([0.0, 1e-6, 1.0, 300.0]),
    dtype=st.sampled_from(TYPES),
    seed=st.integers(0, 1000),
)
def test_honest_nodes_are_never_excluded(
    what: tuple[Rule, list[dict[str, Any]]], kind: str, size: float, dtype: torch.dtype, seed: int
) -> None:
    rule, steps = what
    start = starts(seed, size, dtype)
    delta = moved(rule, start, steps, kind, seed)
    limit = bound(rule, steps)
    assert limit.kind is not None
    assert check_displacement(0, delta, start, NAMES, limit, {}) is None


@settings(max_examples=50, deadline=None)
@given(
    z=st.integers(1, 20),
    betas=st.sampled_from(BETAS[:4]),
    seen=st.sampled_from([0.0, 1e-8, 1.0]),
    t=st.integers(1, 30),
    raw=st.booleans(),
    kind=st.sampled_from(GRADIENTS[:5]),
    seed=st.integers(0, 100),
)
def test_honest_nodes_with_a_sent_preconditioner(
    z: int, betas: tuple[float, float], seen: float, t: int, raw: bool, kind: str, seed: int
) -> None:
    """m = 0, v and the step counter handed in."""
    rule, start = INNER["adam"], starts(seed, 1.0, torch.float32)
    numbers = {"lr": 0.01, "eps": 1e-8, "betas": betas, "bias_correction": "first" if raw else True}
    params = [x.clone() for x in start]
    states: list[ParamState] = [
        {"step": 0 if raw else t, "exp_avg": torch.zeros_like(x), "exp_avg_sq": torch.full_like(x, seen)} for x in start
    ]
    for k in range(z):
        rule.step(params, gradients(kind, start, seed, k, betas), states, numbers)
    delta = [p - x for p, x in zip(params, start, strict=True)]
    assert check_displacement(0, delta, start, NAMES, bound(rule, [numbers] * z), {}) is None


@settings(max_examples=100, deadline=None)
@given(
    what=rounds(),
    tensor=st.integers(0, 2),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 1000),
)
def test_one_percent_beyond_is_excluded(
    what: tuple[Rule, list[dict[str, Any]]], tensor: int, dtype: torch.dtype, seed: int
) -> None:
    """One coordinate (of one tensor) beyond a + c |x|, at a start so small that its rounding is no excuse."""
    rule, steps = what
    start = starts(seed, 1e-7 * max(float(h["lr"]) for h in steps), dtype)
    limit = bound(rule, steps)
    a = limit.constant[tensor] if isinstance(limit.constant, list) else limit.constant
    if limit.kind is None or float(torch.as_tensor(a).max()) == 0:
        return
    c = limit.slope[tensor] if isinstance(limit.slope, list) else limit.slope
    delta = [torch.zeros(x.shape, dtype=dtype) for x in start]
    x = start[tensor].abs()
    if limit.kind == "norm":
        most = torch.as_tensor(a + c * math.sqrt(sum(float(s.double().square().sum()) for s in start)))
    elif limit.kind == "tensor norm":
        most = a + c * torch.linalg.vector_norm(x.double())
    else:
        most = (a + c * x).expand_as(x).reshape(-1)[-1]
    delta[tensor].view(-1)[-1] = 1.01 * float(most) * (-1 if seed % 2 else 1)
    found = check_displacement(3, delta, start, NAMES, limit, {})
    assert found is not None and found.bound is not None
    assert found.node == 3 and abs(found.value) > found.bound
    assert found.subject == ("all tensors" if limit.kind == "norm" else NAMES[tensor])
    assert abs(found.value) == pytest.approx(1.01 * float(most), rel=1e-6)
    delta[tensor].view(-1)[-1] = 0.999 * float(most)
    assert check_displacement(3, delta, start, NAMES, limit, {}) is None


def test_the_bound_is_reached() -> None:
    """Full steps in one direction: what honest nodes can do is what the bound says, without slack."""
    numbers = {"lr": 0.1, "u": 2.0, "d": 0.0}
    limit = bound(INNER["biclip"], [numbers] * 5)
    assert limit == Bound("coordinate", pytest.approx(1.0), 0.0, 5)
    start = [torch.zeros(3, dtype=torch.float64)]
    params = [start[0].clone()]
    for _ in range(5):
        INNER["biclip"].step(params, [torch.full((3,), -9.0, dtype=torch.float64)], [ParamState()], numbers)
    assert params[0].tolist() == pytest.approx([1.0] * 3)


def test_bounds_by_hand() -> None:
    """b <- (1 - k) b + s + k |x|: two steps with lr 0.1, then 0.2, decay 0.5, u = 2."""
    steps = [{"lr": lr, "u": 2.0, "d": 0.0, "weight_decay": 0.5} for lr in (0.1, 0.2)]
    limit = bound(INNER["biclip"], steps)
    assert limit.constant == pytest.approx(0.9 * 0.2 + 0.4)
    assert limit.slope == pytest.approx(0.9 * 0.05 + 0.1)
    assert (limit.kind, limit.steps) == ("coordinate", 2)
    assert bound(INNER["sign"], [{"lr": 0.1}] * 3).constant == pytest.approx(0.3)
    assert bound(INNER["adagrad"], [{"lr": 0.1}] * 3).constant == pytest.approx(0.3)
    adam = {"lr": 0.1, "betas": (0.9, 0.999), "bias_correction": True}
    assert bound(INNER["adam"], [adam] * 2).constant == pytest.approx(
        2 * 0.1 * 0.1 / math.sqrt(0.001 * (1 - 0.81 / 0.999))
    )
    norm = bound(INNER["l2clip"], [{"lr": 0.1, "u": 3.0}])
    assert (norm.kind, norm.constant) == ("norm", pytest.approx(0.3))
    assert bound(INNER["l2clip"], [{"lr": 0.1, "u": 3.0, "scope": "tensor"}]).kind == "tensor norm"


def test_bounds_for_each_parameter() -> None:
    numbers = {"lr": 0.5, "u": [1.0, torch.tensor([1.0, 2.0])], "d": [0.0, 0.0], "weight_decay": 0.2}
    limit = bound(INNER["biclip"], [numbers, numbers])
    assert limit.constant[0] == pytest.approx(0.9 * 0.5 + 0.5)
    torch.testing.assert_close(limit.constant[1], torch.tensor([0.95, 1.9]))
    start = [torch.zeros(2), torch.zeros(2)]
    assert (
        check_displacement(0, [torch.tensor([0.9, 0.9]), torch.tensor([0.9, 1.8])], start, ["a", "b"], limit, {})
        is None
    )
    found = check_displacement(0, [torch.tensor([0.9, 0.9]), torch.tensor([1.0, 1.8])], start, ["a", "b"], limit, {})
    assert found is not None and found.subject == "b" and found.value == 1.0


def test_a_norm_over_tensors_with_their_own_numbers() -> None:
    """One tensor moves 1 a step, the other 2 but decays: first the one, then the other, is farthest in two steps."""
    numbers = {"lr": [1e-3, 2.0], "u": [1e3, 1.0], "weight_decay": 0.45}
    params = [torch.zeros(2), torch.zeros(2)]
    far, none = torch.tensor([-1e6, 0.0]), torch.zeros(2)
    for grads in ([far, none], [none, far]):
        INNER["l2clip"].step(params, grads, [ParamState(), ParamState()], numbers)
    assert math.hypot(*(float(p.norm()) for p in params)) == pytest.approx(math.sqrt(5), rel=1e-3)
    limit = bound(INNER["l2clip"], [numbers, numbers])
    assert check_displacement(0, params, [torch.zeros(2), torch.zeros(2)], ["a", "b"], limit, {}) is None


@pytest.mark.parametrize("rule", [INNER["sgd"], torch_rule(torch.optim.Adam)], ids=["sgd", "class"])
def test_what_has_no_bound_is_judged_for_finiteness_alone(rule: Rule) -> None:
    limit = bound(rule, [{"lr": 0.1}])
    assert limit == Bound(None)
    assert check_displacement(0, [torch.tensor([1e30])], [torch.zeros(1)], ["w"], limit, {}) is None
    assert check_displacement(0, [torch.tensor([math.nan])], [torch.zeros(1)], ["w"], limit, {}) is not None


def test_adam_whose_momentum_outlives_its_second_moment_has_no_bound() -> None:
    numbers = {"lr": 0.1, "betas": (0.9, 0.81), "bias_correction": True}
    assert bound(INNER["adam"], [numbers]) == Bound(None)


def test_no_upper_threshold_is_no_bound_but_finiteness() -> None:
    limit = bound(INNER["biclip"], [{"lr": 0.1, "u": math.inf, "d": 0.0}])
    assert check_displacement(0, [torch.tensor([1e30])], [torch.zeros(1)], ["w"], limit, {}) is None
    assert check_displacement(0, [torch.tensor([math.inf])], [torch.zeros(1)], ["w"], limit, {}) is not None


def test_the_slack_is_units_in_the_last_place_of_the_parameters_type() -> None:
    """At 1.0 and two steps: 0.1 % of b and four units, 4 eps, in the type of the parameter, not of the displacement."""
    limit = Bound("coordinate", 1e-6, 0.0, 2)
    for dtype in TYPES:
        start = [torch.ones(1, dtype=dtype)]
        wide = compute_dtype(dtype)
        allowed = 1e-6 * 1.001 + 4 * torch.finfo(dtype).eps
        assert check_displacement(0, [torch.tensor([allowed * 0.999], dtype=wide)], start, ["w"], limit, {}) is None
        found = check_displacement(0, [torch.tensor([allowed * 1.001], dtype=wide)], start, ["w"], limit, {})
        assert found is not None and found.bound == pytest.approx(allowed, rel=1e-5)


def test_the_slack_of_a_norm_covers_rounding_too() -> None:
    """In bf16 a step of 0.6 units becomes a whole one in every coordinate: honest, and far beyond the plain bound."""
    unit = torch.finfo(torch.bfloat16).eps / 2  # below 1
    numbers = {"lr": 1.0, "u": 4 * 0.6 * unit, "weight_decay": 0.0}
    start = [torch.ones(16, dtype=torch.bfloat16)]
    params = [start[0].clone()]
    for _ in range(3):
        INNER["l2clip"].step(params, [torch.ones(16, dtype=torch.bfloat16)], [ParamState()], numbers)
    delta = [params[0].float() - 1]
    limit = bound(INNER["l2clip"], [numbers] * 3)
    assert float(delta[0].norm()) == 3 * 4 * unit > 1.5 * limit.constant
    assert check_displacement(0, delta, start, ["w"], limit, {}) is None
    assert check_displacement(0, [5 * delta[0]], start, ["w"], limit, {}) is not None


def test_an_exclusion_says_what_happened() -> None:
    found = check_displacement(
        2, [torch.tensor([0.0, -5.0])], [torch.zeros(2)], ["w"], Bound("coordinate", 1.0, 0.0, 1), {}
    )
    assert found is not None
    assert found.as_dict() == {
        "node": 2,
        "tensor": "w",
        "value": -5.0,
        "bound": pytest.approx(1.001, rel=1e-5),
        "reason": "beyond what its optimizer can move",
    }
    assert str(found) == "node 2: beyond what its optimizer can move in w (-5, at most 1 is possible)"
    assert str(Exclusion(1, "w", math.nan, None, "not finite")) == "node 1: not finite in w (nan)"


def test_the_worst_coordinate_is_named() -> None:
    delta = torch.tensor([[2.0, 0.0], [0.0, -7.0]])
    found = check_displacement(
        0,
        [torch.zeros(1), delta],
        [torch.zeros(1), torch.zeros(2, 2)],
        ["a", "b"],
        Bound("coordinate", 1.0, 0.0, 1),
        {},
    )
    assert found is not None and (found.subject, found.value) == ("b", -7.0)


def test_tensors_without_elements_are_fine() -> None:
    limit = Bound("coordinate", 1.0, 0.0, 1)
    assert (
        check_displacement(0, [torch.zeros(0), torch.ones(1)], [torch.zeros(0), torch.zeros(1)], ["a", "b"], limit, {})
        is None
    )
    assert check_displacement(0, [torch.zeros(0)], [torch.zeros(0)], ["a"], limit, {}) is None


INFINITE_BOUNDS = [
    Bound("coordinate", math.inf, 0.0, 1),
    Bound("coordinate", [math.inf, math.inf], 0.0, 1),
    Bound("coordinate", [1e30, torch.tensor([[math.inf], [1e30]])], 0.0, 1),
    Bound("norm", math.inf, 0.0, 1),
    Bound("tensor norm", [math.inf, math.inf], 0.0, 1),
]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("in_c", [True, False])
def test_an_infinite_bound_lets_no_infinity_through(
    in_c: bool, dtype: torch.dtype, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """i_u=inf clips nothing, so the bound is infinite too: an infinite displacement is not beyond it."""
    if not in_c:
        monkeypatch.setattr(library, "loaded", lambda: None)
    start = [torch.ones(3, dtype=dtype), torch.ones(2, 2, dtype=dtype)]
    honest = [torch.full(x.shape, 1e30, dtype=compute_dtype(dtype)) for x in start]
    broken = [honest[0], honest[1].clone()]
    broken[1][0, 1] = bad
    for limit in INFINITE_BOUNDS:
        assert check_displacement(0, honest, start, ["a", "b"], limit, {}) is None
        found = check_displacement(0, broken, start, ["a", "b"], limit, {})
        assert found is not None and (found.subject, found.bound, found.reason) == ("b", None, NOT_FINITE)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_never_clearly_within(bad: float) -> None:
    limit = Bound("coordinate", math.inf, 0.0, 1)
    assert clearly_within(torch.tensor([-3e38, 1.0]), limit)
    assert not clearly_within(torch.tensor([1.0, bad]), limit)


# --- in C and in torch ----------------------------------------------------------------------------------------------

KERNEL = library.loaded()
needs_kernel = pytest.mark.skipif(KERNEL is None, reason="the C kernel was not built")
HALVES = [torch.float32, torch.bfloat16, torch.float16]
MAGNITUDES = [0.0, 1e-45, 1e-40, 1.2e-38, 1e-20, 2.0**-24, 1e-6, 0.02, 1.0, 65504.0, 1e30, 3e38, math.inf, math.nan]


def plainly(d: Tensor, x: Tensor, a: float, c: float, steps: int) -> tuple[int, float] | None:
    """The formula over whole tensors: b (1 + 0.1 %) and z + 2 ulps of max(|x|, b), where b = a + c |x|."""
    wide = x.to(d.dtype).abs()
    b = a + c * wide
    exponent = torch.frexp(torch.maximum(wide, b))[1] - 1
    info = torch.finfo(x.dtype)
    ulp = torch.ldexp(torch.full_like(d, info.eps), exponent).clamp(min=info.smallest_normal * info.eps)
    allowed = b * 1.001 + (steps + 2) * ulp
    beyond = d.abs() > allowed
    if not beyond.any():
        return None
    at = int(torch.where(beyond, d.abs() - allowed, float("-inf")).argmax())
    return at, float(allowed[at])


def magnitudes(draw: st.DrawFn, n: int, source: torch.Generator) -> Tensor:
    """Some of all sizes, some at random: all with random signs."""
    known = torch.tensor(draw(st.lists(st.sampled_from(MAGNITUDES), min_size=1, max_size=6)))
    some = known[torch.randint(len(known), (n,), generator=source)]
    found = torch.where(torch.rand(n, generator=source) < 0.5, some, torch.randn(n, generator=source))
    return torch.where(torch.rand(n, generator=source) < 0.5, -found, found)


@st.composite
def displacements(draw: st.DrawFn) -> tuple[Tensor, Tensor, float, float, int]:
    """d, x, a, c, steps: anything, or exactly at the bound but for a few elements that are next to it, or beyond."""
    n = draw(st.sampled_from([1, 2, 7, 8, 33, 1023, 1025, 3000, 140_000]))
    source = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    a = draw(st.sampled_from([0.0, 1e-45, 1e-38, 1e-20, 1e-6, 0.1, 1e38]))
    c = draw(st.sampled_from([0.0, 1e-30, 1e-3, 0.5, 3.0]))
    steps = draw(st.integers(0, 20))
    x = magnitudes(draw, n, source).to(draw(st.sampled_from(HALVES)))
    d = magnitudes(draw, n, source).nan_to_num_(1.0, 1.0, 1.0)
    if draw(st.booleans()):  # everybody exactly at the bound
        wide = x.float().abs()
        b = a + c * wide
        ulp = torch.exp2(torch.frexp(torch.maximum(wide, b))[1].double() - 1) * torch.finfo(x.dtype).eps
        least = torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps
        d = (b * 1.001 + (steps + 2) * ulp.float().clamp(min=least)).nan_to_num_(1.0, 1.0, 1.0)
        some = torch.rand(n, generator=source) < draw(st.sampled_from([0.0, 0.01, 0.5]))
        d = torch.where(some, torch.nextafter(d, torch.tensor(draw(st.sampled_from([0.0, math.inf])))), d)
        d = torch.where(torch.rand(n, generator=source) < 0.5, -d, d).clamp(-3e38, 3e38)
    return d, x, a, c, steps


@needs_kernel
@settings(max_examples=400, deadline=None)
@given(displacements(), st.integers(1, 2), st.sampled_from(KERNEL.instruction_sets if KERNEL is not None else ["none"]))
def test_the_kernel_decides_as_torch_does(
    what: tuple[Tensor, Tensor, float, float, int], threads: int, instruction_set: str
) -> None:
    """The same element and bound, with zeros, denormals, infinities and NaN, and with all exactly at the bound."""
    assert KERNEL is not None
    d, x, a, c, steps = what
    (found,) = KERNEL.flat.beyond(
        [d], [x], [a], [c], 1.001, steps + 2, instruction_set=instruction_set, threads=threads
    )
    assert found == plainly(d, x, a, c, steps) == _farthest(d, x, a, c, steps)


@needs_kernel
def test_of_several_that_are_equally_far_the_first_is_named() -> None:
    assert KERNEL is not None
    for first in (0, 1, 1023, 1024, 70_000, 299_999):
        d, x = torch.zeros(300_000), torch.zeros(300_000)
        d[first:] = -5.0
        for found in (
            KERNEL.flat.beyond([d], [x], [1.0], [0.0], 1.001, 3, threads=2)[0],
            _farthest(d, x, 1.0, 0.0, 1),
            plainly(d, x, 1.0, 0.0, 1),
        ):
            assert found is not None and found[0] == first


@needs_kernel
@pytest.mark.parametrize("dtype", HALVES)
def test_the_first_tensor_is_named_whoever_looks_at_it(dtype: torch.dtype) -> None:
    """One tensor for the kernel, one with thresholds of its own for torch, one that is not contiguous."""
    start = [torch.ones(3, dtype=dtype), torch.ones(2, 2, dtype=dtype), torch.ones(2, 3, dtype=dtype).t()]
    limit = Bound("coordinate", [1e-6, torch.full((2, 1), 1e-6), 1e-6], 0.0, 1)
    names = ["a", "b", "c"]
    for i in range(3):
        delta = [torch.zeros(x.shape) for x in start]
        assert check_displacement(0, delta, start, names, limit, {}) is None
        for later in delta[i:]:
            later.view(-1)[1] = -0.5
        found = check_displacement(0, delta, start, names, limit, {})
        assert found is not None and (found.subject, found.value) == (names[i], -0.5)
        assert found.bound == pytest.approx(1e-6 + 3 * torch.finfo(dtype).eps, rel=1e-2)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from([*HALVES, torch.float64]), st.sampled_from([0.0, 1e-40, 1e-9, 1e-3, 1.0]))
def test_ulps_of_a_norm_are_added_up_as_in_torch(data: st.DataObject, dtype: torch.dtype, least: float) -> None:
    """Also where they span so many octaves that the sum depends on its order; by all instruction sets and threads."""
    source = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    n = data.draw(st.sampled_from([1, 7, 1025, 32_768, 32_769, 140_000]))
    x = magnitudes(data.draw, n, source).to(dtype)
    wide = x.to(compute_dtype(dtype)).abs().clamp(min=least)
    info = torch.finfo(dtype)
    ulps = torch.ldexp(torch.full_like(wide, info.eps), torch.frexp(wide)[1] - 1)
    ulps = ulps.clamp(min=info.smallest_normal * info.eps)
    expected = [float((block.double() ** 2).sum()) for block in ulps.split(32_768)]
    assert _ulp_squares(x, least) == expected
    if KERNEL is not None and dtype != torch.float64:
        for instruction_set in KERNEL.instruction_sets:
            found = KERNEL.flat.ulp_squares(x, least, instruction_set=instruction_set, threads=2)
            assert all(one in (-1, other) for one, other in zip(found, expected, strict=True))


@needs_kernel
def test_a_plain_sum_of_ulps_is_the_kernels() -> None:
    """Nothing is left to torch where weights are of usual sizes."""
    assert KERNEL is not None
    x = 0.02 * torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    assert all(one > 0 for one in KERNEL.flat.ulp_squares(x, 1e-6))


@needs_kernel
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("kind", ["coordinate", "norm"])
def test_the_exact_test_needs_no_memory(kind: str) -> None:
    """16 million parameters that all moved by one ulp, farther than lr * u: 64 MB, and less than 8 MB more."""
    program = f"""
        import math, torch
        from tailopt.rounds.guard import Bound, check_displacement

        def peak():
            with open("/proc/self/status") as status:
                return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

        def test(x, d, a):
            return check_displacement(0, [d], [x], ["w"], Bound("{kind}", a, 0.0, 1), {{}})

        n = 1 << 24
        x, d = torch.ones(n), torch.full((n,), 2.0**-23)
        a = 1e-8 * (math.sqrt(n) if "{kind}" == "norm" else 1)
        small = slice(0, 100_000)
        test(x[small], d[small], 1e-8)  # what is loaded and made once
        before = peak()
        assert test(x, d, a) is None
        assert test(x, d * 100, a) is not None
        print(peak() - before - 4 * n)  # d * 100
    """
    env = {**os.environ, "PYTHONPATH": str(Path(tailopt.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 8_000_000
