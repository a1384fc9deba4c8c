"""Configurations: strict, the command line over the file, resolved whole, and read again as they were."""

from __future__ import annotations

import dataclasses
import inspect
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tailopt
from tailopt.algorithms import ALGORITHMS
from tailopt.cli import list as listing
from tailopt.cli.configuration import RunSettings, override, plain_keys, read, resolve, sections, split, value
from tailopt.schedules import Power
from tailopt.tasks.table import TASKS

TABLES: dict[str, dict[str, Any]] = {
    "task": {"name": "syntoken", "preset": "small"},
    "algorithm": {"name": "avg-biclip", "ilr": 0.5, "i_u": 0.1, "i_d": 0.01},
}


def resolved(*words: str, tables: dict[str, Any] = TABLES) -> Any:
    rest, pairs = split(words, {})
    assert rest == []
    return resolve(override(sections(tables), pairs))


def test_the_task_decides_what_nobody_says() -> None:
    found = resolved()
    assert (found.run.rounds, found.run.nodes, found.run.local_steps, found.run.batch_size) == (60, 10, 5, 32)
    assert found.task == {
        "name": "syntoken",
        "preset": "small",
        "noise": "student-t",
        "scale": 1.0,
        "df": 1.5,
        "samples": 1000,
        "dimension": 20,
        "dtype": "float32",
    }
    assert resolved("--local_epochs", "2").run.local_steps is None


def test_the_command_line_is_laid_over_the_file() -> None:
    task = ["--noise", "none", "--task.dimension=12", "--dtype", "float64"]
    method = ["--i-u", "2e-1", "--algorithm", "bi2clip", "--olr", "1", "--o_u", "inf", "--o_d", "0"]
    found = resolved(*task, *method, "--run.seed", "3", "--average", "--weights", "1,2.5,3")
    assert (found.task["noise"], found.task["dimension"], found.task["dtype"]) == ("none", 12, "float64")
    assert found.algorithm["name"] == "bi2clip"
    assert (found.algorithm["i_u"], found.algorithm["o_u"]) == (0.2, math.inf)
    assert (found.run.seed, found.run.average, found.run.weights) == (3, True, [1.0, 2.5, 3.0])
    assert found.problem().dimension == 12
    assert next(iter(found.problem().model(0).parameters())).dtype.itemsize == 8


def test_none_takes_a_setting_away() -> None:
    assert resolved("--algorithm", "avg-l2clip", "--i_d", "none").algorithm == {
        "name": "avg-l2clip",
        "ilr": 0.5,
        "i_u": 0.1,
    }
    tables = {**TABLES, "run": {"projection": 3.0}, "schedules": {"ilr": {"power": -0.5}}}
    found = resolved("--projection", "none", "--schedules.ilr", "none", tables=tables)
    assert found.run.projection is None
    assert found.schedules == {}


def test_schedules() -> None:
    by_step = ["--schedules.ilr.power", "-0.5", "--schedules.ilr.per", "step"]
    found = resolved(*by_step, "--schedules.i_u", "[{warmup = 4}, {cosine = 9}]")
    made = found.made_schedules()
    assert made["ilr"] == Power(-0.5, "step")
    assert made["i_u"].factor(2) == pytest.approx(0.5 * (1 + math.cos(math.pi / 9)) / 2)


def test_theory_gives_what_is_not_given() -> None:
    words = ("--algorithm", "rmsprop-biclip", "--olr", "1", "--oeps", "0.1", "--theory", "1.5")
    made = resolved(*words).made_schedules()
    assert made == tailopt.theory("rmsprop-biclip", 1.5).schedules
    with pytest.warns(UserWarning, match="condition"):
        own = resolved(*words, "--schedules.i_u.power", "0.9").made_schedules()
    assert own["i_u"] == Power(0.9)
    assert own["ilr"] == made["ilr"]


