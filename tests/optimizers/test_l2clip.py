"""L2Clip over many steps against the rule written out in NumPy: scopes, groups, types, policies."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tailopt import Counts, L2Clip

INF, NAN = math.inf, math.nan
IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "foreach": {"foreach": True},
    "single": {"foreach": False},
}
every_implementation = pytest.mark.parametrize("impl", IMPLEMENTATIONS)
every_scope = pytest.mark.parametrize("scope", ["global", "group", "tensor"])


def factor(n: float, u: float, d: float) -> float:
    """What a gradient of norm n is multiplied by; a zero gradient stays zero whatever it is."""
    if math.isnan(n) or math.isinf(n):
        return NAN
    if n == 0:
        return 0.0
    if n <= d:
        return d / n
    if n >= u:
        return u / n
    return 1.0


def norm(grads: list[np.ndarray]) -> float:
    return math.hypot(*(float(v) for g in grads for v in np.abs(g).flat))  # neither overflows nor underflows


class Rule:
    """p <- p * (1 - lr * weight_decay) - lr * g * factor, in float64. A group is a dict with `of`: its positions."""

    def __init__(self, params: list[nn.Parameter], groups: list[dict[str, Any]]) -> None:
        self.values, self.groups = arrays(params), groups

    def step(self, grads: list[np.ndarray | None]) -> list[np.ndarray]:
        everywhere = [g for group in self.groups if group["scope"] == "global" for g in self.inside(group, grads)]
        for group in self.groups:
            for i in group["of"]:
                g = grads[i]
                if g is None:
                    continue
                scope = {"global": everywhere, "group": self.inside(group, grads), "tensor": [g]}[group["scope"]]
                c = g * factor(norm(scope), group["u"], group["d"]) * (-1 if group.get("maximize") else 1)
                self.values[i] = self.values[i] * (1 - group["lr"] * group.get("weight_decay", 0.0)) - group["lr"] * c
        return self.values

    @staticmethod
    def inside(group: dict[str, Any], grads: list[np.ndarray | None]) -> list[np.ndarray]:
        return [g for i in group["of"] if (g := grads[i]) is not None]


def fresh(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 0) -> list[nn.Parameter]:
    gen = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=gen, dtype=torch.float64).to(dtype)) for s in shapes]


def arrays(params: list[nn.Parameter]) -> list[np.ndarray]:
    return [p.detach().to(torch.complex128 if p.is_complex() else torch.float64).numpy().copy() for p in params]


def gradients(params: list[nn.Parameter], seed: int, scale: float = 1.0) -> list[np.ndarray]:
    gen = torch.Generator().manual_seed(seed)
    given = []
    for p in params:
        g = scale * torch.randn(p.shape, generator=gen, dtype=torch.float64)
        p.grad = torch.where(torch.rand(p.shape, generator=gen) < 0.1, -0.0, g).to(p.dtype)
        given.append(p.grad.double().numpy().copy())
    return given


def near(params: list[nn.Parameter], want: list[np.ndarray], tolerance: float = 1e-12) -> None:
    for got, w in zip(arrays(params), want, strict=True):
        np.testing.assert_allclose(got, w, rtol=tolerance, atol=tolerance)


SCALES = [1.0, 1e-3, 1e3, 0.0, 1e-30, 1e-170, 1e200, 0.3]  # norms between, below and above the thresholds, and none


# --- trajectories ---------------------------------------------------------------------------------------------------


@every_implementation
@every_scope
@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.1, "u": 1.0, "d": 0.0},
        {"lr": 0.1, "u": 5.0, "d": 0.5},
        {"lr": 0.1, "u": 1 / 3, "d": 1 / 3},
        {"lr": 0.1, "u": INF, "d": 0.0},
        {"lr": 0.1, "u": INF, "d": 0.1},
        {"lr": 0.1, "u": 1e-4, "d": 1e-5, "weight_decay": 0.3},
        {"lr": 0.1, "u": 5.0, "d": 0.5, "maximize": True, "weight_decay": 0.3},
        {"lr": 0.1, "u": 0.0, "d": 0.0, "weight_decay": 0.3},
    ],
    ids=str,
)
def test_many_steps(options: dict, scope: str, impl: str) -> None:
    params = fresh((4, 5), (3,), (), (0,))
    rule = Rule(params, [{"of": [0, 1, 2, 3], "scope": scope, **options}])
    opt = L2Clip(params, scope=scope, **options, **IMPLEMENTATIONS[impl])
    for i, scale in enumerate(SCALES):
        if options["u"] == INF and scale > 1e100:
            continue
        given_g = gradients(params, i, min(scale, 1e100))
        opt.step()
        near(params, rule.step(given_g))


@every_implementation
def test_groups_of_every_scope_together(impl: str) -> None:
    """The global norm is over the global groups alone; each of them applies its own thresholds to it."""
    params = fresh((4, 3), (5,), (2, 2), (6,), (3,), (1,), (2,))
    groups: list[dict[str, Any]] = [
        {"of": [0, 1], "scope": "global", "lr": 0.1, "u": 2.0, "d": 0.1},
        {"of": [2], "scope": "group", "lr": 0.2, "u": 1.0, "d": 0.0, "weight_decay": 0.1},
        {"of": [3, 4], "scope": "tensor", "lr": 0.1, "u": 1.5, "d": 1.4, "maximize": True},
        {"of": [5, 6], "scope": "global", "lr": 0.3, "u": 100.0, "d": 50.0},
    ]
    opt = L2Clip(
        [{"params": [params[i] for i in g["of"]], **{k: v for k, v in g.items() if k != "of"}} for g in groups],
        **IMPLEMENTATIONS[impl],
    )
    rule = Rule(params, groups)
    for i in range(12):
        given_g: list[Any] = gradients(params, i, 10.0 ** (i % 4 - 2))
        if i % 5 == 3:  # what has no gradient is in no norm
            params[5].grad = params[0].grad = None
            given_g[5] = given_g[0] = None
        opt.step()
        near(params, rule.step(given_g))


@every_implementation
@every_scope
def test_schedules(impl: str, scope: str) -> None:
    params = fresh((8, 3), (4,))
    group = {"of": [0, 1], "scope": scope, "lr": 0.2, "u": 1.0, "d": 0.1, "weight_decay": 0.1}
    rule = Rule(params, [group])
    opt = L2Clip(params, **{k: v for k, v in group.items() if k != "of"}, **IMPLEMENTATIONS[impl])
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    for i in range(15):
        group.update(lr=0.2 * 0.9**i, u=4.0 / (1 + i), d=0.1 / (1 + i))
        opt.param_groups[0].update(u=group["u"], d=group["d"])
        given_g = gradients(params, i)
        opt.step()
        schedule.step()
        near(params, rule.step(given_g))


@every_implementation
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=4),
    st.sampled_from(["global", "group", "tensor"]),
    st.floats(0, 1),
    st.floats(0, 3),
    st.floats(0, 1),
    st.sampled_from(SCALES[:5]),
)
def test_any_shapes_and_numbers(impl: str, shapes, scope, lr, u, share, scale) -> None:
    params = fresh(*shapes)
    options = {"lr": lr, "u": u, "d": u * share}
    opt, rule = (
        L2Clip(params, scope=scope, **options, **IMPLEMENTATIONS[impl]),
        Rule(params, [{"of": range(len(params)), "scope": scope, **options}]),
    )
    for i in range(2):
        given_g = gradients(params, i, scale)
        opt.step()
        near(params, rule.step(given_g), 1e-11)


@every_implementation
@every_scope
def test_types_share_a_norm(impl: str, scope: str) -> None:
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    params = [fresh((5, 3), dtype=t, seed=k)[0] for k, t in enumerate(dtypes)]
    group = {"of": range(4), "scope": scope, "lr": 0.5, "u": 1.0, "d": 0.25}
    rule = Rule(params, [group])
    opt = L2Clip(params, **{k: v for k, v in group.items() if k != "of"}, **IMPLEMENTATIONS[impl])
    given_g = gradients(params, 0, 2.0)
    opt.step()
    want = rule.step(given_g)
    for k, t in enumerate(dtypes):
        near(params[k : k + 1], want[k : k + 1], max(4 * torch.finfo(t).eps, 1e-12))


def test_thresholds_of_doubles_are_doubles() -> None:
    p = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    p.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    for u in (1e-4, 1e-60, 1 / 3):
        with torch.no_grad():
            p.zero_()
        L2Clip([p], lr=1.0, u=u).step()
        assert p.tolist() == pytest.approx([-0.6 * u, -0.8 * u], rel=1e-15, abs=0)


def test_nothing_is_added_to_the_norm() -> None:
    """torch's clip_grad_norm_ adds 1e-6: at these thresholds it is off by a percent."""
    p = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    p.grad = torch.tensor([3e-4, 4e-4], dtype=torch.float64)
    L2Clip([p], lr=1.0, u=1e-4).step()
    assert p.norm().item() == pytest.approx(1e-4, rel=1e-14)
    q = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    q.grad = p.grad.clone()
    nn.utils.clip_grad_norm_([q], 1e-4)
    assert q.grad.norm().item() == pytest.approx(1e-4 / (1 + 1e-6 / 5e-4), rel=1e-9)


