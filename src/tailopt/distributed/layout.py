"""Where the tensors of a model lie in one flat buffer, and which partition of it each node reduces.

A partition is a contiguous range of the flat buffer. Norms are summed over blocks of a tensor, and a partition begins
only where such a block begins. So the bits of a round do not depend on how many nodes there are, nor on which node
reduces what.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from tailopt.rounds.block_norm import BLOCK

ALIGNMENT = 16  # elements: a cache line of fp32, and an even count, so that checksums can read pairs


@dataclass(frozen=True)
class Segment:
    """The part of one tensor that lies in one partition.

    Args:
        tensor: the number of the tensor.
        offset: where the segment begins in the tensor.
        start, stop: where it begins and ends in the flat buffer.
        node: the node that reduces it.
    """

    tensor: int
    offset: int
    start: int
    stop: int
    node: int

    @property
    def count(self) -> int:
        """The number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """Where tensors lie in the flat buffer, and which partition of it each node reduces.

    Args:
        sizes: elements of every tensor.
        nodes: how many nodes share the work.

    Attributes:
        offsets: where each tensor begins.
        total: elements of the flat buffer, with the padding between tensors.
        cuts: node k reduces cuts[k] to cuts[k + 1].
    """

    sizes: tuple[int, ...]
    nodes: int
    offsets: tuple[int, ...] = field(init=False)
    total: int = field(init=False)
    cuts: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in self.sizes]
        ends = list(accumulate(padded, initial=0))
        object.__setattr__(self, "offsets", tuple(ends[:-1]))
        object.__setattr__(self, "total", ends[-1])
        # a cut may lie where a block of a tensor begins
        starts = [o + k for o, size in zip(ends[:-1], self.sizes, strict=True) for k in range(0, max(size, 1), BLOCK)]
        starts = sorted({*starts, ends[-1]})
        cuts = [0]
        for k in range(1, self.nodes):
            even = self.total * k / self.nodes
            i = bisect.bisect_left(starts, self.total * k // self.nodes)
            nearest = min(starts[max(i - 1, 0) : i + 1], key=lambda start, even=even: abs(start - even))  # type: ignore[misc]
            cuts.append(max(cuts[-1], nearest))
        object.__setattr__(self, "cuts", (*cuts, self.total))

    def partition(self, node: int) -> slice:
        """The range of the flat buffer that a node reduces."""
        return slice(self.cuts[node], self.cuts[node + 1])

    def segments(self, node: int) -> list[Segment]:
        """The partition of a node by tensor, without the padding."""
        low, high = self.cuts[node], self.cuts[node + 1]
        segments = []
        for i, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            start, stop = max(low, offset), min(high, offset + size)
            if start < stop:
                segments.append(Segment(i, start - offset, start, stop, node))
        return segments

    def padding(self, node: int) -> list[slice]:
        """The ranges of the flat buffer in a node's partition that belong to no tensor."""
        ends = [self.cuts[node], *(s.stop for s in self.segments(node))]
        starts = [*(s.start for s in self.segments(node)), self.cuts[node + 1]]
        return [slice(end, start) for end, start in zip(ends, starts, strict=True) if end < start]

    def views(self, flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
        """The tensors inside a flat buffer."""
        rows = zip(self.offsets, self.sizes, shapes, strict=True)
        return [flat[offset : offset + size].view(shape) for offset, size, shape in rows]
