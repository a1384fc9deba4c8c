"""How much memory a batched program needs, found by running it small before it runs large.

The peak is linear in the number of copies (measured to three digits on the CPU), so that two small runs predict any
number of them.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes: constant + slope * configurations.

    Examples:
        >>> MemoryPlan(constant=100, slope=10).most(limit=150)
        5
    """

    constant: int
    slope: int

    def bytes(self, configurations: int) -> int:
        """Return the predicted peak."""
        return self.constant + self.slope * configurations

    def most(self, limit: int) -> int:
        """Return how many configurations fit into a limit; at least 1, since fewer cannot run."""
        return max(1, (limit - self.constant) // max(1, self.slope))


def planned(run: Callable[[int], Any], device: torch.device, first: Callable[[], Any] | None = None) -> MemoryPlan:
    """Return the plan of a program that `run` runs with a number of configurations; it runs with 2 and with 3.

    Not with 1: numbers in which configurations differ are tensors only where there are several.

    Args:
        first: what runs before, by default `run(2)`: what the first call allocates for good is not the program's.
    """
    if first is None:
        run(2)
    else:
        first()
    two, three = (peak(lambda n=n: run(n), device) for n in (2, 3))  # type: ignore[misc]
    release_unused(device)
    return MemoryPlan(max(0, 3 * two - 2 * three), max(1, three - two))


def peak(run: Callable[[], Any], device: torch.device) -> int:
    """Return how many bytes of tensors a function holds at most, beside those that exist before.

    On a GPU: how many torch reserves. That is what must fit, and a captured graph reserves memory of its own.
    """
    if device.type == "cuda":
        release_unused(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_reserved(device)
        run()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_reserved(device)) - before
    live = _LiveBytes()
    with live:
        run()
    return live.peak


def release_unused(device: torch.device) -> None:
    """Give memory back to a GPU that torch keeps for later."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


class _LiveBytes(TorchDispatchMode):
    """Adds up the storages that operations allocate, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage(), given)
        return result

    def _count(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if not size or address in self._known or address in given:  # a view, or written in place
            return
        self._known.add(address)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, address, size)

    def _free(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.now -= size


def available(device: torch.device) -> int | None:
    """Return the bytes that are free on a device; None where nobody knows."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = {line.split(":")[0]: line.split()[1] for line in lines if len(line.split()) > 1}
    return int(sizes["MemAvailable"]) * 1024 if "MemAvailable" in sizes else None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that there is not enough memory; on the CPU torch has no class for it."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
