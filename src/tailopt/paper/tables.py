"""The tables of the paper as they were printed, and the names by which they are asked for.

Six JSON files stand beside this module: `best_settings`, `sweep_grids`, and the results `glue`, `translation`,
`shakespeare`, `philosopher`. Two columns mean something else than they say: DiLoCo's thresholds are the Nesterov
momentum and the weight decay of its inner AdamW; the lower threshold of L2 clipping is always 0, and no setting here.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any, TypeVar

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
    """A table of results with its remarks: `glue`, `translation`, `shakespeare` or `philosopher`.

    Plain dicts and lists, new at every call. Numbers are as printed; what is odd about them stands under `remarks`.

    Examples:
        >>> results("glue")["results"]["bi2clip"]["qnli"]
        {'accuracy': 89.73}
    """
    found = _named(name, RESULTS, "table of results")
    return load(f"{found}_results")


def load(table: str) -> dict[str, Any]:
    """One of the JSON files, parsed anew."""
    parsed: dict[str, Any] = json.loads(_text(table))
    return parsed


def algorithm_name(algorithm: str) -> str:
    """Our spelling of an algorithm of the paper; `Bi^2Clip` and `Avg-BiClip (L2)` are its own.

    Examples:
        >>> [algorithm_name(name) for name in ("Adam-BiClip", "Bi^2Clip", "Adam^2", "Avg-BiClip (L2)", "Avg-$L_2$Clip")]
        ['adam-biclip', 'bi2clip', 'adam2', 'avg-biclip-l2', 'avg-l2clip']
    """
    return _named(algorithm, algorithms(), "algorithm of the paper")


def dataset_name(dataset: str, known: Iterable[str]) -> str:
    """Our spelling of a data set; case, hyphens, spaces and the study before a slash do not matter.

    Examples:
        >>> [dataset_name(name, ["sst2", "ted-en-de"]) for name in ("SST-2", "glue/sst2", "TED-T (en-de)")]
        ['sst2', 'sst2', 'ted-en-de']
    """
    last = dataset.rsplit("/", 1)[-1]
    return _named(ALIASES.get(_plain(last), last), tuple(known), "data set with settings of this algorithm")


@functools.cache
def algorithms() -> tuple[str, ...]:
    """The eighteen algorithms of the tables."""
    return tuple(load("best_settings")["settings"])


def translated(algorithm: str, row: Mapping[str, Cell | None]) -> dict[str, Cell]:
    """A row with our names: empty columns dropped, `nesterov_momentum` as `momentum`, no `i_d` for L2 clipping."""
    names = {"nesterov_momentum": "momentum"}
    absent = {"i_d"} if algorithm.endswith("-l2clip") else set()
    return {names.get(c, c): cell for c, cell in row.items() if cell is not None and c not in absent}


@functools.cache
def _text(table: str) -> str:
    return resources.files("tailopt.paper").joinpath(f"{table}.json").read_text(encoding="utf-8")


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isascii() and c.isalnum())


def _named(name: str, known: tuple[str, ...], kind: str) -> str:
    by_plain = {_plain(k): k for k in known}
    if _plain(name) in by_plain:
        return by_plain[_plain(name)]
    near = difflib.get_close_matches(_plain(name), by_plain, n=1)
    hint = f" Did you mean {by_plain[near[0]]!r}?" if near else ""
    raise ValueError(f"Invalid name: {name!r} is no {kind}.{hint} There are: {', '.join(known)}.")
