"""`tailopt completion`: a script that makes the tab key complete commands, options, settings and names.

The script is a list of words made from the parser, so that no Python starts when the key is pressed. It
is made again after an update. Files are completed by the shell itself wherever no word fits.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tailopt.algorithms import NAMED
from tailopt.arguments import did_you_mean
from tailopt.cli.list import LISTS
from tailopt.cli.run import LOG_OPTIONS
from tailopt.cli.setting_names import SECTIONS, SHORT, section_keys
from tailopt.cli.study import STUDIES
from tailopt.loggers.named import LOGGERS
from tailopt.tasks.own import installed
from tailopt.tasks.table import TASKS

EXAMPLE = """\
  tailopt completion bash"""
Words = Mapping[str, Sequence[str]]  # a command, or an option -> what may follow


def add(commands: Any) -> None:
    """Declare the command; it describes the parsers of all commands, which `commands` has once all are declared."""
    parser = commands.add_parser(
        "completion",
        help="complete commands and options by the tab key: a script for your shell",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="tailopt completion bash | zsh | fish",
        description="Print a script for your shell. For bash and zsh, put this line into ~/.bashrc or ~/.zshrc:\n"
        '  eval "$(tailopt completion bash)"\n'
        "for fish: tailopt completion fish > ~/.config/fish/completions/tailopt.fish",
        epilog=f"example:\n{EXAMPLE}",
    )
    parser.add_argument("shell", metavar="SHELL", help=", ".join(SCRIPTS))
    parser.set_defaults(command=lambda arguments, _: command(arguments, commands.choices), options=None)


def command(arguments: argparse.Namespace, parsers: Mapping[str, argparse.ArgumentParser]) -> int:
    """Print the script."""
    shell = arguments.shell
    if shell not in SCRIPTS:
        raise ValueError(f"Unknown shell: {shell!r}{did_you_mean(shell, SCRIPTS)} There are: {', '.join(SCRIPTS)}.")
    # only commands with settings have a table of their own options
    options = {
        name: [*options_of(parser), *(settings() if parser.get_default("options") is not None else [])]
        for name, parser in parsers.items()
    }
    names = {"study": [*STUDIES], "list": [*LISTS, "runs"], "completion": [*SCRIPTS]}
    print(SCRIPTS[shell](options, names, after_options()))
    print("# wrote nothing; `tailopt completion --help` says where this goes")
    return 0


def options_of(parser: argparse.ArgumentParser) -> tuple[str, ...]:
    """The options of a parser, such as --out. argparse has no public way to ask for them."""
    return tuple(text for action in parser._actions for text in action.option_strings if text.startswith("--"))


def settings() -> list[str]:
    """The settings of all tasks and algorithms, as options; those of one's own tasks are not known here."""
    keys = {key for section in SECTIONS for key in section_keys(section)}
    return [f"--{key}" for key in sorted(keys | {*SHORT})]


def after_options() -> Words:
    """What may follow an option."""
    tasks, loggers = sorted({*TASKS, *installed()}), [*LOGGERS]
    return {"--task": tasks, "--algorithm": sorted(NAMED), **dict.fromkeys(LOG_OPTIONS, loggers)}


def bash(options: Words, names: Words, values: Words) -> str:
    """A completion function of bash."""
    by_option = "\n".join(f"    {name}) words={shlex.quote(' '.join(words))} ;;" for name, words in values.items())
    by_command = "\n".join(
        f"    {name}) words={shlex.quote(' '.join([*names.get(name, ()), *words]))} ;;"
        for name, words in options.items()
    )
    # a task such as glue/mrpc is one word; a colon, as in my_task.py:MyTask, ends one in bash, and stays a file here
    return f"""_tailopt() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
  case "$before" in
{by_option}
  esac
  if [ -z "$words" ] && [ "$COMP_CWORD" -eq 1 ]; then
    words={shlex.quote(" ".join(options))}
  elif [ -z "$words" ]; then
    case "${{COMP_WORDS[1]}}" in
{by_command}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _tailopt tailopt"""


def zsh(options: Words, names: Words, values: Words) -> str:
    """The same for zsh, which runs completion functions of bash once its own completion is set up."""
    start = "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }"
    return f"{start}\nautoload -Uz bashcompinit && bashcompinit\n{bash(options, names, values)}"


def fish(options: Words, names: Words, values: Words) -> str:
    """The same for fish, which has a line for each word."""
    lines = [f"complete -c tailopt -n __fish_use_subcommand -f -a {shlex.quote(' '.join(options))}"]
    for name, words in options.items():
        inside = f"complete -c tailopt -n '__fish_seen_subcommand_from {name}'"
        if name in names:
            files = "" if name == "list" else "-f "  # `list runs` has a folder
            lines.append(f"{inside} {files}-a {shlex.quote(' '.join(names[name]))}")
        for word in words:
            follows = f" -x -a {shlex.quote(' '.join(values[word]))}" if word in values else ""
            lines.append(f"{inside} -l {word.removeprefix('--')}{follows}")
    return "\n".join(lines)


SCRIPTS: Mapping[str, Callable[[Words, Words, Words], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
