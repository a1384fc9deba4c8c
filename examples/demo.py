"""The central claim in under a minute: nested training on ten nodes, under label noise of infinite variance.

SynToken is a linear regression whose features are as unevenly frequent as words; the noise is Student-t with 1.5
degrees of freedom. Eight algorithms run side by side with the settings in demo_settings.json, which demo_tuning.py
chose on other seeds with equal budgets.

    python examples/demo.py [--rounds 240] [--figure docs/figures/demo.png]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table

import tailopt
from tailopt.figures.labels import dash_legend, name_line_ends, plain_ticks
from tailopt.figures.style import band, band_text, look, pyplot
from tailopt.tasks.synthetic import Synthetic

SEEDS, NODES, LOCAL_STEPS, BATCH = (0, 1), 10, 5, 32
TASK = Synthetic(noise="student-t", df=1.5)
SETTINGS = json.loads((Path(__file__).parent / "demo_settings.json").read_text(encoding="utf-8"))["algorithms"]


def run(name: str, seed: int, rounds: int) -> list[float]:
    """The distance to the true weights after every round."""
    errors: list[float] = []

    def tell(row: dict[str, Any]) -> None:
        errors.append(row["metrics"]["error"])
        if row["round"] % 10 == 0:
            _told.put((name, seed, row["round"], errors[-1]))

    tailopt.simulate(
        TASK.model(seed),
        tailopt.algorithm(name, **SETTINGS[name]["settings"]),
        loss=TASK.loss,
        data=TASK.nodes(seed, NODES),
        batch_size=BATCH,
        rounds=rounds,
        local_steps=LOCAL_STEPS,
        seed=seed,
        evaluate=lambda model: TASK.evaluate(model, seed),
        loggers=[tell],
        progress=False,
    )
    return errors


def start_worker(told: Any) -> None:
    global _told
    _told = told
    torch.set_num_threads(1)


def table(latest: dict[tuple[str, int], tuple[int, float]], rounds: int, title: str) -> Table:
    shown = Table("algorithm", "seeds at round", "distance to the true weights", title=title)
    for name in SETTINGS:
        rows = [latest[name, seed] for seed in SEEDS if (name, seed) in latest]
        where = ", ".join(str(t) for t, _ in rows)
        ends = sorted(error for _, error in rows)
        spread = f"{statistics.median(ends):.3f}  [{ends[0]:.3f}, {ends[-1]:.3f}]" if ends else ""
        shown.add_row(name, where, spread)
    return shown


def draw(curves: dict[str, list[list[float]]], start: float, rounds: int, path: Path) -> None:
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(7.4, 4.2), layout="constrained")
    for name, runs in curves.items():
        band(axis, range(rounds + 1), [[start, *run] for run in runs], **look(name))
    axis.set(yscale="log", xlabel="round", ylabel="distance to the true weights", xlim=(0, rounds))
    plain_ticks(axis.yaxis)
    axis.grid(alpha=0.25, which="both", linewidth=0.5)
    name_line_ends([axis], size=9)
    dash_legend(figure, [axis])
    figure.suptitle(f"SynToken, 10 nodes, Student-t noise (df 1.5): {band_text(len(SEEDS))}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=240)
    parser.add_argument("--figure", type=Path, default=Path("docs/figures/demo.png"))
    arguments = parser.parse_args()
    rounds, console, began = arguments.rounds, Console(), time.monotonic()
    context = multiprocessing.get_context("spawn")
    told, latest = context.Manager().Queue(), {}
    title = f"{NODES} nodes, {rounds} rounds of {LOCAL_STEPS} local steps: median of {len(SEEDS)} seeds [least, most]"
    with ProcessPoolExecutor(2, context, start_worker, (told,)) as pool:
        jobs = {(name, seed): pool.submit(run, name, seed, rounds) for seed in SEEDS for name in SETTINGS}
        with Live(table(latest, rounds, title), console=console, refresh_per_second=4) as live:
            while not all(job.done() for job in jobs.values()):
                try:
                    name, seed, t, error = told.get(timeout=0.25)
                    latest[name, seed] = (t, error)
                except queue.Empty:
                    pass
                live.update(table(latest, rounds, title))
            for (name, seed), job in jobs.items():
                latest[name, seed] = (rounds, job.result()[-1])
            live.update(table(latest, rounds, title))
    curves = {name: [jobs[name, seed].result() for seed in SEEDS] for name in SETTINGS}
    start = statistics.median(TASK.evaluate(TASK.model(seed), seed)["error"] for seed in SEEDS)
    draw(curves, start, rounds, arguments.figure)
    console.print(f"figure: {arguments.figure}   ({time.monotonic() - began:.0f} s)")
    console.print(sentence({name: statistics.median(run[-1] for run in runs) for name, runs in curves.items()}))


def sentence(ends: dict[str, float]) -> str:
    """The result in one sentence, computed from the final distances."""
    first, *_ = sorted(ends, key=ends.__getitem__)
    last = max(ends, key=ends.__getitem__)
    ours, adam = ends["avg-biclip"], ends["avg-adam"]
    return (
        f"{first} came closest ({ends[first]:.2f}) and {last} stayed farthest ({ends[last]:.2f}); BiClip inside the "
        f"nodes, without any state, ended at {ours:.2f}, {ours / adam:.2f} of Adam's {adam:.2f} "
        f"and {ours / ends['avg-sgd']:.2f} of SGD's {ends['avg-sgd']:.2f}."
    )


if __name__ == "__main__":
    main()
