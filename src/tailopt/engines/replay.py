"""The digests of a run of real nodes, and its replay as a simulation on one machine.

Node 0 of `tailopt train`, and the server of a federation, record a digest of every tensor after every round. `replay`
simulates the same run and compares digests: the first difference is named by round and tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tailopt.algorithms import Algorithm
from tailopt.engines.model_state import trainable_parameters
from tailopt.engines.simulate import simulate
from tailopt.records import history
from tailopt.records.folder import Run, is_run
from tailopt.records.ledger import Ledger, chain_of
from tailopt.records.tensor_bytes import tensor_sha256
from tailopt.rounds.drops import DROPPED

DIGESTS = "digests.jsonl"


@dataclass(frozen=True)
class Difference:
    """Where a replay first differs from what was recorded."""

    round: int
    tensor: str
    recorded: str
    replayed: str

    def __str__(self) -> str:
        return (
            f"round {self.round}, tensor {self.tensor}: the run had {self.recorded[:12]}, the replay has "
            f"{self.replayed[:12]}"
        )


def tensor_digests(names: Sequence[str], tensors: Sequence[Tensor]) -> dict[str, str]:
    """Return the SHA-256 of every tensor's bytes."""
    return {name: tensor_sha256(t) for name, t in zip(names, tensors, strict=True)}


def recorded_digests(folder: Path) -> Ledger:
    """Return the digests of a run, checked when they are read; those of runs older than seals are not checked."""
    path, identity = folder / DIGESTS, Run.open(folder).identity
    ledger = Ledger(path, None if identity is None else identity.id)
    of_older_version = identity is None or identity.history_chain_when_id_was_given is not None
    unsealed = not ledger.seal.exists() and (of_older_version or not path.exists())
    return Ledger(path, None) if unsealed else ledger


def continued_digests(folder: Path, round: int) -> Ledger:
    """Return the digests up to a round, ready to be continued: a killed run may have recorded later rounds."""
    before = recorded_digests(folder)
    history.drop_torn_line(before.path)
    before.rewind(round)
    identity = Run.open(folder).identity
    assert identity is not None  # this process writes to the folder
    rows = chain_of(before.path, before.lines())
    ledger = Ledger(before.path, identity.id, rows)
    ledger.rewind(round, rows)  # writes the seal where there was none
    return ledger


class DigestRecorder:
    """Writes the digests of a run, a row after every round.

    Args:
        folder: of the run.
        model: whose trained parameters are recorded.
    """

    def __init__(self, folder: Path, model: torch.nn.Module) -> None:
        trained = trainable_parameters(model)
        self._folder, self._names, self._params = folder, list(trained), list(trained.values())
        self._digests: Ledger | None = None
        if is_run(folder):
            recorded_digests(folder).lines()  # checked before the first round rather than after it

    def record(self, t: int) -> None:
        """Add the row of round t, from the model as it is now."""
        if self._digests is None:
            self._digests = continued_digests(self._folder, t - 1)
        digests = tensor_digests(self._names, self._params)
        self._digests.append(history.line({"round": t, "tensors": digests}), t)


def replay(
    folder: Path, model: torch.nn.Module, algorithm: Algorithm, **settings: Any
) -> tuple[int, Difference | None]:
    """Simulate a recorded run and compare; returns the rounds that are equal, and the first difference.

    Args:
        folder: the run folder.
        model: as the run began with it.
        algorithm: of the run.
        settings: of `simulate`, those of the run.
    """
    if not (folder / DIGESTS).is_file():
        raise FileNotFoundError(f"{folder} has no {DIGESTS}: it is not a run of `tailopt train`, nor of a federation.")
    by_round: dict[int, Mapping[str, str]] = {row["round"]: row["tensors"] for row in recorded_digests(folder).read()}
    rounds = max(by_round, default=0)
    if not rounds:
        raise ValueError(f"{folder} has no finished round to replay.")
    names = list(trainable_parameters(model))
    differences: list[Difference | None] = []

    def compare(net: torch.nn.Module) -> dict[str, float]:
        t = len(differences) + 1
        recorded, replayed = by_round.get(t, {}), tensor_digests(names, list(trainable_parameters(net).values()))
        name = next((name for name in names if recorded.get(name) != replayed[name]), None)
        difference = None if name is None else Difference(t, name, recorded.get(name, "nothing"), replayed[name])
        differences.append(difference)
        return {}

    # a replay cannot repeat why a contribution was lost, but the history tells which ones were
    lost = {
        row["round"]: [e["node"] for e in row["excluded"] if e["reason"] == DROPPED]
        for row in Run.open(folder).history()
    }
    if any(lost.values()):
        settings["drops"] = lambda t, generator: lost.get(t, ())
    simulate(model, algorithm, rounds=rounds, evaluate=compare, progress=False, **settings)
    first = next((difference for difference in differences if difference is not None), None)
    return (rounds, None) if first is None else (first.round - 1, first)
