"""SynToken: linear regression whose features are as unevenly frequent as words, with noise of any tail.

    y = X w* + noise,    w* ~ N(0, I),    X[:, :10] ~ Bernoulli(0.9),    X[:, 10:] ~ Bernoulli(0.1)

The noise is drawn once, with the data. w* is known, so the error of an estimate is its distance to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NOISES = ("none", "gaussian", "student-t", "cauchy")


@dataclass(frozen=True)
class Regression:
    """Features [samples, dimension], labels [samples] and the weights [dimension] that made them."""

    x: Tensor
    y: Tensor
    truth: Tensor

    def error(self, w: Tensor) -> float:
        """The Euclidean distance of w to the truth."""
        return float(torch.linalg.vector_norm(w.detach() - self.truth))


def syntoken(
    seed: int,
    samples: int = 5000,
    dimension: int = 100,
    noise: str = "student-t",
    scale: float = 1.0,
    df: float = 1.5,
    dtype: torch.dtype = torch.float32,
) -> Regression:
    """The SynToken regression problem of a seed.

    Args:
        noise: "none", "gaussian" (standard deviation `scale`), "student-t" (`df` degrees of freedom; the variance is
            infinite up to df = 2, the mean up to 1) or "cauchy"; all of them multiplied by `scale`.

    Examples:
        >>> problem = syntoken(seed=0, noise="none")
        >>> problem.x.shape, float((problem.x @ problem.truth - problem.y).abs().max())
        (torch.Size([5000, 100]), 0.0)
    """
    if noise not in NOISES:
        raise ValueError(f"Unknown noise: {noise!r}; need one of {', '.join(NOISES)}.")
    generator = torch.Generator().manual_seed(seed)
    frequent = torch.full((dimension,), 0.1)
    frequent[:10] = 0.9
    x = torch.bernoulli(frequent.expand(samples, dimension), generator=generator).to(dtype)
    truth = torch.randn(dimension, generator=generator).to(dtype)
    return Regression(x, x @ truth + scale * _noise(noise, samples, df, generator).to(dtype), truth)


def _noise(kind: str, n: int, df: float, generator: torch.Generator) -> Tensor:
    if kind == "none":
        return torch.zeros(n)
    normal = torch.randn(n, generator=generator, dtype=torch.float64)
    if kind == "gaussian":
        return normal
    if kind == "cauchy":
        return normal / torch.randn(n, generator=generator, dtype=torch.float64)
    # torch.distributions takes no generator; a t variable is a normal one over the root of a chi-squared one by df
    chi_squared = 2 * torch._standard_gamma(torch.full((n,), df / 2, dtype=torch.float64), generator=generator)
    return normal / (chi_squared / df).sqrt()
