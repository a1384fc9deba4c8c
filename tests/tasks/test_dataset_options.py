"""Settings that every task on real data has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from tailopt.tasks.dataset_options import check_dataset_options, check_minimum, held_out_share
from tailopt.tasks.table import TASKS, task


@dataclass(frozen=True)
class Options:
    limit: int = 0
    evaluated: int = 0
    judge: str = "validation"
    hold_out: float = 0.1


def test_only_a_split_that_is_evaluated_is_held_out() -> None:
    assert held_out_share(Options()) == 0.0
    assert held_out_share(Options(judge="held-out")) == 0.1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"judge": "test"}, "Invalid judge: got 'test'; need one of validation, held-out"),
        ({"hold_out": 0.0}, "Invalid hold_out: got 0.0; need 0 < hold_out < 1. 0.1 is a tenth"),
        ({"hold_out": 1.0}, "Invalid hold_out: got 1.0"),
        ({"hold_out": float("nan")}, "Invalid hold_out: got nan"),
        ({"limit": -1}, "Invalid limit: got -1; need a whole number, 0 or more"),
        ({"evaluated": 0.5}, "Invalid evaluated: got 0.5; need a whole number, 0 or more"),
    ],
)
def test_values_out_of_range_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_dataset_options(replace(Options(), **wrong))


def test_a_task_may_have_more_splits_and_other_minimums() -> None:
    check_dataset_options(Options(judge="test"), ("validation", "test"))
    check_minimum(Options(limit=3), limit=3)
    with pytest.raises(ValueError, match="Invalid limit: got 3; need a whole number, 4 or more"):
        check_minimum(Options(limit=3), limit=4)


@pytest.mark.parametrize("name", [name for name in TASKS if name not in ("syntoken", "gaussian", "gradient-noise")])
def test_every_task_on_real_data_checks_them(name: str) -> None:
    for wrong in ({"judge": "train"}, {"hold_out": 1.0}, {"limit": -1}, {"evaluated": -1}):
        with pytest.raises(ValueError, match=f"Invalid {next(iter(wrong))}: got"):
            task(name, **wrong)
