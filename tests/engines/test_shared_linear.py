"""Linear layers of many configurations as one product: values and gradients of torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from tailopt.engines.shared_linear import folding_linear_layers


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 3), (2, 5, 3)])
def test_without_vmap_it_is_torchs_layer(shape: tuple[int, ...], bias: bool) -> None:
    source = torch.Generator().manual_seed(0)

    def leaf(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=source, dtype=torch.float64).requires_grad_()

    inputs = [leaf(*shape), leaf(4, 3), *([leaf(4)] if bias else [])]
    expected = linear(*inputs)
    wanted = torch.autograd.grad(expected.sin().sum(), inputs)
    with folding_linear_layers():
        found = linear(*inputs)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.sin().sum(), inputs), wanted)


@pytest.mark.parametrize("bias", [True, False])
def test_stacked_weights_on_one_input(bias: bool) -> None:
    source = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, generator=source, dtype=torch.float64)
    weights = torch.randn(7, 4, 3, generator=source, dtype=torch.float64).requires_grad_()
    biases = torch.randn(7, 4, generator=source, dtype=torch.float64).requires_grad_()
    stacked = [weights, biases] if bias else [weights]
    expected = torch.stack([linear(x, *(t[i] for t in stacked)) for i in range(7)])
    with folding_linear_layers():
        found = torch.vmap(lambda *own: linear(x, *own))(*stacked)
    torch.testing.assert_close(found, expected)
    wanted = torch.autograd.grad(expected.sin().sum(), stacked)
    torch.testing.assert_close(torch.autograd.grad(found.sin().sum(), stacked), wanted)
