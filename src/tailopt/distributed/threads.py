"""The threads of a real node, and all else that blocks: the protocol's interfaces on torch's store and the clock.

    heartbeat    one thread that polls; it has its own connection to the store
    exchange     one thread for everything that can block for ever: messages over gloo, the first connection
    watchdog     one thread that ends the process some seconds after `NodeLost`
    SIGTERM      one thread that finds out which node is gone before this one ends (last_words.py)

`Peers` is what a node's program sees of them.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import socket
import sys
import threading
import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

from tailopt.distributed.agreement import FactExchange, agree
from tailopt.distributed.errors import Disagreement, NodeLost, first_line
from tailopt.distributed.heartbeat import DRAIN_S, Heartbeat
from tailopt.distributed.interfaces import Event, blocking
from tailopt.distributed.last_words import block, on_sigterm, say
from tailopt.distributed.membership import EXIT_AFTER_S, Membership, Timeouts
from tailopt.distributed.roll_call import LOOKUP_S, StoreOwner, answered, incarnation

T = TypeVar("T")
_DIST: Any = dist  # torch does not export the types of its stores

_SELF = uuid.uuid4().hex  # tells this process from all others


def start_daemon(target: Callable[..., object], name: str, *args: object) -> threading.Thread:
    """Start a thread that does not keep the process alive."""
    thread = threading.Thread(target=target, args=args, name=f"tailopt {name}", daemon=True)
    thread.start()
    return thread


class ThreadEvent:
    """An event between threads."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.set, self.clear = self._event.set, self._event.clear

    async def wait(self, seconds: float) -> bool:
        """Block until it is set, at most so long."""
        return self._event.wait(seconds)


class SystemClock:
    """The clock of this machine."""

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Block this thread."""
        time.sleep(seconds)

    def event(self) -> Event:
        """An event between threads."""
        return ThreadEvent()


class TorchStore:
    """torch's store, as the protocol uses it; every method blocks.

    Args:
        store: torch's. A store that is served by this process must live as long as this object.
    """

    def __init__(self, store: Any) -> None:
        self.store = store

    def under(self, prefix: str) -> TorchStore:
        """The same store, with keys below a prefix."""
        return TorchStore(_DIST.PrefixStore(prefix, self.store))

    async def set(self, key: str, value: str) -> None:
        """Write a key."""
        self.store.set(key, value)

    async def get(self, key: str) -> str:
        """Read a key that exists."""
        text: str = self.store.get(key).decode()
        return text

    async def get_many(self, keys: list[str]) -> list[str]:
        """Read several keys that exist, in one message where the store can."""
        if keys and self.store.has_extended_api():
            return [value.decode() for value in self.store.multi_get(keys)]
        return [self.store.get(key).decode() for key in keys]

    async def check(self, key: str) -> bool:
        """Whether a key exists."""
        return bool(self.store.check([key]))

    async def add(self, key: str, amount: int) -> int:
        """Add to a counter; returns its new value."""
        return int(self.store.add(key, amount))

    async def compare_set(self, key: str, value: str) -> str:
        """Write a key unless it exists; returns what is there now."""
        text: str = self.store.compare_set(key, "", value).decode()
        return text


class ThreadCall:
    """A function that another thread runs; see `interfaces.Call`."""

    def __init__(self, function: Callable[[ThreadCall], Any]) -> None:
        self.function: Callable[[ThreadCall], Any] | None = function
        self.value: Any = None
        self.error: BaseException | None = None
        self.waiting_for: int | None = None
        self.done = threading.Event()

    async def wait(self, seconds: float) -> bool:
        """Block until it is done, at most so long."""
        return self.done.wait(seconds)


class CommThread:
    """One thread for everything that can block for ever.

    It keeps its connection to the store: opening one took 0.4 s on a loaded machine.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[ThreadCall | None] = queue.SimpleQueue()
        self._current: ThreadCall | None = None
        start_daemon(_run_calls, "exchange", self._calls)

    def start(self, function: Callable[[ThreadCall], Any]) -> ThreadCall:
        """Begin a call; the function gets the call, to tell for which node it waits."""
        self._current = call = ThreadCall(function)
        self._calls.put(call)
        return call

    @property
    def busy(self) -> bool:
        """Whether a call has not come back."""
        return self._current is not None and not self._current.done.is_set()

    def stop(self) -> None:
        """End the thread after the calls that have begun."""
        self._calls.put(None)


def _run_calls(calls: queue.SimpleQueue[ThreadCall | None]) -> None:
    while (call := calls.get()) is not None:
        try:
            assert call.function is not None
            call.value = call.function(call)
        except BaseException as error:
            call.error = error
        call.function = None  # it holds tensors
        call.done.set()
        del call


