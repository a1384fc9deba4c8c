"""Tensors as bytes in safetensors files, each piece with its digest.

A file is 8 bytes with the length of a header, the header, and the tensors one after another. A piece is a range of a
tensor's flat elements: the whole of it, or what one of several files holds. Reading compares the header with the one
that would be written, and the bytes of every piece with their sha256.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tailopt.records.history import child, kind, known

# The types of the safetensors format that every release of it reads; the others are stored as bytes.
_CODES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}


class DamagedCheckpoint(RuntimeError):
    """A checkpoint is not what was written: a file or tensor is missing, cut, changed or added."""


def digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, types, shapes and bytes, in the order of the names: equal to the bit, or not.

    Examples:
        >>> a, b = torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])
        >>> digest({"w": a}) == digest({"w": a.clone()}), digest({"w": a}) == digest({"w": b})
        (True, False)
    """
    total = hashlib.sha256()
    for name, tensor in sorted(plain(tensors, "tensors").items()):
        total.update(json.dumps([name, dtype_name(tensor.dtype), list(tensor.shape)]).encode())
        total.update(memory(tensor))
    return total.hexdigest()


class Piece(NamedTuple):
    """A range of a tensor's flat elements in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the whole tensor
    start: int
    stop: int
    sha256: str = ""

    @property
    def bytes(self) -> slice:
        """Where its bytes are among the tensor's."""
        return slice(self.start * self.dtype.itemsize, self.stop * self.dtype.itemsize)

    @property
    def stored(self) -> dict[str, Any]:
        """How safetensors calls it: a whole tensor as such, a part as a row, a strange type as bytes."""
        whole = self.stop - self.start == math.prod(self.shape)
        shape = list(self.shape) if whole else [self.stop - self.start]
        code = _CODES.get(self.dtype)
        return {"dtype": code or "U8", "shape": shape if code else [*shape, self.dtype.itemsize]}


def plain(tensors: Mapping[str, Tensor], path: str) -> dict[str, Tensor]:
    """Tensors as they are written: on the CPU, contiguous, detached. Whatever has no plain bytes is refused."""
    ready = {}
    for name, tensor in tensors.items():
        if type(name) is not str or name == "__metadata__":
            raise ValueError(
                f"Invalid name in {path}: got {name!r}; need a string other than '__metadata__'. Rename it."
            )
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{child(path, name)} is {kind(tensor)}; need a tensor. Put plain values into meta.")
        tensor = tensor.detach()
        if type(tensor) is not Tensor:
            raise TypeError(
                f"{child(path, name)} is {kind(tensor)}; need a plain tensor. Save its local or its full tensor."
            )
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            form = "quantized" if tensor.is_quantized else "meta" if tensor.is_meta else str(tensor.layout)
            raise TypeError(
                f"{child(path, name)} is a {form} tensor; need a dense one with memory. Save the tensors it is made of."
            )
        ready[name] = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    return ready


def memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor themselves, not a copy; to be used while the tensor lives."""
    length = tensor.numel() * tensor.element_size()
    if length == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * length).from_address(tensor.data_ptr()))


def split(tensors: Mapping[str, Tensor], index: int, shards: int) -> list[Piece]:
    """What stands in file `index` of `shards`, in its order. An empty tensor stands in the first."""
    pieces = []
    for name, tensor in tensors.items():
        n = tensor.numel()
        start, stop = n * index // shards, n * (index + 1) // shards
        if start < stop or (n == 0 and index == 0):
            pieces.append(Piece(name, tensor.dtype, tuple(tensor.shape), start, stop))
    return in_file_order(pieces)


def in_file_order(pieces: Iterable[Piece]) -> list[Piece]:
    """The order within a file: wide types first, so that every tensor is aligned."""
    return sorted(pieces, key=lambda piece: (-piece.dtype.itemsize, piece.name))


def header(pieces: Iterable[Piece]) -> bytes:
    """The beginning of a safetensors file: its length in 8 bytes, then types, shapes and offsets as JSON.

    Written here rather than by the safetensors package: the arguments of its function for raw memory changed between
    releases, the one for tensors refuses shared memory, and a header that is known to the byte can be compared.
    """
    entries: dict[str, Any] = {}
    end = 0
    for piece in pieces:
        begin, end = end, end + piece.bytes.stop - piece.bytes.start
        entries[piece.name] = {**piece.stored, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_file(path: Path, tensors: Mapping[str, Tensor], pieces: list[Piece]) -> list[Piece]:
    """Write one file; the pieces come back with their digests. Tensors are whole, or just the elements of the piece."""
    with path.open("wb") as file:
        file.write(header(pieces))
        done = []
        for piece in pieces:
            data, length = memory(tensors[piece.name]), piece.bytes.stop - piece.bytes.start
            if len(data) > length:
                data = data[piece.bytes]
            file.write(data)
            done.append(piece._replace(sha256=hashlib.sha256(data).hexdigest()))
    return done


def read_file(path: Path, tensors: Mapping[str, Tensor], pieces: list[Piece], skip: Collection[str] = ()) -> None:
    """Fill tensors from one file that should hold just these pieces; those of `skip` are not read."""
    with path.open("rb") as file:
        expected = header(pieces)
        if file.read(len(expected)) != expected:
            raise damaged(path, f"lists other tensors than the manifest, which has {known(p.name for p in pieces)}")
        for piece in pieces:
            if piece.name in skip:
                file.seek(piece.bytes.stop - piece.bytes.start, os.SEEK_CUR)
                continue
            data = memory(tensors[piece.name])[piece.bytes]
            file.readinto(data)
            if (found := hashlib.sha256(data).hexdigest()) != piece.sha256:
                what = f"has other bytes in tensor {piece.name!r} (sha256 {found[:12]}…, written {piece.sha256[:12]}…)"
                raise damaged(path, what)


def dtype_name(dtype: torch.dtype) -> str:
    """How a type is called in a file."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The type that a file calls so."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no type of tensors")
    return dtype


def damaged(path: Path, what: str) -> DamagedCheckpoint:
    """The error for a file that is not what was written, with what to do."""
    return DamagedCheckpoint(
        f"{path} {what}. The checkpoint is damaged: bring it back from a copy, or remove its folder and resume from an "
        "older one."
    )
