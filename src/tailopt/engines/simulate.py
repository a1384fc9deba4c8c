"""`tailopt.simulate`: N nodes on one machine."""

from __future__ import annotations

import copy
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from tailopt.algorithms import Algorithm
from tailopt.arguments import check_choice, check_counts, check_flags, check_function
from tailopt.engines.batches import BatchFunction, BatchSource, DatasetBatches, FunctionBatches, LossFunction
from tailopt.engines.engine import Evaluate
from tailopt.engines.loop import Loop, Reporting
from tailopt.engines.model_state import ModelState, check_trainable, names_and_dimensions, trainable_parameters
from tailopt.engines.routes import chosen_route
from tailopt.engines.sequential import PRECISIONS, LocalTraining, Sequential
from tailopt.engines.vectorized import Vectorized
from tailopt.evaluation import modes_of, restore_modes
from tailopt.records.folder import open_run
from tailopt.records.run_config import as_stored, in_sections, storable
from tailopt.rounds import robust
from tailopt.rounds.drops import DropChooser
from tailopt.rounds.hyperparameters import AlgorithmHyperparameters, RuleHyperparameters
from tailopt.rounds.participants import Chooser, checked_weights
from tailopt.rounds.policy import RoundPolicy

ENGINES = {"auto": Sequential, "sequential": Sequential, "vectorized": Vectorized}


@dataclass(frozen=True)
class Result:
    """What a simulation leaves.

    Attributes:
        model: with the synchronised weights of the last round.
        average: with the iterate average, or None where it was not asked for.
        history: a dict for each round: round (from 1), loss (over the local steps, weighted like the nodes),
            participants, their local steps, weights (as used), excluded (node, tensor, value, bound, reason), metrics,
            statistics; where thresholds are "auto" also thresholds (u, d and s of the round, inside and outside; None
            during calibration).
        thresholds: what "auto" has chosen, a line for each level.
    """

    model: torch.nn.Module
    average: torch.nn.Module | None
    history: list[dict[str, Any]]
    algorithm: Algorithm
    seed: int
    thresholds: tuple[str, ...] = ()


