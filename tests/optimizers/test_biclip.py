"""BiClip over many steps against the rule written out in NumPy, its policies, its statistics, and what it is for."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tailopt import BiClip, Counts, count

INF, NAN = math.inf, math.nan
IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "foreach": {"foreach": True},
    "single": {"foreach": False},
}
every_implementation = pytest.mark.parametrize("impl", IMPLEMENTATIONS)


def clip(g: np.ndarray, u: Any, d: Any, dead_zone: Any = 0.0) -> np.ndarray:
    a = np.abs(g)
    moved = np.where(a <= d, np.copysign(d, g), np.where(a < u, g, np.copysign(u, g)))
    return np.where(np.isnan(g), g, np.where(a <= dead_zone, 0.0, moved))


def rule(p: np.ndarray, g: np.ndarray, group: dict[str, Any], dead_zone: Any = 0.0) -> np.ndarray:
    """p <- p * (1 - lr * weight_decay) - lr * clip(g), in float64."""
    lr, u, d = group.get("lr", 0.01), group.get("u", 1.0), group.get("d", 0.01)
    c = clip(-g if group.get("maximize") else g, u, d, dead_zone)
    return p * (1 - lr * group.get("weight_decay", 0.0)) - lr * c


def fresh(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 0) -> list[nn.Parameter]:
    gen = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=gen, dtype=torch.float64).to(dtype)) for s in shapes]


def gradients(params: list[nn.Parameter], seed: int) -> list[np.ndarray]:
    """Of many magnitudes, with zeros of both signs and infinities; what was given, as float64."""
    gen = torch.Generator().manual_seed(seed)
    given = []
    for p in params:
        g = torch.randn(p.shape, generator=gen, dtype=torch.float64)
        g *= 10.0 ** torch.randint(-4, 2, p.shape, generator=gen)
        pick = torch.rand(p.shape, generator=gen)
        g = torch.where(pick < 0.05, 0.0, torch.where(pick < 0.1, -0.0, torch.where(pick < 0.12, INF, g)))
        p.grad = g.to(p.dtype)
        given.append(p.grad.double().numpy().copy())
    return given


def arrays(params: list[nn.Parameter]) -> list[np.ndarray]:
    return [p.detach().double().numpy().copy() for p in params]


def near(params: list[nn.Parameter], want: list[np.ndarray], tolerance: float = 1e-12) -> None:
    for p, w in zip(params, want, strict=True):
        np.testing.assert_allclose(p.detach().double().numpy(), w, rtol=tolerance, atol=tolerance)


# --- trajectories ---------------------------------------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {"lr": 0.1, "u": 1.0, "d": 0.01},
    {"lr": 0.1, "u": 0.5, "d": 0.5},
    {"lr": 0.01, "u": 3.0, "d": 0.0},
    {"lr": 0.1, "u": 1.0, "d": 0.01, "weight_decay": 0.3},
    {"lr": 0.1, "u": 1.0, "d": 0.01, "weight_decay": 0.3, "maximize": True},
    {"lr": 0.1, "u": 1.0, "d": 0.01, "dead_zone": 0.001},
    {"lr": 0.1, "u": 1.0, "d": 0.01, "dead_zone": 0.1, "maximize": True},
    {"lr": 0.0, "u": 1.0, "d": 0.01, "weight_decay": 0.3},
]


@every_implementation
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_thirty_steps(options: dict, impl: str) -> None:
    params = fresh((7, 5), (3,), (), (1, 2, 3))
    want = arrays(params)
    opt = BiClip(params, **options, **IMPLEMENTATIONS[impl])
    for i in range(30):
        given_g = gradients(params, i)
        opt.step()
        want = [rule(p, g, options, options.get("dead_zone", 0.0)) for p, g in zip(want, given_g, strict=True)]
        near(params, want)


@every_implementation
def test_groups_with_their_own_numbers(impl: str) -> None:
    shapes = [(4, 3), (5,), (2, 2), (6,)]
    params = fresh(*shapes)
    groups = [
        {"params": params[:2]},
        {"params": params[2:3], "lr": 0.02, "u": 5.0, "d": 0.5, "weight_decay": 0.1},
        {"params": params[3:], "maximize": True, "dead_zone": 0.2},
    ]
    common = {"lr": 0.1, "u": 0.7, "d": 0.03}
    opt = BiClip(groups, **common, **IMPLEMENTATIONS[impl])
    of = [{**common, **groups[k]} for k in (0, 0, 1, 2)]
    want = arrays(params)
    for i in range(20):
        given_g = gradients(params, i)
        if i == 10:  # a parameter without gradient is left alone, decay included
            params[2].grad = None
        opt.step()
        for k, g in enumerate(given_g):
            if not (i == 10 and k == 2):
                want[k] = rule(want[k], g, of[k], of[k].get("dead_zone", 0.0))
        near(params, want)


@every_implementation
def test_schedules_of_everything(impl: str) -> None:
    """lr by a torch scheduler; thresholds and decay by hand: numbers in groups are read at every step."""
    params = fresh((8, 3))
    want = arrays(params)
    opt = BiClip(params, lr=0.2, u=1.0, d=0.1, weight_decay=0.1, **IMPLEMENTATIONS[impl])
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 0.9**t)
    for i in range(25):
        now = {"u": 1.0 / (1 + i), "d": 0.1 / (1 + i) ** 2, "weight_decay": 0.1 * (i % 3), "lr": 0.2 * 0.9**i}
        opt.param_groups[0].update({k: v for k, v in now.items() if k != "lr"})
        given_g = gradients(params, i)
        opt.step()
        schedule.step()
        want = [rule(p, g, now) for p, g in zip(want, given_g, strict=True)]
        near(params, want)


@every_implementation
@pytest.mark.filterwarnings("ignore:BiClip's thresholds do nothing")  # some of these numbers do
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=4),
    st.floats(0, 1),
    st.floats(0, 2),
    st.floats(0, 1),
    st.floats(0, 1),
    st.sampled_from([0.0, 0.1]),
    st.booleans(),
)
def test_any_shapes_and_numbers(impl: str, shapes, lr, u, share, zone, decay, maximize) -> None:
    params = fresh(*shapes)
    want = arrays(params)
    options = {"lr": lr, "u": u, "d": u * share, "weight_decay": decay, "maximize": maximize}
    opt = BiClip(params, **options, dead_zone=u * zone, **IMPLEMENTATIONS[impl])
    for i in range(3):
        given_g = gradients(params, i)
        opt.step()
        want = [rule(p, g, options, u * zone) for p, g in zip(want, given_g, strict=True)]
    near(params, want)


def test_limits_are_other_optimizers() -> None:
    ours, theirs = fresh((6, 4), (3,)), fresh((6, 4), (3,))
    a = BiClip(ours, lr=0.1, u=INF, d=0.0)
    b = torch.optim.SGD(theirs, lr=0.1)
    for i in range(5):
        for params, opt in ((ours, a), (theirs, b)):
            gen = torch.Generator().manual_seed(i)
            for p in params:
                p.grad = torch.randn(p.shape, generator=gen, dtype=p.dtype)
            opt.step()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q), "d = 0, u = inf is SGD"
    p = fresh((50,))[0]
    before = p.detach().clone()
    p.grad = torch.randn(50, dtype=torch.float64)
    BiClip([p], lr=0.5, u=0.25, d=0.25).step()
    assert torch.equal(p, before - 0.125 * p.grad.sign()), "d = u is sign descent"


def test_scaling_gradients_and_thresholds_together_scales_the_step() -> None:
    for scale in (2.0**-30, 2.0**40):
        a, b = fresh((200,)), fresh((200,))
        gradients(a, 1)
        b[0].grad = a[0].grad * scale
        BiClip(a, lr=0.5, u=1.0, d=0.125, dead_zone=0.0625).step()
        BiClip(b, lr=0.5 / scale, u=scale, d=0.125 * scale, dead_zone=0.0625 * scale).step()
        assert torch.equal(a[0], b[0])


@every_implementation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_numbers_beyond_the_type_are_infinities(impl: str, dtype: torch.dtype) -> None:
    """1e300 is rounded to the type of the arithmetic like any other number."""
    for u in (1e300, 1e39, INF):
        p = nn.Parameter(torch.zeros(3, dtype=dtype))
        p.grad = torch.tensor([100.0, -0.25, 0.0], dtype=dtype)
        BiClip([p], lr=0.5, u=u, d=0.5, **IMPLEMENTATIONS[impl]).step()
        assert p.tolist() == [-50.0, 0.25, 0.0]
        assert count([p.grad], u, 0.5)[0].above == 0


# --- thresholds by row and by column --------------------------------------------------------------------------------


@every_implementation
@pytest.mark.parametrize("shape", [(), (1,), (5,), (1, 5), (4, 1), (4, 5)], ids=str)
@pytest.mark.parametrize("of_thresholds", [torch.float32, torch.float64], ids=str)
def test_thresholds_that_broadcast(impl: str, shape: tuple[int, ...], of_thresholds: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(0)
    d = torch.rand(shape, generator=gen).to(of_thresholds)
    u = d + torch.rand(shape, generator=gen).to(of_thresholds)
    params = fresh((4, 5))
    want = arrays(params)
    opt = BiClip(params, lr=0.1, u=u, d=d, weight_decay=0.1, **IMPLEMENTATIONS[impl])
    numbers = {"lr": 0.1, "u": u.double().numpy(), "d": d.double().numpy(), "weight_decay": 0.1}
    for i in range(5):
        given_g = gradients(params, i)
        opt.step()
        want = [rule(p, g, numbers) for p, g in zip(want, given_g, strict=True)]
    near(params, want)


def test_a_threshold_of_another_shape_is_refused_before_anything_moved() -> None:
    params = fresh((4, 5), (3,))
    with pytest.raises(ValueError, match=r"u of shape \(4, 1\) does not broadcast against .* of shape \(3,\)"):
        BiClip(params, u=torch.ones(4, 1))
    with pytest.raises(ValueError, match=r"d of shape \(2, 4, 5\) does not broadcast"):
        BiClip(params[:1], d=torch.zeros(2, 4, 5))
    opt = BiClip([{"params": params[:1]}, {"params": params[1:]}], u=1.0, d=0.1)
    before = arrays(params)
    gradients(params, 0)
    opt.param_groups[1]["u"] = torch.ones(5)
    with pytest.raises(ValueError, match="does not broadcast"):
        opt.step()
    near(params, before, 0.0)


# --- dead zones -----------------------------------------------------------------------------------------------------

EPS = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.bfloat16: 2.0**-23, torch.float16: 2.0**-23}


@every_implementation
@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("maximize", [False, True])
def test_the_automatic_dead_zone(impl: str, dtype: torch.dtype, maximize: bool) -> None:
    """4 eps max|g| over all groups, those with other dead zones too; at it nothing moves, above it everything."""
    top = 8.0
    zone = 4 * EPS[dtype] * top
    if dtype == torch.float16:
        top, zone = 8192.0, 4 * EPS[dtype] * 8192.0  # 2^-8: a number of fp16
    a, b = (nn.Parameter(torch.zeros(4, dtype=dtype)) for _ in range(2))
    a.grad = torch.tensor([zone, -zone * 1.0625, zone / 2, 0.0], dtype=dtype)
    b.grad = torch.tensor([-top, zone / 2, 1.0, 0.0], dtype=dtype)
    groups = [{"params": [a], "dead_zone": "auto"}, {"params": [b], "d": 0.25}]
    BiClip(groups, lr=1.0, u=0.5, d=0.125, maximize=maximize, **IMPLEMENTATIONS[impl]).step()
    sign = -1 if maximize else 1
    assert a.tolist() == [0.0, sign * 0.125, 0.0, 0.0]
    assert b.tolist() == [sign * 0.5, -sign * 0.25, -sign * 0.5, 0.0]


def test_the_automatic_dead_zone_is_that_of_each_type() -> None:
    """One maximum, two precisions."""
    g = 2.0**-30
    params = [nn.Parameter(torch.zeros(2, dtype=t)) for t in (torch.float32, torch.float64, torch.bfloat16)]
    for p in params:
        p.grad = torch.tensor([1.0 if p.dtype == torch.float64 else 0.0, g], dtype=p.dtype)
    BiClip(params, lr=1.0, u=1.0, d=0.5, dead_zone="auto").step()
    assert [p.tolist()[1] for p in params] == [0.0, -0.5, 0.0]


@every_implementation
@pytest.mark.parametrize("shaped", [False, True], ids=["number", "rows"])
def test_the_automatic_dead_zone_is_capped_at_u(impl: str, shaped: bool) -> None:
    """Then it swallows everything up to u itself."""
    p = nn.Parameter(torch.zeros(3, 1))
    p.grad = torch.tensor([[1e6], [1e-3], [2e-3]])
    u: Any = torch.tensor([[1e-3], [1e-3], [1e-3]]) if shaped else 1e-3
    BiClip([p], lr=1.0, u=u, d=1e-4, dead_zone="auto", **IMPLEMENTATIONS[impl]).step()
    zone = 4 * 2.0**-23 * 1e6  # 0.48, above u
    assert zone > 1e-3
    assert p.flatten().tolist() == [pytest.approx(-1e-3), 0.0, pytest.approx(-1e-3)]


def test_the_automatic_dead_zone_moves_with_the_gradients() -> None:
    p = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    opt = BiClip([p], lr=1.0, u=1.0, d=0.5, dead_zone="auto")
    for top, moves in ((1.0, True), (2.0**20, False), (2.0**-20, True)):
        before = p[1].item()
        p.grad = torch.tensor([top, 2.0**-40], dtype=torch.float64)
        opt.step()
        assert (p[1].item() != before) == moves, top


def test_a_bias_before_batch_norm_stays_where_it_is_only_with_a_dead_zone() -> None:
    """Its true gradient is zero; without a dead zone it walks by lr * d a step, driven by rounding noise."""
    gen = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 8, generator=gen), torch.randn(64, 1, generator=gen)

    def drift(dead_zone: Any) -> float:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))
        start = model[0].bias.detach().clone()
        opt = BiClip(model.parameters(), lr=0.01, u=1.0, d=0.1, dead_zone=dead_zone)
        losses = []
        for _ in range(60):
            opt.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            losses.append(loss.item())
            opt.step()
        assert losses[-1] < 0.8 * losses[0], "and the rest learns"
        return (model[0].bias - start).abs().max().item()

    without = drift(0.0)
    assert without >= 5 * 0.01 * 0.1, "several steps of lr * d away"
    assert drift("auto") == 0.0
    assert drift(1e-6) == 0.0


# --- gradients that are not finite ----------------------------------------------------------------------------------


def three(bad: float) -> tuple[list[nn.Parameter], list[np.ndarray]]:
    params = [nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(3)]
    for p in params:
        p.grad = torch.tensor([0.25, -9.0], dtype=torch.float64)
    params[1].grad[1] = bad
    return params, arrays(params)


@every_implementation
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_propagate(impl: str, bad: float) -> None:
    params, _ = three(bad)
    BiClip(params, lr=1.0, u=0.5, d=0.1, **IMPLEMENTATIONS[impl]).step()
    assert params[0].tolist() == params[2].tolist() == [0.75, 1.5]
    assert params[1][0].item() == 0.75, "the other elements step"
    assert math.isnan(params[1][1].item()) if math.isnan(bad) else params[1][1].item() == 1 - math.copysign(0.5, bad)


@every_implementation
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_skip(impl: str, bad: float) -> None:
    params, _ = three(bad)
    opt = BiClip(
        [{"params": params[:2]}, {"params": params[2:]}],
        lr=0.5,
        u=0.5,
        d=0.1,
        weight_decay=0.5,
        nonfinite="skip",
        **IMPLEMENTATIONS[impl],
    )
    for _ in range(3):
        opt.step()
    assert params[1].tolist() == [1.0, 1.0], "left as it is, decay included"
    want = np.ones(2)
    for _ in range(3):
        want = rule(want, np.array([0.25, -9.0]), {"lr": 0.5, "u": 0.5, "d": 0.1, "weight_decay": 0.5})
    near([params[0], params[2]], [want, want])
    counts = opt.statistics()
    assert [counts[i].skipped for i in range(3)] == [0, 3, 0]
    assert [c.skipped for c in opt.statistics().values()] == [0, 0, 0], "and it starts anew"
    params[1].grad[1] = -9.0
    opt.step()
    assert params[1][0].item() != 1.0, "a finite gradient moves it again"


def test_skip_and_statistics() -> None:
    params, _ = three(NAN)
    opt = BiClip(params, lr=0.5, u=0.5, d=0.3, nonfinite="skip", statistics=True)
    opt.step()
    opt.step()
    counts = opt.statistics()
    assert counts[0] == counts[2] and (counts[0].elements, counts[0].below, counts[0].above) == (4, 2, 2)
    assert counts[1].skipped == 2
    assert opt.statistics(by="group")[0] == Counts() + Counts(), "taken"


@every_implementation
@pytest.mark.parametrize("bad", [NAN, INF])
def test_raise_moves_nothing(impl: str, bad: float) -> None:
    params, before = three(bad)
    named = [("a", params[0]), ("b", params[1]), ("c", params[2])]
    groups = [{"params": named[:1], "nonfinite": "propagate"}, {"params": named[1:]}]
    opt = BiClip(groups, lr=1.0, u=0.5, d=0.1, weight_decay=0.1, nonfinite="raise", **IMPLEMENTATIONS[impl])
    with pytest.raises(FloatingPointError, match=r"'b': 1 of 2.*No parameter was moved") as raised:
        opt.step()
    assert "'a'" not in str(raised.value) and "'c'" not in str(raised.value)
    near(params, before, 0.0)
    params[1].grad[1] = -9.0
    opt.step()
    assert params[1].tolist() == pytest.approx([0.9 - 0.25, 0.9 + 0.5])


@every_implementation
def test_policies_are_those_of_each_group(impl: str) -> None:
    params, _ = three(NAN)
    params[0].grad[0] = NAN
    groups = [{"params": params[:1], "nonfinite": "propagate"}, {"params": params[1:], "nonfinite": "skip"}]
    BiClip(groups, lr=1.0, u=0.5, d=0.1, **IMPLEMENTATIONS[impl]).step()
    assert math.isnan(params[0][0].item()) and params[0][1].item() == 1.5
    assert params[1].tolist() == [1.0, 1.0]
    assert params[2].tolist() == [0.75, 1.5]


# --- thresholds that are wrong at the step --------------------------------------------------------------------------


@every_implementation
@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"d": 2.0}, r"d=2\.0 exceeds u=1\.0"),
        ({"u": 0.05}, r"d=0\.1 exceeds u=0\.05"),
        ({"d": -1.0}, r"d=-1\.0"),
        ({"u": NAN}, "u=nan"),
        ({"dead_zone": 1.5}, r"dead_zone=1\.5 exceeds u=1\.0"),
        ({"d": torch.tensor(2.0)}, "need 0 <= d <= u"),
        ({"u": torch.full((2,), 0.05)}, "need 0 <= d <= u"),
        ({"lr": -1.0}, "Invalid learning rate"),
        ({"weight_decay": -1.0}, "Invalid weight_decay"),
        ({"nonfinite": "ignore"}, "Invalid nonfinite policy: 'ignore'"),
        ({"dead_zone": "automatic"}, "Invalid dead_zone: 'automatic'"),
    ],
    ids=str,
)
@pytest.mark.parametrize("when", ["before the step", "in the closure"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_bad_group_is_found_before_anything_moved(impl: str, bad: dict, words: str, when: str, which: int) -> None:
    params, before = three(1.0)
    opt = BiClip([{"params": params[:1]}, {"params": params[1:]}], lr=0.5, u=1.0, d=0.1, **IMPLEMENTATIONS[impl])
    good = dict(opt.param_groups[which])

    def closure() -> float:
        if when == "in the closure":
            opt.param_groups[which].update(bad)
        return 1.0

    if when == "before the step":
        opt.param_groups[which].update(bad)
    with pytest.raises(ValueError, match=words):
        opt.step(closure)
    near(params, before, 0.0)
    opt.param_groups[which].update({k: good[k] for k in bad})
    opt.step()
    assert all(not np.array_equal(p, q) for p, q in zip(arrays(params), before, strict=True))


def test_a_schedule_that_crosses_is_caught_in_time() -> None:
    p = fresh((3,))[0]
    opt = BiClip([p], lr=0.1, u=1.0, d=0.1)
    for i in range(10):
        p.grad = torch.ones(3, dtype=torch.float64)
        opt.param_groups[0]["u"] = 0.5**i
        before = p.detach().clone()
        if opt.param_groups[0]["u"] >= 0.1:
            opt.step()
            assert not torch.equal(p, before)
        else:
            with pytest.raises(ValueError, match=r"d=0\.1 exceeds u=0\.0625.*Swap them, or lower d"):
                opt.step()
            assert torch.equal(p, before)
            return
    pytest.fail("the schedule never crossed")


# --- statistics -----------------------------------------------------------------------------------------------------


def same_counts(got: Counts, want: list[Counts]) -> None:
    total = sum(want, Counts())
    assert (got.elements, got.zero, got.below, got.above, got.nonfinite, got.largest, got.octaves) == (
        total.elements,
        total.zero,
        total.below,
        total.above,
        total.nonfinite,
        total.largest,
        total.octaves,
    )
    assert got.squares == pytest.approx(total.squares, rel=1e-12)
    assert got.logs == pytest.approx(total.logs, rel=1e-9, abs=1e-9)


@every_implementation
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_statistics_by_tensor_and_by_group(impl: str, dtype: torch.dtype) -> None:
    params = fresh((40, 5), (30,), (7,), dtype=dtype)
    groups = [{"params": params[:2]}, {"params": params[2:], "u": 2.0, "d": 0.5, "dead_zone": 0.1}]
    opt = BiClip(groups, lr=0.1, u=1.0, d=0.1, statistics=True, **IMPLEMENTATIONS[impl])
    numbers = [(1.0, 0.1, 0.0), (1.0, 0.1, 0.0), (2.0, 0.5, 0.1)]
    for by in ("tensor", "group"):
        seen: list[list[Counts]] = [[], [], []]
        for i in range(3):
            gradients(params, i)
            for k, p in enumerate(params):
                seen[k].append(count([p.grad.clone()], *numbers[k])[0])
            opt.step()
        got = opt.statistics(by=by)
        wanted = seen if by == "tensor" else [seen[0] + seen[1], seen[2]]
        assert list(got) == list(range(len(wanted)))
        for k, want in enumerate(wanted):
            same_counts(got[k], want)
        assert all(c == Counts() for c in opt.statistics(by=by).values()), "and they start anew"


@every_implementation
def test_counting_changes_no_bit(impl: str) -> None:
    for mode in ("counts", True, "complete"):
        a, b = fresh((70, 3), (1001,), dtype=torch.float32), fresh((70, 3), (1001,), dtype=torch.float32)
        one, two = (
            BiClip(p, lr=0.1, u=1.0, d=0.1, weight_decay=0.1, dead_zone=0.01, statistics=s, **IMPLEMENTATIONS[impl])
            for p, s in ((a, False), (b, mode))
        )
        for i in range(3):
            gradients(a, i)
            gradients(b, i)
            one.step()
            two.step()
        assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def test_names_of_parameters_are_the_keys() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    opt = BiClip(model.named_parameters(), u=1.0, d=0.1, statistics=True)
    model(torch.ones(4, 3)).sum().backward()
    opt.step()
    got = opt.statistics()
    assert list(got) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert [c.elements for c in got.values()] == [6, 2, 2, 1]
    opt.step()
    assert opt.statistics(by="group")[0].elements == 11
    with pytest.raises(ValueError, match=r"Invalid by: 'layer'"):
        opt.statistics(by="layer")


def test_statistics_of_parameters_without_gradient_and_of_added_groups() -> None:
    params = fresh((3,), (4,), (5,))
    opt = BiClip(params[:2], lr=0.1, u=1.0, d=0.1, statistics=True)
    params[0].grad = torch.ones(3, dtype=torch.float64)
    opt.step()
    opt.add_param_group({"params": params[2:]})
    params[2].grad = torch.zeros(5, dtype=torch.float64)
    opt.step()
    got = opt.statistics()
    assert [c.elements for c in got.values()] == [6, 0, 5]
    assert (got[0].above, got[2].zero) == (6, 5)
    with pytest.raises(RuntimeError, match=r"Nothing was counted: .*statistics=False\. Build it with statistics=True"):
        BiClip(params, u=1.0).statistics()


def test_statistics_see_the_gradient_and_not_its_negative_and_the_automatic_zone() -> None:
    p = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    opt = BiClip([p], lr=0.1, u=1.0, d=0.1, dead_zone="auto", maximize=True, statistics="counts")
    p.grad = torch.tensor([2.0**40, 2.0**-11, 2.0**-9, 0.0], dtype=torch.float64)  # 4 eps max is 2^-10
    opt.step()
    got = opt.statistics()[0]
    assert (got.zero, got.below, got.above, got.largest, got.octaves) == (2, 1, 1, 2.0**40, ())


def test_a_skipped_scaler_step_counts_nothing() -> None:
    for fused in (False, True):
        p = nn.Parameter(torch.ones(3))
        opt = BiClip([p], lr=0.1, u=1.0, d=0.1, statistics=True, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale((p * torch.tensor([1.0, INF, 1.0])).sum()).backward()
        scaler.step(opt)
        scaler.update()
        assert opt.statistics()[0] == Counts() and p.tolist() == [1.0] * 3


def test_a_copy_counts_for_itself() -> None:
    p = nn.Parameter(torch.ones(3))
    opt = BiClip([p], u=1.0, d=0.1, statistics=True)
    p.grad = torch.ones(3)
    opt.step()
    twin = copy.deepcopy(opt)
    for q in twin.param_groups[0]["params"]:
        q.grad = torch.ones(3)
    twin.step()
    assert twin.statistics()[0].elements == 3
    assert opt.statistics()[0].elements == 3


# --- sparse and complex gradients -----------------------------------------------------------------------------------


def pieces(dtype: torch.dtype = torch.float64) -> Tensor:
    """Row 1 in two pieces that cancel to (0.5, -0.25); row 2 absent."""
    values = torch.tensor([[3.0, -4.0], [10.0, 0.25], [-9.5, -0.5], [0.01, 0.0]]).to(dtype)
    return torch.sparse_coo_tensor(torch.tensor([[0, 1, 1, 3]]), values, (4, 2), check_invariants=True)


ROWS = torch.tensor([[0.25], [1.0], [2.0], [3.0]], dtype=torch.float64)


@every_implementation
@pytest.mark.parametrize(
    "u", [1.0, ROWS, torch.tensor([0.25, 0.3], dtype=torch.float64)], ids=["number", "rows", "columns"]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_sparse_gradients(impl: str, u: Any, dtype: torch.dtype) -> None:
    """Summed, then clipped; decay is dense. Counted are the values that are there."""
    (p,) = fresh((4, 2), dtype=dtype)
    want = arrays([p])[0]
    options = {"lr": 0.5, "u": u, "d": 0.125, "weight_decay": 0.1, "maximize": True}
    opt = BiClip([p], **options, statistics=True, **IMPLEMENTATIONS[impl])
    dense = pieces().to_dense().numpy()
    numbers = {**options, "u": u.numpy() if isinstance(u, Tensor) else u}
    for _ in range(3):
        p.grad = pieces(dtype)
        opt.step()
        want = rule(want, dense, numbers)
    near([p], [want], {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype])
    got = opt.statistics()[0]
    full = np.broadcast_to(numbers["u"], (4, 2))[[0, 1, 3]]
    values = np.abs(dense[[0, 1, 3]])
    assert (got.elements, got.zero, got.below) == (18, 3, 3)
    assert got.above == 3 * int(((values >= full) & (values > 0.125)).sum())


@every_implementation
@pytest.mark.parametrize(
    "u", [1.0, ROWS, torch.tensor([0.25, 0.3], dtype=torch.float64)], ids=["number", "rows", "columns"]
)
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("conj", [False, True], ids=["", "conj"])
def test_complex_gradients(impl: str, u: Any, sparse: bool, conj: bool) -> None:
    gen = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(4, 2, generator=gen, dtype=torch.complex128))
    g = torch.randn(4, 2, generator=gen, dtype=torch.complex128)
    g[2] = 0
    options = {"lr": 0.5, "u": u, "d": 0.125, "weight_decay": 0.1}
    opt = BiClip([p], **options, statistics=True, **IMPLEMENTATIONS[impl])
    numbers = {**options, "u": u.numpy() if isinstance(u, Tensor) else u}
    start, values = p.detach().numpy().copy(), (g.conj() if conj else g).resolve_conj().numpy()
    p.grad = g.to_sparse(1) if sparse and not conj else g.conj().to_sparse(1) if sparse else g.conj() if conj else g
    opt.step()
    after = p.detach().numpy()
    np.testing.assert_allclose(after.real, rule(start.real, values.real, numbers), rtol=1e-12)
    np.testing.assert_allclose(after.imag, rule(start.imag, values.imag, numbers), rtol=1e-12)
    got = opt.statistics()[0]
    assert (got.elements, got.zero) == ((12, 0) if sparse else (16, 4))


def test_a_lazily_negated_gradient() -> None:
    """Its memory holds the negative: a kernel that reads memory would go uphill."""
    for impl in IMPLEMENTATIONS.values():
        p = nn.Parameter(torch.zeros(3))
        p.grad = torch._neg_view(torch.tensor([1.0, -2.0, 0.25]))
        BiClip([p], lr=1.0, u=1.0, d=0.5, **impl).step()
        assert p.tolist() == [1.0, -1.0, 0.5]
        z = torch.tensor([3.0 + 4.0j])
        p = nn.Parameter(torch.zeros(1))
        p.grad = z.conj().imag
        BiClip([p], lr=1.0, u=1.0, d=0.5, **impl).step()
        assert p.tolist() == [1.0]


# --- shards ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@every_implementation
@pytest.mark.parametrize(
    "u",
    [1.0, torch.tensor([[0.25], [1.0], [2.0], [3.0]]), torch.tensor([0.25, 0.3])],
    ids=["number", "rows", "columns"],
)
@pytest.mark.parametrize("dead_zone", [0.0, "auto"])
def test_a_sharded_parameter_steps_and_counts_like_a_whole_one(mesh, impl: str, u: Any, dead_zone: Any) -> None:
    options = {"lr": 0.5, "u": u, "d": 0.125, "weight_decay": 0.1, "dead_zone": dead_zone, "statistics": True}
    (plain,) = fresh((4, 2), dtype=torch.float32)
    gradients([plain], 0)
    for placement in (Shard(0), Shard(1), Replicate()):
        p = nn.Parameter(DTensor.from_local(plain.detach().clone(), mesh, [placement]))
        p.grad = DTensor.from_local(plain.grad.clone(), mesh, [placement])
        twin = nn.Parameter(plain.detach().clone())
        twin.grad = plain.grad.clone()
        a, b = BiClip([p], **options, **IMPLEMENTATIONS[impl]), BiClip([twin], **options, **IMPLEMENTATIONS[impl])
        a.step()
        b.step()
        assert torch.equal(p.to_local(), twin)  # type: ignore[attr-defined]
        same_counts(a.statistics()[0], [b.statistics()[0]])


# --- precision ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_one_rounding_at_the_store(dtype: torch.dtype) -> None:
    """The float64 rule on the same numbers, rounded once, up to what fp32 arithmetic can move across a midpoint."""
    (p,) = fresh((500,), dtype=dtype)
    want = arrays([p])[0]
    options = {"lr": 0.0625, "u": 1.0, "d": 0.125, "weight_decay": 0.25}
    given_g = gradients([p], 0)[0]
    BiClip([p], **options).step()
    exact = torch.from_numpy(rule(want, given_g, options))
    off = (p.detach().double() - exact).abs()
    assert (off <= 0.5 * torch.finfo(dtype).eps * exact.abs() + 2 * 2.0**-24 * 4).all()


def test_bf16_parameters_stall_where_the_step_is_under_half_a_unit() -> None:
    """A fact to know, not a fault: below 1 bf16 has a number every 2^-8, and a step under 2^-9 is rounded away."""
    p, q, r = (nn.Parameter(torch.ones(4, dtype=t)) for t in (torch.bfloat16, torch.float32, torch.bfloat16))
    small, enough = {"lr": 2.0**-10, "u": 1.0, "d": 0.5}, {"lr": 2.0**-8, "u": 1.0, "d": 1.0}
    opts = [BiClip([p], **small), BiClip([q], **small), BiClip([r], **enough)]
    for _ in range(100):
        for t in (p, q, r):
            t.grad = torch.ones_like(t)
        for opt in opts:
            opt.step()
    assert p.tolist() == [1.0] * 4
    assert q.tolist() == pytest.approx([1 - 100 * 2.0**-10] * 4)
    assert r.tolist() == pytest.approx([1 - 100 * 2.0**-8] * 4)


def test_a_tiny_gradient_moves_a_parameter_by_lr_d() -> None:
    """What d is for: a gradient far below the parameter's precision still counts."""
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.tensor([1e-30, -1e-45, 0.0])
    BiClip([p], lr=0.5, u=1.0, d=0.25).step()
    assert p.tolist() == [0.875, 1.125, 1.0]


