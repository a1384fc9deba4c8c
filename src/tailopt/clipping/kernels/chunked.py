"""torch operations through small buffers that stay in cache: CPU without the C kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tailopt.clipping.kernels.kernel import StepGroup, as_float, on_device, refuses_flat, table_row
from tailopt.clipping.operators import compute_dtype
from tailopt.clipping.reference import ClipByValue, ScaleToNorm, StepHyperparameters

# Elements of a buffer: 1 MiB in fp32. 128k to 512k elements were within 20 % of each other, 32k took twice as long.
CHUNK = 262_144


def refuses(p: Tensor, g: Tensor, hparams: StepHyperparameters) -> str:
    """Why the buffers cannot take these tensors; empty if they can."""
    if isinstance(hparams.clip, ClipByValue) and math.isinf(as_float(hparams.clip.d)):
        return "d is infinite"
    return refuses_flat(p, g, hparams)


def run(groups: Sequence[StepGroup]) -> None:
    """Step on all groups, one piece of one tensor after another."""
    buffers: dict[torch.dtype, list[Tensor]] = {}
    for group in groups:
        for p, g in zip(group.params, group.grads, strict=True):
            dtype, n = compute_dtype(p.dtype), p.numel()
            if dtype not in buffers:
                buffers[dtype] = [torch.empty(CHUNK, dtype=dtype) for _ in range(3)]
            flat_p, flat_g = (t.detach().as_strided((n,), (1,)) for t in (p, g))
            numbers = table_row(on_device(group.hparams, p.device, dtype), dtype)
            for start in range(0, n, CHUNK):
                size = min(CHUNK, n - start)
                c, other, wide = (b[:size] for b in buffers[dtype])
                part, x = flat_p[start : start + size], flat_g[start : start + size]
                _clip_into(c, other, x, group.hparams.clip, numbers, group.hparams.maximize)
                target = part if part.dtype == dtype else wide.copy_(part)
                if group.hparams.weight_decay:
                    target.mul_(numbers[1])
                target.add_(c, alpha=numbers[0])
                if target is not part:
                    part.copy_(target)
    # writing through detached views shares the version counter, so autograd knows


def _clip_into(
    c: Tensor, other: Tensor, x: Tensor, clip: ClipByValue | ScaleToNorm, numbers: tuple[float, ...], maximize: bool
) -> None:
    """c <- clip(x), through one more buffer."""
    if isinstance(clip, ScaleToNorm):
        c.copy_(x)
        (c.neg_() if maximize else c).mul_(numbers[6]).div_(numbers[7]).mul_(numbers[8]).add_(0.0)
        return
    u, d, dead_zone = numbers[3:6]
    x = x if x.dtype == c.dtype else c.copy_(x)
    torch.sign(x, out=other)
    torch.abs(x, out=c)
    if dead_zone:
        other.masked_fill_(c <= dead_zone, 0.0)
    if maximize:
        other.neg_().add_(0.0)  # -0 becomes +0
    c.clamp_(d, u).mul_(other)
