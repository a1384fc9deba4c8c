"""What a kernel is, what it takes, and what kernels ask about tensors and hyperparameters.

A kernel is a function of groups (parameters, gradients, one `StepHyperparameters`) that changes the parameters in place
and gives the bits of `reference.step`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tailopt.clipping.counts import is_gap_free
from tailopt.clipping.operators import Number
from tailopt.clipping.reference import ClipByValue, StepHyperparameters
from tailopt.native.clip import NO_MOMENTUM

PLAIN_TYPES = {Tensor, torch.nn.Parameter}


class StepGroup(NamedTuple):
    """Parameters that step with the same hyperparameters.

    Args:
        params: the parameters.
        grads: their gradients.
        hparams: the hyperparameters of the step.
        slots: the number of each of them in its optimizer, for statistics and stochastic rounding.
        momenta: m of each parameter, where the step has momentum.
        step_counts: how many steps m of each parameter has taken, as 0-dim tensors that the caller adds to.
        corrections: 1 - beta^k of each parameter, where only the device knows k; else it is in `hparams`.
        skips: a bool for each parameter, on its device: true where it, its m and its count stay as they are.
        blank: whether the parameters hold nothing yet; they step as if they were -0, and hold -lr * clip(g) then.
    """

    params: list[Tensor]
    grads: list[Tensor]
    hparams: StepHyperparameters
    slots: Sequence[int] = ()
    momenta: Sequence[Tensor] = ()
    step_counts: Sequence[Tensor] = ()
    corrections: Sequence[Tensor] = ()
    skips: Tensor | None = None
    blank: bool = False

    def only(self, positions: Sequence[int]) -> StepGroup:
        """Return the group with the parameters at these positions."""

        def some(values: Sequence[Any]) -> list[Any]:
            return [values[i] for i in positions] if values else []

        tensors = some(self.params), some(self.grads)
        rest = some(self.slots), some(self.momenta), some(self.step_counts), some(self.corrections)
        skips = self.skips if self.skips is None else torch.stack([self.skips[i] for i in positions])
        return StepGroup(*tensors, self.hparams, *rest, skips, self.blank)


@dataclass(frozen=True)
class Kernel:
    """One implementation of the step.

    run changes parameters in place; refuses(p, g, hparams) is empty, or the reason why the kernel cannot take them.
    """

    name: str
    run: Callable[[Sequence[StepGroup]], None]
    refuses: Callable[[Tensor, Tensor, StepHyperparameters], str]


def joined(groups: Sequence[StepGroup]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """All parameters, gradients and momenta; the lists themselves if there is only one group."""
    if len(groups) == 1:
        return groups[0].params, groups[0].grads, list(groups[0].momenta)
    params, grads = [p for group in groups for p in group.params], [g for group in groups for g in group.grads]
    return params, grads, [m for group in groups for m in group.momenta]


def is_scalar(hparams: StepHyperparameters) -> bool:
    """Whether all hyperparameters can be read without waiting: none is a tensor with dimensions or on a device."""
    numbers = (hparams.lr, *hparams.clip, *(hparams.momentum or ()))
    return all(not isinstance(t, Tensor) or (t.numel() == 1 and t.is_cpu) for t in numbers)


def has_dimensions(hparams: StepHyperparameters) -> bool:
    """Whether a threshold is a tensor that broadcasts against the parameter."""
    return any(isinstance(t, Tensor) and t.ndim for t in hparams.clip)


def as_float(value: Number) -> float:
    """A number's value; 0 for a tensor with dimensions or on a device, which is not read."""
    return float(value) if not isinstance(value, Tensor) or (value.numel() == 1 and value.is_cpu) else 0.0


def refuses_flat(p: Tensor, g: Tensor, hparams: StepHyperparameters) -> str:
    """Why two tensors cannot be walked through memory side by side with scalar thresholds."""
    if type(p) not in PLAIN_TYPES or type(g) not in PLAIN_TYPES:
        return f"it takes plain tensors, not {type(p).__name__} with {type(g).__name__}"
    if g.layout != torch.strided:
        return "the gradient is sparse"
    if not (p.is_cpu and g.is_cpu):
        return f"it runs on the CPU, not on {p.device}"
    if not p.is_floating_point():
        return f"it takes floating types, not {p.dtype}"
    if not is_scalar(hparams):
        return "thresholds or lr are tensors with dimensions, or not on the CPU"
    if hparams.rounding is not None and p.dtype == torch.bfloat16:
        return "it rounds to the nearest"
    if p.stride() != g.stride() or p.shape != g.shape or not (is_gap_free(p) and is_gap_free(g)):
        return "parameter and gradient lie differently in memory, have gaps, or are lazily negated"
    return ""


def table_row(hparams: StepHyperparameters, dtype: torch.dtype) -> tuple[float, ...]:
    """One row of the step table that the C code takes: the hyperparameters, in the order of `Row` in clip.c."""
    clip = tuple(map(float, hparams.clip))
    clip_numbers = (clip + (1.0, 1.0, 1.0)) if isinstance(hparams.clip, ClipByValue) else ((math.inf, 0.0, 0.0) + clip)
    decay = float(hparams.decay(dtype)) if hparams.weight_decay else 1.0
    if hparams.momentum is None:
        return (-float(hparams.lr), decay, float(hparams.maximize), *clip_numbers, *NO_MOMENTUM)
    beta, correction, _ = hparams.momentum
    limit = float(hparams.gradient_limit(dtype))
    return (-float(hparams.lr), decay, float(hparams.maximize), *clip_numbers, beta, 1 - beta, limit, float(correction))


def on_device(hparams: StepHyperparameters, device: torch.device, dtype: torch.dtype) -> StepHyperparameters:
    """The hyperparameters where they are used: CPU scalars as numbers (nothing waits for those), others moved."""

    def ready(value: Number) -> Number:
        if not isinstance(value, Tensor):
            # rounded to the type of the arithmetic; torch's operations refuse what is beyond its range
            return math.copysign(math.inf, value) if abs(value) > torch.finfo(dtype).max else value
        if value.ndim and value.numel() == 1:
            value = value.reshape(())
        if (
            value.is_cpu
            and not value.ndim
            and device.type != "cpu"
            and not value.requires_grad
            and not torch.compiler.is_compiling()
        ):
            return float(value)
        return value.to(device=device, dtype=dtype)

    clip = type(hparams.clip)(*map(ready, hparams.clip))
    return hparams._replace(clip=clip, lr=ready(hparams.lr))
