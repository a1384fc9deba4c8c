"""How long the phases of a round take, for times.jsonl.

    local         the local steps: in a simulation of all nodes, on real nodes of the slowest one
    mean          simulations: the guard and the mean of the displacements
    wait          real nodes: node 0 is done with its local steps, and the slowest node is not
    exchange      real nodes: displacements and verdicts
    outer         the outer step and the new global weights; on real nodes also sending them
    evaluate      the user's evaluation
    checkpoint    the checkpoint that was written since the row before
    round_seconds from the row before to this one; what the phases leave of it are loggers, the history and other things

On a GPU the phase that waits for results also has the time of what was started before it.
"""

from __future__ import annotations

import time


class PhaseClock:
    """Measures phases that follow each other.

    Examples:
        >>> clock = PhaseClock()
        >>> clock.lap("local")
        >>> clock.lap()  # neither of one phase nor of the other
        >>> clock.lap("outer")
        >>> sorted(clock.take())
        ['local', 'outer', 'round_seconds']
        >>> sorted(clock.take())
        ['round_seconds']
    """

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def lap(self, phase: str = "") -> None:
        """Add the time since the last call to a phase; without a name, to none."""
        now = time.perf_counter()
        if phase:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + (now - self._last)
        self._last = now

    def take(self) -> dict[str, float]:
        """Return the seconds of all phases and of the whole since the last call, and begin anew."""
        self._last = time.perf_counter()
        taken = {**self._seconds, "round_seconds": self._last - self._began}
        self._began, self._seconds = self._last, {}
        return taken
