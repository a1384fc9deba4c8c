"""What gradient release saves and costs: peak memory of backward and step, and the time of a training step.

    python benchmarks/gradient_release.py [--write]                     the CPU, a GPT-2 of 24.7M parameters, fp32
    python benchmarks/gradient_release.py --buckets                     the size of the buckets
    python benchmarks/gradient_release.py --device cuda --model gpt2-1.5B [--untied] --dtype bfloat16
    python benchmarks/gradient_release.py --device cuda --model llama-7B --dtype bfloat16 --length 512 --checkpointing

Weights and tokens are random. Memory is measured in a process of its own for every optimizer, in its second step (a
first one makes the state): by `torch.cuda.max_memory_allocated` on a GPU, by the resident memory of the process on the
CPU. "Over weights and activations" is the peak of backward and step, without the weights and what forward has saved:
gradients, state, and what a step takes besides. Times are those of forward, backward and step, with and without
release in turn, on one model in one process. --write puts the tables into benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cpu_step import NUMBERS, machine, put
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tailopt

MIB = 1 << 20


class Shape(NamedTuple):
    """A decoder: gated means three matrices in the MLP instead of two, as in Llama."""

    layers: int
    width: int
    hidden: int
    heads: int
    vocabulary: int
    gated: bool
    tied: bool


MODELS = {
    "gpt2-25M": Shape(5, 512, 2048, 8, 16384, gated=False, tied=True),
    "gpt2-124M": Shape(12, 768, 3072, 12, 50257, gated=False, tied=True),
    "gpt2-1.5B": Shape(48, 1600, 6400, 25, 50257, gated=False, tied=True),
    "llama-7B": Shape(32, 4096, 11008, 32, 32000, gated=True, tied=False),
}


class Block(nn.Module):
    """Attention and MLP, each after a norm."""

    def __init__(self, shape: Shape, like: dict[str, Any]) -> None:
        super().__init__()
        self.heads, bias = shape.heads, not shape.gated
        norm = nn.RMSNorm if shape.gated else nn.LayerNorm
        self.norms = nn.ModuleList(norm(shape.width, **like) for _ in range(2))
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=bias, **like)
        self.out = nn.Linear(shape.width, shape.width, bias=bias, **like)
        self.up = nn.Linear(shape.width, shape.hidden, bias=bias, **like)
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False, **like) if shape.gated else None
        self.down = nn.Linear(shape.hidden, shape.width, bias=bias, **like)

    def forward(self, h: Tensor) -> Tensor:
        x = self.norms[0](h)
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        h = h + self.out(nn.functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))
        x = self.norms[1](h)
        x = nn.functional.gelu(self.up(x)) if self.gate is None else nn.functional.silu(self.gate(x)) * self.up(x)
        return h + self.down(x)


class Decoder(nn.Module):
    """Random weights with the shapes of GPT-2 (learned positions) or Llama (its rotations have no parameters)."""

    def __init__(self, shape: Shape, length: int, checkpointing: bool, like: dict[str, Any]) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.tokens = nn.Embedding(shape.vocabulary, shape.width, **like)
        self.positions = None if shape.gated else nn.Embedding(max(length, 1024), shape.width, **like)
        self.blocks = nn.ModuleList(Block(shape, like) for _ in range(shape.layers))
        self.norm = (nn.RMSNorm if shape.gated else nn.LayerNorm)(shape.width, **like)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False, **like)
        if shape.tied:
            self.head.weight = self.tokens.weight
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x)
        if self.positions is not None:
            h = h + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False) if self.checkpointing else block(h)
        logits = self.head(self.norm(h[:, :-1]))
        return nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-5, fused=True),
    "AdamW 8-bit": lambda params: importlib.import_module("bitsandbytes").optim.AdamW8bit(params, lr=1e-5),
    "SGD foreach": lambda params: torch.optim.SGD(params, lr=1e-5, foreach=True),
    "BiClip": lambda params: tailopt.BiClip(params, **NUMBERS),
    "BiClip, momentum in bf16": lambda params: tailopt.BiClip(
        params, **NUMBERS, momentum=0.9, momentum_dtype=torch.bfloat16
    ),
}
ROWS = [*OPTIMIZERS, "BiClip, release", "BiClip, momentum in bf16, release"]


def build(arguments: argparse.Namespace) -> tuple[Decoder, Tensor]:
    torch.manual_seed(0)
    shape = MODELS[arguments.model]._replace(**({"tied": False} if arguments.untied else {}))
    like = {"device": arguments.device, "dtype": getattr(torch, arguments.dtype)}
    model = Decoder(shape, arguments.length, arguments.checkpointing, like)
    tokens = torch.randint(shape.vocabulary, (arguments.batch, arguments.length), device=arguments.device)
    return model, tokens


# ---- memory ----


def resident(key: str) -> float:
    """A line of /proc/self/status, in bytes: VmRSS now, VmHWM the most since `reset_peak`."""
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) * 1024


class Memory:
    """Bytes in use on a device, and their peak."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"

    def now(self) -> float:
        return torch.cuda.memory_allocated() if self.cuda else resident("VmRSS")

    def peak(self) -> float:
        return torch.cuda.max_memory_allocated() if self.cuda else resident("VmHWM")

    def reset_peak(self) -> None:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")


