"""`tailopt list`: all tasks, algorithms and noises, or the runs in a folder."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tailopt.algorithms import NAMED, REQUIRED, canonical_name
from tailopt.arguments import did_you_mean
from tailopt.cli.compare import find_runs, primary_metric, print_unreadable, read_curve, read_each
from tailopt.cli.overrides import Overrides
from tailopt.cli.setting_help import algorithm_help, class_of, help_text, task_help
from tailopt.cli.setting_names import task_settings
from tailopt.cli.tables import format_cell, print_table
from tailopt.records.folder import Run
from tailopt.rules.table import INNER, OUTER
from tailopt.settings import FIXED_KEYS, PUBLIC_NAMES
from tailopt.tasks.own import installed
from tailopt.tasks.synthetic import NOISES
from tailopt.tasks.table import PRESETS, TASKS, presets_of, task
from tailopt.tasks.task import Defaults

EXAMPLE = """\
  tailopt list
  tailopt list algorithms"""
MEANINGS: Mapping[str, str] = {
    "none": "no noise",
    "gaussian": "normal; `scale` is its standard deviation",
    "student-t": "Student's t with `df` degrees of freedom, times `scale`; no variance up to df = 2",
    "cauchy": "Cauchy, times `scale`; no mean",
}


def add(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "list",
        help="tasks, algorithms with their settings, noises; the runs in a folder",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="tailopt list [tasks [NAME] | algorithms [NAME] | noises | runs [FOLDER]]",
        description="List what can be run, what one task or algorithm can be given, or what has been run.",
        epilog=f"example:\n{EXAMPLE}",
    )
    parser.add_argument(
        "what", nargs="?", metavar="WHAT", help="tasks, algorithms, noises or runs; by default all except runs"
    )
    parser.add_argument(
        "which",
        nargs="?",
        metavar="NAME|FOLDER",
        help="a task, also of your own, or an algorithm, for the meaning of its settings; of runs the folder",
    )
    parser.set_defaults(command=command, options=None)


def command(arguments: argparse.Namespace, overrides: Overrides) -> int:
    """Print the lists that the arguments name."""
    known = (*LISTS, "runs")
    if arguments.what not in (None, *known):
        near = did_you_mean(arguments.what, known)
        raise ValueError(f"Unknown list: {arguments.what!r}{near} There are: {', '.join(known)}.")
    what, which = arguments.what, arguments.which
    if what == "runs":
        return runs(Path(which or "runs"))
    if which is not None:
        if what not in SETTINGS:
            raise ValueError(f"Invalid name: {which!r}; {what} have no settings. Leave it out.")
        SETTINGS[what](which)
        print("\nwrote nothing; `tailopt run --help` has the other settings")
        return 0
    for number, (name, print_list) in enumerate(LISTS.items()):
        if what in (None, name):
            if number and what is None:
                print()
            print_list()
    print("\nwrote nothing; `tailopt run --help` explains how to use them")
    return 0


def tasks() -> None:
    """Print the tasks with the settings of their preset "paper"."""
    rows = []
    for name in TASKS:
        defaults = task(name).defaults
        listed = ", ".join(f"{key} = {format_cell(value)}" for key, value in task_settings(name).items())
        usual = f"{defaults.nodes} nodes, {_length(defaults)}"
        rows.append([name, ", ".join(PRESETS[name]), defaults.metric, usual, listed])
    print_table("tasks", ["name", "presets", "metric", "by default", "settings"], rows)
    others = {name: place for name, place in installed().items() if name not in TASKS}
    for name, place in others.items():  # not loaded: `tailopt list tasks NAME` does that
        print(f"{name}  of an installed package: {place}")


def _length(defaults: Defaults) -> str:
    return f"{defaults.rounds} rounds of " + (
        f"{defaults.local_steps} steps" if defaults.local_steps is not None else f"{defaults.local_epochs} epochs"
    )


def _direction(lower: bool) -> str:
    return "lower" if lower else "higher"


def algorithms() -> None:
    """Print the algorithms with the settings that they need and the settings that they accept."""
    rows = []
    for name in NAMED:
        need, may = settings(name)
        rows.append([name, *NAMED[name], " ".join(need), " ".join(may)])
    print_table("algorithms", ["name", "outer", "inner", "needs", "may have"], rows)
    print(f"Every other pair OUTER-INNER is one too: {', '.join(OUTER)} - {', '.join(INNER)}.")
    print("All may have inner_state (reset, keep).")


def settings(name: str) -> tuple[list[str], list[str]]:
    """The settings that an algorithm needs, and the further settings that it accepts.

    Examples:
        >>> settings("avg-biclip")
        (['ilr', 'i_u', 'i_d'], ['dead_zone', 'inner_momentum', 'scale', 'weight_decay'])
    """
    outer, inner = NAMED[name]
    need: list[str] = []
    may: list[str] = []
    for level, rule in (("inner", INNER[inner]), ("outer", OUTER[outer])):
        need += [PUBLIC_NAMES[level].get(key, key) for key in rule.required]
        may += [PUBLIC_NAMES[level].get(key, key) for key in rule.defaults if key not in FIXED_KEYS[level]]
    need += REQUIRED.get(name, ())
    return need, sorted({*may} - {*need} | ({"send_preconditioner"} if name == "adam2" else set()))


def noises() -> None:
    """Print the noises of the synthetic tasks."""
    print_table("noises", ["name", "what it is"], [[name, MEANINGS[name]] for name in NOISES])


def runs(folder: Path) -> int:
    """Print the runs in a folder with the rounds that they finished."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"Invalid folder: there is no {folder}. Give the folder of your runs: tailopt list runs FOLDER."
        )
    rows, unreadable = read_each(find_runs(folder), _run_row)
    print_table(f"runs in {folder}", ["run", "task", "algorithm", "rounds", "of", "metric", "final"], rows)
    print_unreadable(unreadable)
    print(f"\nread {len(rows)} run{'s'[: len(rows) != 1]}, wrote nothing; `tailopt compare {folder}` compares them")
    return 0


def _run_row(path: Path) -> list[Any]:
    """A run's row of the table: rounds finished, rounds planned, final metric."""
    run = Run.open(path)
    metric = primary_metric(run)[0]
    curve = read_curve(run, metric)
    final = curve.values[-1] if curve.values else None
    return [curve.name, curve.task, curve.algorithm, len(run.history()), run.config["run"].get("rounds"), metric, final]


def task_settings_of(name: str) -> None:
    """Print what can be set about one task, and how it is run by default."""
    known, defaults = presets_of(name), task(name).defaults
    print(f"{name}: {(class_of(name).__doc__ or '').strip().splitlines()[0]}")
    print(f"presets: {', '.join(known)}; metric: {defaults.metric}, {_direction(defaults.lower_is_better)} is better")
    print(f"by default: {defaults.nodes} nodes, {_length(defaults)}, batches of {defaults.batch_size}\n")
    print(f"settings, with those of the preset {next(iter(known))}")
    print(help_text(task_help(name)))


def algorithm_settings_of(name: str) -> None:
    """Print what one algorithm needs and may be given."""
    print(f"settings of {canonical_name(name)}\n{help_text(algorithm_help(name))}")


SETTINGS: Mapping[str, Callable[[str], None]] = {"tasks": task_settings_of, "algorithms": algorithm_settings_of}
LISTS: Mapping[str, Callable[[], None]] = {"tasks": tasks, "algorithms": algorithms, "noises": noises}
