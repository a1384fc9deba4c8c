"""Many tensors in one step: one list of kernels, one function that chooses, and says why.

A kernel is a function of batches (parameters, gradients, one `Step`) that changes the parameters in place and gives
the bits of `reference.step`. `which(p, g, step)` answers which kernel a tensor gets and the reason.

    c         the C kernel: CPU, one parallel region for everything, no extra memory
    chunked   torch operations through small buffers that stay in cache: CPU without the C kernel
    foreach   torch._foreach_* over the list: GPUs
    single    tensor by tensor; takes everything, can be traced and differentiated
    reference tensor by tensor, the oracle itself
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tailopt.clipping import reference
from tailopt.clipping.counts import Watch, is_flat, tally
from tailopt.clipping.kernels.kernel import Batch, Kernel
from tailopt.clipping.memory import check_memory
from tailopt.clipping.operators import arithmetic, real_parts
from tailopt.clipping.reference import Coordinates, Number, Rescaled, Step
from tailopt.clipping.shards import is_dtensor, local_pair, local_part
from tailopt.clipping.step_cache import PLAIN_TYPES, StepCache
from tailopt.clipping.step_cache import row as step_row
from tailopt.native.library import DTYPES, loaded, why_missing

CHUNK = (
    262_144  # elements of a buffer: 1 MiB in fp32; 128k to 512k were within 20 % of each other, 32k took twice as long
)
FOREACH_BYTES = 1 << 28  # of gradients whose intermediates are alive at the same time
PIECE = 1 << 26  # elements of a tensor that are handled at once where a kernel makes intermediates


@dataclass(frozen=True)
class Choice:
    """A kernel, and why it and not a faster one."""

    kernel: Kernel
    why: str


def which(p: Tensor, g: Tensor, step: Step, wanted: str | None = None) -> Choice:
    """The kernel that a parameter and its gradient get, and why.

    Examples:
        >>> p, g = torch.zeros(3), torch.ones(3)
        >>> which(p, g, Step(Coordinates(1.0, 0.0), lr=0.1), wanted="foreach").kernel.name
        'foreach'
    """
    order = (wanted,) if wanted else ("foreach",) if p.device.type != "cpu" else ("c", "chunked")
    reasons: list[str] = []
    for name in order:
        why_not = KERNELS[name].refuses(p, g, step)
        if not why_not:
            return Choice(
                KERNELS[name], "; ".join(reasons) or ("asked for" if wanted else "the fastest for these tensors")
            )
        reasons.append(f"not {name}: {why_not}")
    return Choice(KERNELS["single"], "; ".join(reasons))


def update(
    batches: Sequence[Batch],
    wanted: str | None = None,
    cache: StepCache | None = None,
    watch: Watch | None = None,
    slots: int = 0,
) -> None:
    """Take the step, in place, by the wanted kernel or the fastest one; count on the way where a watch is given.

    cache: what the caller keeps from step to step of the same parameters; a single step needs none.
    """
    if wanted is None:
        cache = cache if cache is not None else StepCache(reused=False)
        numbers = cache.same_steps(batches) or all(_numbers_only(batch.step) for batch in batches)
        if numbers and cache.prepare(*_joined(batches)):
            if loaded() is not None:
                _run_c(batches, cache, watch, slots)
                return
            _say_missing_once()
    _check_tensors(batches)
    chosen: dict[str, list[Batch]] = {}
    for batch in batches:
        for i, (p, g) in enumerate(zip(batch.params, batch.grads, strict=True)):
            p_part, g_part, step = _at_the_border(p, g, batch.step)
            if watch is not None:
                g_part = g_part.coalesce() if g_part.is_sparse else g_part
                clip = _at_coordinates(step.clip, g_part) if g_part.is_sparse else step.clip
                tally(g_part, batch.slots[i], clip, watch.tallies(g_part.device, slots))
            name = which(p_part, g_part, step, wanted).kernel.name
            same = chosen.setdefault(name, [])
            if not same or same[-1].step is not step:
                same.append(Batch([], [], step))
            for p_piece, g_piece in _pieces(p_part, g_part, step):
                same[-1].params.append(p_piece)
                same[-1].grads.append(g_piece)
    for name, parts in chosen.items():
        KERNELS[name].run(parts)


def _check_tensors(batches: Sequence[Batch]) -> None:
    """Refuse what no kernel can step on, before any of them does: integers, as in torch's SGD, and freed memory."""
    for batch in batches:
        for p in batch.params:
            check_type(p)
        if not torch.compiler.is_compiling():
            check_memory([*batch.params, *batch.grads])


def check_type(p: Tensor) -> None:
    """Refuse a parameter of integers or booleans."""
    if not (p.is_floating_point() or p.is_complex()):
        raise RuntimeError(
            f"Cannot step on a parameter of {p.dtype} and shape {tuple(p.shape)}: a step is a fraction, and needs a "
            "floating or complex type. Leave it without a gradient, or out of the optimizer."
        )


