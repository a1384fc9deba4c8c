"""Two nodes in a loop with Accelerate; stopped at any moment, the same command goes on to the same bits.

torchrun --nproc-per-node 2 examples/accelerate_nodes.py runs/accelerate
"""

from __future__ import annotations

import hashlib
import sys

import torch
from accelerate import Accelerator

import tailopt
from tailopt.integrations.accelerate import connect, load_state, save_state

STEPS, LOCAL_STEPS, BATCH = 60, 5, 8


def main(folder: str) -> None:
    node = connect()  # before Accelerator: it then sees one process, and leaves the model unwrapped
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    model.to(accelerator.device)
    optimizer = tailopt.NestedOptimizer(
        tailopt.BiClip(model.named_parameters(), lr=0.02, u=0.5, d=0.01),
        outer="nesterov",
        outer_settings={"olr": 0.7, "momentum": 0.5},
        local_steps=LOCAL_STEPS,
        model=model,
        run=f"{folder}/nodes",  # what the nodes keep together, in a folder that all of them share
        resume=True,  # begins where there is nothing yet
        checkpoint_every=None,  # a checkpoint of the nodes follows every state that Accelerate saves
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.98)
    x = torch.randn(512, 20, generator=torch.Generator().manual_seed(node))  # different data on every node
    model, prepared, schedule = accelerator.prepare(model, optimizer, schedule)
    step = (load_state(accelerator, optimizer) or {"step": 0})["step"]  # where this loop is in its data
    print(f"node {node} begins after step {step}", flush=True)
    while step < STEPS:
        for half in range(2):
            place = (2 * step + half) * BATCH % len(x)
            inputs = x[place : place + BATCH].to(accelerator.device)
            with accelerator.accumulate(model):
                accelerator.backward((model(inputs) - inputs.sum(1, keepdim=True)).abs().mean())
                prepared.step()  # every second one is a local step; every fifth of these ends a round
                schedule.step()
                prepared.zero_grad()
        step += 1
        if step % 3 == 0:  # also in the middle of a round
            save_state(accelerator, optimizer, f"{folder}/node-{node}/step-{step}", {"step": step})
    optimizer.synchronize()
    weights = torch.cat([p.detach().cpu().flatten() for p in model.parameters()]).numpy().tobytes()
    print(f"node {node}: weights {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
