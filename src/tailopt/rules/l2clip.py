"""Descent along the rescaled gradient: its Euclidean norm brought into [d, u].

    biclip-l2   x <- fma(-lr, biclip_l2(g; u, d), x * (1 - lr * weight_decay))
    l2clip      the same with d = 0

No state. The norm is taken over the scope: all parameters ("global") or each ("tensor"). A caller that knows the norm,
from fixed blocks or over shards, passes it as `norm`: a float, or one for each parameter. One step moves the scope by
at most lr * u in norm, decay aside.

Thresholds that are "auto" (`rounds.auto_thresholds`) come with s, by which lr is divided.

With `leading` dimensions, each of their entries is a separate node with its own norm.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tailopt.clipping.dispatch import update
from tailopt.clipping.kernels.kernel import StepGroup
from tailopt.clipping.norms import NormRequest, scaling, scaling_in_torch, scalings
from tailopt.clipping.operators import compute_dtype
from tailopt.clipping.reference import ScaleToNorm, StepHyperparameters
from tailopt.clipping.step_cache import StepCache
from tailopt.rules.rule import (
    Hyperparameters,
    ParamStates,
    Rule,
    StepBound,
    Tensors,
    largest_step,
    scaled_rate_and_decay,
    value_for_param,
)

SCOPES = ("global", "tensor")


def _biclip_l2(
    params: Tensors, grads: Tensors, states: ParamStates, hparams: Hyperparameters, cache: StepCache | None = None
) -> None:
    if hparams.get("leading", 0):
        _step_stacked(params, grads, hparams)
        return
    n = len(params)
    by_tensor = hparams.get("scope", "global") == "tensor"
    u, d = hparams["u"], hparams.get("d", 0.0)
    types = [compute_dtype(p.dtype) for p in params]
    if "norm" in hparams:
        norm = hparams["norm"]
        clips = [
            _scaling_of_norm(value_for_param(norm, i), value_for_param(u, i), value_for_param(d, i), t)
            for i, t in enumerate(types)
        ]
    else:
        scopes = list(range(n)) if by_tensor else [0] * n
        requests = [
            NormRequest(scopes[i], value_for_param(u, i), value_for_param(d, i), t) for i, t in enumerate(types)
        ]
        clips = scalings(list(grads), list(params), scopes, max(scopes, default=0) + 1, requests)
    groups: list[StepGroup] = []
    for i, (p, g, clip) in enumerate(zip(params, grads, clips, strict=True)):
        step_hparams = StepHyperparameters(clip, *scaled_rate_and_decay(hparams, i))
        if not groups or not _same_hparams(groups[-1].hparams, step_hparams):
            groups.append(StepGroup([], [], step_hparams))
        groups[-1].params.append(p)
        groups[-1].grads.append(g)
    update(groups, cache=cache)


def _scaling_of_norm(norm: float, u: float, d: float, dtype: torch.dtype) -> ScaleToNorm:
    """The scaling of a vector whose norm is known; a norm that is not finite makes everything NaN."""
    # norms are pairs (m, q) for m * sqrt(q): here m is the norm, and q is 1, or NaN where the norm is not finite
    return scaling(norm, norm * 0 + 1 if norm else 0.0, u, d, dtype)


def _same_hparams(a: StepHyperparameters, b: StepHyperparameters) -> bool:
    """Whether two steps have the same hyperparameters; tensors are compared by identity, which waits for no device."""
    pairs = zip((*a.clip, a.lr), (*b.clip, b.lr), strict=True)
    return all(x is y or (isinstance(x, float) and isinstance(y, float) and x == y) for x, y in pairs)


def _step_stacked(params: Tensors, grads: Tensors, hparams: Hyperparameters) -> None:
    """The same for tensors whose leading dimensions count nodes, in torch operations."""
    k, decay = hparams["leading"], hparams.get("weight_decay", 0.0)
    squares = [g.double().square().reshape(*g.shape[:k], -1).sum(-1) for g in grads]
    if hparams.get("scope", "global") == "global":
        squares = [torch.stack(squares).sum(0)] * len(squares)
    for i, (p, g, square) in enumerate(zip(params, grads, squares, strict=True)):
        q = square.reshape(square.shape + (1,) * (g.dim() - k))
        q = torch.where(q.isfinite(), q, torch.nan)
        u, d = (
            torch.as_tensor(value_for_param(value, i), dtype=q.dtype) for value in (hparams["u"], hparams.get("d", 0.0))
        )
        c = scaling_in_torch(torch.ones_like(q), q, u, d, compute_dtype(p.dtype))(g)
        lr = value_for_param(hparams["lr"], i)
        if decay:
            p.mul_(1 - lr * decay)
        if isinstance(lr, Tensor):
            p.sub_(c * lr)
        else:
            p.add_(c, alpha=-lr)


def _step_bound(hparams: Hyperparameters) -> StepBound:
    kind = "norm" if hparams.get("scope", "global") == "global" else "tensor norm"
    return StepBound(kind, largest_step(hparams))  # type: ignore[arg-type]


_OPTIONS = {"weight_decay": 0.0, "scope": "global", "scale": "first"}
L2CLIP = Rule("l2clip", ("lr", "u"), _biclip_l2, _step_bound, _OPTIONS, needs_norm=True, auto_u_limits="norms")
BICLIP_L2 = Rule(
    "biclip-l2", ("lr", "u", "d"), _biclip_l2, _step_bound, _OPTIONS, needs_norm=True, auto_u_limits="norms"
)
