"""`tailopt study`: run a study of the paper, or go on with one."""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tailopt.cli.overrides import Overrides
from tailopt.cli.setting_values import parse_value

EXAMPLE = """\
  tailopt study failures --quick --out studies/failures"""
# name -> what it is, with the time that it takes on two cores; each is a module of `tailopt.studies` with a `run`
STUDIES: Mapping[str, str] = {
    "centralised": "BiClip, SGD and Adam on one node, SQuAD and CIFAR-100; half an hour in the preset small",
    "convex": "linear regression under noise of every tail, all algorithms, tuned alike; an hour",
    "drops": "half of the contributions lost, on a small GPT-2 over bytes; ten minutes",
    "failures": "nodes that drop out: harmless, or a biased limit; minutes",
    "glue": "the GLUE table: an encoder over ten nodes; ten minutes a task in the preset small, else days",
    "curves": "convergence on a GLUE task: L2 clipping, adaptivity, BiClip; twenty minutes in the preset small",
    "federated": "language models on Shakespeare's roles and philosophers' works; 3 and 12 minutes in the preset small",
    "gradients": "gradients on MNLI before and after clipping, by round; minutes in the preset small",
    "overhead": "memory, traffic and time of all algorithms, measured and by formula; minutes",
    "pretraining": "DiLoCo and others against data-parallel training; ten minutes in the preset small",
    "rates": "the decay that the theorems promise, measured; ten minutes",
    "translation": "BLEU and METEOR of a T5 over three nodes; half an hour in the preset small",
}
# options of some studies -> how their help reads; a study takes those of its `run`, and of `Asked` where that has it
OPTIONS: Mapping[str, str] = {
    "task": "one of its tasks, or several with commas, such as MRPC",
    "preset": "paper, or small: what two cores can do in minutes; of drops: small, or full on a GPU",
    "model": "a folder or public name of the model, instead of the preset's",
    "tokenizer": "a folder or public name of the tokenizer, for a model that starts from scratch",
    "data": "a folder or file of the data, instead of the public ones",
    "algorithms": "names with commas, instead of the study's",
    "nodes": "how many nodes, instead of the study's",
    "seeds": "how many seeds are reported",
    "budget": "how many settings are tried for each algorithm",
    "settings": "tune (the default), paper, or the results.json of an earlier study",
    "device": "cpu or cuda; by default a GPU where there is one",
}


def add(commands: Any) -> None:
    """Declare the command."""
    names = "\n".join(f"  {name:<13} {text}" for name, text in STUDIES.items())
    parser = commands.add_parser(
        "study",
        help="run a study: tables, figures and claims into a folder",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="tailopt study NAME [--out FOLDER] [--quick] [OPTIONS]",
        description=f"Run a study. What is in the folder already is not run again.\n\n{names}",
        epilog=f"example:\n{EXAMPLE}",
    )
    parser.add_argument("name", choices=[*STUDIES], metavar="NAME", help=", ".join(STUDIES))
    parser.add_argument("--out", metavar="FOLDER", help="where it writes; by default studies/NAME")
    parser.add_argument(
        "--quick", action="store_true", help="seconds instead of minutes: whether it works, not what it says"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")
    for option, text in OPTIONS.items():
        parser.add_argument(f"--{option}", metavar=option.upper(), help=text)
    parser.set_defaults(command=command, options=None)


def command(arguments: argparse.Namespace, overrides: Overrides) -> int:
    """Run it, and say where things are."""
    run: Callable[..., Path] = importlib.import_module(f"tailopt.studies.{arguments.name}").run
    given = _given(arguments, run)
    out = run(
        Path(arguments.out or f"studies/{arguments.name}"),
        quick=arguments.quick,
        progress=not arguments.quiet,
        **given,
    )
    print((out / "table.md").read_text(encoding="utf-8"))
    print(f"wrote {out}: " + ", ".join(sorted(path.name for path in out.iterdir() if path.is_file())))
    return 0


def _given(arguments: argparse.Namespace, run: Callable[..., Path]) -> dict[str, Any]:
    """The options that were given, if the study has them; numbers as numbers."""
    from tailopt.studies.tuned import Asked  # here: the other commands need not load it

    found = {name: getattr(arguments, name) for name in OPTIONS if getattr(arguments, name) is not None}
    parameters = inspect.signature(run).parameters
    shared = Asked.__annotations__ if "asked" in parameters else {}
    known = [name for name in OPTIONS if name in parameters or name in shared]
    for name in found:
        if name not in known:
            has = ", ".join(f"--{other}" for other in known) or "no options of its own"
            raise ValueError(f"Unknown option: --{name}; the study {arguments.name} has {has}.")
    return {name: parse_value(text) if name in ("nodes", "seeds", "budget") else text for name, text in found.items()}
