"""The protocol of loggers.

    begin(run)    before the first round, or the first after a resume
    logger(row)   after every round, with its row of the history
    end()         after the last one, or when something stops the run

A plain function of a row is a logger too: `begin` and `end` are only called where a logger has both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

RowFunction = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """What a logger is told before the first row.

    Attributes:
        name: of the run or the sweep: that of its folder, or of the algorithm where it has none.
        config: the settings, as config.toml has them.
        trial: of a sweep, "point-3-seed-0", or "report-3-seed-2" for the best point on a fresh seed; else empty.
        round: the last round before this start: 0 in a new run, more after a resume.
        folder: of the run or the sweep; None where nothing is recorded.
        node: the number of this node. Real nodes call their loggers on every node, with the same rows.
    """

    name: str
    config: Mapping[str, Any]
    trial: str = ""
    round: int = 0
    folder: Path | None = None
    node: int = 0


@runtime_checkable
class Logger(Protocol):
    """What is told of a run while it goes on. No base class is needed: any object with these three methods is a logger.

    An error in a logger ends the run, after a checkpoint of the last whole round.

    Examples:
        >>> class Lowest:
        ...     def begin(self, run):
        ...         self.name, self.loss = run.name, float("inf")
        ...     def __call__(self, row):
        ...         self.loss = min(self.loss, row["loss"])
        ...     def end(self):
        ...         print(f"{self.name}: {self.loss:.2f}")
        >>> import torch, tailopt
        >>> loss = lambda model, batch: (model(batch) - 1).square().mean()
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> _ = tailopt.simulate(model, tailopt.algorithm("avg-sgd", ilr=0.1), loss=loss, nodes=3, rounds=5,
        ...                      batches=lambda *_: torch.ones(4, 2), local_steps=1, progress=False, loggers=[Lowest()])
        avg-sgd: 0.02
    """

    def begin(self, run: RunStart) -> None:
        """Take note of a run that begins, or goes on after a resume. A sweep begins once for every trial."""

    def __call__(self, row: dict[str, Any]) -> None:
        """Take a row of the history."""

    def end(self) -> None:
        """Write what is left: the run is over, or something stopped it."""


def run_name(folder: Path | None, otherwise: str) -> str:
    """Return the name of a run: that of its folder, if it has one.

    Examples:
        >>> run_name(Path("runs/first"), "bi2clip"), run_name(None, "bi2clip")
        ('first', 'bi2clip')
    """
    return otherwise if folder is None else folder.resolve().name


def begin(loggers: Sequence[RowFunction], run: RunStart) -> None:
    """Tell loggers that a run begins. If one of them cannot begin, those before it are told the end."""
    begun: list[Logger] = []
    try:
        for logger in loggers:
            if isinstance(logger, Logger):
                logger.begin(run)
                begun.append(logger)
    except BaseException:
        end(begun)
        raise


def end(loggers: Sequence[RowFunction]) -> None:
    """Tell loggers that a run is over; all of them, also where one raises."""
    errors = []
    for logger in loggers:
        if isinstance(logger, Logger):
            try:
                logger.end()
            except Exception as error:
                errors.append(error)
    if errors:
        raise errors[0]


@contextmanager
def told(loggers: Sequence[RowFunction], run: RunStart) -> Iterator[None]:
    """Tell loggers the begin and the end of a run."""
    begin(loggers, run)
    try:
        yield
    finally:
        end(loggers)
