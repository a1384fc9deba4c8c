"""Yogi: Adam with a second moment that changes by at most (1 - beta2) g^2 in a step, however far it is from g^2.

    m <- beta1 m + (1 - beta1) g,    v <- v - (1 - beta2) sign(v - g^2) g^2,    m and v starting at 0
    x <- x - lr * m / (sqrt(v) + eps)

The outer rule of FedYogi (Reddi et al., Adaptive Federated Optimization, arXiv 2003.00295), whose tau is eps here. As
for adam there is no bias correction, and v starts at 0; that paper lets it start at tau^2 or above.
"""

from __future__ import annotations

import math

import torch

from tailopt.clipping.step_cache import StepCache
from tailopt.rules.lists import descend_by_quotient, in_windows
from tailopt.rules.rule import Hyperparameters, ParamStates, Rule, StepBound, Tensors, product


@in_windows
def _yogi(
    params: Tensors, grads: Tensors, states: ParamStates, hparams: Hyperparameters, cache: StepCache | None = None
) -> None:
    beta1, beta2 = hparams["betas"]
    for p, state in zip(params, states, strict=True):
        if not state:
            state.update({"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)})
    firsts, seconds = [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states]
    torch._foreach_lerp_(firsts, list(grads), 1 - beta1)
    squares = list(torch._foreach_mul(list(grads), list(grads)))
    signs = list(torch._foreach_sign(torch._foreach_sub(seconds, squares)))
    torch._foreach_addcmul_(seconds, signs, squares, value=beta2 - 1)
    descend_by_quotient(params, firsts, list(torch._foreach_sqrt(seconds)), hparams["lr"], hparams["eps"])


def _step_bound(hparams: Hyperparameters) -> StepBound | None:
    """After a step v is at least beta2 times what it was, and at least min(beta2, 1 - beta2) g^2.

    So |g| of k steps ago is at most sqrt(v / min(beta2, 1 - beta2)) / sqrt(beta2)^k, and m is a geometric series.
    """
    beta1, beta2 = hparams["betas"]
    if beta1**2 >= beta2:
        return None
    ratio = (1 - beta1) / (1 - beta1 / math.sqrt(beta2)) / math.sqrt(min(beta2, 1 - beta2))
    return StepBound("coordinate", product(hparams["lr"], ratio))


YOGI = Rule("yogi", ("lr", "eps"), _yogi, _step_bound, {"betas": (0.9, 0.99)}, ("exp_avg", "exp_avg_sq"))
