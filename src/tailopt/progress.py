"""How far a run or a study is: a bar in a terminal where rich is installed, one line that changes in place in a
notebook, else a line on stderr every few seconds.

`Progress` counts anything; `RoundProgress` counts rounds and shows the loss, how many nodes counted, and the time left.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, TypeVar

_P = TypeVar("_P", bound="Progress")


class Progress:
    """Shows how many of a number of things are done; a context manager.

    Args:
        shown: False shows nothing.
        seconds_between_lines: the least time between two lines where there is no bar.
        keep_bar: whether the bar stays on the screen at the end.
    """

    def __init__(self, shown: bool, *, seconds_between_lines: float = 5.0, keep_bar: bool = False) -> None:
        self._shown, self._seconds_between_lines, self._keep_bar = shown, seconds_between_lines, keep_bar
        self._last_line = float("-inf")
        self._bar: Any = None
        self._notebook: _NotebookLine | None = None
        self._began: tuple[float, int] | None = None  # the time of the first update, and how much was done then

    def __enter__(self: _P) -> _P:
        if self._shown and in_notebook():
            self._notebook = _NotebookLine()
        elif self._shown and sys.stderr.isatty():
            self._bar = _rich_bar(self._keep_bar)
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=None, text="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, total: int, text: str) -> None:
        """Show that `done` of `total` are done and how long the rest will take; `text` names what is being done."""
        now = time.monotonic()
        start, first = self._began = self._began or (now, done)
        seconds = (now - start) / (done - first) * (total - done) if done > first else 0.0
        left = f", about {duration(seconds)} left" if seconds else ""
        self._show(done, total, text, line=f"{done}/{total}  {text}{left}", last=done == total)

    @property
    def shown(self) -> bool:
        """Whether anything is shown."""
        return self._shown

    def say(self, text: str) -> None:
        """Print a line of its own, such as what will be done."""
        if self._shown:
            print(text, file=sys.stderr, flush=True)

    def _show(self, done: int, total: int, text: str, *, line: str, title: str = "", last: bool = False) -> None:
        if not self._shown:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, description=title, text=text)
        elif last or time.monotonic() - self._last_line >= self._between_lines:
            self._last_line = time.monotonic()
            if self._notebook is not None:
                self._notebook.show(line)
            else:
                print(line, file=sys.stderr, flush=True)

    @property
    def _between_lines(self) -> float:
        """Seconds; fewer in a notebook, where a line takes the place of the one before."""
        return min(self._seconds_between_lines, 0.5) if self._notebook is not None else self._seconds_between_lines


class RoundProgress(Progress):
    """Shows rounds as they pass. A run that takes less than two seconds prints no line."""

    def __init__(self, title: str, done: int, rounds: int, shown: bool) -> None:
        super().__init__(shown, seconds_between_lines=2.0, keep_bar=True)
        self._title, self._first, self._rounds = title, done, rounds
        self._start = self._last_line = time.monotonic()

    def __enter__(self) -> RoundProgress:
        super().__enter__()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._first, total=self._rounds, description=self._title)
        return self

    def show(self, row: Mapping[str, Any]) -> None:
        """Show a row of the history."""
        done = row["round"]
        counted = {*row["participants"]} - {exclusion["node"] for exclusion in row["excluded"]}
        text = f"loss {row['loss']:.4g}, {len(counted)} nodes"
        seconds = (time.monotonic() - self._start) / (done - self._first) * (self._rounds - done)
        line = f"{self._title}: round {done}/{self._rounds}, {text}, about {duration(seconds)} left"
        self._show(done, self._rounds, text, line=line, title=self._title)


def duration(seconds: float) -> str:
    """A time in words.

    Examples:
        >>> duration(45.2), duration(600), duration(7200)
        ('45 s', '10 min', '2.0 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def in_notebook() -> bool:
    """Whether this process runs the cells of a notebook: then IPython is loaded, and its shell has a kernel."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


class _NotebookLine:
    """One line below the cell that is running; further ones take its place."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, text: str) -> None:
        from IPython.display import display

        content = {"text/plain": text}
        if self._handle is None:
            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)


def _rich_bar(keep: bool) -> Any:
    """A bar of rich; None where rich is not installed."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
    except ImportError:
        return None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"))
    return Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=not keep)
