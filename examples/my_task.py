"""A task of your own: tailopt run --task examples/my_task.py:Line --algorithm avg-biclip --ilr 0.1 --i_u 0.1 --i_d 0.01

What --help and `tailopt list tasks` say about its settings comes from the docstring of the class.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from tailopt import splits
from tailopt.tasks import Defaults


@dataclass(frozen=True)
class Line:
    """A line through points whose noise has no variance.

    Args:
        samples: how many points are trained on.
        noise: the scale of the Cauchy noise.
    """

    samples: int = 400
    noise: float = 0.1
    name = "line"
    defaults = Defaults(nodes=4, rounds=20, local_steps=3, batch_size=16, metric="error")
    presets = {"small": {"samples": 40}}

    def points(self, seed: int) -> TensorDataset:
        x = torch.randn(self.samples, 1, generator=torch.Generator().manual_seed(seed))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            noise = torch.distributions.Cauchy(0.0, self.noise).sample(x.shape)
        return TensorDataset(x, 3 * x + 1 + noise)

    def model(self, seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)  # every node, and every repetition, begins with the same weights
        return torch.nn.Linear(1, 1)

    def nodes(self, seed: int, n: int) -> list[torch.utils.data.Dataset[tuple[Tensor, ...]]]:
        points = self.points(seed)
        return splits.subsets(points, splits.iid(len(points), n, seed))

    def loss(self, model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return (model(x) - y).square().mean()

    def evaluate(self, model: torch.nn.Module, seed: int) -> Mapping[str, float]:
        slope, intercept = (p.item() for p in model.parameters())
        return {"error": abs(slope - 3) + abs(intercept - 1)}
