"""Signs of life: every node writes one to the store about once per second, and reads those of the others.

gloo names no node when one dies, and cannot be interrupted when one has stopped. So a node is known to be gone by its
sign of life alone: a sign has a count, and where the count does not change, the node is dead, stopped or cut off.

Silence is counted from poll to poll, never by comparing times: a pause of this process (a laptop asleep, a debugger) is
not counted against the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from tailopt.distributed.errors import first_line
from tailopt.distributed.interfaces import Call, Clock, Store

HEARTBEAT_S = 1.0  # between two signs of life
FAST_POLL_S = 0.1  # the same, once something is wrong
SUSPECT_AFTER_S = 3.0  # a connection has closed: the node at its other end is gone if it is silent for so long
DRAIN_S = 2.0  # for the other nodes to read a verdict or a last sign before the store may go

# why a node has left, in its last sign
TOLD_TO_END = "it was told to end (SIGTERM)"
FAILED = "it failed with "  # followed by the error of its program
FINISHED = "it has left; the nodes must end after the same round"


class Place(NamedTuple):
    """Where a node is in the run. Where it does not change, the node makes no progress.

    Args:
        round: the round that it is in.
        step: local steps that it has taken in it.
        waits: whether it waits for messages of others.
        waiting_for: the node whose message it waits for; None where that is not known.
        sequence: the number of the exchange that it is in, or was in last; all nodes count the same exchanges.
        messages: that it has sent and received: a long exchange makes progress too.
    """

    round: int = 0
    step: int = 0
    waits: bool = False
    waiting_for: int | None = None
    sequence: int = 0
    messages: int = 0


class Heartbeat:
    """Shows that this node lives, and listens to the others.

    Args:
        group_store: for the signs of this group.
        run_store: for verdicts; a node of several ranks is in several groups, and a verdict is for all of them.
        node, nodes: this node's number, and how many there are.
        clock: the time.

    Attributes:
        polls: how often the store was read.
        ages: of the nodes that have come: for how long there has been no new sign.
        left: nodes that have left, and why.
        acknowledged: nodes that know the verdict.
        verdict: which nodes are given up, posted by the first node that found out.
        pending_verdict: to be posted, unless another node was first.
        store_error: why the store cannot be reached any more.
        places: where the other nodes are.
        last_checkpoint_sentence: returns a sentence about where the run can go on from.
    """

    def __init__(self, group_store: Store, run_store: Store, node: int, nodes: int, clock: Clock) -> None:
        self.node, self.nodes = node, nodes
        self.polls = 0
        self.ages: dict[int, float] = {}
        self.left: dict[int, str] = {}
        self.acknowledged: set[int] = set()
        self.verdict: dict[str, Any] | None = None
        self.pending_verdict: dict[str, Any] | None = None
        self.store_error = ""
        self.places: dict[int, Place] = {}
        self.round, self.step, self.messages, self.sequence = 0, 0, 0, 0
        self.call: Call | None = None  # what this node waits for
        self.last_checkpoint_sentence: Callable[[], str] = str
        self.stays = False  # keep polling after this node has left: it serves the store
        self._fast = False
        self._leaving: str | None = None
        self._counts: dict[int, int] = {}
        self._group_store, self._run_store, self._clock = group_store, run_store, clock
        self._last_poll = clock.now()
        self._wake = clock.event()

    @property
    def place(self) -> Place:
        """Where this node is."""
        waiting_for = None if self.call is None else self.call.waiting_for
        return Place(self.round, self.step, self.call is not None, waiting_for, self.sequence, self.messages)

    @property
    def leaving(self) -> bool:
        """Whether this node has told the others, or will tell them next, that it leaves."""
        return self._leaving is not None

    def poll_fast(self) -> None:
        """Poll more often from now on: something is wrong."""
        self._fast = True
        self._wake.set()

    def leave(self, why: str) -> None:
        """Tell the others with the next sign, and stop after it."""
        if self._leaving is None:  # the first reason is the one that counts
            self._leaving = why
        self._wake.set()

    def stop_staying(self) -> None:
        """Stop polling, where this node has left and stayed to serve the store."""
        self.stays = False
        self._wake.set()

    async def beat(self) -> None:
        """Poll until this node leaves or the store is lost."""
        while not self.store_error:
            await self._wake.wait(FAST_POLL_S if self._fast else HEARTBEAT_S)
            self._wake.clear()
            last = self._leaving is not None and not self.stays
            try:
                await self.poll()
            except Exception as error:  # of the store, of any kind: a DistError, or a plain RuntimeError
                self.store_error = first_line(error)
            if last:
                return

    async def poll(self) -> None:
        """Write this node's sign and read the others'."""
        now = self._clock.now()  # before reading: a pause in between must not make any node look silent
        sign = {"count": self.polls, "left": self._leaving, "knows": self.verdict is not None, "at": self.place}
        await self._group_store.set(f"sign/{self.node}", json.dumps(sign))
        present = []
        for k in range(self.nodes):
            if k != self.node and (k in self._counts or await self._group_store.check(f"sign/{k}")):
                present.append(k)
        # time in which this node did not poll is silence of no other node
        gap = min(now - self._last_poll, 2 * HEARTBEAT_S)
        for k, text in zip(present, await self._group_store.get_many([f"sign/{k}" for k in present]), strict=True):
            self._read_sign(k, json.loads(text), gap)
        # after the signs: a node that left over a verdict has posted the verdict before
        if self.pending_verdict is not None and self.verdict is None:
            posted = await self._run_store.compare_set("verdict", json.dumps(self.pending_verdict))
            self.verdict = json.loads(posted)
        elif self.verdict is None and await self._run_store.check("verdict"):
            self.verdict = json.loads(await self._run_store.get("verdict"))
        self._last_poll = now
        self.polls += 1

    def _read_sign(self, node: int, sign: dict[str, Any], gap: float) -> None:
        fresh = self._counts.get(node) != sign["count"]
        self.ages[node] = 0.0 if fresh else self.ages.get(node, 0.0) + gap
        self._counts[node] = sign["count"]
        self.places[node] = Place(*sign["at"])
        if sign["left"] is not None:
            self.left[node] = sign["left"]
        if sign["knows"]:
            self.acknowledged.add(node)

    def signs_seen(self) -> dict[int, int]:
        """The count of every other node's last sign."""
        return dict(self._counts)
