"""Local steps of real nodes: which of them count, and what nodes that took different numbers of them make of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tailopt
from tailopt.records.checkpoints import digest
from tests.engines import forked

pytest.importorskip("resource", reason="processes are forked")

HERE = "tests.engines.test_steps"


@pytest.fixture(scope="module")
def server() -> Iterator[forked.Server]:
    with forked.server() as running:
        yield running


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


class Interrupted(Exception):
    """What a user's closure may raise, and the loop around it catches."""


# ---- a step that raises ----


def interrupted(rank: int, fails_in: int, where: str) -> dict[str, Any]:
    """Three rounds of four steps; on node 1 one step of round 2 fails first and is taken again."""
    net = model()
    inner = tailopt.BiClip(net.parameters(), lr=0.05, u=1.0, d=0.01)
    opt = tailopt.NestedOptimizer(inner, local_steps=4, model=net, rounds=3, timeout=10.0)
    taken, failed = 0, 0

    def fail_once(here: str) -> None:
        nonlocal failed
        if (rank, where, taken, failed) == (1, here, 4 + fails_in - 1, 0):
            failed += 1
            raise Interrupted

    step = inner.step

    def step_or_fail(closure: Any = None) -> Any:
        fail_once("inner step")
        return step(closure)

    inner.step = step_or_fail  # type: ignore[method-assign]
    while not opt.finished:
        source = torch.Generator().manual_seed(100 * rank + taken)
        x = torch.randn(8, 3, generator=source)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            fail_once("closure")
            opt.zero_grad()
            loss = (net(x).squeeze(-1) - x.sum(1)).square().mean()
            loss.backward()
            return loss

        with contextlib.suppress(Interrupted):
            opt.step(closure)
            taken += 1
    return {"digest": digest(net.state_dict()), "taken": taken, "failed": failed, "rounds": len(opt.history)}


@pytest.mark.parametrize("where", ["closure", "inner step"])
@pytest.mark.parametrize("fails_in", [4, 2], ids=["last step", "earlier step"])
def test_a_step_that_raised_does_not_count(server: forked.Server, fails_in: int, where: str) -> None:
    """Counted before it was taken, the last one was passed over and the round never ended; an earlier one was lost."""
    ends = server.run(f"{HERE}:interrupted", 2, 40.0, fails_in=fails_in, where=where)
    assert [end.status for end in ends] == [0, 0], [end.said for end in ends]
    clean = server.run(f"{HERE}:interrupted", 2, 40.0, fails_in=100, where=where)
    assert ends[1].value["failed"] == 1
    for end in ends:
        assert (end.value["taken"], end.value["rounds"]) == (12, 3)
        assert end.value["digest"] == clean[0].value["digest"]
