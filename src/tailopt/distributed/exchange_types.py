"""What an exchange gets and returns: a node's statement, the criteria by which a round is judged, and the report."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from tailopt.rounds.clipping_counts import ClippingCounter, NodeCounts
from tailopt.rounds.gradient_statistics import GradientRecorder
from tailopt.rounds.guard import Bound
from tailopt.rounds.robust import Aggregate
from tailopt.rounds.settle import Settlement
from tailopt.thresholds import Statistics


@dataclass(frozen=True)
class Statement:
    """What a node states about its part of a round.

    Args:
        steps: local steps that it took.
        bound: how far it can have moved by them.
        loss: of these steps.
        seconds: that they took.
        trainable_set_digest: a digest of which parameters have requires_grad, by name and group.
        may_be_last: whether this may be the last round: the new weights are then compared at once.
        auto_thresholds_digest: a digest of the thresholds that are "auto".
        threshold_recorder: of what its steps clipped, for "auto" thresholds of the inner rule; None without such.
        clipping_counter: of what its steps clipped, for the history; None where it has no statistics.
    """

    steps: int = 0
    bound: Bound = Bound(None)
    loss: float = math.nan
    seconds: float = 0.0
    trainable_set_digest: int = 0
    may_be_last: bool = False
    auto_thresholds_digest: int = 0
    threshold_recorder: GradientRecorder | None = None
    clipping_counter: ClippingCounter | None = None


@dataclass(frozen=True)
class JudgingCriteria:
    """What a round is judged by.

    Args:
        guard: whether displacements beyond the bound are left out.
        expected_bound: (node, steps) -> its bound, where the settings are agreed; else nodes state their own.
        diverged: participants that continue from weights of their own: nothing bounds their displacement.
        most_steps: local steps that a node may take in a round.
        robust_mean: in place of the weighted mean.
    """

    guard: bool = True
    expected_bound: Callable[[int, int], Bound] | None = None
    diverged: Collection[int] = ()
    most_steps: float = math.inf
    robust_mean: Aggregate | None = None


@dataclass
class ExchangeReport:
    """What real nodes know of a round: the same on all of them, but for the phases and what was sent.

    Args:
        settlement: who counted.
        seconds: that the local steps of every participant took.
        warnings_by_node: a sentence about every node that differs from the others.
        may_be_last: whether this may be the last round.
        reloads: sentences about weights that a node had to load again.
        threshold_statistics: of every node's gradients, for "auto" thresholds of the inner rule.
        outer_step_statistics: of what the outer step clipped, for "auto" thresholds of the outer rule.
        clipping_counts: of every node, for the history; empty where it has no statistics.
        phases: seconds of this node by phase.
        bytes_sent: by this node.
    """

    settlement: Settlement
    seconds: dict[int, float]
    warnings_by_node: dict[int, str]
    may_be_last: bool
    reloads: list[str] = field(default_factory=list)
    threshold_statistics: dict[int, list[Statistics]] = field(default_factory=dict)
    outer_step_statistics: list[Statistics] = field(default_factory=list)
    clipping_counts: list[NodeCounts] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    bytes_sent: int = 0
