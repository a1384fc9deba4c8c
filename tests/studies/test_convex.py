from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tailopt.algorithms import ALGORITHMS, algorithm
from tailopt.studies import convex, convex_cells
from tailopt.studies.convex_cells import CellResult, ConvexCell, ConvexPlan, HorizonResult
from tailopt.studies.study import StudyOptions
from tailopt.sweeps.search import draw_point
from tailopt.sweeps.space import settings_at
from tests.studies.unjudged import assert_unjudged

pytest.importorskip("sklearn", reason="the studies' extra is not installed")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convex.run(tmp_path_factory.mktemp("convex"), StudyOptions(quick=True, progress=False))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_ranges_that_give_its_settings(name: str) -> None:
    for i in range(20):
        algorithm(name, **settings_at(draw_point(convex_cells.SPACE.ranges(name), 0, i)))


def test_the_study_writes_what_it_says(finished: Path) -> None:
    found = json.loads((finished / "results.json").read_text())
    assert len(found["cells"]) == 8 and len(found["checks"]) == 4
    for cell in found["cells"]:
        for horizon, run in cell["horizons"].items():
            assert len(run["errors"]) == 3 and all(math.isfinite(e) and e > 0 for e in run["errors"])
            assert all(len(curve) == int(horizon) for curve in run["curves"])
    assert all(check["largest relative difference"] < 1e-4 for check in found["checks"])
    table = (finished / "table.md").read_text()
    for text in (
        "least squares",
        "w starts at 0",
        "new in every round",
        "half the mean squared error",
        "seeds 100, 101",
    ):
        assert text in table
    assert_unjudged(finished)
    assert (finished / "syntoken.png").stat().st_size > 10_000


def test_least_squares_is_exact_without_noise_and_huber_better_with_a_heavy_tail(finished: Path) -> None:
    references = json.loads((finished / "results.json").read_text())["references"]
    clean, heavy = references["syntoken, no noise"], references[f"syntoken, {convex_cells.HEAVY}"]
    assert max(clean["least squares"]) < 1e-5
    assert sum(heavy["Huber"]) < sum(heavy["least squares"])


def test_a_second_run_takes_what_is_there(finished: Path) -> None:
    record, table = (finished / "cells.jsonl").read_bytes(), (finished / "table.md").read_text()
    lines = record.splitlines(keepends=True)
    assert len(lines) == 8 + 4
    (finished / "cells.jsonl").write_bytes(b"".join([lines[0], *lines[2:]]))  # the second cell is gone
    convex.run(finished, StudyOptions(quick=True, progress=False))
    assert (finished / "cells.jsonl").read_bytes() == b"".join([lines[0], *lines[2:], lines[1]])
    assert (finished / "table.md").read_text() == table


def older_folder(finished: Path, out: Path, **more: Any) -> None:
    """A folder as an older version left it: every cell and every check was a file of its own."""
    (out / "cells").mkdir()
    (out / "checks").mkdir()
    for line in (finished / "cells.jsonl").read_text().splitlines():
        cell, result = json.loads(line)["cell"], json.loads(line)["result"]
        if "check" in cell:
            path = out / "checks" / f"{cell['check']}.json"
        else:
            noise = {"no noise": "no-noise", convex_cells.HEAVY: "student-t-df-1.5"}[cell["noise"]]
            path = out / "cells" / f"{cell['features']}-{noise}-{cell['algorithm']}.json"
        path.write_text(json.dumps({**result, **more}))


def test_a_folder_of_an_older_version_is_read(finished: Path, tmp_path: Path) -> None:
    older_folder(finished, tmp_path)
    convex.run(tmp_path, StudyOptions(quick=True, progress=False))
    assert not (tmp_path / "cells.jsonl").exists() and not (tmp_path / "trials").exists()
    assert (tmp_path / "table.md").read_text() == (finished / "table.md").read_text()


def test_a_cell_of_another_length_is_not_taken(finished: Path, tmp_path: Path) -> None:
    """Older versions did not record their plan: after a quick study the full one would have taken its cells."""
    older_folder(finished, tmp_path)
    path = tmp_path / "cells" / "syntoken-no-noise-avg-sgd.json"
    assert convex_cells._older_cell(convex_cells.QUICK, path) is not None
    assert convex_cells._older_cell(ConvexPlan(), path) is None
    assert convex_cells._older_cell(replace(convex_cells.QUICK, fresh=(0,)), path) is None
    assert ConvexPlan().key() == ConvexPlan(noises=("Cauchy",)).key() != ConvexPlan(budget=3).key()


def test_claims_are_judged_by_the_figures() -> None:
    """Figures made up so that every verdict is known."""
    sizes = {"avg-sgd": 4.0, "avg-l2clip": 1.2, "avg-adam": 1.1, "avg-biclip": 1.0}

    def verdicts(biclip: float) -> dict[int, str]:
        cells = {}
        for noise in convex.FIGURE_1:
            for name in convex_cells.HEADLINE:
                size = 1.0 if noise == "no noise" else biclip if name == "avg-biclip" else sizes[name]
                errors = [size * s for s in (1.0, 2.0, 3.0)]
                result = CellResult("syntoken", noise, name, {"10": HorizonResult({}, errors, [])})
                cells[ConvexCell("syntoken", noise, name)] = result
        plan = ConvexPlan(("syntoken",), convex.FIGURE_1, convex_cells.HEADLINE, horizons=(10,), fresh=(0, 1, 2))
        results = convex.ConvexResults(plan, cells, {}, [])
        return {claim.number: claim.verdict for claim in convex.evaluate_claims(results)}

    assert verdicts(1.0) == {1: "holds", 2: "holds"}
    assert verdicts(1.15) == {1: "holds", 2: "does not hold"}
    assert verdicts(3.0)[1] == "does not hold"  # it helps by less than a third
