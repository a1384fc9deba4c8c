"""The overhead of a simulated round: its time without the forward passes, backward passes and inner steps.

These three are replaced by functions that do nothing. What remains is seeding, batches, loading the weights,
displacements, the guard, the mean, the outer step and the history. Ten nodes, 961 parameters in four tensors. The
result is the marginal time of a round, (300 rounds - 100 rounds) / 200, the minimum of several attempts.

    python benchmarks/round.py [--write]
"""

from __future__ import annotations

import argparse
import time

import torch
from cpu_step import machine, put
from torch import nn

import tailopt
from tailopt.engines import sequential

NODES, TRIES = 10, 7


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 1))


def run(rounds: int, nodes: int, local_steps: int) -> float:
    """The seconds of a simulation."""
    x, y = torch.randn(32, 30), torch.randn(32, 1)
    began = time.perf_counter()
    tailopt.simulate(
        model(),
        tailopt.algorithm("avg-biclip", ilr=0.1, i_u=0.1, i_d=0.01),
        loss=lambda net, batch: (net(batch[0]) - batch[1]).square().mean(),
        batches=lambda node, round, step, generator: (x, y),
        nodes=nodes,
        rounds=rounds,
        local_steps=local_steps,
        progress=False,
    )
    return time.perf_counter() - began


def overhead(local_steps: int) -> float:
    """The milliseconds of a round without the computations of the nodes."""
    backward, inner = sequential.Sequential._backward, sequential.Sequential._inner_step
    loss = torch.tensor(1.0)
    sequential.Sequential._backward = lambda self, batch, params: loss  # type: ignore[method-assign]
    sequential.Sequential._inner_step = lambda *arguments: None  # type: ignore[method-assign]
    try:
        tries = (run(300, NODES, local_steps) - run(100, NODES, local_steps) for _ in range(TRIES))
        return min(tries) / 200 * 1e3
    finally:
        sequential.Sequential._backward, sequential.Sequential._inner_step = backward, inner  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/RESULTS.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    run(10, 4, 5)
    rows = [
        ("overhead of a round, 10 nodes, 961 parameters, one local step", f"{overhead(1):.2f} ms", "< 1 ms"),
        ("the same, five local steps", f"{overhead(5):.2f} ms", ""),
        ("4 nodes x 10 rounds x 5 local steps, total time", f"{min(run(10, 4, 5) for _ in range(5)):.2f} s", "< 1 s"),
    ]
    lines = [f"`python benchmarks/round.py --write`: {machine()}", "", "| | time | goal |", "| --- | --- | --- |"]
    text = "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"
    print(text)
    if arguments.write:
        put(text, "round", "A simulated round")


if __name__ == "__main__":
    main()
