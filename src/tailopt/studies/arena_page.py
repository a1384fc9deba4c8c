"""The page and the figures of the study `arena`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tailopt.figures.labels import dash_legend, named, plain_ticks
from tailopt.figures.style import PALETTE
from tailopt.studies.arena_results import REFERENCES, ArenaResults, ArenaRow
from tailopt.studies.plots import finish, panels
from tailopt.studies.protocol import LEAST_SEEDS, UNJUDGED
from tailopt.studies.tables import markdown_table, mean_and_deviation

MEMORY, RATES = "arena-memory.png", "arena-rates.png"
OURS, OTHERS = PALETTE["vermillion"], PALETTE["blue"]
BY_BATCH = ("blue", "vermillion", "green", "purple")


# --- The page ---------------------------------------------------------------------------------------------------------


def report(results: ArenaResults, verdicts: bool = True) -> str:
    """The study as Markdown."""
    lines = ["# Optimizers on a decoder from scratch", ""]
    if results.left:
        lines += [f"**Not finished:** {results.left} The same command goes on.", ""]
    for tokens in results.batch_sizes:
        lines += _section(results, tokens, verdicts)
    lines += ["## How", "", *_methods(results), ""]
    lines += [] if verdicts else [UNJUDGED, ""]
    return "\n".join(lines)


def _section(results: ArenaResults, tokens: int, verdicts: bool) -> list[str]:
    rows = results.ranked(tokens)
    total = dict(map(tuple, results.plan["amounts"]))[tokens]
    title = f"## {tokens:,} tokens per step, {total:,} in all"
    if not rows:
        return [title, "", "No optimizer has been run on the reported seeds yet.", ""]
    head = [
        "optimizer", "rate", "loss", "more than AdamW", "state, bytes per parameter", "peak, MB", "seconds",
        "wrong rate",
    ]  # fmt: skip
    body = [_texts(results, row, len(rows) - 1, verdicts) for row in rows]
    return [title, "", *markdown_table(head, body, "lr"), "", *(_words(results, rows) if verdicts else []), ""]


def _texts(results: ArenaResults, row: ArenaRow, comparisons: int, verdicts: bool) -> list[str]:
    gap = results.more_than_reference(row, max(1, comparisons)) if verdicts else None
    between = (
        "reference" if row is results.reference(row.tokens) else "too few seeds" if gap is None else gap.text("{:+.3f}")
    )
    return [
        f"**{row.contender}**" if row.ours else row.contender,
        f"{row.rate:.3g}{' (end)' if row.at_end else ''}",
        mean_and_deviation(list(row.losses.values()), 3),
        between if verdicts else "–",
        f"{row.bytes_per_parameter:.2f}",
        "–" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:,.0f}",
        f"{row.seconds:.1f}",
        f"{row.sensitivity:+.3f}",
    ]


def _words(results: ArenaResults, rows: Sequence[ArenaRow]) -> list[str]:
    """Which optimizers are better than AdamW, which are worse, and of which the seeds cannot tell."""
    better: list[str] = []
    worse: list[str] = []
    open_: list[str] = []
    for row in rows:
        if row is results.reference(row.tokens):
            continue
        gap = results.more_than_reference(row, max(1, len(rows) - 1))
        group = open_ if gap is None or gap.low <= 0 <= gap.high else better if gap.high < 0 else worse
        group.append(row.contender)
    said = (("Better than AdamW", better), ("worse", worse), ("cannot tell", open_))
    return ["; ".join(f"{label}: {', '.join(names) or 'none'}" for label, names in said) + "."]


def _methods(results: ArenaResults) -> list[str]:
    plan = results.plan
    seeds, least = len(plan["seeds"]), [row for row in results.rows if row.at_end]
    lines = [
        f"- Text: {results.data} The file files.tsv has them with their digests.",
        f"- A Llama-like decoder of {plan['size']} parameters from scratch, {plan['length']} tokens a block, "
        f"{plan['precision']}, on {plan['device']}. Loss: nats per token on {plan['evaluated']} blocks of text that "
        "nobody trains on; less is better. This library's optimizers are bold.",
        "- The same data in the same order, a linear warm-up over a tenth of the steps and a cosine down to a tenth of "
        "the rate; schedule-free keeps its rate after the warm-up. No weight decay.",
        f"- Five rates each, a factor of root 10 apart, on a seed and on text of their own; then {seeds} seeds of the "
        f"best one: mean ± standard deviation. Ranges were longer by up to {plan['widenings']} rates, for all of a "
        "batch size where the best rate of one was at an end.",
        "- More than AdamW: than the one that did better while tuning, called reference; the mean difference over the "
        "seeds with its bootstrap interval of 95 % over all comparisons of a table. Fewer than "
        f"{LEAST_SEEDS} seeds decide nothing.",
        "- State: bytes in the tensors that an optimizer keeps, at most, counters of automatic thresholds included. "
        "Seconds: of training, on a machine that may have had other work; wrong rate: the mean loss that a rate costs "
        "which is too large or too small by a factor of root 10.",
        *(f"- {row.contender} ({row.source}): {row.settings}." for row in _once(results.rows) if row.settings),
    ]
    if plan["absent"]:
        lines.append(f"- Not run, because their packages are not installed: {', '.join(plan['absent'])}.")
    if least:
        ends = ", ".join(f"{row.contender} at {row.rate:.3g} with {row.tokens} tokens" for row in least)
        lines.append(f"- Best rates that are at an end of their range all the same: {ends}.")
    for check in results.checks:
        lines.append(
            f"- With twice as many rates the best {check.contender} with {check.tokens} tokens per step is "
            f"{check.percent:.2f} % better."
        )
    return lines


def _once(rows: Sequence[ArenaRow]) -> list[ArenaRow]:
    return list({row.contender: row for row in rows}.values())


# --- The figures ------------------------------------------------------------------------------------------------------


def draw(results: ArenaResults, out: Path) -> None:
    """Loss against memory, a panel for each batch size; and loss against rate, a panel for each optimizer."""
    if any(results.ranked(tokens) for tokens in results.batch_sizes):
        _draw_memory(results, out / MEMORY)
    if results.rows:
        _draw_rates(results, out / RATES)


def _draw_memory(results: ArenaResults, path: Path) -> None:
    figure, axes = panels(len(results.batch_sizes), columns=2, height=4.6)
    for axis, tokens in zip(axes, results.batch_sizes, strict=True):
        rows = [row for row in results.ranked(tokens) if math.isfinite(row.loss)]
        for row in rows:
            losses = list(row.losses.values())
            spread = [[row.loss - min(losses)], [max(losses) - row.loss]]
            colour, marker = (OURS, "o") if row.ours else (OTHERS, "s")
            axis.errorbar(row.bytes_per_parameter, row.loss, yerr=spread, color=colour, marker=marker, markersize=4)
        span = rows[-1].loss - rows[0].loss if rows else 0.0
        for row, y in _apart(rows, span / 24 or 1.0):
            axis.annotate(
                row.contender, (row.bytes_per_parameter, row.loss), (row.bytes_per_parameter + 0.35, y),
                fontsize=7, color=OURS if row.ours else OTHERS, va="center",
                arrowprops={"arrowstyle": "-", "linewidth": 0.4, "color": "#999999"},
            )  # fmt: skip
        named(axis, f"{tokens:,} tokens per step")
        axis.set(xlabel="optimizer state, bytes per parameter", ylabel="loss, nats per token")
        axis.set_xlim(-0.5, max([row.bytes_per_parameter for row in rows], default=8.0) + 3.2)
        axis.grid(alpha=0.25, linewidth=0.5)
    seeds = len(results.plan["seeds"])
    title = f"{results.plan['size']} parameters from scratch: mean and range of {seeds} seeds; red: this library's"
    finish(figure, title, path)


def _apart(rows: Sequence[ArenaRow], least: float) -> list[tuple[ArenaRow, float]]:
    """A height for every label: from the lowest loss upwards, those of one column of the figure kept apart."""
    placed: list[tuple[ArenaRow, float]] = []
    for row in rows:
        near = [y for other, y in placed if abs(other.bytes_per_parameter - row.bytes_per_parameter) < 2.5]
        placed.append((row, max([row.loss, *(y + least for y in near)])))
    return placed


def _draw_rates(results: ArenaResults, path: Path) -> None:
    names = [row.contender for row in _once(results.rows)]
    figure, axes = panels(len(names), columns=4, height=2.1)
    finite = [loss for row in results.rows for _, loss in row.tuned if math.isfinite(loss)]
    finite = finite or [0.0]
    low, high = min(finite), statistics.quantiles(finite, n=10)[-1] if len(finite) > 1 else max(finite)
    for axis, name in zip(axes, names, strict=True):
        for tokens, colour in zip(results.batch_sizes, BY_BATCH, strict=False):
            _draw_rate_line(axis, results, name, tokens, PALETTE[colour])
        axis.set_xscale("log")
        axis.set_ylim(low - 0.05 * (high - low), high + 0.1 * (high - low))
        named(axis, name)
        axis.set_xlabel("learning rate", fontsize=7)
        axis.tick_params(labelsize=7)
        plain_ticks(axis.xaxis, narrow=True)
        axis.grid(alpha=0.25, linewidth=0.5)
    figure.supylabel("loss on held-out text, nats per token", fontsize=9)
    dash_legend(figure, axes)
    finish(figure, "Loss by learning rate, one tuning seed; dashed: the best AdamW; a ring: what is reported", path)


def _draw_rate_line(axis: Any, results: ArenaResults, name: str, tokens: int, colour: str) -> None:
    by_name = {row.contender: row for row in results.rows if row.tokens == tokens}
    reference = [loss for known in REFERENCES if known in by_name for _, loss in by_name[known].tuned]
    if reference:
        axis.axhline(min(reference), color=colour, linewidth=0.8, linestyle=(0, (3, 2)))
    if name in by_name:
        row = by_name[name]
        drawn = [(rate, loss) for rate, loss in row.tuned if math.isfinite(loss)]
        axis.plot(
            *([point[i] for point in drawn] for i in (0, 1)),
            color=colour,
            marker=".",
            linewidth=1.2,
            label=f"{tokens:,} tokens per step",
        )
        axis.plot([row.rate], [dict(row.tuned)[row.rate]], "o", color=colour, fillstyle="none", markersize=7)
