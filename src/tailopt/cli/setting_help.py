"""What the settings mean: name, type, default and meaning, for `run --help` and `list`.

Meanings are written once, where a setting belongs: in the docstring of a task's class, in that of `RunSettings`, and in
`settings.MEANINGS`.
"""

from __future__ import annotations

import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from tailopt.algorithms import REQUIRED, resolve_name
from tailopt.cli.run_settings import RunSettings
from tailopt.cli.setting_names import algorithm_keys, task_values
from tailopt.cli.setting_values import dtype_as_name
from tailopt.cli.tables import format_cell
from tailopt.rules.table import INNER, OUTER
from tailopt.settings import FIXED_KEYS, MEANINGS, PUBLIC_NAMES
from tailopt.tasks import own
from tailopt.tasks.table import is_own, task

WIDTH = 112
NEEDED = "needed"  # in place of a default
KINDS: Mapping[type, str] = {int: "whole number", float: "number", bool: "true or false", str: "word"}


@dataclass(frozen=True)
class SettingHelp:
    """A setting as a user reads about it; an empty default is not shown."""

    name: str
    kind: str
    default: str
    meaning: str


def described_arguments(docstring: str) -> dict[str, str]:
    """Read the arguments that a docstring describes; several that share a line share the text.

    Examples:
        >>> described_arguments("Tea.\\n\\nArgs:\\n    a, b: two\\n        numbers.\\n    c: a word.\\n")
        {'a': 'two numbers', 'b': 'two numbers', 'c': 'a word'}
    """
    section = re.search(r"^(?:Args|Attributes):\n((?: +.*\n|\n)+)", inspect.cleandoc(docstring) + "\n", re.MULTILINE)
    entries = re.split(r"^    (?=\S)", section[1], flags=re.MULTILINE) if section else []
    found: dict[str, str] = {}
    for entry in entries:
        names, _, text = " ".join(entry.split()).partition(": ")
        found |= dict.fromkeys(names.split(", "), text.rstrip(".").replace("`", ""))
    return {name: text for name, text in found.items() if text}


def task_help(name: str) -> list[SettingHelp]:
    """What can be set about a task, from the docstring of its class."""
    meanings = described_arguments(class_of(name).__doc__ or "")
    return [
        SettingHelp(
            key, KINDS.get(type(value), "type of torch"), format_cell(dtype_as_name(value)), meanings.get(key, "")
        )
        for key, value in task_values(name).items()
    ]


def class_of(name: str) -> type:
    """The class of a task, whose docstring describes it."""
    return own.find(name).factory if is_own(name) else type(task(name))  # type: ignore[return-value]


def run_help() -> list[SettingHelp]:
    """What can be set about a run, from the docstring of `RunSettings`."""
    hints, meanings = typing.get_type_hints(RunSettings), described_arguments(RunSettings.__doc__ or "")
    rows = []
    for field in fields(RunSettings):
        default = "" if field.default is None else format_cell(field.default)
        rows.append(SettingHelp(field.name, _kind(hints[field.name]), default, meanings.get(field.name, "")))
    return rows


def algorithm_help(name: str | None = None) -> list[SettingHelp]:
    """What can be set about an algorithm, or about all of them; with a name also which settings it needs."""
    if name is None:
        return [SettingHelp(key, MEANINGS[key][0], "", MEANINGS[key][1]) for key in sorted(algorithm_keys())]
    canonical, (outer, inner) = resolve_name(name)
    defaults: dict[str, str] = {}
    for level, rule in (("inner", INNER[inner]), ("outer", OUTER[outer])):
        public = PUBLIC_NAMES[level]
        needed = dict.fromkeys((public.get(key, key) for key in rule.required), NEEDED)
        given = {public.get(k, k): format_cell(v) for k, v in rule.defaults.items() if k not in FIXED_KEYS[level]}
        defaults |= needed | {key: value for key, value in given.items() if key not in defaults}
    defaults |= dict.fromkeys(REQUIRED.get(canonical, ()), NEEDED)
    return [SettingHelp(key, MEANINGS[key][0], value, MEANINGS[key][1]) for key, value in defaults.items()]


def help_text(rows: Iterable[SettingHelp], indent: int = 2) -> str:
    """Set settings in columns: the name, then type, default and meaning, wrapped.

    Examples:
        >>> print(help_text([SettingHelp("df", "number", "1.5", "degrees of freedom")]))
          df  number, default 1.5: degrees of freedom
    """
    rows = list(rows)
    width = max((len(row.name) for row in rows), default=0) + 2
    lines = []
    for row in rows:
        default = f"default {row.default}" if row.default not in ("", NEEDED) else row.default
        facts = ", ".join(part for part in (row.kind, default) if part)
        text = f"{facts}: {row.meaning}" if row.meaning else facts
        first = " " * indent + row.name.ljust(width)
        lines.append(
            textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=" " * len(first), break_on_hyphens=False)
        )
    return "\n".join(lines)


def _kind(hint: Any) -> str:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return " or ".join(KINDS.get(kind, "numbers") for kind in kinds if kind is not types.NoneType)
