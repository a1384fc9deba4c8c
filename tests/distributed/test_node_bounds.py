"""How far nodes may have moved, where they do not step with the same settings; and verdicts that mean nothing."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import tailopt
from tailopt.distributed.gloo import GlooTransport
from tailopt.distributed.header import Header, digest_of_bound
from tailopt.distributed.interfaces import blocking
from tailopt.distributed.node_bounds import CAP, NodeBounds, RoundHeaders, agreed_bounds, cap, encoded, stated_bounds
from tailopt.rounds.guard import Bound
from tests.distributed import forked

pytest.importorskip("resource", reason="processes are forked")

HERE = "tests.distributed.test_node_bounds"


class Diverging(torch.optim.SGD):
    """An outer optimizer that breaks down on one node, in one round."""

    breaks = False
    rounds = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        type(self).rounds += 1
        if self.breaks and self.rounds == 3:
            self.param_groups[0]["params"][0].view(-1)[0] = float("inf")
        return found


class Garbled(GlooTransport):
    """Sends verdicts that mean nothing, about node 0 in round 2."""

    row: list[float] = []
    opt: Any = None

    async def gather(self, mine: Tensor) -> Tensor:
        if mine.shape == (self.nodes, 4) and self.opt.node.round == 1:
            mine = mine.clone()
            mine[0] = torch.tensor(self.row, dtype=mine.dtype)
        return await super().gather(mine)


def trained(
    rank: int,
    lrs: list[float],
    diverging: int | None = None,
    verdict: list[float] | None = None,
    participants: int | None = None,
    l2clip: bool = False,
) -> dict[str, Any]:
    """Five rounds with an inner optimizer of the user's own, whose learning rate may differ by node."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 300), nn.Tanh(), nn.Linear(300, 200), nn.Tanh(), nn.Linear(200, 1))
    inner: Any = tailopt.BiClip(net.parameters(), lr=lrs[0], u=1.0, d=0.9)
    if l2clip:
        inner = tailopt.L2Clip(net.parameters(), lr=lrs[0], u=1.0)
    outer: Any = ("avg", {})
    if diverging is not None:
        Diverging.breaks = rank == diverging
        outer = (Diverging, {"lr": 1.0})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt = tailopt.NestedOptimizer(
            inner, *outer, local_steps=2, model=net, rounds=5, timeout=10.0, participants=participants
        )
        if verdict is not None and rank == 2:
            transport = opt.node.exchange.transport
            opt.node.exchange.transport = garbled = Garbled.replacing(transport)
            garbled.row, garbled.opt = verdict, opt
        for group in opt.param_groups:
            group["lr"] = lrs[rank]  # as a scheduler that follows the local loss may set it
        while not opt.finished:
            source = torch.Generator().manual_seed(opt.total_steps + 100 * rank)
            x = torch.randn(8, 5, generator=source)
            opt.zero_grad()
            (net(x).squeeze(-1) - x.sum(1)).square().mean().backward()
            opt.step()
    return {
        "excluded": [[e["node"] for e in row["excluded"]] for row in opt.history],
        "warned": [str(w.message) for w in caught],
        "weights": torch.cat([p.detach().flatten() for p in net.parameters()]).double().sum().item(),
    }


def test_one_node_with_a_lower_rate_excludes_nobody(server: forked.Server) -> None:
    """Judged by the lowest rate, the honest majority was excluded in all rounds."""
    ends = server.run(f"{HERE}:trained", 3, lrs=[1e-3, 1e-3, 1e-4])
    assert [end.status for end in ends] == [0] * 3, [end.said for end in ends]
    for end in ends:
        assert end.value["excluded"] == [[]] * 5
        assert end.value["weights"] == ends[0].value["weights"]
        (said,) = end.value["warned"]
        assert said.startswith(
            "Node 2 steps with other settings: in round 1 one local step moves 0.weight by up to 0.0001 there, and "
            "0.001 is the lower median of all nodes."
        ), said


def test_a_node_far_above_the_others_is_excluded(server: forked.Server) -> None:
    """Its own statement is capped at ten times the median."""
    for end in server.run(f"{HERE}:trained", 3, lrs=[1e-3, 1e-3, 2e-2]):
        assert end.value["excluded"] == [[2]] * 5
        assert sum("goes on without node 2: beyond what its optimizer can move" in t for t in end.value["warned"]) == 5
    for end in server.run(f"{HERE}:trained", 3, lrs=[1e-3, 1e-3, 9e-3]):
        assert end.value["excluded"] == [[]] * 5


