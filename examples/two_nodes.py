"""Two nodes with their own data in an ordinary training loop: BiClip on each node and on the mean displacement.

    torchrun --nproc-per-node 2 examples/two_nodes.py

To make a loop nested, wrap its optimizer in `NestedOptimizer`.
"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist

import tailopt

ROUNDS, LOCAL_STEPS, BATCH = 30, 5, 32
TRUTH = torch.linspace(-1, 1, 20).unsqueeze(1)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """A regression with label noise of infinite variance, which sometimes gives an extreme gradient."""
    x = torch.randn(BATCH, 20)
    return x, x @ TRUTH + torch.distributions.StudentT(1.5).sample((BATCH, 1))


def main() -> None:
    tailopt.connect()  # in place of init_process_group(): names a node that is missing
    node = dist.get_rank()
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = tailopt.NestedOptimizer(
        tailopt.BiClip(model.parameters(), lr=0.02, u=0.5, d=0.01),
        outer="biclip",
        outer_settings={"olr": 1.0, "o_u": 0.05, "o_d": 0.0},
        local_steps=LOCAL_STEPS,
        model=model,
    )  # from here on every node has the weights of node 0
    torch.manual_seed(node)  # different data on every node
    test = torch.randn(1000, 20)
    for step in range(1, ROUNDS * LOCAL_STEPS + 1):
        x, y = batch()
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()  # every fifth step ends a round: the nodes exchange displacements and load equal weights
        if node == 0 and step % (5 * LOCAL_STEPS) == 0:
            with torch.no_grad():
                loss = torch.nn.functional.mse_loss(model(test), test @ TRUTH)
            print(f"round {step // LOCAL_STEPS}: loss {loss:.4f}", flush=True)
    optimizer.synchronize()  # ends a round early; here the last round is already complete
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().tobytes()
    print(f"node {node}: weights {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
