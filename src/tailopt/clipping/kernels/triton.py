"""The Triton kernel: CUDA, one launch for all tensors of a kind, no extra memory, nothing waits.

`triton_programs` has the arithmetic, `launch_tables` what the programs read. No CUDA device has run this kernel yet:
it has the reference's bits under Triton's interpreter, and `dispatch` takes it only where it is asked for.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tailopt.clipping.counts import StatisticsRecorder, is_gap_free
from tailopt.clipping.kernels.kernel import PLAIN_TYPES, StepGroup, has_dimensions, joined
from tailopt.clipping.kernels.triton_counts import PartialCounts
from tailopt.clipping.kernels.triton_runtime import programs, triton_type, why_missing
from tailopt.clipping.launch_tables import Launch
from tailopt.clipping.operators import is_transformed
from tailopt.clipping.reference import ClipByValue, StepHyperparameters
from tailopt.clipping.step_cache import StepCache

TYPES = {torch.float32, torch.float64, torch.bfloat16, torch.float16}
WARPS = 4


def refuses(p: Tensor, g: Tensor, hparams: StepHyperparameters) -> str:
    """Why the kernel cannot take these tensors; empty if it can."""
    if missing := why_missing(p.device):
        return missing
    if torch.compiler.is_compiling() or is_transformed(p) or is_transformed(g):
        return "the step is traced or transformed"
    if type(p) not in PLAIN_TYPES or type(g) not in PLAIN_TYPES:
        return f"it takes plain tensors, not {type(p).__name__} with {type(g).__name__}"
    if g.layout != torch.strided:
        return "the gradient is sparse"
    if not _types_go_together(p.dtype, g.dtype):
        return f"it takes fp32, fp64, bf16 and fp16, fp64 only with fp64, not {p.dtype} with {g.dtype}"
    if p.device != g.device or not _lie_alike(p, g):
        return "parameter and gradient lie differently in memory, have gaps, or are lazily negated"
    return _refuses_numbers(hparams, p.device)


def _refuses_numbers(hparams: StepHyperparameters, device: torch.device) -> str:
    """Why the kernel cannot take these hyperparameters."""
    if has_dimensions(hparams):
        return "thresholds have dimensions"
    for t in (hparams.lr, *hparams.clip, *(hparams.momentum or ())):
        if isinstance(t, Tensor):
            if t.numel() != 1 or (t.requires_grad and torch.is_grad_enabled()):
                return "thresholds or lr are differentiated"
            if not t.is_cpu and (t.device != device or t.dtype not in (torch.float32, torch.float64)):
                return f"a number is of {t.dtype} on {t.device}; it takes fp32 and fp64 on {device}, or on the CPU"
    return ""


def _types_go_together(dtype: torch.dtype, other: torch.dtype) -> bool:
    return {dtype, other} <= TYPES and (dtype == torch.float64) == (other == torch.float64)


def _lie_alike(p: Tensor, g: Tensor) -> bool:
    """Whether a walk through memory meets the same coordinates in both."""
    if p.is_contiguous() and g.is_contiguous():
        return p.shape == g.shape and not p.is_neg() and not g.is_neg()
    return p.stride() == g.stride() and p.shape == g.shape and is_gap_free(p) and is_gap_free(g)


def takes_all(groups: Sequence[StepGroup], cache: StepCache) -> bool:
    """Whether the kernel takes every tensor of a step; the cache is prepared for it then."""
    params, grads, momenta = joined(groups)
    if not params or torch.compiler.is_compiling() or why_missing(params[0].device):
        return False
    if len({bool(group.momenta) for group in groups if group.params}) > 1:
        return False  # then momenta are not in step with parameters
    if not cache.same_hparams_as_last_call(groups) and any(
        _refuses_numbers(group.hparams, params[0].device) for group in groups
    ):
        return False
    return cache.prepare(params, grads, momenta, _go_together)


def _go_together(params: list[Tensor], grads: list[Tensor], momenta: list[Tensor]) -> bool:
    """Whether programs can walk through parameters, gradients and momenta side by side, all on one device."""
    everything = params + grads + momenta
    return (
        set(map(type, everything)) <= PLAIN_TYPES
        and all(t.layout == torch.strided and t.device == params[0].device for t in everything)
        and all(_types_go_together(p.dtype, g.dtype) and _lie_alike(p, g) for p, g in zip(params, grads, strict=True))
        and (not momenta or all(_takes_momentum(p, m) for p, m in zip(params, momenta, strict=True)))
    )


def _takes_momentum(p: Tensor, m: Tensor) -> bool:
    return _types_go_together(p.dtype, m.dtype) and _lie_alike(p, m)


def can_count(recorder: StatisticsRecorder | None) -> bool:
    """Whether the kernel counts what this recorder wants: everything but histograms."""
    return recorder is None or recorder.mode == "counts"


def run(
    groups: Sequence[StepGroup], cache: StepCache | None = None, recorder: StatisticsRecorder | None = None
) -> None:
    """Step on all groups, and count on the way if there is a recorder.

    cache: prepared for these groups by the caller; without one the tensors are looked at here.
    """
    params, grads, momenta = joined(groups)
    if cache is None:
        cache = StepCache(reused=False)
        cache.learn(params, momenta)
        cache.locate(params)
    if not cache.distinct:  # a parameter that is in the list twice takes one step after the other
        for group in groups:
            for i in range(len(group.params)):
                run([group.only([i])], None, recorder)
        return
    cache.locate_gradients(grads)
    cache.locate_momenta(momenta)
    # The kernel writes past autograd: without this, a backward pass would use a saved tensor that has changed.
    torch.autograd.graph.increment_version(params)
    launches = cache.launch_tables.launches(groups, cache)
    if recorder is not None:
        recorder.count_by([_partial_counts(launch, groups) for launch in launches])
    for launch in launches:
        with _on_its_device(launch):
            _launch(launch, groups, counts=recorder is not None)


def _partial_counts(launch: Launch, groups: Sequence[StepGroup]) -> PartialCounts:
    """Where the programs of a launch count, with the slots of this step."""
    every = [slot for group in groups for slot in group.slots]
    slots = [every[i] for i in launch.positions]
    if launch.partial_counts is None or launch.partial_counts.slots != slots:
        launch.partial_counts = PartialCounts(launch, slots)
    return launch.partial_counts


def _launch(launch: Launch, groups: Sequence[StepGroup], counts: bool) -> None:
    triton, kind, rows = programs(), launch.kind, launch.rows
    partial = launch.partial_counts if counts else None
    compute = triton_type(kind.compute_dtype)
    if launch.sources is not None:
        count = launch.sources.numel() // 4
        triton.scalar_programs[(count,)](
            launch.sources, rows[launch.operands :], rows, COMPUTE=compute, num_warps=1, enable_fp_fusion=False
        )
    block, blocks = kind.blocks
    triton.step_programs[(launch.chunks.shape[0],)](
        launch.tensors,
        launch.chunks,
        rows,
        _flags(launch, groups) if kind.skips else launch.tensors,
        launch.tensors if launch.keys is None else launch.keys,
        partial.counts if partial is not None else launch.tensors,
        partial.sums if partial is not None else rows,
        P=triton_type(kind.dtype),
        G=triton_type(kind.grad_dtype),
        M=triton_type(kind.momentum_dtype or kind.dtype),
        COMPUTE=compute,
        RESCALES=kind.rescales,
        MOMENTUM=kind.momentum_dtype is not None,
        ALIGNED=kind.aligned,
        SKIPS=kind.skips,
        BLANK=kind.blank,
        ROUNDS=kind.rounds,
        COUNTS=partial is not None,
        BLOCK=block,
        BLOCKS=blocks,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )


def _flags(launch: Launch, groups: Sequence[StepGroup]) -> Tensor:
    """For every tensor of a launch, whether it stays as it is."""
    of_groups = [group.skips for group in groups if group.skips is not None]
    total = sum(len(group.params) for group in groups)
    if len(of_groups) < len(groups):  # positions count the other groups too
        no = torch.zeros((), dtype=torch.bool, device=launch.kind.device)
        of_groups = [no.expand(len(g.params)) if g.skips is None else g.skips for g in groups]
    flags = of_groups[0] if len(of_groups) == 1 else torch.cat(of_groups)
    return (flags if len(launch.positions) == total else flags[launch.places]).view(torch.uint8)


def look(grads: Sequence[Tensor], cache: StepCache) -> tuple[Tensor, Tensor] | None:
    """The largest finite magnitude of all gradients, in float64, and how many elements of each are not finite.

    One read of them, and nothing waits. None if the kernel does not take these gradients.

    cache: kept between the steps.
    """
    launches = _reading(grads, cache)
    if launches is None:
        return None
    tops = [torch.zeros(1, dtype=torch.float64, device=grads[0].device)]
    counts: dict[int, Tensor] = {}
    for launch in launches:
        top = torch.empty(launch.chunks.shape[0], dtype=launch.kind.compute_dtype, device=launch.kind.device)
        count = torch.zeros(len(launch.positions), dtype=torch.int64, device=launch.kind.device)
        _read("look_programs", launch, top, count, COMPUTE=triton_type(launch.kind.compute_dtype))
        tops.append(top.amax().double().reshape(1))
        if len(launch.positions) == len(grads):
            return torch.cat(tops).amax(), count
        counts |= dict(zip(launch.positions, count.unbind(), strict=True))
    nothing = torch.zeros((), dtype=torch.int64, device=grads[0].device)
    return torch.cat(tops).amax(), torch.stack([counts.get(i, nothing) for i in range(len(grads))])


def sum_of_squares(grads: Sequence[Tensor], cache: StepCache) -> Tensor | None:
    """The sum of squares of all gradients in float64, added in the same order in every run; as `look`.

    None also for float64 gradients, whose squares may leave the range.
    """
    if any(g.dtype == torch.float64 for g in grads):
        return None
    launches = _reading(grads, cache)
    if launches is None:
        return None
    total = torch.zeros((), dtype=torch.float64, device=grads[0].device)
    for launch in launches:
        sums = torch.empty(launch.chunks.shape[0], dtype=torch.float64, device=launch.kind.device)
        _read("square_programs", launch, sums)
        total = total + sums.sum()
    return total


_LOOK = StepHyperparameters(ClipByValue(math.inf, 0.0), lr=0.0)  # the numbers of a pass that moves nothing


def _reading(grads: Sequence[Tensor], cache: StepCache) -> list[Launch] | None:
    """The launches of a pass that only reads gradients."""
    groups = [StepGroup(list(grads), list(grads), _LOOK)]
    if not takes_all(groups, cache):
        return None
    cache.locate_gradients(list(grads))
    return cache.launch_tables.launches(groups, cache)


def _read(name: str, launch: Launch, *results: Tensor, **constants: Any) -> None:
    """Read the gradients of a launch."""
    kind = launch.kind
    block, blocks = kind.blocks
    with _on_its_device(launch):
        getattr(programs(), name)[(launch.chunks.shape[0],)](
            launch.tensors,
            launch.chunks,
            *results,
            G=triton_type(kind.grad_dtype),
            ALIGNED=kind.aligned,
            BLOCK=block,
            BLOCKS=blocks,
            num_warps=WARPS,
            enable_fp_fusion=False,
            **constants,
        )


def _on_its_device(launch: Launch) -> contextlib.AbstractContextManager[object]:
    """A context in which programs go to the device of the launch, after its tables were told of the stream."""
    if launch.kind.device.type == "cpu":
        return contextlib.nullcontext()
    stream = torch.cuda.current_stream(launch.kind.device)
    if stream.cuda_stream != launch.stream:
        # no table is used again while a stream other than the one that made it still reads it
        if not torch.cuda.is_current_stream_capturing():  # tables of a graph are never given back
            for table in launch.tables():
                table.record_stream(stream)
        launch.stream = stream.cuda_stream
    return torch.cuda.device(launch.kind.device)
