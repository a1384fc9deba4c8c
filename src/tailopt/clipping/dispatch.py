"""Many tensors in one step: one list of kernels, and one function that picks one and can explain its choice.

`which(p, g, hparams)` answers which kernel a tensor gets and the reason.

    c         the C kernel: CPU, one parallel region for everything, no extra memory
    rows      the C kernel row by row: thresholds or lr that vary along leading dimensions
    chunked   torch operations through small buffers that stay in cache: CPU without the C kernel
    triton    the Triton kernel: CUDA, one launch for all tensors of a kind; only where it is asked for
    foreach   torch._foreach_* over the list: GPUs
    single    tensor by tensor; takes everything, can be traced and differentiated
    reference tensor by tensor, the oracle itself
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tailopt.clipping.counts import StatisticsRecorder, count_in_torch
from tailopt.clipping.dtensor import is_dtensor, local_pair, local_part
from tailopt.clipping.freed_storage import check_not_freed
from tailopt.clipping.kernels import c, chunked, foreach, rows, single, triton
from tailopt.clipping.kernels.kernel import Kernel, StepGroup, has_dimensions, is_scalar, joined
from tailopt.clipping.momentum import advance
from tailopt.clipping.reference import StepHyperparameters
from tailopt.clipping.step_cache import StepCache
from tailopt.native import library

PIECE = 1 << 26  # elements of a tensor that are handled at once by a kernel that makes intermediates

# Tests, benchmarks and the support matrix loop over this list.
KERNELS: dict[str, Kernel] = {
    "c": Kernel("c", c.run, c.refuses),
    "rows": Kernel("rows", rows.run, rows.refuses),
    "chunked": Kernel("chunked", chunked.run, chunked.refuses),
    "triton": Kernel("triton", triton.run, triton.refuses),
    "foreach": Kernel("foreach", foreach.run, foreach.refuses),
    "single": Kernel("single", single.run, single.refuses),
    "reference": Kernel("reference", single.run_reference, single.refuses_reference),
}

# What is tried by default, fastest first, and what `fused=True` asks for; `single` takes the rest. "triton" comes first
# on CUDA by default once tests/contracts/test_gpu_triton.py has passed.
BY_DEFAULT = {"cpu": ("c", "rows", "chunked"), "cuda": ("foreach",)}
FUSED = {"cpu": ("c", "rows", "chunked"), "cuda": ("triton", "foreach")}


@dataclass(frozen=True)
class Choice:
    """A kernel, and why it and not a faster one."""

    kernel: Kernel
    why: str


def which(p: Tensor, g: Tensor, hparams: StepHyperparameters, kernel: str | None = None) -> Choice:
    """The kernel that a parameter and its gradient get, and why.

    kernel: the one to take if it can, or "fused" for what `fused=True` asks for; by default the fastest.

    Examples:
        >>> from tailopt.clipping.reference import ClipByValue
        >>> p, g = torch.zeros(3), torch.ones(3)
        >>> which(p, g, StepHyperparameters(ClipByValue(1.0, 0.0), lr=0.1), kernel="foreach").kernel.name
        'foreach'
    """
    reasons: list[str] = []
    for name in _order(p.device, kernel):
        why_not = KERNELS[name].refuses(p, g, hparams)
        if not why_not:
            return Choice(
                KERNELS[name], "; ".join(reasons) or ("asked for" if kernel else "the fastest for these tensors")
            )
        reasons.append(f"not {name}: {why_not}")
    return Choice(KERNELS["single"], "; ".join(reasons))


def first_choice(device: torch.device, kernel: str | None = None) -> str:
    """The kernel that is tried first for tensors on a device."""
    return _order(device, kernel)[0]


def _first_choice_of(groups: Sequence[StepGroup], kernel: str | None) -> str:
    """The kernel that is tried first for these groups: that of their first tensor."""
    for group in groups:
        if group.params:
            return first_choice(group.params[0].device, kernel)
    return "c"


def _order(device: torch.device, kernel: str | None) -> tuple[str, ...]:
    """The kernels to try for tensors on a device."""
    if kernel is None:
        return BY_DEFAULT.get(device.type, ("foreach",))
    return FUSED.get(device.type, ("foreach",)) if kernel == "fused" else (kernel,)


def update(
    groups: Sequence[StepGroup],
    kernel: str | None = None,
    cache: StepCache | None = None,
    recorder: StatisticsRecorder | None = None,
) -> None:
    """Take the step, in place.

    Args:
        groups: parameters, gradients and the hyperparameters of their step.
        kernel: the one to use for every tensor that it takes, or "fused"; by default the fastest.
        cache: what the caller keeps between the steps of the same parameters; a single step needs none.
        recorder: counts what the step clips; the groups have slots then.
    """
    # Almost every step ends here: if one kernel takes all tensors, nothing looks at them one by one.
    name = _first_choice_of(groups, kernel)
    if name in ("c", "triton"):
        cache = cache if cache is not None else StepCache(reused=False)
        if name == "triton" and triton.can_count(recorder) and triton.takes_all(groups, cache):
            triton.run(groups, cache, recorder)
            return
    _fill_blanks(groups)
    if name == "c" and cache is not None and _c_takes_all(groups, cache):
        if library.loaded() is not None:
            c.run(groups, cache, recorder)
            return
        if kernel != "c":
            _warn_once_of_missing_kernel()
    _check_tensors(groups)
    saved = _saved(groups)
    by_kernel: dict[str, list[StepGroup]] = {}
    for group in groups:
        if group.momenta:
            group = advance(_as_local_reals(group), by_reference=kernel == "reference")
        for i, (p, g) in enumerate(zip(group.params, group.grads, strict=True)):
            p_part, g_part, hparams = _as_dense_local_reals(p, g, group.hparams)
            if recorder is not None:
                g_part = g_part.coalesce() if g_part.is_sparse else g_part
                clip = single.at_coordinates(hparams.clip, g_part) if g_part.is_sparse else hparams.clip
                count_in_torch(g_part, group.slots[i], clip, recorder.counters(g_part.device))
            name = which(p_part, g_part, hparams, kernel).kernel.name
            parts = by_kernel.setdefault(name, [])
            if not parts or parts[-1].hparams is not hparams:
                parts.append(StepGroup([], [], hparams, []))
            slots = parts[-1].slots
            assert isinstance(slots, list)
            for p_piece, g_piece in _pieces(p_part, g_part, hparams):
                parts[-1].params.append(p_piece)
                parts[-1].grads.append(g_piece)
                slots.append(group.slots[i] if group.slots else 0)
    for name, parts in by_kernel.items():
        if name == "triton" and cache is not None and triton.takes_all(parts, cache.of_parts):
            triton.run(parts, cache.of_parts)  # shards and pairs of reals: the tables are kept for these too
        else:
            KERNELS[name].run(parts)
    for tensor, before, verdict in saved:
        tensor.copy_(torch.where(verdict, before, tensor))


def _c_takes_all(groups: Sequence[StepGroup], cache: StepCache) -> bool:
    """Whether the C kernel can take every tensor of a step, if there is one; the cache is prepared for it then."""
    scalar = cache.same_hparams_as_last_call(groups) or all(map(_is_scalar, groups))
    return scalar and cache.prepare(*joined(groups))


def _fill_blanks(groups: Sequence[StepGroup]) -> None:
    """Put -0 into parameters that hold nothing yet: +0 would lose the sign of a zero."""
    for group in groups:
        if group.blank:
            for p in group.params:
                (torch.view_as_real(p) if p.is_complex() else p).fill_(-0.0)


def _saved(groups: Sequence[StepGroup]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(tensor, copy, verdict) of what a verdict may give its value back; the Triton kernel looks at verdicts itself."""
    return [
        (tensor, tensor.clone(), verdict)
        for group in groups
        if group.skips is not None
        for i, verdict in enumerate(group.skips.unbind())
        for tensor in (group.params[i], *(group.momenta[i : i + 1]))
    ]


