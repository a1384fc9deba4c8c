"""Closed forms and torch's own schedulers as oracles; then what is refused, and in which words."""

from __future__ import annotations

import math
import pickle
import random
import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from tailopt.schedules import Schedule, check, cosine, from_torch, per, power, value, warmup

times = st.integers(1, 10**6)


# --- The curves -------------------------------------------------------------------------------------------------------


@given(times, st.floats(-3, 3))
def test_a_power_is_a_power_of_t(t: int, exponent: float) -> None:
    assert power(exponent).factor(t) == float(t) ** exponent
    assert power(exponent).exponent == exponent


@given(times)
def test_a_shifted_power_is_two_over_t_plus_one(t: int) -> None:
    schedule = power(-1, per="step", shift=1)
    assert schedule.factor(t) == pytest.approx(2 / (t + 1), rel=1e-15)
    assert schedule.factor(1) == 1.0
    assert schedule.per == "step"


def test_warmup_is_a_line_that_ends_at_one() -> None:
    assert [warmup(5, start=0.5).factor(t) for t in (1, 5, 6, 1000)] == pytest.approx([0.6, 1, 1, 1])
    assert warmup(1).factor(1) == 1.0


def test_cosine_is_torchs_and_then_stays() -> None:
    ours = cosine(20, floor=0.1)
    torchs = from_torch(lambda opt: lr_scheduler.CosineAnnealingLR(opt, T_max=20, eta_min=0.1))
    assert [ours.factor(t) for t in range(1, 22)] == pytest.approx([torchs.factor(t) for t in range(1, 22)])
    assert ours.factor(40) == pytest.approx(0.1)


@given(times, st.floats(-2, 2), st.integers(1, 100))
def test_a_product_multiplies(t: int, exponent: float, length: int) -> None:
    first, second = power(exponent), warmup(length)
    assert (first * second).factor(t) == first.factor(t) * second.factor(t)


def test_products_count_what_their_parts_count() -> None:
    assert (power(1, "step") * warmup(3, per="step") * cosine(9, per="step")).per == "step"
    with pytest.raises(ValueError, match="one schedule counts rounds, the other steps"):
        power(1) * warmup(3, per="step")
    with pytest.raises(TypeError):
        power(1) * 2.0


# --- torch's schedulers -----------------------------------------------------------------------------------------------


def warm_then_cosine(opt: Optimizer) -> LRScheduler:
    first = lr_scheduler.LinearLR(opt, start_factor=0.1, total_iters=5)
    return lr_scheduler.SequentialLR(opt, [first, lr_scheduler.CosineAnnealingLR(opt, T_max=20)], milestones=[5])


MAKERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, 7, gamma=0.3),
    "ExponentialLR": lambda opt: lr_scheduler.ExponentialLR(opt, 0.9),
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda epoch: 1 / (1 + epoch)),
    "LinearLR": lambda opt: lr_scheduler.LinearLR(opt, 0.25, total_iters=10),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, max_lr=1.0, total_steps=40),
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(opt, base_lr=0.1, max_lr=1.0, step_size_up=4),
    "CosineAnnealingWarmRestarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=6),
    "SequentialLR": warm_then_cosine,
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_torch_scheduler_gives_its_learning_rates_in_any_order(name: str) -> None:
    opt = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0, momentum=0.9)
    scheduler, rates = MAKERS[name](opt), []
    for _ in range(40):
        rates.append(opt.param_groups[0]["lr"])
        opt.step()
        if len(rates) < 40:  # OneCycleLR has no more than it was told
            scheduler.step()
    order = list(range(1, 41)) * 2
    random.Random(0).shuffle(order)
    schedule = from_torch(MAKERS[name])
    assert [schedule.factor(t) for t in order] == [rates[t - 1] for t in order]


def halving(opt: Optimizer) -> LRScheduler:
    return lr_scheduler.ExponentialLR(opt, 0.5)


def test_a_torch_scheduler_survives_pickling() -> None:
    schedule = from_torch(halving, per="step")
    assert schedule.factor(3) == 0.25
    copy = pickle.loads(pickle.dumps(schedule))
    assert copy.factor(2) == 0.5
    assert copy.per == "step"


def test_a_scheduler_that_waits_for_a_metric_is_refused() -> None:
    with pytest.raises(ValueError, match="ReduceLROnPlateau waits for a metric"):
        from_torch(lambda opt: lr_scheduler.ReduceLROnPlateau(opt))


def test_what_is_no_scheduler_on_our_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match="make returned None"):
        from_torch(lambda opt: None)  # type: ignore[arg-type, return-value]
    other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    with pytest.raises(ValueError, match="another optimizer"):
        from_torch(lambda opt: lr_scheduler.StepLR(other, 3))


# --- Values -----------------------------------------------------------------------------------------------------------


