"""The time of a step on the CPU, relative to torch's optimizers on the same parameters in the same run.

    python benchmarks/cpu_step.py [--runs 5] [--write]

A run interleaves all competitors in random order and takes the minimum time of each; a ratio compares two times of one
run. The control is the ratio of SGD to a second SGD on the same parameters; a run whose control is off by more than 5 %
is discarded and repeated. The tables contain the median over the remaining runs, with minimum and maximum. --write puts
them into benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tailopt
from tailopt.clipping.dispatch import KERNELS
from tailopt.clipping.kernels.kernel import StepGroup
from tailopt.clipping.reference import ClipByValue, StepHyperparameters
from tailopt.native import library as native

RESULTS = Path(__file__).with_name("RESULTS.md")
TOLERANCE = 0.05
NUMBERS = {"lr": 1e-3, "u": 0.5, "d": 0.1}


def gpt2_shapes(layers: int, width: int, ratio: int, vocabulary: int, positions: int) -> list[tuple[int, ...]]:
    """The parameters of a GPT-2 with tied embeddings: 12 tensors per layer and 4 more."""
    layer = [
        (width,),
        (width,),
        (width, 3 * width),
        (3 * width,),
        (width, width),
        (width,),
        (width,),
        (width,),
        (width, ratio * width),
        (ratio * width,),
        (ratio * width, width),
        (width,),
    ]
    return [(vocabulary, width), (positions, width), *layer * layers, (width,), (width,)]


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    result = []
    for shape in shapes:
        p = torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        p.grad = torch.randn(shape, generator=generator).to(dtype)
        result.append(p)
    return result


def kernel(name: str, params: list[Tensor]) -> Callable[[], None]:
    hparams = StepHyperparameters(ClipByValue(NUMBERS["u"], NUMBERS["d"]), lr=NUMBERS["lr"])
    batch = StepGroup(params, [p.grad for p in params], hparams)  # type: ignore[misc]

    def run() -> None:
        with torch.no_grad():
            KERNELS[name].run([batch])

    return run


def sign_clamp(params: list[Tensor]) -> Callable[[], None]:
    """The obvious implementation of BiClip: sign times clamp, one tensor at a time."""

    def run() -> None:
        with torch.no_grad():
            for p in params:
                assert p.grad is not None
                p.add_(p.grad.sign() * p.grad.abs().clamp(NUMBERS["d"], NUMBERS["u"]), alpha=-NUMBERS["lr"])

    return run


def sgd_and_control(params: list[Tensor], momentum: float = 0.0) -> dict[str, Callable[[], None]]:
    names = ("SGD foreach", "SGD foreach again")
    return {name: torch.optim.SGD(params, lr=1e-3, momentum=momentum, foreach=True).step for name in names}


def plain_mix(dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    """The optimizers that a user chooses between."""
    params = parameters(gpt2_shapes(5, 512, 4, 16384, 1024), dtype)
    return {
        **sgd_and_control(params),
        "BiClip": tailopt.BiClip(params, **NUMBERS).step,
        "BiClip, counts": tailopt.BiClip(params, **NUMBERS, statistics="counts").step,
        "BiClip, counts and sampled histogram": tailopt.BiClip(params, **NUMBERS, statistics=True).step,
        "SGD fused": torch.optim.SGD(params, lr=1e-3, fused=True).step,
        "AdamW fused": torch.optim.AdamW(params, lr=1e-3, fused=True).step,
    }


def momentum_mix(dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    """The same with momentum; SGD and its control have it too."""
    params = parameters(gpt2_shapes(5, 512, 4, 16384, 1024), dtype)
    narrow: dict[str, Any] = {"momentum": 0.9, "momentum_dtype": torch.bfloat16}
    return {
        **sgd_and_control(params, momentum=0.9),
        "BiClip": tailopt.BiClip(params, **NUMBERS, momentum=0.9).step,
        "BiClip, momentum in bf16": tailopt.BiClip(params, **NUMBERS, **narrow).step,
        "BiClip, counts": tailopt.BiClip(params, **NUMBERS, momentum=0.9, statistics="counts").step,
        "SGD fused": torch.optim.SGD(params, lr=1e-3, momentum=0.9, fused=True).step,
        "AdamW fused": torch.optim.AdamW(params, lr=1e-3, fused=True).step,
    }


def torch_mix() -> dict[str, Callable[[], None]]:
    """BiClip from torch operations: the kernels that run without a compiler, and the obvious implementation."""
    params = parameters(gpt2_shapes(5, 512, 4, 16384, 1024), torch.float32)
    return {
        **sgd_and_control(params),
        "kernel chunked": kernel("chunked", params),
        "kernel foreach": kernel("foreach", params),
        "kernel single (where chain)": kernel("single", params),
        "sign times clamp": sign_clamp(params),
    }


def tiny_mix() -> tuple[list[Tensor], dict[str, Callable[[], None]]]:
    """148 tensors of 1 to 768 elements, where almost all time is overhead."""
    shapes = gpt2_shapes(12, 16, 3, 48, 32)
    shapes[-1] = (1,)
    params = parameters(shapes, torch.float32)
    return params, {
        **sgd_and_control(params),
        "BiClip": tailopt.BiClip(params, **NUMBERS).step,
        "SGD fused": torch.optim.SGD(params, lr=1e-3, fused=True).step,
        "AdamW fused": torch.optim.AdamW(params, lr=1e-3, fused=True).step,
    }


def least_times(steps: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """The minimum time of each competitor, in random order, since the cache depends on the previous competitor."""
    least = dict.fromkeys(steps, float("inf"))
    for _ in range(repeats):
        for name, step in random.sample(list(steps.items()), len(steps)):
            start = time.perf_counter()
            step()
            least[name] = min(least[name], time.perf_counter() - start)
    return least


def with_fresh_gradients(steps: dict[str, Callable[[], None]], params: list[Tensor], repeats: int) -> dict[str, float]:
    """Like `least_times`, with new gradient objects before every step, as after zero_grad(), which are not timed."""
    least = dict.fromkeys(steps, float("inf"))
    for _ in range(repeats):
        for name, step in random.sample(list(steps.items()), len(steps)):
            for p in params:
                p.grad = p.grad.clone()  # type: ignore[union-attr]
            start = time.perf_counter()
            step()
            least[name] = min(least[name], time.perf_counter() - start)
    return least


def runs_that_count(measure: Callable[[], dict[str, float]], runs: int) -> tuple[list[dict[str, float]], int]:
    """The runs whose control is within the tolerance, and the number of discarded runs."""
    measure()  # warm: caches, thread pools, AdamW's state
    good: list[dict[str, float]] = []
    discarded = 0
    while len(good) < runs:
        times = measure()
        control = times["SGD foreach again"] / times["SGD foreach"]
        if abs(control - 1) <= TOLERANCE:
            good.append(times)
        elif (discarded := discarded + 1) > 10 * runs:
            raise SystemExit(
                f"{discarded} runs with a control off by more than 5 %: the machine is too busy to measure."
            )
        print(f"  run {len(good)} of {runs}: control {control:.3f}", file=sys.stderr)
    return good, discarded


def ratio(good: list[dict[str, float]], over: str, under: str) -> str:
    values = [times[over] / times[under] for times in good]
    return f"**{statistics.median(values):.3f}** [{min(values):.3f}, {max(values):.3f}]"


def table(title: str, good: list[dict[str, float]], discarded: int, rows: list[tuple[str, str, str]]) -> str:
    """A table of ratios; a row is (numerator, denominator, goal)."""
    lines = [
        f"### {title}",
        "",
        "| | ratio: median [least, most] | goal | time of the first, ms |",
        "| --- | --- | --- | --- |",
    ]
    for over, under, goal in rows:
        milliseconds = statistics.median(times[over] for times in good) * 1e3
        lines.append(f"| {over} / {under} | {ratio(good, over, under)} | {goal} | {milliseconds:.3g} |")
    control = ratio(good, "SGD foreach again", "SGD foreach")
    lines += ["", f"Control {control}; {len(good)} runs counted, {discarded} discarded.", ""]
    return "\n".join(lines)


MEMORY = """
import sys, torch, tailopt
sys.path.insert(0, {folder!r})
from cpu_step import NUMBERS, gpt2_shapes, kernel, parameters, sign_clamp
def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) / 1024
params = parameters(gpt2_shapes(5, 512, 4, 16384, 1024), torch.float32)
step = {{"BiClip": lambda: tailopt.BiClip(params, **NUMBERS).step(),
        "kernel chunked": kernel("chunked", params), "kernel foreach": kernel("foreach", params),
        "sign times clamp": sign_clamp(params),
        "SGD foreach": torch.optim.SGD(params, lr=1e-3, foreach=True).step}}[{name!r}]
