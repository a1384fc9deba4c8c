"""`tailopt COMMAND ...`: one file a command; here is what they share.

Exit codes: 0, or 2 for what the user can mend (one line that says how), or 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shlex
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from tailopt.cli import compare, list, resume, run, study, train, verify
from tailopt.cli.configuration import Pairs, RunSettings, split

COMMANDS = {
    "run": run,
    "resume": resume,
    "compare": compare,
    "list": list,
    "study": study,
    "train": train,
    "verify": verify,
}
EXAMPLE = run.EXAMPLE.splitlines()[0]
# What a user can mend. Anything else is a mistake of ours and shows its traceback.
EXPECTED = (ValueError, TypeError, OSError, ImportError, RuntimeError)


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are errors: the caller prints them like all others."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage."""
        raise ValueError(f"{message[:1].upper()}{message[1:]}. See: {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code comes back.

    Args:
        argv: the words behind `tailopt`; by default those of this process.
    """
    words = [*(sys.argv[1:] if argv is None else argv)]
    traced = "--traceback" in words
    words = [given for given in words if given != "--traceback"]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("always", category=UserWarning, module=r"tailopt\.")
            warnings.showwarning = _say
            return _called(words)
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # as by `tailopt list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except EXPECTED as error:
        if traced:
            raise
        name = f"tailopt {words[0]}" if words and words[0] in COMMANDS else "tailopt"
        message = " ".join(str(error).split()) or type(error).__name__
        # these two take the library's keywords as options; others speak of Python where they mean it
        print(f"{name}: {in_shell(message) if name.endswith(('run', 'train')) else message}", file=sys.stderr)
        return 2


def in_shell(message: str) -> str:
    """A message of the library with its keywords as options.

    Only true switches and quoted words are replaced: a folder may well be called ilr=0.1.

    Examples:
        >>> in_shell('Pass resume=True to go on with it, or use aggregate="mean".')
        'Pass --resume to go on with it, or use --aggregate mean.'
    """
    options = {field.name: field.name for field in dataclasses.fields(RunSettings)}
    options |= {"resume": "resume", "pretrained": "model"}

    def option(found: re.Match[str]) -> str:
        word, text = found["word"], found["text"]
        if word not in options:
            return found[0]
        value = "" if text is None else f" {shlex.quote(text)}"
        return f"--{options[word]}{value}"

    return re.sub(r'(?<![\w/.-])(?P<word>[a-z_]+)=(?:True\b|"(?P<text>[^"]*)")', option, message)


def _called(words: Sequence[str]) -> int:
    parser = _parser()
    pairs: Pairs = []
    rest = [*words]
    if words and words[0] in ("run", "train"):
        rest, pairs = split(words[1:], train.OPTIONS if words[0] == "train" else run.OPTIONS)
        rest = [words[0], *rest]
    arguments = parser.parse_args(rest)
    if not hasattr(arguments, "command"):
        parser.print_help()
        return 0
    code: int = arguments.command(arguments, pairs)
    sys.stdout.flush()  # so that a pipe that is closed is found here
    return code


def _parser() -> Parser:
    parser = Parser(
        prog="tailopt",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="tailopt COMMAND ... | tailopt --version",
        description="Nested training under heavy-tailed noise: run, resume and compare simulations.",
        epilog="Every command has its own --help. --traceback, anywhere, shows where an error arose.\n\n"
        f"example:\n{EXAMPLE}",
    )
    version = sys.modules["tailopt"].__version__  # the root imports all rooms, so no room imports it
    parser.add_argument("--version", action="version", version=f"tailopt {version}")
    commands = parser.add_subparsers(metavar="COMMAND", prog="tailopt")
    for command in COMMANDS.values():
        command.add(commands)
    return parser


def _say(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)
