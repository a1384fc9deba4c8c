"""The cells of the study `convex`: one algorithm on one kind of features and noise, tuned and reported by horizon.

Tuning runs all settings of an algorithm at once (`sweeps.stacked`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tailopt.algorithms import ALGORITHMS, algorithm
from tailopt.engines.simulate import simulate
from tailopt.optional import missing
from tailopt.progress import Progress
from tailopt.studies.comparison import slug
from tailopt.studies.runner import RECORD, Grid, Tick, digest, older_file, run_grid
from tailopt.sweeps.search import Point, Range, Trial, best, search
from tailopt.sweeps.space import Space, settings_at
from tailopt.sweeps.stacked import Batches, errors
from tailopt.tasks.synthetic import Synthetic

NOISES: Mapping[str, Mapping[str, Any]] = {
    "no noise": {"noise": "none"},
    "Gaussian, scale 1": {"noise": "gaussian", "scale": 1.0},
    "Gaussian, scale 3": {"noise": "gaussian", "scale": 3.0},
    "Student-t, df 3": {"noise": "student-t", "df": 3.0},
    "Student-t, df 2": {"noise": "student-t", "df": 2.0},
    "Student-t, df 1.5": {"noise": "student-t", "df": 1.5},
    "Student-t, df 1.1": {"noise": "student-t", "df": 1.1},
    "Cauchy": {"noise": "cauchy"},
}
HEAVY = "Student-t, df 1.5"
HEADLINE = ("avg-sgd", "avg-l2clip", "avg-adam", "avg-biclip")
FEATURES = {"syntoken": "SynToken", "gaussian": "Gaussian features"}

# A lower threshold is searched as a share of the upper one, and a clipped step by how far it moves at most.
_MOVE, _U, _SHARE, _EPS = Range(1e-3, 0.3), Range(3e-3, 10.0), Range(1e-2, 1.0), Range(1e-8, 1e-1)
SPACE = Space(
    inner={
        "sgd": {"ilr": Range(1e-3, 0.3)},
        "l2clip": {"i_move": Range(1e-2, 3.0), "i_u": Range(3e-2, 30.0)},
        "biclip-l2": {"i_move": Range(1e-2, 3.0), "i_u": Range(3e-2, 30.0), "i_share": _SHARE},
        "biclip": {"i_move": _MOVE, "i_u": _U, "i_share": _SHARE},
        "adagrad": {"ilr": Range(1e-3, 0.3), "ieps": _EPS},
        "adam": {"ilr": Range(1e-3, 0.3), "ieps": _EPS},
        "adamw": {"ilr": Range(1e-3, 0.3), "ieps": _EPS, "weight_decay": Range(1e-6, 1e-1)},
    },
    outer={
        "avg": {},
        "adagrad": {"olr": Range(1e-2, 3.0), "oeps": _EPS},
        "rmsprop": {"olr": Range(1e-3, 1.0), "oeps": _EPS},
        "adam": {"olr": Range(1e-3, 1.0), "oeps": _EPS},
        "biclip": {"o_move": Range(3e-3, 1.0), "o_u": Range(1e-3, 1.0), "o_share": _SHARE},
        "biclip-l2": {"o_move": Range(3e-2, 10.0), "o_u": Range(1e-2, 10.0), "o_share": _SHARE},
        "nesterov": {"olr": Range(0.1, 1.5), "momentum": Range(0.3, 0.95, log=False)},
    },
)


@dataclass(frozen=True)
class ConvexPlan:
    """How much is run: tuned on the seeds `tuning` with `budget` points each, reported on the seeds `fresh`."""

    features: tuple[str, ...] = ("syntoken", "gaussian")
    noises: tuple[str, ...] = tuple(NOISES)
    algorithms: tuple[str, ...] = tuple(ALGORITHMS)
    horizons: tuple[int, ...] = (60, 240)
    budget: int = 60
    tuning: tuple[int, ...] = (100, 101)
    fresh: tuple[int, ...] = tuple(range(10))
    nodes: int = 10
    local_steps: int = 5
    batch_size: int = 32
    samples: int = 5000
    dimension: int = 100

    def task(self, features: str, noise: str) -> Synthetic:
        """The task of a panel."""
        return Synthetic(features, samples=self.samples, dimension=self.dimension, **NOISES[noise])

    def batches(self, features: str, noise: str, seeds: Sequence[int]) -> Batches:
        """The data of a panel, for the longest horizon."""
        steps = max(self.horizons) * self.local_steps
        return Batches.of(self.task(features, noise), seeds, self.nodes, steps, self.batch_size)

    def key(self) -> str:
        """A digest of what every cell depends on: not of how many panels and algorithms there are."""
        amount = ("features", "noises", "algorithms")
        return digest({name: value for name, value in asdict(self).items() if name not in amount})


QUICK = ConvexPlan(
    features=("syntoken",),
    noises=("no noise", HEAVY),
    algorithms=HEADLINE,
    horizons=(5, 10),
    budget=4,
    fresh=(0, 1, 2),
    samples=400,
    dimension=20,
)


@dataclass(frozen=True)
class ConvexCell:
    """One algorithm on one kind of features and noise."""

    features: str
    noise: str
    algorithm: str

    def file_name(self) -> str:
        """The name of its files."""
        return f"{self.features}-{slug(self.noise)}-{self.algorithm}"


@dataclass(frozen=True)
class HorizonResult:
    """The settings that tuning chose for a horizon, and the errors of the fresh seeds: at its end, and by round."""

    settings: Mapping[str, float]
    errors: list[float]
    curves: list[list[float]]


@dataclass(frozen=True)
class CellResult:
    """The results of a cell; horizons: the number of rounds, as text -> the result."""

    features: str
    noise: str
    algorithm: str
    horizons: Mapping[str, HorizonResult]

    @classmethod
    def decode(cls, value: Mapping[str, Any]) -> CellResult:
        """From JSON."""
        horizons = {rounds: HorizonResult(**result) for rounds, result in value["horizons"].items()}
        return cls(value["features"], value["noise"], value["algorithm"], horizons)

    def at(self, horizon: int) -> HorizonResult:
        """The result of a horizon."""
        return self.horizons[str(horizon)]


@dataclass(frozen=True)
class Check:
    """The reported runs of a cell by `tailopt.simulate`: their errors, and the largest relative difference to those."""

    algorithm: str
    rounds: int
    errors: list[float]
    difference: float

    def as_json(self) -> dict[str, Any]:
        """As results.json and the record have it."""
        values = asdict(self)
        return {"largest relative difference" if key == "difference" else key: values[key] for key in values}

    @classmethod
    def decode(cls, value: Mapping[str, Any]) -> Check:
        """From JSON."""
        return cls(value["algorithm"], value["rounds"], value["errors"], value["largest relative difference"])


# --- Running them -----------------------------------------------------------------------------------------------------


def run_cells(plan: ConvexPlan, out: Path, bar: Progress) -> dict[ConvexCell, CellResult]:
    """Tune and report every algorithm on every panel."""
    batches: dict[tuple[str, str], tuple[Batches, Batches]] = {}

    def measure(cell: ConvexCell, tick: Tick) -> CellResult:
        panel = cell.features, cell.noise
        if panel not in batches:
            batches.clear()  # cells come panel by panel, and data are large
            batches[panel] = plan.batches(*panel, plan.tuning), plan.batches(*panel, plan.fresh)
        return tuned_and_reported(plan, cell, *batches[panel], out / "trials" / f"{cell.file_name()}.jsonl")

    grid = Grid[ConvexCell, CellResult](
        cells=[ConvexCell(f, n, a) for f in plan.features for n in plan.noises for a in plan.algorithms],
        key=lambda cell: {**asdict(cell), "plan": plan.key()},
        measure=measure,
        decode=CellResult.decode,
        label=lambda cell: f"{FEATURES[cell.features]}, {cell.noise}: {cell.algorithm}",
        older=lambda cell: _older_cell(plan, out / "cells" / f"{cell.file_name()}.json"),
    )
    return run_grid(grid, out / RECORD, bar)


def _older_cell(plan: ConvexPlan, path: Path) -> Any:
    """A cell that an older version left; those did not record their plan, so one of another length is not taken."""
    value = older_file(path)
    if value is None or {*value["horizons"]} != {*map(str, plan.horizons)}:
        return None
    return value if all(len(h["errors"]) == len(plan.fresh) for h in value["horizons"].values()) else None


def tuned_and_reported(plan: ConvexPlan, cell: ConvexCell, tuning: Batches, fresh: Batches, record: Path) -> CellResult:
    """Tune one algorithm on one kind of data, and report it on the fresh seeds."""
    trials = tune(plan, cell.algorithm, tuning, record)
    horizons = {}
    for horizon in plan.horizons:
        settings = settings_at(best(trials, f"error@{horizon}").point)
        curves = _error_curves(plan, cell.algorithm, fresh, [settings], horizon)[0]
        rounded = [[float(f"{value:.5g}") for value in curve] for curve in curves.tolist()]
        horizons[str(horizon)] = HorizonResult(settings, curves[:, -1].tolist(), rounded)
    return CellResult(cell.features, cell.noise, cell.algorithm, horizons)


def tune(plan: ConvexPlan, name: str, data: Batches, record: Path | None = None) -> list[Trial]:
    """All trials of an algorithm, at once; `error@T` is the mean over seeds of the log error after T rounds."""

    def measure(points: list[Point]) -> list[dict[str, float]]:
        curves = _error_curves(plan, name, data, [settings_at(p) for p in points], max(plan.horizons))
        return [{f"error@{t}": float(row[t - 1]) for t in plan.horizons} for row in curves.log().mean(1)]

    return search(measure, SPACE.ranges(name), plan.budget, record=record, batch=plan.budget)


def _error_curves(
    plan: ConvexPlan, name: str, data: Batches, points: Sequence[Mapping[str, float]], rounds: int
) -> Tensor:
    curves = errors(data, lambda p: algorithm(name, **p), points, rounds, plan.local_steps)
    return torch.nan_to_num(curves, nan=math.inf)


def run_checks(plan: ConvexPlan, results: Mapping[ConvexCell, CellResult], out: Path, bar: Progress) -> list[Check]:
    """The headline under heavy-tailed noise at the longest horizon, again by `tailopt.simulate`."""
    grid = Grid[str, Check](
        cells=HEADLINE if HEAVY in plan.noises else (),
        key=lambda name: {"check": name, "plan": plan.key()},
        measure=lambda name, tick: _check(plan, results[ConvexCell("syntoken", HEAVY, name)]),
        encode=Check.as_json,
        decode=Check.decode,
        label=lambda name: f"by tailopt.simulate: {name}",
        older=lambda name: _older_check(plan, out / "checks" / f"{name}.json"),
    )
    return list(run_grid(grid, out / RECORD, bar).values())


def _older_check(plan: ConvexPlan, path: Path) -> Any:
    value = older_file(path)
    return value if value is not None and value["rounds"] == max(plan.horizons) else None


def _check(plan: ConvexPlan, cell: CellResult) -> Check:
    task, horizon = plan.task(cell.features, cell.noise), max(plan.horizons)
    reported, again = cell.at(horizon), []
    for seed in plan.fresh:
        result = simulate(
            task.model(seed),
            algorithm(cell.algorithm, **reported.settings),
            loss=task.loss,
            data=task.nodes(seed, plan.nodes),
            batch_size=plan.batch_size,
            rounds=horizon,
            local_steps=plan.local_steps,
            seed=seed,
            evaluate=lambda model, seed=seed: task.evaluate(model, seed),  # type: ignore[misc]
            evaluate_every=horizon,
            progress=False,
        )
        again.append(result.history[-1]["metrics"]["error"])
    difference = max(abs(a - b) / b for a, b in zip(again, reported.errors, strict=True))
    return Check(cell.algorithm, horizon, again, difference)


def reference_errors(plan: ConvexPlan, features: str, noise: str) -> dict[str, list[float]]:
    """The errors of least squares and of Huber's estimate on all data of the fresh seeds."""
    try:
        from sklearn.linear_model import HuberRegressor
    except ImportError:
        raise missing("Huber's estimate needs scikit-learn", "scikit-learn", "studies") from None
    task = plan.task(features, noise)
    squares, huber = [], []
    for seed in plan.fresh:
        problem = task.problem(seed)
        x, y = problem.x.double(), problem.y.double()
        w = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
        squares.append(problem.error(w))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # without noise there is nothing to estimate a scale from
            fitted = HuberRegressor(fit_intercept=False, alpha=0.0, max_iter=500).fit(x.numpy(), y.numpy())
        huber.append(problem.error(torch.from_numpy(fitted.coef_)))
    return {"least squares": squares, "Huber": huber}
