"""Whether the vectorized engine takes a task: its loss must ask no tensor for a value."""

from __future__ import annotations

from typing import Any

import pytest

import tailopt
from tailopt.tasks.task import Task


def check_one_program(task: Task, nodes: int = 2) -> None:
    """Compare the losses of all nodes as one program with those of one node after another; the task has no dropout."""
    losses = {}
    for engine in ("sequential", "vectorized"):
        options: dict[str, Any] = {"rounds": 2, "local_steps": 2, "batch_size": 3, "progress": False, "engine": engine}
        result = tailopt.simulate(
            task.model(0), tailopt.algorithm("avg-sgd", ilr=0.1), loss=task.loss, data=task.nodes(0, nodes), **options
        )
        losses[engine] = [row["loss"] for row in result.history]
    assert losses["vectorized"] == pytest.approx(losses["sequential"], rel=1e-4)
