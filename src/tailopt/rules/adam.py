"""Adam and AdamW, and both on top of BiClip.

    m <- beta1 m + (1 - beta1) g,    v <- beta2 v + (1 - beta2) g^2,    m and v starting at 0
    x <- x - lr * (m / c1) / (sqrt(v / c2) + eps)

bias_correction True is torch's Adam: c = 1 - beta^step for both; False, the pseudocode of adaptive federated
optimizers: c1 = c2 = 1; "first": c1 alone, for a second moment that is handed in as it is. AdamW first multiplies x by
1 - lr * weight_decay. `biclip+adam` clips the gradient, then preconditions. torch.optim's operations in its order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tailopt.clipping.operators import biclip
from tailopt.rules.adagrad import divide, refuse_sparse
from tailopt.rules.rule import Numbers, Reach, Rule, State, given, of, product


def _adam(params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[State], h: Numbers) -> None:
    beta1, beta2 = h["betas"]
    decay, correction = h.get("weight_decay", 0.0), h["bias_correction"]
    for i, (p, g, state) in enumerate(zip(params, grads, states, strict=True)):
        lr = of(h["lr"], i)
        refuse_sparse(g, "adam")
        if not state:
            state.update(fresh(p))
        state["step"] += 1
        if given(decay):
            p.mul_(1 - lr * decay)
        m = state["exp_avg"].lerp_(g, 1 - beta1)
        v = state["exp_avg_sq"].mul_(beta2).addcmul_(g, g, value=1 - beta2)
        root = v.sqrt()
        if correction is True:
            root.div_((1 - beta2 ** state["step"]) ** 0.5)
        if correction is not False:
            lr = lr / (1 - beta1 ** state["step"])
        divide(p, m, root, lr, h["eps"])


def fresh(p: Tensor, second_moment: Tensor | None = None, step: int = 0) -> State:
    """Adam's state before a step: nothing seen, or with a second moment handed in."""
    v = torch.zeros_like(p) if second_moment is None else second_moment.to(p, copy=True)
    return {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": v}


def _reach(h: Numbers) -> Reach | None:
    """Cauchy and Schwarz over the weights of m and v; (1 - beta1) / sqrt(1 - beta2) is no bound."""
    beta1, beta2 = h["betas"]
    if beta1**2 >= beta2:
        return None
    ratio = (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2))
    if h["bias_correction"] == "first":
        ratio = max(1.0, (1 - beta1) / math.sqrt(1 - beta1**2 / beta2)) / math.sqrt(1 - beta2)
    return Reach("coordinate", product(h["lr"], ratio))


def _clipped(params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[State], h: Numbers) -> None:
    clipped = [biclip(g, of(h["u"], i), of(h["d"], i), of(h["dead_zone"], i)) for i, g in enumerate(grads)]
    _adam(params, clipped, states, h)


_OPTIONS = {"betas": (0.9, 0.999), "bias_correction": True}
ADAM = Rule("adam", ("lr", "eps"), _adam, _reach, _OPTIONS, ("exp_avg", "exp_avg_sq"))
ADAMW = replace(ADAM, name="adamw", options={**_OPTIONS, "weight_decay": 0.01})
_ON_TOP = ("lr", "eps", "u", "d")
BICLIP_ADAM = replace(ADAM, name="biclip+adam", settings=_ON_TOP, step=_clipped, options={**_OPTIONS, "dead_zone": 0.0})
BICLIP_ADAMW = replace(BICLIP_ADAM, name="biclip+adamw", options={**BICLIP_ADAM.options, "weight_decay": 0.01})
