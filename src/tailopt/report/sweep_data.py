"""A sweep as the page shows it: every point with its settings and its value, and what fewer points would have found."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from tailopt.records import history
from tailopt.records.checked_json import DamagedRecord, read_verified
from tailopt.report.thinning import rounded
from tailopt.sweeps.result import budget_point, rank, values_best_first
from tailopt.sweeps.trials import FORMAT, SWEEP, TRIALS, Trial, parse_line

MOST_POINTS = 400


def is_sweep(folder: Path) -> bool:
    """Whether a folder holds a sweep."""
    return (folder / SWEEP).is_file()


def read_trials(folder: Path) -> tuple[dict[str, Any], list[Trial]]:
    """Return the configuration of a sweep and its trials. Nothing is written; lines that are not whole are left out."""
    try:
        head = read_verified(folder / SWEEP)
    except ValueError as error:
        raise DamagedRecord(f"{folder / SWEEP} {error}. Bring it back from a copy.") from error
    if head["format"] != FORMAT:
        raise DamagedRecord(
            f"{folder / SWEEP} has format {head['format']}, this tailopt reads format {FORMAT}. Upgrade tailopt-torch."
        )
    trials = []
    for line in history.complete_lines(folder / TRIALS):
        try:
            trials.append(Trial.from_row(parse_line(line)))
        except (ValueError, KeyError, TypeError):
            continue
    return head["config"], trials


def sweep_data(folder: Path, name: str) -> dict[str, Any]:
    """Return what the page has of a sweep."""
    config, trials = read_trials(folder)
    metric, lower = str(config.get("metric", "loss")), bool(config.get("lower_is_better", True))
    tuning = [trial for trial in trials if trial.split == "tuning"]
    ranking = rank(tuning or trials, metric, lower)
    names = list(dict.fromkeys(key for tried in ranking for key in tried.settings))
    varied = [key for key in names if len({json.dumps(t.settings.get(key), default=str) for t in ranking}) > 1] or names
    counts = [n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500) if n < len(ranking)] + [len(ranking)]
    values = values_best_first(ranking, lower)
    curve = [budget_point(values, n) for n in counts] if ranking else []
    return {
        "name": name,
        "algorithm": str(config.get("algorithm", "")),
        "metric": metric,
        "lower": lower,
        "points": len(ranking),
        "settings": varied,
        "rows": [
            {
                "number": tried.number,
                "settings": [_plain(tried.settings.get(key)) for key in varied],
                "value": rounded(tried.value),
                "spread": rounded(tried.spread),
                "ended": tried.ended[:120],
                "rounds": tried.rounds,
            }
            for tried in ranking[:MOST_POINTS]
        ],
        "budget": [[point.trials, *map(rounded, (point.median, point.low, point.high))] for point in curve],
        "fresh": [rounded(trial.value(metric)) for trial in trials if trial.split == "report"],
    }


def _plain(value: Any) -> Any:
    """Return a setting as a number where it is one, else as a text."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return value if math.isfinite(value) else str(value)
