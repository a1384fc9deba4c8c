"""The time of a step on a GPU: BiClip, compiled BiClip, and torch's optimizers, on the same parameters in one run.

    python benchmarks/gpu_step.py [--size 124M] [--dtype float32] [--trials 9] [--write]

The parameters are those of GPT-2. Every trial times all optimizers in random order, with CUDA events around several
steps, and the medians are reported. The floor is the time of a flat `add_` over the same number of elements: like
BiClip it must read two numbers and write one per element. --write puts the table into benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
from cpu_step import NUMBERS, gpt2_shapes, put

import tailopt

SIZES = {"124M": (12, 768), "355M": (24, 1024), "774M": (36, 1280), "1.5B": (48, 1600)}  # layers, width


def competitors(params: list[torch.nn.Parameter]) -> dict[str, Callable[[], object]]:
    """Name -> one step. All steps move the same parameters; their time does not depend on the values."""
    count, like = sum(p.numel() for p in params), {"device": params[0].device, "dtype": params[0].dtype}
    x, g = torch.zeros(count, **like), torch.zeros(count, **like)
    return {
        "floor": lambda: x.add_(g, alpha=-1e-3),
        "BiClip": tailopt.BiClip(params, **NUMBERS).step,
        "BiClip, torch.compile(opt.step)": torch.compile(tailopt.BiClip(params, **NUMBERS).step),
        "SGD foreach": torch.optim.SGD(params, lr=1e-3, foreach=True).step,
        "AdamW fused": torch.optim.AdamW(params, lr=1e-3, fused=True).step,
    }


def milliseconds(step: Callable[[], object], steps: int) -> float:
    """The milliseconds of one step, from several that are enqueued one after another."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(steps):
        step()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description="What a step costs on a GPU.")
    parser.add_argument("--size", choices=SIZES, default="124M", help="parameters of the GPT-2")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--trials", type=int, default=9)
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/RESULTS.md")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no CUDA device here, so nothing was measured.")
        return
    layers, width = SIZES[arguments.size]
    like = {"device": "cuda", "dtype": getattr(torch, arguments.dtype)}
    params = [torch.nn.Parameter(torch.randn(shape, **like)) for shape in gpt2_shapes(layers, width, 4, 50257, 1024)]
    for p in params:
        p.grad = torch.randn_like(p)
    steps = competitors(params)
    for name, step in steps.items():
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        print(f"{name}: first step {time.perf_counter() - began:.1f} s", flush=True)
        milliseconds(step, 3)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(arguments.trials):
        for name in random.sample([*steps], len(steps)):
            times[name].append(milliseconds(steps[name], 10))
    middle = {name: statistics.median(several) for name, several in times.items()}
    total = sum(p.numel() for p in params)
    lines = [
        f"`python benchmarks/gpu_step.py --size {arguments.size} --dtype {arguments.dtype} --write`: "
        f"{torch.cuda.get_device_name()}; torch {torch.__version__}, tailopt {tailopt.__version__}; {total:,} "
        f"parameters in {len(params)} tensors, {arguments.trials} trials of 10 steps.",
        "",
        "| | ms: median [least, most] | relative to the floor | relative to AdamW fused |",
        "| --- | --- | ---: | ---: |",
    ]
    for name, several in times.items():
        lines.append(
            f"| {name} | {middle[name]:.3f} [{min(several):.3f}, {max(several):.3f}] | "
            f"{middle[name] / middle['floor']:.2f} | {middle[name] / middle['AdamW fused']:.2f} |"
        )
    print("\n".join(lines))
    if arguments.write:
        section = f"{arguments.size} {arguments.dtype}"
        put("\n".join(lines) + "\n", f"gpu_step {section}", f"A step on a GPU, {section}")


if __name__ == "__main__":
    main()
