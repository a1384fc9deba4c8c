"""`tailopt.simulate`: N nodes on one machine."""

from __future__ import annotations

import copy
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tailopt.algorithms import Algorithm
from tailopt.arguments import (
    check_counts,
    check_flags,
    check_function,
    check_projection,
    checked_loggers,
    checked_seed,
)
from tailopt.engines.batches import BatchFunction, FromData, FromFunction, LossFunction, Source
from tailopt.engines.loop import Evaluate, Loop, check, restore
from tailopt.engines.sequential import PRECISIONS, Sequential, trainable
from tailopt.records import checkpoints
from tailopt.records.folder import opened, storable
from tailopt.rounds import robust
from tailopt.rounds.drops import ON_DROP, Drops, Loss
from tailopt.rounds.participants import SAMPLINGS, Chooser, Sampling, checked_weights, how_many
from tailopt.rounds.round import Synchronised
from tailopt.rounds.settings import Settings

ENGINES = ("auto", "sequential")


@dataclass(frozen=True)
class Result:
    """What a simulation leaves.

    Attributes:
        model: with the synchronised weights of the last round.
        average: with the iterate average, or None where it was not asked for.
        history: a dict for each round: round (from 1), loss (over the local steps, weighted like the nodes),
            participants, their local steps, weights (as used), excluded (node, tensor, value, bound, reason), metrics,
            statistics.
    """

    model: torch.nn.Module
    average: torch.nn.Module | None
    history: list[dict[str, Any]]
    algorithm: Algorithm
    seed: int


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
    drops: float | Loss = 0.0,
    on_drop: str = "sync",
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
    statistics: bool = False,
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
        local_steps: of every node in every round; or `local_epochs`, then as many as the node's data take.
        weights: of the nodes in the mean: None for equal, "samples" for the sizes of their data, or a sequence.
        participation: the fraction of nodes in a round, or a function (round, generator) -> node numbers;
            `participants` is a count.
        sampling: "uniform" draws distinct nodes; "proportional" draws with replacement by weight.
        drops: the probability that a contribution is lost after the local steps, or a function (round, generator) ->
            node numbers. The others renormalise; a round in which nothing arrives takes no outer step.
        on_drop: where a node whose contribution was lost goes on: "sync", from the synchronised weights, or "keep",
            from its own; then its next displacement is everything since, and only its finiteness is judged.
        projection: a radius B: x <- x min(1, B / |x|) after every round.
        average: also keep the average of the rounds' weights, the r-th weighted by r.
        schedules: {"ilr": ...}: schedules of `tailopt.schedules`, functions of the round that return the value, or what
            `tailopt.theory` returns.
        guard: leave out displacements that are not finite, or larger than the inner optimizer can make them.
        aggregate: "mean", or a robust mean: "median-norm", "trimmed-mean", "coordinate-median" or "centred-clipping".
            These hold every node's displacement at once, and ignore weights: only equal ones are accepted.
        engine: "sequential", or "auto", which is the same.
        device: where the nodes compute; by default where the model is.
        precision: None or "bf16" (autocast; weights and displacements stay as they are).
        evaluate: model -> a mapping of numbers, every `evaluate_every` rounds and after the last.
        statistics: count the gradients' coordinates by tensor, into the history.
        run: a folder for configuration, history and checkpoints. `resume` goes on from its last checkpoint.
        checkpoint_every, keep: rounds between checkpoints, and how many are kept.
        loggers: functions that are given every row of the history.
        progress: show a line with the loss and the time left.
        describe: what else stands in the run folder's configuration, and what replaces its entries.

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
    _check_choices(on_drop, engine, precision, sampling)
    if (local_steps is None) == (local_epochs is None):
        raise ValueError("Give local_steps or local_epochs, one of the two: what a node does in a round.")
    check_counts(rounds=rounds, evaluate_every=evaluate_every, checkpoint_every=checkpoint_every, keep=keep)
    check_counts(local_steps=local_steps) if local_epochs is None else check_counts(local_epochs=local_epochs)
    check_flags(average=average, guard=guard, statistics=statistics, resume=resume, progress=progress, inplace=inplace)
    check_projection(projection)
    check_function("loss", loss, "a function (model, batch) that returns a scalar tensor")
    check_function("evaluate", evaluate, "a function of the model that returns a mapping of numbers, or None")
    told = checked_loggers(loggers)
    seed = checked_seed(seed)
    _check_model(model, algorithm)
    source = _source(data, batches, nodes, local_steps, local_epochs, batch_size, seed)
    used = _weights(weights, source)
    combined = robust.chosen(aggregate, used, sampling)
    losing = Drops(source.nodes, drops, seed)
    chosen = Sampling(used, how_many(source.nodes, participation, participants), sampling, seed)
    if run is not None and source.repeatable:
        raise ValueError(
            f"Invalid run: {source.repeatable}, so a stopped run could not be resumed. "
            "Use a map-style dataset without a sampler, or leave `run` out."
        )
    if resume and run is None:
        raise ValueError("Invalid resume: there is no run folder to go on from. Give it as `run`.")
    place = torch.device(device) if device is not None else _device_of(model)
    working = (model if inplace else copy.deepcopy(model)).to(place)
    modes = [(module, module.training) for module in working.modules()]
    names, _ = trainable(working)
    settings = Settings(algorithm, schedules, names)
    settings.inner(1, 0)  # patterns and shapes are refused here, before anything moves
    settings.outer(1)
    worker = Sequential(
        working, algorithm, loss, source, settings, seed, place, precision, statistics, probing=run is not None
    )
    state = Sequential.synchronised(working, average)
    named = isinstance(algorithm.outer, str) and isinstance(algorithm.inner, str)
    config = {
        "algorithm": algorithm.name,
        "settings": {k: storable(v) for k, v in algorithm.settings.items()},
        # two classes of torch.optim may both have a momentum
        "numbers": None if named else {level: storable(algorithm.numbers(level)) for level in ("outer", "inner")},
        "inner_state": algorithm.inner_state,
        "send_preconditioner": algorithm.send_preconditioner,
        "schedules": {name: storable(s) for name, s in _schedule_names(schedules)},
        "rounds": rounds,
        "local_steps": local_steps,
        "local_epochs": local_epochs,
        "batch_size": batch_size,
        "nodes": source.nodes,
        "weights": list(used),
        "participation": storable(participation),
        "participants": participants,
        "sampling": sampling,
        # None where nothing gets lost: so in folders from before
        "drops": storable(drops) if drops != 0 else None,
        "on_drop": on_drop if drops != 0 else None,
        "projection": projection,
        "average": average,
        "guard": guard,
        "aggregate": None if combined is None else str(combined),  # None, the mean: so in folders from before
        "precision": precision,
        "statistics": statistics,
        "seed": seed,
        **(describe or {}),
    }
    loop = Loop(
        worker,
        chosen,
        settings,
        rounds,
        projection,
        guard,
        evaluate,
        evaluate_every,
        statistics,
        None,
        checkpoint_every,
        keep,
        told,
        progress,
        algorithm.name,
        aggregate=combined,
        drops=losing,
        on_drop=on_drop,
    )
    with _own_randomness(place):
        try:
            if run is not None:
                loop.run = opened(run, config, resume)
                if resume:
                    _resume(loop, state)
            try:
                loop.go(state)
            finally:  # a model changed in place holds a whole round, also where one was broken off
                worker.show(state.weights, state.buffers)
                for module, training in modes:
                    module.training = training
        finally:
            if loop.run is not None:
                loop.run.close()
        mean = None
        if state.average is not None:
            mean = copy.deepcopy(working)
            Sequential(mean, algorithm, loss, source, settings, seed, place).show(state.average, state.buffers)
    return Result(working, mean, loop.history, algorithm, seed)


