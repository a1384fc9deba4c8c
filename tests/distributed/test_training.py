"""The training loop of `tailopt train`, called on a node of its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import tailopt
from tailopt.distributed.training import TrainingPlan, train
from tests.distributed import forked

pytest.importorskip("resource", reason="processes are forked")

HERE = "tests.distributed.test_training"


def modes_of_a_run(rank: int) -> dict[str, list[bool]]:
    """Two rounds, evaluated after each, of a model with a frozen BatchNorm: its modes during and after training."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3).eval(), nn.Linear(3, 1))
    seen: dict[str, list[bool]] = {"training": [], "evaluation": []}

    def loss(net: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        seen["training"] += [net.training, net[1].training]  # type: ignore[index]
        return (net(batch[0]) - batch[1]).square().mean()

    def evaluate(net: nn.Module) -> dict[str, float]:
        seen["evaluation"] += [module.training for module in net.modules()] + [torch.is_grad_enabled()]
        return {"weights": float(next(net.parameters()).sum())}

    algorithm = tailopt.algorithm("avg-sgd", ilr=0.1)
    data = [TensorDataset(torch.randn(8, 2), torch.randn(8, 1))]
    plan = TrainingPlan(loss=loss, data=data, rounds=2, local_steps=2, batch_size=4, evaluate=evaluate)
    train(model, algorithm, plan, timeout=10.0)
    return {**seen, "afterwards": [module.training for module in model.modules()]}


def test_a_frozen_module_keeps_its_mode(server: forked.Server) -> None:
    (end,) = server.run(f"{HERE}:modes_of_a_run", nodes=1)
    assert end.status == 0, end.said
    assert end.value["training"] == [True, False] * 4
    assert not any(end.value["evaluation"]) and len(end.value["evaluation"]) == 10
    assert end.value["afterwards"] == [True, True, False, True]
