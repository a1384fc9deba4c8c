"""The hyperparameters of many configurations of one algorithm, as tensors that broadcast against stacked weights.

A hyperparameter in which configurations differ becomes, for every parameter of the model, a tensor of shape
[configurations, 1, ..., 1]; one that all of them share stays a number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tailopt.algorithms import Algorithm
from tailopt.clipping.operators import compute_dtype
from tailopt.rounds.hyperparameters import AlgorithmHyperparameters, RuleHyperparameters
from tailopt.rules.rule import Hyperparameters, value_for_param
from tailopt.settings import PUBLIC_NAMES


class ConfigurationHyperparameters:
    """The hyperparameters of both rules of all configurations.

    Args:
        each: of every configuration.
        weights: one configuration's parameters, for shapes, types and the device.
    """

    def __init__(self, each: Sequence[AlgorithmHyperparameters], weights: Sequence[Tensor]) -> None:
        self._each, self._weights = list(each), list(weights)
        self._scheduled = any(side.schedules for h in each for side in (h.inner, h.outer))
        self._by_step = any(h.inner.by_step for h in each)
        self._cache: dict[Any, Hyperparameters] = {}

    def inner_at(self, t: int, steps_done: int) -> Hyperparameters:
        """Return those of the inner rule in round t, after so many local steps; at one moment the same object."""
        moment = ("inner", t if self._scheduled else 0, steps_done if self._by_step else 0)
        return self._cached(moment, lambda h: h.inner, t, steps_done)

    def outer_at(self, t: int) -> Hyperparameters:
        """Return those of the outer rule in round t."""
        return self._cached(("outer", t if self._scheduled else 0), lambda h: h.outer, t, 0)

    def select(self, which: Sequence[int]) -> ConfigurationHyperparameters:
        """Return those of some configurations."""
        return ConfigurationHyperparameters([self._each[c] for c in which], self._weights)

    def _cached(
        self, moment: Any, side: Callable[[AlgorithmHyperparameters], RuleHyperparameters], t: int, steps_done: int
    ) -> Hyperparameters:
        if moment not in self._cache:
            if len(self._cache) > 64:  # those of past rounds
                self._cache.clear()
            self._cache[moment] = stacked_values([side(h).at(t, steps_done) for h in self._each], self._weights)
        return self._cache[moment]


def stacked_values(each: Sequence[Hyperparameters], weights: Sequence[Tensor]) -> Hyperparameters:
    """Return one mapping for all configurations.

    Examples:
        >>> found = stacked_values([{"lr": 0.1, "eps": 1e-8}, {"lr": 0.2, "eps": 1e-8}], [torch.zeros(3, 4)])
        >>> found["eps"], found["lr"][0].shape
        (1e-08, torch.Size([2, 1, 1]))
    """
    return {key: _stacked_value(key, [h[key] for h in each], weights) for key in each[0]}


def _stacked_value(key: str, values: list[Any], weights: Sequence[Tensor]) -> Any:
    first = values[0]
    if all(value is first for value in values) or all(_is_plain(v) and v == first for v in values):
        return first
    by_parameter = []
    for i, w in enumerate(weights):
        own = [value_for_param(value, i) for value in values]
        wrong = next((v for v in own if not _is_number(v)), None)
        if wrong is not None:
            raise ValueError(
                f"Invalid configurations: they differ in {key}, and one has {wrong!r}; side by side only numbers may "
                "differ. Give all of them the same, or run them in separate calls."
            )
        numbers = torch.tensor([float(v) for v in own], dtype=torch.float64)
        by_parameter.append(numbers.to(w.device, compute_dtype(w.dtype)).reshape(-1, *[1] * w.dim()))
    return by_parameter


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | tuple)


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool | str) and hasattr(value, "__float__") and getattr(value, "ndim", 0) == 0


def check_one_algorithm(algorithms: Sequence[Algorithm]) -> None:
    """Refuse configurations of different algorithms."""
    if not algorithms:
        raise ValueError("Invalid algorithms: there are none; need one or more settings of one algorithm.")
    first = algorithms[0]
    for c, other in enumerate(algorithms):
        for name in ("outer", "inner", "inner_state", "send_preconditioner"):
            mine, its = getattr(first, name), getattr(other, name)
            if mine != its:
                raise ValueError(
                    f"Invalid algorithms: number {c} has {name} {its!r} and the first {mine!r}; side by side run "
                    "settings of one algorithm. Run the others in a call of their own."
                )
        for side in ("outer", "inner"):
            mine, its = (_momentum_of_biclip(a, side) for a in (first, other))
            if mine != its:
                name = PUBLIC_NAMES[side].get("momentum", "momentum")
                raise ValueError(
                    f"Invalid algorithms: number {c} has {name}={its} and the first {mine}; side by side every BiClip "
                    "has one momentum. Give all of them the same, or run them in separate calls."
                )


def stacking_key(algorithm: Algorithm) -> tuple[Any, ...]:
    """Return what configurations of one algorithm must have in common to run side by side: all that is no number.

    Examples:
        >>> from tailopt.algorithms import algorithm
        >>> one, two, three = (
        ...     algorithm("avg-adam", ilr=ilr, ieps=1e-8, inner_betas=(beta, 0.99))
        ...     for ilr, beta in [(0.1, 0.9), (0.2, 0.9), (0.1, 0.5)]
        ... )
        >>> stacking_key(one) == stacking_key(two), stacking_key(one) == stacking_key(three)
        (True, False)
    """
    key: list[Any] = [algorithm.inner_state, algorithm.send_preconditioner]
    for side in ("outer", "inner"):
        key.append(_momentum_of_biclip(algorithm, side))
        key += [(name, repr(value)) for name, value in algorithm.hparams(side).items() if not _is_number(value)]
    return tuple(key)


def _momentum_of_biclip(algorithm: Algorithm, side: str) -> float:
    """Return the momentum of a side that steps by BiClip, whose kernels take one number for it; else 0."""
    rule = algorithm.outer if side == "outer" else algorithm.inner
    if not isinstance(rule, str) or not rule.startswith("biclip"):
        return 0.0
    return float(algorithm.hparams(side).get("momentum", 0.0))
