"""One round, as a function of explicit state:

    1. who takes part                       participants.py
    2. each from x, z local steps           done by an engine; what arrives is a Contribution
    3. the guard                            guard.py
    4. delta = sum of share * displacement  mean.py, in ascending node order; or a robust mean, robust.py
    5. the outer step: x from x and delta   the outer rule, on -delta
    6. x scaled back into a ball, if the policy has a projection_radius
    7. the iterate average, if asked for

An engine hands contributions to a `RoundMean`, one by one, and `finish_round` takes the outer step. A round needs the
memory of one node, however many there are; a robust mean needs that of all nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tailopt.clipping.step_cache import StepCache
from tailopt.rounds.auto_thresholds import AutoThresholds
from tailopt.rounds.block_norm import norm
from tailopt.rounds.clipping_counts import NodeCounts
from tailopt.rounds.drops import Dropped
from tailopt.rounds.gradient_statistics import clipped_by_step, statistics_of_displacement
from tailopt.rounds.guard import Bound, Exclusion, check_displacement, clearly_within
from tailopt.rounds.mean import BufferMean, CollectedMean, WeightedMean
from tailopt.rounds.participants import Participants
from tailopt.rounds.policy import RoundPolicy
from tailopt.rounds.settle import Settlement, settle
from tailopt.rules.rule import Hyperparameters, ParamState, Rule, can_step_flat_without_state
from tailopt.thresholds import Statistics


@dataclass
class GlobalState:
    """What all nodes share after a round.

    Args:
        names: of the parameters that are trained.
        weights: in the compute type (fp32 for bf16 and fp16).
        buffers: in their own types.
        outer_state: the outer rule's state, per parameter.
        average: of the rounds' weights, or None where it was not asked for.
        round: the number of completed rounds.
        flat: one tensor that holds all weights, which are views of it; None where their types differ.
    """

    names: list[str]
    weights: list[Tensor]
    buffers: dict[str, Tensor]
    outer_state: list[ParamState]
    average: list[Tensor] | None = None
    round: int = 0
    flat: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DivergedState:
    """Copies of weights and buffers, in the model's types: a node whose contribution was lost continues from them."""

    weights: list[Tensor]
    buffers: dict[str, Tensor]


@dataclass(slots=True, kw_only=True)
class Contribution:
    """What one node did in a round. Its tensors may lie in the model's own memory: the next contribution reuses it.

    Args:
        node: its number.
        start: the global weights at the start of the round, in the parameters' own types. The displacement is measured
            from them, also that of a diverged node, which started elsewhere.
        delta: the displacement from `start`, in the compute type.
        buffers: of the model, as the node left them.
        loss: the mean over its local steps.
        movement_bound: how far its optimizer can have moved it; unbounded where it is diverged.
        steps: local steps taken.
        flat: the whole displacement as one tensor, laid out like the flat global weights, or None.
        optimizer_state: the state of its inner optimizer, where nodes keep it.
        diverged_state: where it ended, if it continues from there.
        statistics: counts of its gradients' coordinates, if they were asked for.
        threshold_statistics: of its gradients, by tensor, from which thresholds that are "auto" follow; None where
            none is.
    """

    node: int
    start: Sequence[Tensor]
    delta: Sequence[Tensor]
    buffers: Mapping[str, Tensor]
    loss: float
    movement_bound: Bound
    steps: int = 0
    flat: Tensor | None = None
    optimizer_state: list[ParamState] | None = None
    diverged_state: DivergedState | None = None
    statistics: NodeCounts | None = None
    threshold_statistics: list[Statistics] | None = None


@dataclass
class NodeStates:
    """What the nodes of a round keep for themselves, by node."""

    optimizer_states: dict[int, list[ParamState]] = field(default_factory=dict)
    diverged_states: dict[int, DivergedState] = field(default_factory=dict)


@dataclass
class RoundResult:
    """The mean of a round, ready for the outer step.

    Args:
        settlement: who counted.
        delta: the mean displacement, by tensor; empty where every contribution was lost.
        buffers: the mean buffers; where every contribution was lost, those from before the round.
        node_states: what the nodes keep for themselves.
        statistics: of the nodes that counted.
        is_flat: `delta` is one tensor, laid out like the flat global weights.
        threshold_statistics: of the nodes that counted, by node, from which thresholds that are "auto" follow.
    """

    settlement: Settlement
    delta: list[Tensor]
    buffers: dict[str, Tensor]
    node_states: NodeStates
    statistics: list[NodeCounts]
    is_flat: bool = False
    threshold_statistics: dict[int, list[Statistics]] = field(default_factory=dict)


