"""Robust means: their formulas, the order of nodes does not matter, and a minority moves them only so far."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tailopt
from tailopt.rounds import robust
from tailopt.rounds.guard import Bound
from tailopt.rounds.participants import Participants
from tailopt.rounds.policy import RoundPolicy
from tailopt.rounds.robust import AGGREGATES, Aggregate, centred_clipping, coordinate_median, median_norm, trimmed_mean
from tailopt.rounds.round import Contribution, GlobalState, RoundMean, RoundResult
from tailopt.rounds.settle import EveryoneExcluded

NAMES = list(AGGREGATES)
SHAPES: list[tuple[int, ...]] = [(3, 2), (5,), (), (0,)]
TYPES = [torch.float32, torch.float64, torch.bfloat16]


def honest(
    nodes: int, seed: int = 0, dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES
) -> list[list[Tensor]]:
    """Displacements around 1, a tenth apart."""
    source = torch.Generator().manual_seed(seed)
    draw = [[torch.randn(shape, generator=source, dtype=torch.float64) for shape in shapes] for _ in range(nodes)]
    return [[(1 + 0.1 * x).to(dtype) for x in delta] for delta in draw]


def flat(delta: Sequence[Tensor]) -> Any:
    return torch.cat([x.double().reshape(-1) for x in delta]).numpy()


def rows(displacements: Sequence[Sequence[Tensor]]) -> Any:
    return np.stack([flat(delta) for delta in displacements])


def clipped_by_numpy(x: Any, radius: float | None, iterations: int) -> Any:
    """Centred clipping written out in float64."""
    v = np.median(x, axis=0)
    tau: Any = np.sort(np.linalg.norm(x - v, axis=1))[(len(x) - 1) // 2] if radius is None else radius
    for _ in range(iterations):
        away = x - v
        v = v + np.mean([d * min(1.0, tau / max(np.linalg.norm(d), 1e-300)) for d in away], axis=0)
    return v


# The formulas


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 8])
def test_the_coordinate_median_is_numpys(nodes: int) -> None:
    """In fp32 too: the mean of two has one rounding."""
    for dtype in (torch.float32, torch.float64):
        given = honest(nodes, nodes, dtype)
        for i, found in enumerate(coordinate_median(given)):
            assert found.dtype == dtype and found.shape == SHAPES[i]
            wanted = np.median(np.stack([delta[i].numpy() for delta in given]), axis=0)
            np.testing.assert_array_equal(found.numpy(), wanted)


@pytest.mark.parametrize(("nodes", "share"), [(5, 0.2), (10, 0.2), (10, 0.25), (11, 0.45), (30, 0.1), (7, 0.3)])
def test_the_trimmed_mean_is_scipys(nodes: int, share: float) -> None:
    stats = pytest.importorskip("scipy.stats")
    given = honest(nodes, nodes, torch.float64)
    wanted = stats.trim_mean(rows(given), share, axis=0)
    np.testing.assert_allclose(flat(trimmed_mean(given, share)), wanted, rtol=1e-14)


@pytest.mark.parametrize(("nodes", "cut"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 1), (9, 1), (10, 2), (15, 3)])
def test_the_trimmed_mean_cuts_off_at_least_one(nodes: int, cut: int) -> None:
    given = honest(nodes, nodes, torch.float64)
    wanted = np.sort(rows(given), axis=0)[cut : nodes - cut].mean(axis=0)
    np.testing.assert_allclose(flat(trimmed_mean(given)), wanted, rtol=1e-14)


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("multiple", [1.0, 1.05, 3.0])
def test_median_norm_is_the_mean_of_the_near(nodes: int, multiple: float) -> None:
    given = honest(nodes, 1, torch.float64)
    norms = np.linalg.norm(rows(given), axis=1)
    near = norms <= multiple * np.sort(norms)[(nodes - 1) // 2]
    assert multiple > 1 or nodes == 1 or not near.all(), "somebody is left out"
    np.testing.assert_allclose(flat(median_norm(given, multiple)), rows(given)[near].mean(axis=0), rtol=1e-14)


@pytest.mark.parametrize(("radius", "iterations"), [(None, 1), (None, 3), (0.05, 3), (1e9, 1)])
@pytest.mark.parametrize("nodes", [1, 4, 7])
def test_centred_clipping_written_out(nodes: int, radius: float | None, iterations: int) -> None:
    given = honest(nodes, 2, torch.float64)
    found = flat(centred_clipping(given, radius, iterations))
    np.testing.assert_allclose(found, clipped_by_numpy(rows(given), radius, iterations), rtol=1e-13)
    if radius == 1e9:  # clips nobody
        np.testing.assert_allclose(found, rows(given).mean(axis=0), rtol=1e-13)


def test_pieces_of_a_large_tensor_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    given = honest(5, 3, shapes=[(7, 11), (64,)])
    whole = {name: AGGREGATES[name](given) for name in NAMES}
    monkeypatch.setattr(robust, "CHUNK", 8)
    for name in NAMES:
        assert all(map(torch.equal, AGGREGATES[name](given), whole[name])), name


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_arithmetic_is_fp32_or_fp64(name: str, dtype: torch.dtype) -> None:
    """bf16 is widened first, so a result has bits that bf16 has not; what came in is left alone."""
    given = honest(4, 4, dtype)
    before = [[x.clone() for x in delta] for delta in given]
    found = AGGREGATES[name](given)
    assert [x.shape for x in found] == [torch.Size(s) for s in SHAPES]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert all(x.dtype == wide for x in found)
    again = AGGREGATES[name]([[x.to(wide) for x in delta] for delta in given])
    assert all(map(torch.equal, found, again))
    for delta, was in zip(given, before, strict=True):
        assert all(map(torch.equal, delta, was))
    if dtype == torch.bfloat16:
        assert not torch.equal(found[0], found[0].bfloat16().float())


@pytest.mark.parametrize("name", NAMES)
def test_in_place_changes_of_the_result_reach_nobody(name: str) -> None:
    for nodes in (1, 3):
        given = honest(nodes, 5)
        before = [[x.clone() for x in delta] for delta in given]
        torch._foreach_neg_(AGGREGATES[name](given))
        assert all(all(map(torch.equal, delta, was)) for delta, was in zip(given, before, strict=True))


# Properties


@given(name=st.sampled_from(NAMES), nodes=st.integers(1, 9), seed=st.integers(0, 10**6), data=st.data())
@settings(max_examples=80, deadline=None)
def test_the_order_of_nodes_does_not_matter(name: str, nodes: int, seed: int, data: st.DataObject) -> None:
    given = honest(nodes, seed)
    if nodes > 2:
        given[0] = [-1e6 * x for x in given[0]]
    order = data.draw(st.permutations(range(nodes)))
    one, other = AGGREGATES[name](given), AGGREGATES[name]([given[i] for i in order])
    exact = name in ("trimmed-mean", "coordinate-median")
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0 if exact else 2e-6, atol=0 if exact else 1e-7)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@given(name=st.sampled_from(NAMES), nodes=st.integers(1, 9), seed=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_equal_displacements_give_that_displacement(dtype: torch.dtype, name: str, nodes: int, seed: int) -> None:
    """To the bit where no product is rounded; otherwise to a unit a node."""
    (x,) = honest(1, seed, dtype)
    for found, wanted in zip(AGGREGATES[name]([x] * nodes), x, strict=True):
        eps = torch.finfo(found.dtype).eps
        free = name == "median-norm" or dtype == torch.float64
        torch.testing.assert_close(found, wanted.to(found.dtype), rtol=nodes * eps if free else 0, atol=0)


@given(
    name=st.sampled_from(NAMES),
    nodes=st.integers(3, 9),
    seed=st.integers(0, 10**6),
    sent=st.lists(st.sampled_from([-3e38, -1e20, -1e3, -1.0, 0.0, 2.0, 1e6, 3e38, math.inf, math.nan]), min_size=4),
)
@settings(max_examples=150, deadline=None)
def test_a_minority_moves_it_only_so_far(name: str, nodes: int, seed: int, sent: list[float]) -> None:
    """Whatever fewer than half of the nodes send, a result stays where the honest ones are."""
    robust_one = Aggregate(name, share=0.49) if name == "trimmed-mean" else Aggregate(name)
    broken = int(0.49 * nodes)
    good = honest(nodes - broken, seed)
    bad = [
        [torch.full_like(x, sent[(k + i) % len(sent)]) for i, x in enumerate(good[0])]  # not the same in all tensors
        for k in range(broken)
    ]
    found, x = flat(robust_one(bad + good)), rows(good)
    low, high = x.min(axis=0), x.max(axis=0)
    diagonal = float(np.linalg.norm(high - low))
    if name in ("coordinate-median", "trimmed-mean"):
        assert (found >= low).all() and (found <= high).all()
    elif name == "centred-clipping":  # three times by at most the radius, which is an honest distance
        assert np.linalg.norm(found - np.clip(found, low, high)) <= 3 * diagonal * (1 + 1e-5)
    else:
        assert np.linalg.norm(found) <= 3 * np.linalg.norm(x, axis=1).max() * (1 + 1e-5)


def test_the_mean_is_moved_without_bound() -> None:
    """What the property above is worth: the same minority carries the mean away."""
    given = [*honest(4), [1e9 * x for x in honest(1)[0]]]
    assert np.abs(rows(given).mean(axis=0)).max() > 1e8


# Choosing one


def test_an_aggregate_is_a_name_with_parameters() -> None:
    assert str(Aggregate("coordinate-median")) == "coordinate-median"
    one = Aggregate("centred-clipping", radius=0.1, iterations=5)
    assert str(one) == "centred-clipping(iterations=5, radius=0.1)"
    assert one == Aggregate("centred-clipping", iterations=5, radius=0.1) != Aggregate("centred-clipping")
    assert len({one, Aggregate("centred-clipping")}) == 2
    given = honest(4)
    assert all(map(torch.equal, one(given), centred_clipping(given, 0.1, 5)))


@pytest.mark.parametrize(
    ("name", "parameters", "said"),
    [
        ("krum", {}, "Invalid aggregate: 'krum'; need one of 'median-norm', 'trimmed-mean'"),
        ("trimmed-mean", {"radius": 1.0}, "Invalid parameter of trimmed-mean: 'radius'; it takes share"),
        ("coordinate-median", {"share": 0.1}, "'share'; it takes none"),
        ("trimmed-mean", {"share": 0.5}, "Invalid share: got 0.5; need 0 < share < 0.5"),
        ("trimmed-mean", {"share": math.nan}, "Invalid share: got nan"),
        ("median-norm", {"multiple": 0.5}, "Invalid multiple: got 0.5; need 1 <= multiple"),
        ("centred-clipping", {"radius": 0.0}, "Invalid radius: got 0.0"),
        ("centred-clipping", {"radius": math.inf}, "Invalid radius: got inf"),
        ("centred-clipping", {"iterations": 0}, "Invalid iterations: got 0"),
        ("centred-clipping", {"iterations": 2.0}, "Invalid iterations: got 2.0"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_made(name: str, parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the message is compared below, as plain text
        Aggregate(name, **parameters)
    assert said in str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_displacements_that_cannot_be_compared(name: str) -> None:
    with pytest.raises(ValueError, match="Invalid displacements: there are none"):
        AGGREGATES[name]([])
    with pytest.raises(ValueError, match=r"shapes \[\(3,\)\] at index 1, \[\(2,\)\] at index 0"):
        AGGREGATES[name]([[torch.zeros(2)], [torch.zeros(3)]])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"aggregate": "mode"}, "Invalid aggregate: 'mode'; need one of 'mean', 'median-norm', 'trimmed-mean', "),
        ({"aggregate": ["mean"]}, r"Invalid aggregate: \['mean'\]"),
        ({"weights": [1, 1, 2, 1, 1]}, "Invalid weights: from 1.0 to 2.0 with aggregate 'trimmed-mean', which ignores"),
        ({"sampling": "proportional", "participants": 3}, "Invalid sampling: 'proportional' with aggregate"),
    ],
)
def test_what_a_simulation_refuses(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fit(**{"aggregate": "trimmed-mean", **given})


# In a round


def reused(deltas: Sequence[float], buffers: Sequence[float] | None = None) -> Iterator[Contribution]:
    """As an engine sends them: every contribution in the same memory."""
    memory, running, count = torch.zeros(3), torch.zeros(1), torch.zeros((), dtype=torch.int64)
    for node, value in enumerate(deltas):
        memory.fill_(value)
        running.fill_((buffers or deltas)[node])
        count.fill_(node)
        yield Contribution(
            node=node,
            start=[torch.zeros(3)],
            delta=[memory],
            buffers={"running": running, "count": count},
            loss=float(node),
            movement_bound=Bound(None),
            steps=4,
            optimizer_state=[{"node": node}],
            statistics=node,
        )


def mean_of(
    before: GlobalState, sent: Iterable[Contribution], participants: Participants, **options: Any
) -> RoundResult:
    mean = RoundMean(before, participants, RoundPolicy(rounds=None, local_steps=4, inner_state="keep", **options))
    for c in sent:
        mean.add(c)
    return mean.result()


def fresh() -> GlobalState:
    buffers = {"running": torch.zeros(1), "count": torch.zeros((), dtype=torch.int64)}
    return GlobalState(["w"], [torch.zeros(3)], buffers, [{}])


def equal(nodes: int) -> Participants:
    return Participants(list(range(nodes)), dict.fromkeys(range(nodes), 1 / nodes))


@pytest.mark.parametrize("name", NAMES)
def test_displacements_are_copied_as_they_arrive(name: str) -> None:
    sent = [1.0, 2.0, 3.0, 4.0, 1e9]
    found = mean_of(fresh(), reused(sent), equal(5), aggregate=Aggregate(name))
    assert torch.equal(found.delta[0], Aggregate(name)([[torch.full((3,), v)] for v in sent])[0])
    if name == "median-norm":
        assert found.settlement.weights == dict.fromkeys(range(4), 0.25)
    else:
        assert found.settlement.weights == dict.fromkeys(range(5), 0.2)


def test_median_norm_excludes_by_name() -> None:
    """Like the guard: no weight, no loss, no inner state; but its samplers move on."""
    result = mean_of(fresh(), reused([1.0, 2.0, -1e6, 2.0]), equal(4), aggregate=Aggregate("median-norm"))
    (found,) = result.settlement.excluded
    assert (found.node, found.subject, found.reason) == (2, "all tensors", "far above the median norm")
    assert found.value == pytest.approx(1e6 * math.sqrt(3)) and found.bound == pytest.approx(6 * math.sqrt(3))
    assert str(found) == "node 2: far above the median norm in all tensors (1.73e+06, up to 10.4 counts)"
    assert result.settlement.weights == dict.fromkeys((0, 1, 3), 1 / 3)
    assert result.settlement.losses.keys() == result.node_states.optimizer_states.keys() == {0, 1, 3}
    assert result.statistics == [0, 1, 3]
    assert result.settlement.steps.keys() == {0, 1, 2, 3}


def test_median_norm_that_leaves_out_nobody_has_the_means_bits() -> None:
    sent = [0.1, 0.7, 0.3, 0.45, 0.9]
    plain = mean_of(fresh(), reused(sent), equal(5))
    found = mean_of(fresh(), reused(sent), equal(5), aggregate=Aggregate("median-norm"))
    pure = median_norm([[torch.full((3,), v)] for v in sent])
    assert torch.equal(found.delta[0], plain.delta[0]) and torch.equal(pure[0], plain.delta[0])


@pytest.mark.parametrize("name", NAMES)
def test_the_guard_comes_first(name: str) -> None:
    found = mean_of(fresh(), reused([math.nan, 1.0, 1.0, 1.0]), equal(4), aggregate=Aggregate(name))
    assert [(e.node, e.reason) for e in found.settlement.excluded] == [(0, "not finite")]
    torch.testing.assert_close(found.delta[0], torch.ones(3))
    with pytest.raises(EveryoneExcluded, match="Round 1: no displacement can be used"):
        mean_of(fresh(), reused([math.nan, math.inf]), equal(2), aggregate=Aggregate(name))


@pytest.mark.parametrize("name", NAMES)
def test_without_a_guard_a_nan_is_an_outlier(name: str) -> None:
    sent = [1.0, math.nan, 1.0, 1.0]
    found = mean_of(fresh(), reused(sent, [1.0] * 4), equal(4), guard=False, aggregate=Aggregate(name))
    torch.testing.assert_close(found.delta[0], torch.ones(3))


@pytest.mark.parametrize("name", NAMES)
def test_floating_buffers_take_the_median_and_others_the_maximum(name: str) -> None:
    """A node may move its weights as others do and still have ruined statistics."""
    found = mean_of(fresh(), reused([1.0] * 4, [5.0, 1e30, 7.0, 6.0]), equal(4), aggregate=Aggregate(name)).buffers
    assert found["running"].item() == 6.5 and found["count"].item() == 3


# From end to end: a regression with noise, five nodes, sgd inside, and node 3 gone mad

TRUTH = torch.tensor([1.0, -2.0, 3.0, 0.5])


def fit(aggregate: str | Aggregate = "mean", broken: float | None = None, **more: Any) -> tailopt.Result:
    def batches(node: int, round: int, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(16, 4, generator=generator)
        y = x @ TRUTH + torch.randn(16, generator=generator)
        return x, broken * y if broken is not None and node == 3 else y

    def loss(model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return torch.nn.functional.mse_loss(model(batch[0]).squeeze(-1), batch[1])

    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    settings = {"rounds": 30, "local_steps": 4, "nodes": 5, "progress": False, **more}
    algorithm = tailopt.algorithm("avg-sgd", ilr=0.05)
    return tailopt.simulate(model, algorithm, loss=loss, batches=batches, aggregate=aggregate, **settings)


def risk(result: tailopt.Result) -> float:
    """The expected squared error; 1 is the noise's."""
    weight: Any = result.model.weight
    return 1 + float((weight.detach()[0] - TRUTH).square().sum())


