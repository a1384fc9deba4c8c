"""Nested training in the Trainer of Lightning: every process is a node, and Lightning sees only its own.

    node = connect()                                        before the Trainer
    optimizer = tailopt.NestedOptimizer(...)                what configure_optimizers returns
    nested = NestedCallback(optimizer)
    trainer = lightning.Trainer(..., devices=1, callbacks=[nested])
    trainer.fit(module, ckpt_path=nested.resume_from)

Lightning's checkpoints, from ModelCheckpoint or `trainer.save_checkpoint`, have the schedule and the progress of the
loops; every one of them is followed by one of the nodes, which names it. The optimizers of this library need nothing
from here.
"""

from __future__ import annotations

import os
from typing import Any

from tailopt.distributed.nested_optimizer import NestedOptimizer
from tailopt.integrations import nodes
from tailopt.integrations.nodes import NodeCheckpoints
from tailopt.optional import require

require("lightning", "Nested training in Lightning needs lightning", extra="lightning", at_least="2.5")

from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.plugins.io import AsyncCheckpointIO, CheckpointIO  # noqa: E402
from lightning.pytorch.utilities import rank_zero_only  # noqa: E402

__all__ = ["NestedCallback", "connect"]


def connect(timeout: float = 60.0, backend: str = "gloo") -> int:
    """Connect the nodes, as `tailopt.connect`, and then let Lightning see this process alone; returns its number.

    Call it before a Trainer is built.

    Args:
        timeout, backend: as for `tailopt.connect`.
    """
    node = nodes.connect(timeout, backend)
    # Lightning asks torch whether torchrun started the process, and then reads these. Accelerate would take them for a
    # run of several processes, so they are set here alone.
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    of_lightning: Any = rank_zero_only
    of_lightning.rank = 0  # read from RANK when Lightning was imported
    return node


class NestedCallback(Callback):
    """What Lightning needs beside an optimizer from `configure_optimizers` to train as one node among several.

    It checks that Lightning leaves the model unwrapped and that all nodes train alike, writes a checkpoint of the nodes
    after each of Lightning's, and ends the last round when training ends, so that all nodes have the same weights then.

    Args:
        optimizer: what `configure_optimizers` returns, alone or with schedulers; built without `rounds`, and with
            `checkpoint_every=None` where it has a run folder.

    Attributes:
        optimizer: the one that was given.
    """

    def __init__(self, optimizer: NestedOptimizer) -> None:
        self._checkpoints = NodeCheckpoints(optimizer)
        self.optimizer = optimizer

    @property
    def resume_from(self) -> str | None:
        """The checkpoint of Lightning with which the run goes on, for `fit(ckpt_path=...)`; or None."""
        return self._checkpoints.resume_from

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check everything that would make the nodes one, and follow what Lightning writes from now on."""
        _check_trainer(trainer, self.optimizer)
        self._checkpoints.check_step(trainer.global_step)
        limits: dict[str, Any] = {"max_steps": trainer.max_steps, "max_epochs": trainer.max_epochs}
        if trainer.max_steps < 0:  # then the data decide how many steps there are
            limits["batches of an epoch"] = str(trainer.num_training_batches)
        self._checkpoints.check_same(limits)
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
                self._checkpoints.check_own_folder("dirpath", callback.dirpath)
        if self._checkpoints.has_run:
            trainer.strategy.checkpoint_io = _Followed(trainer.strategy.checkpoint_io, self._checkpoints)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """Report the loss for the history of the run."""
        self.optimizer.report(float(loss.detach()) * trainer.accumulate_grad_batches)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn once where the validated weights are those of this node alone."""
        self._checkpoints.warn_inside_round("validation", trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the last round with the steps that were taken, and follow Lightning's checkpoints no longer."""
        self.optimizer.synchronize()
        if isinstance(trainer.strategy.checkpoint_io, _Followed):
            trainer.strategy.checkpoint_io = trainer.strategy.checkpoint_io.io

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the last round also where Lightning had nothing left to train."""
        self.optimizer.synchronize()


class _Followed(CheckpointIO):
    """Lightning's way to write checkpoints; every whole one is followed by one of the nodes."""

    def __init__(self, io: CheckpointIO, checkpoints: NodeCheckpoints) -> None:
        if isinstance(io, AsyncCheckpointIO):
            raise ValueError(
                "Invalid plugins: AsyncCheckpointIO; the checkpoint of the nodes would name one that is not written "
                "yet. Leave it out."
            )
        self.io, self._checkpoints = io, checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a checkpoint of Lightning, and then that of the nodes."""
        self.io.save_checkpoint(checkpoint, path, storage_options)
        if "optimizer_states" in checkpoint:  # else it has weights only, and nothing can go on from it
            self._checkpoints.write(path, checkpoint["global_step"])

    def load_checkpoint(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Load a checkpoint of Lightning."""
        return self.io.load_checkpoint(*args, **options)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint of Lightning."""
        self.io.remove_checkpoint(path)

    def teardown(self) -> None:
        """Close what Lightning writes with."""
        self.io.teardown()


def _check_trainer(trainer: Trainer, optimizer: NestedOptimizer) -> None:
    """Refuse a Trainer of several processes, with another optimizer, or with a scaler that skips steps."""
    if trainer.world_size > 1:
        raise ValueError(
            f"Invalid Trainer: it is that of one of {trainer.world_size} processes, whose gradients "
            f"{type(trainer.strategy).__name__} averages; need a process of its own for each node. Call "
            "tailopt.integrations.lightning.connect() before Trainer(..., devices=1) is built."
        )
    stepped = trainer.optimizers
    if len(stepped) != 1 or stepped[0] is not optimizer:
        names = ", ".join(type(other).__name__ for other in stepped) or "none"
        raise ValueError(
            f"Invalid configure_optimizers: it returned {names}; need the NestedOptimizer of the callback, alone."
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise ValueError(
            f"Invalid precision: {trainer.precision!r}; Lightning counts a step that its GradScaler skips, so that "
            'this node would fall behind the others. Use "bf16-mixed".'
        )
