"""A resumable grid of cells: runs what is missing, records every result as it comes, and shows progress.

A cell is one measurement of a study. `cells.jsonl` in the study's folder has one line for each finished cell,

    {"cell": {everything that the result depends on}, "result": ...}

in the JSON of `records.history`, which writes numbers exactly and can write those that are not finite. A recorded cell
is not run again, so a study that was stopped continues, and more seeds add to the record. The settings of a plan enter
a cell as a digest.
"""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from tailopt.progress import Progress, duration
from tailopt.records import disk, history
from tailopt.records.environment import commit, environment, processor

RECORD = "cells.jsonl"

C = TypeVar("C", bound=Hashable)
R = TypeVar("R")
Tick = Callable[[int], None]


def as_json(value: Any) -> Any:
    """A value of dataclasses, mappings, tuples and lists as dicts and lists.

    Examples:
        >>> as_json({"rounds": (1, 2), "settings": {"ilr": 0.1}})
        {'rounds': [1, 2], 'settings': {'ilr': 0.1}}
    """
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {key: as_json(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(part) for part in value]
    return value


def _as_it_is(value: Any) -> Any:
    return value


def _nothing(cell: Any) -> None:
    return None


def _one_kind(cell: Any) -> Hashable:
    return None


@dataclass(frozen=True, kw_only=True)
class Grid(Generic[C, R]):
    """What a study measures.

    Attributes:
        cells: in the order in which they run.
        key: a cell as JSON: everything that its result depends on.
        measure: (cell, tick) -> the result, which is plain JSON or a dataclass of it; tick(n) tells progress that
            n of the cell's `units` are done.
        encode, decode: the result -> its JSON, and back.
        label: what progress calls a cell.
        short_part: runs a short part of a cell, and returns which share of the cell it is, such as 0.02. One cell of
            every kind is tried so before the first measurement, and the cost of all is said.
        kind: cells of one kind take about as long as each other.
        older: cell -> the JSON of a result that an older version left in a file of its own; None where there is none.
        after: called with every cell whose result has just been recorded.
    """

    cells: Sequence[C]
    key: Callable[[C], Mapping[str, Any]]
    measure: Callable[[C, Tick], R]
    encode: Callable[[R], Any] = as_json
    decode: Callable[[Any], R] = _as_it_is
    label: Callable[[C], str] = str
    units: int = 1
    short_part: Callable[[C], float] | None = None
    kind: Callable[[C], Hashable] = _one_kind
    older: Callable[[C], Any] = _nothing
    after: Callable[[C], None] = _nothing


def run_grid(grid: Grid[C, R], record: Path | None, bar: Progress) -> dict[C, R]:
    """The results of all cells: from the record, or measured now and recorded. Without a record, all are measured."""
    recorded = read_record(record) if record is not None else {}
    results: dict[C, R] = {}
    for cell in grid.cells:
        result = recorded.get(canonical(grid.key(cell)))
        result = grid.older(cell) if result is None else result
        if result is not None:
            results[cell] = grid.decode(result)
    missing = [cell for cell in grid.cells if cell not in results]
    total = len(missing) * grid.units
    if missing and bar.shown:
        before = f"; {len(results)} more are recorded already" if results else ""
        seconds = _cost(grid, missing)
        cost = "the first one tells for how long" if seconds is None else f"about {duration(seconds)}"
        bar.say(f"{len(missing)} measurement{'s' * (len(missing) > 1)} to make, {cost}{before}")
    began = time.monotonic()
    for number, cell in enumerate(missing):

        def tick(done: int, start: int = number * grid.units, label: str = grid.label(cell)) -> None:
            bar.update(start + done, total, label)

        tick(0)
        result = grid.encode(grid.measure(cell, tick))
        if record is not None:
            record.parent.mkdir(parents=True, exist_ok=True)
            history.append(record, {"cell": as_json(grid.key(cell)), "result": result})
        results[cell] = grid.decode(result)
        grid.after(cell)
        if number == 0 and len(missing) > 1 and grid.short_part is None:
            seconds = time.monotonic() - began
            bar.say(f"the first took {duration(seconds)}: about {duration(seconds * (len(missing) - 1))} more")
    if missing:
        bar.update(total, total, "done")
    return {cell: results[cell] for cell in grid.cells}


def _cost(grid: Grid[C, R], missing: Sequence[C]) -> float | None:
    """The seconds that these cells will take, from a short part of one cell of every kind; None without such a part."""
    if grid.short_part is None:
        return None
    kinds: dict[Hashable, list[C]] = {}
    for cell in missing:
        kinds.setdefault(grid.kind(cell), []).append(cell)
    grid.short_part(missing[0])  # the first run of all loads and compiles what the others find ready
    seconds = 0.0
    for cells in kinds.values():
        began = time.perf_counter()
        share = grid.short_part(cells[0])
        seconds += len(cells) * (time.perf_counter() - began) / share
    return seconds


def read_record(path: Path) -> dict[str, Any]:
    """The JSON of every recorded result, by `canonical(cell)`.

    The end of a line that a kill cut short is removed. A line that cannot be read is passed over with a warning: its
    cell runs again.
    """
    history.drop_torn_line(path)
    results = {}
    for number, line in enumerate(history.complete_lines(path), 1):
        try:
            cell, result = _cell_and_result(history.decode(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            warnings.warn(
                f"{path}, line {number}: {line[:60]!r} is no result ({error}). Its cell runs again.", stacklevel=2
            )
            continue
        results[canonical(cell)] = result
    return results


def _cell_and_result(row: Mapping[str, Any]) -> tuple[Any, Any]:
    """The two halves of a line. Three studies had flat lines once, and `rates` had other names for the halves."""
    if "cell" in row:
        return row["cell"], row["result"]
    if "question" in row:
        return row["question"], row["answer"]
    result = row["gaps"] if "gaps" in row else row["curve"]
    return {key: row[key] for key in row if key not in ("gaps", "curve", "seconds", "round")}, result


def canonical(cell: Mapping[str, Any]) -> str:
    """A cell as text that is equal for equal cells."""
    return json.dumps(as_json(cell), sort_keys=True)


def digest(value: Any) -> str:
    """A short name for settings: equal for equal settings.

    Examples:
        >>> digest({"rounds": 5, "seeds": (0, 1)}) == digest({"seeds": [0, 1], "rounds": 5})
        True
    """
    return hashlib.sha256(json.dumps(as_json(value), sort_keys=True).encode()).hexdigest()[:16]


def older_file(path: Path) -> Any:
    """The JSON of a cell that an older version wrote as a file of its own; None where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def write_results(out: Path, results: Any, page: str, command: str = "", indent: int | None = 1) -> None:
    """Write `results.json` and `table.md`, each all at once; without `indent`, the results in one line.

    command: what ran the study; the page ends with it, with the commit and with the machine.
    """
    out.mkdir(parents=True, exist_ok=True)
    disk.replace(out / "results.json", (json.dumps(as_json(results), indent=indent) + "\n").encode())
    disk.replace(out / "table.md", f"{page.rstrip()}\n\n{measured(command)}\n".encode())


def measured(command: str) -> str:
    """Where the numbers of a page come from, in a sentence."""
    facts, at = environment(), commit()
    by = f" by `{command}`" if command else ""
    return (
        f"Measured{f' at commit {at}' if at else ''}{by}: tailopt {facts['tailopt']}, torch {facts['torch']}, "
        f"{device_name()}, {facts['threads']} threads."
    )


def device_name() -> str:
    """The GPU, or the processor where there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else processor()
