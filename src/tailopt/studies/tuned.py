"""Algorithms compared on real tasks: each tuned by the same number of random settings, then reported over seeds.

Tuning looks at a slice held out of train, reporting at the validation split, on all of train. Every trial and every
reported run is kept in the study's folder as it ends, and a run that was stopped goes on from its last round: the same
command, once more, goes on with the study. A study file says what is run, what the paper has beside it and which of
its claims can be judged; everything else is here.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tailopt.algorithms import ALGORITHMS, Algorithm, algorithm
from tailopt.engines.batches import to_device
from tailopt.engines.simulate import simulate
from tailopt.figures.style import band, look, pyplot
from tailopt.paper import paper_settings
from tailopt.paper.tables import algorithm_name
from tailopt.progress import Progress
from tailopt.records import disk
from tailopt.rounds.settle import EveryoneExcluded
from tailopt.studies.claims import Claim, claim_lines
from tailopt.studies.study import StudyOptions, resolve_device
from tailopt.sweeps.search import Point, Range, best, describe, point, search
from tailopt.sweeps.space import Space, settings
from tailopt.tasks.table import task
from tailopt.tasks.task import Task

# options that every study which compares algorithms takes, besides its own
COMPARISON_OPTIONS = ("algorithms", "seeds", "budget", "settings", "device")
_SHARE, _EPS = Range(0.03, 1.0), Range(1e-8, 1e-5)
_NESTEROV = {"olr": Range(0.3, 1.0), "momentum": Range(0.3, 0.9, log=False)}
# Weights that were trained before move by 1e-5 to 1e-3 a step, those that start at random by more. Outside, BiClip is
# searched by its learning rate: around 1 a mean displacement between the thresholds is applied as it is.
SPACES: Mapping[str, Space] = {
    "fine-tuning": Space(
        inner={
            "sgd": {"ilr": Range(1e-3, 0.3)},
            "l2clip": {"i_move": Range(3e-3, 0.3), "i_u": Range(0.03, 3.0)},
            "biclip-l2": {"i_move": Range(3e-3, 0.3), "i_u": Range(0.03, 3.0), "i_share": _SHARE},
            "biclip": {"i_move": Range(3e-5, 1e-3), "i_u": Range(1e-5, 3e-3), "i_share": _SHARE},
            "adagrad": {"ilr": Range(1e-4, 3e-3), "ieps": _EPS},
            "adam": {"ilr": Range(3e-5, 1e-3), "ieps": _EPS},
            "adamw": {"ilr": Range(3e-5, 1e-3), "ieps": _EPS, "weight_decay": Range(1e-4, 1e-1)},
        },
        outer={
            "avg": {},
            "adagrad": {"olr": Range(1e-4, 1e-2), "oeps": _EPS},
            "rmsprop": {"olr": Range(3e-5, 3e-3), "oeps": _EPS},
            "adam": {"olr": Range(1e-4, 1e-2), "oeps": _EPS},
            "biclip": {"olr": Range(0.3, 3.0), "o_u": Range(1e-4, 3e-3), "o_share": _SHARE},
            "biclip-l2": {"olr": Range(0.3, 3.0), "o_u": Range(0.1, 3.0), "o_share": _SHARE},
            "nesterov": _NESTEROV,
        },
    ),
    "scratch": Space(
        inner={
            "sgd": {"ilr": Range(0.03, 3.0)},
            "l2clip": {"i_move": Range(0.03, 3.0), "i_u": Range(0.03, 3.0)},
            "biclip-l2": {"i_move": Range(0.03, 3.0), "i_u": Range(0.03, 3.0), "i_share": _SHARE},
            "biclip": {"i_move": Range(5e-4, 3e-3), "i_u": Range(1e-4, 1e-2), "i_share": _SHARE},
            "adagrad": {"ilr": Range(1e-3, 3e-2), "ieps": _EPS},
            "adam": {"ilr": Range(3e-4, 2e-3), "ieps": _EPS},
            "adamw": {"ilr": Range(3e-4, 2e-3), "ieps": _EPS, "weight_decay": Range(1e-4, 1e-1)},
        },
        outer={
            "avg": {},
            "adagrad": {"olr": Range(3e-3, 0.1), "oeps": Range(1e-3, 1e-2)},
            "rmsprop": {"olr": Range(1e-3, 1e-2), "oeps": Range(1e-3, 1e-2)},
            "adam": {"olr": Range(3e-3, 3e-2), "oeps": Range(1e-3, 1e-2)},
            "biclip": {"olr": Range(0.5, 2.0), "o_u": Range(3e-3, 3e-2), "o_share": Range(1e-3, 0.1)},
            "biclip-l2": {"olr": Range(0.5, 2.0), "o_u": Range(1.0, 30.0), "o_share": _SHARE},
            "nesterov": _NESTEROV,
        },
    ),
}


@dataclass(frozen=True)
class Column:
    """A task as it is run: name and preset as in the table of tasks, settings over that."""

    task: str
    preset: str = "paper"
    settings: Mapping[str, Any] = field(default_factory=dict)

    def made(self, judge: str) -> Task:
        """The task, measured on the "validation" split or on the "held-out" slice of train."""
        return task(self.task, self.preset, **{**self.settings, "judge": judge})


@dataclass(frozen=True)
class Plan:
    """Everything that a comparison depends on.

    Attributes:
        columns: label -> task.
        algorithms: names.
        fixed: name -> keywords of `algorithm` that are not searched, such as inner_state.
        space: of `SPACES`.
        budget: random settings tried for each algorithm on each column.
        seeds: that are reported; tuning has `tuning_seed`.
        run: arguments of `simulate` over the task's defaults: rounds, nodes, local_steps, participants ...
        tuning: the same for tuning alone, over `run`.
        source: "tune"; "paper": the paper's best settings; or the results.json of an earlier study, whose settings are
            taken. With the last two nothing is tuned.
        device: None: a GPU where there is one.
    """

    columns: Mapping[str, Column]
    algorithms: tuple[str, ...]
    fixed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    space: str = "fine-tuning"
    budget: int = 8
    seeds: tuple[int, ...] = (0, 1, 2)
    tuning_seed: int = 100
    run: Mapping[str, Any] = field(default_factory=dict)
    tuning: Mapping[str, Any] = field(default_factory=dict)
    source: str = "tune"
    device: str | None = None

    def place(self) -> str:
        """Where it runs."""
        return resolve_device(self.device)

    def arguments(self, column: str, tuning: bool = False) -> dict[str, Any]:
        """The arguments of `simulate` that say how much is run."""
        usual = self.columns[column].made("validation").defaults
        given = {**self.run, **(self.tuning if tuning else {})}
        found: dict[str, Any] = {"rounds": usual.rounds, "batch_size": usual.batch_size, "weights": usual.weights}
        if not {"local_steps", "local_epochs"} & given.keys():
            found |= {"local_steps": usual.local_steps, "local_epochs": usual.local_epochs}
        participants = getattr(usual, "participants", None)
        if participants is not None and "participation" not in given:
            found["participants"] = participants
        return {**found, **{key: value for key, value in given.items() if key != "nodes"}}

    def nodes(self, column: str) -> int:
        """How many nodes there are."""
        return int(self.run.get("nodes", self.columns[column].made("validation").defaults.nodes))


def with_options(plan: Plan, options: StudyOptions) -> Plan:
    """A plan with what a user asked for; `quick` shows that the study works and nothing more.

    Examples:
        >>> with_options(Plan({}, ("avg-sgd",)), StudyOptions(algorithms="bi2clip, adam2", seeds=2)).algorithms
        ('bi2clip', 'adam2')
    """
    if options.quick:
        few = {label: replace(c, settings={**c.settings, **FEW}) for label, c in plan.columns.items()}
        plan = replace(plan, columns=few, algorithms=plan.algorithms[:2], budget=1, seeds=(0,), tuning={})
        plan = replace(plan, run={**QUICK, **plan.run, "rounds": 1, "local_steps": 1})
    if options.algorithms:
        names = tuple(algorithm_name(name.strip()) for name in options.algorithms.split(","))
        plan = replace(plan, algorithms=names)
    return replace(
        plan,
        seeds=tuple(range(options.seeds)) if options.seeds else plan.seeds,
        budget=options.budget or plan.budget,
        source=options.settings or plan.source,
        device=options.device or plan.device,
    )


QUICK: Mapping[str, Any] = {"nodes": 2, "rounds": 1, "local_steps": 1, "batch_size": 4}
FEW: Mapping[str, Any] = {"limit": 64, "evaluated": 16}


def compare(plan: Plan, out: Path, progress: bool = True) -> dict[str, Any]:
    """Run what is missing in `out`, and return everything that is known: plan, found, cells.

    Raises:
        ValueError: the folder holds a study with other settings.
    """
    held = _same_study(plan, out / "plan.json")
    _say(cost(plan, out), progress)  # loads model and data of every column: what is wrong with them is said here
    out.mkdir(parents=True, exist_ok=True)
    disk.replace(out / "plan.json", (json.dumps(held, indent=1) + "\n").encode())
    cells = []
    total = len(plan.columns) * len(plan.algorithms) * ((plan.budget if plan.source == "tune" else 0) + len(plan.seeds))
    done = 0
    with Progress(progress) as bar:

        def tick(n: int, text: str) -> None:
            nonlocal done
            done += n
            bar.update(done, total, text)

        for column in plan.columns:
            for name in plan.algorithms:
                cells.append(_cell(plan, column, name, out, tick))
    described = {label: getattr(column.made("validation"), "found", "") for label, column in plan.columns.items()}
    found = {"plan": asdict(plan), "found": described, "cells": cells}
    disk.replace(out / "results.json", (json.dumps(found, indent=1) + "\n").encode())
    return found


def cost(plan: Plan, out: Path | None = None) -> str:
    """What a comparison will cost, in local steps and in time: one step of each task is timed, nothing else is run."""
    lines, seconds = [], 0.0
    for label in plan.columns:
        step = _seconds_of_a_step(plan, label)
        tuned = plan.budget if plan.source == "tune" else 0
        steps = len(plan.algorithms) * (
            tuned * _steps(plan, label, tuning=True) + len(plan.seeds) * _steps(plan, label, tuning=False)
        )
        seconds += steps * step
        lines.append(
            f"{label}: {len(plan.algorithms)} algorithms, {tuned} trials and {len(plan.seeds)} seeds each, "
            f"{steps} local steps of {step * 1e3:.3g} ms on {plan.place()}"
        )
    there = len(list((out / "cells").glob("*.json"))) if out is not None else 0
    rest = f"; {there} finished runs are in {out} already" if there else ""
    return "\n".join([*lines, f"about {_duration(seconds)} of training, evaluation not counted{rest}"])


def tuned_settings(found: Mapping[str, Any], column: str, name: str) -> dict[str, Any]:
    """The settings that an earlier study chose."""
    for cell in found["cells"]:
        if (cell["column"], cell["algorithm"]) == (column, name):
            return dict(cell["settings"])
    raise ValueError(f"Invalid source: there are no settings of {name} for {column} in it.")


def _cell(plan: Plan, column: str, name: str, out: Path, tick: Callable[[int, str], None]) -> dict[str, Any]:
    """One algorithm on one task: the settings, and every seed's metrics and curve."""
    chosen, trials = _settings(plan, column, name, out, lambda n: tick(n, f"{column}: {name}, tuning"))
    runs = []
    for seed in plan.seeds:
        where = out / "cells" / f"{slug(column)}-{name}-{seed}.json"
        if not where.is_file():
            where.parent.mkdir(exist_ok=True)
            folder = out / "runs" / f"{slug(column)}-{name}-{seed}"
            disk.replace(where, (json.dumps(_reported(plan, column, name, chosen, seed, folder)) + "\n").encode())
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # the result is safe; weights are large
        runs.append(json.loads(where.read_text(encoding="utf-8")))
        tick(1, f"{column}: {name}, seed {seed}")
    return {"column": column, "algorithm": name, "settings": chosen, "trials": trials, "runs": runs}


