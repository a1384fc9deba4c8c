"""`tailopt diagnose`: the library's diagnosis of a task, at initial weights or those of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tailopt
from tailopt.cli.diagnose import in_turn
from tailopt.cli.main import main
from tailopt.engines.snapshots import load_weights
from tailopt.records.folder import Run
from tailopt.splits.loaders import node_data
from tailopt.tasks.table import task

TASK = ["--task", "syntoken", "--nodes", "3", "--batch_size", "8", "--quiet"]
RUN = ["--algorithm", "avg-sgd", "--ilr", "0.02", "--rounds", "3", "--local_steps", "4", "--out", "run"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def expected(model: torch.nn.Module, count: int) -> tailopt.Diagnosis:
    problem = task("syntoken", noise="gaussian")
    batches = in_turn(node_data(problem.nodes(4, 3), 4, 8), count)
    return tailopt.diagnose(model, problem.loss, batches, count=count, seed=4, progress=False)


def test_it_is_what_the_library_finds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", *TASK, "--noise", "gaussian", "--seed", "4", "--batches", "200"]) == 0
    found = expected(task("syntoken", noise="gaussian").model(4), 200)
    out = capsys.readouterr().out
    assert found.advice in out and found.finding == "cannot tell"  # most words are too rare: 19 coordinates are left
    assert out.startswith("syntoken, 200 batches of 8 at the initial weights\ntensor  elements  index")
    assert out.endswith("\nwrote nothing; --figure FILE.png draws it\n") and "passes over the data" not in out


def test_the_weights_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *TASK, "--noise", "gaussian", "--seed", "4", *RUN]) == 0
    files = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    assert main(["diagnose", "run", "--batches", "50"]) == 0
    out = capsys.readouterr().out
    model = task("syntoken").model(4)
    assert load_weights(Run.open("run"), model) == 3
    assert bool(model.weight.any())
    assert expected(model, 50).advice in out and "50 batches of 8 at the weights after round 3 of run" in out
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == files


def test_batches_come_from_the_nodes_in_turn() -> None:
    nodes = node_data([["a"] * 3, ["b"] * 2], 0, 1)
    assert [batch[0] for batch in in_turn(nodes, 5)] == ["a", "b"] * 3


def test_more_batches_than_data_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", *TASK, "--samples", "600", "--batches", "150"]) == 0
    assert "The batches are 2.0 passes over the data: outliers come back" in capsys.readouterr().out


def test_the_figure(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    for words in (["--noise", "gaussian", "--batches", "130"], ["--noise", "cauchy", "--batches", "40"]):
        assert main(["diagnose", *TASK, *words, "--figure", "noise.png"]) == 0
        assert Path("noise.png").read_bytes().startswith(b"\x89PNG") and Path("noise.png").stat().st_size > 20_000
        Path("noise.png").unlink()
    assert capsys.readouterr().out.endswith("wrote noise.png\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Invalid task: no task is named"),
        (["--task", "syntokken"], "did you mean 'syntoken'?"),
        ([*TASK, "--batches", "31"], "Invalid batches: got 31; need a whole number, 32 or more."),
        ([*TASK, "--coordinates", "0"], "Invalid coordinates: got 0; need a whole number from 1 to 1048576."),
        ([*TASK, "--figure", "noise.txt"], "Invalid figure: 'noise.txt' ends in 'txt'"),
        ([*TASK, "--coordinate", "9"], "Unknown option: --coordinate; did you mean 'coordinates'?"),
        (["missing.toml"], "there is no file 'missing.toml'"),
    ],
)
def test_messages(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "--figure" in words:
        pytest.importorskip("matplotlib")
    assert main(["diagnose", *words]) == 2
    assert message in capsys.readouterr().err
