"""The run folder of real nodes: what they write there together, and how they go on from it.

Every node writes its partition of the synchronised weights and of the outer state, and what it keeps to itself; node 0
also history and log. Whatever could fail on one node (a full disk, a damaged file) is told to all in a small message
before anybody acts on it, so that all of them have the same checkpoint or none has:

    save      node 0 makes a hidden folder -> all write -> all said so -> node 0 renames it -> all know
    resume    node 0 proposes the newest -> all read what they need of it -> all found it sound, or the one before

Where a node is several ranks that shard its parameters, each of them writes: its partition of its shards, in the order
of the whole tensors' elements, and its part of the inner state. Such a run goes on with as many ranks per node.

A disk that is full costs a checkpoint, and the run goes on. A state that can never be saved ends the run, with an error
that names it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailopt.clipping.dtensor import is_dtensor
from tailopt.distributed.all_ranks import AllRanks
from tailopt.distributed.exchange import CHECKPOINT_ON_ALL_NODES
from tailopt.distributed.exchange_types import ExchangeReport
from tailopt.distributed.interfaces import blocking
from tailopt.distributed.shared_state import NodeCountDiffers, merged_meta, read, shared_ranges_and_meta
from tailopt.records import checkpoints, history, multi_writer
from tailopt.records.checkpoints import DamagedCheckpoint, Snapshot
from tailopt.records.folder import HISTORY, Run, is_run, open_run
from tailopt.records.phase_clock import PhaseClock
from tailopt.records.pytree import pack
from tailopt.records.run_config import storable
from tailopt.rounds.settle import EveryoneExcluded

if TYPE_CHECKING:
    from tailopt.distributed.node import Node

Moment = tuple[int, int | None]  # the round, and the local steps after it; None at the end of a round
MAY_DIFFER_ON_RESUME = ("rounds", "nodes", "weights")  # settings that may differ in a resumed run
# Of the meta of a checkpoint. story: what was said at earlier resumes; taken: local steps of every node; single: names
# of outer tensors that have one element for all weights.
NEEDED = {"writers": int, "story": list, "taken": list, "single": list, "nodes": dict, "global": dict}


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on from.

    Args:
        round: completed rounds.
        step: local steps done in the next one; 0 at its beginning.
        extra: what this node gave to `checkpoint`; empty for a node that was not there, or had taken no step.
        nodes: how many nodes wrote the checkpoint.
        path: its folder, which later checkpoints replace.
    """

    round: int
    step: int
    extra: dict[str, Any]
    nodes: int
    path: Path


