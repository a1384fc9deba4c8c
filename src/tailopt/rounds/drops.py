"""Which contributions are lost on the way in a round, although the nodes took their local steps.

    a probability p   every node, independently: u_i < p, one uniform number per node
    a function        (round, generator) -> node numbers

Losses are drawn from a generator that is a function of (seed, round) alone, like the participants. A lost contribution
is nobody's fault: its weight goes to the others, and if nothing arrives at all, the round takes no outer step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from tailopt.rounds.guard import Exclusion
from tailopt.seeds import generator

ON_DROP = ("sync", "keep")
DROPPED = "dropped"
DropChooser = Callable[[int, torch.Generator], Iterable[int]]


@dataclass(frozen=True)
class Drops:
    """The losses of every round.

    Args:
        nodes: how many there are.
        which: a probability from 0 to 1, or a function (round, generator) -> node numbers; a node that does not take
            part has nothing to lose.

    Examples:
        >>> drops = Drops(4, 0.5, seed=0)
        >>> [sorted(drops.draw(t)) for t in (1, 2, 3)]
        [[3], [0, 1, 2, 3], [0, 2, 3]]
        >>> Drops(4, lambda t, generator: [t % 4]).draw(6)
        {2}
    """

    nodes: int
    which: float | DropChooser = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if callable(self.which):
            return
        if isinstance(self.which, bool) or not isinstance(self.which, int | float) or not 0 <= self.which <= 1:
            raise ValueError(
                f"Invalid drops: {self.which!r}; need a probability from 0 to 1, or a function (round, generator) that "
                "returns node numbers."
            )

    def draw(self, t: int) -> set[int]:
        """Return the nodes whose contributions to round t are lost."""
        if not callable(self.which) and self.which == 0:
            return set()
        randomness = generator(self.seed, "drops", t)
        if not callable(self.which):
            numbers = torch.rand(self.nodes, generator=randomness, dtype=torch.float64)
            return set((numbers < self.which).nonzero().flatten().tolist())
        lost_nodes = {int(i) for i in self.which(t, randomness)}
        wrong = [i for i in lost_nodes if not 0 <= i < self.nodes]
        if wrong:
            raise ValueError(
                f"Invalid drops: the function named node {wrong[0]} for round {t}; need numbers from 0 to "
                f"{self.nodes - 1}."
            )
        return lost_nodes


@dataclass(frozen=True)
class Dropped(Exclusion):
    """A contribution that did not arrive."""

    @classmethod
    def of(cls, node: int) -> Dropped:
        """Return the exclusion of a node whose contribution was lost."""
        return cls(node, "what was sent", 0.0, None, DROPPED)

    def __str__(self) -> str:
        return f"node {self.node}: its contribution did not arrive"


def all_were_dropped(excluded: Iterable[Exclusion]) -> bool:
    """Return whether somebody is excluded, and everybody excluded only because the contribution did not arrive."""
    reasons = [e.reason for e in excluded]
    return bool(reasons) and all(reason == DROPPED for reason in reasons)
