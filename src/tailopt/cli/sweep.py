"""`tailopt sweep`: try many settings of an algorithm on a task, and print the best ones."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tailopt.algorithms import canonical_name
from tailopt.arguments import whole_number
from tailopt.cli.config_file import Tables, read_besides, sections
from tailopt.cli.configuration import Configuration, resolve_task_and_run
from tailopt.cli.overrides import Overrides, apply_overrides
from tailopt.cli.run import LOG_OPTIONS, add_log_option
from tailopt.cli.run_settings import RunSettings
from tailopt.cli.setting_values import parse_value
from tailopt.cli.tables import print_table
from tailopt.figures.style import check_figure_file
from tailopt.loggers.named import named_loggers
from tailopt.sweeps.executors import EXECUTORS
from tailopt.sweeps.result import SweepResult
from tailopt.sweeps.sweep import SAMPLERS, sweep
from tailopt.sweeps.trials import SWEEP, TRIALS

# Options of the command itself, with whether a value follows; every other --name is a setting.
OPTIONS = {
    **dict.fromkeys(("--space", "--budget", "--seeds", "--report-seeds", "--report_seeds", "--halving"), True),
    **dict.fromkeys(("--executor", "--workers", "--batch", "--run", "--figure", "--top", "--sampler"), True),
    **LOG_OPTIONS,
    **dict.fromkeys(("--resume", "--quiet", "--help"), False),
}
EXAMPLE = """\
  tailopt sweep --task syntoken --preset small --algorithm bi2clip --budget 32 --halving 3 --rounds 9 --run runs/sweep
  tailopt sweep --task syntoken --preset small --algorithm avg-sgd --space.ilr 0.001,0.01,0.1 --rounds 9"""


def add(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "sweep",
        help="try many settings of an algorithm on a task, and print the best ones",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="tailopt sweep [FILE.toml] [--SETTING VALUE ...] [--space.SETTING VALUES ...] [--budget N] [...]",
        description="Train many settings side by side, choose the best ones by the task's metric on the tuning seeds,\n"
        "and report them on fresh seeds. By default the points are those of the paper's grid.",
        epilog='the space: --space.ilr 0.1,0.3,1 (a grid), --space.ilr "{low = 1e-3, high = 1}" (Sobol points in the\n'
        "logarithm), in a file [space] and ilr = [0.1, 0.3, 1]. Other settings are those of `tailopt run`; a setting\n"
        f"of the algorithm is then the same for all points.\n\nexample:\n{EXAMPLE}",
    )
    parser.add_argument("file", nargs="?", metavar="FILE.toml", help="a configuration; [space] has the points")
    parser.add_argument("--space", metavar="NAME", help="paper (the default) or paper-printed")
    parser.add_argument("--budget", metavar="N", help="how many points, by default 64; all for the whole grid")
    parser.add_argument("--sampler", choices=SAMPLERS, default="sobol", help="what draws the points of ranges")
    parser.add_argument("--seeds", metavar="N", help="tuning seeds: how many, or 0,1,2; by default 2")
    parser.add_argument(
        "--report-seeds", "--report_seeds", metavar="N", help="fresh seeds for the best point; by default 5"
    )
    parser.add_argument("--halving", metavar="FACTOR", help="end the worse part early: true, or a number such as 3")
    parser.add_argument("--executor", choices=EXECUTORS, default="local", help="where points are trained")
    parser.add_argument("--workers", metavar="N", help="of the executors processes and ray")
    parser.add_argument("--batch", metavar="N", help="how many points at a time; by default what the memory holds")
    parser.add_argument("--run", metavar="FOLDER", help="record every trial there; needed to resume")
    parser.add_argument("--resume", action="store_true", help="go on with the sweep in that folder")
    parser.add_argument("--figure", metavar="FILE.png", help="draw the budget curve and the metric over every setting")
    parser.add_argument("--top", metavar="N", default="5", help="how many points the table shows")
    add_log_option(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.set_defaults(command=command, options=OPTIONS)


def command(arguments: argparse.Namespace, overrides: Overrides) -> int:
    """Run the sweep and print its result."""
    tables, space = read_tables(arguments.file, overrides)
    if space and arguments.space is not None:
        raise ValueError(f"Invalid space: {arguments.space} and {', '.join(space)} exclude each other. Give one.")
    fixed = {key: value for key, value in tables["algorithm"].items() if key != "name"}
    name = tables["algorithm"].get("name")
    if not isinstance(name, str):
        raise ValueError("Invalid algorithm: none is named. Give one: --algorithm bi2clip (`tailopt list algorithms`).")
    task_table, run = resolve_task_and_run(tables)
    top = whole_number("top", parse_value(arguments.top), low=1)
    if arguments.resume and arguments.run is None:
        raise ValueError("Invalid resume: no folder is named. Give it: --run FOLDER.")
    if arguments.log and arguments.run is None:
        raise ValueError(f"Invalid log: {arguments.log!r} needs a folder to write to. Give it: --run FOLDER.")
    loggers = named_loggers(arguments.log)
    if arguments.figure is not None:
        check_figure_file(arguments.figure)  # before hours of training, not after them
    configuration = Configuration(task_table, {"name": canonical_name(name)}, run, dict(tables["schedules"]))
    try:
        result = sweep(
            configuration.build_task(),
            name,
            space=space or arguments.space or "paper",
            sampler=arguments.sampler,
            settings=fixed,
            schedules=configuration.build_schedules() or None,
            executor=arguments.executor,
            run=arguments.run,
            resume=arguments.resume,
            loggers=loggers,
            progress=not arguments.quiet,
            **_given(arguments),
            **_run_arguments(run),
        )
    except FileExistsError as error:
        if arguments.resume or not (Path(arguments.run) / SWEEP).exists():
            raise
        raise FileExistsError(
            f"Invalid run: {arguments.run} has a sweep in it already. Add --resume to go on with it, or give another "
            "--run."
        ) from error
    except KeyboardInterrupt:
        print(_stop_message(arguments.run), file=sys.stderr)
        return 130
    print_result(result, top)
    written = [] if result.run is None else [f"wrote {result.run}: {SWEEP}, {TRIALS}, table.md"]
    if arguments.figure is not None:
        result.plot(arguments.figure)
        written.append(f"wrote {arguments.figure}: the budget curve, and {result.metric} over every setting")
    print("\n" + ("\n".join(written) or "wrote nothing; --run FOLDER records every trial"))
    return 0


def print_result(result: SweepResult, top: int) -> None:
    """Print the summary and the table of the best points."""
    print(result.summary() + "\n")
    ranking = result.ranking[:top]
    names = result.varied_settings
    rows = [[k, *(t.settings.get(name) for name in names), t.value, t.spread] for k, t in enumerate(ranking, 1)]
    print_table("best points, on the tuning seeds", ["", *names, result.metric, "deviation"], rows)


def read_tables(file: str | None, overrides: Overrides) -> tuple[Tables, dict[str, Any]]:
    """Return the sections of a file with the settings of the command line laid over them, and the space."""
    tables, space = (sections({}), {}) if file is None else read_besides(file, "space")
    if not isinstance(space, Mapping):
        raise ValueError(f"Invalid space: got {space!r}; need a table. Write [space] and its settings below.")
    space = dict(space)
    rest = []
    for option, text in overrides:
        if option.startswith("space."):
            if text is None:
                raise ValueError(f"--{option} needs a value. Write --{option} 0.1,0.3.")
            space[option.removeprefix("space.")] = parse_value(text)
        else:
            rest.append((option, text))
    return apply_overrides(tables, rest, OPTIONS), space


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `sweep` that the command line has; the library checks them."""
    found = {name: getattr(arguments, name) for name in ("seeds", "report_seeds", "halving", "workers", "batch")}
    values = {name: parse_value(text) for name, text in found.items() if text is not None}
    if arguments.budget is not None:
        number = None if arguments.budget == "all" else parse_value(arguments.budget)
        values["budget"] = number if number is None else whole_number("budget", number, low=1, hint='Or give "all".')
    return values


def _run_arguments(run: RunSettings) -> dict[str, Any]:
    """Return the settings of [run] as arguments of `sweep`; refuse what it does not take, unless it is the default."""
    usual, taken = RunSettings(), inspect.signature(sweep).parameters
    names = [field.name for field in dataclasses.fields(run)]
    for name in sorted(set(names) - set(taken)):
        if getattr(run, name) != getattr(usual, name):
            raise ValueError(f"Invalid run.{name}: a sweep has no use for it. Leave it out.")
    settings = {name: getattr(run, name) for name in names if name in taken}
    if run.participants is not None:
        settings["participation"] = None
    settings["proximal"] = run.proximal or None  # folders of sweeps without it do not name it
    return settings


def _stop_message(run: str | None) -> str:
    if run is None:
        return "Stopped; nothing was written. --run FOLDER records every trial, and --resume goes on with them."
    return (
        f"Stopped. Continue with the same command and --resume; {shlex.quote(run)} has every trial that was finished."
    )
