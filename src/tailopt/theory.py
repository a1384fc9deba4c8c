"""What is proved about an algorithm: the exponents of its schedules, the conditions on them, and the rate.

    theory("rmsprop-biclip", alpha=1.5)    noise with a finite alpha-moment, 1 < alpha < 2

The theorems themselves are in `theorems.py`, the one bound that is proved with its constants in `convex_bound.py`.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

from tailopt.algorithms import spelling_key
from tailopt.convex_bound import convex_bound
from tailopt.schedules import Per, Power, Schedule, power
from tailopt.theorems import THEOREMS, Condition, sludgeclip


@dataclass(frozen=True)
class Theory:
    """The result of `theory`; `simulate(schedules=...)` accepts it directly.

    Attributes:
        algorithm: its name in this library.
        alpha: the order of the finite moment.
        exponents: of t, by setting.
        rate: r of the bound T^(-r), logarithms left out; None if no decay is proved: a condition is broken, or the
            theorem (adam's) promises only a bounded gradient. A rate of 0 or less is no decay either.
        best_rate: the largest r (or its limit) that exponents can give at this alpha.
        measure: the quantity that decays.
        per: what t counts.
        conditions: each with whether it holds.
        terms: r_k by name; the smallest is the rate.
        remark: further assumptions and limits.
    """

    algorithm: str
    alpha: float
    exponents: dict[str, float]
    rate: float | None
    best_rate: float | None
    measure: str
    per: Per
    conditions: tuple[Condition, ...]
    terms: dict[str, float]
    remark: str

    @property
    def schedules(self) -> dict[str, Schedule]:
        """The exponents as schedules, by setting."""
        # avg-l2clip's learning rate is r / (t + 1), with failing nodes too; all others are pure powers.
        shifts = {"ilr": 1.0} if self.algorithm in ("avg-l2clip", "sludgeclip") else {}
        return {name: power(e, self.per, shifts.get(name, 0.0)) for name, e in self.exponents.items()}

    def bound(
        self,
        T: int,
        *,
        mu: float,
        L: float,
        M: float,
        B: float,
        r: float,
        c: float,
        z: int,
        synchronised: bool = False,
        printed: bool = False,
    ) -> dict[str, float]:
        """Return the upper bound on F(average) - F* after T local steps: avg-l2clip's four terms and their "total".

        Args:
            T: local steps of a node, over the whole run.
            mu, L: strong convexity and smoothness of every node's objective.
            M: the largest norm of a node's exact gradient on the domain.
            B: E|noise|^alpha <= B^alpha.
            r: the learning rate is r/(t+1), so r = 2 ilr; r > 2/mu.
            c: the threshold is c t^i_u, so c = i_u's setting.
            z: local steps per round.
            synchronised: bound the average of the weights at the ends of rounds, as `simulate(average=True)` computes
                it; the factor is (T+1) z / (T-z).
            printed: the terms of the printed statement, not those that its proof supports; docs/theory.md lists the
                differences.

        Examples:
            >>> found = theory("avg-l2clip", alpha=1.5)
            >>> constants = dict(mu=1.0, L=2.0, M=1.0, B=1.0, r=4.0, c=1.0, z=2)
            >>> [round(found.bound(T, **constants)["total"], 2) for T in (10**4, 10**7)]
            [0.67, 0.06]
        """
        if self.algorithm != "avg-l2clip":
            raise ValueError(f"Invalid algorithm: {self.algorithm} has no bound with constants; avg-l2clip has.")
        if self.rate is None:
            broken = ", ".join(c.text for c in self.conditions if not c.holds)
            raise ValueError(f"Invalid exponents: the bound needs {broken}.")
        constants = {"mu": mu, "L": L, "M": M, "B": B, "r": r, "c": c}
        return convex_bound(T, z, self.alpha, self.exponents["i_u"], constants, synchronised, printed)

    def __str__(self) -> str:
        """Return a summary of a few lines."""
        if self.rate is None:
            promise = f"no rate for {self.measure}"
        else:
            best = "" if self.best_rate is None else f" (at best {self.best_rate:.4g})"
            promise = f"{self.measure} = O(T^{-self.rate:.4g}){best}"
        lines = [f"{self.algorithm}, alpha = {self.alpha:g}: {promise}, T counts {self.per}s"]
        lines += [f"  {name:<3} ~ t^{exponent:.4g}" for name, exponent in self.exponents.items()]
        lines += [f"  {'holds ' if c.holds else 'BROKEN'} {c.text}  ({c.value:.4g})" for c in self.conditions]
        return "\n".join([*lines, f"  {self.remark}"])


def theory(algorithm: str, alpha: float, *, biased: bool = False, **exponents: float | Power) -> Theory:
    """Return exponents, conditions and rate of an algorithm under noise with a finite alpha-moment.

    By default, the exponents are those of the best rate; strict inequalities are kept by a margin. Arguments replace
    them one by one (bi2clip: the others then follow a given o_u). A UserWarning names the conditions that they break.

    Args:
        algorithm: a name with a theorem, in our spelling or the paper's (`tailclip` means `biclip`). `sludgeclip` is
            avg-l2clip with failing nodes.
        alpha: 1 < alpha < 2.
        biased: for sludgeclip only: the participating nodes do not preserve the objective, for instance because the
            same nodes always fail. Then the bound grows.
        exponents: by setting (`ilr`, `olr`, `i_u`, `i_d`, `o_u`, `o_d`): numbers, or power schedules.

    Examples:
        >>> found = theory("rmsprop-biclip", alpha=1.5)
        >>> round(found.rate, 4), {name: round(e, 4) for name, e in found.exponents.items()}
        (0.1667, {'ilr': -0.8333, 'olr': 0.0, 'i_u': 0.3333, 'i_d': -0.6})
        >>> round(found.schedules["i_u"].factor(100), 2)
        4.64
    """
    name = _name(algorithm)
    if not 1 < alpha < 2:
        raise ValueError(
            f"Invalid alpha: got {alpha}; need 1 < alpha < 2. Noise with a finite variance has every alpha below 2."
        )
    if not isinstance(biased, bool) or (biased and name != "sludgeclip"):
        raise ValueError(f"Invalid biased: {biased!r} for {name}; need False. Only sludgeclip, whose nodes fail, may.")
    theorem, settings = THEOREMS[name] if not biased else (sludgeclip(biased=True), ("ilr", "i_u"))
    overrides = {key: _exponent(key, e, settings, theorem.per, name) for key, e in exponents.items()}
    preset = theorem.preset(alpha, overrides)
    chosen = {key: overrides.get(key, preset[key]) for key in settings}
    # An algorithm without a lower threshold has d = 0, which is t^(-inf): its term vanishes.
    full = {"i_d": -math.inf, "olr": 0.0, **chosen}
    conditions = tuple(c for c in theorem.conditions(alpha, full) if math.isfinite(c.value))
    terms = {key: r for key, r in theorem.terms(alpha, full).items() if math.isfinite(r)}
    best_rate = theorem.best_rate(alpha)
    all_hold = all(c.holds for c in conditions)
    rate = min(terms.values()) if all_hold and best_rate is not None else None
    broken = [f"the condition {c.text} is broken, got {c.value:g}" for c in conditions if not c.holds]
    if broken:
        warnings.warn(f"{name}: {'; '.join(broken)}.", UserWarning, stacklevel=2)
    if rate is not None and rate <= 0:
        warnings.warn(f"{name}: these exponents promise no decay, rate {rate:g}.", UserWarning, stacklevel=2)
    return Theory(name, alpha, chosen, rate, best_rate, theorem.measure, theorem.per, conditions, terms, theorem.remark)


def _name(algorithm: str) -> str:
    """Return our name of an algorithm; `Bi^2Clip`, `RMS-TailClip` and `Avg-BiClip (L2)` are understood too."""
    key = spelling_key(algorithm)
    for name in THEOREMS:
        if key == spelling_key(name):
            return name
    raise ValueError(f"Invalid algorithm: {algorithm!r} has no theorem. Those with one: {', '.join(THEOREMS)}.")


def _exponent(key: str, exponent: float | Power, settings: tuple[str, ...], per: Per, name: str) -> float:
    """Return the exponent of a setting, checked."""
    if key not in settings:
        raise ValueError(f"Invalid exponent: {name} has no setting {key!r}. It has: {', '.join(settings)}.")
    if isinstance(exponent, Power):
        if exponent.per != per:
            raise ValueError(
                f"Invalid schedule of {key}: it counts {exponent.per}s; the theorem of {name} counts {per}s."
            )
        return exponent.exponent
    if not math.isfinite(exponent):
        raise ValueError(f"Invalid exponent of {key}: got {exponent}; need a finite number.")
    return float(exponent)
