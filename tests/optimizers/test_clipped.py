"""Clipped against the wrapped optimizer on gradients clipped by hand, and its manners as a torch optimizer."""

from __future__ import annotations

import copy
import io
import math
import pickle
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.optim import Optimizer

from tailopt import BiClip, biclip, load_named_state_dict, named_state_dict
from tailopt.optimizers.clipped import Clipped
from tailopt.seeds import generator

INF, NAN = math.inf, math.nan
U, D = 0.5, 0.01

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "Adam, weight decay": lambda params: torch.optim.Adam(params, lr=0.1, weight_decay=0.1, amsgrad=True),
    "Adam, foreach": lambda params: torch.optim.Adam(params, lr=0.1, foreach=True),
    "Adam, fused": lambda params: torch.optim.Adam(params, lr=0.1, fused=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.1),
    "AdamW, maximize": lambda params: torch.optim.AdamW(params, lr=0.1, maximize=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "SGD, momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "Adamax": lambda params: torch.optim.Adamax(params, lr=0.1),
    "ASGD": lambda params: torch.optim.ASGD(params, lr=0.1),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "RAdam": lambda params: torch.optim.RAdam(params, lr=0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.1, momentum=0.9),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.1),
}


def fresh(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    gen = generator(seed, "parameters")
    return [nn.Parameter(torch.randn(shape, generator=gen).to(dtype)) for shape in shapes]


def gradient(p: Tensor, *numbers: int) -> Tensor:
    """Of many magnitudes, with zeros of both signs and infinities."""
    gen = generator(0, "gradients", *numbers)
    g = torch.randn(p.shape, generator=gen, dtype=torch.float64)
    g *= 10.0 ** torch.randint(-4, 2, p.shape, generator=gen)
    pick = torch.rand(p.shape, generator=gen)
    return torch.where(pick < 0.05, 0.0, torch.where(pick < 0.1, -0.0, torch.where(pick < 0.12, INF, g))).to(p.dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())


def train(
    wrapped: Clipped | None, plain: Optimizer | None, params: list[nn.Parameter], steps: int = 3, **clip: Any
) -> list[Tensor]:
    """Parameters after some steps of a Clipped, or of an optimizer whose gradients are clipped by hand."""
    for step in range(steps):
        for i, p in enumerate(params):
            g = gradient(p, step, i)
            p.grad = g if plain is None else biclip(g, **clip)
        (plain or wrapped).step()  # type: ignore[union-attr]
    return [p.detach().clone() for p in params]


# --- the arithmetic -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bits_of_the_optimizer_on_clipped_gradients(name: str, dtype: torch.dtype) -> None:
    ours, theirs = (fresh((7, 5), (11,), (), (0,), dtype=dtype) for _ in range(2))
    got = train(Clipped(OPTIMIZERS[name](ours), U, D, dead_zone=1e-3), None, ours)
    want = train(None, OPTIMIZERS[name](theirs), theirs, u=U, d=D, dead_zone=1e-3)
    assert all(map(same_bits, got, want))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_thresholds_it_is_the_plain_optimizer(name: str) -> None:
    ours, theirs = fresh((7, 5), (11,)), fresh((7, 5), (11,))
    opt, plain = Clipped(OPTIMIZERS[name](ours), u=INF, d=0.0), OPTIMIZERS[name](theirs)
    for step in range(3):
        for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            p.grad, q.grad = (gradient(p, step, i).nan_to_num(posinf=3.0) for _ in range(2))
        opt.step()
        plain.step()
    assert all(map(same_bits, ours, theirs))


@given(
    st.lists(st.floats(width=32), max_size=40),
    st.tuples(*[st.floats(0, 2.0**100, width=32)] * 3).map(sorted),
    st.booleans(),
)
@example([-1.0, 1.0], [0.0, 0.0, 0.0], False)  # signed zeros
@settings(deadline=None, max_examples=60)
def test_the_optimizer_sees_biclip_of_every_gradient(values: list[float], thresholds: list[float], fp16: bool) -> None:
    seen: list[Tensor] = []
    zone, d, u = thresholds
    p = nn.Parameter(torch.zeros(len(values), dtype=torch.float16 if fp16 else torch.float32))
    p.grad = torch.tensor(values, dtype=p.dtype)
    inner = torch.optim.SGD([p], lr=1.0)
    inner.register_step_pre_hook(lambda *_: seen.append(p.grad))  # type: ignore[arg-type]
    Clipped(inner, u, d, zone).step()
    want = biclip(p.grad, u, d, zone)
    nan = want.isnan()
    assert torch.equal(seen[0].isnan(), nan)
    assert same_bits(seen[0][~nan], want[~nan])


def test_thresholds_may_be_tensors() -> None:
    rows = torch.tensor([[0.1], [1.0], [INF]])
    for u, d in ((rows, 0.01), (torch.tensor(0.5), torch.tensor([0.01])), (1.0, rows.clamp(max=0.5))):
        ours, theirs = fresh((3, 4)), fresh((3, 4))
        got = train(Clipped(torch.optim.Adam(ours), u, d), None, ours)
        want = train(None, torch.optim.Adam(theirs), theirs, u=u, d=d)
        assert same_bits(got[0], want[0])


def test_a_tensor_of_one_element_is_one_threshold_for_every_shape() -> None:
    ours, theirs = fresh((3, 4), ()), fresh((3, 4), ())
    got = train(Clipped(torch.optim.Adam(ours), torch.tensor([[0.5]]), D), None, ours)
    want = train(None, torch.optim.Adam(theirs), theirs, u=0.5, d=D)
    assert all(map(same_bits, got, want))


def test_complex_gradients_are_clipped_by_parts() -> None:
    p = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    p.grad = torch.tensor([3 + 0.001j, 0.2 - 9j, 0j])
    Clipped(torch.optim.SGD([p], lr=1.0), U, D).step()
    assert torch.equal(p.detach(), torch.tensor([-0.5 - 0.01j, -0.2 + 0.5j, 0j]))


def test_sparse_gradients_are_clipped_where_they_have_values() -> None:
    p = nn.Parameter(torch.zeros(4, 2))
    # Row 1 twice: its sum is clipped, 0.4 + 0.4, and not the addends.
    g = torch.sparse_coo_tensor(
        torch.tensor([[1, 1, 3]]), [[0.4, 0.001], [0.4, 0.002], [-7.0, 0.0]], (4, 2), check_invariants=True
    )
    p.grad = g
    opt = Clipped(torch.optim.SparseAdam([p], lr=0.1), U, D)
    q = nn.Parameter(torch.zeros(4, 2))
    q.grad = biclip(g, U, D)
    assert torch.equal(q.grad.to_dense(), torch.tensor([[0, 0], [0.5, 0.01], [0, 0], [-0.5, 0]]))
    opt.step()
    torch.optim.SparseAdam([q], lr=0.1).step()
    assert same_bits(p, q)
    assert p.grad is g and not g.is_coalesced() and g._nnz() == 3


def test_parameters_without_gradients_stay() -> None:
    a, b = fresh((3,), (3,))
    opt = Clipped(torch.optim.Adam([a, b]), U, D)
    before = b.detach().clone()
    opt.step()
    assert not opt.state
    a.grad = torch.ones(3)
    opt.step()
    assert b.grad is None and torch.equal(b, before) and set(opt.state) == {a}


def test_gradients_that_are_not_laid_out_like_the_parameter() -> None:
    a, b = fresh((4, 3)), fresh((4, 3))
    for g in (torch.randn(3, 4).t(), torch.randn(4, 1).expand(4, 3), torch.randn(4, 6)[:, ::2]):
        a[0].grad, b[0].grad = g, biclip(g, U, D)
        Clipped(torch.optim.SGD(a, lr=0.1), U, D).step()
        torch.optim.SGD(b, lr=0.1).step()
        assert same_bits(a[0], b[0])


def test_differentiable_steps_pass_derivatives_through_the_clipping() -> None:
    scale = torch.tensor(2.0, requires_grad=True)
    leaf = torch.zeros(3, requires_grad=True)
    p = leaf.clone()
    p.retain_grad()
    p.grad = scale * torch.tensor([0.1, 10.0, 0.0001])
    opt = Clipped(torch.optim.SGD([p], lr=1.0, differentiable=True), U, D)
    opt.step()
    p.sum().backward()
    assert scale.grad is not None and scale.grad.item() == pytest.approx(-0.1)  # the others lie at a threshold


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("u", [U, torch.tensor([[0.1], [0.2], [0.5], [1.0]])], ids=["number", "rows"])
@pytest.mark.parametrize(
    "layout", [(Shard(0), Shard(0)), (Replicate(), Partial()), (Shard(0), Replicate())], ids=["shard", "sum", "whole"]
)
def test_sharded_parameters(mesh: DeviceMesh, layout: tuple[Any, Any], u: Any) -> None:
    (whole,) = fresh((4, 3))
    g = gradient(whole)
    p = nn.Parameter(DTensor.from_local(whole.detach().clone(), mesh, [layout[0]]))
    p.grad = given_ = DTensor.from_local(g, mesh, [layout[1]])
    Clipped(torch.optim.Adam([p]), u, D).step()
    whole.grad = biclip(g, u, D)
    torch.optim.Adam([whole]).step()
    assert same_bits(p.full_tensor(), whole) and p.grad is given_  # type: ignore[attr-defined]


# --- gradients stay -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_are_the_same_objects_with_the_same_values(name: str) -> None:
    params = fresh((7, 5), (11,))
    opt = Clipped(OPTIMIZERS[name](params), U, D)
    for step in range(2):
        given_ = [gradient(p, step, i) for i, p in enumerate(params)]
        for p, g in zip(params, given_, strict=True):
            p.grad = g
        copies, versions = [g.clone() for g in given_], [g._version for g in given_]
        opt.step()
        for p, g, was, version in zip(params, given_, copies, versions, strict=True):
            assert p.grad is g
            assert same_bits(g, was) and g._version == version


def test_gradients_come_back_after_an_error() -> None:
    a, b = fresh((3,), (3,))
    a.grad = ga = torch.ones(3)
    b.grad = gb = torch.ones(3).to_sparse()
    opt = Clipped(torch.optim.Adam([a, b]), U, D)  # Adam refuses sparse gradients
    with pytest.raises(RuntimeError, match="sparse"):
        opt.step()
    assert a.grad is ga and b.grad is gb


def test_what_a_hook_of_the_wrapped_optimizer_clears_stays_cleared() -> None:
    (p,) = fresh((3,))
    inner = torch.optim.SGD([p], lr=0.1)
    inner.register_step_post_hook(lambda opt, *_: opt.zero_grad())
    p.grad = torch.ones(3)
    Clipped(inner, U, D).step()
    assert p.grad is None


# --- settings -------------------------------------------------------------------------------------------------------


def test_thresholds_are_settings_of_the_groups() -> None:
    a, b = fresh((3,), (3,))
    groups: list[dict[str, Any]] = [{"params": [a], "u": 0.2}, {"params": [b]}]
    inner = torch.optim.SGD(groups, lr=1.0)
    opt = Clipped(inner, 0.5, 0.1)
    assert [(g["u"], g["d"], g["dead_zone"]) for g in opt.param_groups] == [(0.2, 0.1, 0.0), (0.5, 0.1, 0.0)]
    start = torch.zeros(3)
    for p in (a, b):
        p.data.zero_()
        p.grad = torch.tensor([9.0, -0.3, 0.01])
    opt.step()
    assert torch.equal(a, torch.tensor([-0.2, 0.2, -0.1])) and torch.equal(b, torch.tensor([-0.5, 0.3, -0.1]))
    b.data.copy_(start)
    opt.param_groups[1]["u"], opt.param_groups[1]["dead_zone"] = 0.25, 0.05
    opt.step()
    assert torch.equal(b, torch.tensor([-0.25, 0.25, 0.0]))


BAD: dict[str, dict[str, Any]] = {
    "d=0.3 exceeds u=0.1; need 0 <= d <= u. Swap them, or lower d.": {"u": 0.1, "d": 0.3},
    "u=-1.0; need 0 <= u <= inf.": {"u": -1.0, "d": 0.0},
    "u=nan; need 0 <= u <= inf.": {"u": NAN, "d": 0.0},
    "d=-0.1; need 0 <= d <= u=1.0.": {"u": 1.0, "d": -0.1},
    "dead_zone=2.0 exceeds u=1.0": {"u": 1.0, "d": 0.0, "dead_zone": 2.0},
    "need 0 <= d <= u everywhere": {"u": torch.tensor([1.0, 0.1]), "d": 0.5},
    "u of shape (3,) does not broadcast against a tensor of shape (2,)": {"u": torch.ones(3), "d": 0.5},
    "dead_zone='auto'; need a number or a tensor with 0 <= dead_zone <= u.": {"u": 1.0, "d": 0.0, "dead_zone": "auto"},
    "u=None; need a number or a tensor with 0 <= u <= inf.": {"u": None, "d": 0.0},
    "u=True; need a number or a tensor": {"u": True, "d": 0.0},
    "u='1'; need a number or a tensor": {"u": "1", "d": 0.0},
    "d=[0.1, 0.2]; need a number or a tensor with 0 <= d <= u.": {"u": 1.0, "d": [0.1, 0.2]},
    "d=0.1 with u='auto'; need d='auto' or d=0": {"u": "auto", "d": 0.1},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_thresholds_are_refused_everywhere_before_anything_changes(message: str) -> None:
    bad, refused = BAD[message], pytest.raises(ValueError, match=re.escape(message))
    (p,), (q,) = fresh((2,)), fresh((2,))
    inner = torch.optim.Adam([p])
    with refused:
        Clipped(inner, **bad)
    assert "u" not in inner.defaults and "u" not in inner.param_groups[0]

    opt = Clipped(inner, 1.0, 0.1)
    with refused:
        opt.add_param_group({"params": [q], **bad})
    assert len(opt.param_groups) == 1

    saved = opt.state_dict()
    saved["param_groups"][0].update({"lr": 7.0, "dead_zone": 0.0, **bad})
    with refused:
        opt.load_state_dict(saved)
    assert opt.param_groups[0]["lr"] != 7.0 and opt.param_groups[0]["u"] == 1.0

    opt.add_param_group({"params": [q]})
    opt.param_groups[1].update(bad)  # the first group is fine, and still does not move
    p.grad, q.grad = torch.ones(2), torch.ones(2)
    before = p.detach().clone()
    with refused:
        opt.step()
    assert torch.equal(p, before) and not opt.state


def test_numbers_of_other_libraries_become_floats() -> None:
    (p,) = fresh((2,))
    opt = Clipped(torch.optim.SGD([p]), np.float64(1.0), np.float32(0.5), dead_zone=0)
    assert [type(opt.param_groups[0][key]) for key in ("u", "d", "dead_zone")] == [float] * 3
    assert type(opt.defaults["u"]) is float


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        return super().step(closure)


REFUSED: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "got LBFGS, whose step needs a closure": torch.optim.LBFGS,
    "got NeedsClosure, whose step needs a closure": NeedsClosure,
    "got BiClip, which already has u, d, dead_zone among its settings": BiClip,
    "got Clipped, which already has u, d, dead_zone": lambda ps: Clipped(torch.optim.SGD(ps), U, D),
    "got Adam, which already has u, d, dead_zone": lambda ps: Clipped(torch.optim.Adam(ps), U, D).optimizer,
    "got <class 'torch.optim.adam.Adam'>; need an instance": lambda ps: torch.optim.Adam,
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_wrapped_is_refused_by_name(message: str) -> None:
    inner = REFUSED[message](fresh((2,)))
    with pytest.raises(ValueError, match=re.escape(f"Invalid optimizer: {message}")):
        Clipped(inner, U, D)


# --- a torch optimizer ----------------------------------------------------------------------------------------------


def test_groups_state_and_defaults_are_the_wrapped_optimizers_own() -> None:
    params = fresh((3,))
    inner = torch.optim.Adam(params)
    opt = Clipped(inner, U, D)
    assert isinstance(opt, Optimizer)
    train(opt, None, params)
    opt.load_state_dict(opt.state_dict())  # replaces two of them
    assert opt.param_groups is inner.param_groups and opt.state is inner.state and opt.defaults is inner.defaults
    assert opt.param_groups[0]["params"][0] is params[0] and set(opt.state[params[0]]) >= {"exp_avg", "exp_avg_sq"}
    opt.param_groups, opt.state, opt.defaults = [], type(inner.state)(dict), {}
    assert not inner.param_groups and not inner.state and not inner.defaults


def test_zero_grad() -> None:
    (p,) = fresh((3,))
    opt = Clipped(torch.optim.Adam([p]), U, D)
    p.grad = g = torch.ones(3)
    opt.zero_grad(set_to_none=False)
    assert p.grad is g and not g.any()
    opt.zero_grad()
    assert p.grad is None


def test_a_closure_is_called_once_with_gradients_enabled() -> None:
    (p,) = fresh((3,))
    p.data.zero_()
    opt = Clipped(torch.optim.SGD([p], lr=1.0), U, D)
    losses = []

    def closure() -> Tensor:
        opt.zero_grad()
        loss = (p * torch.tensor([9.0, 0.1, 0.001])).sum()
        loss.backward()
        losses.append(loss)
        return loss

    assert opt.step(closure) is losses[0]
    assert len(losses) == 1 and torch.equal(p, torch.tensor([-0.5, -0.1, -0.01]))


def test_a_group_added_later_gets_the_thresholds() -> None:
    a, b = fresh((3,), (3,))
    opt = Clipped(torch.optim.SGD([a], lr=0.1), U, D)
    opt.add_param_group({"params": iter([b]), "d": 0.2})
    assert opt.param_groups[1]["params"] == [b]
    assert (opt.param_groups[1]["u"], opt.param_groups[1]["d"], opt.param_groups[1]["lr"]) == (U, 0.2, 0.1)


def test_names_pass_through() -> None:
    model = nn.Linear(2, 1)
    opt = Clipped(torch.optim.Adam(model.named_parameters()), U, D)
    assert opt.param_groups[0]["param_names"] == ["weight", "bias"]
    assert opt.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("u", [U, torch.tensor(U), torch.tensor([0.25, 0.5, 1.0])], ids=["number", "0-dim", "tensor"])
def test_state_goes_through_a_file(u: Any) -> None:
    first, second = fresh((4, 3)), fresh((4, 3))
    opt = Clipped(torch.optim.Adam(first, lr=0.1), u, D, 1e-3)
    train(opt, None, first)
    saved = through_a_file(opt.state_dict())
    other = Clipped(torch.optim.Adam(second), 7.0, 3.0)
    other.load_state_dict(saved)
    second[0].data.copy_(first[0].data)
    group = other.param_groups[0]
    assert torch.equal(torch.as_tensor(group["u"]), torch.as_tensor(u)) and type(group["u"]) is type(u)
    assert (group["d"], group["dead_zone"], group["lr"]) == (D, 1e-3, 0.1)
    assert same_bits(train(opt, None, first)[0], train(other, None, second)[0])


def test_a_checkpoint_of_the_bare_optimizer_loads_and_leaves_the_thresholds() -> None:
    params, bare = fresh((3,)), fresh((3,))
    adam = torch.optim.Adam(bare, lr=0.3)
    train(None, adam, bare, u=U, d=D)
    opt = Clipped(torch.optim.Adam(params), U, D)
    opt.param_groups[0]["u"] = 0.25
    opt.load_state_dict(adam.state_dict())
    assert (opt.param_groups[0]["lr"], opt.param_groups[0]["u"], opt.param_groups[0]["d"]) == (0.3, 0.25, D)
    assert torch.equal(opt.state[params[0]]["exp_avg"], adam.state[bare[0]]["exp_avg"])
    opt.optimizer.load_state_dict(adam.state_dict())  # past the wrapper: the constructor's thresholds hold
    train(opt, None, params, steps=1)
    assert (opt.param_groups[0]["u"], opt.param_groups[0]["d"]) == (U, D)


def test_a_checkpoint_of_another_shape_is_refused_by_torch() -> None:
    a, b = fresh((3,), (3,))
    two = Clipped(torch.optim.Adam([{"params": [a]}, {"params": [b]}]), U, D)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        Clipped(torch.optim.Adam(fresh((3,))), U, D).load_state_dict(two.state_dict())


def test_state_by_parameter_name() -> None:
    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    opts = [
        Clipped(torch.optim.Adam(m.parameters(), lr=lr), u, D)
        for m, lr, u in zip(models, (0.1, 1), (U, 9), strict=True)
    ]
    for p in models[0].parameters():
        p.grad = torch.ones_like(p)
    opts[0].step()
    load_named_state_dict(models[1], opts[1], through_a_file(named_state_dict(models[0], opts[0])))
    group = opts[1].param_groups[0]
    assert (group["lr"], group["u"], group["d"]) == (0.1, U, D)
    assert torch.equal(opts[1].state[models[1].bias]["exp_avg"], opts[0].state[models[0].bias]["exp_avg"])


@pytest.mark.parametrize("again", [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))], ids=["copy", "pickle"])
def test_copies_are_independent_and_go_on_alike(again: Callable[[Clipped], Clipped]) -> None:
    params = fresh((4, 3))
    opt = Clipped(torch.optim.Adam(params, lr=0.1), U, D)
    torch.optim.lr_scheduler.ConstantLR(opt)  # leaves a patched step on the instance
    train(opt, None, params)
    other = again(opt)
    (theirs,) = other.param_groups[0]["params"]
    assert type(other.optimizer) is torch.optim.Adam and other.optimizer is not opt.optimizer
    assert theirs is not params[0]
    other.param_groups[0]["u"] = 0.1
    assert opt.param_groups[0]["u"] == U
    other.param_groups[0]["u"] = U
    assert same_bits(train(opt, None, params)[0], train(other, None, [theirs])[0])
    other.register_step_post_hook(lambda *_: None)


