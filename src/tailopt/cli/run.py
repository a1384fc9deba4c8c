"""`tailopt run`: a task and an algorithm, simulated into a run folder."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tailopt.cli.configuration import (
    SCHEDULES,
    SECTIONS,
    Configuration,
    Pairs,
    override,
    plain_keys,
    read,
    resolve,
    sections,
)
from tailopt.cli.tables import word
from tailopt.distributed.training import DIGESTS
from tailopt.engines.simulate import simulate
from tailopt.records.folder import ENVIRONMENT, HISTORY, LOG, TIMES, Run, is_run
from tailopt.records.identity import CONFIG, RUN

# Options of the command itself, with whether a value follows; every other --word is a setting.
OPTIONS = {"--out": True, "--quiet": False, "--help": False}
EXAMPLE = """\
  tailopt run --task syntoken --algorithm avg-biclip --ilr 0.5 --i_u 0.1 --i_d 0.01 --rounds 20 --out runs/first
  tailopt run runs/first/config.toml --noise none --rounds 10 --out runs/quiet"""


def add(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "run",
        help="simulate a task by an algorithm into a run folder",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="tailopt run [FILE.toml] [--SETTING VALUE ...] [--out FOLDER] [--quiet]",
        description="Train a task's model on its nodes by an algorithm, and keep configuration, history and\n"
        "checkpoints in a run folder. Settings come from a TOML file, then from the command line.",
        epilog=f"settings, in a file under [section], here as --SETTING VALUE or --SECTION.SETTING VALUE:\n"
        f"{_listed()}\n\nschedules: --schedules.ilr.power -0.5 (or {', '.join(list(SCHEDULES)[1:])}); "
        "in a file ilr = {power = -0.5};\n--theory 1.5 takes those of the algorithm's theorem. "
        "--settings paper:QNLI begins with the paper's best ones.\n"
        f"`tailopt list` says which settings a task and an algorithm have.\n\nexample:\n{EXAMPLE}",
    )
    parser.add_argument("file", nargs="?", metavar="FILE.toml", help="a configuration; also that of a run folder")
    parser.add_argument("--out", metavar="FOLDER", help="the run folder; by default runs/TASK-ALGORITHM")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.set_defaults(command=command, options=OPTIONS)


def command(arguments: argparse.Namespace, pairs: Pairs) -> int:
    """Resolve the configuration and run it."""
    tables = read(arguments.file) if arguments.file is not None else sections({})
    chosen = resolve(override(tables, pairs))
    folder = _folder(arguments.out, chosen)
    return go(chosen, folder, resume=False, quiet=arguments.quiet)


def go(chosen: Configuration, folder: Path, resume: bool, quiet: bool) -> int:
    """Simulate into a folder, and say what is there then."""
    problem, seed = chosen.problem(), chosen.run.seed
    assert chosen.run.nodes is not None  # resolved
    try:
        data = problem.nodes(seed, chosen.run.nodes)
        # 0 stands for as many as the data have sources; from here on it is a number
        chosen = dataclasses.replace(chosen, run=dataclasses.replace(chosen.run, nodes=len(data)))
        simulate(
            problem.model(seed),
            chosen.method(),
            loss=problem.loss,
            data=data,
            evaluate=lambda model: problem.evaluate(model, seed),
            schedules=chosen.made_schedules() or None,
            run=folder,
            resume=resume,
            progress=not quiet,
            describe=chosen.record(),
            **_arguments(chosen),
        )
    except FileExistsError:
        raise FileExistsError(f"Invalid out: {folder} holds other things than a run. Give another --out.") from None
    except KeyboardInterrupt:
        print(_stopped(folder, chosen.run.rounds), file=sys.stderr)
        return 130
    print(_summary(folder))
    return 0


def _arguments(chosen: Configuration) -> Mapping[str, Any]:
    found = {field.name: getattr(chosen.run, field.name) for field in dataclasses.fields(chosen.run)}
    return {**found, "weights": None if chosen.run.weights == "equal" else chosen.run.weights}


def _folder(given: str | None, chosen: Configuration) -> Path:
    """The folder asked for, if it is free; else the first free one of a name that says what is in it."""
    if given is not None:
        folder = Path(given)
        if is_run(folder):
            raise FileExistsError(
                f"Invalid out: {given} has a run in it already. "
                f"Go on with it by `tailopt resume {shlex.quote(given)}`, or give another --out."
            )
        return folder
    stem = f"{chosen.task['name']}-{chosen.algorithm['name']}".replace("/", "-")
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    return next(folder for folder in (Path("runs") / name for name in names) if not folder.exists())


def _stopped(folder: Path, rounds: int | None) -> str:
    if not is_run(folder):
        return "Stopped before the first round; nothing was written."
    run = Run.open(folder)
    further = "" if run.config["rounds"] == rounds else f" --rounds {rounds}"
    done = len(run.history())
    return f"Stopped after round {done} of {rounds}. Go on with: tailopt resume {shlex.quote(str(folder))}{further}"


def _summary(folder: Path) -> str:
    """What came of a run, and where it stands."""
    rows = Run.open(folder).history()
    last = rows[-1]
    ends = ", ".join(f"{name} {word(held)}" for name, held in {"loss": last["loss"], **last["metrics"]}.items())
    left_out = sum(len(row["excluded"]) for row in rows)
    lines = [f"round {last['round']}: {ends}"]
    if left_out:
        lines.append(f"{left_out} displacements were left out; history.jsonl says which and why")
    lines.append(written(folder))
    return "\n".join(lines)


def written(folder: Path) -> str:
    """What a run left in its folder, in the order in which one would open it."""
    usual = (CONFIG, RUN, ENVIRONMENT, HISTORY, TIMES, DIGESTS, LOG, "checkpoints/")
    return f"wrote {folder}: {', '.join(name for name in usual if (folder / name).exists())}"


def _listed() -> str:
    """The settings by section, for the help text."""
    lines = []
    for section in SECTIONS[:-1]:
        words, line = sorted(plain_keys(section)), f"  [{section}]".ljust(14)
        for name in words:
            if len(line) + len(name) > 108:
                lines.append(line.rstrip())
                line = " " * 14
            line += f"{name} "
        lines.append(line.rstrip())
    return "\n".join(lines)
