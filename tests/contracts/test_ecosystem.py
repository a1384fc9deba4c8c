"""Traps that torch and the libraries around it set for an optimizer: one test each, named after the trap."""

import copy
import inspect
import io
import pickle
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.optim import lr_scheduler as sched

from tailopt import BiClip, L2Clip
from tests.contracts.optimizer_table import (
    BITES,
    IMPLEMENTATIONS,
    OPTIMIZERS,
    every_implementation,
    every_optimizer,
    every_option,
    fresh,
    gradients,
    option_id,
    pairs,
    ulps,
)

BAD_NUMBERS = [
    {"lr": -1.0},
    {"lr": float("nan")},
    {"lr": torch.tensor([0.1, 0.1])},
    {"u": 0.1, "d": 0.3},
    {"u": float("nan")},
    {"d": float("nan")},
    {"weight_decay": -1.0},
]
bad_numbers = pytest.mark.parametrize("bad", BAD_NUMBERS, ids=option_id)


def moved(p: Tensor, before: Tensor) -> bool:
    return not torch.equal(p.detach(), before)


# --- Construction and groups --------------------------------------------------------------------------------------


@every_optimizer
@every_implementation
def test_parameters_alone_are_enough(cls, impl):
    p = fresh([(3,)])
    gradients(p)
    before = p[0].detach().clone()
    cls(p, **IMPLEMENTATIONS[impl]).step()
    assert moved(p[0], before)


@every_optimizer
@bad_numbers
def test_a_group_with_bad_numbers_is_refused_like_a_constructor(cls, bad):
    p, q = fresh([(1,), (1,)])
    with pytest.raises(ValueError, match="Invalid|Tensor lr must be 1-element"):
        cls([{"params": [p]}, {"params": [q], **bad}])


@every_optimizer
def test_a_group_is_judged_with_the_defaults_it_inherits(cls):
    p, q = fresh([(1,), (1,)])
    with pytest.raises(ValueError, match="Invalid thresholds"):
        cls([{"params": [p]}, {"params": [q], "d": 2.0}], u=1.0)
    cls([{"params": [p]}, {"params": [q], "d": 2.0}], u=3.0)


@every_optimizer
@bad_numbers
def test_a_refused_group_is_not_added(cls, bad):
    p, q = fresh([(1,), (1,)])
    opt = cls([p])
    for _ in range(2):
        with pytest.raises(ValueError, match="Invalid|Tensor lr must be 1-element"):
            opt.add_param_group({"params": [q], **bad})
        assert len(opt.param_groups) == 1
    opt.add_param_group({"params": [q]})
    assert len(opt.param_groups) == 2


@every_optimizer
@every_implementation
def test_a_learning_rate_of_zero_is_legal_and_moves_nothing(cls, impl):
    """Cosine schedules end there, and checkpoint helpers step with it."""
    for lr in (0.0, torch.tensor(0.0)):
        p = torch.tensor([1.5, -0.0, 0.0], requires_grad=True)
        before = p.detach().clone()
        p.grad = torch.tensor([1.0, -2.0, 0.0])
        cls([p], **{**BITES[cls], "lr": lr}, **IMPLEMENTATIONS[impl]).step()
        assert torch.equal(p.detach(), before)


@every_optimizer
def test_integer_and_inference_tensors_are_accepted_at_construction(cls):
    with torch.inference_mode():
        inference = torch.ones(2)
    cls([torch.arange(3), inference])


@every_optimizer
def test_torchs_own_keys_stand_in_every_group_and_in_the_defaults(cls):
    p, q = fresh([(1,), (1,)])
    opt = cls([{"params": [p]}, {"params": [q], "maximize": True}])
    for place in (opt.defaults, *opt.param_groups):
        assert {"lr", "maximize", "foreach", "capturable", "differentiable", "fused"} <= set(place)
    assert opt.param_groups[1]["maximize"]
    assert not opt.param_groups[0]["maximize"]


@every_optimizer
@every_implementation
def test_zero_grad_can_fill_instead_of_dropping(cls, impl):
    params = fresh([(3,), (2, 2)])
    gradients(params)
    grads = [p.grad for p in params]
    cls(params, **IMPLEMENTATIONS[impl]).zero_grad(set_to_none=False)
    assert all(p.grad is g and not g.any() for p, g in zip(params, grads, strict=True))


@every_optimizer
@pytest.mark.parametrize("number", [np.float64, np.float32, np.int64], ids=lambda t: t.__name__)
def test_numpy_numbers_do_not_reach_the_saved_file(cls, number):
    """``torch.load(weights_only=True)`` refuses them; so does it an Enum."""
    p, q = fresh([(2,), (2,)])
    opt = cls([p], lr=number(1), u=number(2), d=number(1), weight_decay=number(0))
    opt.add_param_group({"params": [q], "lr": number(2), "u": number(3), "d": number(2), "weight_decay": number(1)})
    for place in (opt.defaults, *opt.param_groups):
        assert not [k for k, v in place.items() if isinstance(v, np.generic)]
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["param_groups"][1]["lr"] == 2


