"""What a sweep trains: for every seed a model, data, a loss and a metric; from a task, or given one by one.

Settings are tuned on one split and reported on another. A task that can hold out a share of its training data
(`judge="held-out"`) is tuned on that share and reported on its validation data; other tasks differ from seed to seed,
and the seeds of the report are fresh ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tailopt.arguments import check_counts, check_function
from tailopt.engines.batches import BatchFunction, BatchSource, LossFunction, batch_digest
from tailopt.engines.configuration_rounds import Replica
from tailopt.engines.model_state import trainable_parameters
from tailopt.engines.simulate import batch_source, node_weights, restoring_global_rng
from tailopt.engines.stacked_batches import NodeBatches
from tailopt.records.run_config import storable
from tailopt.records.tensor_bytes import digest
from tailopt.rounds.policy import RoundPolicy
from tailopt.tasks.own import description
from tailopt.tasks.task import Task

SeedEvaluate = Callable[[torch.nn.Module, int], Mapping[str, Any]]
OWN = ("loss", "data", "batches", "evaluate", "test")  # what a task brings itself


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Everything but the settings, the seeds and the engine that decides what a trial measures.

    Attributes:
        name: of the task, or of the model's class.
        description: what a record says about the task or the model.
        model: seed -> the model at the start.
        data: seed -> one Dataset or DataLoader a node; or `batches`, a function, with `nodes`.
        evaluate: (model, seed) -> numbers by name; None where the loss of the last round is the metric.
        options: of the rounds, by the names of `RoundPolicy`.
    """

    name: str
    description: Any
    model: Callable[[int], torch.nn.Module]
    loss: LossFunction
    data: Callable[[int], Sequence[Any]] | None
    batches: BatchFunction | None
    nodes: int | None
    batch_size: int | None
    weights: Sequence[float] | str | None
    evaluate: SeedEvaluate | None
    rounds: int
    options: Mapping[str, Any]
    schedules: Any
    device: torch.device | str | None
    precision: str | None
    metric: str
    lower_is_better: bool

    def source(self, seed: int) -> BatchSource:
        """Return where the batches of a seed come from."""
        data = None if self.data is None else self.data(seed)
        nodes = None if data is not None else self.nodes
        return batch_source(data, self.batches, nodes, self.batch_size, self.policy(seed, "reset", self.rounds))

    def policy(self, seed: int, inner_state: str, rounds: int) -> RoundPolicy:
        """Return the policy of the rounds, before the number of nodes is known."""
        return RoundPolicy(rounds=rounds, inner_state=inner_state, seed=seed, **self.options)

    def replica(self, seed: int, model: torch.nn.Module, source: BatchSource, inner_state: str, rounds: int) -> Replica:
        """Return what belongs to one seed, for `train_configurations`."""
        policy = self.policy(seed, inner_state, rounds)
        policy = replace(policy, nodes=source.nodes, weights=node_weights(self.weights, source))
        return Replica(model=model, batches=source, policy=policy)

    def config(self, seed: int) -> dict[str, Any]:
        """Return what a record says about the problem, with digests of the start and of the first batch of a seed."""
        with restoring_global_rng(torch.device("cpu")):
            model, source = self.model(seed), self.source(seed)
            start = digest({name: p.detach().cpu() for name, p in trainable_parameters(model).items()})
            batches = [
                batch_digest(NodeBatches(source, node, 1, 0, seed).peek(torch.device("cpu")))[:16]
                for node in sorted({0, source.nodes - 1})
            ]
        return {
            "problem": self.description,
            "loss": storable(self.loss),
            "evaluate": storable(getattr(self.evaluate, "function", None)),
            "rounds": self.rounds,
            **{key: storable(value) for key, value in self.options.items()},
            "nodes": source.nodes,
            "batch_size": self.batch_size,
            "weights": storable(self.weights),
            "schedules": storable(getattr(self.schedules, "schedules", self.schedules)),
            "precision": self.precision,
            "metric": self.metric,
            "lower_is_better": self.lower_is_better,
            "samples": source.samples(),
            "first_weights": start[:16],
            "first_batches": batches,  # of the first and of the last node
        }


class Constant:
    """The same value for every seed; a class, since other processes are sent it."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __call__(self, seed: int) -> Any:
        """Return the value."""
        return self._value


class WithoutSeed:
    """A user's function of a model, called as one of a model and a seed."""

    def __init__(self, function: Callable[[torch.nn.Module], Mapping[str, Any]]) -> None:
        self.function = function

    def __call__(self, model: torch.nn.Module, seed: int) -> Mapping[str, Any]:
        """Call the function."""
        return self.function(model)


class TaskData:
    """The nodes of a task, by seed."""

    def __init__(self, task: Task, nodes: int) -> None:
        self._task, self._nodes = task, nodes

    def __call__(self, seed: int) -> Sequence[Any]:
        """Return the data of every node."""
        return self._task.nodes(seed, self._nodes)


