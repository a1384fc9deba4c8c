"""Sizes of the sweeps, and every reported value against its own grid."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from tailopt.paper import Lower, grid, points
from tailopt.paper.best_settings import corrections
from tailopt.paper.grids import fit, linspace, specs
from tailopt.paper.printed_tables import algorithms, load

PRINTED_SIZES = {
    "avg-sgd": 100,
    "avg-l2clip": 120,
    "avg-adagrad": 120,
    "avg-adam": 120,
    "avg-biclip": 160,
    "avg-biclip-l2": 160,
    "adagrad-sgd": 147,
    "rmsprop-sgd": 147,
    "adam-sgd": 147,
    "adam2": 225,
    "diloco": 300,
    "adagrad-biclip": 432,
    "rmsprop-biclip": 432,
    "adam-biclip-l2": 432,
    "adam-l2clip": 576,
    "bi2clip": 729,
    "bi2clip-l2": 729,
    "adam-biclip": 1125,
}
CORRECTED_SIZES = PRINTED_SIZES | {"adam-l2clip": 144, "adam-biclip": 1500, "avg-biclip-l2": 160 + 36}
ROWS = load("best_settings")["settings"]


@pytest.mark.parametrize("name", PRINTED_SIZES)
def test_sizes_of_the_sweeps(name: str) -> None:
    assert sum(1 for _ in points(name, "paper-printed")) == PRINTED_SIZES[name]
    corrected = [tuple(point.items()) for point in points(name)]
    assert len(corrected) == len(set(corrected)) == CORRECTED_SIZES[name]


def test_every_algorithm_has_a_grid() -> None:
    assert set(PRINTED_SIZES) == set(algorithms())


@pytest.mark.parametrize("name", PRINTED_SIZES)
def test_lower_thresholds_never_pass_the_upper_ones(name: str) -> None:
    for point in points(name):
        assert all(math.isfinite(value) and value >= 0 for value in point.values())
        for lower, upper in (("i_d", "i_u"), ("o_d", "o_u")):
            assert lower not in point or point[lower] <= point[upper]


def test_the_lower_threshold_reaches_the_upper_one_exactly() -> None:
    [sweep] = grid("adam-biclip")
    lower, uppers = sweep["i_d"], sweep["i_u"]
    assert isinstance(lower, Lower)
    assert isinstance(uppers, list)
    for u in uppers:
        assert [lower(u)[0], lower(u)[-1]] == [1e-7, u]
        assert len(lower(u)) == 4


def test_columns_are_settings() -> None:
    assert list(grid("diloco")[0]) == ["ilr", "olr", "ieps", "momentum", "weight_decay"]
    assert list(grid("diloco", "paper-printed")[0]) == ["ilr", "olr", "oeps", "momentum", "weight_decay"]
    assert set(grid("Avg-$L_2$Clip")[0]) == {"i_u", "ilr"}
    assert [len(sweep) for sweep in grid("Avg-BiClip (L2)")] == [3, 3]


def test_spacings() -> None:
    assert linspace(0.0, 1.0, 5) == [0.0, 0.25, 0.5, 0.75, 1.0]
    logs = grid("avg-adam")[0]["ilr"]
    assert isinstance(logs, list)
    assert len(logs) == 30
    assert [logs[0], logs[-1]] == pytest.approx([1e-9, 10.0])
    assert [b / a for a, b in zip(logs, logs[1:], strict=False)] == pytest.approx([10 ** (10 / 29)] * 29)


def test_reported_values_against_the_printed_grids() -> None:
    """638 values: 577 on their grid, 53 off, 8 without one."""
    off: Counter[tuple[str, str]] = Counter()
    without: Counter[tuple[str, str]] = Counter()
    total = 0
    for name, rows in ROWS.items():
        [sweep] = specs(name, "paper-printed")
        for row in rows.values():
            off.update((name, column) for column in fit(name, row, "paper-printed")[1])
            values = [column for column, value in row.items() if value is not None]
            without.update((name, column) for column in values if sweep.get(column) is None)
            total += len(values)
    assert sum(len(rows) for rows in ROWS.values()) == 168
    assert total == 638
    assert without == {("diloco", "ieps"): 8}
    assert off == {
        ("avg-adagrad", "ilr"): 8,
        ("avg-adam", "ilr"): 8,
        ("diloco", "ilr"): 8,
        ("adam-biclip", "i_d"): 7,
        ("adam-l2clip", "i_u"): 5,
        ("avg-biclip-l2", "ilr"): 5,
        ("avg-biclip-l2", "i_u"): 4,
        ("avg-biclip-l2", "i_d"): 1,
        ("rmsprop-sgd", "olr"): 1,
        ("adagrad-sgd", "olr"): 2,
        ("adagrad-biclip", "oeps"): 1,
        ("adam-biclip-l2", "oeps"): 1,
        ("bi2clip", "i_u"): 1,
        ("bi2clip", "i_d"): 1,
    }
    assert off.total() == 53
    assert total - off.total() - without.total() == 577


def test_after_mending_every_row_lies_on_one_sub_sweep() -> None:
    for name, rows in ROWS.items():
        for dataset, row in rows.items():
            sweep, missed = fit(name, row | corrections(name, dataset))
            assert not missed, (name, dataset)
            assert all(sweep.get(column) is not None for column, value in row.items() if value is not None)


def test_each_correction_is_needed() -> None:
    for fix in load("sweep_grids")["corrections"]:
        row = ROWS[fix["algorithm"]][fix["dataset"]]
        assert row[fix["column"]] == fix["printed"]
        assert fix["column"] in fit(fix["algorithm"], row)[1]


def test_what_there_is_not() -> None:
    with pytest.raises(
        ValueError, match=r"'adam-adam'; there is no such algorithm of the paper.*There are: avg-sgd, .*avg-adam\."
    ):
        grid("adam-adam")
    with pytest.raises(
        ValueError, match=r"Invalid grid: got 'printed'; need 'paper' \(corrected\) or 'paper-printed'\."
    ):
        grid("avg-sgd", "printed")  # type: ignore[arg-type]
