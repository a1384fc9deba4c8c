"""The routes of a batched program: named ways to run it, each chosen for a reason that is recorded.

    vmap         the losses of all copies by `torch.vmap`, their gradients by one backward pass
    sequential   one copy after another: what vmap refuses

A route that traces, compiles or captures the program is one more row of `ROUTES`: a function that takes the function of
gradients and returns a faster one with the same arguments and results.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

GradientFunction = Callable[..., Any]
SEQUENTIAL = "sequential"


def _as_it_is(gradients: GradientFunction) -> GradientFunction:
    return gradients


ROUTES: Mapping[str, Callable[[GradientFunction], GradientFunction]] = {"vmap": _as_it_is}


@dataclass(frozen=True)
class Route:
    """How a batched program is run, and why this way: both stand in the records."""

    name: str
    reason: str


class VmapRefused(RuntimeError):
    """A model that runs by itself cannot run under vmap.

    Attributes:
        operation: the line at which it stopped.
        why: what torch says about it.
    """

    def __init__(self, operation: str, why: str) -> None:
        self.operation, self.why = operation, why
        super().__init__(
            f"The vectorized engine cannot run this model: vmap refuses {operation}: {why} "
            'Take engine="sequential", or write the operation without a branch on values and with fixed shapes.'
        )

    @classmethod
    def of(cls, error: BaseException) -> VmapRefused:
        """Name the operation at which an error of vmap arose."""
        frames = traceback.extract_tb(error.__traceback__)
        outside = [frame for frame in frames if not _inside_machinery(frame.filename)]
        where = "its backward pass"
        if outside:
            at = outside[-1]
            where = f"`{at.line}` ({os.path.basename(at.filename)}:{at.lineno}, in {at.name})"
        sentence = " ".join(str(error).split())
        return cls(where, sentence if len(sentence) <= 300 else sentence[:297] + "...")


def _inside_machinery(path: str) -> bool:
    """Whether a file only calls what the model does: torch beside its layers, and this engine."""
    parts = path.replace(os.sep, "/")
    if "/torch/nn/modules/" in parts:
        return parts.endswith("/module.py")
    return "/torch/" in parts or "/tailopt/engines/" in parts
