"""Which weights the owners of partitions sent, and which weights every node loaded.

Each header states the digest of what a node sent at the end of the round before, and digests of what it loaded. All
nodes have the same headers, so all know which node loaded something else, and give it the weights again. Such a pair of
nodes in two rounds in a row ends the run: one of the two or the link between them damages data repeatedly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tailopt.distributed import flat_kernels
from tailopt.distributed.errors import named
from tailopt.distributed.flat_kernels import ChecksumAndMax, SegmentTable
from tailopt.distributed.header import ExchangeAborted, Header, damage_error, digest64
from tailopt.distributed.layout import Layout
from tailopt.distributed.transport import Transport
from tailopt.distributed.verdicts import pairs_that_differ
from tailopt.records.tensor_bytes import tensor_bytes

AT_FAULT = "Either of them or the link between them is at fault."

Pair = tuple[int, int]  # (owner, receiver) of a partition


class WeightSync:
    """What this node sent and loaded of the synchronised weights.

    Args:
        layout: of the flat buffer.
        all_segments: of all partitions.
        node: this node's number.
    """

    def __init__(self, layout: Layout, all_segments: SegmentTable, node: int) -> None:
        self._layout, self._all_segments, self._node = layout, all_segments, node
        self.sent_stats = ChecksumAndMax()  # of this node's partition of the weights, as it sent them
        self.loaded_digests = (0,) * layout.nodes  # of every partition of the weights, as loaded
        self._differed_in: dict[Pair, int] = {}  # the last round in which a receiver loaded something else

    @property
    def sent_finite(self) -> bool:
        """Whether the weights that this node sent are finite."""
        return self.sent_stats.max_abs < math.inf

    def load(self, params: Sequence[Tensor], x: Tensor) -> None:
        """Copy the synchronised weights into the parameters, and note what was loaded."""
        self.loaded_digests = tuple(flat_kernels.load(params, x, self._all_segments, self._layout.cuts))

    def reset_sent_digest(self, x: Tensor) -> None:
        """Note this partition of node 0's weights, or of those of a checkpoint, as if this node had sent it."""
        part = x[self._layout.partition(self._node)]
        self.sent_stats, self._differed_in = ChecksumAndMax(flat_kernels.checksum(part)), {}

    async def all_gather_partitions(self, transport: Transport, flat: Tensor) -> None:
        """Send this node's partition of a flat buffer to every node, and receive theirs."""
        incoming = [flat[self._layout.partition(k)] for k in range(transport.nodes)]
        await transport.exchange([incoming[self._node]] * transport.nodes, incoming)

    async def all_gather_weights(self, transport: Transport, x: Tensor) -> None:
        """Gather the partitions of the new weights; the next header states what was sent."""
        self.sent_stats = flat_kernels.checksum_and_max(x[self._layout.partition(self._node)])
        await self.all_gather_partitions(transport, x)

    async def all_gather_verified(self, transport: Transport, flat: Tensor) -> None:
        """Gather the partitions of a buffer, and compare their digests, which no later header has, at once.

        Where a partition arrived changed, all of them are sent once more.
        """
        sent_digest = flat_kernels.checksum(flat[self._layout.partition(self._node)])
        differing: list[Pair] = []
        for _ in range(2):
            await self.all_gather_partitions(transport, flat)
            loaded_digests = [flat_kernels.checksum(flat[self._layout.partition(k)]) for k in range(transport.nodes)]
            rows = (await transport.gather(torch.tensor([sent_digest, *loaded_digests], dtype=torch.int64))).tolist()
            differing = pairs_that_differ([row[0] for row in rows], {k: row[1:] for k, row in enumerate(rows)})
            if not differing:
                return
        raise damage_error("the outer state, twice,", *differing[0])

    async def broadcast_verified(self, transport: Transport, tensor: Tensor) -> None:
        """Give every node node 0's tensor: compared at once, and sent once more where it arrived differently.

        The owners of partitions have not sent these weights, so the headers of the first round could not tell which
        link changed them.
        """
        data = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1).view(torch.uint8)
        digests: list[int] = []
        for _ in range(2):
            await transport.broadcast(data)
            mine = digest64(tensor_bytes(data))
            digests = (await transport.gather(torch.tensor([mine], dtype=torch.int64))).reshape(-1).tolist()
            if len(set(digests)) == 1:
                return
        receiver = next(k for k, digest in enumerate(digests) if digest != digests[0])
        raise damage_error("what all nodes begin with, twice,", 0, receiver)

    async def resend_differing(
        self, transport: Transport, round: int, headers: Sequence[Header], x: Tensor
    ) -> list[Pair]:
        """Send the right weights of a round to every node that loaded others; returns the pairs.

        Raises:
            ExchangeAborted: a pair differs in two rounds in a row, or no node has the weights that an owner sent.
        """
        differing = self._differing(round, headers)
        here, nothing = self._node, x[:0]
        for owner in sorted({owner for owner, _ in differing}):
            wrong = {receiver for other, receiver in differing if other == owner}
            # the owner itself may be among them: its memory changed after it sent the weights
            donor = next((k for k in (owner, *range(transport.nodes)) if k not in wrong), None)
            if donor is None:
                raise ExchangeAborted(
                    f"No node holds the weights that node {owner} sent. Restart all nodes from the last checkpoint."
                )
            part = x[self._layout.partition(owner)]
            outgoing = [part if here == donor and k in wrong else nothing for k in range(transport.nodes)]
            incoming = [part if here in wrong and k == donor else nothing for k in range(transport.nodes)]
            await transport.exchange(outgoing, incoming)
            # The padding between tensors is zero everywhere. The checksum below covers it, but no digest of loaded
            # weights does, so a node that is not their owner may hold something else there.
            for gap in self._layout.padding(owner):
                x[gap].zero_()
            if here in wrong and flat_kernels.checksum(part) != headers[owner].sent_digest:
                raise damage_error("what was sent again of the weights", donor, here)
        if any(receiver == here for _, receiver in differing):
            self.loaded_digests = tuple(header.sent_digest for header in headers)
        return differing

    def _differing(self, round: int, headers: Sequence[Header]) -> list[Pair]:
        """Where a receiver loaded other weights of a round than the owner sent."""
        loaded_digests = {k: header.loaded_digests for k, header in enumerate(headers)}
        differing = pairs_that_differ([header.sent_digest for header in headers], loaded_digests)
        again = [pair for pair in differing if self._differed_in.get(pair) == round - 1]
        self._differed_in.update(dict.fromkeys(differing, round))
        if again:
            raise ExchangeAborted(
                f"{other_weights(*again[0], round)}, for the second round in a row. {AT_FAULT} Check them, and restart "
                "all nodes from the last checkpoint."
            )
        return differing


def check_sent_weights_finite(t: int, headers: Sequence[Header]) -> None:
    """Raise if the weights that an owner sent at the end of round t were not finite, as its own header states."""
    owners = [k for k, header in enumerate(headers) if not header.sent_finite]
    if owners:
        raise ExchangeAborted(
            f"Round {t} ended with weights that are not finite, in the partition of {named(owners)}. Lower the outer "
            "learning rate; where it is always one node, look at its memory. Where no bound on steps is known, a "
            f"displacement of {named(range(len(headers)))} may have been too large. The last checkpoint is from before."
        )


def other_weights(owner: int, receiver: int, round: int) -> str:
    """What happened between two nodes, in words.

    Examples:
        >>> other_weights(0, 2, 5)
        'Node 2 loaded other weights than node 0 sent at the end of round 5'
    """
    if owner == receiver:
        return f"The weights that node {owner} sent at the end of round {round} changed in its own memory"
    return f"Node {receiver} loaded other weights than node {owner} sent at the end of round {round}"
