from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tailopt.algorithms import ALGORITHMS, algorithm
from tailopt.studies import convex
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
        algorithm(name, **settings_at(draw_point(convex.SPACE.ranges(name), 0, i)))


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
        "made anew",
        "half the mean squared error",
        "seeds 100, 101",
    ):
        assert text in table
    assert_unjudged(finished)
    assert (finished / "syntoken.png").stat().st_size > 10_000


def test_least_squares_is_exact_without_noise_and_huber_better_with_a_heavy_tail(finished: Path) -> None:
    references = json.loads((finished / "results.json").read_text())["references"]
    clean, heavy = references["syntoken, no noise"], references[f"syntoken, {convex.HEAVY}"]
    assert max(clean["least squares"]) < 1e-5
    assert sum(heavy["Huber"]) < sum(heavy["least squares"])


def test_a_second_run_takes_what_is_there(finished: Path) -> None:
    cell = next((finished / "cells").iterdir())
    before = {path: path.stat().st_mtime_ns for path in (finished / "cells").iterdir()}
    table = (finished / "table.md").read_text()
    text = cell.read_text()
    cell.unlink()
    convex.run(finished, StudyOptions(quick=True, progress=False))
    after = {path: path.stat().st_mtime_ns for path in (finished / "cells").iterdir()}
    assert {path for path in before if before[path] != after[path]} == {cell}
    assert cell.read_text() == text and (finished / "table.md").read_text() == table


def test_claims_are_judged_by_the_figures() -> None:
    """Figures made up so that every verdict is known."""
    sizes = {"avg-sgd": 4.0, "avg-l2clip": 1.2, "avg-adam": 1.1, "avg-biclip": 1.0}

    def found(biclip: float) -> dict:
        cells = [
            {
                "features": "syntoken",
                "noise": noise,
                "algorithm": name,
                "horizons": {
                    "10": {"errors": [(biclip if name == "avg-biclip" else sizes[name]) * s for s in (1, 2, 3)]}
                },
            }
            for noise in convex.FIGURE_1
            for name in convex.HEADLINE
        ]
        return {"plan": {"horizons": [10], "features": ["syntoken"], "noises": list(convex.FIGURE_1)}, "cells": cells}

    verdicts = {claim.number: claim.verdict for claim in convex._claims(found(1.0))}
    assert verdicts[2] == "holds"
    verdicts = {claim.number: claim.verdict for claim in convex._claims(found(1.15))}
    assert verdicts[2] == "does not hold"
