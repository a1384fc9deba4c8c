"""`tailopt sweep`: the library's sweep, from a file and the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tailopt
from tailopt.cli.main import main
from tailopt.sweeps.trials import SWEEP, TRIALS
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


def test_a_proximal_term_is_the_same_for_all_points() -> None:
    Path("a.toml").write_text(FILE)
    words = ["--rounds", "2", "--space.ilr", "0.1,0.5", "--budget", "4", "--seeds", "1", "--report-seeds", "0"]
    values = {}
    for name, more in {"with": ["--proximal", "2"], "without": []}.items():
        assert main(["sweep", "a.toml", *words, *more, "--run", name, "--quiet"]) == 0
        record = json.loads(Path(name, SWEEP).read_text())["config"]
        assert record.get("proximal") == (2.0 if more else None)
        assert ("proximal" in record) == bool(more), "folders of sweeps without it stay as they were"
        rows = map(json.loads, Path(name, TRIALS).read_text().splitlines())
        values[name] = [row["rungs"][-1]["loss"] for row in rows]
    space = {"ilr": [0.1, 0.5], "i_u": {"low": 0.1, "high": 1.0}}
    found = tailopt.sweep(
        task("syntoken", "small"), "avg-biclip", space=space, settings={"i_d": 0.0}, budget=4, seeds=1, report_seeds=0,
        rounds=2, nodes=3, local_steps=2, proximal=2.0, progress=False,
    )  # fmt: skip
    assert sorted(values["with"]) == sorted(t.rungs[-1].loss for t in found.trials)
    assert values["with"] != values["without"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--algorithm", "avg-sgd", "--space.ilr", "0.1", "--proximal", "-1"], "Invalid proximal: -1.0; need a finite"),
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