def _is_scalar(group: StepGroup) -> bool:
    return is_scalar(group.hparams) and not group.corrections and group.hparams.rounding is None


def _as_local_reals(group: StepGroup) -> StepGroup:
    """A group with momentum as its arithmetic sees it: shards as local tensors, complex ones as pairs of reals."""
    if not any(is_dtensor(p) or p.is_complex() for p in group.params):
        return group
    if has_dimensions(group.hparams):
        raise ValueError("Thresholds with dimensions cannot be used with momentum on sharded or complex parameters.")
    momenta = [local_pair(p, m)[1] for p, m in zip(group.params, group.momenta, strict=True)]
    pairs = [local_pair(p, g) for p, g in zip(group.params, group.grads, strict=True)]

    def reals(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]

    return group._replace(
        params=reals([p for p, _ in pairs]), grads=reals([g for _, g in pairs]), momenta=reals(momenta)
    )


def _check_tensors(groups: Sequence[StepGroup]) -> None:
    """Raise for what no kernel can step on, before any of them does: integers, as in torch's SGD, and freed memory."""
    for group in groups:
        for p in group.params:
            check_type(p)
        if not torch.compiler.is_compiling():
            check_not_freed([*group.params, *group.grads, *group.momenta])
        if any(g.is_sparse for g in group.grads) and group.momenta:
            raise RuntimeError("Momentum needs dense gradients, and one is sparse. Use momentum=0 for its parameter.")


