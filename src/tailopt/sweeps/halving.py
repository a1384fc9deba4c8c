"""Successive halving: at a few rungs the worse points end, and the better ones go on.

    rungs    rounds / factor, rounds / factor^2, ..., but none before a tenth of the rounds: early ranks say little
    kept     at each rung 1 / factor of those that are left, rounded up

A point is compared with all others that the same process trains, at the same round and on the same seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tailopt.arguments import is_number

FACTOR = 3.0
EARLIEST = 0.1  # of the rounds


@dataclass(frozen=True)
class Halving:
    """When and how many configurations end.

    Examples:
        >>> Halving.of(True, rounds=60)
        Halving(factor=3.0, rungs=(7, 20))
        >>> sorted(Halving(2.0, rungs=(5,)).losers(5, [0.3, 0.1, math.inf, 0.2]))
        [0, 2]
    """

    factor: float
    rungs: tuple[int, ...]

    @classmethod
    def of(cls, halving: bool | float, rounds: int) -> Halving | None:
        """Return the plan of an argument `halving`; None for False."""
        if halving is False:
            return None
        if halving is not True and not (is_number(halving) and 1 < halving < math.inf):
            raise ValueError(f"Invalid halving: {halving!r}; need True, False or a number above 1, such as 3.")
        factor = FACTOR if halving is True else float(halving)
        rungs: list[int] = []
        at = rounds / factor
        while at >= max(1.0, EARLIEST * rounds):
            rungs.insert(0, round(at))
            at /= factor
        return cls(factor, tuple(dict.fromkeys(r for r in rungs if r < rounds)))

    def losers(self, t: int, scores: Sequence[float]) -> dict[int, str]:
        """Return the positions that end after round t, each with the reason; scores: less is better, NaN is worst."""
        if t not in self.rungs:
            return {}
        kept = math.ceil(len(scores) / self.factor)
        order = sorted(range(len(scores)), key=lambda i: (math.isnan(scores[i]), scores[i]))
        return {
            i: f"halving: number {place + 1} of {len(scores)} after round {t}, and {kept} go on"
            for place, i in enumerate(order)
            if place >= kept
        }
