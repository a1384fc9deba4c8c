"""`records.load`: every number of a run folder is in its data frames, and damage is one sentence."""

from __future__ import annotations

import json
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import tailopt
from tailopt import records
from tailopt.records import identity
from tailopt.records.checked_json import DamagedRecord, with_digest
from tailopt.records.folder import HISTORY, TIMES, Run
from tailopt.records.identity import RUN

pandas = pytest.importorskip("pandas")
FIXTURES = Path(__file__).parent / "fixtures"


def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - 1).square().mean()


def simulated(folder: Path, algorithm: str = "avg-biclip", settings: dict[str, Any] | None = None, **more: Any) -> Any:
    arguments = {"nodes": 3, "rounds": 3, "local_steps": 2, "progress": False, **more}
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    found = tailopt.algorithm(algorithm, **(settings or {"ilr": 0.1, "i_u": 0.5, "i_d": 0.1}))
    return tailopt.simulate(
        model, found, loss=loss, batches=lambda *_: torch.ones(4, 2), run=folder, **arguments
    ).history


def test_every_round_node_and_tensor_has_a_row(tmp_path: Path) -> None:
    history = simulated(tmp_path, statistics=True, participants=2, evaluate=lambda model: {"error": 0.5, "seen": 3})
    run = records.load(tmp_path)
    assert list(run.history.index) == [1, 2, 3] and run.history.index.name == "round"
    assert run.history["loss"].tolist() == [row["loss"] for row in history]
    assert run.history["metrics.error"].tolist() == [0.5] * 3
    assert run.history["participants"].tolist() == [2] * 3
    for row in history:
        nodes = run.nodes.loc[row["round"]]
        assert (list(nodes.index), list(nodes["steps"])) == (row["participants"], row["steps"])
        assert list(nodes["weight"]) == row["weights"]
        for name, counts in row["statistics"].items():
            assert run.tensors.loc[(row["round"], name)].to_dict() == counts
    assert run.times.index.tolist() == [1, 2, 3] and (run.times["round_seconds"] > 0).all()
    assert run.settings["algorithm.i_u"] == 0.5 and run.settings.name == tmp_path.name
    assert run.environment["torch"] == str(torch.__version__)


def test_exclusions_and_a_node_drawn_twice(tmp_path: Path) -> None:
    run = Run.create(tmp_path, {"algorithm": "avg-sgd"}, {})
    left_out = {"node": 1, "tensor": "weight", "value": math.inf, "bound": None, "reason": "not finite"}
    row = {"round": 1, "loss": 0.5, "participants": [0, 0, 1], "steps": [5, 5, 2], "weights": [0.5, 0.5, 0.0]}
    run.append({**row, "excluded": [left_out], "metrics": {}, "statistics": {}}, {"local": 0.5})
    nodes = records.load(tmp_path).nodes
    assert nodes.loc[(1, 0), ["drawn", "steps", "weight"]].tolist() == [2, 5, 1.0]
    assert pandas.isna(nodes.loc[(1, 0), "excluded"])
    found = nodes.loc[(1, 1), ["excluded", "tensor", "value"]].tolist()
    assert found == ["not finite", "weight", math.inf]


def test_thresholds_that_are_auto_are_columns(tmp_path: Path) -> None:
    settings = {"ilr": 0.1, "i_u": "auto", "i_d": "auto"}
    history = simulated(tmp_path, settings=settings, rounds=20, nodes=3, local_steps=3)
    chosen = history[-1]["thresholds"]["inner"]
    last = records.load(tmp_path).history.loc[20]
    lists = isinstance(chosen["u"], list)
    assert last["thresholds.inner.u.0" if lists else "thresholds.inner.u"] == (chosen["u"][0] if lists else chosen["u"])


def test_a_run_that_has_no_round_yet_has_empty_frames(tmp_path: Path) -> None:
    Run.create(tmp_path, {"algorithm": "avg-sgd"}, {})
    run = records.load(tmp_path)
    assert [len(frame) for frame in (run.history, run.nodes, run.tensors, run.times)] == [0] * 4
    assert run.nodes.index.names == ["round", "node"] and "loss" in run.history.columns


@pytest.mark.parametrize("name", ["nodes", "simulation"])
def test_folders_of_older_versions_can_be_read(name: str) -> None:
    run = records.load(FIXTURES / name)
    assert run.history.index.tolist() == run.times.index.tolist() == [1, 2, 3]


def test_settings_of_several_runs_make_one_table(tmp_path: Path) -> None:
    for name, rate in (("a", 0.1), ("b", 0.2)):
        simulated(tmp_path / name, settings={"ilr": rate, "i_u": 0.5, "i_d": 0.1})
    table = pandas.concat([records.load(tmp_path / name).settings for name in "ab"], axis=1)
    differing = table[table["a"] != table["b"]]
    assert differing.to_dict("index") == {"algorithm.ilr": {"a": 0.1, "b": 0.2}}


# Bad input: one sentence each, which names the file


def test_a_folder_from_a_newer_version(tmp_path: Path) -> None:
    simulated(tmp_path)
    body = json.loads((tmp_path / RUN).read_text())
    del body["sha256"]
    (tmp_path / RUN).write_bytes(with_digest({**body, "format": identity.FORMAT + 1}))
    with pytest.raises(DamagedRecord, match=r"run.json has format 2, this tailopt reads formats up to 1. Upgrade"):
        records.load(tmp_path)


@pytest.mark.parametrize("cut", [1, 100])
def test_a_truncated_history(tmp_path: Path, cut: int) -> None:
    simulated(tmp_path)
    data = (tmp_path / HISTORY).read_bytes()
    (tmp_path / HISTORY).write_bytes(data[:-cut])
    with pytest.raises(DamagedRecord, match=r"history.jsonl is not what was written: it has 2 whole rows, and 3 were"):
        records.load(tmp_path)


def test_truncated_times_cost_their_rounds_alone(tmp_path: Path) -> None:
    simulated(tmp_path)
    lines = (tmp_path / TIMES).read_bytes().splitlines(keepends=True)
    (tmp_path / TIMES).write_bytes(lines[0] + b"{]\n" + lines[2][:-4])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        run = records.load(tmp_path)
    assert run.times.index.tolist() == [1] and len(run.history) == 3
    assert [str(w.message) for w in warned] and "line 2" in str(warned[0].message)


def test_what_is_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a run folder: it has no config.toml"):
        records.load(tmp_path)


def test_without_pandas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated(tmp_path)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"Data frames need pandas 2 or newer \(extra \[frames\]\).*: .*pip install"):
        records.load(tmp_path)


def test_an_old_pandas_is_refused_with_both_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.5.3")
    with pytest.raises(ImportError, match=r"need pandas 2 or newer .* and 1.5.3 is installed: .*pip install"):
        records.load(tmp_path)