@every_optimizer
def test_the_foreach_function_is_found_beside_the_class(cls):
    """A test of torch's replaces ``_multi_tensor_<name>`` in the class's module and asks whether it was called."""
    name = f"_multi_tensor_{cls.__name__.lower()}"
    module = inspect.getmodule(cls)
    p = fresh([(3,)])
    gradients(p)
    before = p[0].detach().clone()
    opt = cls(p, **BITES[cls], foreach=True)
    with mock.patch.object(module, name) as replaced:
        opt.step()
    assert replaced.called
    assert not moved(p[0], before)


# --- step, hooks, closures ----------------------------------------------------------------------------------------


@every_optimizer
def test_a_subclass_fires_its_hooks_once(cls):
    """The hook wrapper goes around each class's ``step``: calling up would fire twice."""

    class Mine(cls):  # type: ignore[misc, valid-type]
        pass

    for kind in (cls, Mine):
        p = fresh([(2,)])
        gradients(p)
        opt, fired = kind(p, **BITES[cls]), []
        opt.register_step_post_hook(lambda *_, fired=fired: fired.append(1))
        opt.step()
        assert fired == [1]


@every_optimizer
@every_implementation
def test_state_stays_empty_because_nobody_reads_it(cls, impl):
    """It is a ``defaultdict``: a look creates an entry, which then goes into every checkpoint."""
    params = fresh([(3,), (2,)])
    opt = cls(params, **BITES[cls], **IMPLEMENTATIONS[impl])
    for i in range(2):
        gradients(params, i)
        opt.step()
    copy.deepcopy(opt)
    assert opt.state_dict()["state"] == {}
    opt.state[params[0]]  # somebody else looks
    opt.load_state_dict(opt.state_dict())
    opt.step()


@every_optimizer
@every_implementation
def test_a_bad_second_group_is_found_before_the_first_moves(cls, impl):
    params = fresh([(3,), (2,)])
    gradients(params)
    before = [p.detach().clone() for p in params]
    opt = cls([{"params": [p]} for p in params], **BITES[cls], **IMPLEMENTATIONS[impl])
    opt.param_groups[1]["d"] = 99.0
    with pytest.raises(ValueError, match="Invalid thresholds"):
        opt.step()
    assert not any(moved(p, q) for p, q in pairs(params, before))
    opt.param_groups[1]["d"] = 0.0

    def closure() -> float:
        opt.param_groups[1]["lr"] = float("nan")
        return 0.0

    with pytest.raises(ValueError, match="Invalid learning rate"):
        opt.step(closure)
    assert not any(moved(p, q) for p, q in pairs(params, before))


# --- Flags and dispatch -------------------------------------------------------------------------------------------


@every_optimizer
@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_ first"])
def test_every_group_of_a_flagged_optimizer_honours_the_scale(cls, unscale):
    """One flag for the object, but each group may ask for another implementation."""
    flags = [{}, {"fused": False}, {"fused": False, "foreach": True}, {"fused": None}]
    scaled, plain = fresh([(3,)] * 4), fresh([(3,)] * 4)
    opt = cls([{"params": [p], **f} for p, f in zip(scaled, flags, strict=True)], **BITES[cls], fused=True)
    gradients(scaled)
    gradients(plain)
    for p in scaled:
        p.grad *= 1024
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    if unscale:
        scaler.unscale_(opt)
    scaler.step(opt)
    cls([{"params": [p]} for p in plain], **BITES[cls]).step()
    assert max(ulps(p, q) for p, q in pairs(scaled, plain)) <= 4
    assert all(torch.equal(p.grad, q.grad) for p, q in pairs(scaled, plain))


@every_optimizer
@pytest.mark.parametrize("impl", ["default", "single", "foreach"])
def test_without_the_flag_the_scaler_unscales_and_a_group_may_be_fused(cls, impl):
    scaled, plain = fresh([(3,), (4,)]), fresh([(3,), (4,)])
    opt = cls(
        [{"params": scaled[:1], "fused": True, "foreach": False}, {"params": scaled[1:]}],
        **BITES[cls],
        **IMPLEMENTATIONS[impl],
    )
    gradients(scaled)
    gradients(plain)
    for p in scaled:
        p.grad *= 1024
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    scaler.step(opt)
    cls(plain, **BITES[cls]).step()
    assert max(ulps(p, q) for p, q in pairs(scaled, plain)) <= 4


@every_optimizer
def test_a_scaler_without_any_gradient(cls):
    """The plain protocol refuses, in torch's words; the fused one does nothing, and gets the int 0 as found_inf."""
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    p = fresh([(2,)])
    before = p[0].detach().clone()
    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
        scaler.step(cls(p))
    scaler.step(cls(p, fused=True))
    assert not moved(p[0], before)


@every_optimizer
def test_half_precision_gradients_and_the_scaler(cls):
    """The scaler refuses to unscale them itself, and leaves them to a fused step."""
    p, q = fresh([(2,)], torch.float16), fresh([(2,)], torch.float16)
    gradients(p)
    gradients(q)
    p[0].grad *= 1024
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.step(cls(p, **BITES[cls]))
    scaler.step(cls(p, **BITES[cls], fused=True))
    cls(q, **BITES[cls]).step()
    assert torch.equal(p[0].grad, q[0].grad)
    assert ulps(p[0], q[0]) <= (cls is L2Clip)


