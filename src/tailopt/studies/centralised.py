"""One node: BiClip, SGD and Adam by step, on SQuAD with a language model and on CIFAR-100 with a vision transformer.

A round on one node is an interval between two evaluations, and averaging over one node is nothing: avg-biclip and
avg-sgd are BiClip and SGD themselves, and avg-adam is Adam once its state is kept from round to round, as it is here.
With `nodes` the same tasks run nested; Adam's state is then made anew in every round, as elsewhere. Judges claim 11.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tailopt.figures.style import band, pyplot
from tailopt.records import disk
from tailopt.studies.claims import Claim, judged
from tailopt.studies.study import StudyOptions
from tailopt.studies.tuned import (
    COMPARISON_OPTIONS,
    Column,
    Plan,
    compare,
    how,
    look_of,
    over_seeds,
    page,
    table,
    with_options,
)

SUMMARY = "BiClip, SGD and Adam on one node, SQuAD and CIFAR-100; half an hour in the preset small"
OPTIONS = ("task", "preset", "model", "data", "nodes", *COMPARISON_OPTIONS)

# task -> how it is called, and its metrics; the first is the one of the figure
TASKS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "squad": ("SQuAD", ("f1", "exact_match")),
    "cifar100": ("CIFAR-100", ("accuracy",)),
}
ALGORITHMS = ("avg-biclip", "avg-sgd", "avg-adam")
CLAIM = "On one node BiClip reaches Adam's accuracy and speed, without state."


def run(out: Path, options: StudyOptions) -> Path:
    """Run what is not in `out` yet, and write table.md, results.json and centralised.png there.

    Args:
        task: "squad", "cifar100", or both with a comma; empty: both.
        preset: "paper": Qwen2.5-0.5B and a ViT-base, a GPU for a day; "small": a model of 135M parameters on short
            passages, and a small vision transformer from scratch, half an hour on two cores.
        model: a folder or public name: of the language model, or of the image model where `task` is cifar100.
        data: a path or public name; where there are two tasks, a folder that holds squad and cifar100, as folders.
        nodes: None: one; else nested training over that many.
    """
    tasks, parts = chosen(options.task or ""), {}
    for name in tasks:
        plan = with_options(planned(name, options, len(tasks) > 1), options)
        parts[name] = compare(plan, out / name, options.progress)
        parts[name]["start"] = _start(plan, name, out / name / "start.json")
    claims = None if options.quick else [judge(parts)]
    written = {"parts": parts, "claims": [asdict(claim) for claim in claims or ()]}
    disk.replace(out / "results.json", (json.dumps(written, indent=1) + "\n").encode())
    disk.replace(out / "table.md", report(parts, claims).encode())
    draw(parts, out / "centralised.png")
    return out


def chosen(task: str) -> list[str]:
    """The tasks that a text names; both for none.

    Examples:
        >>> chosen(""), chosen("CIFAR-100")
        (['squad', 'cifar100'], ['cifar100'])
    """
    asked = [part.strip().lower().replace("-", "") for part in task.split(",")] if task else list(TASKS)
    for part in asked:
        if part not in TASKS:
            raise ValueError(f"Unknown task: {part!r}; need one of {', '.join(TASKS)}, or both with a comma.")
    return [name for name in TASKS if name in asked]


def planned(name: str, options: StudyOptions, several: bool) -> Plan:
    """What is run of one task."""
    preset, small, nodes = options.preset or "paper", options.small, options.nodes
    over: dict[str, Any] = {"pretrained": options.model} if options.model and not (several and name != "squad") else {}
    if options.data:
        over["data"] = inside(options.data, name) if several else options.data
    scratch = name == "cifar100" and small and "pretrained" not in over
    return Plan(
        {TASKS[name][0]: Column(name, preset, over)},
        algorithms=ALGORITHMS,
        fixed={"avg-adam": {"inner_state": "keep"}} if nodes in (None, 1) else {},
        space="scratch" if scratch else "fine-tuning",
        budget=2 if small else 8,
        seeds=(0,) if small else (0, 1, 2),
        run={} if nodes is None else {"nodes": nodes},
        tuning={"rounds": 1} if small else {"rounds": 5},
    )


def inside(data: str, name: str) -> str:
    """The data of one task in a folder for both: what stands there under its name, or the one zip file in that."""
    folder = Path(data).expanduser()
    there = [path for path in (folder / name, folder / f"{name}.zip") if path.exists()]
    if not there:
        raise FileNotFoundError(
            f"Invalid data: {data!r} holds no {name}. With two tasks, give a folder that holds both."
        )
    zips = sorted(there[0].glob("*.zip")) if there[0].is_dir() else []
    return str(zips[0] if len(zips) == 1 else there[0])


def _start(plan: Plan, name: str, path: Path) -> dict[str, float]:
    """The metrics of the model before the first step, of the first seed."""
    if not path.is_file():
        problem = plan.columns[TASKS[name][0]].made("validation")
        model = problem.model(plan.seeds[0]).to(plan.place())
        disk.replace(path, (json.dumps(dict(problem.evaluate(model, plan.seeds[0]))) + "\n").encode())
    found: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
    return found


# ---- what was seen ----


def lines(found: Mapping[str, Any], name: str, algorithm: str) -> list[list[float]]:
    """The first metric by evaluation, the start before them, a line a seed; without runs that broke down."""
    metric, start = TASKS[name][1][0], found["start"]
    for cell in found["cells"]:
        if cell["algorithm"] == algorithm:
            runs = [run["curve"] for run in cell["runs"] if run["metrics"]]
            return [[start[metric], *(row[metric] for row in curve)] for curve in runs]
    return []


def judge(parts: Mapping[str, Mapping[str, Any]]) -> Claim:
    """Claim 11: on every task BiClip ends no lower than Adam, and is on average over the steps no lower either.

    Less than the larger standard deviation over the seeds is no difference; from one seed nothing can be told.
    """
    verdicts: list[bool | None] = []
    texts = []
    for name, found in parts.items():
        title, metric = TASKS[name][0], TASKS[name][1][0]
        both = {algorithm: lines(found, name, algorithm) for algorithm in ("avg-biclip", "avg-adam", "avg-sgd")}
        if not both["avg-biclip"] or not both["avg-adam"]:
            verdicts.append(None if not both["avg-adam"] else False)
            texts.append(f"{title}: not both were run to the end")
            continue
        at_end = {key: [line[-1] for line in several] for key, several in both.items() if several}
        on_average = {key: [statistics.fmean(line[1:]) for line in several] for key, several in both.items() if several}
        enough = all(len(both[key]) > 1 for key in ("avg-biclip", "avg-adam"))
        verdicts.append(_no_lower(at_end) and _no_lower(on_average) if enough else None)
        said = ", ".join(
            f"{key} {statistics.fmean(at_end[key]):.2f} ({statistics.fmean(on_average[key]):.2f})" for key in at_end
        )
        texts.append(f"{title}, {metric} at the end (mean over the steps): {said}")
    holds = None if None in verdicts else all(verdicts)
    if False in verdicts:
        holds = False
    return judged(11, CLAIM, holds, "; ".join(texts))


def _no_lower(values: Mapping[str, Sequence[float]]) -> bool:
    ours, adams = values["avg-biclip"], values["avg-adam"]
    margin = max(statistics.stdev(ours), statistics.stdev(adams))
    return statistics.fmean(ours) >= statistics.fmean(adams) - margin


def report(parts: Mapping[str, Mapping[str, Any]], claims: Sequence[Claim] | None) -> str:
    """The study as a page."""
    body = []
    for name, found in parts.items():
        title, metrics = TASKS[name]
        before = ", ".join(f"{metric} {found['start'][metric]:.2f}" for metric in metrics)
        body += [
            f"## {title}",
            "",
            f"Validation, percent, after the last step: {over_seeds(found)}. Before: {before}.",
            "",
        ]
        body += [*table(found, {title: metrics}), ""]
        body += [text.replace("## How", "### How") for text in how(found, _differences(name, found))]
    return page("BiClip, SGD and Adam on one node" if _nodes(parts) == 1 else "The same tasks, nested", body, claims)


def _differences(name: str, found: Mapping[str, Any]) -> list[str]:
    (column,) = found["plan"]["columns"].values()
    made = Column(**column).made("validation")
    usual, over = made.defaults, found["plan"]["run"]
    model: Any = getattr(made, "pretrained", "")
    theirs = "Qwen2.5" if name == "squad" else "a ViT-base pretrained on ImageNet"
    return [
        f"Model: {Path(model).name if model else 'from scratch'}; the paper's is {theirs}, and it prints no numbers.",
        f"{over.get('nodes', usual.nodes)} node(s), {over.get('rounds', usual.rounds)} evaluations, one every "
        f"{over.get('local_steps', usual.local_steps)} steps, batch {over.get('batch_size', usual.batch_size)}, preset "
        f"{column['preset']}. Learning rates are constant; Adam's state is "
        f"{'kept throughout' if found['plan']['fixed'] else 'made anew in every round'}.",
    ]


def _nodes(parts: Mapping[str, Mapping[str, Any]]) -> int:
    return int(next(iter(parts.values()))["plan"]["run"].get("nodes", 1))


def draw(parts: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """The first metric by step, a panel a task, from the model that all start with."""
    plt = pyplot()
    figure, axes = plt.subplots(1, len(parts), figsize=(4.6 * len(parts) + 1, 4.0), squeeze=False, layout="constrained")
    for axis, (name, found) in zip(axes[0], parts.items(), strict=True):
        (column,) = found["plan"]["columns"].values()
        usual = Column(**column).made("validation").defaults
        steps = found["plan"]["run"].get("local_steps", usual.local_steps)
        for algorithm in found["plan"]["algorithms"]:
            if several := lines(found, name, algorithm):
                at = [steps * i for i in range(len(several[0]))]
                style = look_of(algorithm, len(several), len(found["plan"]["seeds"]))
                band(axis, at, several, **style, marker="o", markersize=3)
        title, metrics = TASKS[name]
        axis.set(title=f"{title}, {over_seeds(found)}", xlabel="step", ylabel=f"{metrics[0]}, percent")
        axis.grid(alpha=0.25, linewidth=0.5)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8, frameon=False)
    where = "one node" if _nodes(parts) == 1 else f"{_nodes(parts)} nodes"
    figure.suptitle(f"Validation by step, {where}", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)
