"""`tailopt run`: simulate a task with an algorithm and write a run folder."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tailopt.cli.config_file import read, sections
from tailopt.cli.configuration import Configuration, resolve
from tailopt.cli.overrides import Overrides, apply_overrides
from tailopt.cli.schedule_syntax import SCHEDULES
from tailopt.cli.setting_help import algorithm_help, help_text, run_help
from tailopt.cli.setting_names import section_keys
from tailopt.cli.tables import format_cell
from tailopt.cli.threads import threads_for
from tailopt.engines.replay import DIGESTS
from tailopt.engines.simulate import simulate
from tailopt.loggers.named import named_loggers
from tailopt.loggers.protocol import Logger
from tailopt.records.folder import ENVIRONMENT, HISTORY, LOG, TIMES, Run, is_run
from tailopt.records.identity import RUN
from tailopt.records.run_config import CONFIG

# The second name is for torchrun, which takes --log for an abbreviation of an option of its own.
LOG_OPTIONS = {"--log": True, "--loggers": True}
# Options of the command itself, with whether a value follows; every other --name is a setting.
OPTIONS = {"--out": True, **LOG_OPTIONS, "--quiet": False, "--help": False}
EXAMPLE = """\
  tailopt run --task syntoken --algorithm avg-biclip --ilr 0.5 --i_u 0.1 --i_d 0.01 --rounds 20 --out runs/first
  tailopt run runs/first/config.toml --noise none --rounds 10 --out runs/quiet"""


def add(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "run",
        help="simulate a task with an algorithm and write a run folder",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="tailopt run [FILE.toml] [--SETTING VALUE ...] [--out FOLDER] [--quiet]",
        description="Train a task's model on simulated nodes with an algorithm, and write configuration, history and\n"
        "checkpoints into a run folder. Settings come from a TOML file, then from the command line.",
        epilog=f"settings, in a file under [section], here as --SETTING VALUE or --SECTION.SETTING VALUE:\n\n"
        f"{_settings_help()}\n\nschedules: --schedules.ilr.power -0.5 (or {', '.join(list(SCHEDULES)[1:])}); "
        "in a file ilr = {power = -0.5};\n--theory 1.5 uses the schedules of the algorithm's theorem. "
        "--settings paper:QNLI starts from the paper's best settings.\n"
        f"`tailopt list tasks glue/mrpc` shows the settings of a task,\n"
        f"`tailopt list algorithms bi2clip` which ones an algorithm needs.\n\nexample:\n{EXAMPLE}",
    )
    parser.add_argument(
        "file", nargs="?", metavar="FILE.toml", help="a configuration, or the config.toml of a run folder"
    )
    parser.add_argument("--out", metavar="FOLDER", help="the run folder; by default runs/TASK-ALGORITHM")
    add_log_option(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.set_defaults(command=command, options=OPTIONS)


def add_log_option(parser: argparse.ArgumentParser) -> None:
    """Declare the option that names loggers."""
    text = "tell loggers of the run: tensorboard, wandb, or both with a comma; they write into the run folder"
    parser.add_argument(*LOG_OPTIONS, dest="log", metavar="NAMES", default="", help=text)


def command(arguments: argparse.Namespace, overrides: Overrides) -> int:
    """Resolve the configuration and run it."""
    tables = read(arguments.file) if arguments.file is not None else sections({})
    configuration = resolve(apply_overrides(tables, overrides, OPTIONS))
    loggers = named_loggers(arguments.log)
    folder = _choose_folder(arguments.out, configuration)
    return simulate_into(folder, configuration, loggers, resume=False, quiet=arguments.quiet)


def simulate_into(
    folder: Path, configuration: Configuration, loggers: Sequence[Logger], resume: bool, quiet: bool
) -> int:
    """Simulate a configuration into a run folder and print the result; returns the exit code."""
    task, seed = configuration.build_task(), configuration.run.seed
    assert configuration.run.nodes is not None  # `resolve` sets it
    try:
        data = task.nodes(seed, configuration.run.nodes)
        # nodes = 0 means one node per source of the data; the run folder records the number.
        run = dataclasses.replace(configuration.run, nodes=len(data))
        configuration = dataclasses.replace(configuration, run=run)
        model = task.model(seed)
        recorded = Run.open(folder).environment.get("threads") if resume else None
        with threads_for(model, quiet, recorded):
            simulate(
                model,
                configuration.build_algorithm(),
                loss=task.loss,
                data=data,
                evaluate=lambda model: task.evaluate(model, seed),
                schedules=configuration.build_schedules() or None,
                run=folder,
                resume=resume,
                loggers=loggers,
                progress=not quiet,
                describe=configuration.record(),
                **_simulate_arguments(configuration),
            )
    except FileExistsError:
        raise FileExistsError(f"Invalid out: {folder} holds other things than a run. Give another --out.") from None
    except KeyboardInterrupt:
        print(_stop_message(folder, configuration.run.rounds), file=sys.stderr)
        return 130
    print(_summary(folder))
    return 0


def _simulate_arguments(configuration: Configuration) -> Mapping[str, Any]:
    run = configuration.run
    settings = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
    return {**settings, "weights": None if run.weights == "equal" else run.weights}


def _choose_folder(out: str | None, configuration: Configuration) -> Path:
    """The folder of --out if it has no run yet; without --out, runs/TASK-ALGORITHM or the next free number."""
    if out is not None:
        folder = Path(out)
        if is_run(folder):
            raise FileExistsError(
                f"Invalid out: {out} has a run in it already. "
                f"Continue it with `tailopt resume {shlex.quote(out)}`, or give another --out."
            )
        return folder
    task = configuration.task["name"].rpartition(":")[2]  # of my_task.py:MyTask the class
    stem = f"{task}-{configuration.algorithm['name']}".replace("/", "-")
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    return next(folder for folder in (Path("runs") / name for name in names) if not folder.exists())


def _stop_message(folder: Path, rounds: int | None) -> str:
    if not is_run(folder):
        return "Stopped before the first round; nothing was written."
    run = Run.open(folder)
    more_rounds = "" if run.config["run"]["rounds"] == rounds else f" --rounds {rounds}"
    done = len(run.history())
    return (
        f"Stopped after round {done} of {rounds}. Continue with: tailopt resume {shlex.quote(str(folder))}{more_rounds}"
    )


def _summary(folder: Path) -> str:
    """The final metrics of a run and the files that it wrote."""
    rows = Run.open(folder).history()
    last = rows[-1]
    metrics = {"loss": last["loss"], **last["metrics"]}
    lines = [f"round {last['round']}: " + ", ".join(f"{name} {format_cell(value)}" for name, value in metrics.items())]
    excluded = sum(len(row["excluded"]) for row in rows)
    if excluded:
        lines.append(f"{excluded} displacements were excluded; history.jsonl names them with the reasons")
    lines.append(files_written(folder))
    return "\n".join(lines)


def files_written(folder: Path) -> str:
    """A line that names what a run wrote into its folder, in the order in which a user would open it."""
    names = (CONFIG, RUN, ENVIRONMENT, HISTORY, TIMES, DIGESTS, LOG, "checkpoints/", "tensorboard/", "wandb/")
    return f"wrote {folder}: {', '.join(name for name in names if (folder / name).exists())}"


def _settings_help() -> str:
    """The settings by section, for the help text; those of a task depend on the task, so here are only their names."""
    names = textwrap.fill(
        " ".join(sorted(section_keys("task"))), 108, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
    )
    return (
        f"[task]  of all tasks together; `tailopt list tasks NAME` has the meaning of each\n{names}\n\n"
        f"[algorithm]  name, settings (paper:QNLI), and\n{help_text(algorithm_help())}\n\n"
        f"[run]\n{help_text(run_help())}"
    )
