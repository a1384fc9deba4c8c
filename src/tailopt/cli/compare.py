"""`tailopt compare`: where runs ended, in what they differ, and their metric by round as a figure."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tailopt.algorithms import ALGORITHMS
from tailopt.cli.configuration import Pairs, recorded
from tailopt.cli.tables import show, word
from tailopt.figures.style import look, pyplot
from tailopt.records.folder import ENVIRONMENT, Run, is_run
from tailopt.records.identity import CONFIG, RUN
from tailopt.tasks.table import TASKS, task

EXAMPLE = """\
  tailopt run --task syntoken --algorithm avg-biclip --ilr 0.5 --i_u 0.1 --i_d 0.01 --rounds 20 --out runs/biclip
  tailopt run --task syntoken --algorithm avg-sgd --ilr 0.01 --rounds 20 --out runs/sgd
  tailopt compare runs/biclip runs/sgd --figure runs/compare.png"""
MARKS = "osD^v<>pP*XhH8d"
UNREADABLE = (ValueError, TypeError, KeyError, OSError, RuntimeError)  # what a damaged run folder can lead to
Thing = TypeVar("Thing", bound=Hashable)
Made = TypeVar("Made")


@dataclass(frozen=True)
class Course:
    """What of a run is compared: its metric by round, and its settings by their plain names."""

    name: str
    task: str
    algorithm: str
    rounds: Sequence[int]
    values: Sequence[float]
    settings: Mapping[str, Any]

    def best(self, lower: bool) -> tuple[float, int] | None:
        """The best finite value with its round, the earliest where several are equal."""
        finite = [(value, t) for value, t in zip(self.values, self.rounds, strict=True) if math.isfinite(value)]
        return min(finite, key=lambda pair: pair[0] if lower else -pair[0], default=None)


def add(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "compare",
        help="a table of several runs, and a figure of their metric by round",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="tailopt compare FOLDER [FOLDER ...] [--metric NAME] [--figure FILE.png]",
        description="Where runs ended and what their best round was, the settings in which they differ, and on\n"
        "demand a figure. A folder of run folders stands for the runs in it.",
        epilog=f"example:\n{EXAMPLE}",
    )
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="run folders, or folders that hold some")
    parser.add_argument("--metric", metavar="NAME", help="by default what decides in the first run's task")
    parser.add_argument("--figure", metavar="FILE.png", help="draw the metric by round (png, pdf or svg)")
    parser.set_defaults(command=command, options=None)


def command(arguments: argparse.Namespace, pairs: Pairs) -> int:
    """Print the tables and draw the figure."""
    paths = [path for folder in arguments.folders for path in found(folder)]
    if not paths:
        raise FileNotFoundError(
            f"There is no run in {', '.join(arguments.folders)}. Make one: tailopt run --out FOLDER."
        )
    runs, unreadable = each(paths, Run.open)
    if not runs:
        raise next(iter(unreadable.values()))
    metric = arguments.metric or decisive(runs[0])[0]
    lower = lower_is_better(runs[0], metric)
    courses, more = each(runs, lambda run: course(run, metric))
    unreadable |= {run.path: error for run, error in more.items()}
    if not courses:
        raise next(iter(more.values()))
    rows = []
    for one in courses:
        best = one.best(lower)
        ends = [one.rounds[-1], one.values[-1]] if one.rounds else [0, None]
        rows.append([one.name, one.algorithm, *ends, *(best or (None, None))])
    header = ["run", "algorithm", "rounds", f"final {metric}", f"best {metric}", "in round"]
    show(f"{metric}, {'lower' if lower else 'higher'} is better", header, rows)
    differing = differences(courses)
    if differing:
        print()
        show(
            "settings that differ",
            ["run", *differing],
            [[one.name, *(one.settings.get(key) for key in differing)] for one in courses],
        )
    show_unreadable(unreadable)
    if len({one.task for one in courses}) > 1:
        print("\nThese runs are of different tasks: their metrics do not compare.")
    print()
    if arguments.figure is None:
        print(f"wrote nothing; --figure FILE.png draws {metric} by round")
    else:
        draw(Path(arguments.figure), courses, metric)
        print(f"wrote {arguments.figure}: {metric} by round")
    return 0


def found(folder: str | Path) -> list[Path]:
    """The run in a folder, or the runs below it, by name."""
    path = Path(folder)
    if is_run(path) or not path.is_dir():
        return [path]  # `Run.open` says what is wrong where there is none
    ours = (ENVIRONMENT, RUN)  # beside a config.toml of something else there is neither
    return sorted(file.parent for file in path.rglob(CONFIG) if any((file.parent / name).is_file() for name in ours))


def each(things: Sequence[Thing], read: Callable[[Thing], Made]) -> tuple[list[Made], dict[Thing, Exception]]:
    """What is read of every thing, and the errors of those that cannot be: one damaged run hides no other."""
    made: list[Made] = []
    errors: dict[Thing, Exception] = {}
    for thing in things:
        try:
            made.append(read(thing))
        except UNREADABLE as error:
            errors[thing] = error
    return made, errors


def show_unreadable(errors: Mapping[Path, Exception]) -> None:
    """A table of the runs that could not be read, with the problem of each in a few words."""
    if errors:
        print()
        show("cannot be read", ["run", "problem"], [[str(path), brief(error)] for path, error in errors.items()])


def brief(error: Exception) -> str:
    """The first sentence of an error, and no more of it than a line has room for.

    Examples:
        >>> brief(ValueError("config.toml names no algorithm. Write one."))
        'config.toml names no algorithm'
    """
    first = (" ".join(str(error).split()) or type(error).__name__).split(". ")[0].rstrip(".")
    return first if len(first) <= 120 else f"{first[:117]}..."


def decisive(run: Run) -> tuple[str, bool]:
    """The metric that decides in a run's task, and whether less of it is better; the loss where there is no task."""
    name = run.config.get("task", {}).get("name")
    if name in TASKS:
        usual = task(name).defaults
        return usual.metric, usual.lower_is_better
    return "loss", True


