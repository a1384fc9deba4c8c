"""A comparison run: settings chosen for every algorithm on every task, then one reported run per seed.

Every trial and every reported run is recorded in the study's folder as it ends, and a run that was stopped resumes from
its last round.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tailopt.algorithms import algorithm
from tailopt.engines.batches import to_device
from tailopt.engines.simulate import simulate
from tailopt.paper import paper_settings
from tailopt.progress import Progress
from tailopt.records import disk
from tailopt.rounds.settle import EveryoneExcluded
from tailopt.studies.comparison import AlgorithmResult, Comparison, ComparisonPlan, SeedRun, slug
from tailopt.studies.protocol import tune
from tailopt.studies.runner import RECORD, Grid, Tick, older_file, read_record, run_grid
from tailopt.studies.search_spaces import SPACES
from tailopt.studies.study import resolve_device
from tailopt.tasks.task import Task


@dataclass(frozen=True)
class _ReportCell:
    column: str
    algorithm: str
    seed: int

    def file_name(self) -> str:
        return f"{slug(self.column)}-{self.algorithm}-{self.seed}"


@dataclass(frozen=True)
class _Choice:
    """The settings of one algorithm on one column, and the trials that led to them."""

    settings: dict[str, Any]
    trials: list[dict[str, Any]]


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
    with Progress(progress) as bar:
        choices = _choices(plan, pairs, out, bar)

        def measure(cell: _ReportCell, tick: Tick) -> SeedRun:
            return _reported(plan, cell, choices[cell.column, cell.algorithm].settings, out / "runs" / cell.file_name())

        def after(cell: _ReportCell) -> None:  # the result is safe; weights are large
            shutil.rmtree(out / "runs" / cell.file_name() / "checkpoints", ignore_errors=True)

        grid = Grid[_ReportCell, SeedRun](
            cells=[_ReportCell(column, name, seed) for column, name in pairs for seed in plan.seeds],
            key=asdict,
            measure=measure,
            decode=lambda value: SeedRun(**value),
            label=lambda cell: f"{cell.column}: {cell.algorithm}, seed {cell.seed}",
            older=lambda cell: older_file(out / "cells" / f"{cell.file_name()}.json"),
            after=after,
        )
        runs = run_grid(grid, out / RECORD, bar)
    cells = [
        AlgorithmResult(
            column,
            name,
            choices[column, name].settings,
            list(choices[column, name].trials),
            tuple(runs[_ReportCell(column, name, seed)] for seed in plan.seeds),
        )
        for column, name in pairs
    ]
    data = {label: getattr(spec.build("validation"), "data_description", "") for label, spec in plan.columns.items()}
    results = Comparison(plan, data, tuple(cells))
    disk.replace(out / "results.json", (json.dumps(results.as_json(), indent=1) + "\n").encode())
    return results


def cost(plan: ComparisonPlan, out: Path | None = None) -> str:
    """What a comparison will cost, in local steps and in time: one step of each task is timed, nothing else is run."""
    lines, seconds = [], 0.0
    for label in plan.columns:
        step = _seconds_of_a_step(plan, label)
        steps = len(plan.algorithms) * (
            plan.trials * _steps(plan, label, tuning=True) + len(plan.seeds) * _steps(plan, label, tuning=False)
        )
        seconds += steps * step
        lines.append(
            f"{label}: {len(plan.algorithms)} algorithms, {plan.trials} trials and {len(plan.seeds)} seeds each, "
            f"{steps} local steps of {step * 1e3:.3g} ms on {resolve_device(plan.device)}"
        )
    finished = 0
    if out is not None and out.is_dir():
        finished = len(read_record(out / RECORD)) + len(list((out / "cells").glob("*.json")))
    rest = f"; {finished} finished runs are in {out} already" if finished else ""
    return "\n".join([*lines, f"about {_duration(seconds)} of training, evaluation not counted{rest}"])


def earlier_settings(results: Mapping[str, Any], column: str, name: str) -> dict[str, Any]:
    """The settings that an earlier study chose, from its results.json."""
    for cell in results["cells"]:
        if (cell["column"], cell["algorithm"]) == (column, name):
            return dict(cell["settings"])
    raise ValueError(f"Invalid settings: that study has none of {name} for {column}; need one that ran it.")


def _choices(
    plan: ComparisonPlan, pairs: list[tuple[str, str]], out: Path, bar: Progress
) -> dict[tuple[str, str], _Choice]:
    """The settings of every algorithm on every column: the paper's, an earlier study's, or tuned now."""
    if plan.settings == "paper":
        return {(c, name): _Choice(dict(paper_settings(name, plan.columns[c].task)), []) for c, name in pairs}
    if plan.settings != "tune":
        results = json.loads(Path(plan.settings).read_text(encoding="utf-8"))
        return {(column, name): _Choice(earlier_settings(results, column, name), []) for column, name in pairs}
    choices, done, total = {}, 0, len(pairs) * plan.budget
    for column, name in pairs:

        def tick(n: int, label: str = f"{column}: {name}, tuning") -> None:
            nonlocal done
            done += n
            bar.update(done, total, label)

        tuned = tune(
            _score(plan, column, name),
            SPACES[plan.space].ranges(name),
            plan.budget,
            value="score",
            record=out / "trials" / f"{slug(column)}-{name}.jsonl",
            tick=tick,
        )
        trials = [{"point": trial.point, **trial.values} for trial in tuned.trials]
        choices[column, name] = _Choice(tuned.settings, trials)
    return choices


def _score(plan: ComparisonPlan, column: str, name: str) -> Callable[[Mapping[str, float]], float]:
    """A function of settings that tuning minimises: plus or minus the metric on the held-out slice."""

    def score(settings: Mapping[str, float]) -> float:
        problem = plan.columns[column].build("held-out")
        cell = _ReportCell(column, name, plan.tuning_seed)
        rows = _trained(plan, problem, cell, settings, tuning=True)
        if rows is None or not math.isfinite(rows[-1]["loss"]):
            return math.inf
        metric = float(rows[-1]["metrics"][problem.defaults.metric])
        if math.isnan(metric):
            return math.inf
        return metric if problem.defaults.lower_is_better else -metric

    return score


def _reported(plan: ComparisonPlan, cell: _ReportCell, settings: Mapping[str, float], folder: Path) -> SeedRun:
    problem = plan.columns[cell.column].build("validation")
    start = time.perf_counter()
    rows = _trained(plan, problem, cell, settings, run=folder)
    seconds = time.perf_counter() - start
    if rows is None:
        return SeedRun(cell.seed, None, [], [], seconds)
    curve = [row["metrics"] for row in rows]
    return SeedRun(cell.seed, rows[-1]["metrics"], curve, [row["loss"] for row in rows], seconds)


def _trained(
    plan: ComparisonPlan,
    problem: Task,
    cell: _ReportCell,
    settings: Mapping[str, float],
    tuning: bool = False,
    run: Path | None = None,
) -> list[dict[str, Any]] | None:
    """The history of one simulation; None where every node's displacement was excluded."""
    arguments, seed = plan.arguments(cell.column, tuning), cell.seed
    try:
        result = simulate(
            problem.model(seed),
            algorithm(cell.algorithm, **{**settings, **plan.fixed.get(cell.algorithm, {})}),
            loss=problem.loss,
            data=problem.nodes(seed, plan.nodes(cell.column)),
            seed=seed,
            evaluate=lambda model: problem.evaluate(model, seed),
            evaluate_every=arguments["rounds"] if tuning else 1,
            device=resolve_device(plan.device),
            run=run,
            resume=run is not None,
            keep=1,
            progress=False,
            inplace=True,
            **arguments,
        )
    except EveryoneExcluded:
        return None
    return result.history


def _steps(plan: ComparisonPlan, column: str, tuning: bool) -> int:
    """Local steps of one run, over all nodes."""
    arguments = plan.arguments(column, tuning)
    nodes = plan.columns[column].build("validation").nodes(plan.tuning_seed, plan.nodes(column))
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
    problem = plan.columns[column].build("validation")
    data = problem.nodes(plan.tuning_seed, plan.nodes(column))[0]
    size = min(plan.arguments(column)["batch_size"], len(data))
    batch = torch.utils.data.default_collate([data[i] for i in range(size)])
    return seconds_of_a_step(problem, batch, plan.tuning_seed, torch.device(resolve_device(plan.device)))


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

    Seeds, algorithms and columns may be added.
    """
    new = replace(plan, seeds=(), algorithms=(), device=None).as_json()
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


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
