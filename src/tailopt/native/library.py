"""Loads the C kernel and hands it addresses.

`loaded()` is the kernel or None, `why_missing()` says why not. The library is found beside this file, loaded by ctypes
and never imported, so one build serves every Python and every torch.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VERSION = 3  # of cpu.c; a library of another version is refused
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
BINS = 256  # octaves of a histogram
BLOCK = 32_768  # elements of a sum of squares
OPERATIONS = {"biclip": 0, "rescale": 1, "count": 2}

_forked = False


def _after_fork() -> None:
    # A parallel region in the parent leaves a thread pool that the child does not have: its first region would hang.
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@dataclass(frozen=True)
class Library:
    """The loaded kernel. `variants`: instruction sets this processor can run, best last."""

    path: Path
    variants: tuple[str, ...]
    openmp: bool
    _pass: Callable[..., int]
    _moved: Callable[..., None]
    _load: Callable[..., None]
    _mean: Callable[..., None]
    _descend: Callable[..., None]
    _beyond: Callable[..., None]
    _ulp_squares: Callable[..., None]

    def _way(self, variant: str | None, threads: int | None) -> tuple[int, int]:
        """The number of a variant, by default of the best, and how many threads may work."""
        number = len(self.variants) - 1 if variant is None else self.variants.index(variant)
        return number, 1 if _forked else (threads or torch.get_num_threads())

    def run(
        self,
        operation: str,
        params: Sequence[Tensor] | None,
        grads: Sequence[Tensor],
        which_row: Sequence[int],
        rows: Sequence[float],
        *,
        counters: Counters | None = None,
        slots: Sequence[int] | None = None,
        variant: str | None = None,
        threads: int | None = None,
    ) -> None:
        """One pass. The tensors must be dense CPU tensors of DTYPES, each parameter strided like its gradient.

        rows: 9 numbers a row, as `Row` in cpu.c. counters: where to add what was counted, at `slots`.
        """
        where = addresses(params) if params is not None else None
        layout = sizes(grads), array("i", [DTYPES[g.dtype] for g in grads])
        self.run_at(operation, where, addresses(grads), *layout, which_row, rows, counters, slots, variant, threads)

    def run_at(
        self,
        operation: str,
        params: array[int] | None,
        grads: array[int],
        counts: array[int],
        dtypes: array[int],
        which_row: Sequence[int],
        rows: Sequence[float],
        counters: Counters | None = None,
        slots: Sequence[int] | None = None,
        variant: str | None = None,
        threads: int | None = None,
    ) -> None:
        """`run` for callers that know addresses and sizes already; they keep the tensors alive meanwhile."""
        n = len(grads)
        row, numbers = array("i", which_row), array("d", rows)
        slot = array("i", range(n) if slots is None else slots) if counters is not None else row  # not read without
        failed = self._pass(
            OPERATIONS[operation],
            *self._way(variant, threads),
            n,
            params.buffer_info()[0] if params is not None else None,
            grads.buffer_info()[0],
            counts.buffer_info()[0],
            dtypes.buffer_info()[0],
            row.buffer_info()[0],
            numbers.buffer_info()[0],
            slot.buffer_info()[0],
            counters.table.data_ptr() if counters is not None else None,
            counters.bins.data_ptr() if counters is not None and counters.bins is not None else None,
            counters.logs.data_ptr() if counters is not None and counters.logs is not None else None,
            -1 if counters is None else counters.sample_offset,
        )
        if failed:
            raise MemoryError(f"No memory for the partial sums of a pass over {n} tensors.")

    def moved_at(
        self,
        params: array[int] | None,
        starts: array[int] | None,
        deltas: array[int],
        counts: array[int],
        places: array[int],
        slots: array[int],
        into: int,
        variant: str | None = None,
        threads: int | None = None,
    ) -> tuple[array[int], array[float]]:
        """delta = param - start in fp32, piece by piece; without params only a look at what is there.

        places: of each piece's first element in its slot's stretch. Returns, for each of `into` slots, the checksum of
        its pieces as a signed number, and their largest magnitude: inf or NaN where an element is not finite.
        """
        sums, largest = array("q", bytes(8 * into)), array("f", bytes(4 * into))
        self._moved(
            *self._way(variant, threads),
            len(deltas),
            params.buffer_info()[0] if params is not None else None,
            starts.buffer_info()[0] if starts is not None else None,
            deltas.buffer_info()[0],
            counts.buffer_info()[0],
            places.buffer_info()[0],
            slots.buffer_info()[0],
            sums.buffer_info()[0],
            largest.buffer_info()[0],
        )
        return sums, largest

    def load_at(
        self,
        params: array[int],
        starts: array[int],
        counts: array[int],
        places: array[int],
        slots: array[int],
        into: int,
        variant: str | None = None,
        threads: int | None = None,
    ) -> array[int]:
        """param = start in fp32, piece by piece; returns the checksum of the starts of each of `into` slots."""
        sums = array("q", bytes(8 * into))
        self._load(
            *self._way(variant, threads),
            len(params),
            params.buffer_info()[0],
            starts.buffer_info()[0],
            counts.buffer_info()[0],
            places.buffer_info()[0],
            slots.buffer_info()[0],
            sums.buffer_info()[0],
        )
        return sums

    def mean_at(
        self,
        rows: array[int],
        shares: array[float],
        whole: float,
        negative: bool,
        out: int,
        count: int,
        variant: str | None = None,
        threads: int | None = None,
    ) -> None:
        """out = the sum of share * row over whole, or its negative; fp32, row after row, two roundings each."""
        self._mean(
            *self._way(variant, threads),
            rows.buffer_info()[0],
            shares.buffer_info()[0],
            len(rows),
            whole,
            negative,
            out,
            count,
        )

    def descend_at(
        self,
        rows: array[int],
        shares: array[float],
        whole: float,
        starts: array[int],
        counts: array[int],
        params: array[int],
        velocities: array[int] | None,
        neg_lr: array[float],
        momentum: float,
        nesterov: bool,
        fused: bool,
        variant: str | None = None,
        threads: int | None = None,
    ) -> None:
        """Descent on the negative of what `mean_at` forms, with momentum where there are velocities.

        Piece by piece, from the rows' elements at `starts`. fused: with fused multiply-adds where torch has them.
        """
        self._descend(
            *self._way(variant, threads),
            rows.buffer_info()[0],
            shares.buffer_info()[0],
            len(rows),
            whole,
            len(params),
            starts.buffer_info()[0],
            counts.buffer_info()[0],
            params.buffer_info()[0],
            velocities.buffer_info()[0] if velocities is not None else None,
            neg_lr.buffer_info()[0],
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
        variant: str | None = None,
        threads: int | None = None,
    ) -> list[tuple[int, float] | None]:
        """Of each tensor: the element that is farthest beyond what it may move, and how much that is; None: none is.

        A coordinate of start x may move by slack * b and so many ulps of max(|x|, b), where b = a + c |x|. The deltas
        are in fp32, the starts in fp32, bf16 or fp16; all are contiguous, on the CPU.
        """
        n = len(deltas)
        at, most = array("q", bytes(8 * n)), array("f", bytes(4 * n))
        where, begun, counts = addresses(deltas), addresses(starts), sizes(deltas)
        kinds, floors, slopes = array("i", [DTYPES[x.dtype] for x in starts]), array("d", a), array("d", c)
        self._beyond(
            *self._way(variant, threads),
            n,
            where.buffer_info()[0],
            begun.buffer_info()[0],
            counts.buffer_info()[0],
            kinds.buffer_info()[0],
            floors.buffer_info()[0],
            slopes.buffer_info()[0],
            slack,
            ulps,
            at.buffer_info()[0],
            most.buffer_info()[0],
        )
        return [(i, bound) if i >= 0 else None for i, bound in zip(at, most, strict=True)]

    def ulp_squares(
        self, x: Tensor, least: float, variant: str | None = None, threads: int | None = None
    ) -> array[float]:
        """The sum of squares of the ulps of max(|x|, least), of each block of `BLOCK` elements.

        -1 where it would depend on the order. x: fp32, bf16 or fp16, contiguous, on the CPU.
        """
        sums = array("d", bytes(8 * -(-x.numel() // BLOCK)))
        self._ulp_squares(
            *self._way(variant, threads),
            x.data_ptr(),
            DTYPES[x.dtype],
            x.numel(),
            least,
            sums.buffer_info()[0],
        )
        return sums


def addresses(tensors: Sequence[Tensor]) -> array[int]:
    """Where the tensors' elements begin."""
    return array("Q", list(map(Tensor.data_ptr, tensors)))


