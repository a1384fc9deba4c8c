"""The figure of the convex study: the error by round under each kind of noise, in small multiples by inner rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tailopt.figures.labels import compare_with, dash_legend, name_line_ends, named, plain_ticks
from tailopt.figures.style import band, look
from tailopt.studies.plots import finish, grey_line, panels, parts_of

AT_ONCE = 3  # panels in a row where there is one kind of noise


@dataclass(frozen=True)
class NoiseErrors:
    """What was measured under one kind of noise.

    Attributes:
        noise: its name.
        curves: algorithm -> errors by seed and round, of the seeds that did not break down.
        references: what robust and plain estimates on all data reach, by their names.
    """

    noise: str
    curves: Mapping[str, Sequence[Sequence[float]]]
    references: Mapping[str, float]


def draw(found: Sequence[NoiseErrors], title: str, path: Path) -> None:
    """With one kind of noise, a panel for each kind of inner rule; with several, a row of them for each noise."""
    alone = len(found) == 1
    parts = parts_of(list(found[0].curves))
    columns = min(AT_ONCE, len(parts)) if alone else len(parts)
    figure, axes = panels(len(found) * len(parts), columns, height=2.6 if alone else 1.7, sharex=True)
    for number, axis in enumerate(axes):
        errors, part = found[number // len(parts)], list(parts)[number % len(parts)]
        _part(axis, errors, parts[part], name_references=number % columns == 0)
        if number < len(parts):
            named(axis, part)
        if number % columns == 0:
            axis.set_ylabel("distance" if alone else errors.noise)
        if number >= len(axes) - columns:
            axis.set_xlabel("round")
            axis.tick_params(labelbottom=True)
    for first in range(0, len(axes), len(parts)):
        _same_limits(axes[first : first + len(parts)])
    if alone:
        name_line_ends(axes)
    else:
        dash_legend(figure, axes, columns=len(parts))
    finish(figure, title, path)


def _part(axis: Any, errors: NoiseErrors, names: Sequence[str], name_references: bool) -> None:
    """Some algorithms under one kind of noise, the others in grey."""
    for name, curves in errors.curves.items():
        if name not in names:
            grey_line(axis, curves)
    for name in names:
        if curves := errors.curves[name]:
            band(axis, range(1, len(curves[0]) + 1), curves, **look(name))
    axis.set_yscale("log")
    for name, value in errors.references.items():
        compare_with(axis, value, name if name_references else "")
    axis.grid(alpha=0.25, linewidth=0.5)


def _same_limits(axes: Sequence[Any]) -> None:
    """The panels of one kind of noise have the same limits, and so the same ticks."""
    limits = [axis.get_ylim() for axis in axes]
    for axis in axes:
        axis.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
        plain_ticks(axis.yaxis)
