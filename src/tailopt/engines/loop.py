"""T rounds, once for every engine: records, resume, evaluation and progress are here and nowhere else.

An engine says only how the displacements of a round arise. Nothing of the state changes while they do, so whatever
ends a run in the middle of a round (an error, Ctrl-C, a kill) leaves the end of the round before it, and going on from
there gives the bits of a run that was never stopped.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tailopt.engines.sequential import moved
from tailopt.progress import Progress
from tailopt.records import checkpoints
from tailopt.records.folder import Run
from tailopt.records.lock import LostLock
from tailopt.rounds.drops import DROPPED, Drops
from tailopt.rounds.participants import Participants, Sampling
from tailopt.rounds.robust import Aggregate
from tailopt.rounds.round import Contribution, EveryoneExcluded, Own, Report, Synchronised, collect, finish
from tailopt.rounds.settings import Settings
from tailopt.rules.rule import State

Evaluate = Callable[[torch.nn.Module], Mapping[str, Any]]


class Engine(Protocol):
    """How displacements arise, and what nodes keep between rounds."""

    taken: list[int]
    kept: dict[int, list[State]]
    own: dict[int, Own]
    probe: dict[str, Any]

    def contributions(
        self, state: Synchronised, who: Participants, going_on: Collection[int] = ()
    ) -> Iterator[Contribution]:
        """What every participant does in the next round, in ascending order.

        going_on: those that will go on from where they end, so that it has to be kept.
        """

    def commit(self, report: Report) -> None:
        """Take over what nodes keep after a round."""

    def evaluate(self, state: Synchronised, function: Evaluate) -> dict[str, Any]:
        """The user's metrics of the synchronised model."""

    def summary(self, report: Report, names: Sequence[str]) -> dict[str, Any]:
        """The statistics of a round, for the history."""

    def check_repeatable(self) -> None:
        """Refuse data that do not give the same batches again."""


@dataclass
class Loop:
    """What a run does between and around its rounds."""

    engine: Engine
    sampling: Sampling
    settings: Settings
    rounds: int
    projection: float | None = None
    guard: bool = True
    evaluate: Evaluate | None = None
    evaluate_every: int = 1
    statistics: bool = False
    run: Run | None = None
    checkpoint_every: int = 1
    keep: int = 3
    loggers: Sequence[Callable[[dict[str, Any]], None]] = ()
    progress: bool = True
    title: str = "rounds"
    history: list[dict[str, Any]] = field(default_factory=list)
    aggregate: Aggregate | None = None  # a robust one in the mean's place
    drops: Drops | None = None
    on_drop: str = "sync"

    def go(self, state: Synchronised) -> None:
        """Run until `rounds` are done, or until something stops it."""
        saved = state.round if self.history or state.round else -1
        try:
            if saved < 0:
                saved = self._save(state)
            with Progress(self.title, state.round, self.rounds, self.progress) as line:
                while state.round < self.rounds:
                    began = time.perf_counter()
                    row = self._one_round(state, began)
                    last = state.round == self.rounds
                    if self.run is not None and (last or state.round % self.checkpoint_every == 0):
                        saved = self._save(state)
                    line.show(row)
                    for logger in self.loggers:
                        logger(row)
        except BaseException as error:
            # in the middle of finishing a round the state is ahead of the history; then the last checkpoint stands
            settled = state.round == (self.history[-1]["round"] if self.history else 0) and not self._finishing
            if self.run is not None and not isinstance(error, LostLock):  # else the folder is another's
                if settled and state.round > saved and not isinstance(error, checkpoints.DamagedCheckpoint):
                    saved = self._save(state)
                where = " ".join(getattr(error, "__notes__", ()))
                self.run.log(f"stopped after round {saved}: {type(error).__name__}: {error} {where}".rstrip())
            if isinstance(error, EveryoneExcluded):
                where = f" The last good checkpoint is that of round {saved} in {self.run.path}." if self.run else ""
                raise EveryoneExcluded(f"{error}{where} Lower the learning rate, or look at the data.") from None
            raise

    _finishing: bool = False

    def _one_round(self, state: Synchronised, began: float) -> dict[str, Any]:
        t = state.round + 1
        who = self.sampling.draw(t)
        numbers = self.settings.outer(t)
        lost = self.drops.draw(t) if self.drops is not None else set()
        with torch.no_grad():
            sent = self.engine.contributions(state, who, lost if self.on_drop == "keep" else ())
            found = collect(state, sent, who, self.guard, self.aggregate, lost)
            local = time.perf_counter()
            self._finishing = True
            finish(state, found, self.settings.outer_rule, numbers, self.projection)
        self.engine.commit(found.report)
        row = self._row(state, who, found.report)
        done = time.perf_counter()
        if self.run is not None:
            self.run.append(row, {"local": local - began, "round_seconds": done - began})
        self.history.append(row)
        self._finishing = False
        for excluded in found.report.excluded:
            if excluded.reason == DROPPED:  # as it was asked for
                continue
            self._say(f"Round {t} goes on without {excluded}.")
        return row

    def _row(self, state: Synchronised, who: Participants, report: Report) -> dict[str, Any]:
        t, last = state.round, state.round == self.rounds
        metrics: dict[str, Any] = {}
        if self.evaluate is not None and (last or t % self.evaluate_every == 0):
            metrics = self.engine.evaluate(state, self.evaluate)
        times_drawn = {i: who.drawn.count(i) for i in who.shares}
        return {
            "round": t,
            "loss": report.loss(),
            "participants": who.drawn,
            "steps": [report.steps[i] for i in who.drawn],
            "weights": [report.used.get(i, 0.0) / times_drawn[i] for i in who.drawn],
            "excluded": [e.as_dict() for e in report.excluded],
            "metrics": metrics,
            "statistics": self.engine.summary(report, state.names) if self.statistics else {},
        }

    def _say(self, text: str) -> None:
        warnings.warn(text, UserWarning, stacklevel=5)
        if self.run is not None:
            self.run.log(text)

    def _save(self, state: Synchronised) -> int:
        if self.run is None:
            return state.round
        self.run.check_lock()
        self.run.sync()
        save(self.run, state, self.engine)
        checkpoints.prune(self.run.path, self.keep)
        return state.round


