"""What the programs of the Triton kernel count: a row for each program, which adds to it in every step.

So nothing is shared and no order is left to chance. The rows are added up when statistics are read, by one program for
each tensor, into the same `Counters` that every other kernel adds to.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tailopt.clipping.kernels.triton_runtime import programs
from tailopt.clipping.launch_tables import Launch, Staging, programs_of
from tailopt.native.clip import Counters

ROWS_AT_ONCE = 256


class PartialCounts:
    """The rows of one launch.

    Args:
        launch: whose programs count.
        slots: the row of the counters that each of its tensors has.
    """

    def __init__(self, launch: Launch, slots: Sequence[int]) -> None:
        self.device, self.slots = launch.kind.device, list(slots)
        each = programs_of(launch.sizes, launch.kind)
        tensors = torch.stack([each.cumsum(0) - each, each], dim=1)
        staging = Staging()
        self._tensors = staging.send(tensors, self.device)
        self._slots = staging.send(torch.tensor(self.slots, dtype=torch.int64, device="cpu"), self.device)
        total = launch.chunks.shape[0]
        self.counts = torch.zeros(total, 5, dtype=torch.int64, device=self.device)
        self.sums = torch.zeros(total, 2, dtype=torch.float64, device=self.device)

    def add_to(self, counters: Counters) -> None:
        """Add what was counted to the counters, and start again at zero."""
        programs().sum_programs[(len(self.slots),)](
            self.counts,
            self.sums,
            self._tensors,
            self._slots,
            counters.table,
            counters.table.view(torch.float64),
            COLUMNS=counters.table.shape[1],
            WIDTH=ROWS_AT_ONCE,
            num_warps=4,
        )
        self.counts.zero_()
        self.sums.zero_()
