"""Who takes part in a round, and with what weight.

    uniform        k distinct nodes, each with its own weight
    proportional   k draws with replacement, by weight; a node drawn twice is one term with weight 2

Drawn from a generator that is a function of (seed, round) alone. Proportional sampling keeps the
expected objective for any weights, uniform sampling only for equal weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import SupportsFloat

import torch

from tailopt.seeds import generator

SAMPLINGS = ("uniform", "proportional")
Chooser = Callable[[int, torch.Generator], Iterable[int]]


@dataclass(frozen=True)
class Participants:
    """Who takes part in a round.

    Args:
        drawn: ascending node numbers, with repeats.
        shares: node -> its share; shares add up to 1.
    """

    drawn: list[int]
    shares: dict[int, float]


@dataclass(frozen=True)
class Sampling:
    """How the participants of a round are drawn.

    Args:
        weights: one for each node, not negative, not all zero.
        count_or_chooser: how many take part, or a function (round, generator) -> node numbers.
        kind: "uniform" or "proportional".
    """

    weights: tuple[float, ...]
    count_or_chooser: int | Chooser
    kind: str
    seed: int

    def draw(self, t: int) -> Participants:
        """Who takes part in round t, and with what share; shares add up to 1."""
        n = len(self.weights)
        if self.kind != "proportional" and self.count_or_chooser == n:
            drawn = list(range(n))
        else:
            drawn = self._drawn(t, n)
        own = [1.0 if self.kind == "proportional" else self.weights[i] for i in drawn]
        total = math.fsum(own)
        if total <= 0:
            raise ValueError(f"Invalid weights: those that take part in round {t}, {drawn}, all have weight 0.")
        shares_of: dict[int, float] = {}
        for i in sorted(set(drawn)):
            shares_of[i] = own[drawn.index(i)] * drawn.count(i) / total
        return Participants(drawn, shares_of)

    def compared(self, nodes: int, rounds: int) -> int | dict[str, list[int]]:
        """Return the count; for a function, whom it chooses in so many rounds, which real nodes compare."""
        if not callable(self.count_or_chooser):
            return self.count_or_chooser
        return {f"round {t}": self._drawn(t, nodes) for t in range(1, rounds + 1)}

    def _drawn(self, t: int, n: int) -> list[int]:
        source = generator(self.seed, "participants", t)
        if callable(self.count_or_chooser):
            return _checked(self.count_or_chooser(t, source), n, t)
        if self.kind == "proportional":
            shares = torch.tensor(self.weights, dtype=torch.float64)
            return sorted(torch.multinomial(shares, self.count_or_chooser, replacement=True, generator=source).tolist())
        return sorted(torch.randperm(n, generator=source)[: self.count_or_chooser].tolist())


def participant_count(nodes: int, participation: float | Chooser, participants: int | None) -> int | Chooser:
    """The number that takes part, from a fraction or a count, or the function that chooses."""
    if callable(participation):
        if participants is not None:
            raise ValueError(
                f"Invalid participants: {participants}; participation is a function. Give one of them, not both."
            )
        return participation
    if isinstance(participation, bool) or not isinstance(participation, float):
        raise ValueError(
            f"Invalid participation: {participation!r}; need a fraction in (0, 1], such as participation=0.5, "
            f"or a count: participants={participation!r}."
        )
    if not 0 < participation <= 1:
        raise ValueError(f"Invalid participation: {participation}; need a fraction in (0, 1].")
    if participants is None:
        return max(1, round(participation * nodes))
    if participation != 1.0:
        raise ValueError(f"Give participation={participation} or participants={participants}, not both.")
    if isinstance(participants, bool) or not isinstance(participants, int) or not 1 <= participants <= nodes:
        raise ValueError(
            f"Invalid participants: {participants!r}; need a count from 1 to {nodes}, the nodes there are."
        )
    return participants


def checked_weights(weights: Sequence[float], nodes: int) -> tuple[float, ...]:
    """Weights that can be used, as floats."""
    for i, w in enumerate(weights):
        check_weight(w, i)
    values = tuple(float(w) for w in weights)
    if len(values) != nodes:
        raise ValueError(f"Invalid weights: {len(values)} of them for {nodes} nodes; need one for each.")
    if not any(values):
        raise ValueError(f"Invalid weights: all {nodes} of them are 0; need one above 0.")
    if sum(values) == math.inf:
        raise ValueError(
            f"Invalid weights: their sum overflows, the largest is {max(values)}; need a sum < inf. Only their ratios "
            "count: divide all of them by the largest."
        )
    return values


def check_weight(weight: object, node: int) -> None:
    """Raise ValueError unless a node may have this weight."""
    if isinstance(weight, bool | str) or not isinstance(weight, SupportsFloat) or not 0 <= float(weight) < math.inf:
        raise ValueError(f"Invalid weights: {weight!r} for node {node}; need 0 <= weight < inf.")


def _checked(chosen: Iterable[int], nodes: int, t: int) -> list[int]:
    drawn = [int(i) for i in chosen]
    wrong = [i for i in drawn if not 0 <= i < nodes]
    if wrong or not drawn or len(set(drawn)) < len(drawn):
        what = f"node {wrong[0]}" if wrong else "a node twice" if drawn else "nobody"
        raise ValueError(
            f"Invalid participation: the function named {what} for round {t}: {drawn}; "
            f"need distinct numbers from 0 to {nodes - 1}, at least one."
        )
    return sorted(drawn)
