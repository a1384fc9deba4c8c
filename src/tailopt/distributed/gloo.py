"""Messages over gloo, in the threads of a real node."""

from __future__ import annotations

import re
import weakref
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist

from tailopt.distributed.errors import ConnectionFailed
from tailopt.distributed.threads import Peers, ThreadCall
from tailopt.distributed.transport import ExchangeCounter, Messages, Transport

# what gloo says where a connection fails; anything else is an error of another kind
_CONNECTION = re.compile("connection|timed out|timeout|peer|socket|broken pipe|pair", re.IGNORECASE)
_TIMED_OUT = re.compile("timed out|timeout", re.IGNORECASE)


G = TypeVar("G", bound="GlooTransport")


@dataclass
class GlooTransport(Transport):
    """How a node reaches the others of its process group.

    Args:
        group: the process group, over gloo.
        node: this node's number.
        nodes: how many there are.
        peers: watches the other nodes while this one waits for messages; None waits for ever.
        counter: of the exchanges.
    """

    group: dist.ProcessGroup
    node: int
    nodes: int
    peers: Peers | None = None
    counter: ExchangeCounter = field(default_factory=ExchangeCounter)

    @classmethod
    def of(
        cls,
        group: dist.ProcessGroup | None = None,
        timeout: float | None = None,
        stall_timeout: float | None = None,
    ) -> GlooTransport:
        """The nodes of a process group, by default of all processes; watched, where a timeout is given."""
        group = group or dist.group.WORLD
        assert group is not None
        group = on_cpu(group)
        peers = Peers(group, timeout, stall_timeout) if timeout is not None else None
        return cls(group, dist.get_rank(group), dist.get_world_size(group), peers)

    @classmethod
    def replacing(cls: type[G], other: Transport) -> G:
        """A transport of this class in place of another one of the same node and group: to count, or inject faults."""
        if not isinstance(other, GlooTransport):
            raise TypeError(f"Invalid transport: {type(other).__name__}; need one over gloo.")
        return cls(other.group, other.node, other.nodes, other.peers, other.counter)

    def leave(self, error: RuntimeError) -> None:
        """Tell the others that this node failed and takes part in nothing any more."""
        if self.peers is not None:
            self.peers.leave(error)

    async def deliver(self, receives: Messages, sends: Messages) -> None:
        """Receive and send messages; watched, they travel in the exchange thread."""
        if self.peers is None:
            self._transfer(receives, sends, None)
        else:
            call = self.peers.run_in_thread(lambda call: self._transfer(receives, sends, call))
            await self.peers.membership.watch(call)

    def _transfer(self, receives: Messages, sends: Messages, call: ThreadCall | None) -> None:
        node = self.node
        try:
            # every receive is posted before anything is sent: gloo's thread receives then while this one sends, and a
            # message that finds no receive posted would first have to ask
            works = []
            for node, part in receives:
                works.append((node, self.group.recv([part], node, 0)))
            for node, part in sends:
                works.append((node, self.group.send([part], node, 0)))
            for node, work in works:
                if call is not None:
                    call.waiting_for = node
                work.wait()
                if self.peers is not None:
                    self.peers.message_done()
        except RuntimeError as error:
            if isinstance(error, ConnectionFailed) or not _CONNECTION.search(str(error)):
                raise
            raise ConnectionFailed(node, str(error), bool(_TIMED_OUT.search(str(error)))) from error


def on_cpu(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group, or where it carries no tensors of the CPU (NCCL's alone) one over gloo of the same ranks.

    All of them must ask for it, in the same order; it is made once.
    """
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        if group not in _GLOO_TWINS:
            ranks = dist.get_process_group_ranks(group)
            _GLOO_TWINS[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        return _GLOO_TWINS[group]
    return group


_GLOO_TWINS: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()