def sizes(tensors: Sequence[Tensor]) -> array[int]:
    """How many elements the tensors have."""
    return array("q", list(map(Tensor.numel, tensors)))


@dataclass
class Counters:
    """What passes add up: [slots, 7] words as `Tally` in cpu.c, and histograms where asked for."""

    table: Tensor
    bins: Tensor | None = None
    logs: Tensor | None = None
    sample_offset: int = -1  # which cache line in 32 of a large tensor is sampled; -1: all

    @classmethod
    def empty(cls, slots: int, histogram: bool = False, device: torch.device | None = None) -> Counters:
        table = torch.zeros(slots, 7, dtype=torch.int64, device=device)
        if not histogram:
            return cls(table)
        bins, logs = torch.zeros(2, slots, BINS, dtype=torch.int64, device=device).unbind()
        return cls(table, bins, logs)

    @property
    def integers(self) -> Tensor:
        """elements, zero, below, above, nonfinite"""
        return self.table[:, :5]

    @property
    def reals(self) -> Tensor:
        """sum of squares, largest magnitude; both over finite elements"""
        return self.table.view(torch.float64)[:, 5:]


def loaded() -> Library | None:
    """The kernel, loaded once; None where it cannot be had."""
    return _load()[0]


def why_missing() -> str:
    """Why `loaded()` is None, and what to do; empty where it is not."""
    return _load()[1]


