"""Local steps with the proximal term: the inner optimizer steps on g + mu (x - start), and p.grad is g again later.

Gradients are replaced, not changed: a loop that accumulates, clips or logs them between steps finds its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tailopt.clipping.dtensor import is_dtensor, summed
from tailopt.distributed.mesh import local_tensor
from tailopt.rounds.proximal import proximal_gradient

Closure = Callable[[], Any]


class ProximalStep:
    """Takes steps of an inner optimizer on gradients with the proximal term.

    Args:
        params: to which the term is added.
        mu: its factor, above 0.
        start: returns the global weights of this round, one tensor for each parameter: this rank's part, real, in the
            parameter's type. It is called once in a round.
    """

    def __init__(self, params: Sequence[Tensor], mu: float, start: Callable[[], Sequence[Tensor]]) -> None:
        self._params, self.mu, self._start = params, mu, start
        self._start_of_round: Sequence[Tensor] | None = None
        self._gradients: list[tuple[Tensor, Tensor]] = []  # what was replaced, by parameter

    def begin_round(self) -> None:
        """Forget where the last round started."""
        self._start_of_round = None

    def __call__(self, step: Callable[[Closure | None], Any], closure: Closure | None) -> Any:
        """Call `step(closure)` with the term in all gradients, also in those that the closure computes."""

        def with_term() -> Any:
            self._give_back()  # of an optimizer that calls its closure several times
            assert closure is not None
            value = closure()
            self._replace()
            return value

        try:
            if closure is not None:
                return step(with_term)
            self._replace()
            return step(None)
        finally:
            self._give_back()

    @torch.no_grad()
    def _replace(self) -> None:
        """Replace every gradient; a parameter that the loss did not reach has none, and does not move."""
        if self._start_of_round is None:
            self._start_of_round = self._start()
        for p, x0 in zip(self._params, self._start_of_round, strict=True):
            if p.grad is None:
                continue
            own, g = p.grad, summed(p.grad)
            part = proximal_gradient(local_tensor(g), local_tensor(p), x0, self.mu)
            if is_dtensor(g):
                g = torch.empty_like(g)
                local_tensor(g).copy_(part)
            else:
                g = part
            self._gradients.append((p, own))
            p.grad = g

    def _give_back(self) -> None:
        while self._gradients:
            p, own = self._gradients.pop()
            p.grad = own
