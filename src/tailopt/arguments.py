"""Checks of arguments that many functions share. A refusal gives the name, the value and the range.

Arguments with a meaning of their own are checked where they are used: participants, drops, robust means, settings.
"""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard


def whole_number(
    name: str, value: Any, low: int | None = None, high: int | None = None, *, hint: str = "", convert: bool = False
) -> int:
    """Return a whole number in a range, or raise ValueError. A truth value is not a number.

    Args:
        name: of the argument, for the message.
        low, high: the smallest and the largest number that is allowed; None for no limit.
        hint: what to do instead: a sentence that ends the message.
        convert: accept the whole numbers of other libraries too, such as numpy.int64, and return them as int. Without
            it they are refused, for callers that keep the argument itself.

    Examples:
        >>> whole_number("rounds", 3, low=1)
        3
        >>> whole_number("keep", 0, low=1, hint="Keep at least the newest.")
        Traceback (most recent call last):
        ValueError: Invalid keep: got 0; need a whole number, 1 or more. Keep at least the newest.
    """
    number = _as_int(value) if convert or isinstance(value, int) else None
    if number is None or (low is not None and number < low) or (high is not None and number > high):
        limits = f" from {low} to {high}" if high is not None else f", {low} or more" if low is not None else ""
        raise ValueError(f"Invalid {name}: got {value!r}; need a whole number{limits}.{hint and f' {hint}'}")
    return number


def _as_int(value: Any) -> int | None:
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def checked_seed(seed: Any) -> int:
    """Return a seed as an int; any whole number of any library is one."""
    number = _as_int(seed)
    if number is None:
        raise ValueError(f"Invalid seed: {seed!r}; need a whole number.")
    return number


def check_choice(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Refuse a value that is not one of those allowed.

    Examples:
        >>> check_choice("sampling", "all", ("uniform", "proportional"))
        Traceback (most recent call last):
        ValueError: Invalid sampling: 'all'; need one of 'uniform', 'proportional'.
    """
    if value not in allowed:
        raise ValueError(f"Invalid {name}: {value!r}; need one of {', '.join(map(repr, allowed))}.")


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """Continue a message about an unknown name: suggest all equally close ones, as ilr and olr are to lr, or end it.

    Examples:
        >>> did_you_mean("roundz", ["rounds", "nodes"]), did_you_mean("LR", ["ilr", "olr"]), did_you_mean("x", ["df"])
        ("; did you mean 'rounds'?", "; did you mean 'ilr' or 'olr'?", '.')
    """
    by_spelling: dict[str, list[str]] = {}
    for candidate in known:
        by_spelling.setdefault(candidate.lower(), []).append(candidate)
    spelling = str(name).lower()
    near = difflib.get_close_matches(spelling, by_spelling, n=5)
    similarity = {candidate: difflib.SequenceMatcher(None, candidate, spelling).ratio() for candidate in near}
    best = sorted(known for key in near if similarity[key] == similarity[near[0]] for known in by_spelling[key])
    return f"; did you mean {' or '.join(map(repr, best))}?" if best else "."


def check_flags(**flags: Any) -> None:
    """Refuse arguments, given by name, that are neither True nor False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"Invalid {name}: {value!r}; need True or False.")


def check_counts(**counts: Any) -> None:
    """Refuse arguments, given by name, that are not whole numbers of 1 or more."""
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"Invalid {name}: {value!r}; need a whole number, 1 or more.")


def check_seconds(**durations: Any) -> None:
    """Refuse durations, given by name, that are not a finite number of seconds above 0."""
    for name, value in durations.items():
        if not is_number(value) or not 0 < value < math.inf:
            raise ValueError(f"Invalid {name}: {value!r}; need a number of seconds above 0.")


def check_function(name: str, value: Any, what: str) -> None:
    """Refuse an argument that is neither a function nor None; `what` describes the function."""
    if value is not None and not callable(value):
        raise TypeError(f"Invalid {name}: {value!r}; need {what}.")


def checked_loggers(loggers: Any) -> tuple[Callable[[dict[str, Any]], None], ...]:
    """Return loggers as a tuple; each is a function of a row of the history."""
    need = "need a sequence of functions of a row of the history, such as loggers=[print]"
    if not isinstance(loggers, Iterable):
        raise TypeError(f"Invalid loggers: {loggers!r}; {need}.")
    functions = tuple(loggers)
    for logger in functions:
        if not callable(logger):
            raise TypeError(f"Invalid loggers: {logger!r} is no function; {need}.")
    return functions


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is an int or a float, and not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)
