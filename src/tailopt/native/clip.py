"""Calls into clip.c: the optimizer step over many tensors, and what it counts."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tailopt.native.calls import CArray, InstructionSets, addresses, dtype_codes, sizes

BINS = 256  # octaves of a histogram
NO_MOMENTUM = (0.0, 1.0, math.inf, 1.0)  # the last numbers of a row: beta, 1 - beta, u / (1 - beta), 1 - beta^k
OPERATIONS = {"biclip": 0, "rescale": 1, "count": 2, "momentum": 3}


@dataclass
class Counters:
    """What passes add up: one row of 7 words per slot, as `Counters` in clip.c, and histograms on request."""

    table: Tensor
    bins: Tensor | None = None
    logs: Tensor | None = None
    sample_offset: int = -1  # which cache line in 32 of a large tensor is sampled; -1: all

    @classmethod
    def empty(cls, n_slots: int, histogram: bool = False, device: torch.device | None = None) -> Counters:
        """Zeros for so many slots."""
        table = torch.zeros(n_slots, 7, dtype=torch.int64, device=device)
        if not histogram:
            return cls(table)
        bins, logs = torch.zeros(2, n_slots, BINS, dtype=torch.int64, device=device).unbind()
        return cls(table, bins, logs)

    @property
    def integers(self) -> Tensor:
        """elements, zero, below, above, nonfinite"""
        return self.table[:, :5]

    @property
    def reals(self) -> Tensor:
        """sum of squares, largest magnitude; both over finite elements"""
        return self.table.view(torch.float64)[:, 5:]


class TensorTable:
    """The tensors of a pass as the C code takes them; the caller keeps the tensors alive.

    Args:
        params: addresses; none for a pass that only counts.
        grads: addresses.
        sizes, dtypes: of the gradients.
        momenta: addresses, for the operation "momentum".
        momentum_dtypes: their types.
    """

    __slots__ = ("dtypes", "grads", "momenta", "momentum_dtypes", "params", "sizes")

    def __init__(
        self,
        params: Sequence[int],
        grads: Sequence[int],
        sizes: Sequence[int],
        dtypes: Sequence[int],
        momenta: Sequence[int] = (),
        momentum_dtypes: Sequence[int] = (),
    ) -> None:
        self.params, self.grads, self.momenta = CArray("Q", params), CArray("Q", grads), CArray("Q", momenta)
        self.sizes = CArray("q", sizes)
        self.dtypes, self.momentum_dtypes = CArray("i", dtypes), CArray("i", momentum_dtypes)


class StepTable:
    """The numbers that tensors step with, in rows of 13 as `Row` in clip.c, and which row each tensor gets."""

    __slots__ = ("numbers", "row_of_tensor")

    def __init__(self, numbers: Sequence[float], row_of_tensor: Sequence[int]) -> None:
        self.numbers, self.row_of_tensor = CArray("d", numbers), CArray("i", row_of_tensor)


class ClipCalls:
    """The entry point of clip.c."""

    def __init__(self, handle: ctypes.CDLL, instruction_sets: InstructionSets) -> None:
        self._instruction_sets = instruction_sets
        self._pass: Any = handle.tailopt_pass
        self._pass.argtypes = [ctypes.c_int] * 4 + [ctypes.c_void_p] * 12 + [ctypes.c_int]
        self._pass.restype = ctypes.c_int

    def run(
        self,
        operation: str,
        params: Sequence[Tensor] | None,
        grads: Sequence[Tensor],
        step_table: StepTable,
        *,
        counters: Counters | None = None,
        slots: Sequence[int] | None = None,
        instruction_set: str | None = None,
        threads: int | None = None,
    ) -> None:
        """One pass. The tensors must be dense CPU tensors of DTYPES, each parameter strided like its gradient.

        counters: where to add what was counted, each tensor at its slot; by default its position.
        """
        tensors = TensorTable(addresses(params or ()), addresses(grads), sizes(grads), dtype_codes(grads))
        self.run_at(operation, tensors, step_table, counters, slots, instruction_set, threads)

    def run_at(
        self,
        operation: str,
        tensors: TensorTable,
        step_table: StepTable,
        counters: Counters | None = None,
        slots: Sequence[int] | None = None,
        instruction_set: str | None = None,
        threads: int | None = None,
    ) -> None:
        """`run` for callers that know addresses and sizes already."""
        n = len(tensors.grads.values)
        # without counters the C code does not read the slots
        slot = CArray("i", range(n) if slots is None else slots) if counters is not None else step_table.row_of_tensor
        failed = self._pass(
            OPERATIONS[operation],
            *self._instruction_sets.choose(instruction_set, threads),
            n,
            tensors.params.address,
            tensors.grads.address,
            tensors.momenta.address,
            tensors.sizes.address,
            tensors.dtypes.address,
            tensors.momentum_dtypes.address,
            step_table.row_of_tensor.address,
            step_table.numbers.address,
            slot.address,
            counters.table.data_ptr() if counters is not None else None,
            counters.bins.data_ptr() if counters is not None and counters.bins is not None else None,
            counters.logs.data_ptr() if counters is not None and counters.logs is not None else None,
            -1 if counters is None else counters.sample_offset,
        )
        if failed:
            raise MemoryError(f"No memory for the partial sums of a pass over {n} tensors.")
