"""Checks of arguments that many functions share."""

from __future__ import annotations

import re
from typing import Any

import numpy
import pytest
import torch

from tailopt.arguments import check_counts, checked_seed, whole_number


@pytest.mark.parametrize(
    ("value", "limits", "need"),
    [
        (0, {"low": 1}, "a whole number, 1 or more."),
        (-1, {"low": 0}, "a whole number, 0 or more."),
        (4, {"low": 1, "high": 3}, "a whole number from 1 to 3."),
        (True, {"low": 0}, "a whole number, 0 or more."),
        (2.0, {"low": 1}, "a whole number, 1 or more."),
        ("2", {"low": 1}, "a whole number, 1 or more."),
        (None, {}, "a whole number."),
        (numpy.int64(2), {"low": 1}, "a whole number, 1 or more."),
        (True, {"low": 0, "convert": True}, "a whole number, 0 or more."),
        (numpy.float64(2), {"low": 1, "convert": True}, "a whole number, 1 or more."),
        (0, {"low": 1, "hint": "Leave it out for one file."}, "a whole number, 1 or more. Leave it out for one file."),
    ],
)
def test_a_refusal_has_the_name_the_value_and_the_range(value: Any, limits: dict[str, Any], need: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(f'Invalid shards: got {value!r}; need {need}')}$"):
        whole_number("shards", value, **limits)


def test_numbers_at_the_ends_of_a_range_are_in_it() -> None:
    assert [whole_number("n", n, low=-1, high=1) for n in (-1, 0, 1)] == [-1, 0, 1]
    assert whole_number("n", 10**30) == 10**30


@pytest.mark.parametrize("value", [numpy.int64(7), numpy.uint8(7), torch.tensor(7)])
def test_whole_numbers_of_other_libraries_become_ints(value: Any) -> None:
    number = whole_number("n", value, low=1, convert=True)
    assert number == 7 and type(number) is int
    assert checked_seed(value) == 7


def test_counts_are_named() -> None:
    check_counts(rounds=1, keep=5)
    with pytest.raises(ValueError, match="Invalid keep: 0; need a whole number, 1 or more"):
        check_counts(rounds=1, keep=0)
