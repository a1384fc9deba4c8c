"""What PyTorch asks of its own optimizers, asked of ours: every class, every implementation, every option.

The promises are those behind ``TestOptimRenewed``, ``TestDifferentiableOptimizer`` and the gradient-scaler tests in
PyTorch's repository, as far as they can be checked on a CPU. Where PyTorch compares with a tolerance we count units
in the last place, and the steps taken here are large enough for a wrong one to be seen.
"""

import copy
import io
import pickle
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import lr_scheduler as sched
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import SWALR
from torch.utils._pytree import tree_flatten

from tailopt import BiClip, L2Clip
from tests.contracts.optimizer_table import (
    BITES,
    IMPLEMENTATIONS,
    OPTIMIZERS,
    OPTIONS,
    every_implementation,
    every_optimizer,
    every_option,
    every_option_but_tensor_scope,
    fresh,
    gradients,
    option_id,
    pairs,
    ulps,
)

# Every implementation of BiClip rounds as the reference does, where the processor has a fused multiply-add. A norm is
# summed in an order of each implementation's own: with p in [2, 3] and steps below 0.5 that leaves a few ulps of p.
HAS_FMA = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
ULPS = {BiClip: 0 if HAS_FMA else 1, L2Clip: 4}
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def quadratic(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    return (weight.mv(x) + bias).pow(2).sum()


def step_with(cls: type, params: list[Tensor], seed: int = 1, **kwargs: Any) -> None:
    """One step of a new optimizer, from seeded gradients."""
    gradients(params, seed)
    cls(params, **kwargs).step()


# --- The direction -----------------------------------------------------------------------------------------------


@every_option
@every_implementation
@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "strided"])
def test_twenty_steps_lower_the_loss_or_raise_it_with_maximize(cls, options, impl, contiguous):
    gen = torch.Generator().manual_seed(3)
    if contiguous:
        weight, bias = torch.randn(10, 5, generator=gen), torch.randn(10, generator=gen)
    else:
        weight, bias = torch.randn(10, 5, 2, generator=gen)[..., 0], torch.randn(10, 2, generator=gen)[..., 0]
    weight.requires_grad_()
    bias.requires_grad_()
    x = torch.randn(5, generator=gen)
    opt = cls([weight, bias], **options, **IMPLEMENTATIONS[impl])
    before = quadratic(weight, bias, x).item()
    for _ in range(20):
        opt.zero_grad()
        quadratic(weight, bias, x).backward()
        opt.step()
    after = quadratic(weight, bias, x).item()
    assert after > before if options.get("maximize") else after < before


# --- The implementations agree -----------------------------------------------------------------------------------


