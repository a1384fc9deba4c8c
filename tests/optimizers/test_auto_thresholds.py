"""u="auto": 50 steps of sign descent, then thresholds from the gradients; lr is the most that a coordinate moves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tailopt
from tailopt.thresholds import CALIBRATION, Thresholds, choose
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


def train(opt: tailopt.BiClip, params: list[nn.Parameter], first: int, last: int, scale: float = 1.0) -> None:
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


def test_a_compiled_step_has_the_same_bits() -> None:
    params, others = parameters(), parameters()
    opt, eager = automatic(params), automatic(others)
    step = torch.compile(opt.step, backend="eager")
    for k in range(CALIBRATION + 5):
        gradients(params, k)
        step()
    train(eager, others, 0, CALIBRATION + 5)
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))


def sharded(rank: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    whole = parameters()[:2]
    params = [nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in whole]
    opt = automatic(params)
    for step in range(110):
        gradients(whole, step)
        for p, w in zip(params, whole, strict=True):
            assert w.grad is not None
            p.grad = distribute_tensor(w.grad, mesh, [Shard(0)])
        opt.step()
    full = torch.cat([p.full_tensor().flatten() for p in params])  # type: ignore[attr-defined]
    return {"u": opt.param_groups[0]["thresholds"]["u"], "weights": full.tolist()}


def test_sharded_parameters_have_the_thresholds_of_whole_ones(server: forked.Server) -> None:
    """Each rank counts its shard, and the counts are added up over the ranks."""
    ends = server.run(f"{HERE}:sharded", 2)
    assert [end.status for end in ends] == [0, 0], [end.said for end in ends]
    params = parameters()[:2]
    opt = automatic(params)
    train(opt, params, 0, 110)
    for end in ends:
        assert end.value["u"] == pytest.approx(opt.param_groups[0]["thresholds"]["u"], rel=1e-6)
        torch.testing.assert_close(
            torch.tensor(end.value["weights"]), torch.cat([p.detach().flatten() for p in params]), rtol=1e-5, atol=1e-6
        )
