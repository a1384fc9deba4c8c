"""This process as a node: its parameters, the global weights, and its partition of the outer state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tailopt.clipping.dtensor import is_dtensor
from tailopt.distributed import flat_kernels
from tailopt.distributed.exchange import Exchange
from tailopt.distributed.exchange_types import ExchangeReport, JudgingCriteria, Statement
from tailopt.distributed.gloo import GlooTransport
from tailopt.distributed.interfaces import blocking
from tailopt.distributed.mesh import local_tensor, rank_group
from tailopt.distributed.proximal_step import ProximalStep
from tailopt.distributed.weight_sync import AT_FAULT, other_weights
from tailopt.engines.model_state import Buffers, as_real
from tailopt.records.phase_clock import PhaseClock
from tailopt.rounds.auto_thresholds import NO_AUTO_THRESHOLDS, AutoThresholdsByLevel
from tailopt.rounds.drops import DROPPED
from tailopt.rounds.hyperparameters import RuleHyperparameters
from tailopt.rounds.participants import Participants
from tailopt.rounds.policy import RoundPolicy
from tailopt.rounds.round import DivergedState
from tailopt.rules.adam import initial_adam_state
from tailopt.rules.rule import ParamState


class Node:
    """One node of a run.

    Attributes:
        params: the parameters that are exchanged.
        buffers: the model's, or None where they stay local.
        exchange: with the other nodes.
        x: the global weights, flat, in the compute type.
        outer_state: the outer rule's state of this node's partition.
        average: of the rounds' weights, flat, or None.
        round: the number of completed rounds.
        diverged_state: where this node continues, if not from the global weights.
        second_moment: the outer second moment, where the algorithm sends it to the nodes.
        auto_thresholds: those of the coming round that are "auto".
    """

    def __init__(
        self,
        transport: GlooTransport,
        names: Sequence[str],
        params: Sequence[Tensor],
        buffers: Buffers | None,
        average: bool = False,
        auto_thresholds: AutoThresholdsByLevel = NO_AUTO_THRESHOLDS,
    ) -> None:
        self.auto_thresholds = auto_thresholds
        self.params = list(params)
        self.buffers = buffers
        self._plain = not any(is_dtensor(p) or p.is_complex() for p in self.params)
        local = self.local_tensors()
        shapes, dtypes = [p.shape for p in local], [p.dtype for p in local]
        inside = rank_group(transport.group, self.params)
        ranks = None if inside is None else GlooTransport.of(inside)
        self.exchange = Exchange(transport, list(names), shapes, dtypes, ranks, self.params)
        self.x = flat_kernels.alloc_huge_pages(self.exchange.layout.total, self.exchange.dtype)
        self.outer_state: list[ParamState] = [{} for _ in self.exchange.own_segments]
        self.average: Tensor | None = torch.zeros_like(self.x) if average else None
        self.round = 0
        self.diverged_state: DivergedState | None = None
        self.second_moment: Tensor | None = None
        self._buffers_before: dict[str, Tensor] = {}
        torch._foreach_copy_(self.exchange.layout.views(self.x, self.exchange.shapes), local)

    @property
    def number(self) -> int:
        """The number of this node."""
        return self.exchange.transport.node

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return self.exchange.transport.nodes

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.params[0].device if self.params else torch.device("cpu")

    def local_tensors(self) -> list[Tensor]:
        """Return this rank's part of every parameter, as real tensors that share its memory."""
        if self._plain:  # asked for twice per round, which small models notice
            return [p.detach() for p in self.params]
        return [as_real(local_tensor(p)) for p in self.params]

    def weights_at_round_start(self) -> list[Tensor]:
        """Return this rank's part of the global weights, as `local_tensors` has them after they were loaded."""
        views = self.exchange.layout.views(self.x, self.exchange.shapes)
        return [x.to(p.device, p.dtype) for x, p in zip(views, self.local_tensors(), strict=True)]

    def proximal_step(self, mu: float) -> ProximalStep | None:
        """Return what takes local steps with a proximal term; None where its factor is 0."""
        return ProximalStep(self.params, mu, self.weights_at_round_start) if mu else None

    @torch.no_grad()
    def start(self) -> None:
        """Take over node 0's weights, so that the first round starts from the same vector everywhere."""
        buffers = self._host_buffers()
        blocking(self.exchange.start([self.x, *buffers.values()]))
        self._load_buffers(buffers)
        self.restart()

    def restart(self) -> None:
        """Begin with global weights that no outer step made: node 0's, or those of a checkpoint."""
        self.load()
        self.exchange.reset_sent_digest(self.x)

    @torch.no_grad()
    def load(self) -> None:
        """Load the global weights into the parameters."""
        self.exchange.load(self.local_tensors(), self.x)

    def confirm_weights(self, guard: bool) -> list[str]:
        """Meet the others after what may be the last round: a node that loaded wrong weights loads them again.

        Returns what is worth a warning.
        """
        _, differing = blocking(self.exchange.compare_weights_at_barrier(self.round, 0, self.x, guard))
        return self.load_again(differing)

    def load_again(self, differing: Sequence[tuple[int, int]]) -> list[str]:
        """Load weights that were sent again; returns a sentence per (owner, receiver) whose weights differed."""
        if any(receiver == self.number for _, receiver in differing):
            self.load()
        return [f"{other_weights(*pair, self.round)}; it has loaded them again. {AT_FAULT}" for pair in differing]

    def _host_buffers(self) -> dict[str, Tensor]:
        """Return the buffers on the CPU, where the exchange is: themselves, or copies."""
        return {name: b.cpu().contiguous() for name, b in self.buffers.tensors().items()} if self.buffers else {}

    def _load_buffers(self, values: Mapping[str, Tensor]) -> None:
        if self.buffers:
            self.buffers.load(values)
            self._buffers_before = {name: b.clone() for name, b in self._host_buffers().items()}

    def buffers_at_round_start(self) -> Mapping[str, Tensor]:
        """Return the buffers as the round began: the same on every node."""
        return self._buffers_before

    def load_buffers_at_round_start(self, buffers: Mapping[str, Tensor]) -> None:
        """Load the buffers with which a round begins."""
        self._load_buffers(buffers)

    @torch.no_grad()
    def close_round(
        self,
        participants: Participants,
        statement: Statement,
        criteria: JudgingCriteria,
        outer: RuleHyperparameters,
        policy: RoundPolicy,
        send_second_moment: bool = False,
    ) -> ExchangeReport:
        """End the round: exchange displacements, take the outer step, load the new weights.

        send_second_moment: the outer second moment travels with the weights.
        """
        exchange, t = self.exchange, self.round + 1
        clock, sent_before = PhaseClock(), exchange.transport.counter.bytes_sent
        takes_part = self.number in participants.shares
        if takes_part:
            exchange.measure_displacement(self.local_tensors(), self.x)
        before, buffers = self._buffers_before, self._host_buffers()
        report, mean_buffers = blocking(
            exchange.exchange_and_settle(t, participants, self.x, buffers, before, statement, criteria)
        )
        clock.lap("exchange")
        if takes_part:
            lost = any(e.node == self.number and e.reason == DROPPED for e in report.settlement.excluded)
            self.diverged_state = self._copy_state() if lost and policy.dropped_nodes_diverge else None
        if report.settlement.counted_shares:  # where nothing arrived, nothing moves
            blocking(
                exchange.take_outer_step(self.x, self.outer_state, outer.rule, outer.at(t), policy.projection_radius)
            )
        self._gather_statistics(report, statement, policy)
        if send_second_moment:
            self.gather_second_moment()
        self.round = t
        if self.average is not None:
            partition = exchange.partition.range
            self.average[partition].lerp_(self.x[partition], 2.0 / (self.round + 1))
        self._load_buffers(mean_buffers)
        self.load()
        if report.may_be_last:
            report.reloads = self.confirm_weights(policy.guard)
        clock.lap("outer")
        report.phases, report.bytes_sent = clock.take(), exchange.transport.counter.bytes_sent - sent_before
        return report

    def _gather_statistics(self, report: ExchangeReport, statement: Statement, policy: RoundPolicy) -> None:
        """Gather the statistics from which the next "auto" thresholds are computed, and those of the history."""
        statistics, outer = self.exchange.statistics, self.auto_thresholds.outer
        recorder, counter = statement.threshold_recorder, statement.clipping_counter
        if recorder is not None:
            by_node = blocking(statistics.of_gradients(recorder, policy.local_steps or 0))
            report.threshold_statistics = dict(enumerate(by_node))
        if outer is not None and report.settlement.counted_shares:
            of_outer_step = statistics.of_outer_step(self.exchange.mean, self.outer_state, outer)
            report.outer_step_statistics = blocking(of_outer_step)
        if counter is not None:
            report.clipping_counts = blocking(statistics.of_local_steps(counter))

    def _copy_state(self) -> DivergedState:
        buffers = {name: b.clone() for name, b in self.buffers.tensors().items()} if self.buffers else {}
        return DivergedState([p.clone() for p in self.local_tensors()], buffers)

    @torch.no_grad()
    def begin_round(self) -> None:
        """Begin a round in which this node takes part: from the global weights, or from its own."""
        if self.diverged_state is not None:
            torch._foreach_copy_(self.local_tensors(), self.diverged_state.weights)
            if self.buffers:
                self.buffers.load(self.diverged_state.buffers)

    def gather_second_moment(self) -> None:
        """Gather the outer second moment from all nodes' partitions."""
        flat = torch.zeros_like(self.x)
        for part, state in zip(self.exchange.partition.segments_of_flat(flat), self.outer_state, strict=True):
            if "exp_avg_sq" in state:
                part.copy_(state["exp_avg_sq"])
        blocking(self.exchange.all_gather_verified(flat))
        self.second_moment = flat

    def states_with_second_moment(self, adam_step: int) -> list[ParamState]:
        """Return the state of an inner Adam that starts with the outer second moment, after so many steps of Adam."""
        assert self.second_moment is not None
        moments = self.exchange.layout.views(self.second_moment, self.exchange.shapes)
        return [initial_adam_state(p, v, adam_step) for p, v in zip(self.local_tensors(), moments, strict=True)]
