"""The protocol: begin, rows, end, in this order, for every way to run; functions are loggers too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tailopt
from tailopt.loggers import Logger, RunStart
from tests.loggers import small_runs


class Notes:
    """A logger as a user would write one: it imports nothing."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def begin(self, run: RunStart) -> None:
        self.seen.append(run)

    def __call__(self, row: dict[str, Any]) -> None:
        self.seen.append(row["round"])

    def end(self) -> None:
        self.seen.append("end")


def test_what_is_a_logger() -> None:
    assert isinstance(Notes(), Logger)
    assert not isinstance(print, Logger) and not isinstance([].append, Logger)


def test_a_simulation(tmp_path: Path) -> None:
    notes, rows = Notes(), []
    small_runs.simulate(loggers=[notes, rows.append], rounds=2, run=tmp_path / "run", describe={"mine": 1})
    start, *rest = notes.seen
    assert rest == [1, 2, "end"] and [row["round"] for row in rows] == [1, 2]
    assert (start.name, start.round, start.folder, start.node) == ("run", 0, tmp_path / "run", 0)
    assert [start.config["algorithm"][key] for key in ("ilr", "i_d", "i_u")] == [0.1, 0.1, 0.5]
    assert start.config["run"]["mine"] == 1
    again = Notes()
    small_runs.simulate(loggers=[again], rounds=3, run=tmp_path / "run", describe={"mine": 1}, resume=True)
    assert again.seen[0].round == 2 and again.seen[1:] == [3, "end"]


def test_without_a_folder_the_name_is_that_of_the_algorithm() -> None:
    notes = Notes()
    small_runs.simulate(loggers=[notes])
    assert (notes.seen[0].name, notes.seen[0].folder) == ("avg-biclip", None)


def test_a_run_that_stops_is_told_its_end() -> None:
    notes = Notes()
    with pytest.raises(small_runs.Stopped):
        small_runs.simulate(loggers=[notes, small_runs.stop_after(2)])
    assert notes.seen[1:] == [1, 2, "end"]


def test_if_one_cannot_begin_the_others_end() -> None:
    class Broken(Notes):
        def begin(self, run: RunStart) -> None:
            raise OSError("no room")

    first, last = Notes(), Notes()
    with pytest.raises(OSError, match="no room"):
        small_runs.simulate(loggers=[first, Broken(), last])
    assert first.seen[1:] == ["end"] and last.seen == []


def test_all_are_told_the_end_where_one_fails() -> None:
    class Broken(Notes):
        def end(self) -> None:
            raise OSError("no room")

    last = Notes()
    with pytest.raises(OSError, match="no room"):
        small_runs.simulate(loggers=[Broken(), last], rounds=1)
    assert last.seen[1:] == [1, "end"]


def test_a_sweep_tells_every_trial() -> None:
    notes, rows = Notes(), []
    result = tailopt.sweep(
        "gaussian", "avg-sgd", space={"ilr": [0.01, 0.1]}, seeds=2, report_seeds=1, rounds=3, progress=False,
        loggers=[notes, rows.append],
    )  # fmt: skip
    starts = [seen for seen in notes.seen if isinstance(seen, RunStart)]
    best = result.best.number
    named = [f"point-{point}-seed-{seed}" for point in (0, 1) for seed in (0, 1)]
    assert sorted(start.trial for start in starts) == sorted([*named, f"report-{best}-seed-2"])
    assert {start.name for start in starts} == {"avg-sgd"}
    assert all(start.config["algorithm"]["ilr"] in (0.01, 0.1) for start in starts)
    assert notes.seen.count("end") == len(starts) == 5
    assert {(row["point"], row["seed"]) for row in rows if row["split"] == "tuning"} == {
        (point, seed) for point in (0, 1) for seed in (0, 1)
    }
