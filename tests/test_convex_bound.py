"""Theorem 3 with its constants: by hand, against the sums of its proof, and against a run."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tailopt
from tailopt.theory import theory

CONSTANTS: dict[str, Any] = {"mu": 1.0, "L": 2.0, "M": 3.0, "B": 0.5, "r": 4.0, "c": 0.7, "z": 3}


def bound(T: int, alpha: float = 1.5, i_u: float | None = None, **more: Any) -> dict[str, float]:
    found = theory("avg-l2clip", alpha, **({} if i_u is None else {"i_u": i_u}))
    return found.bound(T, **CONSTANTS | more)


def test_the_printed_terms_by_hand() -> None:
    """alpha = 1.5, g = 1/3, T = 8: powers of 8 are powers of 2, and c^(2-2 alpha) = 1/c."""
    found = bound(8, M=1.0, B=4.0, c=2.0, printed=True)
    A, rest, whole = 1 + 8, 1 - 2 / 4, 8 * 9  # 4^1.5 = 8; mu - 2/r; T (T+1)
    assert found["Psi_1"] == pytest.approx(4 * 4 * 8 ** (5 / 3) / (5 / 3) / whole)
    assert found["Psi_2"] == pytest.approx(A**2 / 2 * (8 ** (5 / 3) + 1) / (rest * (2 / 3) * whole))
    assert found["Psi_3"] == pytest.approx(2**0.5 * 4 * 3 * 2 * A * 2 * 8 ** (7 / 6) / (rest * (7 / 6) * whole))
    assert found["Psi_4"] == pytest.approx((4 * 2 * 3 * 2 * 2) ** 2 * (4 + 1) / ((2 / 3) * rest * whole))
    assert found["total"] == pytest.approx(sum(found[f"Psi_{k}"] for k in range(1, 5)))


@given(st.integers(1, 200), st.floats(1.05, 1.95), st.floats(0.02, 0.48))
def test_no_term_is_less_than_the_sum_of_its_proof(T: int, alpha: float, g: float) -> None:
    """The sum over t of what one step adds, before any integral; the learning rate is r/(t+1) and not r/t."""
    mu, L, M, B, r, c, z = (CONSTANTS[k] for k in ("mu", "L", "M", "B", "r", "c", "z"))
    A, u, a = 2 ** (alpha - 1) * (M**alpha + B**alpha), (z + 1) / 2, 1 - 2 / (r * mu)
    t = np.arange(1, T + 1)
    eta, ct = r / (t + 1), c * t**g
    drift = eta * ct * z * u * L
    parts = {
        "Psi_1": t * eta * ct**2 / 2,
        "Psi_2": t / (2 * mu * a) * (A * ct ** (1 - alpha)) ** 2,
        "Psi_3": t / (2 * mu * a) * 2 * A * ct ** (1 - alpha) * drift,
        "Psi_4": t / (2 * mu * a) * drift**2,
    }
    found = bound(T, alpha, g)
    for name, part in parts.items():
        assert found[name] >= 2 * part.sum() / (T * (T + 1)) * (1 - 1e-12), name


@pytest.mark.parametrize("T", [1, 10, 1000])
def test_the_printed_first_and_third_term_are_less_than_their_sums(T: int) -> None:
    found = bound(T, printed=True)
    sums = {p: sum(t**p for t in range(1, T + 1)) / (T * (T + 1)) for p in (2 / 3, 1 / 6)}
    assert found["Psi_1"] < 4 * 0.7**2 * sums[2 / 3]
    A = 3**1.5 + 0.5**1.5
    assert found["Psi_3"] < 0.7**0.5 * 4 * 3 * 2 * A * 2 / 0.5 * sums[1 / 6]


def test_the_moment_of_a_gradient_needs_the_factor_that_the_statement_lacks() -> None:
    """Two points of mean 0, one rare: E|1 + noise|^1.5 exceeds 1 + E|noise|^1.5, and not 2^0.5 times that."""
    p, d = 0.01726, 0.3995
    noise, share = np.array([d, -d * (1 - p) / p]), np.array([1 - p, p])
    assert abs((noise * share).sum()) < 1e-12
    moment, parts = (share * abs(1 + noise) ** 1.5).sum(), 1 + (share * abs(noise) ** 1.5).sum()
    assert 1.08 * parts < moment < 2**0.5 * parts


@pytest.mark.parametrize("printed", [False, True])
@pytest.mark.parametrize(("alpha", "i_u"), [(1.5, None), (1.2, None), (1.5, 0.2), (1.5, 0.4)])
def test_it_falls_at_the_rate_that_theory_says(alpha: float, i_u: float | None, printed: bool) -> None:
    found = theory("avg-l2clip", alpha, **({} if i_u is None else {"i_u": i_u}))
    assert found.rate is not None
    totals = [bound(T, alpha, i_u, printed=printed)["total"] for T in (10**30, 10**34)]
    assert math.log10(totals[0] / totals[1]) / 4 == pytest.approx(found.rate, abs=2e-3)


@pytest.mark.parametrize("name", ["B", "M", "L", "z"])
def test_more_noise_larger_gradients_curvature_and_longer_rounds_cost(name: str) -> None:
    more = bound(1000, **{name: CONSTANTS[name] * 2})
    assert more["total"] > bound(1000)["total"]


def test_the_average_over_rounds_costs_a_factor_of_about_z() -> None:
    plain, rounds = bound(300)["total"], bound(300, synchronised=True)["total"]
    assert rounds == pytest.approx(plain * 301 * 3 / 297)


def test_a_run_stays_below_it() -> None:
    """A quadratic with Pareto noise of index 1.6, which has an alpha-moment for alpha = 1.5."""
    z, rounds, nodes, mu, tail = 2, 100, 4, 1.0, 1.6
    g = 1 / 3

    def batches(node: int, round: int, step: int, generator: torch.Generator) -> torch.Tensor:
        size = torch.rand((), generator=generator, dtype=torch.float64) ** (-1 / tail)
        return size * (torch.randint(0, 2, (), generator=generator) * 2 - 1)

    class Point(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = torch.nn.Parameter(torch.tensor([0.0], dtype=torch.float64))

    result = tailopt.simulate(
        Point(),
        tailopt.algorithm("SludgeClip", ilr=1.5, i_u=1.0),
        loss=lambda model, noise: ((model.x - 0.5).square() / 2 + noise * model.x).sum(),
        batches=batches,
        nodes=nodes,
        rounds=rounds,
        local_steps=z,
        projection=1.0,
        average=True,
        schedules=theory("SludgeClip", 1.5),
        progress=False,
    )
    assert result.average is not None
    excess = float((result.average.x.detach() - 0.5).square() / 2)  # type: ignore[union-attr, operator]
    moment = tail / (tail - 1.5)  # E|noise|^1.5 of the Pareto law
    reach = 1.0 + sum(3.0 * t ** (g - 1) for t in range(1, z + 1))  # the enlarged domain
    found = theory("avg-l2clip", 1.5).bound(
        rounds * z, mu=mu, L=mu, M=reach + 0.5, B=moment ** (1 / 1.5), r=3.0, c=1.0, z=z, synchronised=True
    )
    assert 0 <= excess < found["total"]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"mu": 0.0}, r"Invalid mu: 0\.0; need 0 < mu < inf\."),
        ({"mu": 3.0}, r"Invalid mu: 3\.0 exceeds L=2\.0"),
        ({"M": -1.0}, r"Invalid M: -1\.0; need 0 <= M < inf\."),
        ({"B": math.nan}, "Invalid B: nan"),
        ({"c": "1"}, "Invalid c: '1'; need 0 < c < inf"),
        ({"r": 2.0}, r"Invalid r: 2\.0; need r > 2/mu = 2\."),
        ({"z": 0}, "Invalid z: 0; need a whole number"),
        ({"z": 1000, "synchronised": True}, r"Invalid T: 1000; .* T > z=1000\."),
    ],
)
def test_constants_are_checked(bad: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        bound(1000, **bad)


def test_who_has_no_such_bound() -> None:
    with pytest.raises(ValueError, match="bi2clip has no bound with constants"):
        theory("bi2clip", 1.5).bound(10, **CONSTANTS)
    with pytest.warns(UserWarning, match="broken"):
        found = theory("avg-l2clip", 1.5, i_u=0.7)
    with pytest.raises(ValueError, match="the bound needs i_u < 1/2"):
        found.bound(10, **CONSTANTS)
