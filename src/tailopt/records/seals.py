"""Small files of JSON whose first line is the digest of all that follows.

    {"sha256": "…",
    "format": 1,
    …}

A flipped bit, a cut or an addition does not fit the digest. What a sealed file says was therefore written by somebody
who meant it; whether it makes sense is for its reader to check.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tailopt.records import disk

MOST = 1 << 30  # bytes of a sealed file; the largest are manifests, with some hundred for each tensor of each node


class DamagedRecord(RuntimeError):
    """A file of a run folder outside its checkpoints is not what was written: missing, cut, changed or another's."""


def sealed(body: Mapping[str, Any], length: int = 0) -> bytes:
    """The bytes of a sealed file; blanks at its end fill it up to a length."""
    lines = (f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in body.items())
    rest = (",\n".join(lines) + "}").encode()
    rest = rest.ljust(length - len(_seal(b"")) - 1) + b"\n"
    return _seal(rest) + rest


def unsealed(path: Path) -> dict[str, Any]:
    """What was sealed in a file. Raises ValueError, with what is wrong with it as a predicate, or FileNotFoundError."""
    if (length := path.stat().st_size) > MOST:
        raise ValueError(f"has {length} bytes, and was written with at most {MOST}")
    data = disk.read(path)
    end = data.find(b"\n") + 1
    if data[:end] != _seal(data[end:]):
        raise ValueError("does not fit the digest in its first line")
    try:
        return dict(json.loads(data))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON that can be read ({type(error).__name__}: {error})") from error


def seal(path: Path) -> str:
    """The digest in the first line of a sealed file."""
    with path.open("rb") as file:
        return file.readline(200).decode(errors="replace")[len('{"sha256": "') :][:64]


def _seal(rest: bytes) -> bytes:
    return f'{{"sha256": "{hashlib.sha256(rest).hexdigest()}",\n'.encode()
