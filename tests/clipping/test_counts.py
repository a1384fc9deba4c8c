"""Counts against counting by hand, the sample against the rule that chooses it, tails against known ones."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tailopt import BiClip, Counts, count, standardised
from tailopt.clipping import counts as module
from tailopt.native import library

INF, NAN = math.inf, math.nan
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
both_paths = pytest.mark.parametrize("path", ["c", "torch"])

# A cell of the table of logarithms is 1/1024 of an octave's width, its middle is at most half a cell away, the slope of
# log2 is at most 1/ln 2, and entries are rounded to 1/65536.
LOG_BOUND = 0.5 / 1024 / math.log(2) + 0.5 / 65536


@pytest.fixture
def use(monkeypatch):
    def choose(path: str) -> None:
        if path == "torch":
            monkeypatch.setattr(module, "loaded", lambda: None)
        elif library.loaded() is None:
            pytest.skip("the C kernel was not built")

    return choose


def wide(value: float, dtype: torch.dtype) -> float:
    """A threshold as the arithmetic sees it."""
    return value if dtype == torch.float64 else torch.tensor(value, dtype=torch.float64).float().item()


def by_hand(x: Tensor, u: float, d: float, dead_zone: float = 0.0) -> Counts:
    """Everything but the histogram."""
    u, d, dead_zone = (wide(t, x.dtype) for t in (u, d, dead_zone))
    a = np.abs(x.double().flatten().numpy())
    finite = a[np.isfinite(a)]
    zero = a <= dead_zone
    below = (a <= d) & ~zero
    above = (a >= u) & ~zero & ~below
    return Counts(
        elements=a.size,
        zero=int(zero.sum()),
        below=int(below.sum()),
        above=int(above.sum()),
        nonfinite=int((~np.isfinite(a)).sum()),
        squares=math.fsum(float(v) ** 2 if v < 1e150 else INF for v in finite),
        largest=float(finite.max(initial=0.0)),
    )


def octaves_by_hand(values: np.ndarray) -> tuple[list[int], list[float]]:
    """Elements and the sum of log2|x| by octave: zeros and whatever is below 2^-126 in 0, what is not finite in 255."""
    bins, logs = [0] * 256, [0.0] * 256
    for a in np.abs(values.astype(np.float64)).tolist():
        if not math.isfinite(a):
            k = 255
        elif a < 2.0**-126:
            k = 0
        else:
            k = min(math.frexp(a)[1] - 1 + 127, 254)
            logs[k] += math.log2(a)
        bins[k] += 1
    return bins, logs


def check(got: Counts, want: Counts) -> None:
    assert got.squares == pytest.approx(want.squares, rel=1e-12, abs=5e-324)
    assert replace(got, squares=0.0, octaves=(), logs=()) == replace(want, squares=0.0)


def check_histogram(got: Counts, values: np.ndarray) -> None:
    bins, logs = octaves_by_hand(values)
    assert list(got.octaves) == bins
    for k in range(1, 255):
        assert abs(got.logs[k] - logs[k]) <= LOG_BOUND * bins[k] + 1e-9, k


magnitudes = st.one_of(st.sampled_from([0.0, INF, 1e-45, 0.1, 0.5, 1.0, 3.4e38, 1e300]), st.floats(0, 100))


@st.composite
def thresholds(draw: st.DrawFn) -> tuple[float, float, float]:
    d, u = sorted((draw(magnitudes), draw(magnitudes)))
    return u, d, draw(st.sampled_from([0.0, d, u, draw(magnitudes)]).filter(lambda t: t <= u))


@both_paths
@every_dtype
@settings(max_examples=60, deadline=None)
@given(numbers=thresholds(), values=st.lists(st.floats(-1e140, 1e140), max_size=40), special=st.booleans())
def test_counts_are_those_of_counting(path: str, dtype: torch.dtype, numbers, values: list, special: bool) -> None:
    edges = [s * v for t in numbers for v in (t, math.nextafter(t, 0.0), math.nextafter(t, 1e3)) for s in (1, -1)]
    x = torch.tensor(values + [v for v in edges if abs(v) < 1e140], dtype=torch.float64)
    x = torch.cat([x, torch.tensor([NAN, INF, -INF, -NAN] if special else [0.0, -0.0])]).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        if path == "torch":
            patch.setattr(module, "loaded", lambda: None)
        check(count([x], *numbers)[0], by_hand(x, *numbers))
        # octaves are those of fp32 numbers; between two of them fp64 has more, which go to one of the two
        single = x.float().to(dtype)
        check_histogram(count([single], *numbers)[0], single.double().numpy())


@both_paths
@every_dtype
def test_the_corners_of_the_thresholds(use, path: str, dtype: torch.dtype) -> None:
    use(path)
    x = torch.tensor([0.0, -0.0, 0.125, -0.25, 0.5, -1.0, 2.0, INF, -INF, NAN], dtype=dtype)
    for numbers, zero, below, above in [
        ((0.5, 0.5), 2, 3, 4),  # d = u: what equals them was raised, not cut
        ((INF, 0.0), 2, 0, 2),  # the identity cuts infinities, to infinity
        ((INF, INF), 2, 7, 0),
        ((1.0, 0.125, 0.25), 4, 0, 4),  # a dead zone above d: nothing is raised
        ((1.0, 0.125, 1.0), 6, 0, 3),  # and at u it comes first
        ((0.0, 0.0), 2, 0, 7),
        ((0.5, 0.125), 2, 1, 5),
    ]:
        got = count([x], *numbers)[0]
        assert (got.zero, got.below, got.above) == (zero, below, above), numbers
        assert (got.elements, got.nonfinite, got.largest) == (10, 3, 2.0)
        assert got.rms == pytest.approx(math.sqrt(got.squares / 7))


def test_nothing_counted() -> None:
    assert Counts().rms == 0.0
    empty = count([torch.empty(0)], 1.0, 0.1)[0]
    assert replace(empty, octaves=(), logs=()) == Counts()
    assert sum(empty.octaves) == 0
    assert math.isnan(empty.hill())
    with pytest.raises(ValueError, match="statistics=True"):
        Counts().hill()
    assert count([], 1.0, 0.1) == {}


# --- the histogram --------------------------------------------------------------------------------------------------


@both_paths
@every_dtype
def test_octaves(use, path: str, dtype: torch.dtype) -> None:
    """2^(k-127) <= |g| < 2^(k-126), at both ends of every octave the type has."""
    use(path)
    info = torch.finfo(dtype)
    exponents = range(max(-126, math.frexp(info.smallest_normal)[1] - 1), min(127, math.frexp(info.max)[1] - 1) + 1)
    low = torch.tensor([2.0**k for k in exponents], dtype=torch.float64).to(dtype)
    ends = torch.cat([low, low * (2 - max(info.eps, torch.finfo(torch.float32).eps))])
    x = torch.cat([ends, -ends])
    got = count([x], 1.0, 0.1, complete=True)[0]
    assert [got.octaves[k + 127] for k in exponents] == [4] * len(exponents)
    assert sum(got.octaves) == x.numel()
    check_histogram(got, x.double().numpy())


@both_paths
def test_the_ends_of_the_histogram(use, path: str) -> None:
    use(path)
    x = torch.tensor([0.0, 1e-300, 5e-324, 2.0**-127, 1e39, 1e300, INF, NAN], dtype=torch.float64)
    got = count([x], 1.0, 0.1)[0]
    assert (got.octaves[0], got.octaves[254], got.octaves[255]) == (4, 2, 2)
    x = torch.tensor([0.0, 1e-40, 3.4e38, INF, NAN])
    got = count([x], 1.0, 0.1)[0]
    assert (got.octaves[0], got.octaves[254], got.octaves[255]) == (2, 1, 2)


@both_paths
def test_logs_are_within_the_tables_bound_for_every_element(use, path: str) -> None:
    use(path)
    gen = torch.Generator().manual_seed(0)
    for a in (1 + torch.rand(300, generator=gen)).tolist():
        got = count([torch.tensor([a])], 1.0, 0.1)[0]
        assert abs(got.logs[127] - math.log2(torch.tensor(a).item())) <= LOG_BOUND
    assert LOG_BOUND < 1e-3


# --- the sample -----------------------------------------------------------------------------------------------------


def sampled(x: Tensor, phase: int) -> np.ndarray:
    """The rule: whole below 65,536 elements; else of every 32 lines of 64 bytes the one whose turn it is."""
    values = x.double().numpy()
    if x.numel() < 65_536:
        return values
    line = np.arange(x.numel()) // (64 // x.element_size())
    return values[line % 32 == phase % 32]


def numbered(n: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Magnitudes over many octaves, so that a sample is told from another by its histogram."""
    gen = torch.Generator().manual_seed(seed)
    return torch.ldexp(torch.ones(n), torch.randint(-12, 12, (n,), generator=gen)).to(dtype)


