"""Nodes that fail: how far from the optimum training ends when some of them are missing.

    F = sum of p_i F_i,    F_i(x) = (x - b_i)' A_i (x - b_i) / 2,    gradients of F_i + Student-t noise

A round's mean is over the nodes that are present, normalised: node i has the share s_i. What is minimised is therefore
G = sum of E[s_i] F_i. Where E[s_i] = p_i the objective is preserved, and F(average) - F* goes on falling; where it is
not, it stops at F(argmin G) - F*, the bias, which is known here. Shares are also skewed by learning rates that differ
between nodes: a schedule that counts a node's own steps gives a node that is rarely present the larger ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tailopt.figures.labels import name_line_ends, named, plain_ticks
from tailopt.figures.style import LineStyle
from tailopt.studies.failure_cells import (
    ALGORITHMS,
    FULL,
    QUICK,
    FailureCell,
    FailuresPlan,
    cells,
    recorded_rounds,
    run_cells,
)
from tailopt.studies.fits import slope
from tailopt.studies.plots import finish, panels
from tailopt.studies.protocol import Claim, all_hold, claim_lines, decide
from tailopt.studies.runner import as_json, write_results
from tailopt.studies.study import StudyOptions
from tailopt.studies.tables import markdown_table, with_range
from tailopt.theory import theory

SUMMARY = "nodes that drop out: harmless, or a biased limit; minutes"
OPTIONS: tuple[str, ...] = ()

CLAIM = "Node failures are harmless while the objective is preserved in expectation, and bias the limit otherwise."
JUDGED = "avg-l2clip"  # the theorem is about it; constant thresholds have a bias of their own, whatever fails


def run(out: Path, options: StudyOptions) -> Path:
    """Run what is not in `out` yet, and write table.md, results.json and failures.png there."""
    plan = QUICK if options.quick else FULL
    results = summarise(plan, run_cells(plan, out, options.progress), verdicts=not options.quick)
    write_results(out, results.as_json(), report(results), options.command)
    figure(results, out / "failures.png")
    return out


# --- What came out ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FailureRow:
    """One algorithm under one case.

    Attributes:
        weights: "equal" or "unequal".
        bias: predicted; 0 where the objective is preserved.
        low, median, high: of F(average) - F* over the seeds, by recorded round.
        slopes, last: by seed.
        judged, holds: whether this row is judged, and whether it is as claimed; None where that cannot be told.
    """

    algorithm: str
    case: str
    weights: str
    bias: float
    low: list[float]
    median: list[float]
    high: list[float]
    slopes: list[float]
    last: list[float]
    judged: bool = False
    holds: bool | None = None

    def as_json(self) -> dict[str, Any]:
        """As results.json has it: without a verdict where the row is not judged."""
        values: dict[str, Any] = as_json(self)
        judged, holds = values.pop("judged"), values.pop("holds")
        return {**values, "holds": holds} if judged else values


@dataclass(frozen=True)
class FailureResults:
    """Medians, ranges, slopes and verdicts; claim is None where none is judged."""

    plan: FailuresPlan
    claim: Claim | None
    promised_rate: float
    convexity: float
    rounds: list[int]
    rows: tuple[FailureRow, ...]

    def as_json(self) -> dict[str, Any]:
        """As results.json has it."""
        return {
            "claim": as_json(self.claim),
            "promised_rate": self.promised_rate,
            "convexity": self.convexity,
            "settings": as_json(self.plan),
            "rounds": self.rounds,
            "rows": [row.as_json() for row in self.rows],
        }


def summarise(plan: FailuresPlan, gaps: Mapping[FailureCell, Sequence[float]], verdicts: bool = True) -> FailureResults:
    """Medians, ranges and slopes, and where `verdicts` is set what they say about the claim."""
    rounds, problem = recorded_rounds(plan.rounds), plan.problem()
    promised = theory("avg-l2clip", plan.alpha).rate
    assert promised is not None
    rows = []
    for name, case in dict.fromkeys((cell.algorithm, cell.case) for cell in cells(plan)):
        curves = [list(gaps[FailureCell(name, case, seed)]) for seed in plan.seeds]
        by_round = list(zip(*curves, strict=True))
        weights = case.weights(plan)
        bias = problem.bias(weights, case.limit(plan, weights)) if case.limit is not None else 0.0
        slopes, last = [slope_of(rounds, curve) for curve in curves], [curve[-1] for curve in curves]
        judged = verdicts and name == JUDGED
        row = FailureRow(
            algorithm=name,
            case=case.name,
            weights="equal" if case.equal else "unequal",
            bias=bias,
            low=[min(values) for values in by_round],
            median=[statistics.median(values) for values in by_round],
            high=[max(values) for values in by_round],
            slopes=slopes,
            last=last,
            judged=judged,
            holds=as_claimed(last, slopes, bias, promised) if judged else None,
        )
        rows.append(row)
    claim = evaluate_claim(rows) if verdicts else None
    return FailureResults(plan, claim, promised, problem.convexity(), rounds, tuple(rows))


def slope_of(rounds: Sequence[int], gaps: Sequence[float]) -> float:
    """The exponent of the gap in the round, over the last 7/8 of the rounds.

    Examples:
        >>> round(slope_of([1, 2, 16, 32, 64], [9.0, 9.0, 16**-0.5, 32**-0.5, 64**-0.5]), 6)
        -0.5
    """
    return float(slope(rounds, gaps, span=8))


def as_claimed(last: Sequence[float], slopes: Sequence[float], bias: float, promised: float) -> bool | None:
    """Whether a case did what the claim says; None where that cannot be told.

    Preserved (bias 0): it falls at least as fast as promised, in the median; it does not where no seed does. Biased:
    every seed ends between half and twice the bias, and the median falls more slowly than promised, so that it is not
    just passing by; it does not where every seed ends below half of it.

    Examples:
        >>> as_claimed([0.1, 0.2], [-0.9, -0.7], bias=0.0, promised=0.33)
        True
        >>> as_claimed([0.1, 0.2], [-0.9, -0.7], bias=1.0, promised=0.33)
        False
    """
    if bias == 0:
        falls = statistics.median(slopes) <= -promised
        return True if falls else False if min(slopes) > -promised else None
    if all(bias / 2 <= gap <= 2 * bias for gap in last) and statistics.median(slopes) > -promised:
        return True
    return False if max(last) < bias / 2 else None


def evaluate_claim(rows: Sequence[FailureRow]) -> Claim:
    """The claim, judged by the algorithm that the theorem is about: it holds where every case does."""
    verdicts = [row.holds for row in rows if row.algorithm == JUDGED]
    return decide(14, CLAIM, all_hold(verdicts), "; ".join(_figures(rows, name) for name in ALGORITHMS))


def _figures(rows: Sequence[FailureRow], name: str) -> str:
    of_name = [row for row in rows if row.algorithm == name]
    preserved = [row for row in of_name if not row.bias]
    slopes, costs = [statistics.median(row.slopes) for row in preserved], [cost(row, of_name) for row in preserved]
    ratios = [gap / row.bias for row in of_name if row.bias for gap in row.last]
    return (
        f"{name}{'' if name == JUDGED else ' beside it'}: preserved, median slopes {min(slopes):.2f} to "
        f"{max(slopes):.2f} and at most {max(costs):.1f} times the gap of nobody failing in the end; not preserved, "
        f"seeds end at {min(ratios):.2f} to {max(ratios):.2f} of the predicted bias"
    )


def cost(row: FailureRow, rows: Sequence[FailureRow]) -> float:
    """The last gap in units of that of the same algorithm and weights where nobody fails, which is the first row."""
    reference = next(r for r in rows if (r.algorithm, r.weights) == (row.algorithm, row.weights))
    return row.median[-1] / reference.median[-1]


# --- The page and the figure ------------------------------------------------------------------------------------------


_VERDICTS = {True: "as claimed", False: "not as claimed", None: "cannot tell"}


def report(results: FailureResults) -> str:
    """Table, settings and verdict, as Markdown."""
    head = [
        "algorithm",
        "weights",
        "case",
        "predicted bias",
        "F(average) − F*, median (range)",
        "times nobody failing",
        "slope, median (range)",
    ]
    rows = [
        [
            row.algorithm,
            row.weights,
            row.case,
            f"{row.bias:.3g}" if row.bias else "0",
            with_range(row.last),
            f"{cost(row, results.rows):.1f}",
            with_range(row.slopes),
        ]
        for row in results.rows
    ]
    align = "lllrrrr"
    if results.claim:
        head, align = [*head, "judged"], align + "l"
        for cells_of_row, row in zip(rows, results.rows, strict=True):
            cells_of_row.append(_VERDICTS[row.holds] if row.judged else "–")
    claims = [results.claim] if results.claim else None
    lines = [*markdown_table(head, rows, align), "", *(f"- {text}" for text in _settings(results))]
    return "\n".join([*lines, "", *claim_lines(claims)]) + "\n"


def _settings(results: FailureResults) -> list[str]:
    plan = results.plan
    ilr, u = plan.l2clip
    return [
        f"{plan.nodes} nodes, dimension {plan.dimension}, {plan.rounds} rounds of {plan.local_steps} local steps, "
        f"{len(plan.seeds)} seeds of noise and failures on one problem; x starts at 0, projection on a ball of "
        f"{plan.radius:g}. Weights, where unequal: {', '.join(f'{w:g}' for w in plan.weights)}.",
        f"Gradient noise: Student-t, df {plan.df:g}, times {plan.noise:g}, fresh in every step; "
        f"alpha = {plan.alpha:g}.",
        f"Failures: every node is away half of the time ({plan.away:g}), independently by round, or for "
        f"{plan.stretch:g} rounds on average; or nodes {', '.join(map(str, plan.missing))} always; "
        f"drawn by weight: {plan.present} draws per round.",
        f"avg-l2clip: ilr = {ilr:g}·2/(t+1), i_u = {u:g}·t^(1/{2 * plan.alpha:g}), t counting the steps of the run "
        f"(own clocks: those of the node); 1/mu = {1 / results.convexity:.3g}, ilr must be above. Promised: slope "
        f"{-results.promised_rate:.3f} or steeper.",
        "avg-biclip: ilr = {:g}, i_u = {:g}, i_d = {:g}, constant, chosen by hand. Constant thresholds "
        "have a bias of their own, whoever fails, so it is shown and not judged.".format(*plan.biclip),
        "Slope: of log(F(average) − F*) by log(round) over the last 7/8 of the rounds. A preserved case holds when its "
        "median falls as promised; a biased one when every seed ends between half and twice the predicted bias "
        "and its median falls more slowly than that.",
    ]


# solid lines: biased, but for the reference
STYLES: Mapping[str, LineStyle] = {
    "nobody fails": LineStyle("black"),
    "uniform failures": LineStyle("blue", "--", "o"),
    "failures in bursts": LineStyle("green", "-.", "^"),
    "always the same missing": LineStyle("vermillion", "-", "s"),
    "drawn by weight": LineStyle("sky blue", "-.", "v"),
    "drawn by weight, own clocks": LineStyle("orange", "-", "D"),
}


def figure(results: FailureResults, path: Path) -> None:
    """F(average) - F* by round: one row of panels per algorithm, one column for equal and one for unequal weights."""
    schedules = {"avg-l2clip": "theory schedules", "avg-biclip": "constant settings"}
    drawing, axes = panels(2 * len(schedules), columns=2, height=3.3, sharex=True, sharey=True)
    kinds = [(name, weights) for name in schedules for weights in ("equal", "unequal")]
    for (name, weights), panel in zip(kinds, axes, strict=True):
        rows = [row for row in results.rows if (row.algorithm, row.weights) == (name, weights)]
        _panel(panel, results.rounds, rows)
        named(panel, f"{name}, {schedules[name]}; {weights} weights")
        if name == "avg-l2clip":
            _promise(panel, results)
    for panel in axes:
        plain_ticks(panel.xaxis)
        plain_ticks(panel.yaxis)
    for panel in axes[::2]:
        panel.set_ylabel("F(average) − F*")
    for panel in axes[-2:]:
        panel.set_xlabel("round")
    name_line_ends(axes)
    plan = results.plan
    finish(
        drawing,
        f"{plan.nodes} nodes, half of them away: median and range of {len(plan.seeds)} seeds; "
        "horizontal lines: the predicted bias, where there is one",
        path,
    )


def _panel(panel: Any, rounds: Sequence[int], rows: Sequence[FailureRow]) -> None:
    for row in rows:
        style = STYLES[row.case]
        panel.loglog(rounds, row.median, label=row.case, linewidth=1.6, markersize=4, markevery=3, **style.keywords())
        panel.fill_between(rounds, row.low, row.high, color=style.hex, alpha=0.13, linewidth=0)
        if row.bias:
            panel.axhline(row.bias, color=style.hex, linewidth=0.9, linestyle=(0, (6, 2)))
    panel.grid(alpha=0.25, which="major")


def _promise(panel: Any, results: FailureResults) -> None:
    """The promised slope, as a short line above the curves: an upper bound of how slowly they may fall."""
    first, last = results.rounds[-1] / 8, results.rounds[-1]
    top, rate = 6.0, results.promised_rate
    panel.loglog([first, last], [top, top * (last / first) ** -rate], color="#777777", linestyle=":", linewidth=1.5)
    panel.annotate(f"promised slope −{rate:.2f}", (first, top), fontsize=8, color="#555555", va="bottom", ha="left")
