"""Which displacements count: an honest node cannot move farther than its optimizer allows.

The bound comes from the agreed settings, never from the displacement that was received. With z steps that each move a
coordinate by at most s, and decoupled weight decay k = lr * weight_decay, a coordinate x moves by at most b, where b
starts at 0 and

    b <- |1 - k| b + s + k |x|        that is, b = constant + slope * |x|

A displacement is excluded when an element is not finite, or is beyond b plus a slack of 0.1 % and z + 2 units in the
last place of max(|x|, b), in the parameter's own type. Where the optimizer bounds a norm, the same holds for norms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tailopt.native import library
from tailopt.rounds.block_norm import BLOCK, norm, root_of_sum, sequential_sum, sum_of_squares
from tailopt.rules.rule import Hyperparameters, Rule, product, value_for_param

SLACK = 1e-3
NOT_FINITE, BEYOND = "not finite", "beyond what its optimizer can move"  # why a displacement is excluded
CHUNK = 1 << 16  # elements that torch compares at once
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of parameters, that the C kernel takes


@dataclass(frozen=True)
class Bound:
    """How far a node can have moved: constant + slope * |x|, per coordinate or in norm; kind None bounds nothing."""

    kind: str | None
    constant: Any = 0.0  # a number or a tensor, or a list with one per parameter
    slope: Any = 0.0
    steps: int = 0

    def for_param(self, i: int) -> Bound:
        """Return the bound of the i-th parameter."""
        return Bound(self.kind, value_for_param(self.constant, i), value_for_param(self.slope, i), self.steps)


@dataclass(frozen=True)
class Exclusion:
    """Why a node's displacement does not count in a round.

    subject: what was judged: a tensor or a buffer by name, all tensors, or what arrived at a node.
    """

    node: int
    subject: str
    value: float
    bound: float | None
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Return the exclusion as the history keeps it; its keys are part of the format."""
        fields = dict(vars(self))
        return {"node": fields.pop("node"), "tensor": fields.pop("subject"), **fields}

    def __str__(self) -> str:
        limit = "" if self.bound is None else f", at most {self.bound:.3g} is possible"
        return f"node {self.node}: {self.reason} in {self.subject} ({self.value:.3g}{limit})"


def bound(rule: Rule, steps: Iterable[Hyperparameters]) -> Bound:
    """Return how far a rule can move a node with these hyperparameters, one mapping per local step."""
    constant: Any = 0.0
    slope: Any = 0.0
    kind, count = None, 0
    for h in steps:
        reach = rule.step_bound(h)
        if reach is None:
            return Bound(None)
        kind, count, step_limit = reach.kind, count + 1, reach.limit
        decay = product(h["lr"], h["weight_decay"]) if h.get("weight_decay") else 0.0
        left = [abs(1 - k) for k in decay] if isinstance(decay, list) else abs(1 - decay)
        if kind == "norm":
            # one norm covers all tensors, so each step counts with its largest entry, whichever tensor that belongs to
            decay, left, step_limit = map(_largest, (decay, left, step_limit))
        constant = _affine(left, constant, step_limit)
        slope = _affine(left, slope, decay)
    return Bound(kind, constant, slope, count)


def _affine(left: Any, before: Any, more: Any) -> Any:
    """Return left * before + more, where each may be a list with one entry per parameter."""
    lists = [value for value in (left, before, more) if isinstance(value, list)]
    if lists:
        return [
            _affine(value_for_param(left, i), value_for_param(before, i), value_for_param(more, i))
            for i in range(len(lists[0]))
        ]
    return left * before + more


def clearly_within(flat: Tensor, limit: Bound) -> bool:
    """Return True if every magnitude is at most the constant: no exact check is needed then. False decides nothing."""
    if limit.kind != "coordinate" or isinstance(limit.constant, (Tensor, list)) or not flat.numel():
        return False
    low, high = (end.item() for end in torch.aminmax(flat))
    if not (-math.inf < low and high < math.inf):  # NaN too; an infinite bound would let infinities through
        return False
    return bool(-limit.constant <= low and high <= limit.constant)


def check_displacement(
    node: int,
    delta: Sequence[Tensor],
    start: Sequence[Tensor],
    names: Sequence[str],
    limit: Bound,
    buffers: Mapping[str, Tensor],
    before: Mapping[str, Tensor] | None = None,
) -> Exclusion | None:
    """Return why the displacement of a node from `start` does not count, or None if it does.

    start: in the parameters' own types; before: the buffers that the node started from. A buffer that was not finite
    then and has not changed, such as an attention mask with -inf, is a constant of the model.
    """
    tops = _largest_magnitudes(delta)
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
            if (exclusion := _beyond_norm(node, [delta[i]], [start[i]], name, limit.for_param(i))) is not None:
                return exclusion
    return None


def _largest_magnitudes(tensors: Sequence[Tensor]) -> list[float]:
    """Return the largest magnitude of each tensor; NaN where the tensor contains one."""
    filled = [t for t in tensors if t.numel()]
    if not filled:
        return [0.0] * len(tensors)
    ends = (torch.aminmax(t) for t in filled)  # one pass; the infinity norm takes ten times as long
    tops = iter(torch.stack([torch.maximum(-low, high) for low, high in ends]).tolist())
    return [next(tops) if t.numel() else 0.0 for t in tensors]


def _first_nonfinite(x: Tensor) -> float:
    return float(x[~torch.isfinite(x)].reshape(-1)[0])


