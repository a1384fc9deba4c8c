"""The paper's Bi2Clip grid, 729 points, on SynToken: how long a sweep takes that trains all points side by side.

5000 samples of dimension 100, 10 nodes, 60 rounds of 5 local steps, batches of 32, float32. The time is that of a warm
process, from the settings to the errors after every round, with the drawing of batches and the plan of the memory.
Beside it: the same computation written by hand for this model and this algorithm, and one point by `tailopt.simulate`.
Competitors take turns; each has its least of several times. By hand and by engine, the points whose outer d is small
must end at the same error to 2 %: clipped steps of equal size cancel in the mean of ten nodes, and a large outer d
makes whole steps of the rounding errors that are left.

    python benchmarks/sweep.py [--threads 2] [--tries 5] [--write]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping

import torch
from cpu_step import machine, put
from torch import Tensor

import tailopt
from tailopt.engines.batches import DatasetBatches
from tailopt.engines.configuration_rounds import Configurations, Replica
from tailopt.engines.configurations import ConfigurationsResult, train_configurations
from tailopt.paper.grids import points
from tailopt.rounds.policy import RoundPolicy
from tailopt.splits.loaders import NodeData
from tailopt.tasks.synthetic import Synthetic

NODES, ROUNDS, STEPS, BATCH, SEED = 10, 60, 5, 32, 0
TASK = Synthetic()


def grid() -> list[tailopt.Algorithm]:
    return [tailopt.algorithm("bi2clip", **point) for point in points("bi2clip")]


def side_by_side(algorithms: list[tailopt.Algorithm]) -> ConfigurationsResult:
    truth = TASK.problem(SEED).truth

    def error(t: int, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"error": torch.linalg.vector_norm(weights["weight"].squeeze(2) - truth, dim=-1)}

    replica = Replica(
        model=TASK.model(SEED),
        batches=DatasetBatches(TASK.nodes(SEED, NODES), STEPS, None, BATCH, SEED),
        policy=RoundPolicy(
            rounds=ROUNDS, local_steps=STEPS, inner_state="reset", nodes=NODES, weights=(1.0,) * NODES, seed=SEED
        ),
    )
    task = Configurations(replicas=(replica,), loss=TASK.loss, measure=error)
    return train_configurations(task, algorithms).replica(0)


@torch.no_grad()
def by_hand(algorithms: list[tailopt.Algorithm]) -> Tensor:
    """Bi2Clip on regression with nothing general about it; returns the errors after the last round."""
    problem, numbers = TASK.problem(SEED), [a.settings for a in algorithms]
    ilr, olr, i_u, i_d, o_u, o_d = (
        torch.tensor([point[name] for point in numbers], dtype=TASK.dtype)[:, None]
        for name in ("ilr", "olr", "i_u", "i_d", "o_u", "o_d")
    )
    nodes = [NodeData(data, i, SEED, BATCH) for i, data in enumerate(TASK.nodes(SEED, NODES))]
    x = torch.zeros(len(algorithms), TASK.dimension, dtype=TASK.dtype)
    for t in range(ROUNDS):
        w = x.expand(NODES, *x.shape).clone()
        for features, labels in zip_batches(nodes, t * STEPS):
            residual = torch.baddbmm(labels[:, None], w, features.mT, beta=-1)
            g = torch.bmm(residual, features).div_(features.shape[1])
            w.addcmul_(g.abs().clamp_(i_d, i_u).mul_(g.sign()), -ilr)
        step = (w - x).mean(0)
        x.addcmul_(step.abs().clamp_(o_d, o_u).mul_(step.sign()), olr)
    return torch.linalg.vector_norm(x - problem.truth, dim=-1)


def zip_batches(nodes: list[NodeData], start: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield the batches of all nodes in a round, stacked."""
    for of_nodes in zip(*(node.batches(start, STEPS) for node in nodes), strict=True):
        yield tuple(map(torch.stack, zip(*of_nodes, strict=True)))


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
        "the same by `tailopt.sweep`": lambda: tailopt.sweep(
            TASK, "bi2clip", grid="paper", seeds=[SEED], report_seeds=0, progress=False
        ),
        "the same, written by hand": lambda: by_hand(grid()),
        "one point by `simulate`": lambda: one_simulation(algorithms[0]),
    }
    found = side_by_side(algorithms)  # warm
    small = torch.tensor([a.settings["o_d"] < 0.01 * a.settings["o_u"] for a in algorithms])
    errors = found.measured["error"][:, -1].float()
    torch.testing.assert_close(errors[small], by_hand(algorithms)[small], rtol=0.02, atol=0.0)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(arguments.tries):
        for name, run in runs.items():
            times[name].append(seconds(run))
    least = {name: tuple(map(min, zip(*of_run, strict=True))) for name, of_run in times.items()}
    first, *_, single = (wall for wall, _ in least.values())
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
