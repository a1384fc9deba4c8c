"""How long a node waits for the store before the first round: a pause of the machine is not the store's silence."""

from __future__ import annotations

from typing import Any

import pytest

from tailopt.distributed.errors import NodeLost
from tailopt.distributed.interfaces import Event, blocking
from tailopt.distributed.roll_call import StoreOwner, answered

OWNER = StoreOwner("Node 0, which serves the store,", 0)


class PausingClock:
    """A clock that jumps by `pause` in the first wait, as while a laptop sleeps."""

    def __init__(self, pause: float = 0.0) -> None:
        self.time, self.pause = 0.0, pause

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.time += seconds

    def event(self) -> Event:
        raise AssertionError("not used")


class LateCall:
    """A call that is done after so many seconds in which the machine runs."""

    value, error, waiting_for = "answer", None, None

    def __init__(self, clock: PausingClock, after: float) -> None:
        self.clock, self.left = clock, after

    async def wait(self, seconds: float) -> bool:
        ran = min(seconds, self.left)
        self.left -= ran
        self.clock.time += ran + self.clock.pause
        self.clock.pause = 0.0
        return self.left <= 0


def ask(after: float, pause: float = 0.0) -> tuple[Any, PausingClock]:
    clock = PausingClock(pause)
    return blocking(answered(LateCall(clock, after), clock, 10.0, OWNER, 1)), clock


@pytest.mark.parametrize("pause", [0.0, 60.0])
def test_a_pause_of_the_machine_is_not_counted(pause: float) -> None:
    value, clock = ask(8.5, pause)
    assert value == "answer"
    assert clock.time == 8.5 + pause


@pytest.mark.parametrize("pause", [0.0, 60.0])
def test_a_store_that_never_answers_is_given_up(pause: float) -> None:
    with pytest.raises(NodeLost, match="has not answered for 10 s before the first round; .* from node 1 to it"):
        ask(1e9, pause)
