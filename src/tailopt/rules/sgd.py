"""Plain descent, with momentum if asked for, and the outer average.

    avg       x <- x - g                                    g = -displacement: x + displacement
    sgd       x <- x - lr * g,    or with momentum v <- momentum * v + g,  x <- x - lr * v
    nesterov  v <- momentum * v + g,  x <- x - lr * (g + momentum * v)

torch.optim.SGD's operations in its order, so that its bits are ours.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tailopt.rules.rule import Numbers, Rule, State, given, of


def _average(params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[State], h: Numbers) -> None:
    for p, g in zip(params, grads, strict=True):
        p.sub_(g)


def _sgd(params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[State], h: Numbers) -> None:
    _descend(params, grads, states, h, nesterov=False)


def _nesterov(params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[State], h: Numbers) -> None:
    _descend(params, grads, states, h, nesterov=True)


def _descend(
    params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[State], h: Numbers, nesterov: bool
) -> None:
    momentum = h.get("momentum", 0.0)
    for i, (p, g, state) in enumerate(zip(params, grads, states, strict=True)):
        if given(momentum):
            if "momentum_buffer" in state:
                state["momentum_buffer"].mul_(momentum).add_(g)
            else:
                state["momentum_buffer"] = g.clone()
            v = state["momentum_buffer"]
            if nesterov:
                g = g + v * momentum if isinstance(momentum, Tensor) else g.add(v, alpha=momentum)
            else:
                g = v
        lr = of(h["lr"], i)
        if isinstance(lr, Tensor):
            p.sub_(g * lr)
        else:
            p.add_(g, alpha=-lr)


def _unbounded(h: Numbers) -> None:
    return None


AVG = Rule("avg", (), _average, _unbounded)
SGD = Rule("sgd", ("lr",), _sgd, _unbounded, {"momentum": 0.0}, ("momentum_buffer",))
NESTEROV = Rule("nesterov", ("lr", "momentum"), _nesterov, _unbounded, state_names=("momentum_buffer",))
