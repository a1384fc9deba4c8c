"""Norms over scopes against exact sums, at both ends of every type; the largest element; what is not finite."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tailopt.clipping.norms import _pairs_by_torch, largest_gradient, nonfinite, scalings
from tailopt.clipping.reference import ScaleToNorm
from tailopt.native.library import loaded

INF, NAN = math.inf, math.nan
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
both_ways = pytest.mark.parametrize("traced", [False, True], ids=["numbers", "traced"])


def parts(g: Tensor) -> list[float]:
    g = g.coalesce().values() if g.is_sparse else g
    g = torch.view_as_real(g.resolve_conj()) if g.is_complex() else g
    return g.double().flatten().tolist()


def square_sum(grads: list[Tensor]) -> Fraction:
    return sum((Fraction(v) ** 2 for g in grads for v in parts(g)), Fraction(0))


def root(square: Fraction) -> Fraction:
    """To 60 digits and more."""
    if square == 0:
        return Fraction(0)
    shift = 2 * max(0, 200 - (square.numerator.bit_length() - square.denominator.bit_length()) // 2)
    return Fraction(math.isqrt((square.numerator << shift) // square.denominator), 1 << (shift // 2))


def applied(clip: ScaleToNorm, g: Tensor) -> list[Fraction]:
    """What the rescaling makes of a gradient, exactly; so that its own numbers are judged, and no rounding of g's."""
    scale, norm, target = (Fraction(float(t)) for t in clip)
    return [Fraction(v) * scale / norm * target for v in parts(g)]


def by_hand(grads: list[Tensor], u: float, d: float) -> list[Fraction]:
    n, values = root(square_sum(grads)), [Fraction(v) for g in grads for v in parts(g)]
    if n == 0:
        return [Fraction(0)] * len(values)
    if n <= Fraction(d):
        return [v / n * Fraction(d) for v in values]
    if u < INF and n >= Fraction(u):
        return [v / n * Fraction(u) for v in values]
    return values


def fits(numbers: tuple, dtype: torch.dtype) -> bool:
    """The kernel rounds them to the type: none may be lost there."""
    info = torch.finfo(dtype)
    return all(info.tiny <= float(t) <= info.max for t in numbers[:2])


def one_scope(grads: list[Tensor], u: float, d: float, dtype: torch.dtype, traced: bool) -> ScaleToNorm:
    (clip,) = scalings(grads, grads, [0] * len(grads), 1, [(0, u, d, dtype)], traced)
    assert all(isinstance(t, Tensor if traced else float) for t in clip)
    return clip


def agree(got: list[Fraction], want: list[Fraction], rel: float) -> bool:
    return all(abs(g - w) <= Fraction(rel) * abs(w) for g, w in zip(got, want, strict=True))


numbers = {
    torch.float32: st.floats(width=32, allow_nan=False, allow_infinity=False),
    torch.float64: st.floats(allow_nan=False, allow_infinity=False),
    torch.bfloat16: st.floats(-(2.0**127), 2.0**127),
    torch.float16: st.floats(width=16, allow_nan=False, allow_infinity=False),
}


@st.composite
def tensors(draw: st.DrawFn, dtypes: list[torch.dtype]) -> list[Tensor]:
    kinds = draw(st.lists(st.sampled_from(dtypes), min_size=1, max_size=4))
    lists = [draw(st.lists(numbers[t], max_size=6)) for t in kinds]
    return [torch.tensor(values, dtype=torch.float64).to(t) for values, t in zip(lists, kinds, strict=True)]


@both_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_tensors_and_thresholds(traced: bool, dtype: torch.dtype, data: st.DataObject) -> None:
    wide = dtype == torch.float64
    grads = data.draw(tensors(DTYPES if wide else [t for t in DTYPES if t != torch.float64]))
    n = root(square_sum(grads))
    near = [float(n * f) for f in (Fraction(1, 2), Fraction(2)) if n * f < Fraction(torch.finfo(dtype).max)]
    near = [torch.tensor(t, dtype=dtype).item() for t in near]  # a threshold is rounded to the type once: half of the
    # least denormal is 0 there
    choice = st.sampled_from([0.0, INF, 1e-4, 1.0, 1e30, *near]) | numbers[dtype].map(abs)
    d, u = sorted((data.draw(choice), data.draw(choice)))
    if d == INF or any(0 < t < INF and abs(n - Fraction(t)) <= Fraction(1e-6) * n for t in (u, d)):
        return  # at the edge either branch is right
    clip = one_scope(grads, u, d, dtype, traced)
    assert fits(clip, dtype)
    got = [v for g in grads for v in applied(clip, g)]
    # the numbers may be rounded to the type already, three times
    assert agree(got, by_hand(grads, u, d), 4 * torch.finfo(dtype).eps)


