"""A known objective with fresh, centred, heavy-tailed noise in every gradient: what convergence theorems assume.

    gradient on node i  =  grad F_i(w) + noise,    F = mean of F_i,    F_i(w) = sum_j phi_ij((Q' w)_j - c_ij)
    convex        phi(s) = k s^2 / 2                         F* and its minimum known exactly
    non-convex    phi(s) = k s^2 / (1 + s^2) + r s^2 / 2     flat and concave away from c; grad F known exactly

Q is a rotation, so that no coordinate has a problem of its own; curvatures k and centres c differ from node to node.
A batch is the noise itself, and the loss is F_i(w) + <noise, w>.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils.data import Dataset

from tailopt.arguments import whole_number
from tailopt.seeds import generator
from tailopt.tasks.task import Defaults

OBJECTIVES = ("convex", "non-convex")

MU = 1.0  # the smallest curvature of any node
SPREAD = 4.0  # the largest eigenvalue over the smallest, before nodes differ
DIFFER = 1.5  # a node's curvatures lie between 1 and this many times the common ones
RIDGE = 0.2  # r: far from c the gradient grows again, so that no run can find a small one by running away
DRAWS = 2**20  # of a node's noise before any is used again, where it is read as a data set

Batch = tuple[int | Tensor, Tensor]  # the node, and the noise of shape [..., dimension]


@dataclass(frozen=True)
class Problem:
    """F and everything that is known about it; rows of w, of shape [..., dimension], are points of their own.

    Attributes:
        basis: Q, orthogonal, [dimension, dimension].
        curvatures: k, at least 1, [parts, dimension].
        centres: c in the rotated coordinates, [parts, dimension].
    """

    objective: str
    basis: Tensor
    curvatures: Tensor
    centres: Tensor

    def value(self, part: int, w: Tensor) -> Tensor:
        """F_part(w) of every row."""
        return self._phi(w @ self.basis - self.centres[part], self.curvatures[part]).sum(-1)

    def gradients(self, w: Tensor) -> Tensor:
        """Grad F_i(w) of every row and part, in closed form: [..., parts, dimension]."""
        s = (w @ self.basis).unsqueeze(-2) - self.centres
        if self.objective == "convex":
            slopes = self.curvatures * s
        else:
            slopes = 2 * self.curvatures * s / (1 + s * s).square() + RIDGE * s
        return slopes @ self.basis.T

    def gradient(self, w: Tensor) -> Tensor:
        """Grad F(w) of every row."""
        return self.gradients(w).mean(-2)

    def squared_gradient(self, w: Tensor) -> Tensor:
        """||grad F(w)||^2 of every row."""
        return self.gradient(w).square().sum(-1)

    def optimum(self) -> Tensor:
        """The minimum of the convex F."""
        self._only_convex("optimum")
        return (self.curvatures * self.centres).sum(0) / self.curvatures.sum(0) @ self.basis.T

    def gap(self, w: Tensor) -> Tensor:
        """F(w) - F* of every row, for the convex F: half the mean curvature times the squared distance, exactly."""
        distance = (w - self.optimum()) @ self.basis
        return (self.curvatures.mean(0) * distance.square()).sum(-1) / 2

    def _phi(self, s: Tensor, k: Tensor) -> Tensor:
        square = s * s
        if self.objective == "convex":
            return k * square / 2
        return k * square / (1 + square) + RIDGE / 2 * square

    def _only_convex(self, what: str) -> None:
        if self.objective != "convex":
            raise ValueError(f"Invalid objective: the {what} is known for 'convex' alone, got {self.objective!r}.")


class Points(torch.nn.Module):
    """Independent points in one model, all at 0 at first: one matrix of them, or with `separate` a tensor each."""

    def __init__(self, replicas: int, dimension: int, separate: bool) -> None:
        super().__init__()
        shapes = [(dimension,)] * replicas if separate else [(replicas, dimension)]
        self.points = torch.nn.ParameterList(torch.zeros(shape, dtype=torch.float64) for shape in shapes)

    def forward(self) -> Tensor:
        """All points, [replicas, dimension]."""
        parts = list(self.points)
        return parts[0] if parts[0].dim() == 2 else torch.stack(parts)


@dataclass(frozen=True)
class GradientNoise:
    """The task `gradient-noise`: w starts at 0, in float64; node i has the objective i modulo `parts`.

    Each coordinate of the noise is scale * (sign * X - its mean), with X Lomax: P(X > x) = (1 + x)^(-df). df is
    alpha + excess: a moment is finite below df only, so that the alpha-moment just about is, which is all that the
    theorems ask for, and the variance never for alpha up to 1.9. Skewed noise is the harder kind: clipping it
    moves its mean, which leaves symmetric noise as it is.

    Args:
        objective: "convex" or "non-convex".
        alpha: the order of the moment that is finite, 1 < alpha < 2.
        excess: df - alpha, by how much more than that moment is finite.
        scale: of the noise; 0 for none.
        skew: in [-1, 1]: the sign is + with probability (1 + skew) / 2.
        distance: standard deviation of the coordinates of the common centre, where w starts at 0.
        heterogeneity: standard deviation of a node's own centre around it.
        replicas: points that are trained side by side, each with noise of its own: independent repetitions, at the
            price of one run, of whatever acts on each coordinate by itself.
        dimension: coordinates of a point.
        parts: how many objectives the nodes have in turn.
        separate: a tensor for each of them, for rules with a norm (`scope="tensor"`).

    Examples:
        >>> task = GradientNoise(scale=0.0)
        >>> model = task.model(seed=0)
        >>> round(task.evaluate(model, seed=0)["gap"], 1)
        51.4
    """

    objective: str = "convex"
    alpha: float = 1.5
    excess: float = 0.05
    scale: float = 0.3
    skew: float = 0.5
    dimension: int = 20
    parts: int = 3
    distance: float = 1.5
    heterogeneity: float = 1.0
    replicas: int = 1
    separate: bool = False
    defaults: Defaults = Defaults(nodes=3, rounds=1000, local_steps=2, batch_size=1, metric="gradient")

    def __post_init__(self) -> None:
        """Refuse what has no mean, and what cannot be built."""
        if self.objective not in OBJECTIVES:
            raise ValueError(f"Unknown objective: {self.objective!r}; need one of {', '.join(OBJECTIVES)}.")
        if not 1 < self.alpha < 2:
            raise ValueError(f"Invalid alpha: got {self.alpha}; need 1 < alpha < 2. At 1 the noise has no mean.")
        if not self.excess > 0:
            raise ValueError(f"Invalid excess: got {self.excess}; need > 0. At 0 the alpha-moment is infinite.")
        if not -1 <= self.skew <= 1:
            raise ValueError(f"Invalid skew: got {self.skew}; need -1 <= skew <= 1.")
        if self.scale < 0:
            raise ValueError(f"Invalid scale: got {self.scale}; need >= 0.")
        for name in ("dimension", "parts", "replicas"):
            whole_number(name, getattr(self, name), low=1, convert=True)

    @property
    def name(self) -> str:
        """The name in the table of tasks."""
        return "gradient-noise"

    @property
    def df(self) -> float:
        """The tail's exponent: moments below it are finite."""
        return self.alpha + self.excess

    def problem(self, seed: int) -> Problem:
        """The objective of a seed."""
        return problem(seed, self.objective, self.dimension, self.parts, self.distance, self.heterogeneity)

    def model(self, seed: int) -> Points:
        """Every point at 0."""
        return Points(self.replicas, self.dimension, self.separate)

    def noise(self, rng: torch.Generator) -> Tensor:
        """One draw for every point, [replicas, dimension]."""
        # In float64: with the 24 bits of a float32 the tail would end at 2^(24/df).
        return self.noise_of(1 - torch.rand(self.replicas, self.dimension, dtype=torch.float64, generator=rng))

    def noise_of(self, u: Tensor) -> Tensor:
        """The noise made of numbers u that are uniform on (0, 1]."""
        plus = (1 + self.skew) / 2
        up = u <= plus
        # Given the sign, u is uniform again on its part of (0, 1].
        rest = torch.where(up, u / max(plus, 1e-300), (u - plus) / max(1 - plus, 1e-300))
        lomax = rest.pow(-1 / self.df) - 1
        return self.scale * (torch.where(up, lomax, -lomax) - self.skew / (self.df - 1))

    def batches(self, node: int, round: int, step: int, generator: torch.Generator) -> Batch:
        """For `simulate(batches=...)`: noise that never comes again."""
        return node, self.noise(generator)

    def nodes(self, seed: int, n: int) -> Sequence[Dataset[Batch]]:
        """The noise of n nodes as data sets of 2**20 draws each; a batch of b of them has the mean of b draws."""
        if n % self.parts:
            raise ValueError(
                f"Invalid nodes: got {n}; need a multiple of parts={self.parts}, so that F is the mean over nodes. "
                "Change one of them."
            )
        return [_Draws(self, seed, node) for node in range(n)]

    def loss(self, model: torch.nn.Module, batch: Batch, seed: int = 0) -> Tensor:
        """F_i(w) + <noise, w>, summed over the points. The objective is that of seed 0 unless told otherwise."""
        node, noise = batch
        part = int(node if isinstance(node, int) else node.flatten()[0]) % self.parts
        w: Tensor = model()
        drawn = noise if noise.dim() == 2 else noise.mean(0)
        return self.problem(seed).value(part, w).sum() + (drawn * w).sum()

    def evaluate(self, model: torch.nn.Module, seed: int) -> Mapping[str, float]:
        """||grad F||^2, and F - F* for the convex F: means over the points, free of noise."""
        known, w = self.problem(seed), model().detach()
        values = {"gradient": float(known.squared_gradient(w).mean())}
        if self.objective == "convex":
            values["gap"] = float(known.gap(w).mean())
        return values