def test_with_large_norms_it_is_sgd_with_clip_grad_norm() -> None:
    ours, theirs = fresh((6, 4), (3,)), fresh((6, 4), (3,))
    a, b = L2Clip(ours, lr=0.1, u=1.0), torch.optim.SGD(theirs, lr=0.1)
    for i in range(10):
        gradients(ours, i, 5.0)
        gradients(theirs, i, 5.0)
        a.step()
        nn.utils.clip_grad_norm_(theirs, 1.0)
        b.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


def test_without_thresholds_it_is_sgd() -> None:
    for dtype in (torch.float32, torch.float64):
        ours, theirs = fresh((6, 4), (3,), dtype=dtype), fresh((6, 4), (3,), dtype=dtype)
        for params, opt in ((ours, L2Clip(ours, lr=0.1, u=INF)), (theirs, torch.optim.SGD(theirs, lr=0.1))):
            for i in range(5):
                gradients(params, i)
                opt.step()
        assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


@every_implementation
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_gradients_at_the_ends_of_the_range(impl: str, dtype: torch.dtype) -> None:
    """The step has the length that was asked for, whatever the type can hold."""
    info = torch.finfo(dtype)
    for top in (info.max, info.max / 16, info.tiny * 16, info.tiny, info.tiny * info.eps):
        p = nn.Parameter(torch.zeros(4, 16, dtype=dtype))
        p.grad = torch.full_like(p, top)
        L2Clip([p], lr=1.0, u=1.0, d=1.0, **IMPLEMENTATIONS[impl]).step()
        np.testing.assert_allclose(arrays([p])[0], -1 / 8, rtol=8 * info.eps)


