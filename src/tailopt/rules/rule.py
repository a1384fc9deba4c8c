"""What an update rule is.

A rule is the arithmetic of one optimizer, with nothing hidden: parameters, gradients, state and hyperparameters come in
as arguments; the step changes the parameters and their state in place, and nothing else. Tensors may have any number of
leading dimensions: a rule treats one node's parameter, the stacked parameters of many nodes and a rank's shard alike.
An outer rule takes the negated mean displacement as the gradient.

Hyperparameters (`lr`, `u`, `d`, `eps` ...) are floats, tensors that broadcast against a parameter, or a list with one
of either for each parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

from tailopt.clipping.operators import Number
from tailopt.clipping.step_cache import StepCache

Hyperparameters = Mapping[str, Any]
ParamState = dict[str, Any]  # tensors and plain values of one parameter; empty before its first step
Tensors = Sequence[Tensor]
ParamStates = Sequence[ParamState]


class StepFunction(Protocol):
    """A rule's step: changes parameters and states in place.

    cache: what the caller keeps between the steps of the same parameters. It saves time and changes no bit; rules
    without a kernel ignore it.
    """

    def __call__(
        self,
        params: Tensors,
        grads: Tensors,
        states: ParamStates,
        hparams: Hyperparameters,
        cache: StepCache | None = None,
    ) -> None: ...


@dataclass(frozen=True)
class StepBound:
    """How far one step moves at most: every coordinate, or the Euclidean norm over all tensors or over each.

    limit: a number, a tensor, or a list with one for each parameter. Decoupled weight decay is not included.
    """

    kind: Literal["coordinate", "norm", "tensor norm"]
    limit: Any


ByParameter = Callable[[Any, Sequence[str], Sequence[int]], list[Any]]  # (given, names, dimensions) -> values
Thresholds = tuple[Any, Any, Any]  # u, d and the dead zone of one tensor


def no_thresholds(params: Tensors, grads: Tensors, hparams: Hyperparameters) -> list[Thresholds]:
    """Those of a rule that clips no coordinates: nothing is above u or below d."""
    return [(math.inf, 0.0, 0.0)] * len(params)


@dataclass(frozen=True)
class Rule:
    """One optimizer's arithmetic.

    Args:
        name: as in the name of an algorithm.
        required: hyperparameters without a default.
        defaults: of the other hyperparameters.
        step: (parameters, gradients, states, hyperparameters, cache) -> None, in place.
        step_bound: hyperparameters -> how far one step moves at most; None if nothing bounds it.
        state_names: the tensors in a parameter's state after a step.
        needs_norm: whether a step needs the norm of the whole gradient. A caller that holds only a part of the
            gradient passes the norm as the hyperparameter `norm`.
        needs_whole_tensors: whether a step needs every parameter as it is: no shard of it, and not stacked with those
            of other nodes.
        is_elementwise: whether a coordinate moves by what its own gradient says and by nothing else.
        thresholds: (parameters, gradients, hyperparameters) -> of every tensor, for statistics.
        by_parameter: hyperparameters that become a list with a value for each parameter, by functions of what is given
            and of the names and the numbers of dimensions of all parameters.
        auto_u_limits: what a u that is "auto" limits: every element, or norms; None where u may not be "auto".
    """

    name: str
    required: tuple[str, ...]
    step: StepFunction
    step_bound: Callable[[Hyperparameters], StepBound | None]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    state_names: tuple[str, ...] = ()
    needs_norm: bool = False
    needs_whole_tensors: bool = False
    is_elementwise: bool = False
    thresholds: Callable[[Tensors, Tensors, Hyperparameters], list[Thresholds]] = no_thresholds
    by_parameter: Mapping[str, ByParameter] = field(default_factory=dict)
    auto_u_limits: Literal["elements", "norms"] | None = None


def value_for_param(value: Any, i: int) -> Any:
    """A hyperparameter of the i-th parameter: its own value if there is a list, else the common one."""
    return value[i] if isinstance(value, list) else value


def scaled_rate_and_decay(hparams: Hyperparameters, i: int) -> tuple[Any, Any]:
    """The rate of the i-th parameter's step and its weight decay.

    With thresholds that are "auto" a step is (lr / s) * clip(g; u, d), and weights still decay by lr itself.

    Examples:
        >>> scaled_rate_and_decay({"lr": 0.5, "s": [1.0, 4.0], "weight_decay": 0.25}, 1)
        (0.125, 1.0)
    """
    lr, decay = value_for_param(hparams["lr"], i), hparams.get("weight_decay", 0.0)
    s = value_for_param(hparams.get("s", 1.0), i)
    return (lr, decay) if s == 1 else (lr / s, decay * s)


def largest_step(hparams: Hyperparameters) -> Any:
    """How far a rule that clips by u can move in a step: lr * u, or (lr / s) * u where thresholds are "auto"."""
    u, s = hparams["u"], hparams.get("s")
    if s is not None:
        u = [a / b for a, b in zip(u, s, strict=True)] if isinstance(u, list) else u / s
    return product(hparams["lr"], u)


def can_step_flat_without_state(rule: Rule, hparams: Hyperparameters) -> bool:
    """Whether one step on all parameters laid out as one tensor has the bits of a step on each, and keeps no state."""
    alike = all(isinstance(value, int | float | bool) for value in hparams.values())
    return alike and rule.is_elementwise and not hparams.get("momentum")


def is_active(value: Number) -> bool:
    """Whether an option such as momentum has an effect; a tensor counts as active, without reading it."""
    return isinstance(value, Tensor) or value != 0


def as_list(value: Any, n: int) -> list[Any]:
    """A hyperparameter as a list with one value for each of n parameters."""
    return value if isinstance(value, list) else [value] * n


def product(*values: Any) -> Any:
    """The product of numbers, some of which may be lists with one for each parameter."""
    lengths = [len(value) for value in values if isinstance(value, list)]
    if lengths:
        return [product(*(value_for_param(value, i) for value in values)) for i in range(lengths[0])]
    result = values[0]
    for value in values[1:]:
        result = result * value
    return result
