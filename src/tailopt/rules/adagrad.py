"""Adagrad: v <- v + g^2,  x <- x - lr * g / (sqrt(v) + eps), v starting at 0.

torch.optim.Adagrad's operations in its order. |g| <= sqrt(v), so one step moves a coordinate by at most lr.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tailopt.clipping.step_cache import StepCache
from tailopt.rules.rule import Hyperparameters, ParamStates, Rule, StepBound, Tensors, value_for_param


def _adagrad(
    params: Tensors, grads: Tensors, states: ParamStates, hparams: Hyperparameters, cache: StepCache | None = None
) -> None:
    for i, (p, g, state) in enumerate(zip(params, grads, states, strict=True)):
        refuse_sparse(g, "adagrad")
        if not state:
            state["sum"] = torch.zeros_like(p)
        state["sum"].addcmul_(g, g, value=1)
        descend_by_quotient(p, g, state["sum"].sqrt(), value_for_param(hparams["lr"], i), hparams["eps"])


def refuse_sparse(g: Tensor, name: str) -> None:
    """Raise for a sparse gradient, naming the rules that take one."""
    if g.is_sparse:
        raise ValueError(f"{name} takes no sparse gradients. Use sgd, biclip or l2clip, or Embedding(sparse=False).")


def descend_by_quotient(p: Tensor, numerator: Tensor, root: Tensor, lr: float | Tensor, eps: float | Tensor) -> None:
    """p <- p - lr * numerator / (root + eps), where a root of 0 moves nothing; `root` is overwritten."""
    root.add_(eps)
    if not isinstance(eps, Tensor) and eps == 0:
        root.masked_fill_(root == 0, torch.inf)  # 0/0, or a gradient whose square is too small for the type
    if isinstance(lr, Tensor):
        p.sub_(numerator / root * lr)
    else:
        p.addcdiv_(numerator, root, value=-lr)


def _step_bound(hparams: Hyperparameters) -> StepBound:
    return StepBound("coordinate", hparams["lr"])


ADAGRAD = Rule("adagrad", ("lr", "eps"), _adagrad, _step_bound, state_names=("sum",))
