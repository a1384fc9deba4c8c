"""Linear regression with known weights, features of two kinds and noise of any tail.

    y = X w* + noise,    w* ~ N(0, I)
    syntoken    X[:, :10] ~ Bernoulli(0.9), X[:, 10:] ~ Bernoulli(0.1): as unevenly frequent as words
    gaussian    X ~ N(0, I)

The noise is drawn once, with the data, before they are split. w* is known, so the error of an estimate is its distance
to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from tailopt.seeds import generator
from tailopt.splits.partitions import dirichlet, iid
from tailopt.tasks.task import Defaults

FEATURES = ("syntoken", "gaussian")
TENTHS = 10  # classes of labels
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


@dataclass(frozen=True)
class Synthetic:
    """The convex task: M = 5000 samples of dimension 100 over 10 nodes, IID; w starts at 0.

    Args:
        features: "syntoken" or "gaussian".
        noise: "none", "gaussian" (standard deviation `scale`), "student-t" (`df` degrees of freedom; the variance is
            infinite up to df = 2, the mean up to 1) or "cauchy"; all of them multiplied by `scale`.
        scale: of the noise.
        df: degrees of freedom of Student's t.
        samples: rows of the data, dealt to the nodes.
        dimension: coordinates of the weights.
        alpha: how evenly samples are dealt: the shares of the nodes in every tenth of the labels, sorted by size, are
            drawn from a Dirichlet distribution with alpha, so that nodes have labels of different sizes. None: IID.
        dtype: of the data and the weights.

    Examples:
        >>> task = Synthetic(noise="none")
        >>> model = task.model(seed=0)
        >>> round(task.evaluate(model, seed=0)["error"], 2)  # w = 0: the length of w* itself
        9.1
    """

    features: str = "syntoken"
    noise: str = "student-t"
    scale: float = 1.0
    df: float = 1.5
    samples: int = 5000
    dimension: int = 100
    alpha: float | None = None
    dtype: torch.dtype = torch.float32
    defaults: Defaults = Defaults(nodes=10, rounds=60, local_steps=5, batch_size=32, metric="error")

    @property
    def name(self) -> str:
        """The name in the table of tasks, which is that of the features."""
        return self.features

    def problem(self, seed: int) -> Regression:
        """Return the data of a seed."""
        return regression(
            seed, self.samples, self.dimension, self.noise, self.scale, self.df, self.dtype, self.features
        )

    def model(self, seed: int) -> torch.nn.Module:
        """A linear map without bias, at 0."""
        model = torch.nn.Linear(self.dimension, 1, bias=False, dtype=self.dtype)
        torch.nn.init.zeros_(model.weight)
        return model

    def nodes(self, seed: int, n: int) -> list[Dataset[tuple[Tensor, ...]]]:
        """The samples, dealt out at random, or by their labels."""
        problem = self.problem(seed)
        return [TensorDataset(problem.x[part], problem.y[part]) for part in self.parts(seed, n)]

    def parts(self, seed: int, n: int) -> list[Tensor]:
        """Return the sample numbers of every node."""
        if self.alpha is None:
            return iid(self.samples, n, seed)
        tenths = self.problem(seed).y.argsort().argsort() * TENTHS // self.samples
        return dirichlet(tenths, n, self.alpha, seed=seed, at_least=1)

    def loss(self, model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Half the mean squared error."""
        x, y = batch
        predicted: Tensor = model(x)
        return (predicted.squeeze(-1) - y).square().mean() / 2

    def evaluate(self, model: torch.nn.Module, seed: int) -> Mapping[str, float]:
        """The distance of the model's weights to the truth."""
        (w,) = model.parameters()
        return {"error": self.problem(seed).error(w.squeeze(0))}


@lru_cache(maxsize=16)
def regression(
    seed: int,
    samples: int = 5000,
    dimension: int = 100,
    noise: str = "student-t",
    scale: float = 1.0,
    df: float = 1.5,
    dtype: torch.dtype = torch.float32,
    features: str = "syntoken",
) -> Regression:
    """Draw the regression problem of a seed; `Synthetic` describes the arguments.

    Examples:
        >>> problem = regression(seed=0, noise="none")
        >>> problem.x.shape, float((problem.x @ problem.truth - problem.y).abs().max())
        (torch.Size([5000, 100]), 0.0)
    """
    if noise not in NOISES:
        raise ValueError(f"Unknown noise: {noise!r}; need one of {', '.join(NOISES)}.")
    if features not in FEATURES:
        raise ValueError(f"Unknown features: {features!r}; need one of {', '.join(FEATURES)}.")
    rng = generator(seed, "regression")
    if features == "gaussian":
        x = torch.randn(samples, dimension, generator=rng).to(dtype)
    else:
        frequent = torch.full((dimension,), 0.1)
        frequent[:10] = 0.9
        x = torch.bernoulli(frequent.expand(samples, dimension), generator=rng).to(dtype)
    truth = torch.randn(dimension, generator=rng).to(dtype)
    return Regression(x, x @ truth + scale * draw_noise(noise, samples, df, rng).to(dtype), truth)


def draw_noise(kind: str, n: int, df: float, rng: torch.Generator) -> Tensor:
    """Draw n numbers of a noise, in float64."""
    if kind == "none":
        return torch.zeros(n, dtype=torch.float64)
    normal = torch.randn(n, generator=rng, dtype=torch.float64)
    if kind == "gaussian":
        return normal
    if kind == "cauchy":
        return normal / torch.randn(n, generator=rng, dtype=torch.float64)
    # torch.distributions takes no generator; a t variable is a normal one over the root of a chi-squared one by df
    chi_squared = 2 * torch._standard_gamma(torch.full((n,), df / 2, dtype=torch.float64), generator=rng)
    return normal / (chi_squared / df).sqrt()
