"""config.toml: settings come back, and what TOML cannot hold is refused by name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailopt.records.folder import Run
from tailopt.records.run_config import (
    as_stored,
    by_dotted_name,
    describe_difference,
    difference,
    parse_config,
    to_toml,
)


def test_settings_without_a_value_are_left_out(tmp_path: Path) -> None:
    run = Run.create(tmp_path, {"device": None, "betas": (0.9, 0.99), "inner": {"u": None, "d": 0}}, {})
    assert run.config == {"betas": [0.9, 0.99], "inner": {"d": 0}}


values = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None)  # each waits for the disk
@given(st.dictionaries(st.text(), values, max_size=4))
def test_settings_come_back(tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any]) -> None:
    run = Run.create(tmp_path_factory.mktemp("run"), config, {})
    assert json.dumps(run.config, sort_keys=True) == json.dumps(config, sort_keys=True)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"a": {"loss": print}}, r"config\.a\.loss is a builtin_function_or_method"),
        ({"a": [1, None]}, r"config\.a\[1\] is a NoneType"),
        ({"a": {1: 2}}, r"config\.a has the key 1, an int"),
    ],
)
def test_settings_that_toml_has_not_are_refused_before_anything_is_made(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        Run.create(tmp_path / "run", config, {})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("package", ["tomli_w", "tomllib" if sys.version_info >= (3, 11) else "tomli"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"Run folders need {package}: .*pip install "):
        Run.create(tmp_path / "run", {"a": 1}, {})


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(), values, max_size=3), st.dictionaries(st.text(), values, max_size=3))
def test_the_difference_turns_one_configuration_into_the_other(before: dict[str, Any], after: dict[str, Any]) -> None:
    flat, other = by_dotted_name(before), by_dotted_name(after)
    changed = dict(flat)
    for name, then, now in difference(flat, other):
        assert changed.get(name) == then
        changed[name] = now
    assert {name: value for name, value in changed.items() if value is not None} == other
    assert not difference(flat, flat)


def test_equal_settings_in_other_bytes() -> None:
    assert describe_difference([]) == "the settings are the same, in other bytes"


def test_what_is_stored_is_what_comes_back() -> None:
    config = {"betas": (0.9, 0.99), "radius": None, "inner": {"u": 0.5, "d": None}}
    assert parse_config(Path("config.toml"), to_toml(config)) == as_stored(config)
