"""The convex study: linear regression under light and heavy-tailed noise, all algorithms, tuned alike.

Data, model and metric are those of `tasks.synthetic`; the metric is |w - w*|. Every algorithm gets the same number of
random settings on the tuning seeds (least mean log error, chosen for each horizon by itself), and is reported on other
seeds. Settings and learning rates are constant, inner state starts again in every round (diloco keeps it), w starts at
0, and the last iterate is reported. Least squares and Huber's estimate on all data together are the lines to compare
with: the first is where avg-sgd must end, the second what robust estimation can reach.

The headline is run again by `tailopt.simulate`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tailopt.algorithms import ALGORITHMS
from tailopt.figures.style import band, look
from tailopt.progress import Progress
from tailopt.studies.convex_cells import (
    FEATURES,
    HEADLINE,
    HEAVY,
    QUICK,
    SPACE,
    CellResult,
    Check,
    ConvexCell,
    ConvexPlan,
    reference_errors,
    run_cells,
    run_checks,
)
from tailopt.studies.plots import legend_below, panels, save
from tailopt.studies.protocol import Claim, claim_lines, decide
from tailopt.studies.runner import as_json, write_results
from tailopt.studies.study import StudyOptions
from tailopt.studies.tables import markdown_table, ranges_lines, with_range

SUMMARY = "linear regression under light and heavy-tailed noise, all algorithms, tuned alike; an hour"
OPTIONS: tuple[str, ...] = ()

FIGURE_1 = ("no noise", "Gaussian, scale 1", "Gaussian, scale 3", "Student-t, df 1.5")
FAMILY = ("avg-biclip", "adam-biclip", "rmsprop-biclip", "adagrad-biclip", "bi2clip")
REFERENCES = ("least squares", "Huber")


@dataclass(frozen=True)
class ConvexResults:
    """Everything that was measured.

    references: (features, noise) -> the errors of least squares and of Huber's estimate, by fresh seed.
    """

    plan: ConvexPlan
    cells: Mapping[ConvexCell, CellResult]
    references: Mapping[tuple[str, str], Mapping[str, list[float]]]
    checks: Sequence[Check]

    def errors(self, features: str, noise: str, name: str, horizon: int | None = None) -> list[float]:
        """The errors of the fresh seeds at a horizon, the longest by default."""
        return self.cells[ConvexCell(features, noise, name)].at(horizon or max(self.plan.horizons)).errors

    def ratios(self, features: str, noise: str, name: str, other: str) -> list[float]:
        """The error of one algorithm over that of another at the longest horizon, seed by seed."""
        pairs = zip(self.errors(features, noise, name), self.errors(features, noise, other), strict=True)
        return [ours / theirs for ours, theirs in pairs]

    def as_json(self) -> dict[str, Any]:
        """As results.json has it."""
        return {
            "plan": as_json(self.plan),
            "cells": as_json(list(self.cells.values())),
            "references": {f"{features}, {noise}": dict(e) for (features, noise), e in self.references.items()},
            "checks": [check.as_json() for check in self.checks],
        }


def run(out: Path, options: StudyOptions) -> Path:
    """Run what is missing in `out`, and write table.md, results.json and the figures there."""
    plan = QUICK if options.quick else ConvexPlan()
    with Progress(options.progress) as bar:
        cells = run_cells(plan, out, bar)
        checks = run_checks(plan, cells, out, bar)
    references = {(f, n): reference_errors(plan, f, n) for f in plan.features for n in plan.noises}
    results = ConvexResults(plan, cells, references, checks)
    claims = None if options.quick else list(evaluate_claims(results))
    write_results(out, {**results.as_json(), "claims": claims or []}, report(results, claims), indent=None)
    draw(results, out)
    return out


# --- Claims: by medians over the fresh seeds at the longest horizon ---------------------------------------------------


@dataclass(frozen=True)
class _Panel:
    """The median errors of one kind of features and noise."""

    medians: Mapping[str, float]

    @classmethod
    def of(cls, results: ConvexResults, noise: str = HEAVY, features: str = "syntoken") -> _Panel:
        names = [c.algorithm for c in results.cells if (c.features, c.noise) == (features, noise)]
        return cls({name: statistics.median(results.errors(features, noise, name)) for name in names})

    def has(self, names: Sequence[str]) -> bool:
        return self.medians.keys() >= set(names)

    def ranked(self) -> list[str]:
        return sorted(self.medians, key=lambda name: self.medians[name])

    def text(self, names: Sequence[str]) -> str:
        return ", ".join(f"{name} {self.medians[name]:.3g}" for name in names)


def evaluate_claims(results: ConvexResults) -> Iterator[Claim]:
    """The paper's claims that these cells can decide."""
    heavy = _Panel.of(results)
    if all(_Panel.of(results, noise).has(HEADLINE) for noise in FIGURE_1):
        yield _claim_1(_Panel.of(results, "no noise"), heavy)
    if heavy.has(HEADLINE):
        yield _claim_2(results, heavy)
    yield from _claim_3(results)
    for number, features, text, clean_lead, noisy_lead in (
        (
            4,
            "gaussian",
            "On Gaussian features avg-adam, avg-sgd and rmsprop-biclip lead without noise; with noise rmsprop- and "
            "adam-biclip lead, and avg-sgd is among the worst.",
            ("avg-adam", "avg-sgd", "rmsprop-biclip"),
            ("rmsprop-biclip", "adam-biclip"),
        ),
        (
            5,
            "syntoken",
            "On SynToken avg-sgd is fastest without noise and avg-adam ends better; with noise adam- and "
            "rmsprop-biclip are best.",
            ("avg-adam", "avg-sgd"),
            ("adam-biclip", "rmsprop-biclip"),
        ),
    ):
        clean, noisy = (_Panel.of(results, noise, features) for noise in ("no noise", HEAVY))
        if clean.has(tuple(ALGORITHMS)) and noisy.has(tuple(ALGORITHMS)):
            holds, figures = _leaders(clean, noisy, clean_lead, noisy_lead)
            yield decide(number, text, holds, figures)
    adaptive = ("adam-sgd", "rmsprop-sgd", "adagrad-sgd")
    if heavy.has((*adaptive, *HEADLINE)):
        poor = all(heavy.medians[name] > 1.5 * heavy.medians[inner] for name in adaptive for inner in HEADLINE[1:])
        text = "Under noise an adaptive outer optimizer over SGD is poor: the inner one decides."
        yield decide(6, text, poor, heavy.text((*adaptive, *HEADLINE)))


