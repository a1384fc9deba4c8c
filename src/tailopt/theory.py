"""What is proved: exponents of the schedules, conditions on them, and the rate that they promise.

Noise has a finite alpha-moment, 1 < alpha < 2. Every setting follows a power of t; a bound is a sum of terms T^(-r_k),
so its rate is min r_k. Exponents are keyed by setting, since the paper's letters change their meaning from theorem to
theorem. In the formulas below

    omega = olr   nu = ilr   zeta = i_u   gamma = i_d   zeta~ = o_u   gamma~ = o_d

Where the printed statements contradict their proofs, the proofs are followed; docs/theory.md says where.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tailopt.algorithms import spelling_key
from tailopt.convex_bound import convex_bound
from tailopt.schedules import Per, Power, Schedule, power

GRADIENT = "min ||grad F||^2"
OBJECTIVE = "F(average) - F*"

# The open ends of the theorems: strict inequalities, for which a preset has to choose something.
O_U = 0.01  # zeta~ > 0; the rate is best in the limit 0
MARGIN = 0.1  # a lower threshold decays this much faster than it must

# Presets such as 1/(2 alpha) sit exactly on the inequalities that are not strict; rounding must not push them off.
TOLERANCE = 1e-12

Exponents = Mapping[str, float]


@dataclass(frozen=True)
class Condition:
    """An inequality between exponents, the value that it is about, and whether it holds."""

    text: str
    value: float
    holds: bool


@dataclass(frozen=True)
class Theory:
    """What `theory` returns; `simulate(schedules=...)` takes it as it is.

    Attributes:
        algorithm: its name here.
        alpha: the moment that is finite.
        exponents: of t, by setting.
        rate: r of the bound T^(-r), logarithms left out; None where nothing decays by proof: a condition is broken, or
            the theorem (adam's) promises a bounded gradient only. At or below 0 it is no decay either.
        best_rate: the largest r (or its limit) that exponents can give at this alpha.
        measure: what decays.
        per: what t counts.
        conditions: each with whether it holds.
        terms: r_k by name; the smallest is the rate.
        remark: what else one has to know.
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
        """What F(average) - F* is at most after T local steps: avg-l2clip's four terms and their "total".

        Args:
            T: local steps of a node, over the whole run.
            mu, L: strong convexity and smoothness of every node's objective.
            M: the largest norm of a node's exact gradient on the domain.
            B: E|noise|^alpha <= B^alpha.
            r: the learning rate is r/(t+1), so r = 2 ilr; r > 2/mu.
            c: the threshold is c t^i_u, so c = i_u's setting.
            z: local steps of a round.
            synchronised: for the average of the weights at the ends of rounds, as `simulate(average=True)` has it; the
                factor is (T+1) z / (T-z).
            printed: the statement's terms, not those that its proof supports; docs/theory.md says how they differ.

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
        """A summary of a few lines."""
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
    """Exponents, conditions and rate of an algorithm under noise with a finite alpha-moment.

    Without `exponents` they are those of the best rate, strict inequalities kept by a margin. Those given replace them
    one by one (bi2clip: the others then follow a given o_u); a condition that they break is named in a UserWarning.

    Args:
        algorithm: a name with a theorem, in our spelling or the paper's (`tailclip` means `biclip`). `sludgeclip` is
            avg-l2clip with failing nodes.
        alpha: 1 < alpha < 2.
        biased: of sludgeclip: the nodes that take part do not preserve the objective, as where the same ones always
            fail. Then the bound grows.
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
    theorem, settings = THEOREMS[name] if not biased else (_sludgeclip(biased=True), ("ilr", "i_u"))
    given = {key: _exponent(key, e, settings, theorem.per, name) for key, e in exponents.items()}
    preset = theorem.preset(alpha, given)
    chosen = {key: given.get(key, preset[key]) for key in settings}
    # Without a lower threshold d = 0, which is t^(-inf): its term vanishes.
    full = {"i_d": -math.inf, "olr": 0.0, **chosen}
    conditions = tuple(c for c in theorem.conditions(alpha, full) if math.isfinite(c.value))
    terms = {key: r for key, r in theorem.terms(alpha, full).items() if math.isfinite(r)}
    best_rate = theorem.best_rate(alpha)
    kept = all(c.holds for c in conditions)
    rate = min(terms.values()) if kept and best_rate is not None else None
    broken = [f"the condition {c.text} is broken, got {c.value:g}" for c in conditions if not c.holds]
    if broken:
        warnings.warn(f"{name}: {'; '.join(broken)}.", UserWarning, stacklevel=2)
    if rate is not None and rate <= 0:
        warnings.warn(f"{name}: these exponents promise no decay, rate {rate:g}.", UserWarning, stacklevel=2)
    return Theory(name, alpha, chosen, rate, best_rate, theorem.measure, theorem.per, conditions, terms, theorem.remark)


# --- The theorems -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Theorem:
    """One theorem as functions of alpha and the exponents."""

    preset: Callable[[float, Exponents], dict[str, float]]
    terms: Callable[[float, Exponents], dict[str, float]]
    conditions: Callable[[float, Exponents], list[Condition]]
    best_rate: Callable[[float], float | None]
    measure: str
    per: Per
    remark: str


def _above(text: str, value: float, bound: float) -> Condition:
    return Condition(text, value, value > bound)


def _below(text: str, value: float, bound: float) -> Condition:
    return Condition(text, value, value < bound)


def _at_least(text: str, value: float, bound: float) -> Condition:
    return Condition(text, value, value >= bound - TOLERANCE)


def _at_most(text: str, value: float, bound: float) -> Condition:
    return Condition(text, value, value <= bound + TOLERANCE)


def _avg_l2clip() -> Theorem:
    def terms(a: float, e: Exponents) -> dict[str, float]:
        c = e["i_u"]
        return {"r_1": 1 - 2 * c, "r_2": (2 * a - 2) * c, "r_3": 1 - (2 - a) * c, "r_4": 2 - 2 * c}

    def conditions(a: float, e: Exponents) -> list[Condition]:
        return [
            Condition("ilr = -1", e["ilr"], abs(e["ilr"] + 1) <= TOLERANCE),
            _above("i_u > 0", e["i_u"], 0),
            _below("i_u < 1/2", e["i_u"], 1 / 2),
        ]

    return Theorem(
        preset=lambda a, given: {"ilr": -1.0, "i_u": 1 / (2 * a)},
        terms=terms,
        conditions=conditions,
        best_rate=lambda a: (a - 1) / a,
        measure=OBJECTIVE,
        per="step",
        remark="mu-strongly convex, projected on a ball; the learning rate is ilr * 2/(t+1), and ilr > 1/mu is needed.",
    )


def _sludgeclip(biased: bool = False) -> Theorem:
    """Avg-L2Clip over the nodes that take part; t counts local steps, as there."""
    whole = _avg_l2clip()

    def terms(a: float, e: Exponents) -> dict[str, float]:
        c = e["i_u"]
        # The second as printed. Its sum lacks a factor t, with which it is the fifth; the rate is the same.
        printed = {"r_2": 1 - (2 - 2 * a) * c, "r_3": 1 - (2 - a) * c, "r_4": 2 - 2 * c, "r_5": 2 * c * (a - 1)}
        return {"r_1": 1 - 2 * c, **printed, **({"r_6, biased": -2 * c} if biased else {})}

    return replace(
        whole,
        terms=terms,
        best_rate=lambda a: 0.0 if biased else (a - 1) / a,
        remark="The bound grows: who takes part must preserve the objective."
        if biased
        else "As avg-l2clip, times the number of local steps. Who takes part must preserve the objective with the "
        "normalised weights, as uniform sampling of equally weighted nodes does.",
    )


def _avg_biclip() -> Theorem:
    def terms(a: float, e: Exponents) -> dict[str, float]:
        nu, zeta, gamma = e["ilr"], e["i_u"], e["i_d"]
        return {"r_1": nu + 1, "r_2": -nu - 2 * zeta, "r_5": -gamma, "r_6": (a - 1) * zeta, "r_7": -nu - zeta}

    def conditions(a: float, e: Exponents) -> list[Condition]:
        return [
            _above("i_u > 0", e["i_u"], 0),
            _below("i_d < 0", e["i_d"], 0),
            _at_most("ilr <= 0", e["ilr"], 0),
            _above("ilr > -1", e["ilr"], -1),
        ]

    return Theorem(
        preset=lambda a, given: {
            "ilr": -(a + 1) / (2 * a),
            "i_u": 1 / (2 * a),
            "i_d": -(a - 1) / (2 * a) - MARGIN,
        },
        terms=terms,
        conditions=conditions,
        best_rate=lambda a: (a - 1) / (2 * a),
        measure=GRADIENT,
        per="round",
        remark="Up to log T. A remark of this project, not a result of the paper: bi2clip's proof with the outer step "
        "bounded by the inner clipping.",
    )


def _bi2clip() -> Theorem:
    def preset(a: float, given: Exponents) -> dict[str, float]:
        o_u = given.get("o_u", O_U)
        scale = 1 - 2 * (o_u if 0 < o_u < 1 / 2 else O_U)
        return {
            "ilr": -scale * a / (4 * a - 2),
            "olr": -(2 - scale) / 2,
            "i_u": scale / (4 * a - 2),
            "i_d": -scale * (a - 1) / (4 * a - 2) - MARGIN,
            "o_u": o_u,
            "o_d": -scale / 2 - MARGIN,
        }

    def terms(a: float, e: Exponents) -> dict[str, float]:
        omega, nu, zeta, gamma = e["olr"], e["ilr"], e["i_u"], e["i_d"]
        outer_zeta, outer_gamma = e["o_u"], e["o_d"]
        return {
            "r_1": omega + nu + 1,
            "r_2": -omega - 2 * outer_zeta + nu,
            "r_3": nu - outer_gamma,
            "r_4": (a - 1) * (outer_zeta - nu),
            "r_5": -gamma,
            "r_6": (a - 1) * zeta,
            "r_7": -nu - zeta,
        }

    def conditions(a: float, e: Exponents) -> list[Condition]:
        return [
            _above("i_u > 0", e["i_u"], 0),
            _above("o_u > 0", e["o_u"], 0),
            _below("i_d < 0", e["i_d"], 0),
            _below("o_d < 0", e["o_d"], 0),
            _at_most("olr <= 0", e["olr"], 0),
            _at_most("ilr <= 0", e["ilr"], 0),
            _above("olr + ilr > -1", e["olr"] + e["ilr"], -1),
        ]

    return Theorem(
        preset=preset,
        terms=terms,
        conditions=conditions,
        best_rate=lambda a: (a - 1) / (4 * a - 2),
        measure=GRADIENT,
        per="round",
        remark="Up to log T. The best rate is a limit, o_u -> 0 from above; the method may do better than this bound.",
    )


def _adagrad() -> Theorem:
    def terms(a: float, e: Exponents) -> dict[str, float]:
        omega, nu, zeta, gamma = e["olr"], e["ilr"], e["i_u"], e["i_d"]
        return {
            "r_1": omega - zeta + 1 / 2,
            "r_2": -(omega + 2 * nu + 3 * zeta + 1 / 2),
            "r_3": -(4 * zeta + 3 * nu + 1 / 2),
            # The proof's r_3 needs an accumulator that starts at oeps^2 or more; from 0, as here, it is this one.
            "r_3, v_0 = 0": -(2 * nu + 3 * zeta + 1 / 2),
            "r_4": -(2 * nu + 2 * zeta + 1 / 2),
            "r_5": -(nu + gamma + zeta + 1 / 2),
            "r_6": -(nu + (2 - a) * zeta + 1 / 2),
        }

    def conditions(a: float, e: Exponents) -> list[Condition]:
        return [
            _above("i_u > 0", e["i_u"], 0),
            _below("i_d < 0", e["i_d"], 0),
            _above("olr - i_u + 1/2 > 0", e["olr"] - e["i_u"] + 1 / 2, 0),
            # Not stated in the paper. Below it the accumulator stays bounded, and the six terms are not a bound.
            _at_least("ilr + i_u >= -1/2", e["ilr"] + e["i_u"], -1 / 2),
        ]

    return Theorem(
        preset=_adaptive_preset,
        terms=terms,
        conditions=conditions,
        best_rate=lambda a: (a - 1) / (2 * a),
        measure=GRADIENT,
        per="round",
        remark="Up to powers of log T.",
    )


def _rmsprop() -> Theorem:
    """As for Adagrad, with a second moment that is a moving average: it follows the displacements, and vanishes."""

    def terms(a: float, e: Exponents) -> dict[str, float]:
        omega, nu, zeta, gamma = e["olr"], e["ilr"], e["i_u"], e["i_d"]
        return {
            "r_1": omega + nu + 1,
            "r_2": -omega - nu - 2 * zeta,
            "r_3": -2 * nu - 3 * zeta,
            "r_3, v_0 = 0": -nu - 2 * zeta,  # as in _adagrad
            "r_4": -nu - zeta,
            "r_5": -gamma,
            "r_6": (a - 1) * zeta,
        }

    def conditions(a: float, e: Exponents) -> list[Condition]:
        return [
            _above("i_u > 0", e["i_u"], 0),
            _below("i_d < 0", e["i_d"], 0),
            _above("olr + ilr > -1", e["olr"] + e["ilr"], -1),
            _at_most("ilr + i_u <= 0", e["ilr"] + e["i_u"], 0),
        ]

    return Theorem(
        preset=_adaptive_preset,
        terms=terms,
        conditions=conditions,
        best_rate=lambda a: (a - 1) / (2 * a),
        measure=GRADIENT,
        per="round",
        remark="Up to log T.",
    )


def _adaptive_preset(a: float, given: Exponents) -> dict[str, float]:
    # The paper asks for i_d < -1/2, which is more than its proof needs; the preset keeps to it all the same.
    return {"ilr": -(a + 1) / (2 * a), "olr": 0.0, "i_u": 1 / (2 * a), "i_d": -1 / 2 - MARGIN}


def _adam() -> Theorem:
    def terms(a: float, e: Exponents) -> dict[str, float]:
        omega, nu, zeta, gamma = e["olr"], e["ilr"], e["i_u"], e["i_d"]
        return {
            "F_2, F_4": omega + nu + 1,
            "F_3": -omega - nu - 2 * zeta,
            "F_5 F_6": -2 * nu - 3 * zeta,
            "F_5 F_7": -zeta,
            "F_5 F_8": -gamma,
            "F_5 F_9": -nu - zeta,
            "F_5 F_10": (a - 1) * zeta,
        }

    def conditions(a: float, e: Exponents) -> list[Condition]:
        return [
            Condition("i_u = 0", e["i_u"], abs(e["i_u"]) <= TOLERANCE),
            _below("ilr < 0", e["ilr"], 0),
            _above("ilr > -1", e["ilr"], -1),
            _above("olr + ilr > -1", e["olr"] + e["ilr"], -1),
            _at_most("olr <= 0", e["olr"], 0),
            _below("i_d < 0", e["i_d"], 0),
            _above("i_d + ilr + olr > -1", e["i_d"] + e["ilr"] + e["olr"], -1),
        ]

    return Theorem(
        preset=lambda a, given: {"ilr": -1 / 2, "olr": 0.0, "i_u": 0.0, "i_d": -MARGIN},
        terms=terms,
        conditions=conditions,
        best_rate=lambda a: None,
        measure=GRADIENT,
        per="round",
        remark="Bounded, O(1), which every run on a bounded domain is: there is nothing to measure.",
    )


def _theorems() -> dict[str, tuple[Theorem, tuple[str, ...]]]:
    """Name -> theorem, settings. The bounds hold for clipping by coordinate and by norm alike, up to constants."""
    bi2clip = ("ilr", "olr", "i_u", "i_d", "o_u", "o_d")
    table: dict[str, tuple[Theorem, tuple[str, ...]]] = {
        "avg-l2clip": (_avg_l2clip(), ("ilr", "i_u")),
        "sludgeclip": (_sludgeclip(), ("ilr", "i_u")),
        "avg-biclip": (_avg_biclip(), ("ilr", "i_u", "i_d")),
        "avg-biclip-l2": (_avg_biclip(), ("ilr", "i_u", "i_d")),
        "bi2clip": (_bi2clip(), bi2clip),
        "bi2clip-l2": (_bi2clip(), bi2clip),
    }
    for outer, theorem in (("adagrad", _adagrad()), ("rmsprop", _rmsprop()), ("adam", _adam())):
        table[f"{outer}-l2clip"] = (theorem, ("ilr", "olr", "i_u"))
        table[f"{outer}-biclip"] = (theorem, ("ilr", "olr", "i_u", "i_d"))
        table[f"{outer}-biclip-l2"] = (theorem, ("ilr", "olr", "i_u", "i_d"))
    return table


THEOREMS = _theorems()


def _name(algorithm: str) -> str:
    """Our spelling: `Bi^2Clip`, `RMS-TailClip` and `Avg-BiClip (L2)` too."""
    plain = spelling_key(algorithm)
    for name in THEOREMS:
        if plain == spelling_key(name):
            return name
    raise ValueError(f"Invalid algorithm: {algorithm!r} has no theorem. Those with one: {', '.join(THEOREMS)}.")


def _exponent(key: str, exponent: float | Power, settings: tuple[str, ...], per: Per, name: str) -> float:
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
