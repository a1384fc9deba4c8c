"""Messages between nodes, by node number: what is sent, with which digest, in which order.

    gather                  an all-gather of small tensors: from every node to every node, with digests
    exchange                one tensor to and one from every other node
    exchange_with_header    every node's header, and right behind it what belongs to it
    broadcast               node 0's bytes to every node

Everything that nodes send each other goes through here, so that faults can be injected in one place. How a message
travels is decided by a subclass: over gloo (gloo.py), or in a simulation of the protocol.

Digests cover the number of the exchange: a message that arrives a second time, or in place of a later one, is noticed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tailopt.distributed.header import Header, damage_error, digest64
from tailopt.records.tensor_bytes import tensor_bytes

MESSAGE = 1 << 20  # elements, about: smaller messages cost turns, larger ones make other nodes wait
DIGEST = 8  # bytes

Messages = Iterator[tuple[int, Tensor]]  # (node, what goes to it or comes from it)


@dataclass
class ExchangeCounter:
    """Counts the exchanges of a group, of which all nodes count the same ones, and what this node sends in them."""

    number: int = 0
    bytes_sent: int = 0

    def next(self) -> int:
        """The number of the exchange that begins."""
        self.number += 1
        return self.number


class Transport(ABC):
    """How a node reaches the others of its group.

    Attributes:
        node: this node's number.
        nodes: how many there are.
        counter: of the exchanges; shared by all transports of this node in this group.
    """

    node: int
    nodes: int
    counter: ExchangeCounter

    @abstractmethod
    async def deliver(self, receives: Messages, sends: Messages) -> None:
        """Receive and send messages, all in flight at once; between two nodes they keep their order.

        Raises:
            ConnectionFailed: a connection closed or timed out.
            NodeLost: a node is gone.
        """

    @abstractmethod
    def leave(self, error: RuntimeError) -> None:
        """Tell the others that this node failed and takes part in nothing any more."""

    async def gather(self, mine: Tensor) -> Tensor:
        """All-gather: every node's small tensor, stacked in node order; each travels with a digest of its bytes.

        What nodes decide together follows from these: a bit that flips on the way to one of them must not go unnoticed.
        """
        sequence = self.counter.next()
        data = mine.contiguous().reshape(-1).view(torch.uint8)
        stacked, rows = self._stacked(torch.cat([data, _digest(data, sequence)]))
        # point to point: gloo's all_gather is a ring, whose turns take twice as long with four nodes
        await self._deliver(([rows[self.node]] * self.nodes, rows))
        for sender, row in enumerate(rows):
            if not torch.equal(_digest(row[:-DIGEST], sequence), row[-DIGEST:]):
                raise damage_error("a small message", sender, self.node)
        return stacked[:, :-DIGEST].contiguous().view(mine.dtype).view(self.nodes, *mine.shape)

    async def broadcast(self, data: Tensor) -> None:
        """Give every node the bytes of node 0. Nothing checks here what arrives."""
        nothing = data[:0]
        outgoing = [data if self.node == 0 else nothing] * self.nodes
        incoming = [data if k == 0 and self.node else nothing for k in range(self.nodes)]
        await self.exchange(outgoing, incoming)

    async def exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """Send outgoing[k] to node k and receive incoming[k] from it, for all others; empty tensors are left out."""
        self.counter.next()
        await self._deliver((outgoing, incoming))

    async def exchange_with_header(
        self, header: Header, outgoing: Sequence[Tensor] = (), incoming: Sequence[Tensor] = ()
    ) -> list[Header]:
        """Every node's header, in node order, and right behind each what belongs to it, as by `exchange`."""
        sequence = self.counter.next()
        stacked, rows = self._stacked(header.packed(sequence))
        behind = [(outgoing, incoming)] if outgoing else []
        await self._deliver(([rows[self.node]] * self.nodes, rows), *behind)
        rows_of_words = enumerate(stacked.tolist())
        return [Header.unpacked(words, sequence, sender, self.node) for sender, words in rows_of_words]

    def _stacked(self, mine: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Memory for every node's tensor, whole and by node, with this node's in it."""
        stacked = mine.new_empty((self.nodes, *mine.shape))
        stacked[self.node] = mine
        return stacked, list(stacked.view(self.nodes, -1).unbind(0))

    async def _deliver(self, *turns: tuple[Sequence[Tensor], Sequence[Tensor]]) -> None:
        """Several (outgoing, incoming), one behind the other."""
        others = [(self.node + k) % self.nodes for k in range(1, self.nodes)]  # not all send to the same node first
        self.counter.bytes_sent += sum(outgoing[k].nbytes for outgoing, _ in turns for k in others)
        # iterators, not lists: the first receive is posted before the other messages are cut, because a message that
        # finds no receive posted takes longer
        receives = (message for _, incoming in turns for message in _messages(incoming, others))
        sends = (message for outgoing, _ in turns for message in _messages(outgoing, others))
        await self.deliver(receives, sends)


def _digest(data: Tensor, sequence: int) -> Tensor:
    """The digest of bytes in an exchange, as bytes."""
    return torch.tensor([digest64(tensor_bytes(data), sequence)], dtype=torch.int64).view(torch.uint8)


def _messages(tensors: Sequence[Tensor], others: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """What goes to or comes from each node, in turns: large tensors in several messages, empty ones in none."""
    parts = {k: tensors[k].split(_message_size(tensors[k].numel())) for k in others if tensors[k].numel()}
    for turn in range(max(map(len, parts.values()), default=0)):
        yield from ((k, messages[turn]) for k, messages in parts.items() if turn < len(messages))


def _message_size(count: int) -> int:
    """Elements per message of a tensor with so many: all messages of a partition have about the same size."""
    return -(-count // max(round(count / MESSAGE), 1))
