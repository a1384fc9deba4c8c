"""Thresholds from the gradients of a model as it is: `calibrate` looks at 50 batches and moves nothing.

    u, d = what u="auto" would choose if the first 50 gradients were those of these batches, at the same weights

The counting and the rules are those of `u="auto"` in an optimizer. The thresholds say what a step would do before one
is taken; `u="auto"` itself needs no calibration beforehand.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tailopt.algorithms import Algorithm
from tailopt.arguments import check_function
from tailopt.clipping.dtensor import local_pair
from tailopt.clipping.norms import squares
from tailopt.engines.batches import LossFunction, to_device
from tailopt.engines.model_state import trainable_parameters
from tailopt.engines.simulate import restoring_global_rng
from tailopt.evaluation import modes_of, restore_modes
from tailopt.optimizers.auto_thresholds import count_gradients, read_counts, visible_parts
from tailopt.progress import Progress
from tailopt.thresholds import AUTO, CALIBRATION, Norms, Statistics, Thresholds, choose

QUICK = 2.0  # seconds before progress is shown
RULES = ("biclip", "biclip-l2", "l2clip")  # inner rules with thresholds, the last two for norms


def calibrate(
    model: nn.Module, loss: LossFunction, batches: Iterable[Any], *, algorithm: Algorithm | None = None
) -> Thresholds:
    """Choose u and d for a model from the gradients of 50 batches, without taking a step.

        u = median * clamp(6 * median / RMS, 0.05, 6),    d = u / 3        of the nonzero elements of each tensor

    These are the thresholds that `BiClip(u="auto", d="auto")` would have if its first 50 steps saw these gradients.
    With an algorithm they are those of its inner level: by tensor for biclip, and for biclip-l2 and l2clip a norm, one
    for all tensors or one for each, as its scope says, u = median^2 / RMS and d = u. Its own i_u is not looked at, and
    of i_d only whether it is 0.

    Nothing changes: weights, buffers, modes, gradients, `requires_grad` and the states of the random generators are
    what they were before, also after an error. Only the batches are consumed. A model in evaluation mode is calibrated
    in training mode. The counts of an FSDP2 model are added up over its ranks.

    Args:
        model: its parameters with `requires_grad` count, in the order of `named_parameters()`.
        loss: (model, batch) -> a scalar tensor.
        batches: such as a DataLoader; the first 50 are used, or all where there are fewer. Tensors are moved to the
            device of the model.
        algorithm: whose inner level is meant. With `inner_momentum` the thresholds are those of the mean of the
            gradients, as if the batches were the local steps of one round.

    Returns:
        Thresholds: `u` and `d` with an entry for each parameter (or one for all), and `reason`, a line about the
        choice. A step that moves a coordinate by at most lr has the rate lr / u.

    Raises:
        ValueError: there is no batch, no parameter to train, no gradient, or an algorithm without thresholds inside.

    Examples:
        >>> random = torch.Generator().manual_seed(0)
        >>> model = nn.utils.skip_init(nn.Linear, 20, 1, bias=False)
        >>> _ = nn.init.zeros_(model.weight)
        >>> batches = [(torch.randn(8, 20, generator=random), torch.randn(8, 1, generator=random)) for _ in range(50)]
        >>> chosen = calibrate(model, lambda model, b: nn.functional.mse_loss(model(b[0]), b[1]), batches)
        >>> [round(x, 2) for x in (*chosen.u, *chosen.d)]
        [1.54, 0.51]
        >>> from tailopt import BiClip
        >>> opt = BiClip(model.parameters(), lr=1e-3 / chosen.u[0], u=chosen.u[0], d=chosen.d[0])
    """
    check_model_and_loss(model, loss)
    _check_algorithm(algorithm)
    level = _level(algorithm)
    params = list(trainable_parameters(model).values())
    seen = _Norms(params, level.by_tensor) if level.norms else ElementCounts(params, level.momentum)
    with unchanged(model, params[0].device), Progress(shown=True) as progress:
        n, start = 0, time.monotonic()
        for batch in islice(batches, CALIBRATION):
            backward(model, loss, to_device(batch, params[0].device), params)
            seen.add({i: g for i, p in enumerate(params) if (g := p.grad) is not None})
            n += 1
            if time.monotonic() - start > QUICK:
                progress.update(n, CALIBRATION, "batches of calibration")
    if not n:
        raise ValueError("Invalid batches: there is none; need one or more, better 50. Was the iterator used up?")
    chosen = choose(seen.read(), d=level.d)
    return chosen if n == CALIBRATION else replace(chosen, reason=f"{chosen.reason[:-1]}, in {n} batches.")


class _Level(NamedTuple):
    """What is clipped: elements or norms."""

    norms: bool = False
    by_tensor: bool = True
    d: float | str = AUTO
    momentum: float = 0.0


def _level(algorithm: Algorithm | None) -> _Level:
    if algorithm is None:
        return _Level()
    hparams = algorithm.hparams("inner")
    norms = algorithm.inner != "biclip"
    lower = hparams.get("d", 0.0)
    d = 0.0 if isinstance(lower, int | float) and lower == 0 else AUTO
    return _Level(norms, hparams.get("scope") == "tensor", d, float(hparams.get("momentum", 0.0)))


def check_model_and_loss(model: Any, loss: Any) -> None:
    """Refuse what has no gradients."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"Invalid model: {model!r}; need a torch.nn.Module.")
    check_function("loss", loss if loss is not None else 0, "a function of (model, batch) that returns a scalar tensor")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("Invalid model: no parameter requires a gradient, so there are no gradients to look at.")


