"""Which seeds settings are chosen by, and which ones the best are reported on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tailopt.arguments import checked_seed, is_number, whole_number


def tuning_and_fresh_seeds(seeds: Any, report_seeds: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the seeds that settings are chosen by, and those of the report; none may be both."""
    tuning = checked_seeds("seeds", seeds, 0, least=0)
    fresh = checked_seeds("report_seeds", report_seeds, 1 + max(tuning, default=-1), least=0)
    if not tuning and not fresh:
        raise ValueError("Invalid seeds: 0, and report_seeds is 0 too, so that nothing would run. Give one of them.")
    if both := sorted({*tuning} & {*fresh}):
        raise ValueError(f"Invalid report_seeds: {both[0]} is one of seeds as well; a report needs fresh ones.")
    return tuning, fresh


def checked_seeds(name: str, seeds: Any, first: int, least: int = 1) -> tuple[int, ...]:
    """Return seeds as a tuple; a number means so many, counted from `first`.

    Examples:
        >>> checked_seeds("seeds", 2, 0), checked_seeds("report_seeds", [7, 9], 2)
        ((0, 1), (7, 9))
    """
    if is_number(seeds) and isinstance(seeds, int):
        whole_number(name, seeds, low=least, hint="Or give a list of them.")
        found = tuple(range(first, first + seeds))
    elif isinstance(seeds, Sequence) and not isinstance(seeds, str):
        found = tuple(map(checked_seed, seeds))
    else:
        raise ValueError(f"Invalid {name}: {seeds!r}; need how many, or a list of whole numbers.")
    if len(found) < least or len(set(found)) < len(found):
        raise ValueError(f"Invalid {name}: {seeds!r}; need {least} or more, each once.")
    return found
