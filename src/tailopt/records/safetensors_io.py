"""Reading and writing safetensors files in which every tensor has a digest.

A file is 8 bytes with the length of a header, the header, and the tensors one after another. A piece is a range of a
tensor's flat elements: all of them, or those that one of several files holds. Reading compares the header with the one
that would be written, and the bytes of every piece with their sha256.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tailopt.records.history import quoted_names
from tailopt.records.tensor_bytes import tensor_bytes

# The dtypes that every release of safetensors reads; tensors of other dtypes are stored as bytes.
_SAFETENSORS_DTYPES = {
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
    """A checkpoint differs from what was written: a file or tensor is missing, cut, changed or added."""


class Piece(NamedTuple):
    """A range of a tensor's flat elements in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the whole tensor
    start: int
    stop: int
    sha256: str = ""

    @property
    def byte_range(self) -> slice:
        """The position of its bytes among those of the whole tensor."""
        return slice(self.start * self.dtype.itemsize, self.stop * self.dtype.itemsize)

    @property
    def n_bytes(self) -> int:
        """How many bytes of a file it takes."""
        return (self.stop - self.start) * self.dtype.itemsize

    @property
    def header_entry(self) -> dict[str, Any]:
        """Its dtype and shape in the header: a whole tensor keeps its shape, a range is flat, an odd dtype is bytes."""
        whole = self.stop - self.start == math.prod(self.shape)
        shape = list(self.shape) if whole else [self.stop - self.start]
        code = _SAFETENSORS_DTYPES.get(self.dtype)
        return {"dtype": code or "U8", "shape": shape if code else [*shape, self.dtype.itemsize]}


def pieces_of_file(tensors: Mapping[str, Tensor], index: int, files: int) -> list[Piece]:
    """Return what file number `index` of `files` holds, in its order. An empty tensor is in the first file."""
    pieces = []
    for name, tensor in tensors.items():
        n = tensor.numel()
        start, stop = n * index // files, n * (index + 1) // files
        if start < stop or (n == 0 and index == 0):
            pieces.append(Piece(name, tensor.dtype, tuple(tensor.shape), start, stop))
    return in_file_order(pieces)


def in_file_order(pieces: Iterable[Piece]) -> list[Piece]:
    """Sort pieces as they are in a file: wide dtypes first, so that every tensor is aligned."""
    return sorted(pieces, key=lambda piece: (-piece.dtype.itemsize, piece.name))


def header(pieces: Iterable[Piece]) -> bytes:
    """Return the beginning of a safetensors file: its length in 8 bytes, then dtypes, shapes and offsets as JSON.

    Written here rather than by the safetensors package: the arguments of its function for raw memory changed between
    releases, the one for tensors refuses shared memory, and a header that is known to the byte can be compared.
    """
    entries: dict[str, Any] = {}
    end = 0
    for piece in pieces:
        begin, end = end, end + piece.n_bytes
        entries[piece.name] = {**piece.header_entry, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_file(path: Path, tensors: Mapping[str, Tensor], pieces: list[Piece]) -> list[Piece]:
    """Write one file and return its pieces with their digests.

    tensors: dense CPU tensors by name; each is the whole tensor, or only the elements of its piece.
    """
    with path.open("wb") as file:
        file.write(header(pieces))
        written = []
        for piece in pieces:
            data = tensor_bytes(tensors[piece.name])
            if len(data) > piece.n_bytes:
                data = data[piece.byte_range]
            file.write(data)
            written.append(piece._replace(sha256=hashlib.sha256(data).hexdigest()))
    return written


def read_file(path: Path, tensors: Mapping[str, Tensor], pieces: list[Piece], skip: Collection[str] = ()) -> None:
    """Fill tensors from a file that must hold exactly these pieces; tensors named in `skip` are not read."""
    with path.open("rb") as file:
        expected = header(pieces)
        if file.read(len(expected)) != expected:
            names = quoted_names(p.name for p in pieces)
            raise damaged_checkpoint(path, f"lists other tensors than the manifest, which has {names}")
        for piece in pieces:
            if piece.name in skip:
                file.seek(piece.n_bytes, os.SEEK_CUR)
                continue
            data = tensor_bytes(tensors[piece.name])[piece.byte_range]
            file.readinto(data)
            if (actual := hashlib.sha256(data).hexdigest()) != piece.sha256:
                raise damaged_checkpoint(
                    path,
                    f"has other bytes in tensor {piece.name!r} (sha256 {actual[:12]}…, written {piece.sha256[:12]}…)",
                )


def damaged_checkpoint(path: Path, problem: str) -> DamagedCheckpoint:
    """Build the error for a file that differs from what was written.

    problem: what is wrong with the file, as a predicate: "is missing".
    """
    return DamagedCheckpoint(
        f"{path} {problem}. The checkpoint is damaged: bring it back from a copy, or remove its folder and resume from "
        "an older one."
    )
