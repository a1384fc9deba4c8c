"""Settings on the command line: `--ilr 0.1`, `--run.seed 3`, `--average`, laid over the tables of a file."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tailopt.cli.config_file import Tables
from tailopt.cli.own_task import chosen_task
from tailopt.cli.run_settings import is_switch
from tailopt.cli.setting_names import SECTIONS, SHORT, locate
from tailopt.cli.setting_values import parse_value

# Settings in the order of the command line: name and text; None where no text followed the name.
Overrides = Sequence[tuple[str, str | None]]


def split_arguments(arguments: Sequence[str], options: Mapping[str, bool]) -> tuple[list[str], Overrides]:
    """Separate a command's own arguments from the settings among them.

    Args:
        arguments: what follows the name of the command.
        options: the command's own options, with whether a value follows them.

    Examples:
        >>> split_arguments(["a.toml", "--ilr", "-1e-3", "--out", "runs/a", "--average"], {"--out": True})
        (['a.toml', '--out', 'runs/a'], [('ilr', '-1e-3'), ('average', None)])
    """
    own_arguments: list[str] = []
    overrides: list[tuple[str, str | None]] = []
    queue = list(arguments)
    while queue:
        argument = queue.pop(0)
        name, equals, text = argument.partition("=")
        if not argument.startswith("--") or argument == "--" or name in options:
            own_arguments.append(argument)
            if options.get(name, False) and not equals and queue:
                own_arguments.append(queue.pop(0))
        else:
            # Only two dashes begin an option: a single one is the sign of a number, as in --ilr -1e-3.
            value_follows = bool(queue) and not queue[0].startswith("--")
            value = text if equals else queue.pop(0) if value_follows else None
            overrides.append((name[2:].replace("-", "_"), value))
    return own_arguments, overrides


def apply_overrides(tables: Tables, overrides: Overrides, options: Collection[str] = ()) -> Tables:
    """Lay the settings of the command line over the tables of a file; returns new tables.

    options: of the command itself, so that they are suggested too where a name is unknown.

    Examples:
        >>> empty = {"task": {}, "algorithm": {}, "run": {}, "schedules": {}}
        >>> apply_overrides(empty, [("noise", "none"), ("i_u", "1e-3"), ("schedules.ilr.power", "-0.5")])
        {'task': {'noise': 'none'}, 'algorithm': {'i_u': 0.001}, 'run': {}, 'schedules': {'ilr': {'power': -0.5}}}
    """
    tables = {section: dict(tables.get(section, {})) for section in SECTIONS}
    algorithm = _last(overrides, "algorithm.name") or tables["algorithm"].get("name")
    tables["task"] = chosen_task(tables["task"], _last(overrides, "task.name"))
    for option, text in overrides:
        section, *keys = locate(option, algorithm, tables["task"].get("name"), options)
        if [section, *keys] == ["task", "name"] and text is not None:
            continue  # done above: the settings of a task of one's own are known only with it
        table = _table_of(tables[section], keys)
        if text is None:
            if section != "run" or not is_switch(keys[0]):
                raise ValueError(f"--{option} needs a value. Write --{option} VALUE.")
            text = "true"
        # "none" removes a setting of the file; a task may have "none" as a value, as the noise of syntoken has.
        if text.lower() == "none" and section != "task":
            table.pop(keys[-1], None)
        else:
            table[keys[-1]] = parse_value(text)
    return tables


def _last(overrides: Overrides, setting: str) -> str | None:
    """The last text that the command line has for a setting, such as "task.name"."""
    texts = [text for option, text in overrides if SHORT.get(option, option) == setting]
    return texts[-1] if texts else None


def _table_of(table: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """The table that holds the last key. Tables on the way are copied, since the caller's must not change."""
    for key in keys[:-1]:
        below = table.get(key)
        table[key] = dict(below) if isinstance(below, Mapping) else {}
        table = table[key]
    return table
