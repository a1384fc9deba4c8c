"""How a node watches the other nodes of a run: which of them are gone, and how all nodes end with the same sentence.

    watch     waits for messages and for bad news about the nodes they come from
    check     raises where a node is known to be gone: for local steps, between exchanges
    accuse    posts a verdict: the first node that finds others gone decides, and all nodes name the same ones
    depart    tells the others why this node ends

A verdict names one node, where that node is silent, has left, has failed or makes no progress; it names two where the
connection between them failed though both show signs of life: either of them or the link may be at fault; and it names
none where all nodes wait, and it is not known for which of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tailopt.distributed.errors import ConnectionFailed, NodeLost, first_line, in_round
from tailopt.distributed.failure_detector import FailureDetector
from tailopt.distributed.heartbeat import (
    DRAIN_S,
    FAILED,
    FAST_POLL_S,
    FINISHED,
    HEARTBEAT_S,
    SUSPECT_AFTER_S,
    TOLD_TO_END,
    Heartbeat,
)
from tailopt.distributed.interfaces import Call, Clock, ProcessExit
from tailopt.distributed.last_words import block
from tailopt.distributed.roll_call import StoreOwner

EXIT_AFTER_S = 4.0  # from NodeLost to the end of the process
MIN_TIMEOUT_S = 3.0  # the shortest timeout: a few signs of life


@dataclass(frozen=True)
class Timeouts:
    """How long to wait for other nodes.

    Args:
        timeout: how long a node may show no sign of life.
        stall_timeout: how long a node may show signs of life and make no progress while others wait for it; None for
            ever.
    """

    timeout: float = 60.0
    stall_timeout: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "stall_timeout" and value is None:
                continue
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not MIN_TIMEOUT_S <= value < float("inf")
            ):
                raise ValueError(f"Invalid {name}: {value!r}; need a number of seconds, {MIN_TIMEOUT_S:g} or more.")


class Membership:
    """The protocol by which a node watches the others of its group, as coroutines; `threads.Peers` runs them.

    Args:
        heartbeat: this node's.
        clock: the time.
        process: ends this process where it cannot end in an orderly way.
        timeouts: how long to wait.
        store_owner: the process that serves the store.
        warn: tells the user about a slow node.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        clock: Clock,
        process: ProcessExit,
        timeouts: Timeouts,
        store_owner: StoreOwner,
        warn: Callable[[str], None],
    ) -> None:
        self.heartbeat, self.clock, self.timeouts, self.warn = heartbeat, clock, timeouts, warn
        self._process, self._store_owner = process, store_owner
        self._failed: RuntimeError | None = None
        self.warned_in = -1  # the round in which a slow node was last named

    @property
    def node(self) -> int:
        """This node's number."""
        return self.heartbeat.node

    @property
    def round(self) -> int:
        """The round that this node is in."""
        return self.heartbeat.round

    @property
    def serves_store(self) -> bool:
        """Whether this process serves the store."""
        return self._store_owner.node == self.node

    async def check(self) -> None:
        """Raise `NodeLost` if a node is known to be gone: for local steps, between exchanges."""
        if self._failed is not None:
            raise self._failed
        heartbeat = self.heartbeat
        if heartbeat.verdict is not None:
            await self.end(heartbeat.verdict)
        silent = {k: age for k, age in heartbeat.ages.items() if k not in heartbeat.left}
        longest = max(silent, key=lambda k: silent[k], default=None)
        if longest is not None and silent[longest] > self.timeouts.timeout:
            await self.accuse([longest], self.silence(self.timeouts.timeout))

    def silence(self, seconds: float) -> str:
        """Why a node is given up that shows no sign of life."""
        reason, heartbeat = f"no sign of life for {seconds:g} s", self.heartbeat
        others = [age for k, age in heartbeat.ages.items() if k not in heartbeat.left]
        if self.serves_store and min(others, default=0.0) > HEARTBEAT_S:
            # where this node is cut off, it sees all others fall silent
            return f"{reason}, nor of any other node; it or the network of node {self.node}, the store's, is at fault"
        return reason

    async def watch(self, call: Call, detect: bool = True) -> Any:
        """The result of a call that may block for ever; bad news about a node ends the wait with `NodeLost`.

        detect: look for nodes that are gone; without it, for the loss of the store alone.
        """
        if detect:
            await self.check()
        heartbeat, detector = self.heartbeat, FailureDetector(self, call, detect)
        heartbeat.sequence += 1
        heartbeat.call = call
        try:
            while not await call.wait(HEARTBEAT_S / 4):
                await detector.look()
        finally:
            heartbeat.call = None
        if call.error is None:
            return call.value
        if not detect or not isinstance(call.error, ConnectionFailed):
            raise call.error
        if call.error.timed_out:
            await detector.name_cause(call.error)
        await self._explain(call.error, call)

    async def _explain(self, closed: ConnectionFailed, call: Call) -> None:
        """A connection closed or timed out: find out whether the node at its other end is gone, and end."""
        # this node has not sent all messages of the exchange: the others must not take it for one that has, and see
        # for which node it waits
        call.waiting_for = closed.peer
        self.heartbeat.call, self.heartbeat.sequence = call, self.heartbeat.sequence - 1
        self.heartbeat.poll_fast()
        detector, until = FailureDetector(self, call, closed=closed), self.clock.now() + self.timeouts.timeout
        # nothing is known of the other node while the store does not answer: `look` ends that
        while self.clock.now() < until or detector.knows_nothing:
            await detector.look()
            await self.clock.sleep(FAST_POLL_S)
        await self.accuse(
            sorted([self.node, closed.peer]),
            f"{first_line(closed)}; both show signs of life, so either of them or the link between them is at fault. "
            "Check the network, or give init_process_group a longer timeout for slow nodes",
            closed,
        )

    def fail(self, error: RuntimeError) -> None:
        """Tell the others that this node failed, even if its program goes on; it takes part in nothing then."""
        self._failed = error
        self.heartbeat.leave(failure(error))

    async def accuse(self, nodes: Sequence[int], reason: str, cause: BaseException | None = None) -> None:
        """Post a verdict, and end with it, or with that of a node that was faster."""
        heartbeat = self.heartbeat
        verdict = {"nodes": list(nodes), "round": self.round, "reason": reason}
        heartbeat.pending_verdict = verdict
        heartbeat.poll_fast()
        until = self.clock.now() + DRAIN_S
        # where the store is gone too, this node's own finding has to do
        while heartbeat.verdict is None and not heartbeat.store_error and self.clock.now() < until:
            await self.clock.sleep(FAST_POLL_S / 5)
        await self.end(heartbeat.verdict or verdict, cause)

    async def end(self, verdict: Mapping[str, Any], cause: BaseException | None = None) -> None:
        """Raise `NodeLost` with a verdict; the process that serves the store waits until all others have read it."""
        heartbeat = self.heartbeat
        heartbeat.poll_fast()
        until = self.clock.now() + DRAIN_S
        while self.serves_store and self.clock.now() < until and not heartbeat.store_error:
            alive = {k for k, age in heartbeat.ages.items() if k not in heartbeat.left and age < SUSPECT_AFTER_S}
            if alive <= heartbeat.acknowledged:  # the nodes of the verdict too, if they live
                break
            await self.clock.sleep(FAST_POLL_S)
        self._lose(sentence(verdict, self.node), cause)

    def lose_store(self, reason: str, cause: BaseException | None) -> None:
        """Raise `NodeLost`: the store cannot be reached, so nothing can be posted or read."""
        self._lose(self._store_gone(reason), cause)

    def _store_gone(self, reason: str) -> str:
        words, owner = self._store_owner.words, self._store_owner.node
        # the node that serves it may be gone, or only this node's link to it: nothing tells one from the other here
        blame = "" if owner in (None, self.node) else f"; it or the link from node {self.node} to it is at fault"
        return f"{words} is gone {in_round(self.round)}: {reason}{blame}."

    def _lose(self, text: str, cause: BaseException | None) -> None:
        lost = NodeLost(f"{text} Restart all nodes from the last checkpoint.")
        self._process.schedule(lost, block(text, self.heartbeat.last_checkpoint_sentence()))
        raise lost from cause

    # the end of this process

    async def explain_sigterm(self) -> str:
        """The last words of a node that got SIGTERM: torchrun sends it to all nodes as soon as one of them is gone."""
        heartbeat, until = self.heartbeat, self.clock.now() + SUSPECT_AFTER_S + 3 * HEARTBEAT_S
        heartbeat.poll_fast()
        text = ""
        while not text and not heartbeat.store_error and self.clock.now() < until:
            failed = [k for k, why in heartbeat.left.items() if why.startswith(FAILED)]
            silent = [k for k, age in heartbeat.ages.items() if age > SUSPECT_AFTER_S and k not in heartbeat.left]
            if heartbeat.verdict is not None:
                text = sentence(heartbeat.verdict, self.node)
            elif failed:
                text = f"Node {failed[0]} is gone {in_round(self.round)}: {heartbeat.left[failed[0]]}."
            elif silent:
                text = f"Node {silent[0]} is gone {in_round(self.round)}: no sign of life for {SUSPECT_AFTER_S:g} s."
            await self.clock.sleep(FAST_POLL_S / 2)
        if heartbeat.store_error:
            text = self._store_gone(heartbeat.store_error)
        heartbeat.leave(TOLD_TO_END)
        told = f"This node was told to end (SIGTERM) {in_round(self.round)}; all other nodes showed signs of life."
        return block(text or told, heartbeat.last_checkpoint_sentence())

    async def depart(self, error: BaseException | None = None) -> None:
        """Tell the others why this node ends; the process that serves the store stays until they need it no more."""
        heartbeat = self.heartbeat
        if heartbeat.leaving:
            return
        heartbeat.stays = self.serves_store
        heartbeat.leave(FINISHED if error is None else failure(error))
        if not self.serves_store or isinstance(error, NodeLost):  # all nodes have read the verdict
            heartbeat.stop_staying()
            return
        heartbeat.poll_fast()
        known, until = heartbeat.signs_seen(), self.clock.now() + DRAIN_S
        while not heartbeat.store_error:
            known = {**heartbeat.signs_seen(), **known}  # the first sign that is read of a node may be an old one
            fresh = self.clock.now() >= until  # every node that lives has written another sign since
            if (error is not None and fresh) or not self._needed(known, fresh, error is not None):
                break
            await self.clock.sleep(FAST_POLL_S)
        heartbeat.stop_staying()

    def _needed(self, known: Mapping[int, int], fresh: bool, failed: bool) -> bool:
        """Whether a node still needs the store: it lives, has not left, and still waits for messages of others.

        Args:
            known: the signs that were known when this node ended; a new one tells whether a node still waits.
            fresh: whether there has been time for a new sign of every node.
            failed: whether this node failed; then all others have to end, and to read why.
        """
        heartbeat, signs = self.heartbeat, self.heartbeat.signs_seen()
        for k in range(heartbeat.nodes):
            if k == self.node or k in heartbeat.left or heartbeat.ages.get(k, 0.0) > SUSPECT_AFTER_S:
                continue
            if failed or (not fresh and signs.get(k) == known.get(k)) or (k in signs and heartbeat.places[k].waits):
                return True
        return False


def failure(error: BaseException) -> str:
    """Why a node has left whose program raised."""
    return f"{FAILED}{type(error).__name__}: {first_line(error)}"


def sentence(verdict: Mapping[str, Any], node: int) -> str:
    """A verdict in words, for the node that prints it.

    Examples:
        >>> sentence({"nodes": [2], "round": 3, "reason": "no sign of life for 5 s"}, 0)
        'Node 2 is gone in round 3: no sign of life for 5 s.'
    """
    nodes, when = verdict["nodes"], in_round(verdict["round"])
    if not nodes:
        who = "No node has made progress"
    elif len(nodes) > 1:
        who = f"The connection between node {nodes[0]} and node {nodes[1]} failed"
    elif nodes[0] == node:
        who = "This node was given up by the others"
    else:
        who = f"Node {nodes[0]} is gone"
    return f"{who} {when}: {verdict['reason']}."
