"""Run folders: nothing is overwritten, what was written comes back, and a run can be gone on with."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from tailopt.records import disk
from tailopt.records.folder import Run, is_run

CONFIG = {
    "algorithm": {"name": "bi2clip", "ilr": 0.5, "clip": math.inf},
    "run": {"rounds": 60},
    "schedules": {"i_u": [1e-4, 0.25]},
}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "a" / "run", CONFIG, {"torch": "2", "cuda": None})


def rows(*numbers: int) -> list[dict[str, Any]]:
    return [{"round": number, "loss": 1.0 / number} for number in numbers]


def test_a_run_comes_back(run: Run) -> None:
    again = Run.open(str(run.path))
    assert again.config == run.config == CONFIG
    assert again.environment == run.environment == {"torch": "2", "cuda": None}
    assert again.history() == again.times() == []


def test_the_two_files_of_a_run(run: Run) -> None:
    run.append({"weights": [0.5, 0.5], "round": 1, "loss": math.inf}, {"outer": 0.25, "inner": 1.5})
    assert (run.path / "history.jsonl").read_text() == (
        '{"loss": {"$float": "inf"}, "round": 1, "weights": [0.5, 0.5]}\n'
    )
    assert (run.path / "times.jsonl").read_text() == '{"inner": 1.5, "outer": 0.25, "round": 1}\n'
    run.sync()
    assert run.times() == [{"inner": 1.5, "outer": 0.25, "round": 1}]


def test_a_used_folder_is_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match=rf"{re.escape(str(run.path))} is not empty.*'config\.toml'.*resume=True"):
        Run.create(run.path, {}, {})
    assert run.config == Run.open(run.path).config
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("dear")
    with pytest.raises(FileExistsError, match=r"thesis\.tex"):
        Run.create(tmp_path / "other", {}, {})
    with pytest.raises(FileExistsError, match="is a file"):
        Run.create(tmp_path / "other" / "thesis.tex", {}, {})


def test_an_empty_folder_and_one_that_a_kill_left_are_taken(tmp_path: Path) -> None:
    assert Run.create(tmp_path, {}, {}).config == {}
    killed = tmp_path / "killed"
    killed.mkdir()
    (killed / "environment.json").write_text("{}")
    disk.hidden_path(killed / "config.toml").write_text("half")
    assert not is_run(killed)
    assert Run.create(killed, {"a": 1}, {}).config == {"a": 1} and is_run(killed)


@pytest.mark.parametrize("name", ["", "nowhere"])
def test_what_is_no_run_is_not_opened(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"is not a run folder: it has no config\.toml"):
        Run.open(tmp_path / name)


def test_rewind_and_go_on(run: Run) -> None:
    for row in rows(1, 2, 3, 4):
        run.append(row, {"inner": 0.0})
    again = Run.open(run.path)
    again.rewind(2)
    assert again.history() == rows(1, 2) and [t["round"] for t in again.times()] == [1, 2]
    again.append(rows(3)[0], {})
    assert again.history() == rows(1, 2, 3)


def test_a_torn_line_is_gone_before_the_next_is_written(run: Run) -> None:
    run.append(rows(1)[0], {})
    for name in ("history.jsonl", "times.jsonl"):
        with (run.path / name).open("ab") as file:
            file.write(b'{"round": 2, "lo')
    again = Run.open(run.path)
    assert again.history() == rows(1)
    assert (
        (run.path / "history.jsonl").read_bytes().endswith(b'"lo')
    )  # to look changes nothing: it may still be running
    again.append(rows(2)[0], {})
    assert again.history() == rows(1, 2) and len(again.times()) == 2


def test_a_round_stands_once(run: Run) -> None:
    run.append(rows(3)[0], {})
    for writer in (run, Run.open(run.path)):
        with pytest.raises(ValueError, match=r"got round=3; need more than 3.*rewind\(2\)"):
            writer.append(rows(3)[0], {})
    assert run.history() == rows(3)


@pytest.mark.parametrize(
    ("row", "seconds", "error"),
    [
        ({"loss": 1.0}, {}, ValueError),
        ({"round": True}, {}, ValueError),
        ({"round": 1}, {"round": 2}, ValueError),
        ({"round": 1, "x": object()}, {}, TypeError),
        ({"round": 1}, {"x": object()}, TypeError),
    ],
)
def test_a_bad_row_leaves_both_files_as_they_were(
    run: Run, row: dict[str, Any], seconds: dict[str, Any], error: type[Exception]
) -> None:
    run.append({"round": 0}, {})
    with pytest.raises(error):
        run.append(row, seconds)
    assert len(run.history()) == len(run.times()) == 1
    run.append({"round": 1}, {})
    assert len(run.history()) == len(run.times()) == 2


def test_the_log_keeps_words(run: Run) -> None:
    run.log("begun")
    run.log("ended, π")
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  begun\n\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ended, π\n",
        (run.path / "log.txt").read_text(encoding="utf-8"),
    )


def test_a_row_that_did_not_fit_can_be_written_again(run: Run) -> None:
    """The disk is full in the middle of the line of round 4: a file may not grow beyond its length and some bytes."""
    resource = pytest.importorskip("resource")
    for row in rows(1, 2, 3):
        run.append(row, {"s": 1.0})
    long = {"round": 4, "text": "x" * 5000}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((run.path / "history.jsonl").stat().st_size + 100, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            run.append(long, {"s": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert run.last_round() == 3 and [row["round"] for row in run.history()] == [1, 2, 3]
    run.append(long, {"s": 1.0})
    assert run.history()[-1] == long and run.last_round() == 4