def _at_the_border(p: Tensor, g: Tensor, step: Step) -> tuple[Tensor, Tensor, Step]:
    """Shards as local tensors, complex ones as pairs of reals, thresholds with dimensions cut and shaped like them."""

    def shaped(step: Step, change: Callable[[Tensor], Tensor]) -> Step:
        numbers = (change(t) if isinstance(t, Tensor) and t.ndim else t for t in step.clip)
        return step._replace(clip=type(step.clip)(*numbers))

    if is_dtensor(p):
        owner = p
        step = shaped(step, lambda t: local_part(t, owner)) if _has_dimensions(step) else step
        p, g = local_pair(p, g)
    if p.is_complex() and not g.is_sparse:
        step = shaped(step, lambda t: t[..., None]) if _has_dimensions(step) else step
        p, g = torch.view_as_real(p), torch.view_as_real(g.resolve_conj())
    return p, g, step


def _pieces(p: Tensor, g: Tensor, step: Step) -> list[tuple[Tensor, Tensor]]:
    """A very large tensor in parts, so that intermediates stay small; whole where somebody traces or differentiates."""
    whole = p.numel() <= PIECE or torch.is_grad_enabled() or torch.compiler.is_compiling() or _has_dimensions(step)
    if whole or g.layout != torch.strided or not (p.is_contiguous() and g.is_contiguous()):
        return [(p, g)]
    return list(zip(p.detach().view(-1).split(PIECE), g.detach().view(-1).split(PIECE), strict=True))


def _has_dimensions(step: Step) -> bool:
    return any(isinstance(t, Tensor) and t.ndim for t in step.clip)


# ---- c ----


def _joined(batches: Sequence[Batch]) -> tuple[list[Tensor], list[Tensor]]:
    """All parameters and all gradients; of one batch its own lists."""
    if len(batches) == 1:
        return batches[0].params, batches[0].grads
    return [p for batch in batches for p in batch.params], [g for batch in batches for g in batch.grads]


def _numbers_only(step: Step) -> bool:
    return all(not isinstance(t, Tensor) or (t.numel() == 1 and t.is_cpu) for t in (step.lr, *step.clip))


def _refuses_c(p: Tensor, g: Tensor, step: Step) -> str:
    if loaded() is None:
        return why_missing()
    if p.dtype not in DTYPES or g.dtype != p.dtype:
        return f"it takes fp32, fp64, bf16 and fp16 with gradients of the same type, not {p.dtype} with {g.dtype}"
    return _refuses_flat(p, g, step)


def _refuses_flat(p: Tensor, g: Tensor, step: Step) -> str:
    """Why two tensors cannot be walked through memory side by side with scalar thresholds."""
    if type(p) not in PLAIN_TYPES or type(g) not in PLAIN_TYPES:
        return f"it takes plain tensors, not {type(p).__name__} with {type(g).__name__}"
    if g.layout != torch.strided:
        return "the gradient is sparse"
    if not (p.is_cpu and g.is_cpu):
        return f"it runs on the CPU, not on {p.device}"
    if not p.is_floating_point():
        return f"it takes floating types, not {p.dtype}"
    if not _numbers_only(step):
        return "thresholds or lr are tensors with dimensions, or not on the CPU"
    if p.stride() != g.stride() or p.shape != g.shape or not (is_flat(p) and is_flat(g)):
        return "parameter and gradient lie differently in memory, have gaps, or are lazily negated"
    return ""


def _run_c(
    batches: Sequence[Batch], cache: StepCache | None = None, watch: Watch | None = None, slots: int = 0
) -> None:
    kernel = loaded()
    assert kernel is not None
    params, grads = _joined(batches)
    if cache is None:
        cache = StepCache(reused=False)
        cache.learn(params)
        cache.locate(params)
    rows, which_row = cache.rows(batches)
    grads_at = cache.locate_gradients(grads)
    # The write goes past autograd: without this a tensor saved for backward would be used stale, and nobody told.
    # Before the pass, which sweeps what was just looked at out of the caches.
    torch.autograd.graph.increment_version(params)
    kernel.run_at(
        "rescale" if batches and isinstance(batches[0].step.clip, Rescaled) else "biclip",
        cache.param_addresses,
        grads_at,
        cache.sizes,
        cache.dtype_codes,
        which_row,
        rows,
        watch.tallies(torch.device("cpu"), slots) if watch is not None else None,
        [slot for batch in batches for slot in batch.slots] if watch is not None else None,
        threads=None if cache.distinct else 1,  # a parameter given twice steps twice, one after the other
    )


