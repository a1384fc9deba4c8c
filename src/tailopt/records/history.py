"""JSON lines that come back as they were written: one line a round, in a fixed order, exact.

Every line is strict JSON with sorted keys, so that equal histories are equal files. Floats are written by `repr` and
come back to the bit. JSON has no word for the others; wherever a number may stand they are

    {"$float": "nan"}    {"$float": "inf"}    {"$float": "-inf"}

and "$float" is therefore refused as a key. A line counts when its newline is there: what a kill left of a last line is
passed over by readers, and cut off before the next line is written.
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
_AS_IT_IS = frozenset({type(None), bool, int, str})
_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Add one line to a file: handed to the system at once, so that a kill of this process cannot lose it.

    Examples:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "history.jsonl"
        >>> append(file, {"round": 1, "loss": math.inf})
        >>> file.read_text()
        '{"loss": {"$float": "inf"}, "round": 1}\\n'
        >>> read(file)
        [{'loss': inf, 'round': 1}]
    """
    write(path, line(row))


def line(row: Mapping[str, Any]) -> bytes:
    """A row as its line."""
    return json.dumps(encode(dict(row), "row"), sort_keys=True, allow_nan=False).encode() + b"\n"


def write(path: Path, data: bytes) -> None:
    """Add bytes to the end of a file in one call of the system, as long as it takes them."""
    descriptor = disk.opened(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError as error:  # the system names no file here
        raise OSError(error.errno, f"{error.strerror}. Make room, and resume the run", str(path)) from error
    finally:
        os.close(descriptor)


def read(path: Path) -> list[dict[str, Any]]:
    """All whole rows of a file; none where there is no file."""
    return parsed(path, whole_lines(path))


def parsed(path: Path, lines: Iterable[bytes], first: int = 1) -> list[dict[str, Any]]:
    """Lines as rows; messages call them lines of `path`, from the number `first` on."""
    return [_row(path, number, text) for number, text in enumerate(lines, start=first)]


def rounds(path: Path) -> list[int]:
    """The round of every whole row."""
    return [int(row["round"]) for row in read(path)]


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file, newlines included, without the torn last one that a kill may have left."""
    try:
        data = disk.read(path)
    except FileNotFoundError:
        return []
    return [text + b"\n" for text in data.split(b"\n")[:-1]]


def mend(path: Path) -> None:
    """Cut off a torn last line, before anything is written behind it."""
    if path.is_file():
        length = sum(map(len, whole_lines(path)))
        if length < path.stat().st_size:
            os.truncate(path, length)


def rewind(path: Path, round: int) -> None:
    """Drop the rows after `round`, all at once; what stays keeps its bytes."""
    if not path.is_file():
        return
    before = path.read_bytes()
    after = b"".join(text for text, number in zip(whole_lines(path), rounds(path), strict=True) if number <= round)
    if after != before:
        disk.replace(path, after)


def encode(value: Any, path: str) -> Any:
    """A plain value as strict JSON can hold it; a new one, so that nobody's later change reaches it.

    Args:
        value: None, bool, int, float, str, and lists and string-keyed dicts of these.
        path: how messages call the value.

    Examples:
        >>> encode({"loss": math.nan, "weights": [0.5, 0.5]}, "row")
        {'loss': {'$float': 'nan'}, 'weights': [0.5, 0.5]}
        >>> encode({"weights": (0.5, 0.5)}, "row")
        Traceback (most recent call last):
        TypeError: row.weights is a tuple; only None, bool, int, float, str, lists and dicts can be written. Make it a
        list.
    """
    if _stands(value):
        return value
    if isinstance(value, float):  # numpy's float64 too
        return float(value) if math.isfinite(value) else {_FLOAT: repr(float(value))}
    if type(value) is list:
        # Weights and participants are long lists of plain numbers: these need no path.
        return [item if _stands(item) else encode(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict):
        return {_key(key, path): encode(item, child(path, key)) for key, item in value.items()}
    remedy = {"tuple": "a list", "Tensor": "a number with .item(), or a list with .tolist()"}
    raise TypeError(
        f"{path} is {kind(value)}; only None, bool, int, float, str, lists and dicts can be written. "
        f"Make it {remedy.get(type(value).__name__, 'one of these')}."
    )


def decode(value: Any) -> Any:
    """What `encode` was given."""
    if type(value) is list:
        return [decode(item) for item in value]
    if type(value) is dict:
        if value.keys() == {_FLOAT}:
            return _SPECIAL[value[_FLOAT]]
        return {key: decode(item) for key, item in value.items()}
    return value


def child(path: str, key: object) -> str:
    """How messages call one value of a dict: `path.name`, or `path['0.weight']` for what is no name.

    No two keys of a dict have the same.
    """
    return f"{path}.{key}" if isinstance(key, str) and key.isidentifier() else f"{path}[{key!r}]"


def kind(value: object) -> str:
    """What a value is, in words.

    Examples:
        >>> kind(print), kind(iter([]))
        ('a builtin_function_or_method', 'a list_iterator')
    """
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def known(names: Iterable[object], limit: int = 6) -> str:
    """Names for a message: sorted, the first few, and how many more."""
    ordered = sorted(map(str, names))
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return (", ".join(map(repr, ordered[:limit])) or "none") + more


def _stands(value: Any) -> bool:
    """Whether JSON holds a value as it is."""
    return type(value) in _AS_IT_IS or (type(value) is float and math.isfinite(value))


def _key(key: object, path: str) -> str:
    if type(key) is not str:
        raise TypeError(f"{path} has the key {key!r}, {kind(key)}; keys are strings. Write str({key!r}).")
    if key == _FLOAT:
        raise ValueError(f"{path} has the key {key!r}, which stands for numbers that JSON has not. Rename it.")
    return key


def _row(path: Path, number: int, text: bytes) -> dict[str, Any]:
    """One line as a row."""
    try:
        row = decode(json.loads(text))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path}, line {number}: {text[:60]!r} is no row ({error}). Bring the file back from a copy, or mend that "
            "line."
        ) from error
    if type(row) is not dict or type(row.get("round")) is not int:
        raise ValueError(
            f"{path}, line {number}: {text[:60]!r} has no round. Bring the file back from a copy, or mend that line."
        )
    return row
