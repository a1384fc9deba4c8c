"""The tables of `tailopt compare`: a row per run, a row per group of seeds, and both as a CSV or HTML file."""

from __future__ import annotations

import csv
import html
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tailopt.cli.tables import format_cell
from tailopt.records import disk

KINDS = (".csv", ".html")


@dataclass(frozen=True)
class Table:
    """A table of values that are not formatted yet."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Ended:
    """How one run ended, and with which settings."""

    name: str
    algorithm: str
    rounds: int
    final: float | None
    best: float | None
    best_round: int | None
    settings: Mapping[str, Any]


def by_run(ends: Sequence[Ended], metric: str, settings: Sequence[str] = ()) -> Table:
    """A row per run, and if asked for a column per setting."""
    header = ["run", "algorithm", "rounds", f"final {metric}", f"best {metric}", "in round"]
    further = [key for key in settings if key not in header]
    rows = [
        [end.name, end.algorithm, end.rounds, end.final, end.best, end.best_round]
        + [end.settings.get(key) for key in further]
        for end in ends
    ]
    return Table(metric, [*header, *further], rows)


def over_seeds(ends: Sequence[Ended], metric: str, settings: Sequence[str]) -> Table | None:
    """A row per group of runs that differ in nothing but the seed; None where every group has one run.

    The spread is the standard deviation of the sample, with n - 1. Runs that ended after another number of rounds are a
    group of their own.
    """
    groups: dict[tuple[Any, ...], list[Ended]] = {}
    for end in ends:
        same = {key: format_cell(value) for key, value in end.settings.items() if key != "seed"}
        groups.setdefault((end.algorithm, end.rounds, *sorted(same.items())), []).append(end)
    if len(groups) == len(ends):
        return None
    shown = [key for key in settings if key not in ("seed", "algorithm")]
    rows = []
    for group in groups.values():
        members = sorted(group, key=lambda end: end.settings.get("seed", 0))
        cells = [members[0].algorithm, *(members[0].settings.get(key) for key in shown), members[0].rounds]
        cells.append(", ".join(format_cell(member.settings.get("seed")) for member in members))
        for values in ([member.final for member in members], [member.best for member in members]):
            cells += list(mean_and_spread([value for value in values if value is not None]))
        rows.append(cells)
    header = ["algorithm", *shown, "rounds", "seeds", f"final {metric}", "spread", f"best {metric}", "spread"]
    return Table("over seeds: mean and standard deviation", header, rows)


def mean_and_spread(values: Sequence[float]) -> tuple[float | None, float | None]:
    """The mean and the standard deviation of a sample; None where there are too few values.

    Examples:
        >>> mean_and_spread([1.0, 2.0, 3.0]), mean_and_spread([2.0]), mean_and_spread([])
        ((2.0, 1.0), (2.0, None), (None, None))
    """
    mean = statistics.fmean(values) if values else None
    # stdev of an infinite or undefined value raises in some versions of Python
    spread = statistics.stdev(values) if len(values) > 1 and all(abs(v) < float("inf") for v in values) else None
    return mean, spread


def check_table_file(file: str) -> None:
    """Refuse a file that is neither of the two kinds, before anything is read."""
    if Path(file).suffix.lower() not in KINDS:
        raise ValueError(f"Invalid table: {file!r}; need a file that ends in {' or '.join(KINDS)}.")


def write(file: Path, tables: Sequence[Table]) -> None:
    """Write tables: into CSV the first one, whose numbers keep all digits; into HTML all of them."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = as_csv(tables[0]) if file.suffix.lower() == ".csv" else as_html(tables)
    disk.replace(file, text.encode())


def as_csv(table: Table) -> str:
    """A table as CSV; what is missing is an empty cell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(table.header)
    for row in table.rows:
        writer.writerow(["" if v is None else v if isinstance(v, int | float | str) else format_cell(v) for v in row])
    return out.getvalue()


def as_html(tables: Sequence[Table]) -> str:
    """Tables as one page that needs nothing else, light or dark as the reader's system is."""
    parts = []
    for table in tables:
        head = "".join(f"<th>{html.escape(name)}</th>" for name in table.header)
        body = "\n".join(
            "<tr>" + "".join(f"<td>{html.escape(format_cell(cell))}</td>" for cell in row) + "</tr>"
            for row in table.rows
        )
        parts.append(
            f"<h2>{html.escape(table.title)}</h2>\n<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
        )
    return f"{_HEAD}{chr(10).join(parts)}\n</body>\n</html>\n"


_HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>tailopt compare</title>
<style>
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem; }
table { border-collapse: collapse; margin-bottom: 2rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.75rem; text-align: left; border-bottom: 1px solid #8886; }
</style>
</head>
<body>
"""
