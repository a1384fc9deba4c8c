"""The grid of cells: every result is recorded once, whatever stops it, and older records are read."""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from tailopt.progress import Progress
from tailopt.studies.runner import Grid, Tick, digest, older_file, read_record, run_grid, write_results

SILENT = Progress(False)


@dataclass(frozen=True)
class Cell:
    name: str
    seed: int


@dataclass(frozen=True)
class Outcome:
    losses: tuple[float, ...]


CELLS = [Cell(name, seed) for name in ("a", "b") for seed in (0, 1)]


def grid(measured: list[Cell], cells: list[Cell] = CELLS, **more: Any) -> Grid[Cell, Outcome]:
    def measure(cell: Cell, tick: Tick) -> Outcome:
        measured.append(cell)
        return Outcome((0.1 + cell.seed, math.inf))

    return Grid(
        cells=cells,
        key=asdict,
        measure=measure,
        decode=lambda value: Outcome(tuple(value["losses"])),
        **more,
    )


def test_results_come_in_the_order_of_the_cells_and_are_recorded_exactly(tmp_path: Path) -> None:
    measured: list[Cell] = []
    results = run_grid(grid(measured), tmp_path / "new" / "cells.jsonl", SILENT)
    assert measured == CELLS == list(results)
    assert results[CELLS[1]] == Outcome((1.1, math.inf))
    lines = (tmp_path / "new" / "cells.jsonl").read_text(encoding="utf-8").splitlines()
    assert lines[1] == '{"cell": {"name": "a", "seed": 1}, "result": {"losses": [1.1, {"$float": "inf"}]}}'


def test_a_second_run_measures_what_is_missing(tmp_path: Path) -> None:
    record = tmp_path / "cells.jsonl"
    first = run_grid(grid([]), record, SILENT)
    record.write_bytes(record.read_bytes()[:-9])  # as a kill would leave it: the last cell counts as not run
    measured: list[Cell] = []
    assert run_grid(grid(measured, [*CELLS, Cell("c", 7)]), record, SILENT) == {
        **first,
        Cell("c", 7): Outcome((7.1, math.inf)),
    }
    assert measured == [CELLS[-1], Cell("c", 7)]
    assert len(record.read_text(encoding="utf-8").splitlines()) == 5


def test_without_a_record_everything_is_measured(tmp_path: Path) -> None:
    measured: list[Cell] = []
    run_grid(grid(measured), None, SILENT)
    run_grid(grid(measured), None, SILENT)
    assert measured == [*CELLS, *CELLS] and not any(tmp_path.iterdir())


def test_a_line_that_cannot_be_read_is_named_and_its_cell_runs_again(tmp_path: Path) -> None:
    record = tmp_path / "cells.jsonl"
    run_grid(grid([]), record, SILENT)
    lines = record.read_text(encoding="utf-8").splitlines()
    record.write_text("\n".join([lines[0], lines[1][:20], *lines[2:]]) + "\n", encoding="utf-8")
    measured: list[Cell] = []
    with pytest.warns(UserWarning, match=r"cells.jsonl, line 2: .* is no result .*Its cell runs again"):
        run_grid(grid(measured), record, SILENT)
    assert measured == [CELLS[1]]


def test_a_result_is_recorded_before_what_comes_after_it(tmp_path: Path) -> None:
    record = tmp_path / "cells.jsonl"
    recorded = []

    def after(cell: Cell) -> None:
        recorded.append(len(read_record(record)))

    run_grid(grid([], after=after), record, SILENT)
    assert recorded == [1, 2, 3, 4]


def test_progress_counts_the_units_of_missing_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Every(Progress):
        """Notes every update."""

        def update(self, done: int, total: int, text: str) -> None:
            shown.append((done, total, text))

    shown: list[tuple[int, int, str]] = []

    def measure(cell: Cell, tick: Tick) -> Outcome:
        tick(2)
        return Outcome(())

    cells = Grid(
        cells=CELLS[:2],
        key=asdict,
        measure=measure,
        decode=lambda value: Outcome(tuple(value["losses"])),
        label=lambda cell: f"{cell.name}, seed {cell.seed}",
        units=3,
    )
    run_grid(cells, None, Every(True))
    first, second = "a, seed 0", "a, seed 1"
    assert shown == [(0, 6, first), (2, 6, first), (3, 6, second), (5, 6, second), (6, 6, "done")]