def save(run: Run, state: Synchronised, engine: Engine) -> Path:
    """Write everything that a run needs to go on."""
    tensors, packed = checkpoints.pack(
        {
            "weights": dict(zip(state.names, state.weights, strict=True)),
            "buffers": state.buffers,
            "outer": dict(zip(state.names, state.outer, strict=True)),
            "average": None if state.average is None else dict(zip(state.names, state.average, strict=True)),
        },
        "global",
    )
    nodes: dict[int, dict[str, Tensor]] = {}
    plain: dict[str, Any] = {}
    for node, states in engine.kept.items():
        nodes[node], plain[str(node)] = checkpoints.pack(states, "inner")
    own: dict[str, Any] = {}
    for node, at in engine.own.items():
        held, own[str(node)] = checkpoints.pack({"weights": at.weights, "buffers": at.buffers}, "own")
        nodes[node] = {**nodes.get(node, {}), **held}
    meta = {"global": packed, "inner": plain, "own": own, "taken": engine.taken, "probe": engine.probe}
    return checkpoints.save(run.path, state.round, tensors, nodes, meta, stamp=run.stamp, check=run.check_lock)


def check(run: Run, snapshot: checkpoints.Snapshot, path: Path) -> None:
    """Refuse a checkpoint of another run; DamagedCheckpoint for one that `restore` could not read."""
    run.check(snapshot, path)
    try:
        _held(snapshot)
    except checkpoints.UNREADABLE as error:
        raise checkpoints.damaged(path / checkpoints.MANIFEST, f"lacks what a run needs ({error!r:.300})") from error


class _Held(NamedTuple):
    shared: dict[str, Any]  # weights, buffers, outer, average
    taken: list[int]
    probe: dict[str, Any]
    kept: dict[int, list[State]]
    own: dict[int, Own]


def _held(snapshot: checkpoints.Snapshot) -> _Held:
    """What a checkpoint holds, in the form in which it was given to `save`."""
    meta, nodes = snapshot.meta, snapshot.nodes
    shared = checkpoints.unpack(snapshot.tensors, meta["global"])
    own = meta.get("own", {})  # not in checkpoints from before
    if meta["probe"] and not meta["probe"].keys() >= {"node", "round", "taken", "digest"}:
        raise KeyError(f"probe has {sorted(meta['probe'])}")
    return _Held(
        {key: shared[key] for key in ("weights", "buffers", "outer", "average")},
        [int(steps) for steps in meta["taken"]],
        dict(meta["probe"]),
        {int(n): checkpoints.unpack(nodes[int(n)], packed) for n, packed in meta["inner"].items()},
        {int(n): Own(**checkpoints.unpack(nodes[int(n)], packed)) for n, packed in own.items()},
    )


def restore(snapshot: checkpoints.Snapshot, state: Synchronised, engine: Engine) -> None:
    """Put a checkpoint into a fresh state and engine; refuses one of another model."""
    held = _held(snapshot)
    found = held.shared
    if list(found["weights"]) != state.names:
        other = sorted(set(found["weights"]) ^ set(state.names)) or ["the same names in another order"]
        raise ValueError(f"The checkpoint is of another model: {', '.join(other[:5])} stand in one of them only.")
    if found["buffers"].keys() != state.buffers.keys():
        other = sorted(found["buffers"].keys() ^ state.buffers.keys())
        raise ValueError(
            f"The checkpoint is of another model: the buffers {', '.join(other[:5])} are in one of them only."
        )
    for name, now in [*zip(state.names, state.weights, strict=True), *state.buffers.items()]:
        then = found["weights"][name] if name in found["weights"] else found["buffers"][name]
        if then.shape != now.shape or then.dtype != now.dtype:
            raise ValueError(
                f"The checkpoint is of another model: {name} is {then.dtype} of shape {tuple(then.shape)} there, "
                f"{now.dtype} of shape {tuple(now.shape)} here."
            )
    if (found["average"] is None) != (state.average is None):
        raise ValueError("The checkpoint was written with another setting of `average`; resume with the same.")
    device = state.weights[0].device if state.weights else torch.device("cpu")
    for name, weight in zip(state.names, state.weights, strict=True):
        weight.copy_(found["weights"][name])
    state.buffers = {name: buffer.to(state.buffers[name].device) for name, buffer in found["buffers"].items()}
    state.outer = [moved(found["outer"][name], device) for name in state.names]
    if found["average"] is not None:
        state.average = [found["average"][name].to(device) for name in state.names]
    state.round = snapshot.round
    engine.taken, engine.probe, engine.kept, engine.own = held.taken, held.probe, held.kept, held.own