def simulate(
    model: torch.nn.Module,
    algorithm: Algorithm,
    *,
    loss: LossFunction,
    data: Sequence[Any] | None = None,
    batches: BatchFunction | None = None,
    nodes: int | None = None,
    rounds: int,
    local_steps: int | None = None,
    local_epochs: int | None = None,
    batch_size: int | None = None,
    weights: Sequence[float] | str | None = None,
    participation: float | Chooser = 1.0,
    participants: int | None = None,
    sampling: str = "uniform",
    drops: float | DropChooser = 0.0,
    on_drop: str = "sync",
    proximal: float = 0.0,
    projection: float | None = None,
    average: bool = False,
    schedules: Any = None,
    guard: bool = True,
    aggregate: str | robust.Aggregate = "mean",
    engine: str = "auto",
    device: torch.device | str | None = None,
    precision: str | None = None,
    seed: int = 0,
    evaluate: Evaluate | None = None,
    evaluate_every: int = 1,
    statistics: bool | str = False,
    run: str | os.PathLike[str] | None = None,
    resume: bool = False,
    checkpoint_every: int = 1,
    keep: int = 3,
    loggers: Sequence[Callable[[dict[str, Any]], None]] = (),
    progress: bool = True,
    inplace: bool = False,
    describe: Mapping[str, Any] | None = None,
) -> Result:
    """Train a model on N nodes, one after another on this machine, by any algorithm.

        x_i <- x, then local_steps inner steps on node i;    delta = sum of w_i (x_i - x);    x <- outer step(x, delta)

    The same seed gives the same bits, stopped and resumed or not. The model is copied unless `inplace`.

    Args:
        loss: (model, batch) -> a scalar tensor.
        data: one Dataset or DataLoader a node; with `batch_size`. Each node goes through its own, shuffled, from round
            to round.
        batches: instead of data: (node, round, step, generator) -> batch, with `nodes`. Rounds count from 1, steps
            from 0.
        rounds: synchronisations, in all: a resumed run goes on to that number.
        local_steps: of every node in every round; or give `local_epochs`, the passes over a node's data.
        weights: of the nodes in the mean: None for equal, "samples" for the sizes of their data, or a sequence.
        participation: the fraction of nodes in a round, or a function (round, generator) -> node numbers;
            `participants` is a count.
        sampling: "uniform" draws distinct nodes, whose weights count in the mean; "proportional" draws with replacement
            by weight, and every draw counts alike. A function as `participation` draws itself: only "uniform" then.
        drops: the probability that a contribution is lost after the local steps, or a function (round, generator) ->
            node numbers. The others renormalise; a round in which nothing arrives takes no outer step.
        on_drop: where a node whose contribution was lost goes on: "sync", from the synchronised weights, or "keep",
            from its own; its next displacement then includes the lost rounds, and the guard checks only that it is
            finite.
        proximal: the factor mu of FedProx: every local step uses g + mu (x - start) instead of the gradient g, where
            start are the weights at the beginning of the round.
        projection: a radius B: x <- x min(1, B / |x|) after every round.
        average: also keep the average of the rounds' weights, the r-th weighted by r.
        schedules: {"ilr": ...}: schedules of `tailopt.schedules`, functions of the round that return the value, or what
            `tailopt.theory` returns.
        guard: leave out displacements that are not finite, or larger than the inner optimizer can make them.
        aggregate: "mean", or a robust mean: "median-norm", "trimmed-mean", "coordinate-median" or "centred-clipping".
            These hold every node's displacement at once, and ignore weights: only equal ones are accepted.
        engine: "sequential" trains one node after another; "vectorized" all of them as one batched program, with the
            same results up to rounding where the model draws nothing at random, in the memory of all nodes together;
            "auto" is "sequential", so that one seed gives one result everywhere.
        device: where the nodes compute; by default where the model is.
        precision: None or "bf16" (autocast; weights and displacements stay as they are).
        evaluate: model -> a mapping of numbers, every `evaluate_every` rounds and after the last.
        statistics: count the gradients' coordinates by tensor, into the history; "histograms" counts them also by
            magnitude, in powers of two.
        run: a folder for configuration, history and checkpoints. `resume` goes on from its last checkpoint.
        checkpoint_every, keep: rounds between checkpoints, and how many are kept.
        loggers: functions that are given every row of the history, or objects as in `tailopt.loggers`.
        progress: show a line with the loss and the time left.
        describe: further entries of the run folder's configuration; they override entries of the same name.

    Examples:
        >>> import tailopt
        >>> x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
        >>> y = x @ torch.tensor([1.0, -2.0, 3.0])
        >>> parts = [torch.utils.data.TensorDataset(x[i::4], y[i::4]) for i in range(4)]
        >>> algo = tailopt.algorithm("avg-biclip", ilr=0.1, i_u=1.0, i_d=0.01)
        >>> mse = lambda model, batch: (model(batch[0]).squeeze(-1) - batch[1]).square().mean()
        >>> result = tailopt.simulate(torch.nn.Linear(3, 1), algo, loss=mse, data=parts, batch_size=8,
        ...                           rounds=20, local_steps=5, progress=False)
        >>> result.history[-1]["loss"] < 0.02
        True
    """
    check_choice("engine", engine, tuple(ENGINES))
    check_counts(rounds=rounds)  # a simulation has an end
    check_flags(resume=resume, inplace=inplace)
    check_function("loss", loss, "a function (model, batch) that returns a scalar tensor")
    _check_model(model, algorithm)
    policy = RoundPolicy(
        rounds=rounds,
        inner_state=algorithm.inner_state,
        local_steps=local_steps,
        local_epochs=local_epochs,
        participation=participation,
        participants=participants,
        sampling=sampling,
        drops=drops,
        on_drop=on_drop,
        proximal=proximal,
        projection=projection,
        average=average,
        guard=guard,
        aggregate=aggregate,
        seed=seed,
    )
    source = batch_source(data, batches, nodes, batch_size, policy)
    policy = replace(policy, nodes=source.nodes, weights=node_weights(weights, source))
    reporting = Reporting(
        title=algorithm.name,
        evaluate=evaluate,
        evaluate_every=evaluate_every,
        statistics=statistics,
        checkpoint_every=checkpoint_every,
        keep=keep,
        loggers=loggers,
        progress=progress,
    )
    simulation = Simulation(model, algorithm, policy, loss, source, schedules, device, precision, engine)
    return simulation.run(reporting, RunFolderOptions(run, resume, {"batch_size": batch_size}, describe or {}), inplace)


