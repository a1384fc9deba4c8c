"""Checkpoints: tensors and plain values that come back to the bit, or are refused by name.

    checkpoints/round-000012/            the state after 12 rounds
    checkpoints/round-000012-step-0003/  12 rounds and 3 local steps of the next; sorts after round-000012
        global-00000-of-00001.safetensors    what all nodes share; several shards where several write
        node-0003.safetensors                what node 3 keeps to itself
        manifest.json                        written last

The manifest's first line is the digest of its other bytes, in every format. Those say the format, the round, `meta`,
of which run it is, by which configuration and after which history (`ledger.Stamp`; not in manifests from before), and
of each tensor type, shape and pieces: the file, the range of flat elements in it, and their sha256. A folder is
written under a hidden name and renamed when all of it is on the disk. `round-000012.old` is one that was being replaced
when a kill came; it counts as long as it is there. Nothing is ever unpickled.
"""

from __future__ import annotations

import math
import os
import re
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
from tailopt.records.history import decode, encode, known
from tailopt.records.ledger import Stamp
from tailopt.records.packing import pack, unpack
from tailopt.records.seals import sealed, unsealed
from tailopt.records.shards import (
    DamagedCheckpoint,
    Piece,
    damaged,
    digest,
    dtype_name,
    dtype_named,
    header,
    in_file_order,
    plain,
    read_file,
    split,
    write_file,
)

__all__ = [
    "FORMAT",
    "MANIFEST",
    "UNREADABLE",
    "DamagedCheckpoint",
    "Snapshot",
    "damaged",
    "digest",
    "every",
    "latest",
    "load",
    "load_latest",
    "pack",
    "prune",
    "save",
    "sealed",
    "unpack",
]

FORMAT = 1
FOLDER, MANIFEST = "checkpoints", "manifest.json"

_NAME = re.compile(r"round-(\d{6,})(?:-step-(\d{4,}))?(\.old)?")

