"""How far an inner optimizer of the user's can have moved: the settings of each step, and the bound that they give.

Param groups may differ in every setting. A setting that differs is noted as a list with one entry per parameter, and
each group is bounded by its own settings. Only a norm over all parameters needs the groups together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tailopt.optimizers.biclip import BiClip
from tailopt.optimizers.l2clip import L2Clip
from tailopt.rounds.guard import Bound, bound
from tailopt.rules.adagrad import ADAGRAD
from tailopt.rules.adam import ADAM, ADAMW
from tailopt.rules.biclip import BICLIP
from tailopt.rules.l2clip import BICLIP_L2
from tailopt.rules.rule import Hyperparameters, Rule, value_for_param

# The hyperparameters that decide how far a step can move.
BOUNDING = ("lr", "u", "d", "eps", "weight_decay", "betas", "momentum", "scope")
RULES: dict[type, Rule] = {
    BiClip: BICLIP,
    L2Clip: BICLIP_L2,
    torch.optim.Adam: ADAM,
    torch.optim.AdamW: ADAMW,
    torch.optim.Adagrad: ADAGRAD,
}
# Unless a group says otherwise, these optimizers add weight decay to the gradient (coupled), so the step bound already
# covers it and no extra term is needed.
COUPLED = (torch.optim.Adam, torch.optim.Adagrad)


def bounding_hparams(optimizer: Optimizer, params: Sequence[Tensor]) -> Hyperparameters:
    """Return what the optimizer steps with now; a list has one entry per parameter, where groups differ."""
    groups = optimizer.param_groups
    hparams: dict[str, Any] = {}
    for name in BOUNDING:
        values = [group[name] for group in groups if name in group]
        if len(values) < len(groups):
            continue
        if name == "betas":
            values = [tuple(value) for value in values]  # a list would be one entry per parameter
        if name == "weight_decay":
            pairs = zip(groups, values, strict=True)
            values = [value if _is_decoupled(optimizer, group) else 0.0 for group, value in pairs]
        if all(_equal(value, values[0]) for value in values[1:]):
            hparams[name] = _copied(values[0])
        else:
            copies = [_copied(value) for value in values]
            hparams[name] = [copies[k] for k in _group_of_each(optimizer, params)]
    hparams["bias_correction"] = True  # last: a checkpoint in the middle of a round keeps this order
    return hparams


def inner_bound(optimizer: Optimizer, params: Sequence[Tensor], steps: Sequence[Hyperparameters]) -> Bound:
    """Return how far the optimizer can have moved the parameters in steps with these hyperparameters."""
    rule = RULES.get(type(optimizer))
    if rule is None or not steps:
        return Bound(None)
    if rule is BICLIP_L2:
        if all(hparams["scope"] == "global" for hparams in steps):
            return bound(rule, steps)
        # scopes that differ have no common norm, but no tensor moves farther than the scope that it is in
        steps = [{**hparams, "scope": "tensor"} for hparams in steps]
    if not any(isinstance(value, list) for hparams in steps for value in hparams.values()):
        return bound(rule, steps)
    group_of_param = _group_of_each(optimizer, params)
    first_of_group = {k: group_of_param.index(k) for k in group_of_param}
    by_group = {k: bound(rule, [_of_param(hparams, i) for hparams in steps]) for k, i in first_of_group.items()}
    kinds = {limit.kind for limit in by_group.values() if limit.kind is not None}
    if not kinds:
        return Bound(None)
    (kind,) = kinds
    limits = [by_group[k] for k in group_of_param]
    constants = [limit.constant if limit.kind is not None else math.inf for limit in limits]
    return Bound(kind, constants, [limit.slope for limit in limits], len(steps))


def _is_decoupled(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Return whether a group's weight decay moves the weights beside the step."""
    return bool(group.get("decoupled_weight_decay", type(optimizer) not in COUPLED))


def _group_of_each(optimizer: Optimizer, params: Sequence[Tensor]) -> list[int]:
    """Return the number of each parameter's group; 0 for a parameter that has left the optimizer."""
    groups = {id(p): k for k, group in enumerate(optimizer.param_groups) for p in group["params"]}
    return [groups.get(id(p), 0) for p in params]


def _of_param(hparams: Hyperparameters, i: int) -> Hyperparameters:
    return {name: value_for_param(value, i) for name, value in hparams.items()}


def _equal(a: Any, b: Any) -> bool:
    """Return whether two groups have the same value; tensors of different shapes cannot be compared by element."""
    if a is b:  # one default of all groups: a tensor on a device is not waited for
        return True
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.device == b.device and torch.equal(a, b)
    return bool(a == b)


def _copied(value: Any) -> Any:
    """Return a value that no later step changes: torch's schedulers change a tensor learning rate in place."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return [_copied(entry) for entry in value] if isinstance(value, list) else value
