"""Norms whose bits depend on neither threads nor shards.

A norm that decides something in a round is the root of float64 sums of squares over fixed blocks of each tensor,
added in block order. Larger blocks would be summed in an order that depends on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

BLOCK = 32_768  # elements


def norm(tensors: Iterable[Tensor]) -> float:
    """Return the Euclidean norm over all elements of all tensors; NaN or inf where an element is.

    Examples:
        >>> norm([torch.tensor([3.0]), torch.tensor([[4.0]])])
        5.0
    """
    return root_of_sum(map(sum_of_squares, tensors))


def root_of_sum(sums: Iterable[float]) -> float:
    """Return the root of the total of sums of squares, added in their order; NaN stays NaN."""
    total = sequential_sum(sums)
    return math.sqrt(total) if total >= 0 else total


def sum_of_squares(x: Tensor) -> float:
    """Return the sum of squares of one tensor."""
    sums = ((block.double() ** 2).sum() for block in x.detach().reshape(-1).split(BLOCK) if block.numel())
    if x.is_cpu:  # each at once: small tensors that live between large temporaries fragment the memory
        return sequential_sum(map(float, sums))
    by_block = list(sums)
    return sequential_sum(torch.stack(by_block).tolist()) if by_block else 0.0


def sequential_sum(values: Iterable[float]) -> float:
    """Add one value after another, each sum rounded; Python's own `sum` compensates from version 3.12 on."""
    total = 0.0
    for value in values:
        total += value
    return total
