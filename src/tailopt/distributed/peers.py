"""The other nodes: agreeing with them before the first exchange, and noticing when one of them is gone.

Everything here goes through the store of the process group, never through gloo: gloo ends the process in C++ where
sizes differ, names nobody where a node dies, and cannot be woken where a node has stopped.

    agree       every node posts its facts, waits for everybody's and compares; a difference is an error on all of them
    heart       a thread writes a count every second and reads the others'; what does not change is a dead node
    call        an exchange runs in a second thread, while this one waits for it and for bad news
    verdict     the first to find a node gone posts it, so that everybody ends with the same sentence

Times are in seconds. A pause of this process itself (a laptop asleep, a debugger) is not counted against the others.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import platform
import queue
import re
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tailopt.distributed.last_words import block, on_sigterm, say
from tailopt.distributed.rendezvous import (
    Disagreement,
    NodeLost,
    Store,
    absent_nodes,
    agent_serves,
    awaited,
    connect,
    first_line,
    turn_of,
)
from tailopt.records.tensor_bytes import tensor_sha256

__all__ = ["Disagreement", "NodeLost", "Peers", "comparable", "connect", "described", "difference", "on_cpu", "shape"]

T = TypeVar("T")
_DIST: Any = dist

BEAT = 1.0  # between two signs of life
HURRY = 0.1  # the same, once something is wrong
SILENT = 3.0  # a connection has closed: whoever is silent for so long is the one
LINGER = 2.0  # for an exchange to end of its own accord once a node has left, and for the others to read a verdict
GRACE = 4.0  # from NodeLost to the end of the process
LEAST = 3.0  # the shortest timeout: a few beats
ENVIRONMENT = "environment"
TOLD = "it was told to end (SIGTERM)"
_WORDS = re.compile("connection|timed out|timeout|peer|socket|broken pipe|pair", re.IGNORECASE)


class Heart:
    """Shows that this node lives, and listens to the others: one thread with its own connection to the store.

    A sign of life is JSON: a count, why the node has left if it has, whether it knows the verdict, where it is (round
    and local step), and whether it waits for others there.
    """

    def __init__(self, whole: Store, prefix: str, turn: int, node: int, nodes: int) -> None:
        self.store = whole  # kept: where this process serves the store, it must live as long as the heart
        self.node, self.nodes = node, nodes
        self.polls = 0
        self.ages: dict[int, float] = {}  # of those that have come: how long there has been no new sign
        self.left: dict[int, str] = {}
        self.informed: set[int] = set()
        self.verdict: dict[str, Any] | None = None
        self.broken = ""  # why the store cannot be reached any more
        self.hurry = False
        self.accuse: dict[str, Any] | None = None  # to be posted, unless somebody was first
        self.round, self.step, self.waits = 0, 0, False  # of this node
        self.messages = 0  # that have come or gone: a long exchange makes progress too
        self.places: dict[
            int, tuple[int, int, bool, int]
        ] = {}  # of the others: round, step, whether they wait, messages
        self.last_good: Callable[[], str] = str  # from where the run can go on, in words
        self.keeper = ""  # who serves the store, in words
        self._leaving: str | None = None
        self._counts: dict[int, int] = {}
        self._looked = time.monotonic()
        self._wake = threading.Event()
        self._pid = os.getpid()
        connection = whole.clone()
        self._own = _DIST.PrefixStore(f"{prefix}/{turn}", connection)
        # a node of several ranks is in several groups: a verdict is for all of them
        self._common = _DIST.PrefixStore(f"tailopt/{turn}", connection)
        self._poll()  # so that whoever reads the facts of this node finds its first sign too
        self._thread = threading.Thread(target=self._live, name="tailopt heart", daemon=True)
        self._thread.start()

    def quicken(self) -> None:
        """Something is wrong: look more often from now on."""
        self.hurry = True
        self._wake.set()

    def leave(self, why: str) -> None:
        """Tell the others, and stop."""
        self._leaving = why
        self._wake.set()

    def ended(self, seconds: float) -> bool:
        """Wait for the thread to stop; a forked child has none."""
        if os.getpid() == self._pid and self._thread is not threading.current_thread():
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _live(self) -> None:
        while not self.broken:
            self._wake.wait(HURRY if self.hurry else BEAT)
            self._wake.clear()
            last = self._leaving is not None
            try:
                self._poll()
            except Exception as error:  # of the store, whatever its kind: a DistError, or a plain RuntimeError
                self.broken = first_line(error)
            if last:
                return

    def _poll(self) -> None:
        now = time.monotonic()  # before reading: a pause in between must not age anybody
        at = (self.round, self.step, self.waits, self.messages)
        sign = {"count": self.polls, "left": self._leaving, "knows": self.verdict is not None, "at": at}
        self._own.set(f"sign/{self.node}", json.dumps(sign))
        others = [k for k in range(self.nodes) if k != self.node]
        here = [k for k in others if k in self._counts or self._own.check([f"sign/{k}"])]
        # time in which this thread did not look is nobody's silence
        gap = min(now - self._looked, 2 * BEAT)
        for k, text in zip(here, self._read([f"sign/{k}" for k in here]), strict=True):
            seen = json.loads(text)
            self.ages[k] = self.ages.get(k, 0.0) + gap if self._counts.get(k) == seen["count"] else 0.0
            self._counts[k] = seen["count"]
            round, step, waits, messages = seen["at"]
            self.places[k] = (int(round), int(step), bool(waits), int(messages))
            if seen["left"] is not None:
                self.left[k] = seen["left"]
            if seen["knows"]:
                self.informed.add(k)
        # after the signs: a node that left over a verdict has posted it before
        if self.accuse is not None and self.verdict is None:
            self.verdict = json.loads(self._common.compare_set("verdict", "", json.dumps(self.accuse)))
        elif self.verdict is None and self._common.check(["verdict"]):
            self.verdict = json.loads(self._common.get("verdict"))
        self._looked = now
        self.polls += 1

    def _read(self, keys: list[str]) -> list[bytes]:
        if self._own.has_extended_api() and keys:
            return list(self._own.multi_get(keys))
        return [self._own.get(key) for key in keys]


class _Call:
    def __init__(self, function: Callable[[], Any]) -> None:
        self.function: Callable[[], Any] | None = function
        self.value: Any = None
        self.error: BaseException | None = None
        self.done = threading.Event()


class Worker:
    """One thread for everything that can block for ever, with its own connection to the store.

    The connection is kept: making one took 0.4 s on a loaded machine.
    """

    store: Store = None

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._current: _Call | None = None
        threading.Thread(target=_work, args=(self._calls,), name="tailopt exchange", daemon=True).start()

    def start(self, function: Callable[[], Any]) -> _Call:
        """Begin a call; whether it is done stands in it."""
        self._current = call = _Call(function)
        self._calls.put(call)
        return call

    @property
    def busy(self) -> bool:
        """Whether a call has not come back."""
        return self._current is not None and not self._current.done.is_set()

    def stop(self) -> None:
        """After the calls that have begun."""
        self._calls.put(None)


def _work(calls: queue.SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        try:
            assert call.function is not None
            call.value = call.function()
        except BaseException as error:
            call.error = error
        call.function = None  # it holds tensors
        call.done.set()
        del call


class Peers:
    """The other nodes of a group, watched.

    Args:
        group: the process group; hearts are shared by all that watch the same one.
        timeout: how long a node may show no sign of life.
        stall_timeout: how long a node may show signs of life and make no progress while others wait for it; None for
            as long as it likes.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float = 60.0, stall_timeout: float | None = None) -> None:
        for name, value in (("timeout", timeout), ("stall_timeout", stall_timeout)):
            if name == "stall_timeout" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not LEAST <= value < float("inf"):
                raise ValueError(f"Invalid {name}: {value!r}; need a number of seconds, {LEAST:g} or more.")
        self.node, self.nodes = dist.get_rank(group), dist.get_world_size(group)
        self.timeout, self.stall_timeout = float(timeout), stall_timeout
        self._warned_in = -1  # the round in which a slow node was last named
        self.environments: list[dict[str, Any]] = []
        self._failed: RuntimeError | None = None
        whole = _DIST.distributed_c10d._get_process_group_store(dist.group.WORLD)
        self._keeper, self._keeps = _keeper(whole)
        self._worker, heart = _SHARED.get(group) or (Worker(), None)
        self._heart = heart or self._first(group, whole)
        self._heart.keeper = self._keeper
        on_sigterm(_told_to_end)

    @property
    def round(self) -> int:
        """The round that this node is in."""
        return self._heart.round

    def at(self, round: int, step: int) -> None:
        """Say where this node is."""
        self._heart.round, self._heart.step = round, step

    def message_done(self) -> None:
        """Count a message that has come or gone."""
        self._heart.messages += 1

    def can_go_on_from(self, words: Callable[[], str]) -> None:
        """Say what the last words of this node tell about checkpoints."""
        self._heart.last_good = words

    def _first(self, group: dist.ProcessGroup, whole: Store) -> Heart:
        """The heart of a group that has none; refused where another process already is this node."""
        prefix = f"tailopt/{'-'.join(map(str, dist.get_process_group_ranks(group)))}"

        def come() -> Heart:
            connection = whole.clone()
            turn = turn_of(_DIST.PrefixStore(prefix, connection), self.node)
            self._worker.store = _DIST.PrefixStore(f"{prefix}/{turn}", connection)
            return Heart(whole, prefix, turn, self.node, self.nodes)

        call = self._worker.start(come)
        done = call.done.wait(self.timeout)
        if isinstance(call.error, Disagreement):
            raise call.error
        if not done or call.error is not None:
            reason = first_line(call.error) if call.error else f"no answer for {self.timeout:g} s"
            lost = NodeLost(f"{self._keeper} cannot be reached: {reason}. Start all nodes again.")
            _watchdog(lost, block(f"{self._keeper} cannot be reached: {reason}."))
            raise lost from call.error
        heart: Heart = call.value
        _SHARED[group] = (self._worker, heart)
        _HEARTS.append((heart, self._worker))
        weakref.finalize(group, heart.leave, "it has left the group").atexit = False
        weakref.finalize(group, self._worker.stop).atexit = False
        return heart

    # ---- before the first exchange ----

    def agree(self, facts: Mapping[str, Any], exact: bool = False) -> None:
        """Compare facts with everybody: all nodes go on, or all raise the same `Disagreement`.

        facts: name -> numbers, strings, lists and mappings; the rest as `described`. What differs in the environment
        (torch, instruction set, threads) is an error where `exact`, else node 0 warns: a replay cannot have its bits.
        """
        mine = {**{key: described(value) for key, value in facts.items()}, "exact": exact, ENVIRONMENT: environment()}
        everyone, ready = self.call(lambda: self._collected(json.dumps(mine)), watch=False)
        self.environments = [found.pop(ENVIRONMENT) for found in everyone]
        wrong = difference(everyone)
        unlike = difference([{ENVIRONMENT: found} for found in self.environments])
        if wrong or (exact and unlike):
            self.call(ready, watch=False)
            remedy = "Start all nodes with the same code and settings" if wrong else "exact=True needs equal machines"
            raise Disagreement(f"{wrong or unlike} {remedy}.")
        if unlike and self.node == 0:
            warnings.warn(
                f"{unlike} The run is sound, but a replay on one machine cannot have its exact bits.", stacklevel=4
            )

    def _collected(self, text: str) -> tuple[list[dict[str, Any]], Callable[[], None]]:
        """Everybody's facts, and what waits until everybody has read them."""
        store = self._worker.store
        number = store.add(f"made/{self.node}", 1)  # several optimizers, one after another, on every node alike
        store.set(f"facts/{number}/{self.node}", text)
        missing = awaited(store, f"facts/{number}", range(self.nodes), self.timeout)
        if missing:
            raise NodeLost(absent_nodes(missing, self.nodes, self.timeout))
        found = [json.loads(store.get(f"facts/{number}/{k}")) for k in range(self.nodes)]

        def ready() -> None:
            # one that ends at once might take the store with it
            with contextlib.suppress(RuntimeError):
                store.set(f"read/{number}/{self.node}", "")
                awaited(store, f"read/{number}", range(self.nodes), LINGER)

        return found, ready

    # ---- while it runs ----

    def check(self) -> None:
        """Raise `NodeLost` if a node is known to be gone: for local steps, between exchanges."""
        if self._failed is not None:
            raise self._failed
        heart = self._heart
        if heart.verdict is not None:
            self._end(heart.verdict)
        silent = {k: age for k, age in heart.ages.items() if k not in heart.left}
        worst = max(silent, key=lambda k: silent[k], default=None)
        if worst is not None and silent[worst] > self.timeout:
            self._accuse(worst, f"no sign of life for {self.timeout:g} s")

    def call(self, function: Callable[[], T], watch: bool = True) -> T:
        """The result of a function that may block for ever; bad news about a node ends the wait with `NodeLost`."""
        if watch:
            self.check()
        call = self._worker.start(function)
        vigil = _Vigil(self)
        self._heart.waits = True
        try:
            while not call.done.wait(BEAT / 4):
                vigil.look(closed=None, watch=watch)
        finally:
            self._heart.waits = False
        if call.error is None:
            value: T = call.value
            return value
        if isinstance(call.error, NodeLost) or not isinstance(call.error, RuntimeError) or not watch:
            raise call.error
        if not _WORDS.search(str(call.error)):
            raise call.error
        # a connection has closed, or timed out; whose, is known from the hearts alone
        self._heart.quicken()
        vigil, until = _Vigil(self), time.monotonic() + self.timeout
        while time.monotonic() < until:
            vigil.look(closed=call.error, watch=True)
            time.sleep(HURRY)
        raise NodeLost(
            f"A connection failed {_when(self.round)}, though all nodes show signs of life: {first_line(call.error)}. "
            "Check the network, or give init_process_group a longer timeout for slow nodes."
        ) from call.error

    def leave(self, error: RuntimeError) -> None:
        """Tell the others now that this node failed, even if its program goes on; it takes part in nothing then."""
        self._failed = error
        self._heart.leave(_failure(error))
        self._heart.ended(LINGER)

    def _accuse(self, node: int, reason: str, cause: BaseException | None = None) -> None:
        """Post a verdict, and end with it, or with that of a node that was faster."""
        heart = self._heart
        verdict: dict[str, Any] = {"node": node, "round": self.round, "reason": reason}
        heart.accuse = verdict
        heart.quicken()
        until = time.monotonic() + LINGER
        while heart.verdict is None and not heart.broken and time.monotonic() < until:
            time.sleep(HURRY / 5)
        self._end(heart.verdict or verdict, cause)

    def _end(self, verdict: Mapping[str, Any], cause: BaseException | None = None) -> None:
        heart, (node, round, reason) = self._heart, (verdict[key] for key in ("node", "round", "reason"))
        heart.quicken()
        until = time.monotonic() + LINGER
        while self._keeps and time.monotonic() < until and not heart.broken:
            alive = {k for k, age in heart.ages.items() if k not in heart.left and age < SILENT} - {node}
            if alive <= heart.informed:
                break
            time.sleep(HURRY)
        who = "This node was given up by the others" if node == self.node else f"Node {node} is gone"
        self._lose(f"{who} {_when(round)}: {reason}.", cause)

    def store_gone(self, reason: str, cause: BaseException | None) -> None:
        """The store cannot be reached: nothing can be posted, or read."""
        self._lose(f"{self._keeper} is gone {_when(self.round)}: {reason}.", cause)

    def stuck(self) -> None:
        """All nodes wait for each other: nobody is to blame, and nothing will come."""
        self._lose(f"No node has made progress {_when(self.round)} for {self.stall_timeout:g} s.", None)

    def _lose(self, sentence: str, cause: BaseException | None) -> None:
        lost = NodeLost(f"{sentence} Restart all nodes from the last checkpoint.")
        _watchdog(lost, block(sentence, self._heart.last_good()))
        raise lost from cause


