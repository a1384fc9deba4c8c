"""Trains batches of points with all seeds of a sweep, and turns what was measured into trials.

Side by side, all points of a batch are one program (`engines.configurations`), and halving ends points inside it. Where
the memory does not hold all of them at once, or vmap refuses the model, every rung runs the points that are left again
from the start, a few or one at a time: so that halving compares all of them, in at most factor / (factor - 1) of the
time.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tailopt.algorithms import Algorithm
from tailopt.algorithms import algorithm as named_algorithm
from tailopt.engines.configuration_rounds import Configurations, ReplicasDiffer
from tailopt.engines.configuration_settings import stacking_key
from tailopt.engines.configurations import (
    ReplicasResult,
    planned_batch,
    train_configurations,
    why_one_after_another,
)
from tailopt.engines.model_state import trainable_parameters
from tailopt.engines.routes import SEQUENTIAL, Route, VmapRefused
from tailopt.engines.sequential import seed_python_and_numpy, seed_torch
from tailopt.engines.simulate import restoring_global_rng
from tailopt.evaluation import evaluating
from tailopt.seeds import derive_seed
from tailopt.sweeps.halving import Halving
from tailopt.sweeps.points import algorithm_settings
from tailopt.sweeps.problem import Problem
from tailopt.sweeps.trials import Rung, Trial

NumberedPoint = tuple[int, Mapping[str, Any]]
# by position of the seed and of the point
_Rungs = dict[tuple[int, int], list[Rung]]
_Ends = dict[tuple[int, int], str]
HIDDEN = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)  # as Python does by default
Tick = Callable[[int], None]  # after a round


@dataclass(frozen=True)
class Job:
    """What all batches of a sweep share; another process is sent it.

    every_round: measure after every round, and not at rungs alone.
    """

    problem: Problem
    seeds: tuple[int, ...]
    algorithm: str
    halving: Halving | None
    engine: str
    split: str = "tuning"
    every_round: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a batch of points leaves.

    Attributes:
        trials: of every point with every seed, point by point.
        route: how they were run, and why.
        batch: how many points ran side by side: fewer than were given where the memory did not hold them.
        warnings: what was said on the way; each is to be passed on once.
    """

    trials: tuple[Trial, ...]
    route: Route
    batch: int
    warnings: tuple[tuple[type[Warning], str], ...]


