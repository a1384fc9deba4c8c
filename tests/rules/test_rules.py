"""The rules against torch.optim and tailopt's own optimizers, bit for bit; stacked tensors against their slices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tailopt
from tailopt.rules.rule import ParamState, Rule, as_list, product, value_for_param
from tailopt.rules.table import INNER, OUTER
from tailopt.rules.torch_optim import torch_rule

TYPES = [torch.float32, torch.float64, torch.bfloat16]
SHAPES = [(5, 7), (13,), (), (2, 3, 4)]
STEPS = 6

Class = type[torch.optim.Optimizer]


def tensors(
    seed: int, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] = SHAPES, tails: float = 1.0
) -> list[Tensor]:
    """Numbers of many sizes, with exact zeros among them."""
    source = torch.Generator().manual_seed(seed)
    found = []
    for shape in shapes:
        x = torch.randn(shape, generator=source, dtype=torch.float64)
        x = x * torch.exp(tails * torch.randn(shape, generator=source, dtype=torch.float64))
        found.append(torch.where(torch.rand(shape, generator=source) < 0.1, 0.0, x).to(dtype))
    return found


def gradients(dtype: torch.dtype, steps: int = STEPS, tails: float = 2.0) -> Iterator[list[Tensor]]:
    """One for each step, fresh tensors."""
    return (tensors(100 + k, dtype, tails=tails) for k in range(steps))


def by_rule(rule: Rule, numbers: Mapping[str, Any], dtype: torch.dtype, steps: int = STEPS) -> list[list[Tensor]]:
    """The parameters after every step of a rule that keeps its state."""
    params, states = tensors(0, dtype), [ParamState() for _ in SHAPES]
    seen = []
    for grads in gradients(dtype, steps):
        rule.step(params, grads, states, {**rule.defaults, **numbers})
        seen.append([p.clone() for p in params])
    return seen


def by_class(kind: Class, keywords: Mapping[str, Any], dtype: torch.dtype, steps: int = STEPS) -> list[list[Tensor]]:
    """The same by an optimizer that lives on."""
    params = [torch.nn.Parameter(p) for p in tensors(0, dtype)]
    optimizer, seen = kind(params, **keywords), []
    for grads in gradients(dtype, steps):
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        optimizer.step()
        seen.append([p.detach().clone() for p in params])
    return seen


def assert_same_bits(found: list[list[Tensor]], wanted: list[list[Tensor]]) -> None:
    for k, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert a.dtype == b.dtype and torch.equal(a, b), f"step {k}, tensor {i}: {(a - b).abs().max()} apart"


# torch's own

INSIDE: list[tuple[str, dict[str, Any], Class, dict[str, Any]]] = [
    ("sgd", {"lr": 0.03}, torch.optim.SGD, {"lr": 0.03}),
    ("adagrad", {"lr": 0.03, "eps": 1e-7}, torch.optim.Adagrad, {"lr": 0.03, "eps": 1e-7}),
    ("adam", {"lr": 0.03, "eps": 1e-7}, torch.optim.Adam, {"lr": 0.03, "eps": 1e-7}),
    (
        "adam",
        {"lr": 0.03, "eps": 1e-3, "betas": (0.7, 0.95)},
        torch.optim.Adam,
        {"lr": 0.03, "eps": 1e-3, "betas": (0.7, 0.95)},
    ),
    ("adamw", {"lr": 0.03, "eps": 1e-7}, torch.optim.AdamW, {"lr": 0.03, "eps": 1e-7}),
    (
        "adamw",
        {"lr": 0.03, "eps": 1e-7, "weight_decay": 0.3},
        torch.optim.AdamW,
        {"lr": 0.03, "eps": 1e-7, "weight_decay": 0.3},
    ),
    ("adamw", {"lr": 0.03, "eps": 1e-7, "weight_decay": 0.0}, torch.optim.Adam, {"lr": 0.03, "eps": 1e-7}),
]
OUTSIDE: list[tuple[str, dict[str, Any], Class, dict[str, Any]]] = [
    ("avg", {}, torch.optim.SGD, {"lr": 1.0}),
    ("sgd", {"lr": 0.7}, torch.optim.SGD, {"lr": 0.7}),
    ("sgd", {"lr": 0.7, "momentum": 0.9}, torch.optim.SGD, {"lr": 0.7, "momentum": 0.9}),
    ("nesterov", {"lr": 0.7, "momentum": 0.9}, torch.optim.SGD, {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
    ("adagrad", {"lr": 0.7, "eps": 1e-3}, torch.optim.Adagrad, {"lr": 0.7, "eps": 1e-3}),
    ("rmsprop", {"lr": 0.7, "eps": 1e-3}, torch.optim.RMSprop, {"lr": 0.7, "eps": 1e-3, "alpha": 0.99}),
    (
        "rmsprop",
        {"lr": 0.7, "eps": 1e-3, "betas": (0.0, 0.8)},
        torch.optim.RMSprop,
        {"lr": 0.7, "eps": 1e-3, "alpha": 0.8},
    ),
    (
        "adam",
        {"lr": 0.7, "eps": 1e-3, "bias_correction": True},
        torch.optim.Adam,
        {"lr": 0.7, "eps": 1e-3, "betas": (0.9, 0.99)},
    ),
]


@pytest.mark.parametrize(
    ("dtype", "foreach"),
    [(dtype, foreach) for dtype in TYPES for foreach in (False, True) if not foreach or dtype != torch.bfloat16],
    ids=lambda value: {True: "foreach", False: "single"}.get(value, str(value)),
)
@pytest.mark.parametrize(
    ("name", "numbers", "kind", "keywords"), INSIDE, ids=[f"{r[0]}-{i}" for i, r in enumerate(INSIDE)]
)
def test_inner_rules_have_the_bits_of_torch(
    name: str, numbers: dict[str, Any], kind: Class, keywords: dict[str, Any], foreach: bool, dtype: torch.dtype
) -> None:
    """In bf16 those of foreach=False: torch's two ways round differently there."""
    wanted = by_class(kind, {**keywords, "foreach": foreach}, dtype)
    assert_same_bits(by_rule(INNER[name], numbers, dtype), wanted)
    assert not torch.equal(wanted[0][0], wanted[-1][0])


