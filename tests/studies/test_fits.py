"""Slopes and bootstrap intervals: closed forms, coverage, and the formulas that scipy and numpy replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tailopt.seeds import generator
from tailopt.studies.fits import RESAMPLES, bootstrap_interval, slope
from tailopt.studies.rate_cells import Measurement, recorded
from tailopt.studies.rate_fits import repetitions_of

np = pytest.importorskip("numpy")
stats = pytest.importorskip("scipy.stats")


@given(st.floats(-2.0, -0.01), st.floats(1e-6, 1e6))
@settings(max_examples=30, deadline=None)
def test_the_slope_of_a_power_law_is_its_exponent(exponent: float, base: float) -> None:
    at = recorded(500)
    assert float(slope(at, base * np.array(at) ** exponent)) == pytest.approx(exponent, abs=1e-9)


def test_only_the_last_decade_is_fitted() -> None:
    at = recorded(1000)
    t = np.array(at)
    assert float(slope(at, np.where(t < 100, 7.0, 1 / t))) == pytest.approx(-1.0, abs=1e-9)


def curves(repetitions: int, seed: int = 0) -> tuple[list[int], Any]:
    """t^-0.5 times log-normal noise, [repetitions, recorded rounds]."""
    at = recorded(300)
    return at, np.array(at) ** -0.5 * np.exp(0.3 * np.random.default_rng(seed).standard_normal((repetitions, len(at))))


@pytest.mark.parametrize("span", [10.0, 3.0])
def test_the_slope_is_that_of_linregress_and_of_the_formula_written_out(span: float) -> None:
    at, values = curves(5)
    first = next(i for i, t in enumerate(at) if t >= at[-1] / span)
    x, y = np.log(at[first:]), np.log(values[:, first:])
    centred = x - x.mean()
    found = slope(at, values, span)
    assert found == pytest.approx((y * centred).sum(-1) / (centred**2).sum(), rel=1e-10)
    assert found == pytest.approx([stats.linregress(x, row).slope for row in y], rel=1e-10)


def former_interval(values: Any, statistic: Callable[[Any], Any]) -> tuple[float, float]:
    """The interval as it was before scipy's: other resamples, the same percentiles."""
    drawn = torch.randint(len(values), (RESAMPLES, len(values)), generator=generator(0, "bootstrap")).numpy()
    low, high = np.quantile(statistic(values[drawn].mean(1)), [0.025, 0.975])
    return float(low), float(high)


@pytest.mark.parametrize("minimum", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_intervals_agree_with_the_former_ones(seed: int, minimum: bool) -> None:
    """Both ends are estimated from 1000 resamples: they differ by a fraction of the interval's width."""
    at, values = curves(12, seed)

    def statistic(means: Any) -> Any:
        return slope(at, np.minimum.accumulate(means, axis=-1) if minimum else means)

    (low, high), (former_low, former_high) = bootstrap_interval(values, statistic), former_interval(values, statistic)
    width = former_high - former_low
    assert width > 0
    assert abs(low - former_low) < 0.12 * width and abs(high - former_high) < 0.12 * width


def test_the_interval_covers_a_known_slope() -> None:
    """40 studies of 12 repetitions: a 95 % interval misses in few of them."""
    missed = 0
    for seed in range(40):
        at, values = curves(12, seed)
        low, high = bootstrap_interval(values, lambda means, at=at: slope(at, means))
        assert low < high
        missed += not low <= -0.5 <= high
    assert missed <= 8


def test_one_run_of_many_repetitions_and_many_runs_of_one_are_resampled_alike() -> None:
    values = np.random.default_rng(0).random((6, 1, 5))
    one, many = (repetitions_of(Measurement(v.tolist(), [], 0.0, 0.0)) for v in (values.transpose(1, 0, 2), values))
    assert (one == many).all() and (one == values[:, 0]).all()
    ends = [bootstrap_interval(array, lambda means: means[..., 0]) for array in (one, many)]
    assert ends[0] == ends[1]  # the same resamples in every call


def test_the_spread_of_resamples_is_that_of_a_mean() -> None:
    """With the biased variance; 1.96 deviations on each side hold 95 % of a normal distribution."""
    values = np.random.default_rng(0).standard_normal((200, 1))
    low, high = bootstrap_interval(values, lambda means: means[..., 0])
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 200**0.5, rel=0.1)
