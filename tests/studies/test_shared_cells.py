from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tailopt.progress import Progress
from tailopt.studies.runner import Grid
from tailopt.studies.shared_cells import OutOfTime, TimeLimit, run_shared
from tailopt.studies.study import StudyOptions

pytest.importorskip("fcntl", reason="this system has no locks on files")

# measures the squares of 0 to 11, and prints those that it measured itself
WORKER = """
import sys, time
from pathlib import Path
from tailopt.progress import Progress
from tailopt.studies.runner import Grid
from tailopt.studies.shared_cells import TimeLimit, run_shared
from tailopt.studies.study import StudyOptions

def square(n, tick):
    print(n, flush=True)
    time.sleep(float(sys.argv[2]))
    return n * n

grid = Grid(cells=range(12), key=lambda n: {"n": n}, measure=square)
found = run_shared(grid, Path(sys.argv[1]), Progress(False), TimeLimit(None), lambda n: 0.0)
assert found == {n: n * n for n in range(12)}
"""


def start(record: Path, seconds: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, str(record), str(seconds)], stdout=subprocess.PIPE, text=True
    )


def measured(process: subprocess.Popen[str]) -> list[int]:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return [int(line) for line in out.split()]


def test_two_processes_measure_every_cell_once_and_both_have_all_of_them(tmp_path: Path):
    record = tmp_path / "cells.jsonl"
    first, second = start(record, 0.3), start(record, 0.3)
    one, two = measured(first), measured(second)
    assert sorted(one + two) == list(range(12)) and one and two
    assert len(record.read_text().splitlines()) == 12


def test_a_cell_of_a_process_that_was_killed_is_measured_by_the_next(tmp_path: Path):
    record = tmp_path / "cells.jsonl"
    killed = start(record, 60.0)
    assert killed.stdout is not None
    assert killed.stdout.readline() == "0\n"
    killed.kill()
    killed.communicate()
    assert measured(start(record, 0.0)) == list(range(12))


def test_a_process_leaves_what_it_has_no_time_for_and_the_next_goes_on(tmp_path: Path):
    record = tmp_path / "cells.jsonl"
    seen: list[int] = []

    def slow(n: int, tick: object) -> int:
        seen.append(n)
        time.sleep(0.2)
        return -n

    grid = Grid[int, int](cells=range(20), key=lambda n: {"n": n}, measure=slow)
    began = time.monotonic()
    with pytest.raises(OutOfTime, match=r"0.5 s more would end after the limit of 0.02 minutes"):
        run_shared(grid, record, Progress(False), TimeLimit(0.02), lambda n: 0.5)
    assert time.monotonic() - began < 1.2 + 0.2
    assert 0 < len(seen) < 20 and seen == list(range(len(seen)))
    first = len(seen)
    found = run_shared(grid, record, Progress(False), TimeLimit(None), lambda n: 0.5)
    assert seen == list(range(20)) and found == {n: -n for n in range(20)}
    assert [json.loads(line)["result"] for line in record.read_text().splitlines()][first - 1] == 1 - first


@pytest.mark.parametrize("minutes", [0, -1.0, float("inf"), True])
def test_a_limit_that_is_none_is_refused(minutes: float):
    with pytest.raises(ValueError, match="Invalid minutes: got .*; need a number above 0, or leave it out"):
        StudyOptions(minutes=minutes)
