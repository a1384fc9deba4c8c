"""Real nodes that are killed or stopped at random moments: the others name the right one, and the bits are the same.

A strike comes in a local step, in a message of an exchange, or while a file of a checkpoint is brought to the disk. A
seed decides which node is struck, how, and when, so that a failure can be repeated.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tailopt
from tailopt.distributed.gloo import GlooTransport
from tailopt.records import checkpoints, disk
from tests.distributed import forked

pytest.importorskip("resource", reason="processes are forked")

HERE = "tests.faults.test_random_kills"
NODES, ROUNDS, STEPS = 3, 4, 2
TOGETHER = 4  # groups of nodes that run at once
TIMEOUT = 6.0  # seconds: a dozen processes share the processors
MOMENTS = ("step", "message", "file")


@dataclass(frozen=True)
class Strike:
    """The `count`-th moment of a kind on one node."""

    node: int
    stop: bool
    moment: str
    count: int

    @classmethod
    def drawn(cls, seed: int, moments: list[dict[str, int]]) -> Strike:
        """moments: how many of each kind every node has in a run that nobody disturbs."""
        source = random.Random(seed)
        node, moment = source.randrange(NODES), MOMENTS[seed % len(MOMENTS)]
        return cls(node, source.random() < 0.4, moment, source.randint(1, moments[node][moment]))


class Counter:
    """Counts the moments of a node, and strikes at one of them."""

    def __init__(self, strike: Strike | None) -> None:
        self.strike, self.counts = strike, dict.fromkeys(MOMENTS, 0)

    def __call__(self, moment: str) -> None:
        self.counts[moment] += 1
        if self.strike is not None and (moment, self.counts[moment]) == (self.strike.moment, self.strike.count):
            os.write(1, b"struck\n")
            os.kill(os.getpid(), signal.SIGSTOP if self.strike.stop else signal.SIGKILL)


def trained(rank: int, run: str, strike: list[Any] | None = None) -> dict[str, Any]:
    """Train to the end, or to the strike."""
    counter = Counter(Strike(*strike) if strike is not None and strike[0] == rank else None)
    deliver, sync = GlooTransport.deliver, disk.sync

    async def message(transport: GlooTransport, receives: Any, sends: Any) -> None:
        counter("message")
        await deliver(transport, receives, sends)

    def file(path: Path) -> None:
        counter("file")
        sync(path)

    GlooTransport.deliver, disk.sync = message, file  # type: ignore[method-assign]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 300), nn.Tanh(), nn.Linear(300, 3))
    algorithm = tailopt.algorithm("diloco", ilr=0.01, olr=0.7, ieps=1e-4, momentum=0.9, weight_decay=0.1)
    opt = tailopt.NestedOptimizer.from_algorithm(
        net, algorithm, local_steps=STEPS, rounds=ROUNDS, timeout=TIMEOUT, run=run, resume=True
    )
    while not opt.finished:
        t = opt.node.round + 1
        for step in range(STEPS):
            source = torch.Generator().manual_seed(1000 * t + 10 * rank + step)
            x, y = torch.randn(8, 7, generator=source), torch.randn(8, 3, generator=source) + rank
            counter("step")
            opt.zero_grad()
            ((net(x) - y).square().mean() * 0.02).backward()
            opt.step()
    return {"digest": checkpoints.digest(net.state_dict()), "history": opt.history, "moments": counter.counts}


@pytest.fixture(scope="module")
def clean(server: forked.Server, tmp_path_factory: pytest.TempPathFactory) -> list[forked.End]:
    """A run that nobody disturbs."""
    ends = server.run(f"{HERE}:trained", NODES, run=str(tmp_path_factory.mktemp("clean") / "run"))
    assert [end.status for end in ends] == [0] * NODES, [end.said for end in ends]
    return ends


def survive(server: forked.Server, clean: list[forked.End], seeds: list[int], folder: Path) -> None:
    """Strike several groups of nodes at once; then all of them go on."""
    strikes = {seed: Strike.drawn(seed, [end.value["moments"] for end in clean]) for seed in seeds}
    with ExitStack() as stack:
        groups = {}
        for seed, strike in strikes.items():
            arguments = {"run": str(folder / f"{seed}"), "strike": list(vars(strike).values())}
            groups[seed] = stack.enter_context(server.start(f"{HERE}:trained", NODES, **arguments))
        for seed, nodes in groups.items():
            strike = strikes[seed]
            others = [k for k in range(NODES) if k != strike.node]
            said = lambda nodes=nodes: [nodes.said(k) for k in range(NODES)]  # noqa: E731
            assert nodes.wait(others, 60.0), (seed, strike, said())
            for k in others:
                named(seed, strike, nodes.end(k), k)
            with contextlib.suppress(ProcessLookupError):
                nodes.signal(strike.node, signal.SIGKILL)
            assert nodes.wait([strike.node], 20.0), (seed, strike, said())
    with ExitStack() as stack:
        again = {
            seed: stack.enter_context(server.start(f"{HERE}:trained", NODES, run=str(folder / f"{seed}")))
            for seed in seeds
        }
        for seed, nodes in again.items():
            nodes.wait(list(range(NODES)), 90.0)
            for k in range(NODES):
                end = nodes.end(k)
                assert end.status == 0, (seed, strikes[seed], end.said)
                assert end.value["digest"] == clean[0].value["digest"], (seed, strikes[seed])
                assert end.value["history"] == clean[0].value["history"], (seed, strikes[seed])


def named(seed: int, strike: Strike, end: forked.End, node: int) -> None:
    """A node that was not struck has ended well, or names the one that was, and no other, in its last words.

    A node without an answer from the store cannot tell its owner from the link to it, and names both ends of the link.
    """
    if end.status == 0:  # the strike came when this node had done its part
        return
    assert end.status == 1, (seed, strike, end.said)
    lost = re.findall(r"NodeLost: (.*)", end.said)
    assert lost, (seed, strike, end.said)
    words = lost[-1].replace(f"; it or the link from node {node} to it is at fault", "")
    nodes = {int(k) for k in re.findall(r"[Nn]odes? (\d+)", words)}
    assert nodes == {strike.node}, (seed, strike, lost[-1])


def test_a_few_random_strikes(server: forked.Server, clean: list[forked.End], tmp_path: Path) -> None:
    """Other ones in every run; the message has the seeds."""
    seed = random.SystemRandom().randrange(10**6)
    survive(server, clean, list(range(seed, seed + 2)), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 100, TOGETHER))
def test_a_hundred_random_strikes(server: forked.Server, clean: list[forked.End], tmp_path: Path, first: int) -> None:
    survive(server, clean, list(range(first, first + TOGETHER)), tmp_path)