def _claim_1(clean: _Panel, heavy: _Panel) -> Claim:
    errors = [clean.medians[name] for name in HEADLINE]
    helped = all(heavy.medians[name] < heavy.medians["avg-sgd"] / 1.5 for name in HEADLINE[1:])
    return decide(
        1,
        "Without noise avg-sgd does well; with heavier tails it deteriorates, clipping and adaptivity help.",
        helped and (errors[0] <= 2 * min(errors) or errors[0] < 1e-3),
        f"no noise: {clean.text(HEADLINE)}; {HEAVY}: {heavy.text(HEADLINE)}",
    )


def _claim_2(results: ConvexResults, heavy: _Panel) -> Claim:
    better = all(
        statistics.median(results.ratios("syntoken", HEAVY, "avg-biclip", other)) < 1 for other in HEADLINE[:3]
    )
    text = "BiClip as inner optimizer beats Adam, L2Clip and SGD under heavy-tailed noise."
    return decide(2, text, better, heavy.text(HEADLINE))


def _claim_3(results: ConvexResults) -> Iterator[Claim]:
    """Every panel that has both kinds of clipping counts; within 2 % neither is above."""
    lost, count = [], 0
    for features in results.plan.features:
        for noise in results.plan.noises:
            panel = _Panel.of(results, noise, features)
            if not panel.has(("avg-biclip", "avg-biclip-l2", "avg-l2clip")):
                continue
            count += 1
            by_norm = min(panel.medians["avg-l2clip"], panel.medians["avg-biclip-l2"])
            if panel.medians["avg-biclip"] > 1.02 * by_norm:
                lost.append(f"{FEATURES[features]}, {noise} ({panel.text(('avg-biclip', 'avg-l2clip'))})")
    if count:
        figures = f"{count - len(lost)} of {count} panels" + (f"; not in {'; '.join(lost)}" if lost else "")
        yield decide(3, "Coordinate-wise BiClip is always above L2 clipping.", not lost, figures)


def _leaders(clean: _Panel, noisy: _Panel, clean_lead: Sequence[str], noisy_lead: Sequence[str]) -> tuple[bool, str]:
    """Whether some lead without noise, others with noise by at most 10 %, and avg-sgd is then among the worst."""
    order, quiet = noisy.ranked(), clean.ranked()
    near = all(noisy.medians[name] <= 1.1 * noisy.medians[order[0]] for name in noisy_lead)
    holds = near and "avg-sgd" in order[-6:] and all(clean.medians[name] < 1e-2 for name in clean_lead)
    figures = (
        f"no noise, first five: {clean.text(quiet[:5])}; {HEAVY}, first five: {noisy.text(order[:5])}; "
        f"avg-sgd is {order.index('avg-sgd') + 1}. of {len(order)}"
    )
    return holds, figures


