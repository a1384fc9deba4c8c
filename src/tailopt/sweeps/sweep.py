"""`tailopt.sweep`: find settings of an algorithm on a model or a task."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tailopt.algorithms import canonical_name
from tailopt.arguments import check_choice, check_counts, check_flags, checked_loggers, checked_seed
from tailopt.engines.batches import BatchFunction, LossFunction
from tailopt.engines.configurations import ENGINES
from tailopt.engines.engine import Evaluate
from tailopt.engines.routes import SEQUENTIAL, Route
from tailopt.loggers.protocol import RowFunction
from tailopt.records.run_config import storable
from tailopt.rounds.participants import Chooser
from tailopt.sweeps.executors import EXECUTORS, Executor, make_executor
from tailopt.sweeps.halving import Halving
from tailopt.sweeps.optuna_points import GENERATION, OptunaPoints
from tailopt.sweeps.points import SpaceLike, check_settings, checked_proximal_space, describe, sweep_points
from tailopt.sweeps.problem import Problem, problems
from tailopt.sweeps.result import SweepResult, rank
from tailopt.sweeps.sweep_progress import SweepProgress
from tailopt.sweeps.told_trials import tell
from tailopt.sweeps.training import Job, NumberedPoint, Outcome, Trainer
from tailopt.sweeps.trials import Trial, TrialFolder
from tailopt.sweeps.tuning_seeds import tuning_and_fresh_seeds

SAMPLERS = ("sobol", "optuna")


def sweep(
    model_or_task: Any,
    algorithm: str,
    *,
    space: SpaceLike = "paper",
    grid: SpaceLike | None = None,
    budget: int | None = 64,
    sampler: str = "sobol",
    settings: Mapping[str, Any] | None = None,
    seeds: int | Sequence[int] = 2,
    report_seeds: int | Sequence[int] = 5,
    halving: bool | float = False,
    curves: bool = False,
    loss: LossFunction | None = None,
    data: Sequence[Any] | Callable[[int], Sequence[Any]] | None = None,
    batches: BatchFunction | None = None,
    nodes: int | None = None,
    rounds: int | None = None,
    local_steps: int | None = None,
    local_epochs: int | None = None,
    batch_size: int | None = None,
    weights: Sequence[float] | str | None = None,
    participation: float | Chooser | None = None,
    participants: int | None = None,
    sampling: str | None = None,
    proximal: float | None = None,
    projection: float | None = None,
    schedules: Any = None,
    evaluate: Evaluate | None = None,
    test: Evaluate | None = None,
    metric: str | None = None,
    lower_is_better: bool | None = None,
    engine: str = "auto",
    device: torch.device | str | None = None,
    precision: str | None = None,
    batch: int | None = None,
    memory_limit: int | None = None,
    executor: str = "local",
    workers: int | None = None,
    run: str | os.PathLike[str] | None = None,
    resume: bool = True,
    seed: int = 0,
    loggers: Sequence[RowFunction] = (),
    progress: bool = True,
) -> SweepResult:
    """Try many settings of an algorithm, choose the best ones, and report them on fresh seeds.

        best = argmin over points of the mean over `seeds` of the metric;    reported: the best with `report_seeds`

    Points train side by side where the model allows it, as many as the memory holds; each follows `tailopt.simulate`
    with the same seed up to rounding.

    Args:
        model_or_task: a model, or a function of a seed that returns one, with `loss`, `data` or `batches` and `rounds`
            as in `simulate`; or a task or its name, which brings all of these. `data` may be a function of the seed.
        algorithm: its name.
        space: "paper", the paper's grid of this algorithm; a mapping from settings to lists of values or to
            `tailopt.sweeps.Range`; or a list of points. A mapping with a range gives Sobol points, one of lists a grid.
            Points whose d exceeds u are dropped, with a warning. Beside settings of the algorithm a space may have
            "proximal", the mu of FedProx.
        grid: instead of `space`: all points of a grid, whatever the budget.
        budget: how many points; part of a grid is drawn at random. None for all of it.
        sampler: "sobol", or "optuna", which proposes the points of a mapping by what earlier ones did, 16 at a time.
        settings: further settings, the same for all points.
        seeds: settings are chosen by the mean over these; a number means 0, 1, ... A space of one point leaves nothing
            to choose and may have 0, so that the point is reported alone.
        report_seeds: the best settings are reported on these; a number means those after `seeds`; 0 for no report.
        halving: end the worse points early: True keeps a third at one ninth and at one third of the rounds, a number is
            what is divided by. It saves most of the time, and may end a setting that starts slowly. Points are compared
            with all others that the same process trains and that can run side by side.
        curves: measure the report after every round, and not only at its end.
        evaluate: model -> numbers by name, for a model: measured at rungs and at the end; `metric` names the one that
            settings are chosen by. By default that is the loss of the last round.
        test: the same for the report; by default `evaluate`. Tasks that hold out training data are tuned on these and
            reported on their validation data.
        engine: "auto" trains points side by side, and one after another if vmap refuses the model; "vectorized" or
            "sequential" does one of the two. The result has the route and the reason, and a resumed sweep keeps it.
        batch: how many points are trained at a time, and recorded when they are done (with halving, when all are); by
            default as many as fit into `memory_limit` bytes, or half of what is free.
        executor: "local", this process; "processes" or "ray", `workers` of them. Batches of the same points give the
            same bits in all of them.
        run: a folder for every trial. A sweep that was killed goes on there with `resume`, and runs no trial twice;
            a larger budget adds points.
        seed: of the points.
        loggers: as in `simulate`; every trial is a run, told when its batch is done.
        progress: show how far it is.

    Examples:
        >>> import tailopt
        >>> result = tailopt.sweep("gaussian", "avg-sgd", space={"ilr": [0.01, 0.1, 1e9]}, rounds=10, progress=False)
        >>> result.best.settings, len(result.trials), result.route.name
        ({'ilr': 0.1}, 6, 'vmap')
        >>> result.ranking[-1].ended[:21]
        'Round 1: not finite: '
    """
    arguments = {
        "loss": loss, "data": data, "batches": batches, "nodes": nodes, "rounds": rounds, "local_steps": local_steps,
        "local_epochs": local_epochs, "batch_size": batch_size, "weights": weights, "participation": participation,
        "participants": participants, "sampling": sampling, "proximal": proximal, "projection": projection,
        "schedules": schedules, "evaluate": evaluate, "test": test, "metric": metric, "device": device,
        "lower_is_better": lower_is_better, "precision": precision,
    }  # fmt: skip
    tuning, reporting = problems(model_or_task, arguments)
    check_choice("engine", engine, ENGINES)
    check_choice("executor", executor, EXECUTORS)
    check_choice("sampler", sampler, SAMPLERS)
    check_flags(resume=resume, progress=progress, curves=curves)
    check_counts(**{k: v for k, v in {"batch": batch, "memory_limit": memory_limit}.items() if v is not None})
    tuning_seeds, fresh_seeds = tuning_and_fresh_seeds(seeds, report_seeds)
    plan = Plan(
        tuning=tuning,
        reporting=reporting,
        algorithm=canonical_name(algorithm),
        space=checked_proximal_space(space if grid is None else grid, proximal, halving),
        budget=budget if grid is None else None,
        sampler=sampler,
        settings=dict(settings or {}),
        seeds=tuning_seeds,
        report_seeds=fresh_seeds,
        halving=Halving.of(halving, tuning.rounds),
        curves=curves,
        seed=checked_seed(seed),
    )
    how = How(engine, batch, memory_limit, executor, workers, checked_loggers(loggers), progress)
    folder = None if run is None else TrialFolder(run, plan.config(), resume)
    try:
        return _Sweep(plan, how, folder).go()
    finally:
        if folder is not None:
            folder.close()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What decides the trials."""

    tuning: Problem
    reporting: Problem
    algorithm: str
    space: SpaceLike
    budget: int | None
    sampler: str
    settings: Mapping[str, Any]
    seeds: tuple[int, ...]
    report_seeds: tuple[int, ...]
    halving: Halving | None
    curves: bool
    seed: int

    def config(self) -> dict[str, Any]:
        """Return what a record says about the plan. Budget and report seeds are left out: they may grow."""
        return {
            "algorithm": self.algorithm,
            "settings": storable(self.settings),
            "space": describe(self.space),
            "sampler": self.sampler,
            "seed": self.seed,
            "seeds": list(self.seeds),
            "halving": None if self.halving is None else self.halving.factor,
            **({"curves": True} if self.curves else {}),  # folders of the first version lack it
            **self.tuning.config((*self.seeds, *self.report_seeds)[0]),
            "test": storable(getattr(self.reporting.evaluate, "function", None)),
        }

    def job(self, engine: str) -> Job:
        """Return what workers are sent."""
        return Job(self.tuning, self.seeds, self.algorithm, self.halving, engine)


