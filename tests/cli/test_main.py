"""What the commands share: help that works, errors in one line, exit codes."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import tailopt
from tailopt.cli.main import COMMANDS, main
from tailopt.cli.setting_names import SECTIONS, section_keys

SOURCE = Path(tailopt.__file__).parents[1]


def helped(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        main([*words, "--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


def in_a_process(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-m", "tailopt", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


# what needs several processes, or what they leave, has its example run in test_train.py
@pytest.mark.parametrize("command", [None, *(name for name in COMMANDS if name not in ("train", "verify"))])
def test_the_example_of_each_help_text_works(
    command: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = helped(capsys, *([command] if command else []))
    assert max(map(len, text.splitlines())) <= 120
    examples = [line.strip() for line in text.split("example:\n")[1].splitlines()]
    assert any(line.startswith(f"tailopt {command or ''}") for line in examples)
    for line in examples:
        if "--figure" in line:
            pytest.importorskip("matplotlib")
        program, *words = shlex.split(line)
        assert program == "tailopt"
        assert main(words) == 0, line
        assert "wrote" in capsys.readouterr().out.splitlines()[-1]


def test_the_help_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    words = {*helped(capsys, "run").split()}
    assert {key for section in SECTIONS[:-1] for key in section_keys(section)} <= words
    assert {"local_steps", "i_u", "oeps", "noise"} <= words


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(f"\n    {name}" in out for name in COMMANDS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rnu"], "tailopt: Unknown command: 'rnu'; did you mean 'run'? There are: run, resume, compare"),
        (["compare"], "tailopt compare: The following arguments are required: FOLDER. See: tailopt compare --help"),
        (
            ["compare", "a", "--figrue", "b"],
            "tailopt compare: Unknown option: --figrue; did you mean '--figure'? tailopt compare has",
        ),
        (["study", "gleu"], "tailopt study: Unknown study: 'gleu'; did you mean 'glue'? There are: arena, "),
        (["study", "glue", "--seed=2"], "tailopt study: Unknown option: --seed; did you mean '--seeds'?"),
        (["run", "a", "b"], "tailopt run: Unexpected argument: 'b'. See: tailopt run --help"),
        (["resume", "a", "--rounds", "x"], "tailopt resume: Argument --rounds: invalid int value: 'x'"),
    ],
)
def test_errors_of_the_parser_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"tailopt {tailopt.__version__}\n"


def test_messages_of_the_library_are_in_the_words_of_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split("run --task syntoken --preset small --nodes 3 --rounds 1 --algorithm avg-sgd --ilr 0.1 --quiet")
    assert main([*words, "--aggregate", "coordinate-median", "--weights", "1,2,3", "--out", "aggregate=true"]) == 2
    said = capsys.readouterr().err
    assert "--aggregate mean" in said and 'aggregate="mean"' not in said


def test_a_traceback_on_demand() -> None:
    with pytest.raises(ValueError, match="no task is named"):
        main(["run", "--traceback"])


def test_as_a_program() -> None:
    """python -m tailopt: exit codes and streams are those of a process."""
    wrong = in_a_process("run", "--task", "nothing")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("tailopt run: Invalid task: unknown task 'nothing'. Give one of syntoken, gaussian")
    assert wrong.stderr.count("\n") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of a shell")
def test_a_closed_pipe_is_no_error() -> None:
    command = f"{shlex.quote(sys.executable)} -m tailopt list | true"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    result = subprocess.run(
        ["sh", "-c", command], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.stderr == ""
