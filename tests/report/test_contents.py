"""Which folders a report finds, how it names them, and which runs belong together."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailopt.records.folder import Run
from tailopt.report.contents import Contents, grouped, nothing_in_common, short_names, sweeps_and_studies
from tailopt.report.page import MOST_BYTES, report_page
from tests.report import small_reports


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["runs/a", "runs/b"], ["a", "b"]),
        (["runs/a/1", "runs/b/1"], ["a/1", "b/1"]),
        (["runs", "runs/b"], ["runs", "b"]),
        ([], []),
    ],
)
def test_names_tell_folders_apart(paths: list[str], names: list[str]) -> None:
    assert short_names([Path(path) for path in paths]) == names


def test_sweeps_and_studies_are_found_at_any_depth(tmp_path: Path) -> None:
    small_reports.study(tmp_path / "deep" / "study")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "table.md").write_text("a study that has not finished")
    assert sweeps_and_studies([tmp_path, tmp_path / "deep"]) == ([], [tmp_path / "deep" / "study"])


def test_runs_that_differ_in_their_seed_alone_are_one_group() -> None:
    runs = [
        {"algorithm": "avg-sgd", "settings": {"algorithm.ilr": "0.1", "run.seed": str(seed), "run.rounds": rounds}}
        for seed, rounds in ((0, "5"), (1, "9"))
    ]
    assert grouped(runs) == [{"name": "avg-sgd", "runs": [0, 1]}]


def test_runs_of_different_tasks_have_a_sentence(tmp_path: Path) -> None:
    first = small_reports.recorded(tmp_path / "a", 1, task={"name": "syntoken"})
    second = small_reports.recorded(tmp_path / "b", 1, task={"name": "gaussian"})
    third = small_reports.recorded(tmp_path / "c", 1)
    assert nothing_in_common([first, first]) == ""
    assert nothing_in_common([first, second, third]) == (
        "These runs are of different tasks (a model of your own, gaussian, syntoken): their values cannot be compared "
        "with each other."
    )


@pytest.mark.slow
def test_ten_runs_with_everything_stay_below_three_megabytes(tmp_path: Path) -> None:
    """Many metrics over many rounds: points are thinned further until the page is small enough."""
    runs = {}
    for k in range(10):
        run = small_reports.recorded(tmp_path / str(k), 0, seed=k)
        counts = {"elements": 1000, "zero": 1, "below": 37 * k, "above": 31, "nonfinite": 0, "largest": 0.123456}
        for t in range(1, 301):
            metrics = {f"metric-{m}": (t * 7919 + m * k) % 1013 / 1013 for m in range(60)}
            statistics = {f"encoder.layer.{i}.attention.weight": {**counts, "above": (t * i) % 997} for i in range(60)}
            row = {"round": t, "loss": 1 / t, "participants": list(range(50)), "steps": [1] * 50, "excluded": []}
            run.append({**row, "weights": [0.02] * 50, "metrics": metrics, "statistics": statistics}, {"local": 0.1})
        runs[f"run {k}"] = Run.open(run.path)
    page = report_page(Contents(runs=runs), "ten", lambda run: ("loss", True), "now", "tailopt")
    assert 500_000 < len(page.encode()) <= MOST_BYTES
