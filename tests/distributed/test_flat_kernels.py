"""Passes over displacements: the kernel has torch's bits, with every instruction set and number of threads."""

from __future__ import annotations

import gc
import itertools
import mmap
from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tailopt.distributed import flat_kernels, outer_step, transport
from tailopt.distributed.layout import Layout, Segment
from tailopt.distributed.outer_step import PendingMean
from tailopt.native import library
from tailopt.native.calls import addresses
from tailopt.native.flat import Pieces, WeightedSum
from tailopt.rules.rule import ParamState
from tailopt.rules.table import OUTER

KERNEL = library.loaded()
needs_kernel = pytest.mark.skipif(KERNEL is None, reason="the C kernel was not built")
INSTRUCTION_SETS = [(v, threads) for v in (KERNEL.instruction_sets if KERNEL is not None else ()) for threads in (1, 2)]
LARGE = 200_003  # more than two threads share


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def segments(layout: Layout) -> list[Segment]:
    return [s for k in range(layout.nodes) for s in layout.segments(k)]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bits, so that signs of zeros and the payloads of NaN count."""
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])


def torch_stats(x: torch.Tensor) -> flat_kernels.ChecksumAndMax:
    return flat_kernels.ChecksumAndMax(flat_kernels._checksum(x), flat_kernels._max_abs(x))


def signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def mixed(i: int) -> int:
    """SplitMix64, as its author wrote it."""
    z = (i + 1) * 0x9E3779B97F4A7C15 % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 70_000), min_size=1, max_size=5), st.integers(1, 4), st.integers(0, 99))
def test_displacement_fills_the_buffer_and_sees_every_partition(sizes: list[int], nodes: int, seed: int) -> None:
    layout = Layout(tuple(sizes), nodes)
    params = [numbers(n, seed=seed + i) for i, n in enumerate(sizes)]
    x, delta = numbers(layout.total, seed=seed + 50), torch.zeros(layout.total)
    stats = flat_kernels.displacement(params, x, delta, segments(layout), layout.cuts)
    shapes = [p.shape for p in params]
    for p, begun, d in zip(params, layout.views(x, shapes), layout.views(delta, shapes), strict=True):
        assert same(d, p - begun)
    assert stats == [torch_stats(delta[layout.partition(k)]) for k in range(nodes)]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64])
def test_other_types_move_from_the_rounded_start(kind: torch.dtype) -> None:
    layout = Layout((33, 10), 2)
    flat = torch.float64 if kind == torch.float64 else torch.float32
    params, x = [numbers(11, 3).t().to(kind), numbers(10).to(kind)], numbers(layout.total).to(flat)
    delta = torch.zeros(layout.total, dtype=flat)
    stats = flat_kernels.displacement(params, x, delta, segments(layout), layout.cuts)
    shapes = [p.shape for p in params]
    for p, begun, d in zip(params, layout.views(x, shapes), layout.views(delta, shapes), strict=True):
        assert torch.equal(d, p.to(flat) - begun.to(kind).to(flat))
    assert stats == [torch_stats(delta[layout.partition(k)]) for k in range(2)]


@needs_kernel
@pytest.mark.parametrize(("instruction_set", "threads"), INSTRUCTION_SETS)
@pytest.mark.parametrize("wrong", [0.0, -0.0, 1e30, -1e30, float("inf"), float("-inf"), float("nan")])
def test_the_kernel_and_torch_see_the_same_stats(instruction_set: str, threads: int, wrong: float) -> None:
    assert KERNEL is not None
    for n in (1, 2, 7, 16, 1024, 1040, LARGE):
        x = numbers(n)
        x[n // 3] = wrong
        where, pieces = array("Q", [x.data_ptr()]), Pieces(array("q", [n]), array("q", [0]), array("i", [0]), 1)
        (checksum,), (top,) = KERNEL.flat.displacement(
            None, None, where, pieces, instruction_set=instruction_set, threads=threads
        )
        expected = torch_stats(x)
        assert checksum == expected.checksum
        assert top == expected.max_abs or (top != top and expected.max_abs != expected.max_abs)


PAGE = flat_kernels.PAGE


@pytest.mark.parametrize("count", [0, 1, PAGE // 4 - 1, PAGE // 4, PAGE // 2 + 3])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_room_is_zeros_of_its_own(count: int, kind: torch.dtype) -> None:
    x, y = flat_kernels.alloc_huge_pages(count, kind), flat_kernels.alloc_huge_pages(count, kind)
    assert torch.equal(x, torch.zeros(count, dtype=kind)) and x.dtype == kind and x.is_contiguous()
    x.fill_(1.0)
    assert not y.any()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no large pages on this system")
def test_room_begins_with_a_page_and_outlives_its_maker() -> None:
    rows = [flat_kernels.alloc_huge_pages(flat_kernels.PAGE, torch.float32).fill_(k) for k in range(4)]
    gc.collect()
    assert all(row.data_ptr() % flat_kernels.PAGE == 0 and bool((row == k).all()) for k, row in enumerate(rows))


def test_room_without_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert torch.equal(flat_kernels.alloc_huge_pages(flat_kernels.PAGE, torch.float32), torch.zeros(flat_kernels.PAGE))


@given(st.integers(1, 1 << 27))
def test_a_partition_goes_in_few_messages_of_about_the_same_size(count: int) -> None:
    size = transport._message_size(count)
    parts = -(-count // size)
    assert min(count, 2 * transport.MESSAGE // 3) <= size <= 3 * transport.MESSAGE // 2
    assert count - size * (parts - 1) > size - parts  # the last one is not a crumb


# --- checksums ------------------------------------------------------------------------------------------------------


def words(*values: int) -> torch.Tensor:
    """fp32 elements with these bits."""
    return torch.tensor([value - 2**32 if value >= 2**31 else value for value in values], dtype=torch.int32).view(
        torch.float32
    )


def test_a_checksum_by_hand() -> None:
    """word[i] * key[i mod 1024] * page_key[i div 1024], in Python's own integers."""
    assert flat_kernels.checksum(torch.zeros(5000)) == flat_kernels.checksum(torch.zeros(0)) == 0
    for place in (0, 1, 2, 1023, 1024, 5000):
        x = torch.zeros(place + 1)
        x[place] = 1.0
        key, page_key = mixed(place % 1024) >> 32 | 1, mixed(1024 + place // 1024) | 1
        for found in (flat_kernels.checksum(x), flat_kernels._checksum(x), flat_kernels.checksum_and_max(x).checksum):
            assert found == signed(0x3F800000 * key * page_key)


def test_the_keys_of_a_page_are_odd_and_different() -> None:
    """Then an exchange of two words of a page, and any change of one word, are seen whatever the words are."""
    keys = flat_kernels._keys().tolist()
    assert len(set(keys)) == 1024 and all(key % 2 == 1 and 0 < key < 2**32 for key in keys)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_any_flipped_bit_is_seen(kind: torch.dtype) -> None:
    x = numbers(3000).to(kind)
    before = flat_kernels.checksum_and_max(x).checksum
    for i in (0, 1, 2, 63, 511, 512, 1023, 1024, 1500, 2999):
        for bit in range(8 * kind.itemsize):
            flipped = x.clone()
            bits(flipped)[i] ^= signed(1 << bit) if kind == torch.float64 else signed(1 << bit << 32) >> 32
            assert flat_kernels.checksum_and_max(flipped).checksum != before


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 4999), st.sampled_from([0, 0x3F800000, None])
)
def test_any_change_of_one_word_is_seen(before: int, after: int, place: int, rest: int | None) -> None:
    """Also where words cancel their keys, zeros become something, and bits come and go in numbers."""
    x = numbers(5000) if rest is None else words(rest).repeat(5000)
    x[place : place + 1] = words(before)
    y = x.clone()
    y[place : place + 1] = words(after)
    assert (flat_kernels.checksum(x) == flat_kernels.checksum(y)) == (before == after)


