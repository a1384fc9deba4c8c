"""Headers and small messages are accepted as they were sent, in the exchange in which they were sent, and not else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tailopt.distributed.header import ExchangeAborted, Header
from tailopt.distributed.interfaces import blocking
from tailopt.distributed.transport import ExchangeCounter, Messages, Transport

words = st.integers(-(2**63), 2**63 - 1)
headers = st.builds(
    Header,
    round=words,
    node=words,
    elements=words,
    contributes=words,
    share=st.floats(allow_nan=False),
    loss=st.floats(allow_nan=False),
    steps=words,
    bound_digest=words,
    trainable_set_digest=words,
    auto_thresholds_digest=words,
    may_be_last=words,
    sent_finite=words,
    seconds=st.floats(allow_nan=False),
    sent_digest=words,
    checksums=st.tuples(words, words),
    loaded_digests=st.tuples(words, words),
)


@given(headers, st.integers(0, 99))
def test_a_header_comes_back(header: Header, sequence: int) -> None:
    assert Header.unpacked(header.packed(sequence).tolist(), sequence, 0, 1) == header


@given(headers, st.integers(0, 63), st.data())
def test_any_flipped_bit_is_seen(header: Header, bit: int, data: st.DataObject) -> None:
    packed = header.packed(3)
    packed[data.draw(st.integers(0, packed.numel() - 1))] ^= torch.tensor(1).bitwise_left_shift(bit)
    with pytest.raises(ExchangeAborted, match="Node 1 received something else than node 0 sent: the header"):
        Header.unpacked(packed.tolist(), 3, 0, 1)


@given(headers)
def test_a_header_of_another_exchange_is_refused(header: Header) -> None:
    with pytest.raises(ExchangeAborted):
        Header.unpacked(header.packed(3).tolist(), 4, 0, 1)


class Repeating(Transport):
    """Receives what node 1 sent in the first exchange, again and again."""

    node, nodes = 0, 2

    def __init__(self) -> None:
        self.counter = ExchangeCounter()
        self._first: list[torch.Tensor] = []

    def leave(self, error: RuntimeError) -> None:
        raise error

    async def deliver(self, receives: Messages, sends: Messages) -> None:
        self._first = self._first or [part.clone() for _, part in sends]
        for (_, into), part in zip(receives, self._first, strict=True):
            into.copy_(part)


def test_a_small_message_that_arrives_twice_is_refused() -> None:
    transport = Repeating()
    assert blocking(transport.gather(torch.tensor([7]))).tolist() == [[7], [7]]
    with pytest.raises(ExchangeAborted, match="Node 0 received something else than node 1 sent: a small message"):
        blocking(transport.gather(torch.tensor([8])))
