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
    """The Euclidean norm over all elements of all tensors; NaN or inf where an element is.

    Examples:
        >>> norm([torch.tensor([3.0]), torch.tensor([[4.0]])])
        5.0
    """
    return root(map(squares, tensors))


def root(sums: Iterable[float]) -> float:
    """The root of sums of squares, added in their order; NaN stays."""
    total = _added(sums)
    return math.sqrt(total) if total >= 0 else total


def squares(x: Tensor) -> float:
    """The sum of squares of one tensor."""
    blocks = [(block.double() ** 2).sum() for block in x.detach().reshape(-1).split(BLOCK)]
    if len(blocks) == 1:
        return float(blocks[0])
    return _added(torch.stack(blocks).tolist()) if blocks else 0.0


def _added(values: Iterable[float]) -> float:
    """One rounded addition after another; Python's own `sum` compensates from version 3.12 on."""
    total = 0.0
    for value in values:
        total += value
    return total
