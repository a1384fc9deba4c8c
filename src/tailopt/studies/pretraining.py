"""Pretraining a language model on nodes that rarely meet, against data-parallel training on the same tokens.

    gap = 100 (loss / loss of data-parallel AdamW - 1),    losses on text that nobody trains on

Data-parallel training is one AdamW on the mean gradient of the batches that the nodes take in the same local step; it
meets after every step, the others after every round. Steps and tokens are the same for any number of nodes: what a
step takes is dealt out among them. Everybody is tuned by the same number of random settings on held-out blocks, with
`TUNED_AT` nodes, and reported with those settings for every number of nodes. Learning rates are constant.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tailopt.algorithms import ALGORITHMS, algorithm
from tailopt.engines.batches import to_device
from tailopt.engines.simulate import simulate
from tailopt.figures.style import look, pyplot
from tailopt.paper.tables import algorithm_name
from tailopt.progress import Progress
from tailopt.records import disk, history
from tailopt.rounds.settle import EveryoneExcluded
from tailopt.splits.loaders import node_data
from tailopt.studies.protocol import UNJUDGED, one_sided_draws
from tailopt.studies.study import StudyOptions, resolve_device
from tailopt.sweeps.search import Point, Range, best, search
from tailopt.sweeps.space import Space, settings_at
from tailopt.tasks.language import Language
from tailopt.tasks.table import task

SUMMARY = "DiLoCo and others against data-parallel training; ten minutes in the preset small"
OPTIONS = ("preset", "tokenizer", "data", "algorithms", "seeds", "budget", "device")

REFERENCE = "data-parallel"
NESTED = ("diloco", "adam2", "rmsprop-biclip", "bi2clip")
TUNED_AT = 4

# Outside, everything is looked for about where a step is as long as the mean displacement, some 1e-3 to 1e-2 a
# coordinate: olr = 1 where it is clipped, olr of the size of root(v) + oeps where it is divided by that.
_SHARE, _EPS = Range(0.03, 1.0), Range(1e-8, 1e-5)
_ADAM = {"ilr": Range(3e-4, 5e-3), "ieps": _EPS}
SPACE = Space(
    inner={
        "adam": _ADAM,
        "adamw": {**_ADAM, "weight_decay": Range(1e-4, 1e-1)},
        "biclip": {"i_move": Range(3e-4, 3e-3), "i_u": Range(1e-4, 1e-2), "i_share": _SHARE},
    },
    outer={
        "adam": {"olr": Range(3e-3, 3e-2), "oeps": Range(1e-3, 1e-2)},
        "rmsprop": {"olr": Range(1e-3, 1e-2), "oeps": Range(1e-3, 1e-2)},
        "biclip": {"olr": Range(0.5, 2.0), "o_u": Range(3e-3, 3e-2), "o_share": Range(1e-3, 1e-1)},
        "nesterov": {"olr": Range(0.3, 1.0), "momentum": Range(0.3, 0.9, log=False)},
    },
)


@dataclass(frozen=True)
class Plan:
    """Everything that a result depends on.

    Attributes:
        preset, data, tokenizer: of the task `pretraining`; an empty tokenizer is the preset's.
        counts: numbers of nodes.
        blocks: that are trained on in a step, by all nodes together.
        budget: random settings tried for each algorithm.
        rounds, local_steps: 0 for the task's.
        device: None: a GPU where there is one.
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

    def task(self, judge: str = "validation") -> Language:
        """What is trained."""
        over = {"tokenizer": self.tokenizer} if self.tokenizer else {}
        made = task("pretraining", self.preset, data=self.data, judge=judge, **over)
        assert isinstance(made, Language)
        return made

    def length(self) -> tuple[int, int]:
        """Rounds, and local steps of each."""
        usual = self.task().defaults
        return self.rounds or usual.rounds, self.local_steps or int(usual.local_steps or 1)

    def place(self) -> str:
        """Where it runs."""
        return resolve_device(self.device)

    def key(self) -> str:
        """A name for results of this plan; what only says how much of it is run is left out."""
        left_out = ("algorithms", "counts", "seeds", "device")
        kept = {name: value for name, value in asdict(self).items() if name not in left_out}
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


