"""The tables of the paper as they were printed, and the names of algorithms and data sets in them.

Six JSON files are next to this module: `best_settings`, `sweep_grids`, and the results `glue`, `translation`,
`shakespeare`, `philosopher`. Two columns do not mean what they are called: DiLoCo's thresholds are the Nesterov
momentum and the weight decay of its inner AdamW; the lower threshold of L2 clipping is always 0, and not a setting.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any, TypeVar

from tailopt.arguments import did_you_mean

Cell = TypeVar("Cell")

RESULTS = ("glue", "translation", "shakespeare", "philosopher")

# Other spellings of data sets, letters and digits only.
ALIASES = {
    "tedtende": "ted-en-de",
    "tedtenfr": "ted-en-fr",
    "tedtalksende": "ted-en-de",
    "tedtalksenfr": "ted-en-fr",
    "newscommentaryenfr": "newscomm-en-fr",
}


def results(name: str) -> dict[str, Any]:
    """Return a table of results with its remarks: `glue`, `translation`, `shakespeare` or `philosopher`.

    Plain dicts and lists, new at every call. Numbers are as printed; `remarks` lists what is odd about them.

    Examples:
        >>> results("glue")["results"]["bi2clip"]["qnli"]
        {'accuracy': 89.73}
    """
    return load(f"{_resolve(name, RESULTS, 'table of results')}_results")


def load(table: str) -> dict[str, Any]:
    """Return the content of one of the JSON files, new at every call."""
    parsed: dict[str, Any] = json.loads(_text(table))
    return parsed


def algorithm_name(algorithm: str) -> str:
    """Return our spelling of an algorithm of the paper, which writes `Bi^2Clip` and `Avg-BiClip (L2)`.

    Examples:
        >>> [algorithm_name(name) for name in ("Adam-BiClip", "Bi^2Clip", "Adam^2", "Avg-BiClip (L2)", "Avg-$L_2$Clip")]
        ['adam-biclip', 'bi2clip', 'adam2', 'avg-biclip-l2', 'avg-l2clip']
    """
    return _resolve(algorithm, algorithms(), "algorithm of the paper")


def dataset_name(dataset: str, known: Iterable[str]) -> str:
    """Return our spelling of a data set; case, hyphens, spaces and the study before a slash do not matter.

    Examples:
        >>> [dataset_name(name, ["sst2", "ted-en-de"]) for name in ("SST-2", "glue/sst2", "TED-T (en-de)")]
        ['sst2', 'sst2', 'ted-en-de']
    """
    last = dataset.rsplit("/", 1)[-1]
    return _resolve(
        ALIASES.get(_letters_and_digits(last), last), tuple(known), "data set with settings of this algorithm"
    )


@functools.cache
def algorithms() -> tuple[str, ...]:
    """Return the eighteen algorithms of the tables."""
    return tuple(load("best_settings")["settings"])


def translated(algorithm: str, row: Mapping[str, Cell | None]) -> dict[str, Cell]:
    """Return a row with our names: no empty columns, `nesterov_momentum` as `momentum`, no `i_d` for L2 clipping."""
    names = {"nesterov_momentum": "momentum"}
    absent = {"i_d"} if algorithm.endswith("-l2clip") else set()
    return {names.get(c, c): cell for c, cell in row.items() if cell is not None and c not in absent}


@functools.cache
def _text(table: str) -> str:
    return resources.files("tailopt.paper").joinpath(f"{table}.json").read_text(encoding="utf-8")


def _letters_and_digits(name: str) -> str:
    return "".join(c for c in name.lower() if c.isascii() and c.isalnum())


def _resolve(name: str, known: tuple[str, ...], kind: str) -> str:
    """Return the known name that has the same letters and digits; ValueError with the nearest one if there is none."""
    by_spelling = {_letters_and_digits(k): k for k in known}
    spelling = _letters_and_digits(name)
    if spelling in by_spelling:
        return by_spelling[spelling]
    near = did_you_mean(name, known)
    raise ValueError(f"Invalid name: {name!r}; there is no such {kind}{near} There are: {', '.join(known)}.")