def test_hooks_fire_and_see_the_true_gradients() -> None:
    (p,) = fresh((2,))
    opt = Clipped(torch.optim.SGD([p]), U, D)
    p.grad = g = torch.tensor([9.0, 0.001])
    seen: list[Any] = []
    opt.register_step_pre_hook(lambda o, *_: seen.append(("before", o, p.grad)))
    opt.register_step_post_hook(lambda o, *_: seen.append(("after", o, p.grad)))
    opt.step()
    assert [(when, o is opt, grad is g) for when, o, grad in seen] == [("before", True, True), ("after", True, True)]


def test_hooks_around_the_state_dict() -> None:
    opt = Clipped(torch.optim.SGD(fresh((2,))), U, D)
    seen = []
    opt.register_state_dict_pre_hook(lambda o: seen.append(("saving", o)))
    opt.register_state_dict_post_hook(lambda o, state: {**state, "note": 1})
    opt.register_load_state_dict_pre_hook(lambda o, state: {k: v for k, v in state.items() if k != "note"})
    opt.register_load_state_dict_post_hook(lambda o: seen.append(("loaded", o)))
    saved = opt.state_dict()
    assert saved["note"] == 1
    opt.load_state_dict(saved)
    assert seen == [("saving", opt), ("loaded", opt)]


