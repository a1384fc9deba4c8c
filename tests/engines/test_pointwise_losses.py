"""Losses from torch.nn.functional run side by side, with the numbers of a simulation."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tailopt
from tailopt.engines.pointwise_losses import LOSSES, giving_targets_copies
from tailopt.tasks.synthetic import Synthetic

DATA = Synthetic(samples=90, dimension=4, dtype=torch.float64).nodes(0, 3)
OPTIONS = {"data": DATA, "batch_size": 8, "rounds": 3, "local_steps": 2, "progress": False}


@pytest.mark.parametrize("of", [*LOSSES, functional.l1_loss, nn.MSELoss(), nn.HuberLoss(delta=0.5)])
def test_points_run_side_by_side(of: Callable[[Tensor, Tensor], Tensor]) -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return of(model(batch[0]).squeeze(-1), batch[1])

    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    found = tailopt.sweep(model, "avg-sgd", space={"ilr": [0.01, 0.1]}, seeds=1, report_seeds=0, loss=loss, **OPTIONS)
    assert found.route.name == "vmap", found.route.reason
    for trial in found.trials:
        algo = tailopt.algorithm("avg-sgd", **trial.settings)
        alone = tailopt.simulate(model, algo, loss=loss, **OPTIONS).history[-1]["loss"]
        assert trial.value("loss") == pytest.approx(alone, rel=1e-9)


@pytest.mark.parametrize("of", LOSSES)
def test_values_and_gradients_stay(of: Callable[..., Tensor]) -> None:
    x, y = torch.randn(2, 5, 3).unbind()
    x.requires_grad_()
    with giving_targets_copies():
        value = of(x, y, reduction="sum")
    assert torch.equal(value, of(x, y, reduction="sum"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about shapes that broadcast
        with giving_targets_copies():
            assert torch.equal(of(x, y[0]), of(x, y[0]))
