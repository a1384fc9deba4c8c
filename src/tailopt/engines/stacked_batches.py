"""The batches of many nodes: drawn as each node would draw them alone, and stacked where they have the same form."""

from __future__ import annotations

import random
import sys
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tailopt.engines.batches import BatchSource, to_device
from tailopt.engines.sequential import seed_python_and_numpy, seed_torch
from tailopt.seeds import derive_seed, step_seed

AHEAD = 16  # batches that are drawn for a node at once


class NodeBatches:
    """The batches of one node's round.

    Before its first batch Python's and numpy's generators are seeded for the node, and torch's before each, as when
    nodes run one after another: augmentations then draw the same numbers.
    """

    def __init__(self, source: BatchSource, node: int, t: int, steps_done: int, seed: int) -> None:
        self.node, self.steps_done, self.steps = node, steps_done, (steps := source.steps(node))
        self._iterator = iter(source.batches(node, t, steps_done, steps))
        self._seed = derive_seed(seed, "model", t, node)
        self.first_batch: Any = None  # as it was drawn, wherever the nodes compute
        self._drawn: list[Any] = []
        self._error: Exception | None = None  # of the batch after those that are drawn
        self._next_step = 0
        self._generators: tuple[Any, Any] | None = None

    def peek(self, device: torch.device) -> Any:
        """Return the next batch, which `next` returns again. Raises StopIteration where the data end."""
        if not self._drawn and self._error is None:
            self._draw(device)
        if not self._drawn:
            assert self._error is not None
            raise self._error
        return self._drawn[-1]

    def next(self, device: torch.device) -> Any:
        """Return the next batch."""
        batch = self.peek(device)
        self._drawn.pop()
        return batch

    def _draw(self, device: torch.device) -> None:
        numpy = sys.modules.get("numpy")
        if self._generators is None:
            seed_python_and_numpy(self._seed)
        else:
            random.setstate(self._generators[0])
            if numpy is not None and self._generators[1] is not None:
                numpy.random.set_state(self._generators[1])
        drawn = []
        for _ in range(min(AHEAD, self.steps - self._next_step)):
            seed_torch(step_seed(self._seed, self._next_step), device)
            try:
                batch = next(self._iterator)
                drawn.append(to_device(batch, device))
            except Exception as error:
                self._error = error
                break
            if self._next_step == 0:
                self.first_batch = batch
            self._next_step += 1
        if self._next_step < self.steps:
            self._generators = random.getstate(), None if numpy is None else numpy.random.get_state()
        self._drawn = drawn[::-1]


def signature(batch: Any) -> Hashable:
    """Return a key that is equal for batches which can be stacked: types, shapes, and everything that is no tensor."""
    if isinstance(batch, Tensor):
        return batch.dtype, batch.shape, batch.layout
    if type(batch) in (tuple, list) or (isinstance(batch, tuple) and hasattr(batch, "_fields")):
        return (type(batch), *map(signature, batch))
    if type(batch) is dict:
        return (dict, *((key, signature(value)) for key, value in batch.items()))
    if batch is None or type(batch) in (bool, int, float, str, bytes):
        return type(batch), batch
    return id(batch)  # nobody knows what it holds: this batch runs by itself


def stacked(batches: Sequence[Any]) -> Any:
    """Return batches of one signature as one, every tensor with a leading dimension."""
    first = batches[0]
    if type(first) in (tuple, list) and all(type(part) is Tensor for part in first):
        return type(first)(torch.stack(parts) for parts in zip(*batches, strict=True))
    leaves: Iterator[tuple[Any, ...]] = zip(*map(tree_leaves, batches), strict=True)

    def one(leaf: Any) -> Any:
        parts = next(leaves)
        return torch.stack(parts) if isinstance(leaf, Tensor) else leaf

    return tree_map(one, first)
