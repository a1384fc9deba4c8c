from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from tailopt.algorithms import algorithm
from tailopt.engines.simulate import simulate
from tailopt.studies import rate_cells as cells
from tailopt.studies import rate_fits as fits
from tailopt.studies import rates as study
from tailopt.studies.runner import read_record
from tailopt.studies.study import StudyOptions
from tailopt.tasks.gradient_noise import GradientNoise
from tailopt.theory import theory
from tests.studies.unjudged import assert_unjudged


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("matplotlib")
    return study.run(tmp_path_factory.mktemp("rates"), StudyOptions(quick=True, progress=False))


@pytest.mark.parametrize("rounds", [20, 100, 999])
def test_recorded_rounds_rise_from_the_first_to_the_last(rounds: int) -> None:
    at = cells.recorded(rounds)
    assert at[0] == 1 and at[-1] == rounds and at == sorted(set(at))


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
    assert fits.verdict(low, high, promise=-0.3, allowance=0.1) == expected


def test_the_watched_average_is_that_of_simulate() -> None:
    task = GradientNoise(replicas=2, separate=True)
    watch = cells.MeasureRecorder(task, {5, 12}, averaged=True)
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
    free, loose, tight = (cells.clipping_limit(u, 0.0, steps=200, quantiles=300) for u in (math.inf, 30.0, 3.0))
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
    assert found == pytest.approx(cells.clipping_limit(5.0, 1.0), rel=0.1)


def test_the_quick_study_writes_its_files(folder: Path) -> None:
    assert {p.name for p in folder.iterdir()} == {"cells.jsonl", "table.md", "results.json", "rates.png"}
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert [row["case"] for row in results["rows"]] == list(cells.CASES)
    assert [row["variant"] for row in results["thresholds"]] == list(cells.THRESHOLDS)
    for row in results["rows"]:
        assert row["promise"] == -theory(cells.CASES[row["case"]].algorithm, 1.5).rate
        assert row["low"] <= row["slope"] + 0.2 and row["low"] < row["high"]
        assert min(row["values"]) > 0 and row["rounds"][-1] == 40
    text = (folder / "table.md").read_text(encoding="utf-8")
    assert all(f"| {name} |" in text for name in cells.CASES)
    assert_unjudged(folder)
    assert (folder / "rates.png").stat().st_size > 10_000


def test_a_study_that_is_not_quick_judges(folder: Path) -> None:
    text = study.report(fits.rates(4, 40, alphas=(1.5,), out=folder, progress=False))
    assert all(f"Rate of {name}: " in text for name in cells.CASES)
    assert text.count("Claim 13: ") == 3 and "| late | verdict |" in text


def test_the_minimum_never_rises_and_noise_is_fresh_in_every_repetition(folder: Path) -> None:
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    for row in results["rows"]:
        if row["measure"].startswith("min"):
            assert row["values"] == sorted(row["values"], reverse=True)
    for line in (folder / "cells.jsonl").read_text(encoding="utf-8").splitlines():
        ends = [rep[-1] for run in json.loads(line)["result"]["values"] for rep in run]
        assert len(ends) == 4 and len(set(ends)) == 4


def test_what_is_finished_is_not_run_again(folder: Path, tmp_path: Path) -> None:
    lines = (folder / "cells.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    marked = json.loads(lines[0])
    marked["result"]["radius"] = 1e6  # seen again only if the cell did not run again
    copied = tmp_path / "cells.jsonl"
    copied.write_text(json.dumps(marked) + "\n" + lines[1] + lines[2][:50], encoding="utf-8")  # the third was cut off
    found = fits.rates(4, 40, alphas=(1.5,), cases=tuple(cells.CASES)[:3], panel=False, out=tmp_path, progress=False)
    assert found.radius == 1e6
    after = copied.read_text(encoding="utf-8").splitlines()
    assert len(after) == 3
    again, first = json.loads(after[2]), json.loads(lines[2])
    assert again["cell"] == first["cell"] and again["result"]["values"] == first["result"]["values"]


def test_a_record_of_an_older_version_is_read(folder: Path, tmp_path: Path) -> None:
    """A quick study of the version before cells had one format: nothing runs again, and the values are the same."""
    older = Path(__file__).parent / "older_records" / "rates.jsonl"
    shutil.copy(older, tmp_path / "cells.jsonl")
    study.run(tmp_path, StudyOptions(quick=True, progress=False))
    assert (tmp_path / "cells.jsonl").read_bytes() == older.read_bytes()
    ours, theirs = (read_record(path / "cells.jsonl") for path in (folder, tmp_path))
    assert ours.keys() == theirs.keys()
    for cell, found in ours.items():
        # another processor rounds otherwise, and where a coordinate changes its sign BiClip makes a step of that: 0.2 %
        assert torch.allclose(torch.tensor(found["values"]), torch.tensor(theirs[cell]["values"]), rtol=1e-2, atol=0)


def test_other_settings_are_other_cells(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cells.jsonl").write_bytes((folder / "cells.jsonl").read_bytes())
    before = len((tmp_path / "cells.jsonl").read_text(encoding="utf-8").splitlines())
    fits.rates(4, 20, alphas=(1.8,), cases=("bi2clip",), panel=False, out=tmp_path, progress=False)
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
        fits.rates(**wrong, progress=False)  # type: ignore[arg-type]
