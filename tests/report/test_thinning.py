"""Thinning keeps what stands out."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from tailopt.report.thinning import buckets, rounded, thin

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300)


@given(VALUES, st.integers(2, 50))
def test_points_are_few_in_order_and_include_the_extremes(y: list[float], points: int) -> None:
    x, middle, *edges = thin(list(range(len(y))), y, points)
    assert len(x) == len(middle) <= points
    assert x == sorted(set(x))
    if len(y) <= points:
        assert not edges and middle == [rounded(value) for value in y]
    else:
        low, high = edges
        assert (min(low), max(high)) == (rounded(min(y)), rounded(max(y)))
        tolerance = 1e-5 * max(map(abs, y)) + 1e-300
        assert all(a - tolerance <= m <= b + tolerance for a, m, b in zip(low, middle, high, strict=True))


def test_a_single_spike_survives_and_nan_hides_nothing() -> None:
    y = [1.0] * 10_000
    y[3_333], y[7_777] = 50.0, math.nan
    _, middle, low, high = thin(list(range(10_000)), y, 100)
    assert max(high) == 50.0 and high.count(1.0) == 49 and set(low) == {1.0} and None not in middle
    assert thin([1, 2, 3, 4], [math.nan] * 4, 2) == [[3], [None], [None], [None]]


@given(st.integers(0, 500), st.integers(1, 60))
def test_buckets_cover_everything_once(count: int, most: int) -> None:
    parts = buckets(count, most)
    assert [i for part in parts for i in part] == list(range(count))
    assert len(parts) == min(count, most) and all(map(len, parts))
