"""The drawings that studies share: panels, curves by round in small multiples, and saving a figure.

A figure is at most `WIDTH` wide: a README and the guide show it at about 800 pixels, where the text must be readable.
It has one title; where there are several panels each has its name above it. A panel with more than `CROWD` lines is
divided by inner rules: each part shows its own algorithms by name, and all others in grey behind them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tailopt.algorithms import rule_names
from tailopt.figures.labels import compare_with, name_line_ends, named, plain_ticks
from tailopt.figures.style import band, band_text, look, pyplot
from tailopt.studies.comparison import AlgorithmResult, Comparison

WIDTH = 9.0  # inches
CROWD = 6  # lines in a panel, with names that can be told apart
FEW_ROUNDS = 12  # so few points have markers
# part of a divided panel -> the inner rules in it
PARTS: Mapping[str, tuple[str, ...]] = {
    "SGD inside": ("sgd",),
    "L2 clipping inside": ("l2clip",),
    "BiClip by norm inside": ("biclip-l2",),
    "BiClip inside": ("biclip",),
    "adaptive inside": ("adagrad", "adam", "adamw"),
    "Muon inside": ("muon",),
}


def panels(count: int, columns: int = 3, height: float = 2.6, **shared: Any) -> tuple[Any, list[Any]]:
    """A figure with so many panels, `columns` at most in a row. shared: sharex and sharey, as matplotlib has them."""
    columns = 2 if count == 4 and columns == 3 else min(columns, count)
    rows = -(-count // columns)
    size = (WIDTH, height * rows + 0.7) if count > 1 else (0.8 * WIDTH, 3.8)
    figure, axes = pyplot().subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **shared)
    for axis in axes.flat[count:]:
        axis.set_visible(False)
    return figure, list(axes.flat[:count])


def finish(figure: Any, title: str, path: Path) -> None:
    """Give a figure its title, write it, and free its memory."""
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)
    pyplot().close(figure)


def metric_curves(results: Comparison, metrics: Mapping[str, str], path: Path, title: str) -> None:
    """A metric by round, a line per algorithm: median over seeds and spread, and what ignores the input to compare."""
    crowded = len(results.plan.algorithms) > CROWD
    columns = list(results.plan.columns)
    parts = parts_of(results.plan.algorithms) if crowded else {"": results.plan.algorithms}
    figure, axes = panels(len(columns) * len(parts), **({"sharey": True} if len(columns) == 1 else {}))
    for number, axis in enumerate(axes):
        label = columns[number // len(parts)]
        part, names = list(parts.items())[number % len(parts)]
        _metric_panel(axis, results, label, metrics[label], names)
        if len(axes) > 1:
            named(axis, ", ".join(text for text in (label if len(columns) > 1 else "", part) if text))
    name_line_ends(axes)
    what = f"{columns[0]} {metrics[columns[0]]}" if len(columns) == 1 else "validation"
    finish(figure, f"{title}: {what} by round, {band_text(len(results.plan.seeds))}", path)


def parts_of(algorithms: Sequence[str]) -> dict[str, list[str]]:
    """Algorithms by what is inside.

    Examples:
        >>> parts_of(["avg-sgd", "bi2clip", "adam2", "avg-biclip"])
        {'SGD inside': ['avg-sgd'], 'BiClip inside': ['bi2clip', 'avg-biclip'], 'adaptive inside': ['adam2']}
    """
    found = {part: [name for name in algorithms if rule_names(name)[1] in rules] for part, rules in PARTS.items()}
    return {part: names for part, names in found.items() if names}


def _metric_panel(axis: Any, results: Comparison, label: str, metric: str, names: Sequence[str]) -> None:
    """One column of a comparison: the algorithms of these names, and all others in grey."""
    for cell in results.cells:
        if cell.column == label and cell.algorithm not in names:
            grey_line(axis, [run.values(metric) for run in cell.whole_runs])
    for cell in results.cells:
        if cell.column == label and cell.algorithm in names:
            algorithm_line(axis, cell, metric)
    baseline(axis, results, label, metric)
    axis.set(xlabel="round", ylabel=metric)
    axis.xaxis.get_major_locator().set_params(integer=True)
    if metric == "perplexity":  # the first round's may be many times the last one's
        axis.set_yscale("log")
        plain_ticks(axis.yaxis)
    axis.grid(alpha=0.25, linewidth=0.5, which="both" if axis.get_yscale() == "log" else "major")


def baseline(axis: Any, results: Comparison, label: str, metric: str) -> None:
    """The line that a model reaches which ignores its input, where the task of a column knows it."""
    found = getattr(results.plan.columns[label].build(), "baseline", None)
    if found is not None and metric in found.metrics:
        compare_with(axis, found.metrics[metric], found.name)


def algorithm_line(axis: Any, cell: AlgorithmResult, metric: str) -> None:
    """A metric of one algorithm by round, of the seeds that did not break down."""
    curves = [run.values(metric) for run in cell.whole_runs]
    if curves:
        marker = {"marker": "o", "markersize": 3} if len(curves[0]) < FEW_ROUNDS else {}
        band(
            axis, range(1, len(curves[0]) + 1), curves, **look_of(cell.algorithm, len(curves), len(cell.runs)), **marker
        )


def grey_line(axis: Any, curves: Sequence[Sequence[float]]) -> None:
    """The median of curves that only serve to compare."""
    if curves:
        medians = [sorted(values)[len(values) // 2] for values in zip(*curves, strict=True)]
        axis.plot(range(1, len(medians) + 1), medians, color="#dddddd", linewidth=1.0, zorder=1)


def look_of(algorithm: str, drawn: int, seeds: int) -> dict[str, Any]:
    """How the line of an algorithm looks; where some of its seeds broke down, its name has how many are drawn.

    Examples:
        >>> look_of("avg-sgd", 1, 3)["label"]
        'avg-sgd (1 of 3 seeds)'
    """
    return look(algorithm) | ({"label": f"{algorithm} ({drawn} of {seeds} seeds)"} if drawn < seeds else {})
