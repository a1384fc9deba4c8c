"""A model's parameters and buffers, as a round loads and reads them.

Where all parameters have one wide type, they become views of one flat tensor: loading the weights and forming the
displacement are then one operation each, which saves much of a small model's round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tailopt.clipping.counts import is_gap_free
from tailopt.clipping.operators import compute_dtype
from tailopt.rounds.round import DivergedState, GlobalState


class ModelState:
    """Loads weights and buffers into a model, and forms what it moved since.

    Attributes:
        params: the trained parameters; a tied one counts once.
        weights: their memory, complex ones as pairs of reals.
        buffers: the model's buffers by name.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        trained = trainable_parameters(model)
        self.names, self.params = list(trained), list(trained.values())
        self._flat = flatten_in_place(self.params)
        self.weights = [as_real(p.detach()) for p in self.params]
        self.buffers = Buffers(model)

    def global_state(self, average: bool) -> GlobalState:
        """Return the state before the first round: copies of weights, in the compute type, and of buffers."""
        flat = self._flat
        if flat is None:
            weights = [w.to(compute_dtype(w.dtype), copy=True) for w in self.weights]
        else:
            flat = flat.clone()
            weights = [flat.as_strided(p.shape, p.stride(), p.storage_offset()) for p in self.params]
        mean = [torch.zeros_like(w) for w in weights] if average else None
        buffers = {name: buffer.clone() for name, buffer in self.buffers.tensors().items()}
        return GlobalState(self.names, weights, buffers, [{} for _ in weights], mean, flat=flat)

    def diverged_state(self) -> DivergedState:
        """Return a copy of the weights and buffers as they are now, in host memory."""
        buffers = {name: b.to("cpu", copy=True) for name, b in self.buffers.tensors().items()}
        return DivergedState([w.to("cpu", copy=True) for w in self.weights], buffers)

    def load(self, state: GlobalState) -> None:
        """Load the global weights and buffers."""
        self.buffers.load(state.buffers)
        if self._flat is not None and state.flat is not None:
            self._flat.copy_(state.flat)
        else:
            torch._foreach_copy_(self.weights, state.weights)

    def weights_in_own_types(self, state: GlobalState) -> Sequence[Tensor]:
        """Return the global weights, each in the type of its parameter. Call it directly after `load`.

        A tensor is copied only where the type of its parameter differs from the compute type.
        """
        if self._flat is not None:
            return state.weights
        return [w if w.dtype == p.dtype else p.clone() for p, w in zip(self.weights, state.weights, strict=True)]

    @torch.no_grad()
    def load_diverged(self, diverged: DivergedState) -> None:
        """Load the weights and buffers from which a diverged node continues."""
        torch._foreach_copy_(self.weights, diverged.weights)
        self.buffers.load(diverged.buffers)

    @torch.no_grad()
    def load_average(self, state: GlobalState) -> None:
        """Load the iterate average, and the global buffers."""
        assert state.average is not None
        torch._foreach_copy_(self.weights, state.average)
        self.buffers.load(state.buffers)

    def take_displacement(self, state: GlobalState, start: Sequence[Tensor]) -> tuple[list[Tensor], Tensor | None]:
        """Return the displacement from the start: a list of tensors, and one flat tensor if they share one storage.

        Where the parameters have the compute type, it overwrites them: call `load` before the next step.
        """
        if self._flat is not None and state.flat is not None:
            return self.weights, self._flat.sub_(state.flat)
        if all(w.dtype == compute_dtype(w.dtype) for w in self.weights):
            torch._foreach_sub_(self.weights, list(start))
            return self.weights, None
        types = [compute_dtype(w.dtype) for w in self.weights]
        return [w.to(t) - s.to(t) for w, s, t in zip(self.weights, start, types, strict=True)], None


class Buffers:
    """A model's buffers by name. They are located once by module, since modules may replace the tensors themselves."""

    def __init__(self, model: torch.nn.Module) -> None:
        modules = dict(model.named_modules())
        names = [name for name, _ in model.named_buffers()]
        self._places = [(name, modules[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in names]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors themselves."""
        return {name: getattr(module, key).detach() for name, module, key in self._places}

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Copy values into the buffers."""
        for name, module, key in self._places:
            getattr(module, key).copy_(values[name])


def trainable_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that require a gradient, by name; a tied one counts once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def check_trainable(model: torch.nn.Module) -> None:
    """Refuse a model of which nothing would move."""
    if not trainable_parameters(model):
        raise ValueError("Invalid model: no parameter requires a gradient, so there is nothing to train.")


def names_and_dimensions(params: Mapping[str, Tensor]) -> tuple[list[str], list[int]]:
    """Return the names of parameters and how many dimensions each has, complex ones as pairs of reals."""
    return list(params), [p.dim() + int(p.is_complex()) for p in params.values()]


def as_real(x: Tensor) -> Tensor:
    """Return a complex tensor as pairs of reals, and any other as it is."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def flatten_in_place(params: Sequence[torch.nn.Parameter]) -> Tensor | None:
    """Make the parameters views of one tensor and return it; None where they are not all of one wide type."""
    kinds = {(p.dtype, p.device) for p in params}
    dense = all(type(p) is torch.nn.Parameter and is_gap_free(p) for p in params)
    if len(kinds) != 1 or not dense or params[0].dtype not in (torch.float32, torch.float64):
        return None
    if (shared := _shared_storage(params)) is not None:
        return shared
    flat = torch.empty(sum(p.numel() for p in params), dtype=params[0].dtype, device=params[0].device)
    offset = 0
    for p in params:
        view = flat.as_strided(p.shape, p.stride(), offset)
        view.copy_(p.detach())
        p.data = view
        offset += p.numel()
    return flat


def _shared_storage(params: Sequence[torch.nn.Parameter]) -> Tensor | None:
    """Return the tensor behind parameters that lie one after another in it already."""
    offset = 0
    for p in params:
        if p.storage_offset() != offset or p.untyped_storage().data_ptr() != params[0].untyped_storage().data_ptr():
            return None
        offset += p.numel()
    if params[0].untyped_storage().nbytes() != offset * params[0].element_size():
        return None
    return params[0].detach().as_strided((offset,), (1,), 0)