def problems(model_or_task: Any, arguments: Mapping[str, Any]) -> tuple[Problem, Problem]:
    """Return what settings are tuned on and what the best ones are reported on.

    arguments: of `sweep`, by name; None where the task or a default decides.
    """
    if isinstance(model_or_task, str):
        from tailopt.tasks.table import task as named_task  # here: the table knows all tasks, and imports them

        model_or_task = named_task(model_or_task)
    if _is_task(model_or_task):
        _refuse_own_parts(model_or_task, arguments)
        tuned = model_or_task
        if getattr(model_or_task, "judge", None) == "validation":
            tuned = dataclasses.replace(model_or_task, judge="held-out")
        return task_problem(tuned, arguments), task_problem(model_or_task, arguments)
    tuning = own_problem(model_or_task, arguments)
    test = arguments["test"]
    return tuning, tuning if test is None else replace(tuning, evaluate=WithoutSeed(test))


def task_problem(task: Task, arguments: Mapping[str, Any]) -> Problem:
    """Return the problem of a task; arguments override its defaults."""
    usual = task.defaults
    given = {key: value for key, value in arguments.items() if value is not None}
    steps: dict[str, Any] = {"local_steps": usual.local_steps, "local_epochs": usual.local_epochs}
    if "local_steps" in given or "local_epochs" in given:
        steps = {}
    parts = {} if "participants" in given or "participation" in given else {"participants": usual.participants}
    nodes = given.get("nodes", usual.nodes)
    metric = given.get("metric", usual.metric)
    return Problem(
        name=task.name,
        description=description(task),
        model=task.model,
        loss=task.loss,
        data=TaskData(task, nodes),
        batches=None,
        nodes=nodes,
        batch_size=given.get("batch_size", usual.batch_size),
        weights=_weights(given.get("weights", usual.weights)),
        evaluate=task.evaluate,
        rounds=given.get("rounds", usual.rounds),
        options={**steps, **parts, **_round_options(given)},
        schedules=arguments["schedules"],
        device=arguments["device"],
        precision=arguments["precision"],
        metric=metric,
        lower_is_better=given.get("lower_is_better", usual.lower_is_better if metric == usual.metric else True),
    )


def own_problem(model: Any, arguments: Mapping[str, Any]) -> Problem:
    """Return the problem of a model with a loss and data of its own."""
    if not isinstance(model, torch.nn.Module) and not callable(model):
        raise TypeError(
            f"Invalid model: {model!r}; need a torch.nn.Module, a function of a seed that returns one, a task, or the "
            "name of a task."
        )
    loss, data, rounds, evaluate = (arguments[key] for key in ("loss", "data", "rounds", "evaluate"))
    for key, value, what in (("loss", loss, "loss=a function (model, batch)"), ("rounds", rounds, "rounds=60")):
        if value is None:
            raise ValueError(f"Invalid {key}: a model needs it. Give {what}, or the name of a task.")
    check_function("loss", loss, "a function (model, batch) that returns a scalar tensor")
    check_function("evaluate", evaluate, "a function of a model that returns a mapping of numbers")
    check_function("test", arguments["test"], "a function of a model that returns a mapping of numbers")
    check_counts(rounds=rounds)
    given = {key: value for key, value in arguments.items() if value is not None}
    metric = given.get("metric", "loss")
    if evaluate is None and metric != "loss":
        raise ValueError(f'Invalid metric: {metric!r}, but there is no evaluate. Give evaluate, or metric="loss".')
    if evaluate is not None and "metric" not in given:
        raise ValueError('Invalid metric: name the number of evaluate that settings are chosen by: metric="accuracy".')
    if evaluate is not None and metric != "loss" and "lower_is_better" not in given:
        raise ValueError(f"Invalid lower_is_better: say whether {metric} is better when lower: True or False.")
    return Problem(
        name=type(model).__name__ if isinstance(model, torch.nn.Module) else getattr(model, "__name__", "model"),
        description=storable(model) if not isinstance(model, torch.nn.Module) else type(model).__name__,
        model=Constant(model) if isinstance(model, torch.nn.Module) else model,
        loss=loss,
        data=data if data is None or callable(data) else Constant(data),
        batches=arguments["batches"],
        nodes=arguments["nodes"],
        batch_size=arguments["batch_size"],
        weights=_weights(arguments["weights"]),
        evaluate=None if evaluate is None else WithoutSeed(evaluate),
        rounds=rounds,
        options=_round_options(given),
        schedules=arguments["schedules"],
        device=arguments["device"],
        precision=arguments["precision"],
        metric=metric,
        lower_is_better=given.get("lower_is_better", True),
    )


def _is_task(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("defaults", "nodes", "evaluate", "loss", "model"))


def _refuse_own_parts(task: Task, arguments: Mapping[str, Any]) -> None:
    for key in OWN:
        if arguments[key] is not None:
            raise ValueError(f"Invalid {key}: the task {task.name} has its own. Leave it out, or give a model.")


def _round_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a round that a problem has no field for, in the order of the policy."""
    of_problem = {field.name for field in dataclasses.fields(Problem)}
    names = [field.name for field in dataclasses.fields(RoundPolicy) if field.name not in of_problem]
    return {name: given[name] for name in names if name in given}


def _weights(weights: Any) -> Any:
    return None if isinstance(weights, str) and weights == "equal" else weights
