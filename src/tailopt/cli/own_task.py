"""Which task is run, and whether its code may be: the one place that decides it, before any of that code runs.

A task of a file or package runs that code. A user who names it in a command has asked for that. A run folder that names
it has not: its config.toml may be somebody else's, or the file may have changed since. So for a task that only a run
folder names

    its path is absolute, so that it cannot mean another file in another folder
    the file has the digest that the folder recorded, or the user names the file again
    a line says which file is run
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tailopt.cli.config_file import CODE
from tailopt.tasks import own
from tailopt.tasks.table import is_own


def chosen_task(table: Mapping[str, Any], named: str | None = None) -> dict[str, Any]:
    """Return the section [task] without what a run folder recorded about the task's code; raise if it must not run.

    Args:
        table: the section of a file.
        named: the task that the command line names, if any.
    """
    rest = {key: value for key, value in table.items() if key != CODE}
    if named is not None:
        return {**rest, "name": own.located(named) if is_own(named) else named}
    name, code = str(table.get("name", "")), table.get(CODE)
    if code is None or not is_own(name):
        return rest
    again = f"--task {Path(name).name if '.py:' in name else name}"
    recorded = code.get("sha256") if isinstance(code, Mapping) else None
    if own.located(name) != name or not isinstance(recorded, str):
        raise ValueError(
            f"Invalid task: the run folder names {name!r} without "
            f"{'its digest' if own.located(name) == name else 'its whole path'}, so it is not run. "
            f"If you trust it, name it: {again}."
        )
    now = own.file_digest(name)
    if now != recorded:
        raise ValueError(
            f"The file of the task {name} has changed since this run was started (sha256 {recorded[:12]}…, now "
            f"{now[:12]}…), so it is not run. If the change is meant, name it again: {again}."
        )
    print(f"running the code of the task {name}, unchanged since this run was started", file=sys.stderr)
    return rest


def recorded_code(name: str) -> dict[str, Any]:
    """Return what a run folder records about a task's code, and how its runs are compared; nothing for the library's.

    `tailopt compare` and `list` read it: they run nothing.
    """
    if not is_own(name):
        return {}
    found = own.find(name)
    defaults = found.build(next(iter(found.presets))).defaults
    return {CODE: {"sha256": found.sha256, "metric": defaults.metric, "lower_is_better": defaults.lower_is_better}}
