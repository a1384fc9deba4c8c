"""Convergence by round on one GLUE task: what L2 clipping, adaptivity and BiClip each do; the paper's is QNLI.

(a) L2 clipping    avg-sgd, avg-l2clip, adam-sgd, adam-l2clip
(b) adaptivity     avg-sgd, avg-adam, adam2, adaptive outer optimizers over SGD
(c) BiClip         avg-biclip, adam-biclip, bi2clip, adam2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tailopt.figures.labels import name_line_ends, named
from tailopt.figures.style import band_text
from tailopt.studies import claims
from tailopt.studies.comparison import COMPARISON_OPTIONS, Comparison
from tailopt.studies.comparison_runs import compare
from tailopt.studies.glue import METRICS, glue_plan, labels, task_spec
from tailopt.studies.plots import algorithm_line, baseline, finish, panels
from tailopt.studies.protocol import Claim, decide
from tailopt.studies.runner import write_results
from tailopt.studies.study import StudyOptions
from tailopt.studies.tables import methods_section, metric_table, page, seeds_text

SUMMARY = "convergence on a GLUE task: L2 clipping, adaptivity, BiClip; twenty minutes in the preset small"
OPTIONS = ("task", "preset", "model", "data", *COMPARISON_OPTIONS)

PANELS: Mapping[str, Sequence[str]] = {
    "(a) L2 clipping": ("avg-sgd", "avg-l2clip", "adam-sgd", "adam-l2clip"),
    "(b) adaptivity": ("avg-sgd", "avg-adam", "adam2", "adagrad-sgd", "rmsprop-sgd", "adam-sgd"),
    "(c) BiClip": ("avg-biclip", "adam-biclip", "bi2clip", "adam2"),
}
ALL = tuple(dict.fromkeys(name for names in PANELS.values() for name in names))
SMALL = ("avg-sgd", "avg-l2clip", "avg-adam", "adam2", "avg-biclip", "bi2clip")  # two in each panel at least


def run(out: Path, options: StudyOptions) -> Path:
    """Run what is not in `out` yet, and write table.md, results.json and curves.png there; presets as in `glue`."""
    (label,) = labels(options.task or "QNLI")[:1]
    plan = glue_plan({label: task_spec(label, options)}, options, SMALL if options.small else ALL)
    results = compare(plan, out, options.progress)
    judged = None if options.quick else evaluate_claims(results, label)
    body = [f"{label}, validation, percent: {seeds_text(plan)}.", "", *metric_table(results, METRICS), ""]
    stand_in = [] if label == "QNLI" else [f"The paper's curves are on QNLI; these are on {label}."]
    text = page("Convergence", [*body, *methods_section(results, stand_in)], judged)
    write_results(out, {**results.as_json(), "claims": judged or []}, text, options.command)
    draw(results, label, out / "curves.png")
    return out


def evaluate_claims(results: Comparison, label: str) -> list[Claim]:
    """Claim 7, on one task."""
    metric = METRICS[label][0]
    scores = results.scores(label, metric)
    figures = ", ".join(f"{name} {results.mean(label, name, metric):.2f}" for name in results.plan.algorithms)
    return [decide(7, claims.TEXTS[7], claims.best_needs_more_than_sgd(scores), f"{label}: {figures}")]


def draw(results: Comparison, label: str, path: Path) -> None:
    """The three panels, on one scale."""
    metric = METRICS[label][0]
    figure, axes = panels(len(PANELS), height=3.6, sharey=True)
    for axis, (title, names) in zip(axes, PANELS.items(), strict=True):
        for cell in results.cells:
            if cell.algorithm in names:
                algorithm_line(axis, cell, metric)
        baseline(axis, results, label, metric)
        named(axis, title)
        axis.set_xlabel("round")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.25, linewidth=0.5)
    axes[0].set_ylabel(f"{metric}, percent")
    name_line_ends(axes)
    finish(figure, f"{label}, validation by round: {band_text(len(results.plan.seeds))}", path)
