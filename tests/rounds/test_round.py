"""The arithmetic of a round: the mean's exact bits, the outer step, projection, the iterate average, buffers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tailopt.rounds.guard import Bound
from tailopt.rounds.participants import Participants, Sampling
from tailopt.rounds.policy import RoundPolicy
from tailopt.rounds.round import Contribution, GlobalState, RoundMean, RoundResult, finish_round, outer_step, project
from tailopt.rounds.settle import EveryoneExcluded
from tailopt.rules.table import OUTER

UNBOUNDED = Bound(None)


def state(weights: Sequence[Tensor], average: bool = False, **buffers: Tensor) -> GlobalState:
    names = [f"w{i}" for i in range(len(weights))]
    kept = [torch.zeros_like(w) for w in weights] if average else None
    return GlobalState(names, [w.clone() for w in weights], buffers, [{} for _ in weights], kept)


def contribution(node: int, delta: Sequence[Tensor], loss: float = 0.0, **more: Any) -> Contribution:
    given = {"start": [torch.zeros_like(d) for d in delta], "buffers": {}, "movement_bound": UNBOUNDED, **more}
    return Contribution(node=node, delta=delta, loss=loss, **given)


def policy(**options: Any) -> RoundPolicy:
    return RoundPolicy(rounds=None, local_steps=1, inner_state="keep", **options)


def mean_of(
    before: GlobalState, sent: Iterable[Contribution], participants: Participants, **options: Any
) -> RoundResult:
    mean = RoundMean(before, participants, policy(**options))
    for c in sent:
        mean.add(c)
    return mean.result()


def who(shares: Sequence[float]) -> Participants:
    return Participants(list(range(len(shares))), dict(enumerate(shares)))


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def mean_by_numpy(deltas: Iterable[np.ndarray[Any, Any]], shares: Iterable[float], whole: float | None) -> Any:
    """One rounding for every product, one for every sum, in the order given."""
    total: Any = None
    for delta, share in zip(deltas, shares, strict=True):
        term = delta * delta.dtype.type(share)
        total = term if total is None else total + term
    return total if whole is None else total / total.dtype.type(whole)


# The weighted mean


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("lost", [(), (0,), (1, 4), (0, 1, 2, 3, 5)])
def test_the_mean_has_exactly_these_roundings(lost: tuple[int, ...], dtype: torch.dtype) -> None:
    """Products and sums rounded apart, ascending; a division by what counted only where somebody did not."""
    shares = Sampling((3.0, 1.0, 0.7, 2.0, 0.1, 5.0), 6, "uniform", 0).draw(1).shares
    deltas = [random(40, seed=i, dtype=dtype) for i in range(6)]
    sent = [[d if i not in lost else torch.full_like(d, math.nan)] for i, d in enumerate(deltas)]
    found = mean_of(
        state([torch.zeros(40, dtype=dtype)]), (contribution(i, s) for i, s in enumerate(sent)), who([*shares.values()])
    )
    counted = [i for i in range(6) if i not in lost]
    whole = math.fsum(shares[i] for i in counted) if lost else None
    wanted = mean_by_numpy([deltas[i].numpy() for i in counted], [shares[i] for i in counted], whole)
    assert np.array_equal(found.delta[0].numpy(), wanted)
    assert [e.node for e in found.settlement.excluded] == list(lost)
    assert found.settlement.weights == {i: shares[i] / (whole or 1.0) for i in counted}


def test_the_products_are_rounded_before_they_are_added() -> None:
    """A fused multiply-add gives other bits for these very numbers."""
    shares = [1 / 3, 2 / 3]
    deltas = [random(5000, seed=1), random(5000, seed=2)]
    found = mean_of(state([torch.zeros(5000)]), (contribution(i, [d]) for i, d in enumerate(deltas)), who(shares))
    wide = [d.double().numpy() * np.float64(np.float32(s)) for d, s in zip(deltas, shares, strict=True)]
    fused = (np.float32(wide[0]).astype(np.float64) + wide[1]).astype(np.float32)
    assert not np.array_equal(found.delta[0].numpy(), fused)
    assert np.array_equal(found.delta[0].numpy(), np.float32(wide[0]) + np.float32(wide[1]))


def test_without_exclusions_nothing_is_divided() -> None:
    """Shares that do not add up to 1 to the last bit stay as they are."""
    n = next(n for n in range(2, 1000) if math.fsum([1 / n] * n) != 1.0)
    deltas = [random(100, seed=i, dtype=torch.float64) for i in range(n)]
    sent = (contribution(i, [d]) for i, d in enumerate(deltas))
    found = mean_of(state([torch.zeros(100, dtype=torch.float64)]), sent, who([1 / n] * n))
    assert np.array_equal(found.delta[0].numpy(), mean_by_numpy([d.numpy() for d in deltas], [1 / n] * n, None))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_node_that_is_not_finite_is_skipped(bad: float) -> None:
    """Never multiplied by 0; the others' mean is as if their weights had been alone, to rounding."""
    good = [random(7, seed=i) for i in range(2)]
    broken = random(7, seed=5)
    broken[3] = bad
    sent = [contribution(0, [good[0]], 1.0), contribution(1, [broken], math.nan), contribution(2, [good[1]], 4.0)]
    found = mean_of(state([torch.zeros(7)]), sent, who([0.2, 0.4, 0.4]))
    torch.testing.assert_close(found.delta[0], (good[0] + 2 * good[1]) / 3)
    (lost,) = found.settlement.excluded
    assert (lost.node, lost.subject, lost.reason, lost.bound) == (1, "w0", "not finite", None)
    assert math.isnan(lost.value) if math.isnan(bad) else lost.value == bad
    assert set(found.settlement.losses) == {0, 2}
    assert found.settlement.loss == pytest.approx((1.0 + 2 * 4.0) / 3)


