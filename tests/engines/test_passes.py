"""Passes over displacements: the kernel has torch's bits, with every instruction set and number of threads."""

from __future__ import annotations

import gc
import mmap
from array import array
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tailopt.clipping import cpu
from tailopt.engines import exchange, passes
from tailopt.engines.exchange import Layout, _step, _Sum
from tailopt.engines.passes import Span
from tailopt.rules.rule import State
from tailopt.rules.table import OUTER

KERNEL = cpu.loaded()
needs_kernel = pytest.mark.skipif(KERNEL is None, reason="the C kernel was not built")
VARIANTS = [(v, threads) for v in (KERNEL.variants if KERNEL is not None else ()) for threads in (1, 2)]
LARGE = 200_003  # more than two threads share


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def spans(layout: Layout) -> list[Span]:
    return [
        Span(s.tensor, s.start - layout.offsets[s.tensor], s.start, s.stop - s.start, k)
        for k in range(layout.nodes)
        for s in layout.segments(k)
    ]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bits, so that signs of zeros count."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 70_000), min_size=1, max_size=5), st.integers(1, 4), st.integers(0, 99))
def test_moved_fills_the_buffer_and_sees_every_stretch(sizes: list[int], nodes: int, seed: int) -> None:
    layout = Layout(tuple(sizes), nodes)
    params = [numbers(n, seed=seed + i) for i, n in enumerate(sizes)]
    x, delta = numbers(layout.total, seed=seed + 50), torch.zeros(layout.total)
    looks = passes.moved(params, x, delta, spans(layout), layout.cuts)
    shapes = [p.shape for p in params]
    for p, begun, d in zip(params, layout.views(x, shapes), layout.views(delta, shapes), strict=True):
        assert same(d, p - begun)
    assert looks == [passes._look(delta[layout.stretch(k)]) for k in range(nodes)]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64])
def test_other_types_move_from_the_rounded_start(kind: torch.dtype) -> None:
    layout = Layout((33, 10), 2)
    flat = torch.float64 if kind == torch.float64 else torch.float32
    params, x = [numbers(11, 3).t().to(kind), numbers(10).to(kind)], numbers(layout.total).to(flat)
    delta = torch.zeros(layout.total, dtype=flat)
    looks = passes.moved(params, x, delta, spans(layout), layout.cuts)
    shapes = [p.shape for p in params]
    for p, begun, d in zip(params, layout.views(x, shapes), layout.views(delta, shapes), strict=True):
        assert torch.equal(d, p.to(flat) - begun.to(kind).to(flat))
    assert looks == [passes._look(delta[layout.stretch(k)]) for k in range(2)]