@dataclass(frozen=True)
class How:
    """What does not decide the trials, beyond rounding."""

    engine: str
    batch: int | None
    memory_limit: int | None
    executor: str
    workers: int | None
    loggers: Sequence[RowFunction]
    progress: bool


class _Sweep:
    """One run of a sweep: trains what the record lacks, records it, and reports the best."""

    def __init__(self, plan: Plan, how: How, folder: TrialFolder | None) -> None:
        self._plan, self._how, self._folder = plan, how, folder
        self._trials: list[Trial] = list(folder.trials) if folder is not None else []
        recorded = folder.route if folder is not None else None
        self._route = None if recorded is None else Route(recorded["name"], recorded["reason"])
        self._batch = how.batch
        if self._batch is None and folder is not None:
            self._batch = folder.batch
        self._divided = False  # whether the points are more than one batch
        self._said: set[str] = set()
        self._bar = SweepProgress(how.progress, f"{plan.algorithm} on {plan.tuning.name}")

    def go(self) -> SweepResult:
        """Run what is missing, and return the result."""
        plan, dropped = self._plan, 0
        trials: tuple[Trial, ...] = ()
        with self._bar:
            if plan.seeds:
                points, dropped = self._tune()
                trials = tuple(self._tuning_trials(points))
                if self._batch is None:  # the record has all points, and they were one batch
                    self._batch = len(points)
                first = rank(trials, plan.tuning.metric, plan.tuning.lower_is_better)[0]
                best = None if math.isnan(first.value) else (first.number, first.settings)
            else:
                best = self._only_point()
            reports = () if best is None else self._report(best)
        assert self._route is not None
        run = None if self._folder is None else self._folder.path
        problem = plan.tuning
        result = SweepResult(
            plan.algorithm, problem.metric, problem.lower_is_better, trials, reports, dropped, self._route,
            problem.rounds, run,
        )  # fmt: skip
        if self._folder is not None:
            self._folder.write_page("table.md", f"{result.summary()}\n\n{result.table()}\n")
        return result

    def _engine(self) -> str:
        """Return the engine: that of the record, so that a resumed sweep goes on in the same way."""
        if self._route is None or self._how.engine != "auto":
            return self._how.engine
        return SEQUENTIAL if self._route.name == SEQUENTIAL else "vectorized"

    def _tune(self) -> tuple[list[NumberedPoint], int]:
        """Train all points of the plan that the record lacks; returns the points, and how many were dropped."""
        trainer = Trainer(self._plan.job(self._engine()), self._bar.tick)
        self._check_repeatable(trainer)
        executor = make_executor(self._how.executor, trainer, self._how.workers)
        try:
            if self._plan.sampler == "optuna":
                return self._tune_by_optuna(trainer, executor)
            points, dropped = self._points()
            self._run_missing(points, trainer, executor)
            return points, dropped
        finally:
            executor.close()

    def _points(self) -> tuple[list[NumberedPoint], int]:
        """Return the points of the space with all their settings, and how many were dropped."""
        plan = self._plan
        found = sweep_points(plan.algorithm, plan.space, plan.budget, plan.seed, plan.settings)
        check_settings(plan.algorithm, found.settings, plan.settings)
        _say_dropped(found.dropped)
        points = zip(found.numbers, found.settings, strict=True)
        return [(i, {**plan.settings, **point}) for i, point in points], found.dropped

    def _only_point(self) -> NumberedPoint:
        """Return the one point of a space from which nothing is chosen."""
        points, _ = self._points()
        if len(points) > 1:
            raise ValueError(
                f"Invalid seeds: 0, but the space has {len(points)} points, and one has to be chosen. Give one point, "
                "or seeds=2."
            )
        return points[0]

    def _tune_by_optuna(self, trainer: Trainer, executor: Executor) -> tuple[list[NumberedPoint], int]:
        """Train points in generations, each of which knows what the earlier ones did."""
        plan, problem = self._plan, self._plan.tuning
        if plan.budget is None:
            raise ValueError("Invalid budget: None, but Optuna proposes points without end. Give a number.")
        proposer = OptunaPoints(plan.algorithm, plan.space, plan.seed, problem.lower_is_better, plan.settings)
        points: list[NumberedPoint] = []
        while len(points) < plan.budget:
            # whole generations, so that a larger budget proposes the same points first
            parameters, proposed = zip(*proposer.propose(GENERATION), strict=True)
            check_settings(plan.algorithm, proposed, plan.settings)
            numbers = range(len(points), plan.budget)
            part: list[NumberedPoint] = [
                (i, {**plan.settings, **point}) for i, point in zip(numbers, proposed, strict=False)
            ]
            self._run_missing(part, trainer, executor)
            points += part
            tried = rank(self._tuning_trials(part), problem.metric, problem.lower_is_better)
            proposer.tell(parameters[: len(part)], sorted(tried, key=lambda one: one.number))
        _say_dropped(proposer.dropped)
        return points, proposer.dropped

    def _tuning_trials(self, points: Sequence[NumberedPoint]) -> list[Trial]:
        """Return the trials of these points on the tuning seeds, in order."""
        settings, seeds = dict(points), self._plan.seeds
        found = [  # a record sorts settings by name; here they have the order of the space again
            replace(t, settings=settings[t.number])
            for t in self._trials
            if t.split == "tuning" and t.number in settings
        ]
        return sorted(found, key=lambda t: (t.number, seeds.index(t.seed)))

    def _run_missing(self, points: Sequence[NumberedPoint], trainer: Trainer, executor: Executor) -> None:
        missing = self._missing(points)
        if not missing:
            return
        if self._batch is None:
            limit = self._how.memory_limit
            if limit is not None:
                limit //= executor.workers
            self._batch = trainer.planned(missing, limit)
            if executor.workers > 1:  # each has a part, and the memory is for all of them
                self._batch = max(1, min(self._batch // executor.workers, math.ceil(len(missing) / executor.workers)))
        self._divided = self._batch < len(missing)
        self._bar.begin(len(points) - len(missing), len(points), self._plan.tuning.rounds)
        for outcome in executor.outcomes(missing, self._compared(len(missing), executor.workers), self._batch):
            self._keep(outcome)
            self._bar.add(len(outcome.trials) // len(self._plan.seeds))

    def _compared(self, missing: int, workers: int) -> int:
        """Return how many points are one batch: those that halving compares, which a resumed sweep must not change."""
        assert self._batch is not None
        if self._plan.halving is None:
            return self._batch
        recorded = None if self._folder is None else self._folder.compared
        compared = recorded or math.ceil(missing / workers)
        if self._folder is not None:
            self._folder.set_compared(compared)
        return compared

    def _missing(self, points: Sequence[NumberedPoint]) -> list[NumberedPoint]:
        """Return the points that the record lacks; refuse a record with other settings."""
        recorded = {t.number: t.settings for t in self._trials if t.split == "tuning"}
        for number, settings in points:
            if number in recorded and recorded[number] != storable(settings):
                assert self._folder is not None
                raise ValueError(
                    f"{self._folder.path} holds another sweep: its point {number} is {recorded[number]!r}, and here it "
                    f"is {dict(settings)!r}. Use another folder."
                )
        return [point for point in points if point[0] not in recorded]

    def _keep(self, outcome: Outcome) -> None:
        """Record what a batch left, and pass on what it warned of, once."""
        for category, text in outcome.warnings:
            if text not in self._said:
                self._said.add(text)
                warnings.warn(text, category, stacklevel=6)
        if self._route is None:
            self._route = outcome.route
        assert self._batch is not None
        if outcome.route.name != SEQUENTIAL and outcome.batch < len(outcome.trials) // len(self._plan.seeds):
            self._batch, self._divided = outcome.batch, True  # the memory held fewer
        if self._folder is not None:
            self._folder.set_route(self._route.name, self._route.reason, self._batch if self._divided else None)
            self._folder.append(outcome.trials)
        self._trials += outcome.trials
        self._tell(outcome.trials)

    def _report(self, best: NumberedPoint) -> tuple[Trial, ...]:
        """Run the best point with the seeds of the report that the record lacks."""
        plan = self._plan
        done = {t.seed: t for t in self._trials if t.split == "report" and t.number == best[0]}
        missing = [seed for seed in plan.report_seeds if seed not in done]
        # not the engine of the record: fresh seeds may differ in what the tuning seeds share
        engine = SEQUENTIAL if self._engine() == SEQUENTIAL else self._how.engine
        at_a_time = max(1, (self._batch or 1) * len(plan.seeds))  # as many copies of the model as in tuning
        for some in _parts(missing, at_a_time):
            job = replace(
                plan.job(engine), problem=plan.reporting, seeds=some, halving=None, split="report",
                every_round=plan.curves,
            )  # fmt: skip
            trainer = Trainer(job, self._bar.tick)
            self._check_repeatable(trainer)
            outcome = trainer.train([best])
            if self._route is None:
                self._route = outcome.route
                if self._folder is not None:
                    self._folder.set_route(self._route.name, self._route.reason, None)
            if self._folder is not None:
                self._folder.append(outcome.trials)
            self._tell(outcome.trials)
            done |= {trial.seed: trial for trial in outcome.trials}
        return tuple(done[seed] for seed in plan.report_seeds)

    def _tell(self, trials: Sequence[Trial]) -> None:
        plan, folder = self._plan, None if self._folder is None else self._folder.path
        tell(self._how.loggers, trials, plan.algorithm, plan.config() if self._how.loggers else {}, folder)

    def _check_repeatable(self, trainer: Trainer) -> None:
        why = trainer.not_repeatable_because
        if why and (self._folder is not None or self._how.executor != "local"):
            raise ValueError(
                f"Invalid data: {why}, so that a sweep could not be resumed or split up. Use a map-style dataset "
                'without a sampler, or leave `run` out and take executor="local".'
            )


def _say_dropped(count: int) -> None:
    if count:
        warnings.warn(
            f"{count} points of the space were dropped: their lower threshold d exceeds the upper one u.", stacklevel=5
        )


def _parts(seeds: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
    for start in range(0, len(seeds), most):
        yield tuple(seeds[start : start + most])