def test_nodes_that_do_not_take_part_judge_by_what_the_others_state(server: forked.Server) -> None:
    """They have no bound of their own, and still own a partition."""
    for end in server.run(f"{HERE}:trained", 3, lrs=[1e-3, 1e-3, 1e-3], participants=2):
        assert end.value["excluded"] == [[]] * 5 and end.value["warned"] == []


@pytest.mark.parametrize(("lrs", "participants"), [([1e-2] * 3, 2), ([1e-2, 1e-2, 1e-3], None)])
def test_stated_bounds_on_a_norm(server: forked.Server, lrs: list[float], participants: int | None) -> None:
    """They are gathered where a node does not take part, and where rates differ: one number for all tensors."""
    ends = server.run(f"{HERE}:trained", 3, lrs=lrs, participants=participants, l2clip=True)
    assert [end.status for end in ends] == [0] * 3, [end.said for end in ends]
    for end in ends:
        assert end.value["excluded"] == [[]] * 5
        assert end.value["weights"] == ends[0].value["weights"]


def test_a_verdict_that_means_nothing_names_its_sender(server: forked.Server) -> None:
    expected = r"ExchangeAborted: Round 2: node 2 sent a verdict about node 0 that cannot be read \(code 17\)"
    for end in server.run(f"{HERE}:trained", 3, lrs=[1e-3] * 3, verdict=[17.0, 0.0, 0.0, 0.0]):
        assert end.status == 1 and re.search(expected, end.said), end.said


@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        ((2.5, 0.0, 0.0, 0.0), r"code 2.5"),
        ((-1.0, 0.0, 0.0, 0.0), r"code -1"),
        ((float("nan"), 0.0, 0.0, 0.0), r"code nan"),
        ((2.0, 6.0, 0.0, 0.0), r"tensor 6 of 6"),
        ((2.0, 0.5, 0.0, 0.0), r"tensor 0.5 of 6"),
        ((3.0, float("inf"), 0.0, 0.0), r"tensor inf of 6"),
    ],
)
def test_codes_and_tensors_that_no_verdict_has(verdict: tuple[float, float, float, float], said: str) -> None:
    from tailopt.distributed.header import ExchangeAborted
    from tailopt.distributed.verdicts import SOUND, merge_verdicts

    rows = [[SOUND, SOUND], [verdict, SOUND]]
    with pytest.raises(ExchangeAborted, match=rf"node 1 sent a verdict about node 0 that cannot be read \({said}\)"):
        merge_verdicts(1, [0, 1], rows, [0, 1], ["a", "b", "c", "d", "e", "f"])


@pytest.mark.parametrize("owner", [2])
def test_an_owner_whose_new_weights_are_not_finite_is_named_alone(server: forked.Server, owner: int) -> None:
    ends = server.run(f"{HERE}:trained", 3, lrs=[1e-3] * 3, diverging=owner)
    for end in ends:
        assert end.status == 1
        said = re.search(r"ExchangeAborted: (Round 3 ended with weights that are not finite, .*?)\. Lower", end.said)
        assert said is not None, end.said
        assert said[1] == f"Round 3 ended with weights that are not finite, in the partition of node {owner}"