def test_repr_shows_the_wrapped_optimizer_and_the_thresholds() -> None:
    text = repr(Clipped(torch.optim.Adam(fresh((2,)), lr=0.1), U, D))
    assert text.startswith("Clipped(Adam (\nParameter Group 0\n") and text.endswith("\n))")
    assert all(f"    {line}\n" in text for line in ("u: 0.5", "d: 0.01", "dead_zone: 0.0", "lr: 0.1"))


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "StepLR": lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5),
    "CosineAnnealingLR": lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 4),
    "OneCycleLR": lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=4),  # cycles betas
    "LambdaLR": lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda i: 1 / (1 + i)),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_do_to_it_what_they_do_to_the_bare_optimizer(name: str) -> None:
    ours, theirs = fresh((4,)), fresh((4,))
    opt, plain = Clipped(torch.optim.Adam(ours, lr=0.1), U, D), torch.optim.Adam(theirs, lr=0.1)
    schedules = SCHEDULERS[name](opt), SCHEDULERS[name](plain)
    rates = []
    for step in range(3):
        g = gradient(ours[0], step)
        ours[0].grad, theirs[0].grad = g, biclip(g, U, D)
        opt.step()
        plain.step()
        for schedule in schedules:  # would warn, had the step not been seen
            schedule.step()
        assert opt.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
        rates.append(opt.param_groups[0]["lr"])
    assert len(set(rates)) > 1 and same_bits(ours[0], theirs[0])


