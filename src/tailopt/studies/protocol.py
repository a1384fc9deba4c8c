"""How algorithms are compared: searched alike, told apart by a margin over seeds, and claims decided by that.

    tuned      as many Sobol points for every algorithm, each algorithm with points of its own, at the horizon that is
               reported, on seeds or data that no reported number comes from; ranges that widen for all
               (`search_spaces`)
    reported   the best point on fresh seeds; and what 5, 20, 64 and 128 points would have found
    decided    by the mean difference over the seeds, paired, with a bootstrap interval of 95 % (of 1 - 0.05 / m where
               a claim needs m comparisons): "holds" and "does not hold" need an interval on one side of the margin,
               all else is "cannot tell"

Scores are numbers by seed of which higher is better; an algorithm that broke down with a seed has NaN there.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tailopt.optional import require

# `--quick` runs too little for any figure to mean something
UNJUDGED = "No claim is judged: `--quick` shows that the study works, and its figures say nothing."
LEAST_SEEDS = 5  # an interval over fewer says nothing
CONFIDENCE = 0.95
RESAMPLES = 9999
NEEDED = "Bootstrap intervals need numpy and scipy"

Scores = Mapping[str, Sequence[float]]


# --- Margins ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Interval:
    """The mean of a difference over seeds, and a bootstrap interval around it."""

    low: float
    mean: float
    high: float

    def text(self, form: str = "{:+.3g}") -> str:
        """As a report has it.

        Examples:
            >>> Interval(0.5, 1.0, 1.5).text()
            '+1 (+0.5 to +1.5)'
        """
        low, mean, high = (form.format(number) for number in (self.low, self.mean, self.high))
        return f"{mean} ({low} to {high})"


def difference(ours: Sequence[float], theirs: Sequence[float], comparisons: int = 1) -> Interval | None:
    """The mean of ours - theirs, seed by seed, with its bootstrap interval; None if there are too few seeds.

    A side that broke down with some seed is infinitely worse; where both did, there is nothing to compare.

    Args:
        comparisons: how many of these a claim needs; each then has the confidence 1 - 0.05 / comparisons.

    Examples:
        >>> difference([3.0, 3.1, 2.9, 3.2, 3.0], [1.0, 1.1, 1.0, 1.1, 0.9]).text("{:.2f}")
        '2.02 (1.94 to 2.08)'
        >>> difference([1.0, 2.0], [0.0, 0.0]) is None
        True
    """
    if len(ours) != len(theirs):
        raise ValueError(f"Invalid scores: {len(ours)} and {len(theirs)} seeds; need the same seeds on both sides.")
    if len(ours) < LEAST_SEEDS:
        return None
    broken = [not all(map(math.isfinite, scores)) for scores in (ours, theirs)]
    if any(broken):
        infinite = -math.inf if broken[0] else math.inf
        return None if all(broken) else Interval(infinite, infinite, infinite)
    gaps = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean = statistics.fmean(gaps)
    if max(gaps) - min(gaps) <= 1e-12 * max(1.0, abs(mean)):  # the bootstrap of equal numbers is not defined
        return Interval(mean, mean, mean)
    numpy, stats = require("numpy", NEEDED, "studies"), require("scipy.stats", NEEDED, "studies", package="scipy")
    found = stats.bootstrap(
        (gaps,),
        numpy.mean,
        confidence_level=1 - (1 - CONFIDENCE) / comparisons,
        n_resamples=RESAMPLES,
        method="BCa",
        random_state=numpy.random.default_rng(0),
    ).confidence_interval
    return Interval(float(found.low), mean, float(found.high))


def exceeds(ours: Sequence[float], theirs: Sequence[float], by: float = 0.0, comparisons: int = 1) -> bool | None:
    """Whether ours exceed theirs by more than a margin; None where the interval of the difference contains the margin.

    With a negative margin: whether ours are at most so much below.

    Examples:
        >>> ours, theirs = [3.0, 3.1, 2.9, 3.2, 3.0], [1.0, 1.1, 1.0, 1.1, 0.9]
        >>> exceeds(ours, theirs), exceeds(theirs, ours), exceeds(ours, theirs, by=2.0)
        (True, False, None)
    """
    found = difference(ours, theirs, comparisons)
    if found is None or found.low <= by <= found.high:
        return None
    return found.low > by


def places(scores: Scores, name: str) -> tuple[int, int] | None:
    """The best and the worst place that an algorithm can have among all; None if there are too few seeds.

    Others count as better or worse where their interval says so; the rest may be either.

    Examples:
        >>> seeds = [0.0, 0.1, 0.2, 0.1, 0.0]
        >>> scores = {"a": [s + 2 for s in seeds], "b": [0.1, 0.0, 0.1, 0.2, 0.0], "c": seeds}
        >>> places(scores, "a"), places(scores, "b")
        ((1, 1), (2, 3))
    """
    others = [other for other in scores if other != name]
    if len(scores[name]) < LEAST_SEEDS:
        return None
    verdicts = [exceeds(scores[other], scores[name], comparisons=len(others)) for other in others]
    return 1 + sum(v is True for v in verdicts), 1 + sum(v is not False for v in verdicts)


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


def all_hold(verdicts: Iterable[bool | None]) -> bool | None:
    """Whether a claim of several parts holds: it does not where one part does not, and is open where one part is.

    Examples:
        >>> all_hold([True, True]), all_hold([True, None]), all_hold([None, False]), all_hold([])
        (True, None, False, None)
    """
    found = list(verdicts)
    return False if False in found else None if None in found or not found else True


def claim_lines(claims: Sequence[Claim] | None) -> list[str]:
    """Claims as lines of a report; None, as with `--quick`: the line that explains why none is judged.

    Examples:
        >>> claim_lines(None) == [UNJUDGED]
        True
    """
    return [UNJUDGED] if claims is None else [claim.line() for claim in claims]