@dataclass(frozen=True)
class RunFolderOptions:
    """Where a simulation is recorded, and the config entries that are stored beside those that determine the results.

    Args:
        folder: the run folder, or None.
        resume: whether to continue from its last checkpoint.
        extra_config: entries that the simulation itself does not know, such as the batch size.
        describe: entries of the user's, which override others of the same name.
    """

    folder: str | os.PathLike[str] | None
    resume: bool
    extra_config: Mapping[str, Any]
    describe: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.resume and self.folder is None:
            raise ValueError("Invalid resume: there is no run folder to go on from. Give it as `run`.")


@dataclass(frozen=True)
class Simulation:
    """Everything that decides the bits of a simulation."""

    model: torch.nn.Module
    algorithm: Algorithm
    policy: RoundPolicy
    loss: LossFunction
    batches: BatchSource
    schedules: Any
    device: torch.device | str | None
    precision: str | None
    engine: str | Callable[[torch.nn.Module, LocalTraining], Sequential]  # a key of `ENGINES`, or what builds one

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, tuple(PRECISIONS))

    def run(self, reporting: Reporting, records: RunFolderOptions, inplace: bool) -> Result:
        """Train, in the model itself or in a copy of it."""
        if records.folder is not None and self.batches.not_repeatable_because:
            raise ValueError(
                f"Invalid run: {self.batches.not_repeatable_because}, so a stopped run could not be resumed. "
                "Use a map-style dataset without a sampler, or leave `run` out."
            )
        device = torch.device(self.device) if self.device is not None else next(self.model.parameters()).device
        names, dims = names_and_dimensions(trainable_parameters(self.model))
        hyperparameters = AlgorithmHyperparameters(self.algorithm, self.schedules, names, dims)
        hyperparameters.check_first_round()
        auto_thresholds = hyperparameters.auto_thresholds
        working = (self.model if inplace else copy.deepcopy(self.model)).to(device)
        modes = modes_of(working)
        try:
            training = self._training(hyperparameters.inner, device, reporting.statistics, records)
            engine = (self.engine if callable(self.engine) else ENGINES[self.engine])(working, training)
            state = engine.initial_state(self.policy.average)
            with restoring_global_rng(device):
                config = self._config(reporting.statistics, records)
                run = open_run(records.folder, config, records.resume) if records.folder is not None else None
                try:
                    loop = Loop(engine, self.policy, hyperparameters.outer, auto_thresholds, reporting, run)
                    if records.resume:
                        loop.resume(state)
                    loop.go(state, as_stored(config))
                finally:
                    if run is not None:
                        run.close()
        finally:
            # Building the engine put the model into train mode. This is undone also if the run folder cannot be opened.
            restore_modes(modes)
        mean = None
        if state.average is not None:
            mean = copy.deepcopy(working)
            ModelState(mean).load_average(state)
        chosen = auto_thresholds.choice_messages
        return Result(working, mean, loop.history, self.algorithm, self.policy.seed, chosen)

    def _training(
        self,
        inner_hyperparameters: RuleHyperparameters,
        device: torch.device,
        statistics: bool | str,
        records: RunFolderOptions,
    ) -> LocalTraining:
        return LocalTraining(
            algorithm=self.algorithm,
            inner_hyperparameters=inner_hyperparameters,
            loss=self.loss,
            batches=self.batches,
            seed=self.policy.seed,
            device=device,
            precision=self.precision,
            proximal=self.policy.proximal,
            statistics=statistics,
            resumable=records.folder is not None,
            route=chosen_route(device, self._steps_in_run()),
        )

    def _steps_in_run(self) -> int:
        """Return how many local steps a node takes at most in the whole run."""
        steps = max(self.batches.steps(node) for node in range(self.batches.nodes))
        return (self.policy.rounds or 1) * steps

    def _config(self, statistics: bool | str, records: RunFolderOptions) -> dict[str, Any]:
        """Return what the run folder says about this simulation.

        The order of the keys is part of the format: checkpoints contain the digest of config.toml.
        """
        schedules = getattr(self.schedules, "schedules", self.schedules)
        named = sorted(schedules.items()) if isinstance(schedules, Mapping) else []
        policy = self.policy.as_config()
        seed = policy.pop("seed")
        config = {
            **dict.fromkeys(("algorithm", "settings", "numbers", "inner_state", "send_preconditioner")),
            **algorithm_config(self.algorithm),
            "schedules": dict(named),
            **dict.fromkeys(("rounds", "local_steps", "local_epochs")),
            **records.extra_config,
            **policy,
            "precision": self.precision,
            "statistics": statistics,
            # folders of the sequential engine do not name it
            **({"engine": self.engine} if self.engine == "vectorized" else {}),
            "seed": seed,
        }
        return in_sections({**{key: storable(value) for key, value in config.items()}, **records.describe})