def check_type(p: Tensor) -> None:
    """Raise for a parameter of integers or booleans."""
    if not (p.is_floating_point() or p.is_complex()):
        raise RuntimeError(
            f"Cannot step on a parameter of {p.dtype} and shape {tuple(p.shape)}: a step is a fraction, and needs a "
            "floating or complex type. Leave it without a gradient, or out of the optimizer."
        )


def _as_dense_local_reals(
    p: Tensor, g: Tensor, hparams: StepHyperparameters
) -> tuple[Tensor, Tensor, StepHyperparameters]:
    """What kernels see: shards as local tensors, complex ones as pairs of reals; thresholds with dimensions follow."""

    def shaped(hparams: StepHyperparameters, change: Callable[[Tensor], Tensor]) -> StepHyperparameters:
        numbers = (change(t) if isinstance(t, Tensor) and t.ndim else t for t in hparams.clip)
        return hparams._replace(clip=type(hparams.clip)(*numbers))

    if is_dtensor(p):
        owner = p
        hparams = shaped(hparams, lambda t: local_part(t, owner)) if has_dimensions(hparams) else hparams
        p, g = local_pair(p, g)
    if p.is_complex() and not g.is_sparse:
        hparams = shaped(hparams, lambda t: t[..., None]) if has_dimensions(hparams) else hparams
        p, g = torch.view_as_real(p), torch.view_as_real(g.resolve_conj())
    return p, g, hparams


def _pieces(p: Tensor, g: Tensor, hparams: StepHyperparameters) -> list[tuple[Tensor, Tensor]]:
    """A very large tensor in parts, so that intermediates stay small; whole if the step is traced or differentiated."""
    whole = p.numel() <= PIECE or torch.is_grad_enabled() or torch.compiler.is_compiling() or has_dimensions(hparams)
    whole = whole or hparams.rounding is not None  # its random bits belong to places in the tensor
    if whole or g.layout != torch.strided or not (p.is_contiguous() and g.is_contiguous()):
        return [(p, g)]
    return list(zip(p.detach().view(-1).split(PIECE), g.detach().view(-1).split(PIECE), strict=True))


def _warn_once_of_missing_kernel() -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"tailopt steps on the CPU without its C kernel, about 4 times slower: {library.why_missing()}",
            stacklevel=2,
        )


_warned = False