_Owner = int | None  # a node's number; None for what all of them share


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds. Tensors are on the CPU, contiguous, and share nothing with each other."""

    round: int
    step: int | None
    tensors: dict[str, Tensor]
    nodes: dict[int, dict[str, Tensor]]
    meta: dict[str, Any]
    stamp: Stamp | None = None  # of which run; None in those from before


def _nothing() -> None:
    """Nobody else can write here."""


def save(
    run_folder: str | os.PathLike[str],
    round: int,
    tensors: Mapping[str, Tensor],
    nodes: Mapping[int, Mapping[str, Tensor]] | None = None,
    meta: Mapping[str, Any] | None = None,
    step: int | None = None,
    *,
    shards: int = 1,
    stamp: Stamp | None = None,
    check: Callable[[], None] = _nothing,
) -> Path:
    """Write a checkpoint, wholly or not at all, and return its folder.

    One of the same round and step is replaced, and there is no moment without a good one. Tensors that share memory
    are written one by one. One process writes at a time.

    Args:
        run_folder: the run's folder.
        round: completed rounds, 0 or more.
        tensors: what all nodes share, by name: plain tensors of any type and device.
        nodes: what each node keeps to itself, by its number.
        meta: plain values, as in a history; see `pack` for tuples, tensors and other keys.
        step: local steps done in the next round, 1 or more; None at the end of a round.
        shards: over how many files each shared tensor is spread.
        stamp: of which run it is.
        check: is called before the manifest is written and before the folder gets its name; raises where another
            process writes here now.

    Examples:
        >>> import tempfile
        >>> run = tempfile.mkdtemp()
        >>> path = save(run, 12, {"w": torch.tensor([1.0, 2.0])}, {3: {"steps": torch.tensor(60)}}, {"seed": 0})
        >>> path.name, sorted(p.name for p in path.iterdir())
        ('round-000012', ['global-00000-of-00001.safetensors', 'manifest.json', 'node-0003.safetensors'])
        >>> load(path).nodes
        {3: {'steps': tensor(60)}}
    """
    name = folder_name(round, step)
    whole_number("shards", shards, low=1, hint="Leave it out for one file.")
    for node in nodes or {}:
        whole_number("node", node, low=0, hint="Number the nodes from 0.")
    shared = plain(tensors, "tensors")
    own = {node: plain((nodes or {})[node], f"nodes[{node}]") for node in sorted(nodes or {})}
    plain_meta = encode(dict(meta or {}), "meta")

    fresh = place(run_folder, name)
    parent = fresh.parent
    try:
        sources = {global_file(i, shards): (shared, split(shared, i, shards)) for i in range(shards)}
        sources |= {node_file(node): (its, split(its, 0, 1)) for node, its in own.items()}
        written = {file: write_file(fresh / file, *source) for file, source in sources.items()}
        globals_ = {file: pieces for file, pieces in written.items() if file.startswith("global")}
        body = {
            "format": FORMAT,
            "round": round,
            "step": step,
            "shards": shards,
            "run": stamp,
            "tensors": entries(shared, globals_),
            "nodes": {str(node): entries(its, {(f := node_file(node)): written[f]}) for node, its in own.items()},
            "meta": plain_meta,
        }
        for file in written:  # after all are written, so that the disk may order them as it likes
            disk.sync(fresh / file)
        check()
        (fresh / MANIFEST).write_bytes(sealed(body))
        disk.sync(fresh / MANIFEST)
        disk.sync(fresh)
        check()
        put_in_place(fresh, parent / name)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    return parent / name


Wanted = Callable[[int | None, str, int, int], bool]


def load(path: str | os.PathLike[str], wanted: Wanted | None = None) -> Snapshot:
    """Read a checkpoint and check all of it.

    Args:
        path: its folder.
        wanted: (node or None for what all share, name, start, stop) -> whether to read that range of a tensor's flat
            elements, for readers that need a part. The other elements are undefined and unchecked.

    Raises:
        DamagedCheckpoint: a file or a tensor is not what was written; the message says which.
        ValueError: it was written in a newer format.
        FileNotFoundError: there is no such folder.
    """
    folder = Path(path)
    if not folder.is_dir():
        near = [p.name for p in in_order(folder.parent)]
        raise FileNotFoundError(
            f"There is no checkpoint {folder}; beside it there are: {known(near)}. Pass one of these."
        )
    body = manifest(folder)
    try:
        shapes, files = _plan(body)
        meta = decode(body["meta"])
        if type(meta) is not dict:
            raise TypeError(f"meta is {meta!r}")
        _check_files(folder, files)
        # only now, when the sizes on the disk are those of the shapes, is there any memory for them
        tensors = {
            owner: {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in own.items()}
            for owner, own in shapes.items()
        }
    except DamagedCheckpoint:
        raise
    except UNREADABLE as error:
        raise damaged(folder / MANIFEST, f"does not fit format {FORMAT} ({error!r:.300})") from error
    stamp = None if body.get("run") is None else Stamp.stated(body["run"])
    snapshot = Snapshot(body["round"], body["step"], tensors.pop(None), {}, meta, stamp)
    snapshot.nodes.update((node, its) for node, its in tensors.items() if node is not None)
    for file, (node, pieces) in files.items():
        own = snapshot.tensors if node is None else snapshot.nodes[node]
        skip = {p.name for p in pieces if wanted is not None and not wanted(node, p.name, p.start, p.stop)}
        if not pieces or len(skip) < len(pieces):
            read_file(folder / file, own, pieces, skip)
    return snapshot


def every(run_folder: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints of a run, sound or not, oldest first."""
    return in_order(Path(run_folder) / FOLDER)


def latest(run_folder: str | os.PathLike[str]) -> Path | None:
    """The newest checkpoint of a run, sound or not; None where there is none."""
    return next(reversed(in_order(Path(run_folder) / FOLDER)), None)


def load_latest(
    run_folder: str | os.PathLike[str], check: Callable[[Snapshot, Path], None] | None = None
) -> Snapshot | None:
    """The newest checkpoint that is sound; None where there is none at all.

    Damaged newer ones are passed over with a warning. Where all of them are damaged that is an error: to begin again is
    for the user to decide.

    check: is given the newest that can be read; one for which it raises DamagedCheckpoint is passed over too.
    """
    paths = in_order(Path(run_folder) / FOLDER)
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
            f"None of the checkpoints in {Path(run_folder) / FOLDER} is sound: {known(p.name for p in paths)}. Bring "
            "one back from a copy, or remove the folder to begin again."
        )
    return None


