"""The time of a step on a GPU: BiClip, compiled BiClip, and torch's optimizers, on the same parameters in one run.

    python benchmarks/gpu_step.py [ROW ...] [--size 124M] [--dtype float32] [--trials 9] [--record FILE] [--write]

    step        BiClip by default and by the Triton kernel (fused=True), SGD, AdamW
    lr          a tensor lr on the device, eager and compiled
    momentum    BiClip with momentum 0.9, AdamW; the floor reads three numbers and writes two
    mixed       fp32 parameters with bf16 gradients
    rounding    stochastic rounding against rounding to the nearest, for bf16
    policies    dead zones and policies for non-finite gradients, against BiClip without
    l2clip      L2Clip and clip_grad_norm_; the floor reads one gradient more
    clipped     Clipped(AdamW) against AdamW
    statistics  BiClip that counts against BiClip that does not; read once in 100 steps
    blocks      the Triton kernel with other numbers of elements in a program
    host        microseconds that the host spends inside step()
    memory      the largest memory that a step needs beyond what it keeps, in bytes per parameter

The parameters are those of GPT-2. In every trial all competitors take several steps each, in random order, between CUDA
events: enqueued one after another ("events"), and as replays of a CUDA graph ("graph"). The floor is the fastest flat
pass that moves as many bytes as BiClip must: two reads and one write per element. Every measurement is appended to FILE
as a line of JSON as soon as it is taken. --table FILE prints the medians of a file that was recorded; --write puts the
table into benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from cpu_step import NUMBERS, gpt2_shapes, put
from torch import Tensor

import tailopt
from tailopt.clipping import launch_tables
from tailopt.clipping.dispatch import update
from tailopt.clipping.kernels.kernel import StepGroup
from tailopt.clipping.reference import ClipByValue, StepHyperparameters
from tailopt.clipping.step_cache import StepCache

Step = Callable[[], object]
SIZES = {"124M": (12, 768), "355M": (24, 1024), "774M": (36, 1280), "1.5B": (48, 1600)}  # layers, width
TYPES = ("float32", "bfloat16", "float16", "float64")
STEPS = 20  # between two events, and in a graph
SHAPES = [(512, 1), (1024, 1), (2048, 1), (1024, 2), (2048, 2), (4096, 1)]  # elements of a block, blocks


def parameters(size: str, dtype: torch.dtype) -> list[Tensor]:
    layers, width = SIZES[size]
    params = []
    for shape in gpt2_shapes(layers, width, 4, 50257, 1024):
        p = torch.nn.Parameter(torch.randn(shape, device="cuda", dtype=dtype))
        p.grad = torch.randn_like(p)
        params.append(p)
    return params


def biclip(params: list[Tensor], **settings: Any) -> Step:
    settings = {"fused": True, "capturable": True, **NUMBERS, **settings}
    return tailopt.BiClip(params, **settings).step


def adamw(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, fused=True, capturable=True)


def elements(params: list[Tensor]) -> int:
    return sum(p.numel() for p in params)


def step_row(params: list[Tensor]) -> dict[str, Step]:
    return {
        **floors(elements(params), params[0].dtype),
        "BiClip, fused": biclip(params),
        "BiClip, default": biclip(params, fused=None),
        "SGD foreach": torch.optim.SGD(params, lr=1e-3, foreach=True).step,
        "SGD foreach again": torch.optim.SGD(params, lr=1e-3, foreach=True).step,
        "SGD fused": torch.optim.SGD(params, lr=1e-3, fused=True).step,
        "AdamW fused": adamw(params).step,
    }


def lr_row(params: list[Tensor]) -> dict[str, Step]:
    lr = torch.tensor(NUMBERS["lr"], device="cuda")
    return {
        **floors(elements(params), params[0].dtype),
        "BiClip, fused": biclip(params, lr=lr),
        "BiClip, torch.compile(opt.step)": torch.compile(biclip(params, lr=lr, fused=None)),
        "BiClip, fused, number": biclip(params),
        "BiClip, torch.compile(opt.step), number": torch.compile(biclip(params, fused=None)),
    }


def momentum_row(params: list[Tensor]) -> dict[str, Step]:
    return {
        **floors(elements(params), params[0].dtype, momentum=True),
        "BiClip, fused, momentum": biclip(params, momentum=0.9, capturable=False),
        "BiClip, fused, momentum, capturable": biclip(params, momentum=0.9),
        "AdamW fused": adamw(params).step,
    }


def by_kernel(params: list[Tensor], grads: list[Tensor]) -> Step:
    """A step of the Triton kernel alone."""
    cache, clip = StepCache(), ClipByValue(NUMBERS["u"], NUMBERS["d"])
    groups = [StepGroup(params, grads, StepHyperparameters(clip, lr=NUMBERS["lr"]))]
    return torch.no_grad()(lambda: update(groups, "triton", cache))


def mixed_row(params: list[Tensor]) -> dict[str, Step]:
    grads = [p.grad.bfloat16() for p in params]
    for p in params:
        p.grad = None
    count = elements(params)
    return {**floors(count, params[0].dtype, torch.bfloat16), "kernel triton": by_kernel(params, grads)}


def rounding_row(params: list[Tensor]) -> dict[str, Step]:
    return {"off": biclip(params), "on": biclip(params, stochastic_rounding=0, capturable=False)}


def policies_row(params: list[Tensor]) -> dict[str, Step]:
    return {
        "off": biclip(params),
        "dead zone": biclip(params, dead_zone=1e-8),
        'dead zone "auto"': biclip(params, dead_zone="auto"),
        "skip": biclip(params, nonfinite="skip"),
        "raise": biclip(params, nonfinite="raise"),
    }


def l2clip_row(params: list[Tensor]) -> dict[str, Step]:
    sgd = torch.optim.SGD(params, lr=1e-3, foreach=True)

    def clipped_sgd() -> None:
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        sgd.step()

    numbers = {"lr": 0.1, "u": 1.0, "fused": True, "capturable": True}
    return {
        **floors(elements(params), params[0].dtype),
        "L2Clip, fused": tailopt.L2Clip(params, **numbers).step,
        "L2Clip, fused, by tensor": tailopt.L2Clip(params, **numbers, scope="tensor").step,
        "clip_grad_norm_, SGD foreach": clipped_sgd,
    }


def clipped_row(params: list[Tensor]) -> dict[str, Step]:
    return {
        "AdamW fused": adamw(params).step,
        "Clipped(AdamW fused)": tailopt.Clipped(adamw(params), u=NUMBERS["u"], d=NUMBERS["d"]).step,
    }


def statistics_row(params: list[Tensor]) -> dict[str, Step]:
    def reading(statistics: bool | str) -> Step:
        optimizer = tailopt.BiClip(params, **NUMBERS, fused=True, statistics=statistics)
        numbers = itertools.count(1)

        def step() -> None:
            optimizer.step()
            if next(numbers) % 100 == 0:
                optimizer.statistics()

        return step

    return {"off": biclip(params), "counts": reading("counts"), "counts and sampled histogram": reading(True)}


def blocks_row(params: list[Tensor]) -> dict[str, Step]:
    """The kernel with other shapes; each has tables of its own."""
    steps = floors(elements(params), params[0].dtype)
    chosen = launch_tables.blocks

    def with_shape(shape: tuple[int, int]) -> Step:
        step = by_kernel(params, [p.grad for p in params])

        def run() -> object:
            launch_tables.blocks = lambda *_: shape
            try:
                return step()
            finally:
                launch_tables.blocks = chosen

        return run

    return {**steps, **{f"{block} elements, {count} blocks": with_shape((block, count)) for block, count in SHAPES}}


def floors(*arguments: Any, **more: Any) -> dict[str, Step]:
    from gpu_floor import floors  # it imports Triton

    return floors(*arguments, **more)


ROWS: dict[str, Callable[[list[Tensor]], dict[str, Step]]] = {
    "step": step_row,
    "momentum": momentum_row,
    "mixed": mixed_row,
    "rounding": rounding_row,
    "policies": policies_row,
    "lr": lr_row,
    "l2clip": l2clip_row,
    "clipped": clipped_row,
    "statistics": statistics_row,
    "blocks": blocks_row,
    "host": lambda params: {k: s for k, s in step_row(params).items() if "floor" not in k},
    "memory": lambda params: {**policies_row(params), "BiClip, default": biclip(params, fused=None)},
}
COMPILING = "first steps, s"
GRAPHS = {"step", "momentum", "mixed", "lr", "blocks", "l2clip"}  # rows that are also timed as replays


def milliseconds(step: Step, steps: int) -> float:
    """The milliseconds of one step, from several that are enqueued one after another."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(steps):
        step()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / steps


