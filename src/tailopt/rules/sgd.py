"""Plain descent, optionally with momentum, and the outer average.

    avg       x <- x - g                                    g = -displacement: x + displacement
    sgd       x <- x - lr * g,    or with momentum v <- momentum * v + g,  x <- x - lr * v
    nesterov  v <- momentum * v + g,  x <- x - lr * (g + momentum * v)

torch.optim.SGD's operations in its order, so that the bits are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tailopt.clipping.operators import Number
from tailopt.clipping.step_cache import StepCache
from tailopt.rules.lists import add_, in_windows, scale_
from tailopt.rules.rule import Hyperparameters, ParamStates, Rule, Tensors, is_active, value_for_param


def _average(
    params: Tensors, grads: Tensors, states: ParamStates, hparams: Hyperparameters, cache: StepCache | None = None
) -> None:
    torch._foreach_sub_(list(params), list(grads))


def _sgd(
    params: Tensors, grads: Tensors, states: ParamStates, hparams: Hyperparameters, cache: StepCache | None = None
) -> None:
    _descend(params, grads, states, hparams, nesterov=False)


@in_windows
def _nesterov(
    params: Tensors, grads: Tensors, states: ParamStates, hparams: Hyperparameters, cache: StepCache | None = None
) -> None:
    _descend(params, grads, states, hparams, nesterov=True)


def _descend(params: Tensors, grads: Tensors, states: ParamStates, hparams: Hyperparameters, nesterov: bool) -> None:
    momentum, lr = hparams.get("momentum", 0.0), hparams["lr"]
    directions = _with_momentum(grads, states, momentum, nesterov) if is_active(momentum) else list(grads)
    if isinstance(lr, int | float):
        torch._foreach_add_(list(params), directions, alpha=-lr)
        return
    for i, (p, direction) in enumerate(zip(params, directions, strict=True)):
        rate = value_for_param(lr, i)
        if isinstance(rate, Tensor):
            p.sub_(direction * rate)
        else:
            p.add_(direction, alpha=-rate)


def _with_momentum(grads: Tensors, states: ParamStates, momentum: Number, nesterov: bool) -> list[Tensor]:
    """Update the momenta; returns the directions of the step."""
    started = [i for i, state in enumerate(states) if "momentum_buffer" in state]
    if started:
        buffers = [states[i]["momentum_buffer"] for i in started]
        scale_(buffers, momentum)
        add_(buffers, [grads[i] for i in started])
    for g, state in zip(grads, states, strict=True):
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = g.clone()
    buffers = [state["momentum_buffer"] for state in states]
    if not nesterov:
        return buffers
    if isinstance(momentum, Tensor):
        return list(torch._foreach_add(list(grads), [v * momentum for v in buffers]))
    return list(torch._foreach_add(list(grads), buffers, alpha=momentum))


def _unbounded(hparams: Hyperparameters) -> None:
    return None


AVG = Rule("avg", (), _average, _unbounded, is_elementwise=True)
SGD = Rule("sgd", ("lr",), _sgd, _unbounded, {"momentum": 0.0}, ("momentum_buffer",))
NESTEROV = Rule("nesterov", ("lr", "momentum"), _nesterov, _unbounded, state_names=("momentum_buffer",))
