"""Descent along the clipped gradient, coordinate by coordinate; and along its sign.

    biclip   x <- fma(-lr, biclip(g; u, d), x * (1 - lr * weight_decay))
    sign     the same with u = d = 1

No state. One step moves a coordinate by at most lr * u, decay aside. The kernels of `clipping.dispatch` take the step.
"""

from __future__ import annotations

from typing import Any

from tailopt.clipping.dispatch import update
from tailopt.clipping.kernels.kernel import StepGroup
from tailopt.clipping.norms import auto_dead_zone, largest
from tailopt.clipping.operators import compute_dtype
from tailopt.clipping.reference import ClipByValue, Step
from tailopt.clipping.step_cache import StepCache
from tailopt.rules.rule import Hyperparameters, Rule, States, StepBound, Tensors, as_list, product


def _biclip(
    params: Tensors, grads: Tensors, states: States, hparams: Hyperparameters, cache: StepCache | None = None
) -> None:
    names = ("lr", "u", "d")
    if not any(isinstance(hparams[name], list) for name in names) and not isinstance(hparams.get("dead_zone"), str):
        clip = ClipByValue(hparams["u"], hparams["d"], hparams.get("dead_zone", 0.0))
        step = Step(clip, hparams["lr"], hparams.get("weight_decay", 0.0))
        update([StepGroup(list(params), list(grads), step)], cache=cache)
        return
    n = len(params)
    zones = _dead_zones(params, grads, hparams)
    rows = zip(params, grads, *(as_list(hparams[name], n) for name in names), zones, strict=True)
    decay = hparams.get("weight_decay", 0.0)
    batches = [StepGroup([p], [g], Step(ClipByValue(u, d, zone), lr, decay)) for p, g, lr, u, d, zone in rows]
    update(batches, cache=cache)


def _dead_zones(params: Tensors, grads: Tensors, hparams: Hyperparameters) -> list[Any]:
    """The dead zone of each parameter; "auto" is taken over all of them."""
    zone = hparams.get("dead_zone", 0.0)
    if zone != "auto":
        return as_list(zone, len(params))
    top = largest(list(grads), list(params))
    uppers = as_list(hparams["u"], len(params))
    return [auto_dead_zone(top, u, compute_dtype(p.dtype)) for p, u in zip(params, uppers, strict=True)]


def _sign(
    params: Tensors, grads: Tensors, states: States, hparams: Hyperparameters, cache: StepCache | None = None
) -> None:
    _biclip(params, grads, states, {**hparams, "u": 1.0, "d": 1.0}, cache)


def _step_bound(hparams: Hyperparameters) -> StepBound:
    return StepBound("coordinate", product(hparams["lr"], hparams["u"]))


def _sign_step_bound(hparams: Hyperparameters) -> StepBound:
    return StepBound("coordinate", hparams["lr"])


_OPTIONS = {"weight_decay": 0.0, "dead_zone": 0.0}
BICLIP = Rule("biclip", ("lr", "u", "d"), _biclip, _step_bound, _OPTIONS)
SIGN = Rule("sign", ("lr",), _sign, _sign_step_bound, _OPTIONS)
