"""Fit SynToken by SGD, AdamW, L2Clip and BiClip on one node: without noise, and with a heavy tail.

Each optimizer is tuned with the same number of random settings on two seeds and reported on five others.

    python examples/demo.py [--figure docs/figures/demo.png]
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path

import matplotlib
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import tailopt
from tailopt.tasks.synthetic import Regression, syntoken

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STEPS, BATCH, EVERY = 900, 32, 30
BUDGET = 10  # settings tried for each optimizer
TUNING, REPORTED = (100, 101), (0, 1, 2, 3, 4)
NOISES = {
    "no noise": {"noise": "none"},
    "Student-t, df 1.5": {"noise": "student-t"},
}

# name -> (constructor, ranges of its settings, searched in the logarithm)
Optimizers = dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, tuple[float, float]]]]
OPTIMIZERS: Optimizers = {
    "SGD": (torch.optim.SGD, {"lr": (1e-3, 0.2)}),
    "AdamW": (lambda p, lr: torch.optim.AdamW(p, lr=lr, weight_decay=0.0), {"lr": (1e-3, 0.1)}),
    "L2Clip": (tailopt.L2Clip, {"lr": (1e-2, 1.0), "u": (0.1, 10.0)}),
    "BiClip": (
        lambda p, move, u, ratio: tailopt.BiClip(p, lr=move / u, u=u, d=u * ratio),
        {"move": (1e-3, 0.1), "u": (1e-2, 1.0), "ratio": (1e-3, 1.0)},
    ),
}
# Okabe and Ito's colours: they survive printing in grey and most colour blindness
STYLE = {"SGD": ("#999999", ":"), "AdamW": ("#E69F00", "--"), "L2Clip": ("#56B4E9", "-."), "BiClip": ("#D55E00", "-")}


def fit(
    problem: Regression, make: Callable[..., torch.optim.Optimizer], settings: dict[str, float], seed: int
) -> list[float]:
    """The distance to the truth every EVERY steps, the start included."""
    w = torch.nn.Parameter(torch.zeros_like(problem.truth))
    optimizer = make([w], **settings)
    generator = torch.Generator().manual_seed(seed)
    batches = torch.randint(len(problem.y), (STEPS, BATCH), generator=generator)
    errors = [problem.error(w)]
    for step, (x, y) in enumerate(zip(problem.x[batches], problem.y[batches], strict=True), 1):
        # the gradient of half the mean squared error, by hand: the demo spends its time on optimizers
        w.grad = x.T @ (x @ w.detach() - y) / BATCH
        optimizer.step()
        if step % EVERY == 0:
            errors.append(problem.error(w))
    return errors


def final(errors: list[float]) -> float:
    """The last error; what diverged counts as infinitely far."""
    return errors[-1] if math.isfinite(errors[-1]) else math.inf


def tuned(name: str, problems: dict[int, Regression], tick: Callable[[], None]) -> dict[str, float]:
    """The best of BUDGET random settings, by the mean logarithm of the final error on the tuning seeds."""
    make, ranges = OPTIMIZERS[name]
    rng = random.Random(f"{name} 0")
    tried = []
    for _ in range(BUDGET):
        settings = {key: math.exp(rng.uniform(math.log(low), math.log(high))) for key, (low, high) in ranges.items()}
        ends = [final(fit(problems[seed], make, settings, seed)) for seed in TUNING]
        tried.append((statistics.fmean(math.log(end) for end in ends), settings))
        tick()
    return min(tried, key=lambda pair: pair[0])[1]


def main() -> None:
    """Run, print the table, save the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", type=Path, default=Path("docs/figures/demo.png"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    curves: dict[tuple[str, str], list[list[float]]] = {}
    chosen: dict[tuple[str, str], dict[str, float]] = {}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("fitting", total=len(NOISES) * len(OPTIMIZERS) * (BUDGET + 1))
        for label, noise in NOISES.items():
            problems = {seed: syntoken(seed, **noise) for seed in TUNING + REPORTED}
            for name in OPTIMIZERS:
                settings = tuned(name, problems, lambda: progress.advance(task))
                make = OPTIMIZERS[name][0]
                curves[label, name] = [fit(problems[seed], make, settings, seed) for seed in REPORTED]
                chosen[label, name] = settings
                progress.advance(task)

    title = f"distance to the truth after {STEPS} steps: median of {len(REPORTED)} seeds [least, most]"
    table = Table("optimizer", *NOISES, title=title)
    for name in OPTIMIZERS:
        ends = [sorted(map(final, curves[label, name])) for label in NOISES]
        table.add_row(name, *(f"{statistics.median(e):.3g} [{e[0]:.3g}, {e[-1]:.3g}]" for e in ends))
    console.print(table)
    for name in OPTIMIZERS:
        settings = chosen["Student-t, df 1.5", name]
        console.print(f"{name} under the heavy tail: " + ", ".join(f"{k}={v:.3g}" for k, v in settings.items()))

    figure, axes = plt.subplots(1, len(NOISES), figsize=(8.6, 3.4), sharex=True, layout="constrained")
    steps = range(0, STEPS + 1, EVERY)
    for axis, label in zip(axes, NOISES, strict=True):
        for name, (colour, line) in STYLE.items():
            runs = torch.tensor(curves[label, name])
            axis.plot(steps, runs.median(0).values, line, color=colour, label=name, linewidth=1.8)
            axis.fill_between(steps, runs.amin(0), runs.amax(0), color=colour, alpha=0.15, linewidth=0)
        axis.set(title=label, xlabel="steps", yscale="log")
        axis.grid(alpha=0.25, which="both", linewidth=0.5)
    axes[0].set_ylabel("distance to the truth")
    axes[-1].legend(frameon=False)
    figure.suptitle(f"SynToken, one node, batch {BATCH}: median and range of {len(REPORTED)} seeds", fontsize=11)
    arguments.figure.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.figure, dpi=130)
    console.print(f"figure: {arguments.figure}")


if __name__ == "__main__":
    main()
