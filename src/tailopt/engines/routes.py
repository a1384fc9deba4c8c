"""The routes of a batched program: named ways to run it, each chosen for a reason that is recorded.

compiled     vmap traced by make_fx, compiled by inductor, and replayed as one CUDA graph (`captured_steps`)
vmap         the losses of all copies by `torch.vmap`, their gradients by one backward pass
sequential   one copy after another: what vmap refuses
"""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass

import torch

COMPILED, VMAP, SEQUENTIAL = "compiled", "vmap", "sequential"
CHOICES = ("auto", COMPILED, VMAP)
# An estimate: compiling a Transformer of six layers takes 40 s, and saves about 30 ms in each step of 10 nodes (H200).
COMPILE_FROM = 1000


@dataclass(frozen=True)
class Route:
    """How a batched program is run, and why this way: both stand in the records."""

    name: str
    reason: str


def chosen_route(device: torch.device, steps: int, choice: str = "auto") -> Route:
    """Return the route that a batched program takes first.

    Args:
        device: where it runs.
        steps: how many local steps one program takes in the whole run.
        choice: one of `CHOICES`.

    Examples:
        >>> chosen_route(torch.device("cuda"), steps=20).reason
        'the run has 20 local steps, and compiling pays from about 1000'
    """
    if choice != "auto":
        return Route(choice, "asked for")
    if device.type != "cuda":
        return Route(VMAP, "all configurations and nodes as one program")
    if steps < COMPILE_FROM:
        return Route(VMAP, f"the run has {steps} local steps, and compiling pays from about {COMPILE_FROM}")
    return Route(COMPILED, "on a GPU, launching operations takes longer than computing them")


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
