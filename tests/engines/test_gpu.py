"""The simulation on a CUDA device: as on the CPU, and repeatable."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tailopt
from tailopt.algorithms import ALGORITHMS
from tests.engines import nodes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def model() -> nn.Module:
    """No bias before BatchNorm: its gradient is rounding noise, which a lower threshold lifts to full steps."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 9, bias=False), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 3)).double()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0].double()) - batch[1].double()).square().mean()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_as_on_the_cpu(name: str) -> None:
    def run(device: str) -> tailopt.Result:
        return tailopt.simulate(
            model(),
            nodes.algorithm(name),
            loss=loss,
            batches=nodes.batches,
            nodes=3,
            rounds=4,
            local_steps=3,
            average=True,
            device=device,
            progress=False,
        )

    here, there, again = run("cpu"), run("cuda"), run("cuda")
    for p, q, r in zip(*(result.model.parameters() for result in (here, there, again)), strict=True):
        assert q.is_cuda and torch.equal(q, r)
        torch.testing.assert_close(p, q.cpu(), rtol=1e-9, atol=1e-9)
