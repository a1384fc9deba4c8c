"""Thinning keeps what stands out."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from tailopt.report.thinning import buckets, rounded, thin

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300)


@given(VALUES, st.integers(2, 50))
def test_points_are_few_in_order_and_include_the_extremes(y: list[float], points: int) -> None:
    x, kept = thin(list(range(len(y))), y, points)
    assert len(x) == len(kept) <= max(points, 2)
    assert x == sorted(set(x))
    assert {rounded(min(y)), rounded(max(y))} <= {*kept}
    assert all(kept[k] == rounded(y[x[k]]) for k in range(len(x)))


def test_a_single_spike_and_a_single_nan_survive() -> None:
    y = [1.0] * 10_000
    y[3_333], y[7_777] = 50.0, math.nan
    x, kept = thin(list(range(10_000)), y, 100)
    assert (x.count(3_333), kept[x.index(3_333)]) == (1, 50.0)
    assert kept[x.index(7_777)] is None


@given(st.integers(0, 500), st.integers(1, 60))
def test_buckets_cover_everything_once(count: int, most: int) -> None:
    parts = buckets(count, most)
    assert [i for part in parts for i in part] == list(range(count))
    assert len(parts) == min(count, most) and all(map(len, parts))