def scheduled(rank: int, algorithm: str, odd: float, other: int) -> dict[str, Any]:
    """One node's schedule gives another rate in round 5, which is not among those that are compared at the start."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 30), nn.Tanh(), nn.Linear(30, 1))
    settings = {"ilr": 1e-2, "i_u": 1.0}
    if algorithm == "avg-biclip":
        settings["i_d"] = 0.1
    factor = odd if rank == other else 1.0

    def rate(t: int) -> float:
        return 1e-2 * (factor if t == 5 else 1.0)

    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        opt = tailopt.NestedOptimizer.from_algorithm(
            net, tailopt.algorithm(algorithm, **settings), local_steps=2, schedules={"ilr": rate}, timeout=10.0
        )
        while opt.node.round < 6:
            x = torch.randn(8, 5, generator=torch.Generator().manual_seed(opt.total_steps + 100 * rank))
            opt.zero_grad()
            (net(x).squeeze(-1) - x.sum(1)).square().mean().backward()
            opt.step()
    return {"excluded": [[e["node"] for e in row["excluded"]] for row in opt.history]}


@pytest.mark.parametrize("algorithm", ["avg-biclip", "avg-l2clip"])
def test_a_node_that_leaves_the_agreed_settings_is_excluded_and_excludes_nobody(
    server: forked.Server, algorithm: str
) -> None:
    """Also where bounds are norms, for which the nodes exchange one more message."""
    ends = server.run(f"{HERE}:scheduled", 3, algorithm=algorithm, odd=0.5, other=1)
    assert [end.status for end in ends] == [0] * 3, [end.said for end in ends]
    for end in ends:
        assert end.value["excluded"] == [[], [], [], [], [1], []]


def test_the_last_bit_of_a_schedule_is_no_other_setting(server: forked.Server) -> None:
    """As a cosine may give it on another machine."""
    ends = server.run(f"{HERE}:scheduled", 2, algorithm="avg-biclip", odd=1.0 + 2**-50, other=1)
    assert [(end.status, end.value) for end in ends] == [(0, {"excluded": [[]] * 6})] * 2, [end.said for end in ends]


# ---- the arithmetic of it ----


def bounds_at(node: int, lengths: list[float], diverged: tuple[int, ...]) -> NodeBounds:
    """What a node of a round judges by, where every node states its own bound."""
    stated = [Bound("coordinate", length, 0.0, 1) for length in lengths]
    digests = [digest_of_bound(bound) for bound in stated]
    headers = [Header(1, k, 4, steps=1, bound_digest=digest) for k, digest in enumerate(digests)]

    async def gather(mine: Tensor) -> Tensor:
        return torch.tensor([encoded(bound, 1) for bound in stated], dtype=mine.dtype)

    round_headers = RoundHeaders(1, headers, range(len(lengths)), diverged)
    return blocking(stated_bounds(round_headers, stated[node], ["w"], gather))


def test_a_diverged_node_judges_by_what_the_others_state() -> None:
    """By its own, lower bound it would exclude nodes that all others count."""
    each = [bounds_at(node, [0.5, 0.5, 0.05], diverged=(2,)).by_node for node in range(3)]
    assert each[2] == each[0] == each[1]
    assert each[2][0].constant == [0.5] and each[2][2].kind is None


@pytest.mark.parametrize("steps", [1 << 62, -1])
def test_steps_that_nobody_takes_are_not_worked_through(steps: int) -> None:
    """A flipped bit in a header would otherwise make every node add up a bound for ever."""
    asked = []

    def expected(node: int, steps: int) -> Bound:
        asked.append(steps)
        return Bound("coordinate", 0.1 * steps, 0.0, steps)

    async def gather(mine: Tensor) -> Tensor:
        return mine.expand(2, -1)

    digest = digest_of_bound(Bound("coordinate", 0.5, 0.0, 5))
    headers = [Header(1, 0, 4, steps=5, bound_digest=digest), Header(1, 1, 4, steps=steps, bound_digest=digest)]
    round_headers = RoundHeaders(1, headers, range(2), most_steps=5)
    blocking(agreed_bounds(round_headers, expected, Bound("coordinate", 0.5, 0.0, 5), 1, gather))
    assert asked == [5, 0]


def test_an_unbounded_tensor_leaves_the_others_capped() -> None:
    """Param groups may differ: nothing bounds one of them on any node, and one node states ten thousandfold for all."""
    rows = {k: [1.0, *([math.inf, most] if k else [1e4, 1e4 * most]), 0.0, 0.0] for k, most in enumerate([1.0] * 3)}
    capped, _ = cap(rows, {0: 2, 1: 2, 2: 2})
    assert [bound.constant for bound in capped.values()] == [[1e4, CAP], [math.inf, 1.0], [math.inf, 1.0]]
    nothing, _ = cap({0: encoded(Bound(None), 2), 1: encoded(Bound("coordinate", [math.inf] * 2), 2)}, {0: 1, 1: 1})
    assert {bound.kind for bound in nothing.values()} == {None}


@given(
    st.lists(st.tuples(st.floats(0, 1e3), st.integers(1, 50)), min_size=1, max_size=7),
)
def test_a_majority_is_never_capped_below_its_own_statement(stated: list[tuple[float, int]]) -> None:
    """The cap is ten times the lower median: at least half of the nodes are below it by themselves."""
    rows = {i: [1.0, a * steps, 0.0] for i, (a, steps) in enumerate(stated)}
    capped, medians = cap(rows, {i: steps for i, (_, steps) in enumerate(stated)})
    kept = [i for i, (a, steps) in enumerate(stated) if capped[i].constant[0] >= 0.999999 * a * steps]
    assert 2 * len(kept) >= len(stated)
    for i, (_, steps) in enumerate(stated):
        assert capped[i].constant[0] <= CAP * medians[0] * steps * 1.000001
