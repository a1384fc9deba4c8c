"""The section [run] of a configuration: the arguments of `simulate` that a file or the command line can set."""

from __future__ import annotations

import typing
from dataclasses import dataclass, fields
from typing import Any

import torch

from tailopt.cli.setting_values import check_type
from tailopt.rounds.policy import RoundPolicy

# settings of a round that simulations and real nodes are given in different forms
PASSED_APART = {"rounds", "nodes", "local_steps", "local_epochs", "weights", "drops", "seed"}


@dataclass(frozen=True)
class RunSettings:
    """The arguments of `simulate` that a file can hold. None where the task decides, or where it means "not".

    Attributes:
        rounds: synchronisations in all; by default the task's.
        nodes: how many; 0 is one per source of the data, where the task has sources; by default the task's.
        local_steps: of every node in every round; by default the task's, in steps or epochs.
        local_epochs: passes over a node's data in every round, instead of local_steps.
        batch_size: samples of a local step; by default the task's.
        weights: of the nodes in the mean: equal, samples (the sizes of their data), or a number for each, as in 2,1,1.
        participation: the fraction of the nodes in a round, above 0, at most 1.
        participants: how many nodes are in a round, instead of participation.
        sampling: uniform draws distinct nodes; proportional draws by weight, with replacement.
        drops: the probability that a node's contribution is lost, 0 to below 1.
        on_drop: where a node whose contribution was lost goes on: sync, from the common weights; keep, from its own.
        proximal: the factor mu of FedProx: local steps use g + mu (x - start) as the gradient; 0 for no such term.
        projection: a radius; the weights are projected onto that ball after every round.
        average: also keep the average of the rounds' weights, the r-th weighted by r.
        guard: leave out displacements that are not finite, or larger than the inner optimizer can make them.
        aggregate: mean, or a robust mean: median-norm, trimmed-mean, coordinate-median, centred-clipping.
        engine: sequential trains one node after another, vectorized all at once; auto is sequential.
        device: where the nodes compute, such as cpu or cuda; by default where the model is.
        precision: bf16 trains with autocast; weights stay as they are.
        seed: of everything that depends on chance.
        evaluate_every: rounds between two evaluations; the last round always has one.
        statistics: count the gradients' coordinates by tensor, into the history; histograms: also by magnitude.
        checkpoint_every: rounds between two checkpoints.
        keep: how many checkpoints are kept.
    """

    rounds: int | None = None
    nodes: int | None = None
    local_steps: int | None = None
    local_epochs: int | None = None
    batch_size: int | None = None
    weights: str | list[float] = "equal"  # or "samples", or one number per node
    participation: float = 1.0
    participants: int | None = None
    sampling: str = "uniform"
    drops: float = 0.0
    on_drop: str = "sync"
    proximal: float = 0.0
    projection: float | None = None
    average: bool = False
    guard: bool = True
    aggregate: str = "mean"
    engine: str = "auto"
    device: str | None = None
    precision: str | None = None
    seed: int = 0
    evaluate_every: int = 1
    statistics: bool | str = False  # or "histograms"
    checkpoint_every: int = 1
    keep: int = 3

    def round_options(self) -> dict[str, Any]:
        """Return the options of a round that `simulate` and `NestedOptimizer` take under the same name."""
        shared = {field.name for field in fields(RoundPolicy)} - PASSED_APART
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name in shared}

    def __post_init__(self) -> None:
        """Check every value against its type; the library checks ranges."""
        for name, hint in typing.get_type_hints(RunSettings).items():
            object.__setattr__(self, name, check_type(f"run.{name}", getattr(self, name), hint))
        if self.device is not None and self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(f"Invalid run.device: got {self.device!r}; torch sees no CUDA device here. Leave it out.")


def is_switch(name: str) -> bool:
    """Whether a setting is true or false, so that the command line may name it without a value."""
    return typing.get_type_hints(RunSettings).get(name) in (bool, bool | str)
