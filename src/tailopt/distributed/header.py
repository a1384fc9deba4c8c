"""The header of an exchange: what every node tells every other node before anything else of a round.

All nodes hold the same headers afterwards, so whatever follows from them alone needs no further message. A header ends
with a digest of its own words: one that was damaged on its way is noticed before anything is decided by it.

The barrier before a checkpoint, and after the last round, is a header too, with a negative round (`barrier_header`): a
node that writes a checkpoint while another ends a round is noticed.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tailopt.records.tensor_bytes import tensor_bytes
from tailopt.rounds.guard import Bound

PROTOCOL = 4  # of the exchange; nodes with another one cannot talk to each other

_FLOAT_FIELDS = ("share", "loss", "seconds")


class ExchangeAborted(RuntimeError):
    """The exchange cannot continue, and excluding a node would not help; the run must end."""


class Header(NamedTuple):
    """One node's header.

    Args:
        round: the round that the node ends. At a barrier this is -1 minus the number of completed rounds.
        node: its number.
        elements: how many its flat buffer has.
        contributes: 1 where the node takes part, else 0, which all nodes know from the participants. Only
            `tailopt.faults` clears it for a participant, whose contribution then counts as dropped.
        share: its share of the mean.
        loss: the loss of its local steps.
        steps: local steps that it took in this round.
        bound_digest: a digest of how far it says it can have moved.
        trainable_set_digest: a digest of which parameters have requires_grad, by name and group.
        auto_thresholds_digest: a digest of the thresholds with which it began the round, where some are "auto".
        may_be_last: 1 where this may be the last round, so that the nodes compare the new weights at once.
        seconds: how long its local steps took.
        sent_digest: a digest of the weights of its own partition, as it sent them at the end of the round before.
        sent_finite: 0 where those weights are not finite.
        checksums: a checksum of every partition of its displacement.
        loaded_digests: a digest of every partition of the weights, as it loaded them before it began the round.
    """

    round: int
    node: int
    elements: int
    contributes: int = 0
    share: float = 0.0
    loss: float = float("nan")
    steps: int = 0
    bound_digest: int = 0
    trainable_set_digest: int = 0
    auto_thresholds_digest: int = 0
    may_be_last: int = 0
    seconds: float = 0.0
    sent_digest: int = 0
    sent_finite: int = 1
    checksums: tuple[int, ...] = ()
    loaded_digests: tuple[int, ...] = ()

    def packed(self, sequence: int) -> Tensor:
        """The header of an exchange as 64-bit words, the digest of the others last."""
        scalars: Any = self[: len(_SCALAR_FIELDS)]
        named_scalars = zip(_SCALAR_FIELDS, scalars, strict=True)
        words = [_bits(value) if name in _FLOAT_FIELDS else value for name, value in named_scalars]
        words += [*self.checksums, *self.loaded_digests]
        return torch.tensor([*words, digest64(struct.pack(f"<{len(words)}q", *words), sequence)], dtype=torch.int64)

    @classmethod
    def unpacked(cls, words: list[int], sequence: int, sender: int, receiver: int) -> Header:
        """The header that was packed; raises `ExchangeAborted` if the words are not those sent in this exchange."""
        if digest64(struct.pack(f"<{len(words) - 1}q", *words[:-1]), sequence) != words[-1]:
            raise damage_error("the header", sender, receiver)
        scalars, rest = words[: len(_SCALAR_FIELDS)], words[len(_SCALAR_FIELDS) : -1]
        values: dict[str, Any] = dict(zip(_SCALAR_FIELDS, scalars, strict=True))
        values |= {name: _float(values[name]) for name in _FLOAT_FIELDS}
        half = len(rest) // 2
        return cls(**values, checksums=tuple(rest[:half]), loaded_digests=tuple(rest[half:]))


_SCALAR_FIELDS = Header._fields[:-2]  # the last two have a number for every partition


def barrier_header(header: Header, round: int, step: int) -> Header:
    """The header that a node sends at a barrier, after so many rounds and so many local steps of the next."""
    return header._replace(round=-1 - round, steps=step)


def damage_error(what: str, sender: int, receiver: int) -> ExchangeAborted:
    """The error about something that changed on its way between two nodes."""
    return ExchangeAborted(
        f"Node {receiver} received something else than node {sender} sent: {what} does not fit its digest. Either of "
        "them or the link between them is at fault. Restart all nodes from the last checkpoint."
    )


def digest64(data: bytes | memoryview, sequence: int = 0) -> int:
    """A digest of bytes as a signed 64-bit word; the same bytes have another digest in every exchange.

    Examples:
        >>> digest64(b"a") == digest64(b"a"), digest64(b"a") == digest64(b"b")
        (True, False)
        >>> digest64(b"a", 1) == digest64(b"a", 2)
        False
    """
    return int.from_bytes(
        hashlib.blake2b(data, digest_size=8, salt=sequence.to_bytes(8, "little")).digest(), "little", signed=True
    )


def digest_of_bound(bound: Bound) -> int:
    """A digest of a bound: equal on two nodes that can have moved equally far.

    Examples:
        >>> digest_of_bound(Bound("coordinate", 0.5, 0.0, 5)) == digest_of_bound(Bound("coordinate", 0.5, 0.0, 5))
        True
        >>> digest_of_bound(Bound("coordinate", 0.5, 0.0, 5)) == digest_of_bound(Bound("coordinate", 0.25, 0.0, 5))
        False
    """
    return digest64(
        b"|".join([repr((bound.kind, bound.steps)).encode(), _number_bytes(bound.constant), _number_bytes(bound.slope)])
    )


def _number_bytes(value: Any) -> bytes:
    if isinstance(value, list):
        return b"[" + b",".join(map(_number_bytes, value)) + b"]"
    if isinstance(value, Tensor):
        wide = value.detach().to("cpu", torch.float64).contiguous()
        return struct.pack("<d", float(wide)) if not wide.dim() else bytes(tensor_bytes(wide))
    return struct.pack("<d", float(value))


def _bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
