"""Algorithms compared on tasks: what is compared, and what came out.

Each algorithm is tuned with the same number of points, then reported over seeds (`protocol`). Tuning looks at a slice
held out of train, reporting at the validation split, after training on all of train; synthetic tasks differ from seed
to seed instead. A study file defines what is run, what the paper has beside it and which of its claims can be decided;
`comparison_runs` runs it, `tables` and `plots` show it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tailopt.paper.printed_tables import algorithm_name
from tailopt.studies.runner import as_json
from tailopt.studies.search_spaces import WIDENINGS
from tailopt.studies.study import StudyOptions
from tailopt.sweeps.result import BudgetPoint
from tailopt.tasks.table import task
from tailopt.tasks.task import Task

# options that every comparison takes, besides its own
COMPARISON_OPTIONS = ("algorithms", "seeds", "budget", "batch", "settings", "device", "precision")
# what `--quick` runs: arguments of `simulate`, and settings of the task
QUICK_RUN: Mapping[str, Any] = {"nodes": 2, "rounds": 1, "local_steps": 1, "batch_size": 4}
FEW_POINTS: Mapping[str, Any] = {"budget": 2, "widenings": 0, "tuning_seeds": (100,)}
QUICK_DATA: Mapping[str, Any] = {"limit": 64, "evaluated": 16}


# --- What is compared -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskSpec:
    """A task to be built: name and preset as in the table of tasks, and settings that override the preset's.

    run: arguments of `sweep` for this task alone, such as rounds.
    """

    task: str
    preset: str = "paper"
    settings: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> Task:
        """The task, measured on what is reported."""
        return task(self.task, self.preset, **self.settings)


@dataclass(frozen=True)
class ComparisonPlan:
    """Everything that a comparison depends on.

    Attributes:
        columns: label -> task.
        algorithms: names.
        fixed: name -> keywords of `algorithm` that are not searched, such as inner_state.
        space: a key of `SPACES`.
        budget: points tried for each algorithm on each column.
        widenings: how often ranges become wider where a best point lies at an end; few points say nothing about that.
        tuning_seeds: what points are chosen by.
        seeds: the seeds that are reported.
        halving: whether the worse part of the points ends early.
        run: arguments of `sweep` that override the task's defaults: rounds, nodes, local_steps, participants ...
        settings: "tune"; "paper": the paper's best settings; or the results.json of an earlier study, whose settings
            are taken. With the last two nothing is tuned.
        device: None is a GPU where there is one.
        batch: how many points train side by side; None is as many as the memory holds.
    """

    columns: Mapping[str, TaskSpec]
    algorithms: tuple[str, ...]
    fixed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    space: str = "fine-tuning"
    budget: int = 64
    widenings: int = WIDENINGS
    tuning_seeds: tuple[int, ...] = (100, 101)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    halving: bool = False
    run: Mapping[str, Any] = field(default_factory=dict)
    settings: str = "tune"
    device: str | None = None
    batch: int | None = None

    @property
    def trials(self) -> int:
        """How many settings are tried for each algorithm on each column, each with every tuning seed."""
        return self.budget if self.settings == "tune" else 0

    def overrides(self, column: str) -> dict[str, Any]:
        """The arguments of `sweep` that the study sets for a column."""
        return {**self.run, **self.columns[column].run}

    def arguments(self, column: str) -> dict[str, Any]:
        """What determines how much is run: the overrides over the task's defaults."""
        defaults, overrides = self.columns[column].build().defaults, self.overrides(column)
        arguments: dict[str, Any] = {"rounds": defaults.rounds, "batch_size": defaults.batch_size}
        if not {"local_steps", "local_epochs"} & overrides.keys():
            arguments |= {"local_steps": defaults.local_steps, "local_epochs": defaults.local_epochs}
        if defaults.participants is not None and "participation" not in overrides:
            arguments["participants"] = defaults.participants
        return {**arguments, **{key: value for key, value in overrides.items() if key != "nodes"}}

    def nodes(self, column: str) -> int:
        """How many nodes a column has."""
        return int(self.overrides(column).get("nodes", self.columns[column].build().defaults.nodes))

    def length(self, column: str) -> str:
        """How much a reported run is, in words."""
        arguments = self.arguments(column)
        steps = arguments.get("local_steps")
        amount = f"{steps} local steps" if steps else f"{arguments['local_epochs']} local epochs"
        nodes, rounds, batch_size = self.nodes(column), arguments["rounds"], arguments["batch_size"]
        return f"{nodes} nodes, {rounds} rounds of {amount}, batch {batch_size}"

    def as_json(self) -> dict[str, Any]:
        """As plan.json and results.json have it."""
        found: dict[str, Any] = as_json(self)
        return found


