"""Descent along the clipped gradient, coordinate by coordinate; and along its sign.

    biclip   x <- fma(-lr, biclip(g; u, d), x * (1 - lr * weight_decay))
    sign     the same with u = d = 1

With momentum a mean of clamped gradients takes the place of g (`clipping.reference`), and is the only state. One step
moves a coordinate by at most lr * u, decay aside. The kernels of `clipping.dispatch` take the step.

Thresholds that are "auto" (`rounds.auto_thresholds`) come with s, by which lr is divided, and with `clamp_momentum`:
whether the gradients are clamped that enter the momentum. It is False while u is not known yet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tailopt.clipping.dispatch import update
from tailopt.clipping.kernels.kernel import StepGroup
from tailopt.clipping.momentum import as_finite
from tailopt.clipping.norms import auto_dead_zone, largest_gradient
from tailopt.clipping.operators import compute_dtype
from tailopt.clipping.reference import ClipByValue, Momentum, StepHyperparameters
from tailopt.clipping.step_cache import StepCache
from tailopt.rules.rule import (
    Hyperparameters,
    ParamStates,
    Rule,
    StepBound,
    Tensors,
    Thresholds,
    as_list,
    largest_step,
    scaled_rate_and_decay,
)


def _biclip(
    params: Tensors, grads: Tensors, states: ParamStates, hparams: Hyperparameters, cache: StepCache | None = None
) -> None:
    names = ("lr", "u", "d")
    momentum, clamp_gradients = float(hparams.get("momentum", 0.0)), hparams.get("clamp_momentum", True)
    if momentum and not clamp_gradients:
        grads = [as_finite(g, compute_dtype(p.dtype)) for p, g in zip(params, grads, strict=True)]
    if not any(isinstance(hparams[name], list) for name in names) and not isinstance(hparams.get("dead_zone"), str):
        clip = ClipByValue(hparams["u"], hparams["d"], hparams.get("dead_zone", 0.0))
        step_hparams = StepHyperparameters(clip, *scaled_rate_and_decay(hparams, 0))
        groups = [StepGroup(list(params), list(grads), step_hparams)]
    else:
        each = enumerate(zip(params, grads, thresholds(params, grads, hparams), strict=True))
        groups = [
            StepGroup([p], [g], StepHyperparameters(ClipByValue(*c), *scaled_rate_and_decay(hparams, i)))
            for i, (p, g, c) in each
        ]
    if momentum:
        groups = _with_momentum(groups, states, momentum, clamp_gradients)
    update(groups, cache=cache)


def _with_momentum(
    groups: Sequence[StepGroup], states: ParamStates, beta: float, clamp_gradients: bool
) -> list[StepGroup]:
    """The groups with their momenta, split by how many steps these have taken; every count goes up by one."""
    result, first = [], 0
    for group in groups:
        its_states = states[first : first + len(group.params)]
        first += len(group.params)
        by_count: dict[int, list[int]] = {}
        for i, (p, state) in enumerate(zip(group.params, its_states, strict=True)):
            if "momentum_buffer" not in state:
                state |= {"step": 0, "momentum_buffer": torch.zeros_like(p, dtype=compute_dtype(p.dtype))}
            state["step"] += 1
            by_count.setdefault(state["step"], []).append(i)
        for k, positions in by_count.items():
            momenta = [its_states[i]["momentum_buffer"] for i in positions]
            hparams = group.hparams._replace(momentum=Momentum.at(beta, k)._replace(clamps=clamp_gradients))
            result.append(group.only(positions)._replace(hparams=hparams, momenta=momenta))
    return result


def _dead_zones(params: Tensors, grads: Tensors, hparams: Hyperparameters) -> list[Any]:
    """The dead zone of each parameter; "auto" is taken over all of them."""
    zone = hparams.get("dead_zone", 0.0)
    if zone != "auto":
        return as_list(zone, len(params))
    top = largest_gradient(list(grads), list(params))
    # u limits the zone, unless it is "auto": where such a u is below the zone, all gradients are rounding noise
    uppers = as_list(math.inf if "s" in hparams else hparams["u"], len(params))
    return [auto_dead_zone(top, u, compute_dtype(p.dtype)) for p, u in zip(params, uppers, strict=True)]


def thresholds(params: Tensors, grads: Tensors, hparams: Hyperparameters) -> list[Thresholds]:
    """u, d and the dead zone with which every tensor is clipped."""
    n = len(params)
    zones = _dead_zones(params, grads, hparams)
    return list(zip(as_list(hparams["u"], n), as_list(hparams["d"], n), zones, strict=True))


def _sign_thresholds(params: Tensors, grads: Tensors, hparams: Hyperparameters) -> list[Thresholds]:
    return thresholds(params, grads, {**hparams, "u": 1.0, "d": 1.0})


def _sign(
    params: Tensors, grads: Tensors, states: ParamStates, hparams: Hyperparameters, cache: StepCache | None = None
) -> None:
    _biclip(params, grads, states, {**hparams, "u": 1.0, "d": 1.0}, cache)


def _step_bound(hparams: Hyperparameters) -> StepBound:
    return StepBound("coordinate", largest_step(hparams))


def _sign_step_bound(hparams: Hyperparameters) -> StepBound:
    return StepBound("coordinate", hparams["lr"])


_OPTIONS = {"weight_decay": 0.0, "dead_zone": 0.0, "momentum": 0.0}
_STATE = ("momentum_buffer",)  # where there is momentum
BICLIP = Rule(
    "biclip",
    ("lr", "u", "d"),
    _biclip,
    _step_bound,
    {**_OPTIONS, "scale": "first"},
    _STATE,
    is_elementwise=True,
    thresholds=thresholds,
    auto_u_limits="elements",
)
SIGN = Rule(
    "sign", ("lr",), _sign, _sign_step_bound, _OPTIONS, _STATE, is_elementwise=True, thresholds=_sign_thresholds
)