def seven_steps(cls: type, dtype: torch.dtype, kwargs: dict[str, Any]) -> list[Tensor]:
    """A small network with a layer frozen for two steps, one step without gradients, and a 0-dim tensor in the list."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.sign() * (2 + p.abs()))
    scalar = torch.tensor(2.5, dtype=dtype, requires_grad=True)
    opt = cls([*model.parameters(), scalar], **kwargs)
    x = torch.linspace(0.1, 0.6, 6, dtype=dtype).reshape(3, 2)
    trail = []
    for i in range(7):
        opt.zero_grad()
        model[2].requires_grad_(i not in (3, 4))
        if i != 2:
            (model(x).sum() * scalar).backward()
        before = [p.detach().clone() for p in (*model.parameters(), scalar)]
        opt.step()
        trail += [p.detach().clone() for p in (*model.parameters(), scalar)]
        if i == 2:
            assert all(torch.equal(a, b) for a, b in zip(before, trail[-5:], strict=True)), "no gradient, no step"
        if i in (3, 4):
            assert torch.equal(before[2], trail[-3]), "a frozen layer moved"
        assert i == 2 or dtype.itemsize == 2 or not torch.equal(before[0], trail[-5]), "nothing moved"
        # The next step starts from the same place for all, so that roundings do not add up.
        with torch.no_grad():
            for p in (*model.parameters(), scalar):
                p.copy_(
                    p.sign() * (2 + torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).abs().to(dtype))
                )
    return trail


@pytest.mark.parametrize("impl", ["default", "foreach", "fused"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@every_option
def test_every_implementation_takes_the_same_steps(cls, options, dtype, impl):
    kwargs = {**BITES[cls], **options}
    single = seven_steps(cls, dtype, {**kwargs, **IMPLEMENTATIONS["single"]})
    other = seven_steps(cls, dtype, {**kwargs, **IMPLEMENTATIONS[impl]})
    assert max(ulps(a, b) for a, b in pairs(single, other)) <= ULPS[cls]


# Sizes on both sides of a vector, an unrolled loop and a cache line, and nothing at all.
SIZES = st.sampled_from([0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 257, 1025])
VALUES = st.sampled_from(
    [0.0, -0.0, 1e-42, -1e-30, 0.1, 0.5, -0.5, 0.75, -0.75, 3.0, float("inf"), -float("inf"), float("nan")]
)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.tuples(SIZES, st.sampled_from(FLOATS)), min_size=1, max_size=6),
    special=st.lists(VALUES, max_size=8),
    decay=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**16),
)
@pytest.mark.parametrize("impl", ["default", "foreach", "fused"])
def test_any_list_of_tensors_is_stepped_alike(impl, sizes, special, decay, seed):
    """Sizes, types and special values in any mixture; NaN and infinities go where the single way puts them."""

    def after(flags: dict[str, Any]) -> list[Tensor]:
        params = [fresh([(n,)], dtype, seed + i)[0] for i, (n, dtype) in enumerate(sizes)]
        gradients(params, seed)
        for p in params:
            k = min(len(special), p.numel())
            p.grad[:k] = torch.tensor(special[:k], dtype=torch.float64).to(p.dtype)
        BiClip(params, **BITES[BiClip], weight_decay=decay, **flags).step()
        return [p.detach() for p in params]

    single, other = after(IMPLEMENTATIONS["single"]), after(IMPLEMENTATIONS[impl])
    assert max(ulps(a, b) for a, b in pairs(single, other)) <= ULPS[BiClip]


@every_optimizer
@pytest.mark.parametrize("impl", ["default", "foreach", "fused"])
def test_a_list_of_mixed_types_and_layouts(cls, impl):
    def after(flags: dict[str, Any]) -> list[Tensor]:
        params = [fresh([(4, 3)], dtype, i)[0] for i, dtype in enumerate(FLOATS * 2)]
        params[4] = params[4].detach().t().requires_grad_()
        gradients(params)
        counter = torch.arange(6)  # an integer without a gradient may stand in the list
        opt = cls([*params, counter], **BITES[cls], **flags)
        opt.step()
        assert torch.equal(counter, torch.arange(6))
        return [p.detach() for p in params]

    single, other = after(IMPLEMENTATIONS["single"]), after(IMPLEMENTATIONS[impl])
    assert max(ulps(a, b) for a, b in pairs(single, other)) <= ULPS[cls]
    start = [fresh([(4, 3)], dtype, i)[0] for i, dtype in enumerate(FLOATS * 2)]
    assert all(not torch.equal(a, b) for a, b in pairs([s.t() if i == 4 else s for i, s in enumerate(start)], other))


# --- Numbers given as tensors -------------------------------------------------------------------------------------


@every_optimizer
@every_implementation
@pytest.mark.parametrize("dims", [0, 1, 2])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_tensor_lr_of_any_dimension_steps_like_a_number(cls, impl, dims, decay):
    number, tensor = fresh([(10, 5), (10,)]), fresh([(10, 5), (10,)])
    kwargs = {**BITES[cls], "weight_decay": decay, **IMPLEMENTATIONS[impl]}
    a, b = cls(number, **kwargs), cls(tensor, **{**kwargs, "lr": torch.tensor(kwargs["lr"]).reshape([1] * dims)})
    for i in range(3):
        gradients(number, i)
        gradients(tensor, i)
        a.step()
        b.step()
    # Formed in fp32 from a tensor and in double from a number: a rounding each for decay, product and sum, three steps.
    assert max(ulps(p, q) for p, q in pairs(number, tensor)) <= 6 + ULPS[cls]


@every_optimizer
@every_implementation
def test_tensor_thresholds_step_like_numbers(cls, impl):
    number, tensor = fresh([(10, 5), (10,)]), fresh([(10, 5), (10,)])
    kwargs = {**BITES[cls], **IMPLEMENTATIONS[impl]}
    step_with(cls, number, **kwargs)
    step_with(cls, tensor, **{**kwargs, "u": torch.tensor(kwargs["u"]), "d": torch.tensor(kwargs["d"])})
    assert max(ulps(p, q) for p, q in pairs(number, tensor)) <= 2 + ULPS[cls]
    assert not torch.equal(tensor[0], fresh([(10, 5), (10,)])[0])


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: sched.LambdaLR(o, lambda t: 0.9**t),
    "MultiplicativeLR": lambda o: sched.MultiplicativeLR(o, lambda t: 0.8),
    "StepLR": lambda o: sched.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: sched.MultiStepLR(o, [1, 3], 0.5),
    "ConstantLR": lambda o: sched.ConstantLR(o, 0.4, 3),
    "LinearLR": lambda o: sched.LinearLR(o, 0.4, 0.8, 4),
    "ExponentialLR": lambda o: sched.ExponentialLR(o, 0.7),
    "PolynomialLR": lambda o: sched.PolynomialLR(o, 8, 0.9),
    "CosineAnnealingLR": lambda o: sched.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: sched.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: sched.CyclicLR(o, 0.1, 0.4, 2, cycle_momentum=False),
    "OneCycleLR": lambda o: sched.OneCycleLR(o, 0.5, 8, cycle_momentum=False),
    "SequentialLR": lambda o: sched.SequentialLR(o, [sched.ConstantLR(o, 0.5, 2), sched.ExponentialLR(o, 0.6)], [2]),
    "ChainedScheduler": lambda o: sched.ChainedScheduler([sched.StepLR(o, 2, 0.5), sched.ExponentialLR(o, 0.9)]),
    "ReduceLROnPlateau": lambda o: sched.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=3),
}


@every_optimizer
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_drive_a_number_and_a_tensor_alike(cls, name):
    """Six steps of every scheduler: the parameters move by exactly the rates that the scheduler shows."""

    def six(lr: float | Tensor) -> tuple[list[float], list[Tensor]]:
        params = fresh([(3, 2), (3,)], torch.float64)
        # A tensor for each group: a shared one would be multiplied once a group by schedulers that compound.
        lrs = [lr, lr] if isinstance(lr, float) else [lr, lr.clone()]
        opt = cls([{"params": p, "lr": r} for p, r in zip(params, lrs, strict=True)], **BITES[cls])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*scheduler.step.*", module="torch")  # SequentialLR's own
            scheduler = SCHEDULERS[name](opt)
        rates, moved = [], []
        for _ in range(6):
            gradients(params)  # the same each time
            before = [p.detach().clone() for p in params]
            rates.append(float(opt.param_groups[1]["lr"]))
            opt.step()
            moved.append(torch.cat([(p.detach() - q).flatten() for p, q in pairs(params, before)]))
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        if isinstance(lr, Tensor):
            assert all(g["lr"] is r for g, r in zip(opt.param_groups, lrs, strict=True)), "filled, not replaced"
        return rates, moved

    rates, moved = six(0.25)
    # The direction of the clipped gradient, from the first step.
    unit = moved[0] / rates[0]
    for rate, m in zip(rates, moved, strict=True):
        torch.testing.assert_close(m, unit * rate, rtol=1e-12, atol=1e-14)
    assert len(set(rates)) > 1
    tensor_rates, tensor_moved = six(torch.tensor(0.25))
    assert tensor_rates == pytest.approx(rates, rel=1e-6, abs=1e-8)  # kept in fp32
    for rate, m in zip(tensor_rates, tensor_moved, strict=True):
        torch.testing.assert_close(m, unit * rate, rtol=1e-6, atol=1e-12)


# --- Complex and sparse -------------------------------------------------------------------------------------------


def as_real(x: Tensor) -> Tensor:
    return torch.view_as_real(x.detach()) if x.is_complex() else x.detach()


@every_option
@pytest.mark.parametrize("impl", ["default", "single", "foreach"])
def test_complex_parameters_are_pairs_of_real_ones(cls, options, impl):
    kwargs = {**BITES[cls], **options, **IMPLEMENTATIONS[impl]}
    gen = torch.Generator().manual_seed(0)
    mixed = [torch.randn(4, 3, generator=gen, dtype=torch.complex64), torch.randn(5, generator=gen)]
    mixed = [p.requires_grad_() for p in mixed]
    real = [as_real(p).clone().requires_grad_() for p in mixed]
    a, b = cls(mixed, **kwargs), cls(real, **kwargs)
    for _ in range(3):
        for p, q in pairs(mixed, real):
            p.grad = torch.randn(p.shape, generator=gen, dtype=p.dtype)
            q.grad = as_real(p.grad).clone()
        a.step()
        b.step()
    for p, q in pairs(mixed, real):
        torch.testing.assert_close(as_real(p), q.detach(), rtol=1e-6, atol=1e-6)


@every_option_but_tensor_scope
@pytest.mark.parametrize("impl", ["default", "single", "foreach"])
def test_complex_is_real_and_imaginary_part(cls, options, impl):
    """The parts as two parameters: the norm over everything is the same (that of a single tensor cannot be)."""
    kwargs = {**BITES[cls], **options, **IMPLEMENTATIONS[impl]}
    whole = torch.randn(4, generator=torch.Generator().manual_seed(0), dtype=torch.complex64).requires_grad_()
    parts = [whole.detach().real.clone().requires_grad_(), whole.detach().imag.clone().requires_grad_()]
    a, b = cls([whole], **kwargs), cls(parts, **kwargs)
    for _ in range(3):
        a.zero_grad()
        b.zero_grad()
        (whole**2 - 1).abs().sum().backward()
        (torch.complex(*parts) ** 2 - 1).abs().sum().backward()
        a.step()
        b.step()
    torch.testing.assert_close(whole.detach().real, parts[0].detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole.detach().imag, parts[1].detach(), rtol=1e-5, atol=1e-5)


def rosenbrock_gradient(p: Tensor) -> tuple[float, float]:
    x, y = p.tolist()
    return -400 * x * (y - x * x) - 2 * (1 - x), 200 * (y - x * x)


def sparse_vector(indices: list[int], values: list[float], dtype: torch.dtype, size: int = 2) -> Tensor:
    return torch.sparse_coo_tensor([indices], torch.tensor(values, dtype=dtype), (size,), check_invariants=True)


@every_optimizer
@pytest.mark.parametrize("impl", ["default", "single", "foreach"])
def test_sparse_gradients_step_like_dense_ones(cls, impl):
    """Coordinate descent on Rosenbrock's valley. The sparse gradient comes in two pieces of the same coordinate."""
    types_ = [torch.float32, torch.float64] if impl == "foreach" else [torch.float64]
    sparse = [torch.tensor([1.5, 1.5], dtype=t, requires_grad=True) for t in types_]
    dense = [p.detach().clone().requires_grad_() for p in sparse]
    kwargs = {"lr": 2e-3, "u": 1.0, "d": 0.1, **IMPLEMENTATIONS[impl]}
    a, b = cls(sparse, **kwargs), cls(dense, **kwargs)
    for i in range(300):
        k = i % 2
        for p, q in pairs(sparse, dense):
            g = rosenbrock_gradient(p.detach())[k]
            p.grad = sparse_vector([k, k], [g / 4, g - g / 4], p.dtype)
            q.grad = torch.tensor([g, 0.0] if k == 0 else [0.0, g], dtype=q.dtype)
        a.step()
        b.step()
    for p, q in pairs(sparse, dense):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=5e-6, atol=5e-6)
        assert not torch.equal(p.detach(), torch.tensor([1.5, 1.5], dtype=p.dtype))


