"""The operators against the table of what they mean, written out in plain Python; then every kind of tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tailopt import biclip, biclip_l2, l2clip

INF, NAN = math.inf, math.nan
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


# --- What is expected, in float64 -----------------------------------------------------------------------------------


def rounded(value: float, dtype: torch.dtype) -> float:
    return torch.tensor(value, dtype=torch.float64).to(dtype).item()


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def table(x: float, u: float, d: float, dead_zone: float = 0.0) -> float:
    """One row after the other; the first that fits holds."""
    if math.isnan(x):
        return NAN
    if abs(x) <= dead_zone:
        return 0.0
    if abs(x) <= d:
        return math.copysign(d, x)
    if abs(x) < u:
        return x
    return math.copysign(u, x)


def slopes(x: float, u: float, d: float, dead_zone: float) -> tuple[float, float, float]:
    """The derivatives by x, u and d."""
    a, sign = abs(x), math.copysign(1.0, x) if x else 0.0
    by_x = float(max(d, dead_zone) < a < u or (a == 0 and d == dead_zone == 0 and u > 0))
    by_u = sign if a >= u and a > dead_zone else 0.0
    by_d = sign if dead_zone < a <= d and a < u else 0.0
    return by_x, by_u, by_d


def length_table(x: list[float], u: float, d: float) -> list[float]:
    """biclip_l2, scaled by a power of two near the largest element, so that float64 does not overflow."""
    if any(not math.isfinite(v) for v in x):
        return [NAN] * len(x)
    top = max(map(abs, x), default=0.0)
    if top == 0:
        return [0.0] * len(x)
    e = math.frexp(top)[1]
    small = [math.ldexp(v, -e) for v in x]
    n = math.sqrt(math.fsum(v * v for v in small))  # the norm is n * 2^e

    def against(t: float) -> float:
        """The threshold in the same scale; where that leaves the range, on its side of any n."""
        try:
            return math.ldexp(t, -e)
        except OverflowError:
            return INF

    if n <= against(d):
        return [v / n * d for v in small]
    if n >= against(u):
        return [v / n * u for v in small]
    return list(x)


def same(got: Tensor, want: list[float]) -> bool:
    """Equal as numbers, with the sign of zeros; NaN equals NaN."""
    pairs = zip(got.double().flatten().tolist(), want, strict=True)
    return all((g != g and w != w) or (g == w and math.copysign(1, g) == math.copysign(1, w)) for g, w in pairs)


# --- biclip, element by element -------------------------------------------------------------------------------------

magnitudes = st.one_of(
    st.sampled_from([0.0, INF, 1e-45, 1e-42, 1e-8, 0.1, 0.5, 1.0, 448.0, 65504.0, 3.4e38, 1e39, 1e300, 5e-324]),
    st.floats(min_value=0, allow_nan=False),
    st.floats(min_value=0, max_value=10, width=16),
)


@st.composite
def thresholds(draw: st.DrawFn) -> tuple[float, float, float]:
    d, u = sorted((draw(magnitudes), draw(magnitudes)))
    return u, d, draw(st.sampled_from([0.0, d, u, draw(magnitudes)]).filter(lambda v: v <= u))


@every_dtype
@settings(max_examples=150, deadline=None)
@given(thresholds(), st.lists(st.floats(), max_size=20))
def test_every_element_follows_the_table(dtype: torch.dtype, numbers: tuple[float, float, float], values: list) -> None:
    u, d, dead_zone = (rounded(t, wide(dtype)) for t in numbers)
    near = [v for t in (u, d, dead_zone) for v in (t, math.nextafter(t, 0), math.nextafter(t, INF))]
    ends = [0.0, INF, NAN, torch.finfo(dtype).max, torch.finfo(dtype).tiny, torch.finfo(dtype).smallest_normal / 2]
    x = torch.tensor(values + near + [-v for v in near] + ends + [-v for v in ends], dtype=torch.float64).to(dtype)
    got = biclip(x, *numbers)
    assert got.dtype == dtype
    assert same(got, [rounded(table(v, u, d, dead_zone), dtype) for v in x.double().tolist()])


@every_dtype
def test_closed_forms(dtype: torch.dtype) -> None:
    x = torch.tensor([-INF, -3.0, -0.25, -1e-7, -0.0, 0.0, 1e-7, 0.25, 3.0, INF], dtype=dtype)
    assert torch.equal(biclip(x, 0.25, 0.25), 0.25 * x.sign()), "d = u: scaled sign"
    assert torch.equal(biclip(x, INF, 0.0), x), "d = 0, u = inf: the identity"
    assert torch.equal(biclip(x, 0.0, 0.0), torch.zeros_like(x)), "u = 0: nothing is left"
    assert torch.equal(biclip(x, 0.5, 0.0), x.clamp(-0.5, 0.5)), "d = 0: clamp"
    assert torch.equal(biclip(-x, 0.5, 0.125), -biclip(x, 0.5, 0.125)), "odd"
    once = biclip(x, 0.5, 0.125)
    assert torch.equal(biclip(once, 0.5, 0.125), once), "idempotent"
    for zone in (0.0, 0.1, 0.2, 0.5):
        # u is at least the dead zone; at u itself the dead zone comes first
        assert torch.equal(biclip(x, 0.5, 0.125, zone) == 0, x.abs().double() <= zone)


def test_a_zero_is_plus_zero() -> None:
    for requires_grad in (False, True):
        x = torch.tensor([-0.0, -0.001], requires_grad=requires_grad)
        for d in (0.0, 0.5):
            assert not torch.signbit(biclip(x, 1.0, d, 0.01)).any()
            assert not torch.signbit(biclip(x, 1.0, d)[0])


def test_numbers_are_rounded_once_to_the_arithmetic() -> None:
    third = 1 / 3
    assert biclip(torch.tensor([1.0]), third, 0.0).item() == rounded(third, torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        got = biclip(torch.tensor([1.0], dtype=dtype), third, 0.0)
        assert got.item() == rounded(rounded(third, torch.float32), dtype)
    # 0.1 lies below its fp32 neighbour: that neighbour reaches u = 0.1 and is not above it
    near = torch.tensor([0.1])
    assert biclip(near, 0.1, 0.0).item() == near.item()
    # in bf16 and fp16 thresholds keep the precision of fp32: 1 + 2^-20 is not 1
    for dtype in (torch.bfloat16, torch.float16):
        one = torch.ones(1, dtype=dtype, requires_grad=True)
        biclip(one, 1 + 2.0**-20, 0.0).backward()
        assert one.grad.item() == 1


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_eight_bits(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, 0.5, 3.0, -0.0625, -3.0, NAN]).to(dtype)
    got = biclip(x, 1.0, 0.125)
    assert got.dtype == dtype
    assert same(got.float(), [0.0, 0.5, 1.0, -0.125, -1.0, NAN])
    assert same(l2clip(torch.tensor([3.0, 4.0]).to(dtype), 10.0).float(), [3.0, 4.0])


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (2, 3, 4)])
def test_shapes_and_strides_stay(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    for clip in (lambda x: biclip(x, 0.5, 0.1), lambda x: biclip_l2(x, 0.5, 0.1), lambda x: l2clip(x, 0.5)):
        assert clip(x).shape == x.shape
        if x.ndim > 1:
            assert torch.equal(clip(x.mT), clip(x).mT.contiguous())
    assert torch.equal(biclip(x.expand(2, *shape), 0.5, 0.1)[1], biclip(x, 0.5, 0.1))


def test_the_argument_is_not_written() -> None:
    x = torch.randn(7)
    before = x.clone()
    for y in (biclip(x, INF, 0.0), biclip_l2(x, INF, 0.0), l2clip(x, INF)):
        assert torch.equal(y, before)
        y.zero_()
        assert torch.equal(x, before), "the identity returns a tensor of its own"


# --- thresholds that are tensors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (5,), (4, 1), (1, 5), (4, 5)], ids=str)
@every_dtype
def test_thresholds_broadcast(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(4, 5, generator=gen).to(dtype)
    d = 0.5 * torch.rand(shape, generator=gen, dtype=torch.float64)
    u = d + 0.5 * torch.rand(shape, generator=gen, dtype=torch.float64)
    zone = u * 0.3
    got = biclip(x, u, d, zone)
    assert got.dtype == dtype and got.shape == x.shape
    us, ds, zones = (t.to(wide(dtype)).double().expand(4, 5).flatten().tolist() for t in (u, d, zone))
    values = x.double().flatten().tolist()
    want = [rounded(table(*row), dtype) for row in zip(values, us, ds, zones, strict=True)]
    assert same(got, want)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((0.1, 0.2), r"d=0\.2 exceeds u=0\.1.*Swap"),
        ((1.0, -0.1), r"d=-0\.1"),
        ((-1.0, 0.0), r"u=-1\.0"),
        ((NAN, 0.0), "u=nan"),
        ((1.0, NAN), "d=nan"),
        ((1.0, 0.0, 2.0), r"dead_zone=2\.0 exceeds u=1\.0.*Lower the dead zone"),
        ((1.0, 0.0, -1.0), r"dead_zone=-1\.0"),
        ((1.0, 0.0, NAN), "dead_zone=nan"),
        ((torch.tensor(0.1), 0.2), "d=0.2"),
        ((0.1, torch.tensor(0.2)), "u=0.1"),
        ((torch.tensor([1.0, 0.1]), 0.2), "0 <= d <= u everywhere"),
        ((torch.tensor([1.0, 1.0]), torch.tensor([0.0, -1.0])), "0 <= d <= u everywhere"),
        ((torch.tensor([1.0, NAN]), 0.0), "0 <= d <= u everywhere"),
        ((torch.tensor([1.0, 1.0]), 0.0, torch.tensor([0.0, 2.0])), "0 <= dead_zone <= u everywhere"),
    ],
    ids=str,
)
def test_bad_thresholds_are_named(numbers: tuple, words: str) -> None:
    with pytest.raises(ValueError, match="Invalid thresholds: .*" + words):
        biclip(torch.ones(2), *numbers)
    if len(numbers) == 2:
        with pytest.raises(ValueError, match="Invalid thresholds: "):
            biclip_l2(torch.ones(2), *numbers)


# --- derivatives of biclip ------------------------------------------------------------------------------------------

GRID = [
    (x, u, d, zone)
    for u, d, zone in itertools.product([0.0, 0.5, 1.0, INF], [0.0, 0.25, 0.5, 1.0], [0.0, 0.125, 0.5, 1.0])
    if d <= u and zone <= u
    for x in [0.0, -0.0, 0.0625, -0.125, 0.2, -0.25, 0.4, -0.5, 0.75, -1.0, 3.0, -INF, INF, NAN]
]


@every_dtype
def test_slopes_on_a_grid_with_every_edge(dtype: torch.dtype) -> None:
    x, u, d, zone = (torch.tensor(column, dtype=dtype) for column in zip(*GRID, strict=True))
    for t in (x, u, d):
        t.requires_grad_()
    biclip(x, u, d, zone).sum().backward()
    expected = [slopes(float(rounded(row[0], dtype)), *row[1:]) for row in GRID]
    for name, t, want in zip(("x", "u", "d"), (x, u, d), zip(*expected, strict=True), strict=True):
        wrong = [(row, g, w) for row, g, w in zip(GRID, t.grad.tolist(), want, strict=True) if g != w]
        assert not wrong, f"by {name}: (x, u, d, dead_zone), got, want: {wrong[:5]}"


@pytest.mark.parametrize("x", [0.0, -0.0])
@pytest.mark.parametrize("how", ["backward", "func.grad", "func.jvp", "dual numbers", "vmap", "compile"])
def test_at_zero_it_is_smooth_only_without_thresholds_there(how: str, x: float) -> None:
    def slope(u: float, d: float, zone: float = 0.0) -> float:
        def clip(t: Tensor) -> Tensor:
            return biclip(t, u, d, zone)

        point = torch.tensor(x, dtype=torch.float64)
        if how == "func.grad":
            return torch.func.grad(clip)(point).item()
        if how == "func.jvp":
            return torch.func.jvp(clip, (point,), (torch.ones_like(point),))[1].item()
        if how == "vmap":
            return torch.vmap(torch.func.grad(clip))(point.reshape(1)).item()
        if how == "dual numbers":
            with forward_ad.dual_level():
                dual = clip(forward_ad.make_dual(point, torch.ones_like(point)))
                tangent = forward_ad.unpack_dual(dual).tangent
                return 0.0 if tangent is None else tangent.item()
        point.requires_grad_()
        (torch.compile(clip, backend="aot_eager") if how == "compile" else clip)(point).backward()
        return point.grad.item()

    assert slope(1.0, 0.0) == 1
    assert slope(INF, 0.0) == 1
    if how == "compile":
        return
    assert slope(1.0, 0.5) == 0
    assert slope(1.0, 0.0, 0.5) == 0
    assert slope(0.0, 0.0) == 0


def test_between_the_edges_slopes_are_those_of_differences() -> None:
    x = torch.tensor([[0.03, -0.2, 0.5, -0.7], [2.0, -3.0, 0.08, 0.3]], dtype=torch.float64, requires_grad=True)
    for shape in [(), (2, 1), (1, 4), (4,), (2, 4)]:
        u = torch.full(shape, 1.0, dtype=torch.float64, requires_grad=True)
        d = torch.full(shape, 0.1, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(biclip, (x, u, d))
        assert torch.autograd.gradcheck(lambda x, u, d: biclip(x, u, d, 0.05), (x, u, d))
    z = torch.view_as_complex(torch.tensor([[0.03, -0.2], [0.5, -0.7], [2.0, -3.0]], dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda z: biclip(z, 1.0, 0.1), z.requires_grad_())


# --- biclip_l2 and l2clip -------------------------------------------------------------------------------------------


def close(got: Tensor, want: list[float], dtype: torch.dtype, target: float = 0.0) -> None:
    """A few roundings of the arithmetic and one of the store; of a quotient below the normal range, of its last bit."""
    eps, lost = torch.finfo(dtype).eps, (1 + target) * smallest(wide(dtype)) + smallest(dtype)
    expected = torch.tensor(want, dtype=torch.float64)
    torch.testing.assert_close(got.double().flatten(), expected, rtol=8 * eps, atol=2 * lost, equal_nan=True)


def smallest(dtype: torch.dtype) -> float:
    """The smallest denormal number."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


