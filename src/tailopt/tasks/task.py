"""What a task is: data, model, loss and metric, with the numbers that belong to them. It knows no algorithm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Defaults:
    """How a task is run where nobody says otherwise."""

    nodes: int
    rounds: int
    local_steps: int | None = None
    local_epochs: int | None = None
    batch_size: int = 32
    weights: str | None = None  # None: equal; "samples"
    participants: int | None = None  # nodes in a round; None: all
    metric: str = "loss"  # what of `evaluate` decides
    lower_is_better: bool = True


class Task(Protocol):
    """One problem. Everything is a function of a seed, so that a run can be repeated."""

    @property
    def name(self) -> str:
        """As in the table of tasks."""

    @property
    def defaults(self) -> Defaults:
        """How it is run where nobody says otherwise."""

    def model(self, seed: int) -> torch.nn.Module:
        """A fresh model."""

    def nodes(self, seed: int, n: int) -> Sequence[Any]:
        """The data of n nodes."""

    def loss(self, model: torch.nn.Module, batch: Any) -> Tensor:
        """A scalar."""

    def evaluate(self, model: torch.nn.Module, seed: int) -> Mapping[str, float]:
        """The metrics of a model on what this seed holds out."""
