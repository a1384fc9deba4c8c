"""What a diagnosis says: numbers of gradient noise, and in words what follows from them and how certain it is.

`diagnose` computes the numbers; here is no arithmetic on gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from tailopt.tails import TailIndex

Finding = Literal["heavy", "light", "cannot tell"]
Certainty = Literal["high", "moderate", "low"]

BATCHES_FOR_NORMS = 128  # a norm is one number for each batch
UNEQUAL = 10.0  # scales that differ by more than this
AGREEING = 0.9  # a mean cosine at which noise hardly matters


@dataclass(frozen=True)
class Noise:
    """The noise of a tensor's gradients over batches, or of all of them; of the coordinates that were sampled.

    Attributes:
        elements, sampled: coordinates of the tensor, and how many of them were looked at.
        zero: of those, the coordinates whose gradient is 0 in every batch.
        constant: others whose median deviation is 0: more than half of the batches agree.
        sparse: others that are 0 in more than a quarter of the batches. Neither they nor the two above have a scale,
            so they are left out of `tails` and `kurtosis`.
        tails: question 1, of the standardised coordinates.
        pooled: the tail index of all that are not zero, without their scales taken away.
        kurtosis: the excess kurtosis of a coordinate over batches, the median over coordinates; 0 for Gaussian noise.
        scales: the 10 %, 50 % and 90 % quantile of the coordinates' deviations s_j.
        clipped, lifted: the shares of nonzero elements that `u="auto"`, d="auto"` would cut to u and raise to d.
    """

    elements: int
    sampled: int
    zero: int
    constant: int
    sparse: int
    tails: TailIndex
    pooled: TailIndex
    kurtosis: float
    scales: tuple[float, float, float]
    clipped: float
    lifted: float

    @property
    def standardised(self) -> int:
        """How many coordinates have a scale."""
        return self.sampled - self.zero - self.constant - self.sparse

    @property
    def scale_ratio(self) -> float:
        """The 90 % quantile of the scales over the 10 % quantile."""
        low, _, high = self.scales
        return high / low if low > 0 else math.nan


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found; `print` shows it as a table and a paragraph.

    Attributes:
        layers: by the name of the parameter.
        overall: over all parameters.
        u, d: the thresholds of `u="auto", d="auto"` for every parameter, as `calibrate` chooses them.
        norms: question 2, of ||g_b - m|| over batches; from 128 batches on.
        second_opinion: question 1 again with each coordinate divided by its own 90 % quantile. Coordinates with next to
            no gradient in most batches and a large one in a few have a heavy tail in `overall.tails` and none here.
        agreement: the mean cosine between the gradients of two batches: 1 without noise, 0 if they are all noise.
        batches, nonfinite: how many batches were used, and how many were left out for NaN or infinite gradients.
        gram: [batches, batches], the inner products of the sampled gradients.
        survival: a magnitude of standardised coordinates -> the share of them that is larger.
    """

    layers: dict[str, Noise]
    overall: Noise
    u: tuple[float, ...]
    d: tuple[float, ...]
    norms: TailIndex
    second_opinion: TailIndex
    agreement: float
    batches: int
    nonfinite: int
    gram: Tensor = field(repr=False)
    survival: dict[float, float] = field(repr=False)

    @property
    def finding(self) -> Finding:
        """Question 1: "heavy" if both intervals are below 2, "light" if both are above it, else "cannot tell"."""
        tails, second = self.overall.tails, self.second_opinion
        if tails.heavy and second.heavy:
            return "heavy"
        return "light" if tails.light and second.light else "cannot tell"

    @property
    def certainty(self) -> Certainty:
        """How far to trust the finding: the advice has the reasons."""
        if self.finding == "cannot tell":
            return "low"
        return ("high", "moderate", "low")[min(2, len(self.doubts))]

    @property
    def doubts(self) -> list[str]:
        """What speaks against trusting the finding."""
        tails, noise = self.overall.tails, self.overall
        found = []
        if self.batches < BATCHES_FOR_NORMS:
            found.append(f"there are only {self.batches} batches, so rarer outliers were not seen")
        if tails.batches < min(30, self.batches / 4):
            found.append(f"the tail is from {tails.batches:.0f} batches in effect, so a few of them decide")
        if tails.largest_batch > 0.25:
            found.append(f"{tails.largest_batch:.0%} of the largest values are from one batch")
        if noise.standardised < noise.sampled / 2:
            found.append(f"{1 - noise.standardised / noise.sampled:.0%} of the coordinates had to be left out")
        if self.nonfinite:
            found.append(f"{self.nonfinite} batches with NaN or infinite gradients were left out")
        if tails.heavy != self.second_opinion.heavy or tails.light != self.second_opinion.light:
            found.append("two ways to scale the coordinates disagree")
        return found

    @property
    def advice(self) -> str:
        """A paragraph: the three answers, what would help, and how certain that is."""
        sentences = (self._coordinates(), self._norms(), self._scales(), self._remedy(), self._certainty())
        return " ".join(filter(None, sentences))

    def _coordinates(self) -> str:
        tails = self.overall.tails
        if math.isnan(tails.index):
            return (
                "Whether single coordinates are heavy-tailed cannot be told: "
                f"only {self.overall.standardised} of {self.overall.sampled} that were looked at have a scale."
            )
        index = f"the tail index is {interval(tails)}"
        if self.finding == "heavy":
            what = f"is heavy-tailed: {index}, and below 2 the variance is infinite"
            return f"Coordinate by coordinate, the noise over batches {what}."
        if self.finding == "light":
            what = f"is not heavy-tailed: {index}, and above 2 the variance is finite"
            return f"Coordinate by coordinate, the noise over batches {what}."
        if tails.heavy:
            return (
                f"Some coordinates are next to 0 in most batches and large in a few: {index}, but "
                f"{interval(self.second_opinion)} where each is compared with its own larger values. Rare events "
                "such as infrequent words look like this, heavy tails need not."
            )
        why = "the largest values alone are heavier" if tails.low > 2 else "that is on both sides of 2"
        return f"Whether single coordinates are heavy-tailed over batches cannot be told: {index}; {why}."

    def _norms(self) -> str:
        if self.batches < BATCHES_FOR_NORMS:
            return (
                f"For the norms of gradients cannot tell: that takes {BATCHES_FOR_NORMS} batches, not {self.batches}."
            )
        if math.isnan(self.norms.index):
            return "For the norms of gradients cannot tell: most of them are equal."
        what = "heavy-tailed too" if self.finding == "heavy" else "heavy-tailed"
        if self.norms.heavy:
            return f"The norms over batches are {what}: {interval(self.norms)}."
        if self.norms.light:
            return f"The norms do not look heavy-tailed, as far as {self.batches} can show: {interval(self.norms)}."
        return f"For the norms of gradients cannot tell: {interval(self.norms)}."

    def _scales(self) -> str:
        ratio, pooled = self.overall.scale_ratio, self.overall.pooled
        if math.isnan(ratio):
            return ""
        text = f"The scales of coordinates differ by a factor of {ratio:.3g} between the 10 % and the 90 % quantile"
        hill = pooled.hill_at(0.01)
        if self.finding == "light" and hill < 2:
            return f"{text}; that alone brings Hill's estimate of all coordinates pooled down to {hill:.2g}."
        return f"{text}."

    def _remedy(self) -> str:
        clipping = (
            f'tailopt.BiClip(params), whose u="auto" would cut {self.overall.clipped:.0%} of the coordinates '
            f"and raise {self.overall.lifted:.0%}"
        )
        unequal = self.overall.scale_ratio > UNEQUAL
        if self.finding == "heavy":
            return f"Clip every coordinate: {clipping}."
        if self.finding == "cannot tell":
            return f"Compare {clipping}, with what you use now; more batches may decide."
        if self.certainty == "low":
            return "That is too uncertain to act on: take more batches, and smaller ones."
        if self.norms.heavy:
            return "Some batches have far larger gradients altogether: clip the norm, as tailopt.L2Clip does."
        if self.agreement > AGREEING:
            return f"Gradients of two batches agree (mean cosine {self.agreement:.2f}), so noise hardly matters here."
        if unequal:
            return (
                "There are no outliers to clip. Unequal scales call for steps that do not depend on them, as those of "
                "Adam, or of BiClip with d near u."
            )
        return "There are no outliers to clip, and scales are alike: nothing here speaks against plain SGD."

    def _certainty(self) -> str:
        reasons = "; ".join(self.doubts)
        here = "It is about the weights as they are now: look again during training."
        return f"Certainty: {self.certainty}{f', because {reasons}' if reasons else ''}. {here}"


def interval(tails: TailIndex) -> str:
    """An index with its interval.

    Examples:
        >>> interval(TailIndex(1.52, 1.4, 1.71))
        '1.5 (90 % interval 1.4 to 1.7)'
    """
    if math.isnan(tails.index):
        return "unknown"
    high = f"to {tails.high:.2g}" if math.isfinite(tails.high) else "and more"
    return f"{tails.index:.2g} (90 % interval {tails.low:.2g} {high})"
