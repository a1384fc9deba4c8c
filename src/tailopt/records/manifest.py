"""The manifest of a checkpoint: which tensors it has, in which files, with which digests.

manifest.json is written last, and its first line is the digest of its other bytes (see `checked_json.py`), in every
format. The other keys:

    format, round, step, meta
    run       to which run, configuration and history the checkpoint belongs (`ledger.Provenance`); null or missing in
              manifests by older versions
    shards    how many files hold what all nodes share: global-00000-of-00002.safetensors, …
    tensors   what all nodes share: by name the dtype, the shape and the pieces
    nodes     what each node keeps to itself, in node-0003.safetensors: by node, the same

A piece is a file, a range of flat elements, and their sha256.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tailopt.records import disk
from tailopt.records.checked_json import read_verified, with_digest
from tailopt.records.checkpoint_folders import folder_name, is_checkpoint_name
from tailopt.records.history import quoted_names
from tailopt.records.ledger import Provenance
from tailopt.records.safetensors_io import DamagedCheckpoint, Piece, damaged_checkpoint, header, in_file_order
from tailopt.records.tensor_bytes import dtype_from_name, dtype_name

FORMAT = 1
MANIFEST = "manifest.json"

# What reading a manifest by an attacker or a bug can raise: its digest fits, its content makes no sense.
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError, MemoryError)

Owner = int | None  # a node's number; None for what all nodes share


class TensorInfo(NamedTuple):
    """The dtype and the shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class FileContents(NamedTuple):
    """Whose tensors a file holds, and its pieces in their order."""

    owner: Owner
    pieces: list[Piece]


def global_file(index: int, parts: int) -> str:
    """Return the name of a file with what all nodes share, or with one of several parts of it."""
    return f"global-{index:05d}-of-{parts:05d}.safetensors"


def node_file(node: int) -> str:
    """Return the name of the file with what a node keeps to itself."""
    return f"node-{node:04d}.safetensors"


# Writing


def tensor_entries(tensors: Mapping[str, Tensor], files: Mapping[str, list[Piece]]) -> dict[str, Any]:
    """Return the manifest's entries of tensors, in the order of `tensors`; files: the pieces written to each."""
    entries: dict[str, Any] = {
        name: {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "pieces": []}
        for name, tensor in tensors.items()
    }
    for file, pieces in files.items():
        for piece in pieces:
            entries[piece.name]["pieces"].append(piece_entry(file, piece))
    return entries


def piece_entry(file: str, piece: Piece) -> dict[str, Any]:
    """Return the manifest's entry of one piece."""
    return {"file": file, "start": piece.start, "stop": piece.stop, "sha256": piece.sha256}


def manifest_body(
    round_and_step: tuple[int, int | None],
    parts: int,
    provenance: Provenance | None,
    tensors: Mapping[str, Any],
    nodes: Mapping[int, Any],
    meta: Any,
) -> dict[str, Any]:
    """Return the content of a manifest.

    Args:
        round_and_step: completed rounds, and local steps of the next (None at the end of a round).
        parts: how many files hold what all nodes share.
        provenance: to which run it belongs.
        tensors: the entries of what all nodes share.
        nodes: by node, the entries of what it keeps to itself.
        meta: plain values, encoded.
    """
    round, step = round_and_step
    return {
        "format": FORMAT,
        "round": round,
        "step": step,
        "shards": parts,
        "run": provenance,
        "tensors": tensors,
        "nodes": {str(node): entries for node, entries in nodes.items()},
        "meta": meta,
    }


def write_manifest(folder: Path, body: Mapping[str, Any]) -> None:
    """Write the manifest, and wait until it is on the disk."""
    (folder / MANIFEST).write_bytes(with_digest(body))
    disk.sync(folder / MANIFEST)


# Reading


