"""Convergence by round on one GLUE task: what L2 clipping, adaptivity and BiClip each do; the paper's is QNLI.

(a) L2 clipping    avg-sgd, avg-l2clip, adam-sgd, adam-l2clip
(b) adaptivity     avg-sgd, avg-adam, adam2, adaptive outer optimizers over SGD
(c) BiClip         avg-biclip, adam-biclip, bi2clip, adam2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tailopt.figures.style import pyplot
from tailopt.studies.claims import Claim, judged
from tailopt.studies.glue import FEWER, METRICS, labels
from tailopt.studies.study import StudyOptions
from tailopt.studies.tuned import (
    COMPARISON_OPTIONS,
    Column,
    Plan,
    compare,
    finished,
    how,
    line,
    mean,
    over_seeds,
    page,
    slug,
    table,
    with_options,
)

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
    """Run what is not in `out` yet, and write table.md, results.json and curves.png there; options as in `glue.run`."""
    (label,) = labels(options.task or "QNLI")[:1]
    preset, small = options.preset or "paper", options.small
    over = {key: value for key, value in (("pretrained", options.model), ("data", options.data)) if value}
    plan = Plan(
        {label: Column(f"glue/{slug(label).replace('-', '')}", preset, over)},
        algorithms=SMALL if small else ALL,
        budget=2 if small else 8,
        seeds=(0,) if small else (0, 1, 2),
        run=FEWER if small else {},
        tuning={"rounds": 1} if small else {"rounds": 3},
    )
    plan = with_options(plan, options)
    found = compare(plan, out, options.progress)
    claims = None if options.quick else judge(found, label)
    body = [f"{label}, validation, percent: {over_seeds(found)}.", "", *table(found, METRICS), ""]
    stand_in = [] if label == "QNLI" else [f"The paper's curves are on QNLI; these are on {label}."]
    finished(out, found, claims, page("Convergence", [*body, *how(found, stand_in)], claims))
    draw(found, label, out / "curves.png")
    return out


def judge(found: Mapping[str, Any], label: str) -> list[Claim]:
    """Claim 7, on one task: SGD inside stays behind whatever is outside."""
    ran, metric = found["plan"]["algorithms"], METRICS[label][0]
    plain = [name for name in ran if name.endswith("-sgd")]
    others = [name for name in ran if name in ("avg-adam", "adam2", "avg-biclip", "adam-biclip", "bi2clip")]
    said = ", ".join(f"{name} {mean(found, label, name, metric):.2f}" for name in ran)
    holds = None
    if plain and others and len(found["plan"]["seeds"]) > 1:
        best = max(mean(found, label, name, metric) for name in plain)
        holds = all(mean(found, label, name, metric) > best for name in others)
    text = "SGD inside stays behind; the best averages need adaptivity or BiClip inside."
    return [judged(7, text, holds, f"{label}: {said}")]


def draw(found: Mapping[str, Any], label: str, path: Path) -> None:
    """The three panels, on one scale."""
    plt, metric = pyplot(), METRICS[label][0]
    figure, axes = plt.subplots(1, len(PANELS), figsize=(11, 4.2), sharey=True, layout="constrained")
    for axis, (title, names) in zip(axes, PANELS.items(), strict=True):
        for cell in found["cells"]:
            if cell["algorithm"] in names:
                line(axis, cell, metric)
        axis.set(title=title, xlabel="round")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.25, linewidth=0.5)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3)
    axes[0].set_ylabel(f"{label} {metric}, percent")
    n = len(found["plan"]["seeds"])
    figure.suptitle(f"{label}, validation by round, {f'median of {n} seeds' if n > 1 else 'one seed'}", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)