# --- The page and the figures -----------------------------------------------------------------------------------------


def report(results: ConvexResults, claims: Sequence[Claim] | None) -> str:
    """The study as a page: tables by data and horizon, how it was run, and the claims."""
    plan = results.plan
    lines = ["# The convex study", "", "Distance to the true weights: median of the fresh seeds [least, most].", ""]
    for features in plan.features:
        for horizon in plan.horizons:
            lines += [f"## {FEATURES[features]}, {horizon} rounds", "", *_errors_table(results, features, horizon), ""]
    if results.checks:
        lines += _ratios_section(results)
    lines += [*_methods_section(plan), "## Claims", "", *claim_lines(claims)]
    return "\n".join(lines) + "\n"


def _errors_table(results: ConvexResults, features: str, horizon: int) -> list[str]:
    plan = results.plan
    rows = {name: [results.errors(features, n, name, horizon) for n in plan.noises] for name in plan.algorithms}
    for name in REFERENCES:
        rows[f"*{name}, all data*"] = [results.references[features, noise][name] for noise in plan.noises]
    texts = [[name, *(with_range(errors, limits="[{}, {}]") for errors in ends)] for name, ends in rows.items()]
    return markdown_table(["algorithm", *plan.noises], texts)


def _ratios_section(results: ConvexResults) -> list[str]:
    rows = []
    for name in (name for name in FAMILY if name in results.plan.algorithms):
        for other in ("avg-adam", "avg-l2clip", "avg-sgd"):
            ratios = results.ratios("syntoken", HEAVY, name, other)
            rows.append([name, other, *(f"{r:.3f}" for r in (statistics.median(ratios), min(ratios), max(ratios)))])
    difference = max(check.difference for check in results.checks)
    names = ", ".join(check.algorithm for check in results.checks)
    return [
        f"## Under {HEAVY}, {max(results.plan.horizons)} rounds, seed by seed",
        "",
        *markdown_table(["error of", "over that of", "median ratio", "least", "most"], rows),
        "",
        f"Run again by `tailopt.simulate` ({names}): errors differ by at most {difference:.1e} of themselves.",
        "",
    ]


def _methods_section(plan: ConvexPlan) -> list[str]:
    return [
        "## How",
        "",
        f"{plan.samples} samples of dimension {plan.dimension}, dealt out to {plan.nodes} nodes at random; "
        f"noise drawn once, before the split; batch {plan.batch_size}, {plan.local_steps} local steps per round, "
        "all nodes in every round. Loss: half the mean squared error. w starts at 0; the last iterate is reported, "
        "without averaging. Learning rates and thresholds are constant. Inner state is new in every round, but "
        "for diloco, which keeps it; adam2 sends the outer second moment to the nodes; outer Adam is without bias "
        "correction.",
        "",
        f"Every algorithm was tuned by {plan.budget} random settings, for each horizon by itself, on seeds "
        f"{', '.join(map(str, plan.tuning))} (least mean logarithm of the error), and is reported on seeds "
        f"{plan.fresh[0]} to {plan.fresh[-1]}. The ranges, searched in the logarithm:",
        "",
        *ranges_lines(SPACE),
        "",
        "move = learning rate * upper threshold; share = lower / upper threshold.",
        "",
    ]


def draw(results: ConvexResults, out: Path) -> None:
    """The error by round: one figure for each kind of features."""
    plan, horizon = results.plan, max(results.plan.horizons)
    for features in plan.features:
        figure, axes = panels(len(plan.noises), width=3.1, height=2.9, extra=0.9)
        for axis, noise in zip(axes, plan.noises, strict=True):
            for name in plan.algorithms:
                curves = results.cells[ConvexCell(features, noise, name)].at(horizon).curves
                band(axis, range(1, horizon + 1), curves, **look(name))
            for name, dashes in zip(REFERENCES, ((0, (4, 3)), (0, (1, 3))), strict=True):
                if noise != "no noise":
                    median = statistics.median(results.references[features, noise][name])
                    axis.axhline(median, color="black", linestyle=dashes, linewidth=0.9)
            axis.set(title=noise, xlabel="round", yscale="log")
            axis.grid(alpha=0.25, which="both", linewidth=0.5)
        axes[0].set_ylabel("distance to the true weights")
        legend_below(figure, axes[0], 6)
        text = f"{FEATURES[features]}, {plan.nodes} nodes: median and quartiles of {len(plan.fresh)} seeds"
        figure.suptitle(text + "; black: least squares (dashed) and Huber (dotted) on all data", fontsize=10)
        save(figure, out / f"{features}.png")
