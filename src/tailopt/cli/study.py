"""`tailopt study`: run a study of the paper, or go on with one."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tailopt.cli.configuration import Pairs
from tailopt.studies import convex, failures, rates

EXAMPLE = """\
  tailopt study failures --quick --out studies/failures"""
# name -> what runs it, and what it is with the time that it takes on two cores
STUDIES: Mapping[str, tuple[Callable[..., Path], str]] = {
    "convex": (convex.run, "linear regression under noise of every tail, all algorithms, tuned alike; an hour"),
    "failures": (failures.run, "nodes that drop out: harmless, or a biased limit; minutes"),
    "rates": (rates.run, "the decay that the theorems promise, measured; ten minutes"),
}


def add(commands: Any) -> None:
    """Declare the command."""
    names = "\n".join(f"  {name:<10} {text}" for name, (_, text) in STUDIES.items())
    parser = commands.add_parser(
        "study",
        help="run a study: tables, figures and claims into a folder",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="tailopt study NAME [--out FOLDER] [--quick]",
        description=f"Run a study. What is in the folder already is not run again.\n\n{names}",
        epilog=f"example:\n{EXAMPLE}",
    )
    parser.add_argument("name", choices=[*STUDIES], metavar="NAME", help=", ".join(STUDIES))
    parser.add_argument("--out", metavar="FOLDER", help="where it writes; by default studies/NAME")
    parser.add_argument(
        "--quick", action="store_true", help="seconds instead of minutes: whether it works, not what it says"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.set_defaults(command=command, options=None)


def command(arguments: argparse.Namespace, pairs: Pairs) -> int:
    """Run it, and say where things are."""
    run, _ = STUDIES[arguments.name]
    out = run(Path(arguments.out or f"studies/{arguments.name}"), quick=arguments.quick, progress=not arguments.quiet)
    print((out / "table.md").read_text(encoding="utf-8"))
    print(f"wrote {out}: " + ", ".join(sorted(path.name for path in out.iterdir() if path.is_file())))
    return 0
