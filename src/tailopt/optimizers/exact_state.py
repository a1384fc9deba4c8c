"""State that keeps its own type when it is loaded: torch rounds it to that of its parameter, which may be narrower."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def load_exact_state(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """`load_state_dict`, to the bit."""
    optimizer.load_state_dict(saved)
    restore_exact_types(optimizer, saved)


def restore_exact_types(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Replace state that `load_state_dict` has just rounded by what was saved."""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for number, p in zip(numbers, params, strict=False):
        values = saved["state"].get(number)
        if not isinstance(values, dict):
            continue
        state = optimizer.state[p]
        for key, exact in values.items():
            rounded = state.get(key)
            if isinstance(exact, Tensor) and isinstance(rounded, Tensor) and exact.dtype != rounded.dtype:
                state[key] = exact.to(rounded.device, copy=True)
