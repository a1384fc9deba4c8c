"""How far a sweep is: its points, and the round of those that are being trained in this process."""

from __future__ import annotations

import time

from tailopt.progress import Progress


class SweepProgress(Progress):
    """Shows how many points are done, and the round of those that are being trained in this process."""

    def __init__(self, shown: bool, title: str) -> None:
        super().__init__(shown, seconds_between_lines=2.0, keep_bar=True)
        self._title, self._done, self._total, self._rounds = title, 0, 0, 0

    def __enter__(self) -> SweepProgress:
        super().__enter__()
        self._last_line = time.monotonic()  # a sweep that takes less than two seconds prints no line
        return self

    def begin(self, done: int, total: int, rounds: int) -> None:
        """Start counting points, each of which takes so many rounds."""
        self._done, self._total, self._rounds = done, total, rounds

    def tick(self, t: int) -> None:
        """Show that a round has passed."""
        if self._total:
            self._show_points(f"round {t}/{self._rounds}")

    def add(self, points: int) -> None:
        """Show that points are done."""
        self._done += points
        self._show_points("")

    def _show_points(self, text: str) -> None:
        line = f"{self._title}: {self._done}/{self._total} points{', ' * bool(text)}{text}"
        self._show(self._done, self._total, text, line=line, title=self._title)