def _say_missing_once() -> None:
    global _said
    if not _said:
        _said = True
        warnings.warn(
            f"tailopt steps on the CPU without its C kernel, about 4 times slower: {why_missing()}", stacklevel=2
        )


_said = False


# ---- chunked ----


def _refuses_chunked(p: Tensor, g: Tensor, step: Step) -> str:
    if isinstance(step.clip, Coordinates) and math.isinf(_number(step.clip.d)):
        return "d is infinite"
    return _refuses_flat(p, g, step)


def _number(value: Number) -> float:
    """A number's value; of a tensor with dimensions, or on a device, nobody asks."""
    return float(value) if not isinstance(value, Tensor) or (value.numel() == 1 and value.is_cpu) else 0.0


def _run_chunked(batches: Sequence[Batch]) -> None:
    buffers: dict[torch.dtype, list[Tensor]] = {}
    for batch in batches:
        for p, g in zip(batch.params, batch.grads, strict=True):
            dtype, n = arithmetic(p.dtype), p.numel()
            if dtype not in buffers:
                buffers[dtype] = [torch.empty(CHUNK, dtype=dtype) for _ in range(3)]
            flat_p, flat_g = (t.detach().as_strided((n,), (1,)) for t in (p, g))
            row = step_row(_on_device(batch.step, p.device, dtype), dtype)
            for start in range(0, n, CHUNK):
                size = min(CHUNK, n - start)
                c, other, wide = (b[:size] for b in buffers[dtype])
                part, x = flat_p[start : start + size], flat_g[start : start + size]
                _clip_into(c, other, x, batch.step.clip, row, batch.step.maximize)
                target = part if part.dtype == dtype else wide.copy_(part)
                if batch.step.weight_decay:
                    target.mul_(row[1])
                target.add_(c, alpha=row[0])
                if target is not part:
                    part.copy_(target)
    # writing through detached views shares the version counter, so autograd knows


def _clip_into(
    c: Tensor, other: Tensor, x: Tensor, clip: Coordinates | Rescaled, row: tuple[float, ...], maximize: bool
) -> None:
    """c <- clip(x), through one more buffer."""
    if isinstance(clip, Rescaled):
        c.copy_(x)
        (c.neg_() if maximize else c).mul_(row[6]).div_(row[7]).mul_(row[8]).add_(0.0)
        return
    u, d, dead_zone = row[3:6]
    x = x if x.dtype == c.dtype else c.copy_(x)
    torch.sign(x, out=other)
    torch.abs(x, out=c)
    if dead_zone:
        other.masked_fill_(c <= dead_zone, 0.0)
    if maximize:
        other.neg_().add_(0.0)  # -0 becomes +0
    c.clamp_(d, u).mul_(other)


# ---- foreach ----


def _refuses_foreach(p: Tensor, g: Tensor, step: Step) -> str:
    if g.layout != torch.strided:
        return "the gradient is sparse"
    if not p.is_floating_point():
        return f"it takes floating types, not {p.dtype}"
    if _has_dimensions(step):
        return "thresholds have dimensions"
    if isinstance(step.clip, Coordinates) and (isinstance(step.clip.dead_zone, Tensor) or step.clip.dead_zone):
        return "there is a dead zone"
    if isinstance(step.clip, Coordinates) and math.isinf(
        _number(step.clip.d) if not torch.compiler.is_compiling() else 0.0
    ):
        return "d is infinite"
    return ""


def _run_foreach(batches: Sequence[Batch]) -> None:
    for batch in batches:
        kinds: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for p, g in zip(batch.params, batch.grads, strict=True):
            ps, gs = kinds.setdefault((p.device, p.dtype), ([], []))
            ps.append(p)
            gs.append(g)
        for (device, dtype), (ps, gs) in kinds.items():
            step = _on_device(batch.step, device, arithmetic(dtype))
            start = held = 0
            for end, g in enumerate(gs, 1):
                held += g.numel() * g.element_size()
                if held >= FOREACH_BYTES or end == len(gs):
                    _foreach(ps[start:end], gs[start:end], step)
                    start, held = end, 0