@needs_kernel
@pytest.mark.parametrize(("variant", "threads"), VARIANTS)
@pytest.mark.parametrize("wrong", [0.0, -0.0, 1e30, -1e30, float("inf"), float("-inf"), float("nan")])
def test_a_look_of_the_kernel_is_a_look_of_torch(variant: str, threads: int, wrong: float) -> None:
    assert KERNEL is not None
    for n in (2, 16, 1024, 1040, LARGE + 1):
        x = numbers(n)
        x[n // 3] = wrong
        where = array("Q", [x.data_ptr()]), array("q", [n]), array("i", [0])
        (checksum,), (top,) = KERNEL.moved_at(None, None, *where, 1, variant=variant, threads=threads)
        expected = passes._look(x)
        assert checksum == expected.checksum
        assert top == expected.top or (top != top and expected.top != expected.top)


@pytest.mark.parametrize("count", [0, 1, passes.PAGE // 4 - 1, passes.PAGE // 4, passes.PAGE // 2 + 3])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_room_is_zeros_of_its_own(count: int, kind: torch.dtype) -> None:
    x, y = passes.room(count, kind), passes.room(count, kind)
    assert torch.equal(x, torch.zeros(count, dtype=kind)) and x.dtype == kind and x.is_contiguous()
    x.fill_(1.0)
    assert not y.any()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no large pages on this system")
def test_room_begins_with_a_page_and_outlives_its_maker() -> None:
    rows = [passes.room(passes.PAGE, torch.float32).fill_(k) for k in range(4)]
    gc.collect()
    assert all(row.data_ptr() % passes.PAGE == 0 and bool((row == k).all()) for k, row in enumerate(rows))


def test_room_without_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert torch.equal(passes.room(passes.PAGE, torch.float32), torch.zeros(passes.PAGE))


@given(st.integers(1, 1 << 27))
def test_a_stretch_goes_in_few_messages_of_about_the_same_size(count: int) -> None:
    size = exchange._message(count)
    parts = -(-count // size)
    assert min(count, 2 * exchange.MESSAGE // 3) <= size <= 3 * exchange.MESSAGE // 2
    assert count - size * (parts - 1) > size - parts  # the last one is not a crumb


def test_any_flipped_bit_is_seen() -> None:
    x = numbers(64)
    before = passes.look(x).checksum
    for i in range(64):
        for bit in range(32):
            flipped = x.clone()
            flipped.view(torch.int32)[i] ^= -(2**31) if bit == 31 else 1 << bit
            assert passes.look(flipped).checksum != before


@needs_kernel
@pytest.mark.parametrize(("variant", "threads"), VARIANTS)
@pytest.mark.parametrize("nodes", [1, 2, 5])
@pytest.mark.parametrize("whole", [1.0, 0.7])
@pytest.mark.parametrize("negative", [False, True])
def test_a_mean_of_the_kernel_is_the_mean_of_torch(
    variant: str, threads: int, nodes: int, whole: float, negative: bool
) -> None:
    assert KERNEL is not None
    shares = [(k + 1) / 15 for k in range(nodes)]
    for n in (1, 1023, 1025, LARGE):
        rows = list(numbers(nodes, n).unbind())
        for row in rows:
            row[:1] = -0.0
        expected = passes._mean([row.clone() for row in rows], shares, whole, negative)
        where = cpu.addresses(rows), array("f", shares), whole, negative, rows[0].data_ptr(), n
        KERNEL.mean_at(*where, variant=variant, threads=threads)
        assert same(rows[0], expected)


@needs_kernel
def test_this_torch_adds_multiples_in_a_known_way() -> None:
    assert passes._fused() is not None


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
    states: list[State] = [{} for _ in pieces]
    others: list[State] = [{} for _ in pieces]
    took = []
    for turn in range(3):
        rows = list(numbers(3, length, seed=turn).unbind())
        mean = passes._mean([row.clone() for row in rows], shares, whole, False)
        _step(rule, cut(theirs), cut(mean), others, more)
        took.append(passes.descend(rule, ours, states, more, rows, shares, whole, pieces))
        if not took[-1]:  # the first step makes the state
            form = _Sum(rows, shares, whole)
            form.form(0, length)
            _step(rule, cut(ours), cut(rows[0]), states, more)
        assert same(ours, theirs)
    for state, other in zip(states, others, strict=True):
        assert state.keys() == other.keys()
        assert all(same(state[key], other[key]) for key in state)
    assert took[1:] == [True, True]


def test_what_the_kernel_cannot_do_is_left_to_torch() -> None:
    x, row, whole = numbers(4), [numbers(4)], [(0, 4)]
    momentum: list[State] = [{"momentum_buffer": numbers(4)}]
    own = {"lr": torch.full((4,), 0.5), "momentum": 0.9}
    assert not passes.descend(OUTER["nesterov"], x, momentum, own, row, [1.0], 1.0, whole)
    assert not passes.descend(OUTER["adam"], x, [{}], {"lr": 0.5}, row, [1.0], 1.0, whole)
    assert not passes.descend(OUTER["avg"], x.double(), [{}], {}, [row[0].double()], [1.0], 1.0, whole)
