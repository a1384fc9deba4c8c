"""The run folder of real nodes: what they write there together, and how they go on from it.

Every node writes its stretch of the synchronised weights and of the outer state, and what it keeps to itself; node 0
also history and log. Whatever could fail on one node (a full disk, a damaged file) is told to all in a small message
before anybody acts on it, so that all of them have the same checkpoint or none has:

    save      node 0 makes a hidden folder -> all write -> all said so -> node 0 renames it -> all know
    resume    node 0 proposes the newest -> all read what they need of it -> all found it sound, or the one before

Where a node is several ranks that shard its parameters, each of them writes: its stretch of its shards, in the order of
the whole tensors' elements, and its part of the inner state. Such a run goes on with as many ranks a node.

A disk that is full costs a checkpoint, and the run goes on. State that can never be saved ends it, by its name.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from tailopt.clipping.shards import is_dtensor
from tailopt.distributed.exchange import ALIKE
from tailopt.distributed.transport import Transport
from tailopt.records import checkpoints, history, together
from tailopt.records.checkpoints import DamagedCheckpoint, Snapshot
from tailopt.records.folder import HISTORY, Run, is_run, opened, storable
from tailopt.records.history import child, decode
from tailopt.records.packing import names as tensors_of
from tailopt.records.packing import pack, unpack
from tailopt.records.together import Stretch
from tailopt.rounds.settle import EveryoneExcluded
from tailopt.rules.torch_optim import GROUP

if TYPE_CHECKING:
    from tailopt.distributed.node import Node

TEXT = 1000  # bytes of a message between nodes
FREE = ("rounds", "nodes", "weights")  # settings that may be others in a resumed run
# of the meta of a checkpoint
NEEDED = {"writers": int, "story": list, "taken": list, "single": list, "nodes": dict, "global": dict}

Found = TypeVar("Found")


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


class OtherNodes(Exception):
    """A checkpoint in the middle of a round was written by another number of nodes."""


@dataclass(frozen=True)
class Crew:
    """All ranks of all nodes, by one number each: node * ranks + rank. Where a node is one process, the nodes.

    Args:
        across: this rank's part of every node.
        inside: the ranks of this node.
    """

    across: Transport
    inside: Transport | None = None

    @property
    def ranks(self) -> int:
        """Of each node."""
        return 1 if self.inside is None else self.inside.nodes

    @property
    def number(self) -> int:
        """This process's."""
        return self.across.node * self.ranks + (0 if self.inside is None else self.inside.node)

    @property
    def count(self) -> int:
        """How many there are."""
        return self.across.nodes * self.ranks

    def gather(self, mine: Tensor) -> Tensor:
        """Everybody's small tensor, stacked by number."""
        rows = self.across.gather(mine)
        return rows if self.inside is None else self.inside.gather(rows).transpose(0, 1).flatten(0, 1)

    def called(self, number: int) -> str:
        """How one of them is called."""
        return f"node {number // self.ranks}" + (f", rank {number % self.ranks}" if self.ranks > 1 else "")


class _Answer(NamedTuple):
    code: int  # 0: done; 1: failed, and the run can go on; 2: the run must end
    text: str


