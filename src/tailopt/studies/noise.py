"""Whether clipping keeps a decoder in training when some of its data are wrong.

    labels    in every step a tenth of the targets are shuffled among themselves
    burst     in the middle of the training all tokens of five batches in a row are drawn at random

The decoder, the text, the schedule and the optimizers are those of the study `arena`, and the rates too: those that it
found on clean text, or the middle of an optimizer's first range. Beside them is AdamW behind clip_grad_norm_(1).
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tailopt.figures.labels import name_line_ends, named
from tailopt.figures.style import PALETTE
from tailopt.progress import Progress
from tailopt.seeds import generator
from tailopt.studies.arena import PRESETS, ArenaPlan
from tailopt.studies.arena_optimizers import CONTENDERS, contenders_named
from tailopt.studies.arena_training import ArenaRun, Corruption, train
from tailopt.studies.plots import finish, panels
from tailopt.studies.protocol import LEAST_SEEDS, UNJUDGED
from tailopt.studies.runner import RECORD, Grid, as_json, write_results
from tailopt.studies.shared_cells import OutOfTime, TimeLimit, run_shared
from tailopt.studies.study import StudyOptions, resolve_device
from tailopt.studies.tables import markdown_table, mean_and_deviation
from tailopt.tasks.corpus import load_corpus

SUMMARY = "a decoder whose labels are shuffled, or with a burst of random batches; minutes in the preset small"
OPTIONS = ("preset", "data", "tokenizer", "algorithms", "settings", "seeds", "device", "precision", "minutes")
KINDS = ("clean", "labels", "burst")
SHUFFLED, BURST = 0.1, 5
CLIPPED_NORM = "adamw, clip_grad_norm_(1)"
USUAL = ("adamw", "clipped-adamw", "biclip", "biclip-momentum")
LOOKS = 20


@dataclass(frozen=True)
class NoiseCell:
    """One run. optimizer: a contender of the arena, or `CLIPPED_NORM`."""

    optimizer: str
    kind: str
    rate: float
    seed: int


def run(out: Path, options: StudyOptions) -> Path:
    """Run what is not in `out` yet, and write table.md, results.json and noise.png there.

    `settings` is the results.json of an arena, whose rates are taken; the presets are the arena's.
    """
    plan, device = PRESETS[options.preset or "small"], resolve_device(options.device)
    plan = replace(
        plan,
        data=options.data or plan.data,
        tokenizer=options.tokenizer or "",
        seeds=tuple(range(options.seeds)) if options.seeds else (0, 1, 2),
        device=device,
        precision=options.precision or ("bf16" if device.startswith("cuda") else "fp32"),
        amounts=plan.amounts[:1],
    )
    if options.quick:
        tokens = plan.amounts[0][0]
        plan = replace(plan, amounts=((tokens, 20 * tokens),), seeds=(0,), evaluated=8)
    names = contenders_named(options.algorithms, USUAL)
    rates = rates_of(options.settings, names)
    limit, left = TimeLimit(options.minutes), ""
    with Progress(options.progress) as bar:
        try:
            found = _measure(plan, rates, out / RECORD, bar, limit)
        except OutOfTime as error:
            left, found = str(error), {}
    rows = summarise(found, plan.seeds)
    steps = plan.amounts[0][1] // plan.amounts[0][0]
    write_results(
        out, {"plan": as_json(plan), "rows": as_json(rows)}, report(plan, rows, left, options.quick), options.command
    )
    if rows:
        draw(rows, steps, out / "noise.png")
    return out


def rates_of(settings: str | None, names: Sequence[str]) -> dict[str, float]:
    """The rate of every optimizer: from an arena's results.json, or the middle of its first range."""
    found = {name: CONTENDERS[name].rate(CONTENDERS[name].middle) for name in names}
    if settings not in (None, "tune"):
        rows = json.loads(Path(str(settings)).read_text(encoding="utf-8"))["rows"]
        first = min(row["tokens"] for row in rows)
        found |= {row["contender"]: row["rate"] for row in rows if row["tokens"] == first and row["contender"] in found}
    if "adamw" in found:
        found[CLIPPED_NORM] = found["adamw"]
    return found


def _measure(
    plan: ArenaPlan, rates: Mapping[str, float], record: Path, bar: Progress, limit: TimeLimit
) -> dict[NoiseCell, ArenaRun]:
    corpus = load_corpus(plan.data, plan.tokenizer, plan.at_most)
    tokens, total = plan.amounts[0]
    steps = total // tokens
    setup = replace(plan.setup(corpus, tokens, "validation"), looks=min(LOOKS, steps))
    seconds = [0.0]

    def measure(cell: NoiseCell, tick: Any) -> ArenaRun:
        contender = CONTENDERS["adamw" if cell.optimizer == CLIPPED_NORM else cell.optimizer]
        own = replace(
            setup,
            corruption=corruption(cell.kind, cell.seed, steps, corpus.vocabulary),
            clip_norm=1.0 if cell.optimizer == CLIPPED_NORM else None,
        )
        found = train(own, contender, cell.rate, cell.seed, lambda n: None)
        seconds.append(1.5 * found.seconds)  # evaluations on the way
        return found

    grid = Grid[NoiseCell, ArenaRun](
        cells=[
            NoiseCell(name, kind, rate, seed) for seed in plan.seeds for kind in KINDS for name, rate in rates.items()
        ],
        key=lambda cell: {"noise": as_json(cell), "plan": plan.key(corpus, tokens)},
        measure=measure,
        decode=lambda found: ArenaRun(**{**found, "losses": tuple(found["losses"])}),
        label=lambda cell: f"{cell.optimizer}, {cell.kind}, seed {cell.seed}",
    )
    return run_shared(grid, record, bar, limit, lambda cell: max(seconds))


