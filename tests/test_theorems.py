"""The theorems' tables as values, their optima as optima, and where the printed statements go wrong."""

from __future__ import annotations

import math
import warnings

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from tailopt.schedules import check
from tailopt.theorems import MARGIN, O_U, THEOREMS
from tailopt.theory import Theory, theory

ALPHAS = [1.1, 1.2, 1.5, 1.8, 1.9]
every_alpha = pytest.mark.parametrize("alpha", ALPHAS)
alphas = st.floats(1.01, 1.99)
WITH_A_RATE = [name for name in THEOREMS if not name.startswith("adam-")]

# alpha: best exponents and rate to four digits; avg-l2clip (i_u, rate), bi2clip (ilr, i_u, rate) in the limit o_u -> 0,
# adagrad and rmsprop (ilr, i_u, rate).
TABLE = {
    1.1: ((0.4545, 0.0909), (-0.4583, 0.4167, 0.0417), (-0.9545, 0.4545, 0.0455)),
    1.2: ((0.4167, 0.1667), (-0.4286, 0.3571, 0.0714), (-0.9167, 0.4167, 0.0833)),
    1.5: ((0.3333, 0.3333), (-0.3750, 0.2500, 0.1250), (-0.8333, 0.3333, 0.1667)),
    1.8: ((0.2778, 0.4444), (-0.3462, 0.1923, 0.1538), (-0.7778, 0.2778, 0.2222)),
    1.9: ((0.2632, 0.4737), (-0.3393, 0.1786, 0.1607), (-0.7632, 0.2632, 0.2368)),
}


def quiet(name: str, alpha: float, **exponents: float) -> Theory:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return theory(name, alpha, **exponents)


def four(*numbers: float) -> object:
    return pytest.approx(list(numbers), abs=6e-5)


# --- Presets ----------------------------------------------------------------------------------------------------------


@every_alpha
def test_avg_l2clip(alpha: float) -> None:
    found = theory("avg-l2clip", alpha)
    assert four(*TABLE[alpha][0]) == [found.exponents["i_u"], found.rate]
    assert found.rate == pytest.approx(found.best_rate)
    assert (found.measure, found.per) == ("F(average) - F*", "step")
    ilr, i_u = found.schedules["ilr"], found.schedules["i_u"]
    assert [ilr.factor(t) for t in (1, 2, 9)] == pytest.approx([1, 2 / 3, 2 / 10])
    assert i_u.factor(7) == pytest.approx(7 ** (1 / (2 * alpha)))
    assert ilr.per == i_u.per == "step"


@every_alpha
def test_bi2clip_takes_a_small_o_u_and_the_exponents_that_belong_to_it(alpha: float) -> None:
    nu, zeta, sigma = TABLE[alpha][1]
    scale = 1 - 2 * O_U
    found = theory("bi2clip", alpha)
    e = found.exponents
    assert four(scale * nu, scale * zeta, scale * sigma) == [e["ilr"], e["i_u"], found.rate]
    assert (e["o_u"], e["olr"], e["o_d"]) == pytest.approx((0.01, -0.51, -0.59))
    assert e["i_d"] == pytest.approx(-scale * (alpha - 1) / (4 * alpha - 2) - 0.1)
    assert four(sigma) == [found.best_rate]
    for term in ("r_1", "r_2", "r_6", "r_7"):  # these bind together
        assert found.terms[term] == pytest.approx(found.rate)


@given(alphas, st.floats(0.001, 0.499))
def test_bi2clip_follows_a_given_o_u(alpha: float, o_u: float) -> None:
    sigma = (alpha - 1) / (4 * alpha - 2)
    assert theory("bi2clip", alpha, o_u=o_u).rate == pytest.approx((1 - 2 * o_u) * sigma)


@every_alpha
def test_the_limit_exponents_with_a_positive_o_u_cost_more(alpha: float) -> None:
    nu, zeta = -alpha / (4 * alpha - 2), 1 / (4 * alpha - 2)
    sigma = (alpha - 1) / (4 * alpha - 2)
    with pytest.warns(UserWarning, match="promise no decay"):
        found = theory("bi2clip", alpha, olr=-0.5, ilr=nu, i_u=zeta, o_u=0.1)
    assert found.rate == pytest.approx(sigma - 0.2)


