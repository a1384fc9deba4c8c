"""`tailopt resume`: go on with a run that was stopped, or further than it was meant to go."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from tailopt.cli.configuration import Pairs, resolve, sections
from tailopt.cli.run import go
from tailopt.records.folder import Run, accept_config, is_run
from tailopt.records.identity import CONFIG, settings, told

EXAMPLE = """\
  tailopt run --task syntoken --algorithm avg-biclip --ilr 0.5 --i_u 0.1 --i_d 0.01 --rounds 10 --out runs/first
  tailopt resume runs/first --rounds 20"""


def add(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "resume",
        help="go on with a run from its last checkpoint",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="tailopt resume FOLDER [--rounds N] [--accept-config] [--quiet]",
        description="Go on with a run from its last checkpoint, by the configuration in its folder. The history\n"
        "is to the bit that of a run that was never stopped, also after Ctrl-C or a kill.",
        epilog=f"example:\n{EXAMPLE}",
    )
    parser.add_argument("folder", metavar="FOLDER", help="the run folder")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds in all; by default as the run was asked for")
    parser.add_argument(
        "--accept-config",
        action="store_true",
        help="go on by a config.toml that was changed by hand, from the last checkpoint on; without this it is refused",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.set_defaults(command=command, options=None)


def command(arguments: argparse.Namespace, pairs: Pairs) -> int:
    """Read the folder's configuration and go on."""
    if arguments.accept_config:
        _accept(Path(arguments.folder))
    run = Run.open(arguments.folder)
    if "task" not in run.config:
        raise ValueError(
            f"{run.path} names no task: it was run from Python. Go on there, by simulate(..., run=..., resume=True)."
        )
    chosen = resolve(sections(run.config))
    done = len(run.history())
    rounds = arguments.rounds if arguments.rounds is not None else chosen.run.rounds
    assert rounds is not None  # resolved
    if rounds < done:
        raise ValueError(
            f"Invalid rounds: got {rounds}; {run.path} has {done} already. Give more: --rounds {2 * done}."
        )
    further = dataclasses.replace(chosen, run=dataclasses.replace(chosen.run, rounds=rounds))
    return go(further, run.path, resume=True, quiet=arguments.quiet)


def _accept(folder: Path) -> None:
    """Take a changed config.toml over; what is no configuration is refused before. One from Python is not looked at."""
    if is_run(folder):
        changed = (folder / CONFIG).read_text(encoding="utf-8")
        if "task" in (found := settings(folder / CONFIG, changed)):
            resolve(sections(found))
    difference = accept_config(folder)
    if difference is not None:
        print(f"accepted: {told(difference)}", file=sys.stderr)
