"""Contributions that get lost: a small GPT-2 on many nodes, and half of what they send never arrives.

    everybody   nothing gets lost
    sync        every contribution is lost with probability 1/2; a node that lost one starts from the global weights
    keep        the same losses; a node that lost one goes on from its own weights, and sends everything next time

Reported is the perplexity by byte on text that no node trained on, and how far it is above that of `everybody` with the
same seed, which has the same first weights and the same batches. DiLoCo (Douillard et al., 2023) reports 2.1 % for
half of the contributions lost in its own, much larger setting.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tailopt.algorithms import algorithm
from tailopt.engines.simulate import simulate
from tailopt.figures.labels import compare_with, name_line_ends, named, plain_ticks
from tailopt.figures.style import LineStyle
from tailopt.optional import missing
from tailopt.progress import Progress
from tailopt.schedules import cosine
from tailopt.seeds import derive_seed, generator
from tailopt.studies.byte_corpus import BYTES, ByteCorpus, text, windows
from tailopt.studies.plots import finish, panels
from tailopt.studies.protocol import UNJUDGED
from tailopt.studies.runner import RECORD, Grid, Tick, as_json, digest, run_grid, write_results
from tailopt.studies.study import StudyOptions, resolve_device
from tailopt.studies.tables import markdown_table, settings_text, with_range

SUMMARY = "half of the contributions lost, on a small GPT-2 over bytes; ten minutes"
OPTIONS = ("preset", "data", "seeds", "device")

PUBLISHED = 2.1  # percent above full participation, by DiLoCo's authors
CASES: Mapping[str, str | None] = {"everybody": None, "sync": "sync", "keep": "keep"}


SETTINGS: Mapping[str, Mapping[str, float]] = {  # DiLoCo's own; avg-biclip's by a few tries with everybody
    "diloco": {"ilr": 4e-4, "ieps": 1e-8, "weight_decay": 0.1, "olr": 0.7, "momentum": 0.9},
    "avg-biclip": {"ilr": 10.0, "i_u": 1e-4, "i_d": 1e-5},
}


@dataclass(frozen=True)
class DropsPlan:
    """Everything that a cell depends on, but for the text; the defaults are the full study."""

    rounds: int = 50
    local_steps: int = 16
    batch: int = 16
    context: int = 128
    seeds: tuple[int, ...] = (0, 1, 2)
    nodes: int = 8
    lost: float = 0.5
    layers: int = 2
    width: int = 256
    heads: int = 4
    floor: float = 0.1  # inner learning rates fall to this share of themselves, by half a cosine
    windows: int = 512  # of held-out text
    every: int = 5  # rounds between evaluations
    algorithms: Mapping[str, Mapping[str, float]] = field(default_factory=lambda: dict(SETTINGS))

    def key(self, text_digest: str, name: str) -> str:
        """A digest of the plan, the text and one algorithm's settings, without seeds: more seeds add to the record."""
        settings = {key: value for key, value in asdict(self).items() if key not in ("seeds", "algorithms")}
        return digest([settings, f"{text_digest} {name} {sorted(self.algorithms[name].items())}"])


PRESETS = {
    "full": DropsPlan(),
    # in so few rounds DiLoCo's outer momentum has only begun to help
    "small": DropsPlan(
        rounds=20,
        local_steps=4,
        batch=8,
        context=64,
        seeds=(0, 1),
        windows=128,
        algorithms={"avg-biclip": SETTINGS["avg-biclip"]},
    ),
}
QUICK = DropsPlan(
    rounds=2, local_steps=1, batch=2, context=16, seeds=(0, 1), windows=4, nodes=4, layers=1, width=32, heads=2, every=1
)


