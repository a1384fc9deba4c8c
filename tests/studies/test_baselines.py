from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tailopt.studies import baselines
from tailopt.studies.baselines import report
from tailopt.studies.comparison import AlgorithmResult, Comparison, ComparisonPlan, SeedRun, TaskSpec
from tailopt.studies.study import StudyOptions
from tests.studies.unjudged import assert_unjudged


def test_fedprox_is_searched_by_its_factor_and_all_are_told_apart_from_fedavg(tmp_path: Path, monkeypatch):
    label, settings = next(iter(baselines.SYNTOKEN.items()))
    monkeypatch.setattr(baselines, "SYNTOKEN", {label: {**settings, "samples": 200, "dimension": 12}})
    monkeypatch.setattr(
        baselines, "syntoken_plan",
        lambda options: replace(PLAN(options), run={"weights": "samples", "rounds": 3, "nodes": 4}, widenings=0),
    )  # fmt: skip
    options = StudyOptions(preset="small", budget=3, seeds=5, algorithms="avg-sgd,fedprox", progress=False)
    out = baselines.run(tmp_path / "out", options)
    found = json.loads((out / "results.json").read_text(encoding="utf-8"))
    by_name = {cell["algorithm"]: cell for cell in found["cells"]}
    assert by_name["avg-sgd"]["settings"].keys() == {"ilr"}
    assert by_name["fedprox"]["settings"].keys() == {"ilr", "proximal"}
    assert len({trial["settings"]["proximal"] for trial in by_name["fedprox"]["trials"]}) == 3
    assert by_name["fedprox"]["ranges"]["proximal"] == [1e-3, 10.0]
    table = (out / "table.md").read_text(encoding="utf-8")
    assert "| avg-sgd (FedAvg) |" in table and "| fedprox (FedProx) |" in table
    assert "- outer proximal: proximal 0.001 to 10" in table


PLAN = baselines.syntoken_plan


def test_a_quick_study_judges_nothing(tmp_path: Path, monkeypatch):
    label, settings = next(iter(baselines.SYNTOKEN.items()))
    monkeypatch.setattr(baselines, "SYNTOKEN", {label: {**settings, "samples": 200, "dimension": 12}})
    assert_unjudged(baselines.run(tmp_path / "out", StudyOptions(quick=True, progress=False, algorithms="avg-sgd")))


def test_an_algorithm_is_better_where_its_interval_says_so():
    def cell(name: str, errors: list[float]) -> AlgorithmResult:
        return AlgorithmResult(
            "SynToken", name, {}, tuple(SeedRun(i, {"error": e}, [], []) for i, e in enumerate(errors))
        )

    reference = [2.0, 2.1, 2.0, 2.2, 2.1]
    plan = ComparisonPlan({"SynToken": TaskSpec("syntoken")}, ("avg-sgd", "yogi-sgd", "bi2clip"), space="regression")
    cells = (
        cell("avg-sgd", reference),
        cell("yogi-sgd", [e * (1.2 if i % 2 else 0.8) for i, e in enumerate(reference)]),
        cell("bi2clip", [e / (2 + 0.01 * i) for i, e in enumerate(reference)]),
    )
    text = report(Comparison(plan, {}, cells))
    first = text.split("## How")[0]
    rows = {line.split(" |")[0].removeprefix("| "): line for line in first.splitlines() if line.startswith("| ")}
    assert rows["bi2clip"].endswith("| better |") and rows["yogi-sgd (FedYogi)"].endswith("| cannot tell |")
    assert rows["avg-sgd (FedAvg)"].endswith("| – | – |")
    assert text.index("| bi2clip |") < text.index("| avg-sgd (FedAvg) |")


def test_what_cannot_be_run_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="Unknown task: 'Homer'; need SynToken or Philosopher"):
        baselines.run(tmp_path, StudyOptions(task="Homer"))
    with pytest.raises(ValueError, match="Unknown algorithm: 'fedprx'; did you mean 'fedprox'"):
        baselines.run(tmp_path, StudyOptions(algorithms="fedprx"))
    with pytest.raises(ValueError, match="SynToken is drawn from a seed"):
        baselines.run(tmp_path, StudyOptions(data="texts"))