def test_plateau_scheduler() -> None:
    opt = Clipped(torch.optim.Adam(fresh((4,)), lr=0.1), U, D)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.5)
    for loss in (1.0, 1.0, 1.0):
        schedule.step(loss)
    assert opt.param_groups[0]["lr"] == 0.025


@pytest.mark.parametrize("fused", [None, True])
def test_a_scaler_unscales_before_the_clipping(fused: bool | None) -> None:
    (p,) = fresh((3,))
    p.data.zero_()
    inner = torch.optim.SGD([p], lr=1.0, fused=fused)
    opt = Clipped(inner, U, D)
    assert getattr(inner, "_step_supports_amp_scaling", False) is bool(fused)
    assert not getattr(opt, "_step_supports_amp_scaling", False)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale((p * torch.tensor([9.0, 0.125, 0.001])).sum()).backward()
    scaler.step(opt)
    scaler.update()
    assert torch.equal(p, torch.tensor([-0.5, -0.125, -0.01]))
    assert p.grad is not None and torch.equal(p.grad, torch.tensor([9.0, 0.125, 0.001]))

    before = p.detach().clone()
    p.grad = torch.tensor([INF, 0.0, 0.0])
    scaler.step(opt)  # would be clipped to u, were it not for the scaler
    scaler.update()
    assert torch.equal(p, before) and scaler.get_scale() == 512.0


