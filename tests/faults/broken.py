"""What the processes of test_injection.py run: four gloo nodes, of which node 2 has a fault."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import tailopt
from tailopt import faults
from tailopt.seeds import generator

ROUNDS, STEPS, BROKEN = 25, 2, 2
LATE = range(5, ROUNDS + 1)
CASES: dict[str, list[faults.Fault]] = {
    "clean": [],
    "NaN": [faults.NotANumber(LATE)],
    "inf": [faults.Infinite(LATE)],
    "flip on the way": [faults.BitFlip(LATE)],
    "flip in memory, beyond the bound": [faults.BitFlip(LATE, in_memory=True)],
    "flip in memory, within it": [faults.BitFlip(LATE, bit=0, in_memory=True)],
    "stale": [faults.Stale(LATE)],
    "duplicate": [faults.Duplicate(LATE)],
    "slow": [faults.Slow({6}, seconds=0.3)],
}


def train(case: str, node: int) -> dict[str, object]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    truth = torch.linspace(-1, 1, 6)
    algorithm = tailopt.algorithm("avg-biclip", ilr=0.2, i_u=0.1, i_d=0.0)
    opt = tailopt.NestedOptimizer.from_algorithm(model, algorithm, local_steps=STEPS, rounds=ROUNDS)
    if node == BROKEN:
        faults.inject(opt, *CASES[case])
    while not opt.finished:
        t = opt.node.round + 1
        for step in range(STEPS):
            x = torch.randn(16, 6, generator=generator(0, "batch", t, node, step))
            opt.zero_grad()
            (model(x).squeeze(-1) - x @ truth).square().mean().backward()
            opt.step()
    x = torch.randn(2000, 6, generator=generator(1, "test"))
    with torch.no_grad():
        loss = float((model(x).squeeze(-1) - x @ truth).square().mean())
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    return {"loss": loss, "weights": weights, "excluded": [row["excluded"] for row in opt.history]}


def main(rank: int, nodes: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=nodes)
    found = {case: train(case, rank) for case in CASES}
    Path(f"{out}/{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
