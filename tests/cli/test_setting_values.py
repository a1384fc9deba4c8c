"""Values of settings: any text is one, and types are checked by name."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tailopt.cli.setting_values import check_algorithm_value, check_type, dtype_as_name, dtype_from_name, parse_value


@given(st.text())
def test_any_text_has_a_value(text: str) -> None:
    assert isinstance(parse_value(text), bool | int | float | str | list | dict)


@pytest.mark.parametrize(
    ("value", "hint", "need"),
    [
        (True, float, "a number"),
        (True, int | None, "a whole number or none"),
        ("a", str | None, None),
        ([1, True], str | list[float], "[1]: got True; need a number"),
        ({}, str | list[float], "a word or a list of numbers"),
        (1.0, bool, "true or false"),
    ],
)
def test_types(value: Any, hint: Any, need: str | None) -> None:
    if need is None:
        assert check_type("run.x", value, hint) == value
    else:
        with pytest.raises(ValueError, match=rf"^Invalid run\.x.*{re.escape(need)}\.$"):
            check_type("run.x", value, hint)


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("ilr", 1, True),
        ("i_u", {"0.weight": 0.1}, "no"),
        ("o_d", "auto", "first"),
        ("scale", "follow", 1),
        ("dead_zone", "auto", "none"),
        ("scope", "global", 1),
        ("inner_betas", [0.9, 0.99], 0.9),
        ("adamw_on", ["*emb*", "head.*"], 0.9),
        ("adamw_on", "*emb*", [0.9]),
        ("adjust_lr_fn", "match_rms_adamw", 0.9),
        ("bias_correction", True, 1),
    ],
)
def test_values_of_an_algorithm(key: str, good: Any, bad: Any) -> None:
    check_algorithm_value(key, good)
    with pytest.raises(ValueError, match=rf"Invalid {key}: got {re.escape(repr(bad))}; need .*Write --{key} VALUE"):
        check_algorithm_value(key, bad)


def test_types_of_torch_by_name() -> None:
    assert dtype_from_name("dtype", dtype_as_name(torch.bfloat16)) is torch.bfloat16
    assert dtype_as_name(3) == 3
    with pytest.raises(ValueError, match=r"Invalid task\.dtype: got 'nn'; need a type of torch"):
        dtype_from_name("dtype", "nn")