def test_zero_gradients_move_nothing() -> None:
    for d in (0.0, 0.5):
        p = nn.Parameter(torch.tensor([1.0, -0.0]))
        p.grad = torch.tensor([0.0, -0.0])
        L2Clip([p], lr=1.0, u=1.0, d=d).step()
        assert p.tolist() == [1.0, 0.0] and torch.signbit(p[1])


# --- sparse and complex ---------------------------------------------------------------------------------------------


@every_implementation
@every_scope
def test_sparse_gradients(impl: str, scope: str) -> None:
    """The norm is that of the summed pieces."""
    params = fresh((4, 2), (3,))
    values = torch.tensor([[3.0, -4.0], [100.0, 1.0], [-99.5, -1.0]], dtype=torch.float64)
    g = torch.sparse_coo_tensor(torch.tensor([[0, 2, 2]]), values, (4, 2), check_invariants=True)
    group = {"of": [0, 1], "scope": scope, "lr": 0.5, "u": 1.0, "d": 0.25, "weight_decay": 0.1, "maximize": True}
    rule = Rule(params, [group])
    opt = L2Clip(params, **{k: v for k, v in group.items() if k != "of"}, **IMPLEMENTATIONS[impl])
    for _ in range(3):
        params[0].grad = g.clone()
        params[1].grad = torch.ones(3, dtype=torch.float64)
        opt.step()
        near(params, rule.step([g.to_dense().numpy(), np.ones(3)]))