class _Vigil:
    """One wait of one call: time is counted in looks, so that a pause of this process is nobody's silence."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self.polls, self.quiet, self.since = peers._heart.polls, 0.0, 0.0
        self.waited = 0.0
        self.places: dict[int, tuple[int, int, bool, int]] = {}
        self.stalled: dict[int, float] = {}  # how long each node has been where it is
        self.last = time.monotonic()

    def look(self, closed: BaseException | None, watch: bool) -> None:
        """Raise `NodeLost` where somebody is to be named."""
        peers, heart, now = self.peers, self.peers._heart, time.monotonic()
        gap, self.last = min(now - self.last, BEAT), now
        self.quiet = 0.0 if heart.polls != self.polls else self.quiet + gap
        self.polls = heart.polls
        if watch:
            if heart.verdict is not None:
                peers._end(heart.verdict, closed)
            self._left(closed, gap)
            self._silent(closed)
            if closed is None:
                self._slow(gap)
        if heart.broken:
            peers.store_gone(heart.broken, closed)
        if self.quiet > peers.timeout:
            peers.store_gone(f"no answer for {peers.timeout:g} s", closed)

    def _left(self, closed: BaseException | None, gap: float) -> None:
        if not self.peers._heart.left:
            return
        self.since += gap
        for node, why in self.peers._heart.left.items():
            # torchrun tells all nodes to end when one is gone: that one is silent, and it is the one to be named
            if why == TOLD:
                if self.since > SILENT + 3 * BEAT:
                    self.peers._accuse(node, why, closed)
                continue
            # one that left after this very exchange has done its part: let it end
            if why.startswith("it failed") or closed is not None or self.since > LINGER:
                self.peers._accuse(node, why, closed)

    def _slow(self, gap: float) -> None:
        """Name a node that lives and makes no progress: in a warning, and where a limit was set as lost."""
        peers, limit = self.peers, self.peers.stall_timeout
        self.waited += gap
        for k, place in peers._heart.places.items():
            self.stalled[k] = self.stalled.get(k, 0.0) + gap if self.places.get(k) == place else 0.0
            self.places[k] = place
        busy = {k: self.stalled[k] for k, (_, _, waits, _) in self.places.items() if not waits}
        slowest = max(busy, key=lambda k: busy[k], default=None)
        if slowest is not None and self.waited > peers.timeout and peers._warned_in != peers.round:
            peers._warned_in = peers.round
            round, step, *_ = self.places[slowest]
            warnings.warn(
                f"Round {peers.round} has waited for node {slowest} for {self.waited:.0f} s: it shows signs of life, "
                f"and is in round {round}, after {step} local steps.",
                stacklevel=7,
            )
        if limit is None or not peers.round:  # before the first round a node may wait for a run folder
            return
        if slowest is not None and busy[slowest] > limit:
            step = self.places[slowest][1]
            peers._accuse(slowest, f"it shows signs of life, and no progress after {step} local steps for {limit:g} s")
        if not busy and self.stalled and min(self.stalled.values()) > limit:
            peers.stuck()

    def _silent(self, closed: BaseException | None) -> None:
        heart = self.peers._heart
        ages = {k: age for k, age in heart.ages.items() if heart.left.get(k) != TOLD}
        worst = max(ages, key=lambda k: ages[k], default=None)
        most = self.peers.timeout if closed is None else min(SILENT, self.peers.timeout)
        if worst is not None and ages[worst] > most:
            reason = f"no sign of life for {most:g} s"
            self.peers._accuse(worst, reason if closed is None else f"its connection is closed, and {reason}", closed)


def on_cpu(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group, or where it carries no tensors of the CPU (NCCL's alone) one over gloo of the same ranks.

    All of them must ask for it, in the same order; it is made once.
    """
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        if group not in _BESIDE:
            ranks = dist.get_process_group_ranks(group)
            _BESIDE[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        return _BESIDE[group]
    return group


_BESIDE: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


# ---- facts ----


def described(value: Any) -> Any:
    """A value as JSON that is equal on two nodes where the value is: tensors by their digest, functions by name.

    Examples:
        >>> described({"u": 0.5, "betas": (0.9, 0.999), "dtype": torch.float32, "of": torch.optim.SGD})
        {'betas': [0.9, 0.999], 'dtype': 'float32', 'of': 'torch.optim.sgd.SGD', 'u': 0.5}
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): described(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, Sequence):
        return [described(entry) for entry in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Tensor):
        plain = value.detach().cpu()
        if not plain.dim():
            return plain.item() if not plain.is_complex() else str(plain.item())
        return f"{shape(value)} sha256:{tensor_sha256(plain)[:12]}"
    named = value if hasattr(value, "__qualname__") else type(value)  # an object's repr may hold its address
    return f"{named.__module__}.{named.__qualname__}"


def comparable(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without what may differ between nodes: device, weight, paths, loggers, progress and timeouts.

    Examples:
        >>> comparable({"rounds": 3, "device": "cuda:1", "task": {"name": "texts", "data": "/here", "df": 1.5}})
        {'rounds': 3, 'task': {'name': 'texts', 'df': 1.5}}
    """
    return {
        key: comparable(value) if isinstance(value, Mapping) else value
        for key, value in configuration.items()
        if key not in _LOCAL and not (key in _MAYBE_PATHS and os.path.exists(os.path.expanduser(str(value))))
    }


_LOCAL = {"weight", "device", "data", "loggers", "progress", "timeout", "stall_timeout"}
_MAYBE_PATHS = {"model", "tokenizer"}  # or names of the hub, which must be the same


def shape(value: Tensor) -> str:
    """Type and shape of a tensor.

    Examples:
        >>> shape(torch.zeros(3, 4))
        'float32[3, 4]'
    """
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def environment() -> dict[str, Any]:
    """What the bits of a run depend on beside its settings."""
    return {
        "torch": torch.__version__,
        "instruction set": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
    }


def difference(everyone: Sequence[Mapping[str, Any]]) -> str:
    """The first fact in which a node differs from node 0, as a sentence; empty where all agree.

    Examples:
        >>> difference([{"local_steps": 5}, {"local_steps": 5}, {"local_steps": 3}])
        'Node 2 disagrees with node 0 on local_steps: it has 3, and node 0 has 5.'
    """
    for node, facts in enumerate(everyone):
        found = _differing(dict(everyone[0]), dict(facts), "")
        if found is not None:
            where, first, other = found
            return f"Node {node} disagrees with node 0 on {where}: it has {other}, and node 0 has {first}."
    return ""


def _differing(a: Any, b: Any, where: str) -> tuple[str, str, str] | None:
    """Where two values differ first, and how."""
    if isinstance(a, dict) and isinstance(b, dict):
        pairs = [(f"{where}, {key}" if where else key, a.get(key, _NONE), b.get(key, _NONE)) for key in {**a, **b}]
    elif isinstance(a, list) and isinstance(b, list):
        pairs = [(f"{where}, entry {i}", x, y) for i, (x, y) in enumerate(zip_longest(a, b, fillvalue=_NONE))]
    else:
        x, y = (str(v) if v is _NONE else json.dumps(v) for v in (a, b))  # as text: NaN equals NaN
        return (where, x, y) if x != y else None
    return next((found for key, x, y in pairs if (found := _differing(x, y, key)) is not None), None)


class _Nothing:
    def __str__(self) -> str:
        return "none"


_NONE = _Nothing()


# ---- sentences ----


def _when(round: int) -> str:
    return f"in round {round}" if round else "before the first round"


def _keeper(store: Store) -> tuple[str, bool]:
    """Who serves the store, in words, and whether it is this process."""
    whole = store
    while isinstance(whole, _DIST.PrefixStore):
        whole = whole.underlying_store
    if not isinstance(whole, _DIST.TCPStore):
        return "The store", False
    if agent_serves():
        return f"The store of torchrun at {whole.host}:{whole.port}", False
    return f"Node 0, which serves the store at {whole.host}:{whole.port},", dist.get_rank() == 0


# ---- the end of the process ----

_SHARED: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[Worker, Heart]] = weakref.WeakKeyDictionary()
_HEARTS: list[tuple[Heart, Worker]] = []
_LOST: list[tuple[NodeLost, str]] = []  # with its last words


