"""Thresholds that do nothing: BiClip looks at its gradients in a few steps, and warns once.

A tensor counts as idle where d < u, at least 99.9 % of the coordinates that its gradient moves are at or below d, and

    max(lr, initial_lr, max_lr) * d  <  1e-4 * RMS weight

Then every coordinate moves by lr * d whatever its gradient, and too little for the weights to change. `initial_lr` and
`max_lr` are what torch's schedulers write into a group: a warm-up from 0 is not idle.

On the CPU steps 1, 10, 100 and every 1,000th are checked. On a CUDA device it is steps 1 and 10, and nothing waits: the
numbers go to pinned memory behind an event, and a later step reads them when they have arrived. Other devices are not
checked. Nothing is sent between ranks: every rank sees its own shard.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from tailopt.clipping.counts import add, moved_and_raised
from tailopt.clipping.dtensor import is_dtensor
from tailopt.clipping.freed_storage import is_freed
from tailopt.clipping.kernels.kernel import PLAIN_TYPES, StepGroup
from tailopt.clipping.operators import Number, is_transformed, real_parts
from tailopt.clipping.reference import ClipByValue
from tailopt.native.clip import Counters

SHARE = 0.999  # of the coordinates that move
SMALL = 1e-4  # of the RMS weight
ON_DEVICE = (1, 10)  # steps that are checked if the numbers have to come from a device
WARMED_UP = ("initial_lr", "max_lr")  # where schedulers keep the learning rate that they warm up to


def warn_caller(text: str) -> None:
    """A UserWarning at the line outside torch and this library that called the step."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("torch", "tailopt"):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, UserWarning, stacklevel=level)


class Reading(NamedTuple):
    """What was seen of one tensor."""

    moved: float  # coordinates beyond the dead zone
    raised: float  # those of them at or below d
    weight: float  # RMS
    step_size: float  # lr * d, with the learning rate after a warm-up
    apart: float  # 1 where d < u everywhere

    @property
    def idle(self) -> bool:
        """Whether the thresholds do nothing for this tensor; a weight of RMS 0 has no scale to compare with."""
        lifted = self.moved > 0 and self.raised >= SHARE * self.moved
        return bool(self.apart) and lifted and 0 < self.step_size < SMALL * self.weight < math.inf


class Queued(NamedTuple):
    """Readings on their way from a device."""

    step: int
    names: list[str | int]
    arrived: Any  # the event after the copy
    rows: Tensor  # in pinned memory