class RoundMean:
    """Checks the contributions of a round as they arrive, and adds up those that count. `state` is never changed.

    Args:
        state: from which the round started.
        participants: who takes part.
        policy: whether the guard checks, and which mean is taken.
        lost: nodes whose contributions do not arrive. They are not checked, and their optimizer states move on.
    """

    def __init__(
        self, state: GlobalState, participants: Participants, policy: RoundPolicy, lost: Collection[int] = ()
    ) -> None:
        self._state, self._participants, self._guard, self._lost = state, participants, policy.guard, lost
        self._robust = policy.robust_mean
        mean_function = None if self._robust is None else self._robust.mean_function()
        self._delta = WeightedMean() if mean_function is None else CollectedMean(mean_function)
        self._buffers = BufferMean(state.buffers) if self._robust is None else BufferMean.median(state.buffers)
        self._is_flat = False  # whether `_delta` adds up one flat tensor
        self._waiting: list[Contribution] = []  # until a robust mean has seen all of them
        self._steps: dict[int, int] = {}
        self._losses: dict[int, float] = {}
        self._excluded: list[Exclusion] = []
        self._node_states = NodeStates()
        self._statistics: list[NodeCounts] = []
        self._threshold_statistics: dict[int, list[Statistics]] = {}

    def add(self, c: Contribution) -> None:
        """Take one contribution, in ascending node order. Afterwards its tensors may be overwritten."""
        self._steps[c.node] = c.steps  # a node's samplers move on, whether it counts or not
        if c.node in self._lost:
            self._excluded.append(Dropped.of(c.node))
            self._collect_node_states(c)
        elif (exclusion := self._check(c)) is not None:
            self._excluded.append(exclusion)
        elif self._robust is not None:
            copied = {name: b.clone() for name, b in c.buffers.items()}
            self._waiting.append(replace(c, flat=None, delta=[d.clone() for d in c.delta], buffers=copied))
        else:
            self._accumulate(c)

    def result(self) -> RoundResult:
        """Settle the round. Raises `EveryoneExcluded` where no displacement can be used."""
        if self._robust is not None:
            self._accumulate_all_but_outliers()
        settlement = settle(self._state.round + 1, self._participants, self._steps, self._excluded, self._losses)
        if not settlement.counted_shares:
            return RoundResult(settlement, [], self._state.buffers, self._node_states, [])
        delta = self._delta.result(settlement.total_share)
        buffers = self._buffers.result(settlement.total_share, self._state.buffers)
        return RoundResult(
            settlement, delta, buffers, self._node_states, self._statistics, self._is_flat, self._threshold_statistics
        )

    def _check(self, c: Contribution) -> Exclusion | None:
        if not self._guard or (c.flat is not None and not c.buffers and clearly_within(c.flat, c.movement_bound)):
            return None
        state = self._state
        return check_displacement(c.node, c.delta, c.start, state.names, c.movement_bound, c.buffers, state.buffers)

    def _accumulate(self, c: Contribution) -> None:
        share = self._participants.shares[c.node]
        self._is_flat = c.flat is not None
        self._delta.add([c.flat] if c.flat is not None else c.delta, share)
        if c.buffers:
            self._buffers.add(c.buffers, share)
        self._losses[c.node] = c.loss
        self._collect_node_states(c)
        if c.statistics is not None:
            self._statistics.append(c.statistics)
        if c.threshold_statistics is not None:
            self._threshold_statistics[c.node] = c.threshold_statistics

    def _accumulate_all_but_outliers(self) -> None:
        assert self._robust is not None
        nodes = [c.node for c in self._waiting]
        outliers = self._robust.outliers([c.delta for c in self._waiting], nodes) if nodes else []
        self._excluded += outliers
        left_out = {e.node for e in outliers}
        for c in self._waiting:
            if c.node not in left_out:
                self._accumulate(c)

    def _collect_node_states(self, c: Contribution) -> None:
        if c.optimizer_state is not None:
            self._node_states.optimizer_states[c.node] = c.optimizer_state
        if c.diverged_state is not None and c.node in self._lost:
            self._node_states.diverged_states[c.node] = c.diverged_state


def finish_round(
    state: GlobalState,
    result: RoundResult,
    outer: Rule,
    hparams: Hyperparameters,
    policy: RoundPolicy,
    cache: StepCache | None = None,
) -> None:
    """Take steps 5 to 7: `state` moves on to the next global weights.

    `result.delta` is negated in place: it is no longer the mean displacement afterwards.

    cache: of the outer rule's step; the engine owns it and passes it in every round.
    """
    state.buffers = result.buffers
    if result.settlement.counted_shares:  # where nothing arrived, nothing moves
        delta = result.delta
        if result.is_flat and state.flat is not None and can_step_flat_without_state(outer, hparams):
            outer.step([state.flat], [delta[0].neg_()], [{}], hparams, cache)
        else:
            outer_step(state, _by_tensor(state, result), outer, hparams, cache)
        if policy.projection_radius is not None:
            project(state.weights, policy.projection_radius)
    state.round += 1
    if state.average is not None:
        # x~ = sum of r x_r over sum of r: the share of the last one is r / (1 + ... + r)
        torch._foreach_lerp_(state.average, state.weights, 2.0 / (state.round + 1))


def statistics_of_outer_step(
    state: GlobalState, result: RoundResult, auto_thresholds: AutoThresholds
) -> list[Statistics]:
    """Return the statistics of what an outer step clipped, after it; none where nothing arrived.

    The mean displacement was negated by then, which changes no magnitude.
    """
    if not result.settlement.counted_shares:
        return []
    clipped = clipped_by_step(_by_tensor(state, result), state.outer_state, auto_thresholds.momentum)
    return statistics_of_displacement(clipped, auto_thresholds.kind)


def _by_tensor(state: GlobalState, result: RoundResult) -> list[Tensor]:
    """Return the mean displacement by tensor; views, where it is flat."""
    if not result.is_flat:
        return result.delta
    return [result.delta[0].as_strided(w.shape, w.stride(), w.storage_offset()) for w in state.weights]


def outer_step(
    state: GlobalState, delta: list[Tensor], outer: Rule, hparams: Hyperparameters, cache: StepCache | None = None
) -> None:
    """Apply the outer rule to the negated mean displacement; `delta` is negated in place."""
    norms = {}
    if outer.needs_norm:
        per_tensor = hparams.get("scope") == "tensor"
        norms["norm"] = [norm([d]) for d in delta] if per_tensor else norm(delta)
    torch._foreach_neg_(delta)
    outer.step(state.weights, delta, state.outer_state, {**hparams, **norms}, cache)


def project(weights: Sequence[Tensor], radius: float) -> None:
    """Scale the weights by min(1, radius / |x|), with one norm over all tensors."""
    length = norm(weights)
    if length > radius:
        torch._foreach_mul_(list(weights), radius / length)
