"""The drawings that studies share: panels, curves by round, and saving a figure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tailopt.figures.style import band, look, pyplot
from tailopt.studies.comparison import AlgorithmResult, Comparison


def panels(count: int, width: float, height: float, extra: float, least_width: float = 0.0) -> tuple[Any, list[Any]]:
    """A figure with `count` panels of a size, at most four in a row; `extra` is the height of legend and title."""
    columns = min(4, count)
    rows = -(-count // columns)
    size = (max(least_width, width * columns), height * rows + extra)
    figure, axes = pyplot().subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[count:]:
        axis.set_visible(False)
    return figure, list(axes.flat[:count])


def legend_below(figure: Any, axis: Any, columns: int) -> None:
    """The legend of one panel, below all of them."""
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)


def save(figure: Any, path: Path) -> None:
    """Write a figure and free its memory."""
    figure.savefig(path, dpi=130)
    pyplot().close(figure)


def metric_curves(results: Comparison, metrics: Mapping[str, str], path: Path, title: str) -> None:
    """A metric by round, one panel per column, one line per algorithm: median over seeds, quartiles from four on."""
    figure, axes = panels(len(results.plan.columns), width=3.6, height=3.4, extra=1.2, least_width=8.0)
    for axis, label in zip(axes, results.plan.columns, strict=True):
        for cell in results.cells:
            if cell.column == label:
                algorithm_line(axis, cell, metrics[label])
        axis.set(title=label, xlabel="round", ylabel=metrics[label])
        axis.xaxis.get_major_locator().set_params(integer=True)
        if metrics[label] == "perplexity":  # the first round's may be many times the last one's
            axis.set_yscale("log")
            axis.yaxis.set_minor_formatter(pyplot().NullFormatter())
        axis.grid(alpha=0.25, linewidth=0.5, which="both" if axis.get_yscale() == "log" else "major")
    legend_below(figure, axes[0], 5)
    figure.suptitle(f"{title}, {median_text(len(results.plan.seeds))}", fontsize=10)
    save(figure, path)


def median_text(seeds: int) -> str:
    """What a line shows.

    Examples:
        >>> median_text(3), median_text(1)
        ('median of 3 seeds', 'one seed')
    """
    return f"median of {seeds} seeds" if seeds > 1 else "one seed"


def algorithm_line(axis: Any, cell: AlgorithmResult, metric: str) -> None:
    """A metric of one algorithm by round, of the seeds that did not break down."""
    curves = [run.values(metric) for run in cell.whole_runs]
    if curves:
        marker = {"marker": "o", "markersize": 3} if len(curves[0]) < 12 else {}
        band(
            axis, range(1, len(curves[0]) + 1), curves, **look_of(cell.algorithm, len(curves), len(cell.runs)), **marker
        )


def look_of(algorithm: str, drawn: int, seeds: int) -> dict[str, Any]:
    """How the line of an algorithm looks; where some of its seeds broke down, the legend has how many are drawn.

    Examples:
        >>> look_of("avg-sgd", 1, 3)["label"]
        'avg-sgd (1 of 3 seeds)'
    """
    return look(algorithm) | ({"label": f"{algorithm} ({drawn} of {seeds} seeds)"} if drawn < seeds else {})
