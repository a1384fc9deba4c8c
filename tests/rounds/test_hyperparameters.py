"""An algorithm's numbers at a moment: schedules by round and by step, patterns, the order of thresholds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tailopt
from tailopt.rounds.guard import bound
from tailopt.rounds.hyperparameters import AlgorithmHyperparameters
from tailopt.schedules import power, warmup

NAMES = ["layer.weight", "layer.bias"]


def bi2clip(**more: Any) -> tailopt.Algorithm:
    given = {"ilr": 0.5, "olr": 1.0, "i_u": 1.0, "i_d": 0.1, "o_u": 0.2, "o_d": 0.05, **more}
    return tailopt.algorithm("bi2clip", **given)


def test_without_schedules_everything_is_constant() -> None:
    found = AlgorithmHyperparameters(bi2clip(), None, NAMES)
    assert (
        found.inner.at(1, 0)
        == found.inner.at(9, 123)
        == {"lr": 0.5, "u": 1.0, "d": 0.1, "weight_decay": 0.0, "dead_zone": 0.0, "momentum": 0.0}
    )
    assert (
        found.outer.at(1)
        == found.outer.at(9)
        == {
            "lr": 1.0,
            "u": 0.2,
            "d": 0.05,
            "dead_zone": 0.0,
            "momentum": 0.0,
        }
    )
    assert found.inner.rule.name == found.outer.rule.name == "biclip"
    assert not found.inner.by_step


def test_schedules_count_rounds() -> None:
    """The same in every step of a round; factors multiply, functions give the value."""
    found = AlgorithmHyperparameters(bi2clip(), {"ilr": power(-1.0), "o_u": lambda t: 0.2 * t, "olr": warmup(4)}, NAMES)
    for t in (3, 1, 2, 3):
        assert found.inner.at(t, 0)["lr"] == found.inner.at(t, 77)["lr"] == 0.5 * (1 / t)
        assert found.outer.at(t)["u"] == 0.2 * t
        assert found.outer.at(t)["lr"] == t / 4
        assert found.inner.at(t, 0)["u"] == 1.0
    assert not found.inner.by_step


def test_schedules_count_the_nodes_own_steps() -> None:
    """`taken` are the steps before this one: the first is step 1 of the run, whatever the round."""
    found = AlgorithmHyperparameters(bi2clip(), {"ilr": power(-1.0, per="step"), "i_u": power(0.5)}, NAMES)
    assert found.inner.by_step
    for t, taken in [(1, 0), (1, 4), (2, 3), (5, 0)]:
        numbers = found.inner.at(t, taken)
        assert numbers["lr"] == 0.5 * (1 / (taken + 1))
        assert numbers["u"] == t**0.5
    assert found.outer.at(3)["lr"] == 1.0


def test_an_outer_setting_has_no_steps_to_count() -> None:
    with pytest.raises(ValueError, match=r'^Invalid schedule of olr: per="step" counts local steps'):
        AlgorithmHyperparameters(bi2clip(), {"olr": power(-1.0, per="step")}, NAMES)


def test_a_schedule_of_what_there_is_not() -> None:
    with pytest.raises(
        ValueError, match=r"'ilt' is no setting .*did you mean 'ilr'\? It has: i_d, i_u, ilr, o_d, o_u, olr"
    ):
        AlgorithmHyperparameters(bi2clip(), {"ilt": power(-1.0)}, NAMES)
    with pytest.raises(ValueError, match=r"'i_d' is no setting"):
        AlgorithmHyperparameters(tailopt.algorithm("avg-l2clip", ilr=0.1, i_u=1.0), {"i_d": power(-1.0)}, NAMES)


def test_what_theory_returns_is_taken() -> None:
    found = AlgorithmHyperparameters(bi2clip(), tailopt.theory("bi2clip", 1.5), NAMES)
    assert found.inner.at(100, 0)["lr"] < 0.5 < found.inner.at(100, 0)["lr"] + 0.5
    assert found.inner.at(100, 0)["u"] > 1.0


def test_classes_of_torch_are_scheduled_by_the_same_names() -> None:
    algo = tailopt.Algorithm(
        torch.optim.Adam, torch.optim.SGD, outer_settings={"lr": 0.1}, inner_settings={"lr": 0.5, "momentum": 0.9}
    )
    found = AlgorithmHyperparameters(algo, {"ilr": power(-1.0), "olr": power(-0.5)}, NAMES)
    assert found.inner.at(4, 0) == {"lr": 0.125, "momentum": 0.9}
    assert found.outer.at(4) == {"lr": 0.05}


# Patterns


def test_patterns_become_a_list_for_the_parameters() -> None:
    rows = torch.tensor([[0.5], [1.5]])
    algo = bi2clip(i_u={"*.bias": 2.0, "*": rows}, i_d=0.1)
    numbers = AlgorithmHyperparameters(algo, None, NAMES).inner.at(1, 0)
    assert numbers["u"][0] is rows and numbers["u"][1] == 2.0
    assert numbers["d"] == 0.1


def test_patterns_are_scheduled_entry_by_entry() -> None:
    algo = bi2clip(i_u={"*.bias": 2.0, "*": torch.tensor([1.0, 3.0])}, i_d=0.1)
    u = AlgorithmHyperparameters(algo, {"i_u": power(1.0)}, NAMES).inner.at(3, 0)["u"]
    assert u[1] == 6.0 and u[0].tolist() == [3.0, 9.0]


def test_a_function_may_return_patterns() -> None:
    found = AlgorithmHyperparameters(bi2clip(), {"i_u": lambda t: {"*.bias": 1.0 * t, "*": 2.0 * t}}, NAMES)
    assert found.inner.at(3, 0)["u"] == [6.0, 3.0]


def test_a_parameter_that_no_pattern_fits() -> None:
    with pytest.raises(ValueError, match=r"Invalid i_u: no pattern of \['\*.bias'\] fits the parameter 'layer.weight'"):
        AlgorithmHyperparameters(bi2clip(i_u={"*.bias": 2.0}), None, NAMES).inner.at(1, 0)


# The order of thresholds


@pytest.mark.parametrize(
    ("level", "bad"), [("i", {"i_d": power(1.0)}), ("i", {"i_u": power(-1.0)}), ("o", {"o_d": power(1.0)})]
)
def test_a_lower_threshold_that_overtakes_names_the_round(level: str, bad: dict[str, Any]) -> None:
    """Ten times apart (four times outside): in order up to there, refused after."""
    found = AlgorithmHyperparameters(bi2clip(), bad, NAMES)
    last = 10 if level == "i" else 4
    numbers = found.inner.at(last, 0) if level == "i" else found.outer.at(last)
    assert numbers["d"] <= numbers["u"]
    with pytest.raises(
        ValueError, match=rf"^Invalid thresholds: {level}_d=.* exceeds {level}_u=.*in round {last + 1}\.$"
    ):
        found.inner.at(last + 1, 0) if level == "i" else found.outer.at(last + 1)


def test_the_order_is_kept_by_steps_too() -> None:
    found = AlgorithmHyperparameters(bi2clip(), {"i_d": power(1.0, per="step")}, NAMES)
    assert found.inner.at(2, 9)["d"] == 1.0
    with pytest.raises(ValueError, match=r"i_d=1.1.* exceeds i_u=1.0.*in round 2\."):
        found.inner.at(2, 10)


def test_the_order_is_kept_for_patterns_and_tensors() -> None:
    algo = bi2clip(
        i_u={"*.bias": 2.0, "*": torch.tensor([1.0, 3.0])}, i_d={"*.bias": 0.1, "*": torch.tensor([0.5, 0.1])}
    )
    found = AlgorithmHyperparameters(algo, {"i_d": power(1.0)}, NAMES)
    found.inner.at(2, 0)
    with pytest.raises(ValueError, match=r"^Invalid thresholds: need 0 <= i_d <= i_u everywhere.*in round 3\."):
        found.inner.at(3, 0)


def test_a_dead_zone_stays_below_a_scheduled_threshold() -> None:
    algo = tailopt.algorithm("avg-biclip", ilr=0.1, i_u=1.0, i_d=0.0, dead_zone=0.3)
    found = AlgorithmHyperparameters(algo, {"i_u": power(-1.0)}, NAMES)
    found.inner.at(3, 0)
    with pytest.raises(ValueError, match=r"dead_zone=0.3 exceeds .*in round 4\."):
        found.inner.at(4, 0)
    auto = tailopt.algorithm("avg-biclip", ilr=0.1, i_u=1.0, i_d=0.0, dead_zone="auto")
    assert AlgorithmHyperparameters(auto, {"i_u": power(-1.0)}, NAMES).inner.at(4, 0)["dead_zone"] == "auto"


# Limits


def test_the_limit_sums_the_rounds_own_steps() -> None:
    """Steps 6 to 8 of a node, scheduled by step and by round."""
    found = AlgorithmHyperparameters(bi2clip(), {"ilr": power(-1.0, per="step"), "i_u": power(1.0)}, NAMES)
    limit = found.inner.bound(2, 5, 3)
    assert limit.constant == pytest.approx(sum(0.5 / k * 2.0 for k in (6, 7, 8)))
    assert (limit.kind, limit.steps) == ("coordinate", 3)
    assert limit == bound(found.inner.rule, [found.inner.at(2, k) for k in (5, 6, 7)])
    assert found.inner.bound(2, 6, 3) != limit


def test_limits_of_nodes_that_take_other_steps() -> None:
    found = AlgorithmHyperparameters(bi2clip(), None, NAMES)
    assert found.inner.bound(1, 0, 2).constant == pytest.approx(1.0)
    assert found.inner.bound(1, 0, 4).constant == pytest.approx(2.0)
    assert found.inner.bound(7, 100, 4) is found.inner.bound(1, 0, 4), "constant settings are worked out once"


def test_many_rounds_keep_their_own_numbers() -> None:
    """More rounds than are remembered, in any order."""
    found = AlgorithmHyperparameters(bi2clip(), {"ilr": power(-0.5), "olr": power(-0.25)}, NAMES)
    for t in [*range(1, 200), *range(199, 0, -1)]:
        assert found.inner.at(t, 0)["lr"] == pytest.approx(0.5 / math.sqrt(t))
        assert found.outer.at(t)["lr"] == pytest.approx(t**-0.25)


def test_tensors_are_handed_on_as_they_are() -> None:
    rows: Tensor = torch.tensor([[0.5], [1.5]])
    found = AlgorithmHyperparameters(tailopt.algorithm("avg-biclip", ilr=0.1, i_u=rows, i_d=0.0), None, ["w"])
    assert found.inner.at(1, 0)["u"] is rows
    torch.testing.assert_close(found.inner.bound(1, 0, 2).constant, 0.2 * rows)


def test_schedules_are_described_by_what_they_give() -> None:
    given = {"ilr": power(-1.0, per="step"), "o_u": lambda t: 0.2 * t, "olr": warmup(4)}
    found = AlgorithmHyperparameters(bi2clip(), given, NAMES).sampled_schedules(40, 5)
    assert list(found) == ["ilr", "olr", "o_u"]
    assert list(found["o_u"]) == [f"round {t}" for t in (1, 2, 3, 10, 20, 30, 40)]
    assert found["olr"]["round 2"] == 0.5 and found["o_u"]["round 40"] == 8.0
    assert list(found["ilr"])[-1] == "step 200" and found["ilr"]["step 200"] == 0.0025
    assert list(AlgorithmHyperparameters(bi2clip(), given, NAMES).sampled_schedules(None, 5)["olr"])[-1] == "round 1000"
    assert AlgorithmHyperparameters(bi2clip(), None, NAMES).sampled_schedules(40, 5) == {}


def test_a_schedule_that_fails_later_is_described_by_its_error() -> None:
    found = AlgorithmHyperparameters(bi2clip(), {"ilr": lambda t: [0.1, 0.2][t - 1]}, NAMES).sampled_schedules(3, 5)
    assert found == {"ilr": {"round 1": 0.1, "round 2": 0.2, "round 3": "IndexError: list index out of range"}}


def test_a_long_schedule_of_torch_is_not_driven_to_its_end() -> None:
    halved = tailopt.schedules.from_torch(lambda opt: torch.optim.lr_scheduler.StepLR(opt, 10, 0.5), per="step")
    assert (
        list(AlgorithmHyperparameters(bi2clip(), {"ilr": halved}, NAMES).sampled_schedules(10**6, 10**3)["ilr"])[-1]
        == "step 1000"
    )
