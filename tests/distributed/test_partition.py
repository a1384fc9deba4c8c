"""What a node holds of its partition is on the CPU, wherever the settings of the optimizers are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import tailopt
from tailopt.distributed.layout import Layout
from tailopt.distributed.partition import Partition
from tailopt.rounds.guard import Bound
from tests.distributed import forked

HERE = "tests.distributed.test_partition"
SIZES = (3, 2)


@pytest.mark.parametrize("by_param", [False, True], ids=["one for all", "one for each"])
def test_settings_on_a_device_come_to_the_cpu(by_param: bool) -> None:
    """A learning rate that is a tensor of the device could not be added to displacements, and ended the round."""
    partition = Partition(Layout(SIZES, 1), 0, [torch.Size((n,)) for n in SIZES])
    with FakeTensorMode():  # a device that is not there
        lr = torch.tensor(1e-3, device="cuda")
        value: Any = [lr, 2.0 * lr] if by_param else lr
        limit = partition.bound_by_segment(Bound("coordinate", value, 0.0, 1))
        for i in range(len(SIZES)):
            constant = limit.for_param(i).constant
            assert (constant + torch.zeros(SIZES[i])).device.type == "cpu"
    assert partition.hparams_by_segment({"eps": 1e-8, "betas": (0.9, 0.99)}) == {"eps": 1e-8, "betas": (0.9, 0.99)}


def trained(rank: int) -> list[Any]:
    """Two rounds of Adam whose learning rate is a tensor of the device, in one group and in two."""
    found = []
    for groups in (1, 2):
        torch.manual_seed(0)
        net = nn.Linear(4, 3).cuda()
        rates = [torch.tensor(1e-2 * (k + 1), device="cuda") for k in range(groups)]
        params = [list(net.parameters())[k::groups] for k in range(groups)]
        inner = torch.optim.Adam(
            [{"params": p, "lr": lr} for p, lr in zip(params, rates, strict=True)], lr=rates[0], capturable=True
        )
        opt = tailopt.NestedOptimizer(inner, local_steps=2, model=net, rounds=2, timeout=20.0)
        while not opt.finished:
            opt.zero_grad()
            net(torch.randn(8, 4, device="cuda")).square().mean().backward()
            opt.step()
        found.append([row["excluded"] for row in opt.history])
    return found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_guard_takes_a_rate_on_the_device(server: forked.Server) -> None:
    ends = server.run(f"{HERE}:trained", 2)
    assert [(end.status, end.value) for end in ends] == [(0, [[[], []], [[], []]])] * 2, [end.said for end in ends]