@both_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_ends_of_the_range(dtype: torch.dtype, traced: bool) -> None:
    """No norm overflows or underflows while the elements are representable."""
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    tops = [
        info.max,
        info.max / 3,
        math.sqrt(info.max) * 2,
        math.sqrt(info.tiny) / 2,
        info.tiny,
        info.tiny / 8,
        smallest,
    ]
    for top in tops:
        for n in (1, 3, 40):
            grads = [torch.full((n,), top, dtype=dtype), torch.full((n,), -top, dtype=dtype)]
            for u, d in ((1.0, 1.0), (1.0, 0.0), (INF, 1.0), (top, 0.0), (INF, 0.0)):
                clip = one_scope(grads, u, d, dtype, traced)
                assert fits(clip, dtype), (top, n, u, d, clip)
                got = [v for g in grads for v in applied(clip, g)]
                assert agree(got, by_hand(grads, u, d), 4 * info.eps), (top, n, u, d, clip)
                # and in the arithmetic itself, on the quotient's way down and up again
                kernel = float(clip(grads[0])[0])
                assert kernel == pytest.approx(float(got[0]), rel=8 * info.eps, abs=2 * smallest), (top, n, u, d, clip)


@both_ways
def test_tensors_of_different_ends_in_one_scope(traced: bool) -> None:
    grads = [
        torch.tensor([3e307, -4e307], dtype=torch.float64),
        torch.tensor([3e38]),
        torch.tensor([5e-324], dtype=torch.float64),
        torch.tensor([], dtype=torch.float64),
    ]
    clip = one_scope(grads, 1.0, 0.0, torch.float64, traced)
    assert float(applied(clip, grads[0])[0]) == pytest.approx(0.6, rel=1e-12)
    tiny = [torch.tensor([3e-320, 4e-320], dtype=torch.float64), torch.tensor([0.0])]
    clip = one_scope(tiny, 1.0, 0.5, torch.float64, traced)
    assert float(applied(clip, tiny[0])[0]) == pytest.approx(0.3, rel=1e-3)
    mixed = [torch.tensor([3e-200], dtype=torch.float64), torch.tensor([4e200], dtype=torch.float64)]
    clip = one_scope(mixed, 1.0, 0.0, torch.float64, traced)
    assert float(applied(clip, mixed[1])[0]) == pytest.approx(1.0, rel=1e-12)


@both_ways
@pytest.mark.parametrize("size", [1e-60, 1e-200, 1e-310, 1e60, 1e200, 1e308])
def test_a_norm_of_doubles_for_a_tensor_of_floats(traced: bool, size: float) -> None:
    """Next to it floats are nothing: they become 0, and not 0 / 0."""
    g, zeros = torch.full((2,), size, dtype=torch.float64), torch.tensor([0.0, 0.0 if size < 1 else 1.0])
    wanted = [(0, 1.0, 0.5, torch.float64), (0, 1.0, 0.5, torch.float32)]
    wide, narrow = scalings([g, zeros], [g, zeros], [0, 0], 1, wanted, traced)
    assert wide(g).tolist() == pytest.approx([(1.0 if size > 1 else 0.5) / math.sqrt(2)] * 2, rel=1e-12)
    rounded = ScaleToNorm(*(torch.as_tensor(t, dtype=torch.float64).float() for t in narrow))
    assert rounded(zeros).tolist() == pytest.approx([0.0, 0.0], abs=1e-38)


@both_ways
def test_many_tensors_against_a_long_sum(traced: bool) -> None:
    gen = torch.Generator().manual_seed(0)
    grads = [torch.randn(37 + i, 11, generator=gen) * 10.0 ** (i % 7 - 3) for i in range(60)]
    n = np.sqrt(sum(np.square(g.numpy().astype(np.longdouble)).sum() for g in grads))
    clip = one_scope(grads, 1.0, 0.0, torch.float32, traced)
    assert float(clip.norm) == pytest.approx(float(n), rel=1e-7 if traced else 1e-13)
    assert float(clip.target) == 1.0


@pytest.mark.skipif(loaded() is None, reason="torch's own sums depend on the number of threads")
def test_the_sum_does_not_depend_on_threads() -> None:
    gen = torch.Generator().manual_seed(0)
    grads = [torch.randn(300_000, generator=gen), torch.randn(5, generator=gen)]
    before, seen = torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            seen.add(one_scope(grads, 1.0, 0.0, torch.float32, False).norm)
    finally:
        torch.set_num_threads(before)
    assert len(seen) == 1


@both_ways
def test_scopes_are_apart(traced: bool) -> None:
    grads = [torch.tensor([3.0]), torch.tensor([30.0], dtype=torch.float64), torch.tensor([4.0]), torch.tensor([NAN])]
    wanted = [
        (0, 1.0, 0.0, torch.float32),
        (0, 10.0, 8.0, torch.float32),  # other thresholds for the same norm
        (1, 3.0, 0.0, torch.float64),
        (2, 3.0, 0.0, torch.float32),
        (3, 3.0, 1.0, torch.float32),  # a scope without tensors
    ]
    clips = scalings(grads, grads, [0, 1, 0, 2], 4, wanted, traced)
    factors = [float(c.scale) / float(c.norm) * float(c.target) for c in clips]
    assert factors[:3] == pytest.approx([1 / 5, 8 / 5, 1 / 10], rel=1e-6)
    assert math.isnan(factors[3])
    assert factors[4] == 0


