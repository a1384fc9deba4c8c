"""Contributions that get lost: a small GPT-2 on many nodes, and half of what they send never arrives.

    everybody   nothing gets lost
    sync        every contribution is lost with probability 1/2; who lost one starts from the synchronised weights
    keep        the same losses; who lost one goes on from its own weights, and brings everything at once next time

Reported is the perplexity by byte on text that nobody trained on, and how far it is above that of `everybody` with the
same seed, which has the same first weights and the same batches. DiLoCo (Douillard et al., 2023) reports 2.1 % for
half of the contributions lost in its own, much larger setting.
"""

from __future__ import annotations

import functools
import hashlib
import json
import lzma
import math
import statistics
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tailopt.algorithms import algorithm
from tailopt.engines.simulate import simulate
from tailopt.optional import missing
from tailopt.progress import Progress
from tailopt.records import disk, history
from tailopt.schedules import cosine
from tailopt.seeds import derive, generator
from tailopt.studies.protocol import UNJUDGED
from tailopt.studies.study import StudyOptions, resolve_device

SUMMARY = "half of the contributions lost, on a small GPT-2 over bytes; ten minutes"
OPTIONS = ("preset", "data", "seeds", "device")

PUBLISHED = 2.1  # percent above full participation, by DiLoCo's authors
CASES: Mapping[str, str | None] = {"everybody": None, "sync": "sync", "keep": "keep"}
BYTES = 256  # the vocabulary
STRIPE = 1 << 15  # bytes that are dealt out to the nodes in turn
HELD_OUT = 20  # every so many stripes one is for evaluation


SETTINGS: Mapping[str, Mapping[str, float]] = {  # DiLoCo's own; avg-biclip's by a few tries with everybody
    "diloco": {"ilr": 4e-4, "ieps": 1e-8, "weight_decay": 0.1, "olr": 0.7, "momentum": 0.9},
    "avg-biclip": {"ilr": 10.0, "i_u": 1e-4, "i_d": 1e-5},
}


@dataclass(frozen=True)
class Plan:
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

    def key(self, text: str) -> str:
        """A name for results of this plan on a text. Seeds are left out: more of them go on with what is there."""
        settings = {name: value for name, value in asdict(self).items() if name not in ("seeds", "algorithms")}
        return hashlib.sha256(json.dumps([settings, text], sort_keys=True).encode()).hexdigest()[:16]


PRESETS = {
    "full": Plan(),
    # in so few rounds DiLoCo's outer momentum has only begun to help
    "small": Plan(
        rounds=20,
        local_steps=4,
        batch=8,
        context=64,
        seeds=(0, 1),
        windows=128,
        algorithms={"avg-biclip": SETTINGS["avg-biclip"]},
    ),
}
QUICK = Plan(
    rounds=2, local_steps=1, batch=2, context=16, seeds=(0, 1), windows=4, nodes=4, layers=1, width=32, heads=2, every=1
)


def run(out: Path, options: StudyOptions) -> Path:
    """Run what is not in `out` yet, and write the table, the results and the figure there.

    Args:
        out: a folder. `cells.jsonl` in it holds every finished cell; these are not run again.
        quick: two rounds of a tiny model, to see that it works; its figures say nothing.
        progress: say on stderr where it is.
        data: a folder of *.txt and *.txt.xz files, or one of them; by default the source code of Python's library.
        preset: "small", avg-biclip alone, ten minutes on two cores; or "full", half an hour on a GPU.
        seeds: how many, instead of the preset's.
        device: by default a GPU where there is one.

    Returns:
        The folder, with `table.md`, `results.json` and `drops.png`.
    """
    preset = options.preset or "small"
    if preset not in PRESETS:
        raise ValueError(f"Invalid preset: {preset!r}; need one of {', '.join(map(repr, PRESETS))}.")
    plan = QUICK if options.quick else PRESETS[preset]
    if options.seeds:
        plan = replace(plan, seeds=tuple(range(options.seeds)))
    return measured(out, plan, text(options.data), options.device, options.progress, judge=not options.quick)