def run(out: Path, options: StudyOptions) -> Path:
    """Run what is not in `out` yet, and write table.md, results.json and drops.png there.

    The preset "small" is avg-biclip alone, ten minutes on two cores; "full" is half an hour on a GPU. `data` is a
    folder of *.txt and *.txt.xz files, or one of them; by default the source code of Python's library.
    """
    preset = options.preset or "small"
    if preset not in PRESETS:
        raise ValueError(f"Invalid preset: {preset!r}; need one of {', '.join(map(repr, PRESETS))}.")
    plan = QUICK if options.quick else PRESETS[preset]
    if options.seeds:
        plan = replace(plan, seeds=tuple(range(options.seeds)))
    corpus = ByteCorpus.of(text(options.data), plan.nodes, plan.context, torch.device(resolve_device(options.device)))
    verdicts = not options.quick
    return run_plan(out, plan, corpus, progress=options.progress, verdicts=verdicts, command=options.command)


def run_plan(
    out: Path,
    plan: DropsPlan,
    corpus: ByteCorpus,
    *,
    progress: bool = False,
    verdicts: bool = True,
    command: str = "",
) -> Path:
    """The study by any plan, on any text; without `verdicts` nothing is compared with what DiLoCo's authors report."""
    results = summarise(plan, corpus, run_cells(out, plan, corpus, progress), verdicts)
    write_results(out, results.as_json(), report(results), command)
    figure(results, out / "drops.png")
    return out


# --- The cells --------------------------------------------------------------------------------------------------------


def model(plan: DropsPlan, seed: int) -> torch.nn.Module:
    """A GPT-2 without dropout, over bytes."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        raise missing("This study needs transformers", "transformers", "studies") from None
    config = GPT2Config(
        vocab_size=BYTES,
        n_positions=plan.context,
        n_embd=plan.width,
        n_layer=plan.layers,
        n_head=plan.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    with torch.random.fork_rng([]):
        torch.manual_seed(derive_seed(seed, "drops model"))
        return GPT2LMHeadModel(config)


def loss(net: torch.nn.Module, batch: Tensor) -> Tensor:
    """The mean cross entropy of the next byte."""
    logits = net(input_ids=batch[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def perplexity(net: torch.nn.Module, text: Tensor) -> float:
    """The perplexity by byte, over windows."""
    parts = text.split(64)
    return math.exp(sum(float(loss(net, part)) * len(part) for part in parts) / len(text))


@dataclass(frozen=True)
class DropsCell:
    """One simulation; case: a key of CASES."""

    algorithm: str
    case: str
    seed: int


@dataclass(frozen=True)
class PerplexityCurve:
    """Held-out perplexity after each of these rounds, and the device that it was computed on."""

    rounds: list[int]
    perplexity: list[float]
    device: str


def run_cells(out: Path, plan: DropsPlan, corpus: ByteCorpus, progress: bool) -> dict[DropsCell, PerplexityCurve]:
    """The curve of every cell."""

    def short_part(cell: DropsCell) -> float:
        measure(replace(plan, rounds=1), corpus, cell)
        return 1 / plan.rounds

    grid = Grid[DropsCell, PerplexityCurve](
        cells=[DropsCell(name, case, seed) for seed in plan.seeds for name in plan.algorithms for case in CASES],
        key=lambda cell: {**asdict(cell), "plan": plan.key(corpus.digest, cell.algorithm)},
        measure=lambda cell, tick: measure(plan, corpus, cell, tick),
        decode=lambda value: PerplexityCurve(**value),
        label=lambda cell: f"{cell.algorithm}, {cell.case}, seed {cell.seed}",
        units=plan.rounds,
        short_part=short_part,
        kind=lambda cell: cell.algorithm,
    )
    with Progress(progress) as bar:
        return run_grid(grid, out / RECORD, bar)


def measure(plan: DropsPlan, corpus: ByteCorpus, cell: DropsCell, tick: Tick = lambda t: None) -> PerplexityCurve:
    """One simulation; `tick` is called with every round that is done."""
    held_out = windows(corpus.held_out, plan.windows, plan.context, generator(0, "drops held-out"))

    def batch(node: int, round: int, step: int, generator: torch.Generator) -> Tensor:
        return windows(corpus.nodes[node], plan.batch, plan.context, generator)

    result = simulate(
        model(plan, cell.seed),
        algorithm(cell.algorithm, **plan.algorithms[cell.algorithm]),
        loss=loss,
        batches=batch,
        nodes=plan.nodes,
        rounds=plan.rounds,
        local_steps=plan.local_steps,
        drops=0.0 if CASES[cell.case] is None else plan.lost,
        on_drop=CASES[cell.case] or "sync",
        schedules={"ilr": cosine(plan.rounds, plan.floor)},
        device=corpus.held_out.device,
        seed=cell.seed,
        evaluate=lambda net: {"perplexity": perplexity(net, held_out)},
        evaluate_every=plan.every,
        loggers=[lambda row: tick(row["round"])],
        progress=False,
    )
    rows = [row for row in result.history if row["metrics"]]
    curve = [row["metrics"]["perplexity"] for row in rows]
    return PerplexityCurve([row["round"] for row in rows], curve, corpus.held_out.device.type)


# --- What came out ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DropsRow:
    """One algorithm under one case.

    mean, least, most: over the seeds, by round; last: by seed; above: percent above `everybody`, by seed.
    """

    algorithm: str
    case: str
    rounds: list[int]
    mean: list[float]
    least: list[float]
    most: list[float]
    last: list[float]
    above: list[float]
    mean_above: float


@dataclass(frozen=True)
class DropsResults:
    """Perplexities, and percent above full participation.

    Attributes:
        spread: name -> percent between the best and the worst seed of `everybody`.
        text: digest and sizes of the text.
        device: where the cells were computed.
        judged: whether the results are compared with what DiLoCo's authors report.
    """

    plan: DropsPlan
    rows: tuple[DropsRow, ...]
    spread: Mapping[str, float]
    unigram: float
    text: Mapping[str, Any]
    device: str
    judged: bool

    def best(self) -> dict[str, float]:
        """name -> percent above `everybody` of the better of sync and keep."""
        lost = [row for row in self.rows if row.case != "everybody"]
        return {name: min(r.mean_above for r in lost if r.algorithm == name) for name in self.plan.algorithms}

    def within(self) -> dict[str, bool]:
        """name -> whether that is at most what DiLoCo's authors report."""
        return {name: value <= PUBLISHED for name, value in self.best().items()}

    def as_json(self) -> dict[str, Any]:
        """As results.json has it: without `within` where nothing is judged."""
        return {
            "best": self.best(),
            "spread": dict(self.spread),
            "published": PUBLISHED,
            **({"within": self.within()} if self.judged else {}),
            "unigram": self.unigram,
            "text": dict(self.text),
            "device": self.device,
            "settings": as_json(self.plan),
            "rows": as_json(self.rows),
        }


