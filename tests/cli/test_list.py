"""`tailopt list`: everything that there is, by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailopt.algorithms import ALGORITHMS
from tailopt.cli.list import MEANINGS
from tailopt.cli.main import main
from tailopt.tasks.synthetic import NOISES
from tailopt.tasks.table import TASKS


def test_everything_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    whole = capsys.readouterr().out
    firsts = [line.split()[0] for line in whole.splitlines() if line]
    assert {*TASKS, *ALGORITHMS, *NOISES} <= {*firsts}
    assert "samples = 5000" in whole
    for what, names in {"tasks": TASKS, "algorithms": ALGORITHMS, "noises": NOISES}.items():
        assert main(["list", what]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == what
        assert [line.split()[0] for line in lines[2 : 2 + len(names)]] == [*names]
        assert "\n".join(lines[: 2 + len(names)]) in whole


def test_every_noise_is_explained() -> None:
    assert list(MEANINGS) == list(NOISES)


def test_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["list", "runs"]) == 2
    assert "there is no runs. Give that of your runs: tailopt list runs FOLDER" in capsys.readouterr().err
    words = ["--task", "gaussian", "--preset", "small", "--rounds", "2", "--nodes", "2", "--quiet"]
    assert main(["run", *words, "--algorithm", "avg-sgd", "--ilr", "0.01"]) == 0
    final = capsys.readouterr().out.split("error ")[1].split()[0]
    assert main(["list", "runs"]) == 0
    row = capsys.readouterr().out.splitlines()[2]
    assert row.split() == ["runs/gaussian-avg-sgd", "gaussian", "avg-sgd", "2", "2", "error", final]


@pytest.mark.parametrize(("words", "message"), [(["task"], "invalid choice: 'task'"), (["tasks", "x"], "list runs")])
def test_mistakes(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", *words]) == 2
    assert message in capsys.readouterr().err
