"""Many copies of one model as one program.

    losses = vmap(f)(weights, buffers, batch),    gradients = d (sum of losses) / d weights

f is the user's loss of the model with other weights in it. Copies do not interact, so one ordinary backward pass of the
sum gives the stack of all gradients; `vmap(grad(f))` gives the same, but keeps what the backward pass would free.

Weights are stacked as [nodes, *shape], or as [nodes, configurations, *shape]: configurations share their node's batch,
and a layer that sees the batch itself becomes one large matrix product per node. Frozen weights, and buffers that the
model does not change, stay unstacked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tailopt.engines.attention import batchable_copy
from tailopt.engines.batches import LossFunction
from tailopt.engines.folded_attention import folding_attention
from tailopt.engines.memory_plan import is_out_of_memory
from tailopt.engines.model_state import Buffers, trainable_parameters
from tailopt.engines.pointwise_losses import giving_targets_copies
from tailopt.engines.routes import VmapRefused
from tailopt.engines.shared_linear import folding_linear_layers


class StackedGradients(NamedTuple):
    """Of one step of all copies; a gradient is None where the loss does not reach the parameter."""

    losses: Tensor
    gradients: list[Tensor | None]
    buffers: dict[str, Tensor]


class StackedModel:
    """Losses and gradients of many copies of a model.

    Args:
        model: what is copied; the program works on a copy of its own and leaves the model as it is.
        loss: (model, batch) -> a scalar tensor.
        autocast_dtype: of mixed precision, or None.
        configurations: whether weights have a second leading dimension, along which the batch is shared.

    Attributes:
        names: of the trained parameters.
        changing: the names of the buffers that the model changes; they are stacked.
        draws: whether the model draws random numbers, as dropout does.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: LossFunction,
        autocast_dtype: torch.dtype | None = None,
        configurations: bool = False,
    ) -> None:
        trained = trainable_parameters(model)
        self.names = list(trained)
        self._device = next(iter(trained.values())).device
        self.changing: tuple[str, ...] = ()
        self.draws = False
        self._program = _Program(batchable_copy(model), loss)
        self._autocast_dtype, self._configurations = autocast_dtype, configurations
        self._keys = [f"model.{name}" for name in self.names]

    def look_at(self, model: torch.nn.Module, batch: Any) -> None:
        """Run the model itself once, to see which buffers it changes and whether it draws random numbers.

        It gets its buffers back. The caller seeds torch's generators before the next draw.
        """
        buffers = Buffers(model)
        before = {name: b.clone() for name, b in buffers.tensors().items()}
        generators = self._generator_states()
        try:
            with torch.enable_grad(), self._context():
                self._program.loss(model, batch)
            after = buffers.tensors()
            self.changing = tuple(name for name, b in before.items() if not torch.equal(b, after[name]))
        finally:
            buffers.load(before)
        self.draws = not all(map(torch.equal, generators, self._generator_states()))

    def _generator_states(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        if self._device.type != "cpu":
            states.append(torch.get_device_module(self._device).get_rng_state(self._device))
        return states

    def load_constants(self, buffers: Mapping[str, Tensor]) -> None:
        """Give the program the buffers of the global model, of which it reads those that are not stacked."""
        self._program.buffers_of_model.load(buffers)

    def check_constants(self, buffers: Mapping[str, Tensor]) -> None:
        """Raise where the program changed a buffer that is not stacked."""
        for name, now in self._program.buffers_of_model.tensors().items():
            if name not in self.changing and not torch.equal(now, buffers[name]):
                raise VmapRefused(
                    f"the buffer {name}", "the first batch left it unchanged and a later one did not, so it is shared."
                )

    def gradients(self, weights: Sequence[Tensor], buffers: Mapping[str, Tensor], batch: Any) -> StackedGradients:
        """Return losses, gradients and new buffers of all copies.

        Args:
            weights: stacked, by parameter.
            buffers: stacked, the changing ones; they are not written to.
            batch: as the loss takes it, every tensor in it stacked by node.

        Raises:
            VmapRefused: vmap cannot run the model. An error that the model has by itself looks the same from here: the
                caller, who has the batches of the nodes, can tell.
        """
        leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        try:
            return self.losses_and_gradients(weights, [buffers[n] for n in self.changing], leaves, batch)
        except Exception as error:
            if isinstance(error, _InvalidLoss) or is_out_of_memory(error):
                raise
            raise VmapRefused.of(error) from error

    def constants(self) -> dict[str, Tensor]:
        """Return what the program reads and nobody stacks: frozen weights, and buffers that do not change."""
        stacked = {*self.names, *self.changing}
        model = self._program.model
        both = [*model.named_parameters(), *model.named_buffers()]
        return {name: t.detach() for name, t in both if name not in stacked}

    def losses_and_gradients(
        self,
        weights: Sequence[Tensor],
        buffers: Sequence[Tensor],
        leaves: Sequence[Tensor],
        batch: Any,
        constants: Mapping[str, Tensor] | None = None,
    ) -> StackedGradients:
        """Do the work of `gradients`, whose errors are torch's own here.

        Args:
            weights: stacked, by parameter.
            buffers: stacked, in the order of `changing`.
            leaves: the tensors of the batch, stacked by node.
            batch: where the leaves belong; its own tensors are not read.
            constants: in place of the program's own, so that a trace has no tensors besides its arguments.
        """
        fixed = {f"model.{name}": t for name, t in (constants or {}).items()}
        moving = [w.detach().requires_grad_() for w in weights]

        def one(weights: Sequence[Tensor], buffers: Sequence[Tensor], leaves: Sequence[Tensor]) -> Any:
            values = fixed | dict(zip(self._keys, weights, strict=True))
            # cloned: a model that writes into its buffers would write into the caller's
            values |= {f"model.{name}": b.clone() for name, b in zip(self.changing, buffers, strict=True)}
            tensors = iter(leaves)
            own = tree_map(lambda leaf: next(tensors) if isinstance(leaf, Tensor) else leaf, batch)
            with ExitStack() as stack:
                if self._configurations and not self.draws:
                    stack.enter_context(folding_linear_layers())
                    stack.enter_context(giving_targets_copies())
                if self._device.type == "cuda":
                    stack.enter_context(folding_attention())
                return torch.func.functional_call(self._program, values, (own, self.changing))

        # different: every copy has its own dropout masks. Attention with dropout runs under one vmap, not under two, so
        # that copies of a model that draws are one dimension, each with its batch.
        all_copies, flat = one, self._configurations and self.draws
        if self._configurations and not flat:
            all_copies = torch.vmap(all_copies, in_dims=(0, 0, None), randomness="different")
        all_copies = torch.vmap(all_copies, in_dims=(0, 0, 0), randomness="different")
        with torch.enable_grad():
            with self._context():
                if flat:
                    shape = weights[0].shape[:2]
                    losses, new_buffers = all_copies(
                        [w.flatten(0, 1) for w in moving],
                        [b.flatten(0, 1) for b in buffers],
                        [leaf.repeat_interleave(shape[1], dim=0) for leaf in leaves],
                    )
                    losses, new_buffers = losses.unflatten(0, shape), [b.unflatten(0, shape) for b in new_buffers]
                else:
                    losses, new_buffers = all_copies(moving, list(buffers), list(leaves))
            if not losses.requires_grad:
                raise _InvalidLoss(
                    "Invalid loss: it depends on no trainable parameter. Was it detached, or is all frozen?"
                )
            gradients = torch.autograd.grad(losses.sum(), moving, allow_unused=True)
        changed = {name: b.detach() for name, b in zip(self.changing, new_buffers, strict=True)}
        return StackedGradients(losses.detach(), list(gradients), changed)

    @contextmanager
    def _context(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._autocast_dtype is not None:
                stack.enter_context(torch.autocast(self._device.type, dtype=self._autocast_dtype))
            if self._device.type == "cpu":
                # the other implementations on the CPU have no batching rule: one call per copy, with a warning
                stack.enter_context(torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH))
            yield


class _InvalidLoss(ValueError):
    """The loss is not what an engine can use."""


class _Program(torch.nn.Module):
    """A model with its loss, as a module whose weights `functional_call` replaces."""

    def __init__(self, model: torch.nn.Module, loss: LossFunction) -> None:
        super().__init__()
        self.model, self.loss = model, loss
        self.buffers_of_model = Buffers(model)

    def forward(self, batch: Any, changing: Sequence[str]) -> tuple[Tensor, list[Tensor]]:
        """Return the loss, and the buffers as the model left them: it may have put others in their place."""
        loss = self.loss(self.model, batch)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{type(loss).__name__}"
            raise _InvalidLoss(f"Invalid loss: {got}; need a scalar tensor, such as the mean over the batch.")
        after = self.buffers_of_model.tensors() if changing else {}
        return loss, [after[name] for name in changing]