SMALL = Plan("small", blocks=16, budget=5, seeds=(0, 1))


def run(out: Path, options: StudyOptions) -> Path:
    """Run what is not in `out` yet, and write table.md, results.json and pretraining.png there.

    Args:
        out: a folder. `cells.jsonl` in it holds every finished run, `trials` every trial; these are not run again.
        quick: two rounds of two steps, to see that it works; its figures say nothing.
        preset: "paper" or "small", some ten minutes on two cores.
        data: a folder of text files.
        plan: instead of all these.
    """
    base = SMALL if options.small else Plan(options.preset or "paper")
    plan = replace(base, data=options.data or "", tokenizer=options.tokenizer or "", device=options.device)
    if options.algorithms:
        plan = replace(plan, algorithms=tuple(algorithm_name(name.strip()) for name in options.algorithms.split(",")))
    seeds = tuple(range(options.seeds)) if options.seeds else plan.seeds
    plan = replace(plan, budget=options.budget or plan.budget, seeds=seeds)
    if options.quick:
        plan = replace(plan, budget=1, seeds=(0,), counts=(2, 4), rounds=2, local_steps=2)
    return run_plan(out, plan, progress=options.progress, judge=not options.quick)


def run_plan(out: Path, plan: Plan, *, progress: bool = True, judge: bool = True) -> Path:
    """Run a plan; without `judge` the table ranks nothing."""
    uneven = [n for n in (*plan.counts, TUNED_AT) if plan.blocks % n]
    if uneven:
        raise ValueError(f"Invalid blocks: got {plan.blocks}; need a multiple of {uneven[0]}, the number of nodes.")
    for name in plan.algorithms:
        ranges(name)  # refused here, before anything is run
    out.mkdir(parents=True, exist_ok=True)
    if progress:
        print(cost(plan), file=sys.stderr, flush=True)
    with Progress(progress) as bar:
        chosen = _tuned(plan, out / "trials" / plan.key(), bar.update)
        cells = _cells(plan, chosen, out / "cells.jsonl", bar.update)
    results = summarise(plan, chosen, cells)
    disk.replace(out / "results.json", (json.dumps(results, indent=1) + "\n").encode())
    disk.replace(out / "table.md", report(results, judge=judge).encode())
    figure(results, out / "pretraining.png")
    return out


# --- One run ----------------------------------------------------------------------------------------------------------


def trained(plan: Plan, name: str, numbers: Mapping[str, Any], nodes: int, seed: int, judge: str) -> list[float]:
    """The loss after every round; infinite from where a run broke down."""
    problem, (rounds, steps) = plan.task(judge), plan.length()
    if name == REFERENCE:
        return data_parallel(plan, problem, numbers, nodes, seed)
    tuning = judge == "held-out"
    try:
        result = simulate(
            problem.model(seed),
            algorithm(name, **numbers),
            loss=problem.loss,
            data=problem.nodes(seed, nodes),
            batch_size=plan.blocks // nodes,
            rounds=rounds,
            local_steps=steps,
            seed=seed,
            evaluate=lambda model: problem.evaluate(model, seed),
            evaluate_every=rounds if tuning else 1,
            device=plan.place(),
            progress=False,
            inplace=True,
        )
    except EveryoneExcluded:
        return [math.inf] * (1 if tuning else rounds)
    return [_finite(row["metrics"]["loss"]) for row in result.history if row.get("metrics")]


