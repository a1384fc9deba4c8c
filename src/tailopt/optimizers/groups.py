"""Param groups on their way through a step: those with gradients, and those whose settings were checked."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tailopt.clipping.dtensor import is_dtensor
from tailopt.clipping.kernels import triton_runtime
from tailopt.clipping.kernels.kernel import StepGroup
from tailopt.clipping.reference import StepHyperparameters
from tailopt.clipping.stochastic_rounding import StochasticRounding
from tailopt.native.calls import DTYPES

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
    """The groups whose settings were checked, and the hyperparameters that were built from them.

    An entry is valid while every setting of the group is the very object that was checked. A group with a tensor among
    its settings has no entry: the tensor may change in place.
    """

    def __init__(self, settings: Iterable[str]) -> None:
        self._settings = operator.itemgetter(*settings)
        self._checked: dict[int, tuple[Any, ...]] = {}  # by id of the group
        self._hparams: dict[int, list[tuple[list[int] | None, StepHyperparameters]]] = {}

    def __contains__(self, group: Group) -> bool:
        current, checked = self._settings(group), self._checked.get(id(group), ())
        return len(current) == len(checked) and all(map(operator.is_, current, checked))

    def add(self, group: Group) -> None:
        """Remember the settings of a group that was just checked; forget what was built from the settings before."""
        settings = self._settings(group)
        self._checked[id(group)] = () if any(isinstance(value, Tensor) for value in settings) else settings
        self._hparams.pop(id(group), None)

    def known_hparams(self, group: Group) -> list[tuple[list[int] | None, StepHyperparameters]] | None:
        """The hyperparameters that were kept for a group since its settings were checked, by positions."""
        return self._hparams.get(id(group))

    def keep_hparams(self, group: Group, hparams: list[tuple[list[int] | None, StepHyperparameters]]) -> None:
        """Keep the hyperparameters of a group: as the same objects, they are recognised by the step cache."""
        self._hparams[id(group)] = hparams


def skip_where(batch: StepGroup, verdict: Tensor) -> StepGroup:
    """The batch that stays as it is where the verdict is true."""
    verdicts = verdict.expand(len(batch.params))
    return batch._replace(skips=verdicts.clone() if batch.skips is None else batch.skips | verdicts)


def shared_by_scope(bad: Tensor, scopes: Sequence[int]) -> Tensor:
    """Verdicts of tensors, where those of one scope share theirs."""
    if len(set(scopes)) == len(scopes):
        return bad
    each = bad.unbind()
    of_scope: dict[int, Tensor] = {}
    for scope, verdict in zip(scopes, each, strict=True):
        of_scope[scope] = of_scope[scope] | verdict if scope in of_scope else verdict
    return torch.stack([of_scope[scope] for scope in scopes])


def check_fused(params: Sequence[Tensor]) -> None:
    """Raise for parameters that `fused=True` cannot take."""
    for p in params:
        device = (p.to_local() if is_dtensor(p) else p).device
        missing = "" if device.type == "cpu" else triton_runtime.why_missing(device)
        if missing or p.dtype not in DTYPES:
            raise RuntimeError(
                "`fused=True` requires all the params to be floating point Tensors of supported devices: "
                f"['cpu', 'cuda'] but got {p.dtype} on {device.type}{missing and ': '}{missing}. Leave `fused` unset."
            )


def check_capturable(params: Sequence[Tensor]) -> None:
    """Raise for parameters on devices whose work cannot be captured in a graph."""
    from torch.optim.optimizer import _get_capturable_supported_devices

    devices = _get_capturable_supported_devices()
    if not all(p.device.type in devices for p in params):
        used = sorted({p.device.type for p in params})
        raise AssertionError(f"If capturable=True, params must be on supported devices: {devices}, not on {used}.")


def check_rounding(group: Group) -> None:
    """Raise for a seed of stochastic rounding that is none, and for steps that cannot be rounded so."""
    seed = group["stochastic_rounding"]
    if seed is None:
        return
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"Invalid stochastic_rounding: {seed!r}; need None, or a seed: an integer from 0 to 2^63 - 1.")
    for other in ("capturable", "differentiable"):
        if group[other]:
            raise ValueError(
                f"Invalid stochastic_rounding: {seed} with {other}=True; need {other}=False, because the random bits "
                "of a step depend on its number, which the host counts. Or round to the nearest, with None."
            )


def rounding_of(group: Group, params: Sequence[Tensor]) -> StochasticRounding | None:
    """Where the random bits of a group's next step come from; None where all is rounded to the nearest."""
    if group["stochastic_rounding"] is None or not any(p.dtype == torch.bfloat16 for p in params):
        return None
    if torch.compiler.is_compiling():
        raise RuntimeError("A step with stochastic_rounding cannot be compiled. Call step() itself, or set it to None.")
    return StochasticRounding(group["stochastic_rounding"], group.get("roundings", 0))


def count_rounding(groups: Iterable[Group]) -> None:
    """Count a step that was taken, in the groups that round stochastically."""
    for group in groups:
        if group["stochastic_rounding"] is not None:
            group["roundings"] = group.get("roundings", 0) + 1
