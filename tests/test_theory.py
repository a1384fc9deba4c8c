"""`theory`: names in any spelling, exponents that are given, what is warned of and what is refused."""

from __future__ import annotations

import math

import pytest

from tailopt.schedules import power
from tailopt.theorems import THEOREMS
from tailopt.theory import theory


@pytest.mark.parametrize("name", THEOREMS)
def test_schedules_have_the_exponents(name: str) -> None:
    found = theory(name, 1.4)
    for setting, schedule in found.schedules.items():
        assert schedule.factor(1) == 1
        slope = math.log(schedule.factor(2 * 10**6) / schedule.factor(10**6)) / math.log(2)
        assert slope == pytest.approx(found.exponents[setting], abs=1e-5)


def test_a_broken_condition_is_named_with_its_value() -> None:
    with pytest.warns(UserWarning, match=r"bi2clip: the condition o_d < 0 is broken, got 0\.2\.") as caught:
        found = theory("bi2clip", 1.5, o_d=0.2)
    assert [c.text for c in found.conditions if not c.holds] == ["o_d < 0"]
    assert found.rate is None
    assert [warning.filename for warning in caught] == [__file__]


def test_a_power_schedule_can_be_asked_about() -> None:
    assert theory("avg-biclip", 1.5, i_d=power(-0.2)) == theory("avg-biclip", 1.5, i_d=-0.2)
    with pytest.raises(
        ValueError, match="Invalid schedule of i_u: it counts rounds; the theorem of avg-l2clip counts steps"
    ):
        theory("avg-l2clip", 1.5, i_u=power(0.2))


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("Bi^2Clip", "bi2clip"),
        ("RMSProp-TailClip", "rmsprop-biclip"),
        ("Adagrad-$L_2Clip$", "adagrad-l2clip"),
        ("AVG-L2CLIP", "avg-l2clip"),
        ("Avg-BiClip (L2)", "avg-biclip-l2"),
        ("SludgeClip", "sludgeclip"),
        ("RMS-$TailClip$", "rmsprop-biclip"),
        ("rmstailclip", "rmsprop-biclip"),
        ("AdamTailClip", "adam-biclip"),
        ("AdaGrad-TailClip", "adagrad-biclip"),
    ],
)
def test_names_in_the_papers_spelling(spelling: str, name: str) -> None:
    assert theory(spelling, 1.5).algorithm == name


def test_a_name_without_a_theorem_lists_those_with_one() -> None:
    with pytest.raises(ValueError, match=r"'avg-sgd' has no theorem\. Those with one: avg-l2clip, .*rmsprop-biclip"):
        theory("avg-sgd", 1.5)


@pytest.mark.parametrize("alpha", [1.0, 2.0, 0.5, math.nan, math.inf])
def test_alpha_is_strictly_between_one_and_two(alpha: float) -> None:
    with pytest.raises(ValueError, match=rf"Invalid alpha: got {alpha}; need 1 < alpha < 2\."):
        theory("bi2clip", alpha)


def test_exponents_are_checked() -> None:
    with pytest.raises(ValueError, match=r"avg-biclip has no setting 'o_u'\. It has: ilr, i_u, i_d\."):
        theory("avg-biclip", 1.5, o_u=0.1)
    with pytest.raises(ValueError, match=r"Invalid exponent of ilr: got nan"):
        theory("avg-biclip", 1.5, ilr=math.nan)


def test_it_prints_as_a_summary() -> None:
    lines = str(theory("rmsprop-biclip", 1.5)).splitlines()
    assert lines[0] == (
        "rmsprop-biclip, alpha = 1.5: min ||grad F||^2 = O(T^-0.1667) (at best 0.1667), T counts rounds"
    )
    assert "  i_u ~ t^0.3333" in lines
    with pytest.warns(UserWarning, match="ilr <= 0 is broken"):
        broken = theory("bi2clip", 1.5, ilr=0.5)
    assert "BROKEN ilr <= 0  (0.5)" in str(broken)
    assert "no rate for" in str(theory("adam-biclip", 1.5))


def test_only_failing_nodes_can_be_biased() -> None:
    with pytest.raises(ValueError, match=r"Invalid biased: True for avg-l2clip; need False\."):
        theory("avg-l2clip", 1.5, biased=True)
    with pytest.raises(ValueError, match="Invalid biased: 'x'"):
        theory("sludgeclip", 1.5, biased="x")  # type: ignore[arg-type]