@functools.cache
def _load() -> tuple[Library | None, str]:
    remedy = "Install a C compiler and reinstall tailopt-torch."
    found = sorted(p for p in Path(__file__).parent.glob("_cpu.*") if p.suffix in (".so", ".pyd", ".dylib"))
    if not found:
        return None, f"it was not built: no compiler worked when tailopt-torch was installed. {remedy}"
    path = found[0]
    try:
        handle = ctypes.CDLL(str(path))  # after torch: binds to the OpenMP runtime torch has loaded
    except OSError as error:
        return None, f"{path.name} does not load on this {platform.machine()} machine ({error}). {remedy}"
    try:
        version = handle.tailopt_version()
    except AttributeError:
        return None, f"{path.name} is not tailopt's kernel. Reinstall tailopt-torch."
    if version != VERSION:
        return None, f"{path.name} has version {version}, this release needs {VERSION}. Reinstall tailopt-torch."
    handle.tailopt_prepare()
    handle.tailopt_variant.restype = ctypes.c_char_p
    names = (handle.tailopt_variant(i) for i in range(16))
    variants = tuple(name.decode() for name in names if name is not None)
    one_pass = handle.tailopt_pass
    one_pass.argtypes = [ctypes.c_int] * 4 + [ctypes.c_void_p] * 10 + [ctypes.c_int]
    one_pass.restype = ctypes.c_int
    moved, load, mean = handle.tailopt_moved, handle.tailopt_load, handle.tailopt_mean
    moved.argtypes, moved.restype = [ctypes.c_int] * 3 + [ctypes.c_void_p] * 8, None
    load.argtypes, load.restype = [ctypes.c_int] * 3 + [ctypes.c_void_p] * 6, None
    mean.argtypes = [ctypes.c_int] * 2 + [ctypes.c_void_p] * 2 + [ctypes.c_int, ctypes.c_float, ctypes.c_int]
    mean.argtypes += [ctypes.c_void_p, ctypes.c_int64]
    descend = handle.tailopt_descend
    descend.argtypes = [ctypes.c_int] * 2 + [ctypes.c_void_p] * 2 + [ctypes.c_int, ctypes.c_float, ctypes.c_int]
    descend.argtypes += [ctypes.c_void_p] * 5 + [ctypes.c_float, ctypes.c_int, ctypes.c_int]
    mean.restype = descend.restype = None
    beyond, ulp_squares = handle.tailopt_beyond, handle.tailopt_ulp_squares
    beyond.argtypes = [ctypes.c_int] * 3 + [ctypes.c_void_p] * 6 + [ctypes.c_float] * 2 + [ctypes.c_void_p] * 2
    ulp_squares.argtypes = [ctypes.c_int] * 2 + [ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_double]
    ulp_squares.argtypes += [ctypes.c_void_p]
    beyond.restype = ulp_squares.restype = None
    passes = one_pass, moved, load, mean, descend, beyond, ulp_squares
    return Library(path, variants, bool(handle.tailopt_openmp()), *passes), ""
