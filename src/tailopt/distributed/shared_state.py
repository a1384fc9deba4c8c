"""What all nodes share, as the parts of a checkpoint: weights, buffers, outer state and average.

Every node writes its partition; a checkpoint has the whole tensors, as a simulation writes them, so that a run can go
on with another number of nodes. Where the ranks of a node shard its parameters, each rank writes its own shards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tailopt.clipping.dtensor import is_dtensor
from tailopt.distributed.all_ranks import AllRanks
from tailopt.records import checkpoints
from tailopt.records.checkpoints import Snapshot
from tailopt.records.history import child_path, decode
from tailopt.records.model_check import ModelLayout, TensorSpec, check_same_model
from tailopt.records.multi_writer import ElementRange
from tailopt.records.pytree import pack, tensor_names, unpack
from tailopt.rounds.auto_thresholds import checked_state
from tailopt.rules.torch_optim import CHANGED_OPTIONS_KEY

if TYPE_CHECKING:
    from tailopt.distributed.node import Node


class NodeCountDiffers(Exception):
    """The mid-round checkpoint was written by a different number of nodes."""


class Place(NamedTuple):
    """A rank's part of a tensor: the shape of the whole, where the part begins, whether this rank writes it."""

    shape: tuple[int, ...]
    start: int
    writes: bool


def tensor_places(node: Node) -> list[Place]:
    """Where this rank's part of every parameter lies. What all ranks of a node have is written by the first of them."""
    exchange, places = node.exchange, []
    for i, (name, p, local) in enumerate(zip(exchange.names, node.params, exchange.shapes, strict=True)):
        before = exchange.elements_before(i)
        if before is None:
            places.append(Place(tuple(local), 0, exchange.rank_transport is None or exchange.rank_transport.node == 0))
            continue
        assert is_dtensor(p)
        if not all(placement.is_replicate() or placement.is_shard(0) for placement in p.placements):
            raise ValueError(
                f"Invalid run: {name} is sharded as {p.placements}; only parameters cut along their first dimension "
                "can be written to checkpoints. Shard it so, or leave `run` out."
            )
        places.append(Place((*p.shape, *local[p.dim() :]), before, True))
    return places


def shared_ranges_and_meta(node: Node) -> tuple[dict[str, ElementRange], dict[str, Any]]:
    """This node's partition of weights, outer state and average, and the plain rest of the outer state.

    Each tensor of the outer state either has one element per weight and is partitioned like the weights, or is a 0-dim
    scalar equal on all segments of a parameter, written only by the rank that has the parameter's first segment. Node 0
    writes buffers and empty tensors.
    """
    exchange, parts, plain, where = node.exchange, {}, {}, tensor_places(node)
    scalars: list[str] = []
    changed_options: Any = None
    for s, state in zip(exchange.own_segments, node.outer_state, strict=True):
        name = exchange.names[s.tensor]
        shape, before, writes = where[s.tensor]
        start = before + s.offset
        if not writes:
            continue
        parts[child_path("global.weights", name)] = ElementRange(node.x[s.start : s.stop], start, shape)
        if node.average is not None:
            parts[child_path("global.average", name)] = ElementRange(node.average[s.start : s.stop], start, shape)
        state = dict(state)
        changed_options = state.pop(CHANGED_OPTIONS_KEY, changed_options)
        path = child_path("global.outer", name)
        tensors, plain[name] = pack(state, path)
        for key, tensor in tensors.items():
            if tuple(tensor.shape) == (s.count,):
                parts[key] = ElementRange(tensor, start, shape)
            elif tensor.dim() == 0:
                scalars.append(key)
                if start == 0:
                    parts[key] = ElementRange(tensor, 0, ())
            else:
                raise TypeError(
                    f"{key} is a tensor of shape {tuple(tensor.shape)} for {s.count} weights; only outer "
                    "state with one element for each weight, or with a single one, can be saved. Use another outer "
                    "optimizer, or leave `run` out."
                )
    if exchange.transport.node == 0 and (exchange.rank_transport is None or exchange.rank_transport.node == 0):
        for name, (shape, _, _) in zip(exchange.names, where, strict=True):
            if not math.prod(shape):
                empty = ElementRange(node.x[:0], 0, shape)
                parts[child_path("global.weights", name)] = empty
                if node.average is not None:
                    parts[child_path("global.average", name)] = empty
        for name, buffer in node.buffers_at_round_start().items():
            parts[child_path("global.buffers", name)] = ElementRange(buffer, 0, tuple(buffer.shape))
    return parts, {"outer": plain, "single": scalars, "group": changed_options}


