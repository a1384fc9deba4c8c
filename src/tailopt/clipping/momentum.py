"""Momentum in torch operations: what kernels without momentum of their own clip in place of the gradient.

The semantics are those of `reference.momentum`. The C kernel does the same in its own pass; every other kernel steps on
what `advance` returns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tailopt.clipping import reference
from tailopt.clipping.kernels.kernel import StepGroup
from tailopt.clipping.operators import Number, compute_dtype
from tailopt.clipping.reference import StepHyperparameters


def advance(group: StepGroup, by_reference: bool = False) -> StepGroup:
    """Move the momenta of a group on by one step; returns the group whose gradients are what the step clips.

    by_reference: by the oracle, tensor by tensor.
    """
    momentum = group.hparams.momentum
    assert momentum is not None
    corrections: Sequence[Number] = group.corrections or [momentum.correction] * len(group.params)
    means: list[Tensor] = []
    for p, g, m, correction in zip(group.params, group.grads, group.momenta, corrections, strict=True):
        dtype = compute_dtype(p.dtype)
        if by_reference:
            hparams = group.hparams._replace(momentum=momentum._replace(correction=correction))
            new, mean = reference.momentum(m, g, hparams, dtype)
            m.copy_(new)
        else:
            mean = _advance(m, g, group.hparams, correction, dtype)
        means.append(mean)
    return group._replace(grads=means, hparams=group.hparams._replace(maximize=False, momentum=None), momenta=())


def _advance(m: Tensor, g: Tensor, hparams: StepHyperparameters, correction: Number, dtype: torch.dtype) -> Tensor:
    assert hparams.momentum is not None
    beta, limit = hparams.momentum.beta, hparams.gradient_limit(dtype)
    g = (-g if hparams.maximize else g).to(dtype)
    if isinstance(limit, Tensor):
        limit = limit.to(g.device)
        g = g.clamp(-limit, limit)
    elif limit <= torch.finfo(dtype).max:
        g = g.clamp(-limit, limit)
    wide = m if m.dtype == dtype else m.to(dtype)
    # add with alpha is a fused multiply-add where the processor has one
    wide.mul_(beta).add_(g, alpha=1 - beta)
    if wide is not m:
        m.copy_(wide)
    if not isinstance(correction, Tensor):
        if correction == 1:
            return wide
        # by a tensor on the device: some devices divide by a number through its reciprocal
        correction = torch.full((), correction, dtype=dtype, device=g.device)
    return wide / correction.to(device=g.device, dtype=dtype)


def as_finite(g: Tensor, dtype: torch.dtype) -> Tensor:
    """A gradient for a momentum of some type, while u is not known: what is not finite would stay in the mean.

    NaN and infinities count as 0, and larger magnitudes than the type has become its largest.

    Examples:
        >>> as_finite(torch.tensor([1.0, float("inf"), 1e30]), torch.float16)
        tensor([1.0000e+00, 0.0000e+00, 6.5504e+04])
    """
    if g.is_complex():
        return torch.view_as_complex(as_finite(torch.view_as_real(g.resolve_conj()), dtype))
    most = min(torch.finfo(g.dtype).max, torch.finfo(dtype).max)
    return torch.where(g.isfinite(), g, 0.0).clamp(-most, most)


def check_momentum(value: object) -> None:
    """Raise ValueError unless a momentum is a number in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1 or math.isnan(value):
        raise ValueError(f"Invalid momentum: {value!r}; need 0 <= momentum < 1.")