@every_optimizer
def test_sparse_descent_ends_nearer_to_the_solution(cls):
    p = torch.tensor([1.5, 1.5], requires_grad=True)
    opt = cls([p], lr=2e-3, u=1.0)
    for i in range(1800):
        g = rosenbrock_gradient(p.detach())[i % 2]
        p.grad = sparse_vector([i % 2], [g], p.dtype)
        opt.step()
    assert torch.dist(p.detach(), torch.ones(2)) <= torch.dist(torch.tensor([1.5, 1.5]), torch.ones(2))


# --- Groups -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_groups_with_some_keys_are_two_optimizers(impl):
    kwargs = {**BITES[BiClip], **IMPLEMENTATIONS[impl]}
    together, apart = fresh([(4, 3), (7,)]), fresh([(4, 3), (7,)])
    own = {"lr": 0.5, "weight_decay": 0.1, "maximize": True}
    opt = BiClip([{"params": together[0]}, {"params": [together[1]], **own}], **kwargs)
    gradients(together)
    gradients(apart)
    opt.step()
    BiClip(apart[:1], **kwargs).step()
    BiClip(apart[1:], **{**kwargs, **own}).step()
    assert all(torch.equal(p, q) for p, q in pairs(together, apart))
    assert opt.param_groups[0]["weight_decay"] == 0.0
    assert opt.param_groups[1]["u"] == kwargs["u"]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_l2_groups_share_the_global_norm_and_group_scope_does_not(impl):
    """Both groups bring their own u; the norm is one (global) or each group's (group)."""
    flags = IMPLEMENTATIONS[impl]
    for scope in ("global", "group"):
        params = fresh([(4, 3), (7,)], torch.float64)
        before = [p.detach().clone() for p in params]
        gradients(params)
        L2Clip([{"params": params[0]}, {"params": params[1], "u": 0.25}], lr=0.5, u=0.5, scope=scope, **flags).step()
        norms = [p.grad.norm() for p in params]
        if scope == "global":
            norms = [torch.stack(norms).norm()] * 2
        for p, q, n, u in zip(params, before, norms, (0.5, 0.25), strict=True):
            torch.testing.assert_close(p.detach(), q - 0.5 * u * p.grad / n, rtol=1e-14, atol=1e-14)


