"""Arguments that `simulate` and `NestedOptimizer` share: refused by name, value and range, before anything moves.

What has a meaning of its own is checked where that is: participants, drops, robust means, settings of algorithms.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any


def checked_seed(seed: Any) -> int:
    """A whole number of any library, as an int.

    Examples:
        >>> checked_seed("x")
        Traceback (most recent call last):
        ValueError: Invalid seed: 'x'; need a whole number.
    """
    try:
        if not isinstance(seed, bool):
            return operator.index(seed)
    except TypeError:
        pass
    raise ValueError(f"Invalid seed: {seed!r}; need a whole number.")


def check_choice(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Refuse a value that is not one of those allowed.

    Examples:
        >>> check_choice("sampling", "all", ("uniform", "proportional"))
        Traceback (most recent call last):
        ValueError: Invalid sampling: 'all'; need one of 'uniform', 'proportional'.
    """
    if value not in allowed:
        raise ValueError(f"Invalid {name}: {value!r}; need one of {', '.join(map(repr, allowed))}.")


def check_flags(**flags: Any) -> None:
    """True or False, nothing that is merely taken for one of them."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"Invalid {name}: {value!r}; need True or False.")


def check_counts(**counts: Any) -> None:
    """Whole numbers from 1."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"Invalid {name}: {value!r}; need a whole number, 1 or more.")


def check_function(name: str, value: Any, what: str) -> None:
    """Something to call, or None."""
    if value is not None and not callable(value):
        raise TypeError(f"Invalid {name}: {value!r}; need {what}.")


def checked_loggers(loggers: Any) -> tuple[Callable[[dict[str, Any]], None], ...]:
    """Functions of a row of the history."""
    need = "need a sequence of functions of a row of the history, such as loggers=[print]"
    if not isinstance(loggers, Iterable):
        raise TypeError(f"Invalid loggers: {loggers!r}; {need}.")
    found = tuple(loggers)
    for logger in found:
        if not callable(logger):
            raise TypeError(f"Invalid loggers: {logger!r} is no function; {need}.")
    return found


def is_number(value: Any) -> bool:
    """Whether this is a plain number, and not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)