@both_paths
@every_dtype
@pytest.mark.parametrize("n", [65_535, 65_536, 65_536 + 7, 150_001])
def test_large_tensors_are_sampled_by_lines(use, path: str, dtype: torch.dtype, n: int) -> None:
    use(path)
    x = numbered(n, dtype)
    got = count([x], 1.0, 0.1)[0]
    assert list(got.octaves) == octaves_by_hand(sampled(x, 0))[0]
    check(got, by_hand(x, 1.0, 0.1))  # the rest is exact
    whole = count([x], 1.0, 0.1, complete=True)[0]
    assert list(whole.octaves) == octaves_by_hand(x.double().numpy())[0]


@both_paths
@every_dtype
def test_the_line_moves_with_every_step_and_runs_repeat(use, path: str, dtype: torch.dtype, monkeypatch) -> None:
    if path == "torch":
        monkeypatch.setattr("tailopt.clipping.step_cache.StepCache.prepare", lambda *tensors: False)
    else:
        use(path)
    n = 65_536 + 100

    def run(steps: int) -> list[Counts]:
        p = torch.nn.Parameter(torch.zeros(n, dtype=dtype))
        opt = BiClip([p], lr=0.0, u=1.0, d=0.1, statistics=True)
        seen = []
        for i in range(steps):
            p.grad = numbered(n, dtype, seed=i % 2)
            opt.step()
            seen.append(opt.statistics()[0])
        return seen

    first = run(34)
    for i, counts in enumerate(first):
        assert list(counts.octaves) == octaves_by_hand(sampled(numbered(n, dtype, seed=i % 2), i))[0], i
    assert run(3) == first[:3]
    assert first[0].octaves != first[2].octaves


