"""BiClip as a torch optimizer: every coordinate clipped from both sides; no state without momentum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from tailopt.clipping.counts import StatisticsRecorder
from tailopt.clipping.dispatch import update
from tailopt.clipping.dtensor import is_dtensor, local_pair
from tailopt.clipping.kernels.kernel import StepGroup
from tailopt.clipping.momentum import as_finite, check_momentum
from tailopt.clipping.norms import auto_dead_zone, largest_gradient, root_mean_squares
from tailopt.clipping.operators import Number, compute_dtype
from tailopt.clipping.reference import ClipByValue, StepHyperparameters
from tailopt.clipping.step_cache import StepCache
from tailopt.optimizers.auto_thresholds import (
    Observation,
    check_auto,
    chosen_thresholds,
    is_auto,
    is_calibrating,
    numbers,
    visible_parts,
)
from tailopt.optimizers.clipping_optimizer import ClippingOptimizer
from tailopt.optimizers.exact_state import restore_exact_types
from tailopt.optimizers.groups import Gathered, Group, GroupAndStep, ScopeOf
from tailopt.optimizers.momentum_steps import by_step_count, momentum_numbers
from tailopt.optimizers.rounding_steps import check_rounding, rounding_of
from tailopt.optimizers.threshold_warning import ThresholdCheck

RELATIVE_LR = 3e-3  # of the RMS of a tensor
SMALLEST_SIZE = 1e-3  # of a tensor, in relative steps: those of one that begins at zero


class BiClip(ClippingOptimizer):
    """Clip every coordinate of the gradient to a magnitude between d and u, then descend.

        p <- p * (1 - lr * weight_decay) - lr * sign(g) * min(max(|g|, d), u)

    One step moves a coordinate by at least lr * d and at most lr * u, whatever the gradient's tail; a zero gradient
    moves nothing. No state is kept: memory is that of SGD without momentum. Computed in fp32 for fp32, bf16 and fp16,
    in fp64 for fp64, with one fused multiply-add and one rounding at the store.

    With `momentum` beta above 0, a mean of the gradients takes the place of g, and the bound lr * u stays:

        m <- beta * m + (1 - beta) * min(max(g, -u / (1 - beta)), u / (1 - beta))
        g <- m / (1 - beta^k)                                  in the k-th step since m was 0

    One outlier adds at most u to m, so that it is forgotten after as many steps as any gradient of that size.

    Thresholds that do nothing are warned of, once: where at least 99.9 % of a tensor's nonzero gradient coordinates are
    at or below d < u, and lr * d is below 1e-4 of its RMS weight. That is looked at in steps 1, 10, 100 and every
    1,000th on the CPU, in steps 1 and 10 on a CUDA device, and neither in compiled nor in captured steps. So is
    lr * weight_decay >= 1.

    Args:
        params: parameters, named parameters or groups, each with its own values of what follows.
        lr: learning rate, a number or a 1-element tensor. With u="auto" it is the most that a coordinate moves in a
            step, as with Adam. By default 0.003 of the size of each tensor (see `relative`); with a number for u, 0.01.
        u: upper threshold, a number or a tensor: 0-dim, or one that broadcasts against the parameters of its group
            (row- and column-wise thresholds). "auto": chosen for every tensor from the first 50 gradients, which are
            steps of lr * sign(g); see `thresholds`. The default; if d is a number, 1.0.
        d: lower threshold, 0 <= d <= u, likewise. "auto": a third of u. The default; if u is a number, 0.01. With
            u="auto" it is "auto" or 0.
        scale: with u="auto", what happens as gradients shrink: "first", steps shrink with them; "follow", the largest
            step stays lr, and a schedule shrinks it.
        relative: with u="auto", steps in proportion to the weights: the most that a coordinate moves is
            lr * max(RMS(p), 0.001), with the RMS of its tensor before the step. By default so where no lr is given, for
            all parameters or for the group. It reads the parameters, and waits for the device.
        weight_decay: decoupled, as in AdamW.
        momentum: 0 <= momentum < 1, such as 0.9; 0 keeps no state. Thresholds and statistics refer to the mean.
        momentum_dtype: the type of m: by default fp32 (fp64 for fp64); torch.bfloat16 (2 bytes per parameter) or the
            parameter's own type.
        stochastic_rounding: a seed, to round bf16 parameters up or down with probabilities that keep the mean: a step
            of less than half a unit of a weight is then not lost. None: to the nearest. Repeatable, also after a
            resume: the bits depend on the seed, the number of the step (`roundings` in the group) and the place. By
            torch operations, or on CUDA with `fused=True` by the Triton kernel; not in compiled or captured steps.
        dead_zone: coordinates with |g| <= dead_zone stay unmoved. "auto": 4 * eps * max|g| over all parameters, for
            those whose true gradient is zero (a bias before BatchNorm), where d would make a full step of rounding
            noise; it costs a read of the gradients. It does not cure gradients computed wholly in bf16.
        nonfinite: what a NaN or infinity in a gradient does. "propagate" (free): NaN goes into the parameter, an
            infinity counts as u. "skip": that tensor is left as it is and counted; "raise": FloatingPointError before
            anything moved. Both cost a read of the gradients; "raise" waits for the device, "skip" on a GPU copies the
            parameters, unless fused.
        statistics: count in the same pass: "counts" (thresholds hit, sum of squares, maximum), True (with a sampled
            histogram), "complete" (a histogram of every element, several times slower). See `statistics()`.
        maximize, foreach, capturable, differentiable, fused: as in torch. Without any of them the fastest kernel is
            taken. `fused=True` is the C kernel on the CPU and the Triton kernel on CUDA, which no device has run yet;
            it also takes the unscaling over from GradScaler.

    Examples:
        >>> w = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
        >>> opt = BiClip([w], lr=0.1, u=1.0, d=0.5)
        >>> (w * torch.tensor([100.0, 0.001])).sum().backward()
        >>> opt.step()
        >>> w.data
        tensor([0.9000, 0.9500])
    """

    optional = {**ClippingOptimizer.optional, "dead_zone": 0.0, "momentum": 0.0, "momentum_dtype": None}
    optional |= {"stochastic_rounding": None}
    optional |= {"scale": "first", "relative": False, "thresholds": None, "calibration": None}
    not_counted = (
        "Nothing was counted: this BiClip was built with statistics=False. Build it with statistics=True (or "
        '"counts", or "complete"), or count given gradients with tailopt.count.'
    )

    def __init__(
        self,
        params: Any,
        lr: Number | None = None,
        u: Number | str | None = None,
        d: Number | str | None = None,
        *,
        scale: str = "first",
        relative: bool | None = None,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        momentum_dtype: torch.dtype | None = None,
        stochastic_rounding: int | None = None,
        dead_zone: float | str = 0.0,
        nonfinite: str = "propagate",
        statistics: bool | str = False,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        if u is None:
            u = "auto" if d is None or is_auto(d) else 1.0
        if d is None:
            d = "auto" if is_auto(u) else 1e-2
        if relative is None and not (lr is None and is_auto(u)):
            relative = False  # else None: for the groups that have no lr of their own
        if lr is None:
            lr = 1e-2 if relative is False else RELATIVE_LR
        defaults: Group = {"lr": lr, "u": u, "d": d, "weight_decay": weight_decay}
        defaults |= {"momentum": momentum, "momentum_dtype": momentum_dtype}
        defaults |= {"stochastic_rounding": stochastic_rounding}
        defaults |= {"scale": scale, "relative": relative, "thresholds": None, "calibration": None}
        defaults |= {"dead_zone": dead_zone, "nonfinite": nonfinite, "maximize": maximize, "foreach": foreach}
        defaults |= {"capturable": capturable, "differentiable": differentiable, "fused": fused}
        super().__init__(params, defaults, statistics)

    def _init_runtime(self) -> None:
        super()._init_runtime()
        self._threshold_check = ThresholdCheck()
        self._momentum_cache = StepCache()

    def check(self, group: Group, params: Sequence[Tensor] = (), at_step: bool = False) -> None:
        """Raise for a group that cannot be used."""
        check_momentum(group["momentum"])
        dtype = group["momentum_dtype"]
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"Invalid momentum_dtype: {dtype!r}; need a floating torch.dtype, or None.")
        check_rounding(group)
        if group["relative"] and not is_auto(group["u"]):
            raise ValueError(
                f"Invalid relative: True with u={group['u']!r}; need u='auto', because the step of a tensor is then "
                "lr * RMS(p) whatever the gradient's size. Set u='auto', or relative=False."
            )
        super().check(check_auto(group), params, at_step)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group; one with its own lr takes steps of that lr, unless it or the constructor has relative=True."""
        if isinstance(param_group, dict) and param_group.get("relative", self.defaults["relative"]) is None:
            relative = "lr" not in param_group and is_auto(param_group.get("u", self.defaults["u"]))
            param_group = {**param_group, "relative": relative}
        super().add_param_group(param_group)

    @property
    def thresholds(self) -> list[str]:
        """What "auto" has chosen, in a line per group; empty before the 51st step."""
        return chosen_thresholds(self.param_groups)

    def _append_momenta(
        self,
        group: Group,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        momenta: list[Tensor],
        step_counts: list[Tensor],
    ) -> None:
        if any(g.is_sparse for g in grads):
            raise RuntimeError("Momentum needs dense gradients, and one is sparse. Use momentum=0 for its parameter.")
        for p in params:
            state = self.state[p]
            if "momentum_buffer" not in state:
                state |= _empty_state(p, group)
            if "step" not in state or state["momentum_buffer"].shape != p.shape:
                raise ValueError(
                    f"Invalid state: the momentum of a parameter of shape {tuple(p.shape)} has shape "
                    f"{tuple(state['momentum_buffer'].shape)} and the keys {sorted(state)}; need its shape, and a "
                    "step. Was it saved by another optimizer? Remove its entry to begin with an empty momentum."
                )
            momenta.append(state["momentum_buffer"])
            step_counts.append(_where_needed(state, p, group))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load settings and momenta; a momentum keeps the type that it was saved in."""
        super().load_state_dict(state_dict)
        restore_exact_types(self, state_dict)

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
        for group, params, grads, momenta, step_counts, _ in gathered:
            if top is None and group["dead_zone"] == "auto":
                top = self._largest_gradient(gathered)
            calibrating = bool(momenta) and is_calibrating(group)
            if calibrating and group["nonfinite"] == "propagate":
                grads = [as_finite(g, m.dtype) for g, m in zip(grads, momenta, strict=True)]
            numbers_of_momenta = (
                momentum_numbers(group["momentum"], step_counts, clamps=not calibrating) if momenta else []
            )
            rounding = rounding_of(group, params)
            if rounding is not None:
                slot = slot or self._slots()
            for positions, hparams in self._hparams_by_positions(group, params, top):
                if positions is None and not momenta and not slot:
                    batches.append((group, StepGroup(params, grads, hparams)))
                    continue
                if rounding is not None:
                    hparams = hparams._replace(rounding=rounding)
                ps = params if positions is None else [params[i] for i in positions]
                gs = grads if positions is None else [grads[i] for i in positions]
                batch = StepGroup(ps, gs, hparams, [slot[id(p)] for p in ps] if slot else ())
                if not momenta:
                    batches.append((group, batch))
                    continue
                chosen = range(len(params)) if positions is None else positions
                of_batch = [momenta[i] for i in chosen], [step_counts[i] for i in chosen]
                parts = by_step_count(batch, *of_batch, [numbers_of_momenta[i] for i in chosen])
                batches += [(group, part) for part in parts]
        return batches, lambda b, i: id(batches[b][1].params[i])  # every tensor is skipped on its own

    def _largest_gradient(self, gathered: Gathered) -> Tensor:
        """max|g| over all parameters."""
        owners = [p for one in gathered for p in one.params]
        grads = [g for one in gathered for g in one.grads]
        local = [local_pair(p, g)[1] for p, g in zip(owners, grads, strict=True)]
        return largest_gradient(local, owners, self._look(local))

    def _look_at_part(self, batches: Sequence[GroupAndStep]) -> None:
        assert self._threshold_check is not None
        # thresholds that refer to a mean, or follow the gradients, are not compared with them
        plain = [(group, batch) for group, batch in batches if not batch.momenta and not is_auto(group["u"])]
        self._threshold_check.look(plain, self._names_by_id())

    def _observe(self, gathered: Gathered, observation: Observation) -> None:
        """Show the gradients, or the means that were clipped, to the groups whose thresholds follow them."""
        for group, params, grads, momenta, step_counts, _ in gathered:
            if not is_auto(group["u"]) or not params or not observation.is_due(group):
                continue
            clipped = visible_parts(params, grads)
            if group["nonfinite"] == "skip":  # what was skipped is not counted: zeros are left out of quantiles
                clipped = [torch.where(g.isfinite().all(), g, 0.0) for g in clipped]
            if momenta:
                beta = group["momentum"]
                each = [1 - beta**count for count in step_counts]
                corrections = [float(c) if c.is_cpu else c for c in each]  # a copy to the device would wait for it
                clipped = visible_parts(params, [m / c for m, c in zip(momenta, corrections, strict=True)])
            where = {id(p): i for i, p in enumerate(group["params"])}
            observation.add_gradients(group, [where[id(p)] for p in params], clipped)

    def _hparams_by_positions(
        self, group: Group, params: Sequence[Tensor], top: Tensor | None
    ) -> list[tuple[list[int] | None, StepHyperparameters]]:
        """Positions in the group with the hyperparameters of their step, the same objects until a setting changes."""
        tracing = torch.compiler.is_compiling()
        known = self._checked_groups.known_hparams(group) if not tracing else None
        if known is not None and (len(known) == 1 or len(params) == len(group["params"]) == len(known)):
            return known
        lr, weight_decay, maximize = (group[key] for key in ("lr", "weight_decay", "maximize"))
        each = numbers(group)
        sizes = _sizes(params) if group["relative"] else []
        where = {id(p): i for i, p in enumerate(group["params"])} if len(each) > 1 else {}
        result: list[tuple[list[int] | None, StepHyperparameters]] = []
        for positions, zone in _dead_zones(group, params, top):
            alone = [[i] for i in (range(len(params)) if positions is None else positions)]
            for some in alone if where or sizes else [positions]:
                s: Number
                u, d, s = each[where[id(params[some[0]])] if where and some else 0]
                if sizes and some:
                    s = s / sizes[some[0]]
                # weights decay by lr itself, not by lr / s
                plain = not isinstance(s, Tensor) and s == 1
                rate, decay = (lr, weight_decay) if plain else (lr / s, weight_decay * s if weight_decay else 0.0)
                result.append((some, StepHyperparameters(ClipByValue(u, d, zone), rate, decay, maximize)))
        if (
            not tracing
            and not sizes
            and not isinstance(group["dead_zone"], str)
            and len(params) == len(group["params"])
        ):
            self._checked_groups.keep_hparams(group, result)
        return result

    def _run(self, kind: str, batches: Sequence[StepGroup], recorder: StatisticsRecorder | None) -> None:
        if len(batches) == 1 and not batches[0].momenta:
            _take(kind, batches, self._step_cache, recorder)
            return
        with_momentum = [batch for batch in batches if batch.momenta]
        if without := [batch for batch in batches if not batch.momenta]:
            _take(kind, without, self._step_cache, recorder)
        if with_momentum:
            _take(kind, with_momentum, self._momentum_cache, recorder)
        # only now: a step that raised is no step
        on_host = [count for batch in with_momentum for count in batch.step_counts if count.is_cpu]
        on_device = [c for batch in with_momentum if batch.skips is None for c in batch.step_counts if not c.is_cpu]
        if on_host:  # by a tensor: a number would be made one for each of them
            torch._foreach_add_(on_host, torch.ones((), device="cpu"), alpha=1)
        if on_device:
            torch._foreach_add_(on_device, 1)
        for batch in with_momentum:
            if batch.skips is not None:
                torch._foreach_add_(list(batch.step_counts), (~batch.skips).float().unbind())


def _take(kind: str, batches: Sequence[StepGroup], cache: StepCache, recorder: StatisticsRecorder | None) -> None:
    """Take the step of batches that all have momentum, or all have none."""
    if kind == "multi":
        _multi_tensor_biclip(batches, cache, recorder)
    elif kind == "foreach":
        _multi_tensor_biclip(batches, cache, recorder, "foreach")
    elif kind == "fused":
        _fused_biclip(batches, cache, recorder)
    else:
        _single_tensor_biclip(batches, recorder)


def _sizes(params: Sequence[Tensor]) -> Sequence[Number]:
    """What relative steps are multiplied by: max(RMS(p), 0.001); tensors where the step is traced.

    A traced step would be traced again for every other number.
    """
    if torch.compiler.is_compiling() and not any(is_dtensor(p) or p.is_complex() for p in params):
        wide = [p.detach().to(compute_dtype(p.dtype)) for p in params]
        return [x.square().mean().sqrt().clamp(min=SMALLEST_SIZE) for x in wide]
    return [max(rms, SMALLEST_SIZE) for rms in root_mean_squares(params)]


def _empty_state(p: Tensor, group: Group) -> dict[str, Tensor]:
    """The state of a parameter before its first step with momentum."""
    dtype = group["momentum_dtype"] or compute_dtype(p.dtype)
    m = torch.zeros_like(p, dtype=p.dtype if p.is_complex() else dtype, requires_grad=False)
    return {"momentum_buffer": m, "step": torch.zeros((), dtype=torch.float32, device=_step_device(p, group))}


def _step_device(p: Tensor, group: Group) -> torch.device:
    """The parameter's device where the host must not wait for the number of steps, else the CPU."""
    on_device = group["capturable"] or group["nonfinite"] == "skip"
    return p.device if on_device else torch.device("cpu")


def _where_needed(state: dict[str, Any], p: Tensor, group: Group) -> Tensor:
    """The count of steps, moved where a setting has changed or a checkpoint came from elsewhere."""
    device = _step_device(p, group)
    if state["step"].device != device:
        state["step"] = state["step"].to(device)
    step: Tensor = state["step"]
    return step


def _dead_zones(group: Group, params: Sequence[Tensor], top: Tensor | None) -> list[tuple[list[int] | None, Number]]:
    """The group's parameters by dead zone: one for all, or with "auto" one for each type of arithmetic."""
    if not isinstance(group["dead_zone"], str):
        return [(None, group["dead_zone"])]
    assert top is not None
    result: list[tuple[list[int] | None, Number]] = []
    for dtype in (torch.float32, torch.float64):
        positions = [i for i, p in enumerate(params) if compute_dtype(p.dtype) == dtype]
        if positions:
            # a u that is chosen from the gradients does not limit the zone: where it is smaller, all is rounding noise
            u = math.inf if is_auto(group["u"]) else group["u"]
            result.append((positions, auto_dead_zone(top, u, dtype)))
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
    update(batches, "fused", cache, recorder)