@pytest.mark.parametrize(
    ("name", "numbers", "kind", "keywords"), INSIDE, ids=[f"{r[0]}-{i}" for i, r in enumerate(INSIDE)]
)
def test_one_bf16_step_is_near_foreach(
    name: str, numbers: dict[str, Any], kind: Class, keywords: dict[str, Any]
) -> None:
    """To three roundings of the parameter or of its step."""
    wanted = by_class(kind, {**keywords, "foreach": True}, torch.bfloat16, steps=1)[0]
    found = by_rule(INNER[name], numbers, torch.bfloat16, steps=1)[0]
    for a, b, p in zip(found, wanted, tensors(0, torch.bfloat16), strict=True):
        unit = torch.finfo(torch.bfloat16).eps * torch.maximum(p.abs(), b.abs()).float().clamp(min=0.03)
        assert bool(((a.float() - b.float()).abs() <= 3 * unit).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("foreach", [False, True], ids=["single", "foreach"])
@pytest.mark.parametrize(
    ("name", "numbers", "kind", "keywords"), OUTSIDE, ids=[f"{r[0]}-{i}" for i, r in enumerate(OUTSIDE)]
)
def test_outer_rules_have_the_bits_of_torch(
    name: str, numbers: dict[str, Any], kind: Class, keywords: dict[str, Any], foreach: bool, dtype: torch.dtype
) -> None:
    """Outer weights are fp32 or fp64. The gradients here stand for -delta."""
    assert_same_bits(by_rule(OUTER[name], numbers, dtype), by_class(kind, {**keywords, "foreach": foreach}, dtype))


def test_outer_adam_without_bias_correction() -> None:
    """m = (1 - b1) g, v = (1 - b2) g^2: the first step is lr * (1 - b1) / sqrt(1 - b2) = lr, in the sign of g."""
    x, g = torch.zeros(4, dtype=torch.float64), torch.tensor([3.0, -1e-3, 100.0, 0.0], dtype=torch.float64)
    OUTER["adam"].step([x], [g], [{}], {**OUTER["adam"].defaults, "lr": 0.2, "eps": 0.0})
    torch.testing.assert_close(x, torch.tensor([-0.2, 0.2, -0.2, 0.0], dtype=torch.float64), rtol=1e-12, atol=0)


def test_the_second_moment_of_raw_adam_is_not_corrected() -> None:
    """m / (1 - b1) = g after one step, over the root of v as it was handed in and moved on."""
    v = torch.tensor([4.0, 9.0], dtype=torch.float64)
    x, g = torch.zeros(2, dtype=torch.float64), torch.tensor([1.0, -2.0], dtype=torch.float64)
    state = {"step": 0, "exp_avg": torch.zeros_like(x), "exp_avg_sq": v.clone()}
    INNER["adam"].step([x], [g], [state], {"lr": 0.5, "eps": 0.1, "betas": (0.9, 0.999), "bias_correction": "first"})
    wanted = -0.5 * g / ((0.999 * v + 0.001 * g * g).sqrt() + 0.1)
    torch.testing.assert_close(x, wanted, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["adagrad", "adam", "adamw", "biclip+adam", "biclip+adamw"])
def test_without_epsilon_a_zero_gradient_moves_nothing(name: str) -> None:
    """0/0 is 0, also after a coordinate beside it has moved; then with a gradient it moves as it would have."""
    rule = INNER[name]
    numbers = {**rule.defaults, "lr": 0.1, "eps": 0.0, "u": 1.0, "d": 0.0, "weight_decay": 0.0}
    x, states = torch.tensor([1.0, -2.0, -0.0]), [ParamState()]
    for _ in range(3):
        rule.step([x], [torch.tensor([0.5, 0.0, 0.0])], states, numbers)
    assert x[0] < 1.0 and x[1:].tolist() == [-2.0, 0.0]
    rule.step([x], [torch.tensor([0.0, 0.0, 0.5])], states, numbers)
    assert x[1] == -2.0 and x[2] < 0 and x.isfinite().all()


@pytest.mark.parametrize("name", ["adagrad", "rmsprop", "adam", "yogi"])
def test_without_epsilon_a_zero_displacement_moves_nothing(name: str) -> None:
    rule = OUTER[name]
    x, states = torch.tensor([1.0, -2.0]), [ParamState()]
    for _ in range(3):
        rule.step([x], [torch.tensor([0.5, 0.0])], states, {**rule.defaults, "lr": 0.1, "eps": 0.0})
    assert x[0] < 1.0 and x[1] == -2.0


@pytest.mark.parametrize(
    ("table", "name"), [("inner", n) for n in ("adagrad", "adam")] + [("outer", "rmsprop"), ("outer", "yogi")]
)
def test_without_epsilon_a_gradient_too_small_to_square_moves_nothing(table: str, name: str) -> None:
    """Its root is 0, and a step of infinity would end the run."""
    rule = (INNER if table == "inner" else OUTER)[name]
    x = torch.ones(2)
    rule.step([x], [torch.tensor([1e-30, 1.0])], [ParamState()], {**rule.defaults, "lr": 0.1, "eps": 0.0})
    assert x[0] == 1.0 and x[1] < 1.0


STACKABLE = [name for name in INNER if not INNER[name].needs_whole_tensors]  # the others have a test file of their own


@pytest.mark.parametrize("name", STACKABLE)
def test_zero_gradients_keep_a_fresh_parameter(name: str) -> None:
    rule = INNER[name]
    x = torch.tensor([1.5, -2.0])
    numbers = {**rule.defaults, "lr": 0.1, "eps": 0.0, "u": 1.0, "d": 0.5 if name != "l2clip" else 0.0}
    rule.step([x], [torch.zeros(2)], [ParamState()], {**numbers, "weight_decay": 0.0})
    assert x.tolist() == [1.5, -2.0]


@pytest.mark.parametrize(("table", "name"), [("inner", n) for n in STACKABLE] + [("outer", n) for n in OUTER])
def test_state_is_what_the_rule_says(table: str, name: str) -> None:
    """Its tensors have the names that the rule gives, and the parameter's shape and type."""
    rule = (INNER if table == "inner" else OUTER)[name]
    numbers = {**rule.defaults, "lr": 0.1, "eps": 1e-3, "u": 1.0, "d": 0.5 if name != "l2clip" else 0.0}
    momentum = {"momentum": 0.9} if "momentum" in {*rule.defaults, *rule.required} else {}
    state = ParamState()
    rule.step([torch.ones(3)], [torch.ones(3)], [state], {**numbers, **momentum})
    held = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    assert set(held) == (set(rule.state_names) if momentum or name != "sgd" else set())
    assert all(value.shape == (3,) and value.dtype == torch.float32 for value in held.values())


# BiClip and L2Clip

THRESHOLDS: list[tuple[Any, Any]] = [(0.5, 0.1), (0.3, 0.3), (float("inf"), 0.0), (1.0, 0.0), (0.0, 0.0)]


@pytest.mark.parametrize("dtype", [*TYPES, torch.float16], ids=str)
@pytest.mark.parametrize("more", [{}, {"weight_decay": 0.1}, {"dead_zone": 0.2}, {"dead_zone": "auto"}], ids=str)
@pytest.mark.parametrize(("u", "d"), THRESHOLDS)
def test_biclip_has_the_bits_of_the_optimizer(u: float, d: float, more: dict[str, Any], dtype: torch.dtype) -> None:
    if more.get("dead_zone") == 0.2 and u == 0:
        more = {"dead_zone": 0.0}
    wanted = by_class(tailopt.BiClip, {"lr": 0.05, "u": u, "d": d, **more}, dtype)
    assert_same_bits(by_rule(INNER["biclip"], {"lr": 0.05, "u": u, "d": d, **more}, dtype), wanted)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("more", [{}, {"weight_decay": 0.1}, {"dead_zone": 0.2}, {"dead_zone": "auto"}], ids=str)
def test_biclip_with_its_own_thresholds_for_every_tensor(more: dict[str, Any], dtype: torch.dtype) -> None:
    """Lists of numbers, and of tensors for rows and columns, against param groups."""
    u: list[Any] = [torch.linspace(0.3, 2.0, 5)[:, None], torch.tensor(0.7), 0.9, torch.linspace(0.5, 3.0, 4)]
    d: list[Any] = [0.1, 0.0, torch.tensor(0.05), torch.linspace(0.0, 0.4, 4)]
    lr = [0.05, 0.01, 0.02, 0.03]

    class Grouped(tailopt.BiClip):
        def __init__(self, params: list[Tensor], **keywords: Any) -> None:
            rows = zip(params, lr, u, d, strict=True)
            super().__init__([{"params": [p], "lr": r, "u": a, "d": b} for p, r, a, b in rows], **keywords)

    assert_same_bits(
        by_rule(INNER["biclip"], {"lr": lr, "u": u, "d": d, **more}, dtype), by_class(Grouped, more, dtype)
    )


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_an_automatic_dead_zone_ends_at_four_units(dtype: torch.dtype) -> None:
    """4 eps max|g| over all tensors, eps of fp32 also for bf16; at most u."""
    unit = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    params = [torch.zeros(1, dtype=dtype), torch.zeros(2, dtype=dtype)]
    grads = [torch.tensor([1.0], dtype=dtype), torch.tensor([4 * unit, 4.5 * unit], dtype=dtype)]
    states = [ParamState(), ParamState()]
    INNER["biclip"].step(params, grads, states, {"lr": 1.0, "u": 1.0, "d": 0.5, "dead_zone": "auto"})
    assert [p.tolist() for p in params] == [[-1.0], [0.0, -0.5]]
    params[1].zero_()
    INNER["biclip"].step(params, grads, states, {"lr": 1.0, "u": 2 * unit, "d": 0.0, "dead_zone": "auto"})
    assert params[1].tolist() == [-2 * unit, -2 * unit]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("zone", [0.0, 0.3, "auto"])
@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_sign_is_biclip_with_equal_thresholds(zone: Any, decay: float, dtype: torch.dtype) -> None:
    more = {"dead_zone": zone, "weight_decay": decay}
    found = by_rule(INNER["sign"], {"lr": 0.05, **more}, dtype)
    assert_same_bits(found, by_class(tailopt.BiClip, {"lr": 0.05, "u": 1.0, "d": 1.0, **more}, dtype))


def test_sign_moves_by_the_learning_rate() -> None:
    x = torch.zeros(4, dtype=torch.float64)
    INNER["sign"].step([x], [torch.tensor([5.0, -1e-30, 0.0, -0.0], dtype=torch.float64)], [ParamState()], {"lr": 0.25})
    assert x.tolist() == [-0.25, 0.25, 0.0, 0.0]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("name", "kind"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)])
