"""What all calls into the C library share: numbers of types, addresses, the choice of instruction set and threads."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}

_forked = False


def _after_fork() -> None:
    # A parallel region in the parent leaves a thread pool that the child does not have: its first region would hang.
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class InstructionSets(NamedTuple):
    """The instruction sets that this processor can run, best last."""

    names: tuple[str, ...]

    def choose(self, instruction_set: str | None, threads: int | None) -> tuple[int, int]:
        """The number of an instruction set, by default of the best, and how many threads may work."""
        number = len(self.names) - 1 if instruction_set is None else self.names.index(instruction_set)
        return number, 1 if _forked else (threads or torch.get_num_threads())


def pointers(tensors: Sequence[Tensor]) -> list[int]:
    """Where the tensors' elements begin, as a list: two lists are compared faster than an array is made."""
    return list(map(Tensor.data_ptr, tensors))


def addresses(tensors: Sequence[Tensor]) -> array[int]:
    """Where the tensors' elements begin, as the C code takes it."""
    return array("Q", pointers(tensors))


def sizes(tensors: Sequence[Tensor]) -> array[int]:
    """How many elements the tensors have."""
    return array("q", list(map(Tensor.numel, tensors)))


def dtype_codes(tensors: Sequence[Tensor]) -> array[int]:
    """The numbers that the C sources have for the tensors' types."""
    return array("i", [DTYPES[t.dtype] for t in tensors])


class CArray:
    """An array, and where its elements begin; asked for once, because a step passes nine arrays that it has kept."""

    __slots__ = ("address", "values")

    def __init__(self, code: str, values: Sequence[Any]) -> None:
        self.values = values if isinstance(values, array) and values.typecode == code else array(code, values)
        self.address = self.values.buffer_info()[0]


def pointer(values: array[int] | array[float] | None) -> int | None:
    """Where an array's elements begin; the caller keeps the array alive."""
    return values.buffer_info()[0] if values is not None else None
