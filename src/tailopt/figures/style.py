"""Colours, lines and the few drawings that figures share.

An algorithm has the colour of its inner rule and the dashes of its outer rule. The colours are Okabe and Ito's,
which most colour-blind people can distinguish; dashes and markers keep lines apart in grey print.
"""

from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tailopt.algorithms import rule_names
from tailopt.optional import missing

PALETTE = {
    "black": "#000000",
    "orange": "#E69F00",
    "sky blue": "#56B4E9",
    "green": "#009E73",
    "blue": "#0072B2",
    "vermillion": "#D55E00",
    "purple": "#CC79A7",
}
# of inner and of outer rules
COLOURS = {
    "sgd": "#8c8c8c",
    "l2clip": PALETTE["sky blue"],
    "biclip-l2": PALETTE["blue"],
    "biclip": PALETTE["vermillion"],
    "adagrad": PALETTE["purple"],
    "adam": PALETTE["orange"],
    "adamw": PALETTE["green"],
    "muon": PALETTE["black"],
}
LINES: Mapping[str, Any] = {
    "avg": "-",
    "adam": "--",
    "yogi": (0, (5, 2, 1, 2, 1, 2)),
    "rmsprop": ":",
    "adagrad": "-.",
    "biclip": (0, (5, 1, 1, 1)),
    "biclip-l2": (0, (5, 1, 1, 1)),
    "nesterov": (0, (1, 1)),
}


@dataclass(frozen=True)
class LineStyle:
    """How the line of something other than an algorithm looks. colour: a name of PALETTE; marker: "" for none."""

    colour: str
    dashes: Any = "-"
    marker: str = ""

    @property
    def hex(self) -> str:
        """The colour for matplotlib."""
        return PALETTE[self.colour]

    def keywords(self) -> dict[str, Any]:
        """Keywords of matplotlib's `plot`.

        Examples:
            >>> LineStyle("blue", "--", "o").keywords()
            {'color': '#0072B2', 'linestyle': '--', 'marker': 'o'}
        """
        return {"color": self.hex, "linestyle": self.dashes, "marker": self.marker}


def check_figure_file(file: str) -> None:
    """Raise ValueError for a file that matplotlib cannot write a figure to, by its ending."""
    known = sorted(pyplot().figure().canvas.get_supported_filetypes())
    pyplot().close()
    ending = Path(file).suffix.removeprefix(".").lower()
    if ending not in known:
        raise ValueError(f"Invalid figure: {file!r} ends in {ending!r}; need one of {', '.join(known)}.")


def pyplot() -> ModuleType:
    """matplotlib's pyplot, drawing into files: the only way to matplotlib. Raises with the command that installs it."""
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
    outer, inner = rule_names(algorithm)
    return {"color": COLOURS[inner], "linestyle": LINES[outer], "label": algorithm}


def colours(n: int) -> list[str]:
    """Return n different colours: those of the palette, then others around the circle of hues.

    Examples:
        >>> colours(2), len({*colours(100)})
        (['#0072B2', '#D55E00'], 100)
    """
    first = [PALETTE[name] for name in ("blue", "vermillion", "green", "purple", "orange", "sky blue", "black")]
    # the golden ratio of the circle is never near a hue that is taken; two brightnesses tell neighbours apart
    others = (colorsys.hsv_to_rgb(k * 0.618034 % 1, 0.75, (0.85, 0.55)[k % 2]) for k in range(1, n))
    return [*first, *("#" + "".join(f"{round(255 * part):02x}" for part in rgb) for rgb in others)][:n]


def band(axis: Any, x: Sequence[float], runs: Sequence[Sequence[float]], **line: Any) -> None:
    """The median of several runs as a line, and their spread as a band: the quartiles from four runs on, else all."""
    columns = [sorted(column) for column in zip(*runs, strict=True)]
    n = len(runs)
    middle = [(column[(n - 1) // 2] + column[n // 2]) / 2 for column in columns]
    axis.plot(x, middle, **{"linewidth": 1.7, **line})
    if n > 1:
        inside = n // 4 if n >= 4 else 0
        low, high = ([column[i] for column in columns] for i in (inside, n - 1 - inside))
        axis.fill_between(x, low, high, color=line.get("color"), alpha=0.15, linewidth=0)


def band_text(seeds: int) -> str:
    """What `band` shows, for a title.

    Examples:
        >>> band_text(10), band_text(3), band_text(1)
        ('median and quartiles of 10 seeds', 'median and range of 3 seeds', 'one seed')
    """
    return f"median and {'quartiles' if seeds >= 4 else 'range'} of {seeds} seeds" if seeds > 1 else "one seed"
