"""What a node keeps to itself between checkpoints: the state of torch's generators and of the inner optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def rng_states(device: torch.device) -> dict[str, Tensor]:
    """The state of torch's generators: of the CPU, and of the device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def restore_rng_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Give torch's generators their state back; that of another kind of device is ignored."""
    torch.set_rng_state(states["cpu"])
    if device.type in states and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[device.type], device)


def load_exact_state(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """`load_state_dict`, to the bit: torch rounds state to the type of its parameter, which may be narrower."""
    optimizer.load_state_dict(saved)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for i, values in saved["state"].items():
        if isinstance(i, int) and i < len(params) and isinstance(values, dict):
            state = optimizer.state[params[i]]
            for key, exact in values.items():
                rounded = state.get(key)
                if isinstance(exact, Tensor) and isinstance(rounded, Tensor) and exact.dtype != rounded.dtype:
                    state[key] = exact.to(rounded.device, copy=True)
