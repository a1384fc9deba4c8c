"""Randomness as a pure function of what it is for: (seed, purpose, round, node, step).

No draw depends on how often another one was made. So a resumed run, another engine or another machine draws the same
participants, the same batches and the same dropout masks, in any order.
"""

from __future__ import annotations

import hashlib

import torch


def derive_seed(seed: int, purpose: str, *numbers: int) -> int:
    """A seed in [0, 2**63) for one purpose, and for one round, node or step of it.

    Examples:
        >>> derive_seed(0, "participants", 3) == derive_seed(0, "participants", 3)
        True
        >>> derive_seed(0, "participants", 3) == derive_seed(0, "order", 3)
        False
    """
    text = "/".join(map(str, (seed, purpose, *numbers)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def step_seed(base: int, step: int) -> int:
    """Derive a step seed from the round seed: much cheaper than hashing each step, and just as well separated.

    Examples:
        >>> step_seed(5, 0), step_seed(5, 1)
        (5, 2177342782468422682)
    """
    return (base + step * 0x9E3779B97F4A7C15) & (2**63 - 1)


def generator(seed: int, purpose: str, *numbers: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator for one purpose, seeded by `derive_seed`."""
    new = (
        torch.Generator() if device == "cpu" else torch.Generator(device=device)
    )  # reading a device takes a microsecond
    return new.manual_seed(derive_seed(seed, purpose, *numbers))