def captured(step: Step) -> Step:
    """Several steps as one graph; as many were taken before, on another stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(STEPS):
            step()
    return graph.replay


def host_microseconds(step: Step) -> float:
    """The median time inside step() while the device has nothing else to do."""
    times = []
    for _ in range(50):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        times.append((time.perf_counter() - began) * 1e6)
    return statistics.median(times)


def extra_bytes(step: Step, count: int) -> float:
    """The largest memory that a step allocates on top of what was there before, per parameter."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / count


def measured(row: str, params: list[Tensor], trials: int) -> Iterator[dict[str, Any]]:
    """One measurement after another: the competitor, how, and the number."""
    steps = ROWS[row](params)
    for name, step in list(steps.items()):
        began = time.perf_counter()
        try:
            for _ in range(12):  # the tenth step looks at the thresholds
                step()
            torch.cuda.synchronize()
        except Exception as error:  # one competitor that fails does not take the others with it
            yield {"name": name, "how": "failed", "value": f"{type(error).__name__}: {error}"}
            del steps[name]
            continue
        yield {"name": name, "how": COMPILING, "value": time.perf_counter() - began}
    if row == "memory":
        for name, step in steps.items():
            yield {"name": name, "how": "B per parameter", "value": extra_bytes(step, elements(params))}
        return
    if row == "host":
        for _ in range(trials):
            for name in random.sample([*steps], len(steps)):
                yield {"name": name, "how": "us", "value": host_microseconds(steps[name])}
        return
    graphs: dict[str, Step] = {}
    for name, step in steps.items() if row in GRAPHS else ():
        try:
            graphs[name] = captured(step)
        except Exception as error:
            yield {"name": name, "how": "failed in a graph", "value": f"{type(error).__name__}: {error}"}
            break  # later captures fail too
    for _ in range(trials):
        for name in random.sample([*steps], len(steps)):
            yield {"name": name, "how": "events", "value": milliseconds(steps[name], STEPS)}
            if name in graphs:
                yield {"name": name, "how": "graph", "value": milliseconds(graphs[name], 1) / STEPS}


