"""The partition of the flat buffer that this node reduces: its segments, and sums over them by block and by tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tailopt.clipping.dtensor import local_part, positions_by_process_groups
from tailopt.distributed.layout import Layout, Segment
from tailopt.rounds.block_norm import BLOCK
from tailopt.rounds.guard import Bound
from tailopt.rules.rule import Hyperparameters


class Partition:
    """One node's partition.

    Args:
        layout: of the flat buffer.
        node: the node that reduces the partition.
        shapes: of this rank's parts of all tensors.
        params: the parameters, where the ranks of a node shard them; else nothing.

    Attributes:
        range: where the partition lies in the flat buffer.
        segments: the partition by tensor.
        segment_ranges: (start in the partition, count) of each segment.
        sharded: the tensors of which this rank has a part only.
    """

    def __init__(self, layout: Layout, node: int, shapes: Sequence[torch.Size], params: Sequence[Tensor] = ()) -> None:
        self.layout, self.node, self.shapes, self._params = layout, node, shapes, params
        self.range = layout.partition(node)
        self.segments = layout.segments(node)
        self.segment_ranges = [(s.start - self.range.start, s.count) for s in self.segments]
        self.sharded = {i for groups, members in positions_by_process_groups(params).items() if groups for i in members}
        # of every node: the tensor to which each block of its partition belongs
        self._blocks = [
            [s.tensor for s in layout.segments(k) for _ in range(-(-s.count // BLOCK))] for k in range(layout.nodes)
        ]

    def __len__(self) -> int:
        return self.layout.cuts[self.node + 1] - self.layout.cuts[self.node]

    def segments_of_flat(self, flat: Tensor) -> list[Tensor]:
        """This partition's segments as views of a flat buffer, which has all partitions."""
        return [flat[s.start : s.stop] for s in self.segments]

    def segments_of_partition(self, buffer: Tensor) -> list[Tensor]:
        """This partition's segments as views of a buffer that has this partition alone."""
        return [buffer[start : start + count] for start, count in self.segment_ranges]

    def block_sums(self, buffer: Tensor) -> Tensor:
        """The sum of squares of each block of this partition, padded to the length of the longest partition."""
        padded = torch.zeros(max(map(len, self._blocks)), dtype=torch.float64)
        sums = [
            (block.double() ** 2).sum() for part in self.segments_of_partition(buffer) for block in part.split(BLOCK)
        ]
        if sums:
            torch.stack(sums, out=padded[: len(sums)])
        return padded

    def sums_by_tensor(self, block_sums: Tensor) -> list[float]:
        """The block sums of all partitions as sums by tensor, added in block order: the same bits on every node."""
        sums = [0.0] * len(self.layout.sizes)
        for tensors, row in zip(self._blocks, block_sums.tolist(), strict=True):
            for tensor, value in zip(tensors, row, strict=False):  # the row is padded
                sums[tensor] += value
        return sums

    def hparams_by_segment(self, hparams: Hyperparameters) -> dict[str, Any]:
        """Hyperparameters with a value for each parameter, converted to a value for each segment."""
        by_segment: dict[str, Any] = {}
        for key, value in hparams.items():
            if isinstance(value, list):
                value = [self._of_segment(value[s.tensor], s) for s in self.segments]
            elif isinstance(value, Tensor):
                value = [self._of_segment(value, s) for s in self.segments] if value.dim() else value.to("cpu")
            by_segment[key] = value
        return by_segment

    def bound_by_segment(self, limit: Bound) -> Bound:
        """A bound by coordinate, with coefficients for each segment; none for a norm, which needs all parts."""
        if limit.kind != "coordinate":
            return Bound(None)
        coefficients = {"constant": limit.constant, "slope": limit.slope}
        return Bound(limit.kind, steps=limit.steps, **self.hparams_by_segment(coefficients))

    def _of_segment(self, value: Any, s: Segment) -> Any:
        """A value that broadcasts against a tensor, as the part of it that belongs to a segment, on the CPU."""
        if not isinstance(value, Tensor):
            return value
        if not value.dim():
            return value.to("cpu")
        if s.tensor in self.sharded:
            value = local_part(value, self._params[s.tensor])
        return value.expand(self.shapes[s.tensor]).reshape(-1)[s.offset : s.offset + s.count].to("cpu")
