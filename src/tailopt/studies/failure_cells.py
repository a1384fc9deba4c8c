"""The simulations of the study `failures`: its plan, the ways of failing, and F(average) - F* of every cell."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tailopt.algorithms import Algorithm, algorithm
from tailopt.engines.simulate import Result, simulate
from tailopt.progress import Progress
from tailopt.studies.failure_models import always, bursts, expected_shares, independent, own_clock_shares
from tailopt.studies.iterate_average import IterateAverage
from tailopt.studies.quadratics import PointModel, Quadratics, noisy_loss, two_camps
from tailopt.studies.runner import RECORD, Grid, Tick, digest, run_grid
from tailopt.tasks.synthetic import draw_noise
from tailopt.theory import Theory, theory


@dataclass(frozen=True)
class FailuresPlan:
    """Everything that a cell depends on; the defaults are the full study.

    Half of the nodes are away: in every round on average (`away`), or for good (`missing`).
    """

    rounds: int = 1024
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    local_steps: int = 2
    nodes: int = 8
    dimension: int = 10
    distance: float = 4.0  # between the optima of the nodes that are always missing and the others
    weights: tuple[float, ...] = (9, 1, 1, 1, 1, 1, 1, 1)  # where they are not equal
    away: float = 0.5
    stretch: float = 10.0  # rounds that a failure lasts, on average, where failures come in bursts
    missing: tuple[int, ...] = (0, 1, 2, 3)
    noise: float = 0.5
    df: float = 1.6  # moments below 1.6 are finite, so alpha is one of them
    alpha: float = 1.5
    radius: float = 10.0
    l2clip: tuple[float, float] = (2.0, 5.0)  # ilr > 1/mu, and i_u, both at the first step
    biclip: tuple[float, float, float] = (0.1, 1.0, 0.05)  # ilr, i_u, i_d, constant

    @property
    def present(self) -> int:
        """How many are drawn where nodes are drawn by weight: as many as are present on average."""
        return round(self.nodes * (1 - self.away))

    def key(self) -> str:
        """A digest of the plan without its seeds: more seeds add to the recorded results."""
        return digest({name: value for name, value in asdict(self).items() if name != "seeds"})

    def problem(self) -> Quadratics:
        """The objectives; the missing nodes' optima lie apart."""
        return two_camps(self.nodes, self.dimension, self.missing, self.distance)


FULL = FailuresPlan()
QUICK = FailuresPlan(rounds=8, seeds=(0, 1))


