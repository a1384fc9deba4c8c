"""Tensor by tensor: `single` takes everything and can be traced and differentiated; `reference` is the oracle."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tailopt.clipping import reference
from tailopt.clipping.kernels.kernel import StepGroup, on_device
from tailopt.clipping.operators import Number, compute_dtype, real_parts
from tailopt.clipping.reference import ClipByValue, ScaleToNorm, StepNumbers


def refuses(p: Tensor, g: Tensor, step: StepNumbers) -> str:
    """Empty: it takes everything."""
    return ""


def run(groups: Sequence[StepGroup]) -> None:
    """Step on one tensor after another."""
    for group in groups:
        for p, g in zip(group.params, group.grads, strict=True):
            _single(p, g, group.step)


def _single(p: Tensor, g: Tensor, step: StepNumbers) -> None:
    dtype = compute_dtype(p.dtype)
    step = on_device(step, p.device, dtype)
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
        where, clip, g = tuple(g.indices()), at_coordinates(step.clip, g), real_parts(g)
        touched = wide[where]
        _descend(touched, clip, g.to(dtype), step)
        wide[where] = touched
    else:
        _descend(wide, step.clip, g.to(dtype), step)
    if wide is not p:
        p.copy_(wide)


def _descend(wide: Tensor, clip: ClipByValue | ScaleToNorm, g: Tensor, step: StepNumbers) -> None:
    """wide <- fma(-lr, clip(g), wide), in place."""
    c = clip(-g if step.maximize else g)
    if isinstance(step.lr, Tensor):
        wide.addcmul_(c, -step.lr)
    else:
        wide.add_(c, alpha=-step.lr)


def at_coordinates(clip: ClipByValue | ScaleToNorm, g: Tensor) -> ClipByValue | ScaleToNorm:
    """A clip whose thresholds are those at the coordinates of a coalesced sparse gradient."""

    def picked(threshold: Number) -> Number:
        if not isinstance(threshold, Tensor) or not threshold.ndim:
            return threshold
        here = threshold.expand(g.shape)[tuple(g.indices())]
        return here[..., None] if g.is_complex() else here

    return type(clip)(*map(picked, clip))


def run_reference(groups: Sequence[StepGroup]) -> None:
    """Step on one tensor after another by the reference."""
    with torch.no_grad():
        for group in groups:
            for p, g in zip(group.params, group.grads, strict=True):
                p.copy_(reference.step(p, g, group.step))


def refuses_reference(p: Tensor, g: Tensor, step: StepNumbers) -> str:
    """Why the reference cannot take these tensors; empty if it can."""
    return "the gradient is sparse" if g.layout != torch.strided else ""
