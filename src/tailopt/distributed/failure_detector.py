"""Which nodes are gone, while this node waits for a message: by silence, by what they said last, or by no progress.

Time is counted from look to look and not by comparing times, so that a pause of this process is silence of no other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailopt.distributed.errors import ConnectionFailed, first_line
from tailopt.distributed.heartbeat import DRAIN_S, FAILED, HEARTBEAT_S, SUSPECT_AFTER_S, TOLD_TO_END, Place
from tailopt.distributed.interfaces import Call

if TYPE_CHECKING:
    from tailopt.distributed.membership import Membership


class FailureDetector:
    """Looks for nodes that are gone, during one wait.

    Args:
        membership: the nodes.
        call: what this node waits for.
        detect: look for nodes that are gone; without it, for the loss of the store alone.
        closed: the connection that failed, if one did.
    """

    def __init__(
        self, membership: Membership, call: Call, detect: bool = True, closed: ConnectionFailed | None = None
    ) -> None:
        self._membership, self._call, self._detect, self._closed = membership, call, detect, closed
        self._heartbeat = membership.heartbeat
        self._polls, self._unanswered = self._heartbeat.polls, 0.0  # for how long the store has not answered
        self._left_for: dict[int, float] = {}  # how long ago a node left
        self._waited = 0.0
        self._places: dict[int, Place] = {}
        self._stalled: dict[int, float] = {}  # how long each node has been at its place
        self._last_look = membership.clock.now()

    @property
    def knows_nothing(self) -> bool:
        """Whether the store has not answered for a while: what is known of the others is old."""
        return self._unanswered > 2 * HEARTBEAT_S

    async def look(self) -> None:
        """Raise `NodeLost` where a node is to be named."""
        membership, heartbeat, now = self._membership, self._heartbeat, self._membership.clock.now()
        gap, self._last_look = min(now - self._last_look, HEARTBEAT_S), now
        self._unanswered = 0.0 if heartbeat.polls != self._polls else self._unanswered + gap
        self._polls = heartbeat.polls
        if self._detect:
            if heartbeat.verdict is not None:
                await membership.end(heartbeat.verdict, self._closed)
            await self._check_left(gap)
            await self._check_silent()
            if self._closed is None:
                await self._check_progress(gap)
        if heartbeat.store_error:
            membership.lose_store(heartbeat.store_error, self._closed)
        if self._unanswered > membership.timeouts.timeout:
            membership.lose_store(f"no answer for {membership.timeouts.timeout:g} s", self._closed)

    async def _check_left(self, gap: float) -> None:
        """Name a node that has left although it is needed."""
        peer = None if self._closed is None else self._closed.peer
        for node, why in self._heartbeat.left.items():
            left_for = self._left_for[node] = self._left_for.get(node, 0.0) + gap
            if why.startswith(FAILED):
                await self._membership.accuse([node], why, self._closed)
            elif why == TOLD_TO_END:
                # torchrun tells all nodes to end when one is gone: that one is silent, and it is the one to be named
                if left_for > SUSPECT_AFTER_S + 3 * HEARTBEAT_S:
                    await self._membership.accuse([node], why, self._closed)
            elif node == peer or (self._closed is None and node == self._call.waiting_for):
                await self._check_finished(node, why, left_for)

    async def _check_finished(self, node: int, why: str, left_for: float) -> None:
        """Name a node that has ended without an error, and for whose message this node waits.

        Where it left before the exchange that this node is in, it left too early. Else it has sent its messages before
        it left, and they are on their way: then the link may be at fault.
        """
        membership = self._membership
        # the number of an exchange that failed was taken back, so that others see that this node is stuck in it
        exchange = self._heartbeat.sequence + (self._closed is not None)
        early = self._heartbeat.places[node].sequence < exchange
        if early and (self._closed is not None or left_for > DRAIN_S):
            await membership.accuse([node], why, self._closed)
        if not early and (self._closed is not None or left_for > membership.timeouts.timeout):
            reason = f"node {node} has finished, and its last message to node {membership.node} has not arrived"
            await membership.accuse(sorted([node, membership.node]), reason, self._closed)

    async def _check_silent(self) -> None:
        """Name a node without signs of life; sooner, where the connection to it has closed."""
        heartbeat, timeout = self._heartbeat, self._membership.timeouts.timeout
        peer = None if self._closed is None else self._closed.peer
        # a node that has left writes no more signs: `_check_left` decides about it
        ages = {k: age for k, age in heartbeat.ages.items() if k not in heartbeat.left}
        limits = {k: min(SUSPECT_AFTER_S, timeout) if k == peer else timeout for k in ages}
        silent = [k for k, age in ages.items() if age > limits[k]]
        if silent:
            longest = max(silent, key=lambda k: ages[k])
            reason = self._membership.silence(limits[longest])
            if longest == peer:
                reason = f"its connection is closed, and {reason}"
            await self._membership.accuse([longest], reason, self._closed)

    async def _check_progress(self, gap: float) -> None:
        """Name what holds up a round although all nodes live: in a warning, and where a limit was set as lost."""
        membership, limit = self._membership, self._membership.timeouts.stall_timeout
        self._waited += gap
        for k, place in {**self._heartbeat.places, membership.node: self._heartbeat.place}.items():
            self._stalled[k] = self._stalled.get(k, 0.0) + gap if self._places.get(k) == place else 0.0
            self._places[k] = place
        if self._waited > membership.timeouts.timeout and membership.warned_in != membership.round:
            self._warn()
        if limit is None or not membership.round:  # before the first round a node may wait for a run folder
            return
        await self._name(self._held_up_by(limit), f"for {limit:g} s")
        if min(self._stalled.values()) > limit and all(place.waits for place in self._places.values()):
            await membership.accuse([], f"all nodes have waited for {limit:g} s")

    async def name_cause(self, closed: ConnectionFailed) -> None:
        """Name what held up the messages of a connection that timed out; nothing, where that is not known."""
        await self._name(self._held_up_by(HEARTBEAT_S), f"({first_line(closed)})")

    async def _name(self, cause: int | tuple[int, int] | None, how_long: str) -> None:
        if isinstance(cause, int):
            step = self._places[cause].step
            reason = f"it shows signs of life, and no progress after {step} local steps {how_long}"
            await self._membership.accuse([cause], reason, self._closed)
        elif cause is not None:
            reason = f"a message of node {cause[0]} to node {cause[1]} has not arrived {how_long}"
            await self._membership.accuse(sorted(cause), f"{reason}; both show signs of life", self._closed)

    def _warn(self) -> None:
        membership = self._membership
        cause = self._held_up_by(HEARTBEAT_S)
        if cause is None:
            return
        membership.warned_in = membership.round
        waited = f"Round {membership.round} has waited for"
        if isinstance(cause, int):
            place = self._places[cause]
            membership.warn(
                f"{waited} node {cause} for {self._waited:.0f} s: it shows signs of life, and is in round "
                f"{place.round}, after {place.step} local steps."
            )
        else:
            membership.warn(
                f"{waited} a message of node {cause[0]} to node {cause[1]} for {self._waited:.0f} s: both show signs "
                "of life."
            )

    def _held_up_by(self, limit: float) -> int | tuple[int, int] | None:
        """A node that does not come, or (sender, receiver) of a message that does not arrive; None: not for so long.

        This node waits for another one, which may wait for a third. Every exchange has a number. A node that is in the
        same exchange, or in a later one, has sent its messages: then the link holds them up. A node that is in an
        earlier exchange either waits itself, and is followed, or is busy, and is the one.
        """
        receiver, ages = self._membership.node, self._heartbeat.ages
        if self.knows_nothing or receiver not in self._places:
            return None
        while True:
            place = self._places[receiver]
            sender = place.waiting_for
            if sender is None or sender not in self._places:
                return None  # it does not tell for which node it waits
            if ages.get(sender, 0.0) > 2 * HEARTBEAT_S:
                return None  # it may be gone: `_check_silent` decides about it
            if self._places[sender].sequence >= place.sequence:
                return (sender, receiver) if self._stalled[receiver] > limit else None
            if not self._places[sender].waits:
                return sender if self._stalled[sender] > limit else None
            receiver = sender
