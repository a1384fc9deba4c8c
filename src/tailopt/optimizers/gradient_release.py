"""Gradient release: parameters are updated inside backward, and every gradient is freed as soon as it was used.

    loss.backward()     a gradient is complete  ->  into a bucket;  the bucket is full  ->  a part of the step, freed
    optimizer.step()    the rest of the buckets, and what happens once per step (`step_in_parts`)

Here are the hooks, the handle and what is refused. `pending_step` has the buckets and knows which backward pass a
gradient belongs to; `step_in_parts` takes the step.

A hook of torch (`register_post_accumulate_grad_hook`) runs when a parameter's gradient is complete, with all uses of
the parameter in it. By then no node of the graph needs the parameter: if one does after all, because it was used
without a gradient too, torch finds the parameter changed and raises.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from tailopt.clipping.dtensor import is_dtensor
from tailopt.optimizers.clipping_optimizer import ClippingOptimizer
from tailopt.optimizers.pending_step import PendingStep
from tailopt.optimizers.step_in_parts import refusal
from tailopt.optimizers.threshold_warning import warn_caller

# A part of a step costs about 0.1 ms of calls, whatever its size; a bucket counts towards the peak, with 0.02 bytes per
# parameter of a model of 1.5B. `benchmarks/gradient_release.py --buckets` compares sizes.
BUCKET_BYTES = 32 << 20


def release_gradients(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, bucket_bytes: int = BUCKET_BYTES
) -> GradientRelease:
    """Update the parameters inside backward, and free each gradient as soon as it was used.

    The loop stays as it is, `optimizer.step()` included: it takes what is left of the step, lets thresholds follow the
    gradients and runs hooks. Parameters, state and statistics have the bits of a loop without release. From backward
    on, `p.grad` is None, so nothing can read gradients afterwards (`clip_grad_norm_` sees none and returns 0).

    Memory for gradients falls to `bucket_bytes` and the largest gradient. A parameter that is used at both ends of the
    model (tied embeddings) keeps its gradient to the end of backward.

    Args:
        model: that the optimizer trains. Not inside DistributedDataParallel or FSDP1; FSDP2 works.
        optimizer: a BiClip, or an L2Clip with scope="tensor"; with nonfinite="propagate", and a dead zone that is a
            number. Without GradScaler and without a closure.
        bucket_bytes: gradients are collected up to this size and used in one call; 0 uses each at once.

    Returns:
        A handle. `handle.remove()`, or the end of a `with` block, restores ordinary steps. `with handle.accumulate():`
        belongs around every backward pass of a step but the last one.

    Examples:
        >>> from tailopt import BiClip
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> optimizer = BiClip(model.parameters(), lr=0.1, u=1.0, d=0.5)
        >>> with release_gradients(model, optimizer):
        ...     model(torch.tensor([100.0, 0.001])).sum().backward()
        ...     print(model.weight.grad)
        ...     optimizer.step()
        None
        >>> model.weight.data
        tensor([[0.9000, 0.9500]])
    """
    _check(model, optimizer, bucket_bytes)
    assert isinstance(optimizer, ClippingOptimizer)
    return GradientRelease(model, optimizer, bucket_bytes)


def is_released(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the gradients of an optimizer are released at present."""
    return isinstance(optimizer, ClippingOptimizer) and optimizer._released is not None


def _check(model: torch.nn.Module, optimizer: torch.optim.Optimizer, bucket_bytes: int) -> None:
    """Raise for what gradients cannot be released from."""
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"Invalid model: got {type(model).__name__}; need the torch.nn.Module that is trained.")
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 0:
        raise ValueError(f"Invalid bucket_bytes: {bucket_bytes!r}; need a whole number of bytes, 0 or more.")
    name = type(optimizer).__name__
    if not isinstance(optimizer, ClippingOptimizer):
        inner = " It is around another optimizer: release that one." if hasattr(optimizer, "optimizer") else ""
        raise ValueError(f"Invalid optimizer: got {name}; need a BiClip, or an L2Clip with scope='tensor'.{inner}")
    if optimizer._released is not None:
        raise ValueError(f"The gradients of this {name} are released already. Call remove() of that handle first.")
    for i, group in enumerate(optimizer.param_groups):
        if why := refusal(group):
            raise ValueError(f"The gradients of param group {i} cannot be released: {why}")
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if len(set(map(id, params))) < len(params):
        raise ValueError("A parameter is in the optimizer twice, and would take two steps. Pass each of them once.")
    if any(map(is_lazy, params)):
        raise ValueError("A parameter has no shape yet. Call the model once, then release its gradients.")
    if not {id(p) for p in params} & {id(p) for p in model.parameters()}:
        raise ValueError(
            f"Invalid model: none of its parameters is one of the {len(params)} of the optimizer. Pass the model whose "
            "parameters the optimizer was built from; with FSDP2, shard the model before."
        )
    for module in model.modules():
        if why := _reason_of_wrapper(module):
            raise ValueError(f"The gradients of a {type(module).__name__} cannot be released: {why}")


