"""Norms over fixed blocks: what they are, and that threads do not change a bit of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tailopt.rounds.block_norm import BLOCK, norm, sum_of_squares


def random(n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    source = torch.Generator().manual_seed(n)
    return (torch.randn(n, generator=source) * torch.exp(3 * torch.randn(n, generator=source))).to(dtype)


def test_a_block_has_32768_elements() -> None:
    assert BLOCK == 32_768


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17])
def test_sums_of_blocks_are_added_in_order(n: int, dtype: torch.dtype) -> None:
    """One plain addition after another, whatever the version of Python adds up with."""
    x = random(n, dtype)
    total = 0.0
    for start in range(0, n, BLOCK):
        total += (x[start : start + BLOCK].double() ** 2).sum().item()
    assert sum_of_squares(x) == total
    assert norm([x]) == math.sqrt(total)


def test_tensors_are_added_in_order() -> None:
    tensors = [random(n) for n in (5, BLOCK + 3, 100, 7, 11, 13)]
    total = 0.0
    for t in tensors:
        total += sum_of_squares(t)
    assert norm(iter(tensors)) == math.sqrt(total)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e100, 1e100), max_size=20))
def test_it_is_the_norm(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float64)
    wanted = math.sqrt(math.fsum(v * v for v in values))
    assert norm([x]) == pytest.approx(wanted, rel=1e-14)
    assert norm([x[:3], x[3:].reshape(1, -1)]) == pytest.approx(wanted, rel=1e-14)


def test_shapes_and_strides_do_not_matter() -> None:
    x = random(60).reshape(3, 4, 5)
    assert norm([x]) == norm([x.reshape(-1)])
    assert norm([x.transpose(0, 2)]) == norm([x.transpose(0, 2).contiguous()])


def test_nothing_has_no_length() -> None:
    assert norm([]) == 0.0
    assert norm([torch.zeros(0), torch.zeros(3)]) == 0.0


@pytest.mark.parametrize(("bad", "wanted"), [(math.nan, math.nan), (math.inf, math.inf), (-math.inf, math.inf)])
def test_what_is_not_finite_stays_so(bad: float, wanted: float) -> None:
    found = norm([torch.ones(3), torch.tensor([1.0, bad])])
    assert found == wanted or (math.isnan(found) and math.isnan(wanted))


def test_float32_numbers_of_any_size_have_a_norm() -> None:
    assert norm([torch.full((4,), 1e38)]) == pytest.approx(2e38)
    assert norm([torch.full((4,), 1e-40)]) == pytest.approx(2e-40, rel=1e-4)


def test_a_block_needs_no_gradient() -> None:
    assert norm([torch.nn.Parameter(torch.tensor([3.0, 4.0]))]) == 5.0


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_the_number_of_threads_changes_no_bit(threads: Callable[[int], None]) -> None:
    tensors = [random(n) for n in (300_003, 32_768, 65_537, 11)]
    found = set()
    for n in (1, 2, 3, 4):
        threads(n)
        assert torch.get_num_threads() == n
        found.add(norm(tensors))
    assert len(found) == 1