SIZE = 4096  # words of 64 bits in the tests below: 8 pages of keys


def changed(x: torch.Tensor, change: Callable[[torch.Tensor], None]) -> bool:
    """Whether a change of 64-bit words, if it is one, changes the checksum."""
    y = x.clone()
    change(y.view(torch.int64))
    assert not same(x, y)
    return flat_kernels.checksum_and_max(x).checksum != flat_kernels.checksum_and_max(y).checksum


places = st.integers(0, SIZE - 1)


@settings(max_examples=200, deadline=None)
@given(places, places, st.integers(0, 99))
def test_swapped_words_are_seen(i: int, j: int, seed: int) -> None:
    if i == j:
        j = (i + 1) % SIZE

    def swap(w: torch.Tensor) -> None:
        w[[i, j]] = w[[j, i]]

    assert changed(numbers(2 * SIZE, seed=seed), swap)


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 64), st.integers(0, SIZE - 64), st.sampled_from(["random", "small integers", "one value twice"]))
def test_reversed_blocks_are_seen(length: int, start: int, what: str) -> None:
    x = numbers(2 * SIZE)
    if what == "small integers":
        x = torch.arange(2.0 * SIZE)
    elif what == "one value twice":
        x[2 * start : 2 * (start + length)] = 1.0
        x[2 * start] = 2.0
    assert changed(x, lambda w: w[start : start + length].copy_(w[start : start + length].flip(0)))


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 1024), st.integers(0, SIZE // 2 - 1024), st.integers(SIZE // 2, SIZE - 1024))
def test_swapped_blocks_are_seen(length: int, i: int, j: int) -> None:
    def swap(w: torch.Tensor) -> None:
        first = w[i : i + length].clone()
        w[i : i + length] = w[j : j + length]
        w[j : j + length] = first

    assert changed(numbers(2 * SIZE), swap)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3000))