def test_a_schedule_scales_numbers_tensors_and_mappings() -> None:
    half = power(-1)
    assert value(half, 0.5, 2) == 0.25
    assert torch.equal(value(half, torch.tensor([1.0, 4.0]), 2), torch.tensor([0.5, 2.0]))  # type: ignore[arg-type]
    scaled = value(half, {"bias": 2.0, "*": torch.tensor(6.0)}, 2)
    assert isinstance(scaled, dict)
    assert scaled["bias"] == 1.0
    assert torch.equal(scaled["*"], torch.tensor(3.0))


def test_scaling_leaves_the_base_alone() -> None:
    base = torch.tensor([1.0, 2.0])
    value(power(1), base, 7)
    assert base.tolist() == [1.0, 2.0]


def test_a_plain_function_gives_the_value_itself() -> None:
    assert value(lambda t: 0.1 * t, 5.0, 3) == pytest.approx(0.3)
    assert value(lambda t: {"bias": 1.0 / t}, 5.0, 2) == {"bias": 0.5}
    assert torch.equal(value(lambda t: torch.tensor(2.0), 5.0, 3), torch.tensor(2.0))  # type: ignore[arg-type]


def test_no_schedule_leaves_the_setting() -> None:
    assert value(None, 0.5, 9) == 0.5


def test_an_absent_threshold_stays_absent() -> None:
    assert value(power(-1), math.inf, 100) == math.inf


def test_counting() -> None:
    assert per(None) == per(lambda t: 1.0) == per(power(1)) == "round"
    assert per(power(1, "step")) == "step"


class Broken(Schedule):
    def factor(self, t: int) -> float:
        return {1: 1.0, 2: math.nan, 3: -0.5}[t]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: value(Broken(), 1.0, 2, "ilr"), "ilr at t=2: factor nan"),
        (lambda: value(Broken(), {"a": 1.0}, 3, "i_u"), "i_u at t=3: factor -0.5"),
        (lambda: value(lambda t: -1.0 / t, 1.0, 4, "ilr"), "ilr at t=4: value -0.25"),
        (lambda: value(lambda t: math.inf, 1.0, 1, "o_u"), "o_u at t=1: value inf"),
        (lambda: value(lambda t: {"w": math.nan}, 1.0, 1, "o_u"), "o_u['w'] at t=1: value nan"),
        (lambda: value(lambda t: torch.tensor([1.0, -2.0]), 1.0, 1, "i_d"), "i_d at t=1: value -2.0"),
        (lambda: value(power(400.0), 1.0, 10, "ilr"), "ilr at t=10: factor inf"),
        (lambda: value(power(300.0), 1e10, 10, "ilr"), "ilr at t=10: value inf"),
        (lambda: value(cosine(1), math.inf, 9, "o_u"), "o_u at t=9: value nan"),
        (lambda: value(power(1.0), "auto", 1, "i_u"), "i_u: 'auto' cannot be scaled"),  # type: ignore[arg-type]
        (lambda: value(None, 1.0, 0, "ilr"), "t: got 0"),
        (lambda: power(1.0).factor(0), "t: got 0"),
        (lambda: power(1.0).factor(2.5), "t: got 2.5"),  # type: ignore[arg-type]
        (lambda: power(math.nan), "exponent: got nan"),
        (lambda: power(1.0, shift=-1.0), "shift: got -1.0"),
        (lambda: power(1.0, per="epoch"), "per: got 'epoch'"),  # type: ignore[arg-type]
        (lambda: warmup(0), "length: got 0"),
        (lambda: warmup(3, start=1.5), "start: got 1.5"),
        (lambda: cosine(0), "total: got 0"),
        (lambda: cosine(3, floor=-0.1), "floor: got -0.1"),
    ],
)
def test_what_is_no_setting_is_refused_with_its_value(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^Invalid (schedule of )?{re.escape(message)}"):
        call()


@pytest.mark.parametrize("found", [None, "0.1", True])
def test_what_is_no_number_is_refused(found: object) -> None:
    with pytest.raises(TypeError, match=r"Invalid schedule of ilr at t=1: value"):
        value(lambda t: found, 1.0, 1, "ilr")  # type: ignore[arg-type]


# --- Schedules of an algorithm ----------------------------------------------------------------------------------------


def test_check_returns_the_schedules_by_setting() -> None:
    given_ones = {"ilr": power(-1), "i_u": lambda t: 1.0}
    assert check(given_ones, ["ilr", "i_u", "i_d"]) == given_ones
    assert check(SimpleNamespace(schedules=given_ones), ["ilr", "i_u"]) == given_ones
    assert check(None, ["ilr"]) == {}


def test_check_names_the_settings_there_are() -> None:
    with pytest.raises(ValueError, match=r"'olr' is no setting of this algorithm.*It has: i_u, ilr\."):
        check({"olr": power(-1)}, ["ilr", "i_u"])


@pytest.mark.parametrize(
    ("schedules", "message"),
    [
        ({"ilr": 0.1}, "A constant belongs to the algorithm's settings"),
        ({"ilr": lr_scheduler.StepLR}, "from_torch"),
        ([power(1)], "need a mapping"),
    ],
)
def test_check_refuses_what_is_no_schedule(schedules: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        check(schedules, ["ilr"])
