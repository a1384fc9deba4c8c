"""Configurations: the command line over the file, every default filled in, mistakes named."""

from __future__ import annotations

import math
from typing import Any

import pytest

import tailopt
from tailopt.cli.config_file import sections
from tailopt.cli.configuration import resolve
from tailopt.cli.overrides import apply_overrides, split_arguments
from tailopt.schedules import Power

TABLES: dict[str, dict[str, Any]] = {
    "task": {"name": "syntoken", "preset": "small"},
    "algorithm": {"name": "avg-biclip", "ilr": 0.5, "i_u": 0.1, "i_d": 0.01},
}


def resolved(*words: str, tables: dict[str, Any] = TABLES) -> Any:
    rest, overrides = split_arguments(words, {})
    assert rest == []
    return resolve(apply_overrides(sections(tables), overrides))


def test_the_task_gives_the_defaults() -> None:
    configuration = resolved()
    run = configuration.run
    assert (run.rounds, run.nodes, run.local_steps, run.batch_size) == (60, 10, 5, 32)
    assert configuration.task == {
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
    configuration = resolved(*task, *method, "--run.seed", "3", "--average", "--weights", "1,2.5,3")
    assert [configuration.task[key] for key in ("noise", "dimension", "dtype")] == ["none", 12, "float64"]
    assert configuration.algorithm["name"] == "bi2clip"
    assert (configuration.algorithm["i_u"], configuration.algorithm["o_u"]) == (0.2, math.inf)
    assert (configuration.run.seed, configuration.run.average, configuration.run.weights) == (3, True, [1.0, 2.5, 3.0])
    assert configuration.build_task().dimension == 12
    assert next(iter(configuration.build_task().model(0).parameters())).dtype.itemsize == 8


def test_none_removes_a_setting() -> None:
    assert resolved("--algorithm", "avg-l2clip", "--i_d", "none").algorithm == {
        "name": "avg-l2clip",
        "ilr": 0.5,
        "i_u": 0.1,
    }
    tables = {**TABLES, "run": {"projection": 3.0}, "schedules": {"ilr": {"power": -0.5}}}
    configuration = resolved("--projection", "none", "--schedules.ilr", "none", tables=tables)
    assert configuration.run.projection is None
    assert configuration.schedules == {}


def test_schedules() -> None:
    by_step = ["--schedules.ilr.power", "-0.5", "--schedules.ilr.per", "step"]
    configuration = resolved(*by_step, "--schedules.i_u", "[{warmup = 4}, {cosine = 9}]")
    made = configuration.build_schedules()
    assert made["ilr"] == Power(-0.5, "step")
    assert made["i_u"].factor(2) == pytest.approx(0.5 * (1 + math.cos(math.pi / 9)) / 2)


def test_theory_gives_schedules_that_are_not_written() -> None:
    words = ("--algorithm", "rmsprop-biclip", "--olr", "1", "--oeps", "0.1", "--theory", "1.5")
    made = resolved(*words).build_schedules()
    assert made == tailopt.theory("rmsprop-biclip", 1.5).schedules
    with pytest.warns(UserWarning, match="condition"):
        own = resolved(*words, "--schedules.i_u.power", "0.9").build_schedules()
    assert own["i_u"] == Power(0.9)
    assert own["ilr"] == made["ilr"]


def test_the_papers_settings_come_first() -> None:
    configuration = resolved(
        "--algorithm", "bi2clip", "--settings", "paper:QNLI", tables={"task": {"name": "syntoken"}}
    )
    assert configuration.algorithm == {"name": "bi2clip", **tailopt.paper_settings("bi2clip", "QNLI")}
    configuration = resolved(
        "--algorithm", "Bi^2Clip", "--settings", "paper:qnli", "--ilr", "7", tables={"task": {"name": "syntoken"}}
    )
    assert configuration.algorithm["ilr"] == 7
    assert configuration.algorithm["name"] == "bi2clip"


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
        (["--preset", "tiny"], r"Unknown preset: 'tiny'\. syntoken has paper, small"),
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


def test_nothing_named() -> None:
    with pytest.raises(ValueError, match=r"no task is named.*--task syntoken"):
        resolve(sections({}))
    with pytest.raises(ValueError, match=r"Invalid algorithm: none is named.*tailopt list algorithms"):
        resolve(sections({"task": {"name": "syntoken"}}))
