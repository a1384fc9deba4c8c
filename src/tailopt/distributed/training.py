"""The training loop of `tailopt train`: a task on real nodes.

Every node takes the simulation's batches, seeds and steps, with `NestedOptimizer` between the nodes. Node 0 records a
digest of every tensor after every round, so that `tailopt verify` can replay the run (engines/replay.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tailopt.algorithms import Algorithm
from tailopt.distributed.nested_optimizer import NestedOptimizer
from tailopt.engines.batches import DatasetBatches, LossFunction
from tailopt.engines.engine import Evaluate
from tailopt.engines.replay import DigestRecorder
from tailopt.engines.sequential import seed_python_and_numpy, seed_torch
from tailopt.evaluation import evaluating
from tailopt.loggers.protocol import RowFunction
from tailopt.seeds import derive_seed, step_seed


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """What all nodes do.

    Args:
        loss: (model, batch) -> a scalar tensor.
        data: of every node, as for `simulate`; each node reads its own.
        rounds: in all.
        local_steps: of a round.
        batch_size: of a local step.
        weights: of the nodes in the mean; None for equal ones.
        seed: of the run.
        evaluate: model -> metrics, on node 0, every `evaluate_every` rounds and after the last.
    """

    loss: LossFunction
    data: Sequence[Any]
    rounds: int
    local_steps: int
    batch_size: int | None = None
    weights: Sequence[float] | None = None
    seed: int = 0
    evaluate: Evaluate | None = None
    evaluate_every: int = 1


def train(
    model: torch.nn.Module,
    algorithm: Algorithm,
    plan: TrainingPlan,
    *,
    prepare: Callable[[NestedOptimizer], None] = lambda optimizer: None,
    run: Path | None = None,
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
    loggers: Sequence[RowFunction] = (),
    **settings: Any,
) -> NestedOptimizer:
    """Train on this node as the simulation would, and synchronise with the others.

    Args:
        prepare: called with the optimizer before the first round.
        run: the run folder.
        on_row: called with every row of the history, on node 0.
        loggers: told of the run on node 0, with the metrics.
        settings: of `NestedOptimizer.from_algorithm`.
    """
    node, nodes = dist.get_rank(), dist.get_world_size()
    if len(plan.data) != nodes:
        raise ValueError(f"Invalid nodes: there are data for {len(plan.data)}, and {nodes} processes.")
    if not model.training:  # otherwise the modes are the user's, as in the simulation: a frozen BatchNorm stays frozen
        model.train()
    told = [_RoundLogger(model, plan, run, on_row), *loggers] if node == 0 else []
    opt = NestedOptimizer.from_algorithm(
        model,
        algorithm,
        local_steps=plan.local_steps,
        rounds=plan.rounds,
        seed=plan.seed,
        weight=1.0 if plan.weights is None else float(plan.weights[node]),
        run=run,
        loggers=told,
        **settings,
    )
    prepare(opt)
    source = DatasetBatches(plan.data, plan.local_steps, None, plan.batch_size, plan.seed)
    while not opt.finished:
        _local_round(opt, model, plan, source)
    return opt


def _local_round(opt: NestedOptimizer, model: torch.nn.Module, plan: TrainingPlan, source: DatasetBatches) -> None:
    """Take the local steps of a round with the seeds of the simulation."""
    node, t = dist.get_rank(), opt.node.round + 1
    seed = derive_seed(plan.seed, "model", t, node)
    seed_python_and_numpy(seed)
    batches = source.batches(node, t, opt.total_steps, plan.local_steps)
    losses = []
    for step in range(plan.local_steps):
        seed_torch(step_seed(seed, step), opt.node.device)  # before the batch is drawn, as in the simulation
        batch = next(batches)
        opt.zero_grad()
        loss = plan.loss(model, batch)
        loss.backward()
        losses.append(loss.item())
        if step == plan.local_steps - 1:
            opt.report(sum(losses) / len(losses))
        opt.step()


class _RoundLogger:
    """Records digests and evaluates, on node 0, at the end of every round."""

    def __init__(
        self,
        model: torch.nn.Module,
        plan: TrainingPlan,
        run: Path | None,
        on_row: Callable[[dict[str, Any]], None],
    ) -> None:
        self._model, self._plan, self._on_row = model, plan, on_row
        self._digests = None if run is None else DigestRecorder(run, model)

    def __call__(self, row: dict[str, Any]) -> None:
        """Take one row of the history; metrics are added to it."""
        t, plan = row["round"], self._plan
        if self._digests is not None:
            self._digests.record(t)
        if plan.evaluate is not None and (t % plan.evaluate_every == 0 or t == plan.rounds):
            with evaluating(self._model):
                row["metrics"] = {str(key): float(value) for key, value in plan.evaluate(self._model).items()}
        self._on_row(row)
