"""Pretraining a language model on nodes that rarely exchange, against data-parallel training on the same tokens.

    gap = 100 (loss / loss of data-parallel AdamW - 1),    losses on text that nobody trains on

Data-parallel training is one AdamW on the mean gradient of the batches that the nodes take in the same local step; it
exchanges after every step, the others after every round. Steps and tokens are the same for any number of nodes: what a
step takes is dealt out among them. Every algorithm is tuned with the same number of points on held-out blocks, with
`TUNED_AT` nodes, and reported with those settings for every number of nodes. Learning rates are constant.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tailopt.algorithms import algorithm
from tailopt.engines.batches import to_device
from tailopt.engines.simulate import simulate
from tailopt.figures.labels import compare_with, name_line_ends, named
from tailopt.figures.style import LineStyle, band, band_text, look
from tailopt.progress import Progress
from tailopt.rounds.settle import EveryoneExcluded
from tailopt.splits.loaders import node_data
from tailopt.studies.comparison import algorithm_names
from tailopt.studies.comparison_runs import seconds_of_a_step
from tailopt.studies.plots import finish, panels
from tailopt.studies.protocol import UNJUDGED
from tailopt.studies.runner import RECORD, Grid, as_json, digest, run_grid, write_results
from tailopt.studies.search_spaces import DATA_PARALLEL, SPACES, rules_of, search
from tailopt.studies.study import StudyOptions, resolve_device
from tailopt.studies.tables import markdown_table, mean_and_deviation, settings_text
from tailopt.sweeps.points import sweep_points
from tailopt.sweeps.space import Space
from tailopt.tasks.language import Language
from tailopt.tasks.table import task

SUMMARY = "DiLoCo and others against data-parallel training; ten minutes in the preset small"
OPTIONS = ("preset", "tokenizer", "data", "algorithms", "seeds", "budget", "device")

REFERENCE = DATA_PARALLEL
NESTED = ("diloco", "adam2", "rmsprop-biclip", "bi2clip")
TUNED_AT = 4
SPACE = SPACES["pretraining"]


@dataclass(frozen=True)
class PretrainingPlan:
    """Everything that a result depends on.

    Attributes:
        preset, data, tokenizer: of the task `pretraining`; an empty tokenizer is the preset's.
        counts: numbers of nodes.
        blocks: blocks of tokens per step, of all nodes together.
        budget: points tried for each algorithm.
        rounds, local_steps: 0 is the task's.
        device: None is a GPU where there is one.
    """

    preset: str = "paper"
    data: str = ""
    tokenizer: str = ""
    algorithms: tuple[str, ...] = NESTED
    counts: tuple[int, ...] = (2, 4, 8)
    blocks: int = 64
    budget: int = 8
    seeds: tuple[int, ...] = (0, 1, 2)
    tuning_seed: int = 100
    rounds: int = 0
    local_steps: int = 0
    device: str | None = None

    def task(self, split: str = "validation") -> Language:
        """What is trained, evaluated on the "validation" text or on "held-out" blocks of train."""
        overrides = {"tokenizer": self.tokenizer} if self.tokenizer else {}
        problem = task("pretraining", self.preset, data=self.data, judge=split, **overrides)
        assert isinstance(problem, Language)
        return problem

    def length(self) -> tuple[int, int]:
        """Rounds, and local steps of each."""
        defaults = self.task().defaults
        return self.rounds or defaults.rounds, self.local_steps or int(defaults.local_steps or 1)

    def names(self) -> tuple[str, ...]:
        """What is compared, the reference first."""
        return (REFERENCE, *self.algorithms)

    def key(self) -> str:
        """A digest of what every run depends on: not of how many runs there are."""
        amount = ("algorithms", "counts", "seeds", "device")
        return digest({name: value for name, value in asdict(self).items() if name not in amount})

    def check(self) -> None:
        """Raise for a plan that cannot be run."""
        for nodes in (*self.counts, TUNED_AT):
            if self.blocks % nodes:
                raise ValueError(f"Invalid blocks: got {self.blocks}; need a multiple of {nodes}, the number of nodes.")
        for name in self.algorithms:
            outer, inner = rules_of(name)
            if outer not in SPACE.outer or inner not in SPACE.inner:
                raise ValueError(f"Invalid algorithms: got {name!r}; need some of {', '.join(NESTED)}, with commas.")


SMALL = PretrainingPlan("small", blocks=16, budget=5, seeds=(0, 1))


def run(out: Path, options: StudyOptions) -> Path:
    """Run what is not in `out` yet, and write table.md, results.json and pretraining.png there.

    The preset "small" takes some ten minutes on two cores. `data` is a folder of text files.
    """
    plan = SMALL if options.small else PretrainingPlan(options.preset or "paper")
    plan = replace(plan, data=options.data or "", tokenizer=options.tokenizer or "", device=options.device)
    if options.algorithms:
        plan = replace(plan, algorithms=algorithm_names(options.algorithms))
    seeds = tuple(range(options.seeds)) if options.seeds else plan.seeds
    plan = replace(plan, budget=options.budget or plan.budget, seeds=seeds)
    if options.quick:
        plan = replace(plan, budget=1, seeds=(0,), counts=(2, 4), rounds=2, local_steps=2)
    return run_plan(out, plan, progress=options.progress, verdicts=not options.quick, command=options.command)


def run_plan(
    out: Path, plan: PretrainingPlan, *, progress: bool = True, verdicts: bool = True, command: str = ""
) -> Path:
    """Run a plan; without `verdicts` the table ranks nothing."""
    plan.check()
    if progress:
        print(cost(plan), file=sys.stderr, flush=True)
    with Progress(progress) as bar:
        settings = tuned_settings(plan, out, bar)
        curves = run_cells(plan, settings, out, bar)
    results = summarise(plan, settings, curves)
    write_results(out, results.as_json(), report(results, verdicts=verdicts), command)
    figure(results, out / "pretraining.png")
    return out


# --- One run ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PretrainingCell:
    """One run; algorithm: a name, or REFERENCE."""

    algorithm: str
    nodes: int
    seed: int


def trained(plan: PretrainingPlan, cell: PretrainingCell, settings: Mapping[str, Any], split: str) -> list[float]:
    """The loss after every round, or on the held-out blocks after the last; infinite where a run broke down."""
    problem, (rounds, steps), seed = plan.task(split), plan.length(), cell.seed
    if cell.algorithm == REFERENCE:
        return data_parallel(plan, problem, cell, settings)
    tuning = split == "held-out"
    try:
        result = simulate(
            problem.model(seed),
            algorithm(cell.algorithm, **settings),
            loss=problem.loss,
            data=problem.nodes(seed, cell.nodes),
            batch_size=plan.blocks // cell.nodes,
            rounds=rounds,
            local_steps=steps,
            seed=seed,
            evaluate=lambda model: problem.evaluate(model, seed),
            evaluate_every=rounds if tuning else 1,
            device=resolve_device(plan.device),
            progress=False,
            inplace=True,
        )
    except EveryoneExcluded:
        return [math.inf] * (1 if tuning else rounds)
    return [_finite(row["metrics"]["loss"]) for row in result.history if row.get("metrics")]


def data_parallel(
    plan: PretrainingPlan, problem: Language, cell: PretrainingCell, settings: Mapping[str, Any]
) -> list[float]:
    """One AdamW on the mean gradient over the nodes; their batches are those of `simulate`."""
    device, (rounds, steps) = torch.device(resolve_device(plan.device)), plan.length()
    model = problem.model(cell.seed).to(device).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings["ilr"], eps=settings["ieps"], weight_decay=settings["weight_decay"]
    )
    nodes = node_data(problem.nodes(cell.seed, cell.nodes), cell.seed, plan.blocks // cell.nodes)
    streams = [node.batches(0, rounds * steps) for node in nodes]
    curve = []
    for t in range(1, rounds + 1):
        for _ in range(steps):
            optimizer.zero_grad()
            mean_loss(problem, model, [to_device(next(stream), device) for stream in streams]).backward()
            optimizer.step()
        if t == rounds or problem.judge != "held-out":
            curve.append(_finite(problem.evaluate(model, cell.seed)["loss"]))
    return curve


def mean_loss(problem: Language, model: torch.nn.Module, batches: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """The mean over nodes of their losses; of batches of one size that is the loss of all of them as one."""
    if len({len(batch[0]) for batch in batches}) == 1:
        ids, counts = (torch.cat(list(column)) for column in zip(*batches, strict=True))
        return problem.loss(model, (ids, counts))
    return torch.stack([problem.loss(model, (batch[0], batch[1])) for batch in batches]).mean()


def _finite(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


# --- All runs ---------------------------------------------------------------------------------------------------------


def cost(plan: PretrainingPlan) -> str:
    """What a study will cost: one step of every size is timed, nothing else is run."""
    rounds, steps = plan.length()
    runs = {n: len(plan.seeds) for n in plan.counts}
    runs[TUNED_AT] = runs.get(TUNED_AT, 0) + plan.budget
    nested = sum(often * n * _seconds(plan, plan.blocks // n) for n, often in runs.items()) * len(plan.algorithms)
    whole = sum(runs.values()) * _seconds(plan, plan.blocks)
    minutes = (nested + whole) * rounds * steps / 60
    return (
        f"{len(plan.names())} ways of training, {plan.budget} trials each, then {len(plan.seeds)} seeds with "
        f"{', '.join(map(str, plan.counts))} nodes: {sum(runs.values()) * len(plan.names())} runs of {rounds * steps} "
        f"steps of {plan.blocks} blocks on {resolve_device(plan.device)}, about {minutes:.1f} min of training."
    )


def _seconds(plan: PretrainingPlan, blocks: int) -> float:
    problem = plan.task()
    return seconds_of_a_step(problem, problem.nodes(0, 1)[0][:blocks], 0, torch.device(resolve_device(plan.device)))


@dataclass(frozen=True)
class PretrainingTrial:
    """One point of the search. settings: as JSON, which has an order of its own."""

    algorithm: str
    settings: str


def tuned_settings(plan: PretrainingPlan, out: Path, bar: Progress) -> dict[str, dict[str, float]]:
    """The best settings of the reference and of every algorithm."""
    chosen: dict[str, dict[str, float]] = {}

    def best(name: str, space: Space) -> dict[str, float] | None:
        points = sweep_points(name, space.ranges_of(*rules_of(name)), plan.budget).settings
        grid = Grid[PretrainingTrial, float](
            cells=[PretrainingTrial(name, json.dumps(point, sort_keys=True)) for point in points],
            key=lambda trial: {"tuning": asdict(trial), "plan": plan.key()},
            measure=lambda trial, tick: _held_out_loss(plan, trial),
            label=lambda trial: f"{trial.algorithm}, tuning",
        )
        losses = run_grid(grid, out / RECORD, bar)
        first = min(losses, key=lambda trial: losses[trial])
        chosen[name] = json.loads(first.settings)
        return chosen[name] if math.isfinite(losses[first]) else None

    search(SPACE, plan.names(), best)
    return chosen


def _held_out_loss(plan: PretrainingPlan, trial: PretrainingTrial) -> float:
    cell = PretrainingCell(trial.algorithm, TUNED_AT, plan.tuning_seed)
    return trained(plan, cell, json.loads(trial.settings), "held-out")[-1]


def run_cells(
    plan: PretrainingPlan, settings: Mapping[str, Mapping[str, float]], out: Path, bar: Progress
) -> dict[PretrainingCell, list[float]]:
    """The loss of every run by round."""
    grid = Grid[PretrainingCell, list[float]](
        cells=[PretrainingCell(name, n, seed) for seed in plan.seeds for n in plan.counts for name in plan.names()],
        key=lambda cell: {**asdict(cell), "plan": plan.key()},
        measure=lambda cell, tick: trained(plan, cell, settings[cell.algorithm], "validation"),
        label=lambda cell: f"{cell.algorithm}, {cell.nodes} nodes, seed {cell.seed}",
    )
    return run_grid(grid, out / RECORD, bar)


# --- What came out ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PretrainingRow:
    """One algorithm on one number of nodes. losses, gaps: by seed, after the last round; curves: by seed and round."""

    algorithm: str
    nodes: int
    losses: list[float]
    gaps: list[float]
    curves: list[list[float]]

    @property
    def mean_gap(self) -> float:
        """The mean of the gaps over the seeds."""
        return statistics.fmean(self.gaps)


@dataclass(frozen=True)
class PretrainingResults:
    """Losses and gaps. plan: with the rounds and local steps that were run; model: the sizes of the model."""

    plan: PretrainingPlan
    data: str
    model: Mapping[str, int]
    unigram_loss: float
    settings: Mapping[str, Mapping[str, float]]
    rows: tuple[PretrainingRow, ...]

    def row(self, name: str, nodes: int) -> PretrainingRow:
        """The row of an algorithm on a number of nodes."""
        return next(row for row in self.rows if (row.algorithm, row.nodes) == (name, nodes))

    def as_json(self) -> dict[str, Any]:
        """As results.json has it."""
        return {"found" if key == "data" else key: value for key, value in as_json(self).items()}


def gap(loss: float, reference: float) -> float:
    """How far a loss is above the reference, in percent of the reference.

    Examples:
        >>> round(gap(2.1, 2.0), 3)
        5.0
    """
    return 100 * (loss / reference - 1)


def summarise(
    plan: PretrainingPlan,
    settings: Mapping[str, Mapping[str, float]],
    curves: Mapping[PretrainingCell, Sequence[float]],
) -> PretrainingResults:
    """Losses and gaps by algorithm and nodes."""
    rows = []
    for nodes in plan.counts:
        reference = [curves[PretrainingCell(REFERENCE, nodes, seed)][-1] for seed in plan.seeds]
        for name in plan.names():
            by_seed = [list(curves[PretrainingCell(name, nodes, seed)]) for seed in plan.seeds]
            losses = [curve[-1] for curve in by_seed]
            gaps = [gap(loss, theirs) for loss, theirs in zip(losses, reference, strict=True)]
            rows.append(PretrainingRow(name, nodes, losses, gaps, by_seed))
    rounds, steps = plan.length()
    problem = plan.task()
    sizes = {name: getattr(problem, name) for name in ("layers", "width", "heads", "length")}
    plan = replace(plan, rounds=rounds, local_steps=steps)
    return PretrainingResults(plan, problem.data_description, sizes, math.log(problem.unigram), settings, tuple(rows))


def report(results: PretrainingResults, verdicts: bool = True) -> str:
    """Table, settings and what they show, as Markdown."""
    plan, model = results.plan, results.model
    head, rows = ["algorithm"], []
    for nodes in plan.counts:
        head += [f"{nodes} nodes: loss", "gap, %"]
    for name in plan.names():
        texts = [name]
        for row in (results.row(name, nodes) for nodes in plan.counts):
            texts += [mean_and_deviation(row.losses, 3), "–" if name == REFERENCE else mean_and_deviation(row.gaps, 1)]
        rows.append(texts)
    tokens = plan.rounds * plan.local_steps * plan.blocks * model["length"]
    lines = [
        *markdown_table(head, rows, "lr"),
        "",
        f"Mean over {len(plan.seeds)} seeds, ± their standard deviation; loss in nats per token, gap to data-parallel "
        "AdamW on the same batches. Less is better.",
        "",
        f"- {results.data} Such a model has a loss of {results.unigram_loss:.3f}.",
        f"- GPT-2 from scratch, {model['layers']} layers, {model['width']} wide, {model['heads']} heads, "
        f"{'bytes' if plan.preset == 'small' and not plan.tokenizer else 'tokens'} in blocks of "
        f"{model['length']}; {plan.rounds} rounds of {plan.local_steps} local steps, {plan.blocks} blocks per "
        f"step dealt to the nodes: {tokens:,} in all, preset {plan.preset}.",
        f"- Tuned with {plan.budget} random settings each, {TUNED_AT} nodes, seed {plan.tuning_seed}, on blocks "
        "held out of train; constant learning rates.",
        *(f"- {name}: {settings_text(numbers, '{} = {:.3g}')}." for name, numbers in results.settings.items()),
        "",
        *(_ranking(results) if verdicts else [UNJUDGED]),
    ]
    return "\n".join(lines) + "\n"


def _ranking(results: PretrainingResults) -> list[str]:
    """One line per number of nodes; no numbered claim is about pretraining."""
    lines = []
    for nodes in results.plan.counts:
        ranked = sorted((results.row(name, nodes) for name in results.plan.algorithms), key=lambda row: row.mean_gap)
        if ranked:
            order = ", ".join(f"{row.algorithm} {row.mean_gap:+.1f} %" for row in ranked)
            lines.append(f"- {nodes} nodes, by gap: {order}.")
    return lines


# --- The figure -------------------------------------------------------------------------------------------------------


def figure(results: PretrainingResults, path: Path) -> None:
    """Losses by step, one panel per number of nodes, and the gaps by nodes."""
    plan, unigram = results.plan, results.unigram_loss
    drawing, axes = panels(len(plan.counts) + 1, columns=2, height=3.0)
    finite = [loss for row in results.rows for curve in row.curves for loss in curve if math.isfinite(loss)]
    limits = min([*finite, unigram]) - 0.1, max([*finite, unigram]) + 0.1
    steps = [plan.local_steps * t for t in range(1, plan.rounds + 1)]
    for axis, nodes in zip(axes, plan.counts, strict=False):
        for name in plan.names():
            band(axis, steps, results.row(name, nodes).curves, **{**_look(name), "marker": "o", "markersize": 2.5})
        compare_with(axis, unigram, "unigram model")
        axis.set(xlabel="step", ylabel="loss, nats per token", ylim=limits)
        named(axis, f"{nodes} nodes")
        axis.grid(alpha=0.25, linewidth=0.5)
    _gaps_panel(axes[-1], results)
    name_line_ends(axes)
    finish(
        drawing,
        f"Pretraining, the same tokens for everybody, {plan.local_steps} local steps per round: validation loss, "
        f"{band_text(len(plan.seeds))}",
        path,
    )


def _gaps_panel(axis: Any, results: PretrainingResults) -> None:
    counts = results.plan.counts
    for number, name in enumerate(results.plan.names()):
        positions = [i + 0.06 * (number - 2) for i in range(len(counts))]  # side by side
        rows = [results.row(name, nodes) for nodes in counts]
        means = [row.mean_gap for row in rows]
        bars = [[row.mean_gap - min(row.gaps) for row in rows], [max(row.gaps) - row.mean_gap for row in rows]]
        axis.errorbar(positions, means, yerr=bars, capsize=2, linewidth=1.5, **{**_look(name), "marker": "o"})
    axis.set_xticks(range(len(counts)), [str(n) for n in counts])
    named(axis, "at the end, mean and range")
    axis.set(xlabel="nodes", ylabel="gap to data-parallel AdamW, %")
    axis.grid(alpha=0.25, linewidth=0.5)


def _look(name: str) -> dict[str, Any]:
    if name == REFERENCE:
        return {**LineStyle("black").keywords(), "label": "data-parallel AdamW"}
    return look(name)
