"""New weights that change on their way or in memory: noticed in the next header, named by pair, and loaded again."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tailopt
from tailopt import faults
from tailopt.distributed.gloo import GlooTransport
from tailopt.records import checkpoints
from tests.distributed import forked

pytest.importorskip("resource", reason="processes are forked")

HERE = "tests.distributed.test_weights"
NODES, ROUNDS, STEPS = 3, 6, 2


class Flipping(GlooTransport):
    """Flips a bit of the weights that this node sends to another one, or of its own after it sent them."""

    opt: tailopt.NestedOptimizer
    flips: dict[int, int] = {}  # round -> receiver

    async def exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        again = not all(t.numel() for t in outgoing)  # to the nodes that loaded others
        receiver = None if again else self.flips.pop(self.opt.node.round + 1, None)
        if receiver is not None and receiver != self.node:
            outgoing = [flipped(t.clone()) if k == receiver else t for k, t in enumerate(outgoing)]
        await super().exchange(outgoing, incoming)
        if receiver == self.node:
            flipped(outgoing[self.node - 1])  # the node's own memory, after it was sent


def flipped(weights: Tensor) -> Tensor:
    weights.view(torch.int32)[5] ^= 1 << 20
    return weights


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 6000), nn.Tanh(), nn.Linear(6000, 3))


def trained(
    rank: int,
    owner: int = 0,
    flips: dict[str, int] | None = None,
    run: str | None = None,
    algorithm: str = "diloco",
    middle: int = 0,
    not_a_number: int | None = None,
) -> dict[str, Any]:
    """Train; the owner's weights change on the way to a receiver at the ends of some rounds."""
    net = model()
    settings = {"ilr": 0.01, "olr": 0.7, "momentum": 0.9, "weight_decay": 0.1, "ieps": 1e-4}
    if algorithm == "adam2":
        settings = {"ilr": 0.01, "olr": 0.1, "ieps": 1e-4, "oeps": 1e-3}
    keeping = {"run": run, "resume": True, "keep": 99} if run is not None else {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt = tailopt.NestedOptimizer.from_algorithm(
            net, tailopt.algorithm(algorithm, **settings), local_steps=STEPS, rounds=ROUNDS, timeout=10.0, **keeping
        )
        if rank == owner and flips:
            transport = opt.node.exchange.transport
            opt.node.exchange.transport = faulty = Flipping.replacing(transport)
            faulty.opt, faulty.flips = opt, {int(t): receiver for t, receiver in flips.items()}
        if not_a_number is not None and rank == 2:
            faults.inject(opt, faults.NotANumber({not_a_number}))
        while not opt.finished:
            t = opt.node.round + 1
            for step in range(STEPS):
                source = torch.Generator().manual_seed(1000 * t + 10 * rank + step)
                x, y = torch.randn(8, 7, generator=source), torch.randn(8, 3, generator=source) + rank
                opt.zero_grad()
                ((net(x) - y).square().mean() * 0.02).backward()
                opt.step()
                if t == middle and step == 0:
                    opt.checkpoint()
    return {
        "digest": checkpoints.digest(net.state_dict()),
        "excluded": [row["excluded"] for row in opt.history],
        "warned": [str(w.message) for w in caught],
        "moment": str(opt.node.second_moment.sum().item()) if opt.node.second_moment is not None else "",
    }


def agreed(ends: list[forked.End]) -> dict[str, Any]:
    """All nodes ended well, with the same weights and the same history."""
    assert [end.status for end in ends] == [0] * NODES, [end.said for end in ends]
    for key in ("digest", "excluded", "moment"):
        assert len({str(end.value[key]) for end in ends}) == 1, key
    return dict(ends[0].value)


def repaired(value: dict[str, Any], t: int) -> dict[str, Any]:
    """A result without the one warning about weights that were loaded again."""
    (said,) = value["warned"]
    assert said == (
        f"Node 2 loaded other weights than node 0 sent at the end of round {t}; it has loaded them again. Either of "
        "them or the link between them is at fault."
    )
    return {**value, "warned": []}


@pytest.mark.parametrize(("owner", "receiver"), [(0, 2), (2, 0)])
def test_a_flipped_bit_toward_one_node_excludes_it_for_a_round(
    server: forked.Server, owner: int, receiver: int
) -> None:
    ends = server.run(f"{HERE}:trained", NODES, owner=owner, flips={3: receiver})
    value = agreed(ends)
    assert [len(excluded) for excluded in value["excluded"]] == [0, 0, 0, 1, 0, 0]
    (excluded,) = value["excluded"][3]
    assert (excluded["node"], excluded["tensor"]) == (receiver, f"weights of node {owner}")
    for end in ends:
        (said,) = end.value["warned"]
        assert said == (
            f"Round 4 goes on without node {receiver}: it began from other weights of node {owner} than were sent; "
            "either of the two nodes or the link between them is at fault."
        )


def test_a_bit_that_flips_in_the_owners_memory_is_its_own_fault(server: forked.Server) -> None:
    """The outer step of the next round must not start from it."""
    value = agreed(server.run(f"{HERE}:trained", NODES, owner=1, flips={3: 1}))
    (excluded,) = value["excluded"][3]
    assert (excluded["node"], excluded["tensor"]) == (1, "weights of node 1")
    # the same node is left out of the same round for another reason: the bits are the same
    other = agreed(server.run(f"{HERE}:trained", NODES, owner=0, flips={3: 1}))
    assert value["digest"] == other["digest"]


def test_the_inner_state_of_that_round_is_undone(server: forked.Server) -> None:
    """AdamW's state is kept from round to round: what it saw from other weights must not stay in it."""
    value = agreed(server.run(f"{HERE}:trained", NODES, owner=0, flips={3: 2}))
    # a node that is left out of the same round for another reason begins the next one with the same state
    other = agreed(server.run(f"{HERE}:trained", NODES, not_a_number=4))
    assert [e["node"] for e in value["excluded"][3]] == [e["node"] for e in other["excluded"][3]] == [2]
    assert value["digest"] == other["digest"]


def test_the_same_pair_twice_in_a_row_ends_the_run(server: forked.Server) -> None:
    ends = server.run(f"{HERE}:trained", NODES, owner=0, flips={3: 2, 4: 2})
    for end in ends:
        assert end.status == 1
        assert (
            "Node 2 loaded other weights than node 0 sent at the end of round 4, for the second round in a" in end.said
        )


def test_a_link_that_damages_every_round_ends_the_run_although_checkpoints_repair_it(
    server: forked.Server, tmp_path: Path
) -> None:
    flips = dict.fromkeys(range(3, ROUNDS + 1), 2)
    for end in server.run(f"{HERE}:trained", NODES, owner=0, flips=flips, run=str(tmp_path / "run")):
        assert end.status == 1
        assert (
            "Node 2 loaded other weights than node 0 sent at the end of round 4, for the second round in a" in end.said
        )


def test_two_nodes_with_other_weights_get_them_from_whoever_holds_the_right_ones(server: forked.Server) -> None:
    """Node 1 lacks a partition of node 0's, node 2 one of node 1's: no node is wholly sound but node 0."""
    value = agreed(server.run(f"{HERE}:crossed", NODES))
    assert [sorted(e["node"] for e in excluded) for excluded in value["excluded"]] == [[], [], [], [1, 2], [], []]


def crossed(rank: int) -> dict[str, Any]:
    return trained(rank, rank, {"3": rank + 1} if rank < 2 else None)


def test_two_pairs_in_turns_do_not_end_it(server: forked.Server) -> None:
    value = agreed(server.run(f"{HERE}:trained", NODES, owner=0, flips={2: 1, 3: 2, 4: 1}))
    assert [[e["node"] for e in excluded] for excluded in value["excluded"]] == [[], [], [1], [2], [1], []]


@pytest.mark.parametrize("keeps", [False, True], ids=["without a run folder", "with checkpoints"])
def test_after_the_last_round_all_nodes_hold_the_same_weights(
    server: forked.Server, keeps: bool, tmp_path: Path
) -> None:
    run = {"run": str(tmp_path / "run")} if keeps else {}
    value = agreed(server.run(f"{HERE}:trained", NODES, owner=0, flips={ROUNDS: 2}, **run))
    clean = agreed(server.run(f"{HERE}:trained", NODES))
    assert repaired(value, ROUNDS) == clean


def test_checkpoints_hold_the_weights_that_were_sent(server: forked.Server, tmp_path: Path) -> None:
    """A node that writes a checkpoint loads them again first, and is sound for the next round."""
    value = agreed(server.run(f"{HERE}:trained", NODES, owner=0, flips={3: 2}, run=str(tmp_path / "run")))
    clean = agreed(server.run(f"{HERE}:trained", NODES))
    assert repaired(value, 3) == clean
    assert "Node 2 loaded other weights than node 0 sent" in (tmp_path / "run" / "log.txt").read_text()


def test_local_steps_from_other_weights_are_left_out_after_a_checkpoint_in_their_middle(
    server: forked.Server, tmp_path: Path
) -> None:
    """The weights are whole again, the steps that began from others are not."""
    run = {"run": str(tmp_path / "run"), "middle": 4}
    settings = {"owner": 0, "flips": {3: 2}, "algorithm": "adam2"}
    clean = agreed(server.run(f"{HERE}:trained", NODES, algorithm="adam2"))
    ends = server.run(f"{HERE}:trained", NODES, **settings, **run)
    assert agreed(ends)["digest"] == clean["digest"]  # the checkpoint after round 3 has made it good
    folders = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert "round-000003-step-0001" in folders


def test_the_second_moment_that_travels_is_compared_too(server: forked.Server) -> None:
    """adam2 sends it after the weights: the second exchange of a round."""
    value = agreed(server.run(f"{HERE}:moment_flipped", NODES))
    clean = agreed(server.run(f"{HERE}:trained", NODES, algorithm="adam2"))
    assert value["digest"] == clean["digest"] and value["moment"] == clean["moment"]


class FlippingMoment(Flipping):
    """Flips a bit of the second thing that this node sends in round 3."""

    seen = 0

    async def exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        if self.opt.node.round + 1 == 3:
            self.seen += 1
            if self.seen == 2:
                outgoing = [flipped(t.clone()) if k == 2 else t for k, t in enumerate(outgoing)]
        await GlooTransport.exchange(self, outgoing, incoming)


def moment_flipped(rank: int) -> dict[str, Any]:
    global Flipping
    Flipping = FlippingMoment  # type: ignore[misc]
    return trained(rank, 0, {"99": 0}, algorithm="adam2")