def _source(
    data: Sequence[Any] | None,
    batches: BatchFunction | None,
    nodes: int | None,
    steps: int | None,
    epochs: int | None,
    batch_size: int | None,
    seed: int,
) -> Source:
    if (data is None) == (batches is None):
        raise ValueError("Give data, one Dataset or DataLoader a node, or batches, a function; one of the two.")
    if data is not None:
        if nodes is not None and nodes != len(data):
            raise ValueError(f"Invalid nodes: {nodes}, but there are data for {len(data)}. Leave `nodes` out.")
        return FromData(data, steps, epochs, batch_size, seed)
    assert batches is not None
    if not callable(batches):
        raise TypeError(f"Invalid batches: {type(batches).__name__}; need a function (node, round, step, generator).")
    if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1:
        raise ValueError(f"Invalid nodes: {nodes!r}; with a batch function, say how many nodes there are: nodes=10.")
    if steps is None:
        raise ValueError("Invalid local_epochs: a batch function has no end to count passes by. Give local_steps.")
    if batch_size is not None:
        raise ValueError(f"Invalid batch_size: {batch_size}; the batch function decides that. Leave it out.")
    return FromFunction(batches, nodes, steps, seed)


def _weights(weights: Sequence[float] | str | None, source: Source) -> tuple[float, ...]:
    if weights is None:
        return (1.0,) * source.nodes
    if isinstance(weights, str):
        if weights != "samples":
            raise ValueError(f'Invalid weights: {weights!r}; need None, "samples" or a sequence of numbers.')
        found = source.samples()
        if found is None:
            raise ValueError('Invalid weights: "samples" needs data whose sizes are known. Give the numbers.')
        return checked_weights(found, source.nodes)
    if not isinstance(weights, Iterable):
        raise TypeError(f'Invalid weights: {weights!r}; need None, "samples" or a sequence of numbers, one a node.')
    return checked_weights(list(weights), source.nodes)