@every_alpha
@pytest.mark.parametrize("name", ["adagrad-biclip", "rmsprop-biclip", "adagrad-biclip-l2", "rmsprop-biclip-l2"])
def test_adagrad_and_rmsprop(name: str, alpha: float) -> None:
    found = theory(name, alpha)
    assert four(*TABLE[alpha][2]) == [found.exponents["ilr"], found.exponents["i_u"], found.rate]
    assert found.exponents["olr"] == 0
    assert found.exponents["i_d"] == pytest.approx(-0.6)
    assert found.rate == pytest.approx(found.best_rate)
    assert (found.measure, found.per) == ("min ||grad F||^2", "round")


@every_alpha
def test_the_terms_of_adagrad_at_the_optimum(alpha: float) -> None:
    sigma, found = (alpha - 1) / (2 * alpha), theory("adagrad-biclip", alpha)
    expected = {
        "r_1": sigma,
        "r_2": sigma,
        "r_3": (2 * alpha - 1) / (2 * alpha),
        "r_3, v_0 = 0": sigma,
        "r_4": 1 / 2,
        "r_5": 0.6,
        "r_6": sigma,
    }
    assert found.terms == pytest.approx(expected)


@every_alpha
def test_avg_biclip_is_a_remark(alpha: float) -> None:
    sigma, found = (alpha - 1) / (2 * alpha), theory("avg-biclip", alpha)
    assert found.rate == pytest.approx(sigma)
    assert found.exponents == pytest.approx(
        {"ilr": -(alpha + 1) / (2 * alpha), "i_u": 1 / (2 * alpha), "i_d": -sigma - MARGIN}
    )
    assert "not a result of the paper" in found.remark


@every_alpha
def test_adam_promises_a_bound_only(alpha: float) -> None:
    found = theory("adam-biclip", alpha)
    assert found.rate is None
    assert found.best_rate is None
    assert min(found.terms.values()) == 0  # two terms neither decay nor grow
    assert sorted(found.terms.values())[2] > 0
    assert "O(1)" in found.remark


@pytest.mark.parametrize("outer", ["adagrad", "rmsprop", "adam"])
def test_l2_clipping_has_no_lower_threshold_and_the_same_rate(outer: str) -> None:
    found = theory(f"{outer}-l2clip", 1.5)
    assert list(found.exponents) == ["ilr", "olr", "i_u"]
    assert found.rate == theory(f"{outer}-biclip", 1.5).rate
    assert not any("i_d" in condition.text for condition in found.conditions)


@pytest.mark.parametrize("name", THEOREMS)
@given(alpha=alphas)
@example(alpha=math.nextafter(1.0, 2.0))
@example(alpha=math.nextafter(2.0, 1.0))
def test_presets_keep_their_conditions(name: str, alpha: float) -> None:
    found = quiet(name, alpha)
    assert found.conditions
    assert all(condition.holds for condition in found.conditions)
    assert set(check(found, list(found.exponents))) == set(found.exponents)


# --- Optima are optima ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_A_RATE)
@given(alpha=alphas, data=st.data())
def test_no_exponents_beat_the_best_rate(name: str, alpha: float, data: st.DataObject) -> None:
    preset = theory(name, 1.5)
    near = theory(name, alpha).exponents
    moves = {key: data.draw(st.floats(-1, 1) | st.floats(-0.01, 0.01)) for key in preset.exponents}
    if name == "avg-l2clip":
        moves["ilr"] = 0.0
    found = quiet(name, alpha, **{key: near[key] + move for key, move in moves.items()})
    assume(found.rate is not None)
    assert found.rate is not None
    assert found.best_rate is not None
    assert found.rate <= found.best_rate + 1e-9


@pytest.mark.parametrize("name", WITH_A_RATE)
@given(alpha=alphas, data=st.data())
def test_the_rate_is_the_smallest_term(name: str, alpha: float, data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(sorted(theory(name, alpha).exponents)))
    found = quiet(name, alpha, **{key: data.draw(st.floats(-1, 1))})
    if all(condition.holds for condition in found.conditions):
        assert found.rate == min(found.terms.values())
    else:
        assert found.rate is None


