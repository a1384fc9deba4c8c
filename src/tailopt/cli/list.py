"""`tailopt list`: the tasks, algorithms and noises that there are, or the runs in a folder."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tailopt.algorithms import ALGORITHMS, FIXED, PUBLIC, REQUIRED
from tailopt.cli.compare import course, decisive, each, found, show_unreadable
from tailopt.cli.configuration import Pairs, task_settings
from tailopt.cli.tables import show, word
from tailopt.records.folder import Run
from tailopt.rules.table import INNER, OUTER
from tailopt.tasks.synthetic import NOISES
from tailopt.tasks.table import PRESETS, TASKS, task

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
        usage="tailopt list [tasks | algorithms | noises | runs [FOLDER]]",
        description="What there is to run, with its settings, or what has been run.",
        epilog=f"example:\n{EXAMPLE}",
    )
    parser.add_argument("what", nargs="?", choices=[*LISTS, "runs"], help="by default all but runs")
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help="of runs; by default runs")
    parser.set_defaults(command=command, options=None)


def command(arguments: argparse.Namespace, pairs: Pairs) -> int:
    """Print what is asked for."""
    if arguments.folder is not None and arguments.what != "runs":
        raise ValueError(f"Invalid folder: {arguments.folder!r} belongs to `tailopt list runs FOLDER`. Leave it out.")
    if arguments.what == "runs":
        return runs(Path(arguments.folder or "runs"))
    for number, (name, shown) in enumerate(LISTS.items()):
        if arguments.what in (None, name):
            if number and arguments.what is None:
                print()
            shown()
    print("\nwrote nothing; `tailopt run --help` says how to use them")
    return 0


def tasks() -> None:
    """The tasks with the settings of their preset "paper"."""
    rows = []
    for name in TASKS:
        usual = task(name).defaults
        own = ", ".join(f"{key} = {word(held)}" for key, held in task_settings(name).items())
        length = f"{usual.rounds} rounds of " + (
            f"{usual.local_steps} steps" if usual.local_steps is not None else f"{usual.local_epochs} epochs"
        )
        rows.append([name, ", ".join(PRESETS[name]), usual.metric, f"{usual.nodes} nodes, {length}", own])
    show("tasks", ["name", "presets", "metric", "by default", "settings"], rows)


def algorithms() -> None:
    """The algorithms with what they need and may be given."""
    rows = []
    for name in ALGORITHMS:
        need, may = settings(name)
        rows.append([name, *ALGORITHMS[name], " ".join(need), " ".join(may)])
    show("algorithms", ["name", "outer", "inner", "needs", "may have"], rows)
    print(f"Every other pair OUTER-INNER is one too: {', '.join(OUTER)} - {', '.join(INNER)}.")
    print("All may have inner_state (reset, keep).")


def settings(name: str) -> tuple[list[str], list[str]]:
    """The settings that an algorithm of the table needs, and those that it may be given.

    Examples:
        >>> settings("avg-biclip")
        (['ilr', 'i_u', 'i_d'], ['dead_zone', 'weight_decay'])
    """
    outer, inner = ALGORITHMS[name]
    need: list[str] = []
    may: list[str] = []
    for level, rule in (("inner", INNER[inner]), ("outer", OUTER[outer])):
        need += [PUBLIC[level].get(key, key) for key in rule.settings]
        may += [PUBLIC[level].get(key, key) for key in rule.options if key not in FIXED[level]]
    need += REQUIRED.get(name, ())
    return need, sorted({*may} - {*need} | ({"send_preconditioner"} if name == "adam2" else set()))


def noises() -> None:
    """The noises of the synthetic tasks."""
    show("noises", ["name", "what it is"], [[name, MEANINGS[name]] for name in NOISES])


def runs(folder: Path) -> int:
    """The runs in a folder: how far they came."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"Invalid folder: there is no {folder}. Give that of your runs: tailopt list runs FOLDER."
        )
    rows, unreadable = each(found(folder), _ended)
    show(f"runs in {folder}", ["run", "task", "algorithm", "rounds", "of", "metric", "final"], rows)
    show_unreadable(unreadable)
    print(f"\nread {len(rows)} run{'s'[: len(rows) != 1]}, wrote nothing; `tailopt compare {folder}` compares them")
    return 0


def _ended(path: Path) -> list[Any]:
    """A run's row: how far it came."""
    run = Run.open(path)
    metric = decisive(run)[0]
    one = course(run, metric)
    end = one.values[-1] if one.values else None
    return [one.name, one.task, one.algorithm, len(run.history()), run.config.get("rounds"), metric, end]


LISTS: Mapping[str, Callable[[], None]] = {"tasks": tasks, "algorithms": algorithms, "noises": noises}