def with_options(plan: ComparisonPlan, options: StudyOptions) -> ComparisonPlan:
    """A plan with what a user asked for; `quick` shows that the study works and nothing more.

    Examples:
        >>> options = StudyOptions(algorithms="bi2clip, adam2", seeds=2)
        >>> with_options(ComparisonPlan({}, ("avg-sgd",)), options).algorithms
        ('bi2clip', 'adam2')
    """
    if options.quick:
        few = {label: replace(spec, settings={**spec.settings, **QUICK_DATA}) for label, spec in plan.columns.items()}
        plan = replace(plan, columns=few, algorithms=plan.algorithms[:2], **FEW_POINTS, seeds=(0,))
        plan = replace(plan, run={**QUICK_RUN, **plan.run, "rounds": 1, "local_steps": 1})
    if options.algorithms:
        plan = replace(plan, algorithms=algorithm_names(options.algorithms))
    if options.precision:
        plan = replace(plan, run={**plan.run, "precision": options.precision})
    return replace(
        plan,
        seeds=tuple(range(options.seeds)) if options.seeds else plan.seeds,
        budget=options.budget or plan.budget,
        settings=options.settings or plan.settings,
        device=options.device or plan.device,
        batch=options.batch or plan.batch,
    )


def algorithm_names(text: str) -> tuple[str, ...]:
    """Names separated by commas, in the spelling of this package or of the paper.

    Examples:
        >>> algorithm_names("Bi^2Clip, adam2")
        ('bi2clip', 'adam2')
    """
    return tuple(algorithm_name(name.strip()) for name in text.split(","))


# --- What came out ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SeedRun:
    """One reported run. metrics: after the last round, None where it broke down; curve, losses: by round."""

    seed: int
    metrics: Mapping[str, float] | None
    curve: list[Mapping[str, float]]
    losses: list[float]

    def values(self, metric: str) -> list[float]:
        """A metric by round."""
        return [row[metric] for row in self.curve]


@dataclass(frozen=True)
class AlgorithmResult:
    """One algorithm on one column: its settings, the trials that led to them, and a run per seed.

    Attributes:
        trials: every point that was tried, best first: its settings, the mean of the metric over the tuning seeds, and
            how many rounds it ran.
        budget_curve: what fewer points would have found, on the tuning seeds.
        ranges: where the settings were searched in the end: setting -> low and high.
        at_edge: settings whose best value lies at an end of a range all the same.
        route: how the points were run, and why this way.
    """

    column: str
    algorithm: str
    settings: Mapping[str, Any]
    runs: tuple[SeedRun, ...]
    trials: list[Mapping[str, Any]] = field(default_factory=list)
    budget_curve: tuple[BudgetPoint, ...] = ()
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    at_edge: tuple[str, ...] = ()
    route: str = ""

    @property
    def whole_runs(self) -> tuple[SeedRun, ...]:
        """The runs that did not break down."""
        return tuple(run for run in self.runs if run.metrics)


@dataclass(frozen=True)
class Comparison:
    """The results of a comparison. data: label -> which data were found."""

    plan: ComparisonPlan
    data: Mapping[str, str]
    cells: tuple[AlgorithmResult, ...]

    def cell(self, column: str, name: str) -> AlgorithmResult:
        """The results of one algorithm on one column."""
        for cell in self.cells:
            if (cell.column, cell.algorithm) == (column, name):
                return cell
        raise KeyError(f"{name} was not run on {column}")

    def values(self, column: str, name: str, metric: str) -> list[float]:
        """A metric of all seeds after the last round; NaN where a run broke down."""
        return [run.metrics[metric] if run.metrics else math.nan for run in self.cell(column, name).runs]

    def mean(self, column: str, name: str, metric: str) -> float:
        """The mean of a metric over the seeds."""
        return statistics.fmean(self.values(column, name, metric))

    def scores(self, column: str, metric: str, log: bool = False) -> dict[str, list[float]]:
        """A metric as scores by algorithm and seed, higher is better; minus its logarithm, if `log`."""
        lower = self.plan.columns[column].build().defaults.lower_is_better
        found = {name: self.values(column, name, metric) for name in self.plan.algorithms}
        return {name: [_score(value, lower, log) for value in values] for name, values in found.items()}

    def as_json(self) -> dict[str, Any]:
        """As results.json has it."""
        return {"plan": self.plan.as_json(), "found": dict(self.data), "cells": as_json(self.cells)}


def _score(value: float, lower_is_better: bool, log: bool) -> float:
    if log:
        value = math.log(value) if value > 0 else -math.inf if value == 0 else math.nan
    return -value if lower_is_better else value


def slug(text: str) -> str:
    """A text as a part of a file's name.

    Examples:
        >>> slug("TED-T (en-de)")
        'ted-t-en-de'
    """
    return "-".join("".join(c if c.isalnum() or c == "." else " " for c in text.lower()).split())