LAYOUTS = {
    "transposed gradient": lambda p, g: (p, g.t().contiguous().t()),
    "transposed parameter": lambda p, g: (p.t().contiguous().t(), g),
    "both transposed": lambda p, g: (p.t().contiguous().t(), g.t().contiguous().t()),
    "every second element of the gradient": lambda p, g: (p, torch.stack([g, -9 * g], -1)[..., 0]),
    "every second element of the parameter": lambda p, g: (torch.stack([p, p], -1)[..., 0], g),
    "a slice with an offset": lambda p, g: (torch.cat([p, p])[len(p) :], torch.cat([g, g])[len(g) :]),
    "flipped gradient": lambda p, g: (p, g.flip(0).flip(0)),
    "expanded gradient": lambda p, g: (p, g[:, :1].expand(g.shape)),
    "column of a wider matrix": lambda p, g: (
        torch.cat([p, p], 1)[:, : p.shape[1]],
        torch.cat([g, g], 1)[:, g.shape[1] :],
    ),
}


@every_optimizer
@every_implementation
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_of_parameter_and_gradient_need_not_agree(cls, impl, layout):
    """torch's own fused SGD applies a transposed gradient in the order of its memory."""
    p, g = fresh([(6, 4)])[0].detach(), torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    p, g = LAYOUTS[layout](p, g)
    plain = p.contiguous().clone()
    p.requires_grad_()
    p.grad = g
    assert p.grad.stride() == g.stride()
    plain.requires_grad_().grad = g.contiguous().clone()
    cls([p], **BITES[cls], **IMPLEMENTATIONS[impl]).step()
    cls([plain], **BITES[cls], **IMPLEMENTATIONS["single"]).step()
    assert ulps(p, plain) <= 4 * (cls is L2Clip)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), max_size=4),
    orders=st.tuples(st.permutations(range(4)), st.permutations(range(4))),
    gaps=st.tuples(st.integers(1, 2), st.integers(1, 2)),
)
@pytest.mark.parametrize("impl", ["default", "fused"])
def test_any_pair_of_strides(impl, shape, orders, gaps):
    """Dimensions in any order in memory, with or without gaps, for the parameter and for the gradient."""

    def lay(x: Tensor, order: tuple[int, ...], gap: int) -> Tensor:
        order = [k for k in order if k < x.dim()]
        wide = x.permute(order).contiguous().unsqueeze(-1).repeat(*[1] * x.dim(), gap)[..., 0]
        return wide.permute([order.index(k) for k in range(x.dim())])

    p, g = fresh([tuple(shape)])[0].detach(), torch.randn(shape, generator=torch.Generator().manual_seed(1))
    plain = p.clone().requires_grad_()
    plain.grad = g.clone()
    p, g = lay(p, orders[0], gaps[0]).requires_grad_(), lay(g, orders[1], gaps[1])
    assert torch.equal(p, plain)
    p.grad = g
    BiClip([p], **BITES[BiClip], **IMPLEMENTATIONS[impl]).step()
    BiClip([plain], **BITES[BiClip], **IMPLEMENTATIONS["single"]).step()
    assert ulps(p, plain) == 0


# What a cache of addresses must notice between two steps. Each changes p or p.grad behind the optimizer's back.
def replace_storage(p: Tensor) -> None:
    p.data = p.data.clone()


def replace_grad_object(p: Tensor) -> None:
    p.grad = p.grad.neg()


def replace_grad_storage(p: Tensor) -> None:
    p.grad.data = p.grad.data.neg()


def transpose_grad_storage(p: Tensor) -> None:
    p.grad.data = p.grad.data.neg().t().contiguous().t()


def drop_and_restore_grad(p: Tensor) -> None:
    p.grad = None
    p.grad = torch.ones_like(p)


def widen(p: Tensor) -> None:
    p.grad = None
    p.data = p.data.double()
    p.grad = torch.ones_like(p)


CHANGES = [
    replace_storage,
    replace_grad_object,
    replace_grad_storage,
    transpose_grad_storage,
    drop_and_restore_grad,
    widen,
]


@every_optimizer
@every_implementation
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_parameters_and_gradients_may_be_replaced_between_steps(cls, impl, change):
    params, fresh_eyes = fresh([(4, 3), (5, 5)]), fresh([(4, 3), (5, 5)])
    opt = cls(params, **BITES[cls], **IMPLEMENTATIONS[impl])
    gradients(params)
    gradients(fresh_eyes)
    kept = []
    for i in range(4):
        if i == 2:
            for p, q in pairs(params, fresh_eyes):
                kept += [p.data, p.grad.data]  # the old memory stays, so that writing there is seen as a wrong result
                change(p)
                change(q)
        opt.step()
        cls(fresh_eyes, **BITES[cls], **IMPLEMENTATIONS["single"]).step()
        for p, q in pairs(params, fresh_eyes):
            assert ulps(p, q) <= 4 * (i + 1) * (cls is L2Clip)


