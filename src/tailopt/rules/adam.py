"""Adam and AdamW, and both on top of BiClip.

    m <- beta1 m + (1 - beta1) g,    v <- beta2 v + (1 - beta2) g^2,    m and v starting at 0
    x <- x - lr * (m / c1) / (sqrt(v / c2) + eps)

bias_correction True is torch's Adam: c = 1 - beta^step for both; False, the pseudocode of adaptive federated
optimizers: c1 = c2 = 1; "first": only m is corrected, for nodes that start from the outer v as it is. AdamW first
multiplies x by 1 - lr * weight_decay. `biclip+adam` clips the gradient, then preconditions.
The operations are torch.optim's, in its order.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from tailopt.clipping.operators import biclip
from tailopt.clipping.step_cache import StepCache
from tailopt.rules.adagrad import refuse_sparse
from tailopt.rules.biclip import thresholds
from tailopt.rules.lists import descend_by_quotient, in_windows, scale_
from tailopt.rules.rule import (
    Hyperparameters,
    ParamState,
    ParamStates,
    Rule,
    StepBound,
    Tensors,
    as_list,
    is_active,
    product,
)


@in_windows
def _adam(
    params: Tensors, grads: Tensors, states: ParamStates, hparams: Hyperparameters, cache: StepCache | None = None
) -> None:
    beta1, beta2 = hparams["betas"]
    decay, correction = hparams.get("weight_decay", 0.0), hparams["bias_correction"]
    refuse_sparse(grads, "adam")
    for p, state in zip(params, states, strict=True):
        if not state:
            state.update(initial_adam_state(p))
        state["step"] += 1
    rates = as_list(hparams["lr"], len(params))
    if is_active(decay):
        scale_(params, [1 - lr * decay for lr in rates])
    firsts, seconds = [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states]
    torch._foreach_lerp_(firsts, list(grads), 1 - beta1)
    scale_(seconds, beta2)
    torch._foreach_addcmul_(seconds, list(grads), list(grads), value=1 - beta2)
    roots = list(torch._foreach_sqrt(seconds))
    if correction is True:
        torch._foreach_div_(roots, [(1 - beta2 ** state["step"]) ** 0.5 for state in states])
    if correction is not False:
        rates = [lr / (1 - beta1 ** state["step"]) for lr, state in zip(rates, states, strict=True)]
    descend_by_quotient(params, firsts, roots, rates, hparams["eps"])


def initial_adam_state(p: Tensor, second_moment: Tensor | None = None, step: int = 0) -> ParamState:
    """Adam's state before a step: zero moments, or with a given second moment."""
    v = torch.zeros_like(p) if second_moment is None else second_moment.to(p, copy=True)
    return {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": v}


def _step_bound(hparams: Hyperparameters) -> StepBound | None:
    """By Cauchy-Schwarz over the weights of m and v; (1 - beta1) / sqrt(1 - beta2) alone is not a bound."""
    beta1, beta2 = hparams["betas"]
    if beta1**2 >= beta2:
        return None
    ratio = (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2))
    if hparams["bias_correction"] == "first":
        ratio = max(1.0, (1 - beta1) / math.sqrt(1 - beta1**2 / beta2)) / math.sqrt(1 - beta2)
    return StepBound("coordinate", product(hparams["lr"], ratio))


def _clipped(
    params: Tensors, grads: Tensors, states: ParamStates, hparams: Hyperparameters, cache: StepCache | None = None
) -> None:
    each = thresholds(params, grads, hparams)
    clipped = [biclip(g, *clip) for g, clip in zip(grads, each, strict=True)]
    _adam(params, clipped, states, hparams, cache)


_OPTIONS = {"betas": (0.9, 0.999), "bias_correction": True}
ADAM = Rule("adam", ("lr", "eps"), _adam, _step_bound, _OPTIONS, ("exp_avg", "exp_avg_sq"))
ADAMW = replace(ADAM, name="adamw", defaults={**_OPTIONS, "weight_decay": 0.01})
_ON_TOP = ("lr", "eps", "u", "d")
BICLIP_ADAM = replace(
    ADAM,
    name="biclip+adam",
    required=_ON_TOP,
    step=_clipped,
    defaults={**_OPTIONS, "dead_zone": 0.0},
    thresholds=thresholds,
)
BICLIP_ADAMW = replace(BICLIP_ADAM, name="biclip+adamw", defaults={**BICLIP_ADAM.defaults, "weight_decay": 0.01})
