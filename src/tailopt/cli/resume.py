"""`tailopt resume`: continue a run that was stopped, or extend a finished run by more rounds."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from tailopt.cli.config_file import CODE, sections
from tailopt.cli.configuration import resolve
from tailopt.cli.overrides import Overrides, apply_overrides
from tailopt.cli.run import add_log_option, simulate_into
from tailopt.loggers.named import named_loggers
from tailopt.records import disk
from tailopt.records.folder import Run, accept_config, is_run
from tailopt.records.run_config import CONFIG, describe_difference, parse_config, to_toml

EXAMPLE = """\
  tailopt run --task syntoken --algorithm avg-biclip --ilr 0.5 --i_u 0.1 --i_d 0.01 --rounds 10 --out runs/first
  tailopt resume runs/first --rounds 20"""


def add(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "resume",
        help="continue a run from its last checkpoint",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="tailopt resume FOLDER [--rounds N] [--accept-config] [--task FILE.py:CLASS] [--log NAMES] [--quiet]",
        description="Continue a run from its last checkpoint with the configuration in its folder. The history\n"
        "equals that of an uninterrupted run bit for bit, also after Ctrl-C or a kill.",
        epilog=f"example:\n{EXAMPLE}",
    )
    parser.add_argument("folder", metavar="FOLDER", help="the run folder")
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="total number of rounds; by default as the run was started with"
    )
    parser.add_argument(
        "--accept-config",
        action="store_true",
        help="continue with a config.toml that was edited by hand; without this option an edited file is an error",
    )
    parser.add_argument(
        "--task",
        metavar="FILE.py:CLASS",
        help="go on with a task of your own whose file has changed or moved; its code is run",
    )
    add_log_option(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.set_defaults(command=command, options=None)


def command(arguments: argparse.Namespace, overrides: Overrides) -> int:
    """Read the folder's configuration and continue the run."""
    if arguments.accept_config:
        _accept(Path(arguments.folder))
    run = Run.open(arguments.folder)
    if "task" not in run.config:
        raise ValueError(
            f"{run.path} names no task: it was run from Python. Continue it there: simulate(..., run=..., resume=True)."
        )
    if arguments.task is not None:
        _accept_code(run, arguments.task)
        run = Run.open(arguments.folder)
    configuration = resolve(apply_overrides(sections(run.config, of_a_run=True), _naming(arguments.task)))
    done = len(run.history())
    rounds = arguments.rounds if arguments.rounds is not None else configuration.run.rounds
    assert rounds is not None  # `resolve` sets it
    if rounds < done:
        raise ValueError(
            f"Invalid rounds: got {rounds}; {run.path} has {done} already. Give more: --rounds {2 * done}."
        )
    extended = dataclasses.replace(configuration, run=dataclasses.replace(configuration.run, rounds=rounds))
    return simulate_into(run.path, extended, named_loggers(arguments.log), resume=True, quiet=arguments.quiet)


def _accept_code(run: Run, named: str) -> None:
    """Record that the run goes on with the code of a task as it is now; all else about the task must be as it was."""
    before = run.config["task"]
    file = run.path / CONFIG
    if CODE not in before:
        raise ValueError(
            f"Invalid task: {run.path} is a run of {before.get('name')!r}; --task serves only to go on with a task of "
            "your own whose file has changed or moved. Leave it out."
        )
    configuration = resolve(apply_overrides(sections(run.config, of_a_run=True), _naming(named)))
    as_it_is = parse_config(file, file.read_text(encoding="utf-8"))  # in the layout of the version that wrote it
    edited = {**as_it_is, "task": {**before, **{key: configuration.task[key] for key in ("name", CODE)}}}
    if edited != as_it_is:
        disk.replace(file, to_toml(edited).encode())
        _accept(run.path)


def _naming(task: str | None) -> list[tuple[str, str | None]]:
    """What --task says, as an override."""
    return [] if task is None else [("task", task)]


def _accept(folder: Path) -> None:
    """Accept an edited config.toml. It must be a valid configuration, unless the run was started from Python."""
    if is_run(folder):
        edited = parse_config(folder / CONFIG, (folder / CONFIG).read_text(encoding="utf-8"))
        if "task" in edited:
            resolve(sections(edited, of_a_run=True))
    difference = accept_config(folder)
    if difference is not None:
        print(f"accepted: {describe_difference(difference)}", file=sys.stderr)