def summarise(
    plan: DropsPlan, corpus: ByteCorpus, curves: Mapping[DropsCell, PerplexityCurve], verdicts: bool = True
) -> DropsResults:
    """Perplexities, and percent above full participation by seed."""
    rows, spread = [], {}
    for name in plan.algorithms:
        everybody = [curves[DropsCell(name, "everybody", seed)].perplexity[-1] for seed in plan.seeds]
        spread[name] = 100 * (max(everybody) / min(everybody) - 1)
        for case in CASES:
            of_case = [curves[DropsCell(name, case, seed)] for seed in plan.seeds]
            by_round = list(zip(*(c.perplexity for c in of_case), strict=True))
            mean, least, most = ([f(values) for values in by_round] for f in (statistics.fmean, min, max))
            last = [curve.perplexity[-1] for curve in of_case]
            above = [100 * (value / base - 1) for value, base in zip(last, everybody, strict=True)]
            rows.append(
                DropsRow(name, case, of_case[0].rounds, mean, least, most, last, above, statistics.fmean(above))
            )
    sizes = {"training_bytes": sum(map(len, corpus.nodes)), "held_out_bytes": len(corpus.held_out)}
    device = " and ".join(sorted({curve.device for curve in curves.values()}))
    text = {"digest": corpus.digest, **sizes}
    return DropsResults(plan, tuple(rows), spread, corpus.unigram, text, device, verdicts)