def table(cells: list[dict[str, Any]]) -> str:
    """The medians of a recorded file, a table for every row, size and type."""
    lines: list[str] = []
    for key in dict.fromkeys((c["row"], c["size"], c["dtype"]) for c in cells):
        own = [c for c in cells if (c["row"], c["size"], c["dtype"]) == key]
        lines += [
            "",
            " ".join(key),
            "",
            "| | how | median [least, most] | / floor | / AdamW fused | / SGD foreach | / off |",
        ]
        lines += ["| --- | --- | --- | ---: | ---: | ---: | ---: |"]
        values: dict[tuple[str, str], list[Any]] = {}
        for cell in own:
            values.setdefault((cell["how"], cell["name"]), []).append(cell["value"])
        names, hows = ([*dict.fromkeys(cell[key] for cell in own)] for key in ("name", "how"))
        for how, name in sorted(values, key=lambda pair: (hows.index(pair[0]), names.index(pair[1]))):
            several = values[how, name]
            if how.startswith("failed"):
                lines.append(f"| {name} | {how} | {several[0].splitlines()[0][:200]} | | | | |")
                continue
            middle = statistics.median(several)
            # compiling takes what it takes: there no ratio means anything
            floor = [statistics.median(v) for (h, n), v in values.items() if h == how and "floor" in n]
            peers = [values.get((how, peer), []) for peer in ("AdamW fused", "SGD foreach", "off")]
            bases = [min(floor, default=0.0), *(statistics.median(p) if p else 0.0 for p in peers)]
            ratios = [f"{middle / base:.3f}" if base and how != COMPILING else "" for base in bases]
            spread = f"{middle:.4g} [{min(several):.4g}, {max(several):.4g}]"
            lines.append(f"| {name} | {how} | {spread} | {' | '.join(ratios)} |")
    return "\n".join(lines[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=["step"], metavar="ROW", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--size", choices=SIZES, nargs="+", default=["124M"], help="parameters of the GPT-2")
    parser.add_argument("--dtype", choices=TYPES, nargs="+", default=["float32"])
    parser.add_argument("--trials", type=int, default=9)
    parser.add_argument("--record", type=Path, default=Path("gpu_step.jsonl"), help="where measurements are appended")
    parser.add_argument("--table", type=Path, help="only print the medians of this file")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/RESULTS.md")
    arguments = parser.parse_args()
    if unknown := set(arguments.rows) - set(ROWS):
        parser.error(f"unknown rows: {', '.join(sorted(unknown))}; need some of {', '.join(ROWS)}")
    if arguments.table:
        print(table([json.loads(line) for line in arguments.table.read_text().splitlines()]))
        return
    if not torch.cuda.is_available():
        print("There is no CUDA device here, so nothing was measured.")
        return
    warnings.simplefilter("ignore")  # of thresholds that do nothing: the data are random
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "tailopt": tailopt.__version__}
    cells = []
    for row, size, dtype in itertools.product(arguments.rows, arguments.size, arguments.dtype):
        params = parameters(size, getattr(torch, dtype))
        for cell in measured(row, params, arguments.trials):
            cells.append({"row": row, "size": size, "dtype": dtype, **cell, **about})
            with arguments.record.open("a") as file:
                file.write(json.dumps(cells[-1]) + "\n")
        del params
        torch.cuda.empty_cache()
        print(table([c for c in cells if (c["row"], c["size"], c["dtype"]) == (row, size, dtype)]), flush=True)
        if arguments.write:
            command = f"`python benchmarks/gpu_step.py {row} --size {size} --dtype {dtype} --trials {arguments.trials}`"
            head = f"{command}: {', '.join(about.values())}.\n\n"
            own = table([c for c in cells if (c["row"], c["size"], c["dtype"]) == (row, size, dtype)])
            put(head + own + "\n", f"gpu_step {row} {size} {dtype}", f"A step on a GPU: {row}, {size} {dtype}")


if __name__ == "__main__":
    main()
