"""Thresholds set to "auto" against a grid on language tasks: what is lost if only the step is searched?

    python benchmarks/auto_tasks.py --task philosopher --preset small --data TEXTS --tokenizer "" --run runs/auto
    python benchmarks/auto_tasks.py --task glue/mrpc --model ENCODER --data GLUE --device cuda --run runs/auto

avg-biclip with i_u = i_d = "auto" and eight steps, ilr = 1e-5 to 3e-2 (--steps), against a grid of 5 values of u, d/u
of 0.1 and 1, and 5 steps ilr * u: 50 points. Both choose by the mean over the same tuning seeds and are reported on the
same fresh ones. The metric is the task's own number of that name; tasks without a loss of their own have the mean of
the last round's local losses. Every trial is recorded in --run, and a run that was stopped goes on with it.
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path
from typing import Any

import tailopt
from tailopt.sweeps.result import SweepResult
from tailopt.tasks.table import task


def spaced(low: float, high: float, count: int) -> list[float]:
    """Numbers with equal ratios."""
    return [low * (high / low) ** (i / (count - 1)) for i in range(count)]


def searched(problem: Any, arguments: argparse.Namespace) -> dict[str, SweepResult]:
    """The sweeps, by name."""
    low, high = arguments.steps
    grid = [
        {"ilr": step / u, "i_u": u, "i_d": share * u}
        for u in spaced(*arguments.thresholds, 5)
        for share in (0.1, 1.0)
        for step in spaced(low, high, 5)
    ]
    settings = {"i_u": "auto", "i_d": "auto"}
    spaces: dict[str, tuple[Any, dict[str, Any]]] = {
        "grid of 50": (grid, {}),
        "auto, 8 steps": ([{"ilr": step} for step in spaced(low, high, 8)], settings),
        "auto, 8 steps, scale=follow": (
            [{"ilr": step} for step in spaced(low, high, 8)],
            {**settings, "scale": "follow"},
        ),
    }
    found = {}
    for name, (space, fixed) in spaces.items():
        folder = arguments.run / "".join(c if c.isalnum() else "-" for c in f"{arguments.task} {name}")
        found[name] = tailopt.sweep(
            problem,
            "avg-biclip",
            space=space,
            budget=None,
            settings=fixed,
            seeds=range(100, 100 + arguments.tune),
            report_seeds=range(arguments.fresh),
            metric=arguments.metric,
            rounds=arguments.rounds,
            device=arguments.device,
            batch=arguments.batch,
            run=folder,
        )
        print(f"{name}: {found[name].summary()}\n", flush=True)
    return found


def table(found: dict[str, SweepResult], metric: str) -> str:
    """The reported means with their deviations, and the ratio of losses to that of the grid, seed by seed."""
    grid = found["grid of 50"].best.reported
    lines = [f"| | {metric} | over the grid's |", "| --- | ---: | ---: |"]
    for name, result in found.items():
        values = result.best.reported
        spread = statistics.stdev(values) if len(values) > 1 else math.nan
        ratios = [ours / theirs for ours, theirs in zip(values, grid, strict=True)]
        lines.append(f"| {name} | {statistics.fmean(values):.4g} ± {spread:.2g} | {statistics.fmean(ratios):.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="philosopher")
    parser.add_argument("--preset", default="small")
    parser.add_argument("--model", help="of the task: a folder or a public name")
    parser.add_argument("--tokenizer", help="of the task; empty for bytes")
    parser.add_argument("--data", help="of the task")
    parser.add_argument("--metric", default="loss")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--steps", type=float, nargs=2, default=(1e-5, 3e-2), metavar=("LOW", "HIGH"))
    parser.add_argument("--thresholds", type=float, nargs=2, default=(1e-6, 1e-1), metavar=("LOW", "HIGH"))
    parser.add_argument("--tune", type=int, default=2, help="tuning seeds")
    parser.add_argument("--fresh", type=int, default=5, help="fresh seeds")
    parser.add_argument("--device")
    parser.add_argument("--batch", type=int, help="points side by side; a run that is stopped loses those under way")
    parser.add_argument("--run", type=Path, default=Path("runs/auto"))
    arguments = parser.parse_args()
    given = {"pretrained": arguments.model, "tokenizer": arguments.tokenizer, "data": arguments.data}
    problem = task(arguments.task, arguments.preset, **{key: v for key, v in given.items() if v is not None})
    print(table(searched(problem, arguments), arguments.metric))


if __name__ == "__main__":
    main()
