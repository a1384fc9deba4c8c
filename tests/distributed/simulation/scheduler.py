"""A virtual clock that resumes the coroutines of all nodes one at a time, in an order that follows from a seed."""

from __future__ import annotations

import contextlib
import heapq
import math
import random
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from tailopt.distributed.interfaces import Event


class Wait:
    """What a coroutine suspends with: until an event is set or a moment has come."""

    def __init__(self, until: float, event: VirtualEvent | None = None) -> None:
        self.until, self.event = until, event

    def __await__(self) -> Generator[Wait, None, None]:
        yield self


class Crashed(BaseException):
    """Raised in the coroutine in which its process dies."""


class Task:
    """A coroutine of a process."""

    def __init__(self, process: Process, coroutine: Coroutine[Any, Any, Any]) -> None:
        self.process, self.coroutine = process, coroutine
        self.done, self.value, self.error = False, None, None  # type: ignore[var-annotated]
        self.turn = 0  # a wake-up for an earlier turn comes too late
        self.on_done: Callable[[], None] = lambda: None


class VirtualEvent:
    """An event between coroutines."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._set = scheduler, False
        self.waiting: list[tuple[Task, int]] = []

    def set(self) -> None:
        """Wake the coroutines that wait."""
        self._set = True
        waiting, self.waiting = self.waiting, []
        for task, turn in waiting:
            self._scheduler.wake(task, turn)

    def clear(self) -> None:
        """Let the next `wait` wait again."""
        self._set = False

    async def wait(self, seconds: float) -> bool:
        """Wait until it is set, at most so long."""
        if not self._set:
            await Wait(self._scheduler.time + seconds, self)
        return self._set


class Process:
    """One node's process: its coroutines stop together, and die together.

    Args:
        scheduler: runs it.
        node: its number.
        at_operation: called with the number of every operation (store, message, wait): where faults strike.
    """

    def __init__(self, scheduler: Scheduler, node: int, at_operation: Callable[[Process, int], None]) -> None:
        self.scheduler, self.node, self._at_operation = scheduler, node, at_operation
        self.alive, self.stopped, self.operations = True, False, 0
        self.ended_at = math.inf
        self.exit_code = 0
        self.tasks: list[Task] = []
        self._held: list[tuple[Task, int]] = []  # wake-ups of a stopped process
        self.on_end: list[Callable[[], None]] = []

    # the clock of the protocol

    def now(self) -> float:
        """Virtual seconds."""
        return self.scheduler.time

    async def sleep(self, seconds: float) -> None:
        """Wait in virtual time."""
        self.operation()
        await Wait(self.scheduler.time + seconds)

    def event(self) -> Event:
        """An event between the coroutines of this process."""
        return VirtualEvent(self.scheduler)

    # faults

    def operation(self) -> None:
        """Count an operation; a fault may strike before it."""
        self.operations += 1
        self._at_operation(self, self.operations)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> Task:
        """Start a coroutine."""
        task = Task(self, coroutine)
        self.tasks.append(task)
        self.scheduler.wake(task, 0)
        return task

    def end(self, exit_code: int) -> None:
        """The process is gone, with all of its coroutines."""
        if self.alive:
            self.alive, self.exit_code, self.ended_at = False, exit_code, self.scheduler.time
            for action in self.on_end:
                action()

    def close(self) -> None:
        """Throw the coroutines away, after the run."""
        for task in self.tasks:
            with contextlib.suppress(Exception, Crashed):
                task.coroutine.close()

    def stop(self) -> None:
        """As by SIGSTOP."""
        self.stopped = True

    def resume(self) -> None:
        """As by SIGCONT."""
        self.stopped = False
        held, self._held = self._held, []
        for task, turn in held:
            self.scheduler.wake(task, turn)

    def hold(self, task: Task, turn: int) -> None:
        """Keep a wake-up until the process goes on."""
        self._held.append((task, turn))


class Scheduler:
    """Runs coroutines in virtual time.

    Args:
        generator: decides which of several coroutines that are ready goes first.
    """

    def __init__(self, generator: random.Random) -> None:
        self.time = 0.0
        self._generator = generator
        self._queue: list[tuple[float, float, int, Callable[[], None]]] = []
        self._count = 0
        self.trace: list[str] | None = None

    def at(self, moment: float, action: Callable[[], None]) -> None:
        """Do something at a moment."""
        self._count += 1
        heapq.heappush(self._queue, (max(moment, self.time), self._generator.random(), self._count, action))

    def wake(self, task: Task, turn: int) -> None:
        """Resume a coroutine, if it still waits in this turn."""
        self.at(self.time, lambda: self._resume(task, turn))

    def note(self, text: str) -> None:
        """A line of the trace, where one is kept."""
        if self.trace is not None:
            self.trace.append(f"{self.time:9.4f} {text}")

    def run(self, limit: float) -> bool:
        """Run until nothing is left to do; False where that takes longer than the limit."""
        while self._queue:
            moment, _, _, action = heapq.heappop(self._queue)
            if moment > limit:
                return False
            self.time = moment
            action()
        return True

    def _resume(self, task: Task, turn: int) -> None:
        process = task.process
        if task.done or not process.alive or task.turn != turn:
            return
        if process.stopped:
            process.hold(task, turn)
            return
        task.turn += 1
        try:
            wait = task.coroutine.send(None)
        except StopIteration as stop:
            task.done, task.value = True, stop.value
        except Crashed:
            task.done = True
        except Exception as error:
            task.done, task.error = True, error
        if task.done:
            task.on_done()
            return
        turn = task.turn
        if wait.event is not None:
            wait.event.waiting.append((task, turn))
        if wait.until < math.inf:
            self.at(wait.until, lambda: self._resume(task, turn))
