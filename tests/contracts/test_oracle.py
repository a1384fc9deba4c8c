"""The oracle itself: against torch.optim, against closed forms, and its guard against the worst sequences there are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from tests.contracts.oracle import (
    ALGORITHMS,
    INNERS,
    OUTERS,
    Array,
    Bounds,
    Gradient,
    NothingCounted,
    Options,
    Tensors,
    Trace,
    adam_factor,
    biclip,
    biclip_l2,
    bounds,
    norm,
    reach,
    run,
    run_algorithm,
    scopes,
    shares,
)

INF, NAN = math.inf, math.nan
START = {"weight": np.arange(6.0).reshape(2, 3) / 4 - 0.5, "bias": np.array([0.3, -1.2]), "scale": np.array(0.7)}
# One value for every setting: thresholds that bite on both sides of the noise below and of its displacements.
SETTINGS = {
    "ilr": 0.05,
    "olr": 0.3,
    "i_u": 0.8,
    "i_d": 0.2,
    "o_u": 0.08,
    "o_d": 0.03,
    "ieps": 1e-3,
    "oeps": 1e-3,
    "momentum": 0.8,
    "weight_decay": 0.1,
}
CONSTANT = {"weight": np.ones((2, 3)), "bias": np.array([1.0, -1.0]), "scale": np.array(1.0)}


def noisy(node: int, round: int, step: int, x: Tensors) -> Tensors:
    """A quadratic with its own minimum on every node, and heavy-tailed noise that is a function of where we are."""
    rng = np.random.default_rng([node, round, step])
    return {k: x[k] - node / 4 + rng.standard_t(2.0, size=x[k].shape) for k in x}


def constant(node: int, round: int, step: int, x: Tensors) -> Tensors:
    return CONSTANT


def close(got: Tensors, expected: Tensors, tolerance: float = 1e-12) -> None:
    assert got.keys() == expected.keys()
    for k in got:
        np.testing.assert_allclose(got[k], expected[k], rtol=tolerance, atol=tolerance, err_msg=k)


def same(a: Trace, b: Trace, tolerance: float = 1e-12) -> None:
    assert len(a.weights) == len(b.weights)
    for x, y in zip(a.weights, b.weights, strict=True):
        close(x, y, tolerance)


class Torch:
    """A torch optimizer on float64 copies of START."""

    def __init__(self, make: Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]) -> None:
        self.parameters = {k: torch.tensor(v, dtype=torch.float64, requires_grad=True) for k, v in START.items()}
        self.optimizer = make(list(self.parameters.values()))

    @property
    def x(self) -> Tensors:
        return {k: p.detach().numpy().copy() for k, p in self.parameters.items()}

    def put(self, x: Tensors) -> None:
        for k, p in self.parameters.items():
            p.data.copy_(torch.as_tensor(x[k]))

    def step(self, g: Tensors) -> Tensors:
        for k, p in self.parameters.items():
            p.grad = torch.tensor(g[k], dtype=torch.float64)
        self.optimizer.step()
        return self.x


# --- Operators ------------------------------------------------------------------------------------------------------

TINY = 5e-324
TABLE = [
    # x, u, d, dead_zone, result
    (NAN, 2.0, 0.5, 0.0, NAN),
    (NAN, 2.0, 0.5, 1.0, NAN),
    (0.0, 2.0, 0.5, 0.0, 0.0),
    (-0.0, 2.0, 0.5, 0.0, 0.0),
    (-0.3, 2.0, 0.1, 0.3, 0.0),
    (-0.31, 2.0, 0.1, 0.3, -0.31),
    (0.31, 2.0, 0.5, 0.3, 0.5),
    (TINY, 2.0, 0.5, 0.0, 0.5),
    (0.499, 2.0, 0.5, 0.0, 0.5),
    (-0.5, 2.0, 0.5, 0.0, -0.5),
    (-0.501, 2.0, 0.5, 0.0, -0.501),
    (-0.7, 2.0, 0.5, 0.0, -0.7),
    (2.0, 2.0, 0.5, 0.0, 2.0),
    (-9.0, 2.0, 0.5, 0.0, -2.0),
    (INF, 2.0, 0.5, 0.0, 2.0),
    (-INF, 2.0, 0.5, 0.0, -2.0),
    (-INF, INF, 0.0, 0.0, -INF),
    (1e300, INF, 0.0, 0.0, 1e300),
    (2.0, 2.0, 2.0, 0.0, 2.0),
    (-5.0, 0.0, 0.0, 0.0, -0.0),
    (2.0, 2.0, 0.5, 2.0, 0.0),
]


@pytest.mark.parametrize(("x", "u", "d", "dead_zone", "result"), TABLE)
def test_biclip_row_by_row(x: float, u: float, d: float, dead_zone: float, result: float) -> None:
    got = biclip(x, u, d, dead_zone)
    np.testing.assert_array_equal(got, result)
    assert math.isnan(x) or np.signbit(got) == np.signbit(result)  # -0.0 becomes +0.0


@examples(deadline=None)
@given(st.lists(st.floats(), min_size=1), st.floats(0, 1e3), st.floats(0, 1))
def test_biclip_is_a_sign_times_a_clamp(xs: list[float], u: float, ratio: float) -> None:
    x, d = np.array(xs), u * ratio
    np.testing.assert_array_equal(biclip(x, u, d), np.sign(x) * np.clip(np.abs(x), d, u))


def test_biclip_takes_a_threshold_for_every_row() -> None:
    x = np.array([[3.0, -0.1], [3.0, -0.1]])
    np.testing.assert_array_equal(biclip(x, np.array([[1.0], [2.0]]), np.array([[0.5], [0.0]])), [[1, -0.5], [2, -0.1]])


@pytest.mark.parametrize("size", [1e-320, 1e-200, 1.0, 1e200, 1.7e308])
@pytest.mark.parametrize(("u", "d"), [(1.0, 0.0), (1.0, 0.5), (2.0, 2.0), (INF, 0.0)])
def test_biclip_l2_at_every_size(size: float, u: float, d: float) -> None:
    x = {"a": np.full((2, 2), size), "b": np.full(5, -size)}
    n = min(3 * size, 1.8e308)
    got = biclip_l2(x, u, d)
    target = d if n <= d else min(n, u)
    if target in (u, d) and n not in (u, d):
        assert norm(got.values()) == pytest.approx(target, rel=1e-12)
        np.testing.assert_allclose(got["a"], target / 3)
    else:
        close(got, x, 0.0)


def test_biclip_l2_by_scope_zero_and_nonfinite() -> None:
    x = {"a": np.array([3.0, 4.0]), "b": np.zeros(2), "c": np.array([INF, 1.0])}
    by_tensor = biclip_l2(x, 1.0, 0.5, "tensor")
    np.testing.assert_allclose(by_tensor["a"], [0.6, 0.8])
    np.testing.assert_array_equal(by_tensor["b"], [0.0, 0.0])
    assert np.isnan(by_tensor["c"]).all()
    assert all(np.isnan(v).all() for v in biclip_l2(x, 1.0, 0.5).values())
    with pytest.raises(ValueError, match="got 'group'"):
        scopes(x, "group")


def test_norm_over_everything() -> None:
    assert norm([np.array([3.0]), np.array(4.0)]) == pytest.approx(5.0, rel=1e-15)
    assert norm([]) == norm([np.zeros(0)]) == 0.0
    assert math.isnan(norm([np.array([INF]), np.array([NAN])]))


# --- Inner steps against torch --------------------------------------------------------------------------------------

TORCH_INNERS: dict[str, tuple[str, dict[str, float], Callable[..., torch.optim.Optimizer]]] = {
    "sgd": ("sgd", {}, lambda p: torch.optim.SGD(p, lr=0.05)),
    "sgd, decay": ("sgd", {"weight_decay": 0.1}, lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.1)),
    "adagrad": ("adagrad", {}, lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-3)),
    "adagrad, decay": (
        "adagrad",
        {"weight_decay": 0.1},
        lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-3, weight_decay=0.1),
    ),
    "adam": ("adam", {}, lambda p: torch.optim.Adam(p, lr=0.05, eps=1e-3)),
    "adam, decay": ("adam", {"weight_decay": 0.1}, lambda p: torch.optim.Adam(p, lr=0.05, eps=1e-3, weight_decay=0.1)),
    "adamw": ("adamw", {}, lambda p: torch.optim.AdamW(p, lr=0.05, eps=1e-3)),
    "adamw, decay": (
        "adamw",
        {"weight_decay": 0.1},
        lambda p: torch.optim.AdamW(p, lr=0.05, eps=1e-3, weight_decay=0.1),
    ),
    "biclip+adam": ("biclip+adam", {}, lambda p: torch.optim.Adam(p, lr=0.05, eps=1e-3)),
    "biclip+adamw": ("biclip+adamw", {}, lambda p: torch.optim.AdamW(p, lr=0.05, eps=1e-3)),
}


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("case", TORCH_INNERS)
def test_inner_steps_are_torchs(case: str, kept: bool) -> None:
    inner, extra, make = TORCH_INNERS[case]
    settings = {"ilr": 0.05, "ieps": 1e-3, "i_u": 0.8, "i_d": 0.2, **extra}
    trace = run("avg", inner, settings, START, noisy, 1, 4, 10, inner_state="keep" if kept else "reset")
    other = Torch(make)
    for t in range(1, 5):
        if not kept:
            x = other.x
            other = Torch(make)
            other.put(x)
        for step in range(10):
            g = noisy(0, t, step, other.x)
            other.step({k: biclip(g[k], 0.8, 0.2) for k in g} if "+" in inner else g)
        close(trace.weights[t], other.x)


@pytest.mark.parametrize("send", [True, "raw", False])
def test_adam2_starts_from_what_it_was_sent(send: bool | str) -> None:
    settings = {"ilr": 0.05, "olr": 0.3, "ieps": 1e-3, "oeps": 1e-3}
    trace = run("adam", "adam", settings, START, noisy, 2, 4, 5, send_preconditioner=send)
    v = {k: np.zeros_like(x) for k, x in START.items()}
    for t in range(1, 5):
        ends = []
        for node in range(2):
            other = Torch(lambda p: torch.optim.Adam(p, lr=0.05, eps=1e-3))
            other.put(trace.weights[t - 1])
            for k, p in other.parameters.items() if send else ():
                other.optimizer.state[p] = {
                    # A step counter so high that 1 - 0.999**n is 1 in float64 leaves v as it is.
                    "step": torch.tensor(t - 1.0 if send is True else 1e6, dtype=torch.float64),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.tensor(v[k]),
                }
            for step in range(5):
                if send == "raw":  # m is then not corrected either: put it into the learning rate
                    other.optimizer.param_groups[0]["lr"] = 0.05 / (1 - 0.9 ** (step + 1))
                other.step(noisy(node, t, step, other.x))
            ends.append(other.x)
        delta = {k: (ends[0][k] + ends[1][k]) / 2 - trace.weights[t - 1][k] for k in v}
        close(trace.deltas[t - 1], delta)
        v = {k: 0.99 * v[k] + 0.01 * delta[k] ** 2 for k in v}


def test_what_is_sent_concerns_adam_adam_alone() -> None:
    for outer, inner in [("rmsprop", "adam"), ("adam", "adamw"), ("adam", "biclip+adam")]:
        sent, unsent = (
            run(outer, inner, SETTINGS, START, noisy, 2, 3, 4, send_preconditioner=send) for send in (True, False)
        )
        same(sent, unsent, 0.0)
    with pytest.raises(ValueError, match="cannot keep its second moment"):
        run("adam", "adam", SETTINGS, START, noisy, 2, 3, 4, inner_state="keep")


# --- Outer steps against torch --------------------------------------------------------------------------------------

TORCH_OUTERS: dict[str, tuple[str, dict[str, Any], Callable[..., torch.optim.Optimizer]]] = {
    "sgd": ("sgd", {"momentum": 0.0}, lambda p: torch.optim.SGD(p, lr=0.3)),
    "momentum": ("sgd", {"momentum": 0.8}, lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.8)),
    "nesterov": ("nesterov", {"momentum": 0.8}, lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.8, nesterov=True)),
    "adagrad": ("adagrad", {}, lambda p: torch.optim.Adagrad(p, lr=0.3, eps=1e-3)),
    "rmsprop": ("rmsprop", {}, lambda p: torch.optim.RMSprop(p, lr=0.3, alpha=0.99, eps=1e-3)),
    "adam": ("adam", {"bias_correction": True}, lambda p: torch.optim.Adam(p, lr=0.3, betas=(0.9, 0.99), eps=1e-3)),
}


@pytest.mark.parametrize("case", TORCH_OUTERS)
def test_outer_steps_are_torchs_on_minus_delta(case: str) -> None:
    outer, extra, make = TORCH_OUTERS[case]
    settings = {"ilr": 0.05, "olr": 0.3, "oeps": 1e-3, "momentum": extra.get("momentum", 0.0)}
    options = {"bias_correction": extra["bias_correction"]} if "bias_correction" in extra else {}
    trace = run(outer, "sgd", settings, START, noisy, 3, 12, 2, **options)
    other = Torch(make)
    for delta, x in zip(trace.deltas, trace.weights[1:], strict=True):
        close(x, other.step({k: -delta[k] for k in delta}))


def test_outer_adam_without_bias_correction() -> None:
    settings = {"ilr": 0.1, "olr": 0.3, "oeps": 0.0}
    trace = run("adam", "sgd", settings, START, constant, 2, 3, 1)
    # Δ = -0.1·g always: m = (1 - 0.9**t)·Δ, v = (1 - 0.99**t)·Δ²; the first step has size olr.
    for t in range(1, 4):
        size = 0.3 * (1 - 0.9**t) / math.sqrt(1 - 0.99**t)
        assert t > 1 or size == pytest.approx(0.3)
        close(trace.weights[t], {k: x - size * CONSTANT[k] for k, x in trace.weights[t - 1].items()})


@pytest.mark.parametrize("outer", ["adagrad", "rmsprop", "adam"])
def test_no_displacement_is_no_step_without_epsilon(outer: str) -> None:
    settings = {"ilr": 0.1, "olr": 0.3, "oeps": 0.0}
    trace = run(outer, "sgd", settings, START, lambda i, t, k, x: {n: 0 * x[n] for n in x}, 1, 2, 1)
    close(trace.weights[-1], START, 0.0)


# --- Closed forms ---------------------------------------------------------------------------------------------------


def test_equal_thresholds_are_scaled_sign_descent() -> None:
    equal = run("avg", "biclip", {"ilr": 0.1, "i_u": 0.5, "i_d": 0.5}, START, noisy, 3, 4, 5)
    sign = run("avg", "sign", {"ilr": 0.05}, START, noisy, 3, 4, 5)
    same(equal, sign)
    straight = run("avg", "sign", {"ilr": 0.05}, START, constant, 3, 4, 5)
    close(straight.weights[-1], {k: START[k] - 20 * 0.05 * np.sign(CONSTANT[k]) for k in CONSTANT})


@pytest.mark.parametrize("inner", ["biclip", "l2clip", "biclip-l2"])
def test_open_thresholds_are_plain_descent(inner: str) -> None:
    settings = {"ilr": 0.1, "i_u": INF, "i_d": 0.0}
    same(run("avg", inner, settings, START, noisy, 3, 4, 5), run("avg", "sgd", settings, START, noisy, 3, 4, 5))


@pytest.mark.parametrize("outer", ["biclip", "biclip-l2", "sgd"])
def test_open_outer_rules_are_the_average(outer: str) -> None:
    settings = {**SETTINGS, "olr": 1.0, "o_u": INF, "o_d": 0.0, "momentum": 0.0}
    same(run(outer, "biclip", settings, START, noisy, 3, 4, 5), run("avg", "biclip", settings, START, noisy, 3, 4, 5))


def test_outer_clipping_acts_on_the_mean_displacement() -> None:
    trace = run("biclip", "biclip", SETTINGS, START, noisy, 3, 3, 2)
    for t, delta in enumerate(trace.deltas):
        close(trace.weights[t + 1], {k: trace.weights[t][k] + 0.3 * biclip(delta[k], 0.08, 0.03) for k in delta})
    for scope, parts in (("global", [list(START)]), ("tensor", [[k] for k in START])):
        trace = run("biclip-l2", "sgd", SETTINGS, START, noisy, 3, 3, 2, scope=scope)
        moves = {k: (trace.weights[1][k] - START[k]) / 0.3 for k in START}
        for part in parts:
            n = norm(trace.deltas[0][k] for k in part)
            assert norm(moves[k] for k in part) == pytest.approx(min(max(n, 0.03), 0.08), rel=1e-12)


@pytest.mark.parametrize("inner", ["l2clip", "biclip-l2"])
def test_inner_norms_are_taken_over_the_scope(inner: str) -> None:
    settings = {"ilr": 0.1, "i_u": 2.0, "i_d": 1.5}  # the norms of CONSTANT: 3 in all; √6, √2 and 1
    whole = run("avg", inner, settings, START, constant, 1, 1, 1).deltas[0]
    close(whole, {k: -0.1 * CONSTANT[k] * 2 / 3 for k in START})
    parts = run("avg", inner, settings, START, constant, 1, 1, 1, scope="tensor").deltas[0]
    expected = [2.0, math.sqrt(2.0), 1.0] if inner == "l2clip" else [2.0, 1.5, 1.5]
    assert [norm([parts[k]]) for k in START] == pytest.approx([0.1 * n for n in expected], rel=1e-12)


def test_a_mapping_gives_every_tensor_its_thresholds() -> None:
    u = {"weight": np.array([[0.5], [1.0]]), "bias": 0.25, "scale": 2.0}
    trace = run("avg", "biclip", {"ilr": 0.1, "i_u": u, "i_d": u}, START, constant, 1, 1, 2)
    close(trace.weights[1], {k: START[k] - 0.2 * np.sign(CONSTANT[k]) * u[k] for k in CONSTANT})


def test_dead_zone_holds_inside_and_outside() -> None:
    def small(inner: str, dead_zone: float) -> Trace:
        settings = {**SETTINGS, "ilr": 1.0, "weight_decay": 0.0}
        gradient = {k: np.full_like(START[k], 0.01) for k in START}
        return run("biclip", inner, settings, START, lambda *_: gradient, 1, 1, 1, dead_zone=dead_zone)

    inside, outside, neither = small("biclip", 0.02), small("sgd", 0.02), small("sgd", 0.005)
    assert norm(inside.deltas[0].values()) == 0.0
    assert norm(outside.deltas[0].values()) == pytest.approx(0.03)
    close(outside.weights[1], START, 0.0)
    close(neither.weights[1], {k: START[k] - 0.3 * 0.03 for k in START})


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_runs_by_name(name: str) -> None:
    outer, inner, needed = ALGORITHMS[name]
    assert outer in OUTERS and inner in INNERS
    settings = {k: SETTINGS[k] for k in needed}
    trace = run_algorithm(name, settings, START, noisy, nodes=3, rounds=4, local_steps=5)
    assert trace.counted == [[0, 1, 2]] * 4 and trace.excluded == [[]] * 4
    assert all(np.isfinite(x[k]).all() for x in trace.weights for k in x)
    assert norm(trace.weights[-1][k] - START[k] for k in START) > 0
    with pytest.raises(ValueError, match=f"{name} needs {needed[0]}"):
        run_algorithm(name, {k: settings[k] for k in needed[1:]}, START, noisy, nodes=3, rounds=1, local_steps=1)


def test_there_are_eighteen_algorithms_and_sign_descent() -> None:
    assert len(ALGORITHMS) == 19 and len({row[:2] for row in ALGORITHMS.values()}) == 19


def test_diloco_keeps_its_state_and_the_pair_of_its_rules_does_not() -> None:
    kept = run_algorithm("diloco", SETTINGS, START, noisy, 2, 3, 4)
    anew = run("nesterov", "adamw", SETTINGS, START, noisy, 2, 3, 4)
    same(kept, run("nesterov", "adamw", SETTINGS, START, noisy, 2, 3, 4, inner_state="keep"), 0.0)
    assert norm(kept.weights[-1][k] - anew.weights[-1][k] for k in START) > 1e-6


# --- The round ------------------------------------------------------------------------------------------------------


def pull(*targets: float) -> Gradient:
    """With ilr 1, node i moves every coordinate by targets[i]."""
    return lambda node, round, step, x: {k: np.full_like(x[k], -targets[node]) for k in x}


ONE = {"w": np.zeros(1)}


def test_weights_are_normalised_over_the_participants() -> None:
    trace = run(
        "avg",
        "sgd",
        {"ilr": 1.0},
        ONE,
        pull(1.0, 10.0, 100.0),
        3,
        2,
        1,
        [1.0, 3.0, 4.0],
        lambda t: [[2, 0], [1]][t - 1],
    )
    assert trace.counted == [[0, 2], [1]] and trace.used_weights == [[0.2, 0.8], [1.0]]
    assert [float(d["w"][0]) for d in trace.deltas] == pytest.approx([80.2, 10.0])


def test_a_node_drawn_twice_steps_once_and_counts_twice() -> None:
    asked: list[tuple[int, int, int]] = []

    def gradient(node: int, round: int, step: int, x: Tensors) -> Tensors:
        asked.append((node, round, step))
        return pull(1.0, 4.0)(node, round, step, x)

    trace = run("avg", "sgd", {"ilr": 1.0}, ONE, gradient, 3, 1, 2, participants=lambda t: [1, 0, 1])
    assert asked == [(0, 1, 0), (0, 1, 1), (1, 1, 0), (1, 1, 1)]
    assert trace.counted == [[0, 1]] and trace.used_weights[0] == pytest.approx([1 / 3, 2 / 3])
    assert trace.weights[1]["w"] == pytest.approx(2 * (1 + 2 * 4) / 3)


@pytest.mark.parametrize("bad", [[1.0], [1.0, -1.0], [1.0, NAN], [0.0, 0.0], [1.0, INF]])
def test_weights_that_cannot_be_used(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="Invalid weights"):
        shares([0, 1], bad, 2)


def test_an_excluded_nodes_weight_goes_to_the_others() -> None:
    def gradient(node: int, round: int, step: int, x: Tensors) -> Tensors:
        g = pull(1.0, 4.0, 7.0)(node, round, step, x)
        return {"w": np.array([NAN])} if (node, round) == (1, 2) else g

    trace = run("avg", "sgd", {"ilr": 1.0}, ONE, gradient, 3, 3, 1, [1.0, 2.0, 3.0])
    assert trace.counted == [[0, 1, 2], [0, 2], [0, 1, 2]] and trace.excluded == [[], [1], []]
    assert trace.used_weights[1] == pytest.approx([0.25, 0.75])
    assert [float(d["w"][0]) for d in trace.deltas] == pytest.approx([5.0, 5.5, 5.0])
    unguarded = run("avg", "sgd", {"ilr": 1.0}, ONE, gradient, 3, 3, 1, [1.0, 2.0, 3.0], guard=False)
    assert np.isnan(unguarded.weights[-1]["w"]).all() and unguarded.excluded == [[], [], []]


def test_nobody_left_ends_the_run_with_what_there_was() -> None:
    def gradient(node: int, round: int, step: int, x: Tensors) -> Tensors:
        return {"w": np.array([INF if round == 3 else 1.0])}

    with pytest.raises(NothingCounted, match="round 3") as caught:
        run("avg", "sgd", {"ilr": 1.0}, ONE, gradient, 2, 5, 1)
    assert [float(x["w"][0]) for x in caught.value.trace.weights] == [0.0, -1.0, -2.0]


def test_kept_state_waits_and_goes_back_after_an_exclusion() -> None:
    settings = {"ilr": 0.1, "ieps": 1e-8, "weight_decay": 0.0}

    def gradient(node: int, round: int, step: int, x: Tensors) -> Tensors:
        if (node, round, step) == (0, 3, 1):
            return {"w": np.array([NAN])}  # its first step of the round was a good one
        return {"w": np.array([{1: 1.0, 3: 50.0}.get(round, -0.5) if node == 0 else 0.0])}

    turns = {1: [0], 2: [1], 3: [0, 1], 4: [0]}
    trace = run("avg", "adamw", settings, ONE, gradient, 2, 4, 2, None, turns.__getitem__, "keep")
    assert trace.excluded == [[], [], [0], []]
    other = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.AdamW([other], lr=0.1, weight_decay=0.0)
    for g in (1.0, 1.0, -0.5, -0.5):  # rounds 1 and 4: nothing else happened to this state
        other.grad = torch.tensor([g], dtype=torch.float64)
        optimizer.step()
    np.testing.assert_allclose(trace.weights[4]["w"], other.detach().numpy(), rtol=1e-12)


def test_projection_and_the_iterate_average() -> None:
    start = {"a": np.array([3.0]), "b": np.array([4.0])}
    still = {"a": np.zeros(1), "b": np.zeros(1)}
    inside = run("avg", "sgd", {"ilr": 1.0}, start, lambda *_: still, 1, 1, 1, projection=6.0)
    close(inside.weights[1], start, 0.0)
    outside = run("avg", "sgd", {"ilr": 1.0}, start, lambda *_: still, 1, 1, 1, projection=2.5)
    close(outside.weights[1], {"a": np.array([1.5]), "b": np.array([2.0])})
    moving = run("avg", "sgd", {"ilr": 1.0}, ONE, pull(1.0), 1, 4, 1, projection=2.5, average=True)
    assert [float(x["w"][0]) for x in moving.weights] == [0.0, 1.0, 2.0, 2.5, 2.5]
    assert moving.average is not None and moving.average["w"] == pytest.approx((1 + 4 + 7.5 + 10) / 10)
    assert outside.average is None


def test_a_schedule_gives_the_value_of_the_round() -> None:
    schedules = {"ilr": lambda t: 1.0 / t, "olr": lambda t: float(t), "i_u": lambda t: 0.5 * t, "o_u": lambda t: 1.25}
    settings = {"ilr": 99.0, "i_u": 99.0, "i_d": 0.0, "o_d": 0.0}
    trace = run("biclip", "biclip", settings, ONE, pull(0.75), 1, 3, 2, schedules=schedules)
    # inner: 2 steps of (1/t)·min(0.75, t/2) = 1, 0.75, 0.5; outer: t·min(that, 1.25)
    assert [float(x["w"][0]) for x in trace.weights] == pytest.approx([0.0, 1.0, 2.5, 4.0])
    assert trace.excluded == [[], [], []]


# --- The guard ------------------------------------------------------------------------------------------------------

OPTIONS = Options()


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.99), (0.0, 0.9), (0.5, 0.3), (0.99, 0.999)])
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("earlier", [0, 1, 10])
def test_adams_bound_is_above_the_worst_sequence_and_near_it(
    betas: tuple[float, float], raw: bool, earlier: int
) -> None:
    """After k steps |m|/√v is largest for gradients that grow like (β₂/β₁)**j."""
    beta1, beta2 = betas
    worst = 0.0
    for k in range(1, 20_000):
        r = beta1**2 / beta2
        total = (1 - r**k) / (1 - r) if r else 1.0
        n = k if raw else earlier + k
        part1, part2 = 1 - beta1**n, 1.0 if raw else 1 - beta2**n
        worst = max(worst, (1 - beta1) * math.sqrt(total / (1 - beta2)) / part1 * math.sqrt(part2))
    assert worst <= adam_factor(betas, raw) * (1 + 1e-12)
    assert worst == pytest.approx(adam_factor(betas, raw), rel=1e-2)


def test_the_familiar_number_is_not_a_bound_and_seven_is() -> None:
    grow = 0.999 / 0.9
    gradient: Gradient = lambda node, round, step, x: {"w": np.array([grow**step])}  # noqa: E731
    settings = {"ilr": 1.0, "ieps": 0.0}
    ends = [run("avg", "adam", settings, ONE, gradient, 1, 1, z, guard=False).weights[1]["w"][0] for z in (2999, 3000)]
    assert (1 - 0.9) / math.sqrt(1 - 0.999) < 3.2 < 7.0 < ends[0] - ends[1] < adam_factor((0.9, 0.999)) < 7.28


def test_no_bound_where_adam_has_none() -> None:
    x = {"w": np.ones(2)}
    for betas in [(0.9, 0.81), (0.9, 0.5)]:
        assert adam_factor(betas) == adam_factor(betas, raw=True) == INF
        assert bounds("adam", SETTINGS, x, 3, Options(inner_betas=betas)).hold({"w": np.array([1e300, 0.0])})
    assert bounds("biclip", {**SETTINGS, "i_u": INF}, x, 3, OPTIONS).hold({"w": np.array([1e300, 0.0])})
    assert bounds("l2clip", {**SETTINGS, "i_u": INF}, x, 3, OPTIONS) == Bounds()
    assert bounds("sgd", SETTINGS, x, 3, OPTIONS) == Bounds()
    assert not Bounds().hold({"w": np.array([0.0, INF])}) and not Bounds().hold({"w": np.array([0.0, NAN])})


PER_STEP = {
    "biclip": 0.05 * 0.8,
    "sign": 0.05,
    "adagrad": 0.05,
    "adam": 0.05 * 7.270292,
    "biclip+adam": 0.05 * 7.270292,
}


@pytest.mark.parametrize("inner", PER_STEP)
def test_bounds_by_coordinate(inner: str) -> None:
    limit = bounds(inner, {**SETTINGS, "weight_decay": 0.0}, START, 10, OPTIONS)
    for k in START:
        np.testing.assert_allclose(limit.coordinate[k], 10 * PER_STEP[inner] * 1.001, rtol=1e-5)
    inside = {k: -limit.coordinate[k] for k in START}
    outside = {**inside, "bias": inside["bias"] * np.array([1.0, 1.0001])}
    assert limit.hold(inside) and not limit.hold(outside)


@pytest.mark.parametrize("inner", ["l2clip", "biclip-l2"])
def test_bounds_in_norm(inner: str) -> None:
    settings = {**SETTINGS, "weight_decay": 0.0}
    whole = bounds(inner, settings, START, 10, OPTIONS)
    parts = bounds(inner, settings, START, 10, Options(scope="tensor"))
    assert whole.norm == {("weight", "bias", "scale"): pytest.approx(0.4 * 1.001, rel=1e-12)}
    assert parts.norm.keys() == {("weight",), ("bias",), ("scale",)}
    even = {k: np.full_like(START[k], 0.4 / 3) for k in START}  # nine coordinates
    assert whole.hold(even) and parts.hold(even)
    more = {k: 2 * even[k] if k == "bias" else even[k] for k in even}
    assert not whole.hold(more) and parts.hold(more)


def test_the_slack_in_ulps_is_what_counts_for_small_steps_on_large_weights() -> None:
    x = {"w": np.array([2.0**60, 0.0])}
    limit = bounds("sign", {"ilr": 1e-3}, x, 4, OPTIONS).coordinate["w"]
    assert limit[0] == 6 * 256.0 + 4e-3 * 1.001 and limit[1] == pytest.approx(4e-3 * 1.001, rel=1e-12)
    in_norm = bounds("l2clip", {"ilr": 1e-3, "i_u": 1.0}, x, 4, OPTIONS).norm[("w",)]
    assert in_norm == pytest.approx(6 * 256.0 + 4e-3 * 1.001, rel=1e-12)


@pytest.mark.parametrize("decay", [0.1, 1.0, 30.0])
def test_weight_decay_reaches_its_bound_and_not_beyond(decay: float) -> None:
    """Signs that always agree with the pull to zero: nothing an honest node does goes further."""
    settings = {"ilr": 0.05, "weight_decay": decay, "i_u": 1.0, "i_d": 1.0}
    start = {"w": np.array([2.0, -3.0, 0.0])}
    signs = {"w": np.array([1.0, -1.0, 1.0])}
    plain = reach(0.05, 0.05 * decay, np.abs(start["w"]), 10)
    for inner in ("sign", "biclip"):
        limit = bounds(inner, settings, start, 10, OPTIONS)
        trace = run("avg", inner, settings, start, lambda *_: signs, 1, 1, 10)
        assert trace.counted == [[0]] and limit.hold(trace.deltas[0])
        if decay <= 20:  # 1 - ilr·decay is not negative
            np.testing.assert_allclose(np.abs(trace.deltas[0]["w"]), plain, rtol=1e-12)
        np.testing.assert_allclose(limit.coordinate["w"], 1.001 * plain, rtol=1e-12)


def test_decay_beyond_one_turns_the_displacement_round() -> None:
    settings = {"ilr": 0.05, "weight_decay": 30.0}  # 1 - ilr·decay = -0.5, so that opposite signs add up
    trace = run("avg", "sign", settings, ONE, lambda i, t, k, x: {"w": np.array([(-1.0) ** k])}, 1, 1, 3)
    assert trace.excluded == [[]] and abs(trace.deltas[0]["w"][0]) == pytest.approx(0.05 * 1.75)


def test_decay_in_the_gradient_moves_no_further() -> None:
    for inner, further in [("adam", False), ("biclip+adam", False), ("adagrad", False), ("adamw", True)]:
        with_decay = bounds(inner, SETTINGS, START, 5, OPTIONS).coordinate["bias"]
        without = bounds(inner, {**SETTINGS, "weight_decay": 0.0}, START, 5, OPTIONS).coordinate["bias"]
        assert bool((with_decay != without).any()) is further


@examples(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from(sorted(set(INNERS) - {"sgd"})), st.floats(0, 3), st.integers(1, 12))
def test_honest_nodes_always_count(seed: int, inner: str, decay: float, local_steps: int) -> None:
    rng = np.random.default_rng(seed)
    start: dict[str, Array] = {
        "a": rng.standard_cauchy(4) * 10.0 ** rng.integers(-12, 12),
        "b": rng.normal(size=(2, 2)),
    }

    def gradient(node: int, round: int, step: int, x: Tensors) -> Tensors:
        return {k: rng.standard_cauchy(x[k].shape) * 10.0 ** rng.integers(-12, 12) for k in x}

    for scope in ("global", "tensor"):
        settings = {"ilr": 0.1, "i_u": 0.7, "i_d": 0.3, "ieps": 1e-8, "weight_decay": decay}
        state = "keep" if seed % 2 else "reset"
        trace = run("avg", inner, settings, start, gradient, 2, 2, local_steps, scope=scope, inner_state=state)
        assert trace.excluded == [[], []]


@pytest.mark.parametrize("send", [True, "raw", False])
def test_honest_nodes_count_with_what_they_were_sent(send: bool | str) -> None:
    settings = {"ilr": 0.1, "olr": 1e-3, "ieps": 1e-12, "oeps": 1e-8}
    trace = run("adam", "adam", settings, START, noisy, 3, 8, 6, send_preconditioner=send)
    assert trace.excluded == [[]] * 8
    if send == "raw":  # its first step is 1/√(1-β₂) times ilr, beyond what the corrected Adam could do
        first = run("adam", "adam", settings, START, noisy, 1, 1, 1, send_preconditioner="raw")
        assert np.max(np.abs(first.deltas[0]["weight"])) == pytest.approx(0.1 / math.sqrt(0.001), rel=1e-6)
