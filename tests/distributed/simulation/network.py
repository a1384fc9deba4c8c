"""The simulated network: connections between nodes that behave as gloo's over TCP, and a store that one process serves.

Between two nodes messages keep their order, as over TCP, unless a fault changes it. A process that ends closes its
connections; one that has stopped, or whose cable is cut, does not. A message of another size than the one that is
expected breaks the connection. Where nothing arrives for `GLOO_TIMEOUT_S`, the connection times out.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine
from typing import Any

import torch
from torch import Tensor

from tailopt.distributed.errors import ConnectionFailed
from tailopt.distributed.membership import Membership
from tailopt.distributed.transport import ExchangeCounter, Messages, Transport
from tests.distributed.simulation.scheduler import Process, Scheduler, VirtualEvent, Wait

GLOO_TIMEOUT_S = 45.0  # half an hour in reality
LATENCY_S = 0.002
CLOSED, TIMED_OUT = "Connection closed by peer", f"Timed out waiting {GLOO_TIMEOUT_S * 1000:.0f}ms for recv operation"


class SimulatedCall:
    """A coroutine in flight; see `interfaces.Call`."""

    def __init__(self, process: Process, coroutine: Coroutine[Any, Any, Any]) -> None:
        self.waiting_for: int | None = None
        self._done = VirtualEvent(process.scheduler)
        self._task = process.spawn(coroutine)
        self._task.on_done = self._done.set

    @property
    def value(self) -> Any:
        """What it returned."""
        return self._task.value

    @property
    def error(self) -> BaseException | None:
        """What it raised."""
        return self._task.error

    async def wait(self, seconds: float) -> bool:
        """Wait until it is done, at most so long."""
        await self._done.wait(seconds)
        return self._task.done


class Link:
    """Messages from one node to another, with what is to happen to them by number."""

    def __init__(self) -> None:
        self.arrived: deque[Tensor] = deque()
        self.sent = 0
        self.last_arrival = 0.0
        self.faults: dict[int, tuple[str, float]] = {}  # message number -> kind, and how long or which bit
        self.held_back: Tensor | None = None  # a message that the next one overtakes


class Network:
    """All connections.

    Args:
        scheduler: the clock.
        processes: of all nodes.
        generator: draws latencies.
        strike: told about a fault that happens, as its kind and the two nodes.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        processes: list[Process],
        generator: random.Random,
        strike: Callable[[str, int, int], None],
    ) -> None:
        self.scheduler, self.processes, self._generator, self._strike = scheduler, processes, generator, strike
        self.links: defaultdict[tuple[int, int], Link] = defaultdict(Link)
        self.broken: set[frozenset[int]] = set()
        self.cut_off: set[int] = set()  # nodes whose cable is cut
        self._changed = [VirtualEvent(scheduler) for _ in processes]
        for process in processes:
            process.on_end.append(lambda node=process.node: self._close_all(node))  # type: ignore[misc]

    def latency(self) -> float:
        """Of one message."""
        return LATENCY_S * self._generator.uniform(0.1, 2.0)

    def reachable(self, a: int, b: int) -> bool:
        """Whether anything gets from one node to another."""
        return a == b or not self.cut_off & {a, b}

    def _close_all(self, node: int) -> None:
        for other in range(len(self.processes)):
            if other != node and self.reachable(node, other):  # nobody hears of it through a cut cable
                # behind what is on its way, as over TCP
                moment = max(self.scheduler.time + self.latency(), self.links[node, other].last_arrival + 1e-9)
                self.scheduler.at(moment, lambda k=other: self.disconnect(node, k))  # type: ignore[misc]

    def disconnect(self, a: int, b: int) -> None:
        """Close the connection between two nodes; both notice."""
        self.broken.add(frozenset((a, b)))
        for node in (a, b):
            self._changed[node].set()

    def send(self, sender: int, receiver: int, message: Tensor) -> None:
        """Put a message on its way."""
        link = self.links[sender, receiver]
        link.sent += 1
        kind, amount = link.faults.get(link.sent, ("", 0.0))
        if kind:
            self._strike(kind, sender, receiver)
            self.scheduler.note(f"{kind} message {link.sent} of node {sender} to node {receiver}")
        message = message.detach().clone()
        delay = self.latency()
        if kind == "drop":  # TCP does not lose a message; what loses it is the end of the connection
            self.disconnect(sender, receiver)
            return
        if kind == "corrupt":
            data = message.view(-1).view(torch.uint8)
            bit = int(amount * 8 * data.numel())
            data[bit // 8] ^= 1 << bit % 8
        if kind == "delay":
            delay += amount
        if kind == "reorder":
            link.held_back = message
            return
        messages = [message, message] if kind == "duplicate" else [message]
        if link.held_back is not None:
            messages, link.held_back = [*messages, link.held_back], None
        # behind the message before it, as over TCP
        link.last_arrival = max(link.last_arrival + 1e-9, self.scheduler.time + delay)
        self.scheduler.at(link.last_arrival, lambda: self._arrive(sender, receiver, messages))

    def _arrive(self, sender: int, receiver: int, messages: list[Tensor]) -> None:
        if not self.reachable(sender, receiver):
            return
        self.links[sender, receiver].arrived.extend(messages)
        self._changed[receiver].set()

    async def receive(self, sender: int, receiver: int, into: Tensor) -> None:
        """Wait for the next message of a node; raise `ConnectionFailed` where it cannot come any more."""
        link, changed = self.links[sender, receiver], self._changed[receiver]
        until = self.scheduler.time + GLOO_TIMEOUT_S
        while not link.arrived:
            if frozenset((sender, receiver)) in self.broken:
                raise ConnectionFailed(sender, CLOSED)
            if self.scheduler.time >= until:
                self.disconnect(sender, receiver)
                raise ConnectionFailed(sender, TIMED_OUT, timed_out=True)
            changed.clear()
            await changed.wait(until - self.scheduler.time)
        message = link.arrived.popleft()
        if (message.dtype, message.shape) != (into.dtype, into.shape):
            self.disconnect(sender, receiver)
            raise ConnectionFailed(sender, "Connection broken: a message of another size")
        into.copy_(message)


class SimulatedTransport(Transport):
    """Messages of one node over the simulated network."""

    def __init__(self, network: Network, process: Process, membership: Membership) -> None:
        self.node, self.nodes, self.counter = process.node, len(network.processes), ExchangeCounter()
        self.membership = membership
        self.waits: list[tuple[float, float, int]] = []  # begin, end and round of every wait
        self.progress: list[float] = []  # when a message arrived
        self._network, self._process = network, process

    def leave(self, error: RuntimeError) -> None:
        """Tell the others that this node failed."""
        self.membership.fail(error)

    async def deliver(self, receives: Messages, sends: Messages) -> None:
        """Send and receive, watched as on a real node."""
        self._process.operation()
        call = SimulatedCall(self._process, self._transfer(receives, sends, lambda: call))
        begun = self._network.scheduler.time
        try:
            await self.membership.watch(call)
        finally:
            self.waits.append((begun, self._network.scheduler.time, self.membership.round))

    async def _transfer(self, receives: Messages, sends: Messages, call: Callable[[], SimulatedCall]) -> None:
        for node, part in sends:
            if frozenset((node, self.node)) in self._network.broken:
                raise ConnectionFailed(node, CLOSED)
            self._network.send(self.node, node, part)
            self._process.operation()
        for node, part in receives:
            call().waiting_for = node
            await self._network.receive(node, self.node, part)
            self.membership.heartbeat.messages += 1
            self.progress.append(self._network.scheduler.time)
            self._process.operation()


class StoreServer:
    """The keys of a store, and the process that serves it; None for the agent of torchrun, which outlives all nodes."""

    def __init__(self, process: Process | None) -> None:
        self.process, self.data = process, dict[str, str]()


class SimulatedStore:
    """One node's connection to the store."""

    def __init__(self, server: StoreServer, network: Network, process: Process, prefix: str = "") -> None:
        self._server, self._network, self._process, self._prefix = server, network, process, prefix

    def under(self, prefix: str) -> SimulatedStore:
        """The same store, with keys below a prefix."""
        return SimulatedStore(self._server, self._network, self._process, f"{self._prefix}{prefix}/")

    async def _ask(self) -> None:
        """One request: fails where the server's process is gone, and has no answer where it cannot be reached."""
        self._process.operation()
        server = self._server.process
        await Wait(self._network.scheduler.time + self._network.latency())
        cut = self._network.cut_off
        while (server is not None and server.stopped and server is not self._process) or (
            self._process.node in cut
            if server is None
            else not self._network.reachable(server.node, self._process.node)
        ):
            await Wait(self._network.scheduler.time + 0.25)
        if server is not None and not server.alive:
            raise RuntimeError("Connection reset by peer")
        self._process.operation()

    async def set(self, key: str, value: str) -> None:
        """Write a key."""
        await self._ask()
        self._server.data[self._prefix + key] = value

    async def get(self, key: str) -> str:
        """Read a key that exists."""
        await self._ask()
        return self._server.data[self._prefix + key]

    async def get_many(self, keys: list[str]) -> list[str]:
        """Read several keys that exist."""
        await self._ask()
        return [self._server.data[self._prefix + key] for key in keys]

    async def check(self, key: str) -> bool:
        """Whether a key exists."""
        await self._ask()
        return self._prefix + key in self._server.data

    async def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        await self._ask()
        value = int(self._server.data.get(self._prefix + key, "0")) + amount
        self._server.data[self._prefix + key] = str(value)
        return value

    async def compare_set(self, key: str, value: str) -> str:
        """Write a key unless it exists."""
        await self._ask()
        return self._server.data.setdefault(self._prefix + key, value)