@every_optimizer
@every_implementation
def test_a_group_with_a_vanishing_lr_stays(cls, impl):
    p, still = fresh([(3, 2), (2, 2)])
    before = still.detach().clone()
    gradients([p, still])
    kwargs = {**BITES[cls], **IMPLEMENTATIONS[impl], "lr": 1e-28}
    cls([{"params": [p], "lr": 0.1}, {"params": [still]}], **kwargs).step()
    assert torch.equal(still, before)
    assert not torch.equal(p, fresh([(3, 2), (2, 2)])[0])


@every_optimizer
@every_implementation
def test_an_empty_group_steps(cls, impl):
    p = fresh([(3,)])[0]
    gradients([p])
    opt = cls([{"params": []}, {"params": [p]}], **BITES[cls], **IMPLEMENTATIONS[impl])
    opt.step()
    assert not torch.equal(p, fresh([(3,)])[0])


# --- What must not move -------------------------------------------------------------------------------------------


@every_option
@every_implementation
def test_parameters_without_gradient_are_skipped_decay_included(cls, options, impl):
    with_grad, without, frozen = fresh([(3,), (4,), (5,)])
    frozen = frozen.detach()
    before = without.detach().clone(), frozen.clone(), with_grad.detach().clone()
    gradients([with_grad])
    opt = cls([without, with_grad, frozen], **{**BITES[cls], "weight_decay": 0.5, **options}, **IMPLEMENTATIONS[impl])
    opt.step()
    assert torch.equal(without, before[0])
    assert torch.equal(frozen, before[1])
    assert not torch.equal(with_grad, before[2])


@every_option
@pytest.mark.parametrize("flags", [*IMPLEMENTATIONS.values(), {"differentiable": True}], ids=option_id)
def test_zero_gradients_move_nothing(cls, options, flags):
    p = torch.tensor([1.5, -0.0, 0.0, -2.0], requires_grad="differentiable" not in flags)
    before = p.detach().clone()
    p.grad = torch.tensor([0.0, -0.0, 0.0, -0.0])
    opt = cls([p], **{**BITES[cls], **options}, **flags)
    opt.step()
    if options.get("weight_decay"):
        before *= 1 - opt.param_groups[0]["lr"] * options["weight_decay"]
    assert torch.equal(p.detach().view(torch.int32), before.view(torch.int32)), "not even the sign of a zero"


@every_option
@every_implementation
def test_gradients_are_never_written(cls, options, impl):
    params = fresh([(5, 1), (3,)])
    params.append(torch.randn(3, dtype=torch.complex64).requires_grad_() if impl != "fused" else fresh([(2,)])[0])
    gradients(params)
    opt = cls(params, **{**BITES[cls], **options}, **IMPLEMENTATIONS[impl])
    before = [(p.grad, p.grad._version, p.grad.clone()) for p in params]
    for _ in range(3):
        opt.step(lambda: torch.tensor(1.0))
    for p, (grad, version, value) in zip(params, before, strict=True):
        assert p.grad is grad
        assert grad._version == version
        assert torch.equal(grad, value)


# --- Closures, hooks, printing ------------------------------------------------------------------------------------


@every_optimizer
@every_implementation
def test_the_closure_runs_with_gradients_and_its_value_is_returned(cls, impl):
    p = fresh([(3,)])[0]
    opt = cls([p], **BITES[cls], **IMPLEMENTATIONS[impl])

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        opt.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    before = (p.detach() ** 2).sum().item()
    assert opt.step(closure).item() == pytest.approx(before)
    assert (p.detach() ** 2).sum() < before
    assert opt.step() is None
    with torch.no_grad():
        opt.step(closure)
        assert not torch.is_grad_enabled()