@every_optimizer
@every_implementation
def test_parameters_without_gradient_may_come_and_go(cls, impl):
    """A frozen layer thaws, another freezes: the list of what is stepped changes from step to step."""
    params, fresh_eyes = fresh([(4,), (5,), (6,)]), fresh([(4,), (5,), (6,)])
    opt = cls(params, **BITES[cls], **IMPLEMENTATIONS[impl])
    for i, missing in enumerate([0, 2, None, 1, None]):
        for some in (params, fresh_eyes):
            gradients(some, i)
            if missing is not None:
                some[missing].grad = None
        opt.step()
        cls(fresh_eyes, **BITES[cls], **IMPLEMENTATIONS["single"]).step()
        assert max(ulps(p, q) for p, q in pairs(params, fresh_eyes)) <= 4 * (i + 1) * (cls is L2Clip)


# --- Numbers that change ------------------------------------------------------------------------------------------


@every_optimizer
@every_implementation
@pytest.mark.parametrize("key", ["lr", "u", "d", "weight_decay", "maximize"])
def test_numbers_in_groups_are_read_at_every_step(cls, impl, key):
    value = {"lr": 0.125, "u": 0.25, "d": 0.0, "weight_decay": 0.5, "maximize": True}[key]
    start = {**BITES[cls], "d": 0.125}
    params, other = fresh([(4, 3)]), fresh([(4, 3)])
    opt = cls(params, **start, **IMPLEMENTATIONS[impl])
    for some in (params, other):
        gradients(some)
        for p in some:
            p.grad *= 0.01  # below d, so that d matters
            p.grad[0] *= 1000  # above u
    opt.step()
    cls(other, **start, **IMPLEMENTATIONS["single"]).step()
    opt.param_groups[0][key] = value
    opt.step()
    wrong = other[0].detach().clone().requires_grad_()
    wrong.grad = other[0].grad
    cls(other, **{**start, key: value}, **IMPLEMENTATIONS["single"]).step()
    assert ulps(params[0], other[0]) <= 8 * (cls is L2Clip)
    if cls is BiClip or key != "d":  # the norm here is above d
        cls([wrong], **start, **IMPLEMENTATIONS["single"]).step()
        assert ulps(params[0], wrong) > 100


@every_optimizer
@every_implementation
def test_a_tensor_lr_filled_in_place_is_seen(cls, impl):
    lr = torch.tensor(0.25)
    p = fresh([(4, 3)], torch.float64)
    opt = cls(p, **{**BITES[cls], "lr": lr}, **IMPLEMENTATIONS[impl])
    gradients(p)
    steps = []
    for value in (0.25, 0.5, 0.0):
        lr.fill_(value)
        before = p[0].detach().clone()
        opt.step()
        steps.append(p[0].detach() - before)
    torch.testing.assert_close(steps[1], 2 * steps[0], rtol=1e-9, atol=0)
    assert not steps[2].any()


@pytest.mark.parametrize("make", [sched.OneCycleLR, sched.CyclicLR], ids=lambda c: c.__name__)
def test_momentum_cycles_where_there_is_one(make):
    """As with SGD, also from 0. A dummy key in L2Clip would be scheduled, saved and believed."""
    p = fresh([(2,)])
    args = (0.1, 10) if make is sched.OneCycleLR else (0.1, 0.2)
    opt = BiClip(p)
    make(opt, *args)
    gradients(p)
    opt.step()
    assert opt.param_groups[0]["momentum"] > 0 and "momentum_buffer" in opt.state[p[0]]
    opt = L2Clip(fresh([(2,)]))
    with pytest.raises(ValueError, match="optimizer must support momentum or beta1"):
        make(opt, *args)
    make(opt, *args, cycle_momentum=False)
    assert "momentum" not in opt.param_groups[0]
    assert "betas" not in opt.param_groups[0]


@every_optimizer
@every_implementation
@pytest.mark.parametrize("key", ["lr", "u", "d"])
def test_loading_replaces_tensor_numbers_and_the_new_ones_count(cls, impl, key):
    """``load_state_dict`` deep-copies groups: a cached address would still read the old tensor."""
    numbers = {k: torch.tensor(v) for k, v in {**BITES[cls], "d": 0.5}.items()}
    p, q = fresh([(4, 3)]), fresh([(4, 3)])
    opt = cls(p, **numbers, **IMPLEMENTATIONS[impl])
    gradients(p)
    p[0].grad *= 0.1  # mostly below d, and a norm below 2
    q[0].grad = p[0].grad.clone()
    opt.step()
    cls(q, **numbers, **IMPLEMENTATIONS["single"]).step()
    opt.load_state_dict(opt.state_dict())
    new = opt.param_groups[0][key]
    assert new is not numbers[key]
    numbers[key].fill_(1.0)  # the old one is nobody's now
    changed = {"lr": 0.125, "u": 0.5, "d": 0.25}[key] if cls is BiClip else {"lr": 0.125, "u": 0.5, "d": 0.4}[key]
    new.fill_(changed)
    opt.step()
    cls(q, **{k: float(g) for k, g in opt.param_groups[0].items() if k in numbers}, **IMPLEMENTATIONS["single"]).step()
    assert ulps(p[0], q[0]) <= 8


@every_optimizer
def test_groups_share_the_tensor_lr_of_the_constructor(cls):
    """One ``fill_`` drives them all, until a state is loaded: then they share the new one."""
    lr = torch.tensor(0.5)
    params = fresh([(2,), (2,)])
    opt = cls([{"params": [p]} for p in params], lr=lr)
    assert all(g["lr"] is lr for g in opt.param_groups)
    opt.load_state_dict(opt.state_dict())
    assert opt.param_groups[0]["lr"] is opt.param_groups[1]["lr"]
    assert opt.param_groups[0]["lr"] is not lr


