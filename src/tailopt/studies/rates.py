"""The rate study: how fast the measure of a theorem falls, beside the rate that the theorem promises.

The objective is known and every gradient has fresh, centred, skewed noise whose alpha-moment is barely finite
(`tasks.gradient_noise`); settings follow `tailopt.theory`. With E the mean over repetitions,

    measure(T)  =  min over t <= T of E ||grad F(x_t)||^2      or, for avg-l2clip,  E F(average of x_1 ... x_T) - F*
    slope       =  that of log measure against log T, by least squares over the last decade of rounds
    promise     =  measure = O(T^(-r) (log T)^k)

The interval is the bootstrap's over repetitions. A promise is an upper bound: a steeper slope agrees with it, a flatter
one does not. (log T)^k makes the bound flatter within the window by a known amount, which is allowed for and shown.
A promise holds where the interval is on its side over the decade and again from a third of the rounds on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tailopt.figures.labels import name_line_ends, named, plain_ticks
from tailopt.figures.style import PALETTE, look
from tailopt.studies.plots import finish, panels
from tailopt.studies.protocol import UNJUDGED, Claim, decide
from tailopt.studies.rate_cells import CASES, LOCAL_STEPS, NODES, PANEL, PANEL_ALPHA, THRESHOLDS
from tailopt.studies.rate_fits import Rate, Rates, rates
from tailopt.studies.runner import write_results
from tailopt.studies.study import StudyOptions
from tailopt.studies.tables import markdown_table, settings_text
from tailopt.tasks.gradient_noise import GradientNoise

SUMMARY = "the decay that the theorems promise, measured; ten minutes"
OPTIONS: tuple[str, ...] = ()


def run(out: Path, options: StudyOptions) -> Path:
    """Run what is not in `out` yet, and write table.md, results.json and rates.png there.

    `quick` is a few rounds at one alpha.
    """
    if options.quick:
        results = rates(4, 40, alphas=(1.5,), out=out, progress=options.progress)
        results = replace(results, rows=tuple(replace(row, verdict="") for row in results.rows))
    else:
        results = rates(out=out, progress=options.progress)
    write_results(out, results, report(results, verdicts=not options.quick), options.command)
    figure(results, out / "rates.png")
    return out


# --- Claims and rates -------------------------------------------------------------------------------------------------


def evaluate_claims(results: Rates) -> tuple[Claim, ...]:
    """Claim 13, by the panel of thresholds."""
    panel = {row.variant: row for row in results.thresholds}
    if not panel:
        return ()
    free, fixed = panel["scheduled"], panel["u and d constant"]
    assert fixed.limit is not None
    biased: bool | None = None
    if fixed.end_low > free.end_high:
        biased = abs(math.log(fixed.end / fixed.limit)) < math.log(1.5) or None
    elif fixed.end_high < free.end_low:
        biased = False
    removed = free.high < -0.05 if free.high < -0.05 or free.low > -0.05 else None
    fell = free.clipped[-1] < free.clipped[0] / 2
    stayed = fixed.clipped[-1] > free.clipped[-1]
    return (
        decide(
            13,
            "Constant thresholds bias the limit.",
            biased,
            f"‖∇F‖² ends at {fixed.end:.3g} ({fixed.end_low:.3g} to {fixed.end_high:.3g}) with constant "
            f"thresholds, where {fixed.limit:.3g} is computed for the limit, and at {free.end:.3g} "
            f"({free.end_low:.3g} to {free.end_high:.3g}) with scheduled ones",
        ),
        decide(
            13,
            "Growing u and vanishing d remove the bias.",
            removed,
            f"with scheduled thresholds the slope is {free.slope:.2f} ({free.low:.2f} to {free.high:.2f}) over rounds "
            f"{results.window[0]} to {results.window[1]}; with constant ones {fixed.slope:.2f} "
            f"({fixed.low:.2f} to {fixed.high:.2f})",
        ),
        decide(
            13,
            "They are a continual warm-up: ever more gradients pass unclipped.",
            fell and stayed,
            f"{free.clipped[0]:.0%} of the coordinates were at or above u in round 1 and {free.clipped[-1]:.1%} in the "
            f"last, against {fixed.clipped[0]:.0%} and {fixed.clipped[-1]:.1%} with constant thresholds",
        ),
    )


def _rate_lines(results: Rates) -> list[str]:
    """One line per case: its worst verdict over alpha."""
    order = ("does not hold", "cannot tell", "holds with the logarithm", "holds")
    lines = []
    for name in dict.fromkeys(row.case for row in results.rows):
        rows = [row for row in results.rows if row.case == name]
        worst = min((row.verdict for row in rows), key=order.index)
        slopes = "; ".join(
            f"alpha {r.alpha:g}: {r.slope:.2f} ({r.low:.2f} to {r.high:.2f}) for {r.promise:.2f}" for r in rows
        )
        lines.append(f"- **Rate of {name}: {worst}.** Slopes, with the promised one: {slopes}.")
    return lines


# --- The page ---------------------------------------------------------------------------------------------------------


def report(results: Rates, verdicts: bool = True) -> str:
    """The table, the claims and the settings, as Markdown; verdicts only where `verdicts` is set."""
    first, last = results.window
    lines = [
        f"Slopes of log measure against log T over rounds {first} to {last}, {results.repetitions} repetitions. "
        "`log T`: by how much the logarithms of the bound make it flatter in this window. `late`: the slope from a "
        "third of the rounds on.",
        "",
        *_slopes_table(results, verdicts),
    ]
    if results.thresholds:
        lines += ["", *_thresholds_table(results)]
    lines += ["", "## Claims", ""]
    lines += [*_rate_lines(results), *(c.line() for c in evaluate_claims(results))] if verdicts else [UNJUDGED]
    return "\n".join([*lines, "", "## Settings", "", *_settings_lines(results)]) + "\n"


def _slopes_table(results: Rates, verdicts: bool) -> list[str]:
    head = ["case", "objective", "measure", "alpha", "promised", "log T", "measured", "95 % interval", "late"]
    rows = [
        [
            row.case,
            row.objective,
            row.measure,
            f"{row.alpha:g}",
            f"{row.promise:.3f}",
            f"{row.allowance:+.3f}",
            f"{row.slope:.3f}",
            f"{row.low:.3f} to {row.high:.3f}",
            f"{row.late:.3f} ({row.late_low:.3f} to {row.late_high:.3f})",
            *([row.verdict] if verdicts else []),
        ]
        for row in results.rows
    ]
    return markdown_table([*head, *(["verdict"] if verdicts else [])], rows, "lllrrrrl")


def _thresholds_table(results: Rates) -> list[str]:
    head = ["thresholds", "at the end", "95 % interval", "computed limit", "slope", "95 % interval"]
    rows = [
        [
            row.variant,
            f"{row.end:.3g}",
            f"{row.end_low:.3g} to {row.end_high:.3g}",
            "0" if row.limit is None else f"{row.limit:.3g}",
            f"{row.slope:.2f}",
            f"{row.low:.2f} to {row.high:.2f}",
            f"{row.clipped[0]:.0%}, {row.clipped[-1]:.1%}",
        ]
        for row in results.thresholds
    ]
    return [
        f"Thresholds of {PANEL.algorithm} on the {PANEL.objective} objective, alpha = {PANEL_ALPHA:g}: "
        "E ‖∇F(x_T)‖² itself, not its minimum.",
        "",
        *markdown_table([*head, "share clipped at u"], rows, "lrlrrl"),
    ]


def _settings_lines(results: Rates) -> list[str]:
    task = GradientNoise()
    return [
        f"- {NODES} nodes, {LOCAL_STEPS} local steps, {results.rounds} rounds, dimension {task.dimension}, w from 0.",
        f"- Failing nodes: {CASES['avg-l2clip, failing nodes'].sampled} of {NODES} drawn uniformly in every round, "
        "independently in every repetition.",
        f"- Noise: Lomax of exponent alpha + {task.excess:g}, scale {task.scale:g}, positive with probability "
        f"{(1 + task.skew) / 2:g}, centred; of its own in every coordinate of every gradient.",
        "- Settings in round 1, which `tailopt.theory(algorithm, alpha).schedules` multiplies:",
        *(f"  - {name}: {settings_text(case.settings, '{} {:g}')}" for name, case in CASES.items()),
        f"- No projection; |x_t| never exceeded {results.radius:.1f}, so one on a larger ball would change nothing.",
        f"- {results.seconds:.0f} s of processor time.",
    ]


# --- The figure -------------------------------------------------------------------------------------------------------


def figure(results: Rates, path: Path) -> None:
    """The measures with their promises, one panel per alpha, and the panels of the thresholds."""
    alphas = list(dict.fromkeys(row.alpha for row in results.rows))
    more = 3 if results.thresholds else 0
    drawing, axes = panels(len(alphas) + more, columns=2, height=3.2)
    for axis, alpha in zip(axes, alphas, strict=False):
        axis.axvspan(*results.window, color="0.95", zorder=0)
        for row in (r for r in results.rows if r.alpha == alpha):
            line = {**look(CASES[row.case].algorithm), "label": row.case}
            if CASES[row.case].sampled:
                line |= {"linestyle": (0, (2, 1)), "alpha": 0.6}
            axis.plot(row.rounds, row.values, linewidth=1.4, **line)
            _promise(axis, row, results.window)
        axis.set(xscale="log", yscale="log", xlabel="rounds T", ylabel="measure of the theorem")
        named(axis, f"alpha = {alpha:g}")
    if more:
        _panel(results, axes[-3:-1])
        _slopes(results, axes[-1])
    for axis in axes:
        for scale in (axis.xaxis, axis.yaxis):
            if scale.get_scale() == "log":
                plain_ticks(scale)
    name_line_ends(axes)
    finish(drawing, f"Decay by round, {results.repetitions} repetitions; thin black lines: promised slopes", path)


def _slopes(results: Rates, axis: Any) -> None:
    """Measured slopes with their intervals, and promised ones."""
    rows = sorted(results.rows, key=lambda r: (list(CASES).index(r.case), r.alpha))
    for i, row in enumerate(rows):
        colour = look(CASES[row.case].algorithm)["color"]
        axis.plot((row.low, row.high), (-i, -i), color=colour, linewidth=2)
        axis.plot(row.slope, -i, marker="o", color=colour, linestyle="none", markersize=4)
        axis.plot(row.promise, -i, marker="|", color="0.2", markersize=9, linestyle="none")
    axis.set_yticks([-i for i in range(len(rows))], [f"{r.case}, {r.alpha:g}" for r in rows], fontsize=7)
    axis.set_xlabel("slope (bar: promised; left of it is faster)")
    named(axis, "measured, with 95 % interval, and promised")


def _promise(axis: Any, row: Rate, window: tuple[int, int]) -> None:
    """The promised slope, through the measure where the window begins."""
    i = next(i for i, t in enumerate(row.rounds) if t >= window[0])
    ends = row.rounds[i], row.rounds[-1]
    axis.plot(ends, [row.values[i] * (t / ends[0]) ** row.promise for t in ends], color="0.35", linewidth=0.8)


def _panel(results: Rates, axes: Sequence[Any]) -> None:
    """The measure and the share clipped, with thresholds scheduled or constant."""
    # One algorithm four times: its colour means nothing here, so these are four others.
    names = dict(zip(THRESHOLDS, ("black", "blue", "purple", "orange"), strict=True))
    colours = {variant: PALETTE[name] for variant, name in names.items()}
    dashes = dict(zip(THRESHOLDS, ("-", "--", ":", "-."), strict=True))
    left, right = axes[0], axes[1]
    for row in results.thresholds:
        line = {"color": colours[row.variant], "linestyle": dashes[row.variant], "label": row.variant}
        left.plot(row.rounds, row.values, linewidth=1.6, **line)
        if row.limit is not None:
            left.plot(results.rounds * 1.25, row.limit, marker="_", markersize=12, color=colours[row.variant])
        right.plot(row.rounds, row.clipped, linewidth=1.6, **line)
    named(left, f"{PANEL.algorithm}, {PANEL.objective}, alpha = {PANEL_ALPHA:g}")
    left.set(xscale="log", yscale="log", xlabel="rounds T", ylabel="‖∇F(x_T)‖² (bars: computed limits)")
    named(right, "the same: a continual warm-up")
    right.set(xscale="log", xlabel="rounds T", ylabel="share of coordinates clipped at u")
    right.set_ylim(0, None)