@every_optimizer
@every_implementation
def test_step_hooks_run_once_and_in_order(cls, impl):
    p = fresh([(2,)])[0]
    opt, other = cls([p], **BITES[cls], **IMPLEMENTATIONS[impl]), torch.optim.SGD([p])
    seen: list[str] = []

    def note(word: str) -> Callable[..., None]:
        return lambda *_: seen.append(word)

    handles = [
        register_optimizer_step_pre_hook(note("all before")),
        register_optimizer_step_post_hook(note("all after")),
        opt.register_step_pre_hook(note("own before")),
        opt.register_step_post_hook(note("own after")),
    ]
    order = ["all before", "own before", "own after", "all after"]
    try:
        opt.step()
        assert seen == order
        other.step()
        assert seen == [*order, "all before", "all after"]
        opt.step()
        assert seen == [*order, "all before", "all after", *order]
    finally:
        for h in handles:
            h.remove()
    opt.step()
    assert len(seen) == 10


@every_optimizer
def test_a_pre_hook_may_replace_the_closure(cls):
    opt = cls(fresh([(2,)]), **BITES[cls])
    opt.register_step_pre_hook(lambda o, args, kwargs: ((o, lambda: 7.0), {}))
    assert opt.step(lambda: 1.0) == 7.0


@every_option
def test_printing_names_the_class_and_its_settings(cls, options):
    text = repr(cls(fresh([(2,), (3,)]), **options))
    assert text.startswith(f"{cls.__name__} (")
    for key in (*options, "lr", "u", "d", "weight_decay", "nonfinite", "maximize", "foreach", "fused"):
        assert f"\n    {key}: " in text


@every_optimizer
def test_the_plain_step_is_two_wrappers_down(cls):
    """Compilers take ``step`` apart: the profiler's wrapper, the grad-mode switch, the function."""
    p, q = fresh([(3,)])[0], fresh([(3,)])[0]
    gradients([p])
    gradients([q])
    opt = cls([p], **BITES[cls])
    plain = opt.step.__wrapped__.__wrapped__
    assert not hasattr(plain, "__wrapped__")
    with torch.no_grad():
        plain(opt)
    cls([q], **BITES[cls]).step()
    assert torch.equal(p, q)
    assert not torch.equal(p, fresh([(3,)])[0])


@every_optimizer
@every_implementation
def test_step_can_be_replaced_on_the_instance(cls, impl):
    """Accelerate and schedulers put their own function on the object and watch whether it was called."""
    p = fresh([(3,)])[0]
    gradients([p])
    opt = cls([p], **BITES[cls], **IMPLEMENTATIONS[impl])
    original, calls = opt.step, []

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return original(*args, **kwargs)

    opt.step = types.MethodType(watched, opt)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    scaler.step(opt)
    assert calls == [opt]
    assert not torch.equal(p, fresh([(3,)])[0])
    sched.ExponentialLR(opt, 0.5)  # wraps it once more
    opt.step()
    assert calls == [opt, opt]
    for twin in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        twin.step()
    assert calls == [opt, opt], "a copy is free of the patch"
    opt.step = original
    opt.step()
    assert calls == [opt, opt]


# --- State: saving, loading, copying ------------------------------------------------------------------------------


def named(params: list[Tensor], names: bool) -> list[Any]:
    return [(f"p{i}", p) for i, p in enumerate(params)] if names else params


def same(a, b):
    """Whether two nested values are equal, tensors to the bit."""
    (of_a, shape_of_a), (of_b, shape_of_b) = tree_flatten(a), tree_flatten(b)
    equal = (torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(of_a, of_b, strict=False))
    return shape_of_a == shape_of_b and all(equal)


def without_names(state: dict[str, Any]) -> dict[str, Any]:
    return {
        **state,
        "param_groups": [{k: v for k, v in g.items() if k != "param_names"} for g in state["param_groups"]],
    }


@every_option
@every_implementation
@pytest.mark.parametrize("names", [(False, False), (True, False), (False, True), (True, True)], ids=str)
def test_a_loaded_optimizer_continues_alike(cls, options, impl, names):
    kwargs = {**BITES[cls], **options, **IMPLEMENTATIONS[impl]}
    a, b = fresh([(3, 2), (4,)]), fresh([(3, 2), (4,)])
    first = cls(named(a, names[0]), **kwargs)
    gradients(a)
    first.step()
    with torch.no_grad():
        for p, q in pairs(a, b):
            q.copy_(p)
    second = cls(named(b, names[1]), lr=123.0)  # what is loaded wins
    saved = copy.deepcopy(first.state_dict())  # loading takes tensors over, as in torch, and `first` steps on
    untouched = copy.deepcopy(saved)
    second.load_state_dict(saved)
    assert same(saved, untouched)
    for i in range(3):
        gradients(a, i)
        gradients(b, i)
        first.step()
        second.step()
        assert all(torch.equal(p, q) for p, q in pairs(a, b))
    assert same(without_names(first.state_dict()), without_names(second.state_dict()))
    if any(names):
        assert second.state_dict()["param_groups"][0]["param_names"] == ["p0", "p1"]
    second.param_groups.extend(second.param_groups)  # repeated parameters keep their numbers
    assert second.state_dict()["param_groups"][-1]["params"] == [0, 1]


