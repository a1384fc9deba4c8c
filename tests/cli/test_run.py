"""`tailopt run`: what it writes is what the library gives, and can be run again."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import tailopt
from tailopt.algorithms import NAMED
from tailopt.cli import list as listing
from tailopt.cli.main import main
from tailopt.records.folder import Run
from tailopt.tasks.table import task

SMALL = ["--task", "syntoken", "--preset", "small", "--nodes", "3", "--rounds", "3", "--local_steps", "2", "--quiet"]
BICLIP = ["--algorithm", "avg-biclip", "--ilr", "0.5", "--i_u", "0.1", "--i_d", "0.01"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_it_is_what_simulate_gives(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--noise", "cauchy", "--seed", "4", "--participation", "0.7", "--schedules.ilr.power", "-0.5"]
    assert main(["run", *SMALL, *BICLIP, *words, "--out", "a/b"]) == 0
    problem = task("syntoken", preset="small", noise="cauchy")
    expected = tailopt.simulate(
        problem.model(4),
        tailopt.algorithm("avg-biclip", ilr=0.5, i_u=0.1, i_d=0.01),
        loss=problem.loss,
        data=problem.nodes(4, 3),
        evaluate=lambda model: problem.evaluate(model, 4),
        rounds=3,
        local_steps=2,
        batch_size=32,
        participation=0.7,
        schedules={"ilr": tailopt.schedules.power(-0.5)},
        seed=4,
        progress=False,
    )
    assert Run.open("a/b").history() == expected.history
    out, err = capsys.readouterr()
    assert out.splitlines()[0].startswith("round 3: loss ")
    assert f"error {expected.history[-1]['metrics']['error']:.4g}" in out
    assert out.splitlines()[-1].startswith("wrote a/b: config.toml")
    assert err == ""


def test_thresholds_are_chosen_and_the_choice_is_stored() -> None:
    auto = [
        "--algorithm",
        "bi2clip",
        "--ilr",
        "0.05",
        "--i_u",
        "auto",
        "--i_d",
        "auto",
        "--olr",
        "0.1",
        "--o_u",
        "auto",
    ]
    words = ["--o_d", "0", "--algorithm.scale", "follow", "--local_steps", "20"]
    assert main(["run", *SMALL, *auto, *words, "--out", "a"]) == 0
    config = Run.open("a").config
    expected = {"ilr": 0.05, "i_u": "auto", "i_d": "auto", "olr": 0.1, "o_u": "auto", "o_d": 0, "scale": "follow"}
    assert {key: config["algorithm"].get(key) for key in expected} == expected
    assert main(["run", "a/config.toml", "--out", "b", "--quiet"]) == 0
    assert Path("a/history.jsonl").read_bytes() == Path("b/history.jsonl").read_bytes()
    last = Run.open("b").history()[-1]["thresholds"]
    assert last["outer"]["d"] == 0 and last["inner"]["u"] == last["inner"]["s"]


def test_the_folder_holds_the_resolved_configuration_and_can_be_run_again() -> None:
    assert main(["run", *SMALL, *BICLIP, "--schedules.i_u", "[{power = 0.25}, {warmup = 2}]", "--out", "a"]) == 0
    config = Run.open("a").config
    assert config["task"]["samples"] == 1000
    assert list(config) == ["task", "algorithm", "run", "schedules"]  # as in a file of one's own
    assert (config["algorithm"]["name"], config["algorithm"]["i_d"], config["run"]["batch_size"]) == (
        "avg-biclip", 0.01, 32,
    )  # fmt: skip
    assert config["schedules"] == {"i_u": [{"power": 0.25}, {"warmup": 2}]}
    assert main(["run", "a/config.toml", "--out", "b", "--quiet"]) == 0
    for name in ("config.toml", "history.jsonl"):
        assert Path("a", name).read_bytes() == Path("b", name).read_bytes()


@pytest.mark.parametrize("name", [name for name in NAMED if name != "muloco"])  # a linear model has no hidden matrix
def test_every_algorithm_comes_back_from_its_folder(name: str) -> None:
    numbers = {"ilr": "0.01", "olr": "0.1", "oeps": "1e-2", "ieps": "1e-2", "momentum": "0.9", "weight_decay": "0"}
    thresholds = {"i_u": "inf", "i_d": "0", "o_u": "1", "o_d": "1e-3"}
    given = {**numbers, **thresholds}
    words = [word for key in listing.settings(name)[0] for word in (f"--{key}", given[key])]
    assert main(["run", *SMALL, "--algorithm", name, *words, "--rounds", "2", "--out", "a"]) == 0
    assert main(["resume", "a", "--rounds", "3", "--quiet"]) == 0
    assert main(["run", *SMALL, "--algorithm", name, *words, "--rounds", "3", "--out", "b"]) == 0
    assert Path("a/history.jsonl").read_bytes() == Path("b/history.jsonl").read_bytes()


def test_a_file_and_the_command_line() -> None:
    Path("a.toml").write_text(
        '[task]\nname = "gaussian"\npreset = "small"\n[algorithm]\nname = "avg-sgd"\nilr = 0.01\n'
        "[run]\nrounds = 9\nnodes = 2\nstatistics = true\nweights = [1, 3]\n"
    )
    assert main(["run", "a.toml", "--rounds", "2", "--out=b", "--quiet"]) == 0
    rows = Run.open("b").history()
    assert len(rows) == 2
    assert rows[0]["weights"] == [0.25, 0.75]
    assert rows[0]["statistics"]


def test_folders_are_named_and_never_written_over(capsys: pytest.CaptureFixture[str]) -> None:
    short = [*SMALL, *BICLIP, "--rounds", "1"]
    assert main(["run", *short]) == main(["run", *short]) == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == ["syntoken-avg-biclip", "syntoken-avg-biclip-2"]
    capsys.readouterr()
    assert main(["run", *short, "--out", "runs/syntoken-avg-biclip"]) == 2
    assert "tailopt resume runs/syntoken-avg-biclip" in capsys.readouterr().err
    Path("mine").mkdir()
    Path("mine/thesis.tex").write_text("dear")
    assert main(["run", *short, "--out", "mine"]) == 2
    assert "Invalid out: mine holds other things than a run" in capsys.readouterr().err
    assert [path.name for path in Path("mine").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rounds", "0"], "Invalid rounds: 0; need a whole number, 1 or more"),
        (["--noise", "pink"], "Unknown noise: 'pink'; need one of none, gaussian, student-t, cauchy"),
        (["--participation", "-1e-3"], "-0.001"),
        (["--weights", "1,2"], "3"),
        (["--sampling", "fair"], "Invalid sampling: 'fair'"),
        (["--device", "cuda:9"], "cuda:9"),
        (["--i_d", "1"], "i_d=1 exceeds i_u=0.1"),
        (["nowhere.toml"], "there is no file 'nowhere.toml'"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_written(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *SMALL, *BICLIP, "--out", "a", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tailopt run: ")
    assert err.count("\n") == 1
    assert message in err
    assert not Path("a").exists()


@pytest.mark.parametrize(
    ("algorithm", "meant"),
    [
        ("avg-biclip", "'ilr'"),
        ("Avg-BiClip", "'ilr'"),
        ("adam-biclip", "'ilr' or 'olr'"),
        ("bi2clip", "'ilr' or 'olr'"),
    ],
)
def test_a_learning_rate_without_a_level_is_understood(
    algorithm: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file.toml").write_text(f'[algorithm]\nname = "{algorithm}"\nlr = 0.1\n')
    for words in (["--task", "syntoken", "--algorithm", algorithm, "--lr", "0.1"], ["file.toml"]):
        assert main(["run", *words]) == 2
        assert f"lr; did you mean {meant}?" in capsys.readouterr().err


def test_texts_has_as_many_nodes_as_there_are_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="the studies' extra is not installed")
    monkeypatch.setenv("TAILOPT_CACHE", str(tmp_path / "cache"))
    Path("texts").mkdir()
    for name in ("one", "two", "three"):
        Path("texts", f"{name}.txt").write_text(f"the sea is calm to-night, {name}. " * 60)
    words = ["--task", "texts", "--preset", "small", "--data", "texts", "--tokenizer", "", "--rounds", "1"]
    assert main(["run", *words, "--algorithm", "avg-sgd", "--ilr", "0.1", "--quiet", "--out", "a"]) == 0
    run = Run.open("a")
    assert run.config["run"]["nodes"] == 3 and run.history()[-1]["participants"] == [0, 1, 2]
    assert main(["resume", "a", "--rounds", "2", "--quiet"]) == 0
    assert main(["run", "a/config.toml", "--rounds", "2", "--quiet", "--out", "b"]) == 0
    assert Run.open("a").history() == Run.open("b").history()


def test_what_was_written_is_said_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *SMALL, *BICLIP, "--out", "a"]) == 0
    files = capsys.readouterr().out.splitlines()[-1].removeprefix("wrote a: ").split(", ")
    assert "log.txt" not in files and all(Path("a", name).exists() for name in files)
    assert main(["resume", "a", "--rounds", "4", "--quiet"]) == 0  # which leaves a line in the log
    files = capsys.readouterr().out.splitlines()[-1].removeprefix("wrote a: ").split(", ")
    assert "log.txt" in files and all(Path("a", name).exists() for name in files)


def test_warnings_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """A node whose loss overflows is left out, and that is said."""
    words = ["--algorithm", "avg-sgd", "--ilr", "1e30", "--nodes", "2", "--guard", "true"]
    code = main(["run", *SMALL, *words, "--out", "a"])
    assert code == 2
    err = capsys.readouterr().err
    assert "tailopt run: " in err
    assert "checkpoint" in err.splitlines()[-1]
    assert main(["run", *SMALL, "--algorithm", "adam2", "--settings", "paper:RTE", "--out", "b"]) == 0
    printed = capsys.readouterr().err
    assert all(line.startswith("warning: adam2") for line in printed.splitlines())
    assert math.isfinite(Run.open("b").history()[-1]["loss"])


def test_loggers_by_name_write_into_the_run_folder(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed (the extra tensorboard)")
    assert main(["run", *SMALL, *BICLIP, "--log", "tensorboard", "--out", "a"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("checkpoints/, tensorboard/")
    assert main(["resume", "a", "--rounds", "5", "--loggers", "tensorboard", "--quiet"]) == 0
    assert len([*Path("a/tensorboard").glob("events.out.tfevents.*")]) == 2
    from tests.loggers.test_event_files import read

    losses = {row["round"]: row["loss"] for row in Run.open("a").history()}
    assert read(Path("a/tensorboard"))[0]["loss"] == losses and len(losses) == 5


def test_an_unknown_logger(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *SMALL, *BICLIP, "--log", "tensorbord", "--out", "a"]) == 2
    assert "Invalid log: 'tensorbord'; need one of 'tensorboard', 'wandb'." in capsys.readouterr().err
    assert not Path("a").exists()
