"""BiClip as a torch optimizer: every coordinate clipped from both sides, no state, the memory of SGD."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from tailopt.clipping.counts import StatisticsRecorder
from tailopt.clipping.dispatch import update
from tailopt.clipping.dtensor import local_pair
from tailopt.clipping.kernels.kernel import StepGroup
from tailopt.clipping.norms import auto_dead_zone, largest
from tailopt.clipping.operators import Number, compute_dtype
from tailopt.clipping.reference import ClipByValue, Step
from tailopt.clipping.step_cache import StepCache
from tailopt.optimizers.clipping_optimizer import ClippingOptimizer, Gathered, Group, GroupAndStep, ScopeOf
from tailopt.optimizers.threshold_warning import ThresholdCheck


class BiClip(ClippingOptimizer):
    """Clip every coordinate of the gradient to a magnitude between d and u, then descend.

        p <- p * (1 - lr * weight_decay) - lr * sign(g) * min(max(|g|, d), u)

    One step moves a coordinate by at least lr * d and at most lr * u, whatever the gradient's tail; a zero gradient
    moves nothing. No state is kept: memory is that of SGD without momentum. Computed in fp32 for fp32, bf16 and fp16,
    in fp64 for fp64, with one fused multiply-add and one rounding at the store.

    Thresholds that do nothing are warned of, once: where at least 99.9 % of a tensor's nonzero gradient coordinates are
    at or below d < u, and lr * d is below 1e-4 of its RMS weight. That is looked at in steps 1, 10, 100 and every
    1,000th on the CPU, in steps 1 and 10 on a CUDA device, and neither in compiled nor in captured steps. So is
    lr * weight_decay >= 1.

    Args:
        params: parameters, named parameters or groups, each with its own values of what follows.
        lr: learning rate, a number or a 1-element tensor.
        u: upper threshold, a number or a tensor: 0-dim, or one that broadcasts against the parameters of its group
            (row- and column-wise thresholds).
        d: lower threshold, 0 <= d <= u, likewise.
        weight_decay: decoupled, as in AdamW.
        dead_zone: coordinates with |g| <= dead_zone stay unmoved. "auto": 4 * eps * max|g| over all parameters, for
            those whose true gradient is zero (a bias before BatchNorm), where d would make a full step of rounding
            noise; it costs a read of the gradients. It does not cure gradients computed wholly in bf16.
        nonfinite: what a NaN or infinity in a gradient does. "propagate" (free): NaN goes into the parameter, an
            infinity counts as u. "skip": that tensor is left as it is and counted; "raise": FloatingPointError before
            anything moved. Both cost a read of the gradients; "raise" waits for the device, "skip" on a GPU copies the
            parameters.
        statistics: count in the same pass: "counts" (thresholds hit, sum of squares, maximum), True (with a sampled
            histogram), "complete" (a histogram of every element, several times slower). See `statistics()`.
        maximize, foreach, capturable, differentiable, fused: as in torch. Without any of them the fastest kernel is
            taken. `fused=True` (CPU) also takes the unscaling over from GradScaler.

    Examples:
        >>> w = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
        >>> opt = BiClip([w], lr=0.1, u=1.0, d=0.5)
        >>> (w * torch.tensor([100.0, 0.001])).sum().backward()
        >>> opt.step()
        >>> w.data
        tensor([0.9000, 0.9500])
    """

    optional = {**ClippingOptimizer.optional, "dead_zone": 0.0}
    not_counted = (
        "Nothing was counted: this BiClip was built with statistics=False. Build it with statistics=True (or "
        '"counts", or "complete"), or count given gradients with tailopt.count.'
    )

    def __init__(
        self,
        params: Any,
        lr: Number = 1e-2,
        u: Number = 1.0,
        d: Number = 1e-2,
        *,
        weight_decay: float = 0.0,
        dead_zone: float | str = 0.0,
        nonfinite: str = "propagate",
        statistics: bool | str = False,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        defaults: Group = {"lr": lr, "u": u, "d": d, "weight_decay": weight_decay}
        defaults |= {"dead_zone": dead_zone, "nonfinite": nonfinite, "maximize": maximize, "foreach": foreach}
        defaults |= {"capturable": capturable, "differentiable": differentiable, "fused": fused}
        super().__init__(params, defaults, statistics)

    def _init_runtime(self) -> None:
        super()._init_runtime()
        self._threshold_check = ThresholdCheck()

    def lower_thresholds(self, group: Group) -> list[tuple[str, Number]]:
        """Return the settings of a group that must not exceed u: d, and a dead zone that is a number."""
        dead_zone = group["dead_zone"]
        if isinstance(dead_zone, str) and dead_zone != "auto":
            raise ValueError(f'Invalid dead_zone: {dead_zone!r}; need a number with 0 <= dead_zone <= u, or "auto".')
        return super().lower_thresholds(group) + ([] if isinstance(dead_zone, str) else [("dead_zone", dead_zone)])

    def _batches(self, gathered: Gathered) -> tuple[list[GroupAndStep], ScopeOf]:
        slot = self._slots() if self._statistics is not None else {}
        top = None
        batches: list[GroupAndStep] = []
        for group, params, grads in gathered:
            if top is None and group["dead_zone"] == "auto":
                top = _largest_gradient(gathered)
            for positions, step in self._steps(group, params, top):
                ps = params if positions is None else [params[i] for i in positions]
                gs = grads if positions is None else [grads[i] for i in positions]
                batches.append((group, StepGroup(ps, gs, step, [slot[id(p)] for p in ps] if slot else ())))
        if not torch.compiler.is_compiling() and self._threshold_check.due():
            names = self.names()
            self._threshold_check.look(batches, {key: names[slot] for key, slot in self._slots().items()})
        return batches, lambda b, i: id(batches[b][1].params[i])  # every tensor is skipped on its own

    def _steps(self, group: Group, params: Sequence[Tensor], top: Tensor | None) -> list[tuple[list[int] | None, Step]]:
        """The group's parameters by the step they take, the same objects until a setting changes."""
        tracing = torch.compiler.is_compiling()
        known_steps = self._checked_groups.steps(group) if not tracing else None
        if known_steps is not None:
            return known_steps
        u, d, lr, weight_decay, maximize = (group[key] for key in ("u", "d", "lr", "weight_decay", "maximize"))
        steps = [
            (positions, Step(ClipByValue(u, d, zone), lr, weight_decay, maximize))
            for positions, zone in _dead_zones(group, params, top)
        ]
        if not tracing and not isinstance(group["dead_zone"], str):
            self._checked_groups.keep_steps(group, steps)
        return steps

    def _run(self, kind: str, batches: Sequence[StepGroup], recorder: StatisticsRecorder | None) -> None:
        if kind == "fused":
            _fused_biclip(batches, self._step_cache, recorder)
        elif kind == "single":
            _single_tensor_biclip(batches, recorder)
        else:
            _multi_tensor_biclip(batches, self._step_cache, recorder, "foreach" if kind == "foreach" else None)


