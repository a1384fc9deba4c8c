"""What a report is made of: numbers with their spread, Markdown tables, the sections of a comparison."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tailopt.algorithms import ALGORITHMS
from tailopt.studies.comparison import Comparison, ComparisonPlan
from tailopt.studies.protocol import Claim, claim_lines
from tailopt.studies.search_spaces import SPACES, rules_of
from tailopt.sweeps.result import BUDGETS
from tailopt.sweeps.space import Space

PaperNumber = Callable[[str, str, str], float | None]


# --- Numbers ----------------------------------------------------------------------------------------------------------


def mean_and_deviation(numbers: Sequence[float], digits: int = 2) -> str:
    """Mean and standard deviation; the mean alone where there is one number, or where a run broke down.

    Examples:
        >>> mean_and_deviation([1.0, 2.0, 3.0]), mean_and_deviation([4.0])
        ('2.00 ± 1.00', '4.00')
    """
    mean = f"{statistics.fmean(numbers):.{digits}f}"
    several = len(numbers) > 1 and all(map(math.isfinite, numbers))  # stdev raises where a run broke down
    return f"{mean} ± {statistics.stdev(numbers):.{digits}f}" if several else mean


def with_range(
    numbers: Sequence[float],
    centre: Callable[[Sequence[float]], float] = statistics.median,
    form: str = "{:.3g}",
    limits: str = "({} to {})",
) -> str:
    """The median, or another centre, with the least and the largest number.

    Examples:
        >>> with_range([3.0, 1.0, 2.0]), with_range([1.0, 2.0], statistics.fmean, "{:+.1f} %")
        ('2 (1 to 3)', '+1.5 % (+1.0 % to +2.0 %)')
    """
    middle, low, high = (form.format(number) for number in (centre(numbers), min(numbers), max(numbers)))
    return f"{middle} {limits.format(low, high)}"


def settings_text(settings: Mapping[str, float], form: str = "{} {:.3g}") -> str:
    """Settings in one line.

    Examples:
        >>> settings_text({"ilr": 0.1, "i_u": 1e-4}), settings_text({"ilr": 0.1}, "{} = {:g}")
        ('ilr 0.1, i_u 0.0001', 'ilr = 0.1')
    """
    return ", ".join(form.format(key, value) for key, value in settings.items())


# --- Tables and pages -------------------------------------------------------------------------------------------------


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], align: str = "") -> list[str]:
    """Lines of a Markdown table.

    Args:
        align: "l" or "r" for every column; the last one counts for all that follow. Left by default.

    Examples:
        >>> markdown_table(["name", "loss"], [["sgd", "0.5"]], "lr")
        ['| name | loss |', '| --- | ---: |', '| sgd | 0.5 |']
    """
    sides = [(align or "l")[min(i, len(align or "l") - 1)] for i in range(len(head))]
    rule = [{"l": "---", "r": "---:"}[side] for side in sides]
    return ["| " + " | ".join(cells) + " |" for cells in (head, rule, *rows)]


def page(title: str, body: Sequence[str], claims: Sequence[Claim] | None) -> str:
    """A report: title, body, and the claims last; None where none is judged."""
    return "\n".join([f"# {title}", "", *body, "## Claims", "", *claim_lines(claims)]) + "\n"


def ranges_lines(space: Space, algorithms: Sequence[str] | None = None) -> list[str]:
    """The ranges of a search space, one line per rule; of the algorithms named, or of the paper's."""
    pairs = [rules_of(name) for name in algorithms or ALGORITHMS]
    lines = []
    for side, table, used in (
        ("inner", space.inner, {inner for _, inner in pairs}),
        ("outer", space.outer, {outer for outer, _ in pairs}),
    ):
        for rule, ranges in table.items():
            if ranges and rule in used:
                text = ", ".join(f"{key} {interval.low:g} to {interval.high:g}" for key, interval in ranges.items())
                lines.append(f"- {side} {rule}: {text}")
    return lines


# --- Comparisons ------------------------------------------------------------------------------------------------------


def seeds_text(plan: ComparisonPlan) -> str:
    """What `mean_and_deviation` shows, in words."""
    n = len(plan.seeds)
    return f"mean ± standard deviation of {n} seeds" if n > 1 else "one seed"


def _no_paper_number(column: str, name: str, metric: str) -> None:
    return None


def metric_table(
    results: Comparison,
    metrics: Mapping[str, Sequence[str]],
    paper: PaperNumber = _no_paper_number,
    digits: int = 2,
) -> list[str]:
    """Lines of Markdown: one row per algorithm, one column per metric, the paper's number behind a slash.

    Args:
        metrics: column -> its metrics.
        paper: (column, algorithm, metric) -> the paper's number, or None.
    """
    columns = [(column, metric) for column in results.plan.columns for metric in metrics[column]]
    rows = []
    for name in results.plan.algorithms:
        texts = [name]
        for column, metric in columns:
            printed = paper(column, name, metric)
            ours = mean_and_deviation(results.values(column, name, metric), digits)
            texts.append(ours + ("" if printed is None else f" / {printed:g}"))
        rows.append(texts)
    return markdown_table(["algorithm", *(f"{column}, {metric}" for column, metric in columns)], rows, "lr")


