"""Everything that knows DTensor: local parts, partial sums, and one reduction over all shards.

There is no DTensor unless `torch.distributed.tensor` was imported, so nothing here imports it before that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(x: Tensor) -> TypeGuard[DTensor]:
    """Whether x is a DTensor (whose `data_ptr()` is 0: no kernel may see one)."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def summed(x: Tensor) -> Tensor:
    """x with its partial sums added up: clipping is not linear, so the addends must not be clipped."""
    if not is_dtensor(x):
        return x
    if not any(p.is_partial() for p in x.placements):
        return x
    from torch.distributed.tensor import Replicate

    return x.redistribute(placements=[Replicate() if p.is_partial() else p for p in x.placements])


def whole(x: Tensor) -> Tensor:
    """A DTensor gathered into a plain tensor; anything else as it is."""
    return x.full_tensor() if is_dtensor(x) else x


def local_pair(p: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's part of a parameter and of its gradient, laid out alike; views, so that p's can be written."""
    if not is_dtensor(p):
        return p, g
    if not is_dtensor(g):
        raise ValueError(
            f"Got a plain gradient of shape {tuple(g.shape)} for a parameter that is a DTensor; "
            "gradients of sharded parameters must be DTensors on the same mesh."
        )
    if g.placements != p.placements:
        g = g.redistribute(placements=p.placements)
    return p.to_local(), g.to_local()


def replicated(value: Tensor, like: Tensor) -> Tensor:
    """A tensor as a DTensor that every rank of `like`'s mesh holds whole."""
    if is_dtensor(value):
        return value
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(like, DTensor)
    mesh = like.device_mesh
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def local_part(value: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor that broadcasts against the DTensor `like`; nothing is sent."""
    assert is_dtensor(like)
    full = replicated(value.expand(like.shape), like)
    assert is_dtensor(full)
    return full.redistribute(placements=like.placements).to_local()


def positions_by_process_groups(owners: Sequence[Tensor]) -> dict[tuple[Any, ...], list[int]]:
    """Positions of owners by the process groups their elements are spread over; () for what every rank holds whole."""
    spread: dict[tuple[Any, ...], list[int]] = {}
    for i, owner in enumerate(owners):
        groups: tuple[Any, ...] = ()
        if is_dtensor(owner):
            mesh, placements = owner.device_mesh, owner.placements
            groups = tuple(mesh.get_group(dim) for dim, p in enumerate(placements) if not p.is_replicate())
        spread.setdefault(groups, []).append(i)
    return spread


def over_shards(value: Tensor, groups: Sequence[Any], fold: Callable[[Tensor], Tensor]) -> Tensor:
    """`fold` of all ranks' values, stacked in rank order: one collective per group, entered with empty shards too."""
    for group in groups:
        parts = [torch.empty_like(value) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(parts, value.contiguous(), group=group)
        value = fold(torch.stack(parts))
    return value
