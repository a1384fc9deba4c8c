from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tailopt.algorithms import algorithm
from tailopt.engines.simulate import simulate
from tailopt.studies import rates as study
from tailopt.studies.study import StudyOptions
from tailopt.tasks.gradient_noise import GradientNoise
from tailopt.theory import theory
from tests.studies.unjudged import assert_unjudged


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("matplotlib")
    return study.run(tmp_path_factory.mktemp("rates"), StudyOptions(quick=True, progress=False))


@given(st.floats(-2.0, -0.01), st.floats(1e-6, 1e6))
@settings(max_examples=30, deadline=None)
def test_the_slope_of_a_power_law_is_its_exponent(exponent: float, base: float) -> None:
    at = study.recorded(500)
    t = torch.tensor(at, dtype=torch.float64)
    assert float(study.slope(at, base * t**exponent)) == pytest.approx(exponent, abs=1e-9)


def test_only_the_last_decade_is_fitted() -> None:
    at = study.recorded(1000)
    t = torch.tensor(at, dtype=torch.float64)
    bent = torch.where(t < 100, torch.full_like(t, 7.0), 1 / t)
    assert float(study.slope(at, bent)) == pytest.approx(-1.0, abs=1e-9)


@pytest.mark.parametrize("rounds", [20, 100, 999])
def test_recorded_rounds_rise_from_the_first_to_the_last(rounds: int) -> None:
    at = study.recorded(rounds)
    assert at[0] == 1 and at[-1] == rounds and at == sorted(set(at))


def test_the_interval_covers_a_known_slope() -> None:
    """40 studies of 12 repetitions t^-0.5 times log-normal noise: a 95 % interval misses in few of them."""
    at, missed = study.recorded(300), 0
    t = torch.tensor(at, dtype=torch.float64)
    source = torch.Generator().manual_seed(0)
    for _ in range(40):
        noise = torch.randn(1, 12, len(at), dtype=torch.float64, generator=source).mul(0.3).exp()
        _, samples = study.means(t**-0.5 * noise)
        low, high = study.interval(study.slope(at, samples))
        assert low < high
        missed += not low <= -0.5 <= high
    assert missed <= 8


def test_one_run_of_many_repetitions_and_many_runs_of_one_are_resampled_alike() -> None:
    values = torch.rand(6, 1, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (mean, samples), (other, others) = study.means(values), study.means(values.transpose(0, 1))
    assert torch.equal(mean, values.mean((0, 1))) and torch.equal(mean, other) and torch.equal(samples, others)
    assert samples.shape == (study.RESAMPLES, 5)
    # the bootstrap's spread is that of a mean of 6, with the biased variance
    assert torch.allclose(samples.std(0), values[:, 0].std(0, correction=0) / 6**0.5, rtol=0.15)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-0.9, -0.4, "holds"),
        (-0.9, -0.25, "holds with the logarithm"),
        (-0.9, -0.1, "cannot tell"),
        (-0.15, -0.1, "does not hold"),
    ],
)
def test_verdicts(low: float, high: float, expected: str) -> None:
    assert study.verdict(low, high, promise=-0.3, allowance=0.1) == expected


def test_the_watched_average_is_that_of_simulate() -> None:
    task = GradientNoise(replicas=2, separate=True)
    watch = study.Watch(task, {5, 12}, averaged=True)
    result = simulate(
        task.model(0),
        algorithm("avg-l2clip", ilr=1.5, i_u=1.0, scope="tensor"),
        loss=task.loss,
        batches=task.batches,
        nodes=3,
        rounds=12,
        local_steps=2,
        schedules=theory("avg-l2clip", 1.5),
        average=True,
        evaluate=watch,
        progress=False,
    )
    assert result.average is not None
    assert torch.allclose(watch.average, result.average().detach(), rtol=1e-12, atol=1e-12)
    assert torch.allclose(watch.values[-1], task.problem(0).gap(watch.average))
    assert len(watch.values) == 2 and watch.radius >= float(result.model().detach().norm(dim=-1).max())


def test_clipping_has_no_bias_without_thresholds_and_more_the_lower_they_are() -> None:
    free, loose, tight = (study.clipping_limit(u, 0.0, steps=200, quantiles=300) for u in (math.inf, 30.0, 3.0))
    assert free < 1e-10 < loose < 1 < tight


