"""What an engine is: how the displacements of a round are produced, and what nodes keep between rounds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from tailopt.rounds.participants import Participants
from tailopt.rounds.round import Contribution, DivergedState, GlobalState, RoundResult
from tailopt.rules.rule import ParamState

Evaluate = Callable[[torch.nn.Module], Mapping[str, Any]]


class Engine(Protocol):
    """Produces the contributions of a round. While it does, it changes nothing that a checkpoint holds.

    Attributes:
        steps_done: local steps that every node has taken since the run began.
        optimizer_states: the inner optimizer's state of every node that keeps one.
        diverged_states: of every node that continues from weights of its own.
        repeatability_probe: a digest of the last round's first batch, to be compared when a run is resumed.
    """

    steps_done: list[int]
    optimizer_states: dict[int, list[ParamState]]
    diverged_states: dict[int, DivergedState]
    repeatability_probe: dict[str, Any]

    def contributions(
        self, state: GlobalState, participants: Participants, diverging: Collection[int] = ()
    ) -> Iterator[Contribution]:
        """Train every participant of the next round, in ascending order.

        A contribution may alias the model's memory: use it before you advance the iterator.

        diverging: nodes that start their next round from the weights that they end this one with.
        """

    def load_into_model(self, state: GlobalState) -> None:
        """Load the global weights and buffers into the model.

        This overwrites the memory that a contribution may alias: call it when no contribution is needed any more.
        """

    def keep_node_states(self, result: RoundResult) -> None:
        """Take over what nodes keep after a round."""

    def evaluate(self, state: GlobalState, function: Evaluate) -> dict[str, Any]:
        """Return the user's metrics of the global model."""

    def statistics_row(self, result: RoundResult, names: Sequence[str]) -> dict[str, Any]:
        """Return the gradient statistics of a round, for the history."""

    def check_repeatable(self) -> None:
        """Refuse data that do not give the same batches again."""