class Trainer:
    """Trains batches of points; models and data of the seeds are made once."""

    def __init__(self, job: Job, tick: Tick = lambda t: None) -> None:
        self.job, self._tick = job, tick
        problem = job.problem
        self._models = [_checked_model(problem.model(seed), problem.name) for seed in job.seeds]
        self._sources = [problem.source(seed) for seed in job.seeds]
        device = problem.device if problem.device is not None else next(self._models[0].parameters()).device
        self._device = torch.device(device)
        self._evaluated: dict[int, torch.nn.Module] = {}  # by position of the seed: where weights are put to evaluate
        self._algorithms: dict[int, Algorithm] = {}  # by number of the point
        self._refused = ""  # why points run one after another; empty while they may run side by side
        self._proximal: float | None = None  # of the points that train now, where the space has it
        self._at_once = 0  # how many points of a batch may run side by side
        halving = job.halving
        self._stages = (*(halving.rungs if halving is not None else ()), problem.rounds)  # where points may end
        self._measured = tuple(range(1, problem.rounds + 1)) if job.every_round else self._stages

    @property
    def not_repeatable_because(self) -> str:
        """Why batches of data cannot be asked for again; empty if they can."""
        return next(filter(None, (source.not_repeatable_because for source in self._sources)), "")

    def planned(self, points: Sequence[NumberedPoint], memory_limit: int | None) -> int:
        """Return how many of these points are to be trained at a time: as many as the memory holds, or one."""
        algorithms = [self._algorithm(point) for point in points]
        if self.job.engine == "auto" and (reason := why_one_after_another(algorithms)):
            self._refused = reason
        keys = [self._stacking_key(point) for point in points]
        alike = [a for a, key in zip(algorithms, keys, strict=True) if key == keys[0]]
        self._proximal = points[0][1].get("proximal")
        if not self._is_sequential:
            task = self._task(alike[0].inner_state, range(len(self._models)), self.job.problem.rounds)
            try:
                with restoring_global_rng(self._device):
                    fitting, plan = planned_batch(task, alike, memory_limit)
                return len(points) if plan is None or fitting == len(alike) else fitting
            except (VmapRefused, ReplicasDiffer) as error:
                self._refuse(error)
        return 1

    def train(self, points: Sequence[NumberedPoint], at_once: int | None = None) -> Outcome:
        """Train a batch of points, so many of them side by side; by default all."""
        self._at_once = min(at_once or len(points), len(points))
        algorithms = [self._algorithm(point) for point in points]
        groups: dict[Any, list[int]] = {}
        for position, point in enumerate(points):
            groups.setdefault(self._stacking_key(point), []).append(position)
        found: dict[int, list[Trial]] = {}
        routes: list[Route] = []
        batch = len(points)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for positions in groups.values():
                chosen = [points[i] for i in positions]
                self._proximal = chosen[0][1].get("proximal")
                trials, route, fitted = self._train_alike(chosen, [algorithms[i] for i in positions])
                found |= dict(zip(positions, trials, strict=True))
                routes.append(route)
                if fitted < len(positions):
                    batch = min(batch, fitted)
        shown = dict.fromkeys((w.category, str(w.message)) for w in said if not issubclass(w.category, HIDDEN))
        ordered = tuple(trial for position in range(len(points)) for trial in found[position])
        return Outcome(ordered, routes[0], batch, tuple(shown))

    @property
    def _is_sequential(self) -> bool:
        return self.job.engine == SEQUENTIAL or bool(self._refused)

    def _refuse(self, error: Exception) -> None:
        if self.job.engine != "auto":
            raise error
        self._refused = str(error)

    def _algorithm(self, point: NumberedPoint) -> Algorithm:
        number, settings = point
        if number not in self._algorithms:
            self._algorithms[number] = named_algorithm(self.job.algorithm, **algorithm_settings(settings))
        return self._algorithms[number]

    def _stacking_key(self, point: NumberedPoint) -> Any:
        """Return what points must have in common to train side by side."""
        return stacking_key(self._algorithm(point)), point[1].get("proximal")

    def _train_alike(
        self, points: Sequence[NumberedPoint], algorithms: Sequence[Algorithm]
    ) -> tuple[list[list[Trial]], Route, int]:
        """Train points that can run side by side; returns their trials, the route, and how many ran at a time."""
        if self.job.engine == "auto" and not self._refused and (reason := why_one_after_another(algorithms)):
            self._refused = reason
        if not self._is_sequential:
            try:
                if self._at_once < len(points):
                    rungs, ended, route = self._rung_by_rung(algorithms, self._a_few_at_a_time)
                    return self._trials(points, rungs, ended, route), route, len(points)
                everybody = range(len(self._models))
                task = self._task(algorithms[0].inner_state, everybody, self.job.problem.rounds, judged=True)
                result = train_configurations(task, algorithms, "vectorized", batch=len(algorithms))
                rungs = _rungs_of(result, self._measured)
                ended = {key: end.reason for key, end in result.ended.items()}
                return self._trials(points, rungs, ended, result.route), result.route, result.batch
            except (VmapRefused, ReplicasDiffer) as error:
                self._refuse(error)
        rungs, ended, route = self._rung_by_rung(algorithms, self._one_after_another)
        return self._trials(points, rungs, ended, route), route, len(points)

    def _one_after_another(self, algorithms: Sequence[Algorithm], rounds: int) -> tuple[_Rungs, _Ends, Route]:
        """Run every point with every seed on its own."""
        rungs, ended = _Rungs(), _Ends()
        for r in range(len(self._models)):
            result = train_configurations(self._task(algorithms[0].inner_state, [r], rounds), algorithms, SEQUENTIAL)
            ended |= {(r, c): end.reason for (_, c), end in result.ended.items()}
            measured = _rungs_of(result, [t for t in self._measured if t <= rounds])
            rungs |= {(r, c): found for (_, c), found in measured.items()}
        return rungs, ended, Route(SEQUENTIAL, self._refused or "asked for")

    def _a_few_at_a_time(self, algorithms: Sequence[Algorithm], rounds: int) -> tuple[_Rungs, _Ends, Route]:
        """Run points side by side, as many as fit."""
        task = self._task(algorithms[0].inner_state, range(len(self._models)), rounds)
        rungs, ended = _Rungs(), _Ends()
        start = 0
        while start < len(algorithms):
            some = list(algorithms[start : start + self._at_once])
            count = len(some)
            if self._device.type == "cuda":  # another number of points would be another program to compile
                some += [some[-1]] * (self._at_once - count)
            result = train_configurations(task, some, "vectorized", batch=len(some))
            self._at_once = min(self._at_once, result.batch)  # smaller where the memory was not enough
            ended |= {(r, start + c): end.reason for (r, c), end in result.ended.items() if c < count}
            measured = _rungs_of(result, [t for t in self._measured if t <= rounds])
            rungs |= {(r, start + c): found for (r, c), found in measured.items() if c < count}
            start += count
        return rungs, ended, result.route

    def _rung_by_rung(
        self,
        algorithms: Sequence[Algorithm],
        run: Callable[[Sequence[Algorithm], int], tuple[_Rungs, _Ends, Route]],
    ) -> tuple[_Rungs, _Ends, Route]:
        """Run all points to the first rung, those that are left to the second, and so on.

        run: (algorithms, rounds) -> what was measured, by seed and position, what ended, and the route.
        """
        seeds = range(len(self._models))
        rungs, ended = _Rungs(), _Ends()
        left = list(range(len(algorithms)))
        for rounds in self._stages:
            measured, ends, route = run([algorithms[c] for c in left], rounds)
            ended |= {(r, left[c]): reason for (r, c), reason in ends.items()}
            rungs |= {(r, left[c]): found for (r, c), found in measured.items()}
            left = [c for c in left if not all((r, c) in ended for r in seeds)]
            if not left:
                break
            if self.job.halving is None or rounds == self._stages[-1]:
                continue
            scores = [self._score([rungs[r, c] for r in seeds], rounds) for c in left]
            losers = self.job.halving.losers(rounds, scores)
            ended |= {(r, left[i]): reason for i, reason in losers.items() for r in seeds if (r, left[i]) not in ended}
            left = [c for i, c in enumerate(left) if i not in losers]
        return rungs, ended, route

    def _trials(
        self,
        points: Sequence[NumberedPoint],
        rungs: Mapping[tuple[int, int], Sequence[Rung]],
        ended: Mapping[tuple[int, int], str],
        route: Route,
    ) -> list[list[Trial]]:
        split, seeds = self.job.split, self.job.seeds
        return [
            [
                Trial(number, seed, split, settings, tuple(rungs[r, c]), ended.get((r, c), ""), route.name)
                for r, seed in enumerate(seeds)
            ]
            for c, (number, settings) in enumerate(points)
        ]

    def _task(self, inner_state: str, which: Sequence[int], rounds: int, judged: bool = False) -> Configurations:
        """Return what `train_configurations` trains, with some of the seeds, by position."""
        problem = self.job.problem
        replicas = tuple(
            problem.replica(self.job.seeds[r], self._models[r], self._sources[r], inner_state, rounds) for r in which
        )
        if self._proximal is not None:
            replicas = tuple(replace(r, policy=replace(r.policy, proximal=self._proximal)) for r in replicas)
        return Configurations(
            replicas=replicas,
            loss=problem.loss,
            schedules=problem.schedules,
            device=self._device,
            precision=problem.precision,
            measure=partial(self._measure, which),
            judge=self._judge if judged and self.job.halving is not None else None,
        )

    def _measure(self, which: Sequence[int], t: int, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Evaluate every point with every seed, in the rounds that are recorded."""
        self._tick(t)
        if t not in self._measured or self.job.problem.evaluate is None:
            return {}
        count = next(iter(state.values())).shape[1]
        numbers: dict[str, list[float]] = {}
        for row, r in enumerate(which):
            for c in range(count):
                for key, value in self._metrics(r, {name: x[row, c] for name, x in state.items()}, t).items():
                    numbers.setdefault(key, []).append(value)
        if any(len(values) != len(which) * count for values in numbers.values()):
            raise ValueError(f"Invalid evaluate: it returned {sorted(numbers)}, but not all of them every time.")
        return {
            key: torch.tensor(values, dtype=torch.float64, device=self._device).reshape(len(which), count)
            for key, values in numbers.items()
        }

    @torch.no_grad()
    def _metrics(self, r: int, state: Mapping[str, Tensor], t: int) -> dict[str, float]:
        """Put weights and buffers into a model and evaluate it as a simulation would."""
        problem, seed = self.job.problem, self.job.seeds[r]
        assert problem.evaluate is not None
        if r not in self._evaluated:
            self._evaluated[r] = copy.deepcopy(self._models[r]).to(self._device)
        model = self._evaluated[r]
        buffers = dict(model.named_buffers())
        own = trainable_parameters(model) | buffers
        for name, constant in self._models[r].named_buffers():  # the last evaluation may have written into them
            if name not in state:
                buffers[name].copy_(constant)
        for name, x in state.items():
            own[name].copy_(torch.view_as_complex(x) if own[name].is_complex() and not x.is_complex() else x)
        evaluation_seed = derive_seed(seed, "evaluate", t)
        seed_python_and_numpy(evaluation_seed)
        seed_torch(evaluation_seed, self._device)
        with evaluating(model):
            metrics = problem.evaluate(model, seed)
        if not isinstance(metrics, Mapping) or problem.metric not in {"loss", *metrics}:
            found = sorted(metrics) if isinstance(metrics, Mapping) else type(metrics).__name__
            raise ValueError(
                f"Invalid metric: {problem.metric!r} is not what evaluate returned: {found}. Name one of these."
            )
        numbers = {str(key): _as_number(value) for key, value in metrics.items()}
        if numbers.get(problem.metric, 0.0) is None:
            raise ValueError(
                f"Invalid evaluate: its {problem.metric!r} is {metrics[problem.metric]!r:.80}; need a number, because "
                "settings are chosen by it."
            )
        return {key: value for key, value in numbers.items() if value is not None}

    def _judge(self, t: int, losses: Tensor, measured: Mapping[str, Tensor]) -> dict[int, str]:
        assert self.job.halving is not None
        if t not in self.job.halving.rungs:
            return {}
        problem = self.job.problem
        values = measured.get(problem.metric, losses)
        means = (values if problem.lower_is_better else -values).mean(0)
        return self.job.halving.losers(t, means.tolist())

    def _score(self, rungs: Sequence[Sequence[Rung]], rounds: int) -> float:
        """Return the mean of the metric over seeds after a round; less is better, NaN where a seed has none."""
        problem = self.job.problem
        values = [r[-1].value(problem.metric) if r and r[-1].round == rounds else math.nan for r in rungs]
        return (1.0 if problem.lower_is_better else -1.0) * sum(values) / len(values)


def _checked_model(model: Any, name: str) -> torch.nn.Module:
    if not isinstance(model, torch.nn.Module) or not trainable_parameters(model):
        raise ValueError(
            f"Invalid model: {name} gives {type(model).__name__}; need a torch.nn.Module with a parameter that trains."
        )
    return model


def _rungs_of(result: ReplicasResult, at: Sequence[int]) -> dict[tuple[int, int], list[Rung]]:
    """Return what every point measured at the rungs that it reached, by seed and point."""
    index = torch.tensor(at) - 1
    losses = result.losses[:, :, index].tolist()
    measured = {key: values[:, :, index].tolist() for key, values in result.measured.items()}
    return {
        (r, c): [
            Rung(t, loss, {key: values[r][c][k] for key, values in measured.items()})
            for k, (t, loss) in enumerate(zip(at, row, strict=True))
            # where all are NaN, it had ended
            if not (math.isnan(loss) and all(math.isnan(values[r][c][k]) for values in measured.values()))
        ]
        for r, of_seed in enumerate(losses)
        for c, row in enumerate(of_seed)
    }


def _as_number(value: Any) -> float | None:
    """Return a number of any library, or None for what is no number."""
    try:
        no_number = isinstance(value, str) or (isinstance(value, Tensor) and value.is_complex())
        return None if no_number else float(value)
    except (TypeError, ValueError, RuntimeError):  # torch's error for several elements
        return None
