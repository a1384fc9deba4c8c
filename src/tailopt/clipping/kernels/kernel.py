"""What a kernel takes and what it is: batches of tensors that take the same step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from tailopt.clipping.reference import Step


class Batch(NamedTuple):
    """Parameters that take the same step. `slots`: their positions in the optimizer, for statistics."""

    params: list[Tensor]
    grads: list[Tensor]
    step: Step
    slots: Sequence[int] = ()


@dataclass(frozen=True)
class Kernel:
    """run changes parameters in place; refuses(p, g, step) is empty, or the reason why it cannot take them."""

    name: str
    run: Callable[[Sequence[Batch]], None]
    refuses: Callable[[Tensor, Tensor, Step], str]
