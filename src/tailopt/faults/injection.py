"""Faults of one node, each in rounds of one's choice.

    inject(optimizer, BitFlip(rounds={5, 6}), Kill(rounds={9}))

`inject` is called on the node that is to fail, with its `NestedOptimizer`. Some faults act before the exchange of a
round: on the node's weights, its process, its disk or its network. Others change what it sends: the header, or the
payload (its displacement) after the checksums were taken. The exchange itself has no code for them.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tailopt.distributed.gloo import GlooTransport
from tailopt.distributed.header import Header
from tailopt.distributed.nested_optimizer import NestedOptimizer
from tailopt.faults import network, small_disk


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong on this node in the given rounds."""

    rounds: Collection[int]

    def before(self, optimizer: NestedOptimizer) -> None:
        """Act before the exchange of a round."""

    def after(self, optimizer: NestedOptimizer) -> None:
        """Undo the fault before the exchange of the first round that is not affected."""

    def header(self, mine: Header, nodes: int) -> Header:
        """Return the header that is sent in place of this node's."""
        return mine

    def payload(self, outgoing: Sequence[Tensor], node: int) -> Sequence[Tensor]:
        """Return what is sent in place of this node's displacement: one tensor per receiving node."""
        return outgoing


@dataclass(frozen=True)
class NotANumber(Fault):
    """One weight becomes NaN."""

    def before(self, optimizer: NestedOptimizer) -> None:
        """Change the first element of the first parameter."""
        _set_first(optimizer, float("nan"))


@dataclass(frozen=True)
class Infinite(Fault):
    """One weight becomes infinite."""

    def before(self, optimizer: NestedOptimizer) -> None:
        """Change the first element of the first parameter."""
        _set_first(optimizer, float("inf"))


@dataclass(frozen=True)
class BitFlip(Fault):
    """One bit flips: in every message on its way, or with `in_memory` in a weight, where only the guard can see it."""

    bit: int = 30
    in_memory: bool = False

    def before(self, optimizer: NestedOptimizer) -> None:
        """Flip the bit in the first parameter itself."""
        if self.in_memory:
            first = optimizer.node.local_tensors()[0].view(-1)[:1]
            first.copy_(_flipped(first.clone(), self.bit))

    def payload(self, outgoing: Sequence[Tensor], node: int) -> Sequence[Tensor]:
        """Flip the bit in copies, so that the node's own displacement stays intact."""
        if self.in_memory:
            return outgoing
        return [_flipped(t.clone(), self.bit) if k != node and t.numel() else t for k, t in enumerate(outgoing)]


@dataclass(frozen=True)
class Stale(Fault):
    """The header names an earlier round."""

    def header(self, mine: Header, nodes: int) -> Header:
        """Name the round before."""
        return mine._replace(round=mine.round - 1)


@dataclass(frozen=True)
class Duplicate(Fault):
    """The header names another node, which takes part already."""

    def header(self, mine: Header, nodes: int) -> Header:
        """Name the next node."""
        return mine._replace(node=(mine.node + 1) % nodes)


@dataclass(frozen=True)
class Drop(Fault):
    """The contribution is lost: the header marks it so, and the other nodes ignore what follows."""

    def header(self, mine: Header, nodes: int) -> Header:
        """Mark that there is no contribution."""
        return mine._replace(contributes=0)


@dataclass(frozen=True)
class Slow(Fault):
    """The node is slow."""

    seconds: float = 1.0

    def before(self, optimizer: NestedOptimizer) -> None:
        """Sleep before the exchange."""
        time.sleep(self.seconds)


class Crashed(RuntimeError):
    """The exception of `Crash`."""


@dataclass(frozen=True)
class Crash(Fault):
    """The program of the node fails: with an exception, or with `hard` at once, as by a segmentation fault.

    After an exception, the program still tells the other nodes that it leaves; after a hard crash, nothing of it runs.
    """

    hard: bool = False

    def before(self, optimizer: NestedOptimizer) -> None:
        """Raise `Crashed`, or abort the process."""
        if self.hard:
            os.abort()
        raise Crashed(f"This node was told to crash in round {optimizer.node.round + 1}.")


@dataclass(frozen=True)
class Kill(Fault):
    """The process is killed, as by kill -9."""

    def before(self, optimizer: NestedOptimizer) -> None:
        """Send SIGKILL to this process."""
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Stop(Fault):
    """The process is stopped, as by SIGSTOP; another process has to continue it."""

    def before(self, optimizer: NestedOptimizer) -> None:
        """Send SIGSTOP to this process; the other nodes see only silence."""
        os.kill(os.getpid(), signal.SIGSTOP)


@dataclass(frozen=True)
class DiskFull(Fault):
    """The disk of a folder is full when the checkpoint of the round is written, until the exchange of the next round.

    It is really filled, so it must be small: a `Disk`, or another of at most 1 GiB.
    """

    folder: str | os.PathLike[str] = ""

    def __post_init__(self) -> None:
        """Reject a large disk before anything is written."""
        if not os.fspath(self.folder):
            raise ValueError("Invalid folder: ''; need one on a small disk, such as Disk().path.")
        small_disk.check_small(self.folder)

    def before(self, optimizer: NestedOptimizer) -> None:
        """Fill the disk."""
        small_disk.fill(self.folder)

    def after(self, optimizer: NestedOptimizer) -> None:
        """Remove what filled it."""
        small_disk.empty(self.folder)


@dataclass(frozen=True)
class Partition(Fault):
    """The node is cut off: nothing that it sends arrives, nothing reaches it, and no connection is closed.

    For a process on a node of a `Network`. The cable stays unplugged; `Network.mend` plugs it in again.
    """

    def __post_init__(self) -> None:
        """Reject a process that is on no such node now, not only in the round."""
        network.check_on_network()

    def before(self, optimizer: NestedOptimizer) -> None:
        """Pull the cable of this node."""
        network.cut_this_node()


def inject(optimizer: NestedOptimizer, *faults: Fault) -> None:
    """Let faults happen on this node."""
    node = optimizer.node
    exchange, close_round = node.exchange, node.close_round
    transport = _FaultyTransport.replacing(exchange.transport)
    exchange.transport = transport

    def close_with_faults(*arguments: Any, **settings: Any) -> Any:
        active = [fault for fault in faults if node.round + 1 in fault.rounds]
        for fault in faults:
            if node.round in fault.rounds and fault not in active:
                fault.after(optimizer)
        transport.faults = active
        for fault in transport.faults:
            fault.before(optimizer)
        return close_round(*arguments, **settings)

    node.close_round = close_with_faults  # type: ignore[method-assign]


class _FaultyTransport(GlooTransport):
    """A transport that sends what the faults of the round turn its messages into."""

    faults: Sequence[Fault] = ()

    async def exchange_with_header(
        self, header: Header, outgoing: Sequence[Tensor] = (), incoming: Sequence[Tensor] = ()
    ) -> list[Header]:
        for fault in self.faults if header.round >= 0 else ():
            header, outgoing = fault.header(header, self.nodes), fault.payload(outgoing, self.node)
        return await super().exchange_with_header(header, outgoing, incoming)


@torch.no_grad()
def _set_first(optimizer: NestedOptimizer, value: float) -> None:
    optimizer.node.local_tensors()[0].view(-1)[0] = value


def _flipped(x: Tensor, bit: int) -> Tensor:
    """Flip one bit of the first element in place, and return the tensor."""
    words = x.view(torch.int32 if x.dtype == torch.float32 else torch.int64)
    words[0] ^= 1 << bit
    return x
