"""What the page has of a sweep: what the library says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tailopt
from tailopt.records.checked_json import DamagedRecord, with_digest
from tailopt.report.sweep_data import is_sweep, sweep_data
from tailopt.sweeps.trials import SWEEP, TRIALS


@pytest.fixture
def result(tmp_path: Path) -> tailopt.SweepResult:
    return tailopt.sweep(
        "gaussian", "avg-sgd", space={"ilr": [0.01, 0.1, 1e9]}, rounds=3, seeds=2, report_seeds=2, progress=False,
        run=tmp_path / "sweep",
    )  # fmt: skip


def test_it_is_what_the_library_found(result: tailopt.SweepResult) -> None:
    assert result.run is not None and is_sweep(result.run)
    data = sweep_data(result.run, "mine")
    assert [row["number"] for row in data["rows"]] == [tried.number for tried in result.ranking]
    assert [row["settings"] for row in data["rows"]] == [[tried.settings["ilr"]] for tried in result.ranking]
    assert data["rows"][0]["value"] == pytest.approx(result.best.value, rel=1e-5)
    assert data["rows"][-1]["value"] is None and data["rows"][-1]["ended"].startswith("Round 1: not finite")
    assert data["fresh"] == pytest.approx(list(result.best.reported), rel=1e-5)
    for n, median, low, high in data["budget"]:
        [point] = result.budget_curve([n])
        finite = [value for value in (median, low, high) if value is not None]
        expected = [value for value in (point.median, point.low, point.high) if value < float("inf")]
        assert finite == pytest.approx(expected, rel=1e-5)


def test_a_torn_line_is_left_out(result: tailopt.SweepResult) -> None:
    assert result.run is not None
    trials = result.run / TRIALS
    before = sweep_data(result.run, "mine")["points"]
    lines = trials.read_bytes().splitlines(keepends=True)
    trials.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])
    data = sweep_data(result.run, "mine")
    assert data["points"] == before and len(data["fresh"]) == 1


def test_a_sweep_of_a_newer_version(result: tailopt.SweepResult) -> None:
    assert result.run is not None
    body = json.loads((result.run / SWEEP).read_text())
    del body["sha256"]
    (result.run / SWEEP).write_bytes(with_digest({**body, "format": 2}))
    with pytest.raises(DamagedRecord, match="sweep.json has format 2, this tailopt reads format 1. Upgrade"):
        sweep_data(result.run, "mine")
