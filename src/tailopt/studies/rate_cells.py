"""The simulations of the study `rates`: its cases, and the measure of every repetition in the recorded rounds."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tailopt.algorithms import algorithm
from tailopt.clipping.operators import biclip
from tailopt.engines.simulate import simulate
from tailopt.progress import Progress
from tailopt.studies.iterate_average import IterateAverage
from tailopt.studies.runner import RECORD, Grid, run_grid
from tailopt.tasks.gradient_noise import GradientNoise
from tailopt.theory import theory

ALPHAS = (1.2, 1.5, 1.8)
NODES, LOCAL_STEPS = 3, 2
POINTS = 24  # rounds that are recorded, per decade

# The values in round 1, chosen by hand so that the first descent is over within the first tenth of the rounds. For
# avg-l2clip ilr > 1/mu is needed, and mu = 1. Its threshold begins near the norm of a node's own gradient at the
# optimum, 10 to 17: below that it clips the nodes' pull, and F(average) does not move until it has grown.
_ADAPTIVE = {"ilr": 0.3, "oeps": 0.1, "i_u": 1.0, "i_d": 0.1}
_L2CLIP = {"ilr": 1.5, "i_u": 10.0}


@dataclass(frozen=True)
class Case:
    """An algorithm as the study runs it. logs: the k of (log T)^k; sampled: how many nodes take part; None is all."""

    algorithm: str
    objective: str
    settings: Mapping[str, float]
    logs: float
    sampled: int | None = None

    @property
    def measure(self) -> str:
        """What the theorem bounds."""
        return "F(average) − F*" if self.algorithm == "avg-l2clip" else "min ‖∇F‖²"


CASES: Mapping[str, Case] = {
    "rmsprop-biclip": Case("rmsprop-biclip", "non-convex", {**_ADAPTIVE, "olr": 0.3}, 1.0),
    "adagrad-biclip": Case("adagrad-biclip", "non-convex", {**_ADAPTIVE, "olr": 1.0}, 1.5),
    "bi2clip": Case(
        "bi2clip", "non-convex", {"ilr": 0.5, "olr": 1.0, "i_u": 1.0, "i_d": 0.1, "o_u": 1.0, "o_d": 0.01}, 1.0
    ),
    "avg-l2clip": Case("avg-l2clip", "convex", _L2CLIP, 0.0),
    "avg-l2clip, failing nodes": Case("avg-l2clip", "convex", _L2CLIP, 0.0, sampled=2),
}
# What stays at its value of round 1 while everything else follows the theory.
THRESHOLDS: Mapping[str, tuple[str, ...]] = {
    "scheduled": (),
    "u constant": ("i_u",),
    "d constant": ("i_d",),
    "u and d constant": ("i_u", "i_d"),
}
# A larger lower threshold than above: that of 0.1 biases the limit by less than runs of this length can show.
PANEL = Case("rmsprop-biclip", "convex", {**_ADAPTIVE, "i_u": 3.0, "i_d": 2.0, "olr": 0.3}, 1.0)
PANEL_ALPHA = 1.5


@dataclass(frozen=True)
class RateCell:
    """A case, or a variant of the panel, at one alpha; name: a key of CASES or of THRESHOLDS."""

    name: str
    alpha: float
    repetitions: int
    rounds: int

    @property
    def panel(self) -> bool:
        """Whether this is a variant of the panel of thresholds."""
        return self.name in THRESHOLDS

    @property
    def case(self) -> Case:
        """The algorithm as it is run."""
        return PANEL if self.panel else CASES[self.name]

    @property
    def constant(self) -> tuple[str, ...]:
        """Settings that stay at their value of round 1."""
        return THRESHOLDS.get(self.name, ())

    def key(self) -> dict[str, Any]:
        """Everything that the measurement depends on."""
        case = self.case
        return {
            "name": self.name,
            "algorithm": case.algorithm,
            "objective": case.objective,
            "settings": dict(case.settings),
            "sampled": case.sampled,
            "alpha": self.alpha,
            "constant": list(self.constant),
            "panel": self.panel,
            "repetitions": self.repetitions,
            "rounds": self.rounds,
        }


@dataclass(frozen=True)
class Measurement:
    """What a cell gave.

    Attributes:
        values: the measure, [runs, repetitions of a run, recorded rounds].
        clipped: the share of gradient coordinates at or above u, by recorded round; only in the panel.
        radius: the largest |x_t|.
        seconds: processor time.
    """

    values: list[list[list[float]]]
    clipped: list[float]
    radius: float
    seconds: float


def run_cells(cells: list[RateCell], out: Path | None, progress: bool) -> dict[RateCell, Measurement]:
    """The measurements of all cells; without `out` none is recorded."""
    grid = Grid[RateCell, Measurement](
        cells=cells,
        key=RateCell.key,
        measure=lambda cell, tick: measure(cell),
        decode=lambda value: Measurement(**value),
        label=lambda cell: f"{cell.name}, alpha = {cell.alpha}",
        short_part=_short_part,
        kind=lambda cell: cell.name,
    )
    with Progress(progress) as bar:
        return run_grid(grid, None if out is None else out / RECORD, bar)


def measure(cell: RateCell) -> Measurement:
    """Run all repetitions of a cell."""
    start = time.process_time()
    # Where nodes are sampled, repetitions in one run would share who takes part; so each is a run of its own.
    runs = cell.repetitions if cell.case.sampled else 1
    each = [_one_run(cell, cell.repetitions // runs, seed) for seed in range(runs)]
    return Measurement(
        values=[[[float(f"{v:.6g}") for v in row] for row in values] for values, _, _ in each],
        clipped=each[0][1],
        radius=max(radius for _, _, radius in each),
        seconds=round(time.process_time() - start, 2),
    )


def _short_part(cell: RateCell) -> float:
    """Run the first rounds of a cell, of one repetition where each is a run; returns the share of the cell."""
    rounds = max(1, cell.rounds // 50)
    repetitions = 1 if cell.case.sampled else cell.repetitions
    measure(replace(cell, rounds=rounds, repetitions=repetitions))
    return rounds / cell.rounds * repetitions / cell.repetitions


def _one_run(cell: RateCell, replicas: int, seed: int) -> tuple[list[list[float]], list[float], float]:
    """Values [replicas, recorded rounds], shares clipped by round, and the largest |x_t|."""
    case = cell.case
    by_norm = case.algorithm == "avg-l2clip"
    task = GradientNoise(case.objective, cell.alpha, replicas=replicas, separate=by_norm)
    # A repetition is a tensor of its own here, and the norm that is clipped is that of its own gradient.
    options: dict[str, Any] = {"scope": "tensor"} if by_norm else {}
    schedules = theory(case.algorithm, cell.alpha).schedules
    recorder = MeasureRecorder(task, set(recorded(cell.rounds)), averaged=by_norm)
    result = simulate(
        task.model(seed),
        algorithm(case.algorithm, **case.settings, **options),
        loss=task.loss,
        batches=task.batches,
        nodes=NODES,
        participants=case.sampled,
        rounds=cell.rounds,
        local_steps=LOCAL_STEPS,
        schedules={key: s for key, s in schedules.items() if key not in cell.constant},
        evaluate=recorder,
        statistics=cell.panel,
        seed=seed,
        progress=False,
    )
    rows = [result.history[t - 1] for t in recorded(cell.rounds)]
    clipped = [_share_clipped(row["statistics"]) for row in rows] if cell.panel else []
    return torch.stack(recorder.values, 1).tolist(), clipped, recorder.radius


class MeasureRecorder:
    """An evaluation that records the measure of every repetition in some rounds.

    avg-l2clip is measured at the average of x_1 ... x_t, the r-th weighted by r. `radius` is the largest |x_t|: a
    projection on a larger ball would change nothing.
    """

    def __init__(self, task: GradientNoise, rounds: set[int], averaged: bool) -> None:
        self._problem, self._rounds, self._averaged = task.problem(0), rounds, averaged
        self._average = IterateAverage(torch.zeros(task.replicas, task.dimension, dtype=torch.float64))
        self.values: list[Tensor] = []
        self.radius = 0.0

    @property
    def average(self) -> Tensor:
        """The average so far, [replicas, dimension]."""
        return self._average.value

    def __call__(self, model: torch.nn.Module) -> dict[str, float]:
        """Called once per round, from the first on."""
        w: Tensor = model().detach()
        self._average.update(w)
        self.radius = max(self.radius, float(w.norm(dim=-1).max()))
        if self._average.round in self._rounds:
            problem = self._problem
            self.values.append(problem.gap(self.average) if self._averaged else problem.squared_gradient(w))
        return {}


def recorded(rounds: int) -> list[int]:
    """Rounds 1 to the last, evenly spread in their logarithm, with the round a power of ten below the last.

    Examples:
        >>> recorded(1000)[:5], recorded(1000)[-3:], 100 in recorded(1000)
        ([1, 2, 3, 4, 5], [825, 909, 1000], True)
    """
    steps = math.ceil(math.log10(rounds) * POINTS)
    return sorted({max(1, round(rounds * 10 ** (-i / POINTS))) for i in range(steps + 1)})


def _share_clipped(statistics: Mapping[str, Mapping[str, float]]) -> float:
    counts = list(statistics.values())
    return sum(c["above"] for c in counts) / sum(c["elements"] for c in counts)


def clipping_limit(
    u: float, d: float, task: GradientNoise | None = None, steps: int = 200, quantiles: int = 1000
) -> float:
    """||grad F||^2 at the point where clipped gradients cancel: mean over nodes of E biclip(grad F_i + noise) = 0.

    Learning rates that vanish slowly lead there, whatever the outer optimizer. With u = inf and d = 0 it is 0. The
    expectation is a mean over quantiles of the noise, the point is the end of a descent along it.
    """
    task = task or GradientNoise(PANEL.objective, PANEL_ALPHA)
    known = task.problem(0)
    noise = task.noise_of((torch.arange(quantiles, dtype=torch.float64) + 0.5) / quantiles)
    noise = noise - (noise.mean() if math.isinf(u) else 0.0)  # what quantiles miss of the tail is centred away
    w = torch.zeros(task.dimension, dtype=torch.float64)
    for _ in range(steps):
        w = w - 0.2 * biclip(known.gradients(w).unsqueeze(-1) + noise, u, d).mean(-1).mean(0)
    return float(known.squared_gradient(w))
