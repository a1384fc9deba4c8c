"""How far a study is: a bar in a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int, int, str], None]


@contextmanager
def counted(shown: bool) -> Iterator[Advance]:
    """A function (done, total, text) that shows where things are; it does nothing where nobody looks."""
    if not shown:
        yield lambda done, total, text: None
        return
    if not sys.stderr.isatty():
        yield _lines()
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield _lines()
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, text: bar.update(task, completed=done, total=total, description=text)


def _lines() -> Advance:
    said = 0.0

    def advance(done: int, total: int, text: str) -> None:
        nonlocal said
        if time.monotonic() - said >= 5 or done == total:
            said = time.monotonic()
            print(f"{done}/{total}  {text}", file=sys.stderr, flush=True)

    return advance
