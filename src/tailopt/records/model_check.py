"""Whether a checkpoint fits the model that is to go on from it.

    check_same_model(saved, current)    raises ValueError with the tensors that differ

Simulations and real nodes hold their weights in different forms; both describe them as a `ModelLayout`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

TensorSpec = tuple[torch.dtype | None, tuple[int, ...]]  # a dtype of None is not compared


@dataclass(frozen=True)
class ModelLayout:
    """What a checkpoint and a model must have in common.

    Args:
        weights: dtype (or None) and shape of every parameter, in order.
        buffers: the same of every buffer; their order does not count.
        average: whether there is an iterate average.
    """

    weights: Mapping[str, TensorSpec]
    buffers: Mapping[str, TensorSpec]
    average: bool


def check_same_model(saved: ModelLayout, current: ModelLayout) -> None:
    """Raise ValueError unless a checkpoint is of this model and was written with the same setting of `average`.

    Examples:
        >>> wide, narrow = {"w": (torch.float32, (3,))}, {"w": (torch.float32, (2,))}
        >>> check_same_model(ModelLayout(wide, {}, False), ModelLayout(narrow, {}, False))
        Traceback (most recent call last):
        ValueError: The checkpoint is of another model: w is float32 of shape (3,) there, float32 of shape (2,) here.
    """
    if list(saved.weights) != list(current.weights):
        names = _in_one_only(saved.weights, current.weights)
        raise ValueError(
            f"The checkpoint is of another model: {names} are in one of them only."
            if names
            else "The checkpoint is of another model: its parameters have the same names in another order."
        )
    if names := _in_one_only(saved.buffers, current.buffers):
        raise ValueError(f"The checkpoint is of another model: the buffers {names} are in one of them only.")
    for then, now in ((saved.weights, current.weights), (saved.buffers, current.buffers)):
        for name in now:
            if _differ(then[name], now[name]):
                raise ValueError(
                    f"The checkpoint is of another model: {name} is {_describe(then[name])} there, "
                    f"{_describe(now[name])} here."
                )
    if saved.average != current.average:
        raise ValueError(
            f"The checkpoint was written with average={saved.average}, and the run has average={current.average}. "
            "Resume with the same."
        )


def _in_one_only(saved: Iterable[str], current: Iterable[str], limit: int = 5) -> str:
    names = sorted(set(saved) ^ set(current))
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _differ(then: TensorSpec, now: TensorSpec) -> bool:
    return then[1] != now[1] or (None not in (then[0], now[0]) and then[0] != now[0])


def _describe(tensor: TensorSpec) -> str:
    dtype, shape = tensor
    return f"of shape {shape}" if dtype is None else f"{str(dtype).removeprefix('torch.')} of shape {shape}"