def corruption(kind: str, seed: int, steps: int, vocabulary: int) -> Corruption | None:
    """What happens to the batches of a run; the same for every optimizer.

    Examples:
        >>> spoil = corruption("burst", 0, steps=100, vocabulary=256)
        >>> ids = torch.zeros(2, 4, dtype=torch.long)
        >>> [bool((spoil(k, ids, ids)[1] == ids).all()) for k in (49, 50, 54, 55)]
        [True, False, False, True]
    """
    if kind == "clean":
        return None

    def labels(k: int, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        draw = generator(seed, "shuffled labels", k)
        flat = targets.flatten().clone()
        chosen = torch.randperm(len(flat), generator=draw)[: int(SHUFFLED * len(flat))]
        flat[chosen] = flat[chosen[torch.randperm(len(chosen), generator=draw)]]
        return inputs, flat.view_as(targets)

    def burst(k: int, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if not steps // 2 <= k < steps // 2 + BURST:
            return inputs, targets
        draw = generator(seed, "burst", k)
        tokens = [torch.randint(vocabulary, part.shape, generator=draw) for part in (inputs, targets)]
        return tokens[0], tokens[1]

    return labels if kind == "labels" else burst


# --- What came out ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NoiseRow:
    """One optimizer on one kind of data. curves: the loss on clean text by look, a curve for each seed."""

    optimizer: str
    kind: str
    rate: float
    curves: tuple[tuple[float, ...], ...]

    @property
    def ends(self) -> list[float]:
        """The loss at the end, by seed."""
        return [curve[-1] for curve in self.curves]

    @property
    def spike(self) -> float:
        """How far the loss rises above the lowest one before it: the largest rise of a seed, the mean over seeds."""
        rises = [max(curve[i] - min(curve[: i + 1]) for i in range(len(curve))) for curve in self.curves]
        return statistics.fmean(rises)


def summarise(found: Mapping[NoiseCell, ArenaRun], seeds: Sequence[int]) -> list[NoiseRow]:
    """Rows by kind and optimizer, in the order of the cells."""
    pairs = dict.fromkeys((cell.kind, cell.optimizer, cell.rate) for cell in found)
    return [
        NoiseRow(name, kind, rate, tuple(found[NoiseCell(name, kind, rate, seed)].losses for seed in seeds))
        for kind, name, rate in pairs
    ]


def report(plan: ArenaPlan, rows: Sequence[NoiseRow], left: str, quick: bool) -> str:
    """The study as a page."""
    lines = ["# A decoder whose data are partly wrong", ""]
    if left:
        lines += [f"**Not finished:** {left} The same command goes on.", ""]
    by = {(row.kind, row.optimizer): row for row in rows}
    names = list(dict.fromkeys(row.optimizer for row in rows))
    body = []
    for name in names:
        texts = [name, f"{by['clean', name].rate:.3g}"]
        for kind in KINDS:
            row = by[kind, name]
            texts += [mean_and_deviation(row.ends, 3), *([f"{row.spike:.3f}"] if kind == "burst" else [])]
        body.append(texts)
    head = ["optimizer", "rate", "clean", "labels shuffled", "burst", "rise at the burst"]
    tokens, total = plan.amounts[0]
    lines += [
        *(markdown_table(head, body, "lr") if body else []),
        "",
        f"Loss on clean text after {total // tokens} steps of {tokens} tokens, nats per token, {len(plan.seeds)} "
        f"seeds; less is better. {plan.size} parameters. Shuffled: {SHUFFLED:.0%} of the targets of every step; burst: "
        f"{BURST} batches of random tokens in the middle. Rise: the largest rise of the loss above an earlier one, "
        f"seen every {max(1, total // tokens // LOOKS)} steps. The rate of {CLIPPED_NORM} is that of adamw. Fewer than "
        f"{LEAST_SEEDS} seeds decide nothing.",
        "",
        *([UNJUDGED, ""] if quick else []),
    ]
    return "\n".join(lines)


def draw(rows: Sequence[NoiseRow], steps: int, path: Path) -> None:
    """The loss by step, a panel for each kind of data."""
    figure, axes = panels(len(KINDS), height=3.4)
    colours = list(PALETTE.values())
    names = list(dict.fromkeys(row.optimizer for row in rows))
    for axis, kind in zip(axes, KINDS, strict=True):
        for row in (row for row in rows if row.kind == kind):
            looks = len(row.curves[0])
            means = [statistics.fmean(column) for column in zip(*row.curves, strict=True)]
            drawn = [(steps * (i + 1) / looks, mean) for i, mean in enumerate(means) if math.isfinite(mean)]
            colour = colours[names.index(row.optimizer) % len(colours)]
            axis.plot(
                *([point[i] for point in drawn] for i in (0, 1)), color=colour, label=row.optimizer, linewidth=1.3
            )
        named(axis, kind)
        axis.set(xlabel="step", ylabel="loss on clean text, nats per token")
        axis.grid(alpha=0.25, linewidth=0.5)
    name_line_ends(axes)
    finish(figure, "A decoder from scratch, where a part of its data is wrong: mean of the seeds", path)
