"""The theorems as functions of alpha and of the exponents: terms of the bound, conditions, presets, best rates.

Every setting follows a power of t. A bound is a sum of terms T^(-r_k), so its rate is the smallest r_k. Exponents are
keyed by setting, because the paper's letters change their meaning from theorem to theorem. In the code below

    omega = olr   nu = ilr   zeta = i_u   gamma = i_d   zeta~ = o_u   gamma~ = o_d

Where the printed statements contradict their proofs, the proofs are followed; docs/theory.md lists the differences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tailopt.schedules import Per

GRADIENT = "min ||grad F||^2"
OBJECTIVE = "F(average) - F*"

# Some inequalities of the theorems are strict, so no exponent is the best one; the presets stay this far away.
O_U = 0.01  # zeta~ > 0; the rate is best in the limit 0
MARGIN = 0.1  # a lower threshold decays this much faster than it must

# Presets such as 1/(2 alpha) are exactly at the limit of inequalities that are not strict: rounding must not break one.
TOLERANCE = 1e-12

Exponents = Mapping[str, float]


@dataclass(frozen=True)
class Condition:
    """An inequality between exponents, the value of its left side, and whether it holds."""

    text: str
    value: float
    holds: bool


@dataclass(frozen=True)
class Theorem:
    """One theorem as functions of alpha and the exponents.

    Args:
        preset: (alpha, exponents that the user chose) -> exponents of the best rate.
        terms: (alpha, exponents) -> r_k of every term T^(-r_k), by name.
        conditions: (alpha, exponents) -> the theorem's conditions.
        best_rate: alpha -> the largest rate, or its limit; None if nothing decays.
        measure: the quantity that is bounded.
        per: what t counts.
        remark: further assumptions and limits.
    """

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


def sludgeclip(biased: bool = False) -> Theorem:
    """Return the theorem of avg-l2clip with failing nodes; t counts local steps, as in avg-l2clip's.

    biased: the nodes that take part do not preserve the objective.
    """
    without_failures = _avg_l2clip()

    def terms(a: float, e: Exponents) -> dict[str, float]:
        c = e["i_u"]
        # r_2 as printed. Its sum lacks a factor t; with it, r_2 equals r_5. The rate is the same.
        printed = {"r_2": 1 - (2 - 2 * a) * c, "r_3": 1 - (2 - a) * c, "r_4": 2 - 2 * c, "r_5": 2 * c * (a - 1)}
        return {"r_1": 1 - 2 * c, **printed, **({"r_6, biased": -2 * c} if biased else {})}

    return replace(
        without_failures,
        terms=terms,
        best_rate=lambda a: 0.0 if biased else (a - 1) / a,
        remark="The bound grows: the participating nodes must preserve the objective."
        if biased
        else "As avg-l2clip, times the number of local steps. The participating nodes must preserve the objective with "
        "the normalised weights, as uniform sampling of equally weighted nodes does.",
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
            # The proof's r_3 needs an accumulator that starts at oeps^2 or more; ours starts at 0, which gives this.
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
            # Not stated in the paper. Below this the accumulator stays bounded, and the six terms are not a bound.
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
    """Return the theorem of RMSProp: as Adagrad's, but the second moment is a moving average, which tends to 0."""

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
    # The paper asks for i_d < -1/2, which is more than its proof needs; the preset satisfies it all the same.
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
    """Return {name: (theorem, settings)}. Clipping by coordinate and by norm have equal bounds, up to constants."""
    bi2clip_settings = ("ilr", "olr", "i_u", "i_d", "o_u", "o_d")
    table: dict[str, tuple[Theorem, tuple[str, ...]]] = {
        "avg-l2clip": (_avg_l2clip(), ("ilr", "i_u")),
        "sludgeclip": (sludgeclip(), ("ilr", "i_u")),
        "avg-biclip": (_avg_biclip(), ("ilr", "i_u", "i_d")),
        "avg-biclip-l2": (_avg_biclip(), ("ilr", "i_u", "i_d")),
        "bi2clip": (_bi2clip(), bi2clip_settings),
        "bi2clip-l2": (_bi2clip(), bi2clip_settings),
    }
    for outer, theorem in (("adagrad", _adagrad()), ("rmsprop", _rmsprop()), ("adam", _adam())):
        table[f"{outer}-l2clip"] = (theorem, ("ilr", "olr", "i_u"))
        table[f"{outer}-biclip"] = (theorem, ("ilr", "olr", "i_u", "i_d"))
        table[f"{outer}-biclip-l2"] = (theorem, ("ilr", "olr", "i_u", "i_d"))
    return table


THEOREMS = _theorems()
