"""Bugs for the simulation to find: each takes something out of the protocol that an invariant depends on."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tailopt.distributed import exchange, header, verdicts
from tailopt.distributed.failure_detector import FailureDetector
from tailopt.distributed.header import Header
from tailopt.distributed.membership import Membership
from tailopt.distributed.weight_sync import WeightSync
from tailopt.rounds.guard import Exclusion
from tailopt.rounds.settle import Settlement

Mutation = Callable[[pytest.MonkeyPatch], None]


async def _nothing(*_: Any, **__: Any) -> None:
    """In place of something that should be done."""


def silence_is_ignored(patch: pytest.MonkeyPatch) -> None:
    """Nodes without signs of life are waited for."""
    patch.setattr(FailureDetector, "_check_silent", _nothing)


def stalls_are_ignored(patch: pytest.MonkeyPatch) -> None:
    """The progress limit does nothing."""
    patch.setattr(FailureDetector, "_check_progress", _nothing)


def lost_store_is_ignored(patch: pytest.MonkeyPatch) -> None:
    """A store that does not answer is waited for."""
    patch.setattr(Membership, "lose_store", lambda *_: None)


def headers_are_not_checked(patch: pytest.MonkeyPatch) -> None:
    """A header that was damaged on its way is believed."""
    unpacked = Header.unpacked.__func__  # type: ignore[attr-defined]

    def believed(cls: type[Header], words: list[int], sequence: int, sender: int, receiver: int) -> Header:
        plain = struct.pack(f"<{len(words) - 1}q", *words[:-1])
        return unpacked(cls, [*words[:-1], header.digest64(plain, sequence)], sequence, sender, receiver)  # type: ignore[no-any-return]

    patch.setattr(Header, "unpacked", classmethod(believed))


def small_messages_are_not_checked(patch: pytest.MonkeyPatch) -> None:
    """A verdict that was damaged on its way is believed."""
    patch.setattr("tailopt.distributed.transport.torch.equal", lambda *_: True)


def verdicts_are_not_unanimous(patch: pytest.MonkeyPatch) -> None:
    """Only the first node's verdicts count, and each node takes another one for the first."""
    merge = verdicts.merge_verdicts

    def own_view(t: int, nodes: Sequence[int], by_judge: Any, judges: Any, places: Any) -> dict[int, Exclusion]:
        half = max(len(by_judge) // 2, 1)
        return merge(t, nodes, by_judge[:half], judges[:half], places)

    patch.setattr(exchange, "merge_verdicts", own_view)


def damage_names_the_sender_alone(patch: pytest.MonkeyPatch) -> None:
    """A link that damages displacements makes its sender look faulty."""
    alone = lambda node, receivers: Exclusion(node, "what arrived", 0.0, None, verdicts.DAMAGED)  # noqa: E731
    patch.setattr(verdicts.DamagedOnTheWay, "of", staticmethod(alone))


def loaded_weights_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    """A node that loaded other weights trains on from them."""
    patch.setattr(WeightSync, "_differing", lambda *_: [])


def first_weights_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    """The weights with which all nodes begin are broadcast, and not compared."""

    async def once(self: WeightSync, through: Any, tensor: Any) -> None:
        await through.broadcast(tensor.view(-1).view(torch.uint8))

    patch.setattr(WeightSync, "broadcast_verified", once)


def a_broken_connection_names_the_other_end(patch: pytest.MonkeyPatch) -> None:
    """The node that notices a broken connection blames the other one."""
    accuse = Membership.accuse

    async def other_end(self: Membership, nodes: Sequence[int], reason: str, cause: Any = None) -> None:
        text = reason.replace("node", "it") if len(nodes) > 1 else reason
        await accuse(self, [k for k in nodes if k != self.node][:1] or nodes, text, cause)

    patch.setattr(Membership, "accuse", other_end)


def the_first_node_takes_the_store_with_it(patch: pytest.MonkeyPatch) -> None:
    """The node that serves the store does not wait for the others at the end of the run."""
    patch.setattr(Membership, "_needed", lambda *_: False)


def a_finished_node_is_given_up(patch: pytest.MonkeyPatch) -> None:
    """A node that has ended after its part of the run counts as one that left too early."""
    check = FailureDetector._check_left

    async def given_up(self: FailureDetector, gap: float) -> None:
        await check(self, gap)
        for node in self._heartbeat.left:
            if self._left_for[node] > 2.0:
                await self._membership.accuse([node], "it has left")

    patch.setattr(FailureDetector, "_check_left", given_up)


def excluded_displacements_are_added(patch: pytest.MonkeyPatch) -> None:
    """The mean is taken over all rows, whoever was left out."""
    begin = exchange.Exchange._form_or_defer_mean

    def over_all(self: Any, settlement: Settlement, robust_mean: Any) -> None:
        counted = settlement.counted_shares
        if len(counted) < self.transport.nodes:
            counted = {**counted, max(counted): 2 * counted[max(counted)]}
        begin(self, replace(settlement, counted_shares=counted, total_share=1.0), robust_mean)

    patch.setattr(exchange.Exchange, "_form_or_defer_mean", over_all)


# a seed with which each of them is found
MUTATIONS: dict[Mutation, int] = {
    silence_is_ignored: 49,
    stalls_are_ignored: 55,
    lost_store_is_ignored: 91,
    headers_are_not_checked: 0,
    small_messages_are_not_checked: 26,
    verdicts_are_not_unanimous: 189,
    damage_names_the_sender_alone: 82,
    loaded_weights_are_not_compared: 451,
    first_weights_are_not_compared: 660,
    a_broken_connection_names_the_other_end: 1,
    the_first_node_takes_the_store_with_it: 71,
    a_finished_node_is_given_up: 4,
    excluded_displacements_are_added: 2,
}
