"""The text in figures: names at the ends of lines, legends that show dashes, numbers at ticks, lines to compare with.

named(axis, name)         the name of a panel; a figure has one title
name_line_ends(axes)      the name of every line beside its end, moved apart where ends are close
dash_legend(figure, ...)  one legend for all panels; its handles have the dashes and no markers
plain_ticks(axis)         0.01, 5, 2000 at logarithmic ticks instead of powers of ten
compare_with(axis, y, …)  a horizontal line with its name on it: a majority class, a unigram model
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tailopt.figures.style import pyplot

SIZE = 8.0  # points, of text beside lines; figures are at most 9 inches wide, so it can be read in a README
LINE_HEIGHT = 1.25  # of text, in its size
POINTS_PER_INCH = 72
GREY = "#666666"


def named(axis: Any, name: str) -> None:
    """Write the name of a panel above it; the title is the figure's own."""
    axis.set_title(name, fontsize=9)


def name_line_ends(axes: Sequence[Any], size: float = SIZE) -> None:
    """Write the label of every line beside its last point, in its colour; a thin line leads to a name that was moved.

    Call it when everything else is drawn: it looks at the limits and at the height of the panels. Lines without a
    label, and those whose label begins with "_", are left out.
    """
    figure = axes[0].figure
    figure.draw_without_rendering()  # settles limits and heights
    for axis in axes:
        named = [line for line in axis.get_lines() if not str(line.get_label()).startswith("_") and _end(line)]
        to_share = (axis.transData + axis.transAxes.inverted()).transform
        ends = [min(1.0, max(0.0, float(to_share(_end(line))[1]))) for line in named]
        height = axis.get_window_extent().height / figure.dpi * POINTS_PER_INCH
        for line, place in zip(named, moved_apart(ends, LINE_HEIGHT * size / height), strict=True):
            axis.annotate(
                line.get_label(),
                xy=_end(line),
                xytext=(1.03, place),
                textcoords="axes fraction",
                va="center",
                fontsize=size,
                color=line.get_color(),
                annotation_clip=False,
                arrowprops={
                    "arrowstyle": "-",
                    "color": line.get_color(),
                    "linewidth": 0.6,
                    "shrinkA": 1,
                    "shrinkB": 1,
                    "relpos": (0, 0.5),
                },
            )


def _end(line: Any) -> tuple[float, float] | None:
    """The last finite point of a line; None if it has none."""
    points = [(float(x), float(y)) for x, y in zip(*line.get_data(), strict=True) if math.isfinite(y)]
    return points[-1] if points else None


def moved_apart(places: Sequence[float], gap: float) -> list[float]:
    """The nearest places, by least squares, that have the same order and are at least `gap` apart.

    Examples:
        >>> moved_apart([0.0, 1.0, 5.0], gap=2.0)
        [-0.5, 1.5, 5.0]
        >>> moved_apart([3.0, 1.0], gap=1.0)
        [3.0, 1.0]
    """
    order = sorted(range(len(places)), key=lambda i: places[i])
    # Without the gaps this is isotonic regression: neighbours in the wrong order take their mean, as one block.
    blocks: list[list[float]] = []  # mean and size
    for rank, i in enumerate(order):
        blocks.append([places[i] - rank * gap, 1.0])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, size = blocks.pop()
            below, below_size = blocks[-1]
            blocks[-1] = [(below * below_size + mean * size) / (below_size + size), below_size + size]
    means = [mean for mean, size in blocks for _ in range(int(size))]
    found = [0.0] * len(places)
    for rank, i in enumerate(order):
        found[i] = means[rank] + rank * gap
    return found


def dash_legend(figure: Any, axes: Sequence[Any], columns: int = 4) -> None:
    """One legend below all panels: every label once, with its colour and its dashes, and no marker that hides them."""
    line = pyplot().Line2D
    handles: dict[str, Any] = {}
    for axis in axes:
        for shown, label in zip(*axis.get_legend_handles_labels(), strict=True):
            if label not in handles:
                handles[label] = line([], [])
                handles[label].update_from(shown if isinstance(shown, line) else shown[0])  # of error bars, the line
                handles[label].set(marker="", linewidth=1.7, label=label)
    figure.legend(
        handles=list(handles.values()), loc="outside lower center", ncols=columns, frameon=False, fontsize=SIZE,
        handlelength=4.0,
    )  # fmt: skip


def plain_ticks(axis: Any, narrow: bool = False) -> None:
    """Write plain numbers at the ticks of a logarithmic x or y axis: 1, 2 and 5 of every decade if there are few.

    Args:
        axis: axes.xaxis or axes.yaxis, with its limits.
        narrow: whether there is room for a few numbers only.
    """
    plt = pyplot()
    low, high = sorted(axis.get_view_interval())
    decades = math.log10(high / low) if low > 0 else math.inf
    if decades < 0.7:
        axis.set_major_locator(plt.MaxNLocator(5, steps=[1, 2, 5, 10]))
    else:
        subs = (1, 2, 3, 5) if decades < 1.5 else (1, 2, 5) if decades < 2.5 and not narrow else (1,)
        axis.set_major_locator(plt.LogLocator(subs=subs, numticks=8))
    axis.set_major_formatter(plt.FuncFormatter(lambda value, _: plain_number(value)))
    axis.set_minor_formatter(plt.NullFormatter())


def plain_number(value: float) -> str:
    """A number as one writes it; a power of ten where that would have many zeros.

    Examples:
        >>> plain_number(0.0002), plain_number(5000.0), plain_number(1e-05), plain_number(2e7)
        ('0.0002', '5000', '10⁻⁵', '2·10⁷')
    """
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        return f"{value:.6f}".rstrip("0").rstrip(".")
    mantissa, exponent = f"{value:.3e}".split("e")
    raised = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    front = f"{float(mantissa):g}"
    return f"10{raised}" if front == "1" else f"{front}·10{raised}"


def compare_with(axis: Any, value: float, name: str) -> None:
    """A dotted horizontal line at a value that is not of a run, with its name above its right end."""
    axis.axhline(value, color=GREY, linewidth=1.0, linestyle=(0, (1, 2)))
    axis.annotate(
        name, (0.99, value), xycoords=("axes fraction", "data"), xytext=(0, 2), textcoords="offset points",
        fontsize=SIZE - 1, color=GREY, va="bottom", ha="right",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5},  # lines may pass behind it
    )  # fmt: skip
