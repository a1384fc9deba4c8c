"""A run as the page shows it. Everything that grows with the rounds is thinned here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tailopt.arguments import is_number
from tailopt.records.folder import Run
from tailopt.records.run_config import by_dotted_name
from tailopt.report.thinning import buckets, rounded, thin

COLUMNS = 160  # of maps over rounds
MOST_TENSORS = 60
MOST_NODES = 64
MOST_EXCLUSIONS = 200
PHASES = ("local", "mean", "wait", "exchange", "outer", "evaluate", "checkpoint")
SEED, ROUNDS = "run.seed", "run.rounds"

Row = Mapping[str, Any]


def run_data(run: Run, name: str, metric: str, lower_is_better: bool, points: int) -> dict[str, Any]:
    """Return what the page has of a run.

    Args:
        name: of the run on the page.
        metric: the main one.
        points: of a series, at most.
    """
    rows, times = run.history(), run.times()
    settings = by_dotted_name(run.config)
    return {
        "name": name,
        "task": _text(settings.get("task.name")),
        "algorithm": _text(settings.get("algorithm.name", settings.get("algorithm.inner"))) or "unknown",
        "seed": _text(settings.get(SEED)),
        "metric": metric,
        "lower": lower_is_better,
        "rounds": rows[-1]["round"] if rows else 0,
        "settings": {key: _text(settings[key]) for key in sorted(settings, key=_place)},
        "curves": curves(rows, points),
        "notFinite": sum(not math.isfinite(row["loss"]) for row in rows),
        "clipping": clipping(rows, points),
        "histograms": histograms(rows),
        "nodes": nodes(rows),
        "times": phase_times(times, points),
        "environment": {key: _text(value) for key, value in _environment(run).items()},
    }


def _place(name: str) -> int:
    """Return where a setting stands: what is compared most comes first, the others in the order of config.toml."""
    first = ("algorithm.name", "algorithm.", "schedules.", "task.")
    return next((k for k, start in enumerate(first) if name.startswith(start)), len(first))


def curves(rows: Sequence[Row], points: int) -> dict[str, Any]:
    """Return the loss and every metric by round: name -> thinned series, its last value and its extremes."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for row in rows:
        for name, value in (("loss", row["loss"]), *_metrics(row["metrics"])):
            x, y = found.setdefault(name, ([], []))
            x.append(row["round"])
            y.append(float(value))
    return {name: {"series": thin(x, y, points), **_ends(x, y)} for name, (x, y) in found.items()}


def _ends(x: Sequence[float], y: Sequence[float]) -> dict[str, Any]:
    """Return the last value, and the smallest and the largest with their rounds."""
    finite = [(value, t) for t, value in zip(x, y, strict=True) if math.isfinite(value)]
    low, high = min(finite, default=None), max(finite, key=lambda pair: pair[0], default=None)
    return {
        "last": rounded(y[-1]),
        "low": None if low is None else [rounded(low[0]), low[1]],
        "high": None if high is None else [rounded(high[0]), high[1]],
    }


