"""The paper's Bi2Clip grid, 729 points, on SynToken: how long a sweep takes that trains all points side by side.

5000 samples of dimension 100, 10 nodes, 60 rounds of 5 local steps, batches of 32, float32. The time is that of a warm
process, from the settings to the errors after every round, with the drawing of batches and the plan of the memory.
Beside it: the program that was written for regression alone (`sweeps.stacked`), and one point by `tailopt.simulate`,
times 729. Competitors take turns; each has its least of several times.

    python benchmarks/sweep.py [--threads 2] [--tries 5] [--write]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping

import torch
from cpu_step import machine, put
from torch import Tensor

import tailopt
from tailopt.engines.configurations import ConfigurationsResult, run_configurations
from tailopt.paper.grids import points
from tailopt.sweeps.stacked import Batches, errors
from tailopt.tasks.synthetic import Synthetic

NODES, ROUNDS, STEPS, BATCH, SEED = 10, 60, 5, 32, 0
TASK = Synthetic()


def grid() -> list[tailopt.Algorithm]:
    return [tailopt.algorithm("bi2clip", **point) for point in points("bi2clip")]


def side_by_side(algorithms: list[tailopt.Algorithm]) -> ConfigurationsResult:
    truth = TASK.problem(SEED).truth

    def error(t: int, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"error": torch.linalg.vector_norm(weights["weight"].squeeze(1) - truth, dim=-1)}

    return run_configurations(
        TASK.model(SEED),
        algorithms,
        loss=TASK.loss,
        data=TASK.nodes(SEED, NODES),
        batch_size=BATCH,
        rounds=ROUNDS,
        local_steps=STEPS,
        seed=SEED,
        measure=error,
    )


def for_regression(algorithms: list[tailopt.Algorithm]) -> Tensor:
    data = Batches.of(TASK, [SEED], NODES, ROUNDS * STEPS, BATCH)
    return errors(data, lambda point: algorithms[point["number"]], [{"number": c} for c in range(len(algorithms))],
                  ROUNDS, STEPS)  # fmt: skip


def one_simulation(algorithm: tailopt.Algorithm) -> None:
    tailopt.simulate(
        TASK.model(SEED),
        algorithm,
        loss=TASK.loss,
        data=TASK.nodes(SEED, NODES),
        batch_size=BATCH,
        rounds=ROUNDS,
        local_steps=STEPS,
        seed=SEED,
        progress=False,
    )


def seconds(run: Callable[[], object]) -> tuple[float, float]:
    """Of the clock, and of the processors."""
    began, used = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - began, time.process_time() - used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/RESULTS.md")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    algorithms = grid()
    runs: dict[str, Callable[[], object]] = {
        f"{len(algorithms)} points side by side": lambda: side_by_side(grid()),
        "the same by `sweeps.stacked`": lambda: for_regression(grid()),
        "one point by `simulate`": lambda: one_simulation(algorithms[0]),
    }
    found = side_by_side(algorithms[:20])  # warm
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(arguments.tries):
        for name, run in runs.items():
            times[name].append(seconds(run))
    least = {name: tuple(map(min, zip(*of_run, strict=True))) for name, of_run in times.items()}
    first, _, single = (wall for wall, _ in least.values())
    goals = {next(iter(runs)): "<= 1.5 s"}
    lines = [
        f"`python benchmarks/sweep.py --write`: {machine()}",
        "",
        f"Route: {found.route.name}. {arguments.threads} threads; the least of {arguments.tries} times. "
        f"{len(algorithms)} simulations one by one would take {single * len(algorithms) / first:.0f} times as long.",
        "",
        "| | time | processor time | goal |",
        "| --- | --- | --- | --- |",
        *(f"| {name} | {wall:.2f} s | {cpu:.2f} s | {goals.get(name, '')} |" for name, (wall, cpu) in least.items()),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.write:
        put(text, "sweep", "A sweep of 729 points")


if __name__ == "__main__":
    main()
