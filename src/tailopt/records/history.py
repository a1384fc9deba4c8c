"""JSON lines that come back exactly as they were written: one line per round.

Every line is strict JSON with sorted keys, so that equal histories are equal files. Floats are written by `repr` and
come back bit for bit. JSON has no NaN and no infinities; in their place is

    {"$float": "nan"}    {"$float": "inf"}    {"$float": "-inf"}

and "$float" is therefore rejected as a key. A line counts once its newline is written: readers skip what a kill left of
a last line, and writers cut it off before they add the next one.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tailopt.records import disk

_FLOAT = "$float"
_JSON_TYPES = frozenset({type(None), bool, int, str})
_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Add one row to a file, in one system call: a kill of this process cannot lose it afterwards.

    Examples:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "history.jsonl"
        >>> append(file, {"round": 1, "loss": math.inf})
        >>> file.read_text()
        '{"loss": {"$float": "inf"}, "round": 1}\\n'
        >>> read(file)
        [{'loss': inf, 'round': 1}]
    """
    append_bytes(path, line(row))


def line(row: Mapping[str, Any]) -> bytes:
    """Return the line of a row, newline included."""
    return json.dumps(encode(dict(row), "row"), sort_keys=True, allow_nan=False).encode() + b"\n"


def append_bytes(path: Path, data: bytes) -> None:
    """Add bytes to the end of a file, in one system call unless the system takes only a part of them."""
    descriptor = disk.open_regular_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError as error:  # os.write knows no file name, so the message would have none
        raise OSError(error.errno, f"{error.strerror}. Make room, and resume the run", str(path)) from error
    finally:
        os.close(descriptor)


def read(path: Path) -> list[dict[str, Any]]:
    """Return all complete rows of a file; none if there is no file."""
    return parse_lines(path, complete_lines(path))


def parse_lines(path: Path, lines: Iterable[bytes], first: int = 1) -> list[dict[str, Any]]:
    """Return lines as rows; messages call them lines of `path`, numbered from `first`."""
    return [_row(path, number, text) for number, text in enumerate(lines, start=first)]


def rounds(path: Path) -> list[int]:
    """Return the round of every complete row."""
    return [int(row["round"]) for row in read(path)]


def complete_lines(path: Path) -> list[bytes]:
    """Return the lines of a file, newlines included, without the torn last line that a kill may have left."""
    try:
        data = disk.read(path)
    except FileNotFoundError:
        return []
    return [text + b"\n" for text in data.split(b"\n")[:-1]]


def drop_torn_line(path: Path) -> None:
    """Cut off a torn last line: to be called before the next line is appended."""
    if path.is_file():
        length = sum(map(len, complete_lines(path)))
        if length < path.stat().st_size:
            os.truncate(path, length)


def rewind(path: Path, round: int) -> None:
    """Drop the rows after `round` atomically; the other rows keep their bytes."""
    if not path.is_file():
        return
    before = path.read_bytes()
    after = b"".join(text for text, number in zip(complete_lines(path), rounds(path), strict=True) if number <= round)
    if after != before:
        disk.replace(path, after)


def encode(value: Any, path: str) -> Any:
    """Return a plain value as strict JSON can hold it; a copy, so that later changes of the value do not reach it.

    Args:
        value: None, bool, int, float, str, and lists and string-keyed dicts of these.
        path: what messages call the value.

    Examples:
        >>> encode({"loss": math.nan, "weights": [0.5, 0.5]}, "row")
        {'loss': {'$float': 'nan'}, 'weights': [0.5, 0.5]}
        >>> encode({"weights": (0.5, 0.5)}, "row")
        Traceback (most recent call last):
        TypeError: row.weights is a tuple; only None, bool, int, float, str, lists and dicts can be written. Make it a
        list.
    """
    if _is_json(value):
        return value
    if isinstance(value, float):  # numpy's float64 too
        return float(value) if math.isfinite(value) else {_FLOAT: repr(float(value))}
    if type(value) is list:
        # Weights and participants are long lists of plain numbers: no path is built for those.
        return [item if _is_json(item) else encode(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict):
        return {_key(key, path): encode(item, child_path(path, key)) for key, item in value.items()}
    remedy = {"tuple": "a list", "Tensor": "a number with .item(), or a list with .tolist()"}
    raise TypeError(
        f"{path} is {type_name(value)}; only None, bool, int, float, str, lists and dicts can be written. "
        f"Make it {remedy.get(type(value).__name__, 'one of these')}."
    )


def decode(value: Any) -> Any:
    """Return the value that `encode` was given."""
    if type(value) is list:
        return [decode(item) for item in value]
    if type(value) is dict:
        if value.keys() == {_FLOAT}:
            return _SPECIAL[value[_FLOAT]]
        return {key: decode(item) for key, item in value.items()}
    return value


def child_path(path: str, key: object) -> str:
    """Return the path of one value of a dict, unique within it: `path.name`, or `path['0.weight']` for other keys.

    Messages use these paths, and checkpoints name their tensors by them.
    """
    return f"{path}.{key}" if isinstance(key, str) and key.isidentifier() else f"{path}[{key!r}]"


def type_name(value: object) -> str:
    """Return the type of a value for a message, with its article.

    Examples:
        >>> type_name(print), type_name(iter([]))
        ('a builtin_function_or_method', 'a list_iterator')
    """
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def quoted_names(names: Iterable[object], limit: int = 6) -> str:
    """Return names for a message: sorted, the first few in quotes, and how many more there are.

    Examples:
        >>> quoted_names(["b", "c", "a"], limit=2), quoted_names([])
        ("'a', 'b' and 1 more", 'none')
    """
    ordered = sorted(map(str, names))
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return (", ".join(map(repr, ordered[:limit])) or "none") + more


def _is_json(value: Any) -> bool:
    """Whether JSON holds a value unchanged."""
    return type(value) in _JSON_TYPES or (type(value) is float and math.isfinite(value))


def _key(key: object, path: str) -> str:
    if type(key) is not str:
        raise TypeError(f"{path} has the key {key!r}, {type_name(key)}; keys are strings. Write str({key!r}).")
    if key == _FLOAT:
        raise ValueError(f"{path} has the key {key!r}, which marks NaN and infinities. Rename it.")
    return key


def _row(path: Path, number: int, text: bytes) -> dict[str, Any]:
    try:
        row = decode(json.loads(text))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path}, line {number}: {text[:60]!r} is not a row ({error}). Bring the file back from a copy, or repair "
            "that line."
        ) from error
    if type(row) is not dict or type(row.get("round")) is not int:
        raise ValueError(
            f"{path}, line {number}: {text[:60]!r} has no round. Bring the file back from a copy, or repair that line."
        )
    return row