def call_with_limit(function: Callable[[], T], seconds: float, name: str) -> T | None:
    """The result of a function that may not come back; None where it has not, and the thread is then left behind."""
    calls: queue.SimpleQueue[ThreadCall | None] = queue.SimpleQueue()
    call = ThreadCall(lambda _: function())
    calls.put(call)
    calls.put(None)
    thread = start_daemon(_run_calls, name, calls)
    if not call.done.wait(seconds):
        _STUCK.append(thread)
        return None
    if call.error is not None:
        raise call.error
    value: T = call.value
    return value


class _LocalMember:
    """This process as a member of a group: its threads and its `Membership`."""

    def __init__(self, comm: CommThread, membership: Membership, thread: threading.Thread) -> None:
        self.comm, self.membership = comm, membership
        self._thread, self.pid = thread, os.getpid()

    def heartbeat_ended(self, seconds: float) -> bool:
        """Wait for the heartbeat's thread to stop; a forked child has none."""
        if os.getpid() == self.pid and self._thread is not threading.current_thread():
            self._thread.join(seconds)
        return not self._thread.is_alive()


class Peers:
    """Runs the protocol's coroutines (`Membership`, `Heartbeat`, `FactExchange`) on the threads of this process.

    Args:
        group: the process group; the threads are shared by all that watch the same one.
        timeout: how long a node may show no sign of life.
        stall_timeout: how long a node may show signs of life and make no progress while others wait for it; None for
            ever.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float = 60.0, stall_timeout: float | None = None) -> None:
        timeouts = Timeouts(timeout, stall_timeout)
        self.node, self.nodes = dist.get_rank(group), dist.get_world_size(group)
        self.environments: list[dict[str, Any]] = []
        self._timeout = float(timeout)
        self._comm, self._store, heartbeat, thread = _SHARED.get(group) or self._join(group)
        self._store_owner = owner = store_owner(_world_store())
        self.membership = Membership(heartbeat, _CLOCK, _EXIT, timeouts, owner, _warn)
        self._member = _LocalMember(self._comm, self.membership, thread)
        _MEMBERS[:] = [known for known in _MEMBERS if known.membership.heartbeat is not heartbeat]
        _MEMBERS.append(self._member)
        on_sigterm(_explain_sigterm, lambda target, *args: start_daemon(target, "sigterm", *args))

    def _join(self, group: dist.ProcessGroup) -> tuple[CommThread, TorchStore, Heartbeat, threading.Thread]:
        """Start the heartbeat of a group that has none; refused where another process already is this node."""
        comm, world = CommThread(), _world_store()
        prefix = f"tailopt/{'-'.join(map(str, dist.get_process_group_ranks(group)))}"

        async def come() -> tuple[TorchStore, Heartbeat]:
            ours, theirs = TorchStore(world.clone()), TorchStore(world.clone())
            turn = await incarnation(ours.under(prefix), self.node, *this_process())
            group_store, run_store = theirs.under(f"{prefix}/{turn}"), theirs.under(f"tailopt/{turn}")
            heartbeat = Heartbeat(group_store, run_store, self.node, self.nodes, _CLOCK)
            await heartbeat.poll()  # a node that reads the facts of this one must find its first sign too
            return ours.under(f"{prefix}/{turn}"), heartbeat

        try:
            call = comm.start(lambda _: blocking(come()))
            limit = self._timeout + LOOKUP_S
            store, heartbeat = blocking(answered(call, _CLOCK, limit, store_owner(world), self.node))
        except Disagreement:
            raise
        except RuntimeError as error:
            text = str(error)
            if not isinstance(error, NodeLost):
                text = f"{store_owner(world).words} cannot be reached: {first_line(error)}. Start all nodes again."
            lost = NodeLost(text)
            _EXIT.schedule(lost, block(text))
            raise lost from error
        thread = start_daemon(_beat, "heartbeat", heartbeat, world)
        _SHARED[group] = joined = comm, store, heartbeat, thread
        weakref.finalize(group, heartbeat.leave, "it has left the group").atexit = False
        weakref.finalize(group, comm.stop).atexit = False
        return joined

    @property
    def round(self) -> int:
        """The round that this node is in."""
        return self.membership.round

    def report_position(self, round: int, step: int) -> None:
        """Say where this node is."""
        self.membership.heartbeat.round, self.membership.heartbeat.step = round, step

    def message_done(self) -> None:
        """Count a message that has come or gone."""
        self.membership.heartbeat.messages += 1

    def set_checkpoint_sentence(self, sentence: Callable[[], str]) -> None:
        """Set the function whose sentence about the last checkpoint is among the last words of this node."""
        self.membership.heartbeat.last_checkpoint_sentence = sentence

    def check(self) -> None:
        """Raise `NodeLost` if a node is known to be gone: for local steps, between exchanges."""
        blocking(self.membership.check())

    def run_in_thread(self, function: Callable[[ThreadCall], Any]) -> ThreadCall:
        """Begin a function that may block for ever in the exchange thread, for `membership.watch`."""
        return self._comm.start(function)

    def leave(self, error: RuntimeError) -> None:
        """Tell the others now that this node failed, even if its program goes on; it takes part in nothing then."""
        self.membership.fail(error)
        self._member.heartbeat_ended(DRAIN_S)

    def agree(self, facts: Mapping[str, Any], exact: bool = False) -> None:
        """Compare facts with all nodes: all nodes go on, or all raise the same `Disagreement`.

        facts: name -> numbers, strings, lists and mappings; the rest as `as_fact`. What differs in the environment
        (torch, instruction set, threads) is an error where `exact`, else node 0 warns: a replay cannot have its bits.
        """
        exchange = FactExchange(self._store, _CLOCK, self.node, self.nodes, self._timeout, self._store_owner)
        agreed = agree(
            facts, exact, exchange, self.membership, lambda coroutine: self.run_in_thread(lambda _: blocking(coroutine))
        )
        self.environments, unlike = blocking(agreed)
        if unlike and self.node == 0:
            warnings.warn(
                f"{unlike} The run is sound, but a replay on one machine cannot have its exact bits.", stacklevel=4
            )


def _beat(heartbeat: Heartbeat, world: Any) -> None:
    """Show signs of life. The world's store is an argument so that it lives as long: this process may serve it."""
    blocking(heartbeat.beat())


