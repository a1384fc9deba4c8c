"""Tensor by tensor: `single` takes everything and can be traced and differentiated; `reference` is the oracle."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tailopt.clipping import reference
from tailopt.clipping.kernels.kernel import StepGroup, on_device
from tailopt.clipping.operators import Number, compute_dtype, real_parts
from tailopt.clipping.reference import ClipByValue, ScaleToNorm, StepHyperparameters


def refuses(p: Tensor, g: Tensor, hparams: StepHyperparameters) -> str:
    """Empty: it takes everything."""
    return ""


def run(groups: Sequence[StepGroup]) -> None:
    """Step on one tensor after another."""
    for group in groups:
        for i, (p, g) in enumerate(zip(group.params, group.grads, strict=True)):
            _single(p, g, group.hparams, group.slots[i] if group.slots else 0)


def _single(p: Tensor, g: Tensor, hparams: StepHyperparameters, slot: int) -> None:
    dtype = compute_dtype(p.dtype)
    hparams = on_device(hparams, p.device, dtype)
    if p.is_complex():  # sparse; dense ones came as pairs of reals
        p = torch.view_as_real(p)
    wide = p if p.dtype == dtype else p.to(dtype)
    if hparams.weight_decay:
        decay = hparams.decay(dtype)
        if isinstance(decay, Tensor) and decay.requires_grad:  # its derivative needs the value that is about to change
            wide = wide.clone()
        wide.mul_(decay)
    if g.is_sparse:  # the touched coordinates step as if the gradient were dense
        g = g.coalesce()
        where, clip, g = tuple(g.indices()), at_coordinates(hparams.clip, g), real_parts(g)
        touched = wide[where]
        _descend(touched, clip, g.to(dtype), hparams)
        wide[where] = touched
    else:
        _descend(wide, hparams.clip, g.to(dtype), hparams)
    if wide is not p:
        p.copy_(reference.stored(wide, p.dtype, hparams, slot))


def _descend(wide: Tensor, clip: ClipByValue | ScaleToNorm, g: Tensor, hparams: StepHyperparameters) -> None:
    """wide <- fma(-lr, clip(g), wide), in place."""
    c = clip(-g if hparams.maximize else g)
    if isinstance(hparams.lr, Tensor):
        wide.addcmul_(c, -hparams.lr)
    else:
        wide.add_(c, alpha=-hparams.lr)


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
            for i, (p, g) in enumerate(zip(group.params, group.grads, strict=True)):
                p.copy_(reference.step(p, g, group.hparams, group.slots[i] if group.slots else 0))


def refuses_reference(p: Tensor, g: Tensor, hparams: StepHyperparameters) -> str:
    """Why the reference cannot take these tensors; empty if it can."""
    return "the gradient is sparse" if g.layout != torch.strided else ""
