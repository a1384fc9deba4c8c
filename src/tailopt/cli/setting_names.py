"""Names of settings: which exist, in which section, and what was probably meant by one that does not.

[task]       name, preset, and the settings of the task
[algorithm]  name, settings (paper:DATASET), and the settings of the algorithm
[run]        the fields of `RunSettings`
[schedules]  theory, and every setting of the algorithm
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Collection
from typing import Any

import torch

from tailopt.algorithms import NAMED, REQUIRED
from tailopt.arguments import did_you_mean
from tailopt.cli.run_settings import RunSettings
from tailopt.cli.setting_values import dtype_as_name
from tailopt.rules.table import INNER, OUTER
from tailopt.settings import FIXED_KEYS, PUBLIC_NAMES
from tailopt.tasks.own import find
from tailopt.tasks.table import TASKS, is_own, task

SECTIONS = ("task", "algorithm", "run", "schedules")
# Options of the command line that are short for a setting of another name, or of two sections.
SHORT = {"task": "task.name", "algorithm": "algorithm.name", "model": "task.pretrained", "scale": "task.scale"}
# Options of every command; listed here so that a misspelled one gets a suggestion.
EXTRA_OPTIONS = ("--traceback", "--help")


def section_keys(section: str, task_name: str | None = None) -> set[str]:
    """The settings of a section for all tasks and algorithms; of [schedules] only what is not a setting's name.

    task_name: of a task that is not in the table, to have its settings too; its file is run.
    """
    names = [*TASKS, *([task_name] if task_name is not None and is_own(task_name) else [])]
    return {
        "task": {"name", "preset", *(key for name in names for key in task_settings(name))},
        "algorithm": {"name", "settings", *algorithm_keys()},
        "run": {field.name for field in dataclasses.fields(RunSettings)},
        "schedules": {"theory"},
    }[section]


def task_settings(name: str) -> dict[str, Any]:
    """A task's settings with their values in its first preset; a torch.dtype is given by its name."""
    return {key: dtype_as_name(value) for key, value in task_values(name).items()}


def task_values(name: str) -> dict[str, Any]:
    """A task's settings with their values in its first preset."""
    if is_own(name):
        return dict(find(name).settings)
    instance = task(name)
    settings = {}
    for field in dataclasses.fields(typing.cast(Any, instance)):
        value = getattr(instance, field.name)
        try:
            TASKS[name](**{field.name: value})
        except TypeError:  # the table of tasks sets this field itself, so it is no setting
            continue
        if isinstance(value, bool | int | float | str | torch.dtype):
            settings[field.name] = value
    return settings


def algorithm_keys() -> set[str]:
    """The settings of all algorithms."""
    names = {
        PUBLIC_NAMES[level].get(key, key)
        for level, table in (("outer", OUTER), ("inner", INNER))
        for rule in table.values()
        for key in (*rule.required, *rule.defaults)
    }
    return names | {"inner_state", "send_preconditioner"}


def algorithm_settings(name: Any) -> set[str]:
    """The settings of one algorithm, or of all algorithms when the name is unknown.

    Examples:
        >>> sorted(algorithm_settings("avg-biclip"))
        ['dead_zone', 'i_d', 'i_u', 'ilr', 'inner_momentum', 'inner_state', 'scale', 'weight_decay']
    """
    lowered = str(name).strip().lower()
    pairs = {f"{outer}-{inner}": (outer, inner) for outer in OUTER for inner in INNER} | {**NAMED}
    if lowered not in pairs:
        return algorithm_keys()
    levels = zip(("outer", "inner"), pairs[lowered], (OUTER, INNER), strict=True)
    extra = {"inner_state", *REQUIRED.get(lowered, ()), *(["send_preconditioner"] if lowered == "adam2" else [])}
    return extra | {
        PUBLIC_NAMES[level].get(key, key)
        for level, rule, table in levels
        for key in (
            *table[rule].required,
            *(option for option in table[rule].defaults if option not in FIXED_KEYS[level]),
        )
    }


def check_section_key(section: str, key: str, algorithm: Any, task_name: str | None = None) -> None:
    """Raise for a key that a section does not have; suggest only settings that the named algorithm has."""
    known = section_keys(section, task_name) | (algorithm_keys() if section == "schedules" else set())
    check_key(section, key, known, known - _of_other_algorithms(algorithm))


def check_key(section: str, key: str, known: Collection[str], suggested: Collection[str] | None = None) -> None:
    """Raise for a key that is not known; the message suggests the nearest ones."""
    if key not in known:
        near = did_you_mean(key, known if suggested is None else suggested)
        raise ValueError(f"Unknown setting: {section}.{key}{near} [{section}] knows {', '.join(sorted(known))}.")


def locate(option: str, algorithm: Any, task_name: str | None = None, others: Collection[str] = ()) -> list[str]:
    """Where an option of the command line belongs: its section, its key, and the keys below that one.

    others: what else the command has, such as --out; suggested like settings.

    Examples:
        >>> locate("ilr", "avg-sgd"), locate("schedules.ilr.power", "avg-sgd")
        (['algorithm', 'ilr'], ['schedules', 'ilr', 'power'])
    """
    parts = SHORT.get(option, option).split(".")
    if parts[0] in SECTIONS and len(parts) > 1:
        check_section_key(parts[0], parts[1], algorithm, task_name)
        return parts
    homes = [section for section in SECTIONS if parts[0] in section_keys(section, task_name)]
    if len(homes) > 1:
        spellings = " or ".join(f"--{section}.{parts[0]}" for section in homes)
        raise ValueError(f"Ambiguous setting: --{option} is in {' and '.join(homes)}. Write {spellings}.")
    if not homes:
        known = {key for section in SECTIONS for key in section_keys(section, task_name)} | {*SHORT}
        known |= {name.removeprefix("--") for name in (*others, *EXTRA_OPTIONS)}
        near = did_you_mean(option, known - _of_other_algorithms(algorithm))
        raise ValueError(f"Unknown option: --{option}{near} Known: {', '.join(sorted(known))}.")
    return [homes[0], *parts]


def _of_other_algorithms(name: Any) -> set[str]:
    return algorithm_keys() - algorithm_settings(name)