def merged_meta(
    names: Sequence[str], buffers: Sequence[str], average: bool, parts: list[dict[str, Any]]
) -> dict[str, Any]:
    """The meta of the checkpoint from those of all ranks; `global` is what a simulation writes."""
    outer: dict[str, Any] = {name: {} for name in names}
    for part in parts:
        for name, packed in part["outer"].items():
            if outer[name] not in ({}, packed):
                raise ValueError(f"The outer state of {name} differs between nodes: {outer[name]} and {packed}.")
            outer[name] = packed
    changed_options = [part["group"] for part in parts if part["group"] is not None]
    if changed_options:
        outer[names[0]] = {**outer[names[0]], CHANGED_OPTIONS_KEY: changed_options[0]}

    def tensors(kind: str, of: Sequence[str]) -> dict[str, Any]:
        return {name: {"$tensor": child_path(f"global.{kind}", name)} for name in of}

    return {
        "global": {
            "weights": tensors("weights", names),
            "buffers": tensors("buffers", buffers),
            "outer": outer,
            "average": tensors("average", names) if average else None,
        },
        "single": sorted({key for part in parts for key in part["single"]}),
        # by number of the rank: its own state, and the whole shapes of the tensors in it that are sharded
        "nodes": {str(k): part["own"] for k, part in enumerate(parts)},
        "cut": {str(k): part["cut"] for k, part in enumerate(parts)},
    }


def read(path: Path, node: Node) -> Snapshot:
    """What this node needs of a checkpoint, checked: all weights, its partition of the outer state, its local state."""
    exchange, transport = node.exchange, node.exchange.transport
    ranks = AllRanks(transport, exchange.rank_transport)
    body = checkpoints.read_manifest(path)
    meta = decode(body["meta"])
    checked_state(meta.get("thresholds", {}))
    if body["step"] and meta["writers"] != transport.nodes:
        raise NodeCountDiffers(
            f"it was written by {meta['writers']} nodes in the middle of a round, and there are {transport.nodes} now, "
            "which can only go on from the end of one"
        )
    if (per_node := meta.get("ranks", 1)) != ranks.ranks_per_node:
        raise ValueError(
            f"The checkpoint was written by nodes of {_ranks(per_node)}, and there are "
            f"{_ranks(ranks.ranks_per_node)} per node now. Resume with the same."
        )
    where = tensor_places(node)
    check_same_model(*_layouts(body, meta, node, where))
    segments = {exchange.names[s.tensor]: s for s in exchange.own_segments}
    ranges: dict[str, tuple[int, int]] = {}
    rows = zip(exchange.names, exchange.layout.offsets, exchange.layout.sizes, where, strict=True)
    for name, offset, size, place in rows:
        keys = [key for key in tensor_names(meta["global"]["outer"][name]) if key not in meta["single"]]
        keys += [child_path("global.average", name)]
        first = place.start - offset
        segment = segments.get(name)
        own_range = (first + segment.start, first + segment.stop) if segment is not None else (0, 0)
        ranges |= dict.fromkeys(keys, own_range)
        ranges[child_path("global.weights", name)] = place.start, place.start + size

    def wanted(owner: int | None, name: str, start: int, stop: int) -> bool:
        if owner is not None:
            return owner == ranks.number
        low, high = ranges.get(name, (start, stop))
        return start == stop or (start < high and low < stop)

    return checkpoints.load(path, wanted)


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"


