"""One run as the command line describes it: checked tables in, arguments of the library out.

    [task]       name, preset, and the settings of the task
    [algorithm]  name and settings; settings = "paper:QNLI" starts from the paper's best ones
    [run]        rounds, nodes, local_steps, seed ...: the arguments of `simulate`
    [schedules]  ilr = {power = -0.5}, or a list of such tables for their product; theory = 1.5 for the theorem's

`config_file` reads a file into tables, `overrides` lays the command line over them, and `resolve` fills in every
default. A run folder records the resolved configuration, which can be read again.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tailopt.algorithms import Algorithm, algorithm
from tailopt.cli.config_file import CODE, Tables
from tailopt.cli.own_task import chosen_task, recorded_code
from tailopt.cli.run_settings import RunSettings
from tailopt.cli.schedule_syntax import parse_schedule
from tailopt.cli.setting_names import check_key, task_settings, task_values
from tailopt.cli.setting_values import check_algorithm_value, check_type, dtype_as_name, dtype_from_name
from tailopt.paper import paper_settings
from tailopt.schedules import Power, Scheduled
from tailopt.tasks.table import presets_of, task
from tailopt.tasks.task import Task
from tailopt.theory import theory

PAPER = "paper:"


@dataclass(frozen=True)
class Configuration:
    """One resolved run: nothing is left to a default.

    Attributes:
        task: name, preset and every setting of the task.
        algorithm: name and settings.
        run: the arguments of `simulate`.
        schedules: as written in the file; `build_schedules` parses them.
    """

    task: Mapping[str, Any]
    algorithm: Mapping[str, Any]
    run: RunSettings
    schedules: Mapping[str, Any]

    def build_task(self) -> Task:
        """Create the task."""
        return _build_task(self.task)

    def build_algorithm(self) -> Algorithm:
        """Create the algorithm."""
        return algorithm(**self.algorithm)

    def build_schedules(self) -> dict[str, Scheduled]:
        """The schedules by setting; with `theory`, the theorem's schedules for every setting without one."""
        written = {key: parse_schedule(key, entry) for key, entry in self.schedules.items() if key != "theory"}
        if "theory" not in self.schedules:
            return dict(written)
        # Powers are passed to the theorem, which warns when they break one of its conditions.
        powers = {key: schedule for key, schedule in written.items() if isinstance(schedule, Power)}
        return {**theory(self.algorithm["name"], self.schedules["theory"], biased=False, **powers).schedules, **written}

    def record(self) -> dict[str, Any]:
        """What a run folder records in addition to what `simulate` writes itself."""
        settings = dataclasses.asdict(self.run)
        for name in ("drops", "proximal"):  # older run folders have no such keys, and must compare equal
            if not settings[name]:
                del settings[name]
        return {**settings, "task": dict(self.task), "schedules": dict(self.schedules)}


def resolve(tables: Tables) -> Configuration:
    """Fill in the defaults of the task and the paper; raises for a configuration that cannot run."""
    task_table, settings = resolve_task_and_run(tables)
    algorithm_table = _resolve_algorithm(tables["algorithm"])
    configuration = Configuration(task_table, algorithm_table, settings, dict(tables["schedules"]))
    configuration.build_algorithm()
    with warnings.catch_warnings():  # a broken condition of a theorem warns once, when the schedules are used
        warnings.simplefilter("ignore")
        configuration.build_schedules()
    return configuration


def resolve_task_and_run(tables: Tables) -> tuple[dict[str, Any], RunSettings]:
    """Return the sections [task] and [run] with the defaults of the task."""
    task_table = _resolve_task(chosen_task(tables["task"]))  # again, for whoever lays nothing over a file
    defaults = _build_task(task_table).defaults
    run_table = tables["run"]
    task_defaults: dict[str, Any] = {
        "rounds": defaults.rounds,
        "nodes": defaults.nodes,
        "batch_size": defaults.batch_size,
        "weights": defaults.weights or "equal",
    }
    # These come in pairs of which only one may be set: the user's choice removes the task's default for both.
    if "local_steps" not in run_table and "local_epochs" not in run_table:
        task_defaults |= {"local_steps": defaults.local_steps, "local_epochs": defaults.local_epochs}
    if "participants" not in run_table and "participation" not in run_table:
        task_defaults["participants"] = defaults.participants
    return task_table, RunSettings(**{**task_defaults, **run_table})


def _resolve_task(table: Mapping[str, Any]) -> dict[str, Any]:
    name = str(table.get("name", ""))
    first, *_ = presets_of(name)
    defaults = task_settings(name)
    for key in table:
        if key not in ("name", "preset"):
            check_key(f"task {name}", key, defaults)
    settings = {key: check_type(f"task.{key}", table[key], type(defaults[key])) for key in table if key in defaults}
    preset = check_type("task.preset", table.get("preset", first), str)
    given = {"name": name, "preset": preset, **settings}
    instance = _build_task(given)
    usual = {**defaults, **presets_of(name)[preset], **given}  # a class of one's own need not keep its settings
    values = {key: dtype_as_name(getattr(instance, key, usual[key])) for key in defaults}
    return {"name": name, "preset": preset, **values, **recorded_code(name)}


def _build_task(table: Mapping[str, Any]) -> Task:
    """Create the task of a table; settings that are a torch.dtype are names there."""
    name = table["name"]
    settings = {key: value for key, value in table.items() if key not in ("name", "preset", CODE)}
    usual = task_values(name)
    for key, value in settings.items():
        if isinstance(usual[key], torch.dtype):
            settings[key] = dtype_from_name(key, value)
    return task(name, table["preset"], **settings)


def _resolve_algorithm(table: Mapping[str, Any]) -> dict[str, Any]:
    settings = {key: value for key, value in table.items() if value is not None}
    name, base = settings.pop("name", None), settings.pop("settings", None)
    if not isinstance(name, str):
        raise ValueError(
            "Invalid algorithm: none is named. Give one: --algorithm avg-biclip (`tailopt list algorithms`)."
        )
    if base is not None:
        if not isinstance(base, str) or not base.startswith(PAPER):
            raise ValueError(f"Invalid settings: got {base!r}; need paper:DATASET, such as paper:QNLI.")
        settings = {**paper_settings(name, base.removeprefix(PAPER)), **settings}
    for key, value in settings.items():
        check_algorithm_value(key, value)
    return {"name": algorithm(name, **settings).name, **settings}
