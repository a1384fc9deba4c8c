"""Nested training of the arena's decoder: loss against what nodes send, with as many tokens for everybody.

    nested           K nodes take `LOCAL_STEPS` local steps on a K-th of the batch each, then one exchange
    data-parallel    AdamW or Muon on the whole batch, an exchange in every step
    sent             4 bytes per parameter, exchange and node: a displacement, or a gradient; of adam2 6, because the
                     owner of a part sends the outer second moment too (the study `overhead` measures both)

Text, decoder, warm-up and cosine are those of the study `arena`; every way of training is tried with as many Sobol
points on held-out text, and the best one is reported on other seeds and other text, for every number of nodes.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from tailopt.algorithms import algorithm
from tailopt.engines.simulate import simulate
from tailopt.figures.labels import named
from tailopt.figures.style import PALETTE
from tailopt.progress import Progress
from tailopt.rounds.settle import EveryoneExcluded
from tailopt.schedules import cosine, warmup
from tailopt.seeds import generator
from tailopt.studies.arena import PRESETS, TUNING_SEED, ArenaPlan
from tailopt.studies.arena_optimizers import CONTENDERS
from tailopt.studies.arena_training import LAST, SIZES, WARM_UP, Setup, decoder, evaluate, loss_of, train
from tailopt.studies.plots import finish, panels
from tailopt.studies.protocol import LEAST_SEEDS, UNJUDGED
from tailopt.studies.runner import RECORD, Grid, as_json, write_results
from tailopt.studies.search_spaces import SPACES, rules_of
from tailopt.studies.shared_cells import OutOfTime, TimeLimit, run_shared
from tailopt.studies.study import StudyOptions, resolve_device
from tailopt.studies.tables import markdown_table, mean_and_deviation, settings_text
from tailopt.sweeps.points import sweep_points
from tailopt.sweeps.space import Range
from tailopt.tasks.corpus import Corpus, load_corpus

SUMMARY = "nested training of the arena's decoder against data-parallel: loss by bytes sent; for a GPU"
OPTIONS = ("preset", "data", "tokenizer", "algorithms", "nodes", "seeds", "budget", "device", "precision", "minutes")
LOCAL_STEPS = 20
SENT = {"adam2": 6}  # bytes per parameter and exchange, where it is not 4
# name -> the algorithm and what is fixed of it
WAYS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "diloco": ("diloco", {}),
    "muloco": ("muloco", {}),
    "adam2": ("adam2", {}),
    "avg-biclip": ("avg-biclip", {}),
    "avg-biclip, momentum": ("avg-biclip", {"inner_momentum": 0.9, "inner_state": "keep"}),
    "bi2clip": ("bi2clip", {}),
    "bi2clip, momentum": ("bi2clip", {"inner_momentum": 0.9, "inner_state": "keep"}),
}
# data-parallel: name -> the contender of the arena
WHOLE: Mapping[str, str] = {"data-parallel adamw": "adamw", "data-parallel muon": "muon"}
WHOLE_RATES = {"ilr": Range(3e-4, 3e-2)}
NAMES = (*WHOLE, *WAYS)


@dataclass(frozen=True)
class NestedCell:
    """One run. settings: as JSON, which has an order of its own."""

    name: str
    nodes: int
    settings: str
    seed: int


def run(out: Path, options: StudyOptions) -> Path:
    """Run what is not in `out` yet, and write table.md, results.json and nested.png there.

    The presets are those of the arena, with its smallest batch size but one; by default there are 4 and 8 nodes.
    """
    plan, device = PRESETS[options.preset or "small"], resolve_device(options.device)
    plan = replace(
        plan,
        amounts=plan.amounts[:2][-1:],
        data=options.data or plan.data,
        tokenizer=options.tokenizer or "",
        seeds=tuple(range(options.seeds or 3)),
        device=device,
        precision=options.precision or ("bf16" if device.startswith("cuda") else "fp32"),
    )
    counts = (options.nodes,) if options.nodes else (2, 4) if options.small or not options.preset else (4, 8)
    budget = options.budget or 5
    if options.quick:
        tokens = plan.amounts[0][0]
        plan, counts, budget = replace(plan, amounts=((tokens, 4 * tokens),), seeds=(0,), evaluated=8), counts[:1], 1
    names = names_of(options.algorithms)
    for nodes in counts:
        if plan.amounts[0][0] // plan.length % nodes:
            blocks = plan.amounts[0][0] // plan.length
            raise ValueError(f"Invalid nodes: got {nodes}; need a divisor of {blocks}, the blocks of a step.")
    corpus = load_corpus(plan.data, plan.tokenizer, plan.at_most)
    runs, left = NestedRuns(plan, corpus, out / RECORD, budget, TimeLimit(options.minutes)), ""
    with Progress(options.progress) as bar:
        try:
            rows = [runs.row(name, nodes, bar) for nodes in counts for name in names]
        except OutOfTime as error:
            left, rows = str(error), runs.rows
    text = report(plan, rows, corpus.description, budget, left, options.quick)
    write_results(out, {"plan": as_json(plan), "rows": as_json(rows)}, text, options.command)
    if rows:
        draw(rows, out / "nested.png")
    return out


def names_of(text: str | None) -> tuple[str, ...]:
    """The ways of training that a text names, with semicolons; all for none.

    Examples:
        >>> names_of("data-parallel muon; bi2clip, momentum")
        ('data-parallel muon', 'bi2clip, momentum')
    """
    names = tuple(part.strip() for part in text.split(";")) if text else NAMES
    for name in names:
        if name not in NAMES:
            raise ValueError(f"Unknown algorithm: {name!r}; with semicolons, need some of {'; '.join(NAMES)}.")
    return names


@dataclass(frozen=True)
class NestedRow:
    """One way of training on a number of nodes. losses: by seed; sent: bytes of a node."""

    name: str
    nodes: int
    settings: Mapping[str, float]
    losses: tuple[float, ...]
    sent: int


class NestedRuns:
    """All runs, recorded as they end."""

    def __init__(self, plan: ArenaPlan, corpus: Corpus, record: Path, budget: int, limit: TimeLimit) -> None:
        self.plan, self.corpus, self.record, self.budget = plan, corpus, record, budget
        self.rows: list[NestedRow] = []
        self._limit, self._longest = limit, 0.0
        ((self._tokens, total),) = plan.amounts
        self._steps = total // self._tokens

    def row(self, name: str, nodes: int, bar: Progress) -> NestedRow:
        """Tune a way of training on a number of nodes, and report its best point."""
        tried = [NestedCell(name, nodes, json.dumps(p, sort_keys=True), TUNING_SEED) for p in self._points(name)]
        found = self._measure(tried, bar)
        best = min(tried, key=lambda cell: found[cell])
        reported = self._measure([replace(best, seed=seed) for seed in self.plan.seeds], bar)
        exchanges = self._steps if name in WHOLE else -(-self._steps // LOCAL_STEPS)
        row = NestedRow(
            name,
            nodes,
            json.loads(best.settings),
            tuple(reported.values()),
            SENT.get(name, 4) * self._parameters() * exchanges,
        )
        self.rows.append(row)
        return row

    def _points(self, name: str) -> Sequence[Mapping[str, float]]:
        if name in WHOLE:
            return sweep_points("avg-sgd", WHOLE_RATES, self.budget).settings
        base, _ = WAYS[name]
        return sweep_points(base, SPACES["pretraining"].ranges_of(*rules_of(base)), self.budget).settings

    def _measure(self, cells: Sequence[NestedCell], bar: Progress) -> dict[NestedCell, float]:
        grid = Grid[NestedCell, float](
            cells=cells,
            key=lambda cell: {
                "nested": as_json(cell), "local steps": LOCAL_STEPS, "plan": self.plan.key(self.corpus, self._tokens)
            },
            measure=lambda cell, tick: self._train(cell),
            label=lambda cell: f"{cell.name}, {cell.nodes} nodes, seed {cell.seed}",
        )  # fmt: skip
        return run_shared(grid, self.record, bar, self._limit, lambda cell: self._longest)

    def _train(self, cell: NestedCell) -> float:
        began = time.monotonic()
        setup = self.plan.setup(self.corpus, self._tokens, "held-out" if cell.seed == TUNING_SEED else "validation")
        settings = json.loads(cell.settings)
        if cell.name in WHOLE:
            found = train(
                replace(setup, looks=1), CONTENDERS[WHOLE[cell.name]], settings["ilr"], cell.seed, lambda n: None
            )
            loss = found.loss
        else:
            loss = trained(setup, cell, settings)
        self._longest = max(self._longest, time.monotonic() - began)
        return loss

    def _parameters(self) -> int:
        with torch.device("meta"):
            model = decoder(SIZES[self.plan.size], self.corpus.vocabulary, self.plan.length, 0)
        return sum(p.numel() for p in model.parameters())


def trained(setup: Setup, cell: NestedCell, settings: Mapping[str, float]) -> float:
    """The loss after nested training; infinite where it broke down."""
    base, fixed = WAYS[cell.name]
    order = torch.randperm(len(setup.blocks), generator=generator(cell.seed, "arena order", 0))
    warm, fall = warmup(max(1, round(WARM_UP * setup.steps)), per="step"), cosine(setup.steps, floor=LAST, per="step")
    names = [name for name in ("ilr", "ilr_adamw") if name in settings]
    losses: list[float] = []

    def look(model: torch.nn.Module) -> dict[str, float]:
        losses.append(evaluate(model, setup))
        return {"loss": losses[-1]}

    rounds = -(-setup.steps // LOCAL_STEPS)
    try:
        simulate(
            decoder(setup.size, setup.vocabulary, setup.blocks.shape[1], cell.seed),
            algorithm(base, **settings, **fixed),
            loss=lambda model, batch: loss_of(model, batch[0][:, :-1].long(), batch[0][:, 1:].long()),
            data=[TensorDataset(setup.blocks[part]) for part in order.tensor_split(cell.nodes)],
            batch_size=setup.batch // cell.nodes,
            rounds=rounds,
            local_steps=min(LOCAL_STEPS, setup.steps),
            seed=cell.seed,
            schedules=dict.fromkeys(names, warm * fall),
            evaluate=look,
            evaluate_every=rounds,
            device=setup.device,
            precision="bf16" if setup.precision == "bf16" else None,
            progress=False,
            inplace=True,
        )
    except EveryoneExcluded:
        return math.inf
    return losses[-1] if math.isfinite(losses[-1]) else math.inf


# --- What came out ----------------------------------------------------------------------------------------------------


def report(plan: ArenaPlan, rows: Sequence[NestedRow], data: str, budget: int, left: str, quick: bool) -> str:
    """The study as a page."""
    lines = ["# Nested training of a decoder from scratch", ""]
    if left:
        lines += [f"**Not finished:** {left} The same command goes on.", ""]
    for nodes in dict.fromkeys(row.nodes for row in rows):
        own = sorted((row for row in rows if row.nodes == nodes), key=lambda row: statistics.fmean(row.losses))
        body = [
            [row.name, mean_and_deviation(row.losses, 3), f"{row.sent / 1e6:,.0f}", settings_text(row.settings)]
            for row in own
        ]
        head = ["way of training", "loss", "sent by a node, MB", "settings"]
        lines += [f"## {nodes} nodes", "", *markdown_table(head, body, "lrrl"), ""]
    ((tokens, total),) = plan.amounts
    lines += [
        f"- Text: {data}",
        f"- {plan.size} parameters, {total:,} tokens in steps of {tokens:,}, {LOCAL_STEPS} local steps in a round, "
        f"{len(plan.seeds)} seeds: mean ± standard deviation of the loss on other text, nats per token. Fewer than "
        f"{LEAST_SEEDS} seeds decide nothing.",
        f"- {budget} Sobol points each, on held-out text and seed {TUNING_SEED}, in ranges that do not widen; warm-up "
        "and cosine as in the study arena. The outer learning rates are constant.",
        "- Sent: 4 bytes per parameter for every displacement or gradient, of adam2 6; data-parallel training sends "
        "one in every step.",
        "",
        *([UNJUDGED, ""] if quick else []),
    ]
    return "\n".join(lines)


def draw(rows: Sequence[NestedRow], path: Path) -> None:
    """Loss against bytes sent, a panel for each number of nodes."""
    counts = list(dict.fromkeys(row.nodes for row in rows))
    figure, axes = panels(len(counts), columns=2, height=4.2)
    colours, markers = list(PALETTE.values()), "osD^v<>PX"
    for axis, nodes in zip(axes, counts, strict=True):
        for row in (row for row in rows if row.nodes == nodes):
            i = NAMES.index(row.name)
            mean = statistics.fmean(row.losses)
            spread = [[mean - min(row.losses)], [max(row.losses) - mean]] if math.isfinite(max(row.losses)) else None
            axis.errorbar(
                row.sent / 1e6, mean, yerr=spread, fmt=markers[i], color=colours[i % len(colours)], label=row.name
            )
        named(axis, f"{nodes} nodes")
        axis.set(xlabel="sent by a node, MB", ylabel="loss, nats per token", xscale="log")
        axis.grid(alpha=0.25, linewidth=0.5)
    # points, not lines: their markers belong into the legend
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    finish(figure, "Nested training from scratch: loss by bytes sent, mean of the seeds and their range", path)
