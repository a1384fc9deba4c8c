"""The state of torch's generators, which a node keeps to itself between checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


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
