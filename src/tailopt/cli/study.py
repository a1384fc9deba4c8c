"""`tailopt study`: run a study of the paper, or go on with one."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tailopt.arguments import did_you_mean
from tailopt.cli.overrides import Overrides
from tailopt.cli.setting_values import parse_value
from tailopt.studies import (
    arena,
    baselines,
    centralised,
    convex,
    curves,
    drops,
    failures,
    federated,
    glue,
    gradients,
    nested,
    noise,
    overhead,
    pretraining,
    rates,
    translation,
)
from tailopt.studies.study import Study, StudyOptions

EXAMPLE = """\
  tailopt study failures --quick --out studies/failures"""
STUDIES: Mapping[str, Study] = {
    "arena": arena,
    "baselines": baselines,
    "centralised": centralised,
    "convex": convex,
    "drops": drops,
    "failures": failures,
    "glue": glue,
    "curves": curves,
    "federated": federated,
    "gradients": gradients,
    "nested": nested,
    "noise": noise,
    "overhead": overhead,
    "pretraining": pretraining,
    "rates": rates,
    "translation": translation,
}
# option -> its help; a study takes those that its `OPTIONS` names
OPTIONS: Mapping[str, str] = {
    "task": "one of its tasks, or several with commas, such as MRPC",
    "preset": "paper, or small: what two cores can do in minutes; of drops: small, or full on a GPU; of arena: small, "
    "or a size on a GPU",
    "model": "a folder or public name of the model, instead of the preset's",
    "tokenizer": "a folder or public name of the tokenizer, for a model that starts from scratch",
    "data": "a folder or file of the data, instead of the public ones",
    "algorithms": "names with commas, instead of the study's",
    "nodes": "how many nodes, instead of the study's",
    "seeds": "how many seeds are reported",
    "budget": "how many settings are tried for each algorithm",
    "batch": "how many settings train side by side, instead of as many as the memory holds",
    "settings": "tune (the default), paper, or the results.json of an earlier study",
    "device": "cpu or cuda; by default a GPU where there is one",
    "precision": "bf16 trains with autocast; fp32 (the default) does not",
    "minutes": "end before it would take longer; the same command goes on from what was recorded",
}


def add(commands: Any) -> None:
    """Declare the command."""
    names = "\n".join(f"  {name:<13} {study.SUMMARY}" for name, study in STUDIES.items())
    parser = commands.add_parser(
        "study",
        help="run a study: tables, figures and claims into a folder",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="tailopt study NAME [--out FOLDER] [--quick] [OPTIONS]",
        description=f"Run a study. What the folder already holds is not run again.\n\n{names}",
        epilog=f"example:\n{EXAMPLE}",
    )
    parser.add_argument("name", metavar="NAME", help=", ".join(STUDIES))
    parser.add_argument("--out", metavar="FOLDER", help="the folder of its tables and figures; by default studies/NAME")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="seconds instead of minutes: shows that the study works; its figures mean nothing",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")
    for option, text in OPTIONS.items():
        parser.add_argument(f"--{option}", metavar=option.upper(), help=text)
    parser.set_defaults(command=command, options=None)


def command(arguments: argparse.Namespace, overrides: Overrides) -> int:
    """Run the study, print its table, and list what it wrote."""
    name = arguments.name
    if name not in STUDIES:
        raise ValueError(f"Unknown study: {name!r}{did_you_mean(name, STUDIES)} There are: {', '.join(STUDIES)}.")
    study = STUDIES[name]
    folder = Path(arguments.out or f"studies/{name}")
    options = options_of(study, arguments)
    try:
        out = study.run(folder, options)
    except KeyboardInterrupt:
        kept = f"{folder} has what was finished" if folder.is_dir() else "nothing was written"
        print(f"Stopped; {kept}. The same command goes on from there.", file=sys.stderr)
        return 130
    print((out / "table.md").read_text(encoding="utf-8"))
    print(f"wrote {out}: " + ", ".join(sorted(path.name for path in out.iterdir() if path.is_file())))
    return 0


def options_of(study: Study, arguments: argparse.Namespace) -> StudyOptions:
    """The options on the command line, numbers as numbers; raises for one that the study does not take."""
    texts = {name: getattr(arguments, name) for name in OPTIONS if getattr(arguments, name) is not None}
    for name in texts:
        if name not in study.OPTIONS:
            takes = ", ".join(f"--{option}" for option in study.OPTIONS) or "no options of its own"
            raise ValueError(f"Unknown option: --{name}; the study {arguments.name} has {takes}.")
    counts = ("nodes", "seeds", "budget", "batch", "minutes")
    options: dict[str, Any] = {name: parse_value(text) if name in counts else text for name, text in texts.items()}
    command = command_text(arguments.name, {**texts, **({"quick": None} if arguments.quick else {})})
    return StudyOptions(quick=arguments.quick, progress=not arguments.quiet, command=command, **options)


def command_text(name: str, options: Mapping[str, str | None]) -> str:
    """The command that runs a study, for its report: of a path only the last part, which says what it is.

    Examples:
        >>> command_text("glue", {"task": "MRPC", "seeds": "3", "quick": None})
        'tailopt study glue --task MRPC --seeds 3 --quick'
    """
    words = ["tailopt", "study", name]
    for option, text in options.items():
        words.append(f"--{option}")
        if text is not None:
            words.append(Path(text).name if Path(text).is_absolute() else text)
    return shlex.join(words)