def test_the_papers_settings_come_first() -> None:
    found = resolved("--algorithm", "bi2clip", "--settings", "paper:QNLI", tables={"task": {"name": "syntoken"}})
    assert found.algorithm == {"name": "bi2clip", **tailopt.paper_settings("bi2clip", "QNLI")}
    found = resolved(
        "--algorithm", "Bi^2Clip", "--settings", "paper:qnli", "--ilr", "7", tables={"task": {"name": "syntoken"}}
    )
    assert found.algorithm["ilr"] == 7
    assert found.algorithm["name"] == "bi2clip"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--roundz", "3"], r"Unknown option: --roundz; did you mean 'rounds'\? Known: .*seed"),
        (["--run.roundz", "3"], r"Unknown setting: run\.roundz; did you mean 'rounds'\? \[run\] knows .*seed"),
        (["--name", "x"], r"Ambiguous setting: --name .*\. Write --task\.name or --algorithm\.name"),
        (["--rounds"], r"--rounds needs a value"),
        (["--rounds", "--seed", "3"], r"--rounds needs a value"),
        (["--rounds", "many"], r"Invalid run\.rounds: got 'many'; need a whole number"),
        (["--rounds", "1.5"], r"Invalid run\.rounds: got 1\.5; need a whole number"),
        (["--average", "3"], r"Invalid run\.average: got 3; need true or false"),
        (["--ilr", "fast"], r"Invalid ilr: got 'fast'; need a number"),
        (["--ilr", "-1"], r"Invalid ilr: -1; need 0 <= ilr"),
        (["--i_d", "0.3"], r"i_d=0\.3 exceeds i_u=0\.1"),
        (["--olr", "1"], r"unknown 'olr'.*needs i_d, i_u, ilr"),
        (["--algorithm", "avg-bicilp"], r"Unknown algorithm: 'avg-bicilp'; did you mean 'avg-biclip'"),
        (["--task", "syntokens"], r"Invalid task: unknown task 'syntokens'; did you mean 'syntoken'\?.*gaussian"),
        (["--preset", "tiny"], r"Unknown preset: 'tiny'; syntoken has paper, small"),
        (["--dimension", "twenty"], r"Invalid task\.dimension: got 'twenty'; need a whole number"),
        (["--dtype", "nn"], r"Invalid task\.dtype: got 'nn'; need a type of torch"),
        (["--settings", "QNLI"], r"Invalid settings: got 'QNLI'; need paper:DATASET"),
        (["--schedules.ilr.powr", "1"], r"Invalid schedules\.ilr: got .*power, warmup, cosine"),
        (["--schedules.lr.power", "1"], r"Unknown setting: schedules\.lr; did you mean '[io]lr'"),
        (["--schedules.ilr.power", "x"], r"Invalid schedules\.ilr\.power: got 'x'; need a number"),
        (["--schedules.ilr", "{power = 1, flor = 2}"], r"schedules\.ilr\.flor.*knows per, power, shift"),
        (["--inner_betas", "0.9"], r"Invalid inner_betas: got 0\.9; need two numbers"),
        (["--theory", "3"], r"Invalid alpha: got 3"),
        (["--run", "3"], r"Unknown option: --run"),
    ],
)  # fmt: skip
def test_mistakes_are_named(words: list[str], message: str) -> None:
    extra = ["--algorithm", "rmsprop-biclip", "--olr", "1", "--oeps", "1"] if "--theory" in words else []
    with pytest.raises(ValueError, match=message):
        resolved(*extra, *words)


def test_a_file(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('[task]\nname = "gaussian"\n[algorithm]\nname = "avg-sgd"\nilr = 0.1\n[run]\nrounds = 7\n')
    found = resolve(read(file))
    assert (found.task["name"], found.algorithm["name"], found.run.rounds) == ("gaussian", "avg-sgd", 7)
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


def test_nothing_named() -> None:
    with pytest.raises(ValueError, match=r"no task is named.*--task syntoken"):
        resolve(sections({}))
    with pytest.raises(ValueError, match=r"Invalid algorithm: none is named.*tailopt list algorithms"):
        resolve(sections({"task": {"name": "syntoken"}}))


@given(st.floats(allow_nan=False))
def test_numbers_come_back(number: float) -> None:
    """Negative, scientific, infinite: whatever Python writes is read."""
    (pair,) = split(["--projection", repr(number)], {})[1]
    assert override(sections({}), [pair])["run"]["projection"] == number


@given(st.text())
def test_any_text_has_a_value(text: str) -> None:
    assert isinstance(value(text), bool | int | float | str | list | dict)


def test_settings_are_the_arguments_of_simulate() -> None:
    """One name from the command line to the library, with the same default."""
    parameters = inspect.signature(tailopt.simulate).parameters
    made_here = {"model", "algorithm", "loss", "data", "batches", "schedules", "evaluate"}
    other = {"run", "resume", "loggers", "progress", "inplace", "describe"}
    own = {field.name: field.default for field in dataclasses.fields(RunSettings)}
    assert own.keys() == parameters.keys() - made_here - other
    for name, default in own.items():
        if name not in ("rounds", "weights"):  # of the task; equal, which is None there
            assert parameters[name].default == default, name


def test_no_task_hides_a_setting_of_run_or_algorithm() -> None:
    assert not plain_keys("task") & plain_keys("run")
    assert not plain_keys("algorithm") & plain_keys("run")
    assert plain_keys("task") & plain_keys("algorithm") == {"name"}
    assert "noise" in plain_keys("task")
    assert {*TASKS} >= {"syntoken", "gaussian"}


@pytest.mark.parametrize("name", ALGORITHMS)
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
