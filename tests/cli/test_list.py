"""`tailopt list`: everything that there is, by name."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

import tailopt
from tailopt.algorithms import NAMED
from tailopt.cli import list as listing
from tailopt.cli.list import MEANINGS
from tailopt.cli.main import main
from tailopt.cli.setting_help import algorithm_help, run_help, task_help
from tailopt.cli.setting_names import algorithm_keys
from tailopt.records.folder import Run
from tailopt.settings import MEANINGS as SETTING_MEANINGS
from tailopt.tasks.synthetic import NOISES
from tailopt.tasks.table import TASKS

TWO_CLASSES = """
import torch, tailopt
x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
data = [torch.utils.data.TensorDataset(part, part.sum(1, keepdim=True)) for part in x.chunk(2)]
tailopt.simulate(
    torch.nn.Linear(3, 1),
    tailopt.Algorithm(
        outer=torch.optim.Adam, inner=torch.optim.SGD, outer_settings={"lr": 1e-2}, inner_settings={"lr": 0.125}
    ),
    loss=lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]),
    data=data, rounds=2, local_steps=2, batch_size=5, run="runs/torch", progress=False,
)
"""
SGD = shlex.split("--task gaussian --preset small --rounds 2 --nodes 2 --algorithm avg-sgd --ilr 0.01 --quiet")


def test_everything_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    whole = capsys.readouterr().out
    firsts = [line.split()[0] for line in whole.splitlines() if line]
    assert {*TASKS, *NAMED, *NOISES} <= {*firsts}
    assert "samples = 5000" in whole
    for what, names in {"tasks": TASKS, "algorithms": NAMED, "noises": NOISES}.items():
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
    assert "there is no runs. Give the folder of your runs: tailopt list runs FOLDER" in capsys.readouterr().err
    words = ["--task", "gaussian", "--preset", "small", "--rounds", "2", "--nodes", "2", "--quiet"]
    assert main(["run", *words, "--algorithm", "avg-sgd", "--ilr", "0.01"]) == 0
    final = capsys.readouterr().out.split("error ")[1].split()[0]
    assert main(["list", "runs"]) == 0
    row = capsys.readouterr().out.splitlines()[2]
    assert row.split() == ["runs/gaussian-avg-sgd", "gaussian", "avg-sgd", "2", "2", "error", final]


def test_a_run_of_two_classes_of_torch_is_listed_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(TWO_CLASSES, {})
    assert main(["list", "runs"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("runs/torch"))
    loss = Run.open("runs/torch").history()[-1]["loss"]
    assert row.split() == ["runs/torch", "-", "Adam-SGD", "2", "2", "loss", f"{loss:.4g}"]
    assert main(["run", *SGD, "--out", "runs/sgd"]) == 0
    assert main(["compare", "runs", "--metric", "loss"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[:3] for line in out.splitlines() if "Adam-SGD" in line][0] == ["runs/torch", "Adam-SGD", "2"]
    assert "0.125" in out  # its learning rate, among the settings that differ


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda run: (run / "config.toml").write_text("rounds = ["), "it is no longer TOML"),
        (
            lambda run: (run / "config.toml").write_text("rounds = 2\n"),
            "task.name is not there",
        ),
        (lambda run: (run / "history.jsonl").write_text("no JSON\n{}\n"), "history.jsonl"),
    ],
)
def test_one_unreadable_run_hides_no_other(
    damage: Callable[[Path], object],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "c"):
        assert main(["run", *SGD, "--out", f"runs/{name}"]) == 0
    damage(tmp_path / "runs" / "b")
    capsys.readouterr()
    for command in (["list", "runs"], ["compare", "runs"]):
        assert main(command) == 0
        sound, _, damaged = capsys.readouterr().out.partition("cannot be read\n")
        assert [line.split()[0] for line in sound.splitlines() if line.startswith("runs/")][:2] == ["runs/a", "runs/c"]
        (row,) = [line for line in damaged.splitlines() if line.startswith("runs/")]
        assert row.startswith("runs/b ") and problem in row and len(row) < 140
    assert main(["compare", "runs/b"]) == 2, "alone it is an error"
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["task"], "Unknown list: 'task'; did you mean 'tasks'? There are: tasks, algorithms"),
        (["tasks", "glue/mrcp"], "unknown task 'glue/mrcp'; did you mean 'glue/mrpc'"),
        (["algorithms", "bi2clp"], "did you mean 'bi2clip'"),
        (["noises", "x"], "noises have no settings"),
    ],
)
def test_mistakes(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMED)
def test_listed_settings_are_those_of_the_algorithm(name: str) -> None:
    need, may = listing.settings(name)
    values = dict.fromkeys(need, 0.5)
    tailopt.algorithm(name, **values)
    for key in need:
        with pytest.raises(ValueError, match=f"missing '{key}'"):
            tailopt.algorithm(name, **{k: v for k, v in values.items() if k != key})
    with pytest.raises(ValueError, match="unknown 'nothing'") as error:
        tailopt.algorithm(name, **values, nothing=1)
    allowed = {word.strip(" .") for word in str(error.value).partition("It may have")[2].split(",")}
    assert allowed - {"inner_state", "send_preconditioner"} == {*may} - {"send_preconditioner"}


def test_the_settings_of_a_task_with_type_default_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "tasks", "glue/mrpc"]) == 0
    out = capsys.readouterr().out
    assert "presets: paper, small; metric: accuracy, higher is better" in out
    assert "\n  length      whole number, default 128: tokens of a sample at most\n" in out
    assert main(["list", "algorithms", "Bi^2Clip"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("settings of bi2clip\n  ilr ") and "number, needed: learning rate of the local steps" in out


@pytest.mark.parametrize("name", TASKS)
def test_every_setting_of_every_task_is_explained(name: str) -> None:
    assert [row.name for row in task_help(name) if not row.meaning] == []


def test_every_setting_of_runs_and_algorithms_is_explained() -> None:
    assert [row.name for row in run_help() if not row.meaning] == []
    assert {row.name for row in algorithm_help()} == algorithm_keys() == {*SETTING_MEANINGS}
    for name in NAMED:
        needed = {row.name for row in algorithm_help(name) if row.default == "needed"}
        assert needed == {*listing.settings(name)[0]}