def test_adam_on_top_of_biclip(name: str, kind: Class, dtype: torch.dtype) -> None:
    u, d, zone = 0.6, 0.05, 0.01

    class Clipping(kind):  # type: ignore[misc, valid-type]
        def step(self, closure: None = None) -> None:
            for p in self.param_groups[0]["params"]:
                p.grad = tailopt.biclip(p.grad, u, d, zone)
            super().step(closure)

    numbers = {"lr": 0.03, "eps": 1e-6, "u": u, "d": d, "dead_zone": zone}
    wanted = by_class(Clipping, {"lr": 0.03, "eps": 1e-6}, dtype)
    assert_same_bits(by_rule(INNER[f"biclip+{name}"], numbers, dtype), wanted)


def test_adam_on_top_of_biclip_leaves_the_gradient_as_it_is() -> None:
    g = torch.tensor([5.0, -0.01])
    numbers = {**INNER["biclip+adam"].defaults, "lr": 0.1, "eps": 1e-3, "u": 1.0, "d": 0.1}
    INNER["biclip+adam"].step([torch.zeros(2)], [g], [ParamState()], numbers)
    assert g.tolist() == torch.tensor([5.0, -0.01]).tolist()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("scope", ["global", "tensor"])
@pytest.mark.parametrize(("u", "d"), [(1.0, 0.0), (0.5, 0.5), (1e4, 500.0), (float("inf"), 0.0)])
def test_l2clip_has_the_bits_of_the_optimizer(u: float, d: float, scope: str, dtype: torch.dtype) -> None:
    more = {"lr": 0.05, "u": u, "weight_decay": 0.1}
    wanted = by_class(tailopt.L2Clip, {**more, "d": d, "scope": scope}, dtype)
    assert_same_bits(by_rule(INNER["biclip-l2"], {**more, "d": d, "scope": scope}, dtype), wanted)
    if d == 0:
        assert_same_bits(by_rule(INNER["l2clip"], {**more, "scope": scope}, dtype), wanted)


