"""Nested training in the Trainer of Transformers: every process is a node, and Trainer sees only its own.

    node = connect()                                        before TrainingArguments
    optimizer = tailopt.NestedOptimizer(...)                around the optimizer that was there before
    nested = NestedCallback(optimizer)
    trainer = Trainer(..., optimizers=(optimizer, None), callbacks=[nested])
    trainer.train(resume_from_checkpoint=nested.resume_from)

Trainer's checkpoints have the step, the schedule and the position in the data; every one of them is followed by one of
the nodes, which names it. The optimizers of this library need nothing from here.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from tailopt.distributed.nested_optimizer import NestedOptimizer
from tailopt.integrations.nodes import NodeCheckpoints, connect
from tailopt.optional import require

require("transformers", "Nested training in Trainer needs transformers", extra="transformers", at_least="4.56")
require("accelerate", "Nested training in Trainer needs accelerate", extra="transformers", at_least="1.10")

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments  # noqa: E402
from transformers.trainer_utils import SaveStrategy  # noqa: E402

__all__ = ["NestedCallback", "connect"]

WEIGHTS = ("*.safetensors", "*.bin")  # one of these is in every checkpoint of Trainer


class NestedCallback(TrainerCallback):
    """What Trainer needs beside `optimizers=(optimizer, None)` to train as one node among several.

    It checks that Trainer leaves the model unwrapped and that all nodes train alike, writes a checkpoint of the nodes
    after each of Trainer's, and ends the last round when training ends, so that all nodes have the same weights then.

    Args:
        optimizer: with which Trainer steps; built without `rounds`, and with `checkpoint_every=None` where it has a
            run folder.

    Attributes:
        optimizer: the one that was given.
    """

    def __init__(self, optimizer: NestedOptimizer) -> None:
        self._checkpoints = NodeCheckpoints(optimizer)
        self.optimizer = optimizer

    @property
    def resume_from(self) -> str | None:
        """The checkpoint of Trainer with which the run goes on, for `train(resume_from_checkpoint=...)`; or None."""
        return self._checkpoints.resume_from

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **trainer: Any
    ) -> None:
        """Check everything that would make the nodes one, or leave them unable to go on."""
        _check_alone(args)
        _check_stepped(self.optimizer, trainer["optimizer"])
        _check_settings(args, self._checkpoints.has_run)
        self._checkpoints.check_step(state.global_step)
        if state.global_step >= state.max_steps:
            raise ValueError(
                f"The run is finished: it has taken {state.global_step} steps of max_steps={state.max_steps}, and "
                f"Trainer would take another one. Give more steps, or use the weights in {self.resume_from}."
            )
        saves = {"save_strategy": str(args.save_strategy), "save_steps": state.save_steps}
        self._checkpoints.check_same({"max_steps": state.max_steps, **saves})
        if args.save_strategy != SaveStrategy.NO:
            self._checkpoints.check_own_folder("output_dir", str(args.output_dir))
        if hasattr(trainer["model"], "should_save_on_this_rank"):  # it asks torch, and not Trainer, for the rank
            trainer["model"].should_save_on_this_rank = _saves_here
        _warn_of_norms(args, self.optimizer)
        if state.global_step and args.ignore_data_skip:
            warnings.warn(
                "ignore_data_skip=True: the data of this epoch begin again, so that the run has other bits than one "
                "that was never stopped.",
                UserWarning,
                stacklevel=2,
            )

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **trainer: Any,
    ) -> None:
        """Report the loss for the history of the run."""
        if logs and "loss" in logs:
            self.optimizer.report(float(logs["loss"]))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **trainer: Any) -> None:
        """Write the nodes' checkpoint; that of Trainer is complete."""
        written = Path(str(args.output_dir), f"checkpoint-{state.global_step}")
        if self._checkpoints.has_run and not any(any(written.glob(name)) for name in WEIGHTS):
            raise RuntimeError(
                f"Trainer wrote no weights to {written} on this node, so that a run could not go on from it. Let "
                "save_pretrained of the model write on every node."
            )
        self._checkpoints.write(written, state.global_step)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **trainer: Any
    ) -> None:
        """Warn once where the evaluated weights are those of this node alone."""
        self._checkpoints.warn_inside_round("evaluation", state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **trainer: Any
    ) -> None:
        """End the last round with the steps that were taken."""
        self.optimizer.synchronize()


def _saves_here(is_main_process: bool) -> bool:
    """Whether `save_pretrained` writes on this node: where it is told to, whatever the number of the node."""
    return is_main_process


def _check_alone(args: TrainingArguments) -> None:
    """Refuse arguments by which Trainer runs the model in several processes, or on several devices."""
    if args.world_size > 1:
        raise ValueError(
            f"Invalid TrainingArguments: they are those of one of {args.world_size} processes, and Trainer would wrap "
            "the model in DDP; need a process of its own for each node. Call "
            "tailopt.integrations.transformers.connect() before TrainingArguments are built."
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"Invalid TrainingArguments: Trainer would spread the model over {args.n_gpu} GPUs; need one per node. "
            'Set os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"] in the first lines of the program.'
        )


def _check_stepped(optimizer: NestedOptimizer, wrapper: Any) -> None:
    """Refuse a Trainer that steps with another optimizer, or whose scaler may skip the steps of one node alone."""
    stepped = getattr(wrapper, "optimizer", wrapper)
    if stepped is not optimizer:
        raise ValueError(
            f"Invalid Trainer: it steps with {type(stepped).__name__}, and not with the NestedOptimizer of the "
            "callback. Give it optimizers=(optimizer, None)."
        )
    if getattr(wrapper, "scaler", None) is not None:
        raise ValueError(
            "Invalid fp16: True; Trainer counts a step that its GradScaler skips, so that this node would fall behind "
            "the others. Use bf16=True, or an own loop with `while not optimizer.finished`."
        )


def _check_settings(args: TrainingArguments, has_run: bool) -> None:
    """Refuse settings that move weights behind the rounds, or leave no checkpoint to go on from."""
    if args.load_best_model_at_end:
        raise ValueError(
            "Invalid load_best_model_at_end: True; every node would load a checkpoint of its own. Leave it out, and "
            "evaluate the weights at the ends of rounds."
        )
    if not has_run or args.save_strategy == SaveStrategy.NO:
        return
    if args.save_strategy == SaveStrategy.BEST:
        raise ValueError('Invalid save_strategy: "best"; nodes would save at different steps. Use "steps" or "epoch".')
    if args.save_only_model:
        raise ValueError("Invalid save_only_model: True; a run with a folder goes on from whole checkpoints.")
    if args.save_total_limit == 1:
        raise ValueError(
            "Invalid save_total_limit: 1; Trainer would delete the checkpoint with which the nodes' newest one goes "
            "before they have written the next. Keep 2 or more."
        )


def _warn_of_norms(args: TrainingArguments, optimizer: NestedOptimizer) -> None:
    """Warn where Trainer clips norms before the thresholds of this library see the gradients."""
    if args.max_grad_norm and any("u" in group for group in optimizer.param_groups):
        warnings.warn(
            f"Trainer clips the norm of the gradient to max_grad_norm={args.max_grad_norm:g} before the optimizer "
            "clips it, which changes what u and d mean from step to step. Set max_grad_norm=0 in TrainingArguments.",
            UserWarning,
            stacklevel=3,
        )
