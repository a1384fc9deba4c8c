"""A comparison run: settings searched for every algorithm on every task, then reported over seeds.

    out/sweeps/TASK-ALGORITHM-DIGEST/     one sweep for each pair: every trial and every reported run, as it ends

The search of a task begins with the ranges of the space. Where a best point lies at an end of a range, the range widens
and all algorithms that have the rule are searched again, with the same number of points; the trials in the narrower
range do not count. After `WIDENINGS` times the ranges stay, and the report says which points lie at an end.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tailopt.engines.batches import to_device
from tailopt.engines.captured_steps import CapturedPrograms, sharing_programs
from tailopt.paper import paper_settings
from tailopt.progress import duration
from tailopt.records import disk
from tailopt.studies.comparison import AlgorithmResult, Comparison, ComparisonPlan, SeedRun, slug
from tailopt.studies.runner import digest
from tailopt.studies.search_spaces import SPACES, Edge, rules_of, search, swept_as
from tailopt.studies.study import resolve_device
from tailopt.sweeps.halving import Halving
from tailopt.sweeps.result import SweepResult
from tailopt.sweeps.space import Range, Space
from tailopt.sweeps.sweep import sweep
from tailopt.sweeps.trials import Trial
from tailopt.tasks.task import Task


def compare(plan: ComparisonPlan, out: Path, progress: bool = True) -> Comparison:
    """Run what is missing in `out`, and return everything that is known.

    Raises:
        ValueError: the folder holds a study with other settings.
    """
    plan_json = _same_study(plan, out / "plan.json")
    estimate = cost(plan, out)  # builds the model and the data of every column: an error in them shows here
    if progress:
        print(estimate, file=sys.stderr, flush=True)
    out.mkdir(parents=True, exist_ok=True)
    disk.replace(out / "plan.json", (json.dumps(plan_json, indent=1) + "\n").encode())
    pairs = [(column, name) for column in plan.columns for name in plan.algorithms]
    searches = {column: _Search(plan, column, out, progress) for column in plan.columns}
    if plan.settings == "tune":
        for search in searches.values():
            search.run()
    announce = Announcer(progress, len(pairs), "reporting")
    cells = []
    for column, name in pairs:
        announce(f"{column}: {name}")
        cells.append(searches[column].report(name))
    announce.end()
    data = {label: getattr(spec.build(), "data_description", "") for label, spec in plan.columns.items()}
    results = Comparison(plan, data, tuple(cells))
    disk.replace(out / "results.json", (json.dumps(results.as_json(), indent=1) + "\n").encode())
    return results


class _Search:
    """The sweeps of one column. space: the ranges as they are now; at_edge: best points that stayed at an end."""

    def __init__(self, plan: ComparisonPlan, column: str, out: Path, progress: bool) -> None:
        self._plan, self._column, self._out, self._progress = plan, column, out, progress
        self._task = plan.columns[column].build()
        self._space: Space = SPACES[plan.space]
        self._at_edge: list[Edge] = []
        self._programs: dict[str, CapturedPrograms] = {}  # on a GPU, of all sweeps of this column

    def run(self) -> None:
        """Search the settings of all algorithms; widen ranges whose ends hold a best point, and search again."""
        announce = Announcer(self._progress, len(self._plan.algorithms), "tuning")

        def best(name: str, space: Space) -> Mapping[str, float] | None:
            announce(f"{self._column}: {name}")
            found = self._sweep(name, space, report=False).best
            return None if found.diverged else found.settings

        self._space, self._at_edge = search(self._space, self._plan.algorithms, best, self._plan.widenings)
        announce.end()

    def report(self, name: str) -> AlgorithmResult:
        """Run the best settings of an algorithm, or those that were given, on the seeds of the report."""
        plan = self._plan
        result = self._sweep(name, self._space, report=True)
        tuned = plan.settings == "tune"
        ranges = self._space.ranges_of(*rules_of(name)) if tuned else {}
        fixed = plan.fixed.get(name, {})
        return AlgorithmResult(
            column=self._column,
            algorithm=name,
            settings={key: value for key, value in result.best.settings.items() if key not in fixed},
            runs=_seed_runs(plan.seeds, result.reports),
            trials=[{"settings": t.settings, "value": t.value, "rounds": t.rounds} for t in result.ranking],
            budget_curve=tuple(result.budget_curve()),
            ranges={key: (interval.low, interval.high) for key, interval in ranges.items()},
            at_edge=tuple(edge.text() for edge in self._at_edge if edge.algorithm == name),
            route=f"{result.route.name}: {result.route.reason}",
        )

    def _sweep(self, name: str, space: Space, report: bool) -> SweepResult:
        plan = self._plan
        points, seeds = self._points(name, space)
        folder = self._out / "sweeps" / f"{slug(self._column)}-{name}-{digest(_as_text(points))[:8]}"
        with sharing_programs(self._programs):
            return sweep(
                self._task,
                swept_as(name),
                space=points,
                budget=plan.budget,
                settings=dict(plan.fixed.get(name, {})),
                seeds=seeds,
                report_seeds=plan.seeds if report else 0,
                halving=plan.halving,
                curves=True,
                device=resolve_device(plan.device),
                batch=plan.batch,
                run=folder,
                progress=self._progress,
                **plan.overrides(self._column),
            )

    def _points(self, name: str, space: Space) -> tuple[Any, Sequence[int] | int]:
        """Where an algorithm is searched, and the tuning seeds; one point and none where its settings are given."""
        plan, column = self._plan, self._column
        if plan.settings == "tune":
            return space.ranges_of(*rules_of(name)), plan.tuning_seeds
        if plan.settings == "paper":
            return [dict(paper_settings(name, plan.columns[column].task))], 0
        results = json.loads(Path(plan.settings).read_text(encoding="utf-8"))
        return [earlier_settings(results, column, name)], 0


def earlier_settings(results: Mapping[str, Any], column: str, name: str) -> dict[str, Any]:
    """The settings that an earlier study chose, from its results.json."""
    for cell in results["cells"]:
        if (cell["column"], cell["algorithm"]) == (column, name):
            return dict(cell["settings"])
    raise ValueError(f"Invalid settings: that study has none of {name} for {column}; need one that ran it.")


def _seed_runs(seeds: Sequence[int], reports: Sequence[Trial]) -> tuple[SeedRun, ...]:
    """The reported runs by seed; one that broke down has no metrics, and a search without a finite trial no reports."""
    by_seed = {trial.seed: trial for trial in reports}
    runs = []
    for seed in seeds:
        trial = by_seed.get(seed)
        rungs = trial.rungs if trial is not None else ()
        whole = trial is not None and not trial.ended and rungs
        metrics = dict(rungs[-1].metrics) if whole else None
        runs.append(SeedRun(seed, metrics, [dict(r.metrics) for r in rungs], [r.loss for r in rungs]))
    return tuple(runs)


def _as_text(space: Any) -> Any:
    """A space as plain values, for the name of its folder."""
    if isinstance(space, Mapping):
        return {key: [r.low, r.high, r.log] if isinstance(r, Range) else r for key, r in space.items()}
    return space


class Announcer:
    """Says on stderr which sweep comes next, and how long the rest will take; the sweep shows its own progress."""

    def __init__(self, shown: bool, total: int, what: str) -> None:
        self._shown, self._total, self._what = shown, total, what
        self._begun = self._last = time.monotonic()
        self._done = -1

    def __call__(self, label: str) -> None:
        """Say what comes next, at most every two seconds: a short sweep needs no line of its own."""
        self._done += 1
        self._total = max(self._total, self._done + 1)  # ranges that widen are searched again
        now = time.monotonic()
        if not self._shown or (self._done and now - self._last < 2.0):
            return
        self._last = now
        left = (now - self._begun) / self._done * (self._total - self._done) if self._done else None
        rest = f", about {duration(left)} left" if left is not None else ""
        print(f"{self._what} {self._done + 1} of {self._total}{rest}: {label}", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Say how long it took."""
        if self._shown:
            print(f"{self._what} took {duration(time.monotonic() - self._begun)}", file=sys.stderr, flush=True)


