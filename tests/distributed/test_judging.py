"""What a node decides about its partition of a displacement."""

from __future__ import annotations

import math

import pytest
import torch

from tailopt.distributed.exchange_types import JudgingCriteria
from tailopt.distributed.flat_kernels import checksum_and_max
from tailopt.distributed.interfaces import blocking
from tailopt.distributed.judging import Displacement, Judge, RoundContext
from tailopt.distributed.layout import Layout
from tailopt.distributed.node_bounds import NodeBounds
from tailopt.distributed.partition import Partition
from tailopt.distributed.verdicts import Verdict
from tailopt.native import library
from tailopt.rounds.guard import NOT_FINITE, Bound, Exclusion
from tailopt.rounds.participants import Participants

NAMES, SHAPES = ["a", "b"], [torch.Size([5]), torch.Size([2, 2])]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("kind", [None, "coordinate", "norm", "tensor norm"])
@pytest.mark.parametrize("in_c", [True, False])
def test_an_infinite_bound_lets_no_infinity_through(
    in_c: bool, kind: str | None, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither from a node whose settings clip nothing, nor where this node's own settings are those that differ."""
    if not in_c:
        monkeypatch.setattr(library, "loaded", lambda: None)
    partition = Partition(Layout((5, 4), nodes=1), 0, SHAPES)
    judge = Judge(partition, NAMES, [torch.float32] * 2, None)
    row = torch.zeros(len(partition))
    context = RoundContext(
        t=1,
        participants=Participants([0], {0: 1.0}),
        headers=[],
        x=torch.ones(len(partition)),
        buffers=[{}],
        buffers_before={},
        bounds=NodeBounds({0: Bound(kind, math.inf, 0.0, 1)}),
        differing=[],
        criteria=JudgingCriteria(),
    )

    def verdict() -> list[float] | None:
        found = judge.verdict(0, Displacement(row, checksum_and_max(row), None), context, NAMES)
        return None if found is None else [float(x) for x in found]

    async def gather(row: torch.Tensor) -> list[float]:
        return partition.sums_by_tensor(partition.block_sums(row)[None])

    partition.segments_of_partition(row)[1][2] = 3e38
    verdicts: dict[int, Exclusion] = {}
    assert verdict() is None
    blocking(judge.judge_norms([row], gather, context, verdicts))
    assert verdicts == {}
    partition.segments_of_partition(row)[1][2] = bad
    found = verdict()
    assert found is not None and found[0] == Verdict.NOT_FINITE
    verdicts[0] = Exclusion(0, "b", bad, None, NOT_FINITE)  # as all nodes have gathered it
    blocking(judge.judge_norms([row], gather, context, verdicts))
    assert verdicts[0].reason == NOT_FINITE
