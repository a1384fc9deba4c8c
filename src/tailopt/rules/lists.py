"""Steps over lists of tensors: a few calls of torch._foreach_* in place of a few for each tensor.

On a GPU every such call is one or a few launches for all tensors. The bits are those of the same operation on one
tensor after another.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tailopt.clipping.step_cache import StepCache
from tailopt.rules.rule import Hyperparameters, ParamStates, StepFunction, Tensors, as_list, value_for_param

# of parameters whose intermediates are alive at the same time: on a CPU they stay in the cache (25M parameters of GPT-2
# in one window: 1.5 times slower), on a GPU they fill it
CPU_WINDOW, GPU_WINDOW = 1 << 22, 1 << 28


def in_windows(step: StepFunction) -> StepFunction:
    """Take a step on some of the tensors at a time, so that its intermediates need little memory."""

    @functools.wraps(step)
    def windowed(
        params: Tensors,
        grads: Tensors,
        states: ParamStates,
        hparams: Hyperparameters,
        cache: StepCache | None = None,
    ) -> None:
        for some in windows(params):
            own = {name: value[some] if isinstance(value, list) else value for name, value in hparams.items()}
            step(params[some], grads[some], states[some], own, cache)

    return windowed


def windows(tensors: Sequence[Tensor]) -> Iterator[slice]:
    """Yield slices that together are the whole list, each of at most a window or one tensor.

    Examples:
        >>> list(windows([torch.empty(1 << 20), torch.empty(2), torch.empty(3)]))  # the first has 4 MiB
        [slice(0, 1, None), slice(1, 3, None)]
    """
    most = CPU_WINDOW if tensors and tensors[0].device.type == "cpu" else GPU_WINDOW
    start = alive = 0
    for end, x in enumerate(tensors):
        size = x.numel() * x.element_size()
        if alive and alive + size > most:
            yield slice(start, end)
            start, alive = end, 0
        alive += size
    if start < len(tensors):
        yield slice(start, len(tensors))


def scale_(tensors: Tensors, factor: Any) -> None:
    """Multiply every tensor in place by a number or a tensor: a common one, or a list with one for each."""
    # of a narrow type on a CPU, torch 2.13 rounds the factor to that type, and does not for a single tensor
    narrow = any(x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16) for x in tensors)
    if narrow or (isinstance(factor, list) and not all(isinstance(value, float) for value in factor)):
        for i, x in enumerate(tensors):
            x.mul_(value_for_param(factor, i))
    else:
        torch._foreach_mul_(list(tensors), _one_for_each(factor, len(tensors)))


def add_(tensors: Tensors, addend: Any) -> None:
    """Add a number or a tensor to every tensor in place: a common one, or a list with one for each."""
    torch._foreach_add_(list(tensors), _one_for_each(addend, len(tensors)))


def _one_for_each(value: Any, n: int) -> Any:
    """A number as it is, a tensor once for each of n tensors."""
    return [value] * n if isinstance(value, Tensor) else value


def descend_by_quotient(params: Tensors, numerators: Tensors, roots: list[Tensor], lr: Any, eps: Any) -> None:
    """p <- p - lr * numerator / (root + eps), where a root of 0 moves nothing; `roots` are overwritten."""
    add_(roots, eps)
    if not isinstance(eps, Tensor) and eps == 0:
        for root in roots:
            root.masked_fill_(root == 0, torch.inf)  # 0/0, or a gradient whose square is too small for the type
    rates = as_list(lr, len(roots))
    if not any(isinstance(rate, Tensor) for rate in rates):
        torch._foreach_addcdiv_(list(params), list(numerators), roots, [-rate for rate in rates])
        return
    for p, numerator, root, rate in zip(params, numerators, roots, rates, strict=True):
        if isinstance(rate, Tensor):
            p.sub_(numerator / root * rate)
        else:
            p.addcdiv_(numerator, root, value=-rate)
