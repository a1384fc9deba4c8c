"""Pairs of sentences in two languages, from files or from the hub, split into train, validation and perhaps test.

Files may be parts of the public corpora. `ParallelCorpus.description` lists the sets of pairs and the use of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from tailopt.seeds import generator
from tailopt.tasks import files, hub, pretrained

LANGUAGES = {"en": "English", "de": "German", "fr": "French", "ro": "Romanian"}  # those that T5 was trained to name

# corpus -> its public name
PUBLIC_NAMES: Mapping[str, str] = {
    "ted": "IWSLT/iwslt2017",
    "newscomm": "Helsinki-NLP/news_commentary",
    "multi30k": "bentrevett/multi30k",
    "news": "wmt/wmt14",
    "tatoeba": "sentence-transformers/parallel-sentences-tatoeba",
}
# name of a set of pairs -> what it is used for
SPLIT_OF_NAME = {
    "train": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "dev": "validation",
}

Pairs = tuple[list[str], list[str]]  # sentences in the source language, and their translations


@dataclass(frozen=True)
class ParallelCorpus:
    """Pairs by what they are used for ("train", "validation", perhaps "test"), and a sentence about them."""

    splits: Mapping[str, Pairs]
    description: str


@dataclass(frozen=True)
class HubLayout:
    """How a data set of the hub is laid out.

    Attributes:
        configuration: its name for a pair of languages; "" for none.
        splits: our name -> the name at the hub.
        columns: of the two sentences, where they are neither `translation` nor named by language.
        options: of `datasets.load_dataset`.
    """

    configuration: str = ""
    splits: Mapping[str, str] = field(default_factory=lambda: {"train": "train", "validation": "validation"})
    columns: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


_ALL_SPLITS = {"train": "train", "validation": "validation", "test": "test"}
HUB_LAYOUTS: Mapping[str, HubLayout] = {
    # stored as a program, which is no longer run; the hub keeps its output on a branch
    "IWSLT/iwslt2017": HubLayout(
        "iwslt2017-{source}-{target}", _ALL_SPLITS, options={"revision": "refs/convert/parquet"}
    ),
    "Helsinki-NLP/news_commentary": HubLayout("{first}-{second}", {"train": "train"}),
    "bentrevett/multi30k": HubLayout("", _ALL_SPLITS),
    # newstest2013 to train on, newstest2014 to validate: the training split has forty million pairs
    "wmt/wmt14": HubLayout(
        "",
        {"train": "validation", "validation": "test"},
        options={"data_files": {name: "{target}-{source}/" + name + "-*.parquet" for name in ("validation", "test")}},
    ),
    "sentence-transformers/parallel-sentences-tatoeba": HubLayout(
        "{source}-{target}", {"train": "train", "validation": "dev"}, ("english", "non_english")
    ),
}


@lru_cache(maxsize=4)
def load_corpus(data: str, source: str, target: str) -> ParallelCorpus:
    """Load all pairs of two languages from a path, or from a data set of the hub."""
    path = Path(data).expanduser()
    if path.exists():
        is_table = path.is_file() and path.suffix != ".zip"
        return _from_table(path, source, target) if is_table else _from_aligned_files(path, source, target)
    if pretrained.looks_like_a_path(data) or path.suffix in (".zip", ".tsv", ".txt", ".xz", ".gz"):
        raise FileNotFoundError(
            f"Invalid data: there is no {data!r}. Give a folder or zip file of .{source} and .{target} files, "
            "a file with one pair per line, or a data set of the hub: --data PATH."
        )
    return _from_hub(data, source, target)


def shuffled_by_source(sources: Sequence[str]) -> list[int]:
    """Return a fixed random order in which equal sources are neighbours.

    A cut between two different sources then leaves none of them on both sides.

    Examples:
        >>> shuffled_by_source(["a", "b", "a", "c"])
        [3, 1, 0, 2]
    """
    positions: dict[str, list[int]] = {}
    for i, text in enumerate(sources):
        positions.setdefault(text, []).append(i)
    groups = list(positions.values())
    order = torch.randperm(len(groups), generator=generator(0, "pairs")).tolist()
    return [i for group in order for i in groups[group]]


def next_boundary(sources: Sequence[str], order: Sequence[int], cut: int) -> int:
    """Return the first position in `order`, from `cut` on, at which the source differs from the one before it."""
    while 0 < cut < len(order) and sources[order[cut]] == sources[order[cut - 1]]:
        cut += 1
    return cut


# ---- where pairs come from ----


def _from_aligned_files(path: Path, source: str, target: str) -> ParallelCorpus:
    """Read files that line up, NAME.en and NAME.de, in a folder or zip file."""
    folder = files.Folder.of(path, within=f"{source}-{target}")
    names = {*map(files.without_compression, folder.names())}
    stems = sorted(name.removesuffix(f".{source}") for name in names if name.endswith(f".{source}"))
    stems = [stem for stem in stems if f"{stem}.{target}" in names]
    if not stems:
        raise FileNotFoundError(
            f"Invalid data: {path} has no two files NAME.{source} and NAME.{target}; it has "
            f"{', '.join(folder.names()) or 'nothing'}. Give one that has."
        )
    return _with_splits({stem: _aligned_pairs(folder, stem, source, target) for stem in stems}, path.name)


def _aligned_pairs(folder: files.Folder, stem: str, source: str, target: str) -> Pairs:
    sources, targets = (files.lines(folder.text(f"{stem}.{language}")) for language in (source, target))
    if len(sources) != len(targets):
        raise ValueError(
            f"Invalid data: {stem}.{source} of {folder.path} has {len(sources):,} lines and {stem}.{target} "
            f"{len(targets):,}; need as many, the n-th being each other's translation."
        )
    return _without_empty(sources, targets)


def _from_table(path: Path, source: str, target: str) -> ParallelCorpus:
    """Read one file with one pair per line: source, tab, target; further columns are ignored."""
    rows = [line.split("\t") for line in files.lines(files.read(path).removeprefix("\ufeff"))]
    for number, row in enumerate(rows, 1):
        if len(row) < 2:
            raise ValueError(
                f"Invalid data: line {number} of {path} has one column; need two, {LANGUAGES[source]} and "
                f"{LANGUAGES[target]}, with a tab between."
            )
    return _with_splits({path.name: _without_empty([row[0] for row in rows], [row[1] for row in rows])}, path.name)


def _from_hub(data: str, source: str, target: str) -> ParallelCorpus:
    layout = HUB_LAYOUTS.get(data, HubLayout())
    first, second = sorted((source, target))
    languages = {"source": source, "target": target, "first": first, "second": second}
    configuration = [layout.configuration.format(**languages)] if layout.configuration else []
    options = dict(layout.options)
    if "data_files" in options:
        options["data_files"] = {split: path.format(**languages) for split, path in options["data_files"].items()}
    sets = {}
    for name, split in layout.splits.items():
        rows = hub.dataset(data, *configuration, split=split, **options)
        sets[name] = _pairs_of_rows(rows, layout.columns or (source, target), source, target, f"{data} ({split})")
    return _with_splits(sets, f"the data set {data}", layout.splits)


def _pairs_of_rows(rows: Any, columns: tuple[str, ...], source: str, target: str, where: str) -> Pairs:
    """Return the two sentences of all rows: in a column `translation` by language, or in two columns."""
    if "translation" in rows.column_names:
        pairs = list(rows["translation"])
        files.check_columns(pairs[0] if pairs else (), (source, target), f"the translation column of {where}")
        return _without_empty([pair[source] for pair in pairs], [pair[target] for pair in pairs])
    files.check_columns(rows.column_names, columns, where)
    return _without_empty(list(rows[columns[0]]), list(rows[columns[1]]))


def _without_empty(sources: Sequence[str], targets: Sequence[str]) -> Pairs:
    """Return the pairs in which neither sentence is missing or blank."""
    pairs = [(s, t) for s, t in zip(sources, targets, strict=True) if s and t and s.strip() and t.strip()]
    return [s for s, _ in pairs], [t for _, t in pairs]


# ---- what pairs are used for ----


def _with_splits(
    sets: Mapping[str, Pairs], where: str, public_names: Mapping[str, str] | None = None
) -> ParallelCorpus:
    """Decide which set of pairs is for training, for validation and for testing.

    Args:
        sets: pairs by the name of their file, or by our name of the split.
        where: the data, for the description.
        public_names: our name of a split -> its name at the hub, for the description.
    """
    filled = {name: pairs for name, pairs in sets.items() if pairs[0]}
    if not filled:
        raise ValueError(f"Invalid data: {where} has no pairs. Give data that have.")
    counts = {name: len(pairs[0]) for name, pairs in filled.items()}
    name_of_split = _choose_names(counts)
    splits = {split: filled[name] for split, name in name_of_split.items()}
    parts = []
    for split, name in name_of_split.items():
        shown = (public_names or {}).get(name, name)
        is_usual = shown == split or SPLIT_OF_NAME.get(shown) == split
        parts.append(f"{shown} {counts[name]:,} pairs" + ("" if is_usual else f" as {split}"))
    if "validation" not in splits:
        splits["train"], splits["validation"] = _split_off_validation(splits["train"])
        train, validation = (len(splits[split][0]) for split in ("train", "validation"))
        parts = [f"{train + validation:,} pairs, of which {train:,} as train and {validation:,} as validation"]
    return ParallelCorpus(splits, f"{where}: {', '.join(parts)}")


def _choose_names(counts: Mapping[str, int]) -> dict[str, str]:
    """Return split -> the name of its set, by the names of the sets and, where those do not tell, by their sizes."""
    chosen: dict[str, str] = {}
    for name in counts:
        split = SPLIT_OF_NAME.get(name)
        if split is not None and split not in chosen:
            chosen[split] = name
    by_size = sorted(counts, key=lambda name: -counts[name])  # stable: of equal sets the first one
    for split in ("train", "validation"):
        free = [name for name in by_size if name not in chosen.values()]
        if split not in chosen and free:
            chosen[split] = free[0]
    tests = [name for name in counts if name.startswith("test") and name not in chosen.values()]
    if tests:
        chosen["test"] = tests[0]
    return chosen


def _split_off_validation(pairs: Pairs) -> tuple[Pairs, Pairs]:
    """Return train and validation: a twentieth of the pairs validates, 2,000 at most."""
    sources, targets = pairs
    order = shuffled_by_source(sources)
    cut = next_boundary(sources, order, len(order) - max(1, min(2000, len(order) // 20)))
    train, validation = (
        ([sources[i] for i in part], [targets[i] for i in part]) for part in (order[:cut], order[cut:])
    )
    return train, validation
