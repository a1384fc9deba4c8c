"""The ranks of one node that shard its parameters (FSDP2): what needs all of a node's shards.

Each rank exchanges its own shard with the same rank of the other nodes. Norms, the start of a round and verdicts are
those of the whole node, so the ranks of a node tell them each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tailopt.distributed.interfaces import blocking
from tailopt.distributed.layout import Layout
from tailopt.distributed.transport import Transport
from tailopt.rounds.block_norm import sequential_sum


class RankShards:
    """The shards of this node's ranks.

    Args:
        transport: reaches the ranks of this node.
        layout: of this rank's flat buffer.
        sharded: the tensors that are sharded; every rank has all of the others.
    """

    def __init__(self, transport: Transport, layout: Layout, sharded: set[int]) -> None:
        self.transport, self._sharded = transport, sharded
        sizes = blocking(transport.gather(torch.tensor(layout.sizes, dtype=torch.int64)))
        self._layouts = [Layout(tuple(row), layout.nodes) for row in sizes.tolist()]

    def elements_before(self, tensor: int) -> int | None:
        """How many elements of a tensor the ranks before this one have; None where every rank has all of it."""
        if tensor not in self._sharded:
            return None
        return sum(layout.sizes[tensor] for layout in self._layouts[: self.transport.node])

    def sum_over_ranks(self, sums_by_tensor: Sequence[float]) -> list[float]:
        """A sum for every tensor, from those of all ranks, added in rank order."""
        rows = blocking(self.transport.gather(torch.tensor(sums_by_tensor, dtype=torch.float64))).tolist()
        return [
            sequential_sum(column) if i in self._sharded else column[0]
            for i, column in enumerate(zip(*rows, strict=True))
        ]

    def gather(self, mine: Tensor) -> Tensor:
        """A small tensor of every rank, stacked in rank order."""
        return blocking(self.transport.gather(mine))

    def gather_parts(self, flat: Tensor) -> list[list[Tensor]]:
        """Every tensor of a flat buffer, as the parts of all ranks."""
        padded = flat.new_zeros(max(layout.total for layout in self._layouts))
        padded[: flat.numel()] = flat
        ranks = list(zip(self._layouts, blocking(self.transport.gather(padded)), strict=True))
        return [
            [
                row[layout.offsets[i] : layout.offsets[i] + layout.sizes[i]]
                for layout, row in (ranks if i in self._sharded else ranks[:1])
            ]
            for i in range(len(self._layouts[0].sizes))
        ]