@pytest.mark.parametrize("broken", [1e6, -1e6], ids=["huge", "opposed"])
@pytest.mark.filterwarnings("ignore:Round .* goes on without node 3")
def test_a_mad_node_ruins_the_mean_and_no_robust_one(broken: float) -> None:
    clean = risk(fit())
    assert clean < 1.05
    ruined = fit(broken=broken)
    assert risk(ruined) > 1e6 and not ruined.history[-1]["excluded"], "sgd has no bound, so the guard lets it pass"
    for name in NAMES:
        result = fit(name, broken=broken)
        assert risk(result) < 1.05 * clean, name
        for row in result.history:
            if name == "median-norm":
                assert [e["node"] for e in row["excluded"]] == [3]
                assert row["weights"] == [0.25, 0.25, 0.25, 0.0, 0.25]
            else:
                assert row["excluded"] == [] and row["weights"] == [0.2] * 5


def test_without_a_mad_node_little_is_lost() -> None:
    clean = risk(fit())
    for name in NAMES:
        assert risk(fit(name)) < 1.05 * clean, name


def test_equal_weights_may_be_written_out() -> None:
    one, other = fit("trimmed-mean", rounds=2), fit("trimmed-mean", rounds=2, weights=[2.0] * 5)
    assert torch.equal(next(one.model.parameters()), next(other.model.parameters()))


def test_a_run_is_resumed_with_the_same_aggregate(tmp_path: Path) -> None:
    chosen = Aggregate("trimmed-mean", share=0.3)
    straight = fit(chosen, rounds=4)
    fit(chosen, rounds=2, run=tmp_path / "run")
    with pytest.raises(ValueError, match=r"another aggregate: it is 'trimmed-mean\(share=0.3\)'"):
        fit("trimmed-mean", rounds=4, run=tmp_path / "run", resume=True)
    resumed = fit(chosen, rounds=4, run=tmp_path / "run", resume=True)
    assert torch.equal(next(straight.model.parameters()), next(resumed.model.parameters()))
