"""Colours, lines and the few drawings that studies share.

The colour says what a node does, the line what is done with the mean displacement. The colours are Okabe and Ito's,
which most colour-blind people tell apart; the lines are there for those who print in grey.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from tailopt.algorithms import ALGORITHMS
from tailopt.optional import missing

COLOURS = {
    "sgd": "#8c8c8c",
    "l2clip": "#56B4E9",
    "biclip-l2": "#0072B2",
    "biclip": "#D55E00",
    "adagrad": "#CC79A7",
    "adam": "#E69F00",
    "adamw": "#009E73",
}
LINES: Mapping[str, Any] = {
    "avg": "-",
    "adam": "--",
    "rmsprop": ":",
    "adagrad": "-.",
    "biclip": (0, (5, 1, 1, 1)),
    "biclip-l2": (0, (5, 1, 1, 1)),
    "nesterov": (0, (1, 1)),
}


def pyplot() -> ModuleType:
    """matplotlib's pyplot, drawing into files; where it is missing, how to get it."""
    try:
        import matplotlib
    except ImportError:
        raise missing("Figures need matplotlib", "matplotlib", "studies") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def look(algorithm: str) -> dict[str, Any]:
    """How an algorithm's line is drawn.

    Examples:
        >>> look("adam-biclip")
        {'color': '#D55E00', 'linestyle': '--', 'label': 'adam-biclip'}
    """
    outer, inner = ALGORITHMS[algorithm]
    return {"color": COLOURS[inner], "linestyle": LINES[outer], "label": algorithm}


def band(axis: Any, x: Sequence[float], runs: Sequence[Sequence[float]], **line: Any) -> None:
    """The median of several runs as a line, and between their quartiles a band."""
    columns = [sorted(column) for column in zip(*runs, strict=True)]
    n = len(runs)
    middle = [(column[(n - 1) // 2] + column[n // 2]) / 2 for column in columns]
    axis.plot(x, middle, linewidth=1.7, **line)
    if n >= 4:
        low, high = ([column[i] for column in columns] for i in (n // 4, n - 1 - n // 4))
        axis.fill_between(x, low, high, color=line.get("color"), alpha=0.15, linewidth=0)
