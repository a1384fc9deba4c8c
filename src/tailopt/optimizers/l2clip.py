"""L2Clip as a torch optimizer: the gradient's norm between two thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from tailopt.clipping.counts import StatisticsRecorder
from tailopt.clipping.dispatch import update
from tailopt.clipping.dtensor import local_pair
from tailopt.clipping.kernels.kernel import StepGroup
from tailopt.clipping.norms import NormRequest, scalings
from tailopt.clipping.operators import Number, compute_dtype
from tailopt.clipping.reference import Step
from tailopt.clipping.step_cache import StepCache
from tailopt.optimizers.clipping_optimizer import ClippingOptimizer
from tailopt.optimizers.groups import Gathered, Group, GroupAndStep, ScopeOf

SCOPES = ("global", "group", "tensor")


class L2Clip(ClippingOptimizer):
    """Rescale the gradient so that its norm lies between d and u, then descend.

        p <- p * (1 - lr * weight_decay) - lr * g * min(max(n, d), u) / n,    n = the norm of g over the scope

    With d = 0 this is SGD with gradient clipping, in one optimizer and with nothing added to n. The norm is one over
    all parameters of the optimizer, all groups and all shards of a DTensor, unless the scope says otherwise.

    Args:
        params: parameters, named parameters or groups, each with its own values of what follows.
        lr: learning rate, a number or a 1-element tensor.
        u: the largest norm, a number or a 0-dim tensor.
        d: the smallest norm of a gradient that is not zero, 0 <= d <= u.
        scope: what n is taken over: "global" (all parameters of all groups with this scope; each group applies its own
            u and d to the common norm), "group" or "tensor".
        weight_decay: decoupled, as in AdamW.
        nonfinite: as in BiClip, but a non-finite element makes everything in its scope NaN ("propagate"), and "skip"
            leaves everything in its scope as it is.
        maximize, foreach, capturable, differentiable, fused: as in torch.

    Examples:
        >>> w = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
        >>> opt = L2Clip([w], lr=0.1, u=1.0)
        >>> (w * torch.tensor([30.0, 40.0])).sum().backward()
        >>> opt.step()
        >>> w.data
        tensor([0.9400, 0.9200])
    """

    optional = {**ClippingOptimizer.optional, "scope": "global"}
    not_counted = (
        'Nothing was counted: L2Clip counts skipped steps alone, and no group has nonfinite="skip". Count gradients '
        "with tailopt.count."
    )

    def __init__(
        self,
        params: Any,
        lr: Number = 1e-2,
        u: Number = 1.0,
        d: Number = 0.0,
        *,
        scope: str = "global",
        weight_decay: float = 0.0,
        nonfinite: str = "propagate",
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        defaults: Group = {"lr": lr, "u": u, "d": d, "scope": scope, "weight_decay": weight_decay}
        defaults |= {"nonfinite": nonfinite, "maximize": maximize, "foreach": foreach}
        defaults |= {"capturable": capturable, "differentiable": differentiable, "fused": fused}
        super().__init__(params, defaults)

    def check(self, group: Group, params: Sequence[Tensor] = (), at_step: bool = False) -> None:
        """Refuse a scope that does not exist, and thresholds that are not single numbers."""
        if group["scope"] not in SCOPES:
            raise ValueError(f"Invalid scope: {group['scope']!r}; need one of {', '.join(SCOPES)}.")
        for name in ("u", "d"):
            if isinstance(group[name], Tensor) and group[name].numel() != 1:
                raise ValueError(
                    f"Invalid thresholds: {name} of shape {tuple(group[name].shape)}; a norm has one threshold, "
                    "a number or a 0-dim tensor."
                )
        super().check(group, params, at_step)

    def _batches(self, gathered: Gathered) -> tuple[list[GroupAndStep], ScopeOf]:
        batches, scopes = _batches_by_scope(gathered)
        return batches, lambda b, i: scopes[b]

    def _run(self, kind: str, batches: Sequence[StepGroup], recorder: StatisticsRecorder | None) -> None:
        if kind == "fused":
            _fused_l2clip(batches, self._step_cache)
        elif kind == "single":
            _single_tensor_l2clip(batches)
        else:
            _multi_tensor_l2clip(batches, self._step_cache, "foreach" if kind == "foreach" else None)


def _batches_by_scope(gathered: Gathered) -> tuple[list[GroupAndStep], list[int]]:
    """Batches of tensors that take the same scaling, and the scope of each batch."""
    places: list[tuple[Group, list[Tensor], list[Tensor], int, torch.dtype]] = []
    norms: dict[Any, int] = {}
    scope_of: list[int] = []
    for k, (group, params, grads, *_) in enumerate(gathered):
        if group["scope"] == "tensor":
            parts = [([p], [g], (k, i)) for i, (p, g) in enumerate(zip(params, grads, strict=True))]
        else:
            parts = [(params, grads, "global" if group["scope"] == "global" else k)]  # type: ignore[list-item]
        for ps, gs, key in parts:
            scope = norms.setdefault(key, len(norms))
            for dtype in (torch.float32, torch.float64):
                chosen = [i for i, p in enumerate(ps) if compute_dtype(p.dtype) == dtype]
                if chosen:
                    places.append((group, [ps[i] for i in chosen], [gs[i] for i in chosen], scope, dtype))
                    scope_of.append(scope)
    owners = [p for _, ps, _, _, _ in places for p in ps]
    if not owners:
        return [], []
    grads = [g for _, _, gs, _, _ in places for g in gs]
    local = [local_pair(p, g)[1] for p, g in zip(owners, grads, strict=True)]
    traced = torch.compiler.is_compiling() or any(one.group["differentiable"] for one in gathered)
    scopes = [scope for _, ps, _, scope, _ in places for _ in ps]
    requests = [NormRequest(scope, group["u"], group["d"], dtype) for group, _, _, scope, dtype in places]
    clips = scalings(local, owners, scopes, len(norms), requests, traced)
    batches = [
        (group, StepGroup(ps, gs, Step(clip, group["lr"], group["weight_decay"], group["maximize"])))
        for (group, ps, gs, _, _), clip in zip(places, clips, strict=True)
    ]
    return batches, scope_of


# As in biclip.py: functions that torch's own tests look for.


def _single_tensor_l2clip(batches: Sequence[StepGroup]) -> None:
    update(batches, "single")


def _multi_tensor_l2clip(batches: Sequence[StepGroup], cache: StepCache, kernel: str | None = None) -> None:
    update(batches, kernel, cache)


@_disable_dynamo
def _fused_l2clip(batches: Sequence[StepGroup], cache: StepCache) -> None:
    update(batches, None, cache)
