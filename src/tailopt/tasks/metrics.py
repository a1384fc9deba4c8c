"""Metrics of tasks on real data, in percent.

    labels        accuracy, f1 (of the positive class), matthews     scikit-learn
    scores        spearman, pearson                                  SciPy
    answers       exact match and F1 by SQuAD's rules                torchmetrics
    translations  corpus BLEU (13a), METEOR                          sacrebleu, NLTK

Each is computed by the library that defines it, or that everybody uses for it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tailopt.optional import require


def label_metric(metric: str, truth: Tensor, predictions: Tensor) -> float:
    """Compute a metric of classes or of scores, by name. Predictions without variation, or not finite, correlate by 0.

    Examples:
        >>> import torch
        >>> truth, predictions = torch.tensor([1, 0, 1, 1]), torch.tensor([1, 0, 0, 1])
        >>> [round(label_metric(metric, truth, predictions), 2) for metric in ("accuracy", "f1", "matthews")]
        [75.0, 80.0, 57.74]
    """
    if metric in ("spearman", "pearson"):
        if not predictions.isfinite().all() or predictions.min() == predictions.max():
            return 0.0
        correlation = getattr(_label_library("scipy.stats"), f"{metric}r")
        return 100 * float(correlation(truth.double().numpy(), predictions.double().numpy()).statistic)
    functions = {"accuracy": "accuracy_score", "f1": "f1_score", "matthews": "matthews_corrcoef"}
    function = getattr(_label_library("sklearn.metrics"), functions[metric])
    options = {"zero_division": 0.0} if metric == "f1" else {}
    return 100 * float(function(truth.numpy(), predictions.numpy(), **options))


def _label_library(module: str) -> Any:
    return require(module, "The metrics need scikit-learn and scipy", "studies", package="scikit-learn scipy")


def answer_metrics(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Compute exact match and F1: means over the questions; for each question the best over its reference answers.

    Examples:
        >>> references = [["Eiffel Tower"], ["the year 1889", "in the year of 1889"]]
        >>> answer_metrics(["the Eiffel tower!", "of 1889"], references)
        {'exact_match': 50.0, 'f1': 83.33333587646484}
    """
    module = "torchmetrics.functional.text.squad"
    squad = require(module, "Exact match and F1 need torchmetrics", extra="studies").squad
    predicted = [{"id": str(i), "prediction_text": text} for i, text in enumerate(predictions)]
    expected = [
        {"id": str(i), "answers": {"text": list(answers), "answer_start": [0] * len(answers)}}
        for i, answers in enumerate(references)
    ]
    return {key: float(value) for key, value in squad(predicted, expected).items()}


def bleu(translations: Sequence[str], references: Sequence[str]) -> float:
    """Compute sacrebleu's corpus BLEU."""
    return float(_bleu().corpus_score(list(translations), [list(references)]).score)


def bleu_signature() -> str:
    """Return sacrebleu's description of how it computes BLEU, its version included."""
    measure = _bleu()
    measure.corpus_score(["a"], [["a"]])  # it knows the number of references only afterwards
    return str(measure.get_signature())


def _bleu() -> Any:
    return require("sacrebleu", "BLEU needs sacrebleu", extra="studies").BLEU(tokenize="13a")


class NoSynonyms:
    """Stands in for WordNet where its data are missing: no word has a synonym."""

    def synsets(self, word: str) -> list[Any]:
        """Return no synonyms."""
        return []


def wordnet() -> Any:
    """Return NLTK's WordNet.

    Raises:
        LookupError: its data are missing; the message has the command that downloads them.
    """
    reader = _nltk("nltk.corpus").wordnet
    try:
        reader.ensure_loaded()
    except LookupError:
        raise LookupError(
            "METEOR needs the data of WordNet: python -m nltk.downloader wordnet; or take another measure: "
            "meteor=auto, meteor=off."
        ) from None
    return reader


def meteor(translations: Sequence[str], references: Sequence[str], wordnet_needed: bool = False) -> tuple[str, float]:
    """Compute the mean of NLTK's METEOR over the sentences, times 100; returns ("meteor", value).

    Words match that are equal, have equal stems (Porter's), or are synonyms (WordNet's): English notions, applied to
    any target, as is usual. Without WordNet's data the third way to match is missing. The number is lower then, and has
    another name, "meteor_exact_stem"; with `wordnet_needed` that raises.
    """
    name, synonyms = "meteor", None
    try:
        synonyms = wordnet()
    except LookupError:
        if wordnet_needed:
            raise
        name, synonyms = "meteor_exact_stem", NoSynonyms()
    score = _nltk("nltk.translate.meteor_score").meteor_score
    # of whole lines: to split them into sentences, NLTK would need further data
    tokenize = _nltk("nltk.tokenize").NLTKWordTokenizer().tokenize
    scores = [
        score([tokenize(reference)], tokenize(translation), wordnet=synonyms)
        for translation, reference in zip(translations, references, strict=True)
    ]
    return name, 100 * statistics.fmean(scores)


def _nltk(module: str) -> Any:
    return require(module, "METEOR needs nltk", extra="studies")
