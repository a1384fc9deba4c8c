"""What a simulated local step with BiClip inside costs beside its forward and backward pass.

    python benchmarks/local_step.py [--write]

64 tensors of 100 elements, one thread: almost all of the time is bookkeeping. The competitors take turns; a ratio is
formed inside a trial, and the table shows the median over the trials with the least and the most.

    BiClip.step             the optimizer, after its first steps
    Rule.step               the inner rule, with the cache that the engine keeps, and without one
    local step              all that `simulate` does for one local step but forward and backward: seeding, the batch,
                            the hyperparameters, the inner step. The marginal time of a step in a long round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from cpu_step import machine, put
from torch import Tensor, nn

import tailopt
from tailopt.clipping.step_cache import StepCache
from tailopt.engines import sequential
from tailopt.rules.table import INNER

TENSORS, ELEMENTS, TRIALS, STEPS = 64, 100, 25, 200
HPARAMS = {"lr": 0.1, "u": 0.1, "d": 0.01}


class Model(nn.Module):
    """Parameters that no forward pass uses."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(ELEMENTS, generator=generator) for _ in range(TENSORS))

    def set_gradients(self) -> list[Tensor]:
        """Give every parameter a gradient that stays."""
        generator = torch.Generator().manual_seed(1)
        for p in self.parameters():
            p.grad = torch.randn(ELEMENTS, generator=generator)
        return [p.grad for p in self.parameters() if p.grad is not None]


def simulated(local_steps: int) -> float:
    """Seconds of a round of one node that computes nothing: its gradients are always the same tensors."""
    model, loss = Model(), torch.tensor(1.0)
    grads = model.set_gradients()

    def backward(self: object, batch: object, params: list[nn.Parameter]) -> Tensor:
        if params[0].grad is None:  # removed at the end of a round
            for p, g in zip(params, grads, strict=True):
                p.grad = g
        return loss

    real, sequential.Sequential._backward = sequential.Sequential._backward, backward  # type: ignore[assignment, method-assign]
    try:
        began = time.perf_counter()
        tailopt.simulate(
            model,
            tailopt.algorithm("avg-biclip", ilr=HPARAMS["lr"], i_u=HPARAMS["u"], i_d=HPARAMS["d"]),
            loss=lambda net, batch: loss,
            batches=lambda node, round, step, generator: None,
            nodes=1,
            rounds=1,
            local_steps=local_steps,
            progress=False,
        )
        return time.perf_counter() - began
    finally:
        sequential.Sequential._backward = real  # type: ignore[method-assign]


def local_step() -> float:
    """Seconds of one more local step in a round."""
    return (simulated(2 * STEPS) - simulated(STEPS)) / STEPS


def repeated(step: Callable[[], None]) -> Callable[[], float]:
    """A function that measures the mean seconds of many steps."""

    def measure() -> float:
        began = time.perf_counter()
        for _ in range(STEPS):
            step()
        return (time.perf_counter() - began) / STEPS

    return measure


def by_rule(cache: StepCache | None) -> Callable[[], None]:
    model = Model()
    grads = model.set_gradients()
    params: list[Tensor] = [p.detach() for p in model.parameters()]
    states: list[dict[str, object]] = [{} for _ in params]
    return lambda: INNER["biclip"].step(params, grads, states, HPARAMS, cache)


def competitors() -> dict[str, Callable[[], float]]:
    model = Model()
    model.set_gradients()
    return {
        "BiClip.step": repeated(tailopt.BiClip(model.parameters(), **HPARAMS).step),
        "Rule.step, kept cache": repeated(by_rule(StepCache())),
        "Rule.step, no cache": repeated(by_rule(None)),
        "local step of simulate": local_step,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/RESULTS.md")
    parser.add_argument("--trials", type=int, default=TRIALS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    measures = competitors()
    for measure in measures.values():  # warm
        measure()
    trials = [{name: measure() for name, measure in measures.items()} for _ in range(arguments.trials)]
    goals = {"Rule.step, kept cache": "<= 1.3", "local step of simulate": "<= 1.3"}
    lines = [
        f"`python benchmarks/local_step.py --write`: {machine()} {TENSORS} tensors of {ELEMENTS} elements, "
        f"{arguments.trials} trials.",
        "",
        "| | us: median [least, most] | of BiClip.step | goal |",
        "| --- | --- | --- | --- |",
    ]
    for name in measures:
        times, ratios = [t[name] * 1e6 for t in trials], [t[name] / t["BiClip.step"] for t in trials]
        lines.append(
            f"| {name} | {statistics.median(times):.1f} [{min(times):.1f}, {max(times):.1f}] | "
            f"**{statistics.median(ratios):.2f}** [{min(ratios):.2f}, {max(ratios):.2f}] | {goals.get(name, '')} |"
        )
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.write:
        put(text, "local_step", "A simulated local step")


if __name__ == "__main__":
    main()