def lower_is_better(run: Run, metric: str) -> bool:
    """Of the task's own metric it is known; losses and errors are, and other metrics are taken not to be."""
    own, lower = decisive(run)
    return lower if metric == own else any(text in metric for text in ("loss", "error", "perplexity"))


def course(run: Run, metric: str) -> Course:
    """A run's metric by round; rounds without it are left out."""
    if not isinstance(run.config.get("algorithm"), str):
        raise ValueError(f"{CONFIG} names no algorithm.")
    points = []
    known = {"loss"}
    for row in run.history():
        held = {"loss": row["loss"], **row["metrics"]}
        known |= held.keys()
        if metric in held:
            points.append((row["round"], float(held[metric])))
    if run.history() and not points:
        raise ValueError(
            f"Invalid metric: {run.path} has no {metric!r}. It has {', '.join(sorted(known))}: --metric loss."
        )
    tables = recorded(run.config)
    settings = {**tables["task"], **tables["run"], **tables["algorithm"]}
    settings |= {f"schedules.{key}": entry for key, entry in tables["schedules"].items()}
    settings.pop("name", None)
    settings.pop("rounds", None)  # how far it came stands in the other table
    return Course(
        str(run.path),
        tables["task"].get("name", "-"),
        tables["algorithm"]["name"],
        [t for t, _ in points],
        [value for _, value in points],
        {"task": tables["task"].get("name"), "algorithm": tables["algorithm"]["name"], **settings},
    )


def differences(courses: Sequence[Course]) -> list[str]:
    """The settings that are not the same in all runs; one that some do not have is another one."""
    keys = dict.fromkeys(key for one in courses for key in one.settings)
    return [key for key in keys if len({word(one.settings.get(key)) for one in courses}) > 1]


def draw(file: Path, courses: Sequence[Course], metric: str) -> None:
    """The metric by round, a line a run."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    for one, line in zip(courses, lines(courses), strict=True):
        axis.plot(one.rounds, one.values, linewidth=1.8, **line)
    shown = [value for one in courses for value in one.values if math.isfinite(value)]
    axis.set(xlabel="round", ylabel=metric)
    if shown and min(shown) > 0:
        axis.set_yscale("log")
    axis.grid(alpha=0.25, which="both", linewidth=0.5)
    axis.legend(frameon=False, fontsize="small")
    axis.set_title(", ".join(sorted({one.task for one in courses})), fontsize=11)
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(file, dpi=130)
    except ValueError as error:
        raise ValueError(f"Invalid figure: {file} ({error}). Name it .png, .pdf or .svg.") from None
    finally:
        plt.close(figure)


def lines(courses: Sequence[Course]) -> list[dict[str, Any]]:
    """How each run is drawn: as its algorithm is in every figure; further runs of one algorithm have marks."""
    drawn: Counter[str] = Counter()
    found = []
    for one in courses:
        line = look(one.algorithm) if one.algorithm in ALGORITHMS else {"color": "#000000", "linestyle": "-"}
        if before := drawn[one.algorithm]:
            line |= {"marker": MARKS[(before - 1) % len(MARKS)], "markevery": 0.1, "markersize": 4}
        drawn[one.algorithm] += 1
        found.append({**line, "label": f"{one.name} ({one.algorithm})"})
    return found