def _reason_of_wrapper(module: torch.nn.Module) -> str:
    """Why gradients inside this wrapper of a model cannot be released; empty if it is none."""
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        return (
            "it averages them over the processes after they are complete on each one, and needs all of them until "
            "then. Use fully_shard (FSDP2), or release_gradients on one process."
        )
    fsdp = sys.modules.get("torch.distributed.fsdp")  # an import takes a second, and only a model that has it needs it
    if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
        return "FSDP1 reduces them after they are complete on each rank. Use fully_shard (FSDP2)."
    return ""


class GradientRelease:
    """The handle that `release_gradients` returns; a context manager that ends with `remove()`."""

    def __init__(self, model: torch.nn.Module, optimizer: ClippingOptimizer, bucket_bytes: int) -> None:
        self._optimizer, self._bucket_bytes = optimizer, bucket_bytes
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._lock = threading.Lock()  # gradients of different devices come in different threads
        self._step: PendingStep | None = None
        self._given_up: set[int] = set()  # numbers of passes that did not end before others began
        self._accumulates = self._removed = False
        self._hooks: dict[int, RemovableHandle] = {}
        self._hook_parameters()
        # With this flag a GradScaler leaves everything to `step`, which refuses it with the reason.
        self._amp_flag = getattr(optimizer, "_step_supports_amp_scaling", False)
        optimizer._step_supports_amp_scaling = True
        optimizer._released = self
        self._on_optimizer = [
            optimizer.register_state_dict_pre_hook(lambda _: self.check_no_step_is_pending("state_dict()")),
            optimizer.register_load_state_dict_pre_hook(lambda *_: self.check_no_step_is_pending("load_state_dict()")),
        ]

    def __enter__(self) -> GradientRelease:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Restore ordinary steps. If a backward pass is waiting for its `optimizer.step()`, that call still ends it."""
        self._check_outside_backward("remove()")
        with self._lock:
            self._removed = True
            for hook in self._hooks.values():
                hook.remove()
            self._hooks.clear()
            failed = self._abandon() if self._step is not None and self._step.running else ""
            if self._step is None:
                self._detach()
        if failed:
            warn_caller(failed)

    def _detach(self) -> None:
        """Leave the optimizer as it was found."""
        if self._optimizer._released is self:
            self._optimizer._released = None
            self._optimizer._step_supports_amp_scaling = self._amp_flag
        for hook in self._on_optimizer:
            hook.remove()

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Let gradients add up in `p.grad`, as without release: around every backward pass of a step but the last."""
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    # ---- inside backward ----

    def _hook_parameters(self) -> None:
        """Hook the optimizer's parameters that train: after every step, others may train or be in the optimizer."""
        itself = weakref.ref(self)  # a hook that held the handle would keep the optimizer alive with the model

        def on_gradient(p: Tensor) -> None:
            release = itself()
            if release is not None:
                release._on_gradient(p)

        params = {id(p): p for group in self._optimizer.param_groups for p in group["params"]}
        for key in self._hooks.keys() - params.keys():
            self._hooks.pop(key).remove()
        for key, p in params.items():
            if p.requires_grad and key not in self._hooks:
                self._hooks[key] = p.register_post_accumulate_grad_hook(on_gradient)

    def _on_gradient(self, p: Tensor) -> None:
        """Take the complete gradient of a parameter; runs in the thread that computed it."""
        backward = torch._C._current_graph_task_id()
        # torch turns gradients on in a hook where create_graph=True; FSDP2 calls hooks itself, some of them afterwards
        differentiated = torch.is_grad_enabled() and not is_dtensor(p)
        with self._lock, torch.no_grad():
            step = self._step_of(backward, p)
            if self._accumulates:
                return
            g = p.grad
            if g is None:
                raise RuntimeError(
                    f"The gradient of {self._name(p)} is gone before it could be used: another hook has taken it. Let "
                    "one optimizer release the gradients of a parameter."
                )
            if differentiated or g.requires_grad:
                raise RuntimeError(
                    "backward(create_graph=True) keeps gradients for another derivative, and release frees them. Use "
                    "torch.autograd.grad for that derivative, which no hook sees, or remove() the handle."
                )
            if step is None:
                step = PendingStep(self._optimizer)
                step.join(backward)
                self._step = step
            if not step.parts.has(p):
                return  # it has left the optimizer since the last step
            p.grad = None
            step.add(p, g, self._bucket_bytes)

    def _step_of(self, backward: int, p: Tensor) -> PendingStep | None:
        """The step that a gradient belongs to, or None where it begins one; raises for a second gradient."""
        step = self._step
        if backward in self._given_up:
            raise RuntimeError(
                f"Two backward passes at once: when the other began, this one looked as if it had failed, and its "
                f"gradients up to that of {self._name(p)} are lost. Let one end, and call optimizer.step(), before the "
                "next begins."
            )
        if step is None:
            return None
        if not step.belongs(backward):
            if step.running:  # the last pass raised
                warn_caller(self._abandon())
                return None
            if id(p) in step.released:
                p.grad = None  # of this pass alone: without it the step can still be finished
            raise RuntimeError(
                f"A second backward pass before optimizer.step(): {self._name(p)} has another gradient, and "
                f"{len(step.released)} parameters were released in the first pass. Call optimizer.step() after every "
                "backward pass, and put `with handle.accumulate():` around those that only add to the gradient. Of "
                "this pass nothing was used."
            )
        step.join(backward)  # whatever this pass raises from here on, the step cannot be finished
        if id(p) in step.released:
            p.grad = None
            raise RuntimeError(
                f"{self._name(p)} has a second gradient in one backward pass, and was updated with the first. "
                "Checkpointing with use_reentrant=True does this to a parameter that is used inside and outside of a "
                "checkpoint, or in two of them: use torch.utils.checkpoint with use_reentrant=False."
            )
        return step

    def _abandon(self) -> str:
        """Give up a step whose backward pass raised; returns what has happened."""
        assert self._step is not None
        return f"A backward pass ended with an error. {self._give_up(self._step)}"

    def _give_up(self, step: PendingStep) -> str:
        step.parts.abandon()
        self._step, self._given_up = None, step.backwards
        params = sum(len(group["params"]) for group in self._optimizer.param_groups)
        return (
            f"{step.updated} of {params} parameters had taken their update: these updates stay, other gradients are "
            "lost, and the step does not count (statistics, calibration and thresholds are as before it)."
        )

    # ---- optimizer.step() ----

    @_disable_dynamo  # a compiled step would be traced with buckets of one backward pass
    def finish_step(self, closure: Callable[[], Any] | None) -> None:
        """Take what is left of the step; the body of `optimizer.step()` while gradients are released."""
        self._refuse(closure)
        with self._lock:
            if self._step is not None and self._step.running:
                raise RuntimeError(f"{self._abandon()} Compute the gradients again, then call optimizer.step().")
            step = self._step if self._step is not None else PendingStep(self._optimizer)
            try:
                self._check_whole(step)
                step.take_rest()
                # what was not released: parameters that train since the last step, and gradients that only accumulated
                step.take(step.parts.rest())
            except BaseException:
                self._give_up(step)
                raise
            self._step = None
            if self._removed:
                self._detach()
            else:
                self._hook_parameters()
            step.parts.end()

    def _refuse(self, closure: Callable[[], Any] | None) -> None:
        """Raise for ways to call `step` that need the gradients."""
        if closure is not None:
            raise RuntimeError(
                "step(closure) computes gradients inside the step, and with release the step is inside backward. Call "
                "backward() first, then step() without a closure."
            )
        self._check_outside_backward("optimizer.step()")
        scaled = [name for name in ("grad_scale", "found_inf") if hasattr(self._optimizer, name)]
        for name in scaled:
            delattr(self._optimizer, name)  # as the scaler does after a step
        if scaled:
            raise RuntimeError(
                "A GradScaler decides after backward whether gradients are finite and a step is taken, and with "
                "release the parameters have moved by then, with scaled gradients. Train in bf16, which needs no "
                "scaler, or remove() the handle."
            )

    def _check_whole(self, step: PendingStep) -> None:
        """Raise where a part of the step was taken with other settings or gradients than the rest would be."""
        moved = f"{step.updated} parameters have already moved"
        if step.released and (changed := step.parts.changed_settings()):
            raise RuntimeError(
                f"Settings changed between backward and optimizer.step(): {', '.join(changed)}. {moved} with the old "
                "values, and the step does not count. Set them before backward, or after optimizer.step()."
            )
        again = [self._name(p) for p in step.released.values() if p.grad is not None]
        if again:
            raise RuntimeError(
                f"Gradients came back after they were released: of {again[0]} and {len(again) - 1} more. Something "
                "writes them after backward: DistributedDataParallel around the model, which cannot be used with "
                f"release, or another backward pass after remove(). {moved}, with the first gradients of this process "
                "alone, and the step does not count."
            )

    def check_no_step_is_pending(self, name: str) -> None:
        """Raise between backward and `optimizer.step()`, for what would see a part of the step."""
        if self._step is not None:
            raise RuntimeError(
                f"{name} between backward and optimizer.step(): {self._step.updated} parameters have already moved, "
                "and others have not. Call optimizer.step() first."
            )

    def _check_outside_backward(self, name: str) -> None:
        if self._step is not None and torch._C._current_graph_task_id() in self._step.backwards:
            raise RuntimeError(f"{name} inside backward, whose gradients are being released. Call it after backward.")

    def _name(self, p: Tensor) -> str:
        return f"parameter {self._names[id(p)]!r}" if id(p) in self._names else f"a parameter of shape {tuple(p.shape)}"