def _largest_gradient(gathered: Gathered) -> Tensor:
    """max|g| over all parameters."""
    owners = [p for _, params, _ in gathered for p in params]
    grads = [g for _, _, grads in gathered for g in grads]
    return largest([local_pair(p, g)[1] for p, g in zip(owners, grads, strict=True)], owners)


def _dead_zones(group: Group, params: Sequence[Tensor], top: Tensor | None) -> list[tuple[list[int] | None, Number]]:
    """The group's parameters by dead zone: one for all, or with "auto" one for each type of arithmetic."""
    if not isinstance(group["dead_zone"], str):
        return [(None, group["dead_zone"])]
    assert top is not None
    result: list[tuple[list[int] | None, Number]] = []
    for dtype in (torch.float32, torch.float64):
        positions: list[int] | None = [i for i, p in enumerate(params) if compute_dtype(p.dtype) == dtype]
        result.append((positions, auto_dead_zone(top, group["u"], dtype)))
    return result


# The three functions that every optimizer of torch has in its module, by torch's names: torch's own tests replace
# `_multi_tensor_<name>` there to see which implementation a step takes. The fused one stays out of compiled graphs.


def _single_tensor_biclip(batches: Sequence[StepGroup], recorder: StatisticsRecorder | None) -> None:
    update(batches, "single", None, recorder)


def _multi_tensor_biclip(
    batches: Sequence[StepGroup], cache: StepCache, recorder: StatisticsRecorder | None, kernel: str | None = None
) -> None:
    update(batches, kernel, cache, recorder)


@_disable_dynamo
def _fused_biclip(batches: Sequence[StepGroup], cache: StepCache, recorder: StatisticsRecorder | None) -> None:
    update(batches, None, cache, recorder)
