"""What the page has of a run: equal to the history, for runs that need no thinning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tailopt
from tailopt.clipping.operators import biclip
from tailopt.records.folder import Run
from tailopt.report.run_data import clipping, curves, histograms, nodes, phase_times, run_data
from tests.report import small_reports


def row(round: int, **more: Any) -> dict[str, Any]:
    plain = {"loss": 1.0, "participants": [0, 1], "steps": [1, 1], "weights": [0.5, 0.5], "excluded": []}
    return {"round": round, **plain, "metrics": {}, "statistics": {}, **more}


def test_curves_are_the_history(tmp_path: Path) -> None:
    small_reports.simulated(tmp_path / "run", tailopt.algorithm("avg-sgd", ilr=0.1), seed=0)
    run = Run.open(tmp_path / "run")
    history = run.history()
    data = run_data(run, "mine", "error", True, 1000)
    for name, values in (("loss", [r["loss"] for r in history]), ("error", [r["metrics"]["error"] for r in history])):
        x, y = data["curves"][name]["series"]
        assert x == [r["round"] for r in history]
        assert y == pytest.approx(values, rel=1e-5)
        best = min(values)
        assert data["curves"][name]["low"] == [pytest.approx(best, rel=1e-5), x[values.index(best)]]
    assert data["nodes"]["excluded"] == sum(len(r["excluded"]) for r in history)
    assert data["times"]["total"] == pytest.approx(sum(t["round_seconds"] for t in run.times()), rel=1e-5)


def test_metrics_by_dotted_names_and_another_loss() -> None:
    found = curves([row(1, metrics={"loss": 3.0, "by": {"class": 2.0}, "note": "text", "whole": True})], 10)
    assert {name: curve["last"] for name, curve in found.items()} == {
        "loss": 1.0,
        "evaluated loss": 3.0,
        "by.class": 2.0,
    }


def test_shares_are_of_all_tensors_together() -> None:
    def counts(elements: int, above: int) -> dict[str, Any]:
        return {"elements": elements, "zero": 0, "below": 0, "above": above, "nonfinite": 0, "largest": 2.0}

    found = clipping([row(1), row(2, statistics={"a": counts(30, 30), "b": counts(70, 0)})], 10)
    assert found is not None
    assert found["shares"]["above"] == [[2], [0.3]] and found["largest"] == [[2], [2.0]]
    assert found["maps"]["above"] == [[1000], [0]] and found["tensors"] == ["a", "b"]
    assert clipping([row(1)], 10) is None


def test_the_histogram_after_clipping_is_that_of_the_clipped_gradient() -> None:
    gradient = torch.randn(5000, generator=torch.Generator().manual_seed(0)).exp() * 0.1
    u, d = 0.3, 0.05

    def octaves(x: torch.Tensor) -> dict[int, int]:
        found = torch.floor(torch.log2(x.double())).int().tolist()
        return {k: found.count(k) for k in sorted(set(found))}

    recorded = {str(k): n for k, n in octaves(gradient).items()}
    [found] = histograms([row(1, statistics={"weight": {"octaves": recorded, "u": u, "d": d}})]) or []
    assert dict(found["before"]) == octaves(gradient)
    assert dict(found["after"]) == octaves(biclip(gradient, u, d))


def test_who_took_part_is_a_map() -> None:
    left_out = {"node": 1, "tensor": "w", "value": 1.5, "bound": None, "reason": "dropped"}
    found = nodes([row(1, excluded=[left_out]), row(2, participants=[1, 1, 3])])
    assert found is not None
    assert found["count"] == 4
    assert found["tookPart"] == [[1, 0], [1, 1], [0, 0], [0, 1]]
    assert found["leftOut"] == [[0, 0], [1, 0], [0, 0], [0, 0]]
    assert found["exclusions"] == [[1, 1, "dropped", "w", "1.5", ""]]


def test_maps_of_long_runs_with_many_nodes_are_small_and_lose_nobody() -> None:
    found = nodes([row(t, participants=[t % 1000]) for t in range(1, 3001)])
    assert found is not None
    assert len(found["tookPart"]) <= 64 and len(found["rounds"]) <= 160
    assert sum(map(sum, found["tookPart"])) == 3000


def test_phases_and_the_rest_add_up() -> None:
    times = [{"round": 1, "round_seconds": 2.0, "local": 1.0, "bytes_sent": 10}, {"round": 2, "round_seconds": 1.0}]
    found = phase_times(times, 10)
    assert found is not None
    assert found["totals"] == {"local": 1.0, "other": 2.0} and found["total"] == 3.0
    assert found["bytesInAll"] == 10 and found["bytes"] == [[1, 2], [10.0, 0.0]]
    assert phase_times([], 10) is None


def test_folders_of_older_versions() -> None:
    for name in ("nodes", "simulation"):
        folder = Path(__file__).parents[1] / "records" / "fixtures" / name
        data = run_data(Run.open(folder), name, "loss", True, 100)
        assert data["rounds"] == 3 and data["times"]["total"] > 0
