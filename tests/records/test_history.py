"""JSON lines: strict, exact, in a fixed order, and none the worse for a kill in the middle of one."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tailopt.records import history

keys = st.text().filter(lambda key: key != "$float")
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Equal in value and type, floats to the bit (any NaN is NaN)."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


@given(st.dictionaries(keys, plain, max_size=5), st.integers(0, 10**9))
def test_a_line_is_strict_json_and_comes_back(row: dict[str, Any], number: int) -> None:
    row["round"] = number
    line = history.line(row)
    assert line.endswith(b"\n") and line.count(b"\n") == 1 and line.isascii()
    parsed = json.loads(line, parse_constant=no_constant)
    assert same(history.decode(parsed), row)


@given(st.dictionaries(keys, plain, max_size=5))
def test_equal_rows_are_equal_lines(row: dict[str, Any]) -> None:
    assert history.line(row) == history.line(dict(reversed(row.items())))


def test_special_floats_are_written_as_documented() -> None:
    row = {"a": math.nan, "b": [math.inf, {"c": -math.inf}]}
    assert history.line(row) == b'{"a": {"$float": "nan"}, "b": [{"$float": "inf"}, {"c": {"$float": "-inf"}}]}\n'


def test_numpy_floats_are_floats() -> None:
    np = pytest.importorskip("numpy")
    assert history.line({"a": np.float64(0.1), "b": [np.float64("nan")]}) == b'{"a": 0.1, "b": [{"$float": "nan"}]}\n'


@pytest.mark.parametrize(
    ("row", "error", "message"),
    [
        ({"weights": (1.0,)}, TypeError, r"row\.weights is a tuple; .* Make it a list\."),
        ({"a": [0, {"b-c": torch.tensor(1.0)}]}, TypeError, r"row\.a\[1\]\['b-c'\] is a Tensor; .*\.item\(\)"),
        ({"a": print}, TypeError, r"row\.a is a builtin_function_or_method"),
        ({"a": {3: 1}}, TypeError, r"row\.a has the key 3, an int; keys are strings"),
        ({"a": {"$float": "nan"}}, ValueError, r"row\.a has the key '\$float'"),
    ],
)
def test_what_cannot_come_back_is_refused_by_its_place(row: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        history.line(row)


def test_a_torn_line_is_passed_over_at_every_length(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    rows: list[dict[str, Any]] = [{"round": 1, "loss": 0.5}, {"round": 2, "loss": math.nan, "name": "π\r\u2028"}]
    whole = [history.line(row) for row in rows]
    for length in range(len(whole[1])):
        file.write_bytes(whole[0] + whole[1][:length])
        assert history.read(file) == rows[:1]
        history.drop_torn_line(file)
        assert file.read_bytes() == whole[0]
    file.write_bytes(b"".join(whole))
    history.drop_torn_line(file)
    assert same(history.read(file), rows)


def test_a_file_of_one_torn_line_is_empty(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    file.write_bytes(b'{"round"')
    assert history.read(file) == [] and history.read(tmp_path / "none") == []


@pytest.mark.parametrize(
    "text", [b"{]\n", b"3\n", b'{"loss": 1}\n', b'{"round": {"$float": "x"}}\n', b'{"round": true}\n']
)
def test_a_damaged_line_is_named(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "history.jsonl"
    file.write_bytes(b'{"round": 1}\n' + text + b'{"round": 3}\n')
    with pytest.raises(ValueError, match=r"history\.jsonl, line 2: .*from a copy, or repair that line"):
        history.read(file)


def test_rewind_keeps_the_bytes_of_what_stays(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    kept = b'{"round":1,   "loss": 1.50}\n{"round": 2}\n'  # not as we would write them
    file.write_bytes(kept + b'{"round": 3}\n{"rou')
    history.rewind(file, 2)
    assert file.read_bytes() == kept
    history.rewind(file, 0)
    assert file.read_bytes() == b"" and [p.name for p in tmp_path.iterdir()] == ["history.jsonl"]
