"""`tailopt completion`: real shells complete what the parser has."""

from __future__ import annotations

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
