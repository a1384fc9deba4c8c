"""Messages between the nodes of a process group, by node number.

    gather                  a small tensor from every node to every node, with a digest
    exchange                one tensor to and one from every other node
    exchange_with_header    every node's header, and right behind it what belongs to it
    broadcast               node 0's tensor to every node

Everything that nodes send each other goes through here, so that faults can be injected in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tailopt.distributed.header import Header, damaged, word_of
from tailopt.distributed.peers import Peers, on_cpu
from tailopt.records.tensor_bytes import tensor_bytes

MESSAGE = 1 << 20  # elements, about: smaller messages cost turns, larger ones make other nodes wait
DIGEST = 8  # bytes


@dataclass
class Transport:
    """How a node reaches the others of its group.

    Args:
        group: the process group, over gloo.
        node: this node's number.
        nodes: how many there are.
        peers: watches the other nodes while this one waits for messages; None waits for ever.
    """

    group: dist.ProcessGroup
    node: int
    nodes: int
    peers: Peers | None = None

    @classmethod
    def of(
        cls,
        group: dist.ProcessGroup | None = None,
        timeout: float | None = None,
        stall_timeout: float | None = None,
    ) -> Transport:
        """The nodes of a process group, by default of all processes; watched, where a timeout is given."""
        group = group or dist.group.WORLD
        assert group is not None
        group = on_cpu(group)
        peers = Peers(group, timeout, stall_timeout) if timeout is not None else None
        return cls(group, dist.get_rank(group), dist.get_world_size(group), peers)

    def gather(self, mine: Tensor) -> Tensor:
        """Every node's small tensor, stacked in node order; each travels with a digest of its bytes.

        What nodes decide together follows from these: a bit that flips on the way to one of them must not go unnoticed.
        """
        data = mine.contiguous().reshape(-1).view(torch.uint8)
        stacked, rows = self._stacked(torch.cat([data, _digest(data)]))
        # point to point: gloo's all_gather is a ring, whose turns take twice as long with four nodes
        self._watched(lambda: self._deliver(([rows[self.node]] * self.nodes, rows)))
        for sender, row in enumerate(rows):
            if not torch.equal(_digest(row[:-DIGEST]), row[-DIGEST:]):
                raise damaged("a small message", sender, self.node)
        return stacked[:, :-DIGEST].contiguous().view(mine.dtype).view(self.nodes, *mine.shape)

    def broadcast(self, flat: Tensor) -> None:
        """Give every node the tensor of node 0."""
        if flat.numel():
            self._watched(lambda: dist.broadcast(flat, dist.get_global_rank(self.group, 0), group=self.group))

    def exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """Send outgoing[k] to node k and receive incoming[k] from it, for all others; empty tensors are left out."""
        self._watched(lambda: self._deliver((outgoing, incoming)))

    def exchange_with_header(
        self, header: Header, outgoing: Sequence[Tensor] = (), incoming: Sequence[Tensor] = ()
    ) -> list[Header]:
        """Every node's header, in node order, and right behind each what belongs to it, as by `exchange`."""
        stacked, rows = self._stacked(header.packed())
        behind = [(outgoing, incoming)] if outgoing else []
        self._watched(lambda: self._deliver(([rows[self.node]] * self.nodes, rows), *behind))
        return [Header.unpacked(words, sender, self.node) for sender, words in enumerate(stacked.tolist())]

    def _watched(self, traffic: Callable[[], object]) -> None:
        if self.peers is None:
            traffic()
        else:
            self.peers.call(traffic)

    def _stacked(self, mine: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Memory for every node's tensor, whole and by node, with this node's in it."""
        stacked = mine.new_empty((self.nodes, *mine.shape))
        stacked[self.node] = mine
        return stacked, list(stacked.view(self.nodes, -1).unbind(0))

    def _deliver(self, *turns: tuple[Sequence[Tensor], Sequence[Tensor]]) -> None:
        """Several (outgoing, incoming), all in flight at once; between two nodes they keep this order."""
        others = [
            (self.node + k) % self.nodes for k in range(1, self.nodes)
        ]  # not all nodes send to the same one first
        # every receive is posted before anything is sent: gloo's thread receives then while this one sends, and a
        # message that finds no receive posted would first have to ask
        works = [self.group.recv([part], k, 0) for _, incoming in turns for k, part in _messages(incoming, others)]
        works += [self.group.send([part], k, 0) for outgoing, _ in turns for k, part in _messages(outgoing, others)]
        for work in works:
            work.wait()
            if self.peers is not None:
                self.peers.message_done()


def _digest(data: Tensor) -> Tensor:
    """The digest of bytes, as bytes."""
    return torch.tensor([word_of(tensor_bytes(data))], dtype=torch.int64).view(torch.uint8)


def _messages(tensors: Sequence[Tensor], others: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """What goes to or comes from each node, in turns: large tensors in several messages, empty ones in none."""
    parts = {k: tensors[k].split(_message_size(tensors[k].numel())) for k in others if tensors[k].numel()}
    for turn in range(max(map(len, parts.values()), default=0)):
        yield from ((k, messages[turn]) for k, messages in parts.items() if turn < len(messages))


def _message_size(count: int) -> int:
    """Elements per message of a tensor with so many: all messages of a partition have about the same size."""
    return -(-count // max(round(count / MESSAGE), 1))
