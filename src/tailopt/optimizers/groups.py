"""Param groups on their way through a step: those with gradients, and those whose settings were checked."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor

from tailopt.clipping.kernels.kernel import StepGroup
from tailopt.clipping.reference import StepNumbers

Group = dict[str, Any]
GroupAndStep = tuple[Group, StepGroup]
ScopeOf = Callable[[int, int], int]  # (batch, position in it) -> which tensors are skipped together


class GatheredGroup(NamedTuple):
    """A group, its parameters that have gradients, and what a step knows of them.

    momenta and step_counts are those of an optimizer with momentum. A step of L2Clip puts the norms of the group's
    scopes into `norms`, where u is "auto": one, or one for each parameter of the group.
    """

    group: Group
    params: list[Tensor]
    grads: list[Tensor]
    momenta: list[Tensor]
    step_counts: list[Tensor]
    norms: list[Tensor]


Gathered = list[GatheredGroup]


class CheckedGroups:
    """The groups whose settings were checked, and the steps that were built from them.

    An entry is valid while every setting of the group is the very object that was checked. A group with a tensor among
    its settings has no entry: the tensor may change in place.
    """

    def __init__(self, settings: Iterable[str]) -> None:
        self._settings = operator.itemgetter(*settings)
        self._checked: dict[int, tuple[Any, ...]] = {}  # by id of the group
        self._steps: dict[int, list[tuple[list[int] | None, StepNumbers]]] = {}

    def __contains__(self, group: Group) -> bool:
        current, checked = self._settings(group), self._checked.get(id(group), ())
        return len(current) == len(checked) and all(map(operator.is_, current, checked))

    def add(self, group: Group) -> None:
        """Remember the settings of a group that was just checked; forget the steps of the settings before."""
        settings = self._settings(group)
        self._checked[id(group)] = () if any(isinstance(value, Tensor) for value in settings) else settings
        self._steps.pop(id(group), None)

    def steps(self, group: Group) -> list[tuple[list[int] | None, StepNumbers]] | None:
        """The steps that were kept for a group since its settings were checked."""
        return self._steps.get(id(group))

    def keep_steps(self, group: Group, steps: list[tuple[list[int] | None, StepNumbers]]) -> None:
        """Keep the steps of a group: as the same objects, they are recognised by the step cache."""
        self._steps[id(group)] = steps