def measure(name: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Bytes of the second step of one optimizer; for a process of its own."""
    memory = Memory(arguments.device)
    model, tokens = build(arguments)
    optimizer = OPTIMIZERS[name.removesuffix(", release")](list(model.parameters()))
    if name.endswith(", release"):
        tailopt.release_gradients(model, optimizer, bucket_bytes=round(arguments.bucket_mib * MIB))

    def step() -> tuple[float, ...]:
        gc.collect()
        before = memory.now()
        memory.reset_peak()
        loss = model(tokens)
        in_forward, after_forward = memory.peak(), memory.now()
        memory.reset_peak()
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()
        return before, after_forward, max(in_forward, memory.peak()), memory.peak()

    step()
    before, after_forward, most, peak = step()
    state = sum(size_of(t) for values in optimizer.state.values() for t in values.values() if isinstance(t, Tensor))
    kept = sum(map(size_of, model.parameters())) + state
    count = sum(p.numel() for p in model.parameters())
    # what the process has besides weights and state is not counted: on a CPU that is mostly torch's code
    return {"over": (peak - after_forward + state) / count, "whole": most - before + kept}


def size_of(t: Tensor) -> int:
    return t.numel() * t.element_size()


def memory_table(arguments: argparse.Namespace, given: list[str]) -> str:
    lines = [
        "| | over weights and activations, B per parameter | peak of the whole step, GB |",
        "| --- | ---: | ---: |",
    ]
    # memory that is freed goes back to the system, and does not hide in the allocator until it is used again
    honest = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    for name in ROWS:
        if "8-bit" in name and (arguments.device != "cuda" or importlib.util.find_spec("bitsandbytes") is None):
            continue
        command = [sys.executable, __file__, *given, "--one", name]
        done = subprocess.run(command, capture_output=True, text=True, env=honest, timeout=1800)
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1]
            lines.append(f"| {name} | – | {reason} |")
            continue
        got = json.loads(done.stdout.splitlines()[-1])
        lines.append(f"| {name} | **{got['over']:.2f}** | {got['whole'] / 1e9:.2f} |")
        print(lines[-1], file=sys.stderr)
    return "\n".join([*lines, ""])


# ---- time ----


def timed(step: Callable[[], None], device: str) -> float:
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def times(arguments: argparse.Namespace, sizes: list[float]) -> str:
    """Steps with buckets of several sizes and without release, in random order; ratios of steps of the same round."""
    model, tokens = build(arguments)
    optimizer = tailopt.BiClip(model.parameters(), **NUMBERS)

    def step() -> None:
        optimizer.zero_grad()
        model(tokens).backward()
        optimizer.step()

    plain = "without release"
    rounds: list[dict[str, float]] = []
    for i in range(arguments.rounds + 1):
        took: dict[str, float] = {}
        for size in random.sample([None, *sizes], len(sizes) + 1):
            handle = None
            if size is not None:
                handle = tailopt.release_gradients(model, optimizer, bucket_bytes=round(size * MIB))
            took[plain if size is None else f"{size:g} MiB"] = timed(step, arguments.device)
            if handle is not None:
                handle.remove()
        if i:  # the first round warms up
            rounds.append(took)
    lines = ["| buckets | time / without release: median [least, most] | least time, ms |", "| --- | --- | ---: |"]
    for name in [plain, *(f"{size:g} MiB" for size in sizes)]:
        ratios = [took[name] / took[plain] for took in rounds]
        least = min(took[name] for took in rounds) * 1e3
        lines.append(
            f"| {name} | **{statistics.median(ratios):.3f}** [{min(ratios):.3f}, {max(ratios):.3f}] | {least:.1f} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=MODELS, default="gpt2-25M")
    parser.add_argument("--untied", action="store_true", help="a last layer of its own, where the model ties it")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--checkpointing", action="store_true", help="recompute every block in backward")
    parser.add_argument("--bucket-mib", type=float, default=32.0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--buckets", action="store_true", help="compare sizes of buckets")
    parser.add_argument("--write", action="store_true", help="put the tables into benchmarks/RESULTS.md")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("There is no CUDA device here, so nothing was measured.")
    if arguments.device == "cpu":
        torch.set_num_threads(min(2, os.cpu_count() or 1))
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments)))
        return
    given = [word for word in sys.argv[1:] if word not in ("--write", "--buckets")]
    where = torch.cuda.get_device_name() if arguments.device == "cuda" else machine().rstrip(".")
    parts = [f"`python benchmarks/gradient_release.py {' '.join(sys.argv[1:])}`: {where}; {arguments.model}.\n"]
    if not arguments.buckets:
        parts.append(memory_table(arguments, given))
    parts.append(times(arguments, [0, 1, 4, 16, 32, 64, 256] if arguments.buckets else [arguments.bucket_mib]))
    print("\n".join(parts))
    if arguments.write:
        put("\n".join(parts), f"gradient_release_{arguments.device}_{arguments.model}", "Gradient release")


if __name__ == "__main__":
    main()
