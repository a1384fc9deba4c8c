"""The grids that the paper searched: as printed, and mended where they cannot have given the reported settings.

A reported value is on a grid if some point of it, rounded to two digits, equals it. Of 638 values 53 are off the
printed grids; off the mended ones (`which="paper"`), with five misprinted cells corrected, none is. What was mended:

- avg-adagrad, avg-adam, ilr: a linspace for a logspace with the same numbers; of all simple grids only that one and its
  bisection hold the six reported values.
- rmsprop-sgd, olr: likewise; adagrad-sgd and adam-sgd have the logspace.
- diloco, ilr: from -6, as adam2; the reported 1.8e-5 is its second point. The epsilon is the inner AdamW's: the outer
  step has none.
- adam-biclip, i_d: four points, since thirds of i_u are reported. adam-l2clip, i_u: three points instead of twelve.
- avg-biclip-l2: a second sweep, adam-biclip-l2's inner grid; every reported row lies wholly on one of the two.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from tailopt.paper.tables import algorithm_name, load, translated

Which: TypeAlias = Literal["paper", "paper-printed"]
Spec: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Lower:
    """A lower threshold's grid: `num` points from `start` to the upper threshold of the same trial.

    Examples:
        >>> Lower("i_u", 0.0, 3)(1.5)
        [0.0, 0.75, 1.5]
    """

    upper: str
    start: float
    num: int

    def __call__(self, u: float) -> list[float]:
        """The points for this upper threshold; the last is `u` itself."""
        return linspace(self.start, u, self.num)


def grid(algorithm: str, which: Which = "paper") -> list[dict[str, list[float] | Lower]]:
    """The sub-sweeps of an algorithm: setting -> values, or a function of the upper threshold.

    Args:
        algorithm: in our spelling or the paper's.
        which: `"paper"` is mended, `"paper-printed"` as printed. Printed, diloco has an outer epsilon and no inner one,
            which the algorithm does not take.

    Examples:
        >>> [sweep] = grid("adam-biclip")
        >>> sweep["oeps"], sweep["i_d"]
        ([1e-07, 1e-05, 0.001], Lower(upper='i_u', start=1e-07, num=4))
    """
    name = algorithm_name(algorithm)
    return [{c: values(spec) for c, spec in translated(name, sweep).items()} for sweep in specs(name, which)]


def points(algorithm: str, which: Which = "paper") -> Iterator[dict[str, float]]:
    """Every trial of the grid, sub-sweep by sub-sweep; lower thresholds follow the upper ones.

    Examples:
        >>> sum(1 for _ in points("bi2clip"))
        729
    """
    for sweep in grid(algorithm, which):
        free = {c: v for c, v in sweep.items() if not isinstance(v, Lower)}
        bound = {c: v for c, v in sweep.items() if isinstance(v, Lower)}
        for chosen in itertools.product(*free.values()):
            point = dict(zip(free, chosen, strict=True))
            for lows in itertools.product(*(lower(point[lower.upper]) for lower in bound.values())):
                resolved = {**point, **dict(zip(bound, lows, strict=True))}
                yield {c: resolved[c] for c in sweep}


def specs(name: str, which: Which) -> list[dict[str, Spec | None]]:
    """The sub-sweeps with the columns and the notation of the printed table."""
    if which not in get_args(Which):
        raise ValueError(f"Invalid grid: got {which!r}; need 'paper' (mended) or 'paper-printed'.")
    tables = _tables()
    printed: dict[str, Spec | None] = tables["grids"][name]
    if which == "paper-printed":
        return [printed]
    return [{**printed, **changes} for changes in tables["mended"].get(name, [{}])]


def fit(name: str, row: Mapping[str, float | None], which: Which = "paper") -> tuple[dict[str, Spec | None], list[str]]:
    """The sub-sweep that a row of the printed table lies on, and the columns in which it does not.

    The sub-sweep that misses the fewest columns counts. Columns without a grid are not missed.
    """
    missed = [(sweep, _misses(row, sweep)) for sweep in specs(name, which)]
    return min(missed, key=lambda pair: len(pair[1]))


def values(spec: Spec) -> list[float] | Lower:
    """What the notation of the table means."""
    if spec["kind"] == "set":
        return [float(v) for v in spec["values"]]
    if isinstance(spec["stop"], str):
        return Lower(spec["stop"], spec["start"], spec["num"])
    even = linspace(spec["start"], spec["stop"], spec["num"])
    return even if spec["kind"] == "linspace" else [float(spec["base"]) ** v for v in even]


def written(spec: Spec) -> str:
    """The notation of the table.

    Examples:
        >>> written({"kind": "linspace", "start": 1e-7, "stop": "i_u", "num": 4})
        'linspace(1e-07, i_u, 4)'
    """
    if spec["kind"] == "set":
        return "{" + ", ".join(f"{v:g}" for v in spec["values"]) + "}"
    stop = spec["stop"] if isinstance(spec["stop"], str) else f"{spec['stop']:g}"
    return f"{spec['kind']}({spec['start']:g}, {stop}, {spec['num']})"


def linspace(start: float, stop: float, num: int) -> list[float]:
    """`num` evenly spaced numbers, both ends exact."""
    return [start, *(start + (stop - start) * (k / (num - 1)) for k in range(1, num - 1)), stop]


def _misses(row: Mapping[str, float | None], sweep: Mapping[str, Spec | None]) -> list[str]:
    missed = []
    for column, value in row.items():
        spec = sweep.get(column)
        if value is not None and spec is not None and not _hits(value, _candidates(spec, row, sweep)):
            missed.append(column)
    return missed


def _candidates(spec: Spec, row: Mapping[str, float | None], sweep: Mapping[str, Spec | None]) -> list[float]:
    """The grid of a column; a lower threshold's runs up to the row's upper one, unrounded where that is on its grid."""
    found = values(spec)
    if not isinstance(found, Lower):
        return found
    upper, above = row[found.upper], sweep[found.upper]
    if upper is None or above is None:
        raise ValueError(f"Invalid row: a lower threshold without {found.upper}.")
    exact = [u for u in _candidates(above, row, sweep) if _hits(upper, [u])]
    return [v for u in exact or [upper] for v in found(u)]


def _hits(value: float, candidates: list[float]) -> bool:
    """The table has two digits."""
    return any(float(f"{c:.1e}") == value for c in candidates)


@functools.cache
def _tables() -> dict[str, Any]:
    return load("sweep_grids")
