"""One checkpoint by several writers in one folder, wholly or not at all.

    begin    one of them: a hidden folder
    write    everybody: its stretch of what all share, what it keeps to itself, and its part of the manifest
    finish   the one, when all are done: the parts become manifest.json, and the folder gets its name

Between the steps the writers must wait for each other; how is not decided here. What `write` returns from is on the
disk. The result is a checkpoint like any other: `checkpoints.load` puts the stretches together.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from tailopt.records import checkpoints, disk
from tailopt.records.history import decode, encode
from tailopt.records.ledger import Stamp
from tailopt.records.seals import sealed
from tailopt.records.shards import Piece, dtype_name, in_file_order, plain, split, write_file

PATIENCE = 10.0  # seconds until a folder that one machine made must be seen by the others


class Stretch(NamedTuple):
    """Some of a tensor's flat elements, from `start` on; shape: of the whole tensor."""

    elements: Tensor
    start: int
    shape: tuple[int, ...]


def begin(run_folder: str | os.PathLike[str], round: int, step: int | None) -> Path:
    """Make the hidden folder; its name is for all writers."""
    return checkpoints.place(run_folder, checkpoints.folder_name(round, step))


def write(
    fresh: Path,
    writer: int,
    writers: int,
    shared: Mapping[str, Stretch],
    own: Mapping[str, Tensor],
    meta: Mapping[str, Any],
) -> None:
    """Write one writer's files.

    Args:
        fresh: what `begin` returned.
        writer: its number, from 0; of `writers`.
        shared: by name, this writer's stretch of tensors that all share; no element belongs to two writers.
        own: what this writer keeps to itself.
        meta: plain values, for the function that `finish` is given.
    """
    await_folder(fresh)
    tensors = plain({name: s.elements for name, s in shared.items()}, "shared")
    pieces = [
        Piece(name, tensors[name].dtype, s.shape, s.start, s.start + s.elements.numel()) for name, s in shared.items()
    ]
    mine = plain(own, "own")
    files = checkpoints.global_file(writer, writers), checkpoints.node_file(writer)
    written = write_file(fresh / files[0], tensors, in_file_order(pieces))
    kept = write_file(fresh / files[1], mine, split(mine, 0, 1))
    part = {
        "shared": {
            p.name: {
                "dtype": dtype_name(p.dtype),
                "shape": list(p.shape),
                "pieces": [checkpoints.listed(files[0], p)],
            }
            for p in written
        },
        "own": checkpoints.entries(mine, {files[1]: kept}),
        "meta": encode(dict(meta), "meta"),
    }
    (fresh / _part(writer)).write_bytes(sealed(part))
    for file in (*files, _part(writer)):
        disk.sync(fresh / file)


def finish(
    fresh: Path,
    round: int,
    step: int | None,
    writers: int,
    meta: Callable[[list[dict[str, Any]]], Mapping[str, Any]],
    stamp: Stamp | None = None,
    check: Callable[[], None] = lambda: None,
) -> Path:
    """Make the parts of all writers one checkpoint, and give it its name.

    Args:
        meta: the writers' metas, by number -> the checkpoint's.
        stamp, check: as for `checkpoints.save`.
    """
    parts = [checkpoints.opened(fresh / _part(writer)) for writer in range(writers)]
    shared: dict[str, Any] = {}
    for part in parts:
        for name, entry in part["shared"].items():
            known = shared.setdefault(name, {**entry, "pieces": []})
            if (known["dtype"], known["shape"]) != (entry["dtype"], entry["shape"]):
                raise ValueError(
                    f"{name} is {known['dtype']} of shape {known['shape']} at one writer, {entry['dtype']} of shape "
                    f"{entry['shape']} at another."
                )
            known["pieces"].extend(entry["pieces"])
    body = {
        "format": checkpoints.FORMAT,
        "round": round,
        "step": step,
        "shards": writers,
        "run": stamp,
        "tensors": shared,
        "nodes": {str(writer): part["own"] for writer, part in enumerate(parts)},
        "meta": encode(dict(meta([decode(part["meta"]) for part in parts])), "meta"),
    }
    check()
    (fresh / checkpoints.MANIFEST).write_bytes(sealed(body))
    disk.sync(fresh / checkpoints.MANIFEST)
    for writer in range(writers):
        (fresh / _part(writer)).unlink()
    disk.sync(fresh)
    path = fresh.with_name(checkpoints.folder_name(round, step))
    check()
    checkpoints.put_in_place(fresh, path)
    return path


def discard(fresh: Path) -> None:
    """Remove what was begun and cannot be finished."""
    shutil.rmtree(fresh, ignore_errors=True)


def _part(writer: int) -> str:
    return f"part-{writer:05d}.json"


def await_folder(folder: Path) -> None:
    """Wait until a folder is seen here: network disks show a new one a little later to other machines."""
    until = time.monotonic() + PATIENCE
    while not folder.is_dir():
        if time.monotonic() > until:
            raise FileNotFoundError(
                f"There is no folder {folder} here, though node 0 made it. Give a run folder that all nodes share."
            )
        if folder.parent.is_dir():
            os.listdir(folder.parent)  # makes some network disks look again
        time.sleep(0.05)
