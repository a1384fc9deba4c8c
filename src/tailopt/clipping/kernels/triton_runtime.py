"""Whether Triton can run on a device, and the compiled programs, which are imported when they are first used."""

from __future__ import annotations

import functools
import importlib
import os
from types import ModuleType
from typing import Any

import torch

OLDEST = (8, 0)  # compute capability: bf16 arithmetic begins there


def why_missing(device: torch.device) -> str:
    """Why the kernel cannot run on a device; empty if it can."""
    if device.type == "cuda":
        return _why_missing_on_cuda(device.index if device.index is not None else torch.cuda.current_device())
    if device.type != "cpu" or os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
        return f"it runs on CUDA devices, not on {device}"
    return _why_not_imported()


@functools.cache
def _why_missing_on_cuda(index: int) -> str:
    if torch.version.hip is not None:
        return "it was never tried on an AMD GPU"
    if torch.cuda.get_device_capability(index) < OLDEST:
        return f"it needs a GPU of compute capability {OLDEST[0]}.{OLDEST[1]} or more"
    return _why_not_imported()


@functools.cache
def _why_not_imported() -> str:
    try:
        programs()
    except ImportError as error:
        return f"Triton cannot be imported: {error}"
    return ""


@functools.cache
def programs() -> ModuleType:
    """The compiled part; Triton takes most of a second to import, so a CPU never imports it."""
    return importlib.import_module("tailopt.clipping.kernels.triton_programs")


@functools.cache
def triton_type(dtype: torch.dtype) -> Any:
    """Triton's name for a type of torch."""
    return getattr(programs().tl, str(dtype).removeprefix("torch."))