def test_where_thresholds_are_constant_a_run_ends_at_the_computed_limit() -> None:
    """The mean of many repetitions, so that what is left is the bias; one local step, so that none of it is drift."""
    task = GradientNoise(replicas=128)
    result = simulate(
        task.model(0),
        algorithm("avg-biclip", ilr=0.1, i_u=5.0, i_d=1.0),
        loss=task.loss,
        batches=task.batches,
        nodes=3,
        rounds=100,
        local_steps=1,
        progress=False,
    )
    found = float(task.problem(0).squared_gradient(result.model().detach().mean(0)))
    assert found == pytest.approx(study.clipping_limit(5.0, 1.0), rel=0.1)


def test_the_quick_study_writes_its_files(folder: Path) -> None:
    assert {p.name for p in folder.iterdir()} == {"cells.jsonl", "table.md", "results.json", "rates.png"}
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert [row["case"] for row in results["rows"]] == list(study.CASES)
    assert [row["variant"] for row in results["thresholds"]] == list(study.THRESHOLDS)
    for row in results["rows"]:
        assert row["promise"] == -theory(study.CASES[row["case"]].algorithm, 1.5).rate
        assert row["low"] <= row["slope"] + 0.2 and row["low"] < row["high"]
        assert min(row["values"]) > 0 and row["rounds"][-1] == 40
    text = (folder / "table.md").read_text(encoding="utf-8")
    assert all(f"| {name} |" in text for name in study.CASES)
    assert_unjudged(folder)
    assert (folder / "rates.png").stat().st_size > 10_000


def test_a_study_that_is_not_quick_judges(folder: Path) -> None:
    text = study.report(study.rates(4, 40, alphas=(1.5,), out=folder, progress=False))
    assert all(f"Rate of {name}: " in text for name in study.CASES)
    assert text.count("Claim 13: ") == 3 and "| late | verdict |" in text


def test_the_minimum_never_rises_and_noise_is_fresh_in_every_repetition(folder: Path) -> None:
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    for row in results["rows"]:
        if row["measure"].startswith("min"):
            assert row["values"] == sorted(row["values"], reverse=True)
    for line in (folder / "cells.jsonl").read_text(encoding="utf-8").splitlines():
        ends = [rep[-1] for run in json.loads(line)["answer"]["values"] for rep in run]
        assert len(ends) == 4 and len(set(ends)) == 4


def test_what_is_finished_is_not_run_again(folder: Path, tmp_path: Path) -> None:
    cells = (folder / "cells.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    marked = json.loads(cells[0])
    marked["answer"]["radius"] = 1e6  # seen again only if the cell was not run anew
    copied = tmp_path / "cells.jsonl"
    copied.write_text(json.dumps(marked) + "\n" + cells[1] + cells[2][:50], encoding="utf-8")  # the third was cut off
    found = study.rates(4, 40, alphas=(1.5,), cases=tuple(study.CASES)[:3], panel=False, out=tmp_path, progress=False)
    assert found.radius == 1e6
    lines = copied.read_text(encoding="utf-8").splitlines()
    assert lines[2] == cells[2][:50]
    again, first = json.loads(lines[3]), json.loads(cells[2])
    assert again["question"] == first["question"] and again["answer"]["values"] == first["answer"]["values"]


def test_other_settings_are_other_cells(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cells.jsonl").write_bytes((folder / "cells.jsonl").read_bytes())
    before = len((tmp_path / "cells.jsonl").read_text(encoding="utf-8").splitlines())
    study.rates(4, 20, alphas=(1.8,), cases=("bi2clip",), panel=False, out=tmp_path, progress=False)
    assert len((tmp_path / "cells.jsonl").read_text(encoding="utf-8").splitlines()) == before + 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"repetitions": 1}, "Invalid repetitions: got 1; need 2 or more"),
        ({"rounds": 10}, "Invalid rounds: got 10; need 20 or more"),
        ({"cases": ("sgd",)}, "Unknown case: 'sgd'; need some of rmsprop-biclip"),
    ],
)
def test_bad_questions(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        study.rates(**wrong, progress=False)  # type: ignore[arg-type]
