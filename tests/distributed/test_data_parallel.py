"""DDP across nodes is refused: found when the optimizer is built, or in the first forward pass that is trained on."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tailopt
from tests.distributed import forked

pytest.importorskip("resource", reason="processes are forked")

HERE = "tests.distributed.test_data_parallel"


def nested(model: nn.Module) -> tailopt.NestedOptimizer:
    inner = tailopt.BiClip(model.parameters(), lr=0.1, u=1.0, d=0.0)
    return tailopt.NestedOptimizer(inner, local_steps=2, model=model, timeout=10.0)


def refused(rank: int, wrapped: str) -> dict[str, Any]:
    """What a model in DDP meets, wrapped before the optimizer is built or after it."""
    torch.manual_seed(0)
    bare = nn.Linear(2, 1)
    before = bare.weight.detach().clone()
    try:
        if wrapped == "before":
            nested(DistributedDataParallel(bare))
        elif wrapped == "inside":
            nested(nn.Sequential(DistributedDataParallel(bare)))
        else:
            optimizer = nested(bare)
            pickle.loads(pickle.dumps(bare))  # the hook that looks does not keep a model from being saved
            with torch.no_grad():
                DistributedDataParallel(bare)(torch.ones(1, 2))  # nothing is trained on this
            DistributedDataParallel(bare)(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    except ValueError as error:
        return {"error": str(error), "moved": not torch.equal(before, bare.weight)}
    return {"error": "", "moved": not torch.equal(before, bare.weight)}


@pytest.mark.parametrize("wrapped", ["before", "inside", "after"])
def test_a_wrapped_model_is_refused_before_it_moves(server: forked.Server, wrapped: str) -> None:
    ends = server.run(f"{HERE}:refused", 2, 40.0, wrapped=wrapped)
    assert [end.status for end in ends] == [0, 0], [end.said for end in ends]
    for end in ends:
        assert "wrapped in DistributedDataParallel over ranks [0, 1]" in end.value["error"]
        assert "connect() of tailopt.integrations.nodes" in end.value["error"]
        assert not end.value["moved"]


def inside_one_node(rank: int) -> list[list[float]]:
    """Four ranks, two nodes of two: DDP averages over the ranks of a node, and rounds over the nodes."""
    nodes = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    ranks = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = tailopt.NestedOptimizer(inner, local_steps=2, model=model, mesh=nodes, timeout=10.0)
    wrapped, seen = DistributedDataParallel(model, process_group=ranks), []
    for _ in range(2):
        optimizer.zero_grad()
        wrapped(torch.full((1, 2), float(rank))).sum().backward()
        optimizer.step()
        seen.append(model.weight[0].tolist())
    return seen


def test_ddp_inside_one_node_is_no_fault(server: forked.Server) -> None:
    ends = server.run(f"{HERE}:inside_one_node", 4, 60.0)
    assert [end.status for end in ends] == [0] * 4, [end.said for end in ends]
    first, second = -0.5, -2.5  # the mean gradient of ranks 0 and 1, and of ranks 2 and 3
    for rank, end in enumerate(ends):
        own = first if rank < 2 else second
        assert end.value == [[own] * 2, [first + second] * 2]


def test_one_process_alone_may_be_wrapped(server: forked.Server) -> None:
    (end,) = server.run(f"{HERE}:refused", 1, 40.0, wrapped="after")
    assert end.status == 0, end.said
    assert end.value == {"error": "", "moved": True}
