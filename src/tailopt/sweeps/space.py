"""Where the settings of an algorithm are searched, along directions in which the result changes slowly.

    ilr = i_move / i_u,    i_d = i_share * i_u,    and likewise olr and o_d

A clipped step is searched by how far it moves at most, and a lower threshold as a share of the upper one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tailopt.algorithms import rule_names
from tailopt.arguments import is_number

Point = dict[str, float]


@dataclass(frozen=True)
class Range:
    """An interval for a setting, searched evenly in the logarithm unless `log` is False."""

    low: float
    high: float
    log: bool = True

    def __post_init__(self) -> None:
        if not all(is_number(x) and math.isfinite(x) for x in (self.low, self.high)):
            raise ValueError(f"Invalid range: [{self.low!r}, {self.high!r}]; need two finite numbers.")
        if not (self.low <= self.high and (self.low > 0 or not self.log)):
            raise ValueError(f"Invalid range: [{self.low}, {self.high}]; need low <= high, and 0 < low in a logarithm.")

    def at(self, share: float) -> float:
        """The number at a share in [0, 1] of the way from low to high."""
        if not self.log:
            return self.low + share * (self.high - self.low)
        return math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))

    def share(self, value: float) -> float:
        """How far a number lies on the way from low to high: below 0 or above 1 outside.

        Examples:
            >>> round(Range(1e-4, 1.0).share(1e-3), 6), Range(0.3, 0.9, log=False).share(0.3)
            (0.25, 0.0)
            >>> Range(1e-4, 1.0).share(0.0)
            -inf
        """
        if self.low == self.high:
            return 0.5
        if not self.log:
            return (value - self.low) / (self.high - self.low)
        return math.log(value / self.low) / math.log(self.high / self.low) if value > 0 else -math.inf


Ranges = Mapping[str, Range]


@dataclass(frozen=True)
class Space:
    """The ranges of every inner and every outer rule."""

    inner: Mapping[str, Ranges]
    outer: Mapping[str, Ranges]

    def ranges(self, name: str) -> dict[str, Range]:
        """The ranges of an algorithm: those of its two rules."""
        return self.ranges_of(*rule_names(name))

    def ranges_of(self, outer: str, inner: str) -> dict[str, Range]:
        """The ranges of two rules."""
        return {**self.inner[inner], **self.outer[outer]}

    def with_range(self, side: str, rule: str, setting: str, interval: Range) -> Space:
        """The space with another range for a setting of one rule; side: "inner" or "outer"."""
        table: Mapping[str, Ranges] = getattr(self, side)
        return replace(self, **{side: {**table, rule: {**table[rule], setting: interval}}})


def settings_at(point: Point, fixed: Mapping[str, Any] | None = None) -> dict[str, float]:
    """A point of the search as settings: lr = move / u, d = share * u.

    fixed: settings that all points have; u may be one of them.

    Examples:
        >>> settings_at({"i_move": 0.05, "i_u": 0.5, "i_share": 0.2})
        {'i_u': 0.5, 'ilr': 0.1, 'i_d': 0.1}
        >>> settings_at({"i_move": 0.05}, fixed={"i_u": 0.5})
        {'ilr': 0.1}
    """
    settings = {key: value for key, value in point.items() if not key.endswith(("_move", "_share"))}
    for prefix in ("i", "o"):
        for key in (f"{prefix}_move", f"{prefix}_share"):
            if key not in point:
                continue
            u = {**(fixed or {}), **point}.get(f"{prefix}_u")
            if not is_number(u) or not 0 < u < math.inf:
                raise ValueError(
                    f"Invalid space: {key} refers to {prefix}_u, which is {u!r} here; need a finite number above 0, in "
                    f"the space or among the settings. Search {prefix}lr and {prefix}_d themselves otherwise."
                )
            if key.endswith("_move"):
                settings[f"{prefix}lr"] = point[key] / u
            else:
                settings[f"{prefix}_d"] = point[key] * u
    return settings


def point_at(settings: Mapping[str, float], ranges: Ranges) -> Point:
    """Settings as a point of a search with these ranges: what `settings_at` undoes.

    Examples:
        >>> ranges = {"i_move": Range(1e-3, 1.0), "i_u": Range(0.1, 1.0), "i_share": Range(0.01, 1.0)}
        >>> point_at({"ilr": 0.1, "i_u": 0.5, "i_d": 0.1}, ranges)
        {'i_move': 0.05, 'i_u': 0.5, 'i_share': 0.2}
    """
    point = {}
    for key in ranges:
        prefix = key[0]
        if key.endswith("_move"):
            point[key] = settings[f"{prefix}lr"] * settings[f"{prefix}_u"]
        elif key.endswith("_share"):
            point[key] = settings[f"{prefix}_d"] / settings[f"{prefix}_u"]
        else:
            point[key] = settings[key]
    return point
