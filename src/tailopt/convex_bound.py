"""Avg-L2Clip on strongly convex objectives: the bound of its theorem with all constants.

    F(average) - F*  <=  Psi_1 + Psi_2 + Psi_3 + Psi_4

with the learning rate r/(t+1), the threshold c t^g, z local steps per round, u = (z+1)/2 and A = 2^(alpha-1) (M^alpha +
B^alpha), where sum_p is 1^p + ... + T^p, bounded from above by an integral:

    Psi_1 = r c^2                      sum_{2g}              / (T (T+1))
    Psi_2 = A^2 c^(2-2alpha)           sum_{(2-2alpha)g + 1} / ((mu - 2/r) T (T+1))
    Psi_3 = 2 A c^(2-alpha) r z u L    sum_{(2-alpha)g}      / ((mu - 2/r) T (T+1))
    Psi_4 = (r c z u L)^2              sum_{2g - 1}          / ((mu - 2/r) T (T+1))

The printed statement differs in constants that its own proof does not support: A lacks 2^(alpha-1), Psi_3 lacks the 2,
and Psi_1 and Psi_3 bound the sum of a growing power by T^(p+1)/(p+1), which is less than the sum. No rate changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from tailopt.arguments import check_counts, is_number


def convex_bound(
    T: int,
    z: int,
    alpha: float,
    exponent: float,
    constants: Mapping[str, float],
    synchronised: bool = False,
    printed: bool = False,
) -> dict[str, float]:
    """Return the four terms and their total.

    Args:
        T: local steps of the whole run.
        z: local steps per round.
        alpha: the order of the finite moment of the noise.
        exponent: g, of the threshold.
        constants: mu, L, M, B, r and c.
        synchronised: bound the average over the ends of rounds only.
        printed: return the terms as the paper states them.

    Examples:
        >>> constants = {"mu": 1.0, "L": 1.0, "M": 1.0, "B": 0.0, "r": 4.0, "c": 1.0}
        >>> convex_bound(1, 1, 1.5, 1 / 3, constants, printed=True)["Psi_4"]
        48.0
    """
    _check(T, z, constants, synchronised)
    mu, L, M, B, r, c = (float(constants[name]) for name in ("mu", "L", "M", "B", "r", "c"))
    a, g, u, margin = alpha, exponent, (z + 1) / 2, mu - 2 / r
    A = (1.0 if printed else 2 ** (a - 1)) * (M**a + B**a)
    weights = {
        "Psi_1": r * c**2,
        "Psi_2": A**2 * c ** (2 - 2 * a) / margin,
        "Psi_3": (1 if printed else 2) * c ** (2 - a) * r * z * u * A * L / margin,
        "Psi_4": (r * c * z * u * L) ** 2 / margin,
    }
    powers = {"Psi_1": 2 * g, "Psi_2": (2 - 2 * a) * g + 1, "Psi_3": (2 - a) * g, "Psi_4": 2 * g - 1}
    if printed:
        sums = {
            "Psi_1": T ** (powers["Psi_1"] + 1) / (powers["Psi_1"] + 1),
            "Psi_2": (T ** (powers["Psi_2"] + 1) + 1) / powers["Psi_2"],
            "Psi_3": T ** (powers["Psi_3"] + 1) / (powers["Psi_3"] + 1),
            "Psi_4": (T ** (2 * g) + 1) / (2 * g),
        }
    else:
        sums = {name: _sum(T, p) for name, p in powers.items()}
    factor = (T + 1) * z / (T - z) if synchronised else 1.0
    terms = {name: factor * weights[name] * sums[name] / (T * (T + 1)) for name in weights}
    return {**terms, "total": math.fsum(terms.values())}


def _sum(T: int, p: float) -> float:
    """Return an upper bound of 1^p + ... + T^p for p > -1: an integral plus the largest of the terms."""
    integral = (T ** (p + 1) - 1) / (p + 1)
    return float(integral + max(1.0, T**p))


def _check(T: int, z: int, constants: Mapping[str, float], synchronised: bool) -> None:
    """Raise ValueError for arguments outside the assumptions of the theorem."""
    check_counts(T=T, z=z)
    for name, value in constants.items():
        zero_allowed = name in ("M", "B")  # without noise B is 0
        if not (is_number(value) and 0 <= value < math.inf) or (value == 0 and not zero_allowed):
            low = "<=" if zero_allowed else "<"
            raise ValueError(f"Invalid {name}: {value!r}; need 0 {low} {name} < inf.")
    mu, L, r = constants["mu"], constants["L"], constants["r"]
    if mu > L:
        raise ValueError(f"Invalid mu: {mu} exceeds L={L}; a strongly convex function has mu <= L.")
    if not r > 2 / mu:
        raise ValueError(f"Invalid r: {r}; need r > 2/mu = {2 / mu:g}. Raise the learning rate, which is r/(t+1).")
    if synchronised and z >= T:
        raise ValueError(f"Invalid T: {T}; the average over the ends of rounds needs more than one round, T > z={z}.")
