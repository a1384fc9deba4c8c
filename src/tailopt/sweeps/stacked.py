"""Many settings of one algorithm on linear regression, over many seeds at once: a case of `engines.configurations`.

The batches are those of the simulation, so that every setting follows `tailopt.simulate` up to rounding. All nodes take
part in every round, with equal weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from tailopt.algorithms import Algorithm
from tailopt.engines.configuration_rounds import Configurations, Replica
from tailopt.engines.configurations import train_configurations
from tailopt.rounds.policy import RoundPolicy
from tailopt.splits.loaders import NodeData
from tailopt.tasks.synthetic import Synthetic


@dataclass(frozen=True)
class Batches:
    """The data of several seeds and nodes, in the order in which they are read.

    x: [seeds, samples, dimension], y: [seeds, samples]; rows: [seeds, nodes, steps, batch]; sizes: [seeds, nodes,
    steps], how many of the rows of a batch count: the last batch of a pass is shorter.
    """

    task: Synthetic
    x: Tensor
    y: Tensor
    truth: Tensor
    rows: Tensor
    sizes: list[list[list[int]]]

    @classmethod
    def of(cls, task: Synthetic, seeds: Sequence[int], nodes: int, steps: int, batch_size: int) -> Batches:
        """The batches that the simulation reads with these seeds."""
        problems = [task.problem(seed) for seed in seeds]
        rows = torch.zeros(len(seeds), nodes, steps, batch_size, dtype=torch.int64)
        sizes = [[[0] * steps for _ in range(nodes)] for _ in seeds]
        for s, seed in enumerate(seeds):
            for i, part in enumerate(task.parts(seed, nodes)):
                data = NodeData(TensorDataset(part), i, seed, batch_size)
                for k in range(steps):
                    index = part[data.indices(k)]
                    rows[s, i, k, : len(index)] = index
                    sizes[s][i][k] = len(index)
        x, y, truth = (torch.stack([getattr(p, name) for p in problems]) for name in ("x", "y", "truth"))
        return cls(task, x, y, truth, rows, sizes)

    def source(self, seed: int, local_steps: int) -> SeedBatches:
        """The batches of one seed, by its position."""
        return SeedBatches(self, seed, local_steps)


class SeedBatches:
    """The batches of one seed, as an engine asks for them."""

    not_repeatable_because = ""

    def __init__(self, data: Batches, seed: int, local_steps: int) -> None:
        self._data, self._seed, self._local_steps = data, seed, local_steps
        self.nodes = data.rows.shape[1]

    def samples(self) -> list[float] | None:
        """Return None: nodes have equal weights."""
        return None

    def steps(self, node: int) -> int:
        """Return the local steps of a round."""
        return self._local_steps

    def batches(self, node: int, t: int, steps_done: int, steps: int) -> Iterator[Any]:
        """Return the batches of one round of a node."""
        data, s, end = self._data, self._seed, steps_done + steps
        index = data.rows[s, node, steps_done:end]  # all of the round at once: a small batch takes microseconds
        xs, ys, sizes = data.x[s][index].unbind(), data.y[s][index].unbind(), data.sizes[s][node][steps_done:end]
        for x, y, size in zip(xs, ys, sizes, strict=True):
            yield x[:size], y[:size]


def errors(
    data: Batches,
    make: Callable[[Mapping[str, Any]], Algorithm],
    points: Sequence[Mapping[str, float]],
    rounds: int,
    local_steps: int,
) -> Tensor:
    """The distance to the truth after every round: [settings, seeds, rounds]; NaN where a setting has diverged.

    make: settings -> the algorithm; called once for every point.
    """
    algorithms = [make(p) for p in points]

    def distance(t: int, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        (w,) = weights.values()  # [seeds, settings, 1, dimension]
        return {"error": torch.linalg.vector_norm(w.squeeze(-2) - data.truth[:, None], dim=-1)}

    policy = RoundPolicy(
        rounds=rounds, local_steps=local_steps, nodes=data.rows.shape[1], inner_state=algorithms[0].inner_state
    )
    replicas = tuple(
        Replica(model=data.task.model(s), batches=data.source(s, local_steps), policy=policy)
        for s in range(len(data.x))
    )
    task = Configurations(
        replicas=replicas,
        loss=data.task.loss,
        schedules=None,
        device=torch.device("cpu"),
        precision=None,
        measure=distance,
    )
    found = train_configurations(task, algorithms, engine="vectorized").measured
    if not found:  # all of them diverged in the first round
        return torch.full((len(points), len(replicas), rounds), torch.nan, dtype=data.x.dtype)
    return found["error"].transpose(0, 1).to(data.x.dtype)
