from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailopt.sweeps.search import Point, Range, best, describe, draw_point, search

RANGES = {"ilr": Range(1e-3, 1.0), "momentum": Range(0.0, 0.9, log=False)}


def bowl(points: list[Point]) -> list[dict[str, float]]:
    return [{"error": math.log(p["ilr"] / 0.1) ** 2 + p["momentum"]} for p in points]


@given(st.integers(0, 2**40), st.integers(0, 10_000))
def test_points_lie_in_their_ranges_and_depend_on_seed_and_number_alone(seed: int, number: int) -> None:
    found = draw_point(RANGES, seed, number)
    assert all(RANGES[name].low <= value <= RANGES[name].high for name, value in found.items())
    assert found == draw_point(RANGES, seed, number)
    assert found != draw_point(RANGES, seed, number + 1)


def test_half_of_the_points_lie_in_the_lower_half_of_the_logarithm() -> None:
    values = [draw_point(RANGES, 0, i)["ilr"] for i in range(400)]
    assert 160 < sum(value < math.sqrt(1e-3) for value in values) < 240


def test_more_budget_finds_no_worse_and_begins_with_the_same_points() -> None:
    few, many = (search(bowl, RANGES, budget) for budget in (5, 50))
    assert many[:5] == few
    assert best(many, "error").values["error"] <= best(few, "error").values["error"]


def test_a_stopped_search_goes_on_and_tries_nothing_twice(tmp_path: Path) -> None:
    record, tried = tmp_path / "deep" / "trials.jsonl", []

    def counting(points: list[Point]) -> list[dict[str, float]]:
        tried.extend(points)
        if len(tried) == 8:
            raise KeyboardInterrupt
        return bowl(points)

    with pytest.raises(KeyboardInterrupt):
        search(counting, RANGES, 20, record=record)
    with record.open("ab") as file:
        file.write(b'{"point": {"ilr"')  # a kill in the middle of a line
    found = search(counting, RANGES, 20, record=record, batch=3)
    assert found == search(bowl, RANGES, 20)
    assert len(tried) == 21  # the eighth was broken off and tried again


def test_another_search_in_the_record_is_refused(tmp_path: Path) -> None:
    record = tmp_path / "trials.jsonl"
    search(bowl, RANGES, 3, record=record)
    with pytest.raises(ValueError, match="holds another search: trial 0 of seed 0"):
        search(bowl, RANGES, 3, seed=1, record=record)
    with pytest.raises(ValueError, match="holds another search"):
        search(bowl, {**RANGES, "ilr": Range(1e-2, 1.0)}, 3, record=record)


def test_what_diverged_is_never_the_best_and_survives_the_record(tmp_path: Path) -> None:
    values = iter([math.nan, math.inf, 3.0])

    def measure(points: list[Point]) -> list[dict[str, float]]:
        return [{"error": next(values)} for _ in points]

    found = search(measure, RANGES, 3, record=tmp_path / "trials.jsonl")
    again = search(bowl, RANGES, 3, record=tmp_path / "trials.jsonl")
    assert best(found, "error").number == best(again, "error").number == 2
    assert math.isnan(again[0].values["error"]) and again[1].values["error"] == math.inf


@pytest.mark.parametrize(("low", "high", "log"), [(0.0, 1.0, True), (2.0, 1.0, False), (math.nan, 1.0, True)])
def test_bad_ranges(low: float, high: float, log: bool) -> None:
    with pytest.raises(ValueError, match="Invalid range"):
        Range(low, high, log)


def test_bad_budget_and_description() -> None:
    with pytest.raises(ValueError, match="Invalid budget: 0"):
        search(bowl, RANGES, 0)
    assert describe(RANGES) == {"ilr": [1e-3, 1.0, "log"], "momentum": [0.0, 0.9, "linear"]}
