"""Schedules as a file writes them: `ilr = {power = -0.5, per = "step"}`, or a list of such tables for their product."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tailopt import schedules
from tailopt.cli.setting_names import check_key

# kind -> the function that builds it, and the keys that its table may also have
SCHEDULES: Mapping[str, tuple[Callable[..., schedules.Schedule], tuple[str, ...]]] = {
    "power": (schedules.power, ("per", "shift")),
    "warmup": (schedules.warmup, ("per", "start")),
    "cosine": (schedules.cosine, ("per", "floor")),
}


def parse_schedule(key: str, entry: Any) -> schedules.Schedule:
    """Build the schedule of one setting from its table, or the product of a list of tables.

    Examples:
        >>> parse_schedule("ilr", {"power": -0.5}).factor(4)
        0.5
    """
    if isinstance(entry, list) and entry:
        first, *others = (parse_schedule(key, part) for part in entry)
        for other in others:
            first = first * other
        return first
    kinds = [kind for kind in SCHEDULES if isinstance(entry, Mapping) and kind in entry]
    if len(kinds) != 1:
        raise ValueError(
            f"Invalid schedules.{key}: got {entry!r}; need a table with one of {', '.join(SCHEDULES)}, "
            f"such as {key} = {{power = -0.5}}."
        )
    (kind,) = kinds
    build, optional_keys = SCHEDULES[kind]
    for name, value in entry.items():
        check_key(f"schedules.{key}", name, (kind, *optional_keys))
        if name != "per" and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"Invalid schedules.{key}.{name}: got {value!r}; need a number.")
    return build(entry[kind], **{name: entry[name] for name in optional_keys if name in entry})
