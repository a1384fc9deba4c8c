"""The points of a sweep: grids, Sobol points, and what is passed over."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tailopt.paper.grids import points as paper_points
from tailopt.sweeps.points import check_settings, describe, exceeds, sweep_points
from tailopt.sweeps.space import Range

RANGES = {"ilr": Range(1e-3, 1.0), "i_u": Range(1e-4, 1e-2)}


def test_the_paper_grid_is_the_default_and_part_of_it_has_no_repetition() -> None:
    whole = [dict(p) for p in paper_points("bi2clip")]
    assert list(sweep_points("bi2clip", "paper", None).settings) == whole
    part = sweep_points("bi2clip", "paper", 64).settings
    assert len(part) == len({tuple(p.items()) for p in part}) == 64
    assert all(p in whole for p in part)
    assert sweep_points("bi2clip", "paper", 100).settings[:64] == part, "a larger budget adds points"
    assert sweep_points("bi2clip", "paper", 64, seed=1).settings != part


def test_sobol_points_cover_every_half_of_every_range() -> None:
    """Eight random draws of an earlier search never fell into the lower half of their first range."""
    space = {**RANGES, "i_d": [0.0, 1e-5]}
    for name in ("avg-biclip", "rmsprop-biclip", "adam-biclip"):
        found = sweep_points(name, space, 8)
        assert found.kind == "sobol" and len(found.settings) == 8
        for key in ("ilr", "i_u"):
            middle = math.sqrt(RANGES[key].low * RANGES[key].high)
            assert sum(p[key] < middle for p in found.settings) == 4
        assert sum(p["i_d"] == 0.0 for p in found.settings) == 4
    assert sweep_points("avg-biclip", space, 8).settings != sweep_points("adam-biclip", space, 8).settings
    assert sweep_points("avg-biclip", space, 20).settings[:8] == sweep_points("avg-biclip", space, 8).settings


def test_points_whose_lower_threshold_exceeds_the_upper_one_are_dropped_and_counted() -> None:
    grid = sweep_points("avg-biclip", {"ilr": 1.0, "i_u": [0.1, 1.0], "i_d": [0.0, 0.5, 2.0]}, None)
    assert (len(grid.settings), grid.dropped, grid.available) == (3, 3, 6)
    drawn = sweep_points("avg-biclip", {"ilr": 1.0, "i_u": Range(0.1, 10.0), "i_d": Range(0.1, 10.0)}, 32)
    assert len(drawn.settings) == 32 and 8 < drawn.dropped < 128
    assert not any(map(exceeds, (*grid.settings, *drawn.settings)))
    with pytest.raises(ValueError, match="all of its 2 points d exceeds u"):
        sweep_points("avg-biclip", {"ilr": 1.0, "i_u": 0.1, "i_d": [0.5, 2.0]}, None)
    with pytest.raises(ValueError, match="i_share"):
        sweep_points("avg-biclip", {"i_u": Range(0.1, 1.0), "i_d": Range(2.0, 3.0)}, 4)


def test_spellings_of_a_grid() -> None:
    spaced = sweep_points("avg-sgd", {"ilr": {"low": 0.01, "high": 1.0, "num": 3}}, None)
    assert [p["ilr"] for p in spaced.settings] == pytest.approx([0.01, 0.1, 1.0])
    space = {"ilr": 0.5, "i_u": [1.0, 2.0], "i_d": {"upper": "i_u", "start": 0.0, "num": 3}}
    assert [p["i_d"] for p in sweep_points("avg-biclip", space, None).settings] == [0.0, 0.5, 1.0, 0.0, 1.0, 2.0]
    moves = sweep_points("avg-biclip", [{"i_move": 0.05, "i_u": 0.5, "i_share": 0.2}], 5)
    assert moves.settings == ({"i_u": 0.5, "ilr": 0.1, "i_d": 0.1},) and moves.kind == "points"
    assert sweep_points("avg-sgd", {"ilr": {"low": 0.1, "high": 1.0}}, 2).kind == "sobol"
    assert describe(space)["i_d"] == {"upper": "i_u", "start": 0.0, "num": 3}


@pytest.mark.parametrize(
    ("space", "budget", "message"),
    [
        ("papers", 5, "Unknown space: 'papers'"),
        ({}, 5, "it is empty"),
        ({"ilr": []}, 5, "ilr has no values"),
        ({"ilr": {"from": 1}}, 5, "needs low and high"),
        ({"ilr": Range(0.1, 1.0)}, None, "budget=64"),
        ({"ilr": [0.1]}, 0, "Invalid budget: 0"),
        ({"i_d": {"upper": "i_u", "start": 0.0, "num": 3}}, None, "i_d ends at i_u"),
        (3, 5, "Invalid space: 3"),
        ({1: [0.1]}, 5, "1 names no setting"),
        ({"i_move": [0.1]}, 5, "i_move refers to i_u, which is None here"),
        (
            {"i_move": [0.1], "i_u": [0.0, 1.0]},
            5,
            "i_move refers to i_u, which is 0.0 here; need a finite number above",
        ),
        ({"i_share": [0.1], "i_u": "auto"}, 5, "i_share refers to i_u, which is 'auto' here"),
        ({"ilr": {"low": 0.1, "high": 1.0, "num": 0}}, 5, "Invalid num of ilr: got 0; need a whole number, 1 or more"),
        ({"ilr": {"low": 0.1, "high": 1.0, "num": "x"}}, 5, "Invalid num of ilr: got 'x'"),
        ({"ilr": {"low": None, "high": 1.0}}, 5, r"Invalid range: \[None, 1.0\]; need two finite numbers"),
        ({"ilr": {"low": 0.1, "high": float("inf")}}, 5, r"Invalid range: \[0.1, inf\]"),
    ],
)
def test_bad_spaces(space, budget, message) -> None:
    with pytest.raises(ValueError, match=message):
        sweep_points("avg-sgd", space, budget)


def test_settings_that_all_points_have_count() -> None:
    found = sweep_points("avg-biclip", {"i_move": [0.1, 0.2]}, None, fixed={"i_u": 0.5, "i_d": 0.0})
    assert found.settings == ({"ilr": 0.2}, {"ilr": 0.4})
    dropped = sweep_points("avg-biclip", {"ilr": 0.1, "i_u": [0.1, 0.5]}, None, fixed={"i_d": 0.2})
    assert dropped.settings == ({"ilr": 0.1, "i_u": 0.5},) and dropped.dropped == 1
    drawn = sweep_points("avg-biclip", {"i_u": Range(0.1, 0.5)}, 8, fixed={"ilr": 0.1, "i_d": 0.2})
    assert drawn.dropped and all(point["i_u"] >= 0.2 for point in drawn.settings)


def test_numbers_of_other_libraries_become_pythons() -> None:
    (point,) = sweep_points("avg-biclip", {"ilr": np.float64(0.5), "i_u": [np.float32(0.25)], "i_d": 0}, None).settings
    assert [type(value) for value in point.values()] == [float, float, int]


def test_settings_are_checked_before_anything_is_trained() -> None:
    with pytest.raises(ValueError, match="paper has no grid for 'nesterov-sign'"):
        sweep_points("nesterov-sign", "paper", 3)
    with pytest.raises(ValueError, match="unknown 'i_u'"):
        check_settings("avg-sgd", [{"ilr": 0.1, "i_u": 1.0}], {})
    with pytest.raises(ValueError, match="ilr is fixed at 0.5"):
        check_settings("avg-sgd", [{"ilr": 0.1}], {"ilr": 0.5})
