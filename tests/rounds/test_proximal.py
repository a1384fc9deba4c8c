"""The proximal term: its arithmetic, and values that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tailopt.rounds.policy import RoundPolicy
from tailopt.rounds.proximal import proximal_gradient


def tensors(dtype: torch.dtype, shape: tuple[int, ...] = (50,)) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    g, x, start = (torch.randn(shape, generator=source, dtype=torch.float64).to(dtype) for _ in range(3))
    return g, x, start


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_rounded_after_every_operation(dtype: torch.dtype) -> None:
    g, x, start = tensors(dtype)
    moved = [a - b for a, b in zip(x, start, strict=True)]
    wanted = torch.stack([a + b * 0.3 for a, b in zip(g, moved, strict=True)])  # tensor operations of one number each
    assert torch.equal(proximal_gradient(g, x, start, 0.3), wanted)
    assert proximal_gradient(g, x, start, 0.3).data_ptr() != g.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_are_rounded_once(dtype: torch.dtype) -> None:
    g, x, start = tensors(dtype)
    wide = g.double() + 0.25 * (x.double() - start.double())  # exact in fp32 up to its own rounding
    found = proximal_gradient(g, x, start, 0.25)
    assert found.dtype == dtype
    # half a unit of the narrow type, and the roundings in fp32
    unit = torch.finfo(dtype).eps * torch.maximum(wide.abs(), torch.tensor(torch.finfo(dtype).smallest_normal))
    assert bool(((found.double() - wide).abs() <= unit * 0.5001 + 1e-6 * (g.abs() + x.abs()).double()).all())
    term = 0.25 * (x - start)  # rounded twice in the narrow type, as it must not be
    assert not torch.equal(found, g + term)


def test_where_a_node_starts_it_adds_nothing() -> None:
    g, x, _ = tensors(torch.float32)
    assert torch.equal(proximal_gradient(g, x, x, 1e6), g)


def test_a_sparse_gradient_becomes_dense() -> None:
    twice, rows = torch.tensor([[1, 1]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    g = torch.sparse_coo_tensor(twice, rows, (3, 2), check_invariants=True)
    found = proximal_gradient(g, torch.ones(3, 2), torch.zeros(3, 2), 0.5)
    assert found.tolist() == [[0.5, 0.5], [4.5, 6.5], [0.5, 0.5]]


def test_complex_parameters_start_from_pairs_of_reals() -> None:
    g, x = torch.tensor([1 + 1j, 2.0]), torch.tensor([3 + 2j, 1j])
    start = torch.view_as_real(torch.tensor([1 + 0j, 0j]))
    assert torch.equal(proximal_gradient(g, x, start, 0.5), torch.tensor([2 + 2j, 2 + 0.5j]))


def test_one_start_for_all_nodes() -> None:
    g, x, start = tensors(torch.float32, (4, 3, 5))
    found = proximal_gradient(g, x, start[:1], 0.7)
    assert all(torch.equal(found[k], proximal_gradient(g[k], x[k], start[0], 0.7)) for k in range(4))


@pytest.mark.parametrize("mu", [-0.1, float("nan"), float("inf"), True, False, "0.1", None])
def test_what_is_no_factor_is_refused(mu: Any) -> None:
    with pytest.raises(ValueError, match=rf"Invalid proximal: {mu!r}; need a finite number of 0 or more.* Give 0 for"):
        RoundPolicy(rounds=1, local_steps=1, inner_state="reset", proximal=mu)


def test_a_policy_without_it_is_described_as_before_there_was_one() -> None:
    policy = RoundPolicy(rounds=1, local_steps=1, inner_state="reset", nodes=2, proximal=0)
    assert policy.as_config()["proximal"] is None, "config.toml leaves it out"
    given = RoundPolicy(rounds=1, local_steps=1, inner_state="reset", nodes=2, proximal=1)
    assert given.as_config()["proximal"] == 1.0 and isinstance(given.proximal, float)