# --- The cost ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Amount:
    """Local steps of the runs of one algorithm on a column."""

    tuning: float
    reported: int


def cost(plan: ComparisonPlan, out: Path | None = None) -> str:
    """What a comparison will cost, in local steps and in time: one step of each task is timed, nothing else is run."""
    lines, seconds = [], 0.0
    for label in plan.columns:
        step, amount = _seconds_of_a_step(plan, label), _amount(plan, label)
        steps = round(len(plan.algorithms) * (amount.tuning + amount.reported))
        seconds += steps * step
        lines.append(
            f"{label}: {_counted(len(plan.algorithms), 'algorithm')}, {_counted(plan.trials, 'trial')} and "
            f"{_counted(len(plan.seeds), 'seed')} each, "
            f"{steps} local steps of {step * 1e3:.3g} ms on {resolve_device(plan.device)}"
        )
    finished = 0
    if out is not None and (out / "sweeps").is_dir():
        finished = sum(path.read_bytes().count(b"\n") for path in (out / "sweeps").glob("*/trials.jsonl"))
    rest = f"; {finished} finished trials and runs are in {out} already" if finished else ""
    again = f"; ranges that have to widen cost up to {plan.widenings} times as much again" if plan.widenings else ""
    return "\n".join(
        [
            *lines,
            f"at most about {duration(seconds)} of training where nothing runs side by side, evaluation not counted"
            f"{again}{rest}",
        ]
    )


