"""The translation table: T5 over three nodes, avg-sgd, avg-l2clip, bi2clip and adam2; claim 9.

The paper's data are TED talks (IWSLT 2017) and News Commentary. A folder of files may hold stand-ins for them; the
table then says which, and its numbers do not compare with the paper's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    slug,
    table,
    values,
    with_options,
)

SUMMARY = "BLEU and METEOR of a T5 over three nodes; half an hour in the preset small"
OPTIONS = ("task", "preset", "model", "tokenizer", "data", *COMPARISON_OPTIONS)

ALGORITHMS = ("avg-sgd", "avg-l2clip", "bi2clip", "adam2")


@dataclass(frozen=True)
class Corpus:
    """A column of the table. files: patterns of its file or folder; stand_ins: pattern -> what is found there."""

    task: str
    files: tuple[str, ...]
    stand_ins: Mapping[str, str]


CORPORA: Mapping[str, Corpus] = {
    "TED (en-de)": Corpus(
        "ted-en-de", ("*ted*en-de*",), {"*multi30k*": "Multi30k", "*tatoeba*en-de*": "Tatoeba's sentences"}
    ),
    "TED (en-fr)": Corpus(
        "ted-en-fr", ("*ted*en-fr*",), {"*multi30k*": "Multi30k", "*tatoeba*en-fr*": "Tatoeba's sentences"}
    ),
    "NewsComm (en-fr)": Corpus(
        "newscomm-en-fr",
        ("*commentary*en-fr*", "*newscomm*en-fr*"),
        {"*news*en-fr*": "news sets of WMT", "*multi30k*": "Multi30k", "*tatoeba*en-fr*": "Tatoeba's sentences"},
    ),
}


def run(out: Path, options: StudyOptions) -> Path:
    """Run what is not in `out` yet, and write table.md, results.json and translation.png there.

    Args:
        task: labels with commas, such as "TED (en-de), NewsComm (en-fr)"; empty: all three.
        preset: "paper": T5-small, three rounds of an epoch, GPU-hours; "small": a T5 of two layers from scratch, three
            rounds of twenty local steps, BLEU near 0, minutes.
        model, tokenizer: folders or public names instead of the preset's.
        data: a folder of corpora by their files' names (ted-en-de, news-commentary-en-fr, ... or stand-ins such as
            multi30k.zip), or one corpus for all columns.
    """
    chosen = labels(options.task or "")
    preset, small = options.preset or "paper", options.small
    columns, standing = {}, {}
    for label in chosen:
        path, stand_in = located(label, options.data or "")
        given = {"pretrained": options.model, "tokenizer": options.tokenizer, "data": path}
        over: dict[str, Any] = {key: value for key, value in given.items() if value}
        if small:
            over["evaluated"] = 64  # one batch: decoding takes longer than training otherwise
        columns[label] = Column(f"translation/{CORPORA[label].task}", preset, over)
        if stand_in:
            standing[label] = stand_in
    plan = Plan(
        columns,
        algorithms=ALGORITHMS,
        space="scratch" if small and not options.model else "fine-tuning",
        budget=3 if small else 8,
        seeds=(0,) if small else (0, 1, 2),
        run={"rounds": 3, "local_steps": 20} if small else {},
        tuning={"rounds": 1} if small else {},
    )
    plan = with_options(plan, options)
    found = compare(plan, out, options.progress)
    found["stand_ins"] = standing
    claims = None if options.quick else judge(found)
    finished(out, found, claims, report(found, claims))
    shown = "loss" if small else "bleu"
    title = f"Translation, {plan.nodes(chosen[0])} nodes: validation by round"
    curves(found, dict.fromkeys(chosen, shown), out / "translation.png", title)
    return out


def labels(task: str) -> list[str]:
    """The labels that a text names, in the table's order; all for none.

    Examples:
        >>> labels("newscomm-en-fr, ted (en-de)")
        ['TED (en-de)', 'NewsComm (en-fr)']
    """
    known = {slug(label): label for label in CORPORA}
    asked = [slug(part) for part in task.split(",") if part.strip()] or list(known)
    for part in asked:
        if part not in known:
            raise ValueError(f"Unknown task: {part!r}; need some of {', '.join(CORPORA)}, with commas.")
    return [label for name, label in known.items() if name in asked]


def located(label: str, data: str) -> tuple[str, str]:
    """Where the data of a column are ("" for their public name), and what they are where they stand in for others."""
    folder = Path(data).expanduser()
    if not data or not folder.is_dir():
        return data, Path(data).name if data else ""
    entries = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    for pattern, stand_in in (*((p, "") for p in CORPORA[label].files), *CORPORA[label].stand_ins.items()):
        for path in entries:
            if path.match(pattern):
                return str(path), stand_in
    return data, folder.name  # one corpus for all columns


def measures(found: Mapping[str, Any], label: str) -> list[str]:
    """bleu, the METEOR that could be had, and the loss."""
    for cell in found["cells"]:
        for made in cell["runs"]:
            if cell["column"] == label and made["metrics"]:
                return [*made["metrics"]]
    return ["bleu", "loss"]


def averages(found: Mapping[str, Any], name: str) -> list[float]:
    """Seed by seed, the mean of all BLEU and METEOR numbers of a row, as the paper's average."""
    rows = [
        values(found, label, name, metric)
        for label in found["plan"]["columns"]
        for metric in measures(found, label)
        if metric != "loss"
    ]
    return [statistics.fmean(numbers) for numbers in zip(*rows, strict=True)]


