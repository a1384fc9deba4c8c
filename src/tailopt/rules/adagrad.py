"""Adagrad: v <- v + g^2,  x <- x - lr * g / (sqrt(v) + eps), v starting at 0.

torch.optim.Adagrad's operations in its order. |g| <= sqrt(v), so one step moves a coordinate by at most lr.
"""

from __future__ import annotations

import torch

from tailopt.clipping.step_cache import StepCache
from tailopt.rules.lists import descend_by_quotient, in_windows
from tailopt.rules.rule import Hyperparameters, ParamStates, Rule, StepBound, Tensors


@in_windows
def _adagrad(
    params: Tensors, grads: Tensors, states: ParamStates, hparams: Hyperparameters, cache: StepCache | None = None
) -> None:
    refuse_sparse(grads, "adagrad")
    for p, state in zip(params, states, strict=True):
        if not state:
            state["sum"] = torch.zeros_like(p)
    sums = [state["sum"] for state in states]
    torch._foreach_addcmul_(sums, list(grads), list(grads), value=1)
    descend_by_quotient(params, grads, list(torch._foreach_sqrt(sums)), hparams["lr"], hparams["eps"])


def refuse_sparse(grads: Tensors, name: str) -> None:
    """Raise for a sparse gradient, naming the rules that take one."""
    if any(g.is_sparse for g in grads):
        raise ValueError(f"{name} takes no sparse gradients. Use sgd, biclip or l2clip, or Embedding(sparse=False).")


def _step_bound(hparams: Hyperparameters) -> StepBound:
    return StepBound("coordinate", hparams["lr"])


ADAGRAD = Rule("adagrad", ("lr", "eps"), _adagrad, _step_bound, state_names=("sum",))
