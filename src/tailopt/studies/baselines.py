"""What federated users expect, where nodes differ: FedAvg, FedProx, FedAdam and FedYogi beside clipped algorithms.

    FedAvg     avg-sgd       arXiv 1602.05629
    FedProx    avg-sgd with the proximal term mu (x - start), mu searched with the rate         arXiv 1812.06127
    FedAdam    adam-sgd, FedYogi yogi-sgd                                                       arXiv 2003.00295

SynToken is dealt to the nodes by a Dirichlet distribution over the tenths of its labels; Philosopher has an author on
every node. All are tuned with as many points, FedProx too, which has one setting more than FedAvg.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tailopt.arguments import did_you_mean
from tailopt.studies.comparison import (
    COMPARISON_OPTIONS,
    FEW_POINTS,
    Comparison,
    ComparisonPlan,
    TaskSpec,
    with_options,
)
from tailopt.studies.comparison_runs import compare
from tailopt.studies.protocol import UNJUDGED, difference
from tailopt.studies.runner import write_results
from tailopt.studies.search_spaces import FEDPROX
from tailopt.studies.study import StudyOptions
from tailopt.studies.tables import markdown_table, mean_and_deviation, methods_section, seeds_text

SUMMARY = "FedAvg, FedProx, FedAdam, FedYogi and ours where nodes differ; minutes in the preset small"
OPTIONS = ("task", "preset", "tokenizer", "data", *COMPARISON_OPTIONS)

REFERENCE = "avg-sgd"
NAMES: Mapping[str, str] = {
    REFERENCE: "FedAvg",
    FEDPROX: "FedProx",
    "adam-sgd": "FedAdam",
    "yogi-sgd": "FedYogi",
    "avg-l2clip": "",
    "avg-biclip": "",
    "adam-biclip": "",
    "bi2clip": "",
}
SYNTOKEN: Mapping[str, Mapping[str, Any]] = {
    "SynToken, no noise, alpha 0.1": {"noise": "none", "alpha": 0.1},
    "SynToken, Student-t df 1.5, alpha 0.1": {"alpha": 0.1},
    "SynToken, Student-t df 1.5, alpha 1": {"alpha": 1.0},
}
PHILOSOPHER = "Philosopher"


def run(out: Path, options: StudyOptions) -> Path:
    """Run what is not in `out` yet, and write table.md and results.json there.

    `task` is "SynToken", the default, or "Philosopher", which takes `data` and `tokenizer`.
    """
    name = (options.task or "SynToken").lower()
    if name not in ("syntoken", "philosopher"):
        raise ValueError(f"Unknown task: {options.task!r}; need SynToken or Philosopher.")
    if name == "syntoken" and (options.data is not None or options.tokenizer is not None):
        raise ValueError("Invalid task: SynToken is drawn from a seed; --data and --tokenizer are for Philosopher.")
    plan = syntoken_plan(options) if name == "syntoken" else philosopher_plan(options)
    plan = replace(plan, algorithms=names_of(options.algorithms))
    options = replace(options, algorithms=None)
    if options.quick and name == "syntoken":  # it has no blocks to limit
        plan = with_options(plan, replace(options, quick=False, seeds=1, budget=2))
    else:
        plan = with_options(plan, options)
    results = compare(plan, out, options.progress)
    write_results(out, results.as_json(), report(results, judged=not options.quick), options.command)
    return out


def names_of(text: str | None) -> tuple[str, ...]:
    """The algorithms that a text names, with commas; all for none.

    Examples:
        >>> names_of("fedprox, yogi-sgd")
        ('fedprox', 'yogi-sgd')
    """
    names = tuple(part.strip() for part in text.split(",")) if text else tuple(NAMES)
    for name in names:
        if name not in NAMES:
            raise ValueError(f"Unknown algorithm: {name!r}{did_you_mean(name, NAMES)} There are: {', '.join(NAMES)}.")
    return names


def syntoken_plan(options: StudyOptions) -> ComparisonPlan:
    """Three columns of the convex task; in the preset small with few points."""
    return ComparisonPlan(
        {label: TaskSpec("syntoken", settings=settings) for label, settings in SYNTOKEN.items()},
        algorithms=tuple(NAMES),
        space="regression",
        budget=20 if options.small else 64,
        run={"weights": "samples"},
    )


def philosopher_plan(options: StudyOptions) -> ComparisonPlan:
    """One node for every author."""
    given = {"tokenizer": options.tokenizer, "data": options.data}
    settings = {key: value for key, value in given.items() if value is not None}
    return ComparisonPlan(
        {PHILOSOPHER: TaskSpec("philosopher", options.preset or "paper", settings)},
        algorithms=tuple(NAMES),
        space="scratch",
        **({**FEW_POINTS, "budget": 3, "seeds": (0,)} if options.small else {"budget": 20}),
        run={"nodes": 0},
    )


def report(results: Comparison, judged: bool = True) -> str:
    """The study as a page."""
    lines = [
        "# Federated baselines where nodes differ",
        "",
        f"{seeds_text(results.plan).capitalize()}; less is better. Over FedAvg: the ratio of the metric to that of "
        "avg-sgd, seed by seed, with its bootstrap interval of 95 % over all comparisons of a table.",
        "",
    ]
    for column in results.plan.columns:
        metric = results.plan.columns[column].build().defaults.metric
        assert metric is not None
        lines += [f"## {column}", "", *_table(results, column, metric, judged), ""]
    lines += [] if judged else [UNJUDGED, ""]
    differences = [
        "FedProx is avg-sgd with the gradient of mu/2 |x - start|^2 in every local step; mu was searched with the "
        "rate, within as many points as the others had.",
    ]
    return "\n".join([*lines, *methods_section(results, differences)])


def _table(results: Comparison, column: str, metric: str, judged: bool) -> list[str]:
    scores = results.scores(column, metric, log=True)
    rows = []
    for name in sorted(results.plan.algorithms, key=lambda name: _mean(results, column, name, metric)):
        known = NAMES.get(name)
        values = mean_and_deviation(results.values(column, name, metric), 4)
        rows.append([f"{name} ({known})" if known else name, values, *(_over(scores, name) if judged else ("–", "–"))])
    return markdown_table(["algorithm", metric, "over FedAvg", "verdict"], rows, "lrrl")


def _mean(results: Comparison, column: str, name: str, metric: str) -> float:
    mean = results.mean(column, name, metric)
    return mean if math.isfinite(mean) else math.inf


def _over(scores: Mapping[str, Sequence[float]], name: str) -> tuple[str, str]:
    """The ratio to FedAvg with its interval, and what it decides."""
    if name == REFERENCE or REFERENCE not in scores:
        return "–", "–"
    gap = difference(scores[name], scores[REFERENCE], len(scores) - 1)
    if gap is None:
        return "–", "cannot tell"
    middle, low, high = (math.exp(-number) for number in (gap.mean, gap.high, gap.low))
    verdict = "better" if gap.low > 0 else "worse" if gap.high < 0 else "cannot tell"
    return f"{middle:.3g} ({low:.3g} to {high:.3g})", verdict