# --- Saving and loading -------------------------------------------------------------------------------------------


@every_optimizer
@every_implementation
def test_setstate_comes_with_and_without_defaults(cls, impl):
    """Loading hands over state and groups; unpickling the defaults too. Neither may rely on the other's keys."""
    p = fresh([(3,)])
    opt = cls(p, **BITES[cls], **IMPLEMENTATIONS[impl])
    reference = opt.param_groups[0].copy()
    late = {"maximize", "foreach", "capturable", "differentiable", "fused", "nonfinite"}
    old = {k: v for k, v in reference.items() if k not in late}
    opt.__setstate__({"state": opt.state, "param_groups": [dict(old)]})
    assert set(opt.param_groups[0]) == set(reference)
    blank = cls.__new__(cls)
    blank.__setstate__({"defaults": opt.defaults, "state": opt.state, "param_groups": [dict(old)]})
    gradients(p)
    before = p[0].detach().clone()
    blank.step()
    assert moved(p[0], before)
    assert repr(blank).startswith(cls.__name__)


@every_optimizer
@every_implementation
def test_caches_do_not_travel_in_a_pickle(cls, impl):
    """An address from another process must never be written to."""
    params = fresh([(300,), (20,)])
    gradients(params)
    opt = cls(params, **BITES[cls], **IMPLEMENTATIONS[impl])
    small = len(pickle.dumps(opt))
    for _ in range(3):
        opt.step()
    assert len(pickle.dumps(opt)) <= small + 64
    extra = {k: v for k, v in opt.__getstate__().items() if k not in ("defaults", "state", "param_groups")}
    assert all(v is None or isinstance(v, bool | int | float | str) for v in extra.values()), extra
    twin = pickle.loads(pickle.dumps(opt))
    before = [p.detach().clone() for p in params]
    for p in twin.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    twin.step()
    assert not any(moved(p, q) for p, q in pairs(params, before))
    assert all(moved(p, q) for p, q in pairs(twin.param_groups[0]["params"], before))


@every_optimizer
def test_the_scalers_attributes_exist_only_during_its_step(cls):
    opt = cls(fresh([(2,)]), fused=True)
    assert not hasattr(opt, "grad_scale")
    assert not hasattr(opt, "found_inf")
    assert {k for k in vars(opt) if not k.startswith("_")} == {"defaults", "state", "param_groups"}


@every_optimizer
@bad_numbers
def test_bad_numbers_in_a_loaded_dict_leave_the_object_as_it_was(cls, bad):
    params = fresh([(2,), (3,)])
    opt = cls([{"params": [p]} for p in params], **BITES[cls])
    state = copy.deepcopy(opt.state_dict())
    state["param_groups"][0]["lr"] = 7.0
    state["param_groups"][1].update(bad)
    before = copy.deepcopy(opt.state_dict())
    groups = opt.param_groups
    with pytest.raises(ValueError, match="Invalid|Tensor lr must be 1-element"):
        opt.load_state_dict(state)
    assert opt.param_groups is groups
    assert opt.state_dict() == before
    gradients(params)
    opt.step()


@every_optimizer
def test_foreign_state_is_left_alone(cls):
    """Hooks of others keep their things under keys that are no parameters."""
    p = fresh([(2,)])
    opt = cls(p, **BITES[cls])
    opt.state["theirs"] = 1
    gradients(p)
    opt.step()
    opt.load_state_dict(opt.state_dict())
    opt.step()
    assert opt.state["theirs"] == 1
    assert copy.deepcopy(opt).state["theirs"] == 1


# --- Gradients and parameters of every shape ----------------------------------------------------------------------


