"""The average of the iterates x_1 ... x_t, the r-th weighted by r, while a run goes on.

`simulate(average=True)` has that of the last round only; studies look at it on the way.
"""

from __future__ import annotations

import torch
from torch import Tensor


class IterateAverage:
    """Call `update` once per round; `value` is the average so far.

    Examples:
        >>> average = IterateAverage(torch.zeros(1))
        >>> for x in (3.0, 6.0):
        ...     average.update(torch.tensor([x]))
        >>> average.round, average.value  # (1 * 3 + 2 * 6) / 3
        (2, tensor([5.]))
    """

    def __init__(self, start: Tensor) -> None:
        self.round = 0
        self.value = torch.zeros_like(start)

    def update(self, x: Tensor) -> None:
        """Take in the iterate of the next round."""
        self.round += 1
        self.value.lerp_(x, 2 / (self.round + 1))
