"""Metrics of tasks on real data: closed forms, and the rules of the libraries that compute them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tailopt.tasks import metrics
from tailopt.tasks.metrics import answer_metrics, bleu, label_metric, meteor

pytest.importorskip("sklearn")
pytest.importorskip("torchmetrics")
pytest.importorskip("nltk")


@pytest.mark.parametrize(
    ("metric", "truth", "predictions", "value"),
    [
        ("accuracy", [1, 0, 1, 1], [1, 0, 0, 0], 50.0),
        ("f1", [1, 0, 1, 1], [1, 1, 0, 0], 40.0),  # precision 1/2, recall 1/3
        ("f1", [0, 0], [0, 0], 0.0),
        ("matthews", [1, 1, 0, 0], [1, 0, 0, 0], 100 / 3**0.5),
        ("matthews", [1, 1, 0, 0], [1, 1, 1, 1], 0.0),
        ("spearman", [0.0, 1.0, 5.0], [0.1, 0.2, 0.3], 100.0),
        ("pearson", [0.0, 1.0, 2.0], [3.0, 2.0, 1.0], -100.0),
        ("pearson", [0.0, 1.0], [2.0, 2.0], 0.0),
        ("spearman", [0.0, 1.0], [2.0, float("nan")], 0.0),
    ],
)
def test_metrics_of_labels_are_in_percent(
    metric: str, truth: list[float], predictions: list[float], value: float
) -> None:
    assert label_metric(metric, torch.tensor(truth), torch.tensor(predictions)) == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize(
    ("text", "answers", "exact", "f1"),
    [
        ("The  Broncos!", ["broncos"], 100, 100),  # case, article, punctuation, spaces
        ("a an the", ["The"], 100, 100),  # nothing is left of either: equal, by the script's second version
        ("theatre", ["atre"], 0, 0),  # an article is a word, not letters of one
        ("Santa Clara", ["Santa Clara, California", "Levi's Stadium"], 0, 80),  # precision 1, recall 2/3
        ("gold gold", ["gold"], 0, 200 / 3),  # a word counts as often as both have it
        ("Denver", ["Carolina", "Denver Broncos", "Denver"], 100, 100),  # the best reference
        ("", ["Denver"], 0, 0),
    ],
)
def test_the_rules_of_the_official_script(text: str, answers: list[str], exact: float, f1: float) -> None:
    found = answer_metrics([text], [answers])
    assert found["exact_match"] == exact and found["f1"] == pytest.approx(f1, rel=1e-6)


def test_scores_are_means_over_the_questions() -> None:
    found = answer_metrics(["Denver", "blue", "x"], [["Denver"], ["gold"], ["x y"]])
    assert found["exact_match"] == pytest.approx(100 / 3) and found["f1"] == pytest.approx((100 + 0 + 200 / 3) / 3)


def test_bleu_is_that_of_a_corpus() -> None:
    pytest.importorskip("sacrebleu")
    assert bleu(["the cat sat on the mat", "it ran"], ["the cat sat on the mat", "it ran"]) == pytest.approx(100)
    # 4 of 5 words, 3 of 4 pairs, 2 of 3 triples, 1 of 2 quadruples, as long as the reference
    value = 100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25
    assert bleu(["a b c d x"], ["a b c d e"]) == pytest.approx(value)


def has_wordnet() -> bool:
    try:
        metrics.wordnet()
    except LookupError:
        return False
    return True


@pytest.mark.skipif(not has_wordnet(), reason="no data of WordNet: python -m nltk.downloader wordnet")
def test_meteor_matches_words_stems_and_synonyms() -> None:
    for said in ("the car stops now", "the car stopped now", "the auto stops now"):
        assert meteor([said], ["the car stops now"]) == ("meteor", pytest.approx(100 * (1 - 0.5 / 64)))
    assert meteor(["the bike stops now"], ["the car stops now"])[1] < 80
    pair = meteor(["a b c d", "x"], ["a b c d", "y"])
    assert pair == ("meteor", pytest.approx(50 * (1 - 0.5 / 64)))


def without_wordnet(program: str) -> subprocess.CompletedProcess[str]:
    """Run in a process that finds no data of NLTK."""
    clean = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "NLTK_DATA": ""}
    whole = f"import nltk.data; nltk.data.path.clear()\nfrom tailopt.tasks.metrics import *\n{program}"
    return subprocess.run([sys.executable, "-c", whole], env=clean, capture_output=True, text=True, timeout=120)


def test_meteor_without_wordnet_has_another_name() -> None:
    ended = without_wordnet("print(*meteor(['the automobile stopped now'], ['the car stops now']))")
    name, value = ended.stdout.split()
    assert name == "meteor_exact_stem" and 60 < float(value) < 80  # three of four words
