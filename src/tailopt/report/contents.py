"""What the folders of a report hold: runs, sweeps, studies; and which runs belong together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tailopt.records.folder import Run
from tailopt.records.run_config import by_dotted_name
from tailopt.report.run_data import ROUNDS, SEED, run_data
from tailopt.report.study_data import is_study, study_data
from tailopt.report.sweep_data import is_sweep, sweep_data

MetricOf = Callable[[Run], tuple[str, bool]]


@dataclass(frozen=True)
class Contents:
    """What a report is about.

    Args:
        runs: by the name on the page.
        sweeps, studies: folders by name.
        notices: sentences that the page begins with.
    """

    runs: Mapping[str, Run] = field(default_factory=dict)
    sweeps: Mapping[str, Path] = field(default_factory=dict)
    studies: Mapping[str, Path] = field(default_factory=dict)
    notices: Sequence[str] = ()


def sweeps_and_studies(folders: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """Return the folders of sweeps and of studies among these folders and below them."""
    below = [place for folder in folders for place in (folder, *sorted(p for p in folder.rglob("*") if p.is_dir()))]
    below = list(dict.fromkeys(below))
    return [place for place in below if is_sweep(place)], [place for place in below if is_study(place)]


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return names that tell folders apart: what is left of their paths without what all share.

    Examples:
        >>> short_names([Path("runs/a/one"), Path("runs/b/one")]), short_names([Path("runs/first")])
        (['a/one', 'b/one'], ['first'])
    """
    parts = [path.resolve().parts for path in paths]
    shared = 0
    if len(set(parts)) > 1:
        while len({p[: shared + 1] for p in parts}) == 1:
            shared += 1
        return ["/".join(p[min(shared, len(p) - 1) :]) for p in parts]
    return [p[-1] if p else "/" for p in parts]


def nothing_in_common(runs: Iterable[Run]) -> str:
    """Return a sentence where runs cannot be compared; empty where they can."""
    found = (by_dotted_name(run.config).get("task.name") for run in runs)
    tasks = sorted({str(name) if name else "a model of your own" for name in found})
    if len(tasks) < 2:
        return ""
    return f"These runs are of different tasks ({', '.join(tasks)}): their values cannot be compared with each other."


def page_data(contents: Contents, metric_of: MetricOf, made: str, points: int) -> dict[str, Any]:
    """Return everything that the page shows, as plain values."""
    runs = [run_data(run, name, *metric_of(run), points) for name, run in contents.runs.items()]
    groups = grouped(runs)
    for number, group in enumerate(groups):
        for i in group["runs"]:
            runs[i]["group"] = number
    return {
        "made": made,
        "notices": list(contents.notices),
        "runs": runs,
        "groups": groups,
        "sweeps": [sweep_data(path, name) for name, path in contents.sweeps.items()],
        "studies": [study_data(path, name, points) for name, path in contents.studies.items()],
    }


def grouped(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return groups of runs that differ in their seed alone, each with a short name that says what is its own.

    Examples:
        >>> run = {"algorithm": "avg-sgd", "settings": {"algorithm.ilr": "0.1", "run.seed": "0"}}
        >>> other = {"algorithm": "avg-sgd", "settings": {"algorithm.ilr": "0.5", "run.seed": "0"}}
        >>> grouped([run, {**run, "settings": {**run["settings"], "run.seed": "1"}}, other])
        [{'name': 'avg-sgd, ilr 0.1', 'runs': [0, 1]}, {'name': 'avg-sgd, ilr 0.5', 'runs': [2]}]
    """
    by_settings: dict[Any, list[int]] = {}
    for i, run in enumerate(runs):
        key = frozenset((name, value) for name, value in run["settings"].items() if name not in (SEED, ROUNDS))
        by_settings.setdefault(key, []).append(i)
    groups = [{"name": runs[members[0]]["algorithm"], "runs": members} for members in by_settings.values()]
    for group in groups:
        alike = [runs[g["runs"][0]] for g in groups if runs[g["runs"][0]]["algorithm"] == group["name"]]
        if len(alike) > 1:
            own = runs[group["runs"][0]]["settings"]
            names = dict.fromkeys(name for run in alike for name in run["settings"] if name not in (SEED, ROUNDS))
            differing = [name for name in names if len({run["settings"].get(name) for run in alike}) > 1]
            words = [f"{name.rpartition('.')[2]} {own.get(name) or 'none'}" for name in differing[:3]]
            group["words"] = ", ".join(words)
    return [
        {"name": ", ".join(filter(None, (group["name"], group.get("words", "")))), "runs": group["runs"]}
        for group in groups
    ]