def test_the_guard_can_be_switched_off() -> None:
    sent = [contribution(0, [torch.tensor([1.0])]), contribution(1, [torch.tensor([math.nan])])]
    assert mean_of(state([torch.zeros(1)]), sent, who([0.5, 0.5]), guard=False).delta[0].isnan().all()


def test_all_excluded_is_an_error_that_says_why() -> None:
    before = state([torch.zeros(1)])
    before.round = 4
    sent = [contribution(i, [torch.tensor([math.nan])]) for i in range(2)]
    with pytest.raises(EveryoneExcluded, match=r"Round 5: .*node 0: not finite in w0 .*; node 1: not finite"):
        mean_of(before, sent, who([0.5, 0.5]))


def test_those_left_need_a_weight() -> None:
    sent = [contribution(0, [torch.tensor([math.nan])]), contribution(1, [torch.tensor([1.0])])]
    with pytest.raises(EveryoneExcluded, match="no displacement can be used"):
        mean_of(state([torch.zeros(1)]), sent, who([1.0, 0.0]))


def test_collecting_changes_neither_state_nor_displacements() -> None:
    before, deltas = state([random(5)]), [random(5, seed=i) for i in (1, 2)]
    copies = [before.weights[0].clone(), *(d.clone() for d in deltas)]
    mean_of(before, [contribution(i, [d]) for i, d in enumerate(deltas)], who([0.5, 0.5]))
    assert all(torch.equal(a, b) for a, b in zip([before.weights[0], *deltas], copies, strict=True))
    assert before.round == 0


def test_one_accumulator_is_enough() -> None:
    """Every contribution may lie in the same memory: it is read before the next is asked for."""
    memory = torch.zeros(3)

    def streamed() -> Iterable[Contribution]:
        for node in range(4):
            memory.fill_(node + 1.0)
            yield contribution(node, [memory])

    found = mean_of(state([torch.zeros(3)]), streamed(), who([0.25] * 4))
    assert found.delta[0].tolist() == [2.5] * 3


