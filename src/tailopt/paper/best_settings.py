"""paper_settings: the settings that the paper reports as best, with our names and without its misprints.

Five cells cannot be what was run: no point of their own grid rounds to them, and their row or its neighbours show the
intended value. They are corrected. Other values are not on the printed grid because the grid is misprinted: they are
kept, with a warning. `printed=True` returns the table as printed, without warnings.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from typing import Any

from tailopt.paper.grids import GridSpec, fit, notation
from tailopt.paper.printed_tables import algorithm_name, dataset_name, load, translated


def paper_settings(algorithm: str, dataset: str, printed: bool = False) -> dict[str, float]:
    """Return the paper's best settings for an algorithm and a data set, as keywords of `algorithm()`.

    Warns (UserWarning) if a cell is read as a misprint, and if a value is not on the grid that is printed for it.

    Args:
        algorithm: in our spelling or the paper's (`adam-biclip`, `Adam-BiClip`, `Bi^2Clip`, `Avg-BiClip (L2)`).
        dataset: case, hyphens and spaces do not matter (`SST-2`, `sst2`, `TED-T (en-de)`).
        printed: return the values as printed, misprints included.

    Examples:
        >>> paper_settings("bi2clip", "QNLI")
        {'ilr': 0.5, 'olr': 1.0, 'o_u': 0.0001, 'o_d': 0.0001, 'i_u': 0.0001, 'i_d': 5e-05}
        >>> paper_settings("diloco", "rte", printed=True)
        {'ilr': 1.8e-05, 'olr': 1.0, 'ieps': 1e-05, 'momentum': 0.95, 'weight_decay': 0.0001}
    """
    name = algorithm_name(algorithm)
    rows: dict[str, dict[str, float | None]] = _table()[name]
    data = dataset_name(dataset, rows)
    row = dict(rows[data])
    if not printed:
        fixes = corrections(name, data)
        row.update(fixes)
        remarks = [_misprint(column, rows[data][column], value) for column, value in fixes.items()]
        remarks += _off_grid_remarks(name, row)
        if remarks:
            warnings.warn(f"{name} on {data}: {' '.join(remarks)}", UserWarning, stacklevel=2)
    return translated(name, row)


def pairs() -> list[tuple[str, str]]:
    """Return every (algorithm, data set) that the paper has settings for.

    Examples:
        >>> len(pairs()), pairs()[0]
        (168, ('avg-sgd', 'stsb'))
    """
    return [(algorithm, dataset) for algorithm, rows in _table().items() for dataset in rows]


def corrections(name: str, dataset: str) -> dict[str, float]:
    """Return the cells of a row that are read as misprints: column -> intended value."""
    all_corrections = load("sweep_grids")["corrections"]
    return {c["column"]: c["read_as"] for c in all_corrections if (c["algorithm"], c["dataset"]) == (name, dataset)}


def _misprint(column: str, printed: float | None, value: float) -> str:
    return f"{column} is printed {printed:g}, which is off its own grid; taken as {value:g} (printed=True keeps it)."


def _off_grid_remarks(name: str, row: Mapping[str, float | None]) -> list[str]:
    """Return a sentence for every value that is not on the printed grid."""
    printed, missed = fit(name, row, "paper-printed")
    meant, _ = fit(name, row, "paper")
    return [
        f"{column}={row[column]:g} is not on the printed grid {_notation(printed[column])}; it is on "
        f"{_notation(meant[column])}, which is probably meant."
        for column in missed
    ]


def _notation(spec: GridSpec | None) -> str:
    return "(none)" if spec is None else notation(spec)


@functools.cache
def _table() -> dict[str, Any]:
    settings: dict[str, Any] = load("best_settings")["settings"]
    return settings
