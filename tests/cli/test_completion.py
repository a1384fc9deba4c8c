"""`tailopt completion`: real shells complete what the parser has."""

from __future__ import annotations

import os
import select
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tailopt.cli.completion import SCRIPTS
from tailopt.cli.main import COMMANDS, main
from tailopt.cli.study import STUDIES
from tailopt.tasks.table import TASKS


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def completed(text: str, *words: str) -> set[str]:
    """What bash offers for the last of the words."""
    program = f"""{text}
COMP_WORDS=({shlex.join(words)})
COMP_CWORD={len(words) - 1}
_tailopt
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    return {*done.stdout.split()}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_options_and_names(capsys: pytest.CaptureFixture[str]) -> None:
    text = script("bash", capsys)
    assert completed(text, "tailopt", "") == {*COMMANDS}
    assert completed(text, "tailopt", "re") == {"resume", "report"}
    assert completed(text, "tailopt", "compare", "--f") == {"--figure"}
    assert completed(text, "tailopt", "run", "--i_") == {"--i_u", "--i_d"}
    assert completed(text, "tailopt", "compare", "--i_") == set()
    assert completed(text, "tailopt", "report", "--t") == {"--title"}
    assert completed(text, "tailopt", "diagnose", "--ba") == {"--batches", "--batch_size"}
    assert completed(text, "tailopt", "resume", "--log", "w") == {"wandb"}
    assert completed(text, "tailopt", "study", "g") == {name for name in STUDIES if name.startswith("g")}
    assert completed(text, "tailopt", "run", "--task", "glue/m") == {
        name for name in TASKS if name.startswith("glue/m")
    }
    assert completed(text, "tailopt", "sweep", "--algorithm", "bi2clip-") == {"bi2clip-l2"}
    assert completed(text, "tailopt", "run", "--algorithm", "mul") == {"muloco"}


TYPED = {
    "tailopt repo": "report",
    "tailopt compare --fig": "compare --figure",
    "tailopt run --task glue/mr": "run --task glue/mrpc",
    "tailopt sweep --algorithm mulo": "sweep --algorithm muloco",
    "tailopt study gradi": "study gradients",
    "tailopt compare --i_": "compare --i_",  # it has no such option
}


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_completes_what_is_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a terminal, by the line that the help says, where no completion was set up before."""
    pty = pytest.importorskip("pty")
    (tmp_path / "script").write_text(script("zsh", capsys))
    terminal, side = pty.openpty()
    environment = {**os.environ, "HOME": str(tmp_path), "ZDOTDIR": str(tmp_path), "TERM": "dumb"}
    shell = subprocess.Popen(
        ["zsh", "-f", "-i"], stdin=side, stdout=side, stderr=side, env=environment, cwd=tmp_path, start_new_session=True
    )
    try:
        os.close(side)
        # the program says what it was called with; in two parts, so that the echo of the line is not the answer
        ask(terminal, """eval "$(cat script)"; tailopt() { print -r -- "<"$*">" }; print "<"ready">"\n""", "<ready>")
        for typed, expected in TYPED.items():
            assert f"<{expected}>" in ask(terminal, f"{typed}\t\n", ">\r\n"), typed
    finally:
        shell.kill()
        shell.wait()
        os.close(terminal)


def ask(terminal: int, text: str, end: str) -> str:
    """Type text into a terminal; returns what appears until `end` does."""
    os.write(terminal, text.encode())
    seen = ""
    while end not in seen:
        assert select.select([terminal], [], [], 30)[0], seen
        seen += os.read(terminal, 65536).decode(errors="replace")
    assert "not found" not in seen
    return seen


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes_what_is_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "script").write_text(script("fish", capsys))
    (tmp_path / "gradients.txt").touch()  # a file, where no file is meant
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}

    def offered(line: str) -> set[str]:
        program = f"source script; complete -C {shlex.quote(line)}"
        done = subprocess.run(
            ["fish", "--no-config", "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True,
            timeout=60, check=True,
        )  # fmt: skip
        assert done.stderr == ""
        return {*done.stdout.split()}

    assert offered("tailopt ") == {*COMMANDS}
    assert offered("tailopt run --i_") == {"--i_u", "--i_d"}
    for typed, expected in TYPED.items():
        last = expected.split()[-1]
        assert offered(typed) == ({last} if typed.split()[-1] != last else set()), typed
    assert "script" in offered("tailopt compare s"), "a run folder is a file"


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_script_is_one_of_that_shell(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    assert "--figure" in text or "-l figure" in text
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here to read it")
    (tmp_path / "script").write_text(text)
    subprocess.run([shell, "-n", str(tmp_path / "script")], timeout=60, check=True)


def test_an_unknown_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fsh"]) == 2
    assert "Unknown shell: 'fsh'; did you mean 'fish'? There are: bash, zsh, fish." in capsys.readouterr().err