# --- What the printed statements get wrong ----------------------------------------------------------------------------


@given(alphas, st.floats(0.001, 2), st.floats(0, 2), st.floats(0.001, 2))
def test_the_printed_condition_of_the_adaptive_theorems_allows_no_decay(
    alpha: float, i_u: float, above: float, more: float
) -> None:
    """Printed: olr - i_u - 1/2 > 0. Where the terms are a bound (ilr + i_u >= -1/2) the second one then grows."""
    found = quiet("adagrad-biclip", alpha, i_u=i_u, ilr=-1 / 2 - i_u + above, olr=i_u + 1 / 2 + more)
    assert found.rate is not None
    assert found.rate < -2 * i_u


@every_alpha
def test_the_optimum_breaks_the_printed_condition_and_keeps_the_proofs(alpha: float) -> None:
    found = theory("rmsprop-biclip", alpha)
    e = found.exponents
    assert e["olr"] - e["i_u"] - 1 / 2 == pytest.approx(-(alpha + 1) / (2 * alpha))
    assert e["olr"] - e["i_u"] + 1 / 2 == pytest.approx(found.rate)


@given(alphas, st.floats(0.001, 0.499))
def test_avg_l2clip_has_the_printed_rate_only_up_to_one_over_two_alpha(alpha: float, i_u: float) -> None:
    rate = theory("avg-l2clip", alpha, i_u=i_u).rate
    printed = (2 * alpha - 2) * i_u
    assert rate == pytest.approx(printed if i_u <= 1 / (2 * alpha) else 1 - 2 * i_u)


@every_alpha
def test_rmsprop_fixes_a_sum_adagrad_both(alpha: float) -> None:
    """With a moving average olr may grow while ilr falls by as much."""
    ilr = -(alpha + 1) / (2 * alpha)
    assert theory("rmsprop-biclip", alpha, olr=0.05, ilr=ilr - 0.05).rate == pytest.approx((alpha - 1) / (2 * alpha))
    with pytest.warns(UserWarning, match=r"ilr \+ i_u >= -1/2 is broken"):
        assert theory("adagrad-biclip", alpha, olr=0.05, ilr=ilr - 0.05).rate is None


@pytest.mark.parametrize("name", WITH_A_RATE)
def test_constant_settings_keep_no_condition(name: str) -> None:
    with pytest.warns(UserWarning, match=r"i_u > 0 is broken, got 0[;.]"):
        found = theory(name, 1.5, **dict.fromkeys(theory(name, 1.5).exponents, 0.0))
    assert found.rate is None


# --- Failing nodes ----------------------------------------------------------------------------------------------------


@every_alpha
def test_sludgeclip_has_five_exponents_and_the_rate_of_avg_l2clip(alpha: float) -> None:
    found, whole = theory("SludgeClip", alpha), theory("avg-l2clip", alpha)
    g = found.exponents["i_u"]
    assert list(found.terms.values()) == pytest.approx(
        [1 - 2 * g, 1 - (2 - 2 * alpha) * g, 1 - (2 - alpha) * g, 2 - 2 * g, 2 * g * (alpha - 1)]
    )
    assert (found.rate, found.best_rate) == pytest.approx((whole.rate, whole.best_rate))
    assert found.exponents == whole.exponents
    assert found.schedules == whole.schedules


@given(alphas, st.floats(0.01, 0.49))
def test_three_of_the_five_never_bind(alpha: float, i_u: float) -> None:
    terms = quiet("sludgeclip", alpha, i_u=i_u).terms
    assert min(terms.values()) == min(terms["r_1"], terms["r_5"])


@every_alpha
@pytest.mark.parametrize("i_u", [0.05, 0.3])
def test_biased_sampling_lets_the_bound_grow(alpha: float, i_u: float) -> None:
    with pytest.warns(UserWarning, match="promise no decay, rate -"):
        found = theory("sludgeclip", alpha, biased=True, i_u=i_u)
    assert found.rate == pytest.approx(-2 * i_u)
    assert found.best_rate == 0
    assert f"O(T^{2 * i_u:.4g})" in str(found)