@every_optimizer
@every_implementation
@pytest.mark.parametrize(
    "missing", ["maximize", "foreach", "capturable", "differentiable", "fused", "nonfinite", "all"]
)
def test_a_state_dict_without_later_keys_loads_and_steps(cls, impl, missing):
    p = fresh([(3, 2)])
    opt = cls(p, **BITES[cls], **IMPLEMENTATIONS[impl])
    state = copy.deepcopy(opt.state_dict())
    flags = ("maximize", "foreach", "capturable", "differentiable", "fused")
    for group in state["param_groups"]:
        for key in flags if missing == "all" else (missing,):
            del group[key]
    opt.load_state_dict(state)
    gradients(p)
    opt.step()
    assert not torch.equal(p[0], fresh([(3, 2)])[0])
    assert set(cls(p).param_groups[0]) == set(opt.param_groups[0]), "the missing keys are back"


def equal_values(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal_values(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(equal_values(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        pytest.param(c, o, id=f"{c.__name__}-{option_id(o)}")
        for c in OPTIMIZERS
        for o in [*OPTIONS[c], {"lr": torch.tensor(0.5)}, {"u": torch.tensor(0.5), "d": torch.tensor(0.25)}]
    ],
)
@every_implementation
@pytest.mark.parametrize("names", [False, True], ids=["unnamed", "named"])
def test_saved_files_are_read_with_weights_only(cls, options, impl, names):
    p = fresh([(3, 2), (4,)])
    gradients(p)
    opt = cls(named(p, names), **{**BITES[cls], **options}, **IMPLEMENTATIONS[impl])
    opt.step()
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert equal_values(loaded, opt.state_dict())
    cls(p).load_state_dict(loaded)


@every_optimizer
def test_state_dict_hooks_run_in_order(cls):
    opt = cls(fresh([(2,)]), **BITES[cls])
    opt.register_state_dict_pre_hook(lambda o: o.state.update({"mark": 1}))
    assert opt.state_dict()["state"]["mark"] == 1

    def post(o: Any, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "seen": state["state"].pop("mark")}

    opt.register_state_dict_post_hook(post)
    state = opt.state_dict()
    assert state["seen"] == 1
    assert "mark" not in state["state"]


@every_optimizer
def test_load_hooks_run_in_order(cls):
    p = fresh([(2,)])
    opt = cls(p, **BITES[cls])
    state = opt.state_dict()

    def in_place(o: Any, d: dict[str, Any]) -> None:
        d["param_groups"][0]["lr"] = 0.002

    def replacing(o: Any, d: dict[str, Any]) -> dict[str, Any]:
        d = copy.deepcopy(d)
        d["param_groups"][0]["lr"] = 0.003
        return d

    opt.register_load_state_dict_pre_hook(in_place)
    opt.load_state_dict(state)
    assert opt.param_groups[0]["lr"] == 0.002
    handle = opt.register_load_state_dict_pre_hook(replacing)
    opt.load_state_dict(state)
    assert opt.param_groups[0]["lr"] == 0.003
    handle.remove()
    opt.register_load_state_dict_pre_hook(replacing, prepend=True)
    opt.register_load_state_dict_post_hook(lambda o: o.state.update({"lr at the end": o.param_groups[0]["lr"]}))
    opt.load_state_dict(state)
    assert opt.state["lr at the end"] == 0.002


@every_option
@every_implementation
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_has_every_public_attribute_and_steps_alike(cls, options, impl, how):
    params = fresh([(3, 2), (4,)])
    opt = cls(params, **{**BITES[cls], **options}, **IMPLEMENTATIONS[impl])
    gradients(params)
    opt.step()
    twin = copy.deepcopy(opt) if how == "deepcopy" else pickle.loads(pickle.dumps(opt))
    public = {k for k in vars(opt) if not k.startswith("_")}
    assert public == {k for k in vars(twin) if not k.startswith("_")}
    assert same(without_names(opt.state_dict()), without_names(twin.state_dict()))
    assert opt.defaults == twin.defaults
    copies = twin.param_groups[0]["params"]
    assert all(p is not q and torch.equal(p, q) for p, q in pairs(params, copies))
    for i in range(2):
        gradients(params, i)
        gradients(copies, i)
        opt.step()
        assert not torch.equal(params[0], copies[0]), "the copy has parameters of its own"
        twin.step()
        assert all(torch.equal(p, q) for p, q in pairs(params, copies))


# --- Errors -------------------------------------------------------------------------------------------------------


@every_optimizer
def test_errors_of_the_base_class_keep_their_words(cls):
    p, q = fresh([(1, 1), (1, 1)])
    with pytest.raises(
        TypeError, match="params argument given to the optimizer should be an iterable of Tensors or dicts"
    ):
        cls(p)
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        cls([{"params": p}, {"params": p}])
    with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
        cls([])
    with pytest.raises(
        ValueError, match=r"all optimizer params should be with/without names\. Some param names are missing"
    ):
        cls([("weight", p), q])
    with pytest.raises(ValueError, match="all optimizer param groups should be with/without names"):
        cls([{"params": [p], "lr": 1e-2}, {"params": [("weight", q)]}])
    with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
        cls([p * 2])
    with pytest.warns(UserWarning, match="a parameter group with duplicate parameters"):
        cls([p, p])


@every_optimizer
@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"lr": torch.tensor([0.001, 0.001])}, ValueError, "Tensor lr must be 1-element"),
        ({"lr": -1.0}, ValueError, r"Invalid learning rate: -1\.0"),
        ({"lr": float("nan")}, ValueError, "Invalid learning rate: nan"),
        ({"weight_decay": -0.5}, ValueError, r"Invalid weight_decay value: -0\.5"),
        ({"weight_decay": float("nan")}, ValueError, "Invalid weight_decay value: nan"),
        ({"u": 0.1, "d": 0.3}, ValueError, r"Invalid thresholds: .*0\.3.*0\.1"),
        ({"u": -1.0}, ValueError, "Invalid thresholds: "),
        ({"u": float("nan")}, ValueError, "Invalid thresholds: .*nan"),
        ({"d": -0.1}, ValueError, r"Invalid thresholds: .*-0\.1"),
        ({"d": float("nan")}, ValueError, "Invalid thresholds: .*nan"),
        ({"u": torch.tensor(0.1), "d": torch.tensor(0.3)}, ValueError, "Invalid thresholds: "),
        ({"nonfinite": "ignore"}, ValueError, "Invalid .*ignore"),
        ({"fused": True, "foreach": True}, RuntimeError, "`fused` and `foreach` cannot be `True` together"),
        ({"fused": True, "differentiable": True}, RuntimeError, "`fused` does not support `differentiable`"),
    ],
    ids=lambda v: option_id(v) if isinstance(v, dict) else "",
)
def test_refused_numbers_are_named_before_anything_else(cls, kwargs, error, words):
    """``params=None`` would be refused by the base class: the number is looked at first."""
    params = fresh([(1,)]) if error is RuntimeError else None
    with pytest.raises(error, match=words):
        cls(params, **kwargs)


