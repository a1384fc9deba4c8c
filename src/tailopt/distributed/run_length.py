"""Run-length code for rows of numbers: equal rows that follow each other are stored once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def run_length_encode(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Rows as [how many, row].

    Examples:
        >>> run_length_encode([{"lr": 0.1}, {"lr": 0.1}, {"lr": 0.2}])
        [[2, {'lr': 0.1}], [1, {'lr': 0.2}]]
    """
    runs: list[list[Any]] = []
    for row in rows:
        if runs and _equal(runs[-1][1], row):
            runs[-1][0] += 1
        else:
            runs.append([1, row])
    return runs


def run_length_decode(runs: Sequence[Sequence[Any]]) -> list[Mapping[str, Any]]:
    """The rows that were encoded.

    Examples:
        >>> run_length_decode([[2, {"lr": 0.1}], [1, {"lr": 0.2}]])
        [{'lr': 0.1}, {'lr': 0.1}, {'lr': 0.2}]
    """
    return [row for count, row in runs for _ in range(count)]


def _equal(a: Any, b: Any) -> bool:
    """Whether values are equal; a tensor only equals itself: it may change between two rows."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)
