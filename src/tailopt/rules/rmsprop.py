"""RMSProp: v <- beta2 * v + (1 - beta2) * g^2,  x <- x - lr * g / (sqrt(v) + eps), v starting at 0.

torch.optim.RMSprop's operations in its order, with alpha = beta2. |g| <= sqrt(v / (1 - beta2)), so one step moves a
coordinate by at most lr / sqrt(1 - beta2).
"""

from __future__ import annotations

import math

import torch

from tailopt.clipping.step_cache import StepCache
from tailopt.rules.adagrad import descend_by_quotient
from tailopt.rules.rule import Hyperparameters, ParamStates, Rule, StepBound, Tensors, product, value_for_param


def _rmsprop(
    params: Tensors, grads: Tensors, states: ParamStates, hparams: Hyperparameters, cache: StepCache | None = None
) -> None:
    beta2 = hparams["betas"][1]
    for i, (p, g, state) in enumerate(zip(params, grads, states, strict=True)):
        if not state:
            state["square_avg"] = torch.zeros_like(p)
        v = state["square_avg"].mul_(beta2).addcmul_(g, g, value=1 - beta2)
        descend_by_quotient(p, g, v.sqrt(), value_for_param(hparams["lr"], i), hparams["eps"])


RMSPROP = Rule(
    "rmsprop",
    ("lr", "eps"),
    _rmsprop,
    lambda hparams: StepBound("coordinate", product(hparams["lr"], 1 / math.sqrt(1 - hparams["betas"][1]))),
    {"betas": (0.9, 0.99)},
    ("square_avg",),
)
