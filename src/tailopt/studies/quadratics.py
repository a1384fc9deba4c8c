"""Quadratic objectives, one per node, whose optima and biases are known exactly.

    F_i(x) = (x - b_i)' A_i (x - b_i) / 2,    F = sum of p_i F_i

Where node i has the share s_i of a round's mean instead of its weight p_i, what is minimised is sum of E[s_i] F_i; F at
that optimum less F at its own is the bias.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tailopt.seeds import generator


@dataclass(frozen=True)
class Quadratics:
    """Quadratic objectives: A_i in hessians [nodes, dimension, dimension], b_i in optima [nodes, dimension]."""

    hessians: Tensor
    optima: Tensor

    def optimum(self, shares: Tensor) -> Tensor:
        """Where the sum of s_i F_i is least: (sum s_i A_i)^-1 sum s_i A_i b_i."""
        pull = torch.einsum("n,nij,nj->i", shares, self.hessians, self.optima)
        optimum: Tensor = torch.linalg.solve(self.hessian(shares), pull)
        return optimum

    def hessian(self, shares: Tensor) -> Tensor:
        """The curvature of the sum of s_i F_i."""
        return torch.einsum("n,nij->ij", shares, self.hessians)

    def gap(self, x: Tensor, weights: Tensor) -> float:
        """F(x) - F*: (x - x*)' H (x - x*) / 2, F with these weights."""
        e = x - self.optimum(weights)
        return float(e @ self.hessian(weights) @ e) / 2

    def bias(self, weights: Tensor, shares: Tensor) -> float:
        """F - F* at the optimum that other shares lead to.

        Examples:
            >>> two = Quadratics(torch.ones(2, 1, 1), torch.tensor([[-1.0], [1.0]]))
            >>> two.bias(torch.tensor([0.5, 0.5]), torch.tensor([0.0, 1.0]))  # the first node is always missing
            0.5
        """
        return self.gap(self.optimum(shares), weights)

    def convexity(self) -> float:
        """Mu: the least curvature of any node's objective."""
        return float(torch.linalg.eigvalsh(self.hessians).min())


def two_camps(nodes: int, dimension: int, far: tuple[int, ...], distance: float) -> Quadratics:
    """One problem for all seeds: curvatures of 200 Gaussian samples per node; the optima of some nodes lie far away."""
    source = generator(0, "failures problem")
    x = torch.randn(nodes, 200, dimension, generator=source, dtype=torch.float64)
    optima = torch.randn(nodes, dimension, generator=source, dtype=torch.float64) / math.sqrt(dimension)
    direction = torch.randn(dimension, generator=source, dtype=torch.float64)
    optima[list(far)] -= distance * direction / torch.linalg.vector_norm(direction)
    return Quadratics(x.mT @ x / 200, optima)


class PointModel(torch.nn.Module):
    """The model: a vector that starts at 0."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(torch.zeros(dimension, dtype=torch.float64))


def noisy_loss(model: torch.nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """F_i plus a linear term, so that its gradient is the gradient of F_i plus noise; batch: A_i, b_i, noise."""
    (x,) = model.parameters()
    hessian, optimum, noise = batch
    e = x - optimum
    return e @ (hessian @ e) / 2 + noise @ x