@lru_cache(maxsize=32)
def problem(
    seed: int,
    objective: str = "convex",
    dimension: int = 20,
    parts: int = 3,
    distance: float = 1.5,
    heterogeneity: float = 1.0,
) -> Problem:
    """Draw the objective of a seed; `GradientNoise` describes the arguments.

    Examples:
        >>> known = problem(0)
        >>> float(known.squared_gradient(known.optimum())) < 1e-24
        True
    """
    rng = generator(seed, "gradient-noise")
    basis = torch.linalg.qr(torch.randn(dimension, dimension, dtype=torch.float64, generator=rng)).Q
    common = MU * SPREAD ** torch.linspace(0, 1, dimension, dtype=torch.float64)
    factors = 1 + (DIFFER - 1) * torch.rand(parts, dimension, dtype=torch.float64, generator=rng)
    centre = distance * torch.randn(dimension, dtype=torch.float64, generator=rng)
    offsets = torch.randn(parts, dimension, dtype=torch.float64, generator=rng)
    return Problem(objective, basis, common * factors, centre + heterogeneity * (offsets - offsets.mean(0)))


@dataclass(frozen=True)
class _Draws(Dataset[Batch]):
    """A node's noise by number."""

    task: GradientNoise
    seed: int
    node: int

    def __len__(self) -> int:
        return DRAWS

    def __getitem__(self, number: int) -> Batch:
        if not 0 <= number < DRAWS:
            raise IndexError(number)
        return self.node, self.task.noise(generator(self.seed, "gradient-noise draw", self.node, int(number)))