@pytest.mark.parametrize("scope", ["global", "tensor"])
@pytest.mark.parametrize(("u", "d"), [(1.0, 0.2), (50.0, 40.0)])
def test_l2clip_with_a_norm_that_is_known(u: float, d: float, scope: str) -> None:
    """The same as finding it, to rounding."""
    grads, params, known = tensors(1, torch.float64), tensors(0, torch.float64), tensors(0, torch.float64)
    numbers: dict[str, Any] = {"lr": 0.1, "u": u, "d": d, "scope": scope, "weight_decay": 0.0}
    norms = [float(torch.linalg.vector_norm(g)) for g in grads]
    norm = norms if scope == "tensor" else float(torch.tensor(norms, dtype=torch.float64).square().sum().sqrt())
    INNER["biclip-l2"].step(params, grads, [ParamState() for _ in grads], numbers)
    INNER["biclip-l2"].step(known, grads, [ParamState() for _ in grads], {**numbers, "norm": norm})
    for a, b in zip(params, known, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("norm", [float("nan"), float("inf")])
def test_a_norm_that_is_not_finite_makes_nan(norm: float) -> None:
    x = torch.ones(2)
    INNER["l2clip"].step([x], [torch.ones(2)], [ParamState()], {"lr": 0.1, "u": 1.0, "norm": norm})
    assert x.isnan().all()


# Leading dimensions: nodes stacked

LEADING = (3, 2)
ELEMENTWISE = [("inner", name) for name in STACKABLE if "l2" not in name] + [
    ("outer", name) for name in OUTER if "l2" not in name
]


def stacked(seed: int, dtype: torch.dtype, tails: float = 1.0) -> list[Tensor]:
    return tensors(seed, dtype, [(*LEADING, *shape) for shape in shapes_of(dtype)], tails)


def shapes_of(dtype: torch.dtype) -> Sequence[tuple[int, ...]]:
    """Whole vector registers in bf16: there torch's own `add` with alpha rounds the rest of a tensor another way."""
    return [(4, 8), (64,)] if dtype == torch.bfloat16 else SHAPES


def slices() -> list[tuple[int, ...]]:
    return [(i, j) for i in range(LEADING[0]) for j in range(LEADING[1])]


def own(value: Any, at: tuple[int, ...]) -> Any:
    """What a slice has of a number: its own entry of a tensor over the leading dimensions."""
    if isinstance(value, list):
        return [own(v, at) for v in value]
    return value[at] if isinstance(value, Tensor) else value


def run_stacked(rule: Rule, numbers: Mapping[str, Any], dtype: torch.dtype) -> list[Tensor]:
    params, states = stacked(0, dtype), [ParamState() for _ in shapes_of(dtype)]
    for k in range(3):
        rule.step(params, stacked(100 + k, dtype, 2.0), states, numbers)
    return params


def run_slices(rule: Rule, numbers: Mapping[str, Any], dtype: torch.dtype) -> list[Tensor]:
    whole = stacked(0, dtype)
    for at in slices():
        params, states = [p[at].clone() for p in whole], [ParamState() for _ in whole]
        for k in range(3):
            grads = [g[at] for g in stacked(100 + k, dtype, 2.0)]
            rule.step(params, grads, states, {word: own(value, at) for word, value in numbers.items()})
        for p, q in zip(whole, params, strict=True):
            p[at] = q
    return whole


def example(rule: Rule) -> dict[str, Any]:
    return {
        **rule.defaults,
        "lr": 0.07,
        "eps": 1e-3,
        "u": 0.8,
        "d": 0.1 if rule.name != "l2clip" else 0.0,
        "momentum": 0.8,
    }


def per_slice(shape: tuple[int, ...], low: float, high: float, dtype: torch.dtype) -> Tensor:
    """A number for every entry of the leading dimensions, shaped to broadcast against a parameter."""
    values = torch.linspace(low, high, LEADING[0] * LEADING[1], dtype=dtype)
    return values.reshape(*LEADING, *(1 for _ in shape))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("table", "name"), ELEMENTWISE)