def this_process() -> tuple[str, str]:
    """This process in words that no other process has, and how often torchrun has started it."""
    words = f"process {os.getpid()} on {socket.gethostname()} ({_SELF})"
    return words, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def agent_serves() -> bool:
    """Whether torchrun's agent serves the store, and not node 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _world_store() -> Any:
    return _DIST.distributed_c10d._get_process_group_store(dist.group.WORLD)


def store_owner(store: Any) -> StoreOwner:
    """The process that serves a store of torch."""
    while isinstance(store, _DIST.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, _DIST.TCPStore):
        return StoreOwner()
    if agent_serves():
        return StoreOwner(f"The store of torchrun at {store.host}:{store.port}")
    return StoreOwner(f"Node 0, which serves the store at {store.host}:{store.port},", 0)


def _warn(text: str) -> None:
    # the frames between: _warn of the detector, its two checks, watch, the transport, the exchange
    warnings.warn(text, stacklevel=9)


# the end of the process

_CLOCK = SystemClock()
_SHARED: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[CommThread, TorchStore, Heartbeat, threading.Thread]]
_SHARED = weakref.WeakKeyDictionary()
_MEMBERS: list[_LocalMember] = []
_STUCK: list[threading.Thread] = []  # in torch's C++, for as long as its own limit


class _Exit:
    """Ends the process some time after the first `NodeLost`."""

    def __init__(self) -> None:
        self.lost: list[tuple[RuntimeError, str]] = []  # with the last words

    def schedule(self, error: RuntimeError, last_words: str) -> None:
        """End the process in a while, whatever it is doing then."""
        self.lost.append((error, last_words))
        if len(self.lost) == 1:
            start_daemon(self._kill_process, "watchdog")

    def _kill_process(self) -> None:
        time.sleep(EXIT_AFTER_S)
        error, last_words = self.lost[0]
        say(f"tailopt: {error} This process still ran {EXIT_AFTER_S:g} s later and is ended.\n{last_words}")
        _exit_now()


_EXIT = _Exit()


def _exit_now() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(1)


def _explain_sigterm() -> str:
    """The last words of a node that got SIGTERM."""
    if _EXIT.lost:
        return _EXIT.lost[0][1]
    member = _MEMBERS[-1]
    if member.heartbeat_ended(0.0):  # the run is over
        return ""
    words = blocking(member.membership.explain_sigterm())
    member.heartbeat_ended(DRAIN_S)
    return words


@atexit.register
def _on_exit() -> None:
    """Tell the others why this process ends, and never wait for gloo."""
    members = [member for member in _MEMBERS if member.pid == os.getpid()]
    error = getattr(sys, "last_value", None)  # set where the program ended with an exception
    for member in members:
        blocking(member.membership.depart(error))
    for member in members:
        member.heartbeat_ended(DRAIN_S)
    # a thread that comes back from C++ while the interpreter is being taken down would abort the process
    if _EXIT.lost or any(member.comm.busy for member in members) or any(thread.is_alive() for thread in _STUCK):
        logging.shutdown()
        if _EXIT.lost:
            say(_EXIT.lost[0][1])
        _exit_now()
