"""Where a node's batches come from: a function of (node, round, step, generator), or one dataset per node."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tailopt.records.tensor_bytes import tensor_bytes
from tailopt.seeds import generator
from tailopt.splits.loaders import NodeData, node_data


class BatchFunction(Protocol):
    """A function that a user may pass instead of datasets."""

    def __call__(self, node: int, round: int, step: int, generator: torch.Generator) -> Any:
        """Return the batch of a node's local step; all randomness must come from the generator."""


class BatchSource(Protocol):
    """What an engine asks for batches."""

    nodes: int
    not_repeatable_because: str  # empty where the same question always gets the same answer

    def samples(self) -> list[float] | None:
        """Return how many samples every node has, or None where that is not known."""

    def steps(self, node: int) -> int:
        """Return how many local steps a node takes in a round."""

    def batches(self, node: int, t: int, steps_done: int, steps: int) -> Iterator[Any]:
        """Return the batches of one round of a node that has taken `steps_done` local steps since the run began."""


class FunctionBatches:
    """Batches from a user's function."""

    not_repeatable_because = ""

    def __init__(self, function: BatchFunction, nodes: int, steps: int, seed: int) -> None:
        self.nodes, self._function, self._steps, self._seed = nodes, function, steps, seed

    def samples(self) -> list[float] | None:
        """Return None: a function does not tell how much data there is."""
        return None

    def steps(self, node: int) -> int:
        """Return the local steps of a round, the same for every node."""
        return self._steps

    def batches(self, node: int, t: int, steps_done: int, steps: int) -> Iterator[Any]:
        """Call the function once per step, each time with a new generator."""
        for step in range(steps):
            yield self._function(node, t, step, generator(self._seed, "batch", t, node, step))


class DatasetBatches:
    """Batches from datasets: a node continues through its shuffled data from round to round."""

    def __init__(
        self, data: Sequence[Any], steps: int | None, epochs: int | None, batch_size: int | None, seed: int
    ) -> None:
        self._data: list[NodeData] = node_data(data, seed, batch_size)
        self.nodes, self._steps, self._epochs = len(self._data), steps, epochs
        fixed = [node.node for node in self._data if not node.repeatable]
        self.not_repeatable_because = (
            f"the data of node {fixed[0]} has an order of its own (an IterableDataset, or a DataLoader with a sampler)"
            if fixed
            else ""
        )

    def samples(self) -> list[float] | None:
        """Return the sizes of the datasets."""
        sizes = [node.samples for node in self._data]
        return None if any(size is None for size in sizes) else [float(size or 0) for size in sizes]

    def steps(self, node: int) -> int:
        """Return the local steps of a round, or as many as the epochs of a round take."""
        return self._steps or (self._epochs or 1) * self._data[node].batches_per_pass

    def batches(self, node: int, t: int, steps_done: int, steps: int) -> Iterator[Any]:
        """Continue where the node left off."""
        return self._data[node].batches(steps_done, steps)


class OwnBatches:
    """Batches of one node on a machine that has only this node's data: those that `DatasetBatches` has for it.

    Args:
        data: a Dataset or DataLoader.
        node, nodes: its number, and how many nodes there are.
    """

    def __init__(self, data: Any, node: int, nodes: int, steps: int, batch_size: int | None, seed: int) -> None:
        self.nodes, self._steps = nodes, steps
        self._data = NodeData(data, node, seed, batch_size)
        self.not_repeatable_because = self._data.own_order or ""

    def samples(self) -> list[float] | None:
        """Return None: the sizes of the others are not known here."""
        return None

    def steps(self, node: int) -> int:
        """Return the local steps of a round, the same for every node."""
        return self._steps

    def batches(self, node: int, t: int, steps_done: int, steps: int) -> Iterator[Any]:
        """Continue where the node left off."""
        return self._data.batches(steps_done, steps)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device."""
    if isinstance(batch, Tensor):
        return batch if batch.device == device else batch.to(device, non_blocking=True)
    if type(batch) in (tuple, list):  # the usual case; the general walk takes ten times as long
        if device.type == "cpu":
            for part in batch:
                if type(part) is not Tensor or not part.is_cpu:
                    break
            else:
                return batch
        return type(batch)(to_device(part, device) for part in batch)
    return tree_map(lambda leaf: to_device(leaf, device) if isinstance(leaf, Tensor) else leaf, batch)


def batch_digest(batch: Any) -> str:
    """Return the SHA-256 of a batch: tensors and arrays by bytes, plain values by text, the rest by type."""
    digest = hashlib.sha256()
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            digest.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            if leaf.numel():
                plain = leaf.detach().to_dense() if leaf.layout != torch.strided else leaf.detach()
                plain = plain.cpu().resolve_conj().resolve_neg().contiguous()
                digest.update(tensor_bytes(plain))
        elif isinstance(leaf, str | int | float | bool | bytes | None):
            digest.update(repr(leaf).encode())
        elif hasattr(leaf, "__array_interface__") and not leaf.dtype.hasobject:  # numpy's
            digest.update(f"{leaf.dtype}{leaf.shape}".encode() + leaf.tobytes())
        else:
            digest.update(type(leaf).__qualname__.encode())
    return digest.hexdigest()


LossFunction = Callable[[torch.nn.Module, Any], Tensor]
