"""Random search over ranges, most of them logarithmic.

The i-th point is a function of (seed, i) alone, so that a search can be stopped, resumed and extended, and two searches
with one seed try the same points. Every trial is one line of a file in the JSON of `records.history`, trial i as round
i.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tailopt.records import history
from tailopt.seeds import generator

Point = dict[str, float]
Values = dict[str, float]


@dataclass(frozen=True)
class Range:
    """An interval for a setting, drawn from uniformly in the logarithm unless `log` is False."""

    low: float
    high: float
    log: bool = True

    def __post_init__(self) -> None:
        if not (self.low <= self.high and (self.low > 0 or not self.log)):
            raise ValueError(f"Invalid range: [{self.low}, {self.high}]; need low <= high, and 0 < low in a logarithm.")

    def at(self, share: float) -> float:
        """The number at a share in [0, 1] of the way from low to high."""
        if not self.log:
            return self.low + share * (self.high - self.low)
        return math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))


@dataclass(frozen=True)
class Trial:
    """A point and what was measured there."""

    number: int
    point: Point
    values: Values


def draw_point(ranges: Mapping[str, Range], seed: int, number: int) -> Point:
    """The point of a trial.

    Examples:
        >>> ranges = {"ilr": Range(1e-3, 1.0)}
        >>> draw_point(ranges, seed=0, number=7) == draw_point(ranges, seed=0, number=7)
        True
    """
    shares = torch.rand(len(ranges), generator=generator(seed, "search", number), dtype=torch.float64).tolist()
    return {name: interval.at(share) for (name, interval), share in zip(ranges.items(), shares, strict=True)}


def search(
    measure: Callable[[list[Point]], Sequence[Values]],
    ranges: Mapping[str, Range],
    budget: int,
    seed: int = 0,
    record: Path | None = None,
    batch: int = 1,
    tick: Callable[[int], None] = lambda n: None,
) -> list[Trial]:
    """Try `budget` random points and return all trials, in order.

    Args:
        measure: points -> what was measured at each, `batch` of them at a time.
        ranges: setting -> its interval.
        budget: how many points, including those in the record.
        record: a file with a line for every trial; trials in it are not run again.
        tick: called with the number of trials that were just done.

    Examples:
        >>> trials = search(lambda points: [{"error": abs(p["x"] - 0.1)} for p in points], {"x": Range(0.01, 1)}, 50)
        >>> 0.05 < best(trials, "error").point["x"] < 0.2
        True
    """
    if budget < 1:
        raise ValueError(f"Invalid budget: {budget}; need 1 or more.")
    trials = _recorded(record, ranges, seed)[:budget]
    tick(len(trials))
    for start in range(len(trials), budget, batch):
        numbers = range(start, min(start + batch, budget))
        points = [draw_point(ranges, seed, i) for i in numbers]
        for i, p, values in zip(numbers, points, measure(points), strict=True):
            trial = Trial(i, p, {key: float(value) for key, value in values.items()})
            trials.append(trial)
            if record is not None:
                row = {"round": i, "seed": seed, "point": trial.point, "values": trial.values}
                record.parent.mkdir(parents=True, exist_ok=True)
                history.append(record, row)
        tick(len(numbers))
    return trials


def best(trials: Sequence[Trial], key: str) -> Trial:
    """The trial with the least value; NaN counts as infinite, and the first of equals wins."""
    return min(trials, key=lambda trial: v if not math.isnan(v := trial.values[key]) else math.inf)


def _recorded(record: Path | None, ranges: Mapping[str, Range], seed: int) -> list[Trial]:
    if record is None or not record.is_file():
        return []
    history.drop_torn_line(record)  # a line that a kill cut short
    trials: list[Trial] = []
    for row in history.read(record):
        expected = draw_point(ranges, seed, row["round"])
        if row["seed"] != seed or row["point"] != expected or row["round"] != len(trials):
            raise ValueError(
                f"{record} holds another search: trial {row['round']} of seed {row['seed']} is at "
                f"{json.dumps(row['point'])}, and here it would be at {json.dumps(expected)}. Use another file."
            )
        trials.append(Trial(row["round"], row["point"], row["values"]))
    return trials


def describe(ranges: Mapping[str, Range]) -> dict[str, Any]:
    """Ranges as plain values, for a record."""
    return {name: [r.low, r.high, "log" if r.log else "linear"] for name, r in ranges.items()}
