"""Local steps of real nodes: which of them count, and what nodes that took different numbers of them make of it."""

from __future__ import annotations

import contextlib
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import tailopt
from tailopt.records.checkpoints import digest
from tests.distributed import forked

pytest.importorskip("resource", reason="processes are forked")

HERE = "tests.distributed.test_steps"


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


# ---- nodes that took different numbers of steps ----


def uneven(rank: int, agreed: bool) -> dict[str, Any]:
    """`synchronize()` after 3 steps on node 0 and after 5 on the others, twice; then two whole rounds."""
    net = model()
    settings: dict[str, Any] = {"local_steps": 6, "model": net, "rounds": 4, "timeout": 10.0}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if agreed:
            settings.pop("model")
            algorithm = tailopt.algorithm("avg-biclip", ilr=0.05, i_u=1.0, i_d=0.9)
            opt = tailopt.NestedOptimizer.from_algorithm(net, algorithm, **settings)
        else:
            inner = tailopt.BiClip(net.parameters(), lr=0.05, u=1.0, d=0.9)
            opt = tailopt.NestedOptimizer(inner, **settings)
        for part in (3 if rank == 0 else 5, 3 if rank == 0 else 5, 6, 6):
            for _ in range(part):
                x = torch.randn(8, 3, generator=torch.Generator().manual_seed(opt.total_steps + 50 * rank))
                opt.zero_grad()
                (net(x).squeeze(-1) - x.sum(1)).square().mean().backward()
                opt.step()
            opt.synchronize()
    return {
        "digest": digest(net.state_dict()),
        "steps": [row["steps"] for row in opt.history],
        "excluded": [row["excluded"] for row in opt.history],
        "taken": opt._records.steps_before_round,
        "warned": [str(w.message) for w in caught],
    }


@pytest.mark.parametrize("agreed", [True, False], ids=["algorithm", "own optimizer"])
def test_steps_are_recorded_and_each_nodes_bound_follows_its_own(server: forked.Server, agreed: bool) -> None:
    """d = 0.9 u: a displacement is nearly at its bound, so that the bound of 3 steps would exclude 5 of them."""
    ends = server.run(f"{HERE}:uneven", 3, agreed=agreed)
    assert [end.status for end in ends] == [0] * 3, [end.said for end in ends]
    for end in ends:
        value = end.value
        assert value["digest"] == ends[0].value["digest"]
        assert value["steps"] == [[3, 5, 5], [3, 5, 5], [6, 6, 6], [6, 6, 6]]
        assert value["excluded"] == [[], [], [], []]
        assert value["taken"] == [18, 22, 22]
        (said,) = value["warned"]  # once for the node, not in every round
        assert said.startswith("Node 0 took 3 local steps in round 1, where 5 are usual.")


# ---- nodes that train different parameters ----


def restructured(rank: int, what: str, who: list[int]) -> None:
    """After the first round some nodes change what they train."""
    net = model()
    extra = nn.Parameter(torch.ones(3))
    groups = [{"params": [p], "lr": 0.01 * (k + 1)} for k, p in enumerate(net.parameters())]
    opt = tailopt.NestedOptimizer(
        tailopt.BiClip(groups, u=1.0, d=0.5), local_steps=2, model=net, rounds=6, timeout=10.0
    )
    while not opt.finished:
        if opt.node.round == 1 and rank in who and opt.total_steps == 2:
            if what == "frozen":
                next(net.parameters()).requires_grad_(False)
            elif what == "group":
                opt.add_param_group({"params": [extra]})
        opt.zero_grad()
        x = torch.randn(8, 3)
        ((net(x).squeeze(-1) - x.sum(1)).square().mean() + extra.square().sum()).backward()
        opt.step()


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("frozen", r"entry 0: it has .*0.bias.*0.weight"),
        ("group", r"entry 4: .*float32\[3\], which is not synchronised"),
    ],
)
def test_what_only_one_node_trains_ends_the_run_on_all(server: forked.Server, what: str, said: str) -> None:
    for end in server.run(f"{HERE}:restructured", 3, what=what, who=[1]):
        assert end.status == 1
        words = "Disagreement: Round 2: Node 1 disagrees with node 0 on parameters that train, "
        assert re.search(words + said, end.said), end.said


def test_freezing_on_all_nodes_is_fine_and_adding_is_refused(server: forked.Server) -> None:
    frozen = server.run(f"{HERE}:restructured", 2, what="frozen", who=[0, 1])
    assert [end.status for end in frozen] == [0, 0], [end.said for end in frozen]
    for end in server.run(f"{HERE}:restructured", 2, what="group", who=[0, 1]):
        assert end.status == 1
        assert re.search(
            r"ValueError: Round 2: group 4: float32\[3\], which is not synchronised: it was added", end.said
        )
