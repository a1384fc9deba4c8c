"""Norms over many tensors and shards: for L2Clip's scopes, and the largest gradient for an automatic dead zone.

A sum of squares is a pair (m, q) of float64 numbers with the value m^2 * q: m is 1 unless the elements are float64
numbers whose squares leave the range, so that no norm overflows or underflows while the elements are representable.
Everything stays on the device; one collective covers all shards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tailopt.clipping.counts import add
from tailopt.clipping.dtensor import is_dtensor, over_shards, positions_by_process_groups
from tailopt.clipping.kernels import triton
from tailopt.clipping.operators import Number, real_parts
from tailopt.clipping.reference import ScaleToNorm
from tailopt.clipping.step_cache import StepCache
from tailopt.native.clip import Counters

UNTHRESHOLDED = (float("inf"), 0.0, 0.0)


class NormRequest(NamedTuple):
    """Whose norm is to be brought between which thresholds, for which type of the arithmetic."""

    scope: int
    u: Number
    d: Number
    dtype: torch.dtype


def scalings(
    grads: Sequence[Tensor],
    owners: Sequence[Tensor],
    scopes: Sequence[int],
    n_scopes: int,
    requests: Sequence[NormRequest],
    traced: bool = False,
) -> list[ScaleToNorm]:
    """One scaling for each request, after which the norm of its scope lies between d and u.

    Args:
        grads: this rank's part of every gradient.
        owners: the parameters that the gradients belong to.
        scopes: the scope of each gradient.
        n_scopes: how many there are, on every rank the same, even if no gradient of this rank is in some of them.
        requests: what to form.
        traced: use torch operations alone, which autograd and compilers can follow. Then, and off the CPU, a scaling
            holds 0-dim tensors, else numbers.
    """
    return scalings_of(squares(grads, owners, scopes, n_scopes, traced), requests, traced)


def scalings_of(pairs: Tensor, requests: Sequence[NormRequest], traced: bool = False) -> list[ScaleToNorm]:
    """`scalings` from the pairs that `squares` returned."""
    if pairs.device.type == "cpu" and not traced:
        numbers = pairs.tolist()
        return [scaling(numbers[k][0], numbers[k][1], float(u), float(d), dtype) for k, u, d, dtype in requests]
    formed: dict[NormRequest, ScaleToNorm] = {}
    for request in requests:
        if request not in formed:  # two dozen launches each; and groups with the same object can step together
            k, u, d, dtype = request
            u, d = (t.reshape(()) if isinstance(t, Tensor) else t for t in (u, d))
            formed[request] = scaling_in_torch(pairs[k, 0], pairs[k, 1], u, d, dtype)
    return [formed[request] for request in requests]


def auto_dead_zone(top: Tensor, u: Number, dtype: torch.dtype) -> Number:
    """dead_zone="auto": 4 * eps * top, at most u, where top is max|g| over all parameters.

    A number on the CPU, else a 0-dim tensor: nothing waits for a device.
    """
    zone = 4 * torch.finfo(dtype).eps * top
    if zone.is_cpu and not isinstance(u, Tensor):
        return min(zone.item(), u)
    return torch.minimum(zone, u.to(zone) if isinstance(u, Tensor) else torch.full_like(zone, u))


def largest_gradient(grads: Sequence[Tensor], owners: Sequence[Tensor], look: StepCache | None = None) -> Tensor:
    """max |g| over the finite elements of all gradients and all their shards; a 0-dim float64 tensor.

    look: what the Triton kernel keeps of gradients between steps, where it is to look at them.
    """
    by_groups = positions_by_process_groups(owners)
    seen = triton.look(grads, look) if look is not None and len(by_groups) == 1 else None
    tops = seen[0].expand(len(grads)) if seen is not None else _counted(grads).reals[:, 1]
    result = tops.new_zeros(())
    for groups, members in by_groups.items():
        top = seen[0] if seen is not None else _rows(tops, members).amax()
        result = torch.maximum(result, over_shards(top, groups, lambda parts: parts.amax(0)))
    return result


def root_mean_squares(tensors: Sequence[Tensor]) -> list[float]:
    """The RMS of each tensor's real coordinates, over all its shards; waits for the device."""
    if not tensors:
        return []
    local = [t.to_local() if is_dtensor(t) else t for t in map(Tensor.detach, tensors)]
    pairs = squares(local, tensors, range(len(tensors)), len(tensors))
    coordinates = [t.numel() * (2 if t.is_complex() else 1) for t in tensors]
    return [m * math.sqrt(q / n) if n else 0.0 for (m, q), n in zip(pairs.tolist(), coordinates, strict=True)]


