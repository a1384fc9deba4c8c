"""Plain descent, optionally with momentum, and the outer average.

    avg       x <- x - g                                    g = -displacement: x + displacement
    sgd       x <- x - lr * g,    or with momentum v <- momentum * v + g,  x <- x - lr * v
    nesterov  v <- momentum * v + g,  x <- x - lr * (g + momentum * v)

torch.optim.SGD's operations in its order, so that the bits are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tailopt.clipping.step_cache import StepCache
from tailopt.rules.rule import Hyperparameters, ParamStates, Rule, Tensors, is_active, value_for_param


def _average(
    params: Tensors, grads: Tensors, states: ParamStates, hparams: Hyperparameters, cache: StepCache | None = None
) -> None:
    torch._foreach_sub_(list(params), list(grads))


def _sgd(
    params: Tensors, grads: Tensors, states: ParamStates, hparams: Hyperparameters, cache: StepCache | None = None
) -> None:
    _descend(params, grads, states, hparams, nesterov=False)


def _nesterov(
    params: Tensors, grads: Tensors, states: ParamStates, hparams: Hyperparameters, cache: StepCache | None = None
) -> None:
    _descend(params, grads, states, hparams, nesterov=True)


def _descend(params: Tensors, grads: Tensors, states: ParamStates, hparams: Hyperparameters, nesterov: bool) -> None:
    momentum = hparams.get("momentum", 0.0)
    for i, (p, g, state) in enumerate(zip(params, grads, states, strict=True)):
        if is_active(momentum):
            if "momentum_buffer" in state:
                state["momentum_buffer"].mul_(momentum).add_(g)
            else:
                state["momentum_buffer"] = g.clone()
            v = state["momentum_buffer"]
            if nesterov:
                g = g + v * momentum if isinstance(momentum, Tensor) else g.add(v, alpha=momentum)
            else:
                g = v
        lr = value_for_param(hparams["lr"], i)
        if isinstance(lr, Tensor):
            p.sub_(g * lr)
        else:
            p.add_(g, alpha=-lr)


def _unbounded(hparams: Hyperparameters) -> None:
    return None


AVG = Rule("avg", (), _average, _unbounded, is_elementwise=True)
SGD = Rule("sgd", ("lr",), _sgd, _unbounded, {"momentum": 0.0}, ("momentum_buffer",))
NESTEROV = Rule("nesterov", ("lr", "momentum"), _nesterov, _unbounded, state_names=("momentum_buffer",))