@dataclass
class CheckpointCoordinator:
    """One rank's part in the records of a run.

    Args:
        ranks: all ranks that write.
        folder: of the run, which all nodes share.
        keep: how many checkpoints are kept.
        guard: whether weights that are not finite end the run before they are written.

    Attributes:
        run: the opened run folder on the rank that writes history and log; None on all others.
        resume_log: one line for each time that the run went on with another number of nodes.
        last: the checkpoint that all nodes wrote, or can read.
    """

    ranks: AllRanks
    folder: Path
    keep: int = 3
    guard: bool = True
    run: Run | None = None
    resume_log: list[str] = field(default_factory=list)
    last: Path | None = None
    _rows: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    _rounds: int | None = None  # in all; the folder is closed after them
    _clock: PhaseClock = field(default_factory=PhaseClock)
    _slowest: int | None = None  # the node that the log named last

    def open(self, config: Mapping[str, Any], resume: bool) -> None:
        """Open a new run folder, or with `resume` the existing one, if it is of the same run."""
        self._rounds = config["run"].get("rounds")

        def first() -> None:
            if self.ranks.number == 0:
                self.run = open_run(self.folder, storable(config), resume, MAY_DIFFER_ON_RESUME)

        def others() -> None:
            if self.ranks.number:
                multi_writer.await_folder(self.folder)
                if not is_run(self.folder):
                    raise FileNotFoundError(
                        f"{self.folder} is another folder here than on node 0: it holds no run. Give a run folder that "
                        "all nodes share."
                    )

        self.ranks.all_ranks_do(first)
        self.ranks.all_ranks_do(others)

    def record(self, row: dict[str, Any], report: ExchangeReport) -> None:
        """Append a row to the history. If the disk is full, the row is queued and written before the next one.

        The slowest node is recorded with the times, and in the log where the others wait for it.
        """
        local_seconds, phases = report.seconds, report.phases
        times: dict[str, Any] = {"bytes_sent": report.bytes_sent, "outer": phases.get("outer", 0.0)}
        exchange = phases.get("exchange", 0.0)
        if local_seconds:
            slowest = max(local_seconds, key=lambda node: local_seconds[node])
            # this node's exchange includes its wait for the slowest one
            wait = min(exchange, local_seconds[slowest] - local_seconds.get(self.ranks.across.node, 0.0))
            times |= {"slowest_node": slowest, "local": local_seconds[slowest], "wait": wait}
            exchange -= wait
            self._log_slowest(row["round"], slowest, local_seconds)
        times |= {"exchange": exchange, **self._clock.take()}
        if self.run is not None:
            self._rows.append((row, times))
            try:
                self._write_rows()
            except OSError as error:
                self.warn(f"The history of round {row['round']} could not be written yet: {error}.")

    def _log_slowest(self, t: int, slowest: int, local_seconds: Mapping[int, float]) -> None:
        """A line in the log when another node than before keeps the others waiting for long."""
        others = sorted(value for node, value in local_seconds.items() if node != slowest)
        usual = others[(len(others) - 1) // 2] if others else 0.0
        if others and slowest != self._slowest and local_seconds[slowest] > max(1.5 * usual, usual + 0.1):
            self._slowest = slowest
            self.log(
                f"round {t}: node {slowest} is the slowest: its local steps took {local_seconds[slowest]:.3g} s, and "
                f"{usual:.3g} s is the median of the others"
            )

    def warn(self, text: str) -> None:
        """A warning on every node, and a line in the log."""
        warnings.warn(text, UserWarning, stacklevel=3)
        self.log(text)

    def log(self, text: str) -> None:
        """A line in the log, where the disk takes it."""
        if self.run is not None:
            try:
                self.run.log(text)
            except OSError:
                return  # every line of the log is also a warning

    def save(
        self, node: Node, step: int, local_state: Callable[[], dict[str, Any]], steps_before_round: Sequence[int]
    ) -> bool:
        """Write a checkpoint together; False where the disk of one node did not take it.

        Args:
            step: local steps done in the round after `node.round`.
            local_state: what this node keeps to itself: tensors and plain values.
            steps_before_round: local steps of every node, over all completed rounds.
        """
        self._clock.lap()
        try:
            return self._save_together(node, step, local_state, steps_before_round)
        finally:
            self._clock.lap("checkpoint")

    def _save_together(
        self, node: Node, step: int, local_state: Callable[[], dict[str, Any]], steps_before_round: Sequence[int]
    ) -> bool:
        self._barrier_and_repair(node, step)
        moment = node.round, step or None
        at = f"after round {node.round}" + (f" and {step} local steps" if step else "")
        new: Path | None = None
        try:
            answers = self.ranks.all_ranks_do(partial(self._begin_folder, moment), OSError)
            if not self.ranks.failures(answers):
                new = self.folder / checkpoints.FOLDER / answers[0].text
                answers = self.ranks.all_ranks_do(partial(self._write_part, new, node, local_state), OSError)
            if new is not None and not self.ranks.failures(answers):
                finish = partial(self._write_manifest, new, moment, node, steps_before_round)
                answers = self.ranks.all_ranks_do(finish, OSError, DamagedCheckpoint)
        except BaseException:
            if self.run is not None and new is not None:
                multi_writer.discard(new)
            raise
        if failed := self.ranks.failures(answers):
            if self.run is not None and new is not None:
                multi_writer.discard(new)
            last = checkpoints.latest(self.folder)
            older = f"the last one is {last.name}" if last else "there is none yet"
            self.warn(f"The checkpoint {at} was not written: {failed}. The run goes on; {older}.")
            return False
        self.last = self.folder / checkpoints.FOLDER / checkpoints.folder_name(*moment)
        if self.run is not None:
            try:
                checkpoints.prune(self.folder, self.keep)
            except OSError as error:
                self.log(f"Older checkpoints could not be removed: {error}.")
            if node.round == self._rounds:  # another process may go on from here
                self.run.close()
        return True

    def _begin_folder(self, moment: Moment) -> str:
        """Node 0 records the rows so far and makes the folder; returns its name, and "" on the other ranks."""
        if self.run is None:
            return ""
        self.run.acquire_lock()
        self.run.check_lock()
        self._write_rows()
        self.run.sync()
        return multi_writer.begin(self.folder, *moment).name

    def _write_part(self, folder: Path, node: Node, local_state: Callable[[], dict[str, Any]]) -> None:
        """Every rank writes its part of the shared state, and what its node keeps to itself."""
        shared, outer_meta = shared_ranges_and_meta(node)
        tensors, packed = pack(local_state(), "node")
        sharded_shapes = {name: list(t.shape) for name, t in tensors.items() if is_dtensor(t)}
        tensors = {name: t.to_local() if is_dtensor(t) else t for name, t in tensors.items()}
        # "own": what this rank keeps to itself; "cut": the whole shapes of its tensors that are one rank's shard
        meta = {**outer_meta, "own": packed, "cut": sharded_shapes}
        multi_writer.write(folder, self.ranks.number, self.ranks.count, shared, tensors, meta)

    def _write_manifest(self, folder: Path, moment: Moment, node: Node, steps_before_round: Sequence[int]) -> None:
        """Node 0 writes the manifest over the parts of all ranks: from here on the checkpoint exists."""
        if self.run is None:
            return
        names, buffers, average = node.exchange.names, list(node.buffers_at_round_start()), node.average is not None
        more = {
            "taken": list(steps_before_round),
            "probe": {},  # empty on real nodes: the reader of simulations asks for both
            "inner": {},
            "writers": self.ranks.across.nodes,
            "ranks": self.ranks.ranks_per_node,
            "story": self.resume_log,
            **({"thresholds": node.auto_thresholds.state()} if node.auto_thresholds.levels else {}),
        }

        def meta(parts: list[dict[str, Any]]) -> dict[str, Any]:
            return {**merged_meta(names, buffers, average, parts), **more}

        multi_writer.finish(folder, *moment, self.ranks.count, meta, self.run.checkpoint_origin)

    def resume(self, node: Node) -> tuple[Snapshot, Path] | None:
        """The newest checkpoint that is sound on all nodes, or None where there is none at all.

        History, log and later checkpoints follow. `node` has not changed.
        """
        newest = self._newest(node)
        if newest is None:
            self.ranks.all_ranks_do(self.run.require_no_rows if self.run is not None else lambda: None)
            return None
        snapshot, path = newest
        before, nodes = int(snapshot.meta["writers"]), self.ranks.across.nodes
        self.resume_log = list(snapshot.meta["story"])
        text = f"resumed after round {snapshot.round}" + (f" and {snapshot.step} local steps" if snapshot.step else "")
        if before != nodes:
            new = range(before, nodes)
            what = f"nodes {list(new)} start fresh" if new else f"what nodes {nodes} and up kept is left out"
            text += f", with {nodes} nodes where there were {before}: the outer state is cut anew, {what}"
            self.resume_log.append(text)

        def rewind() -> None:
            if self.run is not None:
                checkpoints.rewind(self.folder, snapshot.round, snapshot.step or 0)
                self.run.rewind(snapshot.round, snapshot.provenance and snapshot.provenance.history_chain)

        self.ranks.all_ranks_do(rewind)
        self.log(text)
        self.last = path
        return snapshot, path

    def last_checkpoint_sentence(self) -> str:
        """Return a sentence about where the run can go on from."""
        return checkpoints.describe_last_checkpoint(self.folder, self.last)

    def history(self, round: int) -> list[dict[str, Any]]:
        """The rows up to a round; node 0 checks them."""
        rows = history.read(self.folder / HISTORY) if self.run is None else self.run.history()
        return [row for row in rows if row["round"] <= round]

    def _sound(self, path: Path, node: Node) -> Snapshot:
        """A checkpoint that this rank can read; node 0 also checks that it is of this run."""
        try:
            snapshot = read(path, node)
            for key, kind in NEEDED.items():
                if type(snapshot.meta[key]) is not kind:
                    raise TypeError(f"{key} is {snapshot.meta[key]!r:.60}")
        except (KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            manifest = path / checkpoints.MANIFEST
            raise checkpoints.damaged_checkpoint(manifest, f"lacks what a node needs ({error!r:.300})") from error
        if self.run is not None:
            self.run.check_checkpoint(snapshot, path)
        return snapshot

    def _newest(self, node: Node) -> tuple[Snapshot, Path] | None:
        """The newest checkpoint that all ranks can read; node 0 proposes them one after another."""
        names = [path.name for path in reversed(checkpoints.list_checkpoints(self.folder))]
        passed_over: list[str] = []
        # the first rank proposes, since not every rank may see the same folder at the same time
        while name := self.ranks.all_ranks_do(lambda: next(iter(names[len(passed_over) :]), ""))[0].text:
            path = self.folder / checkpoints.FOLDER / name
            loaded: list[Snapshot] = []

            def load(path: Path = path, into: list[Snapshot] = loaded) -> None:
                into.append(self._sound(path, node))

            failed = self.ranks.failures(self.ranks.all_ranks_do(load, OSError, DamagedCheckpoint, NodeCountDiffers))
            if failed is None:
                return loaded[0], path
            passed_over.append(name)
            self.warn(f"Checkpoint {path} is passed over: {failed}")
        if passed_over:
            raise DamagedCheckpoint(
                f"None of the checkpoints in {self.folder / checkpoints.FOLDER} can be used: {', '.join(passed_over)}. "
                "Bring one back from a copy, or begin again in another folder."
            )
        return None

    def _write_rows(self) -> None:
        while self.run is not None and self._rows:
            row, seconds = self._rows[0]
            if row["round"] > self.run.last_round():
                self.run.append(row, seconds)
            del self._rows[0]

    def _barrier_and_repair(self, node: Node, step: int) -> None:
        """Check that all nodes write a checkpoint now, at the same step and with the weights that the owners sent.

        By headers, as at the end of a round: gloo ends a process without a message where lengths differ.
        """
        across, round = self.ranks.across, node.round
        headers, differing = blocking(node.exchange.compare_weights_at_barrier(round, step, node.x, self.guard))
        # in the middle of a round the parameters have moved on; the end of the round excludes them
        for text in node.load_again(differing) if not step else []:
            self.warn(text)
        for k, header in enumerate(headers):
            if (header.round, header.steps) == (-1 - round, step):
                continue
            activity = f"ends round {header.round}"
            if header.round < 0:
                activity = f"writes a checkpoint after round {-1 - header.round}, step {header.steps}"
            error = RuntimeError(
                f"Node {k} {activity}; node {across.node} writes a checkpoint after round {round}, step {step}. "
                f"{CHECKPOINT_ON_ALL_NODES}"
            )
            across.leave(error)  # a node that ends a round waits for this node's displacement
            raise error


def all_excluded(error: EveryoneExcluded, coordinator: CheckpointCoordinator | None) -> EveryoneExcluded:
    """The end of a run in which no displacement of a round could be used, with what to go on from."""
    ended = error.ending_run("" if coordinator is None else coordinator.last_checkpoint_sentence())
    if coordinator is not None:
        coordinator.log(f"stopped: {ended}")
    return ended
