"""The translation study: its columns find their data, it runs end to end, goes on, and judges claim 9 by figures."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from tailopt.studies import translation
from tailopt.studies.comparison import AlgorithmResult, Comparison, ComparisonPlan, SeedRun, TaskSpec
from tailopt.studies.study import StudyOptions
from tailopt.studies.translation import ALGORITHMS, CORPORA, evaluate_claims, labels, located
from tests.studies.unjudged import assert_unjudged

pytest.importorskip("sacrebleu")
pytest.importorskip("nltk")
pytest.importorskip("matplotlib")
transformers = pytest.importorskip("transformers")

WORDS = {
    "en": (("two", "three"), ("red", "old"), ("houses", "dogs", "cars"), ("burn", "sleep")),
    "de": (("zwei", "drei"), ("rote", "alte"), ("Häuser", "Hunde", "Autos"), ("brennen", "schlafen")),
    "fr": (("deux", "trois"), ("rouges", "vieux"), ("maisons", "chiens", "voitures"), ("brûlent", "dorment")),
}


@pytest.fixture
def corpora(tmp_path: Path) -> Path:
    """TED en-de as it should be, Multi30k and WMT's news in the place of the others."""
    for name, languages in (("ted-en-de", "en de"), ("multi30k", "en de fr"), ("wmt14-news-en-fr", "en fr")):
        folder = tmp_path / "corpora" / name
        folder.mkdir(parents=True)
        for language in languages.split():
            lines = [" ".join(words) + "\n" for words in itertools.product(*WORDS[language])]
            (folder / f"train.{language}").write_text("".join(lines[:20]), encoding="utf-8")
            (folder / f"val.{language}").write_text("".join(lines[20:]), encoding="utf-8")
    return tmp_path / "corpora"


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    known = ["<pad>", "</s>", "<unk>", "translate", "English", "to", "German", "French", ":"]
    known += [word for rows in WORDS.values() for row in rows for word in row]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(tmp_path / "words")
    return str(tmp_path / "words")


def test_columns_find_their_files_or_a_stand_in(corpora: Path) -> None:
    assert located("TED (en-de)", str(corpora)) == (str(corpora / "ted-en-de"), "")
    assert located("TED (en-fr)", str(corpora)) == (str(corpora / "multi30k"), "Multi30k")
    assert located("NewsComm (en-fr)", str(corpora)) == (str(corpora / "wmt14-news-en-fr"), "news sets of WMT")
    assert located("TED (en-de)", "") == ("", "")  # the public name
    one = str(corpora / "multi30k")
    assert located("NewsComm (en-fr)", one) == (one, "multi30k")


def test_labels_are_taken_in_any_spelling() -> None:
    assert labels("") == list(CORPORA)
    assert labels("TED-en-fr") == ["TED (en-fr)"]
    with pytest.raises(ValueError, match=r"Unknown task: 'wmt'. Need some of TED \(en-de\)"):
        labels("wmt")


def test_the_study_runs_and_goes_on(
    tmp_path: Path, corpora: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAILOPT_CACHE", str(tmp_path / "cache"))
    settings: dict[str, Any] = {"preset": "small", "data": str(corpora), "tokenizer": tokenizer, "device": "cpu"}
    settings["algorithms"] = "avg-sgd, bi2clip"
    out = translation.run(tmp_path / "out", StudyOptions(quick=True, progress=False, **settings))
    text = (out / "table.md").read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if line.startswith("| bi2clip | ") and " / 29.41" in line]  # the paper's
    assert "TED (en-fr): stand-in, Multi30k instead of the paper's data" in text
    assert "NewsComm (en-fr): stand-in, news sets of WMT" in text and "TED (en-de): stand-in" not in text
    assert "ted-en-de: train 20 pairs, val 4 pairs" in text and "tok:13a" in text
    assert_unjudged(out)
    assert (out / "translation.png").stat().st_size > 10_000
    found = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert len(found["cells"]) == 6
    assert all(math.isfinite(run["metrics"]["loss"]) for cell in found["cells"] for run in cell["runs"])
    before = {path: path.read_bytes() for path in out.glob("sweeps/*/trials.jsonl")}
    assert len(before) == 6
    translation.run(out, StudyOptions(quick=True, progress=False, **settings))
    assert {path: path.read_bytes() for path in out.glob("sweeps/*/trials.jsonl")} == before


def outcome(scores: dict[str, list[float]]) -> str:
    """The verdict where BLEU and METEOR of one column are these, seed by seed."""
    cells = []
    for name, numbers in scores.items():
        metrics = [{"bleu": score, "meteor": score + 20, "loss": 1.0} for score in numbers]
        runs = tuple(SeedRun(seed, found, [found], []) for seed, found in enumerate(metrics))
        cells.append(AlgorithmResult("TED (en-de)", name, {}, runs))
    seeds = tuple(range(len(next(iter(scores.values())))))
    columns = {"TED (en-de)": TaskSpec("translation/ted-en-de")}
    plan = ComparisonPlan(columns, tuple(scores), seeds=seeds)
    (claim,) = evaluate_claims(Comparison(plan, {}, tuple(cells)))
    assert claim.number == 9
    return claim.verdict


def test_claim_9_needs_a_difference_beyond_the_seeds() -> None:
    spread = (0.2, 0.0, -0.2, 0.1, -0.1)

    def by(level: float) -> list[float]:
        return [level + s for s in spread]

    others = {"avg-sgd": by(26.0), "avg-l2clip": by(27.0), "adam2": by(27.2)}
    assert {*others, "bi2clip"} == {*ALGORITHMS}
    assert outcome({**others, "bi2clip": by(29.0)}) == "holds"
    assert outcome({**others, "bi2clip": by(25.0)}) == "does not hold"
    assert outcome({**others, "bi2clip": [27.25 - s for s in spread]}) == "cannot tell"
    assert outcome({"avg-sgd": by(1.0), "bi2clip": by(9.0)}) == "cannot tell"  # two of the four are missing
    assert outcome({name: [1.0 + i] for i, name in enumerate(ALGORITHMS)}) == "cannot tell"  # one seed
    assert outcome({**others, "bi2clip": [math.nan, *by(29.0)[1:]]}) == "does not hold"  # it broke down, they did not
    nothing = {name: [0.1 * i] * 5 for i, name in enumerate(ALGORITHMS)}
    assert outcome(nothing) == "cannot tell"  # BLEU below 1: such numbers are no translations
