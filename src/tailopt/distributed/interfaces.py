"""What the node protocol needs from outside: a store, a clock, messages in flight and the end of the process.

The protocol (rendezvous, agreement, heartbeat, failure detection, the exchange of a round) is written as coroutines and
gets these passed in. It starts no threads and never asks for the time itself, so it has two drivers:

    production   every coroutine below blocks the thread that runs it and never suspends (`run`); threads.py has the
                 threads: one for the heartbeat, one for messages that can block for ever
    simulation   a scheduler with a virtual clock resumes the coroutines of all nodes one at a time, in an order that
                 follows from a seed

Times are in seconds.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Event(Protocol):
    """Something that one coroutine waits for and another one sets."""

    def set(self) -> None:
        """Wake the coroutine that waits."""

    def clear(self) -> None:
        """Let the next `wait` wait again."""

    async def wait(self, seconds: float) -> bool:
        """Wait until it is set, at most so long; whether it is set."""


class Clock(Protocol):
    """Time as this node sees it."""

    def now(self) -> float:
        """Seconds since some moment; never goes back."""

    async def sleep(self, seconds: float) -> None:
        """Wait."""

    def event(self) -> Event:
        """A new event."""


class Store(Protocol):
    """The key-value store through which the nodes meet. Any of these may raise RuntimeError, or never return."""

    def under(self, prefix: str) -> Store:
        """The same store, with keys below a prefix."""

    async def set(self, key: str, value: str) -> None:
        """Write a key."""

    async def get(self, key: str) -> str:
        """Read a key that exists."""

    async def get_many(self, keys: list[str]) -> list[str]:
        """Read several keys that exist."""

    async def check(self, key: str) -> bool:
        """Whether a key exists."""

    async def add(self, key: str, amount: int) -> int:
        """Add to a counter; returns its new value."""

    async def compare_set(self, key: str, value: str) -> str:
        """Write a key unless it exists; returns what is there now."""


class Call(Protocol):
    """Something that may block for ever, and goes on while this node watches the others.

    Attributes:
        waiting_for: the node whose message it waits for now; None where that is not known.
    """

    waiting_for: int | None

    @property
    def value(self) -> Any:
        """What it returned."""

    @property
    def error(self) -> BaseException | None:
        """What it raised."""

    async def wait(self, seconds: float) -> bool:
        """Wait until it is done, at most so long; whether it is."""


class ProcessExit(Protocol):
    """How a node ends that cannot end in an orderly way."""

    def schedule(self, error: RuntimeError, last_words: str) -> None:
        """End the process in EXIT_AFTER_S, even where the program catches the error."""


def blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine of the protocol whose store, clock and messages block: it never suspends.

    Examples:
        >>> async def three() -> int:
        ...     return 3
        >>> blocking(three())
        3
    """
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    coroutine.close()
    raise RuntimeError("A coroutine of the node protocol suspended outside of the simulation; this is a bug.")