def test_clipped_copies_do_not_outlive_the_step() -> None:
    (p,) = fresh((5,))
    seen: list[weakref.ref[Tensor]] = []
    inner = torch.optim.SGD([p], lr=0.1)
    inner.register_step_pre_hook(lambda *_: seen.append(weakref.ref(p.grad)))  # type: ignore[arg-type]
    opt = Clipped(inner, U, D)
    p.grad = torch.ones(5)
    opt.step()
    assert len(seen) == 1 and seen[0]() is None


def test_it_can_be_compiled() -> None:
    ours, theirs = fresh((5,), (3, 2)), fresh((5,), (3, 2))
    opt, plain = Clipped(torch.optim.SGD(ours, lr=0.1), U, D), torch.optim.SGD(theirs, lr=0.1)
    step = torch.compile(opt.step, backend="aot_eager")
    for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
        p.grad = gradient(p, i)
        q.grad = biclip(p.grad, U, D)
    given_ = [p.grad for p in ours]
    step()
    plain.step()
    assert all(map(torch.allclose, ours, theirs))
    assert all(p.grad is g for p, g in zip(ours, given_, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["Adam, foreach", "Adam, fused", "SGD, momentum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    for u in (U, torch.tensor(U, device="cuda"), torch.tensor([0.25, 0.5, 1.0, 2.0, INF], device="cuda")):
        ours, theirs = ([nn.Parameter(p.detach().cuda()) for p in fresh((7, 5), (5,), dtype=dtype)] for _ in range(2))
        opt, plain = Clipped(OPTIMIZERS[name](ours), u, D, 1e-3), OPTIMIZERS[name](theirs)
        opt.load_state_dict(through_a_file(opt.state_dict()))
        for step in range(3):
            for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
                p.grad = gradient(p, step, i).cuda()
                q.grad = biclip(p.grad, u, D, 1e-3)
            given_ = [p.grad for p in ours]
            opt.step()
            plain.step()
            assert all(p.grad is g for p, g in zip(ours, given_, strict=True))
        assert all(map(same_bits, ours, theirs))
    with pytest.raises(ValueError, match="need 0 <= d <= u everywhere"):
        Clipped(OPTIMIZERS[name](ours), torch.tensor([0.1], device="cuda"), 0.5)