def _beyond_coordinates(
    node: int, delta: Sequence[Tensor], start: Sequence[Tensor], names: Sequence[str], limit: Bound, tops: list[float]
) -> Exclusion | None:
    constants, slopes = (
        [value_for_param(value, i) for i in range(len(names))] for value in (limit.constant, limit.slope)
    )
    # b is at least its constant, and nearly always the largest magnitude is within that: then this pass is enough
    undecided = [i for i, top in enumerate(tops) if isinstance(constants[i], Tensor) or not top <= constants[i]]
    kernel = library.loaded()
    by_kernel: dict[int, tuple[int, float] | None] = {}
    if kernel is not None:
        fast = [
            i
            for i in undecided
            if _kernel_takes(delta[i], start[i]) and not isinstance(constants[i] + slopes[i], Tensor)
        ]
        pairs = [delta[i] for i in fast], [start[i] for i in fast]
        coefficients = [constants[i] for i in fast], [slopes[i] for i in fast]
        worst_by_kernel = kernel.flat.beyond(*pairs, *coefficients, 1 + SLACK, limit.steps + 2)
        by_kernel.update(zip(fast, worst_by_kernel, strict=True))
    for i in undecided:
        worst = by_kernel[i] if i in by_kernel else _farthest(delta[i], start[i], constants[i], slopes[i], limit.steps)
        if worst is not None:
            at, most = worst
            value = float(delta[i].reshape(-1)[at])
            return Exclusion(node, names[i], value, most, BEYOND)
    return None


def _kernel_takes(d: Tensor, x: Tensor) -> bool:
    """Return whether the C kernel takes a displacement and its start."""
    known = d.dtype == torch.float32 and x.dtype in KERNEL_DTYPES and d.shape == x.shape
    return known and d.is_cpu and x.is_cpu and d.is_contiguous() and x.is_contiguous()


def _farthest(d: Tensor, x: Tensor, constant: Any, slope: Any, steps: int) -> tuple[int, float] | None:
    """Return the element that is farthest beyond its bound, and that bound; None if no element is beyond it."""
    if d.numel() <= CHUNK or not d.is_cpu:
        farthest = _farthest_of(d, x, constant, slope, steps)
        return None if farthest is None else farthest[1:]
    # in chunks that stay in the cache: a dozen temporary tensors of the size of a parameter take several times as long
    rows = [v.expand(d.shape).reshape(-1) if isinstance(v, Tensor) and v.dim() else v for v in (d, x, constant, slope)]
    best: tuple[float, int, float] | None = None
    for k in range(0, d.numel(), CHUNK):
        chunk = [v[k : k + CHUNK] if isinstance(v, Tensor) and v.dim() else v for v in rows]
        farthest = _farthest_of(chunk[0], chunk[1], chunk[2], chunk[3], steps)
        if farthest is not None and (best is None or farthest[0] > best[0]):
            best = farthest[0], k + farthest[1], farthest[2]
    return None if best is None else best[1:]


def _farthest_of(d: Tensor, x: Tensor, constant: Any, slope: Any, steps: int) -> tuple[float, int, float] | None:
    """Return by how much the farthest element is beyond its bound, its index, and the bound."""
    wide = x.to(d.dtype).abs()
    b = constant + slope * wide
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
    length = norm(delta)
    allowed = allowed_if_exceeded(length, start, limit)
    return None if allowed is None else Exclusion(node, name, length, allowed, BEYOND)


def allowed_if_exceeded(length: float, start: Sequence[Tensor], limit: Bound) -> float | None:
    """Return the largest norm that was possible, if the norm of a displacement is larger; else None."""
    b = _largest(limit.constant) + (_largest(limit.slope) * norm(start) if _largest(limit.slope) else 0.0)
    if length <= b:
        return None
    ulps = root_of_sum(sequential_sum(_ulp_squares(x, b)) for x in start)
    allowed = b * (1 + SLACK) + (limit.steps + 2) * ulps
    return allowed if length > allowed else None


def _ulp_squares(x: Tensor, least: float) -> list[float]:
    """Return, for each block, the sum of squares of the ulps of max(|x|, least)."""
    kernel, flat = library.loaded(), x.detach().reshape(-1)
    kernel_takes = flat.is_cpu and flat.is_contiguous() and flat.dtype in KERNEL_DTYPES
    sums = kernel.flat.ulp_squares(flat, least) if kernel is not None and kernel_takes else None
    blocks = flat.split(BLOCK) if flat.numel() else ()
    # the kernel returns -1 for a block whose sum depends on the order of additions: that one is torch's
    return [_ulp_squares_of(block, least) if sums is None or sums[k] < 0 else sums[k] for k, block in enumerate(blocks)]


def _ulp_squares_of(block: Tensor, least: float) -> float:
    wide = block.to(torch.float64 if block.dtype == torch.float64 else torch.float32).abs()
    return sum_of_squares(_ulp(wide.clamp(min=least), block.dtype))


def _largest(value: Any) -> float:
    """Return the largest entry of a list with one per parameter: it bounds the norm over all of them."""
    return max(map(float, value)) if isinstance(value, list) else float(value)


def _ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance of a magnitude to the next larger number of a type."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(x)[1] - 1  # x = m * 2^exponent, 1 <= m < 2
    return torch.ldexp(torch.full_like(x, info.eps), exponent).clamp(min=info.smallest_normal * info.eps)