small = [torch.zeros(4, requires_grad=True)]
small[0].grad = torch.ones(4)
tailopt.BiClip(small).step(); torch.optim.SGD(small, foreach=True).step()  # load what the very first step loads
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
step()
print(status("VmHWM") - before)
"""


def extra_memory() -> str:
    """The increase of resident memory during a step, each measured in its own process."""
    lines = ["### Extra memory of a step, fp32", "", "| | MiB |", "| --- | --- |"]
    for name in ("SGD foreach", "BiClip", "kernel chunked", "kernel foreach", "sign times clamp"):
        code = MEMORY.format(folder=str(Path(__file__).parent), name=name)
        rises = [float(subprocess.check_output([sys.executable, "-c", code], text=True)) for _ in range(3)]
        lines.append(f"| {name} | {statistics.median(rises):.1f} |")
    return "\n".join([*lines, ""])


def machine() -> str:
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        name = next(
            line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        )
    library = native.loaded()
    instruction_set = library.instruction_sets[-1] if library else "no C kernel"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=RESULTS.parent)
    return (
        f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads; torch {torch.__version__} "
        f"({torch.backends.cpu.get_cpu_capability()}), tailopt {tailopt.__version__} ({instruction_set}), Python "
        f"{platform.python_version()}, commit {commit.stdout.strip()}."
    )


def put(text: str, section: str, title: str) -> None:
    """Put the text into its section of RESULTS.md, which is created if it does not exist."""
    begin, end = f"<!-- {section}:begin -->", f"<!-- {section}:end -->"
    old = RESULTS.read_text()
    if begin not in old:
        old = old.rstrip("\n") + f"\n\n## {title}\n\n{begin}\n{end}\n"
    RESULTS.write_text(old[: old.index(begin) + len(begin)] + "\n" + text + old[old.index(end) :])
    print(f"wrote {RESULTS}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=25, help="steps of each competitor in a run")
    parser.add_argument("--write", action="store_true", help="put the tables into benchmarks/RESULTS.md")
    arguments = parser.parse_args()
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    parts: list[str] = []

    def report(part: str) -> None:
        print(part, flush=True)
        parts.append(part)

    report(f"`python benchmarks/cpu_step.py --write`: {machine()}\n")

    mix = plain_mix(torch.float32)
    good, discarded = runs_that_count(lambda: least_times(mix, arguments.repeats), arguments.runs)
    rows = [
        ("BiClip", "SGD foreach", "<= 0.95"),
        ("BiClip", "AdamW fused", "<= 0.50"),
        ("BiClip, counts", "BiClip", "<= 1.03"),
        ("BiClip, counts and sampled histogram", "BiClip", "<= 1.05"),
        ("SGD fused", "SGD foreach", ""),
    ]
    report(table("fp32, 24.7M parameters in 64 GPT-2-shaped tensors", good, discarded, rows))

    mix = plain_mix(torch.bfloat16)
    good, discarded = runs_that_count(lambda: least_times(mix, arguments.repeats), arguments.runs)
    rows = [
        ("BiClip", "SGD foreach", "<= 0.85"),
        ("BiClip", "AdamW fused", "<= 0.25"),
        ("BiClip, counts", "BiClip", ""),
        ("BiClip, counts and sampled histogram", "BiClip", ""),
        ("SGD fused", "SGD foreach", ""),
    ]
    report(table("bf16, the same tensors", good, discarded, rows))

    for dtype, goal in ((torch.float32, "<= 1.05"), (torch.bfloat16, "")):
        mix = momentum_mix(dtype)
        good, discarded = runs_that_count(partial(least_times, mix, arguments.repeats), arguments.runs)
        rows = [("BiClip", "SGD foreach", goal), ("BiClip, momentum in bf16", "SGD foreach", "")]
        rows += [("BiClip", "AdamW fused", ""), ("BiClip, counts", "BiClip", ""), ("SGD fused", "SGD foreach", "")]
        title = f"With momentum 0.9, {'fp32' if dtype == torch.float32 else 'bf16'}, the same tensors"
        report(table(title, good, discarded, rows))

    mix = torch_mix()
    good, discarded = runs_that_count(lambda: least_times(mix, max(5, arguments.repeats // 3)), arguments.runs)
    rows = [
        (name, "SGD foreach", "<= 3.5" if name == "kernel chunked" else "")
        for name in mix
        if not name.startswith("SGD")
    ]
    report(table("Without a compiler: torch operations, fp32, the same tensors", good, discarded, rows))

    tiny, mix = tiny_mix()
    rows = [("BiClip", "SGD fused", "<= 0.8"), ("BiClip", "SGD foreach", ""), ("AdamW fused", "SGD fused", "")]
    good, discarded = runs_that_count(lambda: least_times(mix, 40 * arguments.repeats), arguments.runs)
    report(table("148 tensors of 1 to 768 elements, the same gradient objects in every step", good, discarded, rows))
    good, discarded = runs_that_count(lambda: with_fresh_gradients(mix, tiny, 10 * arguments.repeats), arguments.runs)
    report(table("148 tensors of 1 to 768 elements, new gradient objects in every step", good, discarded, rows))

    if Path("/proc/self/clear_refs").exists():
        report(extra_memory())
    if arguments.write:
        put("\n".join(parts), "cpu_step", "A step on the CPU")


if __name__ == "__main__":
    main()