@dataclass
class Keeper:
    """One node's part in the records of a run.

    Args:
        crew: all who write.
        folder: the run's, which all nodes share.
        keep: how many checkpoints.
        guard: whether weights that are not finite end the run before they are written.
    """

    crew: Crew
    folder: Path
    keep: int = 3
    guard: bool = True
    run: Run | None = None
    story: list[str] = field(default_factory=list)
    last: Path | None = None  # the checkpoint that all nodes wrote, or found sound
    _rows: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    _rounds: int | None = None  # in all; the folder is let go after them
    _began: float = field(default_factory=time.perf_counter)
    _slowest: int | None = None  # the node that was last named so in the log

    def open(self, config: Mapping[str, Any], resume: bool) -> None:
        """A new run folder, or with `resume` the one that is there, if it is of the same run."""

        self._rounds = config.get("rounds")

        def first() -> None:
            if self.crew.number == 0:
                self.run = opened(self.folder, storable(config), resume, FREE)

        def others() -> None:
            if self.crew.number:
                together.await_folder(self.folder)
                if not is_run(self.folder):
                    raise FileNotFoundError(
                        f"{self.folder} is another folder here than on node 0: it holds no run. Give a run folder that "
                        "all nodes share."
                    )

        self._ask(first)
        self._ask(others)

    def record(self, row: dict[str, Any], local: Mapping[int, float]) -> None:
        """Add a row to the history; where the disk is full, before the next one.

        local: seconds of every participant's local steps. The slowest node stands with the times, and in the log where
        the others wait for it.
        """
        now = time.perf_counter()
        seconds: dict[str, Any] = {"round_seconds": now - self._began}
        self._began = now
        if local:
            slowest = max(local, key=lambda node: local[node])
            seconds |= {"slowest_node": slowest, "local": local[slowest]}
            self._log_slowest(row["round"], slowest, local)
        if self.run is not None:
            self._rows.append((row, seconds))
            try:
                self._write_rows()
            except OSError as error:
                self.say(f"The history of round {row['round']} could not be written yet: {error}.")

    def _log_slowest(self, t: int, slowest: int, local: Mapping[int, float]) -> None:
        """A line in the log when another node than before keeps the others waiting for long."""
        others = sorted(value for node, value in local.items() if node != slowest)
        usual = others[(len(others) - 1) // 2] if others else 0.0
        if others and slowest != self._slowest and local[slowest] > max(1.5 * usual, usual + 0.1):
            self._slowest = slowest
            self.log(
                f"round {t}: node {slowest} is the slowest: its local steps took {local[slowest]:.3g} s, and "
                f"{usual:.3g} s is the median of the others"
            )

    def say(self, text: str) -> None:
        """A warning on every node, and a line in the log."""
        warnings.warn(text, UserWarning, stacklevel=3)
        self.log(text)

    def log(self, text: str) -> None:
        """A line in the log, where the disk takes it."""
        if self.run is not None:
            try:
                self.run.log(text)
            except OSError:
                return  # what is said here is also said as a warning

    def save(self, node: Node, step: int, own: Callable[[], dict[str, Any]], taken: Sequence[int]) -> bool:
        """Write a checkpoint together; False where the disk of one did not take it.

        Args:
            step: local steps done in the round after `node.round`.
            own: what this node keeps to itself: tensors and plain values.
            taken: local steps of every node.
        """
        self._meet(node, step)
        moment = node.round, step or None
        at = f"after round {node.round}" + (f" and {step} local steps" if step else "")
        names, average = node.exchange.names, node.average is not None
        fresh: Path | None = None

        def begin() -> str:
            if self.run is None:
                return ""
            self.run.hold()
            self.run.check_lock()
            self._write_rows()
            self.run.sync()
            return together.begin(self.folder, *moment).name

        def write() -> None:
            assert fresh is not None
            shared, outer = shared_of(node)
            tensors, packed = pack(own(), "node")
            cut = {name: list(t.shape) for name, t in tensors.items() if is_dtensor(t)}
            tensors = {name: t.to_local() if is_dtensor(t) else t for name, t in tensors.items()}
            meta = {**outer, "own": packed, "cut": cut}
            together.write(fresh, self.crew.number, self.crew.count, shared, tensors, meta)

        def finish() -> None:
            if self.run is not None:
                assert fresh is not None
                more = {
                    "taken": list(taken),
                    "probe": {},
                    "inner": {},
                    "writers": self.crew.across.nodes,
                    "ranks": self.crew.ranks,
                    "story": self.story,
                }
                buffers = list(node.begun_buffers())

                def meta(parts: list[dict[str, Any]]) -> dict[str, Any]:
                    return {**_merged(names, buffers, average, parts), **more}

                together.finish(fresh, *moment, self.crew.count, meta, self.run.stamp, self.run.check_lock)

        try:
            answers = self._ask(begin, OSError)
            if not self._failed(answers):
                fresh = self.folder / checkpoints.FOLDER / answers[0].text
                answers = self._ask(write, OSError)
            if not self._failed(answers):
                answers = self._ask(finish, OSError, DamagedCheckpoint)
        except BaseException:
            if self.run is not None and fresh is not None:
                together.discard(fresh)
            raise
        if failed := self._failed(answers):
            if self.run is not None and fresh is not None:
                together.discard(fresh)
            last = checkpoints.latest(self.folder)
            older = f"the last one is {last.name}" if last else "there is none yet"
            self.say(f"The checkpoint {at} was not written: {failed}. The run goes on; {older}.")
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

    def resume(self, node: Node) -> tuple[Snapshot, Path] | None:
        """The newest checkpoint that is sound on all nodes, or None where there is none at all.

        History, log and later checkpoints follow. Nothing has been put into `node`.
        """
        found = self._newest(lambda path: self._sound(path, node))
        if found is None:
            self._ask(self.run.refuse_rows_alone if self.run is not None else lambda: None)
            return None
        snapshot, path = found
        before, nodes = int(snapshot.meta["writers"]), self.crew.across.nodes
        self.story = list(snapshot.meta["story"])
        text = f"resumed after round {snapshot.round}" + (f" and {snapshot.step} local steps" if snapshot.step else "")
        if before != nodes:
            new = range(before, nodes)
            what = f"nodes {list(new)} start fresh" if new else f"what nodes {nodes} and up kept is left out"
            text += f", with {nodes} nodes where there were {before}: the outer state is cut anew, {what}"
            self.story.append(text)

        def rewind() -> None:
            if self.run is not None:
                checkpoints.rewind(self.folder, snapshot.round, snapshot.step or 0)
                self.run.rewind(snapshot.round, snapshot.stamp and snapshot.stamp.history)

        self._ask(rewind)
        self.log(text)
        self.last = path
        return snapshot, path

    def last_good(self) -> str:
        """From where the run can go on, in words."""
        if self.last is None:
            return f"There is no checkpoint in {self.folder} yet."
        round, step = checkpoints.at(self.last)
        after = f"round {round}" + (f" and {step} local steps" if step else "")
        return f"The last good checkpoint is that after {after}: {self.last}."

    def history(self, round: int) -> list[dict[str, Any]]:
        """The rows up to a round; node 0 checks them."""
        rows = history.read(self.folder / HISTORY) if self.run is None else self.run.history()
        return [row for row in rows if row["round"] <= round]

    def _sound(self, path: Path, node: Node) -> Snapshot:
        """A checkpoint that can be read; node 0 also looks whether it is of this run."""
        try:
            snapshot = read(path, node)
            for key, kind in NEEDED.items():
                if type(snapshot.meta[key]) is not kind:
                    raise TypeError(f"{key} is {snapshot.meta[key]!r:.60}")
        except (KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            manifest = path / checkpoints.MANIFEST
            raise checkpoints.damaged(manifest, f"lacks what a node needs ({error!r:.300})") from error
        if self.run is not None:
            self.run.check(snapshot, path)
        return snapshot

    def _newest(self, load: Callable[[Path], Found]) -> tuple[Found, Path] | None:
        names = [path.name for path in reversed(checkpoints.every(self.folder))]
        found: list[Found] = []
        passed: list[str] = []
        while True:
            name = self._ask(lambda: names[len(passed)] if len(passed) < len(names) else "")[0].text
            if not name:
                break
            path = self.folder / checkpoints.FOLDER / name
            answers = self._ask(lambda path=path: found.append(load(path)), OSError, DamagedCheckpoint, OtherNodes)  # type: ignore[misc]
            failed = self._failed(answers)
            if failed is None:
                return found[-1], path
            passed.append(name)
            self.say(f"Checkpoint {path} is passed over: {failed}")
        if passed:
            raise DamagedCheckpoint(
                f"None of the checkpoints in {self.folder / checkpoints.FOLDER} can be used: {', '.join(passed)}. "
                "Bring one back from a copy, or begin again in another folder."
            )
        return None

    def _write_rows(self) -> None:
        while self.run is not None and self._rows:
            row, seconds = self._rows[0]
            if row["round"] > self.run.last():
                self.run.append(row, seconds)
            del self._rows[0]

    # what nodes tell each other

    def _meet(self, node: Node, step: int) -> None:
        """Find out whether all nodes are here, and hold the weights that the owners sent.

        By headers, as at the end of a round: messages of different lengths would end the processes without a word.
        """
        across, round = self.crew.across, node.round
        heads, differing = node.exchange.meet(round, step, node.x, self.guard)
        # in the middle of a round the parameters have moved on; its end leaves them out
        for text in node.load_again(differing) if not step else []:
            self.say(text)
        for k, head in enumerate(heads):
            if (head.round, head.steps) == (-1 - round, step):
                continue
            said = f"ends round {head.round}"
            if head.round < 0:
                said = f"writes a checkpoint after round {-1 - head.round}, step {head.steps}"
            error = RuntimeError(
                f"Node {k} {said}; node {across.node} writes a checkpoint after round {round}, step {step}. {ALIKE}"
            )
            if across.peers is not None:  # who ends a round waits for this node's displacement
                across.peers.leave(error)
            raise error

    def _failed(self, answers: Sequence[_Answer]) -> str | None:
        """Who failed, in words; None where nobody did."""
        said = [f"{self.crew.called(number)}: {answer.text}" for number, answer in enumerate(answers) if answer.code]
        return "; ".join(said) or None

    def _ask(self, work: Callable[[], Any], *harmless: type[Exception]) -> list[_Answer]:
        """Do something on every node and hear how it went everywhere; what is not harmless ends the run everywhere."""
        error: Exception | None = None
        try:
            mine = _Answer(0, work() or "")
        except Exception as caught:
            error = caught
            mine = _Answer(1 if isinstance(error, harmless) else 2, f"{error}")
        data = mine.text.encode()[:TEXT]
        message = torch.tensor([mine.code, len(data) % 256, len(data) // 256, *data.ljust(TEXT)], dtype=torch.uint8)
        answers = []
        for row in self.crew.gather(message).tolist():
            text = bytes(row[3 : 3 + row[1] + 256 * row[2]]).decode(errors="ignore")
            answers.append(_Answer(row[0], text))
        if error is not None and mine.code == 2:
            raise error
        for number, answer in enumerate(answers):
            if answer.code == 2:
                raise RuntimeError(f"{self.crew.called(number).capitalize()}: {answer.text}")
        return answers


def all_excluded(error: EveryoneExcluded, keeper: Keeper | None) -> EveryoneExcluded:
    """The end of a run in which no displacement of a round could be used, with what to go on from."""
    where = "" if keeper is None else f" {keeper.last_good()}"
    ended = EveryoneExcluded(f"{error}{where} Lower the learning rate, or look at the data.")
    if keeper is not None:
        keeper.log(f"stopped: {ended}")
    return ended


# What all nodes share


class Place(NamedTuple):
    """A rank's part of a tensor: the shape of the whole, where the part begins, whether this rank writes it."""

    shape: tuple[int, ...]
    start: int
    writes: bool


def places(node: Node) -> list[Place]:
    """Of every parameter. What all ranks of a node hold is written by the first of them."""
    exchange, found = node.exchange, []
    for i, (name, p, local) in enumerate(zip(exchange.names, node.params, exchange.shapes, strict=True)):
        ahead = exchange.elements_before(i)
        if ahead is None:
            found.append(Place(tuple(local), 0, exchange.shards is None or exchange.shards.node == 0))
            continue
        assert is_dtensor(p)
        if not all(placement.is_replicate() or placement.is_shard(0) for placement in p.placements):
            raise ValueError(
                f"Invalid run: {name} is sharded as {p.placements}; only parameters cut along their first dimension "
                "can be written to checkpoints. Shard it so, or leave `run` out."
            )
        found.append(Place((*p.shape, *local[p.dim() :]), ahead, True))
    return found


def shared_of(node: Node) -> tuple[dict[str, Stretch], dict[str, Any]]:
    """This node's stretch of weights, outer state and average, and the plain rest of the outer state.

    A tensor of the outer state has an element for each weight, and is cut as they are; or it is a single number, the
    same for all stretches of a tensor, and belongs to the first. Buffers and empty tensors are node 0's to write.
    """
    exchange, found, plain, where = node.exchange, {}, {}, places(node)
    single: list[str] = []
    group: Any = None
    for s, state in zip(exchange.segments, node.outer, strict=True):
        name, offset = exchange.names[s.tensor], exchange.layout.offsets[s.tensor]
        shape, ahead, writes = where[s.tensor]
        start = ahead + s.start - offset
        if not writes:
            continue
        found[child("global.weights", name)] = Stretch(node.x[s.start : s.stop], start, shape)
        if node.average is not None:
            found[child("global.average", name)] = Stretch(node.average[s.start : s.stop], start, shape)
        state = dict(state)
        group = state.pop(GROUP, group)
        path = child("global.outer", name)
        tensors, plain[name] = pack(state, path)
        for key, tensor in tensors.items():
            if tuple(tensor.shape) == (s.stop - s.start,):
                found[key] = Stretch(tensor, start, shape)
            elif tensor.dim() == 0:
                single.append(key)
                if start == 0:
                    found[key] = Stretch(tensor, 0, ())
            else:
                raise TypeError(
                    f"{key} is a tensor of shape {tuple(tensor.shape)} for {s.stop - s.start} weights; only outer "
                    "state with one element for each weight, or with a single one, can be saved. Use another outer "
                    "optimizer, or leave `run` out."
                )
    if exchange.transport.node == 0 and (exchange.shards is None or exchange.shards.node == 0):
        for name, (shape, _, _) in zip(exchange.names, where, strict=True):
            if not math.prod(shape):
                empty = Stretch(node.x[:0], 0, shape)
                found[child("global.weights", name)] = empty
                if node.average is not None:
                    found[child("global.average", name)] = empty
        for name, buffer in node.begun_buffers().items():
            found[child("global.buffers", name)] = Stretch(buffer, 0, tuple(buffer.shape))
    return found, {"outer": plain, "single": single, "group": group}


def _merged(names: Sequence[str], buffers: Sequence[str], average: bool, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The metas of all nodes as that of the checkpoint; `global` is what a simulation writes."""
    outer: dict[str, Any] = {name: {} for name in names}
    for part in parts:
        for name, packed in part["outer"].items():
            if outer[name] not in ({}, packed):
                raise ValueError(f"The outer state of {name} differs between nodes: {outer[name]} and {packed}.")
            outer[name] = packed
    groups = [part["group"] for part in parts if part["group"] is not None]
    if groups:
        outer[names[0]] = {**outer[names[0]], GROUP: groups[0]}

    def tensors(kind: str, of: Sequence[str]) -> dict[str, Any]:
        return {name: {"$tensor": child(f"global.{kind}", name)} for name in of}

    return {
        "global": {
            "weights": tensors("weights", names),
            "buffers": tensors("buffers", buffers),
            "outer": outer,
            "average": tensors("average", names) if average else None,
        },
        "single": sorted({key for part in parts for key in part["single"]}),
        "nodes": {str(k): part["own"] for k, part in enumerate(parts)},
        "cut": {str(k): part["cut"] for k, part in enumerate(parts)},
    }


def read(path: Path, node: Node) -> Snapshot:
    """What this node needs of a checkpoint, checked: all weights, its stretch of the outer state, its own."""
    exchange, transport = node.exchange, node.exchange.transport
    crew = Crew(transport, exchange.shards)
    body = checkpoints.manifest(path)
    meta = decode(body["meta"])
    if body["step"] and meta["writers"] != transport.nodes:
        raise OtherNodes(
            f"it was written by {meta['writers']} nodes in the middle of a round, and there are {transport.nodes} now, "
            "which can only go on from the end of one"
        )
    if (ranks := meta.get("ranks", 1)) != crew.ranks:
        raise ValueError(
            f"The checkpoint was written by nodes of {_ranks(ranks)}, and there are {_ranks(crew.ranks)} a node now. "
            "Resume with the same."
        )
    where = places(node)
    _check_model(body, meta, node, where)
    own = {exchange.names[s.tensor]: s for s in exchange.segments}
    cut: dict[str, tuple[int, int]] = {}
    rows = zip(exchange.names, exchange.layout.offsets, exchange.layout.sizes, where, strict=True)
    for name, offset, size, place in rows:
        keys = [key for key in tensors_of(meta["global"]["outer"][name]) if key not in meta["single"]]
        keys += [child("global.average", name)]
        first = place.start - offset
        mine = (first + own[name].start, first + own[name].stop) if name in own else (0, 0)
        cut |= dict.fromkeys(keys, mine)
        cut[child("global.weights", name)] = place.start, place.start + size

    def wanted(owner: int | None, name: str, start: int, stop: int) -> bool:
        if owner is not None:
            return owner == crew.number
        low, high = cut.get(name, (start, stop))
        return start == stop or (start < high and low < stop)

    return checkpoints.load(path, wanted)


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"


def _check_model(body: Mapping[str, Any], meta: Mapping[str, Any], node: Node, where: Sequence[Place]) -> None:
    exchange, found = node.exchange, meta["global"]
    now = node.begun_buffers()
    for then, here in ((found["weights"], exchange.names), (found["buffers"], list(now))):
        if list(then) != list(here):
            other = sorted(set(then) ^ set(here)) or ["the same names in another order"]
            raise ValueError(f"The checkpoint is of another model: {', '.join(other[:5])} stand in one of them only.")
    shapes = {child("global.weights", n): list(p.shape) for n, p in zip(exchange.names, where, strict=True)}
    shapes |= {child("global.buffers", name): list(b.shape) for name, b in now.items()}
    for name, shape in shapes.items():
        if body["tensors"][name]["shape"] != shape:
            raise ValueError(
                f"The checkpoint is of another model: {name} has the shape {body['tensors'][name]['shape']} there, "
                f"{shape} here."
            )
    if (found["average"] is None) != (node.average is None):
        raise ValueError("The checkpoint was written with another setting of `average`; resume with the same.")


@torch.no_grad()
def restore(snapshot: Snapshot, node: Node) -> dict[str, Any] | None:
    """Put what all share into a node; returns what it kept to itself, None where it was not there."""
    exchange, tensors, where = node.exchange, snapshot.tensors, places(node)
    crew = Crew(exchange.transport, exchange.shards)
    found, single = snapshot.meta["global"], set(snapshot.meta["single"])
    views = exchange.layout.views(node.x, exchange.shapes)
    for name, view, place in zip(exchange.names, views, where, strict=True):
        part = tensors[child("global.weights", name)].reshape(-1)[place.start : place.start + view.numel()]
        view.copy_(part.view(view.shape))
    for i, s in enumerate(exchange.segments):
        name, offset = exchange.names[s.tensor], exchange.layout.offsets[s.tensor]
        first = where[s.tensor].start - offset
        mine = slice(first + s.start, first + s.stop)
        packed = {key: value for key, value in found["outer"][name].items() if key != GROUP}
        parts = {
            key: tensors[key].clone() if key in single else tensors[key].reshape(-1)[mine].clone()
            for key in tensors_of(packed)
        }
        node.outer[i] = unpack(parts, packed)
        if i == 0 and (group := found["outer"][exchange.names[0]].get(GROUP)) is not None:
            node.outer[0][GROUP] = group
        if node.average is not None:
            node.average[s.start : s.stop] = tensors[child("global.average", name)].reshape(-1)[mine]
    node.round = snapshot.round
    node.begin_with({name: tensors[child("global.buffers", name)] for name in found["buffers"]})
    own = snapshot.meta["nodes"].get(str(crew.number))
    if own is None:
        return None
    cut = snapshot.meta.get("cut", {}).get(str(crew.number), {})
    parts = {
        name: _as_shard(name, t, cut[name], node) if name in cut else t
        for name, t in snapshot.nodes[crew.number].items()
    }
    return dict(unpack(parts, own))


def _as_shard(name: str, local: Tensor, shape: Sequence[int], node: Node) -> Tensor:
    """A DTensor again, cut as the parameters of its shape are."""
    from torch.distributed.tensor import DTensor

    for p in node.params:
        if is_dtensor(p) and list(p.shape) == list(shape) and p.to_local().shape == local.shape:
            local = local.to(p.device)
            return DTensor.from_local(local, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
    raise ValueError(
        f"The checkpoint's {name} is of shape {list(shape)}, as no sharded parameter is here. Use the same model."
    )


# What a node keeps to itself


def generators(device: torch.device) -> dict[str, Tensor]:
    """The state of torch's generators: of the CPU, and of the device."""
    found = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        found[device.type] = torch.get_device_module(device).get_rng_state(device)
    return found


def set_generators(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Give torch's generators their state back; of another kind of device there is none."""
    torch.set_rng_state(states["cpu"])
    if device.type in states and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[device.type], device)


def load_inner(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """`load_state_dict`, to the bit: torch rounds state to the type of its parameter, which may be narrower."""
    optimizer.load_state_dict(saved)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for i, values in saved["state"].items():
        if isinstance(i, int) and i < len(params) and isinstance(values, dict):
            state = optimizer.state[params[i]]
            for key, then in values.items():
                now = state.get(key)
                if isinstance(then, Tensor) and isinstance(now, Tensor) and then.dtype != now.dtype:
                    state[key] = then.to(now.device, copy=True)


def counted(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Rows of numbers, equal ones that follow each other once: [how many, row].

    Examples:
        >>> counted([{"lr": 0.1}, {"lr": 0.1}, {"lr": 0.2}])
        [[2, {'lr': 0.1}], [1, {'lr': 0.2}]]
    """
    found: list[list[Any]] = []
    for row in rows:
        if found and _same(found[-1][1], row):
            found[-1][0] += 1
        else:
            found.append([1, row])
    return found


def one_by_one(found: Sequence[Sequence[Any]]) -> list[Mapping[str, Any]]:
    """What `counted` counted.

    Examples:
        >>> one_by_one([[2, {"lr": 0.1}], [1, {"lr": 0.2}]])
        [{'lr': 0.1}, {'lr': 0.1}, {'lr': 0.2}]
    """
    return [row for count, row in found for _ in range(count)]


def _same(a: Any, b: Any) -> bool:
    """Whether values are equal; a tensor is so to itself."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)
