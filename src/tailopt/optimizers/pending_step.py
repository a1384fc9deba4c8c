"""A step between the first gradient of its backward pass and `optimizer.step()`: its buckets, and its passes.

Backward passes are told apart by the number that torch gives to each, which grows. A pass that a node of another one
starts, as checkpointing with use_reentrant=True does, has a number of its own and belongs to that other one.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from tailopt.clipping.dtensor import is_dtensor
from tailopt.optimizers.clipping_optimizer import ClippingOptimizer
from tailopt.optimizers.step_in_parts import StepInParts

NODES_IN_PYTHON = {BackwardCFunction.apply.__code__, BackwardCFunction.apply_boxed.__code__}


class PendingStep:
    """A step between the first gradient of its backward pass and `optimizer.step()`."""

    def __init__(self, optimizer: ClippingOptimizer) -> None:
        self.parts = StepInParts(optimizer)
        self.buckets: dict[torch.device, Bucket] = {}
        self.released: dict[int, Tensor] = {}  # by id, those whose gradient was taken
        self.updated = 0
        self.backwards: set[int] = set()  # torch's numbers of the passes that it belongs to
        self.running: set[int] = set()  # those that have not ended; a pass that raises never does
        self._began_nested = False

    def belongs(self, backward: int) -> bool:
        """Whether a gradient of this pass belongs to this step: one that encloses another has the smaller number."""
        if backward in self.backwards or _is_nested():
            return True
        return self._began_nested and backward < min(self.backwards)

    def join(self, backward: int) -> None:
        """Note a pass whose first gradient has come; called inside of it."""
        if backward not in self.backwards:
            self._began_nested |= not self.backwards and _is_nested()
            self.backwards.add(backward)
            self.running.add(backward)
            ended = functools.partial(self.running.discard, backward)
            torch.autograd.Variable._execution_engine.queue_callback(ended)

    def add(self, p: Tensor, g: Tensor, bucket_bytes: int) -> None:
        """Take over a gradient; use it, with others, where its bucket is full."""
        self.released[id(p)] = p
        bucket = self.buckets.setdefault(p.device, Bucket(p.device))
        bucket.add(p, g)
        if bucket.bytes >= bucket_bytes:
            bucket.use(self.take)

    def take(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Update these parameters."""
        if not pairs:
            return
        with _without_autocast(pairs[0][0].device.type):
            self.parts.take(pairs)
        self.updated += len(pairs)

    def take_rest(self) -> None:
        """Update what is in the buckets."""
        for bucket in self.buckets.values():
            bucket.use(self.take)


class Bucket:
    """Gradients of one device that are complete and not used yet."""

    def __init__(self, device: torch.device) -> None:
        self.bytes = 0
        self._device = device
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._streams: set[torch.cuda.Stream] = set()  # that computed them

    def add(self, p: Tensor, g: Tensor) -> None:
        """Put in the gradient of a parameter."""
        # of a sharded parameter an equal share, so that all ranks empty their buckets at the same parameters: a step
        # may have to talk to the others
        ranks = p.device_mesh.size() if is_dtensor(p) else 1
        self.bytes += p.numel() * p.element_size() // ranks
        self._pairs.append((p, g))
        if p.is_cuda:
            self._streams.add(torch.cuda.current_stream(self._device))

    def use(self, take: Callable[[list[tuple[Tensor, Tensor]]], None]) -> None:
        """Take everything out, and pass it on, on the current stream."""
        pairs, self._pairs, self.bytes = self._pairs, [], 0
        streams, self._streams = self._streams, set()
        if streams:
            now = torch.cuda.current_stream(self._device)
            streams.discard(now)
            for stream in streams:
                now.wait_stream(stream)
        take(pairs)
        for stream in streams:
            stream.wait_stream(now)  # which gets the memory of the gradients back


def _without_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """A backward pass may run inside autocast, which is not for the arithmetic of a step."""
    if not torch.amp.is_autocast_available(device_type):
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)


def _is_nested() -> bool:
    """Whether the running backward pass was started by a node of another one: seen in the calls of this thread."""
    frame: FrameType | None = sys._getframe()
    in_backward = False
    while frame is not None:
        if frame.f_code is torch.autograd.backward.__code__:
            in_backward = True
        elif in_backward and frame.f_code in NODES_IN_PYTHON:
            return True
        frame = frame.f_back
    return False
