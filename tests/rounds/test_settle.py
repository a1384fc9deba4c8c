"""Who counts in a round, with what weight, and why the others do not."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailopt.rounds.drops import Dropped
from tailopt.rounds.guard import Exclusion
from tailopt.rounds.participants import Participants
from tailopt.rounds.settle import EveryoneExcluded, settle


def nan_in(node: int) -> Exclusion:
    return Exclusion(node, "w", math.nan, None, "not finite")


@given(
    st.lists(st.floats(0.01, 10.0), min_size=1, max_size=7),
    st.data(),
)
def test_weights_of_those_that_count_add_up_to_one(weights: list[float], data: st.DataObject) -> None:
    total = math.fsum(weights)
    who = Participants(list(range(len(weights))), {i: w / total for i, w in enumerate(weights)})
    left_out = data.draw(st.sets(st.sampled_from(who.drawn), max_size=len(weights) - 1))
    losses = {i: float(i) for i in who.drawn if i not in left_out}
    steps = dict.fromkeys(who.drawn, 3)
    settlement = settle(2, who, steps, [nan_in(i) for i in sorted(left_out)], losses)
    assert settlement.weights.keys() == set(who.drawn) - left_out
    assert math.fsum(settlement.weights.values()) == pytest.approx(1.0)
    ratio = {i: settlement.weights[i] / who.shares[i] for i in settlement.weights}
    assert all(r == pytest.approx(next(iter(ratio.values()))) for r in ratio.values())
    row = settlement.history_row({}, {})
    assert row["weights"] == [settlement.weights.get(i, 0.0) for i in who.drawn]
    assert row["loss"] == pytest.approx(sum(settlement.weights[i] * i for i in settlement.weights))
    assert [e["node"] for e in row["excluded"]] == sorted(left_out)


def test_without_exclusions_the_total_is_exactly_one() -> None:
    """A rounded sum would divide the mean by something else than 1, and change its bits."""
    n = next(n for n in range(2, 1000) if math.fsum([1 / n] * n) != 1.0)
    who = Participants(list(range(n)), dict.fromkeys(range(n), 1 / n))
    settlement = settle(1, who, dict.fromkeys(range(n), 1), [], dict.fromkeys(range(n), 0.0))
    assert settlement.total_share == 1.0 and settlement.weights == who.shares


def test_a_node_drawn_twice_has_two_entries_that_share_its_weight() -> None:
    who = Participants([0, 2, 2], {0: 1 / 3, 2: 2 / 3})
    row = settle(1, who, {0: 4, 2: 5}, [], {0: 1.0, 2: 4.0}).history_row({"accuracy": 0.5}, {})
    assert row["participants"] == [0, 2, 2] and row["steps"] == [4, 5, 5]
    assert row["weights"] == [1 / 3, 1 / 3, 1 / 3]
    assert row["loss"] == pytest.approx(3.0) and row["metrics"] == {"accuracy": 0.5}


def test_a_round_in_which_everything_was_lost_has_no_weights() -> None:
    who = Participants([0, 1], {0: 0.5, 1: 0.5})
    settlement = settle(1, who, {0: 3, 1: 3}, [Dropped.of(0), Dropped.of(1)], {})
    assert not settlement.counted_shares and not settlement.losses
    row = settlement.history_row({}, {})
    assert math.isnan(row["loss"]) and row["weights"] == [0.0, 0.0] and row["steps"] == [3, 3]


def test_an_exclusion_among_losses_ends_the_run() -> None:
    who = Participants([0, 1], {0: 0.5, 1: 0.5})
    with pytest.raises(EveryoneExcluded, match=r"Round 7: .*node 0: its contribution did not arrive; node 1: not fin"):
        settle(7, who, {0: 3, 1: 3}, [Dropped.of(0), nan_in(1)], {})


def test_the_error_that_ends_a_run_names_the_checkpoint_and_the_remedy() -> None:
    error = EveryoneExcluded("Round 5: no displacement can be used: nobody.")
    remedy = "Lower the learning rate, or look at the data."
    assert str(error.ending_run()) == f"{error} {remedy}"
    assert str(error.ending_run("There is no checkpoint yet.")) == f"{error} There is no checkpoint yet. {remedy}"
