"""A diagnosis as a figure: the tail of standardised coordinates, the stability of its index, layers, scales."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from tailopt.diagnosis import Diagnosis
from tailopt.figures.labels import named, plain_ticks
from tailopt.figures.style import PALETTE, pyplot
from tailopt.tails import TailIndex

LAYERS = 24  # more would be too small to read
HIGHEST = 8.0  # larger indices are drawn here
ENDS = {"heavy": PALETTE["vermillion"], "light": PALETTE["blue"], "cannot tell": "#8c8c8c"}


def draw(found: Diagnosis, title: str, path: Path) -> None:
    """Draw a diagnosis into a file."""
    layers = list(found.layers.items())[:LAYERS]
    height = max(3.4, 0.19 * len(layers) + 1.4)
    figure, axes = pyplot().subplots(2, 2, figsize=(9, 3.4 + height), height_ratios=[3.4, height], layout="constrained")
    _survival(axes[0][0], found)
    _stability(axes[0][1], found)
    _indices(axes[1][0], [(name, noise.tails) for name, noise in layers], found)
    _scales(axes[1][1], [noise.scales for noise in (*dict(layers).values(), found.overall)], axes[1][0])
    figure.suptitle(
        f"{title}: {found.finding if found.finding == 'cannot tell' else found.finding + ' tails'}", fontsize=10
    )
    figure.savefig(path, dpi=130)
    pyplot().close(figure)


def _survival(axis: Any, found: Diagnosis) -> None:
    """How many standardised magnitudes are larger than x, beside what Gaussian noise would have."""
    x, shares = list(found.survival), list(found.survival.values())
    axis.loglog(x, shares, color=ENDS[found.finding], linewidth=1.8, label="these gradients")
    floor = min(shares, default=1e-6)
    gaussian = [(t, math.erfc(0.6745 * t / math.sqrt(2))) for t in (10 ** (i / 40 - 1) for i in range(81))]
    drawn = [(t, share) for t, share in gaussian if share >= floor]
    axis.loglog(*zip(*drawn, strict=True), color="black", linestyle="--", linewidth=1.2, label="Gaussian noise")
    axis.set(xlabel="|z|, in median deviations", ylabel="share of z that is larger")
    plain_ticks(axis.yaxis)
    _finish(axis, "1. Tails of coordinates")


def _stability(axis: Any, found: Diagnosis) -> None:
    """Hill's estimate by the share that is taken for the tail."""
    lines = (
        ("standardised coordinates", found.overall.tails, ENDS[found.finding], "-"),
        ("all coordinates pooled, with their scales", found.overall.pooled, PALETTE["orange"], "--"),
        ("norms", found.norms, PALETTE["green"], ":"),
    )
    for label, tails, colour, dashes in lines:
        if tails.shares:
            hill = [min(value, HIGHEST) for value in tails.hill]
            axis.plot(tails.shares, hill, color=colour, linestyle=dashes, linewidth=1.7, label=label)
    tails = found.overall.tails
    if tails.shares:
        _bar(axis, tails.share, tails, ENDS[found.finding], vertical=True)
    axis.axhline(2, color="black", linewidth=0.8)
    axis.set(xlabel="share that is taken for the tail", ylabel="Hill's estimate")
    axis.set_xscale("log")
    axis.set_ylim(0, HIGHEST * 1.4)  # above the lines is the legend
    axis.set_yticks(range(round(HIGHEST) + 1))
    _finish(axis, "Stability of the index")


def _indices(axis: Any, layers: list[tuple[str, TailIndex]], found: Diagnosis) -> None:
    """The index of every tensor with its interval, then that of all of them, and that of the norms."""
    rows = [*layers, ("all", found.overall.tails), ("2. norms", found.norms)]
    for y, (_, tails) in enumerate(rows):
        if tails.index == tails.index:
            end = "heavy" if tails.heavy else "light" if tails.light else "cannot tell"
            _bar(axis, y, tails, ENDS[end], vertical=False)
    axis.axvline(2, color="black", linewidth=0.8)
    axis.set_yticks(range(len(rows)), [_short(name) for name, _ in rows], fontsize=7)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xlim(0, HIGHEST * 1.05)
    more = len(found.layers) - len(layers)
    named(axis, f"Indices{f' of the first {len(layers)} of {len(found.layers)} tensors' if more else ''}")
    axis.set_xlabel(f"tail index with 90 % interval; {HIGHEST:g} stands for more")
    axis.grid(axis="x", alpha=0.25, linewidth=0.5)


def _scales(axis: Any, scales: list[tuple[float, float, float]], beside: Any) -> None:
    """From the 10 % to the 90 % quantile of the scales of every tensor, in the rows of the panel beside it."""
    for y, (low, middle, high) in enumerate(scales):
        if low > 0:
            axis.plot([low, high], [y, y], color=PALETTE["orange"], linewidth=2.5, solid_capstyle="butt")
            axis.plot([middle], [y], color="black", marker="|", markersize=7)
    axis.set_yticks(range(len(scales)), [""] * len(scales))
    axis.set_ylim(beside.get_ylim())
    axis.set_xlabel("median deviation: 10 %, 50 % and 90 % quantile")
    named(axis, "3. Scales of coordinates")
    axis.set_xscale("log")
    low, high = axis.get_xlim()
    axis.set_xlim(min(low, high / 20), max(high, 20 * low))  # with less than a decade there would be no label
    plain_ticks(axis.xaxis)
    axis.grid(axis="x", alpha=0.25, linewidth=0.5)


def _bar(axis: Any, place: float, tails: TailIndex, colour: str, vertical: bool) -> None:
    """An index with its interval."""
    index, low, high = (min(value, HIGHEST) for value in (tails.index, tails.low, tails.high))
    ends = {"color": colour, "linewidth": 1.6, "capsize": 3, "marker": "o", "markersize": 4}
    errors = [[index - low], [high - index]]
    if vertical:
        axis.errorbar([place], [index], yerr=errors, **ends)
    else:
        axis.errorbar([index], [place], xerr=errors, **ends)


def _short(name: str) -> str:
    return name if len(name) <= 30 else f"…{name[-29:]}"


def _finish(axis: Any, name: str) -> None:
    named(axis, name)
    plain_ticks(axis.xaxis)
    axis.grid(alpha=0.25, linewidth=0.5)
    axis.legend(loc="upper right", frameon=False, fontsize=8, handlelength=4.0)
