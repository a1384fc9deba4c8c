"""tail_index: exact tails, an interval whose unit is the batch, and what cannot be told."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tailopt.tails import LEVEL, UNKNOWN, TailIndex, student_quantile, tail_index, tail_index_of_few


def pareto(alpha: float, *shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** (-1 / alpha)


@pytest.mark.parametrize("alpha", [0.8, 1.5, 3.0])
def test_the_interval_of_a_pareto_tail_has_its_level(alpha: float) -> None:
    """Without an error to correct, the allowance for it makes the interval wider than 90 %, by what it is by chance."""
    found = [tail_index(pareto(alpha, 64, 100, seed=seed)) for seed in range(60)]
    covered = sum(t.low <= alpha <= t.high for t in found) / len(found)
    assert 0.85 <= covered <= 1.0
    assert sum(t.index for t in found) / len(found) == pytest.approx(alpha, rel=0.05)


def test_plain_estimates_are_hills() -> None:
    x = pareto(1.5, 50, 40)
    found = tail_index(x)
    top = x.reshape(-1).sort(descending=True).values
    for share, hill in zip(found.shares, found.hill, strict=True):
        k = round(share * 2000)
        assert hill == pytest.approx(1 / float((top[:k] / top[k]).log().mean()), rel=1e-9)


def test_dependence_inside_a_batch_widens_the_interval() -> None:
    """The same number in all coordinates is one number: 256 of them, not 25,600."""
    alone = tail_index(pareto(1.5, 256, 100))
    shared = tail_index(pareto(1.5, 256, 1).expand(256, 100))
    assert shared.high - shared.low > 3 * (alone.high - alone.low)
    assert shared.batches <= 64 < alone.batches
    found = [tail_index(pareto(1.5, 256, 1, seed=seed).expand(256, 100)) for seed in range(40)]
    assert sum(t.low <= 1.5 <= t.high for t in found) >= 34
    independent = math.sqrt(5 / shared.points) / 1.5  # the standard error that ignores it
    assert 1 / shared.low - 1 / shared.high > 4 * independent


def test_one_batch_with_an_outlier_is_no_tail() -> None:
    x = torch.randn(256, 1000, generator=torch.Generator().manual_seed(0))
    x[7] *= 1e6
    found = tail_index(x)
    assert not found.heavy and found.largest_batch > 0.9


@given(st.floats(1e-20, 1e20), st.integers(0, 5))
def test_neither_scale_nor_order_matters(scale: float, seed: int) -> None:
    x = pareto(1.5, 40, 50)
    found, other = (
        tail_index(x),
        tail_index(-scale * x[torch.randperm(40, generator=torch.Generator().manual_seed(seed))]),
    )
    assert other.index == pytest.approx(found.index, rel=1e-6)
    assert (other.low, other.high) == pytest.approx((found.low, found.high), rel=1e-6)


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(64, 100),
        torch.ones(64, 1),
        torch.tensor([[1.0], [2.0]]),
        torch.zeros(64, 0),
        torch.cat([torch.zeros(63, 100), torch.ones(1, 100)]),
    ],
)
def test_what_has_no_tail_is_never_heavy(x: Tensor) -> None:
    assert not tail_index(x).heavy
    assert not tail_index_of_few(x).heavy


def test_bounded_magnitudes_have_no_power() -> None:
    uniform = torch.rand(256, 400, generator=torch.Generator().manual_seed(0))
    assert tail_index(uniform).light and tail_index(uniform).index > 8
    assert tail_index(torch.ones(256, 400)).index > 1e6


def test_rare_outliers_behind_bounded_noise_are_not_light() -> None:
    """A sum: uniform noise of width 50 hides a Pareto tail but for the last thousandths."""
    found = tail_index(50 * torch.rand(256, 20, generator=torch.Generator().manual_seed(0)) + pareto(1.5, 256, 20))
    assert found.low > 2, "the test needs a tail that the estimate does not see"
    assert not found.light and not found.heavy


def test_a_correction_that_reaches_far_does_not_miss_on_one_side() -> None:
    """Student's t 3 beside Gaussian noise, 23 columns: a tenth of all numbers is the tail, too much for the estimate.

    With the same allowance for both ends 54 of these 60 intervals begin above 3.
    """
    found = []
    for seed in range(60):
        source = torch.Generator().manual_seed(seed)
        first, beside, *squares = torch.randn(5, 256, 23, generator=source, dtype=torch.float64)
        found.append(tail_index(first / torch.stack(squares).square().mean(0).sqrt() + 1.5 * beside))
    assert all(t.share > 0.09 for t in found)
    assert sum(t.low <= 3 <= t.high for t in found) >= 48


def test_few_numbers_tell_only_what_is_far_apart() -> None:
    source = torch.Generator().manual_seed(0)
    gaussian = [tail_index_of_few(torch.randn(256, generator=source)) for _ in range(50)]
    cauchy = [tail_index_of_few(pareto(1.0, 256, seed=seed)) for seed in range(50)]
    assert not any(t.heavy for t in gaussian)
    assert sum(t.heavy for t in cauchy) >= 35
    assert not any(t.light for t in cauchy)
    assert tail_index_of_few(torch.ones(9)) == UNKNOWN
    for n in range(11, 40):
        assert tail_index_of_few(pareto(1.0, n)).points == 10


def test_properties() -> None:
    assert TailIndex(1.5, 1.2, 1.9).heavy and not TailIndex(1.5, 1.2, 2.1).heavy
    assert TailIndex(3.0, 2.5, 4.0, deepest_low=2.1).light and not TailIndex(3.0, 2.5, 4.0, deepest_low=1.9).light
    assert not UNKNOWN.heavy and not UNKNOWN.light and math.isnan(UNKNOWN.hill_at(0.1))


@pytest.mark.parametrize(("df", "expected"), [(3, 2.3534), (9, 1.8331), (29, 1.6991), (1e6, 1.6449)])
def test_quantiles_of_student(df: float, expected: float) -> None:
    assert student_quantile(LEVEL, df) == pytest.approx(expected, rel=0.02)
    assert student_quantile(LEVEL, 0.5) == student_quantile(LEVEL, 3)


def test_hill_is_that_of_a_published_package() -> None:
    """`pip install tailestim`: its Hill estimator has an estimate of 1 / alpha for every number of points."""
    tailestim = pytest.importorskip("tailestim", reason="tailestim is not installed")
    x = torch.distributions.StudentT(1.5).sample((256, 40)).abs()
    found = tail_index(x)
    estimator = tailestim.HillEstimator(bootstrap=False)
    estimator.fit(x.reshape(-1).double().numpy())
    inverses = estimator.get_result().xi_arr_
    assert len(found.shares) >= 5
    for share, hill in zip(found.shares, found.hill, strict=True):
        assert hill == pytest.approx(1 / inverses[round(share * x.numel()) - 1], rel=1e-9)
