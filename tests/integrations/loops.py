"""One small model in four loops: Trainer, Accelerate, Lightning, and a plain one that replays what they trained on.

The loops of others shuffle, batch and accumulate as they like; a hook writes down what reached the model between two
steps. Five batches an epoch and two of them a step: the last step of every epoch has one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import tailopt
from tailopt.records.checkpoints import digest

ACCUMULATION, BATCH, ROWS = 2, 2, 10
Batches = list[dict[str, Tensor]]


class Net(nn.Module):
    """A model that computes its own loss, as Trainer likes it, and whose first layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
        self.head = nn.Linear(6, 1)
        self.body[0].requires_grad_(False)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.head(self.body(x)).squeeze(-1) - labels).square().mean()}


def rows(node: int = 0) -> list[dict[str, Tensor]]:
    x = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(node))
    return [{"x": row, "labels": row.sum()} for row in x]


def trained(net: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in net.named_parameters() if p.requires_grad]


def inner(net: nn.Module, name: str = "BiClip") -> Any:
    """One of the optimizers of this library, by one line."""
    return {
        "BiClip": lambda: tailopt.BiClip(trained(net), lr=0.1, u=0.3, d=0.01, statistics=True),
        "L2Clip": lambda: tailopt.L2Clip(trained(net), lr=0.1, u=0.5, nonfinite="skip"),
        "Clipped": lambda: tailopt.Clipped(torch.optim.AdamW(trained(net), lr=0.01), u=0.3, d=0.01),
    }[name]()


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


class Seen:
    """What a loop trains on, batch by batch and step by step, and the weights after every step."""

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.steps: list[Batches] = []
        self.weights: list[str] = []
        self._since: Batches = []
        net.register_forward_pre_hook(self._batch, with_kwargs=True)
        optimizer.register_step_post_hook(lambda *_: self._step(net))

    def _batch(self, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Tensor]) -> None:
        if torch.is_grad_enabled():
            named = dict(zip(("x", "labels"), inputs, strict=False)) | keywords
            self._since.append({name: value.clone() for name, value in named.items()})

    def _step(self, net: nn.Module) -> None:
        self.steps.append(self._since)
        self.weights.append(digest(net.state_dict()))
        self._since = []


Loop = Callable[..., Any]


def with_trainer(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    node: int,
    folder: Path,
    steps: int,
    bf16: bool = False,
    callbacks: Any = (),
    resume: str | None = None,
    **settings: Any,
) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATION,
        bf16=bf16,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **{"save_strategy": "no", "logging_strategy": "no", "max_grad_norm": 0.0, "seed": node, **settings},
    )
    trainer = Trainer(
        net, arguments, train_dataset=rows(node), eval_dataset=rows(node), callbacks=list(callbacks),
        optimizers=(optimizer, schedule(optimizer)),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def with_accelerate(
    net: nn.Module, optimizer: torch.optim.Optimizer, node: int, folder: Path, steps: int, bf16: bool = False
) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)  # singletons, which an earlier loop has set
    GradientState._reset_state()
    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16" if bf16 else "no", gradient_accumulation_steps=ACCUMULATION
    )
    loader = DataLoader(rows(node), BATCH, shuffle=True, generator=torch.Generator().manual_seed(node))
    model, prepared, rate, loader = accelerator.prepare(net, optimizer, schedule(optimizer), loader)
    taken = 0
    while taken < steps:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                prepared.step()
                rate.step()
                prepared.zero_grad()
            taken += accelerator.sync_gradients
            if taken == steps:
                break
    return accelerator, prepared


def with_lightning(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    node: int,
    folder: Path,
    steps: int,
    bf16: bool = False,
    callbacks: Any = (),
    resume: str | None = None,
    **settings: Any,
) -> Any:
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            return self.net(**batch)["loss"]

        validation_step = training_step

        def configure_optimizers(self) -> Any:
            return [optimizer], [{"scheduler": schedule(optimizer), "interval": "step"}]

    precision = "bf16-mixed" if bf16 else "32-true"
    defaults = {"enable_checkpointing": False, "devices": 1, "num_sanity_val_steps": 0, "precision": precision}
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=steps,
        accumulate_grad_batches=ACCUMULATION,
        callbacks=list(callbacks),
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **defaults | settings,
    )
    # Nobody saves the state of a loader's own generator; torch's generator is in the checkpoints of the nodes.
    own = None if settings.get("enable_checkpointing") else torch.Generator().manual_seed(node)
    loader = DataLoader(rows(node), BATCH, shuffle=True, generator=own)
    validation = DataLoader(rows(node), BATCH) if "val_check_interval" in settings else None
    trainer.fit(Module(), loader, validation, ckpt_path=resume)
    return trainer


LOOPS: dict[str, Loop] = {
    "transformers": with_trainer,
    "accelerate": with_accelerate,
    "lightning": with_lightning,
}


def plain(
    net: nn.Module, optimizer: torch.optim.Optimizer, steps: list[Batches], loop: str, bf16: bool = False
) -> None:
    """The same steps in a loop of a few lines. A last step with fewer batches is their mean in Trainer alone."""
    rate = schedule(optimizer)
    for batches in steps:
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext():
                loss = net(**batch)["loss"]
            (loss / (len(batches) if loop == "transformers" else ACCUMULATION)).backward()
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
