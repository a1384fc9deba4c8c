"""Claims that several studies judge: one test for each, whatever the study."""

from __future__ import annotations

import math

import pytest

from tailopt.studies import claims

pytest.importorskip("scipy", reason="the studies' extra is not installed")

SEEDS = (0.0, 0.2, -0.1, 0.1, -0.2)


def by(level: float, spread: float = 1.0) -> list[float]:
    """Scores around a level."""
    return [level + spread * s for s in SEEDS]


def near(level: float) -> list[float]:
    """Scores around a level, in another order of the seeds."""
    return [level + s for s in SEEDS[::-1]]


def test_coordinates_beat_norms_only_if_all_pairs_say_so() -> None:
    panel = {"avg-biclip": by(2.0), "avg-l2clip": by(1.0), "bi2clip": by(2.0), "bi2clip-l2": by(1.5)}
    assert claims.coordinates_beat_norms([panel]) is True
    assert claims.coordinates_beat_norms([panel, {**panel, "bi2clip-l2": by(3.0)}]) is False
    assert claims.coordinates_beat_norms([panel, {**panel, "bi2clip-l2": near(2.0)}]) is None
    assert claims.coordinates_beat_norms([{"avg-biclip": by(2.0)}]) is None  # nothing to compare with


def test_the_adam_pair_of_claim_3_is_compared_too() -> None:
    assert ("adam-biclip", "adam-l2clip") in claims.CLIPPING_PAIRS
    assert claims.coordinates_beat_norms([{"adam-biclip": by(1.0), "adam-l2clip": by(2.0)}]) is False


def test_the_best_of_each_kind_decides_claim_7() -> None:
    scores = {"avg-sgd": by(1.0), "adam-sgd": by(3.0), "avg-adam": by(2.0), "bi2clip": by(4.0)}
    assert claims.best_needs_more_than_sgd(scores) is True
    assert claims.best_needs_more_than_sgd({**scores, "bi2clip": by(2.5)}) is False
    assert claims.best_needs_more_than_sgd({**scores, "bi2clip": near(3.0)}) is None
    broken = {**scores, "adam-sgd": [math.nan] * 5, "avg-sgd": [math.nan] * 5}
    assert claims.best_needs_more_than_sgd(broken) is None  # nothing with SGD inside ended
    # l2clip and biclip-l2 are neither: they clip norms
    assert claims.best_needs_more_than_sgd({"avg-sgd": by(1.0), "avg-l2clip": by(2.0)}) is None


def test_being_first_needs_all_others_behind() -> None:
    scores = {"bi2clip": by(3.0), "adam2": by(2.0), "diloco": by(1.0)}
    assert claims.beats_all(scores, "bi2clip", ["adam2", "diloco"]) is True
    assert claims.beats_all({**scores, "adam2": by(3.5)}, "bi2clip", ["adam2", "diloco"]) is False
    assert claims.beats_all({**scores, "adam2": near(3.0)}, "bi2clip", ["adam2", "diloco"]) is None
    assert claims.beats_all(scores, "bi2clip", ["adam2", "avg-sgd"]) is None  # one was not run


def test_places_decide_who_leads_and_who_trails() -> None:
    scores = {name: by(float(level)) for level, name in enumerate("fedcba")}
    assert claims.leads(scores, "a", 2) is True and claims.leads(scores, "c", 2) is False
    assert claims.trails(scores, "f", 2) is True and claims.trails(scores, "a", 2) is False
    tied = {**scores, "b": near(3.0), "c": by(3.0)}
    assert claims.leads(tied, "c", 2) is None and claims.trails(tied, "c", 2) is False
    assert claims.leads({"a": [1.0], "b": [0.0]}, "a", 1) is None  # one seed


def test_ratios_of_errors_are_told_as_such() -> None:
    scores = {"ours": [-math.log(1.0)] * 5, "theirs": [-math.log(2.0)] * 5}
    assert claims.margins_text(scores, [("ours", "theirs")], ratio=True) == (
        "error of ours over that of theirs: 0.5 (0.5 to 0.5)"
    )
    assert claims.margins_text(scores, [("ours", "nobody")]) == ""