def _check_algorithm(algorithm: Any) -> None:
    if algorithm is None:
        return
    if not isinstance(algorithm, Algorithm):
        raise TypeError(
            f"Invalid algorithm: {algorithm!r}; make one with tailopt.algorithm(name, ...), or leave it out."
        )
    if algorithm.inner not in RULES:
        raise ValueError(
            f"Invalid algorithm: {algorithm.name}, whose inner optimizer {algorithm.inner!r} has no thresholds to "
            f"choose; need one with {', '.join(RULES[:-1])} or {RULES[-1]} inside, or none for those of BiClip."
        )


def backward(model: nn.Module, loss: LossFunction, batch: Any, params: Sequence[nn.Parameter]) -> None:
    """Put the gradients of a batch in the place of those that parameters have."""
    for p in params:
        p.grad = None
    with torch.enable_grad():
        value = loss(model, batch)
    if not isinstance(value, Tensor) or value.dim() != 0:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"Invalid loss: {got}; need a scalar tensor, such as the mean over the batch.")
    if not value.requires_grad:
        raise ValueError("Invalid loss: it depends on no trainable parameter. Was it detached, or is all frozen?")
    value.backward()


class ElementCounts:
    """Counts the elements of gradients by tensor, or those of their mean with momentum."""

    def __init__(self, params: Sequence[nn.Parameter], momentum: float) -> None:
        self._params, self._beta = params, momentum
        self._progress: dict[str, Any] = {"steps": 0}
        self._means: dict[int, Tensor] = {}

    def add(self, grads: dict[int, Tensor]) -> None:
        """Count a gradient; keys are positions of parameters."""
        self._progress["steps"] += 1
        parts = dict(zip(grads, visible_parts([self._params[i] for i in grads], list(grads.values())), strict=True))
        if self._beta:
            parts = {i: self._mean(i, g) for i, g in parts.items()}
        count_gradients(self._progress, len(self._params), list(parts), list(parts.values()))

    def _mean(self, i: int, g: Tensor) -> Tensor:
        """m / (1 - beta^k) after m <- beta * m + (1 - beta) * g; what is not finite counts as 0, as in calibration."""
        beta, k = self._beta, int(self._progress["steps"])
        g = torch.where(g.isfinite(), g, 0.0)
        mean: Tensor = beta * self._means.get(i, torch.zeros_like(g)) + (1 - beta) * g
        self._means[i] = mean
        return mean / (1 - beta**k)

    def read(self) -> Sequence[Statistics]:
        """Of every tensor, over all ranks."""
        return read_counts(self._progress, len(self._params), self._params)


class _Norms:
    """Keeps the norms of gradients: one over all tensors, or one for each."""

    def __init__(self, params: Sequence[nn.Parameter], by_tensor: bool) -> None:
        self._params, self._by_tensor = params, by_tensor
        self._rows: list[Tensor] = []

    def add(self, grads: dict[int, Tensor]) -> None:
        """Take the norms of a gradient; keys are positions of parameters."""
        if not grads:
            return
        owners = [self._params[i] for i in grads]
        local = [local_pair(p, g)[1] for p, g in zip(owners, grads.values(), strict=True)]
        scopes = list(grads) if self._by_tensor else [0] * len(grads)
        m, q = squares(local, owners, scopes, len(self._params) if self._by_tensor else 1).unbind(1)
        self._rows.append(m * q.sqrt())

    def read(self) -> Sequence[Statistics]:
        """Of every scope."""
        return [Norms(tuple(column)) for column in torch.stack(self._rows).T.tolist()] if self._rows else [Norms()]


@contextmanager
def unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Give the model what it had: buffers, modes, gradients and requires_grad; and the generators their states.

    Inside, a model in evaluation mode is in training mode, as in a simulation; otherwise modes are the user's.
    """
    flags = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    modes = modes_of(model)
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        with restoring_global_rng(device):
            if not model.training:
                model.train()
            yield
    finally:
        restore_modes(modes)
        for p, requires_grad, grad in flags:
            p.requires_grad_(requires_grad)
            p.grad = grad
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                setattr(module, name, buffer)  # a module may have put another tensor in its place
                buffer.copy_(before)
