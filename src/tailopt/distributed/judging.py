"""What this node decides about the displacements of all nodes, from its own partition of them.

Single elements are judged by the node that receives them. A norm needs all partitions: their block sums are gathered,
and all nodes decide the same.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tailopt.distributed.exchange_types import JudgingCriteria
from tailopt.distributed.flat_kernels import ChecksumAndMax
from tailopt.distributed.header import Header
from tailopt.distributed.node_bounds import NodeBounds
from tailopt.distributed.partition import Partition
from tailopt.distributed.rank_shards import RankShards
from tailopt.distributed.verdicts import Verdict, VerdictRow, verdict_row
from tailopt.distributed.weight_sync import Pair
from tailopt.rounds.block_norm import root_of_sum
from tailopt.rounds.guard import BEYOND, SLACK, Bound, Exclusion, allowed_if_exceeded, check_displacement
from tailopt.rounds.participants import Participants


@dataclass(frozen=True)
class RoundContext:
    """What all nodes know about a round before they judge displacements.

    Args:
        t: the round.
        participants: with their shares.
        headers: of all nodes.
        x: the synchronised weights, flat.
        buffers: of every node, by name.
        buffers_before: as the round began, the same on every node.
        bounds: how far each participant can have moved.
        differing: (owner, receiver) of weights that a node loaded differently.
        criteria: what the round is judged by.
    """

    t: int
    participants: Participants
    headers: Sequence[Header]
    x: Tensor
    buffers: Sequence[Mapping[str, Tensor]]
    buffers_before: Mapping[str, Tensor]
    bounds: NodeBounds
    differing: Sequence[Pair]
    criteria: JudgingCriteria


@dataclass(frozen=True)
class Displacement:
    """One node's displacement in this partition.

    Args:
        row: its elements.
        stats: of the row as it is here.
        stated_checksum: of the row as its sender's header states it; None for this node's own.
    """

    row: Tensor
    stats: ChecksumAndMax
    stated_checksum: int | None


class Judge:
    """Judges displacements.

    Args:
        partition: of this node.
        names: of all tensors.
        param_dtypes: types of the parameters.
        ranks: the other ranks of this node, where its parameters are sharded.
    """

    def __init__(
        self, partition: Partition, names: Sequence[str], param_dtypes: Sequence[torch.dtype], ranks: RankShards | None
    ) -> None:
        self._partition, self._names, self._param_dtypes, self._ranks = partition, names, param_dtypes, ranks

    def verdict(
        self, node: int, displacement: Displacement, context: RoundContext, tensor_and_buffer_names: Sequence[str]
    ) -> VerdictRow | None:
        """What this partition of a node's displacement decides; the row has the index of a name."""
        if displacement.stated_checksum not in (None, displacement.stats.checksum):
            return verdict_row(Verdict.DAMAGED)
        if not context.criteria.guard:
            return None
        exclusion = self._exclusion(node, displacement, context)
        if exclusion is None:
            return None
        verdict = Verdict.NOT_FINITE if exclusion.bound is None else Verdict.BEYOND_BOUND
        return verdict_row(
            verdict, tensor_and_buffer_names.index(exclusion.subject), exclusion.value, exclusion.bound or 0.0
        )

    def _exclusion(self, node: int, displacement: Displacement, context: RoundContext) -> Exclusion | None:
        """The guard's verdict about a node's buffers and this partition of its displacement; norms come later."""
        limit, buffers = context.bounds.by_node[node], context.buffers[node]
        if _clearly_within(displacement.stats.max_abs, limit):
            return check_displacement(node, [], [], [], Bound(None), buffers, context.buffers_before)
        partition = self._partition
        names = [self._names[s.tensor] for s in partition.segments]
        views = zip(partition.segments_of_flat(context.x), partition.segments, strict=True)
        start = [part.to(self._param_dtypes[s.tensor]) for part, s in views]
        delta, bound = partition.segments_of_partition(displacement.row), partition.bound_by_segment(limit)
        return check_displacement(node, delta, start, names, bound, buffers, context.buffers_before)

    async def judge_norms(
        self,
        rows: Sequence[Tensor],
        gather_sums_of_squares: Callable[[Tensor], Awaitable[list[float]]],
        context: RoundContext,
        verdicts: dict[int, Exclusion],
    ) -> None:
        """Add exclusions by bounds on norms to the verdicts.

        Args:
            rows: this partition of every node's displacement.
            gather_sums_of_squares: of every tensor, from the rows of all nodes.
            context: what all nodes know about the round.
            verdicts: about coordinates and headers.
        """
        for node in context.participants.shares:
            limit = context.bounds.by_node[node]
            if limit.kind not in ("norm", "tensor norm"):
                continue
            # also of a node that is excluded already: all nodes must take part in the same messages
            squares = await gather_sums_of_squares(rows[node])
            whole = limit.kind == "norm"
            norms = [root_of_sum(squares)] if whole else [root_of_sum([s]) for s in squares]
            limits = [limit] if whole else [limit.for_param(i) for i in range(len(norms))]
            clearly_within = all(norm <= float(b.constant) for norm, b in zip(norms, limits, strict=True))
            if node in verdicts or clearly_within:
                continue
            tensors = self._start_of_round(context.x)
            groups = [[piece for pieces in tensors for piece in pieces]] if whole else tensors
            for i, (norm, group, of_group) in enumerate(zip(norms, groups, limits, strict=True)):
                allowed = allowed_if_exceeded(norm, group, of_group)
                if allowed is not None:
                    name = "all tensors" if whole else self._names[i]
                    verdicts[node] = Exclusion(node, name, norm, allowed, BEYOND)
                    break

    def _start_of_round(self, x: Tensor) -> list[list[Tensor]]:
        """The weights from which the round began, by tensor, in the parameters' own types: the parts of all ranks."""
        if self._ranks is None:
            tensors = [[view] for view in self._partition.layout.views(x, self._partition.shapes)]
        else:
            tensors = self._ranks.gather_parts(x)
        return [[part.to(kind) for part in parts] for parts, kind in zip(tensors, self._param_dtypes, strict=True)]


def _clearly_within(max_abs: float, limit: Bound) -> bool:
    """Whether the largest magnitude shows that the guard would find nothing: finite, and below the least bound.

    Half the slack leaves a margin for the roundings of the exact test, which reads the weights too.
    """
    if not max_abs < math.inf:  # NaN too
        return False
    if limit.kind != "coordinate":
        return True
    constants = limit.constant if isinstance(limit.constant, list) else [limit.constant]
    if any(isinstance(constant, Tensor) for constant in constants):
        return False
    return bool(max_abs <= min(constants) * (1 + SLACK / 2))
