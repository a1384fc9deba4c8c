"""Stochastic rounding to bf16: up or down, with probabilities that keep the mean.

A step that is smaller than half a unit of a bf16 weight is lost by rounding to the nearest, every time: the weight
stalls. Rounded up with probability (x - below) / (above - below), it moves as far on average as in fp32.

    bits of bf16(x) = upper half of (bits of x + r),   r uniform on 0 ... 65535

r is a function of (seed, step, tensor, place of the element in memory): two rounds of a 32-bit mix, whose result
serves two neighbours. Nothing is drawn from a generator, so a run that is resumed rounds as if it had not been stopped,
and all kernels round alike.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
# Multipliers of a 32-bit mix whose bias is among the smallest known for two multiplications, and of splitmix64.
FIRST, SECOND = 0x7FEB352D, 0x846CA68B
WIDE_FIRST, WIDE_SECOND, GOLDEN = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15


class StochasticRounding(NamedTuple):
    """Where the random bits of a step come from."""

    seed: int
    step: int

    def keys(self) -> tuple[int, int]:
        """Two numbers of 32 bits that the bits of all tensors in this step depend on.

        Examples:
            >>> StochasticRounding(seed=0, step=0).keys() == StochasticRounding(seed=0, step=1).keys()
            False
        """
        z = _mixed(_mixed(self.seed + GOLDEN) + (self.step + 1) * GOLDEN)
        return z & MASK, z >> 32


def rounded_to_bf16(x: Tensor, rounding: StochasticRounding, tensor: int) -> Tensor:
    """An fp32 tensor in bf16.

    tensor: its number among those of the step, which gives it random bits of its own.

    Examples:
        >>> x = torch.full((10_000,), 1 + 2**-9)  # a quarter of the way from 1 to the next number
        >>> y = rounded_to_bf16(x, StochasticRounding(seed=0, step=0), tensor=0)
        >>> sorted(set(y.tolist())), round(float((y > 1).float().mean()), 1)
        ([1.0, 1.0078125], 0.2)
    """
    bits = x.view(torch.int32).to(torch.int64) & MASK
    upper = ((bits + random_halves(_places(x), rounding, tensor)) >> 16) & 0xFFFF
    up_or_down = torch.where(upper >= 1 << 15, upper - (1 << 16), upper).to(torch.int16).view(torch.bfloat16)
    return torch.where(torch.isnan(x), x.to(torch.bfloat16), up_or_down)


def random_halves(places: Tensor, rounding: StochasticRounding, tensor: int) -> Tensor:
    """16 random bits for each place of a tensor, as int64."""
    first, second = rounding.keys()
    first = int(_mix(torch.tensor(first ^ (tensor * FIRST & MASK))))
    pairs = places >> 1
    h = _mix((pairs & MASK) ^ first)
    h = _mix((h + second + (pairs >> 32) * SECOND) & MASK)
    return torch.where(places & 1 == 0, h & 0xFFFF, h >> 16)


def _places(x: Tensor) -> Tensor:
    """Where each element lies in memory, counted from the first."""
    places = torch.arange(x.numel(), device=x.device)
    dense = x.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(x)
    return places.view(x.shape) if dense else places.as_strided(x.shape, x.stride())


def _mix(x: Tensor) -> Tensor:
    """A permutation of the numbers of 32 bits that makes all bits depend on all others."""
    x = ((x ^ (x >> 16)) * FIRST) & MASK
    x = ((x ^ (x >> 15)) * SECOND) & MASK
    return x ^ (x >> 16)


def _mixed(z: int) -> int:
    """The same for 64 bits, on the host."""
    z &= 2**64 - 1
    z = ((z ^ (z >> 30)) * WIDE_FIRST) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * WIDE_SECOND) & (2**64 - 1)
    return z ^ (z >> 31)
