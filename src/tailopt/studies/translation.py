"""The translation table: T5 over three nodes, avg-sgd, avg-l2clip, bi2clip and adam2; claim 9.

The paper's data are TED talks (IWSLT 2017) and News Commentary. A folder of files may hold stand-ins for them; the
table then names them, and its numbers do not compare with the paper's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tailopt.arguments import did_you_mean
from tailopt.paper import results as paper_results
from tailopt.studies import claims
from tailopt.studies.comparison import (
    COMPARISON_OPTIONS,
    FEW_POINTS,
    Comparison,
    ComparisonPlan,
    TaskSpec,
    slug,
    with_options,
)
from tailopt.studies.comparison_runs import compare
from tailopt.studies.plots import metric_curves
from tailopt.studies.protocol import LEAST_SEEDS, Claim, Scores, decide
from tailopt.studies.runner import write_results
from tailopt.studies.study import StudyOptions
from tailopt.studies.tables import markdown_table, mean_of_all, methods_section, metric_table, page, seeds_text

SUMMARY = "BLEU and METEOR of a T5 over three nodes; half an hour in the preset small"
OPTIONS = ("task", "preset", "model", "tokenizer", "data", *COMPARISON_OPTIONS)

ALGORITHMS = ("avg-sgd", "avg-l2clip", "bi2clip", "adam2")


@dataclass(frozen=True)
class CorpusFiles:
    """Where the data of a column may be. files: patterns of its file or folder; stand_ins: pattern -> what that is."""

    task: str
    files: tuple[str, ...]
    stand_ins: Mapping[str, str]


CORPORA: Mapping[str, CorpusFiles] = {
    "TED (en-de)": CorpusFiles(
        "ted-en-de", ("*ted*en-de*",), {"*multi30k*": "Multi30k", "*tatoeba*en-de*": "Tatoeba's sentences"}
    ),
    "TED (en-fr)": CorpusFiles(
        "ted-en-fr", ("*ted*en-fr*",), {"*multi30k*": "Multi30k", "*tatoeba*en-fr*": "Tatoeba's sentences"}
    ),
    "NewsComm (en-fr)": CorpusFiles(
        "newscomm-en-fr",
        ("*commentary*en-fr*", "*newscomm*en-fr*"),
        {"*news*en-fr*": "news sets of WMT", "*multi30k*": "Multi30k", "*tatoeba*en-fr*": "Tatoeba's sentences"},
    ),
}


def run(out: Path, options: StudyOptions) -> Path:
    """Run what is not in `out` yet, and write table.md, results.json and translation.png there.

    The preset "paper" is T5-small, three rounds of an epoch, GPU-hours; "small" is a T5 of two layers from scratch,
    three rounds of twenty local steps, BLEU near 0, minutes. `task` names labels such as "TED (en-de), NewsComm
    (en-fr)"; by default all three. `data` is a folder of corpora by their files' names (ted-en-de,
    news-commentary-en-fr, ... or stand-ins such as multi30k.zip), or one corpus for all columns.
    """
    chosen, small = labels(options.task or ""), options.small
    columns, stand_ins = {}, {}
    for label in chosen:
        path, stand_in = located(label, options.data or "")
        overrides = {"pretrained": options.model, "tokenizer": options.tokenizer, "data": path}
        settings: dict[str, Any] = {key: value for key, value in overrides.items() if value}
        if small:
            settings["evaluated"] = 64  # one batch: decoding takes longer than training otherwise
        columns[label] = TaskSpec(f"translation/{CORPORA[label].task}", options.preset or "paper", settings)
        if stand_in:
            stand_ins[label] = stand_in
    plan = ComparisonPlan(
        columns,
        algorithms=ALGORITHMS,
        space="scratch" if small and not options.model else "translation",
        **({**FEW_POINTS, "seeds": (0,)} if small else {"budget": 20}),
        run={"rounds": 3, "local_steps": 20} if small else {},
    )
    plan = with_options(plan, options)
    results = compare(plan, out, options.progress)
    judged = None if options.quick else evaluate_claims(results)
    written = {**results.as_json(), "stand_ins": stand_ins, "claims": judged or []}
    write_results(out, written, report(results, stand_ins, judged), options.command)
    shown = "loss" if small else "bleu"
    title = f"Translation, {plan.nodes(chosen[0])} nodes"
    metric_curves(results, dict.fromkeys(chosen, shown), out / "translation.png", title)
    return out


def labels(task: str) -> list[str]:
    """The labels that a text names, in the table's order; all for none.

    Examples:
        >>> labels("newscomm-en-fr, ted (en-de)")
        ['TED (en-de)', 'NewsComm (en-fr)']
    """
    by_name = {slug(label): label for label in CORPORA}
    names = [slug(part) for part in task.split(",") if part.strip()] or list(by_name)
    for name in names:
        if name not in by_name:
            raise ValueError(
                f"Unknown task: {name!r}{did_you_mean(name, CORPORA)} Need some of {', '.join(CORPORA)}, with commas."
            )
    return [label for name, label in by_name.items() if name in names]


def located(label: str, data: str) -> tuple[str, str]:
    """Where the data of a column are ("" for their public name), and what they are where they are a stand-in."""
    folder = Path(data).expanduser()
    if not data or not folder.is_dir():
        return data, Path(data).name if data else ""
    entries = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    for pattern, stand_in in (*((p, "") for p in CORPORA[label].files), *CORPORA[label].stand_ins.items()):
        for path in entries:
            if path.match(pattern):
                return str(path), stand_in
    return data, folder.name  # one corpus for all columns


def metrics_of(results: Comparison, label: str) -> list[str]:
    """bleu, the METEOR that could be computed, and the loss."""
    for cell in results.cells:
        for run in cell.whole_runs:
            if cell.column == label:
                return [*(run.metrics or ())]
    return ["bleu", "loss"]


def averages(results: Comparison, name: str) -> list[float]:
    """Seed by seed, the mean of all BLEU and METEOR numbers of a row, as the paper's average."""
    return mean_of_all(
        results.values(label, name, metric)
        for label in results.plan.columns
        for metric in metrics_of(results, label)
        if metric != "loss"
    )