def test_all_phases_together_are_the_whole() -> None:
    x = numbered(70_000, torch.float32)
    p = torch.nn.Parameter(torch.zeros_like(x))
    p.grad = x
    opt = BiClip([p], lr=0.0, u=1.0, d=0.1, statistics=True)
    for _ in range(32):
        opt.step()
    got = opt.statistics()[0]
    assert list(got.octaves) == octaves_by_hand(x.double().numpy())[0]
    assert got.elements == 32 * x.numel()


@pytest.mark.parametrize("mode", ["counts", True, "complete"])
def test_what_each_mode_keeps(mode) -> None:
    x = numbered(70_000, torch.float32)
    p = torch.nn.Parameter(torch.zeros_like(x))
    p.grad = x
    opt = BiClip([p], lr=0.0, u=1.0, d=0.1, statistics=mode)
    opt.step()
    got = opt.statistics()[0]
    check(got, by_hand(x, 1.0, 0.1))
    assert sum(got.octaves) == {"counts": 0, True: sampled(x, 0).size, "complete": 70_000}[mode]


# --- the two paths --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(library.loaded() is None, reason="the C kernel was not built")
@every_dtype
@pytest.mark.parametrize("n", [0, 1, 63, 1000, 65_535, 65_536, 200_003])
@pytest.mark.parametrize("numbers", [(1.0, 0.1), (0.5, 0.5), (1.0, 0.1, 0.3), (INF, 0.0)], ids=str)
def test_both_paths_count_the_same(dtype: torch.dtype, n: int, numbers: tuple, monkeypatch) -> None:
    gen = torch.Generator().manual_seed(n)
    x = (torch.randn(n, generator=gen) * torch.ldexp(torch.ones(n), torch.randint(-20, 8, (n,), generator=gen))).to(
        dtype
    )
    if n > 60:
        x[5], x[17], x[41] = NAN, INF, 0.0
    by_c = count([x], *numbers)[0]
    monkeypatch.setattr(module, "loaded", lambda: None)
    by_torch = count([x], *numbers)[0]
    assert by_torch.squares == pytest.approx(by_c.squares, rel=1e-12)
    assert replace(by_torch, squares=0.0) == replace(by_c, squares=0.0)


