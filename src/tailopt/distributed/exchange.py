"""The exchange of a round between real nodes: one flat buffer, every element summed once, in node order.

Each node reduces one partition of the flat buffer. It receives that partition of every node's displacement, point to
point, and judges it; verdicts are exchanged, so that an exclusion is unanimous; then it adds up in ascending node
order, takes the outer step on its partition (the outer state lives there too), and sends the new weights back:

    header      round, node, weight, steps, digests (header.py)             to every node
    partitions  partition k of my displacement to node k                    right behind it, point to point
    bounds      where the nodes state different ones (node_bounds.py)       to every node, else not at all
    verdicts    damaged, not finite, beyond the bound: about every node     to every node
    sum, step   my partition: weighted mean, outer rule, radius             no traffic, but for norms
    weights     my partition to every node                                  point to point

Before the first exchange of a run the nodes send their headers alone, to check that all flat buffers have the same
size. The header of the next round states which weights a node loaded and which ones it sent (weight_sync.py). A node
that loaded something else than was sent is left out of that round, and receives the weights again before it uses them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tailopt.clipping.operators import compute_dtype
from tailopt.clipping.step_cache import StepCache
from tailopt.distributed import flat_kernels
from tailopt.distributed.buffers import gather_buffers, mean_buffers
from tailopt.distributed.exchange_types import ExchangeReport, JudgingCriteria, Statement
from tailopt.distributed.flat_kernels import ChecksumAndMax, SegmentTable
from tailopt.distributed.header import ExchangeAborted, Header, barrier_header, digest_of_bound
from tailopt.distributed.interfaces import blocking
from tailopt.distributed.judging import Displacement, Judge, RoundContext
from tailopt.distributed.layout import Layout, Segment
from tailopt.distributed.node_bounds import NodeBounds, RoundHeaders, agreed_bounds, stated_bounds
from tailopt.distributed.outer_step import PendingMean, outer_step
from tailopt.distributed.partition import Partition
from tailopt.distributed.rank_shards import RankShards
from tailopt.distributed.round_statistics import StatisticsExchange
from tailopt.distributed.transport import Transport
from tailopt.distributed.verdicts import check_auto_thresholds, header_verdict, merge_verdicts
from tailopt.distributed.weight_sync import Pair, WeightSync, check_sent_weights_finite
from tailopt.rounds.block_norm import root_of_sum
from tailopt.rounds.guard import Exclusion
from tailopt.rounds.mean import BufferMean
from tailopt.rounds.participants import Participants
from tailopt.rounds.robust import Aggregate
from tailopt.rounds.settle import Settlement, settle
from tailopt.rules.rule import Hyperparameters, ParamState, Rule

CHECKPOINT_ON_ALL_NODES = "Call checkpoint() on every node, after the same step."


class TrainableSetsDiffer(Exception):
    """The nodes do not train the same parameters any more. `TrainableSet.disagreement` finds out which differ."""


@dataclass
class Exchange:
    """One node's part of every exchange; holds the buffers.

    Args:
        transport: reaches the other nodes.
        names: of all tensors.
        shapes: of this rank's parts of them.
        param_dtypes: the types of the parameters; the arithmetic is in fp32, or in fp64 where all of them are.
        rank_transport: reaches the other ranks of this node, where its parameters are sharded; its nodes are ranks.
        params: then, the parameters themselves.
    """

    transport: Transport
    names: list[str]
    shapes: list[torch.Size]
    param_dtypes: list[torch.dtype]
    rank_transport: Transport | None = None
    params: Sequence[Tensor] = ()

    def __post_init__(self) -> None:
        compute_dtypes = {compute_dtype(dtype) for dtype in self.param_dtypes}
        if len(compute_dtypes) != 1:
            raise ValueError(
                f"Invalid model: parameters in {len(compute_dtypes)} types; need all in fp64, or none of them."
            )
        (self.dtype,) = compute_dtypes
        here, nodes = self.transport.node, self.transport.nodes
        self.layout = Layout(tuple(shape.numel() for shape in self.shapes), nodes)
        self.partition = Partition(self.layout, here, self.shapes, self.params)
        self.delta = flat_kernels.alloc_huge_pages(self.layout.total, self.dtype)
        # received[k] is node k's displacement in this node's partition; the own entry is a view of `self.delta`
        rows = [flat_kernels.alloc_huge_pages(len(self.partition), self.dtype) for _ in range(nodes - 1)]
        self.received = [*rows[:here], self.delta[self.partition.range], *rows[here:]]
        self._stats = [ChecksumAndMax()] * nodes  # of every partition of this node's displacement
        self._mean = self.received[here]
        self._pending: PendingMean | None = None  # what `_mean` will be, where it is not added up yet
        self._sizes_agreed = False
        self._outer_cache = StepCache()
        segments = (s for k in range(nodes) for s in self.layout.segments(k))
        self._all_segments = SegmentTable.of(segments, self.layout.cuts)  # of all partitions
        self._weight_sync = WeightSync(self.layout, self._all_segments, here)
        sharded = self.partition.sharded
        self._ranks = None if self.rank_transport is None else RankShards(self.rank_transport, self.layout, sharded)
        self._judge = Judge(self.partition, self.names, self.param_dtypes, self._ranks)
        self.statistics = StatisticsExchange(self.transport, self.partition, self._ranks, self.gather_sums_of_squares)

    @property
    def mean(self) -> Tensor:
        """The mean displacement in this node's partition.

        Valid only after `take_outer_step`, which may leave it negated.
        """
        return self._mean

    @property
    def own_segments(self) -> list[Segment]:
        """The segments of this node's own partition."""
        return self.partition.segments

    @property
    def loaded_digests(self) -> list[int]:
        """Digests of every partition of the weights with which this node began its round."""
        return list(self._weight_sync.loaded_digests)

    def restore_loaded_digests(self, digests: Sequence[int]) -> None:
        """Take back what a checkpoint in the middle of a round has as `loaded_digests`."""
        self._weight_sync.loaded_digests = tuple(digests)

    def elements_before(self, tensor: int) -> int | None:
        """How many elements of a tensor the ranks of this node before this one have; None where each has all of it."""
        return None if self._ranks is None else self._ranks.elements_before(tensor)

    def measure_displacement(self, params: Sequence[Tensor], x: Tensor) -> None:
        """Form `self.delta`: how far this node's parameters are from the synchronised weights."""
        self._stats = flat_kernels.displacement(params, x, self.delta, self._all_segments, self.layout.cuts)

    def load(self, params: Sequence[Tensor], x: Tensor) -> None:
        """Copy the synchronised weights into the parameters, and note what was loaded."""
        self._weight_sync.load(params, x)

    def reset_sent_digest(self, x: Tensor) -> None:
        """Note this partition of node 0's weights, or of those of a checkpoint, as if this node had sent it."""
        self._weight_sync.reset_sent_digest(x)

    async def exchange_and_settle(
        self,
        t: int,
        participants: Participants,
        x: Tensor,
        buffers: Mapping[str, Tensor],
        buffers_before: Mapping[str, Tensor],
        statement: Statement,
        criteria: JudgingCriteria,
    ) -> tuple[ExchangeReport, dict[str, Tensor]]:
        """Exchange and judge all displacements and settle the round; `take_outer_step` comes next.

        x: the synchronised weights, flat, from which the displacement was measured; buffers_before: the buffers as the
        round began. Returns the report, the same on every node, and the mean buffers. Where every contribution was
        lost, no node counts and there is no mean.
        """
        headers = await self._exchange_displacements(t, participants, statement, criteria)
        differing = await self._weight_sync.resend_differing(self.transport, t - 1, headers, x)
        all_buffers = await gather_buffers(self.transport, buffers)
        bounds = await self._bounds(t, participants, headers, statement, criteria)
        context = RoundContext(t, participants, headers, x, all_buffers, buffers_before, bounds, differing, criteria)
        verdicts = await self._verdicts(context)
        settlement = self._settle(context, verdicts, await self._norms(context, verdicts))
        report = ExchangeReport(
            settlement,
            seconds={node: headers[node].seconds for node in participants.shares},
            warnings_by_node=bounds.warnings_by_node,
            may_be_last=any(header.may_be_last for header in headers),
        )
        if not settlement.counted_shares:
            return report, dict(buffers_before)
        self._form_or_defer_mean(settlement, criteria.robust_mean)
        into = (BufferMean if criteria.robust_mean is None else BufferMean.median)(buffers_before)
        return report, mean_buffers(into, all_buffers, settlement.counted_shares, settlement.total_share, buffers)

    def _settle(
        self, context: RoundContext, verdicts: Mapping[int, Exclusion], norms: Mapping[int, float]
    ) -> Settlement:
        """Turn verdicts into who counts, the same on every node; a robust mean may exclude further nodes.

        norms: of the displacements of nodes without a verdict, where the robust mean asks for them.
        """
        shares, headers, criteria = context.participants.shares, context.headers, context.criteria
        excluded = [verdicts[node] for node in shares if node in verdicts]
        sound = [node for node in shares if node not in verdicts]
        if criteria.robust_mean is not None and sound:
            norm_by_row = {id(self.received[i]): norm for i, norm in norms.items()}
            rows = [[self.received[i]] for i in sound]
            excluded += criteria.robust_mean.outliers(rows, sound, lambda delta: norm_by_row[id(delta[0])])
        round_headers = RoundHeaders(context.t, headers, shares, most_steps=criteria.most_steps)
        steps = {node: round_headers.plausible_steps(node) for node in shares}
        losses = {node: header.loss for node, header in enumerate(headers)}
        return settle(context.t, context.participants, steps, excluded, losses)

    def _form_or_defer_mean(self, settlement: Settlement, robust_mean: Aggregate | None) -> None:
        """Combine the displacements in this partition; a weighted mean is added up later, with the outer step."""
        rows, shares = [self.received[i] for i in settlement.counted_shares], list(settlement.counted_shares.values())
        mean_function = (
            robust_mean.mean_function(lambda delta: blocking(self._norm(delta))) if robust_mean is not None else None
        )
        if mean_function is None:
            self._mean, self._pending = rows[0], PendingMean(rows, shares, settlement.total_share)
        else:
            (self._mean,), self._pending = mean_function([[row] for row in rows]), None

    async def take_outer_step(
        self, x: Tensor, states: Sequence[ParamState], rule: Rule, hparams: Hyperparameters, radius: float | None
    ) -> None:
        """Take the mean and the outer step on this node's partition of x, and give all nodes the new weights.

        radius: the norm that all weights together may have, or None.
        """
        norm_hparam: dict[str, Any] = {}
        if rule.needs_norm:
            if self._pending is not None:  # the norm needs all of the mean first
                self._pending.form(0, self._mean.numel())
                self._pending = None
            squares = await self.gather_sums_of_squares(self._mean)
            norm_per_tensor = hparams.get("scope") == "tensor"
            norm_hparam["norm"] = (
                [root_of_sum([squares[s.tensor]]) for s in self.own_segments]
                if norm_per_tensor
                else root_of_sum(squares)
            )
        part, partition = x[self.partition.range], self.partition
        by_segment = {**partition.hparams_by_segment(hparams), **norm_hparam}
        if self._pending is None or not self._pending.sgd_step(
            rule, part, states, by_segment, partition.segment_ranges
        ):
            means = partition.segments_of_partition(self._mean)
            outer_step(
                rule, partition.segments_of_flat(x), means, states, by_segment, self._negated_mean, self._outer_cache
            )
        if radius is not None:
            norm = root_of_sum(await self.gather_sums_of_squares(part))
            if norm > radius:
                part.mul_(radius / norm)
        await self._weight_sync.all_gather_weights(self.transport, x)

    def _negated_mean(self, segment: int, mean: Tensor, cut: slice) -> Tensor:
        """Minus a piece of a segment's mean; added up only now, so that the outer step finds it in the cache."""
        piece = mean[cut]
        if self._pending is None:
            return piece.neg_()
        self._pending.form(self.partition.segment_ranges[segment][0] + cut.start, piece.numel(), negative=True)
        return piece

    async def start(self, tensors: Sequence[Tensor]) -> None:
        """Give every node the weights and buffers of node 0, before the first round."""
        for flat in tensors:
            if flat.numel():
                await self._weight_sync.broadcast_verified(self.transport, flat)

    async def all_gather_partitions(self, flat: Tensor) -> None:
        """Send this node's partition of a flat buffer to every node, and receive theirs."""
        await self._weight_sync.all_gather_partitions(self.transport, flat)

    async def all_gather_verified(self, flat: Tensor) -> None:
        """Gather the partitions of a buffer, and compare their digests, which no later header has, at once."""
        await self._weight_sync.all_gather_verified(self.transport, flat)

    async def gather_sums_of_squares(self, buffer: Tensor) -> list[float]:
        """The sum of squares of every tensor, where each node has its partition; all nodes ask at the same time."""
        sums = self.partition.sums_by_tensor(await self.transport.gather(self.partition.block_sums(buffer)))
        return sums if self._ranks is None else self._ranks.sum_over_ranks(sums)

    async def _norm(self, delta: Sequence[Tensor]) -> float:
        """The norm of a displacement of which each node has its partition."""
        (buffer,) = delta
        return root_of_sum(await self.gather_sums_of_squares(buffer))

    async def _norms(self, context: RoundContext, verdicts: Mapping[int, Exclusion]) -> dict[int, float]:
        """The norms of all displacements without a verdict, for a robust mean that compares nodes by them."""
        robust_mean = context.criteria.robust_mean
        if robust_mean is None or robust_mean.name != "median-norm":
            return {}
        nodes = [k for k in context.participants.shares if k not in verdicts]
        return {k: await self._norm([self.received[k]]) for k in nodes}

    # headers

    def _header(self, t: int, takes_part: bool, share: float, statement: Statement) -> Header:
        return Header(
            round=t,
            node=self.transport.node,
            elements=self.layout.total,
            contributes=int(takes_part),
            share=share,
            loss=statement.loss,
            steps=statement.steps,
            bound_digest=digest_of_bound(statement.bound),
            trainable_set_digest=statement.trainable_set_digest,
            auto_thresholds_digest=statement.auto_thresholds_digest,
            may_be_last=int(statement.may_be_last),
            seconds=statement.seconds,
            sent_digest=self._weight_sync.sent_stats.checksum,
            sent_finite=int(self._weight_sync.sent_finite),
            checksums=tuple(stats.checksum if takes_part else 0 for stats in self._stats),
            loaded_digests=self._weight_sync.loaded_digests,
        )

    async def _exchange_displacements(
        self, t: int, participants: Participants, statement: Statement, criteria: JudgingCriteria
    ) -> list[Header]:
        """Every node's header; this partition of all participants' displacements is in `received` then.

        A wrong number of elements raises ExchangeAborted; a wrong round or node number only excludes its sender.
        """
        here, shares = self.transport.node, participants.shares
        takes_part, nothing = here in shares, self.delta[:0]
        header = self._header(t, takes_part, shares.get(here, 0.0), statement)
        if not self._sizes_agreed:
            # In the first exchange, send the header alone and compare buffer sizes: gloo aborts the process if a
            # message is larger than the receive buffer.
            headers = await self.transport.exchange_with_header(header)
            self._check_headers(t, participants, headers, criteria)
            self._sizes_agreed = True
        nodes = range(self.transport.nodes)
        outgoing = [self.delta[self.layout.partition(k)] if takes_part else nothing for k in nodes]
        incoming = [row if k in shares else nothing for k, row in enumerate(self.received)]
        headers = await self.transport.exchange_with_header(header, outgoing, incoming)
        self._check_headers(t, participants, headers, criteria)
        return headers

    def _check_headers(
        self, t: int, participants: Participants, headers: Sequence[Header], criteria: JudgingCriteria
    ) -> None:
        """Raise unless every node ends a round, with this node's number of elements and its expected share."""
        for k, header in enumerate(headers):
            if header.round < 0:
                raise ExchangeAborted(
                    f"Node {k} writes a checkpoint while node {self.transport.node} ends round {t}. "
                    f"{CHECKPOINT_ON_ALL_NODES}"
                )
            share = participants.shares.get(k, 0.0)
            if header.elements != self.layout.total:
                wrong = f"{header.elements} elements, and {self.layout.total} were expected"
            elif header.share != share:
                wrong = f"a share of {header.share:g}, and {share:g} was expected"
            else:
                continue
            raise ExchangeAborted(f"Round {t}: node {k} came with {wrong}. Restart all nodes from the last checkpoint.")
        if len({header.trainable_set_digest for header in headers}) > 1:
            raise TrainableSetsDiffer
        check_auto_thresholds(t, headers)
        if criteria.guard:
            check_sent_weights_finite(t - 1, headers)

    async def compare_weights_at_barrier(
        self, round: int, step: int, x: Tensor, guard: bool
    ) -> tuple[list[Header], list[Pair]]:
        """Meet all nodes before a checkpoint or after the last round, and repair the weights that differ.

        A partition that a node loaded wrongly is sent to it again, into `x`; the caller must reload the parameters.
        Returns the headers and the (owner, receiver) pairs that were sent again. If any node is at another step,
        nothing is compared and there are no pairs.
        """
        header = barrier_header(self._header(0, False, 0.0, Statement()), round, step)
        headers = await self.transport.exchange_with_header(header)
        if any((header.round, header.steps) != (-1 - round, step) for header in headers):
            return headers, []
        if guard:
            check_sent_weights_finite(round, headers)
        digests_at_round_start = self._weight_sync.loaded_digests
        differing = await self._weight_sync.resend_differing(self.transport, round, headers, x)
        if step:
            # This node may have taken its local steps from wrong weights. Its next header still states the weights
            # with which it began, so that the others leave its displacement out at the end of the round.
            self._weight_sync.loaded_digests = digests_at_round_start
        return headers, differing

    # verdicts

    async def _bounds(
        self,
        t: int,
        participants: Participants,
        headers: Sequence[Header],
        statement: Statement,
        criteria: JudgingCriteria,
    ) -> NodeBounds:
        """How far each participant can have moved."""
        round_headers = RoundHeaders(t, headers, participants.shares, criteria.diverged, criteria.most_steps)
        gather = self.transport.gather
        if criteria.expected_bound is None:
            return await stated_bounds(round_headers, statement.bound, self.names, gather)
        return await agreed_bounds(round_headers, criteria.expected_bound, statement.bound, len(self.names), gather)

    async def _verdicts(self, context: RoundContext) -> dict[int, Exclusion]:
        """The nodes that all leave out, and why: the worst that any node saw."""
        here, nodes = self.transport.node, self.transport.nodes
        tensor_and_buffer_names = [*self.names, *(context.buffers[0] if context.buffers else ())]
        mine = torch.zeros(nodes, 4, dtype=torch.float64)
        wrong_weights_owners = {receiver: owner for owner, receiver in reversed(context.differing)}
        for node in context.participants.shares:
            header = context.headers[node]
            wrong_bound = node in context.bounds.wrong
            owner = wrong_weights_owners.get(node)
            row = header_verdict(context.t, node, header, owner, wrong_bound, context.criteria)
            if row is None:
                stats = self._stats[node] if node == here else flat_kernels.checksum_and_max(self.received[node])
                stated = None if node == here else header.checksums[here]
                row = self._judge.verdict(
                    node, Displacement(self.received[node], stats, stated), context, tensor_and_buffer_names
                )
            if row is not None:
                mine[node] = torch.tensor(row, dtype=torch.float64)
        rows, judges = await self.transport.gather(mine), list(range(nodes))
        if self._ranks is not None:  # what one rank of a node saw, all of them act on
            ranks = self._ranks.transport
            rows, judges = blocking(ranks.gather(rows)).flatten(0, 1), judges * ranks.nodes  # these nodes are ranks
        by_judge = [[tuple(about) for about in judge] for judge in rows.tolist()]
        verdicts = merge_verdicts(
            context.t, list(context.participants.shares), by_judge, judges, tensor_and_buffer_names
        )
        if context.criteria.guard:
            await self._judge.judge_norms(self.received, self.gather_sums_of_squares, context, verdicts)
        return verdicts
