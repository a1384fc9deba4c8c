"""Who takes part: fractions, counts, functions, draws with replacement; what is refused."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tailopt.rounds.participants import Sampling, checked_weights, participant_count
from tailopt.seeds import generator


def sampling(n: int = 6, count: Any = 3, kind: str = "uniform", seed: int = 0, weights: Any = None) -> Sampling:
    return Sampling(tuple(weights or [1.0] * n), count, kind, seed)


# How many


@pytest.mark.parametrize(
    ("nodes", "fraction", "wanted"),
    [(10, 1.0, 10), (10, 0.5, 5), (10, 0.01, 1), (1144, 0.001, 1), (7, 0.5, 4), (5, 0.5, 2), (3, 0.99, 3)],
)
def test_fractions(nodes: int, fraction: float, wanted: int) -> None:
    """max(1, round(f N)), ties to even as Python rounds."""
    assert participant_count(nodes, fraction, None) == wanted


@pytest.mark.parametrize("count", [1, 4, 10])
def test_counts(count: int) -> None:
    assert participant_count(10, 1.0, count) == count


def test_functions_choose_themselves() -> None:
    def chosen(t: int, source: torch.Generator) -> list[int]:
        return [t]

    assert participant_count(10, chosen, None) is chosen
    with pytest.raises(ValueError, match="not both"):
        participant_count(10, chosen, 3)


@pytest.mark.parametrize("bad", [1, 3, True])
def test_a_count_for_a_fraction_names_both_spellings(bad: Any) -> None:
    with pytest.raises(ValueError, match=rf"participation=0.5, or a count: participants={bad}"):
        participant_count(10, bad, None)


@pytest.mark.parametrize("bad", [0.0, -0.5, 1.5, math.nan, math.inf])
def test_fractions_out_of_range(bad: float) -> None:
    with pytest.raises(ValueError, match=r"need a fraction in \(0, 1\]"):
        participant_count(10, bad, None)


@pytest.mark.parametrize("bad", [0, -1, 11, 2.0, True, "3"])
def test_counts_out_of_range(bad: Any) -> None:
    with pytest.raises(ValueError, match="need a count from 1 to 10, the nodes there are"):
        participant_count(10, 1.0, bad)


def test_a_fraction_and_a_count_exclude_each_other() -> None:
    with pytest.raises(ValueError, match=r"participation=0.5 or participants=3, not both"):
        participant_count(10, 0.5, 3)


# Weights


def test_usable_weights() -> None:
    assert checked_weights([1, 2.5, 0], 3) == (1.0, 2.5, 0.0)
    assert checked_weights(torch.tensor([1.0, 2.0]), 2) == (1.0, 2.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, 2.0], "2 of them for 3 nodes; need one for each"),
        ([1.0] * 4, "4 of them for 3 nodes"),
        ([1.0, -2.0, 1.0], r"-2.0 for node 1; need 0 <= weight < inf"),
        ([1.0, 1.0, math.nan], "nan for node 2"),
        ([math.inf, 1.0, 1.0], "inf for node 0"),
        ([0.0, 0.0, 0.0], "of them are 0"),
    ],
)
def test_weights_that_cannot_be_used(weights: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=f"^Invalid weights: .*{message}"):
        checked_weights(weights, 3)


# The draw


def test_everybody() -> None:
    found = sampling(4, 4).draw(1)
    assert found.drawn == [0, 1, 2, 3]
    assert found.shares == dict.fromkeys(range(4), 0.25)


def test_shares_are_formed_in_float64() -> None:
    found = sampling(3, 3, weights=[3.0, 1.0, 0.7]).draw(1)
    total = math.fsum([3.0, 1.0, 0.7])
    assert found.shares == {0: 3.0 / total, 1: 1.0 / total, 2: 0.7 / total}


@settings(max_examples=50, deadline=None)
@given(
    n=st.integers(1, 30),
    data=st.data(),
    seed=st.integers(0, 2**40),
    t=st.integers(1, 10**6),
    kind=st.sampled_from(["uniform", "proportional"]),
)
def test_every_draw(n: int, data: st.DataObject, seed: int, t: int, kind: str) -> None:
    """Ascending, of the right number, distinct where uniform; shares ascending by node and adding up to 1."""
    weights = data.draw(st.lists(st.floats(0.01, 100), min_size=n, max_size=n))
    count = data.draw(st.integers(1, n))
    chosen = sampling(n, count, kind, seed, weights)
    found = chosen.draw(t)
    assert found.drawn == sorted(found.drawn) and len(found.drawn) == count
    assert all(0 <= i < n for i in found.drawn)
    assert list(found.shares) == sorted(set(found.drawn))
    assert math.fsum(found.shares.values()) == pytest.approx(1.0, rel=1e-14)
    if kind == "uniform":
        assert len(set(found.drawn)) == count
        for i, share in found.shares.items():
            assert share == weights[i] / math.fsum(weights[j] for j in found.drawn)
    else:
        assert found.shares == {i: k / count for i, k in Counter(found.drawn).items()}
    assert chosen.draw(t) == found == sampling(n, count, kind, seed, weights).draw(t)


def test_a_node_drawn_twice_is_one_term_with_twice_the_weight() -> None:
    chosen = sampling(3, 5, "proportional", weights=[1.0, 1.0, 1.0])
    found = chosen.draw(1)
    assert len(found.drawn) == 5 and len(found.shares) <= 3
    assert found.shares == {i: found.drawn.count(i) / 5 for i in sorted(set(found.drawn))}
    assert max(found.shares.values()) >= 0.4


def test_rounds_and_seeds_draw_differently() -> None:
    by_round = {tuple(sampling(20, 5).draw(t).drawn) for t in range(1, 11)}
    by_seed = {tuple(sampling(20, 5, seed=s).draw(1).drawn) for s in range(10)}
    assert len(by_round) == 10 and len(by_seed) == 10


def test_drawing_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    sampling().draw(1)
    sampling(kind="proportional").draw(1)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_proportional_sampling_preserves_the_objective() -> None:
    """The mean of the shares is p_i for any p_i; uniform sampling with weights is biased where they differ."""
    weights = [8.0, 1.0, 1.0, 0.5, 0.5, 5.0]
    p = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    rounds, k = 3000, 2
    means = {}
    for kind in ("proportional", "uniform"):
        total = torch.zeros(6, dtype=torch.float64)
        for t in range(1, rounds + 1):
            for i, share in sampling(6, k, kind, 3, weights).draw(t).shares.items():
                total[i] += share
        means[kind] = total / rounds
    deviation = (p * (1 - p) / (k * rounds)).sqrt()
    assert bool(((means["proportional"] - p).abs() < 4 * deviation).all())
    assert bool(((means["uniform"] - p).abs() > 10 * deviation).any())


def test_uniform_sampling_preserves_it_for_equal_weights() -> None:
    rounds = 2000
    total = Counter(i for t in range(1, rounds + 1) for i in sampling(5, 2).draw(t).drawn)
    for i in range(5):
        assert abs(total[i] / rounds - 0.4) < 4 * math.sqrt(0.4 * 0.6 / rounds)


def test_a_node_without_weight_is_never_drawn_in_proportion() -> None:
    chosen = sampling(3, 4, "proportional", weights=[1.0, 0.0, 2.0])
    assert all(1 not in chosen.draw(t).drawn for t in range(1, 200))


def test_those_that_take_part_need_a_weight() -> None:
    with pytest.raises(ValueError, match=r"in round 7, \[1\], all have weight 0"):
        sampling(2, lambda t, g: [1], weights=[1.0, 0.0]).draw(7)


# Functions


def test_a_function_is_given_the_round_and_its_generator() -> None:
    def chosen(t: int, source: torch.Generator) -> list[int]:
        return torch.randperm(6, generator=source)[:t].tolist()

    wanted = sorted(torch.randperm(6, generator=generator(5, "participants", 2))[:2].tolist())
    found = sampling(6, chosen, seed=5, weights=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).draw(2)
    assert found.drawn == wanted == list(found.shares)
    total = sum(i + 1 for i in wanted)
    assert found.shares == {i: (i + 1) / total for i in wanted}


@pytest.mark.parametrize("chosen", [(3, 1), {1, 3}, torch.tensor([3, 1]), iter([3, 1])], ids=lambda c: type(c).__name__)
def test_a_function_may_return_anything_with_numbers(chosen: Any) -> None:
    assert sampling(4, lambda t, g: chosen).draw(1).drawn == [1, 3]


@pytest.mark.parametrize(
    ("chosen", "what"),
    [([0, 4], "node 4"), ([-1], "node -1"), ([], "nobody"), ([2, 2], "a node twice")],
)
def test_a_function_that_names_what_there_is_not(chosen: list[int], what: str) -> None:
    with pytest.raises(ValueError, match=rf"named {what} for round 9: .*need distinct numbers from 0 to 3"):
        sampling(4, lambda t, g: chosen).draw(9)