# --- it trains ------------------------------------------------------------------------------------------------------


@every_implementation
@pytest.mark.parametrize("settings", [{}, {"lr": 3e-3}, {"u": 1.0}], ids=str)
def test_the_defaults_train_a_small_model(settings: dict[str, float], impl: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        x = torch.randn(128, 8)
        y = x @ torch.randn(8, 1) + 0.1 * torch.randn(128, 1)
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    opt = BiClip(model.parameters(), **settings, **IMPLEMENTATIONS[impl])
    losses = []
    for _ in range(400):
        opt.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_heavy_tails_do_not_throw_it_off() -> None:
    """Gradients with infinite variance (Cauchy noise): SGD is thrown far away, BiClip stays near the solution."""

    def distance(opt_of: Any) -> float:
        gen = torch.Generator().manual_seed(0)
        p = nn.Parameter(torch.full((50,), 2.0))
        opt = opt_of([p])
        for _ in range(500):
            noise = torch.tan(math.pi * (torch.rand(50, generator=gen) - 0.5))
            p.grad = p.detach() + noise
            opt.step()
        return p.detach().abs().max().item()

    assert distance(lambda params: BiClip(params, lr=0.02, u=1.0, d=0.0)) < 1.0
    assert distance(lambda params: torch.optim.SGD(params, lr=0.02)) > 10.0