@every_implementation
@every_scope
@pytest.mark.parametrize("conj", [False, True], ids=["", "conj"])
def test_complex_gradients(impl: str, scope: str, conj: bool) -> None:
    gen = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(4, generator=gen, dtype=torch.complex128)), *fresh((3,))]
    group = {"of": [0, 1], "scope": scope, "lr": 0.5, "u": 1.0, "d": 0.25, "weight_decay": 0.1}
    rule = Rule(params, [group])
    opt = L2Clip(params, **{k: v for k, v in group.items() if k != "of"}, **IMPLEMENTATIONS[impl])
    g = torch.randn(4, generator=gen, dtype=torch.complex128)
    params[0].grad = g.conj() if conj else g
    params[1].grad = torch.ones(3, dtype=torch.float64)
    given_g = [params[0].grad.resolve_conj().numpy().copy(), np.ones(3)]
    opt.step()
    near(params, rule.step(given_g))


def test_a_lazily_negated_gradient() -> None:
    """Its memory holds the negative: a kernel that reads memory would go uphill."""
    for impl in IMPLEMENTATIONS.values():
        p = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        p.grad = torch._neg_view(torch.tensor([3.0, -4.0], dtype=torch.float64))
        L2Clip([p], lr=1.0, u=1.0, **impl).step()
        assert p.tolist() == pytest.approx([0.6, -0.8], rel=1e-15)


@every_implementation
def test_a_tiny_norm_of_doubles_leaves_floats_without_gradient_alone(impl: str) -> None:
    for size in (1e-60, 1e-200, 1e-310):
        a, b = nn.Parameter(torch.ones(2, dtype=torch.float64)), nn.Parameter(torch.ones(2))
        a.grad, b.grad = torch.full_like(a, size), torch.zeros(2)
        L2Clip([a, b], lr=1.0, u=1.0, d=0.5, **IMPLEMENTATIONS[impl]).step()
        assert a.tolist() == pytest.approx([1 - 0.5 / math.sqrt(2)] * 2) and b.tolist() == [1.0, 1.0]


# --- gradients that are not finite ----------------------------------------------------------------------------------


def four(bad: float) -> list[nn.Parameter]:
    """In the tests: 0 and 1 in the first group, 2 and 3 in the second; the bad one is number 1."""
    params = [nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(4)]
    for p in params:
        p.grad = torch.tensor([3.0, -4.0], dtype=torch.float64)
    params[1].grad[0] = bad
    return params


AFFECTED = {"global": [0, 1, 2, 3], "group": [0, 1], "tensor": [1]}


@every_implementation
@every_scope
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_propagate_fills_the_scope(impl: str, scope: str, bad: float, dtype: torch.dtype) -> None:
    params = [nn.Parameter(p.detach().to(dtype)) for p in four(bad)]
    for p, q in zip(params, four(bad), strict=True):
        p.grad = q.grad.to(dtype)
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    L2Clip(groups, lr=0.5, u=1.0, d=0.5, scope=scope, **IMPLEMENTATIONS[impl]).step()
    for i, p in enumerate(params):
        assert bool(torch.isnan(p).all()) == (i in AFFECTED[scope]), (i, p)
        assert bool(torch.isfinite(p).all()) == (i not in AFFECTED[scope]), (i, p)


@every_implementation
@every_scope
@pytest.mark.parametrize("bad", [NAN, INF])
def test_skip_leaves_the_scope(impl: str, scope: str, bad: float) -> None:
    params = four(bad)
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    options = {"lr": 0.5, "u": 1.0, "d": 0.5, "weight_decay": 0.5, "scope": scope, "nonfinite": "skip"}
    opt = L2Clip(groups, **options, **IMPLEMENTATIONS[impl])
    opt.step()
    opt.step()
    for i, p in enumerate(params):
        assert (p.tolist() == [1.0, 1.0]) == (i in AFFECTED[scope]), (i, p)
    assert [c.skipped for c in opt.statistics().values()] == [2 * (i in AFFECTED[scope]) for i in range(4)]
    assert opt.statistics() == dict.fromkeys(range(4), Counts())
    params[1].grad[0] = 1.0
    opt.step()
    assert all(p.tolist() != [1.0, 1.0] for p in params)


