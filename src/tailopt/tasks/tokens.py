"""Texts as numbers, once: tokenised data stand in a cache, named by what they were made of.

The cache is the folder `$TAILOPT_CACHE`, else `~/.cache/tailopt`; it can be removed at any time. A file there is
written aside and renamed, so that a stopped process leaves none that is cut short.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tailopt.optional import require
from tailopt.records import disk


def cache() -> Path:
    """The folder of the cache."""
    return Path(os.environ.get("TAILOPT_CACHE", "") or Path.home() / ".cache" / "tailopt")


def cached(made: Callable[[], Mapping[str, Tensor]], *parts: Any) -> dict[str, Tensor]:
    """What a function makes, from the cache where it was made before of the same parts.

    Args:
        parts: everything that it depends on: texts (also many of them), numbers, the tokenizer's `fingerprint`.
    """
    safetensors = require("safetensors.torch", "Tokenised data need safetensors", extra="studies")
    path = cache() / "tokens" / f"{digest(*parts)}.safetensors"
    if path.is_file():
        return dict(safetensors.load(path.read_bytes()))
    found = {name: value.contiguous() for name, value in made().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    disk.replace(path, safetensors.save(found))
    return found


def digest(*parts: Any) -> str:
    """A name for what something was made of.

    Examples:
        >>> digest("ab", ["c"]) == digest("a", ["bc"]), len(digest("x", 1))
        (False, 32)
    """
    found = hashlib.sha256()
    for part in parts:
        for text in [part] if isinstance(part, str) or not isinstance(part, Sequence) else part:
            found.update(repr(text).encode("utf-8", "surrogatepass") + b"\0")
        found.update(b"\1")
    return found.hexdigest()[:32]


def fingerprint(tokenizer: Any) -> str:
    """What a tokenizer does, as a short text: its vocabulary and a sample."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    sample = tokenizer("The quick (brown) fox's 3.50 ÄÖü\n\ttwo  spaces")["input_ids"]
    return digest(type(tokenizer).__name__, [f"{word}={number}" for word, number in vocabulary], sample)


def padded(rows: Sequence[Sequence[int]], length: int, pad: int) -> Tensor:
    """Rows of numbers as one tensor [rows, length], cut or padded on the right.

    Examples:
        >>> padded([[1, 2, 3], [4]], 2, pad=0)
        tensor([[1, 2],
                [4, 0]])
    """
    found = torch.full((len(rows), length), pad)
    for i, row in enumerate(rows):
        kept = row[:length]
        found[i, : len(kept)] = torch.tensor(kept, dtype=torch.long)
    return found


def trimmed(mask: Tensor) -> int:
    """How many columns of a batch hold anything: the length of its longest row, 1 at least."""
    used = mask.bool().any(0).nonzero()
    return int(used[-1]) + 1 if len(used) else 1