def _watchdog(lost: NodeLost, words: str) -> None:
    """End the process in a while, whatever it is doing then."""
    _LOST.append((lost, words))
    if len(_LOST) == 1:
        threading.Thread(target=_bite, name="tailopt watchdog", daemon=True).start()


def _bite() -> None:
    time.sleep(GRACE)
    say(f"tailopt: {_LOST[0][0]} This process still ran {GRACE:g} s later and is ended.\n{_LOST[0][1]}")
    _exit()


def _exit() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(1)


def _told_to_end() -> str:
    """The last words of a node that got SIGTERM: torchrun sends it to all as soon as one node is gone."""
    if _LOST:
        return _LOST[0][1]
    heart, until = _HEARTS[-1][0], time.monotonic() + SILENT + 3 * BEAT
    if heart.ended(0.0):  # the run is over
        return ""
    heart.quicken()
    sentence = ""
    while not sentence and not heart.broken and time.monotonic() < until:
        failed = [k for k, why in heart.left.items() if why.startswith("it failed")]
        silent = [k for k, age in heart.ages.items() if age > SILENT and k not in heart.left]
        if heart.verdict is not None:
            node, round, reason = (heart.verdict[key] for key in ("node", "round", "reason"))
            sentence = f"Node {node} is gone {_when(round)}: {reason}."
        elif failed:
            sentence = f"Node {failed[0]} is gone {_when(heart.round)}: {heart.left[failed[0]]}."
        elif silent:
            sentence = f"Node {silent[0]} is gone {_when(heart.round)}: no sign of life for {SILENT:g} s."
        time.sleep(HURRY / 2)
    if heart.broken:
        sentence = f"{heart.keeper} is gone {_when(heart.round)}: {heart.broken}."
    told = "This node was told to end (SIGTERM)"
    heart.leave(TOLD)
    heart.ended(LINGER)
    return block(sentence or f"{told} {_when(heart.round)}; all other nodes showed signs of life.", heart.last_good())


@atexit.register
def _depart() -> None:
    """Tell the others why this process ends, and never wait for gloo."""
    hearts = [pair for pair in _HEARTS if pair[0]._pid == os.getpid()]
    error = getattr(sys, "last_value", None)  # set where the program ended with an exception
    why = "it has left; the nodes must end after the same round" if error is None else _failure(error)
    for heart, _ in hearts:
        heart.leave(why)
    for heart, _ in hearts:
        heart.ended(LINGER)
    # a thread that comes back from C++ while the interpreter is being taken down would abort the process
    if _LOST or any(worker.busy for _, worker in hearts):
        logging.shutdown()
        if _LOST:
            say(_LOST[0][1])
        _exit()


def _failure(error: BaseException) -> str:
    return f"it failed with {type(error).__name__}: {first_line(error)}"