@every_optimizer
@every_implementation
@pytest.mark.parametrize(("of_p", "of_g"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_gradient_of_another_type(cls, impl, of_p, of_g):
    """Computed in fp32 either way, like a gradient that was converted (exactly) first."""
    p, wide = fresh([(5, 3)], of_p)[0], fresh([(5, 3)], of_p)[0].detach().float().requires_grad_()
    g = torch.randn(5, 3, generator=torch.Generator().manual_seed(2)).to(of_g)
    p.grad_dtype = None
    p.grad = g
    assert p.grad.dtype == of_g
    wide.grad = g.float()
    cls([p], **BITES[cls], **IMPLEMENTATIONS[impl]).step()
    cls([wide], **BITES[cls], **IMPLEMENTATIONS["single"]).step()
    assert ulps(p, wide.detach().to(of_p)) <= 4 * (cls is L2Clip)


@every_optimizer
@every_implementation
def test_channels_last(cls, impl):
    shape = (2, 3, 4, 4)
    p, plain = fresh([shape])[0].detach().to(memory_format=torch.channels_last), fresh([shape])[0]
    p.requires_grad_()
    g = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for grad in (g, g.to(memory_format=torch.channels_last)):
        p.grad, plain.grad = grad, g
        cls([p], **BITES[cls], **IMPLEMENTATIONS[impl]).step()
        cls([plain], **BITES[cls], **IMPLEMENTATIONS["single"]).step()
        assert p.is_contiguous(memory_format=torch.channels_last)
        assert ulps(p, plain) <= 8 * (cls is L2Clip)


@every_optimizer
@every_implementation
def test_a_parameter_that_overlaps_itself_is_refused(cls, impl):
    p = torch.ones(1, 3).expand(4, 3).requires_grad_()
    p.grad = torch.ones(4, 3)
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor refers to a single memory"):
        cls([p], **BITES[cls], **IMPLEMENTATIONS[impl]).step()
    assert torch.equal(p, torch.ones(4, 3))


@every_optimizer
@every_implementation
def test_scalars_and_tensors_without_elements(cls, impl):
    scalar, empty, flat = torch.tensor(2.5, requires_grad=True), *fresh([(0,), (0, 3)])
    for p in (scalar, empty, flat):
        p.grad = torch.ones_like(p)
    cls([empty, scalar, flat], **BITES[cls], **IMPLEMENTATIONS[impl]).step()
    assert scalar.item() == 2.5 - BITES[cls]["lr"] * (0.75 if cls is BiClip else 1.0)
    lonely = fresh([(0,)])
    lonely[0].grad = torch.ones_like(lonely[0])
    cls(lonely, **BITES[cls], **IMPLEMENTATIONS[impl]).step()


@every_optimizer
@pytest.mark.parametrize("impl", ["default", "single", "foreach"])
def test_a_lazily_conjugated_gradient(cls, impl):
    """``view_as_real`` refuses one; torch's Adam fails on it."""
    z = torch.randn(4, generator=torch.Generator().manual_seed(0), dtype=torch.complex64)
    p, q = z.clone().requires_grad_(), z.clone().requires_grad_()
    g = torch.randn(4, generator=torch.Generator().manual_seed(1), dtype=torch.complex64)
    p.grad, q.grad = g.conj(), g.conj().resolve_conj()
    assert p.grad.is_conj()
    cls([p], **BITES[cls], **IMPLEMENTATIONS[impl]).step()
    cls([q], **BITES[cls], **IMPLEMENTATIONS["single"]).step()
    torch.testing.assert_close(p, q, rtol=1e-6, atol=0)
    assert moved(p, z)


def sparse(values: list[float], indices: list[int], dtype: torch.dtype = torch.float32, size: int = 4) -> Tensor:
    return torch.sparse_coo_tensor([indices], torch.tensor(values, dtype=dtype), (size,), check_invariants=True)


@every_optimizer
@pytest.mark.parametrize("impl", ["default", "single", "foreach"])
def test_pieces_of_a_sparse_gradient_are_summed_before_clipping(cls, impl):
    p, q = fresh([(4,), (4,)], torch.float64)
    with torch.no_grad():
        q.copy_(p)
    p.grad = sparse([5.0, -4.5, 0.25], [1, 1, 3], torch.float64)  # 0.5 and 0.25 together
    q.grad = p.grad.to_dense()
    kwargs = {"lr": 0.25, "u": 0.4, "d": 0.3}
    cls([p], **kwargs, **IMPLEMENTATIONS[impl]).step()
    cls([q], **kwargs, **IMPLEMENTATIONS["single"]).step()
    torch.testing.assert_close(p, q, rtol=1e-12, atol=0)


@every_optimizer
@pytest.mark.parametrize("impl", ["default", "single", "foreach"])
def test_decay_of_a_sparsely_stepped_parameter_is_dense(cls, impl):
    p = torch.full((4,), 2.0, requires_grad=True)
    p.grad = sparse([0.5], [1])
    cls([p], lr=0.5, u=1.0, weight_decay=0.5, **IMPLEMENTATIONS[impl]).step()
    assert torch.equal(p.detach(), torch.tensor([1.5, 1.25, 1.5, 1.5]))


@every_optimizer
def test_fused_refuses_sparse_gradients_before_anything_moves(cls):
    first, p = fresh([(3,), (4,)])
    before = first.detach().clone()
    first.grad, p.grad = torch.ones(3), sparse([0.5], [1])
    opt = cls([first, p], **BITES[cls], fused=True)
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        opt.step()
    assert not moved(first, before)


@every_optimizer
def test_foreach_takes_lists_that_mix_sparse_and_dense_and_types(cls):
    def make() -> list[Tensor]:
        params = [*fresh([(4,), (4,)], torch.float32), *fresh([(4,), (4,)], torch.float64, 3)]
        gradients(params)
        params[0].grad = sparse([2.0, 1.0], [2, 2])
        params[2].grad = sparse([2.0, 0.1], [0, 3], torch.float64)
        return params

    a, b = make(), make()
    cls(a, **BITES[cls], foreach=True).step()
    cls(b, **BITES[cls], foreach=False, fused=False).step()
    assert max(ulps(p, q) for p, q in pairs(a, b)) <= 4 * (cls is L2Clip)
    assert all(
        moved(p, q.detach()) for p, q in pairs(a, [*fresh([(4,), (4,)]), *fresh([(4,), (4,)], torch.float64, 3)])
    )


@every_optimizer
@every_implementation
def test_a_lazily_negated_gradient(cls, impl):
    """A real tensor may carry a minus that its memory does not show."""
    p, q = fresh([(40,)])[0], fresh([(40,)])[0]
    g = torch.randn(40, generator=torch.Generator().manual_seed(1))
    p.grad, q.grad = torch._neg_view(g), -g
    assert p.grad.is_neg()
    cls([p], **BITES[cls], **IMPLEMENTATIONS[impl]).step()
    cls([q], **BITES[cls], **IMPLEMENTATIONS["single"]).step()
    assert ulps(p, q) <= 4 * (cls is L2Clip)


@every_optimizer
@every_implementation
def test_autograd_notices_that_a_parameter_was_stepped(cls, impl):
    """A backward pass through values from before the step is an error, not a wrong gradient."""
    p = fresh([(40,)])[0]
    gradients([p])
    loss = (p * p).sum()
    cls([p], **BITES[cls], **IMPLEMENTATIONS[impl]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@every_optimizer
@every_implementation
def test_a_parameter_that_gets_its_shape_later(cls, impl):
    layer = nn.LazyLinear(3)
    opt = cls(layer.parameters(), **BITES[cls], **IMPLEMENTATIONS[impl])
    opt.step()
    layer(torch.ones(2, 4)).sum().backward()
    before = layer.weight.detach().clone()
    opt.step()
    assert moved(layer.weight, before)


@every_optimizer
@every_implementation
def test_a_subclass_of_parameter(cls, impl):
    class Marked(nn.Parameter):
        pass

    p, q = Marked(fresh([(5,)])[0].detach()), fresh([(5,)])[0]
    gradients([p])
    gradients([q])
    cls([p], **BITES[cls], **IMPLEMENTATIONS[impl]).step()
    cls([q], **BITES[cls], **IMPLEMENTATIONS["single"]).step()
    assert type(p) is Marked
    assert ulps(p.detach().as_subclass(Tensor), q) <= 4 * (cls is L2Clip)


# --- What surrounds a step ----------------------------------------------------------------------------------------


@every_option
@every_implementation
@pytest.mark.parametrize("default", [torch.device("meta"), torch.float64, torch.bfloat16], ids=str)
def test_default_device_and_type_do_not_leak_into_a_step(cls, options, impl, default):
    """Scripts call ``torch.set_default_device("cuda")`` and keep parameters on the CPU."""
    p, q = fresh([(40,), (3, 2)]), fresh([(40,), (3, 2)])
    gradients(p)
    gradients(q)
    opt = cls(p, **{**BITES[cls], **options}, **IMPLEMENTATIONS[impl])
    cls(q, **{**BITES[cls], **options}, **IMPLEMENTATIONS[impl]).step()
    if isinstance(default, torch.device):
        with default:
            opt.step()
    else:
        torch.set_default_dtype(default)
        try:
            opt.step()
        finally:
            torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in pairs(p, q))


@every_option
@every_implementation
def test_deterministic_algorithms(cls, options, impl):
    p = fresh([(40,)])
    gradients(p)
    before = p[0].detach().clone()
    torch.use_deterministic_algorithms(True)
    try:
        cls(p, **{**BITES[cls], **options}, **IMPLEMENTATIONS[impl]).step()
    finally:
        torch.use_deterministic_algorithms(False)
    assert moved(p[0], before)


@every_optimizer
@pytest.mark.parametrize("impl", ["default", "fused"])
def test_a_parameter_given_twice_is_stepped_twice(cls, impl):
    """As torch does after its warning. Two threads that meet in the same memory would lose one of the steps."""
    p = torch.empty(1_000_003, requires_grad=True)
    p.grad = torch.ones_like(p)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        opt = cls([p, p], lr=0.125, u=0.5, d=0.5, **IMPLEMENTATIONS[impl])
    size = 0.125 * 0.5 if cls is BiClip else 0.125 * 0.5 / (2 * p.numel()) ** 0.5
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for _ in range(20):
            with torch.no_grad():
                p.fill_(2.0)
            opt.step()
            low, high = p.detach().aminmax()
            assert low == high
            assert low.item() == pytest.approx(2 - 2 * size, rel=1e-6)
    finally:
        torch.set_num_threads(threads)


# --- torch.compile ------------------------------------------------------------------------------------------------


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@every_optimizer
@every_implementation
@pytest.mark.parametrize("how", ["numbers", "tensors", "closure"])
def test_a_compiled_step_does_what_the_step_does(dynamo, cls, impl, how):
    """Dynamo maps the lists that ``_init_group`` fills, if they were passed by position; otherwise nothing moves."""
    numbers = {k: torch.tensor(v) for k, v in BITES[cls].items()} if how == "tensors" else BITES[cls]
    kwargs = {**numbers, "weight_decay": 0.1, **IMPLEMENTATIONS[impl]}
    eager, compiled = fresh([(4, 3), (5,)]), fresh([(4, 3), (5,)])
    a, b = cls(eager, **kwargs), cls(compiled, **kwargs)
    gradients(eager)
    gradients(compiled)
    closure = (lambda: 1.0) if how == "closure" else None

    @torch.compile(backend="eager")
    def step() -> Any:
        return b.step(closure)

    for _ in range(3):
        before = compiled[0].detach().clone()
        assert a.step(closure) == step()
        assert moved(compiled[0], before)
        assert max(ulps(p, q) for p, q in pairs(eager, compiled)) <= 12
    assert not b.param_groups[0]["capturable"], "and nothing was switched on behind our back"


@every_optimizer
@pytest.mark.parametrize("impl", ["default", "single", "foreach"])
@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
def test_the_plain_step_is_one_graph(dynamo, cls, impl, tensors):
    """Validation of tensor thresholds (``bool(tensor)``) would break it."""
    numbers = {k: torch.tensor(v) for k, v in BITES[cls].items()} if tensors else BITES[cls]
    eager, compiled = fresh([(4, 3), (5,)]), fresh([(4, 3), (5,)])
    a, b = cls(eager, **numbers, **IMPLEMENTATIONS[impl]), cls(compiled, **numbers, **IMPLEMENTATIONS[impl])
    gradients(eager)
    gradients(compiled)
    plain = b.step.__wrapped__.__wrapped__
    run = torch.compile(lambda: plain(b), backend="eager", fullgraph=True)
    for _ in range(2):
        a.step()
        with torch.no_grad():
            run()
    assert max(ulps(p, q) for p, q in pairs(eager, compiled)) <= 12
    assert moved(compiled[0], fresh([(4, 3), (5,)])[0].detach())


@every_optimizer
@pytest.mark.parametrize("impl", ["default", "single", "foreach"])
def test_a_scheduled_tensor_lr_compiles_once(dynamo, cls, impl):
    counter = CompileCounter()
    p, q = fresh([(4, 3)]), fresh([(4, 3)])
    opt = cls(p, **{**BITES[cls], "lr": torch.tensor(0.25)}, **IMPLEMENTATIONS[impl])
    eager = cls(q, **BITES[cls], **IMPLEMENTATIONS["single"])
    gradients(p)
    gradients(q)
    schedules = [sched.ExponentialLR(o, 0.5) for o in (opt, eager)]
    step = torch.compile(lambda: opt.step(), backend=counter)
    frames = []
    for _ in range(5):
        step()
        eager.step()
        for s in schedules:
            s.step()
        frames.append(counter.frame_count)
    assert frames[0] > 0, "something was compiled"
    assert frames[-1] == frames[0]
    assert ulps(p[0], q[0]) <= 20


@every_optimizer
def test_a_scheduled_number_compiles_twice_at_most(dynamo, cls):
    """The second graph has a symbolic lr: after it, no more."""
    counter = CompileCounter()
    p = fresh([(4, 3)])
    opt = cls(p, **BITES[cls], foreach=True)
    gradients(p)
    schedule = sched.ExponentialLR(opt, 0.5)
    step = torch.compile(lambda: opt.step(), backend=counter)
    frames = []
    for _ in range(5):
        step()
        schedule.step()
        frames.append(counter.frame_count)
    assert frames[0] > 0
    assert frames[-1] <= 2 * frames[0]


@pytest.mark.slow
@every_optimizer
@pytest.mark.parametrize("impl", ["single", "foreach"])
def test_generated_code_agrees(dynamo, cls, impl):
    """Through Inductor and a C++ compiler."""
    kwargs = {**BITES[cls], "lr": torch.tensor(0.25), "weight_decay": 0.1, **IMPLEMENTATIONS[impl]}
    eager, compiled = fresh([(10, 10), (10,)]), fresh([(10, 10), (10,)])
    a, b = cls(eager, **kwargs), cls(compiled, **copy.deepcopy(kwargs))
    gradients(eager)
    gradients(compiled)
    step = torch.compile(lambda: b.step())
    for _ in range(2):
        a.step()
        step()
    for p, q in pairs(eager, compiled):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=0)
    assert moved(compiled[0], fresh([(10, 10), (10,)])[0].detach())


# --- d amplifies rounding noise -----------------------------------------------------------------------------------


def test_a_bias_before_batch_norm_walks_without_a_dead_zone_and_stays_with_one():
    """Its true gradient is zero, its computed one is not: with d > 0 every coordinate takes a full step of noise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))
    x, y = torch.randn(64, 8), torch.randn(64, 1)
    (model(x) - y).pow(2).mean().backward()
    bias, weight = model[0].bias, model[0].weight
    noisy = bias.grad != 0
    assert noisy.any()
    assert bias.grad.abs().max() < 1e-6 * weight.grad.abs().max()
    for dead_zone in (0.0, "auto", 1e-6):
        twin = copy.deepcopy(model)
        for p, q in zip(twin.parameters(), model.parameters(), strict=True):
            p.grad = q.grad.clone()
        with torch.no_grad():
            twin[0].bias.zero_()
        BiClip(twin.parameters(), lr=1.0, u=1.0, d=1e-3, dead_zone=dead_zone).step()
        expected = torch.where(noisy, 1e-3, 0.0) if dead_zone == 0.0 else torch.zeros(16)
        assert torch.equal(twin[0].bias.detach().abs(), expected), dead_zone
        assert moved(twin[0].weight, weight.detach())


def test_the_table_of_optimizers_is_complete():
    """A new optimizer of the library belongs into the contract table."""
    import tailopt

    public = {v for v in vars(tailopt).values() if isinstance(v, type) and issubclass(v, torch.optim.Optimizer)}
    around_others = {tailopt.Clipped, tailopt.NestedOptimizer}  # their groups and state are another optimizer's
    assert public - around_others == set(OPTIMIZERS)
