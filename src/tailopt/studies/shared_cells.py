"""A grid of cells that several processes measure together, each for as long as it is given.

Every process runs the same command. It takes the first cell that is neither recorded nor taken, so processes may come
and go: a cell is taken by a lock on a file, which the system gives back when a process ends, however it ends. A process
with a limit begins no cell that would not be done in time, and raises `OutOfTime`; the next one goes on from the
record.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tailopt.progress import Progress
from tailopt.records import history
from tailopt.studies.runner import C, Grid, R, as_json, canonical, digest, read_record

try:
    import fcntl
except ImportError:  # Windows has none: there, one process at a time
    fcntl = None  # type: ignore[assignment]

WAIT = 1.0  # seconds between two looks at cells that other processes measure
Expected = Callable[[Any], float]


class OutOfTime(Exception):
    """The time of this process is up: what it recorded stays, and the same command goes on."""


class TimeLimit:
    """When a process has to be done.

    Args:
        minutes: from now; None for no limit.

    Examples:
        >>> TimeLimit(1).check(5.0)
        >>> TimeLimit(0.01).check(5.0)
        Traceback (most recent call last):
        tailopt.studies.shared_cells.OutOfTime: 5 s more would end after the limit of 0.01 minutes.
    """

    def __init__(self, minutes: float | None) -> None:
        self.minutes = minutes
        self._end = math.inf if minutes is None else time.monotonic() + 60 * minutes

    def check(self, seconds: float) -> None:
        """Raise `OutOfTime` where something that takes so long would end too late."""
        if time.monotonic() + seconds > self._end:
            raise OutOfTime(f"{seconds:.3g} s more would end after the limit of {self.minutes:g} minutes.")


def run_shared(grid: Grid[C, R], record: Path, bar: Progress, limit: TimeLimit, expected: Expected) -> dict[C, R]:
    """The results of all cells: from the record, measured now, or measured by other processes meanwhile.

    Args:
        expected: a cell -> how many seconds it will take, as far as is known.
    """
    record.parent.mkdir(parents=True, exist_ok=True)
    locks = record.parent / "locks"
    locks.mkdir(exist_ok=True)
    keys = {cell: canonical(grid.key(cell)) for cell in grid.cells}
    while True:
        recorded = read_shared(record)
        missing = [cell for cell in grid.cells if keys[cell] not in recorded]
        if not missing:
            return {cell: grid.decode(recorded[keys[cell]]) for cell in grid.cells}
        cell = _measure_one(grid, missing, keys, record, locks, bar, limit, expected)
        if cell is None:  # others are at all of them
            limit.check(WAIT)
            time.sleep(WAIT)


def _measure_one(
    grid: Grid[C, R],
    missing: list[C],
    keys: Mapping[C, str],
    record: Path,
    locks: Path,
    bar: Progress,
    limit: TimeLimit,
    expected: Expected,
) -> C | None:
    """Measure and record the first cell that no other process is at; None if there is none."""
    for number, cell in enumerate(missing):
        with locked(locks / f"{digest(keys[cell])}.lock", wait=False) as mine:
            if not mine or keys[cell] in read_shared(record):
                continue
            limit.check(expected(cell))
            done = len(grid.cells) - len(missing) + number

            def tick(part: int, done: int = done, label: str = grid.label(cell)) -> None:
                bar.update(done * grid.units + part, len(grid.cells) * grid.units, label)

            tick(0)
            result = grid.encode(grid.measure(cell, tick))
            with locked(_gate(record)):
                history.append(record, {"cell": as_json(grid.key(cell)), "result": result})
            return cell
    return None


def read_shared(record: Path) -> dict[str, Any]:
    """The JSON of every recorded result, by `canonical(cell)`, while no other process writes."""
    if not record.exists():
        return {}
    with locked(_gate(record)):
        return read_record(record)


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Hold a lock on a file; without `wait`, whether it could be had."""
    with path.open("a") as file:
        free = True
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                free = False
        yield free  # closing the file gives the lock back


def _gate(record: Path) -> Path:
    return record.with_name("writing.lock")