def test_what_lies_elsewhere_is_seen(by: int) -> None:
    """The same content further on, by words of 64 or of 32 bits, with zeros before it."""
    x = torch.zeros(8192)
    x[:5000] = numbers(5000)
    y = torch.zeros(8192)
    y[by : 5000 + by] = x[:5000]
    assert flat_kernels.checksum(x) != flat_kernels.checksum(y)


@settings(max_examples=300, deadline=None)
@given(places, places, st.integers(0, 63), st.booleans(), st.integers(0, 9))
def test_paired_flips_are_seen(i: int, j: int, bit: int, top: bool, seed: int) -> None:
    """The same bit of two words; a sum of words does not see the top bits, nor a bit that goes and comes."""
    if i == j:
        j = (i + 1) % SIZE
    flip = signed(1 << (63 if top else bit))
    x = numbers(2 * SIZE, seed=seed)
    w = x.view(torch.int64)
    if (w[i] & flip) == (w[j] & flip):
        w[i] ^= flip

    def both(w: torch.Tensor) -> None:
        w[[i, j]] ^= flip

    assert changed(x, both)


@needs_kernel
@pytest.mark.parametrize(("instruction_set", "threads"), INSTRUCTION_SETS)
@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 400_000), max_size=6), st.integers(0, 9))
def test_a_checksum_does_not_depend_on_how_it_is_formed(
    instruction_set: str, threads: int, cuts: list[int], seed: int
) -> None:
    """Instruction sets, threads, and where the buffer is cut into segments, odd places included."""
    assert KERNEL is not None
    x = numbers(400_001, seed=seed)
    ends = sorted({0, *cuts, x.numel()})
    where = array("Q", [x.data_ptr() + 4 * start for start in ends[:-1]])
    counts = array("q", [stop - start for start, stop in itertools.pairwise(ends)])
    pieces = Pieces(counts, array("q", ends[:-1]), array("i", [0] * len(counts)), 1)
    (found,), (top,) = KERNEL.flat.displacement(
        None, None, where, pieces, instruction_set=instruction_set, threads=threads
    )
    y = torch.zeros_like(x)
    to = array("Q", [y.data_ptr() + 4 * start for start in ends[:-1]])
    (loaded,) = KERNEL.flat.load(to, where, pieces, instruction_set=instruction_set, threads=threads)
    assert found == loaded == flat_kernels._checksum(x) and top == flat_kernels._max_abs(x)
    assert same(x, y)


