"""Language models on data that differ between nodes: Shakespeare by role, Philosopher by work; claim 10.

Perplexity is exp of the mean negative log-likelihood of a predicted token, padding left out. The paper's figures can
only be reached with padding counted in, so that number stands beside ours for comparison.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tailopt.paper import results
from tailopt.studies.claims import Claim, judged
from tailopt.studies.study import StudyOptions
from tailopt.studies.tuned import (
    COMPARISON_OPTIONS,
    Column,
    Plan,
    compare,
    curves,
    finished,
    how,
    mean,
    over_seeds,
    page,
    table,
    with_options,
)

SUMMARY = "language models on Shakespeare's roles and philosophers' works; 3 and 12 minutes in the preset small"
OPTIONS = ("task", "preset", "model", "tokenizer", "data", *COMPARISON_OPTIONS)

LABELS = {"Shakespeare": "shakespeare", "Philosopher": "philosopher"}
ALGORITHMS = ("avg-sgd", "avg-l2clip", "avg-biclip", "rmsprop-biclip", "bi2clip", "adam2")
METRICS = ("perplexity", "perplexity_with_padding")


def run(out: Path, options: StudyOptions) -> Path:
    """Run what is not in `out` yet, and write table.md, results.json and federated.png there.

    Args:
        task: "Shakespeare" or "Philosopher".
        preset: "paper" or "small".
        model, tokenizer, data: folders or public names instead of the preset's; an empty tokenizer takes bytes.
    """
    by_plain = {label.lower(): label for label in LABELS}
    task, preset, small = options.task or "Philosopher", options.preset or "paper", options.small
    if task.lower() not in by_plain:
        raise ValueError(f"Unknown task: {task!r}; need one of {', '.join(LABELS)}.")
    label = by_plain[task.lower()]
    given = {"pretrained": options.model, "tokenizer": options.tokenizer, "data": options.data}
    over = {key: value for key, value in given.items() if value is not None}
    plan = Plan(
        {label: Column(LABELS[label], preset, over)},
        algorithms=ALGORITHMS,
        space="fine-tuning" if label == "Shakespeare" and not small else "scratch",
        budget=3 if small else 8,
        seeds=(0,) if small else (0, 1, 2),
        run={"nodes": 0},  # as many as there are sources
    )
    plan = with_options(plan, options)
    found = compare(plan, out, options.progress)
    claims = None if options.quick else judge(found, label)
    finished(out, found, claims, report(found, label, claims))
    curves(found, {label: "perplexity"}, out / "federated.png", f"{label}: perplexity by round")
    return out


def judge(found: Mapping[str, Any], label: str) -> list[Claim]:
    """Claim 10: avg-biclip first, adaptivity or clipping at both levels behind it."""
    ran = found["plan"]["algorithms"]
    reached = {name: mean(found, label, name, "perplexity") for name in ran}
    ranked = sorted(ran, key=lambda name: reached[name] if not math.isnan(reached[name]) else math.inf)
    said = ", ".join(f"{name} {reached[name]:.4g}" for name in ranked)
    enough = len(found["plan"]["seeds"]) > 1 and {"avg-biclip", "adam2", "bi2clip", "rmsprop-biclip"} <= set(ran)
    holds = ranked[0] == "avg-biclip" if enough else None
    text = "Where nodes differ, avg-biclip is best, and adaptivity at both levels is worse."
    return [judged(10, text, holds, f"perplexity on {label}: {said}")]


def report(found: Mapping[str, Any], label: str, claims: Sequence[Claim] | None) -> str:
    """The study as a page."""
    printed = results(LABELS[label])["results"]

    def paper(column: str, name: str, metric: str) -> float | None:
        # the paper's numbers look like padding counted in, so they stand beside that
        return float(printed[name]) if metric == "perplexity_with_padding" and name in printed else None

    body = [f"{label}: {over_seeds(found)} / the paper's.", "", *table(found, {label: METRICS}, paper, 4), ""]
    differences = [
        "The paper's perplexities, 1.6 to 2.6, are not reachable by predicted tokens alone; they look like padding "
        "counted in, and stand beside that number.",
    ]
    return page(f"Language modelling on nodes that differ: {label}", [*body, *how(found, differences)], claims)