def test_the_report_has_what_the_nodes_keep() -> None:
    """An excluded node's steps count, its inner state and statistics do not."""
    kept = [{"step": 1}]
    sent = [
        contribution(0, [torch.ones(1)], 2.0, steps=3, optimizer_state=kept, statistics="s"),
        contribution(1, [torch.tensor([math.inf])], 2.0, steps=4, optimizer_state=kept, statistics="s"),
    ]
    result = mean_of(state([torch.zeros(1)]), sent, who([0.5, 0.5]))
    assert result.settlement.steps == {0: 3, 1: 4}
    assert (result.node_states.optimizer_states, result.statistics, result.settlement.weights) == (
        {0: kept},
        ["s"],
        {0: 1.0},
    )


# The outer step, projection, the average


def test_avg_adds_the_mean_displacement() -> None:
    before = state([random(9)])
    x, delta = before.weights[0].clone(), random(9, seed=3)
    outer_step(before, [delta.clone()], OUTER["avg"], {})
    assert torch.equal(before.weights[0], x + delta)


@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_outer_l2_takes_its_norm_over_blocks(scope: str) -> None:
    """A long displacement is cut to length o_u over its scope."""
    before = state([torch.zeros(40_000), torch.zeros(3)])
    deltas = [random(40_000, seed=1), random(3, seed=2)]
    outer_step(before, [d.clone() for d in deltas], OUTER["biclip-l2"], {"lr": 1.0, "u": 0.5, "d": 0.1, "scope": scope})
    found = [float(torch.linalg.vector_norm(w.double())) for w in before.weights]
    if scope == "tensor":
        assert found == pytest.approx([0.5, 0.5], rel=1e-6)
    else:
        assert math.hypot(*found) == pytest.approx(0.5, rel=1e-6)
        assert found[1] / found[0] == pytest.approx(float(deltas[1].norm() / deltas[0].norm()), rel=1e-5)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000), radius=st.floats(1e-3, 10), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_projection(seed: int, radius: float, dtype: torch.dtype) -> None:
    """x min(1, B / |x|), one norm over all tensors."""
    weights = [random(4, 3, seed=seed, dtype=dtype), random(5, seed=seed + 1, dtype=dtype)]
    before = [w.clone() for w in weights]
    length = math.sqrt(sum(float(w.double().square().sum()) for w in before))
    project(weights, radius)
    for w, b in zip(weights, before, strict=True):
        if length <= radius:
            assert torch.equal(w, b)
        else:
            torch.testing.assert_close(w, b * (radius / length))
    after = math.sqrt(sum(float(w.double().square().sum()) for w in weights))
    assert after <= radius * (1 + 1e-6)


def test_a_round_moves_on() -> None:
    """Outer step, then projection, then the average of what came out."""
    now = state([torch.tensor([3.0, 4.0], dtype=torch.float64)], average=True)
    delta = torch.tensor([3.0, 4.0], dtype=torch.float64)
    finish_round(now, mean_of(now, [contribution(0, [delta])], who([1.0])), OUTER["avg"], {}, policy(projection=1.0))
    assert now.round == 1 and now.average is not None
    torch.testing.assert_close(now.weights[0], torch.tensor([0.6, 0.8], dtype=torch.float64))
    assert torch.equal(now.average[0], now.weights[0])


@pytest.mark.parametrize("rounds", [1, 2, 10, 60])
def test_the_iterate_average_weights_round_r_by_r(rounds: int) -> None:
    now = state([torch.zeros(6, dtype=torch.float64)], average=True)
    seen = []
    for t in range(rounds):
        delta = random(6, seed=t, dtype=torch.float64)
        finish_round(now, mean_of(now, [contribution(0, [delta])], who([1.0])), OUTER["avg"], {}, policy())
        seen.append(now.weights[0].clone())
    assert now.average is not None
    wanted = sum(r * x for r, x in enumerate(seen, 1)) / sum(range(1, rounds + 1))
    torch.testing.assert_close(now.average[0], wanted, rtol=1e-13, atol=1e-14)


def test_outer_state_is_kept_from_round_to_round() -> None:
    """Momentum 0.5 over displacements 1, 1: 1 + 1.5."""
    now = state([torch.zeros(1)])
    for _ in range(2):
        found = mean_of(now, [contribution(0, [torch.ones(1)])], who([1.0]))
        finish_round(now, found, OUTER["sgd"], {"lr": 1.0, "momentum": 0.5}, policy())
    assert now.weights[0].item() == 2.5


