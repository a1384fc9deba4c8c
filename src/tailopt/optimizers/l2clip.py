"""L2Clip as a torch optimizer: the gradient's norm between two thresholds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from tailopt.clipping.counts import StatisticsRecorder
from tailopt.clipping.dispatch import update
from tailopt.clipping.dtensor import local_pair
from tailopt.clipping.kernels.kernel import StepGroup
from tailopt.clipping.norms import NormRequest, scalings_of, squares
from tailopt.clipping.operators import Number, compute_dtype
from tailopt.clipping.reference import ScaleToNorm, StepHyperparameters
from tailopt.clipping.step_cache import StepCache
from tailopt.optimizers.auto_thresholds import Observation, check_auto, chosen_thresholds, is_auto, numbers
from tailopt.optimizers.clipping_optimizer import ClippingOptimizer
from tailopt.optimizers.groups import Gathered, Group, GroupAndStep, ScopeOf

SCOPES = ("global", "group", "tensor")
ScopeKey = tuple[int, int]


class L2Clip(ClippingOptimizer):
    """Rescale the gradient so that its norm lies between d and u, then descend.

        p <- p * (1 - lr * weight_decay) - lr * g * min(max(n, d), u) / n,    n = the norm of g over the scope

    With d = 0 this is SGD with gradient clipping, in one optimizer and with nothing added to n. The norm is one over
    all parameters of the optimizer, all groups and all shards of a DTensor, unless the scope says otherwise.

    Args:
        params: parameters, named parameters or groups, each with its own values of what follows.
        lr: learning rate, a number or a 1-element tensor.
        u: the largest norm, a number or a 0-dim tensor. "auto": chosen from the first 50 norms, one for each scope, and
            lr is then the most that the norm of the parameters moves in a step; see `thresholds`.
        d: the smallest norm of a gradient that is not zero, 0 <= d <= u. "auto": u itself, so that every gradient has
            the norm u and only its direction counts; with u="auto" it is "auto" or 0.
        scale: with u="auto", what happens as gradients shrink: "first", steps shrink with them; "follow", the largest
            step stays lr, and a schedule shrinks it.
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

        With u="auto" the first 50 steps have the length lr:

        >>> w = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
        >>> opt = L2Clip([w], lr=0.01, u="auto", d="auto")
        >>> (w * torch.tensor([30.0, 40.0])).sum().backward()
        >>> for _ in range(50):
        ...     opt.step()
        >>> w.data
        tensor([0.7000, 0.6000])
        >>> opt.thresholds[0].split(":")[0]
        "u = 50, d = 1 u, by the rule 'norm'"
    """

    optional = {**ClippingOptimizer.optional, "scope": "global"}
    optional |= {"scale": "first", "thresholds": None, "calibration": None}
    not_counted = (
        'Nothing was counted: L2Clip counts skipped steps alone, and no group has nonfinite="skip". Count gradients '
        "with tailopt.count."
    )

    def __init__(
        self,
        params: Any,
        lr: Number = 1e-2,
        u: Number | str = 1.0,
        d: Number | str = 0.0,
        *,
        scope: str = "global",
        scale: str = "first",
        weight_decay: float = 0.0,
        nonfinite: str = "propagate",
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        defaults: Group = {"lr": lr, "u": u, "d": d, "scope": scope, "weight_decay": weight_decay}
        defaults |= {"scale": scale, "thresholds": None, "calibration": None}
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
        super().check(check_auto(group), params, at_step)

    @property
    def thresholds(self) -> list[str]:
        """What "auto" has chosen, in a line per group; empty before the 51st step."""
        return chosen_thresholds(self.param_groups)

    def _batches(self, gathered: Gathered) -> tuple[list[GroupAndStep], ScopeOf]:
        batches, scopes = _batches_by_scope(gathered, self._look)
        return batches, lambda b, i: scopes[b]

    def _observe(self, gathered: Gathered, observation: Observation) -> None:
        """Show the norms of this step to the groups whose thresholds follow them."""
        for group, params, *_, norms in gathered:
            if norms:
                owners = params if group["scope"] == "tensor" else None
                observation.add_norms(group, owners, norms)

    def _run(self, kind: str, batches: Sequence[StepGroup], recorder: StatisticsRecorder | None) -> None:
        if kind == "fused":
            _fused_l2clip(batches, self._step_cache)
        elif kind == "single":
            _single_tensor_l2clip(batches)
        else:
            _multi_tensor_l2clip(batches, self._step_cache, "foreach" if kind == "foreach" else None)


class Part(NamedTuple):
    """Tensors of a group that have the same scope, thresholds and type of arithmetic."""

    group: Group
    params: list[Tensor]
    grads: list[Tensor]
    scope: int
    dtype: torch.dtype
    numbers: tuple[Number, Number, float]  # u, d, s: a step is (lr / s) * clip(g; u, d)


def _scope_key(group: Group, k: int, i: int) -> ScopeKey:
    """What tells the scopes apart: that of the i-th tensor with a gradient in the k-th group."""
    scope = group["scope"]
    return (k, i) if scope == "tensor" else (k, -1) if scope == "group" else (-1, -1)


def _batches_by_scope(
    gathered: Gathered, look: Callable[[Sequence[Tensor]], StepCache | None]
) -> tuple[list[GroupAndStep], list[int]]:
    """Batches of tensors that take the same scaling, and the scope of each batch.

    look: what a kernel keeps of these gradients between steps, where one is to look at them.
    """
    parts: list[Part] = []
    scopes: dict[ScopeKey, int] = {}
    for k, (group, params, grads, *_) in enumerate(gathered):
        each = numbers(group)
        where = {id(p): i for i, p in enumerate(group["params"])} if len(each) > 1 else {}
        for together in [[i] for i in range(len(params))] if group["scope"] == "tensor" else [range(len(params))]:
            scope = scopes.setdefault(_scope_key(group, k, together[0] if together else 0), len(scopes))
            for dtype in (torch.float32, torch.float64):
                chosen = [i for i in together if compute_dtype(params[i].dtype) == dtype]
                if chosen:
                    ps, gs = [params[i] for i in chosen], [grads[i] for i in chosen]
                    parts.append(Part(group, ps, gs, scope, dtype, each[where[id(ps[0])] if where else 0]))
    owners = [p for part in parts for p in part.params]
    if not owners:
        return [], []
    local = [local_pair(p, g)[1] for part in parts for p, g in zip(part.params, part.grads, strict=True)]
    traced = torch.compiler.is_compiling() or any(one.group["differentiable"] for one in gathered)
    scope_of = [part.scope for part in parts for _ in part.params]
    # A step in parts sees one tensor or many: what the norm of a tensor is added up by must not depend on that.
    by_tensor = any(part.group["scope"] == "tensor" for part in parts)
    pairs = squares(local, owners, scope_of, len(scopes), traced, None if traced or by_tensor else look(local))
    requests = [NormRequest(part.scope, *part.numbers[:2], part.dtype) for part in parts]
    batches = [
        (part.group, _batch(part, clip)) for part, clip in zip(parts, scalings_of(pairs, requests, traced), strict=True)
    ]
    _keep_norms(gathered, scopes, pairs)
    return batches, [part.scope for part in parts]


def _keep_norms(gathered: Gathered, scopes: dict[ScopeKey, int], pairs: Tensor) -> None:
    """Put the norms of its scopes into every group whose thresholds follow them."""
    for k, (group, params, *_, kept) in enumerate(gathered):
        if is_auto(group["u"]) and params:
            norms = (pairs[:, 0] * pairs[:, 1].sqrt()).detach()
            of_group = range(len(params) if group["scope"] == "tensor" else 1)
            kept += [norms[scopes[_scope_key(group, k, i)]] for i in of_group]


def _batch(part: Part, clip: ScaleToNorm) -> StepGroup:
    lr, decay, s = part.group["lr"], part.group["weight_decay"], part.numbers[2]
    # weights decay by lr itself, not by lr / s
    rate, decay = (lr, decay) if s == 1 else (lr / s, decay * s)
    return StepGroup(part.params, part.grads, StepHyperparameters(clip, rate, decay, part.group["maximize"]))


# As in biclip.py: functions that torch's own tests look for.


def _single_tensor_l2clip(batches: Sequence[StepGroup]) -> None:
    update(batches, "single")


def _multi_tensor_l2clip(batches: Sequence[StepGroup], cache: StepCache, kernel: str | None = None) -> None:
    update(batches, kernel, cache)


@_disable_dynamo
def _fused_l2clip(batches: Sequence[StepGroup], cache: StepCache) -> None:
    update(batches, "fused", cache)
