"""The paper's claims, each judged by what a study saw."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# `--quick` runs too little for any figure to mean something
UNJUDGED = "No claim is judged: `--quick` shows that the study works, and its figures say nothing."
# two-sided 95 % quantiles of Student's t by degrees of freedom, from 1 on; beyond them 2 is close enough
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10)


@dataclass(frozen=True)
class Claim:
    """number and text: the paper's; verdict: "holds", "does not hold" or "cannot tell"; figures: what was seen."""

    number: int
    text: str
    verdict: str
    figures: str

    def line(self) -> str:
        """As a line of a report."""
        return f"- **Claim {self.number}: {self.verdict}.** {self.text} Seen: {self.figures}."


def judged(number: int, text: str, holds: bool | None, figures: str) -> Claim:
    """A claim with its verdict; None where the figures do not decide."""
    verdict = "cannot tell" if holds is None else "holds" if holds else "does not hold"
    return Claim(number, text, verdict, figures)


def claim_lines(claims: Sequence[Claim] | None) -> list[str]:
    """Claims as lines of a report; None, as with `--quick`: one line that says why none is judged.

    Examples:
        >>> claim_lines(None) == [UNJUDGED]
        True
    """
    return [UNJUDGED] if claims is None else [claim.line() for claim in claims]


def above(ours: Sequence[float], theirs: Sequence[float]) -> bool | None:
    """Whether the mean of `ours` is above that of `theirs`; None where the 95 % interval of the difference holds 0.

    Both are values of one metric by seed. One seed, or a run that broke down, decides nothing.

    Examples:
        >>> above([3.0, 3.1, 2.9], [1.0, 1.1, 0.9]), above([1.0, 1.1], [3.0, 3.1]), above([1.0, 3.0], [1.0, 2.0])
        (True, False, None)
    """
    if min(len(ours), len(theirs)) < 2 or not all(map(math.isfinite, (*ours, *theirs))):
        return None
    freedom = len(ours) + len(theirs) - 2
    factor = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 2.1
    error = math.sqrt(statistics.variance(ours) / len(ours) + statistics.variance(theirs) / len(theirs))
    gap = statistics.fmean(ours) - statistics.fmean(theirs)
    return None if abs(gap) <= factor * error else gap > 0
