"""How algorithms are compared: tuning that resumes, margins over seeds, verdicts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailopt.studies import protocol
from tailopt.studies.protocol import Claim, claim_lines, decide, mean_is_higher, mean_is_no_lower, tune
from tailopt.studies.search_spaces import SPACES
from tailopt.sweeps.search import draw_point
from tailopt.sweeps.space import settings_at

VALUES = st.lists(st.floats(-100, 100), min_size=2, max_size=5)


def test_tuning_chooses_the_least_and_tries_nothing_twice(tmp_path: Path) -> None:
    tried: list[Mapping[str, float]] = []

    def measure(settings: Mapping[str, float]) -> float:
        tried.append(settings)
        return abs(math.log(settings["ilr"] / 0.01))

    ranges = SPACES["fine-tuning"].ranges("avg-sgd")
    few = tune(measure, ranges, 3, value="score", record=tmp_path / "trials.jsonl")
    ticks: list[int] = []
    many = tune(measure, ranges, 5, value="score", record=tmp_path / "trials.jsonl", tick=ticks.append)
    assert len(tried) == 5 and sum(ticks) == 5 and many.trials[:3] == few.trials
    assert many.settings == min(tried, key=lambda settings: abs(math.log(settings["ilr"] / 0.01)))


def test_every_algorithm_is_tried_at_the_same_draws() -> None:
    """So that no algorithm is lucky: trial i lies at the same share of the way in every space."""
    shares = []
    for name in ("avg-sgd", "avg-adam"):
        interval = SPACES["scratch"].ranges(name)["ilr"]
        ilr = settings_at(draw_point(SPACES["scratch"].ranges(name), 0, 3))["ilr"]
        shares.append(math.log(ilr / interval.low) / math.log(interval.high / interval.low))
    assert shares[0] == pytest.approx(shares[1])


@given(ours=VALUES, theirs=VALUES)
def test_a_margin_is_antisymmetric(ours: list[float], theirs: list[float]) -> None:
    higher, lower = mean_is_higher(ours, theirs), mean_is_higher(theirs, ours)
    assert lower is (None if higher is None else not higher)


@pytest.mark.parametrize(
    ("ours", "theirs"), [([1.0], [2.0, 3.0]), ([1.0, math.nan], [2.0, 3.0]), ([1.0, 1.0], [math.inf, 3.0])]
)
def test_one_seed_or_a_broken_run_decides_nothing(ours: list[float], theirs: list[float]) -> None:
    assert mean_is_higher(ours, theirs) is None


@given(values=VALUES, shift=st.floats(0, 10))
def test_no_lower_holds_up_to_a_standard_deviation(values: list[float], shift: float) -> None:
    assert mean_is_no_lower([v + shift for v in values], values)


@pytest.mark.parametrize(("holds", "verdict"), [(True, "holds"), (False, "does not hold"), (None, "cannot tell")])
def test_verdicts(holds: bool | None, verdict: str) -> None:
    claim = decide(7, "Water is wet.", holds, "a wet finger")
    assert claim == Claim(7, "Water is wet.", verdict, "a wet finger")
    assert claim_lines([claim]) == [f"- **Claim 7: {verdict}.** Water is wet. Seen: a wet finger."]


def test_a_study_that_judges_nothing_gives_the_reason() -> None:
    assert claim_lines(None) == [protocol.UNJUDGED] and claim_lines([]) == []
