"""Configurations in files: strict sections and keys, and errors that name the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailopt.cli.config_file import read
from tailopt.cli.configuration import resolve


def test_a_file(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('[task]\nname = "gaussian"\n[algorithm]\nname = "avg-sgd"\nilr = 0.1\n[run]\nrounds = 7\n')
    configuration = resolve(read(file))
    assert (configuration.task["name"], configuration.algorithm["name"], configuration.run.rounds) == (
        "gaussian",
        "avg-sgd",
        7,
    )
    for text, message in {
        "[run]\nround = 7\n": r"a\.toml: Unknown setting: run\.round; did you mean 'rounds'\?",
        "[runs]\nrounds = 7\n": r"a\.toml: Unknown section: 'runs'; did you mean 'run'\? Known: task, algorithm",
        "task = 3": r"a\.toml: Invalid task: got 3; need a table",
        "[run\n": r"a\.toml: .*line 1",
        "[schedules]\nlr = {power = 1}\n": r"Unknown setting: schedules\.lr",
    }.items():
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            read(file)
    with pytest.raises(FileNotFoundError, match=r"there is no file .*nowhere\.toml"):
        read(tmp_path / "nowhere.toml")
