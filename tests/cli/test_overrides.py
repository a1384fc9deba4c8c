"""Settings on the command line: every number Python writes is read, and a file's tables stay as they are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailopt.cli.config_file import sections
from tailopt.cli.overrides import apply_overrides, split_arguments


@given(st.floats(allow_nan=False))
def test_numbers_come_back(number: float) -> None:
    """Negative, scientific, infinite."""
    (pair,) = split_arguments(["--projection", repr(number)], {})[1]
    assert apply_overrides(sections({}), [pair])["run"]["projection"] == number


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--out=a", "--seed=3"], (["--out=a"], [("seed", "3")])),
        (["--out", "--seed"], (["--out", "--seed"], [])),
        (["--i-u", "1", "file"], (["file"], [("i_u", "1")])),
        (["--average", "--quiet", "--", "x"], (["--quiet", "--", "x"], [("average", None)])),
        (["--out"], (["--out"], [])),
    ],
)
def test_arguments_of_the_command_and_settings(arguments: list[str], expected: object) -> None:
    assert split_arguments(arguments, {"--out": True, "--quiet": False}) == expected


def test_the_tables_of_the_file_do_not_change() -> None:
    tables = sections({"schedules": {"ilr": {"power": -0.5}}, "run": {"seed": 1}})
    changed = apply_overrides(tables, [("schedules.ilr.per", "step"), ("seed", "2")])
    assert changed["schedules"] == {"ilr": {"power": -0.5, "per": "step"}}
    assert tables == sections({"schedules": {"ilr": {"power": -0.5}}, "run": {"seed": 1}})
