"""The C kernel: CPU, one parallel region for all tensors, no extra memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tailopt.clipping.counts import StatisticsRecorder
from tailopt.clipping.kernels.kernel import StepGroup, joined, refuses_flat
from tailopt.clipping.reference import ScaleToNorm, StepHyperparameters
from tailopt.clipping.step_cache import StepCache
from tailopt.native import library
from tailopt.native.calls import DTYPES


def refuses(p: Tensor, g: Tensor, hparams: StepHyperparameters) -> str:
    """Why the C kernel cannot take these tensors; empty if it can."""
    if library.loaded() is None:
        return library.why_missing()
    if p.dtype not in DTYPES or g.dtype != p.dtype:
        return f"it takes fp32, fp64, bf16 and fp16 with gradients of the same type, not {p.dtype} with {g.dtype}"
    return refuses_flat(p, g, hparams)


def run(
    groups: Sequence[StepGroup], cache: StepCache | None = None, recorder: StatisticsRecorder | None = None
) -> None:
    """Step on all groups in one pass, and count on the way if there is a recorder.

    cache: prepared for these groups by the caller; without one the tensors are looked at here.
    """
    kernel = library.loaded()
    assert kernel is not None
    params, grads, momenta = joined(groups)
    if cache is None:
        cache = StepCache(reused=False)
        cache.learn(params, momenta)
        cache.locate(params)
    cache.locate_gradients(grads)
    if momenta:
        cache.locate_momenta(momenta)
    step_table = cache.step_table(groups)
    # The kernel writes past autograd: without this, a backward pass would use a saved tensor that has changed, and
    # nobody would notice. It comes before the pass, which sweeps the tensors' headers out of the processor's caches.
    torch.autograd.graph.increment_version(params)
    kernel.clip.run_at(
        _operation(groups),
        cache.tensor_table,
        step_table,
        recorder.counters(torch.device("cpu")) if recorder is not None else None,
        [slot for group in groups for slot in group.slots] if recorder is not None else None,
        threads=None if cache.distinct else 1,  # a parameter that is in the list twice takes one step after the other
    )


def _operation(groups: Sequence[StepGroup]) -> str:
    """What the pass does. Groups with and without momentum come in separate calls."""
    if not groups:
        return "biclip"
    if isinstance(groups[0].hparams.clip, ScaleToNorm):
        return "rescale"
    return "momentum" if groups[0].momenta else "biclip"
