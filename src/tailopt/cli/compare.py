"""`tailopt compare`: the results of runs, the settings in which they differ, and their metric by round as a figure."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tailopt.algorithms import NAMED
from tailopt.cli.compare_tables import Ended, by_run, check_table_file, over_seeds, write
from tailopt.cli.config_file import CODE
from tailopt.cli.overrides import Overrides
from tailopt.cli.tables import format_cell, print_table
from tailopt.figures.labels import name_line_ends, plain_ticks
from tailopt.figures.style import colours, look, pyplot
from tailopt.records.folder import ENVIRONMENT, Run, is_run
from tailopt.records.identity import RUN
from tailopt.records.run_config import CONFIG
from tailopt.tasks.table import TASKS, task

EXAMPLE = """\
  tailopt run --task syntoken --algorithm avg-biclip --ilr 0.5 --i_u 0.1 --i_d 0.01 --rounds 20 --out runs/biclip
  tailopt run --task syntoken --algorithm avg-sgd --ilr 0.01 --rounds 20 --out runs/sgd
  tailopt compare runs/biclip runs/sgd --figure runs/compare.png"""
# What reading a damaged run folder can raise.
READ_ERRORS = (ValueError, TypeError, KeyError, OSError, RuntimeError)
Source = TypeVar("Source", bound=Hashable)
Content = TypeVar("Content")


@dataclass(frozen=True)
class RunCurve:
    """What `compare` needs of a run: its metric by round, and its settings by name."""

    name: str
    task: str
    algorithm: str
    rounds: Sequence[int]
    values: Sequence[float]
    settings: Mapping[str, Any]

    def best(self, lower: bool) -> tuple[float, int] | None:
        """The best finite value with its round; of several equal values the earliest."""
        finite = [(value, t) for value, t in zip(self.values, self.rounds, strict=True) if math.isfinite(value)]
        return min(finite, key=lambda pair: pair[0] if lower else -pair[0], default=None)

    def ended(self, lower: bool) -> Ended:
        """How the run ended."""
        value, at = self.best(lower) or (None, None)
        rounds, final = (self.rounds[-1], self.values[-1]) if self.rounds else (0, None)
        return Ended(self.name, self.algorithm, rounds, final, value, at, self.settings)


def add(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "compare",
        help="a table of several runs, and a figure of their metric by round",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="tailopt compare FOLDER [FOLDER ...] [--metric NAME] [--figure FILE.png] [--table FILE.csv]",
        description="Print the final and the best value of each run, their mean and spread over seeds, and the\n"
        "settings in which the runs differ. --figure draws the metric by round. A folder of runs means all in it.",
        epilog=f"example:\n{EXAMPLE}",
    )
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="run folders, or folders that contain run folders")
    parser.add_argument("--metric", metavar="NAME", help="by default the main metric of the first run's task")
    parser.add_argument("--figure", metavar="FILE.png", help="draw the metric by round (png, pdf or svg)")
    parser.add_argument(
        "--table", metavar="FILE.csv", help="write the table, with the settings that differ (csv or html)"
    )
    parser.set_defaults(command=command, options=None)


def command(arguments: argparse.Namespace, overrides: Overrides) -> int:
    """Print the tables and draw the figure."""
    if arguments.table is not None:
        check_table_file(arguments.table)
    paths = [path for folder in arguments.folders for path in find_runs(folder)]
    if not paths:
        raise FileNotFoundError(
            f"There is no run in {', '.join(arguments.folders)}. Make one: tailopt run --out FOLDER."
        )
    runs, unreadable = read_each(paths, Run.open)
    if not runs:
        raise next(iter(unreadable.values()))
    metric = arguments.metric or primary_metric(runs[0])[0]
    lower = lower_is_better(runs[0], metric)
    curves, failed = read_each(runs, lambda run: read_curve(run, metric))
    unreadable |= {run.path: error for run, error in failed.items()}
    if not curves:
        raise next(iter(failed.values()))
    ends, differing = [curve.ended(lower) for curve in curves], differences(curves)
    runs_table = by_run(ends, metric)
    print_table(f"{metric}, {'lower' if lower else 'higher'} is better", runs_table.header, runs_table.rows)
    seeds_table = over_seeds(ends, metric, differing)
    if seeds_table is not None:
        print()
        print_table(seeds_table.title, seeds_table.header, seeds_table.rows)
    if differing:
        print()
        print_table(
            "settings that differ",
            ["run", *differing],
            [[curve.name, *(curve.settings.get(key) for key in differing)] for curve in curves],
        )
    print_unreadable(unreadable)
    if len({curve.task for curve in curves}) > 1:
        print("\nThese runs are of different tasks: their metrics cannot be compared.")
    print()
    if arguments.table is not None:
        tables = [by_run(ends, metric, differing), *([] if seeds_table is None else [seeds_table])]
        write(Path(arguments.table), tables)
        print(f"wrote {arguments.table}: the table, with the settings that differ")
    if arguments.figure is not None:
        draw(Path(arguments.figure), curves, metric)
        print(f"wrote {arguments.figure}: {metric} by round")
    if arguments.figure is None and arguments.table is None:
        print(f"wrote nothing; --figure FILE.png draws {metric} by round, --table FILE.csv or FILE.html has the table")
    return 0


def find_runs(folder: str | Path) -> list[Path]:
    """The folder itself if it is a run folder, else all run folders below it, sorted by name."""
    path = Path(folder)
    if is_run(path) or not path.is_dir():
        return [path]  # `Run.open` raises with the reason where it is none
    # A config.toml of another program has neither of these files next to it.
    markers = (ENVIRONMENT, RUN)
    return sorted(file.parent for file in path.rglob(CONFIG) if any((file.parent / name).is_file() for name in markers))


def read_each(
    sources: Sequence[Source], read: Callable[[Source], Content]
) -> tuple[list[Content], dict[Source, Exception]]:
    """Read every source; returns the contents, and the errors of the damaged ones: a damaged run hides no other run."""
    contents: list[Content] = []
    errors: dict[Source, Exception] = {}
    for source in sources:
        try:
            contents.append(read(source))
        except READ_ERRORS as error:
            errors[source] = error
    return contents, errors


def print_unreadable(errors: Mapping[Path, Exception]) -> None:
    """Print a table of the runs that could not be read, with the problem of each in a few words."""
    if errors:
        print()
        print_table(
            "cannot be read", ["run", "problem"], [[str(path), first_sentence(error)] for path, error in errors.items()]
        )


def first_sentence(error: Exception) -> str:
    """The first sentence of an error, cut to the length of a line.

    Examples:
        >>> first_sentence(ValueError("config.toml names no algorithm. Write one."))
        'config.toml names no algorithm'
    """
    first = (" ".join(str(error).split()) or type(error).__name__).split(". ")[0].rstrip(".")
    return first if len(first) <= 120 else f"{first[:117]}..."


def primary_metric(run: Run) -> tuple[str, bool]:
    """The main metric of a run's task and whether lower is better; the loss for a run without a task.

    A task of one's own is not loaded for it: its code may have changed, or may be somebody else's.
    """
    described = run.config.get("task")
    of_task: Any = described if isinstance(described, dict) else {}  # a program may `describe` its task by a word
    name, source = of_task.get("name"), of_task.get(CODE, {})
    if name in TASKS:
        defaults = task(name).defaults
        return defaults.metric, defaults.lower_is_better
    return source.get("metric", "loss"), source.get("lower_is_better", True)


def lower_is_better(run: Run, metric: str) -> bool:
    """Whether lower is better: the task states it for its main metric; for others the name decides."""
    primary, lower = primary_metric(run)
    return lower if metric == primary else any(text in metric for text in ("loss", "error", "perplexity"))


def read_curve(run: Run, metric: str) -> RunCurve:
    """Read a run's metric by round; rounds without the metric are left out."""
    method = run.config.get("algorithm")
    algorithm = method.get("name") if isinstance(method, Mapping) else None
    if method is None or not isinstance(algorithm, str):
        raise ValueError(f"{CONFIG} names no algorithm.")
    points = []
    known = {"loss"}
    for row in run.history():
        metrics = {"loss": row["loss"], **row["metrics"]}
        known |= metrics.keys()
        if metric in metrics:
            points.append((row["round"], float(metrics[metric])))
    if run.history() and not points:
        raise ValueError(
            f"Invalid metric: {run.path} has no {metric!r}. It has {', '.join(sorted(known))}: --metric loss."
        )
    task_of_run = run.config.get("task", {})
    settings = {**task_of_run, **run.config.get("run", {}), **method}
    settings |= {f"schedules.{key}": entry for key, entry in run.config.get("schedules", {}).items()}
    for name in ("name", "numbers", CODE):
        settings.pop(name, None)
    settings.pop("rounds", None)  # the first table has the number of finished rounds
    return RunCurve(
        str(run.path),
        task_of_run.get("name", "-"),
        algorithm,
        [t for t, _ in points],
        [value for _, value in points],
        {"task": task_of_run.get("name"), "algorithm": algorithm, **settings},
    )


