"""Checkpoints: tensors and plain values that come back bit for bit, or raise an error that names the damage.

    checkpoints/round-000012/
        global-00000-of-00001.safetensors    what all nodes share; several parts if several processes write
        node-0003.safetensors                what node 3 keeps to itself
        manifest.json                        written last; see `manifest.py`

A checkpoint appears in full or not at all (`checkpoint_folders.py`). Nothing is ever unpickled.

`torch.distributed.checkpoint` also writes sharded checkpoints, but has no digests, and its metadata file is a pickle.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tailopt.arguments import whole_number
from tailopt.records import disk
from tailopt.records.checkpoint_folders import (
    FOLDER,
    begin_folder,
    commit_folder,
    describe_last_checkpoint,
    folder_name,
    in_order,
    latest,
    list_checkpoints,
    prune,
    rewind,
    round_and_step,
)
from tailopt.records.history import decode, encode, quoted_names
from tailopt.records.ledger import Provenance
from tailopt.records.manifest import (
    MALFORMED,
    MANIFEST,
    check_files,
    global_file,
    malformed_manifest,
    manifest_body,
    node_file,
    plan,
    read_manifest,
    tensor_entries,
    write_manifest,
)
from tailopt.records.pytree import pack, unpack
from tailopt.records.safetensors_io import (
    DamagedCheckpoint,
    damaged_checkpoint,
    pieces_of_file,
    read_file,
    write_file,
)
from tailopt.records.tensor_bytes import dense_cpu_tensors, digest

__all__ = [
    "FOLDER",
    "MALFORMED",
    "MANIFEST",
    "CheckpointOrigin",
    "DamagedCheckpoint",
    "Snapshot",
    "damaged_checkpoint",
    "describe_last_checkpoint",
    "digest",
    "folder_name",
    "latest",
    "list_checkpoints",
    "load",
    "load_latest",
    "pack",
    "prune",
    "read_manifest",
    "rewind",
    "round_and_step",
    "save",
    "unpack",
]


@dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint. Tensors are on the CPU, contiguous, and share no memory with each other."""

    round: int
    step: int | None
    tensors: dict[str, Tensor]
    nodes: dict[int, dict[str, Tensor]]
    meta: dict[str, Any]
    provenance: Provenance | None = None  # to which run it belongs; None in checkpoints by older versions


def _never_lost() -> None:
    """Stand in for the check of a lock where no other process can write."""


@dataclass(frozen=True)
class CheckpointOrigin:
    """Where a checkpoint comes from: its run, and a process that holds the run's lock; see `Run.checkpoint_origin`.

    Args:
        provenance: to which run, configuration and history the checkpoint belongs.
        check_lock: raises if another process writes here now. It is called before the manifest is written and again
            before the folder gets its name.
    """

    provenance: Provenance | None = None
    check_lock: Callable[[], None] = _never_lost


def save(
    run_folder: str | os.PathLike[str],
    round: int,
    tensors: Mapping[str, Tensor],
    nodes: Mapping[int, Mapping[str, Tensor]] | None = None,
    meta: Mapping[str, Any] | None = None,
    step: int | None = None,
    *,
    parts: int = 1,
    origin: CheckpointOrigin | None = None,
) -> Path:
    """Write a checkpoint, in full or not at all, and return its folder.

    A checkpoint of the same round and step is replaced; at every moment one of the two can be read. Tensors that share
    memory are written separately. Only one process may write at a time.

    Args:
        run_folder: the run's folder.
        round: completed rounds, 0 or more.
        tensors: what all nodes share, by name: plain tensors of any dtype and device.
        nodes: what each node keeps to itself, by its number.
        meta: plain values, as in a history; see `pack` for tuples, tensors and other keys.
        step: local steps done in the next round, 1 or more; None at the end of a round.
        parts: over how many files each shared tensor is spread.
        origin: of which run the checkpoint is, and whether this process may still write.

    Examples:
        >>> import tempfile
        >>> run = tempfile.mkdtemp()
        >>> path = save(run, 12, {"w": torch.tensor([1.0, 2.0])}, {3: {"steps": torch.tensor(60)}}, {"seed": 0})
        >>> path.name, sorted(p.name for p in path.iterdir())
        ('round-000012', ['global-00000-of-00001.safetensors', 'manifest.json', 'node-0003.safetensors'])
        >>> load(path).nodes
        {3: {'steps': tensor(60)}}
    """
    name, origin = folder_name(round, step), origin or CheckpointOrigin()
    whole_number("parts", parts, low=1, hint="Leave it out for one file.")
    for node in nodes or {}:
        whole_number("node", node, low=0, hint="Number the nodes from 0.")
    # everything that can be wrong with the arguments is found before there is a folder
    shared = dense_cpu_tensors(tensors, "tensors")
    local = {node: dense_cpu_tensors((nodes or {})[node], f"nodes[{node}]") for node in sorted(nodes or {})}
    plain_meta = encode(dict(meta or {}), "meta")

    hidden = begin_folder(run_folder, name)
    path = hidden.with_name(name)
    try:
        global_pieces = {
            (file := global_file(i, parts)): write_file(hidden / file, shared, pieces_of_file(shared, i, parts))
            for i in range(parts)
        }
        node_entries = {}
        for node, its_tensors in local.items():
            file = node_file(node)
            pieces = write_file(hidden / file, its_tensors, pieces_of_file(its_tensors, 0, 1))
            node_entries[node] = tensor_entries(its_tensors, {file: pieces})
        # after all are written, so that the disk may order the writes as it likes
        for file in (*global_pieces, *map(node_file, local)):
            disk.sync(hidden / file)
        origin.check_lock()
        entries = tensor_entries(shared, global_pieces)
        write_manifest(
            hidden, manifest_body((round, step), parts, origin.provenance, entries, node_entries, plain_meta)
        )
        disk.sync(hidden)
        origin.check_lock()
        commit_folder(hidden, path)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    return path


