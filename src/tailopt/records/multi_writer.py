"""One checkpoint by several writers in one folder, in full or not at all.

    begin    one writer:  creates a hidden folder
    write    all writers: each its ranges of what all share, what it keeps to itself, and its part of the manifest
    finish   one writer:  when all are done, joins the parts into manifest.json and gives the folder its name

Between these steps the writers must wait for each other; how they do that is not decided here. What `write` wrote is on
the disk when it returns. The result is a checkpoint like any other: `checkpoints.load` joins the ranges.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from tailopt.records import disk
from tailopt.records.checked_json import with_digest
from tailopt.records.checkpoint_folders import begin_folder, commit_folder, folder_name
from tailopt.records.checkpoints import CheckpointOrigin
from tailopt.records.history import decode, encode
from tailopt.records.manifest import (
    global_file,
    manifest_body,
    node_file,
    piece_entry,
    read_part,
    tensor_entries,
    write_manifest,
)
from tailopt.records.safetensors_io import Piece, in_file_order, pieces_of_file, write_file
from tailopt.records.tensor_bytes import dense_cpu_tensors, dtype_name

FOLDER_TIMEOUT_S = 10.0  # until a folder that one machine made must be visible on the others


class ElementRange(NamedTuple):
    """Some of a tensor's flat elements, from `start` on; shape: of the whole tensor."""

    elements: Tensor
    start: int
    shape: tuple[int, ...]


def begin(run_folder: str | os.PathLike[str], round: int, step: int | None) -> Path:
    """Create the hidden folder; all writers need its path."""
    return begin_folder(run_folder, folder_name(round, step))


def write(
    hidden: Path,
    writer: int,
    writers: int,
    shared: Mapping[str, ElementRange],
    local: Mapping[str, Tensor],
    meta: Mapping[str, Any],
) -> None:
    """Write one writer's files.

    Args:
        hidden: what `begin` returned.
        writer: its number, from 0; of `writers`.
        shared: by name, this writer's range of tensors that all share; no element belongs to two writers.
        local: what this writer keeps to itself.
        meta: plain values, for the function that `finish` is given.
    """
    await_folder(hidden)
    tensors = dense_cpu_tensors({name: part.elements for name, part in shared.items()}, "shared")
    pieces = [
        Piece(name, tensors[name].dtype, part.shape, part.start, part.start + part.elements.numel())
        for name, part in shared.items()
    ]
    local_tensors = dense_cpu_tensors(local, "own")
    global_name, node_name, part_name = global_file(writer, writers), node_file(writer), _part_file(writer)
    shared_pieces = write_file(hidden / global_name, tensors, in_file_order(pieces))
    local_pieces = write_file(hidden / node_name, local_tensors, pieces_of_file(local_tensors, 0, 1))
    part = {
        "shared": {
            p.name: {"dtype": dtype_name(p.dtype), "shape": list(p.shape), "pieces": [piece_entry(global_name, p)]}
            for p in shared_pieces
        },
        "own": tensor_entries(local_tensors, {node_name: local_pieces}),
        "meta": encode(dict(meta), "meta"),
    }
    (hidden / part_name).write_bytes(with_digest(part))
    for file in (global_name, node_name, part_name):
        disk.sync(hidden / file)


def finish(
    hidden: Path,
    round: int,
    step: int | None,
    writers: int,
    meta: Callable[[list[dict[str, Any]]], Mapping[str, Any]],
    origin: CheckpointOrigin | None = None,
) -> Path:
    """Join the parts of all writers into one checkpoint, and give it its name.

    Args:
        hidden: what `begin` returned.
        round: completed rounds.
        step: local steps done in the next round; None at the end of a round.
        writers: how many have written.
        meta: the writers' metas, by number -> the checkpoint's.
        origin: as for `checkpoints.save`.
    """
    origin = origin or CheckpointOrigin()
    parts = [read_part(hidden / _part_file(writer)) for writer in range(writers)]
    shared: dict[str, Any] = {}
    for part in parts:
        for name, entry in part["shared"].items():
            joined = shared.setdefault(name, {**entry, "pieces": []})
            if (joined["dtype"], joined["shape"]) != (entry["dtype"], entry["shape"]):
                raise ValueError(
                    f"{name} is {joined['dtype']} of shape {joined['shape']} at one writer, {entry['dtype']} of shape "
                    f"{entry['shape']} at another."
                )
            joined["pieces"].extend(entry["pieces"])
    local = {writer: part["own"] for writer, part in enumerate(parts)}
    joined_meta = encode(dict(meta([decode(part["meta"]) for part in parts])), "meta")
    origin.check_lock()
    write_manifest(hidden, manifest_body((round, step), writers, origin.provenance, shared, local, joined_meta))
    # The parts go only now: a checkpoint that has its manifest does not need them.
    for writer in range(writers):
        (hidden / _part_file(writer)).unlink()
    disk.sync(hidden)
    path = hidden.with_name(folder_name(round, step))
    origin.check_lock()
    commit_folder(hidden, path)
    return path


def discard(hidden: Path) -> None:
    """Remove a folder that was begun and cannot be finished."""
    shutil.rmtree(hidden, ignore_errors=True)


def await_folder(folder: Path) -> None:
    """Wait until a folder is visible here: network disks show a new folder to other machines with some delay."""
    deadline = time.monotonic() + FOLDER_TIMEOUT_S
    while not folder.is_dir():
        if time.monotonic() > deadline:
            raise FileNotFoundError(
                f"There is no folder {folder} here, though node 0 made it. Give a run folder that all nodes share."
            )
        if folder.parent.is_dir():
            os.listdir(folder.parent)  # makes some network disks refresh their cache
        time.sleep(0.05)


def _part_file(writer: int) -> str:
    return f"part-{writer:05d}.json"
