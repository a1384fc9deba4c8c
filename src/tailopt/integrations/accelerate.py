"""Nested training in a loop with Accelerate: every process is a node, and Accelerate sees only its own.

    node = connect()                                        before Accelerator
    optimizer = tailopt.NestedOptimizer(...)                around the optimizer that was there before
    model, prepared, loader = accelerator.prepare(model, optimizer, loader)
    save_state(accelerator, optimizer, folder)              in place of accelerator.save_state(folder)
    extra = load_state(accelerator, optimizer)              in place of accelerator.load_state(folder); None at first

Accelerate's checkpoints have the schedule, the scaler and the generators; every one of them is followed by one of the
nodes, which names it. The optimizers of this library need nothing from here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from tailopt.integrations.nodes import NodeCheckpoints, connect
from tailopt.optional import require

require("accelerate", "Nested training with Accelerate needs accelerate", extra="accelerate", at_least="1.10")

from accelerate import Accelerator  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402

__all__ = ["connect", "load_state", "save_state"]


def save_state(
    accelerator: Accelerator,
    optimizer: Optimizer,
    folder: str | os.PathLike[str],
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write the state of Accelerate to a folder of this node, and then a checkpoint of the nodes that names it.

    On all nodes, after the same local step. Keep the folders of the last two calls: the nodes go on from the older one
    where a node is lost between the two halves of a call.

    Args:
        accelerator: whose `save_state` writes first.
        optimizer: the NestedOptimizer, or what `prepare` made of it.
        folder: another one for every node and every call.
        extra: what else comes back from `load_state`, such as the position in the data: tensors and plain values.
    """
    _check_alone(accelerator)
    checkpoints = _checkpoints(optimizer)
    if not checkpoints.has_run:
        raise ValueError(
            "There is no run folder, so the outer state would be lost. Build NestedOptimizer(..., run=folder, "
            "resume=True, checkpoint_every=None)."
        )
    checkpoints.check_own_folder("folder", folder)
    accelerator.save_state(os.fspath(folder))
    checkpoints.write(folder, checkpoints.optimizer.total_steps, {"own": dict(extra or {})})


def load_state(accelerator: Accelerator, optimizer: Optimizer) -> dict[str, Any] | None:
    """Load the state of Accelerate with which the nodes go on; after `prepare`.

    Returns the `extra` that was saved, or None where the run begins.
    """
    _check_alone(accelerator)
    checkpoints = _checkpoints(optimizer)
    resumed, folder = checkpoints.optimizer.resumed, checkpoints.resume_from
    if resumed is None or folder is None:
        return None
    accelerator.load_state(folder)
    return dict(resumed.extra["own"])


def _checkpoints(optimizer: Optimizer) -> NodeCheckpoints:
    bare: Any = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    return NodeCheckpoints(bare)


def _check_alone(accelerator: Accelerator) -> None:
    """Refuse an Accelerator that wraps models and deals out data."""
    if accelerator.num_processes > 1:
        raise ValueError(
            f"Invalid accelerator: it is that of one of {accelerator.num_processes} processes, and wraps the model in "
            "DDP; need a process of its own for each node. Call tailopt.integrations.accelerate.connect() before "
            "Accelerator is built."
        )