def differences(curves: Sequence[RunCurve]) -> list[str]:
    """The settings that differ between runs, including settings that only some runs have."""
    keys = dict.fromkeys(key for curve in curves for key in curve.settings)
    return [key for key in keys if len({format_cell(curve.settings.get(key)) for curve in curves}) > 1]


def draw(file: Path, curves: Sequence[RunCurve], metric: str) -> None:
    """Draw the metric by round, one line per run."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    for curve, style in zip(curves, line_styles(curves), strict=True):
        axis.plot(curve.rounds, curve.values, linewidth=1.8, **style)
    finite = [value for curve in curves for value in curve.values if math.isfinite(value)]
    axis.set(xlabel="round", ylabel=metric)
    if finite and min(finite) > 0:
        axis.set_yscale("log")
        plain_ticks(axis.yaxis)
    axis.grid(alpha=0.25, which="both", linewidth=0.5)
    name_line_ends([axis])
    figure.suptitle(", ".join(sorted({curve.task for curve in curves})), fontsize=11)
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(file, dpi=130)
    except ValueError as error:
        raise ValueError(f"Invalid figure: {file} ({error}). Name it .png, .pdf or .svg.") from None
    finally:
        plt.close(figure)


def line_styles(curves: Sequence[RunCurve]) -> list[dict[str, Any]]:
    """How each run is drawn: in a colour of its own, with the dashes of its algorithm's outer rule."""
    return [
        {
            "color": colour,
            "linestyle": look(curve.algorithm)["linestyle"] if curve.algorithm in NAMED else "-",
            "label": f"{curve.name} ({curve.algorithm})",
        }
        for curve, colour in zip(curves, colours(len(curves)), strict=True)
    ]