def test_strided_complex_and_sparse_tensors_are_counted_too() -> None:
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(6, 8, generator=gen)
    for y in (x.mT, x[:, ::2], x[1:, 3:], x[:, :1].expand(6, 4), x.reshape(2, 3, 8).permute(2, 0, 1)):
        check(count([y], 1.0, 0.1)[0], by_hand(y.contiguous(), 1.0, 0.1))
    z = torch.view_as_complex(x.reshape(24, 2))
    for y in (z, z.conj()):
        check(count([y], 1.0, 0.1)[0], by_hand(x, 1.0, 0.1))
    pieces = torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 2]]), torch.tensor([3.0, -2.5, 0.01]), (4,), check_invariants=True
    )
    check(count([pieces], 1.0, 0.1)[0], by_hand(torch.tensor([0.5, 0.01]), 1.0, 0.1))


def test_names_and_positions() -> None:
    a, b = torch.ones(3), torch.zeros(2)
    by_name, by_position = count({"a": a, "b": b}, 0.5, 0.1), count([a, b], 0.5, 0.1)
    assert list(by_name) == ["a", "b"] and list(by_position) == [0, 1]
    assert list(by_name.values()) == list(by_position.values()) == list(count(iter([a, b]), 0.5, 0.1).values())
    assert (by_name["a"].above, by_name["b"].zero) == (3, 2)
    model = torch.nn.Linear(2, 2)
    assert list(count(dict(model.named_parameters()), 0.5, 0.1)) == ["weight", "bias"]
    with pytest.raises(ValueError, match=r"Invalid thresholds: d=0\.2 exceeds u=0\.1"):
        count([a], 0.1, 0.2)


# --- what is done with counts ---------------------------------------------------------------------------------------


def test_counts_add_up() -> None:
    gen = torch.Generator().manual_seed(0)
    a, b = torch.randn(1000, generator=gen), 3 * torch.randn(500, generator=gen)
    parts = count([a, b], 1.0, 0.1)
    both = parts[0] + parts[1]
    whole = count([torch.cat([a, b])], 1.0, 0.1)[0]
    assert both.squares == pytest.approx(whole.squares, rel=1e-12)
    assert both.logs == pytest.approx(whole.logs, rel=1e-12, abs=1e-9)
    assert replace(both, squares=0.0, logs=()) == replace(whole, squares=0.0, logs=())
    assert parts[0] + Counts() == parts[0] == Counts() + parts[0], "nothing has no histogram and changes none"
    assert Counts(skipped=2) + Counts(skipped=3) == Counts(skipped=5)
    assert sum([parts[0], parts[1]], Counts()) == both


