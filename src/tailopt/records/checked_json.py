"""Small JSON files whose first line is the digest of all bytes that follow.

    {"sha256": "…",
    "format": 1,
    …}

A flipped bit, a cut or an addition does not fit the digest. The digest is no signature: whether the content of such a
file makes sense is for its reader to check.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tailopt.records import disk

MAX_BYTES = 1 << 30  # of a file; the largest are manifests, with some hundred bytes for each tensor of each node


class DamagedRecord(RuntimeError):
    """A file of a run folder, outside its checkpoints, is missing, cut, changed, or belongs to another run."""


def with_digest(body: Mapping[str, Any], length: int = 0) -> bytes:
    """Return the bytes of a file with this content, digest first, padded with blanks to `length`.

    Examples:
        >>> with_digest({"format": 1})[:20], len(with_digest({"format": 1}, length=128))
        (b'{"sha256": "a5f1a88d', 128)
    """
    lines = (f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in body.items())
    rest = (",\n".join(lines) + "}").encode()
    rest = rest.ljust(length - len(_first_line(b"")) - 1) + b"\n"
    return _first_line(rest) + rest


def read_verified(path: Path) -> dict[str, Any]:
    """Return the content of a file after its digest was checked; "sha256" is one of the keys.

    Raises:
        ValueError: what is wrong with the file, as a predicate: "does not fit the digest in its first line".
        FileNotFoundError: there is no such file.
    """
    if (length := path.stat().st_size) > MAX_BYTES:
        raise ValueError(f"has {length} bytes, and was written with at most {MAX_BYTES}")
    data = disk.read(path)
    end = data.find(b"\n") + 1
    if data[:end] != _first_line(data[end:]):
        raise ValueError("does not fit the digest in its first line")
    try:
        return dict(json.loads(data))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON that can be read ({type(error).__name__}: {error})") from error


def stored_digest(path: Path) -> str:
    """Return the digest in the first line of a file, without checking it."""
    with path.open("rb") as file:
        return file.readline(200).decode(errors="replace")[len('{"sha256": "') :][:64]


def _first_line(rest: bytes) -> bytes:
    return f'{{"sha256": "{hashlib.sha256(rest).hexdigest()}",\n'.encode()
