"""Long series in few points, so that a page stays small and what stands out stays visible.

A stretch of rounds becomes its mean with its smallest and its largest value: a spike of one round is still there. Maps
keep the mean of a stretch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

DIGITS = 6  # of numbers on the page


def thin(x: Sequence[float], y: Sequence[float], points: int) -> list[Any]:
    """Return a series as [x, y]; one of more than so many points as [x, mean, low, high] of stretches.

    What is not finite is None, and left out of a stretch that has other values.

    Examples:
        >>> thin([1, 2], [0.5, math.inf], 4)
        [[1, 2], [0.5, None]]
        >>> thin([1, 2, 3, 4, 5, 6], [0.0, 9.0, 1.5, 1.0, 1.0, 2.0], 4)
        [[2, 5], [3.5, 1.33333], [0.0, 1.0], [9.0, 2.0]]
    """
    if len(x) <= points:
        return [list(x), list(map(rounded, y))]
    stretches = buckets(len(x), max(points // 2, 1))
    finite = [[y[i] for i in stretch if math.isfinite(y[i])] or [math.nan] for stretch in stretches]
    middles = [x[stretch[len(stretch) // 2]] for stretch in stretches]
    edges = ([rounded(edge(values)) for values in finite] for edge in (min, max))
    return [middles, [rounded(math.fsum(values) / len(values)) for values in finite], *edges]


def buckets(count: int, most: int) -> list[range]:
    """Cut range(count) into at most so many parts, as even as possible.

    Examples:
        >>> buckets(5, 2)
        [range(0, 2), range(2, 5)]
    """
    parts = min(count, most)
    edges = [count * k // parts for k in range(parts + 1)] if parts else [0]
    return [range(a, b) for a, b in zip(edges, edges[1:], strict=False)]


def rounded(value: float) -> float | None:
    """Return a number with few digits; None where it is not finite."""
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
