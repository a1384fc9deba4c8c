"""Where the settings of an algorithm are searched, along directions in which the result changes slowly.

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
    """The ranges of every inner and every outer rule."""

    inner: Mapping[str, Ranges]
    outer: Mapping[str, Ranges]

    def ranges(self, name: str) -> dict[str, Range]:
        """The ranges of an algorithm: those of its two rules."""
        outer, inner = ALGORITHMS[name]
        return {**self.inner[inner], **self.outer[outer]}


def settings_at(point: Point) -> dict[str, float]:
    """A point of the search as settings: lr = move / u, d = share * u.

    Examples:
        >>> settings_at({"i_move": 0.05, "i_u": 0.5, "i_share": 0.2})
        {'i_u': 0.5, 'ilr': 0.1, 'i_d': 0.1}
    """
    settings = {key: value for key, value in point.items() if not key.endswith(("_move", "_share"))}
    for prefix in ("i", "o"):
        if f"{prefix}_move" in point:
            settings[f"{prefix}lr"] = point[f"{prefix}_move"] / point[f"{prefix}_u"]
        if f"{prefix}_share" in point:
            settings[f"{prefix}_d"] = point[f"{prefix}_share"] * point[f"{prefix}_u"]
    return settings
