"""A study as the page shows it: its table.md, and of a comparison the curves and what fewer points would have found."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tailopt.report.thinning import rounded, thin

TABLE, RESULTS = "table.md", "results.json"


def is_study(folder: Path) -> bool:
    """Whether a folder holds a study that has written its results."""
    return (folder / TABLE).is_file() and (folder / RESULTS).is_file()


def study_data(folder: Path, name: str, points: int) -> dict[str, Any]:
    """Return what the page has of a study."""
    results = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    cells = results.get("cells", []) if isinstance(results, dict) else []
    comparison = [cell for cell in cells if isinstance(cell, dict) and {"column", "algorithm", "runs"} <= cell.keys()]
    return {
        "name": name,
        "blocks": markdown_blocks((folder / TABLE).read_text(encoding="utf-8")),
        "curves": [*_losses(comparison, points), *_budgets(comparison)],
    }


def markdown_blocks(text: str) -> list[dict[str, Any]]:
    """Cut a page of Markdown into headings, tables and paragraphs; marks inside a line (* and `) are left out.

    Examples:
        >>> markdown_blocks("# Title\\n\\n| a | b |\\n| --- | --: |\\n| *1* | 2 |\\n\\nA `line`\\nand more.")
        [{'heading': 'Title'}, {'table': [['a', 'b'], ['1', '2']]}, {'text': 'A line and more.'}]
    """
    blocks: list[dict[str, Any]] = []
    plain = re.sub(r"\*{1,2}([^*\n]+)\*{1,2}|`([^`\n]*)`", lambda found: found[1] or found[2], text)
    for part in filter(None, (part.strip() for part in plain.split("\n\n"))):
        lines = part.splitlines()
        if lines[0].startswith("#"):
            blocks.append({"heading": lines[0].lstrip("# ")})
            lines = lines[1:]
        if len(lines) > 1 and all(line.lstrip().startswith("|") for line in lines):
            rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]
            blocks.append({"table": [row for row in rows if set("".join(row)) - set("-: ")]})
        elif lines:
            bullets = all(line.startswith(("- ", "  ")) for line in lines)
            texts = [f"• {line.strip('- ')}" for line in lines] if bullets else [" ".join(lines)]
            blocks += [{"text": line} for line in texts if not line.startswith("![")]
    return blocks


def _losses(cells: Sequence[Mapping[str, Any]], points: int) -> list[dict[str, Any]]:
    """Return a chart per task: the mean loss over seeds, a line for every algorithm."""
    charts = []
    for column in dict.fromkeys(cell["column"] for cell in cells):
        series = []
        for cell in cells:
            runs = [run["losses"] for run in cell["runs"] if run.get("losses")] if cell["column"] == column else []
            if runs:
                rounds = range(1, min(map(len, runs)) + 1)
                columns = [[_number(run[t - 1]) for run in runs] for t in rounds]
                means = [sum(values) / len(values) for values in columns]
                parts = zip(("x", "y", "low", "high"), thin(list(rounds), means, points), strict=False)
                series.append({"name": str(cell["algorithm"]), **dict(parts)})
        if series:
            charts.append({"title": f"{column}: loss, mean over seeds", "x": "round", "xLog": False, "series": series})
    return charts


def _budgets(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a chart per task: the best of n points, by n."""
    charts = []
    for column in dict.fromkeys(cell["column"] for cell in cells):
        series = []
        for cell in cells:
            curve = cell.get("budget_curve") or [] if cell["column"] == column else []
            if curve:
                parts = {key: [rounded(_number(point[key])) for point in curve] for key in ("median", "low", "high")}
                shown = {"y": parts["median"], "low": parts["low"], "high": parts["high"]}
                series.append({"name": str(cell["algorithm"]), "x": [point["trials"] for point in curve], **shown})
        if series:
            title = f"{column}: the best of so many points, on the tuning seeds"
            charts.append({"title": title, "x": "points tried", "xLog": True, "series": series})
    return charts


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