# --- loading --------------------------------------------------------------------------------------------------------

STRANGE = [0x80000000, 0x7FC12345, 0xFFA00001, 0x00000001, 0x807FFFFF, 0x7F800000, 0x3F7FFFFF, 0x477FFFFF]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 70_000), min_size=1, max_size=5),
    st.integers(1, 4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    st.integers(0, 99),
)
def test_load_is_a_copy_with_checksums(sizes: list[int], nodes: int, kind: torch.dtype, seed: int) -> None:
    """Bit for bit, with signed zeros, payloads of NaN, denormals, and what rounds to infinity in fp16."""
    layout = Layout(tuple(sizes), nodes)
    flat = torch.float64 if kind == torch.float64 else torch.float32
    x = torch.zeros(layout.total, dtype=flat)
    params = [torch.full((n,), 7.0, dtype=kind) for n in sizes]
    views = layout.views(x, [p.shape for p in params])
    for i, view in enumerate(views):
        view.copy_(numbers(view.numel(), seed=seed + i))
        if kind != torch.float64:
            view[: len(STRANGE)] = words(*STRANGE)[: view.numel()]
    expected = [torch.empty_like(p) for p in params]
    torch._foreach_copy_(expected, views)
    for prepared in (segments(layout), flat_kernels.SegmentTable.of(segments(layout), layout.cuts)):
        found = flat_kernels.load(params, x, prepared, layout.cuts)
        assert all(map(same, params, expected))
        assert found == [flat_kernels.checksum_and_max(x[layout.partition(k)]).checksum for k in range(nodes)]
        for p in params:
            p.zero_()


def test_kept_addresses_follow_tensors_that_move() -> None:
    layout = Layout((40, 5), 2)
    kept = flat_kernels.SegmentTable.of(segments(layout), layout.cuts)
    for turn in range(4):
        params, x = [numbers(40, seed=turn), numbers(5, seed=turn)], numbers(layout.total, seed=turn + 10)
        delta = torch.zeros(layout.total)
        stats = flat_kernels.displacement(params, x, delta, kept, layout.cuts)
        views = layout.views(x, [p.shape for p in params])
        for p, begun, d in zip(params, views, layout.views(delta, [p.shape for p in params]), strict=True):
            assert same(d, p - begun)
        assert stats == [torch_stats(delta[layout.partition(k)]) for k in range(2)]
        flat_kernels.load(params, x, kept, layout.cuts)
        assert all(map(same, params, views))


def test_load_takes_any_layout_of_a_parameter() -> None:
    layout = Layout((12, 0, 10), 2)
    x = numbers(layout.total)
    params = [torch.zeros(4, 3).t(), torch.zeros(0, 5), torch.zeros(20)[::2]]
    flat_kernels.load(params, x, segments(layout), layout.cuts)
    for p, view in zip(params, layout.views(x, [p.shape for p in params]), strict=True):
        assert torch.equal(p, view)


def test_autograd_notices_a_load() -> None:
    layout = Layout((3,), 1)
    p = torch.ones(3, requires_grad=True)
    loss = (p * p).sum()
    flat_kernels.load([p.detach()], torch.zeros(layout.total), segments(layout), layout.cuts)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@needs_kernel
