"""`tailopt COMMAND ...`: the entry point. Each command has its own file; this one has what they share.

Exit codes: 0; 2 for an error that the user can fix (one line that explains how); 130 after Ctrl-C.
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

from tailopt.arguments import did_you_mean
from tailopt.cli import compare, completion, diagnose, doctor, list, report, resume, run, study, sweep, train, verify
from tailopt.cli.completion import options_of
from tailopt.cli.overrides import Overrides, split_arguments
from tailopt.cli.run_settings import RunSettings

COMMANDS = {
    "run": run,
    "resume": resume,
    "compare": compare,
    "list": list,
    "report": report,
    "study": study,
    "diagnose": diagnose,
    "sweep": sweep,
    "train": train,
    "verify": verify,
    "doctor": doctor,
    "completion": completion,
}
# Commands that take settings of tasks and algorithms, with the options of their own.
OWN_OPTIONS = {"run": run.OPTIONS, "diagnose": diagnose.OPTIONS, "sweep": sweep.OPTIONS, "train": train.OPTIONS}
EXAMPLE = run.EXAMPLE.splitlines()[0]
# Errors that a user can fix. Any other exception is a bug of this library and shows its traceback.
USER_ERRORS = (ValueError, TypeError, OSError, ImportError, RuntimeError)


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises its errors, so that the caller prints them like all others."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage."""
        raise ValueError(f"{message[:1].upper()}{message[1:]}. See: {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        argv: what follows `tailopt`; by default the arguments of this process.
    """
    arguments = [*(sys.argv[1:] if argv is None else argv)]
    show_traceback = "--traceback" in arguments
    arguments = [argument for argument in arguments if argument != "--traceback"]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("always", category=UserWarning, module=r"tailopt\.")
            warnings.showwarning = _print_warning
            return _run_command(arguments)
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # as by `tailopt list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except USER_ERRORS as error:
        if show_traceback:
            raise
        name = f"tailopt {arguments[0]}" if arguments and arguments[0] in COMMANDS else "tailopt"
        message = " ".join(str(error).split()) or type(error).__name__
        # Only these commands take the library's keyword arguments as options.
        print(f"{name}: {in_shell(message) if name.endswith(tuple(OWN_OPTIONS)) else message}", file=sys.stderr)
        return 2


def in_shell(message: str) -> str:
    """Rewrite a message of the library so that its keyword arguments read as options of the command line.

    Only `name=True` and quoted values are replaced: a folder may be called ilr=0.1.

    Examples:
        >>> in_shell('Pass resume=True to go on with it, or use sampling="uniform".')
        'Pass --resume to go on with it, or use --sampling uniform.'
    """
    options = {field.name: field.name for field in dataclasses.fields(RunSettings)}
    options |= {"resume": "resume", "pretrained": "model"}

    def as_option(match: re.Match[str]) -> str:
        name, text = match["name"], match["text"]
        if name not in options:
            return match[0]
        value = "" if text is None else f" {shlex.quote(text)}"
        return f"--{options[name]}{value}"

    return re.sub(r'(?<![\w/.-])(?P<name>[a-z_]+)=(?:True\b|"(?P<text>[^"]*)")', as_option, message)


def _run_command(arguments: Sequence[str]) -> int:
    parser = _parser()
    overrides: Overrides = []
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        known = ", ".join(COMMANDS)
        raise ValueError(f"Unknown command: {arguments[0]!r}{did_you_mean(arguments[0], COMMANDS)} There are: {known}.")
    if arguments and arguments[0] in OWN_OPTIONS:
        name, *rest = arguments
        # argparse cannot declare settings: which ones exist depends on the task and the algorithm.
        own_arguments, overrides = split_arguments(rest, OWN_OPTIONS[name])
        arguments = [name, *own_arguments]
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise ValueError(_unknown_argument(arguments[0], unknown[0], parser))
    if not hasattr(parsed, "command"):
        parser.print_help()
        return 0
    code: int = parsed.command(parsed, overrides)
    sys.stdout.flush()  # raises BrokenPipeError here, and not when the interpreter exits
    return code


def _unknown_argument(command: str, argument: str, parser: Parser) -> str:
    name = argument.partition("=")[0]
    if command not in COMMANDS or not name.startswith("-"):
        return f"Unexpected argument: {argument!r}. See: tailopt {command} --help"
    known = options_of(commands_of(parser)[command])
    return f"Unknown option: {name}{did_you_mean(name, known)} tailopt {command} has {', '.join(known)}."


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of the commands, by name."""
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(commands.choices)


def _parser() -> Parser:
    parser = Parser(
        prog="tailopt",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="tailopt COMMAND ... | tailopt --version",
        description="Nested training under heavy-tailed noise: run, resume and compare simulations.",
        epilog="Every command has its own --help. --traceback, anywhere, shows where an error was raised.\n\n"
        f"example:\n{EXAMPLE}",
    )
    version = sys.modules["tailopt"].__version__  # an import would be a cycle: the root imports all rooms
    parser.add_argument("--version", action="version", version=f"tailopt {version}")
    commands = parser.add_subparsers(metavar="COMMAND", prog="tailopt")
    for command in COMMANDS.values():
        command.add(commands)
    return parser


def _print_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)
