"""The interface of a task: data, model, loss and metric, with defaults for a run. A task knows no algorithm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Defaults:
    """How a task is run unless a setting overrides it."""

    nodes: int
    rounds: int
    local_steps: int | None = None
    local_epochs: int | None = None
    batch_size: int = 32
    weights: str | None = None  # None: equal; "samples"
    participants: int | None = None  # nodes in a round; None: all
    metric: str = "loss"  # the metric of `evaluate` that runs are compared by
    lower_is_better: bool = True


@dataclass(frozen=True)
class Baseline:
    """What a model reaches that ignores its input. name: of that model; metrics: as `evaluate` returns them."""

    name: str
    metrics: Mapping[str, float]


class Task(Protocol):
    """One problem. Everything is a function of a seed, so that a run can be repeated.

    A task may also have `data_description`, a sentence about its data for reports, and `baseline`, a `Baseline` that
    figures show as a line to compare with, or None.
    """

    @property
    def name(self) -> str:
        """The name in the table of tasks."""

    @property
    def defaults(self) -> Defaults:
        """How the task is run unless a setting overrides it."""

    def model(self, seed: int) -> torch.nn.Module:
        """Build a model."""

    def nodes(self, seed: int, n: int) -> Sequence[Any]:
        """Return the data of n nodes."""

    def loss(self, model: torch.nn.Module, batch: Any) -> Tensor:
        """Return the loss of a batch, a scalar."""

    def evaluate(self, model: torch.nn.Module, seed: int) -> Mapping[str, float]:
        """Return the metrics of a model on data that it is not trained on."""
