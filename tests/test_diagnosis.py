"""What a diagnosis says follows from its numbers: finding, advice, certainty."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tailopt.diagnosis import Diagnosis, Noise, interval
from tailopt.tails import UNKNOWN, TailIndex

HEAVY = TailIndex(1.5, 1.4, 1.6, 0.01, 1000, 200.0, deepest_low=1.2, largest_batch=0.02)
LIGHT = TailIndex(6.0, 5.0, 8.0, 0.01, 1000, 200.0, deepest_low=4.0, largest_batch=0.02)
NOISE = Noise(1000, 1000, 0, 0, 0, LIGHT, LIGHT, 0.1, (1.0, 1.5, 2.0), 0.25, 0.5)


def diagnosis(noise: dict[str, Any] | None = None, **changes: Any) -> Diagnosis:
    """A diagnosis of light tails and equal scales, but for what is given."""
    overall = replace(NOISE, **(noise or {}))
    second = changes.pop("second_opinion", overall.tails)
    usual = {"norms": LIGHT, "agreement": 0.1, "batches": 256, "nonfinite": 0, **changes}
    return Diagnosis(
        {"w": overall}, overall, (1.0,), (0.3,), second_opinion=second, gram=torch.eye(2), survival={}, **usual
    )


@pytest.mark.parametrize(
    ("found", "finding", "certainty", "words"),
    [
        (diagnosis(), "light", "high", "nothing here speaks against plain SGD"),
        (diagnosis({"tails": HEAVY}), "heavy", "high", 'tailopt.BiClip(params), whose u="auto" would cut 25% of the'),
        (
            diagnosis({"scales": (0.1, 1.0, 10.0)}),
            "light",
            "high",
            "Unequal scales call for steps that do not depend on them",
        ),
        (diagnosis(norms=HEAVY), "light", "high", "clip the norm, as tailopt.L2Clip does"),
        (diagnosis(agreement=0.95), "light", "high", "mean cosine 0.95), so noise hardly matters"),
        (diagnosis({"tails": TailIndex(2.0, 1.5, 3.0)}), "cannot tell", "low", "that is on both sides of 2. "),
        (
            diagnosis({"tails": replace(LIGHT, deepest_low=1.5)}),
            "cannot tell",
            "low",
            "the largest values alone are heavier",
        ),
        (
            diagnosis({"tails": HEAVY}, second_opinion=LIGHT),
            "cannot tell",
            "low",
            "two ways to scale the coordinates disagree",
        ),
        (diagnosis({"tails": UNKNOWN, "constant": 999}), "cannot tell", "low", "only 1 of 1000 that were looked at"),
        (diagnosis(batches=64, norms=UNKNOWN), "light", "moderate", "there are only 64 batches, so rarer outliers"),
        (diagnosis(batches=64, nonfinite=3), "light", "low", "3 batches with NaN or infinite gradients were left out"),
        (diagnosis({"sparse": 600}), "light", "moderate", "60% of the coordinates had to be left out"),
        (diagnosis({"tails": replace(HEAVY, batches=9.0)}), "heavy", "moderate", "from 9 batches in effect"),
        (
            diagnosis({"tails": replace(LIGHT, largest_batch=0.9)}),
            "light",
            "moderate",
            "90% of the largest values are from one",
        ),
    ],
)
def test_the_words_follow_from_the_numbers(found: Diagnosis, finding: str, certainty: str, words: str) -> None:
    assert (found.finding, found.certainty) == (finding, certainty)
    assert words in found.advice
    assert f"Certainty: {certainty}" in found.advice
    assert "nan" not in found.advice and "  " not in found.advice


def test_an_uncertain_finding_recommends_nothing() -> None:
    """As of one sample at a time, where ten coordinates were left and half of the largest values are one batch's."""
    found = diagnosis({"sparse": 900, "tails": replace(LIGHT, largest_batch=0.5)})
    assert (found.finding, found.certainty) == ("light", "low")
    assert "too uncertain to act on" in found.advice and "SGD" not in found.advice


def test_a_pool_of_unequal_scales_is_explained() -> None:
    pooled = TailIndex(1.1, 1.0, 1.2, shares=(0.001, 0.01, 0.1), hill=(1.3, 1.1, 0.9))
    assert "down to 1.1." in diagnosis({"pooled": pooled, "scales": (0.01, 1.0, 100.0)}).advice
    assert "down to" not in diagnosis({"pooled": pooled, "tails": HEAVY}).advice, "there it is no explanation"


def test_an_index_as_text() -> None:
    assert interval(UNKNOWN) == "unknown"
    assert interval(TailIndex(9.04, 5.02, math.inf)) == "9 (90 % interval 5 and more)"


def test_counts_of_coordinates() -> None:
    noise = replace(NOISE, zero=100, constant=50, sparse=25)
    assert noise.standardised == 825 and noise.scale_ratio == 2.0
    assert math.isnan(replace(NOISE, scales=(0.0, 0.0, 0.0)).scale_ratio)