def evaluate_claims(results: Comparison) -> list[Claim]:
    """Claim 9, by the average over everything that was run, seed by seed."""
    names = list(results.plan.algorithms)
    scores = {name: averages(results, name) for name in names}
    average = {name: statistics.fmean(numbers) for name, numbers in scores.items()}
    ranked = sorted(names, key=lambda name: -average[name] if not math.isnan(average[name]) else math.inf)
    figures = ", ".join(f"{name} {average[name]:.2f}" for name in ranked)
    figures = f"mean of all BLEU and METEOR numbers: {figures}; the paper's lie within 2.33"
    others = [name for name in ALGORITHMS if name != "bi2clip"]
    undecided = _why_undecided(results, scores)
    if undecided:
        return [decide(9, claims.TEXTS[9], None, f"{figures}; {undecided}")]
    margins = claims.margins_text(scores, [("bi2clip", other) for other in others])
    return [decide(9, claims.TEXTS[9], claims.beats_all(scores, "bi2clip", others), f"{figures}; {margins}")]


def _why_undecided(results: Comparison, scores: Scores) -> str:
    """Why the averages cannot decide claim 9; empty where they can."""
    if not {*ALGORITHMS} <= scores.keys():
        return "not all four were run"
    if len(results.plan.seeds) < LEAST_SEEDS:
        return f"fewer than {LEAST_SEEDS} seeds do not tell a difference from chance"
    bleu = [results.mean(label, name, "bleu") for label in results.plan.columns for name in scores]
    if not max(bleu) >= 1:
        return "BLEU is below 1 everywhere, so nothing is translated yet"
    return ""


def report(results: Comparison, stand_ins: Mapping[str, str], judged: Sequence[Claim] | None) -> str:
    """The study as a page."""
    printed = paper_results("translation")["results"]

    def paper(label: str, name: str, metric: str) -> float | None:
        value = printed.get(name, {}).get(CORPORA[label].task, {}).get(metric)
        return None if value is None else float(value)

    rows = [
        [
            name,
            f"{statistics.fmean(averages(results, name)):.2f}",
            f"{printed[name]['average']:g}" if name in printed else "",
        ]
        for name in results.plan.algorithms
    ]
    body = [
        f"Validation: {seeds_text(results.plan)} / the paper's.",
        "",
        *metric_table(results, {label: metrics_of(results, label) for label in results.plan.columns}, paper),
        "",
        *markdown_table(["algorithm", "mean of all BLEU and METEOR", "paper, of three data sets"], rows, "lr"),
    ]
    return page("Translation", [*body, "", *methods_section(results, differences(results, stand_ins))], judged)


def differences(results: Comparison, stand_ins: Mapping[str, str]) -> list[str]:
    """What differs from the paper, or is not stated there."""
    plan = results.plan
    lines = [
        f"{label}: stand-in, {what} instead of the paper's data; its numbers do not compare."
        for label, what in stand_ins.items()
    ]
    label = next(iter(plan.columns))
    first: Any = plan.columns[label].build()
    lines.append(f"{plan.length(label)}, {first.length} tokens; the paper names none of these.")
    if not first.pretrained:
        limits = f"the {first.pieces:,} most frequent pieces" if first.pieces else "all pieces"
        lines.append(
            f"A T5 of {first.layers} layers, {first.width} wide, from scratch, with {limits} of T5's tokenizer; the "
            f"paper fine-tuned a pretrained T5. {first.limit or 'All'} training pairs, {first.evaluated or 'all'} "
            f"evaluated; tuned by {first.defaults.metric}."
        )
    lines.append(
        f"BLEU: sacrebleu, {first.signature}; greedy decoding. METEOR: NLTK's; `meteor_exact_stem` is NLTK's without "
        "WordNet's synonyms. The paper names neither its implementations nor the split it reports."
    )
    losses = [results.mean(label, name, "loss") for label in plan.columns for name in plan.algorithms]
    lines.append(f"The loss is the mean cross-entropy of a target's token; it ends between {_range(losses)}.")
    return lines


def _range(numbers: Sequence[float]) -> str:
    finite = [number for number in numbers if math.isfinite(number)]
    return f"{min(finite):.2f} and {max(finite):.2f}" if finite else "no finite numbers"
