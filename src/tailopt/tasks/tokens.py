"""A cache of tokenised texts: each file is named by a digest of everything that it was computed from.

The cache is the folder `$TAILOPT_CACHE`, else `~/.cache/tailopt`; it can be removed at any time. A file is written
under another name first and renamed, so that a process that is stopped leaves no incomplete one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tailopt.clipping.operators import is_transformed
from tailopt.optional import require
from tailopt.records import disk


def cache_folder() -> Path:
    """Return the folder of the cache."""
    return Path(os.environ.get("TAILOPT_CACHE", "") or Path.home() / ".cache" / "tailopt")


def cached(compute: Callable[[], Mapping[str, Tensor]], *parts: Any) -> dict[str, Tensor]:
    """Return the tensors that a function computes, from the cache where it has them.

    Args:
        compute: is called only where the cache does not have the result.
        parts: everything that the result depends on: texts or sequences of them, numbers, a tokenizer's `fingerprint`.
    """
    safetensors = require("safetensors.torch", "Tokenised data need safetensors", extra="studies")
    path = cache_folder() / "tokens" / f"{digest(*parts)}.safetensors"
    if path.is_file():
        return dict(safetensors.load(path.read_bytes()))
    tensors = {name: value.contiguous() for name, value in compute().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    disk.replace(path, safetensors.save(tensors))
    return tensors


def digest(*parts: Any) -> str:
    """Return a name for values: 32 hexadecimal digits that depend on all of them and on their boundaries.

    Examples:
        >>> digest("ab", ["c"]) == digest("a", ["bc"]), len(digest("x", 1))
        (False, 32)
    """
    hashed = hashlib.sha256()
    for part in parts:
        for text in [part] if isinstance(part, str) or not isinstance(part, Sequence) else part:
            hashed.update(repr(text).encode("utf-8", "surrogatepass") + b"\0")
        hashed.update(b"\1")
    return hashed.hexdigest()[:32]


def fingerprint(tokenizer: Any) -> str:
    """Return a digest of what a tokenizer does: of its vocabulary, and of its tokens for a sample text."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    sample = tokenizer("The quick (brown) fox's 3.50 ÄÖü\n\ttwo  spaces")["input_ids"]
    return digest(type(tokenizer).__name__, [f"{word}={number}" for word, number in vocabulary], sample)


def padded(rows: Sequence[Sequence[int]], length: int, pad: int) -> Tensor:
    """Return rows of numbers as one tensor [rows, length], cut or padded on the right.

    Examples:
        >>> padded([[1, 2, 3], [4]], 2, pad=0)
        tensor([[1, 2],
                [4, 0]])
    """
    table = torch.full((len(rows), length), pad)
    for i, row in enumerate(rows):
        numbers = torch.tensor(row[:length], dtype=torch.long)
        table[i, : len(numbers)] = numbers
    return table


def trimmed(mask: Tensor) -> int:
    """Return the number of columns of a batch that are not all padding, 1 at least: the length of its longest row.

    Where many copies of a model run as one program, all columns count: shapes cannot depend on values there.
    """
    if is_transformed(mask):
        return mask.shape[1]
    used = mask.bool().any(0).nonzero()
    return int(used[-1]) + 1 if len(used) else 1


def longest(lengths: Tensor, at_most: int) -> int:
    """Return the largest of the lengths; the most that there can be where many copies of a model are one program."""
    return at_most if is_transformed(lengths) else int(lengths.max())
