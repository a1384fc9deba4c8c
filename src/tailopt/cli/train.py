"""`tailopt train`: a task and an algorithm on real nodes, one process each, under torchrun."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tailopt import faults
from tailopt.cli.config_file import read, sections
from tailopt.cli.configuration import Configuration, resolve
from tailopt.cli.overrides import Overrides, apply_overrides
from tailopt.cli.run import OPTIONS as RUN_OPTIONS
from tailopt.cli.run import add_log_option, files_written
from tailopt.cli.tables import format_cell
from tailopt.distributed import last_words
from tailopt.distributed.nested_optimizer import NestedOptimizer
from tailopt.distributed.rendezvous import connect
from tailopt.distributed.training import TrainingPlan, train
from tailopt.loggers.named import named_loggers
from tailopt.loggers.protocol import Logger
from tailopt.records.checkpoint_folders import describe_last_checkpoint, latest
from tailopt.rounds.drops import Drops

OPTIONS = {**RUN_OPTIONS, "--resume": False, "--timeout": True}
EXAMPLE = """\
  torchrun --nproc-per-node 3 -m tailopt train --task syntoken --algorithm avg-biclip --ilr 0.5 --i_u 0.1 --i_d 0.01 \\
    --rounds 10 --out runs/real"""


def add(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "train",
        help="the same on real nodes, under torchrun",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="torchrun ... -m tailopt train [FILE.toml] [--SETTING VALUE ...] --out FOLDER [--resume]",
        description="Train a task on real nodes: every process is one. Settings are those of `tailopt run`; the run\n"
        "folder must be one that all nodes share. `tailopt verify FOLDER` replays it on one machine.",
        epilog=f"example:\n{EXAMPLE}",
    )
    parser.add_argument("file", nargs="?", metavar="FILE.toml", help="a configuration; also that of a run folder")
    parser.add_argument("--out", metavar="FOLDER", required=True, help="the run folder, shared by all nodes")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint, if there is one")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="without a sign of life")
    add_log_option(parser)
    parser.add_argument("--quiet", action="store_true", help="no line a round")
    parser.set_defaults(command=command, options=OPTIONS)


def command(arguments: argparse.Namespace, overrides: Overrides) -> int:
    """Join the others, and train."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise ValueError(
            "There are no other nodes: start it as `torchrun --nproc-per-node 3 -m tailopt train ...`, "
            "or use `tailopt run` for a simulation."
        )
    nodes = int(os.environ["WORLD_SIZE"])
    tables = read(arguments.file) if arguments.file is not None else sections({})
    if not any(key in ("nodes", "run.nodes") for key, _ in overrides):
        overrides = [*overrides, ("run.nodes", str(nodes))]
    chosen = resolve(apply_overrides(tables, overrides, OPTIONS))
    loggers = named_loggers(arguments.log)
    connect(arguments.timeout)
    if not arguments.resume:
        last_words.resume_arguments[:] = ["--resume"]
    rank = int(os.environ["RANK"])
    if rank and not arguments.quiet:  # else it looks as if nothing happened there, perhaps on a terminal of its own
        print(f"node {rank} of {nodes} is connected and trains; node 0 prints the rounds", file=sys.stderr, flush=True)
    try:
        trained(chosen, Path(arguments.out), loggers, arguments.resume, arguments.timeout, arguments.quiet)
    except KeyboardInterrupt:
        # the terminal and torchrun both tell every process, so a second one may come; node 0 speaks for all
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if rank == 0:
            last_words.say(_stop_message(Path(arguments.out)))
        return 130
    finally:
        dist.destroy_process_group()
    if rank == 0:
        print(files_written(Path(arguments.out)))
    elif not arguments.quiet:
        print(f"node {rank} of {nodes} is done", file=sys.stderr, flush=True)
    return 0


def _stop_message(folder: Path) -> str:
    """What is left of a run that was stopped, and the command that goes on with it."""
    return last_words.block("Stopped.", describe_last_checkpoint(folder, latest(folder)))


def trained(
    chosen: Configuration, folder: Path, loggers: Sequence[Logger], resume: bool, timeout: float, quiet: bool
) -> None:
    """Train by a configuration, as this process's node."""
    run, problem = chosen.run, chosen.build_task()
    if run.local_steps is None or run.precision is not None:
        raise ValueError("Real nodes take local_steps and full precision; use `tailopt run`, or set these.")
    assert run.nodes is not None and run.rounds is not None
    data = problem.nodes(run.seed, run.nodes)
    weights = run.weights if isinstance(run.weights, list) else None
    if run.weights == "samples":
        weights = [float(len(samples)) for samples in data]

    def print_row(row: dict[str, Any]) -> None:
        if not quiet:
            cells = {"loss": row["loss"], **row["metrics"]}
            ends = ", ".join(f"{name} {format_cell(cell)}" for name, cell in cells.items())
            print(f"round {row['round']}/{run.rounds}  {ends}", file=sys.stderr, flush=True)

    def lose(optimizer: NestedOptimizer) -> None:
        if run.drops:
            losing, node = Drops(int(run.nodes or 0), run.drops, run.seed), dist.get_rank()
            lost = {t for t in range(1, int(run.rounds or 0) + 1) if node in losing.draw(t)}
            faults.inject(optimizer, faults.Drop(lost))

    plan = TrainingPlan(
        loss=problem.loss,
        data=data,
        rounds=run.rounds,
        local_steps=run.local_steps,
        batch_size=run.batch_size,
        weights=weights,
        seed=run.seed,
        evaluate=lambda model: problem.evaluate(model, run.seed),
        evaluate_every=run.evaluate_every,
    )
    train(
        problem.model(run.seed),
        chosen.build_algorithm(),
        plan,
        run=folder,
        on_row=print_row,
        loggers=loggers,
        prepare=lose,
        resume=resume,
        timeout=timeout,
        schedules=chosen.build_schedules() or None,
        checkpoint_every=run.checkpoint_every,
        keep=run.keep,
        describe=chosen.record(),
        statistics=run.statistics,
        **run.round_options(),
    )
