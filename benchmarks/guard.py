"""The time of the guard's exact test, which runs if lr * u is smaller than the ulps of the weights.

    python benchmarks/guard.py [--repetitions 5] [--write]

GPT-2 small, 124M parameters of about 0.02 to 1, each of which moved by up to lr * u = 1e-6 and one ulp. The largest
magnitude then decides nothing, and the guard checks every coordinate. Three implementations take turns: the C kernel;
torch in pieces that stay in the cache, which runs without the kernel; and torch over whole tensors. The script ends if
their verdicts differ. The table contains the median over the repetitions, with minimum and maximum.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from unittest.mock import patch

import torch
from cpu_step import gpt2_shapes, machine, put
from torch import Tensor

from tailopt.native import library as native
from tailopt.rounds import guard
from tailopt.rounds.guard import Bound, Exclusion, check_displacement

SHAPES = gpt2_shapes(12, 768, 4, 50257, 1024)
REACH = 1e-6  # lr * u
KERNEL, PIECES, WHOLE = "C kernel", "torch, in pieces", "torch, whole tensors"
COMMAND = "python benchmarks/guard.py --write"


def model(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """The weights at the start of a round, and the displacement."""
    source = torch.Generator().manual_seed(0)
    start, delta = [], []
    for shape in SHAPES:
        x = torch.empty(shape).uniform_(0.02, 1.0, generator=source).to(dtype)
        ulp = torch.finfo(dtype).eps * 0.5 ** torch.ceil(-torch.log2(x.float()))
        start.append(x)
        delta.append(torch.empty(shape).uniform_(-1.0, 1.0, generator=source) * (REACH + ulp))
    return start, delta


def whole_squares(x: Tensor, least: float) -> list[float]:
    """The sum of squares of a whole tensor's ulps."""
    return [guard.squares(guard._ulp(x.float().abs().clamp(min=least), x.dtype))]


def timed(way: str, test: Callable[[], Exclusion | None]) -> tuple[float, Exclusion | None]:
    """The seconds of one test, and its verdict."""
    library = native.loaded() if way == KERNEL else None
    size, squares = (1 << 62, whole_squares) if way == WHOLE else (guard.CHUNK, guard._ulp_squares)
    with (
        patch.object(guard.cpu, "loaded", lambda: library),
        patch.object(guard, "PIECE", size),
        patch.object(guard, "_ulp_squares", squares),
    ):
        began = time.perf_counter()
        found = test()
        return time.perf_counter() - began, found


def rows(dtype: torch.dtype, threads: int, repetitions: int) -> list[str]:
    """The lines of a table for one type of parameters."""
    torch.set_num_threads(threads)
    start, delta = model(dtype)
    names = [str(i) for i in range(len(start))]
    far = float(torch.stack([d.double().square().sum() for d in delta]).sum().sqrt())
    tests = {"coordinates": Bound("coordinate", REACH, 0.0, 1), "norm": Bound("norm", far / 2, 0.0, 1)}
    lines = []
    for what, limit in tests.items():
        ways = [KERNEL, PIECES, WHOLE]
        times = compete(ways, lambda limit=limit: check_displacement(0, delta, start, names, limit, {}), repetitions)  # type: ignore[misc]
        kernel = statistics.median(times[KERNEL])
        for way in ways:
            middle = statistics.median(times[way])
            spread = f"**{middle:.3f}** [{min(times[way]):.3f}, {max(times[way]):.3f}]"
            lines.append(f"| {what} | {str(dtype)[6:]} | {threads} | {way} | {spread} | {middle / kernel:.1f} |")
            print(lines[-1], flush=True)
    return lines


def compete(ways: Sequence[str], test: Callable[[], Exclusion | None], repetitions: int) -> dict[str, list[float]]:
    """The seconds of each implementation, which take turns in random order."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    verdicts = set()
    for _ in range(repetitions):
        for way in random.sample(ways, len(ways)):
            seconds, found = timed(way, test)
            times[way].append(seconds)
            verdicts.add(found)
    if len(verdicts) > 1:
        raise SystemExit(f"The ways do not decide alike: {verdicts}")
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="*", default=[1])
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/RESULTS.md")
    arguments = parser.parse_args()
    if native.loaded() is None:
        raise SystemExit(f"No C kernel to measure: {native.why_missing()}")
    torch.set_num_threads(arguments.threads[0])
    head = f"{machine()} {arguments.repetitions} repetitions; load {os.getloadavg()[0]:.1f} at the start."
    table = ["| bound | parameters | threads | by | seconds: median [least, most] | ratio to the kernel |"]
    table.append("| --- | --- | --- | --- | --- | --- |")
    print("\n".join([head, "", *table]), flush=True)
    for threads in arguments.threads:
        for dtype in (torch.float32, torch.bfloat16):
            table += rows(dtype, threads, arguments.repetitions)
    if arguments.write:
        put("\n".join([f"`{COMMAND}`: {head}", "", *table, ""]), "guard", "The guard's exact test, 124M parameters")


if __name__ == "__main__":
    main()
