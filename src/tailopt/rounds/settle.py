"""Who counted in a round, with what weight, and why the others did not: the same for every engine.

    shares     of the participants, as drawn; they add up to 1
    counted    participants that nothing excluded
    weights    share / sum of the counted shares, the weights of the mean

If every contribution was lost on the way, the round takes no outer step. If somebody's was excluded for another
reason and none is left, the run ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tailopt.rounds.block_norm import sequential_sum
from tailopt.rounds.drops import all_were_dropped
from tailopt.rounds.guard import Exclusion
from tailopt.rounds.participants import Participants


class EveryoneExcluded(RuntimeError):
    """No displacement of a round could be used."""

    @classmethod
    def of(cls, t: int, excluded: Sequence[Exclusion]) -> EveryoneExcluded:
        """Name the reasons of all exclusions."""
        reasons = "; ".join(map(str, excluded)) or "nobody with a weight above 0 took part"
        return cls(f"Round {t}: no displacement can be used: {reasons}.")

    def ending_run(self, last_checkpoint: str = "") -> EveryoneExcluded:
        """Return the error that ends the run, with the remedy.

        last_checkpoint: a sentence about where the run can go on from; empty for a run without a folder.
        """
        sentences = [str(self), last_checkpoint, "Lower the learning rate, or look at the data."]
        return EveryoneExcluded(" ".join(filter(None, sentences)))


@dataclass(frozen=True)
class Settlement:
    """The outcome of a round.

    Args:
        round: its number, from 1.
        participants: who took part.
        steps: the local steps of every participant.
        excluded: who did not count, and why.
        counted_shares: the shares of those that counted; empty where nothing arrived.
        total_share: their sum; exactly 1 where nobody was excluded.
        losses: of those that counted.
    """

    round: int
    participants: Participants
    steps: Mapping[int, int]
    excluded: tuple[Exclusion, ...]
    counted_shares: Mapping[int, float]
    total_share: float
    losses: Mapping[int, float]

    @property
    def weights(self) -> dict[int, float]:
        """The weight of every node in the mean."""
        return {node: share / self.total_share for node, share in self.counted_shares.items()}

    @property
    def loss(self) -> float:
        """The mean loss of the nodes that counted, with their weights; NaN where nothing arrived."""
        return self._mean_loss(self.weights)

    def _mean_loss(self, weights: Mapping[int, float]) -> float:
        terms = (weights[node] * loss for node, loss in self.losses.items())
        return sequential_sum(terms) if weights else math.nan

    def history_row(self, metrics: Mapping[str, Any], statistics: Mapping[str, Any]) -> dict[str, Any]:
        """Return the round as a row of the history; a node drawn twice has two entries that share its weight."""
        drawn, weights = list(self.participants.drawn), self.weights
        times_drawn = dict.fromkeys(drawn, 1)
        if len(times_drawn) < len(drawn):
            times_drawn = {i: drawn.count(i) for i in times_drawn}
        return {
            "round": self.round,
            "loss": self._mean_loss(weights),
            "participants": drawn,
            "steps": [self.steps[i] for i in drawn],
            "weights": [weights.get(i, 0.0) / times_drawn[i] for i in drawn],
            "excluded": [e.as_dict() for e in self.excluded],
            "metrics": dict(metrics),
            "statistics": dict(statistics),
        }


def settle(
    round: int,
    participants: Participants,
    steps: Mapping[int, int],
    excluded: Sequence[Exclusion],
    losses: Mapping[int, float],
) -> Settlement:
    """Decide who counted in a round.

    Args:
        excluded: whom the guard, a robust mean or the network left out.
        losses: must contain every participant that is not excluded, and may contain more.

    Raises:
        EveryoneExcluded: nobody counts, and not only because contributions were lost.

    Examples:
        >>> who = Participants([0, 1, 2], {0: 0.25, 1: 0.25, 2: 0.5})
        >>> nan = Exclusion(2, "weight", math.nan, None, "not finite")
        >>> settle(1, who, {0: 5, 1: 5, 2: 5}, [nan], {0: 1.0, 1: 2.0}).weights
        {0: 0.5, 1: 0.5}
    """
    left_out = {e.node for e in excluded}
    counted = {node: share for node, share in participants.shares.items() if node not in left_out}
    if not any(counted.values()):
        if not all_were_dropped(excluded):
            raise EveryoneExcluded.of(round, excluded)
        counted = {}
    # exactly 1 where all counted: a rounded sum would change the bits of the mean
    total = 1.0 if not excluded else math.fsum(counted.values())
    return Settlement(
        round, participants, dict(steps), tuple(excluded), counted, total, {node: losses[node] for node in counted}
    )