# Lines as the first versions of four studies wrote them.
OLDER = [
    ({"question": {"alpha": 1.5, "name": "bi2clip"}, "answer": {"radius": 2.0}}, {"radius": 2.0}),
    ({"algorithm": "avg-l2clip", "case": "x", "equal": True, "seed": 3, "plan": "f", "round": 8, "gaps": [0.5]}, [0.5]),
    ({"algorithm": "diloco", "nodes": 2, "seed": 0, "plan": "f", "round": 2, "curve": [3.0], "seconds": 9.5}, [3.0]),
    (
        {"algorithm": "diloco", "case": "keep", "seed": 0, "plan": "f", "round": 2, "curve": {"perplexity": [9.0]}},
        {"perplexity": [9.0]},
    ),
]


@pytest.mark.parametrize(("row", "result"), OLDER)
def test_lines_of_older_versions_are_read(row: dict[str, Any], result: Any, tmp_path: Path) -> None:
    (tmp_path / "cells.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    ((cell, found),) = read_record(tmp_path / "cells.jsonl").items()
    assert found == result
    names = row.get("question") or {
        key: row[key] for key in ("algorithm", "case", "equal", "nodes", "seed", "plan") if key in row
    }
    assert json.loads(cell) == names


def test_files_of_older_versions_are_read(tmp_path: Path) -> None:
    (tmp_path / "a-0.json").write_text('{"losses": [0.5]}', encoding="utf-8")
    measured: list[Cell] = []
    older = grid(measured, older=lambda cell: older_file(tmp_path / f"{cell.name}-{cell.seed}.json"))
    assert run_grid(older, tmp_path / "cells.jsonl", SILENT)[CELLS[0]] == Outcome((0.5,))
    assert measured == CELLS[1:]


def test_results_are_written_with_their_page(tmp_path: Path) -> None:
    write_results(tmp_path / "out", {"outcome": Outcome((0.5,)), "cells": (1, 2)}, "| a |\n")
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == {
        "outcome": {"losses": [0.5]},
        "cells": [1, 2],
    }
    page = (tmp_path / "out" / "table.md").read_text()
    assert re.fullmatch(
        r"\| a \|\n\nMeasured( at commit [0-9a-f]{7}(\+changes)?)?: tailopt .*, torch .* threads\.\n", page
    )
    write_results(tmp_path / "out", {}, "| a |\n", "tailopt study glue --quick")
    assert " by `tailopt study glue --quick`: tailopt " in (tmp_path / "out" / "table.md").read_text()


def test_a_digest_depends_on_every_value() -> None:
    assert digest({"a": 1, "b": [2.0]}) == digest({"b": (2.0,), "a": 1}) != digest({"a": 1, "b": [2.5]})


def test_the_cost_is_said_before_the_first_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    tried: list[Cell] = []
    said_before = []

    def short_part(cell: Cell) -> float:
        tried.append(cell)
        time.sleep(0.2)
        return 0.0005  # so a cell takes 400 s, and the four of them 27 minutes

    def measure(cell: Cell, tick: Tick) -> float:
        said_before.append(capsys.readouterr().err)
        return 0.0

    grid = Grid(cells=CELLS, key=asdict, measure=measure, short_part=short_part, kind=lambda cell: cell.name)
    run_grid(grid, None, Progress(True))
    assert tried == [CELLS[0], CELLS[0], CELLS[2]]  # once to warm up, then one of each kind
    minutes = re.match(r"4 measurements to make, about (\d+) min\n", said_before[0])
    assert minutes is not None and 26 <= int(minutes[1]) < 60
    tried.clear()
    run_grid(grid, None, SILENT)
    assert not tried


def test_without_a_short_part_the_first_measurement_tells(capsys: pytest.CaptureFixture[str]) -> None:
    def measure(cell: Cell, tick: Tick) -> float:
        time.sleep(0.5)
        return 0.0

    run_grid(Grid(cells=CELLS, key=asdict, measure=measure), None, Progress(True))
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "4 measurements to make, the first one tells for how long"
    assert any(re.fullmatch(r"the first took .* s: about .* s more", line) for line in said)