@every_implementation
@every_scope
@pytest.mark.parametrize("bad", [NAN, INF])
def test_raise_moves_nothing(impl: str, scope: str, bad: float) -> None:
    params = four(bad)
    groups = [
        {"params": [("a", params[0]), ("b", params[1])]},
        {"params": [("c", params[2]), ("d", params[3])], "nonfinite": "propagate"},
    ]
    options = {"lr": 0.5, "u": 1.0, "weight_decay": 0.5, "scope": scope, "nonfinite": "raise"}
    opt = L2Clip(groups, **options, **IMPLEMENTATIONS[impl])
    with pytest.raises(FloatingPointError, match="'b': 1 of 2"):
        opt.step()
    assert all(p.tolist() == [1.0, 1.0] for p in params)


@every_implementation
@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_a_policy_holds_for_what_comes_from_another_group_of_the_scope(impl: str, policy: str) -> None:
    """The bad element lies in a group that propagates, but makes the common norm NaN: this group must not take it."""
    params = four(NAN)
    groups = [{"params": params[:2]}, {"params": params[2:], "nonfinite": policy}]
    opt = L2Clip(groups, lr=0.5, u=1.0, **IMPLEMENTATIONS[impl])
    if policy == "raise":
        with pytest.raises(FloatingPointError):
            opt.step()
        assert all(p.tolist() == [1.0, 1.0] for p in params)
    else:
        opt.step()
        assert all(p.tolist() == [1.0, 1.0] for p in params[2:])


# --- wrong numbers --------------------------------------------------------------------------------------------------


@every_implementation
@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"d": 2.0}, r"d=2\.0 exceeds u=1\.0"),
        ({"u": 0.05}, r"d=0\.1 exceeds u=0\.05"),
        ({"u": torch.tensor(0.05)}, "need 0 <= d <= u"),
        ({"u": torch.ones(2)}, r"u of shape \(2,\)"),
        ({"lr": -1.0}, "Invalid learning rate"),
        ({"scope": "layer"}, "Invalid scope: 'layer'; need one of global, group, tensor"),
        ({"nonfinite": "ignore"}, "Invalid nonfinite policy"),
    ],
    ids=str,
)
@pytest.mark.parametrize("when", ["before the step", "in the closure"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_bad_group_is_found_before_anything_moved(impl: str, bad: dict, words: str, when: str, which: int) -> None:
    params = four(1.0)
    opt = L2Clip([{"params": params[:2]}, {"params": params[2:]}], lr=0.5, u=1.0, d=0.1, **IMPLEMENTATIONS[impl])

    def closure() -> float:
        if when == "in the closure":
            opt.param_groups[which].update(bad)
        return 1.0

    if when == "before the step":
        opt.param_groups[which].update(bad)
    with pytest.raises(ValueError, match=words):
        opt.step(closure)
    assert all(p.tolist() == [1.0, 1.0] for p in params)


def test_a_norm_has_one_threshold() -> None:
    with pytest.raises(ValueError, match=r"u of shape \(4, 1\); a norm has one threshold"):
        L2Clip(fresh((4, 3)), u=torch.ones(4, 1))
    for u in (torch.tensor(1.0), torch.tensor([1.0]), torch.tensor(1.0, dtype=torch.float64)):
        (p,) = fresh((4, 3))
        gradients([p], 0, 9.0)
        before = p.detach().clone()
        L2Clip([p], lr=1.0, u=u).step()
        assert (p - before).norm().item() == pytest.approx(1.0, rel=1e-12)


# --- precision, and training ----------------------------------------------------------------------------------------


def test_a_long_gradient_in_bf16_has_its_norm_from_fp32() -> None:
    """A norm summed in bf16 would stop growing at 256 equal elements."""
    p = nn.Parameter(torch.zeros(1 << 16, dtype=torch.bfloat16))
    p.grad = torch.full_like(p, 0.5)  # its norm is 128
    L2Clip([p], lr=1.0, u=64.0).step()
    assert p.unique().tolist() == [-0.25]


@every_implementation
@every_scope
def test_the_defaults_train_a_small_model(impl: str, scope: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        x = torch.randn(128, 8)
        y = x @ torch.randn(8, 1) + 0.1 * torch.randn(128, 1)
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    opt = L2Clip(model.parameters(), scope=scope, **IMPLEMENTATIONS[impl])
    losses: list[float] = []
    for _ in range(200):
        opt.zero_grad()
        loss: Tensor = (model(x) - y).square().mean()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
