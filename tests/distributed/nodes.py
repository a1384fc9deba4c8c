"""What the processes of test_distributed.py run: real gloo nodes, every algorithm, digests by round."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tailopt
from tailopt.algorithms import NAMED
from tailopt.seeds import generator

ROUNDS, STEPS = 5, 3
SETTINGS = {
    "ilr": 0.05,
    "ilr_adamw": 0.01,
    "i_u": 0.5,
    "i_d": 0.05,
    "ieps": 1e-4,
    "olr": 0.5,
    "oeps": 1e-3,
    "o_u": 0.05,
    "o_d": 0.01,
    "momentum": 0.9,
    "weight_decay": 0.01,
}
NAMES = (*NAMED, "bi2clip+momentum")
CASES: dict[str, dict[str, Any]] = {
    "everybody": {},
    "two of them": {"participants": 2},
    "projected and proximal": {"projection": 2.0, "average": True, "proximal": 0.5},
}


def algorithm(name: str) -> tailopt.Algorithm:
    """With as many of the settings as it takes; "bi2clip+momentum" has momentum on both sides."""
    if name.endswith("+momentum"):
        plain = algorithm(name.removesuffix("+momentum"))
        return tailopt.algorithm(plain.name, **plain.settings, momentum=0.5, inner_momentum=0.9, inner_state="keep")
    try:
        return tailopt.algorithm(name, **SETTINGS)
    except ValueError as error:
        needed = str(error).split("It needs ")[1].split(".")[0].replace(" ", "").split(",")
        return tailopt.algorithm(name, **{key: SETTINGS[key] for key in needed})


def model() -> nn.Module:
    """A bias before BatchNorm, buffers of both kinds, and more elements than one block."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 4000), nn.Tanh(), nn.Linear(4000, 3)
    )


def batches(node: int, round: int, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(8, 7, generator=generator), torch.randn(8, 3, generator=generator) + node


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean() * 0.02  # wide layers: SGD would diverge


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for name, value in model.state_dict().items():
        found.update(name.encode() + value.contiguous().numpy().tobytes())
    return found.hexdigest()


def train(name: str, case: str, node: int) -> list[str]:
    """The digest of the model after every round."""
    net, found = model(), []
    opt = tailopt.NestedOptimizer.from_algorithm(net, algorithm(name), local_steps=STEPS, rounds=ROUNDS, **CASES[case])
    while not opt.finished:
        t = opt.node.round + 1
        for step in range(STEPS):
            opt.zero_grad()
            loss(net, batches(node, t, step, generator(0, "batch", t, node, step))).backward()
            opt.step()
        found.append(f"{opt.node.round} {digest(net)}")
    return [*found, digest(net)]


def main(rank: int, nodes: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=nodes)
    found = {f"{name}, {case}": train(name, case, rank) for name in NAMES for case in CASES}
    Path(f"{out}/{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
