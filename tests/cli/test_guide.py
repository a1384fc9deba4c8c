"""docs/command-line.md and examples/: every command works, and prints the output that the page shows."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tailopt.cli.config_file import read, sections
from tailopt.cli.configuration import resolve
from tailopt.cli.main import main
from tailopt.cli.overrides import apply_overrides, split_arguments

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def words(text: str) -> list[str | float]:
    """The words of a text without its white space; numbers as floats."""
    found: list[str | float] = []
    for word in re.findall(r"[^\s,:]+", text):
        try:
            found.append(float(word))
        except ValueError:
            found.append(word)
    return found


def test_commands_work_and_print_the_output_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples", "examples")
    printed, compared = "", 0
    for language, code in FENCE.findall(PAGE):
        if language == "bash":
            for line in code.splitlines():
                program, *rest = shlex.split(line)
                assert program == "tailopt"
                assert main(rest) == 0, f"{line}\n{capsys.readouterr().err}"
                printed = capsys.readouterr().out
        elif language == "text" and printed:
            if code.startswith("tailopt run: "):
                continue
            for one, other in zip(words(printed), words(code), strict=True):
                # to 2 %: sums round differently on another processor
                assert one == (pytest.approx(other, rel=0.02) if isinstance(other, float) else other), printed
            compared, printed = compared + 1, ""
    assert compared == 2


def test_the_error_shown_is_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    (shown,) = re.findall(r"^tailopt run: .*\.\.\.$", PAGE, flags=re.MULTILINE)
    assert main(["run", "--roundz", "3"]) == 2
    assert capsys.readouterr().err.startswith(shown.removesuffix("..."))


def test_the_files_shown_are_configurations(tmp_path: Path) -> None:
    for language, code in FENCE.findall(PAGE):
        if language == "toml":
            (tmp_path / "shown.toml").write_text(code)
            assert resolve(read(tmp_path / "shown.toml")).schedules == {"ilr": {"power": -0.25}}
    assert resolve(read(ROOT / "examples" / "syntoken.toml")).run.rounds == 60


def test_both_spellings_of_the_table_say_the_same(tmp_path: Path) -> None:
    rows = re.findall(r"^\| `\[(\w+)\]` `(.*?)` \| (.*?) \|$", PAGE, flags=re.MULTILINE)
    assert len(rows) == 6
    for section, line, options in rows:
        (tmp_path / "a.toml").write_text(f"[{section}]\n{line}\n")
        wanted = read(tmp_path / "a.toml")
        for option in re.findall(r"`(--.*?)`", options):
            rest, overrides = split_arguments(shlex.split(option), {})
            assert rest == []
            assert apply_overrides(sections({}), overrides) == wanted
