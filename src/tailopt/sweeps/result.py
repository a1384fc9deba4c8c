"""What a sweep leaves: all trials, the best settings with their spread, and what a smaller budget would have found."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tailopt.arguments import whole_number
from tailopt.engines.routes import Route
from tailopt.figures.labels import plain_ticks
from tailopt.figures.style import PALETTE, pyplot
from tailopt.sweeps.trials import Trial

BUDGETS = (5, 20, 64, 128)


@dataclass(frozen=True)
class Tried:
    """One point over its tuning seeds.

    Attributes:
        values: of the metric, seed by seed: at the end, or where the point ended early.
        value: their mean; NaN where a seed has none.
        spread: their standard deviation; NaN with one seed.
        ended: why it ended early, in its first seed that did; empty if none did.
        rounds: how far it came.
    """

    number: int
    settings: Mapping[str, Any]
    values: tuple[float, ...]
    ended: str
    rounds: int

    @property
    def halved(self) -> bool:
        """Whether neighbours were better at a rung; a point that ended for another reason had diverged."""
        return self.ended.startswith("halving")

    @property
    def diverged(self) -> bool:
        """Whether it ended early because nothing finite was left."""
        return bool(self.ended) and not self.halved

    @property
    def value(self) -> float:
        """The mean over seeds."""
        return _mean(self.values)

    @property
    def spread(self) -> float:
        """The standard deviation over seeds."""
        return _deviation(self.values)


@dataclass(frozen=True)
class Best(Tried):
    """The best point, with what it did on seeds that it was not chosen by; `reported` is empty without such seeds."""

    reported: tuple[float, ...] = ()

    @property
    def report(self) -> float:
        """The mean over the seeds of the report."""
        return _mean(self.reported)

    @property
    def report_spread(self) -> float:
        """The standard deviation over the seeds of the report."""
        return _deviation(self.reported)


@dataclass(frozen=True)
class BudgetPoint:
    """The best value of the tuning seeds among `trials` points drawn from those that were tried.

    mean: infinite where a draw may have only points that diverged; median, low and high: the middle and the quartiles.
    """

    trials: int
    mean: float
    median: float
    low: float
    high: float


@dataclass(frozen=True)
class SweepResult:
    """What `tailopt.sweep` leaves: all trials, and the best settings with their spread.

    Attributes:
        algorithm: its name.
        metric: what settings are chosen by, and `lower_is_better`.
        trials: every point with every tuning seed.
        reports: the best point with every seed of the report.
        dropped: points that were passed over, because d exceeds u.
        route: how trials were run, and why this way.
        run: the folder with the record; None without one.
    """

    algorithm: str
    metric: str
    lower_is_better: bool
    trials: tuple[Trial, ...]
    reports: tuple[Trial, ...]
    dropped: int
    route: Route
    rounds: int
    run: Path | None = None

    @property
    def ranking(self) -> list[Tried]:
        """All points, best first: those that ran to the end, then those that ended later."""
        return rank(self.trials, self.metric, self.lower_is_better)

    @property
    def best(self) -> Best:
        """The best point; the only one, where nothing was tuned."""
        if not self.trials:
            (only,) = rank(self.reports, self.metric, self.lower_is_better)
            return Best(only.number, only.settings, (), only.ended, only.rounds, only.values)
        first = self.ranking[0]
        found = [t.value(self.metric) for t in self.reports if t.number == first.number]
        return Best(first.number, first.settings, first.values, first.ended, first.rounds, tuple(found))

    @property
    def varied_settings(self) -> list[str]:
        """The names of the settings in which points differ; all of them for a single point."""
        names = list(dict.fromkeys(key for trial in (self.trials or self.reports) for key in trial.settings))
        varied = [name for name in names if len({str(trial.settings.get(name)) for trial in self.trials}) > 1]
        return varied or names

    def table(self, top: int = 5) -> str:
        """Return the best points as a Markdown table, with the mean and the standard deviation over seeds."""
        best = self.best
        ranking: Sequence[Tried] = self.ranking or [best]
        names = self.varied_settings
        header = ["", *names, f"{self.metric}, tuning seeds", f"{self.metric}, fresh seeds"]
        rows = []
        for place, tried in enumerate(ranking[:top], 1):
            fresh = _with_spread(best.report, best.report_spread) if place == 1 and best.reported else ""
            ended = f" (ended after round {tried.rounds})" if tried.ended else ""
            rows.append(
                [
                    str(place),
                    *(_text(tried.settings.get(name)) for name in names),
                    (_with_spread(tried.value, tried.spread) if tried.values else "") + ended,
                    fresh,
                ]
            )
        return "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows))

    def budget_curve(self, at: Sequence[int] = BUDGETS) -> list[BudgetPoint]:
        """Return what fewer points would have found, over all ways to draw them from those that were tried.

        A point that halving ended counts with its last value, and one that diverged as the worst. Budgets beyond the
        points that were tried are left out.
        """
        for n in at:
            whole_number("number of points", n, low=1)
        tried = self.ranking
        return [budget_point(values_best_first(tried, self.lower_is_better), n) for n in at if n <= len(tried)]

    def summary(self) -> str:
        """Return a few lines about the sweep."""
        ranking, best = self.ranking, self.best
        diverged, halved = sum(tried.diverged for tried in ranking), sum(tried.halved for tried in ranking)
        settings = ", ".join(f"{name}={_text(value)}" for name, value in best.settings.items())
        measured = [f"{_with_spread(best.value, best.spread)} on the tuning seeds"] if best.values else []
        if best.reported:
            measured += [f"{_with_spread(best.report, best.report_spread)} on {_count(best.reported, 'fresh seed')}"]
        chosen = f"{self.metric} {', '.join(measured)}"
        lines = [
            f"{self.algorithm}: {_count(ranking, 'point')}, {_count(best.values, 'tuning seed')}; {halved} ended by "
            f"halving, {diverged} diverged, {self.dropped} dropped (d > u); route {self.route.name}",
            f"best: {settings}",
            chosen,
        ]
        if not any(math.isfinite(tried.value) for tried in ranking or [best]):
            lines.append(f"No point has a finite {self.metric}: search smaller steps, and look at the loss.")
        curve = self.budget_curve()
        if curve:
            lines.append(
                f"{self.metric} of the best of n points: "
                + ", ".join(f"{point.median:.4g} (n = {point.trials})" for point in curve)
            )
        return "\n".join(lines)

    def plot(self, file: str | Path | None = None) -> Any:
        """Draw the budget curve, and the metric over every setting; returns the figure of matplotlib, or saves it."""
        if not self.trials:
            raise ValueError("Invalid sweep: nothing was tuned, so there is nothing to draw. Give it tuning seeds.")
        tried = [t for t in self.ranking if math.isfinite(t.value)]
        if not tried:
            raise ValueError(f"There is nothing to draw: no point has a finite {self.metric}.")
        plt = pyplot()
        names = self.varied_settings
        figure, axes = plt.subplots(
            1, 1 + len(names), figsize=(3.4 * (1 + len(names)), 3.2), layout="constrained", squeeze=False
        )
        counts = [n for n in (1, 2, 5, 10, 20, 40, 64, 100, 128, 200, 400) if n < len(self.ranking)]
        curve = self.budget_curve([*counts, len(self.ranking)])
        axes[0, 0].plot([p.trials for p in curve], [p.median for p in curve], color=PALETTE["blue"], marker="o")
        low, high = [p.low for p in curve], [p.high for p in curve]
        finite = [i for i, p in enumerate(curve) if math.isfinite(p.low) and math.isfinite(p.high)]
        axes[0, 0].fill_between(
            [curve[i].trials for i in finite], [low[i] for i in finite], [high[i] for i in finite],
            color=PALETTE["blue"], alpha=0.15, linewidth=0,
        )  # fmt: skip
        axes[0, 0].set(xlabel="points tried", ylabel=f"best {self.metric}, tuning seeds", xscale="log")
        for axis, name in zip(axes[0, 1:], names, strict=True):
            for ended, colour in ((True, "#bbbbbb"), (False, PALETTE["vermillion"])):
                shown = [t for t in tried if bool(t.ended) == ended]
                x, y = [t.settings[name] for t in shown], [t.value for t in shown]
                axis.plot(x, y, linestyle="", marker="." if ended else "o", markersize=4, color=colour)
            numbers = [t.settings[name] for t in tried]
            if all(isinstance(x, int | float) and x > 0 for x in numbers):
                axis.set_xscale("log")
            axis.set(xlabel=name, ylabel=self.metric)
        for axis in axes[0]:
            if tried and min(t.value for t in tried) > 0:
                axis.set_yscale("log")
            for scale in (axis.xaxis, axis.yaxis):
                if scale.get_scale() == "log":
                    plain_ticks(scale)
            axis.grid(alpha=0.25, which="both", linewidth=0.5)
        if file is None:
            return figure
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=130)
        plt.close(figure)
        return None


def rank(trials: Iterable[Trial], metric: str, lower_is_better: bool) -> list[Tried]:
    """Return points in order, best first; NaN is worse than any number, and the first of equals wins."""
    by_number: dict[int, list[Trial]] = {}
    for trial in trials:
        by_number.setdefault(trial.number, []).append(trial)
    points = []
    for number, of_point in sorted(by_number.items()):
        ended = next((t.ended for t in of_point if t.ended and not t.halved), "") or of_point[0].ended
        rounds = min(t.rungs[-1].round if t.rungs else 0 for t in of_point)
        values = tuple(t.value(metric) for t in of_point)
        points.append(Tried(number, of_point[0].settings, values, ended, rounds))

    def key(tried: Tried) -> tuple[bool, int, bool, float]:
        value = tried.value if lower_is_better else -tried.value
        return (tried.diverged, -tried.rounds, math.isnan(value), value)

    return sorted(points, key=key)


def budget_point(values: Sequence[float], n: int) -> BudgetPoint:
    """Return the distribution of the best of n of these values, drawn without repetition; exact.

        P(the k-th best value is the best of the n) = C(N - k, n - 1) / C(N, n)

    values: best first.

    Examples:
        >>> budget_point([1.0, 2.0, 3.0], 2)
        BudgetPoint(trials=2, mean=1.3333333333333333, median=1.0, low=1.0, high=2.0)
    """
    total = len(values)
    shares = [math.comb(total - k, n - 1) / math.comb(total, n) for k in range(1, total - n + 2)]
    mean = sum(share * value for share, value in zip(shares, values, strict=False))

    def quantile(q: float) -> float:
        reached = 0.0
        for share, value in zip(shares, values, strict=False):
            reached += share
            if reached >= q - 1e-12:
                return value
        return values[len(shares) - 1]

    return BudgetPoint(n, mean, quantile(0.5), quantile(0.25), quantile(0.75))


def values_best_first(ranking: Sequence[Tried], lower_is_better: bool) -> list[float]:
    """Return the values of points in their order; one that diverged is the worst."""
    worst = math.inf if lower_is_better else -math.inf
    return [worst if tried.diverged or math.isnan(tried.value) else tried.value for tried in ranking]


def _count(things: Sequence[Any], name: str) -> str:
    return f"{len(things)} {name}{'s' * (len(things) != 1)}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan


def _with_spread(value: float, spread: float) -> str:
    return f"{value:.4g}" if math.isnan(spread) else f"{value:.4g} ± {spread:.2g}"


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
