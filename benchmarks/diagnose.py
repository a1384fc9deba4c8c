"""How far `tailopt.diagnose` can be trusted, and what it costs.

    python benchmarks/diagnose.py [--seeds 20] [--first-seed 0] [--batches 256] [--hidden 32 ...]     the accuracy
    python benchmarks/diagnose.py --write [--batches 256] [--repetitions 3]     the time, into RESULTS.md

Accuracy: a network with one hidden layer is fitted to a regression, and noise of a known tail index is added to each of
its minibatch gradients. A case is covered where the 90 % interval holds the index. Controls are Gaussian, with scales
that differ from coordinate to coordinate; the variance is finite there, so none may be called heavy.

Time: all of `diagnose`, divided by forward and backward passes over the same batches, which take turns with it; in
seconds of the processor, on one thread.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from cpu_step import machine, put
from torch import Tensor, nn

from tailopt import Diagnosis, diagnose


class Case(NamedTuple):
    """A law of noise: its tail index, and how the scales of coordinates are distributed."""

    index: float
    draw: Callable[[int, torch.Generator], Tensor]
    scales: Callable[[int, torch.Generator], Tensor] = lambda n, source: torch.ones(n)


def gaussian(n: int, source: torch.Generator) -> Tensor:
    return torch.randn(n, generator=source)


def student(df: float) -> Callable[[int, torch.Generator], Tensor]:
    def draw(n: int, source: torch.Generator) -> Tensor:
        chi_squared = 2 * torch._standard_gamma(torch.full((n,), df / 2, dtype=torch.float64), generator=source)
        return torch.randn(n, generator=source, dtype=torch.float64) / (chi_squared / df).sqrt()

    return draw


def stable(alpha: float) -> Callable[[int, torch.Generator], Tensor]:
    """A symmetric alpha-stable law, by the transformation of Chambers, Mallows and Stuck."""

    def draw(n: int, source: torch.Generator) -> Tensor:
        angle = math.pi * (torch.rand(n, generator=source, dtype=torch.float64) - 0.5)
        wait = -torch.rand(n, generator=source, dtype=torch.float64).clamp(min=1e-300).log()
        first = (alpha * angle).sin() / angle.cos().pow(1 / alpha)
        return first * (((1 - alpha) * angle).cos() / wait).pow((1 - alpha) / alpha)

    return draw


def lognormal(sigma: float) -> Callable[[int, torch.Generator], Tensor]:
    return lambda n, source: (sigma * torch.randn(n, generator=source)).exp()


CASES = {
    "Cauchy": Case(1.0, student(1.0)),
    "Student t 1.1": Case(1.1, student(1.1)),
    "Student t 1.5": Case(1.5, student(1.5)),
    "Student t 2": Case(2.0, student(2.0)),
    "Student t 3": Case(3.0, student(3.0)),
    "alpha-stable 1.3": Case(1.3, stable(1.3)),
    "alpha-stable 1.7": Case(1.7, stable(1.7)),
    "Gaussian": Case(math.inf, gaussian),
    "Gaussian, log-normal scales 1.5": Case(math.inf, gaussian, lognormal(1.5)),
    "Gaussian, log-normal scales 2.5": Case(math.inf, gaussian, lognormal(2.5)),
    "Gaussian, Pareto scales 1.2": Case(
        math.inf, gaussian, lambda n, source: torch.rand(n, generator=source).clamp(min=1e-7).pow(-1 / 1.2)
    ),
}


def diagnosed(case: Case, seed: int, batches: int = 256, hidden: int = 32) -> Diagnosis:
    """Diagnose the network with this noise in its gradients."""
    source = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(20, hidden), nn.Tanh(), nn.Linear(hidden, 1))
    size = sum(p.numel() for p in model.parameters())
    truth, scales = torch.randn(20, 1, generator=source), case.scales(size, source)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, y, noise = batch
        flat = torch.cat([p.reshape(-1) for p in model.parameters()])
        return nn.functional.mse_loss(model(x), y) + (noise * flat).sum()

    def stream() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for _ in range(batches):
            x = torch.randn(16, 20, generator=source)
            yield x, x @ truth, (scales * case.draw(size, source)).float()

    return diagnose(model, loss, stream(), count=batches, seed=seed, progress=False)


def accuracy(given: range, batches: int, hidden: int) -> list[str]:
    """The table of all cases, with these seeds."""
    size, seeds = 22 * hidden + 1, len(given)
    lines = [
        f"{size} coordinates, {batches} batches, {seeds} seeds from {given[0]} on:",
        "",
        "| noise | index | estimate, median | covered | width of the interval, median [most] | called heavy | light |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    print("\n".join(lines), flush=True)
    for name, case in CASES.items():
        found = [diagnosed(case, seed, batches, hidden) for seed in given]
        tails = [f.overall.tails for f in found]
        finite = math.isfinite(case.index)
        covered = sum(t.low <= case.index <= t.high for t in tails)
        widths = sorted(t.high - t.low for t in tails)
        cells = [
            name,
            f"{case.index:g}" if finite else "-",
            f"{statistics.median(t.index for t in tails):.2f}",
            f"{covered} of {seeds}" if finite else "-",
            f"{statistics.median(widths):.2f} [{widths[-1]:.2f}]" if finite else "-",
            *(f"{sum(f.finding == finding for f in found)} of {seeds}" for finding in ("heavy", "light")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return lines


# --- Time -------------------------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """A small Transformer that predicts a class from tokens."""

    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
        self.layers, self.out = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.layers(self.words(tokens)).mean(1))


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def problems(batches: int) -> dict[str, tuple[nn.Module, list[tuple[Tensor, Tensor]]]]:
    """Models with their batches, fewer of them for the largest."""
    source = torch.Generator().manual_seed(0)
    labels = [torch.randint(10, (64,), generator=source) for _ in range(batches)]
    images = [torch.randn(64, 3, 32, 32, generator=source) for _ in range(batches)]
    tokens = [torch.randint(8000, (16, 64), generator=source) for _ in range(batches // 4)]  # it takes long
    wide = nn.Sequential(nn.Flatten(), nn.Linear(3072, 256), nn.ReLU(), nn.Linear(256, 10))
    convolutions = nn.Sequential(
        *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4)),
        *(nn.Flatten(), nn.Linear(1024, 10)),
    )
    return {
        "perceptron, 0.8M": (wide, list(zip(images, labels, strict=True))),
        "convolutions, 30k": (convolutions, list(zip(images, labels, strict=True))),
        "Transformer, 5.2M": (Encoder(8000, 256, 4), list(zip(tokens, (y[:16] for y in labels), strict=False))),
    }


def backward_passes(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    """What has to be done anyway."""
    for batch in batches:
        model.zero_grad(set_to_none=True)
        cross_entropy(model, batch).backward()


def times(batches: int, repetitions: int) -> list[str]:
    """The table of ratios."""
    lines = [
        "| model | batches | diagnose / backward passes: median [least, most] | goal | backward passes, s |",
        "| --- | ---: | ---: | --- | ---: |",
    ]
    print("\n".join(lines), flush=True)
    for name, (model, given) in problems(batches).items():
        ways = {
            "passes": lambda: backward_passes(model, given),  # noqa: B023
            "diagnose": lambda: diagnose(model, cross_entropy, given, progress=False),  # noqa: B023
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        backward_passes(model, given[:2])
        for _ in range(repetitions):
            for way in random.sample(list(ways), len(ways)):
                start = time.process_time()
                ways[way]()
                seconds[way].append(time.process_time() - start)
        ratios = [a / b for a, b in zip(seconds["diagnose"], seconds["passes"], strict=True)]
        spread = f"**{statistics.median(ratios):.3f}** [{min(ratios):.3f}, {max(ratios):.3f}]"
        lines.append(f"| {name} | {len(given)} | {spread} | <= 1.3 | {statistics.median(seconds['passes']):.2f} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--batches", type=int, default=256)
    parser.add_argument("--hidden", type=int, nargs="*", default=[5, 32, 200])
    parser.add_argument("--time", action="store_true", help="the time, without writing it")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="put the time into benchmarks/RESULTS.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.time and not arguments.write:
        seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
        for hidden in arguments.hidden:
            accuracy(seeds, arguments.batches, hidden)
            print()
        return
    head = f"{machine()} {arguments.repetitions} repetitions; load {os.getloadavg()[0]:.1f} at the start."
    print(head + "\n", flush=True)
    table = times(arguments.batches, arguments.repetitions)
    if arguments.write:
        command = f"python benchmarks/diagnose.py --batches {arguments.batches} --write"
        put("\n".join([f"`{command}`: {head}", "", *table, ""]), "diagnose", "A diagnosis of gradient noise")


if __name__ == "__main__":
    main()