def prune(run_folder: str | os.PathLike[str], keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, and what killed writes left behind.

    The newest at the end of a round stays too, however many in the middle of one came after it: another number of
    nodes can go on from nothing else.
    """
    whole_number("keep", keep, low=1, hint="Keep at least the newest.")
    parent = Path(run_folder) / FOLDER
    paths = in_order(parent)
    for path in paths:
        if path.suffix == ".old" and path.with_suffix("") in paths:
            disk.remove(path)  # it was replaced; the kill came before its removal
    paths = in_order(parent)
    whole = [path for path in paths if at(path)[1] == 0]
    for path in paths[:-keep]:
        if path not in whole[-1:]:
            disk.remove(path)
    for leftover in parent.glob(".round-*"):
        shutil.rmtree(leftover)


def rewind(run_folder: str | os.PathLike[str], round: int, step: int = 0) -> None:
    """Remove the checkpoints after a moment: damaged ones that were passed over must not outlive the good ones."""
    for path in in_order(Path(run_folder) / FOLDER):
        if at(path) > (round, step):
            disk.remove(path)


# Names and places


def at(path: Path) -> tuple[int, int]:
    """The moment of a checkpoint, by its name: completed rounds, and local steps of the next."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def folder_name(round: int, step: int | None) -> str:
    """The name of a checkpoint."""
    whole_number("round", round, low=0, hint="Pass the number of completed rounds.")
    if step is None:
        return f"round-{round:06d}"
    whole_number("step", step, low=1, hint="Leave it out at the end of a round.")
    return f"round-{round:06d}-step-{step:04d}"


def global_file(index: int, shards: int) -> str:
    """The file of what all share, or of a part of it."""
    return f"global-{index:05d}-of-{shards:05d}.safetensors"


def node_file(node: int) -> str:
    """The file of what a node keeps to itself."""
    return f"node-{node:04d}.safetensors"


def place(run_folder: str | os.PathLike[str], name: str) -> Path:
    """A fresh hidden folder, in which a checkpoint of that name is to be written."""
    parent = Path(run_folder) / FOLDER
    if not parent.is_dir():
        parent.mkdir(parents=True)
        disk.sync(parent.parent)
    fresh = disk.hidden(parent / name)
    fresh.mkdir()
    return fresh


def in_order(parent: Path) -> list[Path]:
    """Checkpoints, oldest first; of two of one moment the one that was being replaced."""
    found = []
    for path in parent.iterdir() if parent.is_dir() else ():
        if (match := _NAME.fullmatch(path.name)) and path.is_dir():
            round, step, old = match.groups()
            found.append(((int(round), int(step or 0), old is None), path))
    return [path for _, path in sorted(found)]


def put_in_place(fresh: Path, path: Path) -> None:
    """Rename a finished folder to its name. The one there is renamed, to a name that counts, until that is done."""
    old = path.with_name(path.name + ".old")
    if path.exists():
        if old.exists():
            disk.remove(old)
        os.replace(path, old)
    os.replace(fresh, path)
    disk.sync(path.parent)
    if old.exists():
        disk.remove(old)


def _check_files(folder: Path, files: Mapping[str, tuple[_Owner, list[Piece]]]) -> None:
    """Every file there, of its size, and no other."""
    if extra := {p.name for p in folder.glob("*.safetensors")} - files.keys():
        raise damaged(folder, f"has files that the manifest does not list: {known(extra)}")
    for file, (_, pieces) in files.items():
        size = len(header(pieces)) + sum(piece.bytes.stop - piece.bytes.start for piece in pieces)
        if not (folder / file).is_file():
            raise damaged(folder / file, f"is missing; it held {known(piece.name for piece in pieces)}")
        if (found := (folder / file).stat().st_size) != size:
            raise damaged(folder / file, f"has {found} bytes, and was written with {size}")


# The manifest


def entries(tensors: Mapping[str, Tensor], files: Mapping[str, list[Piece]]) -> dict[str, Any]:
    """What the manifest says of tensors, in the order in which they were given."""
    found: dict[str, Any] = {
        name: {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "pieces": []}
        for name, tensor in tensors.items()
    }
    for file, pieces in files.items():
        for p in pieces:
            found[p.name]["pieces"].append(listed(file, p))
    return found


def listed(file: str, piece: Piece) -> dict[str, Any]:
    """What the manifest says of one piece."""
    return {"file": file, "start": piece.start, "stop": piece.stop, "sha256": piece.sha256}


def opened(path: Path) -> dict[str, Any]:
    """What was sealed in a file of a checkpoint."""
    if not path.is_file():
        raise damaged(path, "is missing")
    try:
        return unsealed(path)
    except ValueError as error:
        raise damaged(path, str(error)) from error


def manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint; `meta` as it was encoded, and tensors as they are listed, not looked at yet."""
    body = opened(folder / MANIFEST)
    try:
        _check_manifest(folder, body)
    except DamagedCheckpoint:
        raise
    except UNREADABLE as error:
        raise damaged(folder / MANIFEST, f"does not fit format {FORMAT} ({error!r:.300})") from error
    if body["format"] > FORMAT:
        raise ValueError(
            f"Checkpoint {folder} has format {body['format']}, this tailopt reads formats up to {FORMAT}. "
            "Upgrade tailopt-torch."
        )
    return body


# What a sealed manifest of somebody who means harm, or of a bug, can end in while it is understood.
UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError, MemoryError)


def _check_manifest(folder: Path, body: Mapping[str, Any]) -> None:
    """Types and ranges of the plain numbers, before anything is made by them."""
    if type(body["format"]) is not int or body["format"] < 1:
        raise ValueError(f"format {body['format']!r}")
    if body["format"] > FORMAT:
        return
    round, step, shards = body["round"], body["step"], body["shards"]
    name = folder_name(round, step)
    match = _NAME.fullmatch(folder.name)
    if match is not None and folder.name.removesuffix(".old") != name:
        raise ValueError(f"it is the manifest of {name}")
    if type(shards) is not int or shards < 1:
        raise ValueError(f"shards {shards!r}")
    held = sum(1 for _ in folder.glob("global-*.safetensors"))
    if shards != held:  # also before a name is made for each
        missing = next(file for i in range(held + 1) if not (folder / (file := global_file(i, shards))).is_file())
        raise damaged(folder / missing, f"is missing; {shards} such files were written, and {held} are there")
    if body.get("run") is not None and (stamp := Stamp.stated(body["run"])).history.round > round:
        raise ValueError(f"the history of {stamp.history.round} rounds after {round}")


_Shape = tuple[torch.dtype, tuple[int, ...]]


def _plan(body: Mapping[str, Any]) -> tuple[dict[_Owner, dict[str, _Shape]], dict[str, tuple[_Owner, list[Piece]]]]:
    """Types and shapes of all tensors by owner, and what stands in each file, in its order."""
    owners: dict[_Owner, Mapping[str, Any]] = {None: body["tensors"]}
    owners |= {int(_whole(node)): entries for node, entries in body["nodes"].items()}
    files: dict[str, tuple[_Owner, list[Piece]]]
    files = {global_file(i, body["shards"]): (None, []) for i in range(body["shards"])}
    files |= {node_file(node): (node, []) for node in owners if node is not None}
    shapes: dict[_Owner, dict[str, _Shape]] = {owner: {} for owner in owners}
    for owner, entries in owners.items():
        for name, entry in entries.items():
            dtype, shape = dtype_named(entry["dtype"]), tuple(entry["shape"])
            if len(shape) > 64 or not all(type(size) is int and 0 <= size < 2**63 for size in shape):
                raise ValueError(f"tensor {name!r} has the shape {str(shape):.60}")
            shapes[owner][name] = dtype, shape
            end = 0
            for part in sorted(entry["pieces"], key=lambda part: int(part["start"])):
                start, stop, digest = part["start"], part["stop"], part["sha256"]
                if type(start) is not int or type(stop) is not int or type(digest) is not str or stop < start:
                    raise TypeError(f"tensor {name!r} has the piece {part}")
                if start != end or files[part["file"]][0] != owner:
                    raise ValueError(f"tensor {name!r} has the piece {part} where element {end} should follow")
                end = stop
                files[part["file"]][1].append(Piece(name, dtype, shape, start, end, digest))
            if end != math.prod(shape):
                raise ValueError(f"tensor {name!r} has the shape {shape}, and its pieces end at {end}")
    return shapes, {file: (owner, in_file_order(pieces)) for file, (owner, pieces) in files.items()}


def _whole(number: str) -> str:
    """A node's number as it is written: no sign, no blanks, no other digits than these."""
    if re.fullmatch(r"0|[1-9][0-9]{0,8}", number) is None:
        raise ValueError(f"node {number!r}")
    return number
