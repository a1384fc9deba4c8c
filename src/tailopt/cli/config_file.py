"""Reading a configuration: a TOML file in sections, such as the config.toml of a run folder, as checked tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tailopt.arguments import did_you_mean
from tailopt.cli.setting_names import SECTIONS, check_section_key
from tailopt.cli.setting_values import parse_toml
from tailopt.records.identity import RUN
from tailopt.records.run_config import CONFIG, in_sections
from tailopt.tasks.own import located
from tailopt.tasks.table import is_own

CODE = "code"  # in [task] of a run folder: which code the task of a file or package was
Tables = dict[str, dict[str, Any]]  # section -> its settings; every section is present


def read(path: str | Path) -> Tables:
    """The tables of a TOML file, or of the configuration in a run folder; unknown keys raise an error."""
    return read_besides(path)[0]


def read_besides(path: str | Path, other: str | None = None) -> tuple[Tables, Any]:
    """The same, and what the file has under one name that is no section of a run, such as [space]; {} if nothing."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"Invalid configuration: there is no file {str(path)!r}. Give the path of a TOML file.")
    try:
        of_a_run = path.name == CONFIG or (path.parent / RUN).exists()  # whatever its layout: somebody else may edit it
        document = parse_toml(path.read_text(encoding="utf-8"))
        besides = {} if other is None else document.pop(other, {})
        tables = sections(document, of_a_run)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if is_own(name := str(tables["task"].get("name", ""))) and CODE not in tables["task"]:
        tables["task"]["name"] = located(name, path.parent)  # a path in a file is relative to that file
    return tables, besides


def sections(document: Mapping[str, Any], of_a_run: bool = False) -> Tables:
    """The content of a file as checked tables, one per section. Run folders by older versions have a flat layout.

    of_a_run: whether the file is in a run folder, whose code the user must have named: own_task.py.

    Examples:
        >>> sections({"task": {"name": "syntoken"}, "algorithm": "avg-sgd", "settings": {"ilr": 0.1}, "rounds": 5})
        {'task': {'name': 'syntoken'}, 'algorithm': {'name': 'avg-sgd', 'ilr': 0.1}, 'run': {'rounds': 5},
         'schedules': {}}
    """
    tables = in_sections(document)
    method = tables.get("algorithm")
    if isinstance(method, Mapping):
        # "numbers" is of two torch.optim classes: their settings again, under torch's names
        tables["algorithm"] = method = {key: value for key, value in method.items() if key != "numbers"}
    algorithm = method.get("name") if isinstance(method, Mapping) else None
    if isinstance(tables.get("task"), Mapping) and is_own(str(tables["task"].get("name", ""))):
        # Its settings are checked when it is known whether its file may be run: see own_task.py.
        of_a_run = of_a_run or isinstance(document.get("algorithm"), str)
        tables["task"] = {**({CODE: {}} if of_a_run else {}), **tables["task"]}
    for section, table in tables.items():
        if section not in SECTIONS:
            raise ValueError(
                f"Unknown section: {section!r}{did_you_mean(section, SECTIONS)} Known: {', '.join(SECTIONS)}."
            )
        if not isinstance(table, Mapping):
            raise ValueError(
                f"Invalid {section}: got {table!r}; need a table. Write [{section}] and its settings below."
            )
        unchecked = section == "task" and is_own(str(table.get("name", "")))
        for key in () if unchecked else table:
            check_section_key(section, key, algorithm)
    return {section: dict(tables.get(section, {})) for section in SECTIONS}