@both_ways
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize(("u", "d"), [(1.0, 0.5), (INF, 0.0), (1e-4, 0.0)])
def test_what_is_not_finite_makes_the_scope_nan(
    bad: float, dtype: torch.dtype, traced: bool, u: float, d: float
) -> None:
    grads = [torch.tensor([1.0, bad], dtype=dtype), torch.tensor([0.0, 2.0], dtype=dtype)]
    clip = one_scope(grads, u, d, torch.float64 if dtype == torch.float64 else torch.float32, traced)
    for g in grads:
        assert torch.isnan(clip(g.to(torch.float64))).all(), clip


@both_ways
def test_complex_and_sparse_gradients(traced: bool) -> None:
    z = torch.tensor([3 + 4j, 12j])
    pieces = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([100.0, -84.0]), (4,), check_invariants=True)
    for first in (z, z.conj(), z.to(torch.complex128)):
        clip = one_scope([first, pieces], 1.0, 0.0, torch.float64, traced)
        assert float(clip.norm) == pytest.approx(math.sqrt(169 + 256), rel=1e-6)
    clip = one_scope([torch.tensor([3e200 + 4e200j], dtype=torch.complex128)], 1.0, 0.0, torch.float64, traced)
    assert float(applied(clip, torch.tensor([3e200 + 4e200j], dtype=torch.complex128))[1]) == pytest.approx(
        0.8, rel=1e-12
    )


def test_traced_norms_have_derivatives() -> None:
    x = torch.tensor([0.3, -0.4, 1.2], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)

    def clipped(x: Tensor, y: Tensor, u: float, d: float) -> Tensor:
        (clip,) = scalings([x, y], [x, y], [0, 0], 1, [(0, u, d, torch.float64)], traced=True)
        return torch.cat([clip(x), clip(y)])

    for u, d in ((1.0, 0.5), (10.0, 5.0), (10.0, 0.5), (INF, 0.0), (INF, 5.0)):
        assert torch.autograd.gradcheck(lambda x, y, u=u, d=d: clipped(x, y, u, d), (x, y)), (u, d)


# --- the largest element, and what is not finite --------------------------------------------------------------------


def test_largest() -> None:
    grads = [torch.tensor([1.0, -3.0]), torch.tensor([2.5], dtype=torch.float64), torch.tensor([-2.75]).bfloat16()]
    assert largest_gradient(grads, grads).item() == 3.0
    assert largest_gradient(grads[1:], grads[1:]).item() == 2.75
    z = [torch.tensor([1 - 7j])]
    assert largest_gradient(z, z).item() == 7.0
    pieces = [torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([9.0, -8.0]), (3,), check_invariants=True)]
    assert largest_gradient(pieces, pieces).item() == 1.0
    nothing = [torch.empty(0), torch.zeros(3)]
    assert largest_gradient(nothing, nothing).item() == 0.0
    for dtype in DTYPES:
        ends = [torch.tensor([torch.finfo(dtype).max, 1.0], dtype=dtype), torch.tensor([1e-30], dtype=dtype)]
        assert largest_gradient(ends, ends).item() == torch.finfo(dtype).max
        smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        ends = [torch.tensor([-smallest], dtype=dtype)]
        assert largest_gradient(ends, ends).item() == smallest


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.floats(width=32), max_size=5), min_size=1, max_size=4), st.sampled_from(DTYPES))
def test_nonfinite_by_tensor(lists: list, dtype: torch.dtype) -> None:
    grads = [torch.tensor(values).to(dtype) for values in lists]
    want = [sum(not math.isfinite(v) for v in g.double().tolist()) for g in grads]
    assert nonfinite(grads, grads).tolist() == want
    finite = [abs(v) for g in grads for v in g.double().tolist() if math.isfinite(v)]
    assert largest_gradient(grads, grads).item() == max(finite, default=0.0)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_norms_of_all_tensors_at_once_are_those_of_one_after_another(data: st.DataObject) -> None:
    """What a GPU gets in one launch, here on the CPU."""
    grads = data.draw(tensors(DTYPES))
    together, apart = (_pairs_by_torch(grads, traced) for traced in (False, True))
    torch.testing.assert_close(together, apart, rtol=1e-14, atol=0.0, equal_nan=True)


@both_ways
def test_equal_wishes_are_granted_once(traced: bool) -> None:
    grads, u = [torch.ones(2), torch.ones(3)], torch.tensor(0.5)
    kind = torch.float32
    wanted = [(0, 1.0, 0.0, kind), (1, 1.0, 0.0, kind), (0, 1.0, 0.0, kind), (0, u, 0.0, kind), (0, u, 0.0, kind)]
    found = scalings(grads, grads, [0, 1], 2, wanted, traced)
    assert found[0] == found[2] != found[1] and found[3] == found[4] != found[0]
    if traced:  # tensors: equal because they are the same
        assert found[0] is found[2] and found[3] is found[4]