def _metrics(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield metrics that are numbers, nested ones by dotted names; another loss than that of the local steps too."""
    for key, value in metrics.items():
        if isinstance(value, Mapping):
            yield from _metrics(value, f"{prefix}{key}.")
        elif is_number(value):
            name = f"{prefix}{key}"
            yield ("evaluated loss" if name == "loss" else name), value


# Clipping


def clipping(rows: Sequence[Row], points: int) -> dict[str, Any] | None:
    """Return which shares of the coordinates were clipped and lifted: over rounds, and by tensor as a map."""
    counted = [row for row in rows if row.get("statistics")]
    if not counted:
        return None
    names = list(counted[0]["statistics"])
    x = [row["round"] for row in counted]
    shares = {
        key: thin(x, [_share(list(row["statistics"].values()), key) for row in counted], points)
        for key in ("above", "below", "zero", "nonfinite")
    }
    largest = [max((c["largest"] for c in row["statistics"].values()), default=0.0) for row in counted]
    shown = _largest_tensors(counted[0]["statistics"], names)
    columns = buckets(len(counted), COLUMNS)
    maps = {
        key: [
            [_permille([counted[i]["statistics"].get(name, {}) for i in column], key) for column in columns]
            for name in shown
        ]
        for key in ("above", "below")
    }
    return {
        "shares": shares,
        "largest": thin(x, largest, points),
        "tensors": shown,
        "leftOut": len(names) - len(shown),
        "rounds": [[x[column[0]], x[column[-1]]] for column in columns],
        "maps": maps,
    }


def _largest_tensors(statistics: Mapping[str, Row], names: Sequence[str]) -> list[str]:
    """Return the names of the tensors with most elements, in the order of the model."""
    ranked = sorted(names, key=lambda name: -statistics[name].get("elements", 0))[:MOST_TENSORS]
    return [name for name in names if name in {*ranked}]


def _share(counts: Sequence[Row], key: str) -> float:
    elements = sum(c.get("elements", 0) for c in counts)
    return sum(c.get(key, 0) for c in counts) / elements if elements else math.nan


def _permille(counts: Sequence[Row], key: str) -> int | None:
    share = _share(counts, key)
    return round(1000 * share) if math.isfinite(share) else None


def histograms(rows: Sequence[Row]) -> list[dict[str, Any]] | None:
    """Return the magnitudes of the gradients before and after clipping, in octaves, of up to six rounds.

    Clipping moves everything at or above u into the octave of u, and everything at or below d into that of d, so what
    is left follows from the counts before it. Coordinates that are exactly 0 are in no octave and stay 0.
    """
    recorded = [row for row in rows if any("octaves" in counts for counts in row.get("statistics", {}).values())]
    if not recorded:
        return None
    shown = [recorded[part[-1]] for part in buckets(len(recorded), 6)]
    return [{"round": row["round"], **_histogram(row["statistics"].values())} for row in shown]


def _histogram(statistics: Any) -> dict[str, list[list[int]]]:
    before: dict[int, int] = {}
    after: dict[int, int] = {}
    for counts in statistics:
        low, high = _octave(counts.get("d", 0.0)), _octave(counts.get("u", math.inf))
        for text, number in counts.get("octaves", {}).items():
            octave = int(text)
            before[octave] = before.get(octave, 0) + number
            moved = min(max(octave, low), high)
            after[moved] = after.get(moved, 0) + number
    return {name: [list(p) for p in sorted(found.items())] for name, found in (("before", before), ("after", after))}


def _octave(value: float) -> int:
    """Return k with 2^k <= value < 2^(k+1), within the range of fp32."""
    if value <= 0:
        return -127
    return 128 if math.isinf(value) else max(min(math.frexp(value)[1] - 1, 128), -127)


# Nodes


def nodes(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Return who took part and who did not count, as a map of nodes and rounds, with the reasons."""
    if not rows:
        return None
    count = 1 + max((node for row in rows for node in row["participants"]), default=0)
    lines, columns = buckets(count, MOST_NODES), buckets(len(rows), COLUMNS)
    line_of = {node: k for k, line in enumerate(lines) for node in line}
    took_part = [[0] * len(columns) for _ in lines]
    left_out = [[0] * len(columns) for _ in lines]
    exclusions = []
    for k, column in enumerate(columns):
        for i in column:
            for node in {*rows[i]["participants"]}:
                took_part[line_of[node]][k] += 1
            for entry in rows[i]["excluded"]:
                left_out[line_of[entry["node"]]][k] += 1
                exclusions.append([rows[i]["round"], entry["node"], *(_text(entry.get(key)) for key in REASONS)])
    return {
        "count": count,
        "lines": [[line[0], line[-1]] for line in lines],
        "rounds": [[rows[column[0]]["round"], rows[column[-1]]["round"]] for column in columns],
        "cells": [len(line) * len(column) for line in lines for column in columns],
        "tookPart": took_part,
        "leftOut": left_out,
        "excluded": len(exclusions),
        "exclusions": exclusions[:MOST_EXCLUSIONS],
    }


REASONS = ("reason", "tensor", "value", "bound")


# Times


def phase_times(times: Sequence[Row], points: int) -> dict[str, Any] | None:
    """Return seconds by phase, in all and over rounds, and the bytes that were sent."""
    if not times:
        return None
    x = [row["round"] for row in times]
    phases = [phase for phase in PHASES if any(phase in row for row in times)]
    total = sum(_seconds(row, "round_seconds") for row in times)
    totals = {phase: sum(_seconds(row, phase) for row in times) for phase in phases}
    totals["other"] = max(total - sum(totals.values()), 0.0)
    found = {
        "total": rounded(total),
        "totals": {phase: rounded(value) for phase, value in totals.items()},
        "rounds": thin(x, [_seconds(row, "round_seconds") for row in times], points),
    }
    if any("bytes_sent" in row for row in times):
        sent = [float(row.get("bytes_sent", 0)) for row in times]
        found |= {"bytes": thin(x, sent, points), "bytesInAll": sum(sent)}
    return found


def _seconds(row: Row, phase: str) -> float:
    value = row.get(phase, 0.0)
    return float(value) if is_number(value) and math.isfinite(value) else 0.0


def _environment(run: Run) -> Mapping[str, Any]:
    return by_dotted_name(run.environment)


def _text(value: Any) -> str:
    """Return a setting as the page shows it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        text = ", ".join(map(_text, value[:12]))
        return f"[{text}{', …' if len(value) > 12 else ''}]"
    return str(value)[:300]
