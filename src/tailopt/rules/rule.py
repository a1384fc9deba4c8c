"""What an update rule is.

A rule is the arithmetic of one optimizer, with nothing hidden: parameters, gradients, state and numbers come in as
arguments, the parameters and their state are changed in place, and nothing else is. Tensors may have any number of
leading dimensions: one node's parameter, the parameters of many nodes stacked, and a rank's shard are the same to it.
An outer rule takes the negated mean displacement for a gradient.

Numbers (`lr`, `u`, `d`, `eps` ...) are floats, tensors that broadcast against a parameter, or a list with one of
either for each parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

Number = float | Tensor
Numbers = Mapping[str, Any]
State = dict[str, Any]  # of one parameter: tensors and plain values; empty before its first step
Step = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[State], Numbers], None]


@dataclass(frozen=True)
class Reach:
    """How far one step moves at most: every coordinate, or the Euclidean norm over all tensors or over each.

    length: a number, a tensor, or a list with one for each parameter; what decoupled weight decay adds is not in it.
    """

    kind: Literal["coordinate", "norm", "tensor norm"]
    length: Any


@dataclass(frozen=True)
class Rule:
    """One optimizer's arithmetic.

    Args:
        name: as in the name of an algorithm.
        settings: what must be given.
        options: what may be given, with its default.
        step: (parameters, gradients, states, numbers) -> None, in place.
        reach: numbers -> how far one step moves at most; None where nothing bounds it.
        state_names: the tensors a parameter's state holds after a step.
    """

    name: str
    settings: tuple[str, ...]
    step: Step
    reach: Callable[[Numbers], Reach | None]
    options: Mapping[str, Any] = field(default_factory=dict)
    state_names: tuple[str, ...] = ()


def of(value: Any, i: int) -> Any:
    """A number of the i-th parameter: its own where there is a list, else the common one."""
    return value[i] if isinstance(value, list) else value


def given(value: Number) -> bool:
    """Whether an option such as momentum does anything; a tensor is taken to."""
    return isinstance(value, Tensor) or value != 0


def listed(value: Any, n: int) -> list[Any]:
    """A number for each of n parameters."""
    return value if isinstance(value, list) else [value] * n


def product(*values: Any) -> Any:
    """The product of numbers some of which may be lists with one for each parameter."""
    lengths = [len(value) for value in values if isinstance(value, list)]
    if lengths:
        return [product(*(of(value, i) for value in values)) for i in range(lengths[0])]
    result = values[0]
    for value in values[1:]:
        result = result * value
    return result
