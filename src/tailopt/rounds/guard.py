"""Which displacements count: an honest node cannot move farther than its optimizer allows.

The bound comes from the agreed settings, never from what was received. With z steps that each move a coordinate by at
most s, and decoupled weight decay k = lr * weight_decay, a coordinate x moves by at most b, where b starts at 0 and

    b <- |1 - k| b + s + k |x|        that is, b = a + c |x| with two numbers a and c

A displacement is excluded when an element is not finite, or is beyond b plus a slack of 0.1 % and z + 2 units in the
last place of max(|x|, b), in the parameter's own type. Where the optimizer bounds a norm, the same holds for norms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tailopt.native import library
from tailopt.rounds.blocks import BLOCK, added, norm, root, squares
from tailopt.rules.rule import Numbers, Rule, of, product

SLACK = 1e-3
NOT_FINITE, BEYOND = "not finite", "beyond what its optimizer can move"  # why a displacement is excluded
PIECE = 1 << 16  # elements that torch compares at once
KERNEL = (torch.float32, torch.bfloat16, torch.float16)  # types of parameters that the C kernel knows


@dataclass(frozen=True)
class Bound:
    """How far a node can have moved: a + c |x|, for every coordinate or in norm. None bounds nothing."""

    kind: str | None
    a: Any = 0.0  # a number or a tensor, or a list with one for each parameter
    c: Any = 0.0
    steps: int = 0


@dataclass(frozen=True)
class Exclusion:
    """Why a node's displacement does not count in a round."""

    node: int
    tensor: str
    value: float
    bound: float | None
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """As it stands in the history."""
        return dict(vars(self))

    def __str__(self) -> str:
        limit = "" if self.bound is None else f", at most {self.bound:.3g} is possible"
        return f"node {self.node}: {self.reason} in {self.tensor} ({self.value:.3g}{limit})"


def bound(rule: Rule, steps: Iterable[Numbers]) -> Bound:
    """What a rule can do with these numbers, one mapping for each local step."""
    a: Any = 0.0
    c: Any = 0.0
    kind, count = None, 0
    for h in steps:
        reach = rule.reach(h)
        if reach is None:
            return Bound(None)
        kind, count, length = reach.kind, count + 1, reach.length
        decay = product(h["lr"], h["weight_decay"]) if h.get("weight_decay") else 0.0
        left = [abs(1 - k) for k in decay] if isinstance(decay, list) else abs(1 - decay)
        if kind == "norm":  # one number for all: what is largest in this step, since the next may favour another tensor
            decay, left, length = map(_largest, (decay, left, length))
        a = _affine(left, a, length)
        c = _affine(left, c, decay)
    return Bound(kind, a, c, count)


def _affine(left: Any, before: Any, more: Any) -> Any:
    """left * before + more, where each may be a list with one for each parameter."""
    lists = [value for value in (left, before, more) if isinstance(value, list)]
    if lists:
        return [_affine(of(left, i), of(before, i), of(more, i)) for i in range(len(lists[0]))]
    return left * before + more


def within(flat: Tensor, limit: Bound) -> bool:
    """Whether all is well at a glance: every element within the least that the bound can be. False: look closer."""
    if limit.kind != "coordinate" or isinstance(limit.a, Tensor | list) or not flat.numel():
        return False
    low, high = torch.aminmax(flat)
    return bool(-limit.a <= low.item() and high.item() <= limit.a)  # NaN is neither


def judge(
    node: int,
    delta: Sequence[Tensor],
    start: Sequence[Tensor],
    names: Sequence[str],
    limit: Bound,
    buffers: Mapping[str, Tensor],
    before: Mapping[str, Tensor] | None = None,
) -> Exclusion | None:
    """None, or why the displacement of a node from `start` does not count.

    start: in the parameters' own types; before: the buffers that it started from. One that was not finite then and has
    not changed, such as an attention mask with -inf, is a constant of the model.
    """
    tops = _tops(delta)
    for name, d, top in zip(names, delta, tops, strict=True):
        if not top < float("inf"):
            return Exclusion(node, name, _first_nonfinite(d), None, NOT_FINITE)
    for name, buffer in buffers.items():
        values = torch.view_as_real(buffer.resolve_conj()) if buffer.is_complex() else buffer
        if bool(torch.isfinite(values).all()) or (before is not None and torch.equal(buffer, before[name])):
            continue
        return Exclusion(node, name, _first_nonfinite(values), None, NOT_FINITE)
    if limit.kind == "coordinate":
        return _beyond_coordinates(node, delta, start, names, limit, tops)
    if limit.kind == "norm":
        return _beyond_norm(node, delta, start, "all tensors", limit)
    if limit.kind == "tensor norm":
        for i, name in enumerate(names):
            own = Bound(limit.kind, of(limit.a, i), of(limit.c, i), limit.steps)
            found = _beyond_norm(node, [delta[i]], [start[i]], name, own)
            if found:
                return found
    return None


def _tops(tensors: Sequence[Tensor]) -> list[float]:
    """The largest magnitude of each tensor; NaN where there is one."""
    filled = [t for t in tensors if t.numel()]
    if not filled:
        return [0.0] * len(tensors)
    ends = (torch.aminmax(t) for t in filled)  # one pass; the infinity norm takes ten times as long
    found = iter(torch.stack([torch.maximum(-low, high) for low, high in ends]).tolist())
    return [next(found) if t.numel() else 0.0 for t in tensors]