@pytest.mark.parametrize(("instruction_set", "threads"), INSTRUCTION_SETS)
@pytest.mark.parametrize("nodes", [1, 2, 5])
@pytest.mark.parametrize("whole", [1.0, 0.7])
@pytest.mark.parametrize("negative", [False, True])
def test_a_mean_of_the_kernel_is_the_mean_of_torch(
    instruction_set: str, threads: int, nodes: int, whole: float, negative: bool
) -> None:
    assert KERNEL is not None
    shares = [(k + 1) / 15 for k in range(nodes)]
    for n in (1, 1023, 1025, LARGE):
        rows = list(numbers(nodes, n).unbind())
        for row in rows:
            row[:1] = -0.0
        expected = flat_kernels._mean([row.clone() for row in rows], shares, whole, negative)
        summed = WeightedSum(addresses(rows), array("f", shares), whole)
        KERNEL.flat.mean(summed, negative, rows[0].data_ptr(), n, instruction_set=instruction_set, threads=threads)
        assert same(rows[0], expected)


@needs_kernel
def test_this_torch_adds_multiples_in_a_known_way() -> None:
    assert flat_kernels._fused() is not None


@needs_kernel
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("avg", {}),
        ("sgd", {"lr": 0.7, "momentum": 0.0}),
        ("sgd", {"lr": 0.7, "momentum": 0.9}),
        ("nesterov", {"lr": 0.7, "momentum": 0.9}),
        ("nesterov", {"lr": [0.5, 0.25, 0.125], "momentum": 0.9}),
    ],
)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("whole", [1.0, 0.7])
def test_a_descent_of_the_kernel_is_the_rule_on_the_mean(
    name: str, more: dict[str, Any], threads: int, whole: float, request: pytest.FixtureRequest
) -> None:
    before = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(before))
    torch.set_num_threads(threads)
    rule, pieces = OUTER[name], [(3, 5), (16, 1037), (1056, LARGE)]
    shares, length = [0.2, 0.5, 0.3], 1056 + LARGE

    def cut(flat: torch.Tensor) -> list[torch.Tensor]:
        return [flat[start : start + count] for start, count in pieces]

    ours = numbers(length, seed=length)
    theirs = ours.clone()
    states: list[ParamState] = [{} for _ in pieces]
    others: list[ParamState] = [{} for _ in pieces]
    took = []
    for turn in range(3):
        rows = list(numbers(3, length, seed=turn).unbind())
        mean = flat_kernels._mean([row.clone() for row in rows], shares, whole, False)
        outer_step.outer_step(rule, cut(theirs), cut(mean), others, more)
        took.append(
            flat_kernels.mean_and_sgd_step(rule, ours, states, more, flat_kernels.Rows(rows, shares, whole), pieces)
        )
        if not took[-1]:  # the first step makes the state
            form = PendingMean(rows, shares, whole)
            form.form(0, length)
            outer_step.outer_step(rule, cut(ours), cut(rows[0]), states, more)
        assert same(ours, theirs)
    for state, other in zip(states, others, strict=True):
        assert state.keys() == other.keys()
        assert all(same(state[key], other[key]) for key in state)
    assert took[1:] == [True, True]


def test_what_the_kernel_cannot_do_is_left_to_torch() -> None:
    x, row, whole = numbers(4), [numbers(4)], [(0, 4)]
    momentum: list[ParamState] = [{"momentum_buffer": numbers(4)}]
    own = {"lr": torch.full((4,), 0.5), "momentum": 0.9}
    assert not flat_kernels.mean_and_sgd_step(
        OUTER["nesterov"], x, momentum, own, flat_kernels.Rows(row, [1.0], 1.0), whole
    )
    assert not flat_kernels.mean_and_sgd_step(
        OUTER["adam"], x, [{}], {"lr": 0.5}, flat_kernels.Rows(row, [1.0], 1.0), whole
    )
    assert not flat_kernels.mean_and_sgd_step(
        OUTER["avg"], x.double(), [{}], {}, flat_kernels.Rows([row[0].double()], [1.0], 1.0), whole
    )
