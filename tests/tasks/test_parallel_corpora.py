"""Pairs of sentences from every kind of file, and what each set of them is used for."""

from __future__ import annotations

import lzma
import os
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailopt.tasks import parallel_corpora
from tailopt.tasks.parallel_corpora import load_corpus, next_boundary, shuffled_by_source
from tailopt.tasks.table import task

DATA = os.environ.get("TAILOPT_TEST_DATA", "")
with_data = pytest.mark.skipif(not DATA, reason="TAILOPT_TEST_DATA names no folder with data")


def files() -> Path:
    return Path(DATA) / "translation"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    path = tmp_path / "pairs"
    path.mkdir()
    for stem, n in (("train", 7), ("val", 3)):
        for language in ("en", "de"):
            (path / f"{stem}.{language}").write_text("".join(f"{stem} {language} {i}\n" for i in range(n)))
    return str(path)


@with_data
@pytest.mark.parametrize(
    ("name", "file", "counts"),
    [
        ("multi30k-en-de", "multi30k.zip", {"train": 29000, "validation": 1014, "test": 1000}),
        ("multi30k-en-fr", "multi30k.zip", {"train": 29000, "validation": 1014, "test": 1000}),
        ("ted-en-de", "iwslt2017-ted-en-de.zip", {"train": 8079, "validation": 888}),
        ("news-en-de", "wmt14-news-en-fr-en-de.zip", {"train": 3000, "validation": 3000}),
        ("news-en-fr", "wmt14-news-en-fr-en-de.zip", {"train": 3000, "validation": 3000}),
        ("tatoeba-en-de", "tatoeba-en-de.tsv.xz", {"train": 167197, "validation": 2000}),
        ("tatoeba-en-fr", "tatoeba-en-fr.tsv.xz", {"train": 140787, "validation": 2000}),
    ],
)
def test_the_public_files_have_their_pairs(name: str, file: str, counts: dict[str, int]) -> None:
    made = task(f"translation/{name}", data=str(files() / file))
    splits = load_corpus(str(files() / file), *name.split("-")[1:]).splits
    assert {role: len(pairs[0]) for role, pairs in splits.items()} == counts
    for number in counts.values():
        assert f"{number:,}" in made.data_description
    assert str(files()) not in made.data_description


@with_data
def test_a_folder_in_a_zip_holds_its_own_pair_of_languages() -> None:
    path = str(files() / "wmt14-news-en-fr-en-de.zip")
    french, german = load_corpus(path, "en", "fr"), load_corpus(path, "en", "de")
    assert french.splits["validation"][0] != german.splits["validation"][0]  # newstest2014 differs by pair
    assert " est " in " ".join(french.splits["train"][1]) and " ist " in " ".join(german.splits["train"][1])


@with_data
def test_tatoeba_validates_on_sentences_that_it_does_not_train_on() -> None:
    splits = load_corpus(str(files() / "tatoeba-en-de.tsv.xz"), "en", "de").splits
    assert not {*splits["train"][0]} & {*splits["validation"][0]}


@given(st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=40), st.integers(0, 40))
def test_a_cut_leaves_no_sentence_on_both_sides(sources: list[str], cut: int) -> None:
    order = shuffled_by_source(sources)
    assert sorted(order) == list(range(len(sources)))
    at = next_boundary(sources, order, min(cut, len(order)))
    assert at >= min(cut, len(order))
    if cut:
        assert not {sources[i] for i in order[:at]} & {sources[i] for i in order[at:]}


def test_a_set_without_a_name_for_it_trains_and_is_named(tmp_path: Path) -> None:
    for stem, n in (("newstest2013", 3), ("newstest2014", 5), ("dev", 9)):
        for language in ("en", "de"):
            (tmp_path / f"{stem}.{language}").write_text("".join(f"{stem} {i}\n" for i in range(n)))
    corpus = load_corpus(str(tmp_path), "en", "de")
    assert [len(corpus.splits[role][0]) for role in ("train", "validation")] == [5, 9]
    assert "newstest2014 5 pairs as train" in corpus.description and "dev 9 pairs" in corpus.description


def test_the_same_pairs_from_a_zip_a_folder_and_compressed(tmp_path: Path, folder: str) -> None:
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for path in Path(folder).iterdir():
            archive.write(path, f"deep/inside/{path.name}")
    for path in Path(folder).iterdir():
        (tmp_path / "xz").mkdir(exist_ok=True)
        (tmp_path / "xz" / f"{path.name}.xz").write_bytes(lzma.compress(path.read_bytes()))
    plain = load_corpus(folder, "en", "de").splits
    assert load_corpus(str(tmp_path / "all.zip"), "en", "de").splits == plain
    assert load_corpus(str(tmp_path / "xz"), "en", "de").splits == plain


def test_a_missing_column_of_the_hub_is_named() -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"translation": [{"en": "a", "cs": "b"}]})
    with pytest.raises(ValueError, match=r"the translation column of news \(train\) has no column 'de'"):
        parallel_corpora._pairs_of_rows(rows, ("en", "de"), "en", "de", "news (train)")
    rows = datasets.Dataset.from_dict({"en": ["a"], "nl": ["b"]})
    with pytest.raises(ValueError, match="news has no column 'de'; it has en, nl"):
        parallel_corpora._pairs_of_rows(rows, ("en", "de"), "en", "de", "news")


def test_columns_of_the_hub_are_read_in_both_layouts() -> None:
    datasets = pytest.importorskip("datasets")
    nested = datasets.Dataset.from_dict({"translation": [{"en": "a", "de": "b"}, {"en": "", "de": "c"}]})
    plain = datasets.Dataset.from_dict({"english": ["a", "x"], "non_english": ["b", " "]})
    # half-empty pairs are left out
    assert parallel_corpora._pairs_of_rows(nested, ("en", "de"), "en", "de", "") == (["a"], ["b"])
    assert parallel_corpora._pairs_of_rows(plain, ("english", "non_english"), "en", "de", "") == (["a"], ["b"])
