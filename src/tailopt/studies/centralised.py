"""One node: BiClip, SGD and Adam by step, on SQuAD with a language model and on CIFAR-100 with a vision transformer.

A round on one node is an interval between two evaluations, and averaging over one node is nothing: avg-biclip and
avg-sgd are BiClip and SGD themselves, and avg-adam is Adam once its state is kept from round to round, as it is here.
With `nodes` the same tasks run nested; Adam's state then starts again in every round, as elsewhere. Judges claim 11.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tailopt.arguments import did_you_mean
from tailopt.figures.labels import name_line_ends, named
from tailopt.figures.style import band, band_text
from tailopt.records import disk
from tailopt.studies import claims
from tailopt.studies.comparison import (
    COMPARISON_OPTIONS,
    FEW_POINTS,
    Comparison,
    ComparisonPlan,
    TaskSpec,
    with_options,
)
from tailopt.studies.comparison_runs import compare
from tailopt.studies.plots import baseline, finish, look_of, panels
from tailopt.studies.protocol import Claim, all_hold, decide, exceeds
from tailopt.studies.runner import write_results
from tailopt.studies.study import StudyOptions, resolve_device
from tailopt.studies.tables import methods_section, metric_table, page, seeds_text

SUMMARY = "BiClip, SGD and Adam on one node, SQuAD and CIFAR-100; half an hour in the preset small"
OPTIONS = ("task", "preset", "model", "data", "nodes", *COMPARISON_OPTIONS)

# task -> its label and its metrics; the first metric is the one of the figure
TASKS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "squad": ("SQuAD", ("f1", "exact_match")),
    "cifar100": ("CIFAR-100", ("accuracy",)),
}
ALGORITHMS = ("avg-biclip", "avg-sgd", "avg-adam")
MARGIN = 1.0  # points of accuracy or F1 that BiClip may be below Adam


@dataclass(frozen=True)
class TaskResults:
    """The comparison on one task. start: the metrics of the model before the first step."""

    task: str
    results: Comparison
    start: Mapping[str, float]

    @property
    def plan(self) -> ComparisonPlan:
        """What was run."""
        return self.results.plan

    @property
    def label(self) -> str:
        """The task as tables call it."""
        return TASKS[self.task][0]

    @property
    def metric(self) -> str:
        """The metric of the figure."""
        return TASKS[self.task][1][0]

    def curves(self, algorithm: str) -> list[list[float]]:
        """The metric by evaluation, the start first, one curve per seed that did not break down."""
        for cell in self.results.cells:
            if cell.algorithm == algorithm:
                return [[self.start[self.metric], *run.values(self.metric)] for run in cell.whole_runs]
        return []

    def as_json(self) -> dict[str, Any]:
        """As results.json has it."""
        return {**self.results.as_json(), "start": dict(self.start)}


def run(out: Path, options: StudyOptions) -> Path:
    """Run what is not in `out` yet, and write table.md, results.json and centralised.png there.

    The preset "paper" is Qwen2.5-0.5B and a ViT-base, a GPU for a day; "small" is a model of 135M parameters on short
    passages, and a small vision transformer from scratch, half an hour on two cores. `task` is "squad", "cifar100", or
    both with a comma, the default. `model` is the language model, or the image model where `task` is cifar100. Where
    there are two tasks, `data` is a folder that holds squad and cifar100, as folders. Without `nodes` there is one.
    """
    tasks, parts = tasks_named(options.task or ""), []
    for name in tasks:
        plan = with_options(task_plan(name, options, len(tasks) > 1), options)
        results = compare(plan, out / name, options.progress)
        parts.append(TaskResults(name, results, _start(plan, out / name / "start.json")))
    judged = None if options.quick else [evaluate_claim(parts)]
    written = {"parts": {part.task: part.as_json() for part in parts}, "claims": judged or []}
    write_results(out, written, report(parts, judged), options.command)
    draw(parts, out / "centralised.png")
    return out


def tasks_named(text: str) -> list[str]:
    """The tasks that a text names; both for none.

    Examples:
        >>> tasks_named(""), tasks_named("CIFAR-100")
        (['squad', 'cifar100'], ['cifar100'])
    """
    names = [part.strip().lower().replace("-", "") for part in text.split(",")] if text else list(TASKS)
    for name in names:
        if name not in TASKS:
            raise ValueError(
                f"Unknown task: {name!r}{did_you_mean(name, TASKS)} Need one or both of {', '.join(TASKS)}."
            )
    return [name for name in TASKS if name in names]


def task_plan(name: str, options: StudyOptions, several: bool) -> ComparisonPlan:
    """What is run of one task."""
    small, nodes = options.small, options.nodes
    settings: dict[str, Any] = {}
    if options.model and not (several and name != "squad"):
        settings["pretrained"] = options.model
    if options.data:
        settings["data"] = data_of(options.data, name) if several else options.data
    scratch = name == "cifar100" and small and "pretrained" not in settings
    return ComparisonPlan(
        {TASKS[name][0]: TaskSpec(name, options.preset or "paper", settings)},
        algorithms=ALGORITHMS,
        fixed={"avg-adam": {"inner_state": "keep"}} if nodes in (None, 1) else {},
        space="scratch" if scratch else "fine-tuning",
        **({**FEW_POINTS, "seeds": (0,)} if small else {"budget": 20, "halving": True}),
        run={} if nodes is None else {"nodes": nodes},
    )


def data_of(data: str, name: str) -> str:
    """The data of one task in a folder for both: the entry of that name, or the one zip file in it."""
    folder = Path(data).expanduser()
    paths = [path for path in (folder / name, folder / f"{name}.zip") if path.exists()]
    if not paths:
        raise FileNotFoundError(
            f"Invalid data: {data!r} holds no {name}. With two tasks, give a folder that holds both."
        )
    zips = sorted(paths[0].glob("*.zip")) if paths[0].is_dir() else []
    return str(zips[0] if len(zips) == 1 else paths[0])


def _start(plan: ComparisonPlan, path: Path) -> dict[str, float]:
    """The metrics of the model before the first step, of the first seed."""
    if not path.is_file():
        (spec,) = plan.columns.values()
        problem, seed = spec.build(), plan.seeds[0]
        model = problem.model(seed).to(resolve_device(plan.device))
        disk.replace(path, (json.dumps(dict(problem.evaluate(model, seed))) + "\n").encode())
    metrics: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
    return metrics


# --- The claim --------------------------------------------------------------------------------------------------------


def evaluate_claim(parts: Sequence[TaskResults]) -> Claim:
    """Claim 11: on every task BiClip ends at most a point below Adam, and is so on average over the steps too."""
    decided = [_evaluate_part(part) for part in parts]
    verdict = all_hold(verdict for verdict, _ in decided)
    return decide(11, claims.TEXTS[11], verdict, "; ".join(text for _, text in decided))


def _evaluate_part(part: TaskResults) -> tuple[bool | None, str]:
    names = ("avg-biclip", "avg-adam", "avg-sgd")
    curves = {name: part.curves(name) for name in names}
    if not curves["avg-biclip"] or not curves["avg-adam"]:
        return None if not curves["avg-adam"] else False, f"{part.label}: not both were run to the end"
    at_end = {name: [curve[-1] for curve in several] for name, several in curves.items() if several}
    on_average = {name: [statistics.fmean(c[1:]) for c in several] for name, several in curves.items() if several}
    verdict = None
    if len(curves["avg-biclip"]) == len(curves["avg-adam"]) == len(part.plan.seeds):
        verdict = all_hold(
            exceeds(by["avg-biclip"], by["avg-adam"], by=-MARGIN, comparisons=2) for by in (at_end, on_average)
        )
    figures = ", ".join(
        f"{name} {statistics.fmean(at_end[name]):.2f} ({statistics.fmean(on_average[name]):.2f})" for name in at_end
    )
    return verdict, f"{part.label}, {part.metric} at the end (mean over the steps): {figures}"


# --- The page and the figure ------------------------------------------------------------------------------------------


def report(parts: Sequence[TaskResults], judged: Sequence[Claim] | None) -> str:
    """The study as a page."""
    body = []
    for part in parts:
        metrics = TASKS[part.task][1]
        before = ", ".join(f"{metric} {part.start[metric]:.2f}" for metric in metrics)
        methods = methods_section(part.results, _differences(part))
        body += [
            f"## {part.label}",
            "",
            f"Validation, percent, after the last step: {seeds_text(part.plan)}. Before: {before}.",
            "",
            *metric_table(part.results, {part.label: metrics}),
            "",
            *(text.replace("## How", "### How") for text in methods),
        ]
    return page("BiClip, SGD and Adam on one node" if _nodes(parts) == 1 else "The same tasks, nested", body, judged)


def _differences(part: TaskResults) -> list[str]:
    plan, spec = part.plan, part.plan.columns[part.label]
    arguments = plan.arguments(part.label)
    model: Any = getattr(spec.build(), "pretrained", "")
    theirs = "Qwen2.5" if part.task == "squad" else "a ViT-base pretrained on ImageNet"
    return [
        f"Model: {Path(model).name if model else 'from scratch'}; the paper's is {theirs}, and it prints no numbers.",
        f"{plan.nodes(part.label)} node(s), {arguments['rounds']} evaluations, one every "
        f"{arguments['local_steps']} steps, batch {arguments['batch_size']}, preset "
        f"{spec.preset}. Learning rates are constant; Adam's state is "
        f"{'kept throughout' if plan.fixed else 'new in every round'}.",
    ]


def _nodes(parts: Sequence[TaskResults]) -> int:
    return int(parts[0].plan.run.get("nodes", 1))


def draw(parts: Sequence[TaskResults], path: Path) -> None:
    """The first metric by step, one panel per task, from the model that all start with."""
    figure, axes = panels(len(parts), columns=2, height=3.4)
    for axis, part in zip(axes, parts, strict=True):
        steps = part.plan.arguments(part.label)["local_steps"]
        for algorithm in part.plan.algorithms:
            if curves := part.curves(algorithm):
                style = look_of(algorithm, len(curves), len(part.plan.seeds))
                band(axis, [steps * i for i in range(len(curves[0]))], curves, **style, marker="o", markersize=3)
        baseline(axis, part.results, part.label, part.metric)
        axis.set(xlabel="step", ylabel=f"{part.metric}, percent")
        if len(parts) > 1:
            named(axis, part.label)
        axis.grid(alpha=0.25, linewidth=0.5)
    name_line_ends(axes)
    where = "one node" if _nodes(parts) == 1 else f"{_nodes(parts)} nodes"
    of_what = parts[0].label if len(parts) == 1 else "Validation"
    finish(figure, f"{of_what} by step, {where}, {band_text(len(parts[0].plan.seeds))}", path)
