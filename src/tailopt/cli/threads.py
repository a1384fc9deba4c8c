"""How many threads torch computes with: one where the model is small.

Forward and backward pass of a small Transformer, in ms, on two cores that other processes kept busy (torch 2.13.0):

    parameters    1 thread    2 threads
         0.13M          19          398
         0.46M          26           98
          1.7M         105         1387

Two threads wait for each other after every operation, and so for whatever else the second core does. A model of a
million parameters gains little from it even where nothing else runs.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

import torch

SMALL = 1_000_000  # parameters
CHOSEN_BY_USER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@contextlib.contextmanager
def threads_for(model: torch.nn.Module, quiet: bool, recorded: int | None = None) -> Iterator[None]:
    """Compute with one thread where the model is small; afterwards everything is as before.

    Args:
        quiet: do not say so.
        recorded: what the run began with: the number of threads decides the order of sums, and so the last bits.
    """
    before = torch.get_num_threads()
    size = sum(parameter.numel() for parameter in model.parameters())
    threads = recorded if isinstance(recorded, int) else 1 if size <= SMALL else before
    if any(name in os.environ for name in CHOSEN_BY_USER):
        threads = before
    if threads != before and recorded is None and not quiet:
        print(
            f"computing with 1 thread, since the model has only {size} parameters; OMP_NUM_THREADS={before} uses "
            f"{before}",
            file=sys.stderr,
        )
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