def _layouts(
    body: Mapping[str, Any], meta: Mapping[str, Any], node: Node, where: Sequence[Place]
) -> tuple[ModelLayout, ModelLayout]:
    """Return the layouts of a checkpoint and of the model that continues from it; types are not compared."""
    saved, exchange = meta["global"], node.exchange

    def saved_specs(kind: str) -> dict[str, TensorSpec]:
        keys = {name: child_path(f"global.{kind}", name) for name in saved[kind]}
        return {name: (None, tuple(body["tensors"][key]["shape"])) for name, key in keys.items()}

    weights: dict[str, TensorSpec] = {n: (None, tuple(p.shape)) for n, p in zip(exchange.names, where, strict=True)}
    buffers: dict[str, TensorSpec] = {name: (None, tuple(b.shape)) for name, b in node.buffers_at_round_start().items()}
    then = ModelLayout(saved_specs("weights"), saved_specs("buffers"), saved["average"] is not None)
    return then, ModelLayout(weights, buffers, node.average is not None)


@torch.no_grad()
def restore(snapshot: Snapshot, node: Node) -> dict[str, Any] | None:
    """Copy what all share into a node; returns its local state, None where it did not write the checkpoint."""
    exchange, tensors, where = node.exchange, snapshot.tensors, tensor_places(node)
    ranks = AllRanks(exchange.transport, exchange.rank_transport)
    saved, scalars = snapshot.meta["global"], set(snapshot.meta["single"])
    views = exchange.layout.views(node.x, exchange.shapes)
    for name, view, place in zip(exchange.names, views, where, strict=True):
        part = tensors[child_path("global.weights", name)].reshape(-1)[place.start : place.start + view.numel()]
        view.copy_(part.view(view.shape))
    for i, s in enumerate(exchange.own_segments):
        name = exchange.names[s.tensor]
        start = where[s.tensor].start + s.offset
        own_range = slice(start, start + s.count)
        packed = {key: value for key, value in saved["outer"][name].items() if key != CHANGED_OPTIONS_KEY}
        parts = {
            key: tensors[key].clone() if key in scalars else tensors[key].reshape(-1)[own_range].clone()
            for key in tensor_names(packed)
        }
        node.outer_state[i] = unpack(parts, packed)
        if i == 0 and (changed_options := saved["outer"][exchange.names[0]].get(CHANGED_OPTIONS_KEY)) is not None:
            node.outer_state[0][CHANGED_OPTIONS_KEY] = changed_options
        if node.average is not None:
            node.average[s.start : s.stop] = tensors[child_path("global.average", name)].reshape(-1)[own_range]
    node.round = snapshot.round
    node.auto_thresholds.load_state(snapshot.meta.get("thresholds", {}))
    node.load_buffers_at_round_start({name: tensors[child_path("global.buffers", name)] for name in saved["buffers"]})
    local = snapshot.meta["nodes"].get(str(ranks.number))
    if local is None:
        return None
    cut = snapshot.meta.get("cut", {}).get(str(ranks.number), {})
    parts = {
        name: _as_shard(name, t, cut[name], node) if name in cut else t
        for name, t in snapshot.nodes[ranks.number].items()
    }
    return dict(unpack(parts, local))


def _as_shard(name: str, local: Tensor, shape: Sequence[int], node: Node) -> Tensor:
    """A rank's part as a DTensor again, sharded as the parameters of its shape are."""
    from torch.distributed.tensor import DTensor

    for p in node.params:
        if is_dtensor(p) and list(p.shape) == list(shape) and p.to_local().shape == local.shape:
            local = local.to(p.device)
            return DTensor.from_local(local, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
    raise ValueError(
        f"The checkpoint's {name} is of shape {list(shape)}, as no sharded parameter is here. Use the same model."
    )
