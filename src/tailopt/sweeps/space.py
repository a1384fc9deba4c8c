"""Where the settings of an algorithm are looked for, in directions in which the result changes slowly.

    ilr = i_move / i_u,    i_d = i_share * i_u,    and likewise olr and o_d

A clipped step is searched by how far it moves at most, and a lower threshold as a share of the upper one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tailopt.algorithms import ALGORITHMS
from tailopt.sweeps.search import Point, Range

Ranges = Mapping[str, Range]


@dataclass(frozen=True)
class Space:
    """The ranges of every rule, inside and outside."""

    inner: Mapping[str, Ranges]
    outer: Mapping[str, Ranges]

    def ranges(self, name: str) -> dict[str, Range]:
        """Those of an algorithm."""
        outer, inner = ALGORITHMS[name]
        return {**self.inner[inner], **self.outer[outer]}


def settings_at(point: Point) -> dict[str, float]:
    """A point of the search as settings: lr = move / u, d = share * u.

    Examples:
        >>> settings_at({"i_move": 0.05, "i_u": 0.5, "i_share": 0.2})
        {'i_u': 0.5, 'ilr': 0.1, 'i_d': 0.1}
    """
    found = {key: value for key, value in point.items() if not key.endswith(("_move", "_share"))}
    for level in ("i", "o"):
        if f"{level}_move" in point:
            found[f"{level}lr"] = point[f"{level}_move"] / point[f"{level}_u"]
        if f"{level}_share" in point:
            found[f"{level}_d"] = point[f"{level}_share"] * point[f"{level}_u"]
    return found
