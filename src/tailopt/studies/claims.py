"""The paper's claims, each judged by what a study saw."""

from __future__ import annotations

from dataclasses import dataclass


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