@pytest.mark.parametrize(
    ("cls", "kwargs"),
    [
        (BiClip, {"dead_zone": -1.0}),
        (BiClip, {"dead_zone": float("nan")}),
        (BiClip, {"dead_zone": 2.0, "u": 1.0}),
        (BiClip, {"dead_zone": "automatic"}),
        (L2Clip, {"scope": "layer"}),
    ],
)
def test_own_settings_are_refused_by_name(cls, kwargs):
    key, value = next(iter(kwargs.items()))
    with pytest.raises(ValueError, match=rf"Invalid .*{key}.*{value}"):
        cls(fresh([(1,)]), **kwargs)


# --- The gradient scaler ------------------------------------------------------------------------------------------


def scaled_step(opt: torch.optim.Optimizer, params: list[Tensor], scaler: Any, unscale: bool, seed: int = 1) -> None:
    """One iteration with a loss whose gradients are standard normal."""
    gen = torch.Generator().manual_seed(seed)
    opt.zero_grad()
    loss = sum((p * torch.randn(p.shape, generator=gen).to(p.dtype)).sum() for p in params)
    scaler.scale(loss).backward()
    if unscale:
        scaler.unscale_(opt)
    scaler.step(opt)
    scaler.update()


@every_option
@every_implementation
@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_ first"])
def test_a_scaled_loss_takes_the_unscaled_step(cls, options, impl, unscale):
    """Both protocols, with gradients left unscaled afterwards, as the plain protocol leaves them."""
    kwargs = {**BITES[cls], **options, **IMPLEMENTATIONS[impl]}
    scaled, plain = fresh([(4, 3), (5,)]), fresh([(4, 3), (5,)])
    opt, ref = cls(scaled, **kwargs), cls(plain, **{**kwargs, **IMPLEMENTATIONS["single"]})
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    off = torch.amp.GradScaler("cpu", enabled=False)
    for i in range(2):
        scaled_step(opt, scaled, scaler, unscale, i)
        scaled_step(ref, plain, off, False, i)
        for p, q in pairs(scaled, plain):
            assert torch.equal(p.grad, q.grad)  # a power of two: exact
            assert ulps(p, q) <= 2 * ULPS[cls]
    assert not hasattr(opt, "grad_scale")
    assert not hasattr(opt, "found_inf")


@every_optimizer
@every_implementation
@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_ first"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_scaled_step_with_an_overflow_is_left_out(cls, impl, unscale, bad):
    params = fresh([(4, 3), (5,)])
    before = [p.detach().clone() for p in params]
    opt = cls(params, **BITES[cls], weight_decay=0.1, **IMPLEMENTATIONS[impl])
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    scaler.scale(sum(p.sum() for p in params)).backward()
    params[1].grad[3] = bad
    if unscale:
        scaler.unscale_(opt)
    scaler.step(opt)
    scaler.update()
    assert all(torch.equal(p, q) for p, q in pairs(params, before))
    assert scaler.get_scale() == 64.0
    opt.zero_grad()
    scaled_step(opt, params, scaler, unscale)
    assert not torch.equal(params[0], before[0]), "and the next one is taken"


@every_optimizer
@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_ first"])
def test_a_scale_preset_by_the_user_is_multiplied_in(cls, unscale):
    p = torch.full((3,), 2.0, requires_grad=True)
    q = torch.full((3,), 2.0, requires_grad=True)
    p.grad, q.grad = torch.full((3,), 15.0), torch.full((3,), 1.0)
    opt = cls([p], lr=0.1, u=10.0, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=5.0)
    scaler.scale(torch.ones(()))
    if unscale:
        scaler.unscale_(opt)
        torch.testing.assert_close(p.grad, torch.full((3,), 3.0))
    opt.grad_scale = torch.tensor([3.0])
    scaler.step(opt)
    torch.testing.assert_close(p.grad, torch.ones(3))
    cls([q], lr=0.1, u=10.0).step()
    torch.testing.assert_close(p, q, rtol=1e-6, atol=0)


@every_optimizer
def test_the_scaler_flag_is_set_by_fused_in_the_constructor_alone(cls):
    p = fresh([(2,)])[0]

    def flag(opt: Any) -> bool:
        return bool(getattr(opt, "_step_supports_amp_scaling", False))

    assert flag(cls([p], fused=True))
    assert not flag(cls([p]))
    assert not flag(cls([p], fused=False))
    assert not flag(cls([p], foreach=True))
    assert not flag(cls([{"params": [p], "fused": True}]))
    for opt in (cls([p], fused=True), cls([p])):
        for twin in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
            assert flag(twin) == flag(opt)