def _foreach(params: list[Tensor], grads: list[Tensor], step: Step) -> None:
    dtype = arithmetic(params[0].dtype)
    gs = [g if g.dtype == dtype else g.to(dtype) for g in grads]
    wide = [p if p.dtype == dtype else p.to(dtype) for p in params]
    if isinstance(step.clip, Coordinates):
        clipped = torch._foreach_abs(gs)
        torch._foreach_clamp_min_(clipped, _scalar(step.clip.d, len(gs)))
        torch._foreach_clamp_max_(clipped, _scalar(step.clip.u, len(gs)))
        # the signs a quarter of the list at a time: a second copy of all gradients would be alive otherwise
        some = -(-len(gs) // 4)
        for i in range(0, len(gs), some):
            signs = torch._foreach_sign(gs[i : i + some])
            if step.maximize:
                torch._foreach_neg_(signs)
                torch._foreach_add_(signs, 0.0)  # -0 becomes +0
            torch._foreach_mul_(clipped[i : i + some], signs)
    else:
        clipped = torch._foreach_mul(gs, -step.clip.scale if step.maximize else step.clip.scale)
        torch._foreach_div_(clipped, step.clip.norm)
        torch._foreach_mul_(clipped, step.clip.target)
        torch._foreach_add_(clipped, 0.0)
    if step.weight_decay:
        torch._foreach_mul_(wide, step.decay(dtype))
    if isinstance(step.lr, Tensor):
        torch._foreach_mul_(clipped, -step.lr)
        torch._foreach_add_(wide, clipped)
    else:
        torch._foreach_add_(wide, clipped, alpha=-step.lr)
    if params[0].dtype != dtype:
        torch._foreach_copy_(params, wide)


def _scalar(value: Number, n: int) -> float | list[Tensor]:
    """What `_foreach_clamp_*` takes: a number, or a tensor for every tensor."""
    return [value] * n if isinstance(value, Tensor) else value


# ---- single and reference ----


def _takes_all(p: Tensor, g: Tensor, step: Step) -> str:
    return ""


def _run_single(batches: Sequence[Batch]) -> None:
    for batch in batches:
        for p, g in zip(batch.params, batch.grads, strict=True):
            _single(p, g, batch.step)


def _single(p: Tensor, g: Tensor, step: Step) -> None:
    dtype = arithmetic(p.dtype)
    step = _on_device(step, p.device, dtype)
    if p.is_complex():  # sparse; dense ones came as pairs of reals
        p = torch.view_as_real(p)
    wide = p if p.dtype == dtype else p.to(dtype)
    if step.weight_decay:
        decay = step.decay(dtype)
        if isinstance(decay, Tensor) and decay.requires_grad:  # its derivative needs the value that is about to change
            wide = wide.clone()
        wide.mul_(decay)
    if g.is_sparse:  # the touched coordinates step as if the gradient were dense
        g = g.coalesce()
        where, clip, g = tuple(g.indices()), _at_coordinates(step.clip, g), real_parts(g)
        touched = wide[where]
        _descend(touched, clip, g.to(dtype), step)
        wide[where] = touched
    else:
        _descend(wide, step.clip, g.to(dtype), step)
    if wide is not p:
        p.copy_(wide)


def _descend(wide: Tensor, clip: Coordinates | Rescaled, g: Tensor, step: Step) -> None:
    """wide <- fma(-lr, clip(g), wide), in place."""
    c = clip(-g if step.maximize else g)
    if isinstance(step.lr, Tensor):
        wide.addcmul_(c, -step.lr)
    else:
        wide.add_(c, alpha=-step.lr)


def _at_coordinates(clip: Coordinates | Rescaled, g: Tensor) -> Coordinates | Rescaled:
    """A clip whose thresholds are those at the coordinates of a coalesced sparse gradient."""

    def picked(threshold: Number) -> Number:
        if not isinstance(threshold, Tensor) or not threshold.ndim:
            return threshold
        here = threshold.expand(g.shape)[tuple(g.indices())]
        return here[..., None] if g.is_complex() else here

    return type(clip)(*map(picked, clip))


def _run_reference(batches: Sequence[Batch]) -> None:
    with torch.no_grad():
        for batch in batches:
            for p, g in zip(batch.params, batch.grads, strict=True):
                p.copy_(reference.step(p, g, batch.step))


def _refuses_reference(p: Tensor, g: Tensor, step: Step) -> str:
    return "the gradient is sparse" if g.layout != torch.strided else ""


def _on_device(step: Step, device: torch.device, dtype: torch.dtype) -> Step:
    """The step's tensors where they are used: CPU scalars as numbers (nothing waits for those), others moved."""

    def ready(value: Number) -> Number:
        if not isinstance(value, Tensor):
            # rounded to the type of the arithmetic; torch's operations refuse what is beyond its range
            return math.copysign(math.inf, value) if abs(value) > torch.finfo(dtype).max else value
        if value.ndim and value.numel() == 1:
            value = value.reshape(())
        if (
            value.is_cpu
            and not value.ndim
            and device.type != "cpu"
            and not value.requires_grad
            and not torch.compiler.is_compiling()
        ):
            return float(value)
        return value.to(device=device, dtype=dtype)

    return Step(type(step.clip)(*map(ready, step.clip)), ready(step.lr), step.weight_decay, step.maximize)


KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel("c", _run_c, _refuses_c),
        Kernel("chunked", _run_chunked, _refuses_chunked),
        Kernel("foreach", _run_foreach, _refuses_foreach),
        Kernel("single", _run_single, _takes_all),
        Kernel("reference", _run_reference, _refuses_reference),
    )
}
