"""`WandB`: the offline file, read by the record classes of wandb, holds every number of the history."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tailopt
from tailopt.loggers import RunStart, WandB, row_numbers, row_texts
from tests.loggers import small_runs

pytest.importorskip("wandb", reason="wandb is not installed (the extra wandb)")
HEADER, BLOCK = 7, 32768  # of LevelDB's log format, in which wandb frames its records


def records(file: Path) -> Iterator[Any]:
    """The records of an offline file."""
    proto = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    data, at, parts = file.read_bytes(), HEADER, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:  # the rest of a block is padding
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield proto.Record.FromString(parts)
            parts = b""


def finished_records(file: Path) -> list[Any]:
    """The records of a run that has finished; wandb's own process may write the last ones a little later."""
    deadline = time.monotonic() + 30
    while True:
        found = list(records(file))
        if any(record.HasField("exit") for record in found):
            return found
        assert time.monotonic() < deadline, f"{file} has no end"
        time.sleep(0.05)


def read(folder: Path) -> list[tuple[Any, dict[int, dict[str, Any]]]]:
    """The run record and the history by step of every offline run in a folder."""
    found = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        run, history = None, {}
        for record in finished_records(file):
            if record.HasField("run"):
                run = record.run
            if record.HasField("history"):
                items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
                history[int(items.pop("_step"))] = {
                    name: value(text) for name, text in items.items() if not name.startswith("_")
                }
        found.append((run, history))
    return found


def value(text: str) -> Any:
    """A value as wandb writes it: numbers that are not finite are texts."""
    special = {'"NaN"': math.nan, '"Infinity"': math.inf, '"-Infinity"': -math.inf}
    return special[text] if text in special else json.loads(text)


def config(run: Any) -> dict[str, Any]:
    return {item.key: json.loads(item.value_json) for item in run.config.update}


def test_the_offline_file_holds_every_number_of_the_history(tmp_path: Path) -> None:
    history = small_runs.eventful_history(run=tmp_path / "first", loggers=[WandB()])
    [(run, logged)] = read(tmp_path / "first")
    assert small_runs.same(logged) == small_runs.same(
        {row["round"]: {**row_numbers(row), **row_texts(row)} for row in history}
    )
    assert (run.display_name, run.project) == ("first", "tailopt")
    assert config(run)["algorithm"]["i_u"] == 0.5


def test_after_a_resume_the_further_rounds_are_a_run_of_their_own(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(small_runs.Stopped):
        small_runs.simulate(run=run, loggers=[WandB(), small_runs.stop_after(2)], rounds=4)
    history = small_runs.simulate(run=run, loggers=[WandB()], rounds=4, resume=True)
    rounds = sorted(list(logged) for _, logged in read(run))
    assert rounds == [[1, 2], [3, 4]]
    losses = {step: row["loss"] for _, logged in read(run) for step, row in logged.items()}
    assert losses == {row["round"]: row["loss"] for row in history}


def test_every_trial_of_a_sweep_is_a_run_of_one_group(tmp_path: Path) -> None:
    result = tailopt.sweep(
        "gaussian", "avg-sgd", space={"ilr": [0.01, 0.1]}, seeds=1, report_seeds=0, rounds=3, progress=False,
        run=tmp_path / "sweep", loggers=[WandB("my-project", tags=["tuning"])],
    )  # fmt: skip
    found = {run.display_name: (run, logged) for run, logged in read(tmp_path / "sweep")}
    assert {run.run_group for run, _ in found.values()} == {"sweep"}
    for trial in result.trials:
        run, logged = found[f"point-{trial.number}-seed-0"]
        assert {step: row["loss"] for step, row in logged.items()} == {rung.round: rung.loss for rung in trial.rungs}
        assert config(run)["algorithm"] == {"name": "avg-sgd", **trial.settings}
        assert (run.project, list(run.tags)) == ("my-project", ["tuning"])


def test_only_node_0_writes(tmp_path: Path) -> None:
    logger = WandB(folder=tmp_path)
    logger.begin(RunStart(name="run", config={}, node=1))
    logger({"round": 1, "loss": 0.5})
    logger.end()
    assert not [*tmp_path.iterdir()]


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"Runs of Weights & Biases need wandb 0.20 or newer .*: .*pip install"):
        WandB()


def test_an_old_package_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.15.1")
    with pytest.raises(ImportError, match=r"need wandb 0.20 or newer .* and 0.15.1 is installed: .*pip install"):
        WandB()