def measured(
    out: Path, plan: Plan, given: bytes, device: str | None = None, progress: bool = False, judge: bool = True
) -> Path:
    """The study by any plan, on any text; without `judge` it says nothing about what DiLoCo's authors report."""
    place = torch.device(resolve_device(device))
    corpus = Corpus.of(given, plan.nodes, plan.context, place)
    out.mkdir(parents=True, exist_ok=True)
    cells = _cells(out / "cells.jsonl", plan, corpus, progress)
    results = summarise(plan, corpus, cells)
    if not judge:
        del results["within"]
    disk.replace(out / "results.json", (json.dumps(results, indent=1) + "\n").encode())
    disk.replace(out / "table.md", report(plan, results).encode())
    figure(results, out / "drops.png")
    return out


# --- The text ---------------------------------------------------------------------------------------------------------


def text(path: str | Path | None = None) -> bytes:
    """All of a folder's *.txt and *.txt.xz files by name, or one of them; by default Python's own library."""
    if path is None:
        return b"\n".join(p.read_bytes() for p in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    path = Path(path)
    files = [path] if path.is_file() else sorted([*path.glob("*.txt"), *path.glob("*.txt.xz")])
    if not files:
        raise FileNotFoundError(f"Invalid data: {path} has no *.txt or *.txt.xz file. Give a folder that has some.")
    return b"\n".join(lzma.decompress(p.read_bytes()) if p.suffix == ".xz" else p.read_bytes() for p in files)


@dataclass(frozen=True)
class Corpus:
    """Text as numbers: what each node has, and what none of them has.

    Attributes:
        digest: of the whole text.
        unigram: the perplexity of who knows how frequent every byte of the held-out text is, and nothing else.
    """

    nodes: list[Tensor]
    held_out: Tensor
    digest: str
    unigram: float

    @classmethod
    def of(cls, given: bytes, nodes: int, context: int, device: torch.device) -> Corpus:
        """Stripes are dealt out in turn; every twentieth is held out. A short text has shorter stripes.

        Examples:
            >>> corpus = Corpus.of(bytes(range(250)) * 40, nodes=4, context=8, device=torch.device("cpu"))
            >>> sum(len(part) for part in corpus.nodes) + len(corpus.held_out)
            10000
        """
        stripe = min(STRIPE, len(given) // (HELD_OUT * max(nodes, 2)))
        if stripe <= context:
            need = (context + 1) * HELD_OUT * max(nodes, 2)
            raise ValueError(f"Invalid data: {len(given)} bytes of text; need {need} or more for {nodes} nodes.")
        whole = torch.frombuffer(bytearray(given), dtype=torch.uint8).to(device)
        stripes = whole.split(stripe)
        kept = [s for i, s in enumerate(stripes) if i % HELD_OUT != HELD_OUT - 1]
        held_out = torch.cat([s for i, s in enumerate(stripes) if i % HELD_OUT == HELD_OUT - 1])
        shares = torch.bincount(held_out.long(), minlength=BYTES).double() / held_out.numel()
        unigram = math.exp(-float(torch.special.xlogy(shares, shares).sum()))
        parts = [torch.cat(kept[k::nodes]) for k in range(nodes)]
        return cls(parts, held_out, hashlib.sha256(given).hexdigest(), unigram)

    def batch(self, plan: Plan, node: int, source: torch.Generator) -> Tensor:
        """Windows of a node's text, any."""
        return windows(self.nodes[node], plan.batch, plan.context, source)


def windows(of: Tensor, count: int, context: int, source: torch.Generator) -> Tensor:
    """Some windows of a text, one byte longer than the context: what follows each byte is in it too."""
    starts = torch.randint(len(of) - context, (count, 1), generator=source)
    return of[(starts + torch.arange(context + 1)).to(of.device)].long()


# --- The cells --------------------------------------------------------------------------------------------------------


def model(plan: Plan, seed: int) -> torch.nn.Module:
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
        torch.manual_seed(derive(seed, "drops model"))
        return GPT2LMHeadModel(config)


def loss(net: torch.nn.Module, batch: Tensor) -> Tensor:
    """The mean cross entropy of the next byte."""
    logits = net(input_ids=batch[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def perplexity(net: torch.nn.Module, text: Tensor) -> float:
    """Of windows, by byte."""
    parts = text.split(64)
    return math.exp(sum(float(loss(net, part)) * len(part) for part in parts) / len(text))


def measure(
    plan: Plan, corpus: Corpus, name: str, case: str, seed: int, tell: Callable[[int], None] = lambda t: None
) -> dict[str, Any]:
    """Held-out perplexity by round, which of the rounds these are, and where it was run."""
    check = windows(corpus.held_out, plan.windows, plan.context, generator(0, "drops held-out"))
    result = simulate(
        model(plan, seed),
        algorithm(name, **plan.algorithms[name]),
        loss=loss,
        batches=lambda node, t, step, source: corpus.batch(plan, node, source),
        nodes=plan.nodes,
        rounds=plan.rounds,
        local_steps=plan.local_steps,
        drops=0.0 if CASES[case] is None else plan.lost,
        on_drop=CASES[case] or "sync",
        schedules={"ilr": cosine(plan.rounds, plan.floor)},
        device=corpus.held_out.device,
        seed=seed,
        evaluate=lambda net: {"perplexity": perplexity(net, check)},
        evaluate_every=plan.every,
        loggers=[lambda row: tell(row["round"])],
        progress=False,
    )
    rows = [row for row in result.history if row["metrics"]]
    return {
        "rounds": [row["round"] for row in rows],
        "perplexity": [row["metrics"]["perplexity"] for row in rows],
        "device": corpus.held_out.device.type,
    }


Found = dict[tuple[str, str, int], dict[str, Any]]


def _cells(record: Path, plan: Plan, corpus: Corpus, progress: bool) -> Found:
    """The curve of every cell: from the record, or run now and recorded."""
    history.drop_torn_line(record)  # a line that a kill cut short
    keys = {
        name: plan.key(f"{corpus.digest} {name} {sorted(plan.algorithms[name].items())}") for name in plan.algorithms
    }
    done: Found = {
        (row["algorithm"], row["case"], row["seed"]): row["curve"]
        for row in history.read(record)
        if row["plan"] == keys.get(row["algorithm"])
    }
    every = [(name, case, seed) for seed in plan.seeds for name in plan.algorithms for case in CASES]
    todo = [cell for cell in every if cell not in done]
    with Progress(progress) as bar:
        for number, cell in enumerate(todo):
            name, case, seed = cell
            label = f"{name}, {case}, seed {seed}"
            told = functools.partial(_advanced, bar.update, number * plan.rounds, len(todo) * plan.rounds, label)
            told(0)
            done[cell] = measure(plan, corpus, name, case, seed, told)
            row = {"algorithm": name, "case": case, "seed": seed, "round": plan.rounds, "curve": done[cell]}
            history.append(record, {**row, "plan": keys[name]})
        if todo:
            bar.update(len(todo) * plan.rounds, len(todo) * plan.rounds, "done")
    return done


def _advanced(advance: Callable[[int, int, str], None], before: int, total: int, label: str, t: int) -> None:
    advance(before + t, total, label)


# --- What was seen ----------------------------------------------------------------------------------------------------


def summarise(plan: Plan, corpus: Corpus, found: Found) -> dict[str, Any]:
    """Perplexities, and percent above full participation by seed, as plain values."""
    rows: list[dict[str, Any]] = []
    for name in plan.algorithms:
        whole = [found[name, "everybody", seed]["perplexity"][-1] for seed in plan.seeds]
        for case in CASES:
            curves = [found[name, case, seed]["perplexity"] for seed in plan.seeds]
            last = [curve[-1] for curve in curves]
            above = [100 * (value / base - 1) for value, base in zip(last, whole, strict=True)]
            rows.append(
                {
                    "algorithm": name,
                    "case": case,
                    "rounds": found[name, case, plan.seeds[0]]["rounds"],
                    "mean": [statistics.fmean(values) for values in zip(*curves, strict=True)],
                    "last": last,
                    "above": above,
                    "mean_above": statistics.fmean(above),
                }
            )
    best = {
        name: min(r["mean_above"] for r in rows if r["algorithm"] == name and r["case"] != "everybody")
        for name in plan.algorithms
    }
    ends = {row["algorithm"]: row["last"] for row in rows if row["case"] == "everybody"}
    return {
        "best": best,
        "spread": {name: 100 * (max(last) / min(last) - 1) for name, last in ends.items()},
        "published": PUBLISHED,
        "within": {name: value <= PUBLISHED for name, value in best.items()},
        "unigram": corpus.unigram,
        "text": {
            "digest": corpus.digest,
            "training_bytes": sum(map(len, corpus.nodes)),
            "held_out_bytes": len(corpus.held_out),
        },
        "device": " and ".join(sorted({curve["device"] for curve in found.values()})),
        "settings": asdict(plan),
        "rows": rows,
    }


def report(plan: Plan, results: Mapping[str, Any]) -> str:
    """Table, settings and verdict, as Markdown."""
    lines = [
        "| algorithm | contributions | held-out perplexity by byte, mean (range) | above everybody, mean (range) |",
        "| --- | --- | ---: | ---: |",
    ]
    for row in results["rows"]:
        lost = "all arrive" if row["case"] == "everybody" else f"{plan.lost:.0%} lost, {row['case']}"
        above = "–" if row["case"] == "everybody" else _spread(row["above"], "{:+.2f} %")
        lines.append(f"| {row['algorithm']} | {lost} | {_spread(row['last'], '{:.3f}')} | {above} |")
    return "\n".join([*lines, "", *(f"- {line}" for line in _settings(plan, results)), "", *_verdict(results)]) + "\n"


def _settings(plan: Plan, results: Mapping[str, Any]) -> list[str]:
    about = results["text"]
    numbers = [f"{name}: {', '.join(f'{k} = {v:g}' for k, v in s.items())}" for name, s in plan.algorithms.items()]
    return [
        f"GPT-2 of {plan.layers} layers, {plan.width} wide, {plan.heads} heads, {plan.context} bytes of context, bytes "
        f"as vocabulary, no dropout; {plan.nodes} nodes, {plan.rounds} rounds of {plan.local_steps} local steps of "
        f"{plan.batch} windows; seeds {', '.join(map(str, plan.seeds))}; run on {results['device']}.",
        f"{about['training_bytes']:,} bytes of text to train on, dealt out to the nodes by stripes; perplexity on "
        f"{plan.windows} windows of {about['held_out_bytes']:,} held-out bytes, whose unigram perplexity is "
        f"{results['unigram']:.2f}. SHA-256 of the text: {about['digest'][:16]}.",
        f"{'; '.join(numbers)}; inner learning rates fall to {plan.floor:g} of that by half a cosine. The same "
        "where contributions get lost.",
    ]


def _verdict(results: Mapping[str, Any]) -> list[str]:
    if "within" not in results:
        return [UNJUDGED]
    words = {True: "at most the", False: "more than the"}
    return [
        f"- {name}: the better of sync and keep ends {abs(value):.2f} % {'above' if value > 0 else 'below'} everybody: "
        f"{words[results['within'][name]]} {PUBLISHED} % above that DiLoCo's authors report. Everybody itself differs "
        f"by {results['spread'][name]:.1f} % between seeds; what is smaller than that says little."
        for name, value in results["best"].items()
    ]


def _spread(values: Sequence[float], form: str) -> str:
    mean, low, high = (form.format(v) for v in (statistics.fmean(values), min(values), max(values)))
    return f"{mean} ({low} to {high})"


# Okabe and Ito's colours, each with its own dashes and marker, so that print in grey tells them apart
STYLE: dict[str, tuple[str, str, str]] = {
    "everybody": ("#000000", "-", ""),
    "sync": ("#0072B2", "--", "o"),
    "keep": ("#D55E00", "-.", "s"),
}


def figure(results: Mapping[str, Any], path: Path) -> None:
    """Held-out perplexity by round, a panel an algorithm."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(results["settings"]["algorithms"])
    drawn, line = plt.subplots(
        1, len(names), figsize=(5.5 * len(names), 4.2), sharey=True, squeeze=False, layout="constrained"
    )
    for name, panel in zip(names, line[0], strict=True):
        for row in [r for r in results["rows"] if r["algorithm"] == name]:
            colour, dashes, marker = STYLE[row["case"]]
            share = f" ({row['mean_above']:+.1f} % in the end)" if marker else ""
            label = f"{row['case']}{share}"
            panel.plot(
                row["rounds"], row["mean"], label=label, color=colour, linestyle=dashes, marker=marker, markersize=4
            )
        panel.axhline(results["unigram"], color="#777777", linewidth=1, linestyle=":", label="unigram")
        panel.set_yscale("log")
        panel.set_title(name, fontsize=10)
        panel.set_xlabel("round")
        panel.grid(alpha=0.25)
        panel.legend(fontsize=8)
    line[0][0].set_ylabel("held-out perplexity by byte")
    settings, seeds = results["settings"], len(results["settings"]["seeds"])
    title = f"{settings['lost']:.0%} of contributions lost, {settings['nodes']} nodes, mean of {seeds} seeds"
    drawn.suptitle(title, fontsize=11)
    drawn.savefig(path, dpi=130)
    plt.close(drawn)