Wanted = Callable[[int | None, str, int, int], bool]


def load(path: str | os.PathLike[str], wanted: Wanted | None = None) -> Snapshot:
    """Read a checkpoint and check all of it.

    Args:
        path: its folder.
        wanted: (node, or None for what all share; name; start; stop) -> whether to read that range of a tensor's flat
            elements, for readers that need only a part. The other elements are undefined and unchecked.

    Raises:
        DamagedCheckpoint: a file or a tensor differs from what was written; the message says which.
        ValueError: it was written in a newer format.
        FileNotFoundError: there is no such folder.
    """
    folder = Path(path)
    if not folder.is_dir():
        others = quoted_names(p.name for p in in_order(folder.parent))
        raise FileNotFoundError(f"There is no checkpoint {folder}; beside it there are: {others}. Pass one of these.")
    body = read_manifest(folder)
    try:
        infos, files = plan(body)
        meta = decode(body["meta"])
        if type(meta) is not dict:
            raise TypeError(f"meta is {meta!r}")
        check_files(folder, files)
        # Memory is allocated only now, when the sizes on the disk are known to be those of the shapes.
        tensors = {
            owner: {name: torch.empty(info.shape, dtype=info.dtype) for name, info in its_infos.items()}
            for owner, its_infos in infos.items()
        }
    except DamagedCheckpoint:
        raise
    except MALFORMED as error:
        raise malformed_manifest(folder, error) from error
    provenance = None if body.get("run") is None else Provenance.from_json(body["run"])
    for file, (owner, pieces) in files.items():
        skip = {p.name for p in pieces if wanted is not None and not wanted(owner, p.name, p.start, p.stop)}
        if not pieces or len(skip) < len(pieces):
            read_file(folder / file, tensors[owner], pieces, skip)
    shared = tensors.pop(None)
    nodes = {node: its_tensors for node, its_tensors in tensors.items() if node is not None}
    return Snapshot(body["round"], body["step"], shared, nodes, meta, provenance)


def load_latest(
    run_folder: str | os.PathLike[str], check: Callable[[Snapshot, Path], None] | None = None
) -> Snapshot | None:
    """Return the newest sound checkpoint; None if there is none at all.

    Damaged newer ones are skipped with a warning. If all are damaged, that is an error: only the user can decide to
    begin again.

    check: is called with the newest that can be read; one for which it raises DamagedCheckpoint is skipped too.
    """
    paths = list_checkpoints(run_folder)
    for path in reversed(paths):
        try:
            snapshot = load(path)
            if check is not None:
                check(snapshot, path)
            return snapshot
        except DamagedCheckpoint as error:
            warnings.warn(f"Checkpoint {path} is passed over. {error}", UserWarning, stacklevel=2)
    if paths:
        raise DamagedCheckpoint(
            f"None of the checkpoints in {Path(run_folder) / FOLDER} is sound: {quoted_names(p.name for p in paths)}. "
            "Bring one back from a copy, or remove the folder to begin again."
        )
    return None
