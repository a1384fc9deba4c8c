"""A run of real nodes, trained and replayed.

`train` is the training loop of a task under torchrun: the simulation's batches, seeds and steps on this node, with
`NestedOptimizer` between the nodes. Node 0 writes a digest of every tensor after every round. `replay` simulates the
same run on one machine and compares digests: the first difference is named by round and tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tailopt.algorithms import Algorithm
from tailopt.distributed.nested_optimizer import NestedOptimizer
from tailopt.engines.batches import DatasetBatches, LossFunction
from tailopt.engines.engine import Evaluate
from tailopt.engines.model_state import trainable
from tailopt.engines.sequential import seed_python_and_numpy, seed_torch
from tailopt.engines.simulate import simulate
from tailopt.evaluation import evaluating
from tailopt.records import history
from tailopt.records.folder import Run, is_run
from tailopt.records.ledger import Ledger, chain_of
from tailopt.records.tensor_bytes import tensor_sha256
from tailopt.rounds.drops import DROPPED
from tailopt.seeds import derive, mixed

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


def digests(names: Sequence[str], tensors: Sequence[Tensor]) -> dict[str, str]:
    """SHA-256 of every tensor's bytes."""
    rows = zip(names, tensors, strict=True)
    return {name: tensor_sha256(t) for name, t in rows}


def train(
    model: torch.nn.Module,
    algorithm: Algorithm,
    *,
    loss: LossFunction,
    data: Sequence[Any],
    rounds: int,
    local_steps: int,
    batch_size: int | None = None,
    weights: Sequence[float] | None = None,
    seed: int = 0,
    evaluate: Evaluate | None = None,
    evaluate_every: int = 1,
    prepare: Callable[[NestedOptimizer], None] = lambda optimizer: None,
    run: Path | None = None,
    tell: Callable[[dict[str, Any]], None] = lambda row: None,
    **settings: Any,
) -> NestedOptimizer:
    """Train on this node as the simulation would, and synchronise with the others.

    Args:
        data: of every node, as for `simulate`; this one reads its own.
        prepare: is given the optimizer before the first round; faults are injected there.
        tell: is given every row of the history, on node 0.
        settings: of `NestedOptimizer.from_algorithm`.
    """
    node = dist.get_rank()
    if len(data) != dist.get_world_size():
        raise ValueError(f"Invalid nodes: there are data for {len(data)}, and {dist.get_world_size()} processes.")
    source = DatasetBatches(data, local_steps, None, batch_size, seed)
    names, params = trainable(model)
    device = params[0].device
    ledgers: list[Ledger] = []
    if node == 0 and run is not None and is_run(run):
        recorded(run).lines()  # checked before the first round rather than after it

    def note(row: dict[str, Any]) -> None:
        if node != 0:
            return
        if run is not None:
            if not ledgers:  # a run that was killed may have written of rounds that are done again
                ledgers.append(_writable(run, row["round"] - 1))
            line = history.line({"round": row["round"], "tensors": digests(names, params)})
            ledgers[0].append(line, row["round"])
        if evaluate is not None and (row["round"] % evaluate_every == 0 or row["round"] == rounds):
            with evaluating(model):
                row["metrics"] = {str(key): float(value) for key, value in evaluate(model).items()}
        tell(row)

    if not model.training:  # otherwise the modes are the user's, as in the simulation: a frozen BatchNorm stays frozen
        model.train()
    opt = NestedOptimizer.from_algorithm(
        model,
        algorithm,
        local_steps=local_steps,
        rounds=rounds,
        seed=seed,
        weight=1.0 if weights is None else float(weights[node]),
        run=run,
        loggers=[note],
        **settings,
    )
    prepare(opt)
    while not opt.finished:
        t, taken = opt.node.round + 1, opt.taken
        base = derive(seed, "model", t, node)
        seed_python_and_numpy(base)
        losses = []
        for step, batch in enumerate(_given(source, node, t, taken, local_steps)):
            seed_torch(mixed(base, step), device)
            opt.zero_grad()
            found = loss(model, batch)
            found.backward()
            losses.append(found.item())
            if step == local_steps - 1:
                opt.report(sum(losses) / len(losses))
            opt.step()
    return opt


def _given(source: DatasetBatches, node: int, t: int, taken: int, steps: int) -> Iterator[Any]:
    """Batch by batch: the caller seeds between them, as the simulation does."""
    batches = source.batches(node, t, taken, steps)
    for _ in range(steps):
        yield next(batches)


def recorded(folder: Path) -> Ledger:
    """The digests of a run, checked when they are read; not where they are from before there were seals."""
    path, known = folder / DIGESTS, Run.open(folder).identity
    found = Ledger(path, None if known is None else known.id)
    unsealed = not found.seal.exists() and (known is None or known.since is not None or not path.exists())
    return Ledger(path, None) if unsealed else found


def _writable(folder: Path, round: int) -> Ledger:
    """The digests up to a round, to be gone on with."""
    before = recorded(folder)
    history.drop_torn_line(before.path)
    before.rewind(round)
    known = Run.open(folder).identity
    assert known is not None  # this process writes there
    rows = chain_of(before.path, before.lines())
    found = Ledger(before.path, known.id, rows)
    found.rewind(round, rows)  # writes the seal where there was none
    return found


def replay(
    folder: Path, model: torch.nn.Module, algorithm: Algorithm, **settings: Any
) -> tuple[int, Difference | None]:
    """Simulate a recorded run and compare: the rounds that are equal, and the first difference.

    Args:
        settings: of `simulate`, those of the run.
    """
    if not (folder / DIGESTS).is_file():
        raise FileNotFoundError(f"{folder} has no {DIGESTS}: it is not a run of `tailopt train`.")
    run: dict[int, Mapping[str, str]] = {row["round"]: row["tensors"] for row in recorded(folder).read()}
    names, _ = trainable(model)
    found: list[tuple[int, Difference | None]] = []

    def compare(net: torch.nn.Module) -> dict[str, float]:
        t = len(found) + 1
        seen = digests(names, trainable(net)[1])
        wrong = [name for name in names if run.get(t, {}).get(name) != seen[name]]
        first = Difference(t, wrong[0], run.get(t, {}).get(wrong[0], "nothing"), seen[wrong[0]]) if wrong else None
        found.append((t, first))
        return {}

    lost = {
        row["round"]: [e["node"] for e in row["excluded"] if e["reason"] == DROPPED]
        for row in Run.open(folder).history()
    }
    if any(lost.values()):  # why it was lost nobody can repeat; that it was, the history says
        settings["drops"] = lambda t, source: lost.get(t, ())
    rounds = max(run, default=0)
    if not rounds:
        raise ValueError(f"{folder} has no finished round to replay.")
    simulate(model, algorithm, rounds=rounds, evaluate=compare, progress=False, **settings)
    for t, difference in found:
        if difference is not None:
            return t - 1, difference
    return rounds, None
