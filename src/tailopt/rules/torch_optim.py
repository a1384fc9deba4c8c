"""Any optimizer class of torch.optim, or a class like them, as a rule.

Every step builds the class over the tensors and gives it the state of the last step back: what it keeps per parameter
and what it changes in its group. Nothing bounds how far it moves, and it does not use the step cache.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tailopt.clipping.step_cache import StepCache
from tailopt.rules.rule import Hyperparameters, ParamStates, Rule, Tensors

REFUSED = {"LBFGS": "it needs a closure", "SparseAdam": "it takes sparse gradients alone"}
CHANGED_OPTIONS_KEY = "param_group"  # in the first parameter's state: the options that the class changed in its group


def torch_rule(kind: type[Optimizer]) -> Rule:
    """The rule of an optimizer class; its keyword arguments are the options.

    Examples:
        >>> x, states = torch.ones(2), [{}]
        >>> torch_rule(torch.optim.SGD).step([x], [torch.ones(2)], states, {"lr": 0.5})
        >>> x
        tensor([0.5000, 0.5000])
    """
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise TypeError(f"Invalid optimizer: {kind!r}; need a name or a class of torch.optim.")
    if kind.__name__ in REFUSED:
        raise ValueError(f"{kind.__name__} cannot be used here: {REFUSED[kind.__name__]}. Take another optimizer.")

    def step(
        params: Tensors, grads: Tensors, states: ParamStates, hparams: Hyperparameters, cache: StepCache | None = None
    ) -> None:
        _step(kind, params, grads, states, hparams)

    accepted = list(inspect.signature(kind.__init__).parameters.values())[2:]  # without self and params
    required = tuple(a.name for a in accepted if a.default is a.empty and a.kind is not a.VAR_KEYWORD)
    options = {a.name: a.default for a in accepted if a.default is not a.empty}
    return Rule(kind.__name__, required, step, lambda hparams: None, options)


def _step(
    kind: type[Optimizer],
    params: Tensors,
    grads: Tensors,
    states: ParamStates,
    hparams: Hyperparameters,
) -> None:
    leaves = [p.detach() for p in params]  # the same memory
    for leaf, g in zip(leaves, grads, strict=True):
        leaf.grad = g.clone()  # some optimizers write into it
    optimizer = kind(leaves, **_keyword_arguments(hparams))
    group = optimizer.param_groups[0]
    before = _settings(group)
    for leaf, state in zip(leaves, states, strict=True):
        group.update(state.pop(CHANGED_OPTIONS_KEY, {}))
        if state:
            optimizer.state[leaf] = dict(state)
    optimizer.step()
    for leaf, state in zip(leaves, states, strict=True):
        state.clear()
        state.update(optimizer.state[leaf])
    changed = {key: value for key, value in _settings(group).items() if key not in before or before[key] != value}
    if changed:
        states[0][CHANGED_OPTIONS_KEY] = changed


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params" and not isinstance(value, Tensor)}


def _keyword_arguments(hparams: Hyperparameters) -> dict[str, Any]:
    for name, value in hparams.items():
        if isinstance(value, list) or (isinstance(value, torch.Tensor) and value.numel() != 1):
            raise ValueError(f"Invalid {name}: {value}; an optimizer of torch.optim takes one number for all tensors.")
    return dict(hparams)
