"""Two nodes in a loop of your own that may be stopped at any moment: the same command goes on, to the same bits.

    torchrun --nproc-per-node 2 examples/resume_nodes.py runs/own

The optimizer restores the weights, its own state, the random numbers and the round. The loop restores what only it
knows, from `extra`: its scheduler, and its position in the data.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import torch
import torch.distributed as dist

import tailopt

ROUNDS, LOCAL_STEPS, BATCH = 40, 5, 32


def batch(x: torch.Tensor, node: int, position: int) -> torch.Tensor:
    """The batch at a position: shuffled anew in every pass, by the node and the number of the pass alone."""
    one_pass, place = divmod(position, len(x) // BATCH)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1000 * node + one_pass))
    return x[order[place * BATCH : (place + 1) * BATCH]]


def main(folder: str) -> None:
    tailopt.connect()  # in place of init_process_group(): names a node that is missing
    node = dist.get_rank()
    x = torch.randn(512, 20, generator=torch.Generator().manual_seed(node))  # different data on every node
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    inner = tailopt.BiClip(model.parameters(), lr=0.02, u=0.5, d=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, gamma=0.98)  # before NestedOptimizer, which restores lr
    position = 0

    def extra() -> dict[str, Any]:
        return {"scheduler": scheduler.state_dict(), "position": position}

    optimizer = tailopt.NestedOptimizer(
        inner,
        outer="nesterov",
        outer_settings={"olr": 0.7, "momentum": 0.5},
        local_steps=LOCAL_STEPS,
        rounds=ROUNDS,
        model=model,
        run=folder,
        resume=True,  # begins where there is nothing yet
        extra=extra,
    )
    if optimizer.resumed is not None:
        position = optimizer.resumed.extra["position"]
        scheduler.load_state_dict(optimizer.resumed.extra["scheduler"])
        scheduler.step()  # the checkpoint is written inside optimizer.step(), before the scheduler's own step below
        print(f"node {node} goes on after round {optimizer.resumed.round}", flush=True)
    while not optimizer.finished:
        inputs = batch(x, node, position)
        position += 1
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).abs().mean()
        loss.backward()
        optimizer.report(loss.item())
        optimizer.step()  # every fifth step ends a round, and writes a checkpoint
        scheduler.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().tobytes()
    print(f"node {node}: weights {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
