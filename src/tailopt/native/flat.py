"""Calls into flat.c: passes over flat fp32 buffers, for a round between nodes and for the guard."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from tailopt.native.calls import DTYPES, InstructionSets, addresses, dtype_codes, pointer, sizes

BLOCK = 32_768  # elements of a sum of squares


class Pieces(NamedTuple):
    """Pieces of partitions: how long each is, and where it lies in which partition."""

    sizes: array[int]
    places: array[int]  # of a piece's first element in its partition
    partitions: array[int]
    n_partitions: int


class WeightedSum(NamedTuple):
    """The sum of share * row over `whole`: fp32, row after row, two roundings each."""

    rows: array[int]  # addresses
    shares: array[float]
    whole: float


class DescentPieces(NamedTuple):
    """Pieces of a descent: x and velocity of each, from the elements of the sum that begin at `starts`."""

    starts: array[int]
    sizes: array[int]
    params: array[int]  # addresses
    velocities: array[int] | None
    neg_lr: array[float]


class FlatCalls:
    """The entry points of flat.c. Arrays hold addresses; the caller keeps the tensors alive."""

    def __init__(self, handle: ctypes.CDLL, instruction_sets: InstructionSets) -> None:
        self._instruction_sets = instruction_sets
        number, real, size, address = ctypes.c_int, ctypes.c_float, ctypes.c_int64, ctypes.c_void_p
        weighted_sum = [address, address, number, real]
        signatures = {
            "moved": [number] * 3 + [address] * 8,
            "load": [number] * 3 + [address] * 6,
            "mean": [number] * 2 + weighted_sum + [number, address, size],
            "descend": [number] * 2 + weighted_sum + [number] + [address] * 5 + [real, number, number],
            "beyond": [number] * 3 + [address] * 6 + [real] * 2 + [address] * 2,
            "ulp_squares": [number] * 2 + [address, number, size, ctypes.c_double, address],
        }
        self._functions: dict[str, Any] = {}
        for name, arguments in signatures.items():
            function = getattr(handle, f"tailopt_{name}")
            function.argtypes, function.restype = arguments, None
            self._functions[name] = function

    def displacement(
        self,
        params: array[int] | None,
        starts: array[int] | None,
        deltas: array[int],
        pieces: Pieces,
        instruction_set: str | None = None,
        threads: int | None = None,
    ) -> tuple[array[int], array[float]]:
        """delta = param - start in fp32, piece by piece; without params the deltas are only read.

        Returns, for each partition, the checksum of its pieces as a signed number, and their largest magnitude: inf or
        NaN if an element is not finite.
        """
        n = pieces.n_partitions
        checksums, largest = array("q", bytes(8 * n)), array("f", bytes(4 * n))
        self._functions["moved"](
            *self._instruction_sets.choose(instruction_set, threads),
            len(deltas),
            pointer(params),
            pointer(starts),
            pointer(deltas),
            pointer(pieces.sizes),
            pointer(pieces.places),
            pointer(pieces.partitions),
            pointer(checksums),
            pointer(largest),
        )
        return checksums, largest

    def load(
        self,
        params: array[int],
        starts: array[int],
        pieces: Pieces,
        instruction_set: str | None = None,
        threads: int | None = None,
    ) -> array[int]:
        """param = start in fp32, piece by piece; returns the checksum of each partition's starts."""
        checksums = array("q", bytes(8 * pieces.n_partitions))
        self._functions["load"](
            *self._instruction_sets.choose(instruction_set, threads),
            len(params),
            pointer(params),
            pointer(starts),
            pointer(pieces.sizes),
            pointer(pieces.places),
            pointer(pieces.partitions),
            pointer(checksums),
        )
        return checksums

    def mean(
        self,
        summed: WeightedSum,
        negative: bool,
        out: int,
        count: int,
        instruction_set: str | None = None,
        threads: int | None = None,
    ) -> None:
        """out = the weighted sum of so many elements, or its negative."""
        self._functions["mean"](
            *self._instruction_sets.choose(instruction_set, threads),
            pointer(summed.rows),
            pointer(summed.shares),
            len(summed.rows),
            summed.whole,
            negative,
            out,
            count,
        )

    def descend(
        self,
        summed: WeightedSum,
        pieces: DescentPieces,
        momentum: float,
        nesterov: bool,
        fused: bool,
        instruction_set: str | None = None,
        threads: int | None = None,
    ) -> None:
        """Descent along the weighted sum, piece by piece, with momentum if there are velocities.

        fused: with fused multiply-adds where torch has them.
        """
        self._functions["descend"](
            *self._instruction_sets.choose(instruction_set, threads),
            pointer(summed.rows),
            pointer(summed.shares),
            len(summed.rows),
            summed.whole,
            len(pieces.params),
            pointer(pieces.starts),
            pointer(pieces.sizes),
            pointer(pieces.params),
            pointer(pieces.velocities),
            pointer(pieces.neg_lr),
            momentum,
            nesterov,
            fused,
        )

    def beyond(
        self,
        deltas: Sequence[Tensor],
        starts: Sequence[Tensor],
        a: Sequence[float],
        c: Sequence[float],
        slack: float,
        ulps: float,
        instruction_set: str | None = None,
        threads: int | None = None,
    ) -> list[tuple[int, float] | None]:
        """For each tensor the element that is farthest beyond its bound, and that bound; None if none is beyond it.

        A coordinate of start x may move by slack * b and so many ulps of max(|x|, b), where b = a + c |x|. The deltas
        are in fp32, the starts in fp32, bf16 or fp16; all are contiguous, on the CPU.
        """
        n = len(deltas)
        positions, bounds = array("q", bytes(8 * n)), array("f", bytes(4 * n))
        delta_addresses, start_addresses, counts = addresses(deltas), addresses(starts), sizes(deltas)
        codes, floors, slopes = dtype_codes(starts), array("d", a), array("d", c)
        self._functions["beyond"](
            *self._instruction_sets.choose(instruction_set, threads),
            n,
            pointer(delta_addresses),
            pointer(start_addresses),
            pointer(counts),
            pointer(codes),
            pointer(floors),
            pointer(slopes),
            slack,
            ulps,
            pointer(positions),
            pointer(bounds),
        )
        return [(i, bound) if i >= 0 else None for i, bound in zip(positions, bounds, strict=True)]

    def ulp_squares(
        self, x: Tensor, least: float, instruction_set: str | None = None, threads: int | None = None
    ) -> array[float]:
        """The sum of squares of the ulps of max(|x|, least), for each block of `BLOCK` elements.

        -1 where it would depend on the order. x: fp32, bf16 or fp16, contiguous, on the CPU.
        """
        sums = array("d", bytes(8 * -(-x.numel() // BLOCK)))
        self._functions["ulp_squares"](
            *self._instruction_sets.choose(instruction_set, threads),
            x.data_ptr(),
            DTYPES[x.dtype],
            x.numel(),
            least,
            pointer(sums),
        )
        return sums