@every_dtype
@pytest.mark.parametrize(
    ("x", "u", "d", "want"),
    [
        ([3.0, -4.0], 10.0, 0.0, [3.0, -4.0]),
        ([3.0, -4.0], 1.0, 0.0, [0.6, -0.8]),
        ([3.0, -4.0], 20.0, 10.0, [6.0, -8.0]),
        ([3.0, -4.0], 5.0, 5.0, [3.0, -4.0]),
        ([3.0, -4.0], 5.0, 0.0, [3.0, -4.0]),
        ([3.0, -4.0], 2.0, 2.0, [1.2, -1.6]),
        ([3.0, -4.0], INF, 0.0, [3.0, -4.0]),
        ([3.0, -4.0], 0.0, 0.0, [0.0, 0.0]),
        ([0.0, 0.0], 1.0, 0.5, [0.0, 0.0]),
        ([0.0, -0.0], 0.0, 0.0, [0.0, 0.0]),
        ([0.0, -2.0], 1.0, 0.5, [0.0, -1.0]),
        ([INF, 1.0], 1.0, 0.5, [NAN, NAN]),
        ([-INF, 0.0], INF, 0.0, [NAN, NAN]),
        ([NAN, 1.0], 1.0, 0.5, [NAN, NAN]),
        ([], 1.0, 0.5, []),
    ],
)
def test_every_branch_of_the_norm(x: list, u: float, d: float, want: list, dtype: torch.dtype) -> None:
    x = torch.tensor(x, dtype=dtype)
    got = biclip_l2(x, u, d)
    assert got.dtype == dtype
    close(got, want, dtype)
    close(biclip_l2(x, torch.tensor(u), torch.tensor(d)), want, dtype)
    assert not torch.signbit(got[x == 0]).any() or (x != 0).any(), "a zero vector becomes +0"  # type: ignore[attr-defined]
    if d == 0:
        close(l2clip(x, u), want, dtype)