def _settings(
    plan: Plan, column: str, name: str, out: Path, tick: Callable[[int], None]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    if plan.source == "paper":
        return dict(paper_settings(name, plan.columns[column].task)), []
    if plan.source != "tune":
        return tuned_settings(json.loads(Path(plan.source).read_text(encoding="utf-8")), column, name), []

    def measure(points: list[Point]) -> list[dict[str, float]]:
        return [{"score": _score(plan, column, name, settings(p))} for p in points]

    record = out / "trials" / f"{slug(column)}-{name}.jsonl"
    trials = search(measure, SPACES[plan.space].ranges(name), plan.budget, record=record, tick=tick)
    return settings(best(trials, "score").point), [{"point": t.point, **t.values} for t in trials]


def _score(plan: Plan, column: str, name: str, chosen: Mapping[str, float]) -> float:
    """What a trial is judged by: the task's metric on the held-out slice after the last round; less is better."""
    problem = plan.columns[column].made("held-out")
    rows = _trained(plan, problem, column, name, chosen, plan.tuning_seed, tuning=True)
    if rows is None or not math.isfinite(rows[-1]["loss"]):
        return math.inf
    value = float(rows[-1]["metrics"][problem.defaults.metric])
    if math.isnan(value):
        return math.inf
    return value if problem.defaults.lower_is_better else -value


def _reported(
    plan: Plan, column: str, name: str, chosen: Mapping[str, float], seed: int, folder: Path
) -> dict[str, Any]:
    problem = plan.columns[column].made("validation")
    began = time.perf_counter()
    rows = _trained(plan, problem, column, name, chosen, seed, run=folder)
    if rows is None:
        return {"seed": seed, "metrics": None, "curve": [], "losses": [], "seconds": time.perf_counter() - began}
    return {
        "seed": seed,
        "metrics": rows[-1]["metrics"],
        "curve": [row["metrics"] for row in rows],
        "losses": [row["loss"] for row in rows],
        "seconds": time.perf_counter() - began,
    }


def _trained(
    plan: Plan,
    problem: Task,
    column: str,
    name: str,
    chosen: Mapping[str, float],
    seed: int,
    tuning: bool = False,
    run: Path | None = None,
) -> list[dict[str, Any]] | None:
    """The history of one simulation; None where no node had anything finite left to say."""
    arguments = plan.arguments(column, tuning)
    try:
        result = simulate(
            problem.model(seed),
            made(plan, name, chosen),
            loss=problem.loss,
            data=problem.nodes(seed, plan.nodes(column)),
            seed=seed,
            evaluate=lambda model: problem.evaluate(model, seed),
            evaluate_every=arguments["rounds"] if tuning else 1,
            device=plan.place(),
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


def made(plan: Plan, name: str, chosen: Mapping[str, float]) -> Algorithm:
    """The algorithm with what was chosen and what the plan fixes."""
    return algorithm(name, **{**chosen, **plan.fixed.get(name, {})})


def _steps(plan: Plan, column: str, tuning: bool) -> int:
    """Local steps of one run, over all nodes."""
    arguments = plan.arguments(column, tuning)
    sizes = [len(part) for part in plan.columns[column].made("validation").nodes(plan.tuning_seed, plan.nodes(column))]
    taking = len(sizes)
    if arguments.get("participants"):
        taking = int(arguments["participants"])
    elif isinstance(arguments.get("participation"), float):
        taking = max(1, round(arguments["participation"] * taking))
    if arguments.get("local_steps"):
        return int(arguments["rounds"]) * taking * int(arguments["local_steps"])
    passes = sum(math.ceil(size / int(arguments["batch_size"])) for size in sizes)
    rounds, epochs = int(arguments["rounds"]), int(arguments["local_epochs"])
    return math.ceil(rounds * epochs * passes * taking / len(sizes))


def _seconds_of_a_step(plan: Plan, column: str) -> float:
    """Of a forward and a backward pass over one batch: the least of two, after a first one."""
    problem, place = plan.columns[column].made("validation"), torch.device(plan.place())
    model = problem.model(plan.tuning_seed).to(place)
    data = problem.nodes(plan.tuning_seed, plan.nodes(column))[0]
    size = min(plan.arguments(column)["batch_size"], len(data))
    batch = to_device(torch.utils.data.default_collate([data[i] for i in range(size)]), place)
    times = []
    for _ in range(3):
        began = time.perf_counter()
        loss = problem.loss(model, batch)
        loss.backward()
        loss.item()  # waits for the device
        times.append(time.perf_counter() - began)
    return min(times[1:])


def _same_study(plan: Plan, path: Path) -> dict[str, Any]:
    """What the folder is to hold; another study in it is refused. Seeds, algorithms and columns may be added."""
    now: dict[str, Any] = json.loads(json.dumps(asdict(replace(plan, seeds=(), algorithms=(), device=None))))
    if path.is_file():
        then = json.loads(path.read_text(encoding="utf-8"))
        both = then["columns"].keys() & now["columns"].keys()
        pairs = [(k, then.get(k), now[k]) for k in now if k != "columns"]
        pairs += [(label, then["columns"][label], now["columns"][label]) for label in both]
        for key, old, new in pairs:
            if old != new:
                raise ValueError(
                    f"{path.parent} holds a study with another {key}: {json.dumps(old)} there, {json.dumps(new)} here. "
                    "Use another folder: --out FOLDER."
                )
        now["columns"] = {**then["columns"], **now["columns"]}
    return now


def finished(out: Path, found: dict[str, Any], claims: Sequence[Claim] | None, text: str) -> None:
    """Write the page, and the claims beside what was found; None where none is judged."""
    found["claims"] = [asdict(claim) for claim in claims or ()]
    disk.replace(out / "results.json", (json.dumps(found, indent=1) + "\n").encode())
    disk.replace(out / "table.md", text.encode())


# ---- what a report shows ----


def values(found: Mapping[str, Any], column: str, name: str, metric: str) -> list[float]:
    """A metric of all seeds after the last round; NaN where a run broke down."""
    for cell in found["cells"]:
        if (cell["column"], cell["algorithm"]) == (column, name):
            return [run["metrics"][metric] if run["metrics"] else math.nan for run in cell["runs"]]
    raise KeyError(f"{name} was not run on {column}")


def mean(found: Mapping[str, Any], column: str, name: str, metric: str) -> float:
    """Over the seeds."""
    return statistics.fmean(values(found, column, name, metric))


def spread(numbers: Sequence[float], digits: int = 2) -> str:
    """Mean and standard deviation.

    Examples:
        >>> spread([1.0, 2.0, 3.0]), spread([4.0])
        ('2.00 ± 1.00', '4.00')
    """
    middle = f"{statistics.fmean(numbers):.{digits}f}"
    several = len(numbers) > 1 and all(map(math.isfinite, numbers))  # stdev raises where a run broke down
    return f"{middle} ± {statistics.stdev(numbers):.{digits}f}" if several else middle


def over_seeds(found: Mapping[str, Any]) -> str:
    """What `spread` shows, in words."""
    n = len(found["plan"]["seeds"])
    return f"mean ± standard deviation of {n} seeds" if n > 1 else "one seed"


def table(
    found: Mapping[str, Any],
    metrics: Mapping[str, Sequence[str]],
    paper: Callable[[str, str, str], float | None] = lambda column, name, metric: None,
    digits: int = 2,
) -> list[str]:
    """Lines of Markdown: a row an algorithm, a column a metric, each with the paper's number behind a slash.

    Args:
        metrics: column -> its metrics.
        paper: (column, algorithm, metric) -> the paper's number, or None.
    """
    heads = [(column, metric) for column in found["plan"]["columns"] for metric in metrics[column]]
    lines = ["| algorithm | " + " | ".join(f"{column}, {metric}" for column, metric in heads) + " |"]
    lines.append("| --- |" + " ---: |" * len(heads))
    for name in found["plan"]["algorithms"]:
        texts = []
        for column, metric in heads:
            printed = paper(column, name, metric)
            ours = spread(values(found, column, name, metric), digits)
            texts.append(ours + ("" if printed is None else f" / {printed:g}"))
        lines.append(f"| {name} | " + " | ".join(texts) + " |")
    return lines


def how(found: Mapping[str, Any], differences: Sequence[str]) -> list[str]:
    """Lines that say how it was run: data as found, tuning, what differs from the paper, settings, ranges."""
    plan = found["plan"]
    lines = ["## How", ""]
    lines += [f"- {label}: {text}" for label, text in found["found"].items() if text]
    lines += [f"- Reported on the validation split after the last round, seeds {', '.join(map(str, plan['seeds']))}."]
    if plan["source"] == "tune":
        lines += [
            f"- Every algorithm was tuned by {plan['budget']} random settings on a slice held out of train (seed "
            f"{plan['tuning_seed']}), never on what is reported.",
            *(f"- {label}: {_tuned_for(plan, label)}" for label in plan["columns"]),
            *one_sided(plan["budget"]),
        ]
    else:
        lines += [f"- Settings: {plan['source']}; nothing was tuned here."]
    lines += [f"- {text}" for text in differences]
    lines += ["", "| algorithm | task | settings |", "| --- | --- | --- |"]
    for cell in found["cells"]:
        text = ", ".join(f"{key} {value:.3g}" for key, value in sorted(cell["settings"].items()))
        lines.append(f"| {cell['algorithm']} | {cell['column']} | {text} |")
    if plan["source"] == "tune":
        lines += [
            "",
            f"Searched ({plan['space']}), in the logarithm but for momentum; move = learning rate · upper threshold, "
            "share = lower / upper threshold:",
            "",
        ]
        space = SPACES[plan["space"]]
        pairs = [ALGORITHMS[name] for name in plan["algorithms"]]
        rules = [("inner", space.inner, {inner for _, inner in pairs}), ("outer", space.outer, {o for o, _ in pairs})]
        for level, known, used in rules:
            for rule, ranges in known.items():
                if rule in used and ranges:
                    text = ", ".join(f"{key} {v[0]:g} to {v[1]:g}" for key, v in describe(ranges).items())
                    lines.append(f"- {level} {rule}: {text}")
    return [*lines, ""]


def _tuned_for(plan: Mapping[str, Any], label: str) -> str:
    """How long a trial was beside a reported run: settings chosen early are not always those that end best."""
    usual = Column(**plan["columns"][label]).made("validation").defaults
    reported = plan["run"].get("rounds", usual.rounds)
    tuned = plan["tuning"].get("rounds", reported)
    if tuned == reported:
        return f"a trial had {tuned} rounds, as a reported run has."
    return f"a trial had {tuned} of the {reported} rounds of a reported run, so settings were chosen for a short run."


def one_sided(budget: int) -> list[str]:
    """A limit of the draws, where there is one: of few random numbers all can lie on one side."""
    shares = [point({"first": Range(0.0, 1.0, log=False)}, seed=0, number=i)["first"] for i in range(budget)]
    if min(shares) >= 0.5 or max(shares) <= 0.5:
        side = "upper" if min(shares) >= 0.5 else "lower"
        return [
            f"- A limit of these trials: the inner learning rate (or move) was tried only in the {side} half of its "
            f"range, at {min(shares):.2f} to {max(shares):.2f} of the way, because trial i is the same draw for every "
            "algorithm and task."
        ]
    return []


def page(title: str, body: Sequence[str], claims: Sequence[Claim] | None) -> str:
    """A report: title, body, and the claims last; None where none is judged."""
    return "\n".join([f"# {title}", "", *body, "## Claims", "", *claim_lines(claims)]) + "\n"


def curves(found: Mapping[str, Any], metrics: Mapping[str, str], path: Path, title: str) -> None:
    """A metric by round, a panel a column, a line an algorithm: median over seeds, quartiles from four seeds on."""
    plt = pyplot()
    labels = list(found["plan"]["columns"])
    width = min(4, len(labels))
    rows = -(-len(labels) // width)
    figure, axes = plt.subplots(
        rows, width, figsize=(max(8.0, 3.6 * width), 3.4 * rows + 1.2), squeeze=False, layout="constrained"
    )
    for axis, label in zip(axes.flat, labels, strict=False):
        for cell in found["cells"]:
            if cell["column"] == label:
                line(axis, cell, metrics[label])
        axis.set(title=label, xlabel="round", ylabel=metrics[label])
        axis.xaxis.get_major_locator().set_params(integer=True)
        if metrics[label] == "perplexity":  # the first round's may be many times the last one's
            axis.set_yscale("log")
            axis.yaxis.set_minor_formatter(plt.NullFormatter())
        axis.grid(alpha=0.25, linewidth=0.5, which="both" if axis.get_yscale() == "log" else "major")
    for axis in axes.flat[len(labels) :]:
        axis.set_visible(False)
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    n = len(found["plan"]["seeds"])
    figure.suptitle(f"{title}, {f'median of {n} seeds' if n > 1 else 'one seed'}", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def line(axis: Any, cell: Mapping[str, Any], metric: str) -> None:
    """A metric of one algorithm by round, of the seeds that did not break down."""
    lines = [[row[metric] for row in run["curve"]] for run in cell["runs"] if run["metrics"]]
    if lines:
        marker = {"marker": "o", "markersize": 3} if len(lines[0]) < 12 else {}
        style = look_of(cell["algorithm"], len(lines), len(cell["runs"]))
        band(axis, range(1, len(lines[0]) + 1), lines, **style, **marker)


def look_of(algorithm: str, drawn: int, seeds: int) -> dict[str, Any]:
    """How the line of an algorithm looks; where some of its seeds broke down, the legend says how many are drawn.

    Examples:
        >>> look_of("avg-sgd", 1, 3)["label"]
        'avg-sgd (1 of 3 seeds)'
    """
    return look(algorithm) | ({"label": f"{algorithm} ({drawn} of {seeds} seeds)"} if drawn < seeds else {})


def slug(text: str) -> str:
    """A text as a part of a file's name.

    Examples:
        >>> slug("TED-T (en-de)")
        'ted-t-en-de'
    """
    return "-".join("".join(c if c.isalnum() or c == "." else " " for c in text.lower()).split())


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _say(text: str, shown: bool) -> None:
    if shown:
        print(text, file=sys.stderr, flush=True)
