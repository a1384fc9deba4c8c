"""What reports are made of: numbers with their spread, and Markdown tables."""

from __future__ import annotations

import math
import statistics

import pytest

from tailopt.studies.search_spaces import SPACES
from tailopt.studies.tables import (
    markdown_table,
    mean_and_deviation,
    mean_of_all,
    ranges_lines,
    settings_text,
    with_range,
)


@pytest.mark.parametrize(
    ("numbers", "digits", "text"),
    [
        ([1.0, 2.0, 3.0], 2, "2.00 ± 1.00"),
        ([4.0], 1, "4.0"),
        ([1.0, math.inf], 3, "inf"),
        ([1.0, math.nan], 3, "nan"),
    ],
)
def test_mean_and_deviation(numbers: list[float], digits: int, text: str) -> None:
    assert mean_and_deviation(numbers, digits) == text


def test_a_range_has_its_centre_first() -> None:
    assert with_range([3.0, 1.0, 8.0]) == "3 (1 to 8)"
    assert with_range([3.0, 1.0, 8.0], limits="[{}, {}]") == "3 [1, 8]"
    assert with_range([1.0, 2.0], statistics.fmean, "{:.2f}") == "1.50 (1.00 to 2.00)"


def test_the_last_alignment_counts_for_all_that_follow() -> None:
    rule = markdown_table(["a", "b", "c", "d"], [], "lr")[1]
    assert rule == "| --- | ---: | ---: | ---: |"
    assert markdown_table(["a", "b"], [["1", "2"]]) == ["| a | b |", "| --- | --- |", "| 1 | 2 |"]


def test_ranges_are_those_of_the_rules_in_use() -> None:
    space = SPACES["regression"]
    lines = ranges_lines(space, ["avg-sgd"])
    assert lines == ["- inner sgd: ilr 0.001 to 0.3"]
    yogi = [line for line in ranges_lines(space, ["yogi-sgd"]) if line.startswith("- outer")]
    rules = sum(map(bool, (*space.inner.values(), *space.outer.values())))
    assert len(yogi) == 1 and len(ranges_lines(space)) == rules - 2, "by default those of the paper's algorithms"


def test_settings_in_a_line_and_means_by_seed() -> None:
    assert settings_text({"ilr": 0.12345, "i_u": 1e-4}) == "ilr 0.123, i_u 0.0001"
    assert mean_of_all([[1.0, 2.0], [3.0, math.inf]]) == [2.0, math.inf]
