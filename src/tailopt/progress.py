"""A line about where a run is: rounds, loss, nodes, the time left. Drawn by rich where it is installed."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any


class Progress:
    """Shows rounds as they pass; a context manager. Without a terminal or without rich, a line every few seconds."""

    def __init__(self, title: str, done: int, rounds: int, shown: bool) -> None:
        self._title, self._done, self._rounds, self._shown = title, done, rounds, shown
        self._began = self._said = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if self._shown and sys.stderr.isatty():
            self._bar = _rich_bar()
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=self._rounds, completed=self._done, loss="", nodes="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, row: dict[str, Any]) -> None:
        """A round has passed."""
        if not self._shown:
            return
        loss = f"{row['loss']:.4g}"
        nodes = f"{len(row['participants']) - len(row['excluded'])} nodes"
        if self._bar is not None:
            self._bar.update(self._task, completed=row["round"], loss=f"loss {loss}", nodes=nodes)
            return
        now = time.monotonic()
        if now - self._said < 2.0:
            return
        self._said = now
        passed = row["round"] - self._done
        left = (now - self._began) / passed * (self._rounds - row["round"])
        text = f"{self._title}: round {row['round']}/{self._rounds}, loss {loss}, {nodes}, about {left:.0f} s left"
        print(text, file=sys.stderr, flush=True)


def _rich_bar() -> Any:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
    except ImportError:
        return None
    fields = (TextColumn("{task.fields[loss]}"), TextColumn("{task.fields[nodes]}"))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *fields, TimeRemainingColumn())
    return Bar(*columns, console=Console(stderr=True))
