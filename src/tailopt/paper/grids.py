"""The grids that the paper searched: as printed, and corrected where they cannot have given the reported settings.

A reported value is on a grid if some point of the grid, rounded to two digits, equals it. Of 638 values, 53 are not on
the printed grids. On the corrected grids (`which="paper"`), with five misprinted cells corrected, all are. Corrections:

- avg-adagrad, avg-adam, ilr: a linspace for a logspace with the same numbers; of all simple grids, only that one and
  its bisection hold the six reported values.
- rmsprop-sgd, olr: the same; adagrad-sgd and adam-sgd have the logspace.
- diloco, ilr: from -6, as adam2; the reported 1.8e-5 is its second point. The epsilon is the inner AdamW's: the outer
  step has none.
- adam-biclip, i_d: four points, since thirds of i_u are reported. adam-l2clip, i_u: three points instead of twelve.
- avg-biclip-l2: a second sweep, adam-biclip-l2's inner grid; every reported row lies completely on one of the two.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from tailopt.paper.printed_tables import algorithm_name, load, translated

Which: TypeAlias = Literal["paper", "paper-printed"]
GridSpec: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Lower:
    """The grid of a lower threshold: `num` points from `start` to the upper threshold of the same trial.

    Examples:
        >>> Lower("i_u", 0.0, 3)(1.5)
        [0.0, 0.75, 1.5]
    """

    upper: str
    start: float
    num: int

    def __call__(self, u: float) -> list[float]:
        """Return the points for this upper threshold; the last is `u` itself."""
        return linspace(self.start, u, self.num)


def grid(algorithm: str, which: Which = "paper") -> list[dict[str, list[float] | Lower]]:
    """Return the sub-sweeps of an algorithm: setting -> values, or a function of the upper threshold.

    Args:
        algorithm: in our spelling or the paper's.
        which: `"paper"` is corrected, `"paper-printed"` as printed. As printed, diloco has an outer epsilon and no
            inner one, which the algorithm does not accept.

    Examples:
        >>> [sweep] = grid("adam-biclip")
        >>> sweep["oeps"], sweep["i_d"]
        ([1e-07, 1e-05, 0.001], Lower(upper='i_u', start=1e-07, num=4))
    """
    name = algorithm_name(algorithm)
    return [{c: values(spec) for c, spec in translated(name, sweep).items()} for sweep in specs(name, which)]


def points(algorithm: str, which: Which = "paper") -> Iterator[dict[str, float]]:
    """Yield every trial of the grid, sub-sweep by sub-sweep; lower thresholds follow the upper ones.

    Examples:
        >>> sum(1 for _ in points("bi2clip"))
        729
    """
    for sweep in grid(algorithm, which):
        independent = {c: v for c, v in sweep.items() if not isinstance(v, Lower)}
        dependent = {c: v for c, v in sweep.items() if isinstance(v, Lower)}
        for chosen in itertools.product(*independent.values()):
            point = dict(zip(independent, chosen, strict=True))
            for lows in itertools.product(*(lower(point[lower.upper]) for lower in dependent.values())):
                resolved = {**point, **dict(zip(dependent, lows, strict=True))}
                yield {c: resolved[c] for c in sweep}


def specs(name: str, which: Which) -> list[dict[str, GridSpec | None]]:
    """Return the sub-sweeps with the columns and the notation of the printed table."""
    if which not in get_args(Which):
        raise ValueError(f"Invalid grid: got {which!r}; need 'paper' (corrected) or 'paper-printed'.")
    tables = _tables()
    printed: dict[str, GridSpec | None] = tables["grids"][name]
    if which == "paper-printed":
        return [printed]
    return [{**printed, **changes} for changes in tables["mended"].get(name, [{}])]


def fit(
    name: str, row: Mapping[str, float | None], which: Which = "paper"
) -> tuple[dict[str, GridSpec | None], list[str]]:
    """Return the sub-sweep that fits a row of the printed table best, and the columns whose values are not on it.

    The best sub-sweep misses the fewest columns. A column without a grid cannot be missed.
    """
    candidates = [(sweep, _off_grid_columns(row, sweep)) for sweep in specs(name, which)]
    return min(candidates, key=lambda pair: len(pair[1]))


def values(spec: GridSpec) -> list[float] | Lower:
    """Return the values that the notation of the table means."""
    if spec["kind"] == "set":
        return [float(v) for v in spec["values"]]
    if isinstance(spec["stop"], str):
        return Lower(spec["stop"], spec["start"], spec["num"])
    even = linspace(spec["start"], spec["stop"], spec["num"])
    return even if spec["kind"] == "linspace" else [float(spec["base"]) ** v for v in even]


def notation(spec: GridSpec) -> str:
    """Return a grid in the notation of the table.

    Examples:
        >>> notation({"kind": "linspace", "start": 1e-7, "stop": "i_u", "num": 4})
        'linspace(1e-07, i_u, 4)'
    """
    if spec["kind"] == "set":
        return "{" + ", ".join(f"{v:g}" for v in spec["values"]) + "}"
    stop = spec["stop"] if isinstance(spec["stop"], str) else f"{spec['stop']:g}"
    return f"{spec['kind']}({spec['start']:g}, {stop}, {spec['num']})"


def linspace(start: float, stop: float, num: int) -> list[float]:
    """Return `num` evenly spaced numbers, both ends exact."""
    return [start, *(start + (stop - start) * (k / (num - 1)) for k in range(1, num - 1)), stop]


def _off_grid_columns(row: Mapping[str, float | None], sweep: Mapping[str, GridSpec | None]) -> list[str]:
    missed = []
    for column, value in row.items():
        spec = sweep.get(column)
        if value is not None and spec is not None and not _on_grid(value, _grid_values(spec, row, sweep)):
            missed.append(column)
    return missed


def _grid_values(spec: GridSpec, row: Mapping[str, float | None], sweep: Mapping[str, GridSpec | None]) -> list[float]:
    """Return the grid of a column.

    That of a lower threshold ends at the row's upper threshold. The table rounds that to two digits; the grid ends at
    the unrounded value, if there is one.
    """
    grid_values = values(spec)
    if not isinstance(grid_values, Lower):
        return grid_values
    lower = grid_values
    upper, upper_spec = row[lower.upper], sweep[lower.upper]
    if upper is None or upper_spec is None:
        raise ValueError(f"Invalid row: a lower threshold without {lower.upper}.")
    unrounded = [u for u in _grid_values(upper_spec, row, sweep) if _on_grid(upper, [u])]
    return [v for u in unrounded or [upper] for v in lower(u)]


def _on_grid(value: float, grid_values: list[float]) -> bool:
    """Whether a value of the table, which has two digits, is one of these."""
    return any(float(f"{v:.1e}") == value for v in grid_values)


@functools.cache
def _tables() -> dict[str, Any]:
    return load("sweep_grids")