# --- The cases --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A way of failing.

    participation: (plan, seed) -> arguments of `simulate`. limit: (plan, weights) -> the shares that are minimised
    instead of the weights, or None where the objective is preserved. own_clock: schedules count each node's own steps.
    """

    name: str
    equal: bool
    participation: Callable[[FailuresPlan, int], dict[str, Any]]
    limit: Callable[[FailuresPlan, Tensor], Tensor] | None = None
    own_clock: bool = False

    def weights(self, plan: FailuresPlan) -> Tensor:
        """p_i, which add up to 1."""
        weights = torch.ones(plan.nodes) if self.equal else torch.tensor(plan.weights)
        return weights.double() / weights.double().sum()


def _survivors(plan: FailuresPlan, weights: Tensor) -> Tensor:
    left = weights.clone()
    left[list(plan.missing)] = 0
    return left / left.sum()


def _nobody(plan: FailuresPlan, seed: int) -> dict[str, Any]:
    return {}


def _independent(plan: FailuresPlan, seed: int) -> dict[str, Any]:
    return {"participation": independent(plan.nodes, plan.away)}


def _bursts(plan: FailuresPlan, seed: int) -> dict[str, Any]:
    return {"participation": bursts(plan.nodes, plan.away, plan.stretch, seed)}


def _always(plan: FailuresPlan, seed: int) -> dict[str, Any]:
    return {"participation": always(plan.nodes, plan.missing)}


def _by_weight(plan: FailuresPlan, seed: int) -> dict[str, Any]:
    return {"participants": plan.present, "sampling": "proportional"}


CASES = (
    Case("nobody fails", True, _nobody),
    Case("uniform failures", True, _independent),
    Case("failures in bursts", True, _bursts),
    Case("always the same missing", True, _always, _survivors),
    Case("nobody fails", False, _nobody),
    Case("drawn by weight", False, _by_weight),
    Case("uniform failures", False, _independent, lambda plan, p: expected_shares(p, plan.away)),
    Case("drawn by weight, own clocks", False, _by_weight, lambda plan, p: own_clock_shares(p, plan.present), True),
)
ALGORITHMS = ("avg-l2clip", "avg-biclip")


# --- The cells --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FailureCell:
    """One simulation."""

    algorithm: str
    case: Case
    seed: int


def cells(plan: FailuresPlan) -> list[FailureCell]:
    """All simulations, seed by seed; with constant settings, whose clock is used makes no difference."""
    return [
        FailureCell(name, case, seed)
        for seed, name, case in itertools.product(plan.seeds, ALGORITHMS, CASES)
        if name == "avg-l2clip" or not case.own_clock
    ]


def run_cells(plan: FailuresPlan, out: Path, progress: bool) -> dict[FailureCell, list[float]]:
    """F(average) - F* of every cell, in the rounds of `recorded_rounds`."""

    def key(cell: FailureCell) -> dict[str, Any]:
        case = cell.case
        values = {"algorithm": cell.algorithm, "case": case.name, "equal": case.equal, "seed": cell.seed}
        return {**values, "plan": plan.key()}

    def measure(cell: FailureCell, tick: Tick) -> list[float]:
        return trained(plan, cell, recorded_rounds(plan.rounds))[1]

    def short_part(cell: FailureCell) -> float:
        rounds = max(1, plan.rounds // 50)
        trained(replace(plan, rounds=rounds), cell, [])
        return rounds / plan.rounds

    grid = Grid[FailureCell, list[float]](
        cells=cells(plan),
        key=key,
        measure=measure,
        label=lambda cell: f"{cell.algorithm}, {cell.case.name}, seed {cell.seed}",
        short_part=short_part,
        kind=lambda cell: (cell.algorithm, cell.case.name),
    )
    with Progress(progress) as bar:
        return run_grid(grid, out / RECORD, bar)


def configured(plan: FailuresPlan, name: str) -> Algorithm:
    """The algorithm with its settings."""
    if name == "avg-l2clip":
        return algorithm(name, ilr=plan.l2clip[0], i_u=plan.l2clip[1])
    return algorithm(name, ilr=plan.biclip[0], i_u=plan.biclip[1], i_d=plan.biclip[2])


def common_clock(theorem: Theory, algo: Algorithm, local_steps: int) -> dict[str, Callable[[int], float]]:
    """The theorem's schedules by the steps of the run: the same for every node, present or not."""

    def at(name: str) -> Callable[[int], float]:
        factor, base = theorem.schedules[name].factor, float(algo.settings[name])
        return lambda t: base * factor((t - 1) * local_steps + 1)

    return {name: at(name) for name in theorem.schedules}


def trained(plan: FailuresPlan, cell: FailureCell, rounds: Sequence[int]) -> tuple[Result, list[float]]:
    """One simulation, and F(average) - F* after each of these rounds."""
    problem, algo, case = plan.problem(), configured(plan, cell.algorithm), cell.case
    weights = case.weights(plan)
    schedules: Any = None
    if cell.algorithm == "avg-l2clip":
        theorem = theory(cell.algorithm, plan.alpha)
        schedules = theorem if case.own_clock else common_clock(theorem, algo, plan.local_steps)
    gaps = _AverageGaps(problem, weights, rounds)

    def batch(node: int, round: int, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        noise = plan.noise * draw_noise("student-t", plan.dimension, plan.df, generator)
        return problem.hessians[node], problem.optima[node], noise

    result = simulate(
        PointModel(plan.dimension),
        algo,
        loss=noisy_loss,
        batches=batch,
        nodes=plan.nodes,
        rounds=plan.rounds,
        local_steps=plan.local_steps,
        weights=weights.tolist(),
        projection=plan.radius,
        average=True,
        schedules=schedules,
        seed=cell.seed,
        evaluate=gaps,
        progress=False,
        **case.participation(plan, cell.seed),
    )
    return result, gaps.values


class _AverageGaps:
    """An evaluation that records F(average) - F* in some rounds."""

    def __init__(self, problem: Quadratics, weights: Tensor, rounds: Sequence[int]) -> None:
        self._optimum, self._hessian = problem.optimum(weights), problem.hessian(weights)
        self._average, self._rounds = IterateAverage(self._optimum), frozenset(rounds)
        self.values: list[float] = []

    def __call__(self, model: torch.nn.Module) -> Mapping[str, float]:
        (x,) = model.parameters()
        self._average.update(x)
        if self._average.round in self._rounds:
            e = self._average.value - self._optimum
            self.values.append(float(e @ self._hessian @ e) / 2)
        return {}


def recorded_rounds(rounds: int) -> list[int]:
    """Rounds at equal distances in the logarithm, the last one included.

    Examples:
        >>> recorded_rounds(16)
        [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 13, 16]
    """
    points = {round(2 ** (k / 4)) for k in range(int(4 * math.log2(rounds)) + 1)}
    return sorted({*points, rounds})