class ThresholdCheck:
    """An optimizer's step counter, and the readings of the steps that are checked. Not a part of its state."""

    def __init__(self) -> None:
        self._steps = 0
        self._next = 1
        self._queued: list[Queued] = []
        self._read: list[tuple[int, str | int, Reading]] = []  # in this step, so far
        self._waiting: dict[torch.device, list[tuple[str | int, Tensor]]] = {}

    def due(self) -> bool:
        """Count a step; returns whether `look` has something to do in it."""
        self._steps += 1
        return self._steps == self._next or bool(self._queued)

    @_disable_dynamo  # a step that could not be traced as a whole runs as it is, with its parts traced
    def look(self, batches: Sequence[tuple[dict[str, Any], StepGroup]], names: Mapping[int, str | int]) -> None:
        """Look at the tensors of a step, or of a part of it, if it is one of the steps that are checked.

        names: of parameters, by id.
        """
        step = self._steps
        if step != self._next or _is_capturing():
            return
        for group, batch in batches:
            rate = _learning_rate(group)
            clip = ClipByValue(*(t.detach() if isinstance(t, Tensor) else t for t in batch.hparams.clip))
            for p, g in zip(batch.params, batch.grads, strict=True):
                parts = _visible(p, g, clip, rate)
                if parts is None:
                    continue
                if parts[0].is_cpu:
                    self._read.append((step, names[id(p)], _reading(*parts, clip, rate)))
                elif step in ON_DEVICE:
                    self._waiting.setdefault(parts[0].device, []).append((names[id(p)], _row(*parts, clip, rate)))

    @_disable_dynamo
    def report(self) -> None:
        """Warn at most once of what was seen in this step, and of readings that have arrived."""
        step, readings, waiting = self._steps, self._read, self._waiting
        self._read, self._waiting = [], {}
        if step == self._next:
            self._next = step * 10 if step < 1000 else step + 1000
        if _is_capturing():
            return  # neither a new kernel nor a question to an event may get into a graph
        readings = self._arrived() + readings
        for device, rows in waiting.items():
            self._queue(device, rows)
        idle = [seen for seen in readings if seen[2].idle]
        if idle:
            self._next, self._queued = 0, []  # once: if warnings are errors, the next step does not raise again
            warn_caller(_sentence(idle))

    def forget(self) -> None:
        """Take back that a step was counted, and what was seen in it."""
        self._steps -= 1
        self._read, self._waiting = [], {}

    def _queue(self, device: torch.device, rows: list[tuple[str | int, Tensor]]) -> None:
        with torch.cuda.device(device):
            stacked = torch.stack([row for _, row in rows])
            host = torch.empty(stacked.shape, dtype=stacked.dtype, device="cpu", pin_memory=True)
            host.copy_(stacked, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self._queued.append(Queued(self._steps, [name for name, _ in rows], arrived, host))

    def _arrived(self) -> list[tuple[int, str | int, Reading]]:
        readings = []
        for queued in [q for q in self._queued if q.arrived.query()]:
            self._queued = [q for q in self._queued if q is not queued]
            rows = zip(queued.names, queued.rows.tolist(), strict=True)
            readings += [(queued.step, name, Reading(*row)) for name, row in rows]
        return readings


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _sentence(idle: Sequence[tuple[int, str | int, Reading]]) -> str:
    step, name, first = idle[0]
    others = f" and {len(idle) - 1} more" if len(idle) > 1 else ""
    share = first.raised / first.moved
    return (
        f"BiClip's thresholds do nothing for tensor {name!r}{others}: in step {step}, {share:.1%} of its nonzero "
        f"gradient coordinates are at or below d and are raised to it, and the step lr*d = {first.step_size:.3g} is "
        f"less than {SMALL:g} of the RMS weight {first.weight:.3g}. Raise lr, or lower u and d to the scale of your "
        "gradients, which opt.statistics() shows with statistics=True."
    )


def _visible(p: Tensor, g: Tensor, clip: ClipByValue, rate: Number) -> tuple[Tensor, Tensor] | None:
    """This rank's part of both where it can be looked at; None where that would fail, wait or be sent."""
    wide = any(isinstance(t, Tensor) and t.ndim for t in clip)
    if is_dtensor(p):
        if not is_dtensor(g) or g.placements != p.placements or wide:
            return None
        p, g = p.to_local(), g.to_local()
    if type(p) not in PLAIN_TYPES or type(g) not in PLAIN_TYPES or is_transformed(p) or is_transformed(g):
        return None
    if p.device.type not in ("cpu", "cuda") or g.device != p.device or (wide and (g.is_sparse or g.is_complex())):
        return None
    if g.layout not in (torch.strided, torch.sparse_coo) or not p.numel() or is_freed(p) or is_freed(g):
        return None
    if any(isinstance(t, Tensor) and t.device != p.device and not t.is_cpu for t in (rate, *clip)):
        return None  # a number on another device would have to be waited for
    return p.detach(), g.detach()


def _reading(p: Tensor, g: Tensor, clip: ClipByValue, rate: Number) -> Reading:
    """On the CPU, by the kernels that count."""
    if any(isinstance(t, Tensor) and t.numel() != 1 for t in clip):
        return Reading(*_row(p, g, clip, rate).tolist())
    u, d, dead = (float(t) for t in clip)
    counters = Counters.empty(1, device=g.device)
    add([g], [0], (u, d, dead), counters)
    elements, zero, raised = counters.integers[0, :3].tolist()
    return Reading(elements - zero, raised, float(_rms(p)), float(rate) * d, d < u)


def _row(p: Tensor, g: Tensor, clip: ClipByValue, rate: Number) -> Tensor:
    """The same five numbers as a tensor on p's device, without waiting for it."""
    counted = torch.stack(moved_and_raised(g, clip.d, clip.dead_zone)).double()
    return torch.cat([counted, _rms(p).double().reshape(1), _step_size_and_apart(p.device, clip, rate)])


def _step_size_and_apart(device: torch.device, clip: ClipByValue, rate: Number) -> Tensor:
    if not any(isinstance(t, Tensor) for t in (rate, clip.u, clip.d)):
        numbers = torch.full((2,), float(rate) * float(clip.d), dtype=torch.float64, device=device)
        numbers[1].fill_(clip.d < clip.u)
        return numbers

    def on_device(value: Number) -> Tensor:
        if isinstance(value, Tensor) and value.device == device:
            return value.double()
        return torch.full((), float(value), dtype=torch.float64, device=device)

    u, d = on_device(clip.u), on_device(clip.d)
    return torch.stack([(on_device(rate) * d).amax(), (d < u).all().double()])


def _rms(p: Tensor) -> Tensor:
    parts = real_parts(p)
    kind = torch.float64 if parts.dtype == torch.float64 else torch.float32
    if parts.dtype.itemsize == 1:  # torch promotes no float8
        parts = parts.to(kind)
    norm: Tensor = torch.linalg.vector_norm(parts, dtype=kind)
    return norm / math.sqrt(parts.numel())


def _learning_rate(group: dict[str, Any]) -> Number:
    """The group's learning rate, or the one that a scheduler warms up to where that is larger."""
    rates: list[Number] = [group["lr"]]
    for key in WARMED_UP:
        value = group.get(key)
        if isinstance(value, Tensor) and value.numel() == 1 or isinstance(value, int | float):
            rates.append(value)
    return _largest(rates)


def _largest(rates: Iterable[Number]) -> Number:
    tensors = [rate.detach().reshape(()) for rate in rates if isinstance(rate, Tensor)]
    numbers = [float(rate) for rate in rates if not isinstance(rate, Tensor)]
    if not tensors:
        return max(numbers)
    top = torch.stack([t.to(tensors[0]) for t in tensors]).amax()
    return top.clamp(min=max(numbers)) if numbers else top
