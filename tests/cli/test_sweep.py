"""`tailopt sweep`: the library's sweep, from a file and the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

import tailopt
from tailopt.cli.main import main
from tailopt.sweeps.trials import TRIALS
from tailopt.tasks.table import task

SMALL = ["--task", "syntoken", "--preset", "small", "--nodes", "3", "--rounds", "3", "--local_steps", "2", "--quiet"]
FILE = """
[task]
name = "syntoken"
preset = "small"
[algorithm]
name = "avg-biclip"
i_d = 0.0
[run]
rounds = 3
nodes = 3
local_steps = 2
[space]
ilr = [0.1, 0.5]
i_u = {low = 0.1, high = 1.0}
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_it_is_what_the_library_finds(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.toml").write_text(FILE)
    words = ["--budget", "6", "--seeds", "3,4", "--report-seeds", "2", "--halving", "2", "--run", "runs/a", "--quiet"]
    assert main(["sweep", "a.toml", "--rounds", "4", "--space.ilr", "0.1,0.5,0.9", *words]) == 0
    space = {"ilr": [0.1, 0.5, 0.9], "i_u": {"low": 0.1, "high": 1.0}}
    expected = tailopt.sweep(
        task("syntoken", "small"), "avg-biclip", space=space, settings={"i_d": 0.0}, budget=6, seeds=[3, 4],
        report_seeds=2, halving=2, rounds=4, nodes=3, local_steps=2, progress=False,
    )  # fmt: skip
    out = capsys.readouterr().out
    assert expected.summary() in out and out.rstrip().endswith("wrote runs/a: sweep.json, trials.jsonl, table.md")
    before = Path("runs/a", TRIALS).read_bytes()
    assert before.count(b"\n") == 14
    assert main(["sweep", "a.toml", "--rounds", "4", "--space.ilr", "0.1,0.5,0.9", *words]) == 2
    assert "Add --resume" in capsys.readouterr().err
    assert main(["sweep", "a.toml", "--rounds", "4", "--space.ilr", "0.1,0.5,0.9", *words, "--resume"]) == 0
    assert Path("runs/a", TRIALS).read_bytes() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--algorithm", "avg-sgd", "--space.ilr", "0.1", "--drops", "0.5"], "run.drops: a sweep has no use for it"),
        (["--algorithm", "avg-sgd", "--space.ilr", "0.1", "--space", "paper"], "exclude each other"),
        (["--algorithm", "avg-sgd", "--space.ilr"], "--space.ilr needs a value"),
        (["--space.ilr", "0.1"], "Invalid algorithm: none is named"),
        (["--algorithm", "avg-sgd", "--budget", "many"], "Invalid budget: got 'many'"),
        (["--algorithm", "avg-sgd", "--space.ilr", "0.1", "--top", "abc"], "Invalid top: got 'abc'"),
        (
            ["--algorithm", "avg-sgd", "--space.ilr", "0.1", "--figure", "x.unknown"],
            "Invalid figure: 'x.unknown' ends in 'unknown'",
        ),
        (["--algorithm", "avg-sgd", "--space.ilr", "0.1", "--resume"], "Give it: --run FOLDER"),
        (["--algorithm", "avg-sgd", "--space.ilr", "0.1", "--run", __file__], "is a file; need a folder"),
        (["--algorithm", "avg-sgd", "--space.ilr", "0.1", "--rounds", "0"], "Invalid rounds: 0"),
    ],
)
def test_bad_input(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", *SMALL, *words]) == 2
    assert message in capsys.readouterr().err


def test_loggers_by_name_write_into_the_folder_of_the_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed (the extra tensorboard)")
    Path("a.toml").write_text(FILE)
    words = ["--budget", "2", "--seeds", "1", "--report-seeds", "1", "--quiet", "--log", "tensorboard"]
    assert main(["sweep", "a.toml", *words]) == 2
    assert "Invalid log: 'tensorboard' needs a folder to write to. Give it: --run FOLDER." in capsys.readouterr().err
    assert main(["sweep", "a.toml", *words, "--run", "runs/a"]) == 0
    assert len([*Path("runs/a/tensorboard").iterdir()]) == 3
    assert main(["sweep", "a.toml", *words, "--run", "runs/a", "--resume"]) == 0
