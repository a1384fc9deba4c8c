from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tailopt
from tailopt.studies import pretraining
from tailopt.studies.pretraining import (
    NESTED,
    REFERENCE,
    SMALL,
    PretrainingCell,
    PretrainingPlan,
    data_parallel,
    mean_loss,
    summarise,
)
from tailopt.studies.study import StudyOptions
from tests.studies.unjudged import assert_unjudged

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "texts"
    made.mkdir()
    for name, sentence in (("a", "the sea is calm to-night. "), ("b", "the tide is full, the moon lies fair. ")):
        (made / f"{name}.txt").write_text(sentence * 200, encoding="utf-8")
    return made


@pytest.fixture
def plan(folder: Path) -> PretrainingPlan:
    return replace(SMALL, data=str(folder), blocks=8, rounds=2, local_steps=3, budget=1, seeds=(0,), counts=(2, 4))


def test_one_node_that_keeps_its_adamw_is_data_parallel_training(plan: PretrainingPlan):
    numbers = {"ilr": 3e-3, "ieps": 1e-8, "weight_decay": 0.01}
    problem = plan.task()
    found = data_parallel(plan, problem, PretrainingCell(REFERENCE, 1, 0), numbers)
    result = tailopt.simulate(
        problem.model(0),
        tailopt.algorithm("avg-adamw", inner_state="keep", **numbers),
        loss=problem.loss,
        data=problem.nodes(0, 1),
        batch_size=8,
        rounds=2,
        local_steps=3,
        evaluate=lambda model: problem.evaluate(model, 0),
        progress=False,
    )
    # x + (x' - x) is not x' to the last bit, and that is all there is between them
    assert [row["metrics"]["loss"] for row in result.history] == pytest.approx(found, rel=1e-5)


def test_data_parallel_training_goes_by_the_mean_gradient_of_the_nodes(plan: PretrainingPlan):
    problem = plan.task()
    model = problem.model(0)
    parts = [node[:2] for node in problem.nodes(0, 4)]
    one = torch.autograd.grad(mean_loss(problem, model, parts), list(model.parameters()))
    each = [torch.autograd.grad(problem.loss(model, part), list(model.parameters())) for part in parts]
    for found, gradients in zip(one, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(found, torch.stack(gradients).mean(0), rtol=1e-3, atol=1e-6)
    uneven = [parts[0], tuple(column[:1] for column in parts[1])]
    expected = (problem.loss(model, parts[0]) + problem.loss(model, uneven[1])) / 2
    assert float(mean_loss(problem, model, uneven).detach()) == pytest.approx(float(expected.detach()))


def test_the_number_of_nodes_changes_no_token_of_a_step(plan: PretrainingPlan):
    problem = plan.task()
    seen = []
    for nodes in plan.counts:
        streams = pretraining.node_data(problem.nodes(0, nodes), 0, plan.blocks // nodes)  # type: ignore[attr-defined]
        seen.append(sum(len(next(iter(stream.batches(0, 1)))[0]) for stream in streams))
    assert seen == [plan.blocks] * len(plan.counts)


def test_a_study_runs_and_a_second_one_goes_on_with_it(
    plan: PretrainingPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    out = pretraining.run_plan(tmp_path / "out", plan)
    assert {path.name for path in out.iterdir()} >= {"table.md", "results.json", "pretraining.png", "cells.jsonl"}
    assert "15 runs of 6 steps of 8 blocks on cpu" in capsys.readouterr().err  # said before anything is trained
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert {row["algorithm"] for row in results["rows"]} == {REFERENCE, *NESTED}
    assert all(len(curve) == 2 for row in results["rows"] for curve in row["curves"])
    assert all(row["gaps"] == [0.0] for row in results["rows"] if row["algorithm"] == REFERENCE)
    table = (out / "table.md").read_text(encoding="utf-8")
    assert all(name in table for name in (REFERENCE, *NESTED)) and "4 nodes, by gap:" in table

    again: list[tuple[str, int]] = []
    real = pretraining.trained

    def counting(plan: PretrainingPlan, cell: PretrainingCell, settings: object, split: str) -> list[float]:
        again.append((cell.algorithm, cell.nodes))
        return real(plan, cell, settings, split)  # type: ignore[arg-type]

    monkeypatch.setattr(pretraining, "trained", counting)
    record = out / "cells.jsonl"
    kept = record.read_bytes()
    record.write_bytes(kept[:-20])  # as if it had been killed while it wrote the last line
    pretraining.run_plan(out, plan, progress=False)
    assert again == [("bi2clip", 4)]
    assert (out / "table.md").read_text(encoding="utf-8") == table


def test_a_quick_study_ranks_nothing(plan: PretrainingPlan, tmp_path: Path):
    plan = replace(plan, algorithms=("diloco",))
    out = pretraining.run_plan(tmp_path / "out", plan, progress=False, verdicts=False)
    assert_unjudged(out)
    assert "by gap:" not in (out / "table.md").read_text(encoding="utf-8")


def test_gaps_are_percents_of_the_reference_with_the_same_nodes_and_seed(plan: PretrainingPlan):
    plan = replace(plan, algorithms=("diloco",), counts=(2,), seeds=(0, 1))
    curves = {
        PretrainingCell(REFERENCE, 2, 0): [3.0, 2.0],
        PretrainingCell(REFERENCE, 2, 1): [3.0, 4.0],
        PretrainingCell("diloco", 2, 0): [3.0, 2.2],
        PretrainingCell("diloco", 2, 1): [3.0, math.inf],
    }
    results = summarise(plan, {REFERENCE: {}, "diloco": {}}, curves)
    assert results.row("diloco", 2).gaps == pytest.approx([10.0, math.inf])
    assert "| diloco | inf | inf |" in pretraining.report(results)


def test_blocks_that_cannot_be_dealt_out_are_refused(plan: PretrainingPlan, tmp_path: Path):
    with pytest.raises(ValueError, match=r"Invalid blocks: got 6; need a multiple of 4, the number of nodes"):
        pretraining.run_plan(tmp_path, replace(plan, blocks=6))


def test_algorithms_without_ranges_are_refused(plan: PretrainingPlan, tmp_path: Path):
    with pytest.raises(ValueError, match=r"Invalid algorithms: got 'avg-sgd'; need some of diloco, adam2"):
        pretraining.run_plan(tmp_path, replace(plan, algorithms=("diloco", "avg-sgd")))


def test_a_study_without_data_says_so_before_anything_is_run(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"Invalid data: none are named. Give a folder of text files"):
        pretraining.run(tmp_path, StudyOptions(preset="small"))
