"""Evaluation mode for a while: `with evaluating(model):` computes without dropout and without gradients.

`model.eval()` and `model.train()` set one mode for all modules. A model may have modules in different modes, such as a
BatchNorm that is frozen while the rest is trained, so every module gets back the mode that it had.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

Modes = list[tuple[torch.nn.Module, bool]]


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, without gradients; every module has its own mode again afterwards.

    The modes are restored also where the block raises.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2).eval())
        >>> with evaluating(model):
        ...     [module.training for module in model], torch.is_grad_enabled()
        ([False, False], False)
        >>> [module.training for module in model]
        [True, False]
    """
    modes = modes_of(model)
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        restore_modes(modes)


def modes_of(model: torch.nn.Module) -> Modes:
    """Return every module and its mode, parents before their children."""
    return [(module, module.training) for module in model.modules()]


def restore_modes(modes: Modes) -> None:
    """Give every module the mode that it had when `modes_of` was called."""
    for module, training in modes:
        if module.training != training:
            module.train(training)  # a call, not an assignment: some modules do more when their mode changes
    for module, training in modes:  # a module with two parents was set again by the second of them
        module.training = training