def pareto(alpha: float, n: int, seed: int) -> Tensor:
    gen = torch.Generator().manual_seed(seed)
    sign = torch.randint(0, 2, (n,), generator=gen) * 2 - 1
    return sign * torch.rand(n, generator=gen, dtype=torch.float64).clamp(min=1e-12).pow(-1 / alpha)


@pytest.mark.parametrize("alpha", [0.8, 1.1, 1.5, 2.0, 3.0])
def test_hill_finds_the_index_of_a_pareto_tail(alpha: float) -> None:
    """The estimate from m exceedances has standard deviation alpha / sqrt(m); four of them, and the table's bound."""
    x = pareto(alpha, 60_000, seed=1)
    for scale in (1.0, 1e-5, 0.37):
        for tail in (0.01, 0.1):
            got = count([(x * scale).float()], 1.0, 0.1)[0].hill(tail)
            assert abs(got - alpha) <= 4 * alpha / math.sqrt(tail * x.numel()) + alpha**2 * LOG_BOUND * math.log(2)


def test_hill_by_hand() -> None:
    """The tail starts at the octave edge that leaves at least the share above it."""
    x = torch.tensor([0.0] * 10 + [1.0, 1.5] * 40 + [4.0, 6.0, 12.0] * 3 + [100.0])
    counts = count([x], 1.0, 0.1)[0]
    for tail, edge in ((0.0, 64.0), (0.01, 64.0), (0.02, 8.0), (0.04, 8.0), (0.05, 4.0), (0.1, 4.0), (0.2, 1.0)):
        over = [a for a in x.tolist() if a >= edge]
        excess = sum(math.log(a / edge) for a in over)
        assert counts.hill(tail) == pytest.approx(len(over) / excess, rel=3e-3), (tail, edge)
    assert counts.hill(1.0) != counts.hill(1.0), "zeros are no tail"
    assert count([torch.ones(4)], 1.0, 0.1)[0].hill() > 500, "no spread, no tail"


# ---- heavy tails, or unequal scales ----


def index(x: Tensor) -> float:
    return count([x.float()], u=1.0, d=0.0, complete=True)[0].hill()


def noise(df: float, spread: float, batches: int, seed: int = 0) -> Tensor:
    """[batches, coordinates]: Student t (df = inf: Gaussian) with log-normal scales, about a million values."""
    gen = torch.Generator().manual_seed(seed)
    n = 1_000_000 // batches
    z, scale = torch.randn(batches, n, generator=gen), torch.exp(spread * torch.randn(n, generator=gen))
    if math.isfinite(df):
        torch.manual_seed(seed)
        z = z / torch.sqrt(torch.distributions.Chi2(torch.tensor(df)).sample(z.shape) / df)
    return z * scale + 5 * scale  # a mean gradient, too


@pytest.mark.parametrize(("spread", "pooled"), [(1.5, 1.6), (2.5, 1.1)])
def test_unequal_scales_look_like_a_heavy_tail_until_they_are_taken_out(spread: float, pooled: float) -> None:
    x = noise(math.inf, spread, 50)
    assert index(x - x.mean(0)) == pytest.approx(pooled, abs=0.25)
    assert index(standardised(x)) > 3.3


@pytest.mark.parametrize("spread", [0.0, 1.5, 2.5])
@pytest.mark.parametrize("batches", [20, 50, 200])
def test_a_true_heavy_tail_stays(spread: float, batches: int) -> None:
    assert index(standardised(noise(1.5, spread, batches))) == pytest.approx(1.5, abs=0.1)


def test_a_sample_deviation_would_put_a_ceiling_on_the_tail() -> None:
    x = noise(1.5, 1.5, 20)
    assert ((x - x.mean(0)) / x.std(0)).abs().max() <= math.sqrt(20)
    assert standardised(x).abs().max() > 1000


