"""Everything that a round depends on beside the algorithm, the weights and the data: validated once, described once.

`tailopt.simulate` and `tailopt.NestedOptimizer` build a `RoundPolicy` from their arguments and pass it on. A new round
option is one field here, with its check, and the place that uses it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

from tailopt.arguments import check_choice, check_counts, check_flags, checked_seed, is_number
from tailopt.rounds import robust
from tailopt.rounds.drops import ON_DROP, DropChooser, Drops
from tailopt.rounds.participants import SAMPLINGS, Chooser, Participants, Sampling, checked_weights, participant_count
from tailopt.rounds.proximal import checked_proximal

INNER_STATES = ("keep", "reset")
COMPARED_ROUNDS = 8  # rounds for which real nodes tell each other which nodes a function chooses


@dataclass(frozen=True, kw_only=True)
class RoundPolicy:
    """The options of a run's rounds.

    Args:
        rounds: in all; None where the run has no planned end.
        local_steps: of every participant in a round; or
        local_epochs: passes over a node's data in a round.
        inner_state: "keep" or "reset", of the inner optimizer between rounds.
        nodes: how many there are; None while that is not known yet.
        weights: one per node; empty while they are not known yet.
        participation: a fraction of the nodes, or a function (round, generator) -> node numbers.
        participants: a count of nodes instead.
        sampling: "uniform" or "proportional".
        drops: which contributions a simulation loses: a probability or a function; None on real nodes,
            where no loss is simulated.
        on_drop: where a node continues whose contribution was lost: "sync" or "keep".
        proximal: the factor mu of FedProx: local steps use g + mu (x - start) as the gradient; 0 for no such term.
        projection: the radius of a ball that contains the weights after every round.
        average: whether the average of the rounds' weights is kept.
        guard: whether displacements that the inner optimizer cannot produce are excluded.
        aggregate: "mean" or a robust mean.
        seed: of everything that is drawn in a round.

    Examples:
        >>> policy = RoundPolicy(rounds=60, local_steps=5, nodes=4, participants=2, inner_state="reset")
        >>> [policy.draw(t).drawn for t in (1, 2, 3)]
        [[0, 1], [0, 2], [1, 2]]
        >>> RoundPolicy(rounds=60, local_steps=5, on_drop="wait", inner_state="reset")
        Traceback (most recent call last):
        ValueError: Invalid on_drop: 'wait'; need one of 'sync', 'keep'.
    """

    rounds: int | None
    inner_state: str
    local_steps: int | None = None
    local_epochs: int | None = None
    nodes: int | None = None
    weights: tuple[float, ...] = ()
    participation: float | Chooser = 1.0
    participants: int | None = None
    sampling: str = "uniform"
    drops: float | DropChooser | None = None
    on_drop: str = "sync"
    proximal: float = 0.0
    projection: float | None = None
    average: bool = False
    guard: bool = True
    aggregate: str | robust.Aggregate = "mean"
    seed: int = 0
    robust_mean: robust.Aggregate | None = field(init=False)  # `aggregate`; None is the weighted mean
    _sampling: Sampling | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        self._check()
        object.__setattr__(self, "seed", checked_seed(self.seed))
        object.__setattr__(self, "proximal", checked_proximal(self.proximal))
        # also refuses weights that a robust mean would have to ignore
        object.__setattr__(self, "robust_mean", robust.resolve(self.aggregate, self.weights, self.sampling))
        if self.nodes is not None:
            weights = checked_weights(self.weights, self.nodes) if self.weights else (1.0,) * self.nodes
            count = participant_count(self.nodes, self.participation, self.participants)
            object.__setattr__(self, "_sampling", Sampling(weights, count, self.sampling, self.seed))
            assert self._drops is not None  # building it refuses an impossible probability

    def _check(self) -> None:
        check_choice("on_drop", self.on_drop, ON_DROP)
        check_choice("sampling", self.sampling, SAMPLINGS)
        check_choice("inner_state", self.inner_state, INNER_STATES)
        if self.sampling == "proportional" and callable(self.participation):
            raise ValueError(
                "Invalid sampling: 'proportional' with a function as participation, which draws the nodes itself: the "
                'weights would count neither there nor in the mean. Use sampling="uniform", with which they count in '
                "the mean, and let the function draw by weight if you want that."
            )
        if (self.local_steps is None) == (self.local_epochs is None):
            raise ValueError(
                f"Invalid local_steps: {self.local_steps}, with local_epochs: {self.local_epochs}; a round takes one "
                "of the two. Give local_steps or local_epochs."
            )
        counts = {"rounds": self.rounds, "local_steps": self.local_steps, "local_epochs": self.local_epochs}
        check_counts(**{name: count for name, count in counts.items() if count is not None})
        check_flags(average=self.average, guard=self.guard)
        if self.projection is not None and not (is_number(self.projection) and 0 < self.projection < math.inf):
            raise ValueError(f"Invalid projection: {self.projection!r}; need a radius above 0, or None.")

    def draw(self, t: int) -> Participants:
        """Return who takes part in round t, and with what share."""
        if self.everybody_takes_part:
            return self._everybody
        return self._known_sampling.draw(t)

    @functools.cached_property
    def _everybody(self) -> Participants:
        return self._known_sampling.draw(1)

    def draw_drops(self, t: int) -> set[int]:
        """Return the nodes whose contributions to round t a simulation loses."""
        return self._drops.draw(t)

    @functools.cached_property
    def everybody_takes_part(self) -> bool:
        """Whether every node takes part in every round, once."""
        count = self._known_sampling.count_or_chooser
        return not callable(count) and count >= len(self._known_sampling.weights) and self.sampling == "uniform"

    @property
    def projection_radius(self) -> float | None:
        """The norm that the weights may have after a round; None where they are not projected."""
        return self.projection

    @property
    def dropped_nodes_diverge(self) -> bool:
        """Whether a node whose contribution was lost continues from weights of its own."""
        return self.on_drop == "keep"

    def as_config(self) -> dict[str, Any]:
        """Describe the policy for a run folder.

        None stands for an option that is not used. config.toml leaves it out, so that a folder which was written before
        there was the option compares as equal.

        The order of the keys is part of the format: checkpoints contain the digest of config.toml.
        """
        simulated = self.drops is not None
        drops: dict[str, Any] = {"drops": self.drops, "on_drop": self.on_drop} if self.drops else {}
        on_drop = {} if simulated or self.on_drop == "sync" else {"on_drop": self.on_drop}
        return {
            "inner_state": self.inner_state,
            "rounds": self.rounds,
            "local_steps": self.local_steps,
            "local_epochs": self.local_epochs,
            "nodes": self.nodes,
            "weights": list(self._known_sampling.weights),
            "participation": self.participation,
            "participants": self.participants,
            "sampling": self.sampling,
            **drops,
            "proximal": self.proximal or None,
            "projection": self.projection,
            "average": self.average,
            "guard": self.guard,
            "aggregate": None if self.robust_mean is None else str(self.robust_mean),
            **on_drop,
            "seed": self.seed,
        }

    def as_facts(self) -> dict[str, Any]:
        """Describe the policy for the comparison between real nodes; a function by the nodes that it chooses."""
        assert self.nodes is not None
        rounds = min(self.rounds or COMPARED_ROUNDS, COMPARED_ROUNDS)
        return {
            "inner_state": self.inner_state,
            "local_steps": self.local_steps,
            "rounds": self.rounds,
            "participants": self._known_sampling.compared(self.nodes, rounds),
            "sampling": self.sampling,
            "seed": self.seed,
            "proximal": self.proximal,
            "projection": self.projection,
            "guard": self.guard,
            "aggregate": "mean" if self.robust_mean is None else str(self.robust_mean),
            "on_drop": self.on_drop,
            "average": self.average,
        }

    @property
    def _known_sampling(self) -> Sampling:
        assert self._sampling is not None, "the number of nodes is not known yet"
        return self._sampling

    @functools.cached_property
    def _drops(self) -> Drops:
        return Drops(self.nodes or 0, 0.0 if self.drops is None else self.drops, self.seed)