# --- Devices ------------------------------------------------------------------------------------------------------


@every_optimizer
def test_fused_refuses_meta_parameters_and_works_once_they_are_real(cls):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    opt = cls(model.parameters(), fused=True)
    for p in model.parameters():
        p.grad = torch.empty_like(p)
    with pytest.raises(RuntimeError, match="`fused=True` requires all the params to be floating point Tensors"):
        opt.step()
    opt.zero_grad(set_to_none=True)
    torch.__future__.set_swap_module_params_on_conversion(True)  # the same parameters, now real
    try:
        model.to_empty(device="cpu")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(2.0)
            p.grad = torch.ones_like(p)
    opt.step()
    assert all((p < 2.0).all() for p in model.parameters())


@every_optimizer
def test_fused_looks_at_every_parameter_before_any_moves(cls):
    good, bad = fresh([(2,)])[0], torch.empty(2, device="meta", requires_grad=True)
    before = good.detach().clone()
    good.grad, bad.grad = torch.ones(2), torch.empty(2, device="meta")
    opt = cls([good, bad], fused=True)
    with pytest.raises(RuntimeError, match="`fused=True` requires all the params to be floating point Tensors"):
        opt.step()
    assert torch.equal(good, before)


@every_optimizer
@pytest.mark.parametrize("impl", ["default", "single", "foreach"])
def test_capturable_is_refused_at_the_step_on_a_cpu(cls, impl):
    """Not at construction: optimizers are built on the CPU from a GPU's state."""
    p = fresh([(2,)])[0]
    before = p.detach().clone()
    gradients([p])
    opt = cls([p], **BITES[cls], capturable=True, **IMPLEMENTATIONS[impl])
    opt.load_state_dict(opt.state_dict())
    with pytest.raises(AssertionError, match="If capturable=True, params must be on supported devices"):
        opt.step()
    assert torch.equal(p, before)


# --- Differentiable -----------------------------------------------------------------------------------------------


@every_optimizer
@pytest.mark.parametrize("maximize", [False, True])
def test_a_step_on_a_clone_is_differentiable_in_everything(cls, maximize):
    """Against finite differences, in p, the gradient, lr, u and d; away from the corners of the clipping."""
    gen = torch.Generator().manual_seed(0)
    p = torch.randn(6, generator=gen, dtype=torch.float64).requires_grad_()
    # One element below d, one above u, the rest between; a norm above u for L2Clip.
    grad = torch.tensor([0.1, -0.2, 0.6, -0.65, 0.9, -2.0], dtype=torch.float64, requires_grad=True)
    numbers = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (0.3, 0.75, 0.5)]

    def stepped(p: Tensor, grad: Tensor, lr: Tensor, u: Tensor, d: Tensor) -> Tensor:
        q = p.clone()
        q.grad = grad
        cls([q], lr=lr, u=u, d=d, weight_decay=0.1, maximize=maximize, differentiable=True).step()
        return q

    assert torch.autograd.gradcheck(stepped, (p, grad, *numbers))


@every_optimizer
def test_a_small_norm_is_differentiable_too(cls):
    """For L2Clip the norm lies below d here, for BiClip every element does."""
    p = torch.ones(3, dtype=torch.float64, requires_grad=True)
    grad = torch.tensor([0.1, -0.2, 0.15], dtype=torch.float64, requires_grad=True)
    d = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)

    def stepped(p: Tensor, grad: Tensor, d: Tensor) -> Tensor:
        q = p.clone()
        q.grad = grad
        cls([q], lr=0.3, u=1.0, d=d, differentiable=True).step()
        return q

    assert torch.autograd.gradcheck(stepped, (p, grad, d))


@every_optimizer
def test_a_loss_two_steps_later_knows_the_learning_rate(cls):
    x, y = torch.tensor(1.0, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64)

    def meta_loss(p: Tensor, lr: Tensor) -> Tensor:
        q = p.clone()
        opt = cls([q], lr=lr, u=0.75, d=0.1, differentiable=True)
        for _ in range(2):
            (q.grad,) = torch.autograd.grad((x * q.sum() - y) ** 2, q, create_graph=True)
            opt.step()
        return (x * q.sum() - y) ** 2

    p = torch.tensor([0.5, 0.25, 0.2], dtype=torch.float64, requires_grad=True)
    lr = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(meta_loss, (p, lr))
    meta_loss(p, lr).backward()
    assert lr.grad.item() != 0.0


@every_optimizer
def test_a_leaf_that_requires_grad_cannot_be_stepped_differentiably(cls):
    p = fresh([(2,)])[0]
    before = p.detach().clone()
    gradients([p])
    opt = cls([p], **BITES[cls], differentiable=True)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        opt.step()
    assert torch.equal(p, before)


@every_option
def test_differentiable_takes_the_same_step(cls, options):
    kwargs = {**BITES[cls], **options}
    a, b = fresh([(4, 3), (5,)]), [p.detach() for p in fresh([(4, 3), (5,)])]
    gradients(a)
    gradients(b)
    cls(a, **kwargs, **IMPLEMENTATIONS["single"]).step()
    cls(b, **kwargs, differentiable=True).step()
    assert max(ulps(p, q) for p, q in pairs(a, b)) <= 2 + ULPS[cls]  # the sum is not fused there
    assert not b[0].requires_grad