def test_standardised_by_hand() -> None:
    column = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 100.0]  # median 5, deviations 5 4 3 2 1 0 1 2 3 4 95
    x = torch.tensor([[c, 7.0] for c in column], dtype=torch.float64)  # the second never moves
    assert standardised(x).tolist() == [(c - 5) / 3 for c in column]
    assert torch.equal(standardised(list(x)), standardised(x))
    shifted = torch.stack([x[:, 0] * 1e-3 - 40, x[:, 0] * 1e6], 1)
    assert torch.allclose(standardised(shifted), standardised(x).repeat_interleave(2), atol=1e-9)
    assert standardised(x.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("few", [torch.ones(9, 4), torch.ones(()), [torch.ones(4)] * 3])
def test_a_few_batches_are_refused(few: Tensor | list[Tensor]) -> None:
    with pytest.raises(ValueError, match="need 10 or more, better 50"):
        standardised(few)


def test_a_normal_sample_has_no_heavy_tail() -> None:
    gen = torch.Generator().manual_seed(0)
    assert count([torch.randn(60_000, generator=gen)], 1.0, 0.1)[0].hill() > 4


QUANTILES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.97)


def samples() -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)
    normal, other = (torch.randn(100_000, generator=rng) for _ in range(2))
    return {
        "normal": normal,
        "cauchy": normal / other,
        "lognormal": torch.exp(normal),
        "unequal scales": normal * torch.exp(1.5 * other),
    }


@pytest.mark.parametrize("name", samples())
@pytest.mark.parametrize("shift", [1.0, 1.3, 1.7])  # where in an octave the bulk lies must not matter
def test_a_quantile_is_that_of_torch(name, shift):
    x = samples()[name] * shift
    got = count([x], u=1, d=0, complete=True)[0]
    exact = torch.quantile(x.abs(), torch.tensor(QUANTILES)).tolist()
    assert [got.quantile(q) for q in QUANTILES] == pytest.approx(exact, rel=0.015)
    assert got.quantile(0.5) == pytest.approx(exact[QUANTILES.index(0.5)], rel=0.005)


def test_a_quantile_leaves_out_zeros_and_what_is_not_finite():
    x = samples()["normal"]
    padded = torch.cat([x, torch.zeros(300_000), torch.tensor([INF, -INF, NAN])])
    assert count([padded], u=1, d=0, complete=True)[0].quantile(0.5) == count([x], u=1, d=0, complete=True)[0].quantile(
        0.5
    )
    for empty in (torch.zeros(7), torch.tensor([INF, NAN]), torch.empty(0)):
        assert math.isnan(count([empty], u=1, d=0)[0].quantile(0.5))


@given(
    st.lists(st.floats(2.0**-100, 2.0**100, allow_subnormal=False), min_size=1, max_size=40),
    st.floats(0, 1, allow_subnormal=False),
)
@settings(max_examples=200, deadline=None)
def test_a_quantile_is_in_the_octave_of_the_element_with_that_rank(values, q):
    x = torch.tensor(values, dtype=torch.float64)
    got = count([x], u=1, d=0, complete=True)[0]
    ordered = sorted(values)
    rank = max(math.ceil(q * len(values)), 1)
    below = math.frexp(ordered[rank - 1])[1] - 1
    assert 2.0**below * (1 - 1e-12) <= got.quantile(q) <= 2.0 ** (below + 1) * (1 + 1e-12)
    assert got.quantile(q) <= ordered[-1]
    more = [got.quantile(p) for p in (0, 0.25, 0.5, 0.75, 1)]
    assert more == sorted(more)


@pytest.mark.parametrize("q", [-0.1, 1.5, NAN])
def test_a_share_outside_0_and_1_is_refused(q):
    with pytest.raises(ValueError, match=rf"Invalid q: {q}; need a share"):
        count([torch.ones(3)], u=1, d=0)[0].quantile(q)


def test_a_quantile_needs_a_histogram():
    with pytest.raises(ValueError, match="no histogram"):
        Counts(elements=3, squares=1.0).quantile(0.5)
