"""`tailopt verify`: replay a run of real nodes as a simulation, and compare bits round by round."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from tailopt.cli.config_file import sections
from tailopt.cli.configuration import resolve
from tailopt.cli.overrides import Overrides, apply_overrides
from tailopt.engines.replay import replay
from tailopt.records.environment import environment
from tailopt.records.folder import Run

EXAMPLE = """\
  tailopt verify runs/real"""


def add(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "verify",
        help="replay a run of `tailopt train` on this machine and compare digests",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="tailopt verify FOLDER [--task FILE.py:CLASS]",
        description="Simulate a run of `tailopt train` once more and compare a digest of every tensor after every\n"
        "round. The first difference is named. Exit code 1 where there is one.",
        epilog=f"example, after `torchrun --nproc-per-node 3 -m tailopt train ... --out runs/real`:\n{EXAMPLE}",
    )
    parser.add_argument("folder", metavar="FOLDER", help="the run folder")
    parser.add_argument("--task", metavar="FILE.py:CLASS", help="a task of your own whose file has changed or moved")
    parser.set_defaults(command=command, options=None)


def command(arguments: argparse.Namespace, overrides: Overrides) -> int:
    """Replay and compare."""
    run = Run.open(arguments.folder)
    if "task" not in run.config:
        raise ValueError(
            f"{run.path} names no task, so it cannot be replayed. Runs of `tailopt train` name one; a federation does "
            "with `describe`."
        )
    if "privacy" in run.config.get("run", {}):
        raise ValueError(f"{run.path} is a private run, which cannot be replayed: its noise was drawn anew.")
    named = [] if arguments.task is None else [("task", arguments.task)]
    chosen = resolve(apply_overrides(sections(run.config, of_a_run=True), named))
    _say_differences(run)
    torch.set_num_threads(int(run.environment.get("threads", torch.get_num_threads())))
    problem, settings = chosen.build_task(), chosen.run
    assert settings.nodes is not None
    equal, difference = replay(
        Path(arguments.folder),
        problem.model(settings.seed),
        chosen.build_algorithm(),
        loss=problem.loss,
        data=problem.nodes(settings.seed, settings.nodes),
        local_steps=settings.local_steps,
        batch_size=settings.batch_size,
        weights=None if settings.weights == "equal" else settings.weights,
        seed=settings.seed,
        schedules=chosen.build_schedules() or None,
        **settings.round_options(),
    )
    if difference is None:
        print(f"{equal} rounds replayed: every tensor has the recorded bits")
        print("wrote nothing")
        return 0
    print(f"{equal} rounds are equal; the first difference is in {difference}")
    print("wrote nothing")
    return 1


def _say_differences(run: Run) -> None:
    """What makes an exact replay unlikely, said before it starts."""
    now = environment()
    for fact in ("torch", "instruction_set"):
        then = run.environment.get(fact)
        if then is not None and then != now.get(fact):
            print(f"warning: {fact} was {then} and is {now.get(fact)} here; bits may differ", file=sys.stderr)
