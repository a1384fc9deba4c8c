"""Faults of one node, each in rounds of one's choice.

    inject(optimizer, BitFlip(rounds={5, 6}), Kill(rounds={9}))

`inject` is called on the node that is to fail, with its `NestedOptimizer`. Some faults strike before the exchange of a
round (the weights that the node moved, the process itself, its disk or its network), others what it sends: the header,
or the shards after their checksum was taken. The exchange itself knows nothing of them.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from tailopt.distributed.header import Header
from tailopt.distributed.nested_optimizer import NestedOptimizer
from tailopt.distributed.transport import Transport
from tailopt.faults import disk, network


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong on this node in these rounds."""

    rounds: Collection[int]

    def before(self, optimizer: NestedOptimizer) -> None:
        """Strike before the round is closed."""

    def after(self, optimizer: NestedOptimizer) -> None:
        """Make it good again, before the next round is closed that is not one of these."""

    def header(self, mine: Header, nodes: int) -> Header:
        """The header that is sent."""
        return mine

    def shards(self, outgoing: Sequence[Tensor], node: int) -> Sequence[Tensor]:
        """The shards that are sent."""
        return outgoing


@dataclass(frozen=True)
class NotANumber(Fault):
    """One weight becomes NaN."""

    def before(self, optimizer: NestedOptimizer) -> None:
        """The first element of the first parameter."""
        _set(optimizer, float("nan"))


@dataclass(frozen=True)
class Infinite(Fault):
    """One weight becomes infinite."""

    def before(self, optimizer: NestedOptimizer) -> None:
        """The first element of the first parameter."""
        _set(optimizer, float("inf"))


@dataclass(frozen=True)
class BitFlip(Fault):
    """One bit flips: of every shard on its way, or with `in_memory` of a weight, where only the guard can see it."""

    bit: int = 30
    in_memory: bool = False

    def before(self, optimizer: NestedOptimizer) -> None:
        """In the first parameter itself."""
        if self.in_memory:
            first = optimizer.node.local_tensors()[0].view(-1)[:1]
            first.copy_(_flipped(first.clone(), self.bit))

    def shards(self, outgoing: Sequence[Tensor], node: int) -> Sequence[Tensor]:
        """Copies, so that the node's own displacement stays."""
        if self.in_memory:
            return outgoing
        return [_flipped(t.clone(), self.bit) if k != node and t.numel() else t for k, t in enumerate(outgoing)]


@dataclass(frozen=True)
class Stale(Fault):
    """The header says an earlier round."""

    def header(self, mine: Header, nodes: int) -> Header:
        """One round ago."""
        return mine._replace(round=mine.round - 1)


@dataclass(frozen=True)
class Duplicate(Fault):
    """The header says another node, which is there already."""

    def header(self, mine: Header, nodes: int) -> Header:
        """The next one."""
        return mine._replace(node=(mine.node + 1) % nodes)


@dataclass(frozen=True)
class Drop(Fault):
    """The contribution is lost: the header says so, and nobody looks at what follows it."""

    def header(self, mine: Header, nodes: int) -> Header:
        """Without a contribution."""
        return mine._replace(sends=0)


@dataclass(frozen=True)
class Slow(Fault):
    """The node takes its time."""

    seconds: float = 1.0

    def before(self, optimizer: NestedOptimizer) -> None:
        """Sleep."""
        time.sleep(self.seconds)


class Crashed(RuntimeError):
    """What a node ends with that was told to crash."""


@dataclass(frozen=True)
class Crash(Fault):
    """The program of the node fails: with an exception, or with `hard` at once, as by a segmentation fault.

    After an exception the program may still say goodbye, and does; after a hard crash nothing of it runs any more.
    """

    hard: bool = False

    def before(self, optimizer: NestedOptimizer) -> None:
        """Raise, or abort."""
        if self.hard:
            os.abort()
        raise Crashed(f"This node was told to crash in round {optimizer.node.round + 1}.")


@dataclass(frozen=True)
class Kill(Fault):
    """The process is killed, as by kill -9."""

    def before(self, optimizer: NestedOptimizer) -> None:
        """Nothing of this process runs after it."""
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Stop(Fault):
    """The process is stopped, as by SIGSTOP; somebody else has to let it go on."""

    def before(self, optimizer: NestedOptimizer) -> None:
        """The others see nothing but silence."""
        os.kill(os.getpid(), signal.SIGSTOP)


@dataclass(frozen=True)
class DiskFull(Fault):
    """The disk of a folder is full when the checkpoint of the round is written, and until the next round is closed.

    It is filled for real, so it has to be a small one: a `Disk`, or another of at most 1 GiB.
    """

    folder: str | os.PathLike[str] = ""

    def __post_init__(self) -> None:
        """A large disk is refused before anything is written."""
        if not os.fspath(self.folder):
            raise ValueError("Invalid folder: none given; need one on a small disk, such as Disk().path.")
        disk.check(self.folder)

    def before(self, optimizer: NestedOptimizer) -> None:
        """Fill it."""
        disk.fill(self.folder)

    def after(self, optimizer: NestedOptimizer) -> None:
        """Remove what filled it."""
        disk.empty(self.folder)


@dataclass(frozen=True)
class Partition(Fault):
    """The node is cut off: nothing that it sends arrives, nothing reaches it, and no connection is closed.

    For a process on a node of a `Network`. The cable stays out; `Network.mend` puts it back.
    """

    def __post_init__(self) -> None:
        """Who is on no such node hears of it now, not in the round."""
        network.check_own()

    def before(self, optimizer: NestedOptimizer) -> None:
        """Pull the cable."""
        network.cut_own()


def inject(optimizer: NestedOptimizer, *faults: Fault) -> None:
    """Let faults happen on this node."""
    node = optimizer.node
    exchange, close_round = node.exchange, node.close_round
    own = {field.name: getattr(exchange.transport, field.name) for field in fields(exchange.transport)}
    transport = _FaultyTransport(**own)
    exchange.transport = transport

    def closed(*arguments: Any, **settings: Any) -> Any:
        active = [fault for fault in faults if node.round + 1 in fault.rounds]
        for fault in faults:
            if node.round in fault.rounds and fault not in active:
                fault.after(optimizer)
        transport.faults = active
        for fault in transport.faults:
            fault.before(optimizer)
        return close_round(*arguments, **settings)

    node.close_round = closed  # type: ignore[method-assign]


class _FaultyTransport(Transport):
    """Sends what the faults of the round make of it."""

    faults: Sequence[Fault] = ()

    def exchange_with_header(
        self, head: Header, outgoing: Sequence[Tensor] = (), incoming: Sequence[Tensor] = ()
    ) -> list[Header]:
        for fault in self.faults if head.round >= 0 else ():
            head, outgoing = fault.header(head, self.nodes), fault.shards(outgoing, self.node)
        return super().exchange_with_header(head, outgoing, incoming)


@torch.no_grad()
def _set(optimizer: NestedOptimizer, value: float) -> None:
    optimizer.node.local_tensors()[0].view(-1)[0] = value


def _flipped(x: Tensor, bit: int) -> Tensor:
    """With one bit of its first element flipped."""
    words = x.view(torch.int32 if x.dtype == torch.float32 else torch.int64)
    words[0] ^= 1 << bit
    return x
