"""torch._foreach_* over the list of tensors: GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tailopt.clipping.kernels.kernel import StepGroup, as_float, has_dimensions, on_device
from tailopt.clipping.operators import Number, compute_dtype
from tailopt.clipping.reference import ClipByValue, StepHyperparameters

FOREACH_BYTES = 1 << 28  # of gradients whose intermediates are alive at the same time


def refuses(p: Tensor, g: Tensor, hparams: StepHyperparameters) -> str:
    """Why a list operation cannot take these tensors; empty if it can."""
    if g.layout != torch.strided:
        return "the gradient is sparse"
    if not p.is_floating_point():
        return f"it takes floating types, not {p.dtype}"
    if has_dimensions(hparams):
        return "thresholds have dimensions"
    if hparams.rounding is not None and p.dtype == torch.bfloat16:
        return "it rounds to the nearest"
    if isinstance(hparams.clip, ClipByValue) and (isinstance(hparams.clip.dead_zone, Tensor) or hparams.clip.dead_zone):
        return "there is a dead zone"
    if isinstance(hparams.clip, ClipByValue) and math.isinf(
        as_float(hparams.clip.d) if not torch.compiler.is_compiling() else 0.0
    ):
        return "d is infinite"
    return ""


def run(groups: Sequence[StepGroup]) -> None:
    """Step on all groups, tensors of one device and type together."""
    for group in groups:
        kinds: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for p, g in zip(group.params, group.grads, strict=True):
            ps, gs = kinds.setdefault((p.device, p.dtype), ([], []))
            ps.append(p)
            gs.append(g)
        for (device, dtype), (ps, gs) in kinds.items():
            hparams = on_device(group.hparams, device, compute_dtype(dtype))
            start = alive = 0
            for end, g in enumerate(gs, 1):
                alive += g.numel() * g.element_size()
                if alive >= FOREACH_BYTES or end == len(gs):
                    _foreach(ps[start:end], gs[start:end], hparams)
                    start, alive = end, 0


def _foreach(params: list[Tensor], grads: list[Tensor], hparams: StepHyperparameters) -> None:
    dtype = compute_dtype(params[0].dtype)
    gs = [g if g.dtype == dtype else g.to(dtype) for g in grads]
    wide = [p if p.dtype == dtype else p.to(dtype) for p in params]
    if isinstance(hparams.clip, ClipByValue):
        clipped = torch._foreach_abs(gs)
        torch._foreach_clamp_min_(clipped, _scalar(hparams.clip.d, len(gs)))
        torch._foreach_clamp_max_(clipped, _scalar(hparams.clip.u, len(gs)))
        # signs for a quarter of the list at a time: otherwise a second copy of all gradients would be alive
        some = -(-len(gs) // 4)
        for i in range(0, len(gs), some):
            signs = torch._foreach_sign(gs[i : i + some])
            if hparams.maximize:
                torch._foreach_neg_(signs)
                torch._foreach_add_(signs, 0.0)  # -0 becomes +0
            torch._foreach_mul_(clipped[i : i + some], signs)
    else:
        clipped = torch._foreach_mul(gs, -hparams.clip.scale if hparams.maximize else hparams.clip.scale)
        torch._foreach_div_(clipped, hparams.clip.norm)
        torch._foreach_mul_(clipped, hparams.clip.target)
        torch._foreach_add_(clipped, 0.0)
    if hparams.weight_decay:
        torch._foreach_mul_(wide, hparams.decay(dtype))
    if isinstance(hparams.lr, Tensor):
        torch._foreach_mul_(clipped, -hparams.lr)
        torch._foreach_add_(wide, clipped)
    else:
        torch._foreach_add_(wide, clipped, alpha=-hparams.lr)
    if params[0].dtype != dtype:
        torch._foreach_copy_(params, wide)


def _scalar(value: Number, n: int) -> float | list[Tensor]:
    """What `_foreach_clamp_*` takes: a number, or a tensor for every tensor."""
    return [value] * n if isinstance(value, Tensor) else value