def read_part(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file of a checkpoint; DamagedCheckpoint unless its digest fits."""
    if not path.is_file():
        raise damaged_checkpoint(path, "is missing")
    try:
        return read_verified(path)
    except ValueError as error:
        raise damaged_checkpoint(path, str(error)) from error


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint. Its plain numbers are checked; `tensors`, `nodes` and `meta` are not yet.

    Raises:
        DamagedCheckpoint: it differs from what was written, or makes no sense.
        ValueError: it has a newer format.
    """
    body = read_part(folder / MANIFEST)
    try:
        _check_numbers(folder, body)
    except DamagedCheckpoint:
        raise
    except MALFORMED as error:
        raise malformed_manifest(folder, error) from error
    if body["format"] > FORMAT:
        raise ValueError(
            f"Checkpoint {folder} has format {body['format']}, this tailopt reads formats up to {FORMAT}. "
            "Upgrade tailopt-torch."
        )
    return body


def malformed_manifest(folder: Path, error: BaseException) -> DamagedCheckpoint:
    """Build the error for a manifest that cannot be understood."""
    return damaged_checkpoint(folder / MANIFEST, f"does not fit format {FORMAT} ({error!r:.300})")


def _check_numbers(folder: Path, body: Mapping[str, Any]) -> None:
    """Check types and ranges of the plain numbers, before memory or names are made from them."""
    if type(body["format"]) is not int or body["format"] < 1:
        raise ValueError(f"format {body['format']!r}")
    if body["format"] > FORMAT:
        return  # whatever else it says, this version cannot read it
    round, step, parts = body["round"], body["step"], body["shards"]
    name = folder_name(round, step)
    if is_checkpoint_name(folder.name) and folder.name.removesuffix(".old") != name:
        raise ValueError(f"it is the manifest of {name}")
    if type(parts) is not int or parts < 1:
        raise ValueError(f"shards {parts!r}")
    existing = sum(1 for _ in folder.glob("global-*.safetensors"))
    if parts != existing:  # before a name is made for each of possibly 10^9 files
        missing = next(file for i in range(existing + 1) if not (folder / (file := global_file(i, parts))).is_file())
        raise damaged_checkpoint(
            folder / missing, f"is missing; {parts} such files were written, and {existing} are there"
        )
    if body.get("run") is not None and (provenance := Provenance.from_json(body["run"])).history_chain.round > round:
        raise ValueError(f"the history of {provenance.history_chain.round} rounds after {round}")


def plan(body: Mapping[str, Any]) -> tuple[dict[Owner, dict[str, TensorInfo]], dict[str, FileContents]]:
    """Return the tensors of a checkpoint by owner, and the contents of each of its files.

    The pieces of every tensor must follow each other without gap or overlap, and cover its shape.
    """
    owners: dict[Owner, Mapping[str, Any]] = {None: body["tensors"]}
    owners |= {_node_number(node): entries for node, entries in body["nodes"].items()}
    files = {global_file(i, body["shards"]): FileContents(None, []) for i in range(body["shards"])}
    files |= {node_file(node): FileContents(node, []) for node in owners if node is not None}
    tensors: dict[Owner, dict[str, TensorInfo]] = {owner: {} for owner in owners}
    for owner, entries in owners.items():
        for name, entry in entries.items():
            info = tensors[owner][name] = _tensor_info(name, entry)
            end = 0
            for piece in sorted(entry["pieces"], key=lambda piece: int(piece["start"])):
                start, stop, sha256 = piece["start"], piece["stop"], piece["sha256"]
                if type(start) is not int or type(stop) is not int or type(sha256) is not str or stop < start:
                    raise TypeError(f"tensor {name!r} has the piece {piece}")
                if start != end or files[piece["file"]].owner != owner:
                    raise ValueError(f"tensor {name!r} has the piece {piece} where element {end} should follow")
                end = stop
                files[piece["file"]].pieces.append(Piece(name, *info, start, stop, sha256))
            if end != math.prod(info.shape):
                raise ValueError(f"tensor {name!r} has the shape {info.shape}, and its pieces end at {end}")
    return tensors, {file: FileContents(owner, in_file_order(pieces)) for file, (owner, pieces) in files.items()}


def _tensor_info(name: str, entry: Mapping[str, Any]) -> TensorInfo:
    info = TensorInfo(dtype_from_name(entry["dtype"]), tuple(entry["shape"]))
    if len(info.shape) > 64 or not all(type(size) is int and 0 <= size < 2**63 for size in info.shape):
        raise ValueError(f"tensor {name!r} has the shape {str(info.shape):.60}")
    return info


def _node_number(text: str) -> int:
    """Return a node's number if it is written as this module writes it: `int` alone also takes '+1', ' 1' and '١'."""
    if re.fullmatch(r"0|[1-9][0-9]{0,8}", text) is None:
        raise ValueError(f"node {text!r}")
    return int(text)


def check_files(folder: Path, files: Mapping[str, FileContents]) -> None:
    """Raise DamagedCheckpoint unless every file exists with its size, and no other does."""
    if extra := {p.name for p in folder.glob("*.safetensors")} - files.keys():
        raise damaged_checkpoint(folder, f"has files that the manifest does not list: {quoted_names(extra)}")
    for file, (_, pieces) in files.items():
        size = len(header(pieces)) + sum(piece.n_bytes for piece in pieces)
        if not (folder / file).is_file():
            names = quoted_names(piece.name for piece in pieces)
            raise damaged_checkpoint(folder / file, f"is missing; it held {names}")
        if (actual := (folder / file).stat().st_size) != size:
            raise damaged_checkpoint(folder / file, f"has {actual} bytes, and was written with {size}")
