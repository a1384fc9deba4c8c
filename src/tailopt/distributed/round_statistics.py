"""The statistics of a round on real nodes, for thresholds that are "auto" and for the history: every node has the same,
with the bits of a simulation.

    inside     each node's own record, gathered at the end of a round (`rounds/gradient_statistics.py`)
    outside    each node counts its partition of the mean displacement; integers add up, and squares go by blocks
    history    each node's counts of what its steps clipped (`rounds/clipping_counts.py`), gathered in the same way
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tailopt.distributed.partition import Partition
from tailopt.distributed.rank_shards import RankShards
from tailopt.distributed.transport import Transport
from tailopt.rounds import clipping_counts
from tailopt.rounds.auto_thresholds import AutoThresholds
from tailopt.rounds.block_norm import root_of_sum
from tailopt.rounds.clipping_counts import ClippingCounter, NodeCounts
from tailopt.rounds.gradient_statistics import (
    GradientRecorder,
    Kind,
    clipped_by_step,
    counters_of_parts,
    counts_of_displacement,
    over_ranks,
    unpacked,
)
from tailopt.rules.rule import ParamState
from tailopt.thresholds import Norms, Statistics


@dataclass(frozen=True)
class StatisticsExchange:
    """One node's part of it.

    Args:
        transport: reaches the other nodes.
        partition: of this node.
        ranks: the other ranks of this node, where its parameters are sharded.
        gather_sums_of_squares: of every tensor, from the partitions of all nodes.
    """

    transport: Transport
    partition: Partition
    ranks: RankShards | None
    gather_sums_of_squares: Callable[[Tensor], Awaitable[list[float]]]

    async def of_gradients(self, recorder: GradientRecorder, most_steps: int) -> list[list[Statistics]]:
        """What every node recorded in this round, in node order.

        most_steps: that a node may have taken: all of them send as much.
        """
        rows = await self.transport.gather(recorder.packed(most_steps))
        return [unpacked(row, recorder.kind) for row in self._over_ranks(rows, recorder.kind)]

    async def of_local_steps(self, counter: ClippingCounter) -> list[NodeCounts]:
        """What every node's local steps of this round clipped, in node order."""
        rows = await self.transport.gather(counter.packed())
        if self.ranks is not None:
            by_rank, sharded = self.ranks.gather(rows), sorted(self.partition.sharded)
            rows = torch.stack([clipping_counts.over_ranks(by_rank[:, k], sharded) for k in range(len(rows))])
        return [clipping_counts.unpacked(row) for row in rows]

    async def of_outer_step(
        self, mean: Tensor, states: Sequence[ParamState], thresholds: AutoThresholds
    ) -> list[Statistics]:
        """What an outer step clipped, after it.

        mean: the mean displacement in this partition, negated or not; states: of the outer rule, by segment.
        """
        partition, buffer = self.partition, mean
        if thresholds.momentum:
            buffer = torch.zeros_like(mean)
            parts = partition.segments_of_partition(buffer)
            for part, clipped in zip(parts, clipped_by_step(parts, states, thresholds.momentum), strict=True):
                part.copy_(clipped)
        squares = await self.gather_sums_of_squares(buffer)
        if thresholds.kind == "norm":
            return [Norms((root_of_sum(squares),))]
        if thresholds.kind == "tensor norms":
            return [Norms((root_of_sum([s]),)) for s in squares]
        slots = [s.tensor for s in partition.segments]
        mine = counters_of_parts(partition.segments_of_partition(buffer), slots, len(partition.layout.sizes))
        rows = self._over_ranks(await self.transport.gather(mine), thresholds.kind)
        return counts_of_displacement(rows, squares)

    def _over_ranks(self, rows: Tensor, kind: Kind) -> Tensor:
        """Rows of all nodes, each over the ranks of its node."""
        if self.ranks is None:
            return rows
        by_rank = self.ranks.gather(rows)
        return torch.stack([over_ranks(by_rank[:, k], kind, sorted(self.partition.sharded)) for k in range(len(rows))])
