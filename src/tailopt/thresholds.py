"""Thresholds without a search: u and d from the statistics of gradients, for `u="auto"` and `d="auto"`.

    step of round t     (lr / s_t) * clip(g; u_t, d_t)        so lr is the most that one coordinate moves
    calibration         the first 50 gradients, d = u: a step is lr * sign(g)
    scale="first"       s_t = u_1 and u_t <= u_1: steps shrink with the gradients
    scale="follow"      s_t = u_t: the largest step stays lr, and a schedule shrinks it

Where the norm is clipped, read ||g|| for g: lr is the most that the norm moves, and a step of calibration is
lr * g / ||g||.

Here are pure functions of statistics: `Counts` of elements, or `Norms`. `total` adds those of nodes in node order, and
`choose` and `Thresholds.follow` depend on these sums alone, so every node gets the same numbers and can compare their
digest.
docs/results/thresholds.md has the measurement that chose the default rule.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from torch import Tensor

from tailopt.arguments import check_choice, is_number
from tailopt.clipping.counts import Counts

Scale = Literal["first", "follow"]
Number = TypeVar("Number", float, Tensor)

AUTO = "auto"
CALIBRATION = 50  # gradients, over all participants
SCALES = ("first", "follow")
LOWEST, HIGHEST = 0.05, 6.0  # u in units of the base


@dataclass(frozen=True)
class Norms:
    """The norms of gradients over one scope, a number for each gradient; all of them, because they are few.

    Zeros and what is not finite are left out, as they are from the quantiles of `Counts`.

    Examples:
        >>> norms = Norms((3.0, 0.0, 1.0, float("nan"))) + Norms((2.0,))
        >>> norms.elements, norms.quantile(0.5), round(nonzero_rms(norms), 3)
        (5, 2.0, 2.16)
    """

    values: tuple[float, ...] = ()

    def __add__(self, other: Norms) -> Norms:
        return Norms(self.values + other.values)

    @property
    def elements(self) -> int:
        """How many there are, the zeros and those that are not finite too."""
        return len(self.values)

    @property
    def positive(self) -> list[float]:
        """Those that count, in ascending order."""
        return sorted(x for x in self.values if 0 < x < math.inf)

    def quantile(self, q: float) -> float:
        """The norm below which a share q of those that count lies, on a straight line between neighbours, or NaN."""
        ordered = self.positive
        if not ordered:
            return math.nan
        place = q * (len(ordered) - 1)
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])


Statistics = Counts | Norms
SomeStatistics = TypeVar("SomeStatistics", Counts, Norms)


@dataclass(frozen=True)
class Rule:
    """How u and d follow from the nonzero finite elements of gradients, or from their norms.

        base = a quantile of |g|, or its RMS
        u    = base * clamp(factor * (2 * median / RMS)^tail_power, 0.05, 6)
        d    = ratio * u

    The RMS of a Gaussian variable is 1.5 times its median magnitude; heavy tails raise the RMS and leave the median. So
    with a positive `tail_power` u falls as tails get heavier, towards sign descent, and light-tailed gradients are
    hardly clipped.

    Attributes:
        quantile: of the base, in (0, 1); None is the RMS.
        memory: the weight of the last u, per local step, in a geometric mean with the u of new gradients.
    """

    quantile: float | None = 0.5
    factor: float = 1.0
    tail_power: float = 0.0
    ratio: float = 1 / 3
    memory: float = 0.996

    def upper(self, counts: Statistics) -> float:
        """u for these gradients; NaN if no element is nonzero and finite.

        Examples:
            >>> import torch
            >>> from tailopt.clipping.counts import count
            >>> g = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
            >>> outliers = torch.cat([g, torch.full((10,), 100.0)])
            >>> [round(RULES["tail"].upper(count([x], u=1, d=0)[0]), 2) for x in (g, outliers)]
            [2.77, 0.84]
        """
        median, rms = counts.quantile(0.5), nonzero_rms(counts)
        if not rms > 0 or math.isnan(median):
            return math.nan
        base = rms if self.quantile is None else counts.quantile(self.quantile)
        tail = self.factor * (2 * median / rms) ** self.tail_power
        return _rounded(base * min(max(tail, LOWEST), HIGHEST))


# The first is the default, and "norm" that of norms; the others lost on SynToken and are kept for comparison.
RULES: Mapping[str, Rule] = {
    "tail": Rule(factor=3.0, tail_power=1.0),
    "median": Rule(),
    "rms": Rule(quantile=None),
    "q25": Rule(quantile=0.25),
    "q75": Rule(quantile=0.75),
    "q90": Rule(quantile=0.9),
    "sign": Rule(ratio=1.0),
    # u = median^2 / RMS and d = u: the step has the length of a usual norm, and only its direction is the gradient's.
    "norm": Rule(factor=0.5, tail_power=1.0, ratio=1.0),
    # For `Clipped`, whose steps another optimizer scales: only the largest are cut. One gradient in 50 that is far too
    # large does not reach this quantile. docs/replace-adamw.md has the measurement.
    "gate": Rule(quantile=0.97, ratio=0.0),
}
DEFAULT, NORM = "tail", "norm"


@dataclass(frozen=True)
class Thresholds:
    """The thresholds of a round: one number each for all tensors, or one per tensor.

    Where norms are clipped, a norm takes the place of a tensor's elements: one over all, or one per tensor.

    Attributes:
        u1: at the end of calibration.
        u, d: of the coming round.
        scale: "first" or "follow": what lr is divided by.
        rule: the name of a `Rule` in `RULES`.
        ratio: d / u; the rule's, or 0.
        reason: one line about the choice.

    Examples:
        >>> import torch
        >>> from tailopt.clipping.counts import count
        >>> g = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
        >>> chosen = choose(list(count([g], u=1, d=0).values()))
        >>> [round(x, 2) for x in chosen.numbers(0)]  # u, d, s
        [2.77, 0.92, 2.77]
        >>> smaller = chosen.follow(list(count([g / 10], u=1, d=0).values()), steps=500)
        >>> [round(x, 2) for x in smaller.numbers(0)], round(smaller.step_bound(lr=0.1), 3)
        ([0.37, 0.12, 2.77], 0.014)
    """

    u1: tuple[float, ...]
    u: tuple[float, ...]
    d: tuple[float, ...]
    scale: Scale = "first"
    rule: str = DEFAULT
    ratio: float = RULES[DEFAULT].ratio
    reason: str = ""

    @property
    def per_tensor(self) -> bool:
        """Whether every tensor has its own thresholds."""
        return len(self.u) > 1

    def numbers(self, tensor: int) -> tuple[float, float, float]:
        """u, d and s of a tensor, by its position: its step is (lr / s) * clip(g; u, d)."""
        i = tensor if self.per_tensor else 0
        return self.u[i], self.d[i], self.u1[i] if self.scale == "first" else self.u[i]

    def step_bound(self, lr: float) -> float:
        """How far one step can move a coordinate, or the norm: lr * u / s, of the tensor with the largest ratio."""
        return lr * max(u / s for u, _, s in map(self.numbers, range(len(self.u))))

    def follow(self, counts: Sequence[Statistics], steps: int) -> Thresholds:
        """The thresholds of the next round, from the statistics of all gradients of this one: one entry per tensor.

            u <- u^m * (u of this round's gradients)^(1 - m),  m = memory^steps;  with scale="first" at most u_1

        A tensor without a nonzero finite gradient keeps its thresholds.

        Args:
            counts: of every tensor, added up over the nodes with `total`.
            steps: local steps of the round; 1 in a loop without rounds.
        """
        rule = RULES[self.rule]
        memory = rule.memory**steps
        u = []
        for old, first, seen in zip(self.u, self.u1, _scopes(counts, self.per_tensor), strict=True):
            target = rule.upper(seen)
            new = old if math.isnan(target) else _rounded(old**memory * target ** (1 - memory))
            u.append(min(new, first) if self.scale == "first" else new)
        return replace(self, u=tuple(u), d=tuple(self.ratio * x for x in u))

    def digest(self) -> str:
        """SHA-256 of everything that a step depends on; nodes compare it."""
        text = f"{self.scale}/{self.rule}/{len(self.u)}".encode()
        numbers = (*self.u1, *self.u, *self.d, self.ratio)
        return hashlib.sha256(text + struct.pack(f"<{len(numbers)}d", *numbers)).hexdigest()

    def state(self) -> dict[str, Any]:
        """As plain data, for a param group and a checkpoint: numbers, or one per tensor as a list."""

        def plain(values: tuple[float, ...]) -> float | list[float]:
            return list(values) if self.per_tensor else values[0]

        words = {"scale": self.scale, "rule": self.rule, "ratio": self.ratio, "reason": self.reason}
        return {"u1": plain(self.u1), "u": plain(self.u), "d": plain(self.d), **words}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Thresholds:
        """What `state` stored."""
        known = ("u1", "u", "d", "scale", "rule", "ratio", "reason")
        if set(state) != set(known):
            raise ValueError(f"Invalid thresholds: they have {sorted(state)}; need {sorted(known)}.")
        u1, u, d = (tuple(v) if isinstance(v := state[name], list | tuple) else (v,) for name in ("u1", "u", "d"))
        if not len(u1) == len(u) == len(d):
            raise ValueError(f"Invalid thresholds: {len(u1)} u1, {len(u)} u and {len(d)} d; need as many of each.")
        check_choice("scale of thresholds", state["scale"], SCALES)
        check_choice("rule of thresholds", state["rule"], tuple(RULES))
        return cls(u1, u, d, state["scale"], state["rule"], state["ratio"], state["reason"])


def choose(
    counts: Sequence[Statistics],
    *,
    rule: str | None = None,
    scale: Scale = "first",
    per_tensor: bool = True,
    d: float | str = AUTO,
) -> Thresholds:
    """The thresholds after calibration.

    Args:
        counts: of the gradients of calibration, with histograms; one per tensor, added up over the nodes with `total`.
            Where norms are clipped, `Norms`: one over all tensors, or one per tensor.
        rule: a name in `RULES`; by default "tail", and "norm" for norms.
        scale: "first" or "follow".
        per_tensor: one u per tensor, or one for all. A tensor without a nonzero finite gradient gets the one for all.
        d: "auto", the rule's ratio of u, or 0.
    """
    rule = rule or (NORM if any(isinstance(c, Norms) for c in counts) else DEFAULT)
    check_choice("rule of thresholds", rule, tuple(RULES))
    check_choice("scale of thresholds", scale, SCALES)
    ratio = ratio_of_auto(d, rule)
    overall = pooled(counts)
    for_all = RULES[rule].upper(overall)
    if math.isnan(for_all):
        raise ValueError(
            f"Invalid gradients: none of {overall.elements} {'norms' if isinstance(overall, Norms) else 'elements'} is "
            "nonzero and finite; u='auto' needs some. "
            "Set u, or check the loss."
        )
    own = [RULES[rule].upper(c) for c in _scopes(counts, per_tensor)]
    u = tuple(for_all if math.isnan(x) else x for x in own)
    lower = tuple(ratio * x for x in u)
    return Thresholds(u, u, lower, scale, rule, ratio, explain(overall, u, ratio, rule))


def explain(overall: Statistics, u: Sequence[float], ratio: float, rule: str) -> str:
    """One line about a choice: u and d, and what in the gradients led to it."""
    median, rms = overall.quantile(0.5), nonzero_rms(overall)
    tensors = f" over {len(u)} tensors" if len(u) > 1 else ""
    span = f"{u[0]:.3g}" if min(u) == max(u) else f"{min(u):.3g} to {max(u):.3g}"
    tail = "light" if rms < 3 * median else "heavy" if rms > 6 * median else "moderate"
    what = "the norm" if isinstance(overall, Norms) else "|g|"
    return (
        f"u = {span}{tensors}, d = {ratio:.3g} u, by the rule {rule!r}: the median of {what} is {median:.3g} and the "
        f"RMS {rms / median:.3g} times that ({tail} tails or unequal scales)."
    )


def total(by_node: Sequence[Sequence[SomeStatistics]]) -> list[SomeStatistics]:
    """Add up the statistics of nodes, tensor by tensor, in the order given: that of the nodes' numbers."""
    if len({len(counts) for counts in by_node}) != 1:
        raise ValueError(f"Invalid counts: the nodes have {[len(c) for c in by_node]} tensors; need as many on each.")
    sums = list(by_node[0])
    for counts in by_node[1:]:
        sums = [a + b for a, b in zip(sums, counts, strict=True)]
    return sums


def pooled(counts: Sequence[Statistics]) -> Statistics:
    """All tensors as one. Histograms of large tensors are a sample, and count as much as the tensor has elements."""
    if not counts:
        raise ValueError("Invalid counts: there is no tensor; need one or more.")
    result = Counts()
    if isinstance(counts[0], Norms):
        return sum((c for c in counts if isinstance(c, Norms)), Norms())
    for c in (c for c in counts if isinstance(c, Counts)):
        in_histogram = sum(c.octaves)
        weight = c.elements / in_histogram if in_histogram else 1.0
        if weight > 1:
            scaled = tuple(round(weight * n) for n in c.octaves)
            logs = tuple(log * m / n if n else 0.0 for log, m, n in zip(c.logs, scaled, c.octaves, strict=True))
            c = replace(c, octaves=scaled, logs=logs)
        result = result + c
    return result


def nonzero_rms(counts: Statistics) -> float:
    """The RMS of the nonzero finite elements, or norms; 0 if there is none."""
    if isinstance(counts, Norms):
        positive = counts.positive
        return math.hypot(*positive) / math.sqrt(len(positive)) if positive else 0.0
    elements = counts.elements - counts.nonfinite - counts.zero
    return math.sqrt(counts.squares / elements) if elements > 0 else 0.0


def ratio_of_auto(d: float | str | Tensor, rule: str = DEFAULT) -> float:
    """d / u where u is "auto": the rule's ratio for "auto", or 0; every other d is refused.

    Examples:
        >>> ratio_of_auto(0), round(ratio_of_auto("auto"), 3)
        (0.0, 0.333)
        >>> ratio_of_auto(1e-5)
        Traceback (most recent call last):
        ValueError: Invalid thresholds: d=1e-05 with u='auto'; need d='auto' or d=0, because u is not known yet.
    """
    if isinstance(d, str) and d == AUTO:
        return RULES[rule].ratio
    if is_number(d) and d == 0:
        return 0.0
    raise ValueError(f"Invalid thresholds: d={d!r} with u='auto'; need d='auto' or d=0, because u is not known yet.")


def lower_of_auto(u: Number, rule: str = DEFAULT) -> Number:
    """d where d is "auto" and u is a number or a tensor: the rule's ratio of u.

    Examples:
        >>> lower_of_auto(0.3)
        0.09999999999999999
    """
    if is_number(u) and not 0 <= u < math.inf:
        raise ValueError(f"Invalid thresholds: u={u} with d='auto'; need a finite u >= 0, of which d is a share.")
    return u * RULES[rule].ratio


def _scopes(counts: Sequence[Statistics], per_tensor: bool) -> Sequence[Statistics]:
    return counts if per_tensor else [pooled(counts)]


def _rounded(x: float) -> float:
    """Six significant digits: the last bit of a power differs between C libraries, and nodes must agree on u."""
    return float(f"{x:.6g}")
