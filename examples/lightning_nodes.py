"""Two nodes in the Trainer of Lightning; stopped at any moment, the same command goes on to the same bits.

torchrun --nproc-per-node 2 examples/lightning_nodes.py runs/lightning
"""

from __future__ import annotations

import hashlib
import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import tailopt
from tailopt.integrations.lightning import NestedCallback, connect


class Regression(lightning.LightningModule):
    def __init__(self, folder: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
        self.optimizer = tailopt.NestedOptimizer(
            tailopt.BiClip(self.named_parameters(), lr=0.02, u=0.5, d=0.01),
            outer="nesterov",
            outer_settings={"olr": 0.7, "momentum": 0.5},
            local_steps=5,
            model=self,
            run=f"{folder}/nodes",  # what the nodes keep together, in a folder that all of them share
            resume=True,  # begins where there is nothing yet
            checkpoint_every=None,  # a checkpoint of the nodes follows every checkpoint of Lightning
        )

    def training_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
        return (self.model(x) - x.sum(1, keepdim=True)).abs().mean()

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[torch.optim.lr_scheduler.LRScheduler]]:
        return [self.optimizer], [torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)]


def main(folder: str) -> None:
    node = connect()  # before Trainer: Lightning then sees one process, and leaves the model unwrapped
    module = Regression(folder)
    x = torch.randn(96, 20, generator=torch.Generator().manual_seed(node))  # different data on every node
    loader = torch.utils.data.DataLoader(x, batch_size=8, shuffle=True)
    nested = NestedCallback(module.optimizer)
    files = ModelCheckpoint(dirpath=f"{folder}/node-{node}", save_top_k=2, monitor="step", mode="max")  # every epoch
    settings = {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "max_epochs": 10}  # 6 local steps an epoch
    trainer = lightning.Trainer(devices=1, callbacks=[nested, files], logger=False, **settings)
    print(f"node {node} begins after {nested.resume_from}", flush=True)
    trainer.fit(module, loader, ckpt_path=nested.resume_from)
    weights = torch.cat([p.detach().cpu().flatten() for p in module.parameters()]).numpy().tobytes()
    print(f"node {node}: weights {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