def judge(found: Mapping[str, Any]) -> list[Claim]:
    """Claim 9, by the average over everything that was run; within one standard deviation nothing is told."""
    ran = list(found["plan"]["algorithms"])
    by_seed = {name: averages(found, name) for name in ran}
    average = {name: statistics.fmean(numbers) for name, numbers in by_seed.items()}
    ranked = sorted(ran, key=lambda name: -average[name] if not math.isnan(average[name]) else math.inf)
    said = ", ".join(f"{name} {average[name]:.2f}" for name in ranked)
    text = "bi2clip is above adam2, avg-l2clip and avg-sgd; differences are small."
    figures = f"mean of all BLEU and METEOR numbers: {said}; the paper's lie within 2.33"
    if not {*ALGORITHMS} <= {*ran}:
        return [judged(9, text, None, f"{figures}; not all four were run")]
    seeds = len(found["plan"]["seeds"])
    if seeds < 2:
        return [judged(9, text, None, f"{figures}; one seed does not tell a difference from chance")]
    if not all(map(math.isfinite, average.values())):
        return [judged(9, text, None, f"{figures}; a run broke down")]
    if max(mean(found, label, name, "bleu") for label in found["plan"]["columns"] for name in ran) < 1:
        return [judged(9, text, None, f"{figures}; BLEU is below 1 everywhere, so nothing is translated yet")]
    other = next(name for name in ranked if name != "bi2clip")
    noise = math.hypot(*(statistics.stdev(by_seed[name]) for name in ("bi2clip", other)))
    gap = average["bi2clip"] - average[other]
    holds = None if not abs(gap) > noise else gap > 0
    return [judged(9, text, holds, f"{figures}; bi2clip less {other}: {gap:+.2f}, standard deviation {noise:.2f}")]


def report(found: Mapping[str, Any], claims: Sequence[Claim] | None) -> str:
    """The study as a page."""
    columns = found["plan"]["columns"]
    printed = results("translation")["results"]

    def paper(label: str, name: str, metric: str) -> float | None:
        value = printed.get(name, {}).get(CORPORA[label].task, {}).get(metric)
        return None if value is None else float(value)

    body = [
        f"Validation: {over_seeds(found)} / the paper's.",
        "",
        *table(found, {label: measures(found, label) for label in columns}, paper),
        "",
        "| algorithm | mean of all BLEU and METEOR | paper, of three data sets |",
        "| --- | ---: | ---: |",
    ]
    for name in found["plan"]["algorithms"]:
        there = f"{printed[name]['average']:g}" if name in printed else ""
        body.append(f"| {name} | {statistics.fmean(averages(found, name)):.2f} | {there} |")
    return page("Translation", [*body, "", *how(found, differences(found))], claims)


def differences(found: Mapping[str, Any]) -> list[str]:
    """What is not as in the paper, or not said there."""
    said = [
        f"{label}: stand-in, {what} instead of the paper's data; its numbers do not compare."
        for label, what in found["stand_ins"].items()
    ]
    made = {label: Column(**column).made("validation") for label, column in found["plan"]["columns"].items()}
    first: Any = next(iter(made.values()))
    usual, over = first.defaults, found["plan"]["run"]
    steps = over.get("local_steps", usual.local_steps)
    amount = f"{steps} local steps" if steps else f"{usual.local_epochs} local epochs"
    said.append(
        f"{over.get('nodes', usual.nodes)} nodes, {over.get('rounds', usual.rounds)} rounds of {amount}, batch "
        f"{over.get('batch_size', usual.batch_size)}, {first.length} tokens; the paper names none of these."
    )
    if not first.pretrained:
        limits = f"the {first.pieces:,} most frequent pieces" if first.pieces else "all pieces"
        said.append(
            f"A T5 of {first.layers} layers, {first.width} wide, from scratch, with {limits} of T5's tokenizer; the "
            f"paper fine-tuned a pretrained T5. {first.limit or 'All'} training pairs, {first.evaluated or 'all'} "
            f"evaluated; tuned by {usual.metric}."
        )
    said.append(
        f"BLEU: sacrebleu, {first.signature}; greedy decoding. METEOR: NLTK's; `meteor_exact_stem` is NLTK's without "
        "WordNet's synonyms. The paper names neither its implementations nor the split it reports."
    )
    losses = [mean(found, label, name, "loss") for label in made for name in found["plan"]["algorithms"]]
    said.append(f"The loss is the mean cross-entropy of a target's token; it ends between {_range(losses)}.")
    return said


def _range(numbers: Sequence[float]) -> str:
    finite = [number for number in numbers if math.isfinite(number)]
    return f"{min(finite):.2f} and {max(finite):.2f}" if finite else "no finite numbers"
