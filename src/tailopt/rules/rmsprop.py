"""RMSProp: v <- beta2 * v + (1 - beta2) * g^2,  x <- x - lr * g / (sqrt(v) + eps), v starting at 0.

torch.optim.RMSprop's operations in its order, with alpha = beta2. |g| <= sqrt(v / (1 - beta2)), so one step moves a
coordinate by at most lr / sqrt(1 - beta2).
"""

from __future__ import annotations

import math

import torch

from tailopt.clipping.step_cache import StepCache
from tailopt.rules.lists import descend_by_quotient, in_windows, scale_
from tailopt.rules.rule import Hyperparameters, ParamStates, Rule, StepBound, Tensors, product


@in_windows
def _rmsprop(
    params: Tensors, grads: Tensors, states: ParamStates, hparams: Hyperparameters, cache: StepCache | None = None
) -> None:
    beta2 = hparams["betas"][1]
    for p, state in zip(params, states, strict=True):
        if not state:
            state["square_avg"] = torch.zeros_like(p)
    averages = [state["square_avg"] for state in states]
    scale_(averages, beta2)
    torch._foreach_addcmul_(averages, list(grads), list(grads), value=1 - beta2)
    descend_by_quotient(params, grads, list(torch._foreach_sqrt(averages)), hparams["lr"], hparams["eps"])


RMSPROP = Rule(
    "rmsprop",
    ("lr", "eps"),
    _rmsprop,
    lambda hparams: StepBound("coordinate", product(hparams["lr"], 1 / math.sqrt(1 - hparams["betas"][1]))),
    {"betas": (0.9, 0.99)},
    ("square_avg",),
)