def test_stacked_tensors_have_the_bits_of_their_slices(table: str, name: str, dtype: torch.dtype) -> None:
    rule = (INNER if table == "inner" else OUTER)[name]
    for a, b in zip(run_stacked(rule, example(rule), dtype), run_slices(rule, example(rule), dtype), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("table", "name"), ELEMENTWISE)
def test_every_slice_may_have_its_own_numbers(table: str, name: str, dtype: torch.dtype) -> None:
    """lr, u and d as tensors over the leading dimensions, against numbers for each slice: to two roundings a step."""
    rule = (INNER if table == "inner" else OUTER)[name]
    lr = [per_slice(shape, 0.01, 0.2, dtype) for shape in SHAPES]
    u = [per_slice(shape, 0.5, 2.0, dtype) for shape in SHAPES]
    d = [per_slice(shape, 0.0, 0.4, dtype) for shape in SHAPES]
    numbers = {**example(rule), "lr": lr, "u": u, "d": d}
    found = run_stacked(rule, numbers, dtype)
    alone = run_slices(rule, numbers, dtype)
    for a, b in zip(found, alone, strict=True):
        assert torch.equal(a, b)
    # and against plain numbers
    whole = stacked(0, dtype)
    for at in slices():
        plain = {
            **numbers,
            "lr": [float(v[at]) for v in lr],
            "u": [float(v[at]) for v in u],
            "d": [float(v[at]) for v in d],
        }
        params, states = [p[at].clone() for p in whole], [ParamState() for _ in SHAPES]
        for k in range(3):
            rule.step(params, [g[at] for g in stacked(100 + k, dtype, 2.0)], states, plain)
        for p, q in zip(found, params, strict=True):
            close = 1e-5 if dtype == torch.float32 else 1e-13
            torch.testing.assert_close(p[at], q, rtol=close, atol=close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scope", ["global", "tensor"])
@pytest.mark.parametrize("name", ["l2clip", "biclip-l2"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_stacked_l2clip_has_a_norm_for_every_slice(name: str, scope: str, decay: float, dtype: torch.dtype) -> None:
    """To 1e-6, with thresholds such that some slices are clipped, some lifted and some left alone."""
    rule = INNER[name]
    norms = (
        torch.stack([(g.double() ** 2).reshape(*LEADING, -1).sum(-1) for g in stacked(100, dtype, 2.0)]).sum(0).sqrt()
    )
    middle = float(norms.median())
    numbers = {"lr": 0.07, "u": 1.2 * middle, "d": 0.8 * middle if name == "biclip-l2" else 0.0}
    numbers |= {"scope": scope, "weight_decay": decay}  # type: ignore[dict-item]
    assert (norms > numbers["u"]).any() and (norms < middle * 0.8).any()
    found = run_stacked(rule, {**numbers, "leading": 2}, dtype)
    for a, b in zip(found, run_slices(rule, numbers, dtype), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6 * 0.07 * middle)


@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_stacked_l2clip_with_numbers_for_every_slice(scope: str) -> None:
    lr = [per_slice(shape, 0.01, 0.2, torch.float64) for shape in SHAPES]
    u = [per_slice(shape, 1.0, 40.0, torch.float64) for shape in SHAPES]
    d = [per_slice(shape, 0.5, 30.0, torch.float64) for shape in SHAPES]
    found = run_stacked(
        INNER["biclip-l2"],
        {"lr": lr, "u": u, "d": d, "scope": scope, "leading": 2, "weight_decay": 0.0},
        torch.float64,
    )
    whole = stacked(0, torch.float64)
    for at in slices():
        plain: dict[str, Any] = {"lr": [float(v[at]) for v in lr], "scope": scope}
        plain |= {"u": [float(v[at]) for v in u], "d": [float(v[at]) for v in d]}
        params = [p[at].clone() for p in whole]
        for k in range(3):
            grads = [g[at] for g in stacked(100 + k, torch.float64, 2.0)]
            INNER["biclip-l2"].step(params, grads, [ParamState() for _ in SHAPES], plain)
        for p, q in zip(found, params, strict=True):
            torch.testing.assert_close(p[at], q, rtol=1e-6, atol=1e-9)


def test_a_stacked_slice_that_is_not_finite_spoils_itself_alone() -> None:
    params, grads = [torch.ones(3, 4), torch.ones(3)], [torch.ones(3, 4), torch.ones(3)]
    grads[0][1, 2] = float("nan")
    grads[1][2] = float("inf")
    INNER["l2clip"].step(params, grads, [{}, {}], {"lr": 0.1, "u": 1.0, "leading": 1})
    assert params[0].isfinite().all(1).tolist() == [True, False, False]
    assert params[1].isfinite().tolist() == [True, False, False]


def test_a_stacked_slice_of_zeros_stays() -> None:
    x = torch.ones(2, 3)
    grads = torch.stack([torch.zeros(3), torch.ones(3)])
    INNER["biclip-l2"].step([x], [grads], [{}], {"lr": 0.1, "u": 1.0, "d": 0.5, "leading": 1})
    assert x[0].tolist() == [1.0] * 3 and (x[1] < 1).all()


# Any class of torch.optim

CLASSES: list[tuple[Class, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"lr": 0.05, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 0.05, "maximize": True}),
    (torch.optim.RMSprop, {"lr": 0.05, "centered": True, "momentum": 0.5}),
    (torch.optim.NAdam, {"lr": 0.05}),
    (torch.optim.RAdam, {"lr": 0.05}),
    (torch.optim.Adadelta, {"lr": 0.5}),
    (torch.optim.Adagrad, {"lr": 0.5, "lr_decay": 0.1, "initial_accumulator_value": 0.2}),
    (torch.optim.Adamax, {"lr": 0.05}),
    (torch.optim.ASGD, {"lr": 0.05, "t0": 2}),
    (torch.optim.Rprop, {"lr": 0.05}),
    (tailopt.BiClip, {"lr": 0.05, "u": 0.5, "d": 0.1}),
]


@pytest.mark.parametrize("foreach", [False, True], ids=["single", "foreach"])
@pytest.mark.parametrize(("kind", "keywords"), CLASSES, ids=[f"{c.__name__}-{i}" for i, (c, _) in enumerate(CLASSES)])
def test_a_class_keeps_its_state_as_if_it_lived_on(kind: Class, keywords: dict[str, Any], foreach: bool) -> None:
    rule = torch_rule(kind)
    keywords = {**keywords, "foreach": foreach}
    params, states = tensors(0, torch.float64), [ParamState() for _ in SHAPES]
    seen = []
    for grads in gradients(torch.float64, 12):
        rule.step(params, grads, states, keywords)
        seen.append([p.clone() for p in params])
    assert_same_bits(seen, by_class(kind, keywords, torch.float64, 12))


def test_a_class_sees_a_learning_rate_that_changes() -> None:
    """A schedule wins over what the class was built with before."""
    x, states = torch.zeros(1), [ParamState()]
    rule = torch_rule(torch.optim.SGD)
    for lr in (1.0, 0.5):
        rule.step([x], [torch.ones(1)], states, {"lr": lr, "momentum": 0.5})
    assert x.item() == -1.0 - 0.5 * 1.5


def test_a_class_that_changes_its_group_gets_it_back() -> None:
    """ScheduleFree-like classes count in their group."""

    class Slower(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            group = self.param_groups[0]
            group["calls"] = group.get("calls", 0) + 1
            for p in group["params"]:
                p.data.sub_(p.grad, alpha=group["lr"] / group["calls"])

    x, states = torch.zeros(1), [ParamState()]
    for _ in range(3):
        torch_rule(Slower).step([x], [torch.ones(1)], states, {"lr": 6.0})
    assert x.item() == -6.0 - 3.0 - 2.0


def test_a_class_leaves_the_gradient_as_it_is() -> None:
    g = torch.ones(2)
    torch_rule(torch.optim.Rprop).step([torch.zeros(2)], [g], [ParamState()], {"lr": 0.1})
    torch_rule(torch.optim.SGD).step([torch.zeros(2)], [g], [ParamState()], {"lr": 0.1, "weight_decay": 0.5})
    assert g.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_classes_that_cannot_be_used_are_refused_by_name(kind: Class) -> None:
    with pytest.raises(ValueError, match=f"^{kind.__name__} cannot be used here: it "):
        torch_rule(kind)


@pytest.mark.parametrize("other", [torch.nn.Linear, "sgd", None])
def test_what_is_no_optimizer_is_refused(other: Any) -> None:
    with pytest.raises(TypeError, match="need a name or a class of torch.optim"):
        torch_rule(other)


@pytest.mark.parametrize("lr", [[0.1], torch.ones(2)])
def test_a_class_takes_one_number_for_all_tensors(lr: Any) -> None:
    with pytest.raises(ValueError, match=r"^Invalid lr: .* takes one number for all tensors"):
        torch_rule(torch.optim.SGD).step([torch.zeros(2)], [torch.ones(2)], [ParamState()], {"lr": lr})


def test_a_class_has_its_keywords_for_options() -> None:
    rule = torch_rule(torch.optim.SGD)
    assert rule.name == "SGD" and rule.required == () and rule.defaults["momentum"] == 0

    class Strict(torch.optim.SGD):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, lr)

    assert torch_rule(Strict).required == ("lr",)


# Small parts


def test_numbers_of_parameters() -> None:
    assert (value_for_param([1.0, 2.0], 1), value_for_param(3.0, 1)) == (2.0, 3.0)
    assert (as_list([1.0], 1), as_list(2.0, 3)) == ([1.0], [2.0, 2.0, 2.0])
    assert product(2.0, 3.0) == 6.0
    assert product([1.0, 2.0], 3.0, [1.0, 10.0]) == [3.0, 60.0]


@settings(max_examples=50, deadline=None)
@given(
    beta1=st.floats(0, 0.99),
    beta2=st.floats(0, 0.9999),
    sizes=st.lists(st.floats(-30, 30), min_size=1, max_size=25),
    kind=st.sampled_from([True, False]),
)
def test_adam_never_moves_beyond_its_step_bound(beta1: float, beta2: float, sizes: list[float], kind: bool) -> None:
    """For gradients 2^s, which come nearest to it; float64."""
    rule = INNER["adam"]
    numbers = {"lr": 0.1, "eps": 0.0, "betas": (beta1, beta2), "bias_correction": kind}
    bound = rule.step_bound(numbers)
    assert (bound is None) == (beta1**2 >= beta2)
    if bound is None:
        return
    x, state = torch.zeros(1, dtype=torch.float64), ParamState()
    for size in sizes:
        before = x.clone()
        rule.step([x], [torch.tensor([2.0**size], dtype=torch.float64)], [state], numbers)
        assert float((x - before).abs()) <= bound.limit * (1 + 1e-9) + 1e-12


def test_yogi_by_hand() -> None:
    """A second moment below g^2 grows by a share of g^2, one above shrinks by that share of the same g^2."""
    x, state = torch.zeros(1, dtype=torch.float64), ParamState()
    numbers = {"lr": 0.5, "eps": 0.25, "betas": (0.5, 0.75)}
    seen = []
    for g in (4.0, 1.0, 0.0):
        OUTER["yogi"].step([x], [torch.tensor([g], dtype=torch.float64)], [state], numbers)
        seen.append((float(state["exp_avg"]), float(state["exp_avg_sq"]), float(x)))
    first = -0.5 * 2.0 / (4.0**0.5 + 0.25)  # m = 2, v = 0.25 * 16
    second = first - 0.5 * 1.5 / (3.75**0.5 + 0.25)  # v = 4 - 0.25 * 1: Adam's would be 3.25
    assert seen == [
        (2.0, 4.0, pytest.approx(first)),
        (1.5, 3.75, pytest.approx(second)),
        (0.75, 3.75, pytest.approx(second - 0.5 * 0.75 / (3.75**0.5 + 0.25))),
    ]


@settings(max_examples=100, deadline=None)
@given(
    beta1=st.floats(0, 0.99),
    beta2=st.floats(0, 0.9999),
    sizes=st.lists(st.floats(-30, 30), min_size=1, max_size=25),
)
def test_yogi_never_moves_beyond_its_step_bound(beta1: float, beta2: float, sizes: list[float]) -> None:
    rule = OUTER["yogi"]
    numbers = {"lr": 0.1, "eps": 0.0, "betas": (beta1, beta2)}
    bound = rule.step_bound(numbers)
    assert (bound is None) == (beta1**2 >= beta2)
    x, state = torch.zeros(1, dtype=torch.float64), ParamState()
    for size in sizes:
        before = x.clone()
        rule.step([x], [torch.tensor([2.0**size], dtype=torch.float64)], [state], numbers)
        assert float(state["exp_avg_sq"]) >= 0
        if bound is not None:
            assert float((x - before).abs()) <= bound.limit * (1 + 1e-9) + 1e-12


def test_adams_step_bound_is_nearly_reached() -> None:
    """Gradients that grow by beta2 / beta1: the worst sequence comes to within 1 % of 7.27 lr."""
    rule, (beta1, beta2) = INNER["adam"], (0.9, 0.999)
    bound = rule.step_bound({"lr": 1.0, "betas": (beta1, beta2), "bias_correction": False})
    assert bound is not None and round(bound.limit, 2) == 7.27
    x, state = torch.zeros(1, dtype=torch.float64), ParamState()
    for k in range(60):
        before = x.clone()
        g = torch.tensor([(beta1 / beta2) ** (59 - k)], dtype=torch.float64)
        rule.step([x], [g], [state], {"lr": 1.0, "eps": 0.0, "betas": (beta1, beta2), "bias_correction": False})
    assert 0.99 * bound.limit < float((before - x).abs()) <= bound.limit


def test_rmsprops_step_bound_is_its_first_step() -> None:
    """g / sqrt((1 - beta2) g^2), whatever g."""
    numbers = {"lr": 0.1, "eps": 0.0, "betas": (0.9, 0.96)}
    bound, x = OUTER["rmsprop"].step_bound(numbers), torch.zeros(2, dtype=torch.float64)
    OUTER["rmsprop"].step([x], [torch.tensor([5.0, -1e-3], dtype=torch.float64)], [ParamState()], numbers)
    assert bound is not None and bound.kind == "coordinate"
    assert x.tolist() == pytest.approx([-bound.limit, bound.limit])
