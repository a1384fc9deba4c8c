"""What one step means, in plain torch: the oracle of every kernel.

    p <- fma(-lr, clip(g), p * (1 - lr * weight_decay))

and with momentum, where the k-th step since m was 0 clips a mean of gradients in place of g:

    m <- fma(1 - beta, clamp(g, -u / (1 - beta), u / (1 - beta)), beta * m)
    p <- fma(-lr, clip(m / (1 - beta^k)), p * (1 - lr * weight_decay))

The clamp keeps what one outlier or infinity adds to m at u. m is rounded to its type after the operator has used it.

fp64 is computed in itself, everything else in fp32; numbers are rounded once to that type, the result once to the
parameter's. `ClipByValue` and `ScaleToNorm` are the two ways to clip, `StepHyperparameters` is a clip with lr and the
other numbers of a step. Kernels take the same and must give the same bits. Nothing here is fast or optimised.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tailopt.clipping.operators import Number, clip_coordinates, compute_dtype
from tailopt.clipping.stochastic_rounding import StochasticRounding, rounded_to_bf16


class ClipByValue(NamedTuple):
    """Clip each coordinate: the magnitude into [d, u], with its sign; what is at or below dead_zone becomes 0."""

    u: Number
    d: Number
    dead_zone: Number = 0.0

    def __call__(self, g: Tensor) -> Tensor:
        return clip_coordinates(g, self.u, self.d, self.dead_zone)


class ScaleToNorm(NamedTuple):
    """Give a vector of known norm another length: ((g * scale) / norm) * target.

    `scale` is 1, or a power of two that brings a norm outside the type's range back into it; (1, 1, 1) is the
    identity.
    """

    scale: Number
    norm: Number
    target: Number

    def __call__(self, g: Tensor) -> Tensor:
        return g * self.scale / self.norm * self.target + 0.0  # -0 becomes +0: a zero moves nothing, not even -0


class Momentum(NamedTuple):
    """The hyperparameters of momentum in one step.

    correction: 1 - beta^k, by which m is divided in its k-th step; clamps: False while u is not known yet.
    """

    beta: float
    correction: Number
    clamps: bool = True

    @classmethod
    def at(cls, beta: float, k: int) -> Momentum:
        """Return those of the k-th step since m was 0.

        Examples:
            >>> Momentum.at(0.5, 2)
            Momentum(beta=0.5, correction=0.75, clamps=True)
        """
        return cls(beta, 1 - beta**k)


class StepHyperparameters(NamedTuple):
    """The hyperparameters with which the parameters of a group take one step."""

    clip: ClipByValue | ScaleToNorm
    lr: Number
    weight_decay: float = 0.0
    maximize: bool = False
    momentum: Momentum | None = None
    rounding: StochasticRounding | None = None  # of bf16 parameters; by default to the nearest

    def decay(self, dtype: torch.dtype) -> Number:
        """1 - lr * weight_decay: in float64 from numbers, in the compute type from a tensor lr."""
        lr = self.lr.to(dtype) if isinstance(self.lr, Tensor) else self.lr
        return 1 - lr * self.weight_decay

    def gradient_limit(self, dtype: torch.dtype) -> Number:
        """u / (1 - beta), to which momentum clamps gradients: in float64 from numbers, else in the compute type."""
        assert isinstance(self.clip, ClipByValue)
        assert self.momentum is not None
        if not self.momentum.clamps:
            return math.inf
        u, rest = self.clip.u, 1 - self.momentum.beta
        return u.to(dtype) / rounded(rest, dtype).to(u.device) if isinstance(u, Tensor) else u / rest


def momentum(m: Tensor, g: Tensor, hparams: StepHyperparameters, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The momentum after one step, in its own type, and what the step clips in place of the gradient.

    dtype: the compute type.

    Examples:
        >>> hparams = StepHyperparameters(ClipByValue(u=0.5, d=0.0), lr=1.0, momentum=Momentum.at(0.5, 1))
        >>> momentum(torch.zeros(2), torch.tensor([0.25, 9.0]), hparams, torch.float32)
        (tensor([0.1250, 0.5000]), tensor([0.2500, 1.0000]))
    """
    assert hparams.momentum is not None
    limit = rounded(hparams.gradient_limit(dtype), dtype)
    g = (-g if hparams.maximize else g).to(dtype)
    clamped = torch.where(g < -limit, -limit, g)  # NaN passes
    clamped = torch.where(clamped > limit, limit, clamped)
    beta = hparams.momentum.beta
    wide = fma(rounded(1 - beta, dtype), clamped, m.to(dtype) * rounded(beta, dtype))
    return wide.to(m.dtype), wide / rounded(hparams.momentum.correction, dtype)


def step(p: Tensor, g: Tensor, hparams: StepHyperparameters, tensor: int = 0) -> Tensor:
    """The parameter after one step, as a new tensor; g is what `momentum` returned, where the step has momentum.

    tensor: its number, for stochastic rounding.

    Examples:
        >>> p, g = torch.tensor([1.0, 1.0, 1.0]), torch.tensor([9.0, 0.0, -1e-6])
        >>> step(p, g, StepHyperparameters(ClipByValue(u=0.5, d=0.1), lr=1.0))
        tensor([0.5000, 1.0000, 1.1000])
    """
    dtype = compute_dtype(p.dtype)
    wide, g = p.to(dtype), g.to(dtype)
    c = hparams.clip(-g if hparams.maximize and hparams.momentum is None else g)
    decayed = wide if hparams.weight_decay == 0 else wide * rounded(hparams.decay(dtype), dtype)
    return stored(fma(-rounded(hparams.lr, dtype), c, decayed), p.dtype, hparams, tensor)


def stored(wide: Tensor, dtype: torch.dtype, hparams: StepHyperparameters, tensor: int) -> Tensor:
    """A result in the type of its parameter: the one rounding at the end of a step."""
    if hparams.rounding is not None and dtype == torch.bfloat16:
        return rounded_to_bf16(wide, hparams.rounding, tensor)
    return wide.to(dtype)


def rounded(value: Number, dtype: torch.dtype) -> Tensor:
    """A number as a 0-dim tensor of the compute type."""
    return torch.as_tensor(value, dtype=torch.float64 if not isinstance(value, Tensor) else value.dtype).to(dtype)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c with one rounding.

    fp32: the product is exact in fp64; the sum is rounded to odd there (its last bit tells whether anything was lost),
    so that the second rounding, to fp32, is the only one that counts. fp64: torch's own fused operation, which is
    fused only where the processor can do it.
    """
    if c.dtype == torch.float64:
        return torch.add(c, b, alpha=float(a))
    product, c = a.double() * b.double(), c.double()
    total = product + c
    part = total - product
    lost = (product - (total - part)) + (c - part)  # what the addition rounded away (two-sum)
    bits = total.view(torch.int64)
    even = (bits & 1) == 0
    away = (lost > 0) == (total > 0)  # the exact sum lies farther from zero than the rounded one
    odd = torch.where(away, bits + 1, bits - 1).view(torch.float64)
    return torch.where((lost != 0) & even & torch.isfinite(total), odd, total).float()
