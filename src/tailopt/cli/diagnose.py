"""`tailopt diagnose`: whether the gradient noise of a task is heavy-tailed, layer by layer, and what would help."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from tailopt.arguments import whole_number
from tailopt.cli.config_file import read, sections
from tailopt.cli.configuration import Configuration, resolve_task_and_run
from tailopt.cli.overrides import Overrides, apply_overrides
from tailopt.cli.setting_values import parse_value
from tailopt.cli.tables import print_table
from tailopt.diagnose import DEFAULT_BATCHES, FEWEST_BATCHES, diagnose
from tailopt.diagnosis import Diagnosis, Noise
from tailopt.engines.snapshots import load_weights
from tailopt.figures.diagnosis import draw
from tailopt.figures.style import check_figure_file
from tailopt.records.folder import Run, is_run
from tailopt.records.run_config import CONFIG
from tailopt.splits.loaders import NodeData, node_data
from tailopt.tails import TailIndex

# Options of the command itself, with whether a value follows; every other --name is a setting.
OPTIONS = {"--batches": True, "--coordinates": True, "--figure": True, "--quiet": False, "--help": False}
EXAMPLE = """\
  tailopt diagnose --task syntoken --noise student-t --df 1.5
  tailopt run --task syntoken --algorithm avg-biclip --ilr 0.5 --i_u 0.1 --i_d 0.01 --rounds 10 --out runs/first
  tailopt diagnose runs/first --batches 64"""


def add(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "diagnose",
        help="tell whether the gradient noise of a task is heavy-tailed",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="tailopt diagnose [FOLDER | FILE.toml] [--SETTING VALUE ...] [--batches N] [--figure FILE.png]",
        description="Take gradients of a task's model at fixed weights, and say whether their noise is heavy-tailed\n"
        "or only differs in scale from coordinate to coordinate, and what would help. The weights are those of a run\n"
        "folder's last checkpoint, or the initial ones.",
        epilog="settings are those of `tailopt run` for the task, and --nodes, --batch_size, --seed and --device.\n"
        "Batches come from the nodes in turn, so that what distinguishes nodes counts as noise; --nodes 1 puts all\n"
        f"data into one.\n\nexample:\n{EXAMPLE}",
    )
    parser.add_argument("file", nargs="?", metavar="FOLDER | FILE.toml", help="a run folder, or a configuration")
    parser.add_argument("--batches", metavar="N", help=f"how many, at least {FEWEST_BATCHES}; by default 256")
    parser.add_argument("--coordinates", metavar="N", help="how many are looked at, at most 2^20")
    parser.add_argument("--figure", metavar="FILE.png", help="draw tails, scales and layers")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.set_defaults(command=command, options=OPTIONS)


def command(arguments: argparse.Namespace, overrides: Overrides) -> int:
    """Diagnose, and print the table and the advice."""
    folder = Path(arguments.file) if arguments.file is not None and is_run(arguments.file) else None
    file = folder / CONFIG if folder is not None else arguments.file
    tables = apply_overrides(read(file) if file is not None else sections({}), overrides, OPTIONS)
    task_table, run = resolve_task_and_run(tables)
    options = {name: parse_value(text) for name in ("batches", "coordinates") if (text := getattr(arguments, name))}
    count = whole_number("batches", options.get("batches", DEFAULT_BATCHES), low=FEWEST_BATCHES)
    if arguments.figure is not None:
        check_figure_file(arguments.figure)
    problem = Configuration(task_table, {}, run, {}).build_task()
    assert run.nodes is not None  # the task has a default
    model = problem.model(run.seed)
    weights = "the initial weights"
    if folder is not None:
        weights = f"the weights after round {load_weights(Run.open(folder), model)} of {folder}"
    nodes = node_data(problem.nodes(run.seed, run.nodes), run.seed, run.batch_size)
    torch.manual_seed(run.seed)  # of dropout
    found = diagnose(
        model.to(run.device or "cpu"),
        problem.loss,
        in_turn(nodes, count),
        count=count,
        coordinates=options.get("coordinates"),
        seed=run.seed,
        progress=not arguments.quiet,
    )
    name = f"{problem.name}, {found.batches} batches of {run.batch_size} at {weights}"
    print_diagnosis(found, name)
    passes = count / sum(node.batches_per_pass for node in nodes)
    if passes > 1:
        print(
            f"\nThe batches are {passes:.1f} passes over the data: outliers come back, new data may have larger ones."
        )
    if arguments.figure is not None:
        draw(found, name, Path(arguments.figure))
    print(f"\nwrote {arguments.figure}" if arguments.figure else "\nwrote nothing; --figure FILE.png draws it")
    return 0


def in_turn(nodes: list[NodeData], count: int) -> Iterator[Any]:
    """Batches of the nodes, one of each, again and again."""
    return chain.from_iterable(zip(*(node.batches(0, -(-count // len(nodes))) for node in nodes), strict=True))


def print_diagnosis(found: Diagnosis, name: str) -> None:
    """Print a row for every tensor and for all of them, and the advice."""
    header = ["tensor", "elements", "index", "90 % interval", "kurtosis", "scales", "left out", "clipped", "lifted"]
    rows = [[label, *_cells(noise)] for label, noise in [*found.layers.items(), ("all", found.overall)]]
    print_table(name, header, rows)
    print(f"\n{found.advice}")


def _cells(noise: Noise) -> list[Any]:
    left_out = 1 - noise.standardised / noise.sampled
    return [
        noise.elements,
        _shown(noise.tails.index),
        _interval(noise.tails),
        _shown(noise.kurtosis),
        _shown(noise.scale_ratio),
        f"{left_out:.0%}",
        f"{noise.clipped:.0%}",
        f"{noise.lifted:.0%}",
    ]


def _shown(value: float) -> str:
    return f"{value:.3g}" if value == value else "-"


def _interval(tails: TailIndex) -> str:
    return f"{tails.low:.2f} to {tails.high:.2f}" if tails.index == tails.index else "-"