def report(results: DropsResults) -> str:
    """Table, settings and verdict, as Markdown."""
    rows = []
    for row in results.rows:
        everybody = row.case == "everybody"
        lost = "all arrive" if everybody else f"{results.plan.lost:.0%} lost, {row.case}"
        above = "–" if everybody else with_range(row.above, statistics.fmean, "{:+.2f} %")
        rows.append([row.algorithm, lost, with_range(row.last, statistics.fmean, "{:.3f}"), above])
    head = ["algorithm", "contributions", "held-out perplexity by byte, mean (range)", "above everybody, mean (range)"]
    lines = [*markdown_table(head, rows, "llr"), "", *(f"- {line}" for line in _settings(results))]
    return "\n".join([*lines, "", *_verdict(results)]) + "\n"


def _settings(results: DropsResults) -> list[str]:
    plan, about = results.plan, results.text
    numbers = [f"{name}: {settings_text(s, '{} = {:g}')}" for name, s in plan.algorithms.items()]
    return [
        f"GPT-2 of {plan.layers} layers, {plan.width} wide, {plan.heads} heads, {plan.context} bytes of context, bytes "
        f"as vocabulary, no dropout; {plan.nodes} nodes, {plan.rounds} rounds of {plan.local_steps} local steps of "
        f"{plan.batch} windows; seeds {', '.join(map(str, plan.seeds))}; run on {results.device}.",
        f"{about['training_bytes']:,} bytes of text to train on, dealt out to the nodes by stripes; perplexity on "
        f"{plan.windows} windows of {about['held_out_bytes']:,} held-out bytes, whose unigram perplexity is "
        f"{results.unigram:.2f}. SHA-256 of the text: {about['digest'][:16]}.",
        f"{'; '.join(numbers)}; inner learning rates fall to {plan.floor:g} of that by half a cosine. The same "
        "where contributions get lost.",
    ]


def _verdict(results: DropsResults) -> list[str]:
    if not results.judged:
        return [UNJUDGED]
    words = {True: "at most the", False: "more than the"}
    within = results.within()
    return [
        f"- {name}: the better of sync and keep ends {abs(value):.2f} % {'above' if value > 0 else 'below'} everybody: "
        f"{words[within[name]]} {PUBLISHED} % above that DiLoCo's authors report. Everybody itself differs "
        f"by {results.spread[name]:.1f} % between seeds; what is smaller than that says little."
        for name, value in results.best().items()
    ]


STYLES: Mapping[str, LineStyle] = {
    "everybody": LineStyle("black"),
    "sync": LineStyle("blue", "--", "o"),
    "keep": LineStyle("vermillion", "-.", "s"),
}


def figure(results: DropsResults, path: Path) -> None:
    """Held-out perplexity by round, one panel per algorithm: the mean over seeds, and their range."""
    plan = results.plan
    drawing, axes = panels(len(plan.algorithms), columns=2, height=3.6, sharey=True)
    for name, panel in zip(plan.algorithms, axes, strict=True):
        for row in [row for row in results.rows if row.algorithm == name]:
            style = STYLES[row.case]
            share = f" ({row.mean_above:+.1f} %)" if style.marker else ""
            panel.plot(row.rounds, row.mean, label=f"{row.case}{share}", markersize=4, **style.keywords())
            panel.fill_between(row.rounds, row.least, row.most, color=style.hex, alpha=0.13, linewidth=0)
        compare_with(panel, results.unigram, "unigram model")
        panel.set_yscale("log")
        plain_ticks(panel.yaxis)
        if len(axes) > 1:
            named(panel, name)
        panel.set_xlabel("round")
        panel.grid(alpha=0.25)
    axes[0].set_ylabel("held-out perplexity by byte")
    name_line_ends(axes)
    of_one = f", {next(iter(plan.algorithms))}" if len(axes) == 1 else ""
    title = (
        f"{plan.lost:.0%} of contributions lost{of_one}, {plan.nodes} nodes: mean and range of {len(plan.seeds)} seeds"
    )
    finish(drawing, title, path)
