"""Adagrad: v <- v + g^2,  x <- x - lr * g / (sqrt(v) + eps), v starting at 0.

torch.optim.Adagrad's operations in its order. |g| <= sqrt(v), so one step moves a coordinate by at most lr.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tailopt.rules.rule import Numbers, Reach, Rule, State, of


def _adagrad(params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[State], h: Numbers) -> None:
    for i, (p, g, state) in enumerate(zip(params, grads, states, strict=True)):
        refuse_sparse(g, "adagrad")
        if not state:
            state["sum"] = torch.zeros_like(p)
        state["sum"].addcmul_(g, g, value=1)
        divide(p, g, state["sum"].sqrt(), of(h["lr"], i), h["eps"])


def refuse_sparse(g: Tensor, name: str) -> None:
    """Say which rules could take it."""
    if g.is_sparse:
        raise ValueError(f"{name} takes no sparse gradients. Use sgd, biclip or l2clip, or Embedding(sparse=False).")


def divide(p: Tensor, numerator: Tensor, root: Tensor, lr: float | Tensor, eps: float | Tensor) -> None:
    """p <- p - lr * numerator / (root + eps), where a root of 0 moves nothing; `root` is used up."""
    root.add_(eps)
    if not isinstance(eps, Tensor) and eps == 0:
        root.masked_fill_(root == 0, torch.inf)  # 0/0, or a gradient whose square is too small for the type
    if isinstance(lr, Tensor):
        p.sub_(numerator / root * lr)
    else:
        p.addcdiv_(numerator, root, value=-lr)


ADAGRAD = Rule("adagrad", ("lr", "eps"), _adagrad, lambda h: Reach("coordinate", h["lr"]), state_names=("sum",))
