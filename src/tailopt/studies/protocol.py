"""How algorithms are compared: tuned alike, told apart by a margin over seeds, and claims decided by that.

Tuning tries the same number of random settings for every algorithm, on data that no reported number comes from. A
difference counts where it exceeds what seeds differ by; the functions below are the margins that studies use. A claim
of the paper then "holds", "does not hold", or the study "cannot tell".
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tailopt.sweeps.search import Point, Range, Trial, best, draw_point, search
from tailopt.sweeps.space import settings_at

# `--quick` runs too little for any figure to mean something
UNJUDGED = "No claim is judged: `--quick` shows that the study works, and its figures say nothing."
# two-sided 95 % quantiles of Student's t by degrees of freedom, from 1 on; beyond them 2 is close enough
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10)


# --- Tuning -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tuned:
    """The settings that a search chose, and all its trials."""

    settings: dict[str, float]
    trials: tuple[Trial, ...]


def tune(
    measure: Callable[[Mapping[str, float]], float],
    ranges: Mapping[str, Range],
    budget: int,
    *,
    value: str,
    record: Path,
    tick: Callable[[int], None] = lambda n: None,
) -> Tuned:
    """Try `budget` random settings and choose those with the least value; the record makes it resumable.

    Args:
        measure: settings -> what is minimised.
        value: how the record calls it.
        tick: called with the number of trials that were just done.
    """

    def measure_all(points: list[Point]) -> list[dict[str, float]]:
        return [{value: measure(settings_at(point))} for point in points]

    trials = search(measure_all, ranges, budget, record=record, tick=tick)
    return Tuned(settings_at(best(trials, value).point), tuple(trials))


def one_sided_draws(budget: int) -> list[str]:
    """The lines that report a limit of the draws, where there is one: few random numbers can all lie on one side."""
    shares = [draw_point({"first": Range(0.0, 1.0, log=False)}, seed=0, number=i)["first"] for i in range(budget)]
    if min(shares) >= 0.5 or max(shares) <= 0.5:
        side = "upper" if min(shares) >= 0.5 else "lower"
        return [
            f"- A limit of these trials: the inner learning rate (or move) was tried only in the {side} half of its "
            f"range, at {min(shares):.2f} to {max(shares):.2f} of the way, because trial i is the same draw for every "
            "algorithm and task."
        ]
    return []


# --- Margins: values of one metric by seed ----------------------------------------------------------------------------


def mean_is_higher(ours: Sequence[float], theirs: Sequence[float]) -> bool | None:
    """Whether the mean of `ours` is above that of `theirs`; None where the 95 % interval of the difference holds 0.

    One seed, or a run that broke down, decides nothing.

    Examples:
        >>> mean_is_higher([3.0, 3.1, 2.9], [1.0, 1.1, 0.9]), mean_is_higher([1.0, 1.1], [3.0, 3.1])
        (True, False)
        >>> mean_is_higher([1.0, 3.0], [1.0, 2.0]) is None
        True
    """
    if min(len(ours), len(theirs)) < 2 or not all(map(math.isfinite, (*ours, *theirs))):
        return None
    freedom = len(ours) + len(theirs) - 2
    factor = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 2.1
    error = math.sqrt(statistics.variance(ours) / len(ours) + statistics.variance(theirs) / len(theirs))
    gap = statistics.fmean(ours) - statistics.fmean(theirs)
    return None if abs(gap) <= factor * error else gap > 0


def mean_is_no_lower(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Whether the mean of `ours` is at most the larger standard deviation below that of `theirs`.

    Examples:
        >>> mean_is_no_lower([1.0, 2.0], [1.5, 2.5]), mean_is_no_lower([1.0, 2.0], [4.0, 5.0])
        (True, False)
    """
    margin = max(statistics.stdev(ours), statistics.stdev(theirs))
    return statistics.fmean(ours) >= statistics.fmean(theirs) - margin


def deviation_of_gap(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The standard deviation, over seeds, of the difference between one value of each.

    Examples:
        >>> round(deviation_of_gap([1.0, 2.0], [1.0, 2.0]), 3)
        1.0
    """
    return math.hypot(statistics.stdev(ours), statistics.stdev(theirs))


# --- Verdicts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """number, text: the paper's; verdict: "holds", "does not hold" or "cannot tell"; figures: what was measured."""

    number: int
    text: str
    verdict: str
    figures: str

    def line(self) -> str:
        """As a line of a report."""
        return f"- **Claim {self.number}: {self.verdict}.** {self.text} Seen: {self.figures}."


def decide(number: int, text: str, holds: bool | None, figures: str) -> Claim:
    """A claim with its verdict; None where the figures do not decide."""
    verdict = "cannot tell" if holds is None else "holds" if holds else "does not hold"
    return Claim(number, text, verdict, figures)


def all_hold(verdicts: Sequence[bool | None]) -> bool | None:
    """Whether a claim of several parts holds: it does not where one part does not, and is open where one part is.

    Examples:
        >>> all_hold([True, True]), all_hold([True, None]), all_hold([None, False])
        (True, None, False)
    """
    return False if False in verdicts else None if None in verdicts else True


def claim_lines(claims: Sequence[Claim] | None) -> list[str]:
    """Claims as lines of a report; None, as with `--quick`: the line that explains why none is judged.

    Examples:
        >>> claim_lines(None) == [UNJUDGED]
        True
    """
    return [UNJUDGED] if claims is None else [claim.line() for claim in claims]
