"""What a node notes of its local steps."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import tailopt
from tailopt.distributed.local_round import LocalRound
from tailopt.distributed.trainable_set import named_parameters


def local_round(lr: float | torch.Tensor) -> tuple[nn.Parameter, LocalRound]:
    p = nn.Parameter(torch.zeros(3))
    inner = tailopt.BiClip([p], lr=lr, u=1.0, d=1.0)
    return p, LocalRound(inner, [p], None, keeps_state=False, can_be_excluded=True)


@pytest.mark.parametrize("lr", [1.0, torch.tensor(1.0)])
def test_each_step_is_bounded_by_the_rate_it_was_taken_with(lr: float | torch.Tensor) -> None:
    """torch's schedulers change a learning rate that is a tensor in place."""
    p, local = local_round(lr)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(local.optimizer, 0.5)
    for k in range(3):
        p.grad = torch.ones(3)
        local.step(1, k, None)
        scheduler.step()
    assert p.detach().abs().max().item() == pytest.approx(1.75)
    assert float(local.bound(1, 0).constant) == pytest.approx(1.75)


def test_thresholds_that_each_node_would_choose_for_itself_are_refused() -> None:
    p = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match="nodes would choose different thresholds"):
        named_parameters(tailopt.BiClip([p], lr=0.1, u="auto", d="auto"), None)


def test_a_round_without_a_report_has_no_loss() -> None:
    """It would otherwise repeat the loss of the round before."""
    _, local = local_round(0.1)
    local.loss = 0.5
    local.clear(None)
    local.begin()
    assert math.isnan(local.loss)
