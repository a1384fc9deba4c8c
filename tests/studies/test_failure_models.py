"""How nodes fail: the functions that name a round's nodes, and the shares that failing nodes have on average."""

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tailopt.studies import failure_models

UNUSED = torch.Generator()  # for a function that has its own randomness
WEIGHTS = st.lists(st.floats(0.05, 20), min_size=2, max_size=6).map(
    lambda w: torch.tensor(w, dtype=torch.float64) / sum(w)
)


def test_independent_failures_have_their_share_and_never_take_everybody():
    chosen = failure_models.independent(5, away=0.9)
    rounds = [list(chosen(t, torch.Generator().manual_seed(t))) for t in range(3000)]
    assert all(rounds)
    counts = [sum(node in present for present in rounds) for node in range(5)]
    # 0.1, and a fifth of the rounds in which all would be away; five deviations of a binomial count
    expected = 0.1 + 0.9**5 / 5
    assert all(abs(c / 3000 - expected) < 5 * (expected * (1 - expected) / 3000) ** 0.5 for c in counts)


@given(order=st.permutations(range(1, 40)), seed=st.integers(0, 5))
def test_bursts_are_a_function_of_the_round_in_any_order(order, seed):
    straight = failure_models.bursts(6, 0.5, 10, seed)
    expected = {t: straight(t, torch.Generator().manual_seed(t)) for t in range(1, 40)}
    shuffled = failure_models.bursts(6, 0.5, 10, seed)
    assert {t: shuffled(t, torch.Generator().manual_seed(t)) for t in order} == expected


def test_bursts_are_the_markov_chain_that_they_say():
    away, stretch, nodes, rounds = 0.3, 8.0, 20, 4000
    chosen = failure_models.bursts(nodes, away, stretch, seed=1)
    there = torch.zeros(rounds, nodes, dtype=torch.bool)
    for t in range(rounds):
        there[t, chosen(t + 1, torch.Generator().manual_seed(t))] = True
    before, after = there[:-1], there[1:]
    fail = 1 / stretch * away / (1 - away)
    for found, expected in [
        ((~there).double().mean(), away),
        ((~before & after).sum() / (~before).sum(), 1 / stretch),
        ((before & ~after).sum() / before.sum(), fail),
    ]:
        assert float(found) == pytest.approx(expected, rel=0.1)
    # stationary from the start: no node is there in round 1 more often than later
    first = [len(failure_models.bursts(nodes, away, stretch, seed)(1, UNUSED)) for seed in range(200)]
    assert statistics.mean(first) / nodes == pytest.approx(1 - away, rel=0.05)


def test_bursts_leave_somebody():
    chosen = failure_models.bursts(2, away=0.9, stretch=20, seed=0)
    alone = [chosen(t, torch.Generator().manual_seed(t)) for t in range(1, 400)]
    assert all(alone)
    assert {0, 1} == {node for present in alone for node in present}


@pytest.mark.parametrize(("away", "stretch"), [(0.5, 1.5), (0.9, 5.0), (0.0, 10.0)])
def test_bursts_that_cannot_be_drawn_are_refused(away, stretch):
    with pytest.raises(ValueError, match=rf"Invalid bursts: away={away}, stretch={stretch}; need"):
        failure_models.bursts(4, away, stretch, seed=0)


def test_the_same_nodes_are_always_missing():
    chosen = failure_models.always(5, (0, 3))
    assert [list(chosen(t, UNUSED)) for t in (1, 99)] == [[1, 2, 4]] * 2


@given(weights=WEIGHTS, away=st.floats(0.05, 0.95))
def test_expected_shares_add_up_and_heavy_nodes_lose(weights, away):
    shares = failure_models.expected_shares(weights, away)
    assert float(shares.sum()) == pytest.approx(1)
    heaviest = int(weights.argmax())
    assert shares[heaviest] <= weights[heaviest] + 1e-12


@given(n=st.integers(1, 7), away=st.floats(0.05, 0.95))
def test_equal_weights_are_preserved(n, away):
    assert failure_models.expected_shares(torch.full((n,), 1 / n).double(), away).tolist() == pytest.approx([1 / n] * n)
