"""Many settings of one algorithm on linear regression, over many seeds, as one tensor program.

Weights are stacked as [settings, seeds, nodes, dimension], and the rules of the simulation step all of them at once;
the gradient of half the mean squared error is written out. The batches are those of the simulation, so that every
setting follows `tailopt.simulate` up to rounding. It is for tuning: no guard, no partial participation, equal weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from tailopt.algorithms import Algorithm
from tailopt.rules.adam import initial_adam_state
from tailopt.rules.rule import State
from tailopt.splits.loaders import NodeData
from tailopt.tasks.synthetic import Synthetic


@dataclass(frozen=True)
class Batches:
    """The data of several seeds and nodes, in the order in which they are read.

    x: [seeds, samples, dimension], y: [seeds, samples]; rows: [seeds, nodes, steps, batch]; share: the weight of a
    sample, 1 / size of its batch, 0 where a batch is padded.
    """

    x: Tensor
    y: Tensor
    truth: Tensor
    rows: Tensor
    share: Tensor

    @classmethod
    def of(cls, task: Synthetic, seeds: Sequence[int], nodes: int, steps: int, batch_size: int) -> Batches:
        """The batches that the simulation reads with these seeds."""
        problems = [task.problem(seed) for seed in seeds]
        rows = torch.zeros(len(seeds), nodes, steps, batch_size, dtype=torch.int64)
        share = torch.zeros(len(seeds), nodes, steps, batch_size, dtype=task.dtype)
        for s, seed in enumerate(seeds):
            for i, part in enumerate(task.parts(seed, nodes)):
                data = NodeData(TensorDataset(part), i, seed, batch_size)
                for k in range(steps):
                    index = part[data.indices(k)]
                    rows[s, i, k, : len(index)] = index
                    share[s, i, k, : len(index)] = 1 / len(index)
        x, y, truth = (torch.stack([getattr(p, name) for p in problems]) for name in ("x", "y", "truth"))
        return cls(x, y, truth, rows, share)

    def gradient(self, w: Tensor, step: int) -> Tensor:
        """The gradient of half the mean squared error, for w of [settings, seeds, nodes, dimension]."""
        seeds = torch.arange(len(self.x))[:, None, None]
        x, y = self.x[seeds, self.rows[:, :, step]], self.y[seeds, self.rows[:, :, step]]
        residual = (torch.einsum("snbm,ksnm->ksnb", x, w) - y) * self.share[:, :, step]
        return torch.einsum("snbm,ksnb->ksnm", x, residual)


@torch.no_grad()
def errors(
    data: Batches,
    make: Callable[[Mapping[str, Any]], Algorithm],
    points: Sequence[Mapping[str, float]],
    rounds: int,
    local_steps: int,
) -> Tensor:
    """The distance to the truth after every round: [settings, seeds, rounds].

    make: settings -> the algorithm; called once for every point.
    """
    k, (s, n) = len(points), data.rows.shape[:2]
    algorithms = [make(p) for p in points]
    first = algorithms[0]
    outer, inner = first.rule("outer"), first.rule("inner")
    dtype, m = data.x.dtype, data.truth.shape[-1]
    outer_numbers = {**_stacked(algorithms, "outer", (k, 1, 1), dtype), "leading": 2}
    inner_numbers = {**_stacked(algorithms, "inner", (k, 1, 1, 1), dtype), "leading": 3}
    x = torch.zeros(k, s, m, dtype=dtype)
    outer_states: list[State] = [{}]
    inner_states: list[State] = [{}]
    distances = []
    for t in range(rounds):
        w = x[:, :, None, :].expand(k, s, n, m).clone()
        if first.inner_state != "keep":
            inner_states = [{}]
            if first.send_preconditioner and t:
                v = outer_states[0]["exp_avg_sq"][:, :, None, :].expand_as(w)
                inner_states = [initial_adam_state(w, v, 0 if first.send_preconditioner == "raw" else t)]
        for step in range(local_steps):
            inner.step([w], [data.gradient(w, t * local_steps + step)], inner_states, inner_numbers)
        delta = (w - x[:, :, None, :]).mean(2)
        outer.step([x], [-delta], outer_states, outer_numbers)
        distances.append(torch.linalg.vector_norm(x - data.truth, dim=-1))
    return torch.stack(distances, dim=-1)


def _stacked(algorithms: Sequence[Algorithm], level: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    """The rule's hyperparameters: one tensor for those that differ between the algorithms, unchanged otherwise."""
    every = [a.hparams(level) for a in algorithms]
    never_stacked = ("betas", "bias_correction", "scope", "dead_zone")
    return {
        word: value
        if word in never_stacked or all(other[word] == value for other in every)
        else torch.tensor([other[word] for other in every], dtype=dtype).reshape(shape)
        for word, value in every[0].items()
    }
