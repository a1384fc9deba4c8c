"""One step of an optimizer, taken in parts: for some of its parameters after others, with the bits of a whole step.

    StepInParts(optimizer)    checks all settings; nothing has moved yet
    take(pairs)               the step of these parameters, which have these gradients; any number of times
    end()                     what a step does once: thresholds follow the gradients, warnings
    abandon()                 instead of `end`: the parts stay taken, and nothing counts

Settings are those of the beginning. A step in which one parameter depends on the gradients of others cannot be taken
in parts: `refusal` gives the reason.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tailopt.optimizers.auto_thresholds import Observation, is_auto
from tailopt.optimizers.clipping_optimizer import ClippingOptimizer
from tailopt.optimizers.groups import Gathered, GatheredGroup, Group
from tailopt.optimizers.rounding_steps import count_rounding

NOT_SETTINGS = ("params", "param_names", "thresholds", "calibration", "roundings")


def refusal(group: Group) -> str:
    """Why the step of a group cannot be taken in parts; empty if it can."""
    if group.get("scope", "tensor") != "tensor":
        return (
            f"scope={group['scope']!r} clips a norm over several parameters, which is known only when all gradients "
            "are there. Use scope='tensor', or BiClip."
        )
    if group["nonfinite"] != "propagate":
        return (
            f"nonfinite={group['nonfinite']!r} decides before any parameter moves, and the first ones have moved when "
            "the last gradients come. Use nonfinite='propagate'."
        )
    if isinstance(group.get("dead_zone"), str):
        return (
            f"dead_zone={group['dead_zone']!r} needs the largest of all gradients before the first parameter moves. "
            "Use a number, or 0."
        )
    if group["differentiable"]:
        return "differentiable=True keeps all gradients for a derivative of the step. Use differentiable=False."
    return ""


class StepInParts:
    """A step that has begun.

    Args:
        optimizer: a BiClip or L2Clip.
    """

    def __init__(self, optimizer: ClippingOptimizer) -> None:
        self._optimizer, groups = optimizer, optimizer.param_groups
        for group in groups:
            if why := refusal(group):
                raise ValueError(f"A step cannot be taken in parts: {why}")
        optimizer._check_groups()
        self._settings = [_settings(group) for group in groups]
        self._group_of = _groups_by_parameter(groups)
        # what `abandon` gives back: the counts of a step that is not completed are no counts
        self._recorder_before = optimizer._recorder.copy()
        self._calibrations = [(g, copy.deepcopy(g["calibration"])) for g in groups if is_auto(g["u"])]
        self._observation = Observation() if self._calibrations else None
        if optimizer._statistics is not None:
            optimizer._recorder.begin_pass(len(optimizer.names()))
        check = optimizer._threshold_check
        self._looks = check is not None and check.due()

    def rest(self) -> list[tuple[Tensor, Tensor]]:
        """Parameters that have a gradient in `grad`, those of groups that came after the beginning too."""
        groups = self._optimizer.param_groups
        self._group_of = _groups_by_parameter(groups)
        return [(p, p.grad) for group in groups for p in group["params"] if p.grad is not None]

    def has(self, p: Tensor) -> bool:
        """Whether a parameter was in the optimizer at the beginning."""
        return id(p) in self._group_of

    def take(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Take the step of these parameters with these gradients."""
        optimizer = self._optimizer
        gathered = self._gathered(pairs)
        batches, _ = optimizer._batches(gathered)
        if self._looks:
            optimizer._look_at_part(batches)
        optimizer._run_batches(batches)
        if self._observation is not None:
            optimizer._observe(gathered, self._observation)

    def _gathered(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Gathered:
        by_group: dict[int, GatheredGroup] = {}
        for p, g in pairs:
            group = self._group_of[id(p)]
            one = by_group.setdefault(id(group), GatheredGroup(group, [], [], [], [], []))
            one.params.append(p)
            one.grads.append(g)
        for group, params, grads, momenta, step_counts, _ in by_group.values():
            if group.get("momentum"):
                self._optimizer._append_momenta(group, params, grads, momenta, step_counts)
            self._optimizer._check_implementation(group, params, grads)
        return list(by_group.values())

    def changed_settings(self) -> list[str]:
        """Settings that differ from those of the beginning, as text."""
        return [
            f"{key} of group {i}"
            for i, (before, group) in enumerate(zip(self._settings, self._optimizer.param_groups, strict=False))
            for key, now in _settings(group).items()
            if key in before and _differ(before[key], now)
        ]

    def end(self) -> None:
        """Do what a step does once, after its last part."""
        count_rounding(self._optimizer.param_groups)
        try:
            if self._observation is not None:
                self._observation.settle()
        finally:  # either may warn, and a warning may be an error
            if self._looks and self._optimizer._threshold_check is not None:
                self._optimizer._threshold_check.report()

    def abandon(self) -> None:
        """Give back what was counted; the parameters, and the momenta that go with them, stay where they are."""
        self._optimizer._recorder.gather()  # kernels keep rows of their own: the next step finds them at zero
        self._optimizer._recorder = self._recorder_before
        for group, before in self._calibrations:
            group["calibration"] = before
        if self._optimizer._threshold_check is not None:
            self._optimizer._threshold_check.forget()


def _groups_by_parameter(groups: Iterable[Group]) -> dict[int, Group]:
    return {id(p): group for group in groups for p in group["params"]}


def _settings(group: Group) -> dict[str, tuple[Any, int]]:
    """Every setting, and for a tensor how often it was written to."""
    versions = {key: value._version if isinstance(value, Tensor) else 0 for key, value in group.items()}
    return {key: (value, versions[key]) for key, value in group.items() if key not in NOT_SETTINGS}


def _differ(before: tuple[Any, int], now: tuple[Any, int]) -> bool:
    if before[0] is now[0]:
        return before[1] != now[1]
    tensors = isinstance(before[0], torch.Tensor) or isinstance(now[0], torch.Tensor)
    return tensors or bool(before[0] != now[0])
