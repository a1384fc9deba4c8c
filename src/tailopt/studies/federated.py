"""Language models on data that differ between nodes: Shakespeare by role, Philosopher by work; claim 10.

Perplexity is exp of the mean negative log-likelihood of a predicted token, padding left out. The paper's figures can
only be reached with padding counted in, so that number is shown beside ours for comparison.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from tailopt.arguments import did_you_mean
from tailopt.paper import results as paper_results
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
from tailopt.studies.plots import metric_curves
from tailopt.studies.protocol import Claim, decide
from tailopt.studies.runner import write_results
from tailopt.studies.study import StudyOptions
from tailopt.studies.tables import methods_section, metric_table, page, seeds_text

SUMMARY = "language models on Shakespeare's roles and philosophers' works; 3 and 12 minutes in the preset small"
OPTIONS = ("task", "preset", "model", "tokenizer", "data", *COMPARISON_OPTIONS)

LABELS = {"Shakespeare": "shakespeare", "Philosopher": "philosopher"}
ALGORITHMS = ("avg-sgd", "avg-l2clip", "avg-biclip", "rmsprop-biclip", "bi2clip", "adam2")
METRICS = ("perplexity", "perplexity_with_padding")


def run(out: Path, options: StudyOptions) -> Path:
    """Run what is not in `out` yet, and write table.md, results.json and federated.png there.

    `task` is "Philosopher", the default, or "Shakespeare". An empty tokenizer takes bytes.
    """
    by_name = {label.lower(): label for label in LABELS}
    name = options.task or "Philosopher"
    if name.lower() not in by_name:
        raise ValueError(f"Unknown task: {name!r}{did_you_mean(name, LABELS)} Need one of {', '.join(LABELS)}.")
    label, small = by_name[name.lower()], options.small
    overrides = {"pretrained": options.model, "tokenizer": options.tokenizer, "data": options.data}
    settings = {key: value for key, value in overrides.items() if value is not None}
    plan = ComparisonPlan(
        {label: TaskSpec(LABELS[label], options.preset or "paper", settings)},
        algorithms=ALGORITHMS,
        space="fine-tuning" if label == "Shakespeare" and not small else "scratch",
        **({**FEW_POINTS, "budget": 3, "seeds": (0,)} if small else {"budget": 20}),
        run={"nodes": 0},  # as many as there are roles or works
    )
    results = compare(with_options(plan, options), out, options.progress)
    judged = None if options.quick else evaluate_claims(results, label)
    text = report(results, label, judged)
    write_results(out, {**results.as_json(), "claims": judged or []}, text, options.command)
    metric_curves(results, {label: "perplexity"}, out / "federated.png", "Nodes that differ")
    return out


def evaluate_claims(results: Comparison, label: str) -> list[Claim]:
    """Claim 10: avg-biclip is ahead of all others that were run, by the perplexity seed by seed."""
    names = results.plan.algorithms
    reached = {name: results.mean(label, name, "perplexity") for name in names}
    ranked = sorted(names, key=lambda name: reached[name] if not math.isnan(reached[name]) else math.inf)
    figures = ", ".join(f"{name} {reached[name]:.4g}" for name in ranked)
    enough = {"avg-biclip", "adam2", "bi2clip", "rmsprop-biclip"} <= set(names)
    scores = results.scores(label, "perplexity", log=True)
    others = [name for name in names if name != "avg-biclip"]
    holds = claims.beats_all(scores, "avg-biclip", others) if enough else None
    return [decide(10, claims.TEXTS[10], holds, f"perplexity on {label}: {figures}")]


def report(results: Comparison, label: str, judged: Sequence[Claim] | None) -> str:
    """The study as a page."""
    printed = paper_results(LABELS[label])["results"]

    def paper(column: str, name: str, metric: str) -> float | None:
        # the paper's numbers look like padding counted in, so they are shown beside that
        return float(printed[name]) if metric == "perplexity_with_padding" and name in printed else None

    table = metric_table(results, {label: METRICS}, paper, 4)
    body = [f"{label}: {seeds_text(results.plan)} / the paper's.", "", *table, ""]
    differences = [
        "The paper's perplexities, 1.6 to 2.6, are not reachable by predicted tokens alone; they look like padding "
        "counted in, and stand beside that number.",
    ]
    title = f"Language modelling on nodes that differ: {label}"
    return page(title, [*body, *methods_section(results, differences)], judged)
