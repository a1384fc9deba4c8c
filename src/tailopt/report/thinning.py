"""Long series in few points, so that a page stays small and what stands out stays visible.

A bucket of rounds keeps its smallest and its largest value, each at its own round: a spike of one round is still there.
Maps keep the mean of a bucket.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

DIGITS = 6  # of numbers on the page


def thin(x: Sequence[float], y: Sequence[float], points: int) -> list[Any]:
    """Return a series as [x, y] with at most about `points` points; y is None where it is not finite.

    Examples:
        >>> thin([1, 2, 3, 4, 5, 6], [0.0, 9.0, 1.0, 1.0, 1.0, 2.0], 4)
        [[1, 2, 4, 6], [0.0, 9.0, 1.0, 2.0]]
        >>> thin([1, 2], [0.5, math.inf], 4)
        [[1, 2], [0.5, None]]
    """
    if len(x) <= points:
        kept: Sequence[int] = range(len(x))
    else:
        kept = sorted({i for bucket in buckets(len(x), max(points // 2, 1)) for i in _extremes(bucket, y)})
    return [[x[i] for i in kept], [rounded(y[i]) for i in kept]]


def _extremes(bucket: range, y: Sequence[float]) -> set[int]:
    """Return where a bucket has its smallest and its largest value; a value that is not finite stands out too."""
    odd = next((i for i in bucket if not math.isfinite(y[i])), None)
    if odd is not None:
        return {odd, min((i for i in bucket if math.isfinite(y[i])), key=lambda i: y[i], default=odd)}
    return {min(bucket, key=lambda i: y[i]), max(bucket, key=lambda i: y[i])}


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