def _counted(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def _amount(plan: ComparisonPlan, column: str) -> _Amount:
    run, rounds = _steps(plan, column), int(plan.arguments(column)["rounds"])
    halving, share, left, before = Halving.of(plan.halving, rounds), 0.0, 1.0, 0
    for rung in (*(halving.rungs if halving is not None else ()), rounds):
        share += left * (rung - before) / rounds
        before = rung
        left /= halving.factor if halving is not None else 1.0
    return _Amount(plan.trials * len(plan.tuning_seeds) * share * run, len(plan.seeds) * run)


def _steps(plan: ComparisonPlan, column: str) -> int:
    """Local steps of one run, over all nodes."""
    arguments = plan.arguments(column)
    nodes = plan.columns[column].build().nodes(plan.seeds[0], plan.nodes(column))
    sizes = [len(node) for node in nodes]
    participants = len(sizes)
    if arguments.get("participants"):
        participants = int(arguments["participants"])
    elif isinstance(arguments.get("participation"), float):
        participants = max(1, round(arguments["participation"] * participants))
    if arguments.get("local_steps"):
        return int(arguments["rounds"]) * participants * int(arguments["local_steps"])
    passes = sum(math.ceil(size / int(arguments["batch_size"])) for size in sizes)
    rounds, epochs = int(arguments["rounds"]), int(arguments["local_epochs"])
    return math.ceil(rounds * epochs * passes * participants / len(sizes))


def _seconds_of_a_step(plan: ComparisonPlan, column: str) -> float:
    problem, size = plan.columns[column].build(), int(plan.arguments(column)["batch_size"])
    return seconds_of_a_first_step(problem, plan.nodes(column), size, plan.seeds[0], resolve_device(plan.device))


def seconds_of_a_first_step(problem: Task, nodes: int, batch_size: int, seed: int, device: str) -> float:
    """The time of a forward and a backward pass over the first batch of the first node."""
    data = problem.nodes(seed, nodes)[0]
    batch = torch.utils.data.default_collate([data[i] for i in range(min(batch_size, len(data)))])
    return seconds_of_a_step(problem, batch, seed, torch.device(device))


def seconds_of_a_step(problem: Task, batch: Any, seed: int, device: torch.device) -> float:
    """The time of a forward and a backward pass over one batch: the least of two, after a first one."""
    model = problem.model(seed).to(device)
    batch = to_device(batch, device)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        loss = problem.loss(model, batch)
        loss.backward()
        loss.item()  # waits for the device
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _same_study(plan: ComparisonPlan, path: Path) -> dict[str, Any]:
    """The content of plan.json; raises where the folder holds another study.

    Seeds, algorithms, columns and points may be added; device and batch do not decide what a study is.
    """
    new = replace(plan, seeds=(), algorithms=(), budget=0, device=None, batch=None).as_json()
    if path.is_file():
        old = json.loads(path.read_text(encoding="utf-8"))
        both = old["columns"].keys() & new["columns"].keys()
        pairs = [(key, old.get(key), new[key]) for key in new if key != "columns"]
        pairs += [(label, old["columns"][label], new["columns"][label]) for label in both]
        for key, recorded, asked in pairs:
            if recorded != asked:
                raise ValueError(
                    f"{path.parent} holds a study with another {key}: {json.dumps(recorded)} there, "
                    f"{json.dumps(asked)} here. Use another folder: --out FOLDER."
                )
        new["columns"] = {**old["columns"], **new["columns"]}
    return new