def _first_nonfinite(x: Tensor) -> float:
    return float(x[~torch.isfinite(x)].reshape(-1)[0])


def _beyond_coordinates(
    node: int, delta: Sequence[Tensor], start: Sequence[Tensor], names: Sequence[str], limit: Bound, tops: list[float]
) -> Exclusion | None:
    a, c = ([of(value, i) for i in range(len(names))] for value in (limit.a, limit.c))
    # a is the least that b can be: a top within it is the usual case
    close = [i for i, top in enumerate(tops) if isinstance(a[i], Tensor) or not top <= a[i]]
    kernel = library.loaded()
    found: dict[int, tuple[int, float] | None] = {}
    if kernel is not None:
        fast = [i for i in close if _plain(delta[i], start[i]) and not isinstance(a[i] + c[i], Tensor)]
        pairs = [delta[i] for i in fast], [start[i] for i in fast]
        numbers = [a[i] for i in fast], [c[i] for i in fast]
        found.update(zip(fast, kernel.beyond(*pairs, *numbers, 1 + SLACK, limit.steps + 2), strict=True))
    for i in close:
        worst = found[i] if i in found else _farthest(delta[i], start[i], a[i], c[i], limit.steps)
        if worst is not None:
            at, most = worst
            value = float(delta[i].reshape(-1)[at])
            return Exclusion(node, names[i], value, most, BEYOND)
    return None


def _plain(d: Tensor, x: Tensor) -> bool:
    """Whether the kernel takes a displacement and its start."""
    known = d.dtype == torch.float32 and x.dtype in KERNEL and d.shape == x.shape
    return known and d.is_cpu and x.is_cpu and d.is_contiguous() and x.is_contiguous()


def _farthest(d: Tensor, x: Tensor, a: Any, c: Any, steps: int) -> tuple[int, float] | None:
    """The element that is farthest beyond its bound, and that bound; None: none is."""
    if d.numel() <= PIECE or not d.is_cpu:
        found = _farthest_of(d, x, a, c, steps)
        return None if found is None else found[1:]
    # in pieces that stay in the cache: a dozen temporary tensors of the size of a parameter take several times as long
    rows = [v.expand(d.shape).reshape(-1) if isinstance(v, Tensor) and v.dim() else v for v in (d, x, a, c)]
    best: tuple[float, int, float] | None = None
    for k in range(0, d.numel(), PIECE):
        piece = [v[k : k + PIECE] if isinstance(v, Tensor) and v.dim() else v for v in rows]
        found = _farthest_of(piece[0], piece[1], piece[2], piece[3], steps)
        if found is not None and (best is None or found[0] > best[0]):
            best = found[0], k + found[1], found[2]
    return None if best is None else best[1:]


def _farthest_of(d: Tensor, x: Tensor, a: Any, c: Any, steps: int) -> tuple[float, int, float] | None:
    """By how much it is beyond, where it is, and its bound."""
    wide = x.to(d.dtype).abs()
    b = a + c * wide
    allowed = b * (1 + SLACK) + (steps + 2) * _ulp(torch.maximum(wide, b), x.dtype)
    beyond = d.abs() > allowed
    if not bool(beyond.any()):
        return None
    excess = torch.where(beyond, d.abs() - allowed, float("-inf")).reshape(-1)
    at = int(excess.argmax())
    return float(excess[at]), at, float(allowed.expand_as(d).reshape(-1)[at])


def _beyond_norm(
    node: int, delta: Sequence[Tensor], start: Sequence[Tensor], name: str, limit: Bound
) -> Exclusion | None:
    moved = norm(delta)
    most = exceeded(moved, start, limit)
    return None if most is None else Exclusion(node, name, moved, most, BEYOND)


def exceeded(moved: float, start: Sequence[Tensor], limit: Bound) -> float | None:
    """None, or the largest norm that was possible, where a displacement has a larger one."""
    b = _largest(limit.a) + (_largest(limit.c) * norm(start) if _largest(limit.c) else 0.0)
    if moved <= b:
        return None
    ulps = root(added(_ulp_squares(x, b)) for x in start)
    allowed = b * (1 + SLACK) + (limit.steps + 2) * ulps
    return allowed if moved > allowed else None


def _ulp_squares(x: Tensor, least: float) -> list[float]:
    """The sum of squares of the ulps of max(|x|, least), of each block."""
    kernel, line = library.loaded(), x.detach().reshape(-1)
    plain = line.is_cpu and line.is_contiguous() and line.dtype in KERNEL
    found = kernel.ulp_squares(line, least) if kernel is not None and plain else None
    blocks = line.split(BLOCK) if line.numel() else ()
    # the kernel leaves those blocks to torch whose sum depends on the order
    return [
        _ulp_squares_of(block, least) if found is None or found[k] < 0 else found[k] for k, block in enumerate(blocks)
    ]


def _ulp_squares_of(block: Tensor, least: float) -> float:
    wide = block.to(torch.float64 if block.dtype == torch.float64 else torch.float32).abs()
    return squares(_ulp(wide.clamp(min=least), block.dtype))


def _largest(value: Any) -> float:
    """Of a list with a threshold for each parameter, the largest bounds the norm over all of them."""
    return max(map(float, value)) if isinstance(value, list) else float(value)


def _ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance of a magnitude to the next larger number of a type."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(x)[1] - 1  # x = m * 2^exponent, 1 <= m < 2
    return torch.ldexp(torch.full_like(x, info.eps), exponent).clamp(min=info.smallest_normal * info.eps)
