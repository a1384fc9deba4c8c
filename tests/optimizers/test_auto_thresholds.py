"""u="auto": 50 steps of sign descent, then thresholds from the gradients; lr is the most that a coordinate moves."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tailopt
from tailopt.thresholds import CALIBRATION, Norms, Thresholds, choose
from tests.distributed import forked

HERE = "tests.optimizers.test_auto_thresholds"
SHAPES = [(40, 30), (30,), (1,)]


def parameters() -> list[nn.Parameter]:
    source = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=source)) for shape in SHAPES]


def gradients(params: list[nn.Parameter], step: int, scale: float = 1.0) -> None:
    """Each tensor has a scale of its own."""
    source = torch.Generator().manual_seed(step)
    for k, p in enumerate(params):
        p.grad = torch.randn(p.shape, generator=source) * 10.0**-k * scale


def automatic(params: list[nn.Parameter], **settings: Any) -> tailopt.BiClip:
    return tailopt.BiClip(params, **{"lr": 0.01, "u": "auto", "d": "auto", **settings})


def train(opt: torch.optim.Optimizer, params: list[nn.Parameter], first: int, last: int, scale: float = 1.0) -> None:
    for step in range(first, last):
        gradients(params, step, scale)
        opt.step()


def bits(params: list[nn.Parameter]) -> list[Tensor]:
    return [p.detach().clone() for p in params]


def test_calibration_is_sign_descent() -> None:
    params, others = parameters(), parameters()
    opt, sign = automatic(params), tailopt.BiClip(others, lr=0.01, u=1.0, d=1.0)
    for step in range(CALIBRATION):
        assert opt.thresholds == [] and opt.param_groups[0]["thresholds"] is None
        for several, one in ((params, opt), (others, sign)):
            gradients(several, step)
            one.step()
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))
    (line,) = opt.thresholds
    assert line.startswith("u = ") and "over 3 tensors" in line


def test_the_thresholds_are_those_of_the_gradients_that_were_seen() -> None:
    params = parameters()
    opt = automatic(params)
    seen: list[list[Tensor]] = [[], [], []]
    for step in range(CALIBRATION):
        gradients(params, step)
        for several, p in zip(seen, params, strict=True):
            assert p.grad is not None
            several.append(p.grad.clone())
        opt.step()
    counts = tailopt.count([torch.stack(several) for several in seen], u=1.0, d=0.0, complete=True)
    expected = choose(list(counts.values()))
    found = Thresholds.from_state(opt.param_groups[0]["thresholds"])
    assert found.u == pytest.approx(expected.u, rel=1e-5) and found.u1 == found.u
    assert found.d == pytest.approx([u / 3 for u in found.u])
    assert found.u[0] > 5 * found.u[1] > 25 * found.u[2], "every tensor has its own scale"


@pytest.mark.parametrize("scale", ["first", "follow"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_no_coordinate_ever_moves_by_more_than_lr(scale: str, momentum: float) -> None:
    params = parameters()
    opt = automatic(params, scale=scale, momentum=momentum)
    moved = []
    for step in range(160):
        before = bits(params)
        gradients(params, step, scale=0.1 ** (step // 60))
        assert params[0].grad is not None
        if step == 100:
            params[0].grad[0, 0] = 1e9
        opt.step()
        moved.append(max(float((p.detach() - b).abs().max()) for p, b in zip(params, before, strict=True)))
    assert max(moved) <= 0.01 * (1 + 1e-4)
    assert moved[99] > 0.001
    first = opt.param_groups[0]["thresholds"]
    assert all(u <= u1 for u, u1 in zip(first["u"], first["u1"], strict=True)) or scale == "follow"


def test_steps_shrink_with_the_gradients_or_stay() -> None:
    ends = {}
    for scale in ("first", "follow"):
        params = parameters()
        opt = automatic(params, scale=scale)
        train(opt, params, 0, 50)
        train(opt, params, 50, 1250, scale=1e-3)
        before = bits(params)
        train(opt, params, 1250, 1251, scale=1e-3)
        ends[scale] = float((params[0].detach() - before[0]).abs().max())
    assert ends["follow"] == pytest.approx(0.01, rel=1e-3)
    assert ends["first"] < 0.003


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("stop", [20, 75])
def test_a_reloaded_optimizer_continues_with_the_same_bits(stop: int, momentum: float) -> None:
    """In the middle of calibration and after it; what was counted is a part of the checkpoint."""
    params, others = parameters(), parameters()
    opt = automatic(params, momentum=momentum)
    train(opt, params, 0, stop)
    other = automatic(others, lr=1.0, momentum=momentum)
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    with torch.no_grad():
        for p, q in zip(params, others, strict=True):
            q.copy_(p)
    train(opt, params, stop, 130)
    train(other, others, stop, 130)
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))
    assert opt.param_groups[0]["thresholds"] == other.param_groups[0]["thresholds"]


def test_a_checkpoint_needs_no_pickle(tmp_path: Any) -> None:
    params = parameters()
    opt = automatic(params)
    train(opt, params, 0, 20)
    torch.save(opt.state_dict(), tmp_path / "opt.pt")
    loaded = torch.load(tmp_path / "opt.pt", weights_only=True)
    assert loaded["param_groups"][0]["calibration"]["seen"] == 20


def test_d_alone_is_a_third_of_u() -> None:
    params, others = parameters(), parameters()
    train(tailopt.BiClip(params, lr=0.1, u=0.3, d="auto"), params, 0, 3)
    train(tailopt.BiClip(others, lr=0.1, u=0.3, d=0.3 / 3), others, 0, 3)
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_d_may_be_zero_and_weights_decay_by_lr() -> None:
    params = parameters()
    opt = automatic(params, d=0, weight_decay=0.5)
    train(opt, params, 0, 60)
    assert opt.param_groups[0]["thresholds"]["d"] == [0.0] * 3
    before = bits(params)
    for p in params:
        p.grad = torch.zeros_like(p)
    opt.step()
    for p, b in zip(params, before, strict=True):
        torch.testing.assert_close(p.detach(), b * (1 - 0.01 * 0.5), rtol=1e-6, atol=0)


def test_a_parameter_without_gradients_gets_the_thresholds_of_all() -> None:
    params = parameters()
    unused = nn.Parameter(torch.ones(3))
    opt = automatic([*params, unused])
    train(opt, params, 0, 60)
    assert len(opt.param_groups[0]["thresholds"]["u"]) == 4 and unused.tolist() == [1.0] * 3


def test_gradients_that_are_all_zero_are_waited_for() -> None:
    """Signs of zeros move nothing; another group is not held up."""
    p, params = nn.Parameter(torch.ones(3)), parameters()
    opt = tailopt.BiClip([{"params": [p]}, {"params": params}], lr=0.01, u="auto")
    p.grad = torch.zeros(3)
    with pytest.warns(UserWarning, match="no nonzero finite gradient of a group of 1 tensors in 50 steps") as caught:
        train(opt, params, 0, 60)
    assert len(caught) == 1 and p.tolist() == [1.0] * 3
    assert opt.param_groups[0]["thresholds"] is None and opt.param_groups[1]["thresholds"] is not None
    p.grad = torch.full((3,), 0.5)
    train(opt, params, 60, 62)
    assert opt.param_groups[0]["thresholds"]["u"] > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("momentum_dtype", [None, torch.bfloat16])
def test_momentum_calibrates_in_every_type(dtype: torch.dtype, momentum_dtype: torch.dtype | None) -> None:
    p = torch.nn.Parameter(torch.ones(5, dtype=dtype))
    opt = automatic([p], lr=0.1, momentum=0.9, momentum_dtype=momentum_dtype)
    p.grad = torch.tensor([1.0, -1.0, float("inf"), float("nan"), torch.finfo(dtype).max], dtype=torch.float64).to(
        dtype
    )
    opt.step()
    moved = (p.detach() - 1).real if dtype.is_complex else p.detach() - 1
    assert moved.isfinite().all() and moved[0] < 0 < moved[1] and moved[4] < 0
    assert moved[2] == moved[3] == 0


def test_a_compiled_relative_step_is_traced_a_few_times() -> None:
    """Every step has other sizes of the weights; they are no constants of the program."""
    torch._dynamo.reset()
    params = [torch.nn.Parameter(torch.randn(n)) for n in (30, 5)]
    plain = [torch.nn.Parameter(p.detach().clone()) for p in params]
    opt, eager = tailopt.BiClip(params), tailopt.BiClip(plain)
    traced = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        traced.append(graph)
        return graph.forward

    step = torch.compile(opt.step, backend=backend)
    for _ in range(40):
        for p, q in zip(params, plain, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        step()
        eager.step()
    assert len(traced) <= 3
    for p, q in zip(params, plain, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_dead_zone_for_rounding_noise(momentum: float) -> None:
    params = parameters()
    null = nn.Parameter(torch.zeros(5))
    opt = automatic([*params, null], dead_zone="auto", momentum=momentum)
    for step in range(120):
        gradients(params, step)
        null.grad = torch.full((5,), 1e-9 * (-1) ** step)
        opt.step()
    assert null.tolist() == [0.0] * 5 and not torch.equal(params[0], parameters()[0])


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_the_policies_hold_during_calibration_with_momentum(policy: str) -> None:
    p = nn.Parameter(torch.ones(2))
    opt = automatic([p], momentum=0.9, nonfinite=policy)
    p.grad = torch.tensor([float("nan"), 1.0])
    if policy == "raise":
        with pytest.raises(FloatingPointError):
            opt.step()
    else:
        opt.step()
    assert p.tolist() == [1.0, 1.0] and opt.state[p]["step"].item() == 0


def test_what_is_skipped_does_not_calibrate() -> None:
    p = nn.Parameter(torch.ones(400))
    opt = automatic([p], nonfinite="skip")
    for step in range(CALIBRATION):
        source = torch.Generator().manual_seed(step)
        p.grad = torch.randn(400, generator=source) * (1.0 if step % 10 == 0 else 1e6)
        if step % 10:
            p.grad[0] = float("inf")
        opt.step()
    assert opt.param_groups[0]["thresholds"]["u"] < 10


def test_a_list_of_parameters_that_grew_is_refused() -> None:
    params = parameters()
    opt = automatic(params)
    train(opt, params, 0, 60)
    opt.param_groups[0]["params"].append(nn.Parameter(torch.ones(2)))
    opt.param_groups[0]["params"][-1].grad = torch.ones(2)
    with pytest.raises(ValueError, match="they are of 3 tensors, and the group has 4 parameters"):
        opt.step()


def test_a_parameter_may_join_during_calibration() -> None:
    params = parameters()
    opt, extra = automatic(params), nn.Parameter(torch.ones(7))
    train(opt, params, 0, 20)
    opt.param_groups[0]["params"].append(extra)
    train(opt, [*params, extra], 20, 60)
    assert len(opt.param_groups[0]["thresholds"]["u"]) == 4


def test_names_in_another_order_are_refused() -> None:
    model = nn.Linear(3, 2)
    opt = automatic(list(model.parameters()))
    for step in range(60):
        gradients(list(model.parameters()), step)
        opt.step()
    state = tailopt.named_state_dict(model, opt)
    other = automatic(list(model.parameters())[::-1])
    with pytest.raises(ValueError, match="in another order than the optimizer's group"):
        tailopt.load_named_state_dict(model, other, state)
    tailopt.load_named_state_dict(model, automatic(list(model.parameters())), state)


@pytest.mark.parametrize("cls", [tailopt.BiClip, tailopt.L2Clip])
def test_a_compiled_step_does_the_same(cls: Any) -> None:
    """To the bit, except for norms, whose sums torch adds in another order."""
    params, others = parameters(), parameters()
    opt, eager = (cls(several, lr=0.01, u="auto", d="auto") for several in (params, others))
    step = torch.compile(opt.step, backend="eager")
    for k in range(CALIBRATION + 5):
        gradients(params, k)
        step()
    train(eager, others, 0, CALIBRATION + 5)
    tolerance = {"rtol": 1e-6, "atol": 1e-7} if cls is tailopt.L2Clip else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(params, others, **tolerance)
    assert opt.thresholds == eager.thresholds != []


def sharded(rank: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    result = {}
    for kind, make in (("values", automatic), ("norms", by_norm), ("gate", gated)):
        whole = parameters()[:2]
        params = [nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in whole]
        opt = make(params)
        for step in range(110):
            gradients(whole, step)
            for p, w in zip(params, whole, strict=True):
                assert w.grad is not None
                p.grad = distribute_tensor(w.grad, mesh, [Shard(0)])
            opt.step()
        full = torch.cat([p.full_tensor().flatten() for p in params])  # type: ignore[attr-defined]
        result[kind] = {"u": opt.param_groups[0]["thresholds"]["u"], "weights": full.tolist()}
    return result


def test_sharded_parameters_have_the_thresholds_of_whole_ones(server: forked.Server) -> None:
    """Each rank counts its shard, and the counts are added up over the ranks; a norm is over all shards anyway."""
    ends = server.run(f"{HERE}:sharded", 2)
    assert [end.status for end in ends] == [0, 0], [end.said for end in ends]
    for kind, make in (("values", automatic), ("norms", by_norm), ("gate", gated)):
        params = parameters()[:2]
        opt = make(params)
        train(opt, params, 0, 110)
        whole = torch.cat([p.detach().flatten() for p in params])
        for found in (end.value[kind] for end in ends):
            assert found["u"] == pytest.approx(opt.param_groups[0]["thresholds"]["u"], rel=1e-6)
            torch.testing.assert_close(torch.tensor(found["weights"]), whole, rtol=1e-5, atol=1e-6)


# --- norms ----------------------------------------------------------------------------------------------------------


def by_norm(params: Any, **settings: Any) -> tailopt.L2Clip:
    return tailopt.L2Clip(params, **{"lr": 0.01, "u": "auto", "d": "auto", **settings})


def lengths(tensors: list[Tensor], scope: str) -> list[float]:
    """The norms of the scopes of one group."""
    each = [float(t.detach().double().norm()) for t in tensors]
    return each if scope == "tensor" else [math.hypot(*each)]


every_scope = pytest.mark.parametrize("scope", ["global", "group", "tensor"])


@every_scope
def test_calibration_steps_have_length_lr_and_u_is_that_of_the_norms(scope: str) -> None:
    params = parameters()
    opt = by_norm(params, scope=scope)
    seen = []
    for step in range(CALIBRATION):
        gradients(params, step)
        before = bits(params)
        seen.append(lengths([p.grad for p in params if p.grad is not None], scope))
        opt.step()
        moved = [p.detach() - b for p, b in zip(params, before, strict=True)]
        assert lengths(moved, scope) == pytest.approx([0.01] * len(seen[0]), rel=1e-4)
    expected = choose([Norms(column) for column in zip(*seen, strict=True)])
    found = Thresholds.from_state(opt.param_groups[0]["thresholds"])
    assert found.u == pytest.approx(expected.u, rel=1e-5) and found.d == found.u
    assert opt.thresholds == [found.reason] and "the median of the norm is" in found.reason
    assert by_norm(parameters(), d=0).param_groups[0]["d"] == 0


@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_no_norm_ever_moves_by_more_than_lr_and_u_follows_the_last_50(scope: str) -> None:
    """Nor does a gradient of 1e9; with scale="first" steps shrink with the gradients, else they stay."""
    last = {}
    for scale in ("first", "follow"):
        params = parameters()
        opt = by_norm(params, scope=scope, scale=scale, weight_decay=0.0)
        for step in range(50 + 6 * 50):
            gradients(params, step, scale=1.0 if step < 50 else 1e-3)
            assert params[0].grad is not None
            if step == 70:
                params[0].grad[0, 0] = 1e9
            before = bits(params)
            opt.step()
            last[scale] = lengths([p.detach() - b for p, b in zip(params, before, strict=True)], scope)
            assert max(last[scale]) <= 0.01 * (1 + 1e-4)
        chosen = Thresholds.from_state(opt.param_groups[0]["thresholds"])
        # in six looks of 50 steps u has come closer to a scale that is 1000 times smaller, by their memory
        assert chosen.u == pytest.approx([u * 1000 ** (0.996**300 - 1) for u in chosen.u1], rel=0.5)
    assert max(last["first"]) < 0.0005 and last["follow"] == pytest.approx([0.01] * len(last["follow"]), rel=1e-4)


@pytest.mark.parametrize("stop", [20, 75])
def test_norms_are_a_part_of_the_checkpoint(stop: int, tmp_path: Any) -> None:
    """By position and by name, without a pickle; the saved dict does not change when the run goes on."""
    models = [nn.Linear(6, 4) for _ in range(3)]
    opts = [by_norm(model.parameters(), scope="tensor") for model in models]
    train(opts[0], list(models[0].parameters()), 0, stop)
    named = tailopt.named_state_dict(models[0], opts[0])
    torch.save(opts[0].state_dict(), tmp_path / "opt.pt")
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    train(opts[0], list(models[0].parameters()), stop, 130)
    opts[1].load_state_dict(torch.load(tmp_path / "opt.pt", weights_only=True))
    tailopt.load_named_state_dict(models[2], opts[2], named)
    for model, opt in zip(models[1:], opts[1:], strict=True):
        train(opt, list(model.parameters()), stop, 130)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), models[0].parameters(), strict=True))
        assert opt.param_groups[0]["thresholds"] == opts[0].param_groups[0]["thresholds"]


def test_d_alone_is_the_u_of_a_norm() -> None:
    params = parameters()
    before = bits(params)
    train(tailopt.L2Clip(params, lr=0.1, u=0.3, d="auto"), params, 0, 1, scale=1e-6)
    moved = [p.detach() - b for p, b in zip(params, before, strict=True)]
    assert lengths(moved, "global") == pytest.approx([0.03], rel=1e-4)


def test_groups_of_one_scope_share_the_norm_and_have_their_own_thresholds() -> None:
    params = parameters()
    opt = by_norm([{"params": params[:2]}, {"params": params[2:], "d": 0, "lr": 0.02}])
    train(opt, params, 0, 60)
    first, second = (group["thresholds"] for group in opt.param_groups)
    assert first["u"] == second["u"] > 0 and first["d"] > 0 == second["d"]


def test_what_is_skipped_or_missing_is_in_no_norm() -> None:
    params = parameters()
    opt = by_norm(params, nonfinite="skip", scope="tensor")
    for step in range(CALIBRATION):
        gradients(params, step, scale=1.0 if step % 10 == 0 else 1e6)
        if step % 10:
            assert params[0].grad is not None
            params[0].grad[0, 0] = float("nan")
        params[2].grad = None
        opt.step()
    u = opt.param_groups[0]["thresholds"]["u"]
    assert u[0] < 1e3 < 1e5 < u[1] and u[2] > 0


def test_thresholds_of_another_scope_are_refused() -> None:
    params = parameters()
    opt = by_norm(params)
    train(opt, params, 0, 60)
    before = bits(params)
    opt.param_groups[0]["scope"] = "tensor"
    gradients(params, 60)
    with pytest.raises(ValueError, match="they are of 1 norms, and the group has 3 parameters with scope='tensor'"):
        opt.step()
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    opt.param_groups[0]["thresholds"] = opt.param_groups[0]["calibration"] = None
    opt.step()


def repeat(opt: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        opt.step()


def test_zero_norms_are_waited_for() -> None:
    p = nn.Parameter(torch.ones(3))
    opt = by_norm([p])
    p.grad = torch.zeros(3)
    with pytest.warns(UserWarning, match="no nonzero finite gradient of a group of 1 tensors in 50 steps") as caught:
        repeat(opt, 60)
    assert len(caught) == 1 and p.tolist() == [1.0] * 3 and opt.thresholds == []
    p.grad = torch.ones(3)
    opt.step()
    assert len(opt.thresholds) == 1


# Steps in proportion to the weights


def test_without_a_learning_rate_steps_are_in_proportion_to_the_weights() -> None:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(scale * torch.randn(shape)) for scale, shape in ((5.0, (40, 5)), (0.1, 30), (0.0, 7))]
    opt = tailopt.BiClip(params, weight_decay=0.1)
    assert [(group["lr"], group["relative"]) for group in opt.param_groups] == [(3e-3, True)]
    for step in range(60):
        before = [p.detach().clone() for p in params]
        for p in params:
            p.grad = torch.randn_like(p).pow(3)
        opt.step()
        for old, new in zip(before, params, strict=True):
            size = max(old.square().mean().sqrt().item(), 1e-3)
            moved = (new - old * (1 - 3e-3 * 0.1)).abs()  # weights decay by lr itself
            assert moved.max() <= 3e-3 * size * 1.0001 + 1e-6 * old.abs().max()
            if step < 50:  # calibration: every coordinate moves as far as it may
                assert moved.min() >= 3e-3 * size * 0.999 - 1e-6 * old.abs().max()


def test_a_group_with_its_own_learning_rate_takes_steps_of_that() -> None:
    def groups() -> list[dict[str, Any]]:
        params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
        return [{"params": params[:1], "lr": 0.1}, {"params": params[1:]}]

    def relative(**settings: Any) -> list[bool]:
        return [group["relative"] for group in tailopt.BiClip(groups(), **settings).param_groups]

    assert relative() == [False, True]
    assert relative(lr=0.2) == [False, False]
    assert relative(relative=True) == [True, True]
    assert relative(u=1.0) == [False, False]
    old = tailopt.BiClip(groups(), lr=0.2).state_dict()
    for group in old["param_groups"]:
        del group["relative"]
    opt = tailopt.BiClip(groups())
    opt.load_state_dict(old)
    assert [group["relative"] for group in opt.param_groups] == [False, False]


def test_thresholds_are_constants_of_a_differentiable_step() -> None:
    torch.manual_seed(0)
    x, twin = torch.randn(6, requires_grad=True).clone(), torch.nn.Parameter(torch.zeros(6))
    twin.data.copy_(x)
    opts = tailopt.BiClip([x], lr=0.01, differentiable=True), tailopt.BiClip([twin], lr=0.01)
    for _ in range(55):
        g = torch.randn(6, requires_grad=True)
        x.grad, twin.grad = g * 2, (g * 2).detach()
        for opt in opts:
            opt.step()
    assert opts[0].thresholds == opts[1].thresholds != []
    torch.testing.assert_close(x, twin)
    u, d, s = (opts[0].param_groups[0]["thresholds"][name] for name in ("u", "d", "u1"))
    (slope,) = torch.autograd.grad(x.sum(), g)
    between = ((2 * g).abs() > d) & ((2 * g).abs() < u)
    torch.testing.assert_close(slope, torch.where(between, -2 * 0.01 / s, 0.0))


# --- in front of another optimizer ----------------------------------------------------------------------------------


def gated(params: Any, inner: Any = torch.optim.SGD, **settings: Any) -> tailopt.Clipped:
    return tailopt.Clipped(inner(params, lr=0.01), **{"u": "auto", "d": "auto", **settings})


INNER = [torch.optim.AdamW, torch.optim.Muon]


@pytest.mark.parametrize("inner", INNER)
def test_a_wrapped_optimizer_sees_all_of_50_gradients_then_clipped_ones(inner: Any) -> None:
    """Its steps are not rescaled: they have the bits of the bare optimizer on gradients clipped by hand."""
    shapes = [(20, 10), (10, 30)]
    params, others = ([nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2))
    opt, bare = gated(params, inner), inner(others, lr=0.01)
    seen: list[list[Tensor]] = [[], []]
    for step in range(CALIBRATION + 20):
        gradients(params, step)
        for i, (p, q) in enumerate(zip(params, others, strict=True)):
            assert p.grad is not None
            p.grad[0, step % 10] = 1e4
            group = opt.param_groups[0]
            q.grad = p.grad if step < CALIBRATION else tailopt.biclip(p.grad, group["thresholds"]["u"][i], 0.0)
            seen[i].append(p.grad)
        opt.step()
        bare.step()
        assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True)), step
    counts = tailopt.count([torch.stack(several[:CALIBRATION]) for several in seen], u=1.0, d=0.0, complete=True)
    expected = choose(list(counts.values()), rule="gate", scale="follow")
    assert opt.param_groups[0]["thresholds"]["u"] == pytest.approx(expected.u, rel=1e-5) != [1e4, 1e4]
    assert opt.thresholds == [opt.param_groups[0]["thresholds"]["reason"]] and "by the rule 'gate'" in opt.thresholds[0]
    assert expected.d == (0.0, 0.0), "nothing is raised"


def test_a_spike_does_not_reach_the_second_moment_and_the_gate_moves_with_the_gradients() -> None:
    params, others = parameters(), parameters()
    opt, bare = gated(params, torch.optim.AdamW), torch.optim.AdamW(others, lr=0.01)
    for several, one in ((params, opt), (others, bare)):
        train(one, several, 0, 60)
        train(one, several, 60, 61, scale=1e3)
    moments = [float(one.state[several[0]]["exp_avg_sq"].max()) for one, several in ((opt, params), (bare, others))]
    assert moments[0] < 0.3 and moments[1] > 100 * moments[0]
    before = opt.param_groups[0]["thresholds"]["u"][0]
    train(opt, params, 61, 1000, scale=30.0)
    assert opt.param_groups[0]["thresholds"]["u"][0] > 10 * before


@pytest.mark.parametrize("stop", [20, 75])
def test_a_gate_is_a_part_of_the_checkpoint(stop: int) -> None:
    """By position and by name; a checkpoint of the bare optimizer loads and leaves the thresholds as they are."""
    models = [nn.Linear(6, 4) for _ in range(3)]
    opts = [gated(model.parameters(), torch.optim.Adam) for model in models]
    train(opts[0], list(models[0].parameters()), 0, stop)
    opts[1].load_state_dict(copy.deepcopy(opts[0].state_dict()))
    tailopt.load_named_state_dict(models[2], opts[2], copy.deepcopy(tailopt.named_state_dict(models[0], opts[0])))
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    for model, opt in zip(models, opts, strict=True):
        train(opt, list(model.parameters()), stop, 130)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), models[0].parameters(), strict=True))
        assert opt.param_groups[0]["thresholds"] == opts[0].param_groups[0]["thresholds"]

    thresholds = opts[0].param_groups[0]["thresholds"]
    bare = torch.optim.Adam(models[1].parameters(), lr=0.5)
    opts[0].load_state_dict(bare.state_dict())
    (group,) = opts[0].param_groups
    assert (group["lr"], group["u"], group["d"], group["thresholds"]) == (0.5, "auto", "auto", thresholds)
    opts[0].load_state_dict(tailopt.Clipped(bare, u=1.0, d=0.5).state_dict())
    assert (opts[0].param_groups[0]["u"], opts[0].param_groups[0]["d"]) == (1.0, 0.5)


def test_the_automatic_d_of_a_gate_is_zero() -> None:
    params = parameters()
    clipped = tailopt.Clipped(torch.optim.SGD(params, lr=1.0), u=1.0, d="auto")
    before = bits(params)
    for p in params:
        p.grad = torch.full_like(p, 1e-3)
    clipped.step()
    assert all(torch.equal(p, b - 1e-3) for p, b in zip(params, before, strict=True)), 'd="auto" is 0'
