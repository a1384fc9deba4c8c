"""How many coordinates local steps cut to u and raised to d, by tensor: the `statistics` of a row of the history.

A node's counts of a round are `NodeCounts`. Real nodes send them to each other as one tensor, `packed`; reading it is
exact, so that the history of real nodes is that of a simulation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tailopt.arguments import check_choice, check_flags
from tailopt.clipping.counts import EXPONENT, STRIDE, Counts, count_in_torch, read
from tailopt.native.clip import BINS, Counters
from tailopt.rounds.gradient_statistics import added
from tailopt.rules.rule import Thresholds

HISTOGRAMS = "histograms"  # counts also by magnitude
FIELDS = ("elements", "zero", "below", "above", "nonfinite", "squares", "largest")
_WORDS = 7  # of a tensor's counts; behind them u and d, and for histograms the octaves


def check_statistics(statistics: Any) -> None:
    """Refuse what is not one of the choices."""
    if isinstance(statistics, str):
        check_choice("statistics", statistics, (False, True, HISTOGRAMS))
    else:
        check_flags(statistics=statistics)


@dataclass(frozen=True)
class NodeCounts:
    """What one node's local steps of a round did to the coordinates of its gradients.

    Args:
        counts: of every tensor.
        limits: u and d of every tensor in the last step that moved it; NaN where they are no numbers.
    """

    counts: list[Counts]
    limits: list[tuple[float, float]]


class ClippingCounter:
    """Counts the gradients of one node's local steps.

    Args:
        statistics: `True`, or "histograms".
        n_params: how many parameters there are.

    Examples:
        >>> counter = ClippingCounter(True, n_params=1)
        >>> counter.add([0], [torch.tensor([0.05, 0.5, 3.0])], [(1.0, 0.1, 0.0)])
        >>> found = unpacked(counter.packed())
        >>> found.counts[0].above, found.counts[0].below, found.limits
        (1, 1, [(1.0, 0.1)])
    """

    def __init__(self, statistics: bool | str, n_params: int) -> None:
        self._histograms, self._n_params = statistics == HISTOGRAMS, n_params
        self._counters: dict[torch.device, Counters] = {}
        self._limits: dict[int, Thresholds] = {}
        self._before: Tensor | None = None  # what a checkpoint had counted of this round

    def add(self, positions: Sequence[int], grads: Sequence[Tensor], thresholds: Sequence[Thresholds]) -> None:
        """Count one local step: the gradients of the parameters at these positions, before it takes place."""
        for i, g, of_tensor in zip(positions, grads, thresholds, strict=True):
            count_in_torch(g.coalesce() if g.is_sparse else g, i, of_tensor, self._counters_on(g.device))
            self._limits[i] = of_tensor

    def _counters_on(self, device: torch.device) -> Counters:
        if device not in self._counters:
            counters = Counters.empty(self._n_params, self._histograms, device)
            counters.sample_offset = STRIDE - 1
            if self._before is not None:  # sums go on in the order of the steps
                counters.table.copy_(self._before[:, :_WORDS])
                if counters.bins is not None:
                    counters.bins.copy_(self._before[:, _WORDS + 2 :])
                self._before = None
            self._counters[device] = counters
        return self._counters[device]

    def load(self, packed: Tensor) -> None:
        """Continue from what a checkpoint in the middle of a round has as `packed`."""
        self._before = packed
        self._limits = {i: (u, d, 0.0) for i, (u, d) in enumerate(unpacked(packed).limits)}

    def packed(self) -> Tensor:
        """Everything that was counted, on the CPU; waits for the device."""
        tables = [] if self._before is None else [_without_limits(self._before)]
        for counters in self._counters.values():
            parts = [counters.table] if counters.bins is None else [counters.table, counters.bins]
            tables.append(torch.cat(parts, 1).cpu())
        nothing = torch.zeros(self._n_params, _WORDS + BINS * self._histograms, dtype=torch.int64)
        counted = added(torch.stack([*tables, nothing]))
        unknown = (math.nan, math.nan, 0.0)
        limits = [[_number(x) for x in self._limits.get(i, unknown)[:2]] for i in range(self._n_params)]
        words = torch.tensor(limits, dtype=torch.float64).view(-1, 2).view(torch.int64)
        return torch.cat([counted[:, :_WORDS], words, counted[:, _WORDS:]], 1)

    def counts(self) -> NodeCounts:
        """Everything that was counted."""
        return unpacked(self.packed())


def unpacked(packed: Tensor) -> NodeCounts:
    """Read the counts of one node."""
    table, limits, bins = packed.split([_WORDS, 2, packed.shape[1] - _WORDS - 2], 1)
    bins = bins.contiguous() if bins.shape[1] else None
    counts = read(Counters(table.contiguous(), bins, None if bins is None else torch.zeros_like(bins)))
    pairs = limits.contiguous().view(torch.float64).tolist()
    return NodeCounts(counts, [(u, d) for u, d in pairs])


def over_ranks(packed: Tensor, sharded: Sequence[int]) -> Tensor:
    """The counts of a node from those of its ranks, stacked; what is not sharded is the same on all of them."""
    result = packed[0].clone()
    for i in sharded:
        counted = added(_without_limits(packed[:, i])[:, None])[0]
        result[i] = torch.cat([counted[:_WORDS], packed[0, i, _WORDS : _WORDS + 2], counted[_WORDS:]])
    return result


def history_statistics(names: Sequence[str], nodes: Sequence[NodeCounts], statistics: bool | str) -> dict[str, Any]:
    """The counts of a round, by tensor, as the history has them.

    names: of the tensors; nodes: those that counted, in their order.
    """
    rows: dict[str, Any] = {}
    for i, name in enumerate(names):
        total = sum((node.counts[i] for node in nodes), Counts())  # nobody where every contribution was lost
        rows[name] = {field: getattr(total, field) for field in FIELDS}
        if statistics == HISTOGRAMS:
            rows[name] |= {"octaves": _octaves(total), **_last_limits([node.limits[i] for node in nodes])}
    return rows


def _octaves(counts: Counts) -> dict[str, int]:
    """Numbers of coordinates by octave k, 2^k <= |g| < 2^(k+1)."""
    return {str(k - EXPONENT): n for k, n in enumerate(counts.octaves) if n and 0 < k < 255}


def _last_limits(limits: Sequence[tuple[float, float]]) -> dict[str, float]:
    """u and d of the last node that has them as numbers."""
    columns = zip("ud", zip(*limits, strict=True), strict=False)
    return {name: known[-1] for name, column in columns if (known := [x for x in column if not math.isnan(x)])}


def _without_limits(packed: Tensor) -> Tensor:
    return torch.cat([packed[:, :_WORDS], packed[:, _WORDS + 2 :]], 1)


def _number(threshold: Any) -> float:
    if isinstance(threshold, Tensor):
        return float(threshold) if threshold.numel() == 1 else math.nan
    return float(threshold)