def nonfinite(grads: Sequence[Tensor], owners: Sequence[Tensor], look: StepCache | None = None) -> Tensor:
    """How many elements of each gradient are not finite, over all its shards; `look` as in `largest_gradient`."""
    seen = triton.look(grads, look) if look is not None else None
    counts = _counted(grads).integers[:, 4].clone() if seen is None else seen[1]
    for groups, members in positions_by_process_groups(owners).items():
        if groups:
            counts[members] = over_shards(counts[members], groups, lambda parts: parts.sum(0))
    return counts


def _rows(x: Tensor, members: Sequence[int]) -> Tensor:
    """x[members], without the copy of an index list to the device, which would wait."""
    return torch.stack([x[i] for i in members])


def _counted(grads: Sequence[Tensor]) -> Counters:
    counters = Counters.empty(len(grads), device=grads[0].device if grads else None)
    add(grads, range(len(grads)), UNTHRESHOLDED, counters)
    return counters


def squares(
    grads: Sequence[Tensor],
    owners: Sequence[Tensor],
    scopes: Sequence[int],
    n_scopes: int,
    traced: bool = False,
    look: StepCache | None = None,
) -> Tensor:
    """[n_scopes, 2]: the sum of squares of every scope as a pair, over all shards.

    The arguments are those of `scalings`, and `look` as in `largest_gradient`.
    """
    if look is not None and not traced and n_scopes == 1 and not any(map(is_dtensor, owners)):
        total = triton.sum_of_squares(grads, look)
        if total is not None:
            return torch.stack([torch.ones_like(total), torch.where(torch.isfinite(total), total, math.nan)])[None]
    on_cpu = not grads or grads[0].device.type == "cpu"
    pairs = _pairs_by_kernel(grads) if on_cpu and not traced else _pairs_by_torch(grads, traced)
    if n_scopes == 1 and not any(map(is_dtensor, owners)):  # the usual case; the rest is noticeable in a small step
        return _fold(pairs)[None]
    nothing = torch.stack([pairs.new_ones(()), pairs.new_zeros(())])
    total = nothing.expand(n_scopes, 2)
    for groups, members in positions_by_process_groups(owners).items():
        inside: list[list[int]] = [[] for _ in range(n_scopes)]
        for i in members:
            inside[scopes[i]].append(i)
        local = torch.stack([pairs[m[0]] if len(m) == 1 else _fold(_rows(pairs, m)) if m else nothing for m in inside])
        total = _fold(torch.stack([total, over_shards(local, groups, _fold)]))
    return total


def _pairs_by_kernel(grads: Sequence[Tensor]) -> Tensor:
    counters = _counted(grads)
    squares, top = counters.reals.unbind(1)
    pairs = torch.stack([torch.ones_like(squares), squares], dim=1)
    for i, g in enumerate(grads):
        if g.dtype in (torch.float64, torch.complex128) and top[i] > 0 and not 1e-270 < squares[i] < 1e300:
            pairs[i, 0] = top[i]
            pairs[i, 1] = (real_parts(g) / top[i]).square().sum()
    pairs[:, 1] = torch.where(
        counters.integers[:, 4] > 0, float("nan"), pairs[:, 1]
    )  # the counters left these elements out
    return pairs