# Buffers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_floating_buffers_are_averaged_like_displacements(dtype: torch.dtype) -> None:
    """In fp32 (fp64 in itself), with one rounding to their own type at the end."""
    values = [random(20, seed=i, dtype=dtype) for i in range(3)]
    shares = [0.2, 0.3, 0.5]
    now = state([torch.zeros(1)], running=torch.zeros(20, dtype=dtype))
    sent = [contribution(i, [torch.zeros(1)], buffers={"running": v}) for i, v in enumerate(values)]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    wanted = torch.from_numpy(mean_by_numpy([v.to(wide).numpy() for v in values], shares, None)).to(dtype)
    found = mean_of(now, sent, who(shares))
    assert torch.equal(found.buffers["running"], wanted) and found.buffers["running"].dtype == dtype
    hparams = {"lr": 1.0, "eps": 1.0, "betas": (0.9, 0.99), "bias_correction": False}
    finish_round(now, found, OUTER["adam"], hparams, policy())
    assert torch.equal(now.buffers["running"], wanted)


def test_complex_buffers_are_averaged_by_parts() -> None:
    now = state([torch.zeros(1)], phase=torch.zeros(1, dtype=torch.complex64))
    sent = [
        contribution(i, [torch.zeros(1)], buffers={"phase": torch.tensor([v])}) for i, v in enumerate((1 + 2j, 3 - 2j))
    ]
    assert mean_of(now, sent, who([0.5, 0.5])).buffers["phase"].tolist() == [2 + 0j]


def test_other_buffers_take_the_maximum() -> None:
    now = state([torch.zeros(1)], count=torch.tensor(0), flag=torch.tensor([False, False]))
    sent = [
        contribution(i, [torch.zeros(1)], buffers={"count": torch.tensor(c), "flag": torch.tensor(f)})
        for i, (c, f) in enumerate([(3, [True, False]), (7, [False, False]), (5, [False, False])])
    ]
    found = mean_of(now, sent, who([0.2, 0.3, 0.5])).buffers
    assert found["count"].item() == 7 and found["count"].dtype == torch.int64
    assert found["flag"].tolist() == [True, False]


def test_buffers_of_an_excluded_node_do_not_count() -> None:
    now = state([torch.zeros(1)], running=torch.zeros(1), count=torch.tensor(0))
    good = {"running": torch.tensor([4.0]), "count": torch.tensor(2)}
    bad = {"running": torch.tensor([1.0]), "count": torch.tensor(99)}
    sent = [
        contribution(0, [torch.zeros(1)], buffers=good),
        contribution(1, [torch.tensor([math.nan])], buffers=bad),
    ]
    found = mean_of(now, sent, who([0.25, 0.75])).buffers
    assert found["running"].item() == 4.0 and found["count"].item() == 2


@pytest.mark.parametrize("bad", [torch.tensor([1.0, math.nan]), torch.tensor([1.0, complex(0, math.inf)])], ids=str)
def test_a_buffer_that_becomes_infinite_excludes(bad: Tensor) -> None:
    now = state([torch.zeros(1)], running=torch.zeros(2, dtype=bad.dtype))
    good = torch.ones(2, dtype=bad.dtype)
    sent = [contribution(i, [torch.zeros(1)], buffers={"running": b}) for i, b in enumerate((bad, good))]
    found = mean_of(now, sent, who([0.5, 0.5]))
    assert [(e.node, e.subject, e.reason) for e in found.settlement.excluded] == [(0, "running", "not finite")]
    assert torch.equal(found.buffers["running"], good)


def test_a_buffer_that_was_infinite_before_does_not() -> None:
    """An attention mask with -inf is a constant of the model."""
    mask = torch.tensor([0.0, -math.inf])
    now = state([torch.zeros(1)], mask=mask)
    sent = [contribution(i, [torch.zeros(1)], buffers={"mask": mask.clone()}) for i in range(2)]
    found = mean_of(now, sent, who([0.5, 0.5]))
    assert not found.settlement.excluded and torch.equal(found.buffers["mask"], mask)
