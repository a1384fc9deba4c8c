"""The C kernel: CPU, one parallel region for all tensors, no extra memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tailopt.clipping.counts import StatisticsRecorder
from tailopt.clipping.kernels.kernel import StepGroup, refuses_flat
from tailopt.clipping.reference import ScaleToNorm, Step
from tailopt.clipping.step_cache import StepCache
from tailopt.native import library
from tailopt.native.calls import DTYPES
from tailopt.native.clip import TensorTable


def refuses(p: Tensor, g: Tensor, step: Step) -> str:
    """Why the C kernel cannot take these tensors; empty if it can."""
    if library.loaded() is None:
        return library.why_missing()
    if p.dtype not in DTYPES or g.dtype != p.dtype:
        return f"it takes fp32, fp64, bf16 and fp16 with gradients of the same type, not {p.dtype} with {g.dtype}"
    return refuses_flat(p, g, step)


def run(
    batches: Sequence[StepGroup], cache: StepCache | None = None, recorder: StatisticsRecorder | None = None
) -> None:
    """Step on all batches in one pass, and count on the way if there is a recorder.

    cache: prepared for these batches by the caller; without one the tensors are looked at here.
    """
    kernel = library.loaded()
    assert kernel is not None
    params, grads, momenta = joined(batches)
    if cache is None:
        cache = StepCache(reused=False)
        cache.learn(params, momenta)
        cache.locate(params)
    rows = cache.rows(batches)
    tensors = TensorTable(
        cache.param_addresses,
        cache.locate_gradients(grads),
        cache.sizes,
        cache.dtype_codes,
        cache.locate_momenta(momenta),
        cache.momentum_codes,
    )
    # The kernel writes past autograd: without this, a backward pass would use a saved tensor that has changed, and
    # nobody would notice. It comes before the pass, which sweeps the tensors' headers out of the processor's caches.
    torch.autograd.graph.increment_version(params)
    kernel.clip.run_at(
        _operation(batches),
        tensors,
        rows,
        recorder.counters(torch.device("cpu")) if recorder is not None else None,
        [slot for batch in batches for slot in batch.slots] if recorder is not None else None,
        threads=None if cache.distinct else 1,  # a parameter that is in the list twice takes one step after the other
    )


def _operation(batches: Sequence[StepGroup]) -> str:
    """What the pass does. Batches with and without momentum come in separate calls."""
    if not batches:
        return "biclip"
    if isinstance(batches[0].step.clip, ScaleToNorm):
        return "rescale"
    return "momentum" if batches[0].momenta else "biclip"


def joined(batches: Sequence[StepGroup]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """All parameters, gradients and momenta; the lists themselves if there is only one batch."""
    if len(batches) == 1:
        return batches[0].params, batches[0].grads, list(batches[0].momenta)
    params, grads = [p for batch in batches for p in batch.params], [g for batch in batches for g in batch.grads]
    return params, grads, [m for batch in batches for m in batch.momenta]