def _check_choices(on_drop: str, engine: str, precision: str | None, sampling: str) -> None:
    choices: list[tuple[str, Any, tuple[Any, ...]]] = [
        ("on_drop", on_drop, ON_DROP),
        ("engine", engine, ENGINES),
        ("precision", precision, tuple(PRECISIONS)),
        ("sampling", sampling, SAMPLINGS),
    ]
    for name, value, allowed in choices:
        if value not in allowed:
            raise ValueError(f"Invalid {name}: {value!r}; need one of {', '.join(map(repr, allowed))}.")


def _check_model(model: torch.nn.Module, algorithm: Algorithm) -> None:
    if not isinstance(algorithm, Algorithm):
        raise TypeError(f"Invalid algorithm: {algorithm!r}; make one with tailopt.algorithm(name, ...).")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("Invalid model: no parameter requires a gradient, so there is nothing to train.")


def _device_of(model: torch.nn.Module) -> torch.device:
    return next(iter(model.parameters())).device


def _resume(loop: Loop, state: Synchronised) -> None:
    run = loop.run
    assert run is not None
    snapshot = checkpoints.load_latest(run.path, lambda snapshot, path: check(run, snapshot, path))
    if snapshot is None:
        run.refuse_rows_alone()
        return
    restore(snapshot, state, loop.engine)
    loop.engine.check_repeatable()  # before anything is dropped
    checkpoints.rewind(run.path, state.round)
    run.rewind(state.round, snapshot.stamp and snapshot.stamp.history)
    loop.history = run.history()
    run.log(f"resumed after round {state.round}")
    if state.round >= loop.rounds:
        warnings.warn(f"The run has {state.round} rounds already; nothing is left to do.", UserWarning, stacklevel=3)


def _schedule_names(schedules: Any) -> list[tuple[str, Any]]:
    found = getattr(schedules, "schedules", schedules)
    return sorted(found.items()) if isinstance(found, Mapping) else []


@contextmanager
def _own_randomness(device: torch.device) -> Iterator[None]:
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
