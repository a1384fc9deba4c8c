"""Descent along the clipped gradient, coordinate by coordinate; and along its sign.

    biclip   x <- fma(-lr, biclip(g; u, d), x * (1 - lr * weight_decay))
    sign     the same with u = d = 1

No state. One step moves a coordinate by at most lr * u, decay aside. The kernels of `clipping.update` do it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tailopt.clipping.norms import largest
from tailopt.clipping.operators import arithmetic
from tailopt.clipping.reference import Coordinates, Step
from tailopt.clipping.update import Batch, update
from tailopt.rules.rule import Numbers, Reach, Rule, State, listed, product


def _biclip(params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[State], h: Numbers) -> None:
    names = ("lr", "u", "d")
    if not any(isinstance(h[name], list) for name in names) and not isinstance(h.get("dead_zone"), str):
        clip = Coordinates(h["u"], h["d"], h.get("dead_zone", 0.0))
        update([Batch(list(params), list(grads), Step(clip, h["lr"], h.get("weight_decay", 0.0)))])
        return
    n = len(params)
    zones = _dead_zones(params, grads, h)
    rows = zip(params, grads, *(listed(h[name], n) for name in names), zones, strict=True)
    update(
        [
            Batch([p], [g], Step(Coordinates(u, d, zone), lr, h.get("weight_decay", 0.0)))
            for p, g, lr, u, d, zone in rows
        ]
    )


def _dead_zones(params: Sequence[Tensor], grads: Sequence[Tensor], h: Numbers) -> list[Any]:
    """For each parameter; "auto" is 4 eps max|g| over all of them, at most u."""
    zone = h.get("dead_zone", 0.0)
    if zone != "auto":
        return listed(zone, len(params))
    top = largest(list(grads), list(params))
    zones = []
    for p, u in zip(params, listed(h["u"], len(params)), strict=True):
        zone = 4 * torch.finfo(arithmetic(p.dtype)).eps * top
        zones.append(torch.minimum(zone, u.to(zone)) if isinstance(u, Tensor) else zone.clamp(max=u))
    return zones


def _sign(params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[State], h: Numbers) -> None:
    _biclip(params, grads, states, {**h, "u": 1.0, "d": 1.0})


BICLIP = Rule(
    "biclip",
    ("lr", "u", "d"),
    _biclip,
    lambda h: Reach("coordinate", product(h["lr"], h["u"])),
    {"weight_decay": 0.0, "dead_zone": 0.0},
)
SIGN = Rule("sign", ("lr",), _sign, lambda h: Reach("coordinate", h["lr"]), {"weight_decay": 0.0, "dead_zone": 0.0})
