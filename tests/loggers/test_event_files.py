"""`TensorBoard`: TensorBoard's own reader finds every number of the history in the event files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import tailopt
from tailopt.loggers import RunStart, TensorBoard, row_numbers, row_texts
from tests.loggers import small_runs

READ_EVERYTHING = {"tensors": 0}


def read(folder: Path) -> tuple[dict[str, dict[int, float]], dict[str, dict[int, str]]]:
    """Numbers and texts of the event files in a folder by tag and step, by TensorBoard's reader."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    util = pytest.importorskip("tensorboard.util.tensor_util")
    events = reader.EventAccumulator(str(folder), size_guidance=READ_EVERYTHING)
    events.Reload()
    numbers: dict[str, dict[int, float]] = {}
    texts: dict[str, dict[int, str]] = {}
    for tag in events.Tags()["tensors"]:
        plugin = events.SummaryMetadata(tag).plugin_data.plugin_name
        for event in events.Tensors(tag):
            value = util.make_ndarray(event.tensor_proto).reshape(-1)[0]
            if plugin == "scalars":
                numbers.setdefault(tag, {})[event.step] = value.item()
            else:
                texts.setdefault(tag, {})[event.step] = value.decode()
    return numbers, texts


@pytest.fixture(autouse=True)
def _installed() -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed (the extra tensorboard)")


def test_an_event_file_holds_every_number_of_the_history(tmp_path: Path) -> None:
    history = small_runs.eventful_history(run=tmp_path / "run", loggers=[TensorBoard()])
    numbers, texts = read(tmp_path / "run" / "tensorboard")
    assert small_runs.by_round(numbers) == small_runs.same({row["round"]: row_numbers(row) for row in history})
    assert "i_u = 0.5" in texts.pop("settings")[0]
    assert small_runs.by_round(texts) == {row["round"]: row_texts(row) for row in history if row_texts(row)}


def test_after_a_resume_there_is_one_curve(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(small_runs.Stopped):
        small_runs.simulate(run=run, loggers=[TensorBoard(), small_runs.stop_after(3)], checkpoint_every=2, rounds=6)
    history = small_runs.simulate(run=run, loggers=[TensorBoard()], checkpoint_every=2, rounds=6, resume=True)
    numbers, _ = read(run / "tensorboard")
    assert numbers["loss"] == {row["round"]: row["loss"] for row in history}


def test_every_trial_of_a_sweep_is_a_run(tmp_path: Path) -> None:
    result = tailopt.sweep(
        "gaussian", "avg-sgd", space={"ilr": [0.01, 0.1]}, seeds=1, report_seeds=1, rounds=3, progress=False,
        run=tmp_path / "sweep", loggers=[TensorBoard()],
    )  # fmt: skip
    folder = tmp_path / "sweep" / "tensorboard"
    best = result.best.number
    assert sorted(path.name for path in folder.iterdir()) == [
        "point-0-seed-0", "point-1-seed-0", f"report-{best}-seed-1",
    ]  # fmt: skip
    for trial in (*result.trials, *result.reports):
        kind = "point" if trial.split == "tuning" else "report"
        numbers, texts = read(folder / f"{kind}-{trial.number}-seed-{trial.seed}")
        assert numbers["loss"] == {rung.round: rung.loss for rung in trial.rungs}
        assert f"algorithm.ilr = {trial.settings['ilr']}" in texts["settings"][0]


def test_only_node_0_writes(tmp_path: Path) -> None:
    logger = TensorBoard(tmp_path / "logs")
    logger.begin(RunStart(name="run", config={}, node=1))
    logger({"round": 1, "loss": 0.5})
    logger.end()
    assert not (tmp_path / "logs").exists()


def test_without_any_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"TensorBoard\(\) has no folder, and the run has none either"):
        small_runs.simulate(loggers=[TensorBoard()])


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("tensorboard.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match=r"Event files need tensorboard 2.14 or newer .*: .*pip install"):
        TensorBoard()


def test_an_old_package_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.9.1")
    with pytest.raises(ImportError, match=r"need tensorboard 2.14 or newer .* 2.9.1 is installed: .*pip install"):
        TensorBoard()


def test_the_folder_that_is_given(tmp_path: Path) -> None:
    rows: Any = small_runs.simulate(loggers=[TensorBoard(tmp_path / "logs")])
    assert read(tmp_path / "logs")[0]["loss"] == {row["round"]: row["loss"] for row in rows}