def _pairs_by_torch(grads: Sequence[Tensor], traced: bool) -> Tensor:
    parts = list(map(real_parts, grads))
    sizes: dict[int, Tensor] = {}  # of those whose squares may leave the range
    for i, g in enumerate(parts):
        if g.dtype == torch.float64 and g.numel():
            top = g.detach().abs().amax()
            sizes[i] = torch.where(top > 0, top, 1.0)
            parts[i] = g / sizes[i]
    if traced:
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in parts]
    else:  # a few launches for all of them: on a GPU, one for each took several times as long as the step
        norms = list(torch._foreach_norm(parts, 2, dtype=torch.float64))
    q = torch.stack(norms).square()
    m = torch.ones_like(q)
    if sizes:
        m = torch.stack([sizes.get(i, one) for i, one in enumerate(m.unbind())])
    return torch.stack([m, torch.where(torch.isfinite(q), q, float("nan"))], dim=1)


def _fold(pairs: Tensor) -> Tensor:
    """The sum of pairs along the first dimension, added in order."""
    m, q = pairs[..., 0], pairs[..., 1]
    m = torch.where(q == 0, 0.0, m)  # nothing has no size: its m must not decide, nor overflow below
    top = m.amax(0)
    top = torch.where(top == 0, 1.0, top)
    return torch.stack([top, (q * (m / top).square()).sum(0)], dim=-1)


def scaling(m: float, q: float, u: float, d: float, dtype: torch.dtype) -> ScaleToNorm:
    """The norm n = m * sqrt(q) against its thresholds, in numbers.

    A norm outside the range of the arithmetic is brought back by a power of two, so that neither it nor the quotient
    g / n is lost.
    """
    if q == 0:
        return ScaleToNorm(1.0, 1.0, 0.0)
    if math.isnan(q):
        return ScaleToNorm(1.0, math.nan, 1.0)
    limits, root = torch.finfo(dtype), math.sqrt(q)
    scale = 1.0
    if not limits.tiny <= m * root <= limits.max:
        limit = _MAX_EXPONENT[dtype]
        scale = 2.0 ** -max(-limit, min(limit, math.frexp(m)[1] + math.frexp(root)[1]))
    norm = m * scale * root
    if scale > 1:  # an fp32 tensor beside fp64 ones of that size can only be zero
        norm = max(norm, limits.tiny)
    if norm <= d * scale:
        return ScaleToNorm(scale, norm, d)
    if norm >= u * scale:
        return ScaleToNorm(scale, norm, u)
    return ScaleToNorm(1.0, 1.0, 1.0)


# The largest power of two that a scale may have, of the type: 2^126 and 2^1000 are normal numbers themselves.
_MAX_EXPONENT = {torch.float32: 126, torch.float64: 1000}


def scaling_in_torch(m: Tensor, q: Tensor, u: Number, d: Number, dtype: torch.dtype) -> ScaleToNorm:
    """`scaling` in float64 tensors: nothing waits for the norm, and autograd can follow it.

    m and q may have dimensions, one entry for each of many vectors; u and d broadcast against them.
    """
    # a number becomes a fill on the device, not a copy to it
    u, d = (t.to(m) if isinstance(t, Tensor) else torch.full_like(m, t) for t in (u, d))
    limits, largest_exponent = torch.finfo(dtype), _MAX_EXPONENT[dtype]
    empty = q == 0
    root = torch.where(empty, 1.0, q).sqrt()
    exponent = torch.frexp(m.detach())[1] + torch.frexp(root.detach())[1]
    fits = (m * root >= limits.tiny) & (m * root <= limits.max) | torch.isnan(q)
    scale = torch.exp2(-torch.where(fits, 0, exponent.clamp(-largest_exponent, largest_exponent)).double())
    norm = m * scale * root
    norm = torch.where(scale > 1, norm.clamp(min=limits.tiny), norm)  # an fp32 tensor beside such fp64 ones is zero
    low, high = norm <= d * scale, norm >= u * scale
    clipped = (low | high) & ~empty
    target = torch.where(empty, 0.0, torch.where(low, d, torch.where(high, u, 1.0)))
    numbers = torch.where(clipped, scale, 1.0), torch.where(clipped | torch.isnan(norm), norm, 1.0), target
    return ScaleToNorm(*(t.to(dtype) for t in numbers))
