"""What a round shows to thresholds that are "auto": counts of elements by tensor, or norms.

    inside     of the gradients that a node's local steps clipped (with momentum: of their mean)
    outside    of the mean displacement

A node's statistics are one small tensor, `packed`, which real nodes send to each other; `unpacked` reads it. Both are
exact, so that a simulation and real nodes have the same bits. Statistics of a mean displacement do not depend on how it
is cut into partitions: every element enters the histogram, and squares are added up by fixed blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from tailopt.clipping.counts import STRIDE, Counts, add, read
from tailopt.clipping.operators import real_parts
from tailopt.native.clip import BINS, Counters
from tailopt.rounds.block_norm import norm, sum_of_squares
from tailopt.rules.rule import ParamState
from tailopt.thresholds import Norms, Statistics

Kind = Literal["elements", "norm", "tensor norms"]  # of every tensor; one norm over all; one of every tensor

_UNBOUNDED = (float("inf"), 0.0, 0.0)  # thresholds of the counting pass: quantiles need none
_WORDS = 7 + 2 * BINS
_NO_STEP = -1.0  # in place of a norm: real nodes send as many rows, also where one took fewer steps


class GradientRecorder:
    """Records what one node's local steps clip.

    Args:
        kind: what is recorded.
        n_params: how many parameters there are.

    Examples:
        >>> recorder = GradientRecorder("norm", n_params=2)
        >>> recorder.add([0, 1], [torch.tensor([3.0]), torch.tensor([4.0])], steps_done=0)
        >>> recorder.statistics()
        [Norms(values=(5.0,))]
    """

    def __init__(self, kind: Kind, n_params: int) -> None:
        self.kind, self._n_params = kind, n_params
        self._counters: dict[torch.device, Counters] = {}
        self._norms: list[list[float]] = []  # by step
        self._before: Tensor | None = None  # what a checkpoint had recorded of this round

    def add(self, positions: Sequence[int], clipped: Sequence[Tensor], steps_done: int) -> None:
        """Record one local step.

        Args:
            positions: of the tensors that stepped.
            clipped: their gradients, or the means of gradients that the step clipped.
            steps_done: local steps of the node before this one, over the whole run: the sample of large tensors moves
                with it.
        """
        dense = [real_parts(g) if g.is_sparse or g.is_complex() else g for g in clipped]
        if self.kind != "elements":
            lengths = [norm([g]) for g in dense] if self.kind == "tensor norms" else [norm(dense)]
            self.add_norms(positions, lengths)
            return
        by_device: dict[torch.device, list[int]] = {}
        for i, g in enumerate(dense):
            by_device.setdefault(g.device, []).append(i)
        for device, chosen in by_device.items():
            if device not in self._counters:
                self._counters[device] = self._begun(device)
            counters = self._counters[device]
            counters.sample_offset = steps_done % STRIDE
            add([dense[i] for i in chosen], [positions[i] for i in chosen], _UNBOUNDED, counters)

    def _begun(self, device: torch.device) -> Counters:
        """Counters that continue from a checkpoint, if there was one: sums go on in the order of the steps."""
        if self._before is None:
            return Counters.empty(self._n_params, histogram=True, device=device)
        table, bins, logs = (part.contiguous() for part in self._before.to(device).split([7, BINS, BINS], -1))
        self._before = None
        return Counters(table, bins, logs)

    def add_norms(self, positions: Sequence[int], lengths: Sequence[float]) -> None:
        """Record the norms of one local step: one over all tensors, or one of every tensor that stepped."""
        if self.kind == "norm":
            self._norms.append(list(lengths))
        else:
            known = dict(zip(positions, lengths, strict=True))
            self._norms.append([known.get(i, 0.0) for i in range(self._n_params)])

    def packed(self, steps: int = 0) -> Tensor:
        """Everything that was recorded, on the CPU; waits for the device.

        steps: rows of norms that real nodes send, whatever the number of steps that each of them took.
        """
        if self.kind == "elements":
            tables = [_packed(counters).cpu() for counters in self._counters.values()]
            tables += [] if self._before is None else [self._before]
            return added(torch.stack([*tables, torch.zeros(self._n_params, _WORDS, dtype=torch.int64)]))
        columns = self._n_params if self.kind == "tensor norms" else 1
        rows = [torch.tensor(row, dtype=torch.float64) for row in self._norms]
        rows = [*([] if self._before is None else self._before), *rows]
        missing = torch.full((max(steps - len(rows), 0), columns), _NO_STEP, dtype=torch.float64)
        return torch.cat([torch.stack(rows), missing]) if rows else missing

    def load(self, packed: Tensor) -> None:
        """Continue from what a checkpoint in the middle of a round has as `packed`."""
        self._before = packed

    def statistics(self) -> list[Statistics]:
        """Everything that was recorded, as the rules of thresholds take it."""
        return unpacked(self.packed(), self.kind)


def unpacked(packed: Tensor, kind: Kind) -> list[Statistics]:
    """Read the statistics of one node."""
    if kind == "elements":
        table, bins, logs = packed.split([7, BINS, BINS], -1)
        return [*read(Counters(table.contiguous(), bins, logs))]
    return [Norms(tuple(x for x in column if x != _NO_STEP)) for column in packed.T.tolist()]


def over_ranks(packed: Tensor, kind: Kind, sharded: Sequence[int]) -> Tensor:
    """The statistics of a node from those of its ranks, stacked; what is not sharded is the same on all of them."""
    result = packed[0].clone()
    if kind == "elements" and sharded:
        result[list(sharded)] = added(packed[:, list(sharded)])
    return result


def clipped_by_step(grads: Sequence[Tensor], states: Sequence[ParamState], momentum: float) -> list[Tensor]:
    """What a step of a rule clipped: the gradients, or with momentum their means, from the states after the step."""
    if not momentum:
        return list(grads)
    return [state["momentum_buffer"] / (1 - momentum ** state["step"]) for state in states]


def counters_of_parts(parts: Sequence[Tensor], slots: Sequence[int], n_params: int) -> Tensor:
    """Packed counts of parts of a mean displacement, each in the row of its tensor; squares are left out."""
    by_device: dict[torch.device, list[int]] = {}
    for i, part in enumerate(parts):
        by_device.setdefault(part.device, []).append(i)
    packed = torch.zeros(n_params, _WORDS, dtype=torch.int64)
    for device, chosen in by_device.items():
        counters = Counters.empty(n_params, histogram=True, device=device)
        add([parts[i] for i in chosen], [slots[i] for i in chosen], _UNBOUNDED, counters)
        counters.reals[:, 0] = 0.0
        packed = packed + _packed(counters).cpu()
    return packed


def counts_of_displacement(packed_parts: Tensor, squares: Sequence[float]) -> list[Statistics]:
    """The counts of a mean displacement: packed counts of its partitions, stacked, and the sum of squares by tensor."""
    counts = unpacked(added(packed_parts), "elements")
    return [replace(c, squares=s) for c, s in zip(counts, squares, strict=True) if isinstance(c, Counts)]


def statistics_of_displacement(delta: Sequence[Tensor], kind: Kind) -> list[Statistics]:
    """The statistics of a whole mean displacement.

    Examples:
        >>> [counts] = statistics_of_displacement([torch.tensor([0.5, 0.0, -2.0])], "elements")
        >>> counts.elements, counts.zero, counts.squares, counts.largest
        (3, 1, 4.25, 2.0)
    """
    if kind == "elements":
        packed = counters_of_parts(delta, range(len(delta)), len(delta))
        return counts_of_displacement(packed[None], [sum_of_squares(d) for d in delta])
    return [Norms((norm([d]),)) for d in delta] if kind == "tensor norms" else [Norms((norm(delta),))]


def _packed(counters: Counters) -> Tensor:
    assert counters.bins is not None
    assert counters.logs is not None
    return torch.cat([counters.table, counters.bins, counters.logs], -1)


def added(stacked: Tensor) -> Tensor:
    """Packed counts added up along the first dimension, in its order."""
    total = torch.sum(stacked, 0)
    squares, largest = stacked.view(torch.float64)[..., 5:7].unbind(-1)
    reals = total.view(torch.float64)
    reals[..., 5] = torch.stack([*squares]).cumsum(0)[-1]  # one after another, on any machine
    reals[..., 6] = largest.amax(0)
    return total