def methods_section(results: Comparison, differences: Sequence[str]) -> list[str]:
    """How it was run: data as found, the search, what differs from the paper, settings, budgets, ranges."""
    plan = results.plan
    lines = ["## How", ""]
    lines += [f"- {label}: {text}" for label, text in results.data.items() if text]
    lines += [f"- Reported after the last round, on data that no settings were chosen by, {seeds_list(plan)}."]
    if plan.settings == "tune":
        lines += [*search_lines(results)]
    else:
        lines += [f"- Settings: {plan.settings}; nothing was tuned here."]
    lines += [f"- {text}" for text in differences]
    chosen = [
        [cell.algorithm, cell.column, settings_text(dict(sorted(cell.settings.items())))] for cell in results.cells
    ]
    lines += ["", *markdown_table(["algorithm", "task", "settings"], chosen)]
    if plan.settings == "tune":
        lines += ["", *budget_section(results), *ranges_section(results)]
    return [*lines, ""]


def seeds_list(plan: ComparisonPlan) -> str:
    """The seeds of the report.

    Examples:
        >>> seeds_list(ComparisonPlan({}, (), seeds=(0, 1, 2)))
        'seeds 0, 1, 2'
    """
    return f"seed{'s' * (len(plan.seeds) != 1)} {', '.join(map(str, plan.seeds))}"


def search_lines(results: Comparison) -> list[str]:
    """How settings were searched, and which best points lie at an end of their range all the same."""
    plan = results.plan
    ended = "; the worse two thirds ended at a ninth and at a third of the rounds" if plan.halving else ""
    lines = [
        f"- Every algorithm was tuned by {plan.budget} Sobol points of its own, at the horizon that is reported, by "
        f"the mean over the tuning seeds {', '.join(map(str, plan.tuning_seeds))}{ended}. Tasks with a validation "
        "split were tuned on a slice held out of train."
    ]
    at_edge = [f"{cell.column}, {text}" for cell in results.cells for text in cell.at_edge]
    if at_edge:
        lines.append(f"- Best values that lie in the outer 5 % of a range all the same: {'; '.join(at_edge)}.")
    return lines


def budget_section(results: Comparison) -> list[str]:
    """What fewer points would have found: the median over all ways to draw them, on the tuning seeds."""
    columns = [
        (label, budget)
        for label in results.plan.columns
        for budget in BUDGETS
        if any(point.trials == budget for cell in results.cells if cell.column == label for point in cell.budget_curve)
    ]
    if not columns:
        return []
    rows = []
    for name in results.plan.algorithms:
        found = {
            (cell.column, point.trials): point.median
            for cell in results.cells
            for point in cell.budget_curve
            if cell.algorithm == name
        }
        rows.append([name, *(f"{found[key]:.4g}" if key in found else "" for key in columns)])
    return [
        "The best of n points, on the tuning seeds: the median over all ways to draw them from those that were tried.",
        "",
        *markdown_table(["algorithm", *(f"{label}, n = {budget}" for label, budget in columns)], rows, "lr"),
        "",
    ]


def ranges_section(results: Comparison) -> list[str]:
    """Where settings were searched: the ranges of the space, and those that were widened."""
    plan = results.plan
    space = SPACES[plan.space]
    lines = [
        f"Searched ({plan.space}), in the logarithm but for momentum; move = learning rate · upper threshold, "
        "share = lower / upper threshold:",
        "",
        *ranges_lines(space, plan.algorithms),
    ]
    wider: dict[str, list[str]] = {}
    for cell in results.cells:
        first = space.ranges_of(*rules_of(cell.algorithm))
        texts = [
            f"{cell.algorithm} {key} {low:g} to {high:g}"
            for key, (low, high) in cell.ranges.items()
            if (low, high) != (first[key].low, first[key].high)
        ]
        wider.setdefault(cell.column, []).extend(texts)
    told = [f"- {label}: {', '.join(texts)}" for label, texts in wider.items() if texts]
    return [*lines, *(["", "Widened, because a best point lay in the outer 5 %:", "", *told] if told else [])]


def mean_of_all(rows: Iterable[Sequence[Any]]) -> list[float]:
    """Seed by seed, the mean of several metrics: rows of one metric each.

    Examples:
        >>> mean_of_all([[1.0, 2.0], [3.0, 4.0]])
        [2.0, 3.0]
    """
    return [statistics.fmean(numbers) for numbers in zip(*rows, strict=True)]
