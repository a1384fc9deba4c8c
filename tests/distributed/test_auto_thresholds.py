"""Thresholds that are "auto" on real nodes: the bits of the simulation, at both levels, stopped and resumed or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tailopt
from tailopt import faults
from tailopt.distributed.errors import Disagreement
from tailopt.distributed.header import ExchangeAborted
from tailopt.records.checkpoints import digest
from tailopt.records.folder import Run
from tailopt.seeds import generator
from tests.distributed import forked

pytest.importorskip("resource", reason="processes are forked")

HERE = "tests.distributed.test_auto_thresholds"
NODES, ROUNDS, STEPS = 3, 5, 9  # 27 gradients in a round: two rounds of calibration
BOTH = {"ilr": 0.01, "olr": 0.02, "i_u": "auto", "i_d": "auto", "o_u": "auto", "o_d": "auto"}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "elements": ("bi2clip", BOTH, {}),
    "momentum": (
        "bi2clip",
        {**BOTH, "momentum": 0.5, "inner_momentum": 0.9, "scale": "follow", "weight_decay": 0.1, "inner_state": "keep"},
        {},
    ),
    "a norm": ("bi2clip-l2", {**BOTH, "o_d": 0}, {}),
    "norms, two of them": ("bi2clip-l2", {**BOTH, "scope": "tensor"}, {"participants": 2}),
    "own loop": ("bi2clip", {**BOTH, "i_u": 0.5, "i_d": 0.0}, {}),
    "lost": ("avg-biclip", {k: v for k, v in BOTH.items() if k[0] == "i"}, {}),
}
LOST = {1: {0}, 2: {0, 1, 2}, 4: {2}}  # in round 2 nothing arrives


def model(case: str) -> nn.Module:
    """A parameter without a gradient; and once a tensor that is cut between nodes, and sampled for its histogram."""
    torch.manual_seed(0)
    width = 8300 if case == "elements" else 5
    net = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1))
    net.unused = nn.Parameter(torch.ones(3))
    return net


def batches(node: int, round: int, step: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 8, generator=source), torch.randn(4, 1, generator=source) + node


def loss(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (net(batch[0]) - batch[1]).square().mean()


def lost(case: str) -> dict[int, set[int]]:
    return LOST if case == "lost" else {}


def trained(
    case: str, node: int, stop: tuple[int, int] | None = None, **settings: Any
) -> tuple[dict[int, str], tailopt.NestedOptimizer]:
    """The digest of the model after every round; stop: leave after a checkpoint at (round, step)."""
    name, given, more = CASES[case]
    net, seen = model(case), dict[int, str]()
    settings |= {"local_steps": STEPS, "rounds": ROUNDS, **more}
    settings["loggers"] = [lambda row: seen.__setitem__(row["round"], digest(net.state_dict()))]
    if case == "own loop":
        inner = tailopt.BiClip(net.parameters(), lr=given["ilr"], u=given["i_u"], d=given["i_d"])
        outer = {key: given[key] for key in ("olr", "o_u", "o_d")}
        opt = tailopt.NestedOptimizer(inner, "biclip", outer, model=net, **settings)
    else:
        opt = tailopt.NestedOptimizer.from_algorithm(net, tailopt.algorithm(name, **given), **settings)
    faults.inject(opt, faults.Drop({t for t, who in lost(case).items() if node in who}))
    begun = opt.resumed.step if opt.resumed is not None else 0
    while not opt.finished:
        t = opt.node.round + 1
        for step in range(begun, STEPS):
            opt.zero_grad()
            loss(net, batches(node, t, step, generator(0, "batch", t, node, step))).backward()
            opt.step()
            if stop == (t, step):
                opt.checkpoint()
                return seen, opt
        begun = 0
    return seen, opt


def every_case(rank: int, out: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case in CASES:
        seen, opt = trained(case, rank, run=f"{out}/{case}" if case == "elements" else None)
        found[case] = {"digests": seen, "rows": [row["thresholds"] for row in opt.history], "said": opt.thresholds}
    seen = trained("momentum", rank, (2, 3), run=f"{out}/stopped")[0]
    seen |= trained("momentum", rank, (4, 6), run=f"{out}/stopped", resume=True)[0]
    last, opt = trained("momentum", rank, run=f"{out}/stopped", resume=True)
    found["resumed"] = {"digests": {**seen, **last}, "rows": [row["thresholds"] for row in opt.history]}
    return found


def simulated(case: str, **settings: Any) -> tuple[dict[str, str], tailopt.Result]:
    name, given, more = CASES[case]
    seen: dict[str, str] = {}
    result = tailopt.simulate(
        model(case),
        tailopt.algorithm(name, **given),
        loss=loss,
        batches=batches,
        nodes=NODES,
        rounds=ROUNDS,
        local_steps=STEPS,
        drops=lambda t, source: lost(case).get(t, ()),
        evaluate=lambda net: seen.__setitem__(str(len(seen) + 1), digest(net.state_dict())) or {},  # type: ignore[func-returns-value]
        progress=False,
        **more,
        **settings,
    )
    return seen, result


def test_real_nodes_have_the_bits_of_the_simulation(server: forked.Server, tmp_path: Path) -> None:
    ends = server.run(f"{HERE}:every_case", NODES, out=str(tmp_path))
    assert [end.status for end in ends] == [0] * NODES, ends[0].said
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = {case: simulated(case) for case in CASES}
    finally:
        torch.set_num_threads(threads)
    expected["resumed"] = expected["momentum"]
    for case, (digests, result) in expected.items():
        rows = [row["thresholds"] for row in result.history]
        if case != "own loop":
            assert rows[1]["inner"] is None and rows[-1]["inner"] is not None, case
        for end in ends:
            found = end.value[case]
            assert found["digests"].items() <= digests.items(), case
            assert found["rows"] == rows, case
            assert case == "resumed" or found["said"] == list(result.thresholds)
    assert all(len(end.value["resumed"]["digests"]) == ROUNDS for end in ends)
    reason = expected["elements"][1].thresholds[0]
    assert (Run.open(tmp_path / "elements").path / "log.txt").read_text().count(reason) == 1


def deviates(rank: int) -> list[str]:
    """What node 1 is told when it has other settings, and when it has other numbers."""
    net = model("")
    name, given, _ = CASES["elements"]
    other = tailopt.algorithm(name, **given, scale="follow" if rank == 1 else "first")
    with pytest.raises(Disagreement) as disagreement:
        tailopt.NestedOptimizer.from_algorithm(net, other, local_steps=1, rounds=3)
    opt = tailopt.NestedOptimizer.from_algorithm(net, tailopt.algorithm(name, **given), local_steps=1, rounds=3)
    try:
        for t in range(3):
            opt.zero_grad()
            loss(net, batches(rank, t, 0, generator(0, "batch", t, rank, 0))).backward()
            opt.step()
            if rank == 1 and t == 0:  # a bit of what was gathered changes on one node
                assert opt.node.auto_thresholds.inner is not None
                state = opt.node.auto_thresholds.inner.state()
                opt.node.auto_thresholds.inner.load_state({**state, "gradients": state["gradients"] + 1})
    except ExchangeAborted as error:
        return [str(disagreement.value), str(error)]
    return []


def test_other_thresholds_on_one_node_end_the_run_on_all(server: forked.Server) -> None:
    for end in server.run(f"{HERE}:deviates", NODES):
        assert end.status == 0, end.said
        before, during = end.value
        assert before.startswith("Node 1 disagrees with node 0 on thresholds, entry 0: it has"), before
        assert during.startswith("Round 2: node 1 began with other automatic thresholds than most nodes"), during
