"""Losses whose gradient torch cannot batch where only the prediction differs between copies.

The mean squared error and its relatives have one kernel for their gradient, which torch 2.13 does not batch under two
vmaps of which the inner one batches the prediction alone ("the size of tensor a must match the size of tensor b"). Two
vmaps are nodes and configurations, and a target is the same for all configurations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import huber_loss, mse_loss, smooth_l1_loss
from torch.overrides import TorchFunctionMode

LOSSES = (mse_loss, smooth_l1_loss, huber_loss)


class giving_targets_copies(TorchFunctionMode):  # a context manager, like torch.no_grad
    """Within this context, the target of these losses has a copy for every copy of the prediction."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Add zeros to the target that differ between copies as the prediction does; leave everything else as it is."""
        if func not in LOSSES:
            return func(*args, **(kwargs or {}))
        return _of_arguments(func, *args, **(kwargs or {}))


def _of_arguments(func: Callable[..., Any], input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Any:
    if input.shape == target.shape:  # of other shapes torch warns, and broadcasts them itself
        target = target + torch.zeros_like(input, dtype=target.dtype, requires_grad=False)
    return func(input, target, *args, **kwargs)