@every_dtype
@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=12),
    st.tuples(magnitudes, magnitudes).filter(lambda pair: 0 < max(pair) < INF),
)
def test_any_vector_and_any_thresholds(dtype: torch.dtype, values: list, pair: tuple[float, float]) -> None:
    d, u = sorted(rounded(t, wide(dtype)) for t in pair)
    x = torch.tensor(values, dtype=torch.float64).clamp(*(s * torch.finfo(dtype).max for s in (-1, 1))).to(dtype)
    numbers = x.double().tolist()
    n = math.hypot(*numbers)
    if d == INF or any(0 < t < INF and abs(n - t) <= 1e-5 * t for t in (u, d)):
        return  # (x / n) * inf means nothing; on an edge either answer is right to rounding, and tested above
    want = length_table(numbers, u, d)
    close(biclip_l2(x, u, d), [rounded(v, dtype) for v in want], dtype, u if n >= u else d if n <= d else 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_no_norm_leaves_the_range(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    least = smallest(dtype)
    for top in (info.max, info.max / 4, math.sqrt(info.max) * 4, math.sqrt(info.tiny) / 4, info.tiny, least * 64):
        x = torch.full((1000,), top, dtype=dtype)
        x[::2] *= -1
        part = 1 / math.sqrt(1000)
        close(
            l2clip(x, 1.0 if top > 1 else top),
            ([-part, part] * 500 if top > 1 else [-top * part, top * part] * 500),
            dtype,
        )
        close(biclip_l2(x, INF, 1.0), ([-part, part] * 500 if top < 1 else x.tolist()), dtype)
        assert torch.equal(l2clip(x, INF), x)
    one = torch.tensor([least, 0.0], dtype=dtype)
    assert biclip_l2(one, 1.0, 0.5).tolist() == [0.5, 0.0]
    mixed = torch.tensor([info.max, least, 1.0], dtype=dtype)
    assert l2clip(mixed, 1.0).tolist()[0] == 1.0


def test_no_epsilon() -> None:
    """torch's own gives 0.99e-4 here: it adds 1e-6 to the norm."""
    x = torch.tensor([3e-4, 4e-4])
    assert l2clip(x, 1e-4).double().norm().item() == pytest.approx(1e-4, rel=1e-6)
    x = torch.tensor([3e-12, 4e-12])
    assert torch.equal(l2clip(x, 1e-11), x)
    assert l2clip(x, 1e-13).double().norm().item() == pytest.approx(1e-13, rel=1e-6)


def test_the_norm_of_many_small_numbers_does_not_drift() -> None:
    """A plain running sum in fp32 would be wrong by percents; the one of bf16 would stop at 256."""
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.full((1 << 20,), 2.0**-4, dtype=dtype)  # its norm is 64
        got = l2clip(x, 32.0)
        torch.testing.assert_close(got.double(), torch.full_like(got, 2.0**-5).double(), rtol=1e-4, atol=0)


def test_slopes_of_the_norm_include_n() -> None:
    x = torch.tensor([[0.3, -0.4], [1.2, 0.0]], dtype=torch.float64, requires_grad=True)  # its norm is 1.3
    for u, d in ((10.0, 0.0), (1.0, 0.5), (5.0, 2.0), (INF, 0.0), (INF, 2.0), (1e300, 0.0), (1.0, 1.0)):
        assert torch.autograd.gradcheck(lambda x, u=u, d=d: biclip_l2(x, u, d), x), (u, d)
        assert torch.autograd.gradgradcheck(lambda x, u=u, d=d: biclip_l2(x, u, d), x), (u, d)
    for u, d in ((1.0, 0.5), (5.0, 2.0), (5.0, 0.5)):
        numbers = [torch.tensor(t, dtype=torch.float64, requires_grad=True) for t in (u, d)]
        assert torch.autograd.gradcheck(biclip_l2, (x, *numbers))
    z = torch.view_as_complex(x.detach().clone()).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: biclip_l2(z, 1.0, 0.5), z)


@pytest.mark.parametrize(("u", "d"), [(INF, 0.0), (INF, 0.5), (1.0, 0.5), (1.0, 0.0), (0.0, 0.0)])
def test_slopes_of_the_norm_are_finite(u: float, d: float) -> None:
    for values in ([3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [0.0, 2.0], [1e-30, 0.0], [3e38, 3e38]):
        x = torch.tensor(values, requires_grad=True)
        biclip_l2(x, u, d).sum().backward()
        assert torch.isfinite(x.grad).all(), (values, x.grad)


# --- other kinds of tensors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_is_two_reals(dtype: torch.dtype) -> None:
    z = torch.tensor([[3 + 0.01j, -0.2 - 5j], [0.0 + 1j, complex(NAN, 2)]], dtype=dtype)
    parts = [v for w in z.flatten().tolist() for v in (w.real, w.imag)]
    real = torch.float64 if dtype == torch.complex128 else torch.float32
    u, d = rounded(1.0, real), rounded(0.1, real)
    for given_z, sign in ((z, 1), (z.conj(), -1)):
        got = biclip(given_z, 1.0, 0.1)
        assert got.dtype == dtype
        want = [table(v if i % 2 == 0 else sign * v, u, d) for i, v in enumerate(parts)]
        assert same(torch.view_as_real(got.resolve_conj()), want)
    rows, zone = torch.tensor([[1.0], [0.5]]), torch.tensor([0.0, 0.3])
    got = biclip(z, rows, 0.1, zone)
    limits = [(1.0, 0.0), (1.0, 0.3), (0.5, 0.0), (0.5, 0.3)]
    pairs = [(limit[0], rounded(limit[1], torch.float32)) for limit in limits for _ in range(2)]
    d = rounded(rounded(0.1, real), real)
    want = [table(v, limit[0], d, limit[1]) for v, limit in zip(parts, pairs, strict=True)]
    assert same(torch.view_as_real(got), want)


def test_the_norm_of_complex_numbers_is_the_usual_one() -> None:
    z = torch.tensor([3 + 4j, 12j])  # 5 and 12: 13
    for given_z in (z, z.conj()):
        got = l2clip(given_z, 1.0)
        torch.testing.assert_close(got.resolve_conj(), given_z.resolve_conj() / 13)
    assert torch.isnan(torch.view_as_real(l2clip(torch.tensor([1 + 1j, complex(0, INF)]), 1.0))).all()


def pieces(dtype: torch.dtype = torch.float32) -> Tensor:
    """Row 1 comes in two pieces that add up to (0.5, -0.25); row 4 is absent."""
    values = torch.tensor([[3.0, -4.0], [10.0, 0.25], [-9.5, -0.5], [0.01, 0.0]]).to(dtype)
    return torch.sparse_coo_tensor(torch.tensor([[0, 1, 1, 3]]), values, (5, 2), check_invariants=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_sparse_is_its_summed_values(dtype: torch.dtype) -> None:
    x = pieces(dtype)
    got = biclip(x, 1.0, 0.125)
    assert got.is_sparse and got.is_coalesced() and got.dtype == dtype and got.shape == x.shape
    assert got.indices().tolist() == [[0, 1, 3]], "what is absent stays absent"
    assert got.values().real.tolist() == [[1.0, -1.0], [0.5, -0.25], [0.125, 0.0]]
    flat = torch.sparse_coo_tensor(
        torch.tensor([[0, 3, 0], [1, 0, 1]]), torch.tensor([2.0, 0.01, -1.75]), (4, 2), check_invariants=True
    )
    got = biclip(flat.to(dtype), 1.0, 0.125)
    assert got.to_dense().real.tolist() == [[0.0, 0.25], [0.0, 0.0], [0.0, 0.0], [0.125, 0.0]]
    got = l2clip(flat.to(dtype), 0.125)
    assert got.values().real.tolist() == pytest.approx([0.125, 0.005], rel=2e-2)
    empty = torch.zeros(3, dtype=dtype).to_sparse()
    assert biclip(empty, 1.0, 0.5)._nnz() == l2clip(empty, 1.0)._nnz() == 0


def test_sparse_with_thresholds_by_row_and_by_column() -> None:
    rows = torch.tensor([[0.25], [1.0], [2.0], [3.0], [4.0]])
    assert biclip(pieces(), rows, 0.0).values().tolist() == [
        [0.25, -0.25],
        [0.5, -0.25],
        [rounded(0.01, torch.float32), 0],
    ]
    columns = torch.tensor([0.25, 0.125])
    dense = biclip(pieces().to_dense(), columns, 0.0)
    assert torch.equal(biclip(pieces(), columns, 0.0).to_dense(), dense)
    z = pieces(torch.complex64)
    assert torch.equal(biclip(z, rows, 0.0).to_dense(), biclip(z.to_dense(), rows, 0.0))


def test_sparse_is_differentiable() -> None:
    values = torch.tensor([3.0, 0.5, 0.01], requires_grad=True)
    x = torch.sparse_coo_tensor(torch.tensor([[0, 2, 3]]), values, (4,), check_invariants=True)
    biclip(x, 1.0, 0.1).to_dense().sum().backward()
    assert values.grad.tolist() == [0.0, 1.0, 0.0]


@pytest.mark.filterwarnings("ignore:.*(Sparse|beta state).*:UserWarning")
@pytest.mark.parametrize(
    "clip", [lambda x: biclip(x, 1.0, 0.1), lambda x: biclip_l2(x, 1.0, 0.1), lambda x: l2clip(x, 1.0)]
)
def test_what_is_refused(clip) -> None:
    for convert in (Tensor.to_sparse_csr, Tensor.to_sparse_csc, lambda x: x.to_sparse_bsr((1, 1)), Tensor.to_mkldnn):
        with pytest.raises(ValueError, match="strided and sparse COO tensors, not torch"):
            clip(convert(torch.eye(2)))
    for dtype in (torch.int64, torch.int8, torch.bool, torch.uint8):
        for x in (torch.ones(3, dtype=dtype), torch.ones(3, dtype=dtype).to_sparse()):
            with pytest.raises(ValueError, match=f"floating or complex tensors, not {dtype}"):
                clip(x)


def test_vmap() -> None:
    x, u = torch.randn(6, 4), torch.rand(6) + 0.5
    each = torch.stack([biclip(row, float(t), 0.1) for row, t in zip(x, u, strict=True)])
    assert torch.equal(torch.vmap(lambda row: biclip(row, 0.5, 0.1))(x), biclip(x, 0.5, 0.1))
    assert torch.equal(torch.vmap(lambda row, t: biclip(row, t, 0.1))(x, u), each)
    assert torch.equal(torch.vmap(lambda t: biclip(x[0], t, 0.1))(u), biclip(x[0].expand(6, 4), u[:, None], 0.1))
    by_example = torch.stack([biclip_l2(row, 1.0, 0.5) for row in x])
    torch.testing.assert_close(torch.vmap(lambda row: biclip_l2(row, 1.0, 0.5))(x), by_example)
    scales = torch.tensor([1e-30, 1.0, 1e30, 0.0, INF, 1e-3])[:, None]
    by_example = torch.stack([l2clip(row, 1.0) for row in x * scales])
    torch.testing.assert_close(torch.vmap(lambda row: l2clip(row, 1.0))(x * scales), by_example, equal_nan=True)


def test_per_example_gradients() -> None:
    x = torch.randn(6, 4, dtype=torch.float64)

    def loss(row: Tensor) -> Tensor:
        return (biclip(row, 1.0, 0.1) + biclip_l2(row, 1.0, 0.5)).square().sum()

    got = torch.vmap(torch.func.grad(loss))(x)
    for row, g in zip(x, got, strict=True):
        row = row.clone().requires_grad_()
        loss(row).backward()
        torch.testing.assert_close(g, row.grad)
    jacobian = torch.func.jacrev(lambda row: biclip_l2(row, 1.0, 0.5))(x[0])
    torch.testing.assert_close(jacobian, torch.func.jacfwd(lambda row: biclip_l2(row, 1.0, 0.5))(x[0]))


def test_compile() -> None:
    """In one graph, with and without tensor thresholds, with derivatives."""
    torch._dynamo.reset()
    x = torch.tensor([0.0, -3.0, 0.01, 0.5, NAN, INF])
    u, d = torch.tensor([1.0, 0.5, 1.0, 1.0, 1.0, 1.0]), torch.tensor(0.1)

    def all_of_them(x: Tensor) -> tuple[Tensor, ...]:
        return biclip(x, 1.0, 0.1), biclip(x, u, d, 0.05), biclip_l2(x[:4], 1.0, 0.1), l2clip(x[:4], 100.0)

    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    eager, compiled = all_of_them(a), torch.compile(all_of_them, backend="aot_eager", fullgraph=True)(b)
    for p, q in zip(eager, compiled, strict=True):
        torch.testing.assert_close(p, q, equal_nan=True)
        p[:4].sum().backward(retain_graph=True)
        q[:4].sum().backward(retain_graph=True)
    torch.testing.assert_close(a.grad, b.grad)
    torch._dynamo.reset()


@pytest.mark.slow
def test_generated_code() -> None:
    torch._dynamo.reset()
    x = torch.tensor([0.0, -3.0, 0.01, 0.5, NAN, INF, -0.0, 1e-40])
    run = torch.compile(lambda x: (biclip(x, 1.0, 0.1), biclip_l2(x[:4], 1.0, 0.1)), fullgraph=True)
    for p, q in zip(run(x), (biclip(x, 1.0, 0.1), biclip_l2(x[:4], 1.0, 0.1)), strict=True):
        torch.testing.assert_close(p, q, equal_nan=True)
    torch._dynamo.reset()


# --- DTensor --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate(), Partial()], ids=str)
def test_a_sharded_tensor_is_clipped_as_a_whole(mesh: DeviceMesh, placement) -> None:
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, generator=gen)
    rows = torch.linspace(0.2, 1.0, 4)[:, None]
    for clip in (
        lambda x: biclip(x, 1.0, 0.1),
        lambda x: biclip(x, 1.0, 0.1, 0.05),
        lambda x: biclip(x, torch.tensor(1.0), torch.tensor(0.1)),
        lambda x: biclip(x, rows, 0.1),
        lambda x: biclip_l2(x, 1.0, 0.1),
        lambda x: biclip_l2(x, 200.0, 100.0),
        lambda x: l2clip(x, torch.tensor(0.5)),
        lambda x: l2clip(x, 100.0),
    ):
        plain = x.clone().requires_grad_()
        sharded = DTensor.from_local(x.clone(), mesh, [placement]).requires_grad_()
        want, got = clip(plain), clip(sharded)
        assert isinstance(got, DTensor)
        # a sum still to be formed is formed first: clipping is not linear
        assert got.placements == ((Replicate(),) if placement.is_partial() else (placement,))
        torch.testing.assert_close(got.full_tensor(), want)
        want.square().sum().backward()
        got.square().sum().backward()
        torch.testing.assert_close(sharded.grad.full_tensor(), plain.grad)
