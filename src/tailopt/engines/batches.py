"""Where a node's batches come from: a function of (node, round, step, generator), or one Dataset a node."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tailopt.seeds import generator
from tailopt.splits.loaders import NodeData, node_data


class BatchFunction(Protocol):
    """What a user may give instead of data sets."""

    def __call__(self, node: int, round: int, step: int, generator: torch.Generator) -> Any:
        """The batch of a node's local step. Repeatable: all randomness comes from the generator."""


class Source(Protocol):
    """What an engine asks for batches."""

    nodes: int
    repeatable: str  # empty, or why the same question would get another answer

    def samples(self) -> list[float] | None:
        """How many samples every node has, where that is known."""

    def steps(self, node: int) -> int:
        """How many local steps a node takes in a round."""

    def batches(self, node: int, t: int, taken: int, steps: int) -> Iterator[Any]:
        """The batches of a node's round; `taken`: local steps it has taken before."""


class FromFunction:
    """Batches by a user's function."""

    repeatable = ""

    def __init__(self, function: BatchFunction, nodes: int, steps: int, seed: int) -> None:
        self.nodes, self._function, self._steps, self._seed = nodes, function, steps, seed

    def samples(self) -> list[float] | None:
        """Nobody knows."""
        return None

    def steps(self, node: int) -> int:
        """The same for every node."""
        return self._steps

    def batches(self, node: int, t: int, taken: int, steps: int) -> Iterator[Any]:
        """One call a step, each with a generator of its own."""
        for step in range(steps):
            yield self._function(node, t, step, generator(self._seed, "batch", t, node, step))


class FromData:
    """Batches from data sets: a node goes on through its shuffled shard from round to round."""

    def __init__(
        self, data: Sequence[Any], steps: int | None, epochs: int | None, batch_size: int | None, seed: int
    ) -> None:
        self._data: list[NodeData] = node_data(data, seed, batch_size)
        self.nodes, self._steps, self._epochs = len(self._data), steps, epochs
        fixed = [node.node for node in self._data if not node.repeatable]
        self.repeatable = (
            f"the data of node {fixed[0]} has an order of its own (an IterableDataset, or a DataLoader with a sampler)"
            if fixed
            else ""
        )

    def samples(self) -> list[float] | None:
        """The sizes of the data sets."""
        sizes = [node.samples for node in self._data]
        return None if any(size is None for size in sizes) else [float(size or 0) for size in sizes]

    def steps(self, node: int) -> int:
        """As asked for, or as many as whole passes take."""
        return self._steps or (self._epochs or 1) * self._data[node].batches_per_pass

    def batches(self, node: int, t: int, taken: int, steps: int) -> Iterator[Any]:
        """Where the node left off."""
        return self._data[node].batches(taken, steps)


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on a device."""
    if isinstance(batch, Tensor):
        return batch if batch.device == device else batch.to(device, non_blocking=True)
    if type(batch) in (tuple, list):  # what most data sets give; the general walk takes ten times as long
        return type(batch)(to_device(part, device) for part in batch)
    return tree_map(lambda leaf: to_device(leaf, device) if isinstance(leaf, Tensor) else leaf, batch)


def batch_digest(batch: Any) -> str:
    """SHA-256 of a batch: tensors and arrays by their bytes, plain values by their text, the rest by type."""
    found = hashlib.sha256()
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            found.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            if leaf.numel():
                plain = leaf.detach().to_dense() if leaf.layout != torch.strided else leaf.detach()
                plain = plain.cpu().resolve_conj().resolve_neg().contiguous()
                found.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, str | int | float | bool | bytes | None):
            found.update(repr(leaf).encode())
        elif hasattr(leaf, "__array_interface__") and not leaf.dtype.hasobject:  # numpy's
            found.update(f"{leaf.dtype}{leaf.shape}".encode() + leaf.tobytes())
        else:
            found.update(type(leaf).__qualname__.encode())
    return found.hexdigest()


LossFunction = Callable[[torch.nn.Module, Any], Tensor]
