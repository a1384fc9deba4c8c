"""Many configurations of one algorithm, trained side by side: what a sweep runs.

Weights are stacked as [configurations, *shape], and as [nodes, configurations, *shape] during local steps. In every
round all configurations have the participants, the batches and the seeds of `tailopt.simulate`, and each follows its
simulation up to rounding. A configuration of which no displacement is finite any more ends, and the others go on
without it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tailopt.algorithms import Algorithm
from tailopt.arguments import check_choice, check_counts
from tailopt.engines.batches import BatchSource
from tailopt.engines.captured_steps import programs_for
from tailopt.engines.configuration_rounds import ConfigurationBatch, Configurations, Ended
from tailopt.engines.configuration_settings import check_one_algorithm
from tailopt.engines.loop import Reporting
from tailopt.engines.memory_plan import MemoryPlan, available, is_out_of_memory, planned
from tailopt.engines.model_state import trainable_parameters
from tailopt.engines.routes import SEQUENTIAL, Route, VmapRefused, chosen_route
from tailopt.engines.simulate import RunFolderOptions, Simulation, restoring_global_rng
from tailopt.optimizers.auto_thresholds import is_auto
from tailopt.rounds.settle import EveryoneExcluded

ENGINES = ("auto", "vectorized", SEQUENTIAL)
TYPICAL_BATCH = 16  # configurations side by side, to guess the number of steps before the memory is planned
PLANNED_BY = 3  # configurations that run to plan the memory of more
MEMORY_SHARE = 0.5  # of what is free, where no limit is given: other processes need some too


@dataclass(frozen=True)
class ConfigurationsResult:
    """What many configurations leave.

    Attributes:
        weights: by name, [configurations, *shape]: after the last round, or after the last one that a configuration
            finished.
        buffers: by name, those that the model changes.
        losses: [configurations, rounds], in float64; NaN where a configuration had ended.
        measured: what `measure` returned, by name: [configurations, rounds].
        ended: the configurations that ended early: number -> round and reason.
        route: how they were run, and why this way.
        batch: how many ran side by side.
        plan: the memory that was predicted for one batch, or None on the sequential route.
    """

    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    losses: Tensor
    measured: dict[str, Tensor]
    ended: dict[int, Ended]
    route: Route
    batch: int
    plan: MemoryPlan | None = None

    @torch.no_grad()
    def load_into(self, model: torch.nn.Module, configuration: int) -> None:
        """Load the weights and buffers of one configuration into a model."""
        own = trainable_parameters(model)
        for name, stacked in self.weights.items():
            own[name].copy_(stacked[configuration])
        buffers = dict(model.named_buffers())
        for name, stacked in self.buffers.items():
            buffers[name].copy_(stacked[configuration])


@dataclass(frozen=True)
class ReplicasResult:
    """What many configurations leave with several seeds: a `ConfigurationsResult` with one more leading dimension."""

    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    losses: Tensor
    measured: dict[str, Tensor]
    ended: dict[tuple[int, int], Ended]
    route: Route
    batch: int
    plan: MemoryPlan | None = None

    def replica(self, number: int) -> ConfigurationsResult:
        """Return the result of one seed."""
        return ConfigurationsResult(
            {name: w[number] for name, w in self.weights.items()},
            {name: b[number] for name, b in self.buffers.items()},
            self.losses[number],
            {key: values[number] for key, values in self.measured.items()},
            {c: end for (r, c), end in self.ended.items() if r == number},
            self.route,
            self.batch,
            self.plan,
        )


def train_configurations(
    task: Configurations,
    algorithms: Sequence[Algorithm],
    engine: str = "auto",
    batch: int | None = None,
    memory_limit: int | None = None,
) -> ReplicasResult:
    """Train many configurations of one algorithm with several seeds at once.

    Displacements that are not finite are left out as by the guard of `tailopt.simulate`; with a kept inner state they
    end the configuration.

    Args:
        algorithms: the configurations: settings of one algorithm.
        engine: "vectorized" raises where vmap refuses the model; "auto" then trains one configuration after another,
            and `route` names the reason; "sequential" always does.
        batch: how many run side by side; by default as many as the memory holds.
        memory_limit: bytes; by default half of what is free.

    Examples:
        >>> from tailopt.algorithms import algorithm
        >>> from tailopt.engines.batches import FunctionBatches
        >>> from tailopt.engines.configuration_rounds import Replica
        >>> from tailopt.rounds.policy import RoundPolicy
        >>> def squares(model, x):
        ...     return (model(x).squeeze(-1) - x.sum(-1)).square().mean()
        >>> def draw(node, round, step, generator):
        ...     return torch.randn(8, 3, generator=generator)
        >>> one = Replica(
        ...     model=torch.nn.Linear(3, 1, bias=False),
        ...     batches=FunctionBatches(draw, nodes=4, steps=5, seed=0),
        ...     policy=RoundPolicy(rounds=20, local_steps=5, inner_state="reset", nodes=4, weights=(1.0,) * 4),
        ... )
        >>> rates = [algorithm("avg-sgd", ilr=ilr) for ilr in (0.01, 0.1, 1e30)]
        >>> result = train_configurations(Configurations(replicas=(one,), loss=squares), rates).replica(0)
        >>> int(result.losses[:, -1].nan_to_num(torch.inf).argmin()), sorted(result.ended), result.route.name
        (1, [2], 'vmap')
    """
    check_choice("engine", engine, ENGINES)
    if batch is not None:
        check_counts(batch=batch)
    check_one_algorithm(algorithms)
    reason = _why_sequential(algorithms, engine)
    with restoring_global_rng(task.device):
        if not reason:
            try:
                return _side_by_side(task, algorithms, batch, memory_limit)
            except VmapRefused as error:
                if engine == "vectorized":
                    raise
                reason = str(error)
        return _one_after_another(task, algorithms, Route(SEQUENTIAL, reason))


def _why_sequential(algorithms: Sequence[Algorithm], engine: str) -> str:
    """Return why the configurations run one after another; empty if they may run side by side."""
    if engine == SEQUENTIAL:
        return "asked for"
    reason = why_one_after_another(algorithms)
    if reason and engine == "vectorized":
        raise ValueError(f'Invalid engine: "vectorized", but {reason}. Take engine="auto" or "sequential".')
    return reason


def why_one_after_another(algorithms: Sequence[Algorithm]) -> str:
    """Return what about these algorithms cannot run side by side; empty if nothing."""
    classes = [side for side in (algorithms[0].outer, algorithms[0].inner) if not isinstance(side, str)]
    if classes:
        return f"{classes[0].__name__} is a class of torch.optim, which steps on one model at a time"
    if algorithms[0].rule("inner").needs_whole_tensors:
        return f"the inner rule {algorithms[0].inner} steps on whole matrices, not on stacked ones"
    if any(is_auto(a.hparams(side).get("u")) for a in algorithms for side in ("outer", "inner")):
        return 'thresholds that are "auto" follow the gradients of one configuration at a time'
    return ""


def _side_by_side(
    task: Configurations, algorithms: Sequence[Algorithm], batch: int | None, memory_limit: int | None
) -> ReplicasResult:
    """Run batches of configurations; a batch for which there is not enough memory is halved."""
    plan, programs = None, programs_for(str(algorithms[0].inner))
    route = _route(task, algorithms)
    if batch is None:
        batch, plan = planned_batch(task, algorithms, memory_limit)
    batch = min(batch, len(algorithms))
    if task.not_repeatable_because and batch < len(algorithms):
        raise ValueError(
            f"Invalid data: {task.not_repeatable_because}, and {len(algorithms)} configurations in batches of "
            f"{batch} read them several times. Use a map-style dataset without a sampler, or fewer configurations."
        )
    found: list[ReplicasResult] = []
    done = 0
    while done < len(algorithms):
        try:
            run = ConfigurationBatch(task, algorithms[done : done + batch], route, programs)
            run.train()
        except Exception as error:
            if not is_out_of_memory(error) or batch == 1:
                raise
            programs.release()
            batch = -(-batch // 2)
            warnings.warn(
                f"Not enough memory: from here on {batch} configurations run side by side.", UserWarning, stacklevel=4
            )
            continue
        ended = {(r, done + c): end for (r, c), end in run.ended.items()}
        found.append(
            ReplicasResult(run.weights(), run.final_buffers, run.losses, run.measured, ended, run.route, batch, plan)
        )
        done += batch
    return _joined(found, batch, plan)


def _route(task: Configurations, algorithms: Sequence[Algorithm]) -> Route:
    """Return the route that batches of configurations take first; all of them run by the same programs."""
    steps = max(replica.batches.steps(node) for replica in task.replicas for node in range(replica.batches.nodes))
    batches = -(-len(algorithms) // TYPICAL_BATCH)
    return chosen_route(task.device, batches * task.rounds * steps, task.route)


def planned_batch(
    task: Configurations, algorithms: Sequence[Algorithm], memory_limit: int | None = None
) -> tuple[int, MemoryPlan | None]:
    """Return how many configurations fit into the memory side by side, and the plan where one was needed."""
    limit = memory_limit if memory_limit is not None else int((available(task.device) or 0) * MEMORY_SHARE)
    if not limit or len(algorithms) <= PLANNED_BY or task.not_repeatable_because:
        return len(algorithms), None
    plan = _memory_plan(task, algorithms, _route(task, algorithms))
    return min(plan.most(limit), len(algorithms)), plan


def _memory_plan(task: Configurations, algorithms: Sequence[Algorithm], route: Route) -> MemoryPlan:
    """Predict the memory of a batch from short runs of a few configurations.

    Two rounds of two steps: after them all states exist. The first and the last point of a grid differ in all settings.
    """
    few = [algorithms[0], algorithms[-1], algorithms[len(algorithms) // 2]]
    replicas = tuple(
        replace(r, policy=replace(r.policy, rounds=2), batches=_FewSteps(r.batches, 2)) for r in task.replicas
    )
    short = replace(task, replicas=replicas, measure=None, judge=None)
    # before them a plain run: compiling for 2 configurations twice would take as long as the plan itself
    return planned(
        lambda n: ConfigurationBatch(short, few[:n], route).train(),
        task.device,
        first=lambda: ConfigurationBatch(short, few[:2]).train(),
    )


class _FewSteps:
    """The batches of another source, of which a node takes only a few in a round."""

    def __init__(self, source: BatchSource, most: int) -> None:
        self._source, self._most = source, most
        self.nodes, self.not_repeatable_because = source.nodes, source.not_repeatable_because
        self.samples, self.batches = source.samples, source.batches

    def steps(self, node: int) -> int:
        """Return the local steps of a round."""
        return min(self._most, self._source.steps(node))


def _joined(found: Sequence[ReplicasResult], batch: int, plan: MemoryPlan | None) -> ReplicasResult:
    """Put the results of batches of configurations together."""
    if len(found) == 1:
        return found[0]
    first = found[0]
    names = dict.fromkeys(key for result in found for key in result.measured)
    measured = {
        # where all configurations of a batch ended in the first round, nothing was measured
        key: torch.cat([result.measured.get(key, torch.full_like(result.losses, torch.nan)) for result in found], 1)
        for key in names
    }
    return ReplicasResult(
        {name: torch.cat([result.weights[name] for result in found], 1) for name in first.weights},
        {name: torch.cat([result.buffers[name] for result in found], 1) for name in first.buffers},
        torch.cat([result.losses for result in found], 1),
        measured,
        {which: end for result in found for which, end in result.ended.items()},
        first.route,
        batch,
        plan,
    )


def _one_after_another(task: Configurations, algorithms: Sequence[Algorithm], route: Route) -> ReplicasResult:
    """Run every configuration with every seed by the sequential engine."""
    if task.judge is not None:
        raise ValueError(
            f"Invalid judge: configurations run one after another ({route.reason}), and none has neighbours to be "
            "judged with. Run all of them for fewer rounds, and those that stay again for more."
        )
    shape = (len(task.replicas), 1, task.rounds)
    found = []
    for c, algorithm in enumerate(algorithms):
        losses, measured = torch.full(shape, torch.nan, dtype=torch.float64), dict[str, Tensor]()
        models, ended = [], {}
        for r in range(len(task.replicas)):
            model, rows, end = _simulated(task, r, algorithm)
            models.append(model)
            if end is not None:
                ended[r, c] = end
            for k, row in enumerate(rows):
                losses[r, 0, k] = row["loss"]
                for key, value in row["metrics"].items():
                    measured.setdefault(key, torch.full_like(losses, torch.nan))[r, 0, k] = value
        weights, buffers = (
            {name: torch.stack([of(model)[name].detach() for model in models])[:, None] for name in of(models[0])}
            for of in (_trained, _buffers)
        )
        found.append(ReplicasResult(weights, buffers, losses, measured, ended, route, 1))
    return _joined(found, 1, None)


def _simulated(
    task: Configurations, r: int, algorithm: Algorithm
) -> tuple[torch.nn.Module, list[dict[str, Any]], Ended | None]:
    """Train one configuration with one seed; returns the model, the history, and why it ended early."""
    replica, rows = task.replicas[r], list[dict[str, Any]]()
    model = copy.deepcopy(replica.model).to(task.device)

    def evaluate(trained: torch.nn.Module) -> dict[str, Any]:
        assert task.measure is not None
        # a function of all seeds: the others get the weights of this one, and their numbers are not used
        stacked = {
            name: p.detach()[None].expand(len(task.replicas), *p.shape)[:, None]
            for name, p in (_trained(trained) | _buffers(trained)).items()
        }
        return {key: float(values[r, 0]) for key, values in task.measure(len(rows) + 1, stacked).items()}

    run = Simulation(
        model,
        algorithm,
        replica.policy,
        task.loss,
        replica.batches,
        task.schedules,
        task.device,
        task.precision,
        SEQUENTIAL,
    )
    function = None if task.measure is None else evaluate
    reporting = Reporting(title=algorithm.name, evaluate=function, loggers=[rows.append], progress=False)
    try:
        run.run(reporting, RunFolderOptions(None, False, {}, {}), inplace=True)
    except EveryoneExcluded as error:
        return model, rows, Ended(len(rows) + 1, str(error))
    return model, rows, None


def _trained(model: torch.nn.Module) -> dict[str, Tensor]:
    return dict(trainable_parameters(model))


def _buffers(model: torch.nn.Module) -> dict[str, Tensor]:
    return dict(model.named_buffers())