def algorithm_config(algorithm: Algorithm) -> dict[str, Any]:
    """Return what a run folder says about an algorithm."""
    named = isinstance(algorithm.outer, str) and isinstance(algorithm.inner, str)
    return {
        "algorithm": algorithm.name,
        "settings": {key: storable(value) for key, value in algorithm.settings.items()},
        # settings of two classes may share a name, so each side's are stored separately
        "numbers": None if named else {side: storable(algorithm.hparams(side)) for side in ("outer", "inner")},
        "send_preconditioner": algorithm.send_preconditioner,
    }


def batch_source(
    data: Sequence[Any] | None,
    batches: BatchFunction | None,
    nodes: int | None,
    batch_size: int | None,
    policy: RoundPolicy,
) -> BatchSource:
    """Return where batches come from: one dataset per node, or a function; anything else is refused."""
    steps, epochs = policy.local_steps, policy.local_epochs
    if (data is None) == (batches is None):
        raise ValueError("Give data, one Dataset or DataLoader per node, or batches, a function; one of the two.")
    if data is not None:
        if nodes is not None and nodes != len(data):
            raise ValueError(f"Invalid nodes: {nodes}, but there are data for {len(data)}. Leave `nodes` out.")
        return DatasetBatches(data, steps, epochs, batch_size, policy.seed)
    assert batches is not None
    if not callable(batches):
        raise TypeError(f"Invalid batches: {type(batches).__name__}; need a function (node, round, step, generator).")
    if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1:
        raise ValueError(f"Invalid nodes: {nodes!r}; with a batch function, say how many nodes there are: nodes=10.")
    if steps is None:
        raise ValueError(
            f"Invalid local_epochs: {epochs}; a batch function has no end to count passes by. Give local_steps."
        )
    if batch_size is not None:
        raise ValueError(f"Invalid batch_size: {batch_size}; the batch function decides that. Leave it out.")
    return FunctionBatches(batches, nodes, steps, policy.seed)


def node_weights(weights: Sequence[float] | str | None, source: BatchSource) -> tuple[float, ...]:
    """Return the weight of every node in the mean: equal, by samples, or as given."""
    if weights is None:
        return (1.0,) * source.nodes
    if isinstance(weights, str):
        if weights != "samples":
            raise ValueError(f'Invalid weights: {weights!r}; need None, "samples" or a sequence of numbers.')
        samples = source.samples()
        if samples is None:
            raise ValueError('Invalid weights: "samples" needs data whose sizes are known. Give the numbers.')
        return checked_weights(samples, source.nodes)
    if not isinstance(weights, Iterable):
        raise TypeError(f'Invalid weights: {weights!r}; need None, "samples" or a sequence of numbers, one per node.')
    return checked_weights(list(weights), source.nodes)


def _check_model(model: torch.nn.Module, algorithm: Algorithm) -> None:
    if not isinstance(algorithm, Algorithm):
        raise TypeError(f"Invalid algorithm: {algorithm!r}; make one with tailopt.algorithm(name, ...).")
    check_trainable(model)


@contextmanager
def restoring_global_rng(device: torch.device) -> Iterator[None]:
    """Give every global generator its state back: a simulation seeds them, and its caller should not notice."""
    devices = [device] if device.type != "cpu" else []
    plain = random.getstate()
    numpy = sys.modules.get("numpy")
    arrays = numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
            yield
    finally:
        random.setstate(plain)
        if numpy is not None:
            numpy.random.set_state(arrays)