def data_parallel(plan: Plan, problem: Language, numbers: Mapping[str, Any], nodes: int, seed: int) -> list[float]:
    """One AdamW on the mean over the nodes of the gradients of their batches; those are the ones of `simulate`."""
    place, (rounds, steps) = torch.device(plan.place()), plan.length()
    model = problem.model(seed).to(place).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=numbers["ilr"], eps=numbers["ieps"], weight_decay=numbers["weight_decay"]
    )
    streams = [
        node.batches(0, rounds * steps) for node in node_data(problem.nodes(seed, nodes), seed, plan.blocks // nodes)
    ]
    curve = []
    for t in range(1, rounds + 1):
        for _ in range(steps):
            optimizer.zero_grad()
            mean_loss(problem, model, [to_device(next(stream), place) for stream in streams]).backward()
            optimizer.step()
        if t == rounds or problem.judge != "held-out":
            curve.append(_finite(problem.evaluate(model, seed)["loss"]))
    return curve


def mean_loss(problem: Language, model: torch.nn.Module, batches: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """The mean over nodes of their losses; of batches of one size that is the loss of all of them as one."""
    if len({len(batch[0]) for batch in batches}) == 1:
        ids, counts = (torch.cat(list(column)) for column in zip(*batches, strict=True))
        return problem.loss(model, (ids, counts))
    return torch.stack([problem.loss(model, (batch[0], batch[1])) for batch in batches]).mean()


def _finite(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


# --- All of them ------------------------------------------------------------------------------------------------------


def names(plan: Plan) -> tuple[str, ...]:
    """What is compared, the reference first."""
    return (REFERENCE, *plan.algorithms)


def ranges(name: str) -> dict[str, Range]:
    """Where the settings are looked for."""
    if name == REFERENCE:
        return dict(SPACE.inner["adamw"])
    outer, inner = ALGORITHMS[name]
    if outer not in SPACE.outer or inner not in SPACE.inner:
        raise ValueError(f"Invalid algorithms: got {name!r}; need some of {', '.join(NESTED)}, with commas.")
    return SPACE.ranges(name)


def cost(plan: Plan) -> str:
    """What it will take: a step of every kind is timed, nothing else is run."""
    rounds, steps = plan.length()
    runs = {n: len(plan.seeds) for n in plan.counts}
    runs[TUNED_AT] = runs.get(TUNED_AT, 0) + plan.budget
    nested = sum(often * n * _seconds(plan, plan.blocks // n) for n, often in runs.items()) * len(plan.algorithms)
    whole = sum(runs.values()) * _seconds(plan, plan.blocks)
    minutes = (nested + whole) * rounds * steps / 60
    return (
        f"{len(names(plan))} ways of training, {plan.budget} trials each, then {len(plan.seeds)} seeds with "
        f"{', '.join(map(str, plan.counts))} nodes: {sum(runs.values()) * len(names(plan))} runs of {rounds * steps} "
        f"steps of {plan.blocks} blocks on {plan.place()}, about {minutes:.1f} min of training."
    )


def _seconds(plan: Plan, blocks: int) -> float:
    """Of a forward and a backward pass: the least of two, after a first one."""
    problem, place = plan.task(), torch.device(plan.place())
    model = problem.model(0).to(place)
    batch = to_device(problem.nodes(0, 1)[0][:blocks], place)
    times = []
    for _ in range(3):
        began = time.perf_counter()
        loss = problem.loss(model, batch)
        loss.backward()
        loss.item()  # waits for the device
        times.append(time.perf_counter() - began)
    return min(times[1:])


def _tuned(plan: Plan, folder: Path, advance: Callable[[int, int, str], None]) -> dict[str, dict[str, float]]:
    """The best settings of everybody."""
    chosen = {}
    total = plan.budget * len(names(plan))
    for number, name in enumerate(names(plan)):

        def measure(points: list[Point], name: str = name) -> list[dict[str, float]]:
            return [
                {"loss": trained(plan, name, settings_at(p), TUNED_AT, plan.tuning_seed, "held-out")[-1]}
                for p in points
            ]

        advance(number * plan.budget, total, f"{name}, tuning")
        trials = search(measure, ranges(name), plan.budget, record=folder / f"{name}.jsonl")
        chosen[name] = dict(sorted(settings_at(best(trials, "loss").point).items()))  # a record has an order of its own
    return chosen


def cells(plan: Plan) -> Iterator[tuple[str, int, int]]:
    """All there is to run: name, nodes, seed."""
    for seed in plan.seeds:
        for nodes in plan.counts:
            for name in names(plan):
                yield name, nodes, seed


def _cells(
    plan: Plan,
    chosen: Mapping[str, Mapping[str, float]],
    record: Path,
    advance: Callable[[int, int, str], None],
) -> dict[tuple[str, int, int], list[float]]:
    """The curves of all runs: from the record, or run now and recorded."""
    history.drop_torn_line(record)  # a line that a kill cut short
    done = {
        (row["algorithm"], row["nodes"], row["seed"]): row["curve"]
        for row in history.read(record)
        if row["plan"] == plan.key()
    }
    todo = [cell for cell in cells(plan) if cell not in done]
    for number, (name, nodes, seed) in enumerate(todo):
        advance(number, len(todo), f"{name}, {nodes} nodes, seed {seed}")
        began = time.perf_counter()
        curve = trained(plan, name, chosen[name], nodes, seed, "validation")
        row = {"algorithm": name, "nodes": nodes, "seed": seed, "plan": plan.key(), "round": len(curve)}
        history.append(record, {**row, "curve": curve, "seconds": time.perf_counter() - began})
        done[name, nodes, seed] = curve
    if todo:
        advance(len(todo), len(todo), "done")
    return done


# --- What was seen ----------------------------------------------------------------------------------------------------


def gap(loss: float, reference: float) -> float:
    """In percent of the reference.

    Examples:
        >>> round(gap(2.1, 2.0), 3)
        5.0
    """
    return 100 * (loss / reference - 1)


def summarise(
    plan: Plan, chosen: Mapping[str, Mapping[str, float]], found: Mapping[tuple[str, int, int], Sequence[float]]
) -> dict[str, Any]:
    """Losses and gaps by algorithm and nodes, as plain values."""
    rows = []
    for nodes in plan.counts:
        for name in names(plan):
            curves = [list(found[name, nodes, seed]) for seed in plan.seeds]
            last = [curve[-1] for curve in curves]
            gaps = [gap(loss, found[REFERENCE, nodes, seed][-1]) for loss, seed in zip(last, plan.seeds, strict=True)]
            rows.append({"algorithm": name, "nodes": nodes, "losses": last, "gaps": gaps, "curves": curves})
    rounds, steps = plan.length()
    problem = plan.task()
    return {
        "plan": {**asdict(plan), "rounds": rounds, "local_steps": steps},
        "found": problem.data_description,
        "model": {name: getattr(problem, name) for name in ("layers", "width", "heads", "length")},
        "unigram_loss": math.log(problem.unigram),
        "settings": {name: dict(numbers) for name, numbers in chosen.items()},
        "rows": rows,
    }


def report(results: Mapping[str, Any], judge: bool = True) -> str:
    """Table, settings and what they say, as Markdown."""
    plan, rows, counts = results["plan"], results["rows"], results["plan"]["counts"]
    lines = [
        "| algorithm | " + " | ".join(f"{n} nodes: loss | gap, %" for n in counts) + " |",
        "| --- |" + " ---: | ---: |" * len(counts),
    ]
    for name in dict.fromkeys(row["algorithm"] for row in rows):
        mine = [_row(rows, name, n) for n in counts]
        numbers = [
            f"{_spread(row['losses'])} | {'–' if name == REFERENCE else _spread(row['gaps'], 1)}" for row in mine
        ]
        lines.append(f"| {name} | " + " | ".join(numbers) + " |")
    model, steps = results["model"], plan["rounds"] * plan["local_steps"]
    lines += [
        "",
        f"Mean over {len(plan['seeds'])} seeds, ± their standard deviation; loss in nats a token, gap to data-parallel "
        "AdamW on the same batches. Less is better.",
        "",
        f"- {results['found']} Such a model has a loss of {results['unigram_loss']:.3f}.",
        f"- GPT-2 from scratch, {model['layers']} layers, {model['width']} wide, {model['heads']} heads, "
        f"{'bytes' if plan['preset'] == 'small' and not plan['tokenizer'] else 'tokens'} in blocks of "
        f"{model['length']}; {plan['rounds']} rounds of {plan['local_steps']} local steps, {plan['blocks']} blocks a "
        f"step dealt to the nodes: {steps * plan['blocks'] * model['length']:,} in all, preset {plan['preset']}.",
        f"- Tuned with {plan['budget']} random settings each, {TUNED_AT} nodes, seed {plan['tuning_seed']}, on blocks "
        "held out of train; constant learning rates.",
        *one_sided_draws(plan["budget"]),
        *(f"- {name}: {_numbers(numbers)}." for name, numbers in results["settings"].items()),
        "",
        *(_said(results) if judge else [UNJUDGED]),
    ]
    return "\n".join(lines) + "\n"


def _said(results: Mapping[str, Any]) -> list[str]:
    """What the gaps say; no numbered claim is about pretraining."""
    rows = [row for row in results["rows"] if row["algorithm"] != REFERENCE]
    found = []
    for n in results["plan"]["counts"]:
        ranked = sorted((row for row in rows if row["nodes"] == n), key=lambda row: statistics.fmean(row["gaps"]))
        if ranked:
            order = ", ".join(f"{row['algorithm']} {statistics.fmean(row['gaps']):+.1f} %" for row in ranked)
            found.append(f"- {n} nodes, by gap: {order}.")
    return found


def _row(rows: Sequence[Mapping[str, Any]], name: str, nodes: int) -> Mapping[str, Any]:
    return next(row for row in rows if (row["algorithm"], row["nodes"]) == (name, nodes))


def _spread(numbers: Sequence[float], digits: int = 3) -> str:
    mean = statistics.fmean(numbers)
    if len(numbers) < 2 or not math.isfinite(mean):
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ± {statistics.stdev(numbers):.{digits}f}"


def _numbers(chosen: Mapping[str, float]) -> str:
    return ", ".join(f"{key} = {value:.3g}" for key, value in chosen.items())


def figure(results: Mapping[str, Any], path: Path) -> None:
    """Losses by step, a panel for each number of nodes, and the gaps by nodes."""
    plt = pyplot()
    plan, rows = results["plan"], results["rows"]
    counts = plan["counts"]
    drawn, axes = plt.subplots(1, len(counts) + 1, figsize=(3.4 * (len(counts) + 1), 3.8), layout="constrained")
    seen = [loss for row in rows for curve in row["curves"] for loss in curve if math.isfinite(loss)]
    low, high = min([*seen, results["unigram_loss"]]) - 0.1, max([*seen, results["unigram_loss"]]) + 0.1
    steps = [plan["local_steps"] * t for t in range(1, plan["rounds"] + 1)]
    for axis, nodes in zip(axes, counts, strict=False):
        for row in (row for row in rows if row["nodes"] == nodes):
            middle = [statistics.fmean(values) for values in zip(*row["curves"], strict=True)]
            axis.plot(steps, middle, marker="o", markersize=2.5, linewidth=1.5, **_look(row["algorithm"]))
        axis.axhline(results["unigram_loss"], color="#999999", linewidth=0.8, linestyle=(0, (2, 2)))
        axis.set(title=f"{nodes} nodes", xlabel="step", ylabel="validation loss, nats a token", ylim=(low, high))
        axis.grid(alpha=0.25, linewidth=0.5)
    _gaps(axes[-1], rows, counts)
    handles, labels = axes[0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8)
    drawn.suptitle(
        f"Pretraining, the same tokens for everybody: mean of {len(plan['seeds'])} seeds, {plan['local_steps']} local "
        "steps a round; grey: a unigram model; bars: the range of the seeds",
        fontsize=10,
    )
    drawn.savefig(path, dpi=130)
    plt.close(drawn)


def _gaps(axis: Any, rows: Sequence[Mapping[str, Any]], counts: Sequence[int]) -> None:
    for number, name in enumerate(dict.fromkeys(row["algorithm"] for row in rows)):
        places = [place + 0.06 * (number - 2) for place in range(len(counts))]  # beside each other, not over
        mine = [_row(rows, name, n)["gaps"] for n in counts]
        means = [statistics.fmean(gaps) for gaps in mine]
        below = [mean - min(gaps) for mean, gaps in zip(means, mine, strict=True)]
        above = [max(gaps) - mean for mean, gaps in zip(means, mine, strict=True)]
        line = {key: value for key, value in _look(name).items() if key != "label"}
        axis.errorbar(places, means, yerr=[below, above], marker="o", markersize=4, capsize=2, linewidth=1.5, **line)
    axis.set_xticks(range(len(counts)), [str(n) for n in counts])
    axis.set(title="at the end", xlabel="nodes", ylabel="gap to data-parallel AdamW, %")
    axis.grid(alpha=0.25, linewidth=0.5)


def _look(name: str) -> dict[str, Any]:
    if name == REFERENCE:
        return {"color": "#000000", "linestyle": "-", "label": "data-parallel AdamW"}
    return look(name)
