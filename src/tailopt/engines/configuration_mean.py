"""The mean over the nodes of many configurations: who counts, and the mean of those who do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tailopt.clipping.operators import compute_dtype
from tailopt.engines.model_state import as_real


@dataclass(frozen=True)
class NodeMean:
    """The weighted mean over nodes of [replicas, nodes, configurations, ...], in ascending order, as `rounds.mean`.

    shares: of the nodes, a number each, or [replicas] where they differ; counted: [replicas, nodes, configurations],
    None where all count; total: the sum of the shares that count, [replicas, configurations].
    """

    shares: Sequence[float | Tensor]
    counted: Tensor | None
    total: Tensor

    @classmethod
    def of_shares(cls, shares: Sequence[Mapping[int, float]], counted: Tensor, some: bool) -> NodeMean:
        """Return the mean of those that count; unless `some`, a configuration counts with all nodes or with none."""
        if bool(counted.all()):
            return cls.of_everybody(shares, counted.device)
        by_node, numbers = _by_node(shares, counted.device)
        weights = torch.tensor(by_node, dtype=torch.float64, device=counted.device).mT[:, :, None]
        everybody = counted.all(1)
        total = torch.where(counted, weights, 0.0).sum(1) if some else torch.zeros_like(everybody, dtype=torch.float64)
        return cls(numbers, counted, torch.where(everybody, 1.0, total))  # exactly 1 where all count

    @classmethod
    def of_everybody(cls, shares: Sequence[Mapping[int, float]], device: torch.device) -> NodeMean:
        """Return the mean of all nodes."""
        return cls(_by_node(shares, device)[1], None, torch.ones((), device=device))

    def of(self, values: Tensor) -> Tensor:
        """Return the mean, [replicas, configurations, ...]; a configuration of which nothing counts has 0."""
        acc: Tensor | None = None
        for i, share in enumerate(self.shares):
            one = values[:, i]
            term = one * (like(share, one).to(one.dtype) if isinstance(share, Tensor) else share)
            if self.counted is not None:
                term = torch.where(like(self.counted[:, i], term), term, torch.zeros_like(term))
            acc = term if acc is None else acc.add_(term)
        assert acc is not None
        if self.counted is None:
            return acc
        return acc.div_(like(torch.where(self.total == 0, 1.0, self.total), acc).to(acc.dtype))

    def of_buffer(self, values: Tensor, before: Tensor) -> Tensor:
        """Return the mean of a floating-point buffer, and the maximum of an integer one; unchanged ones stay."""
        if not (values.is_floating_point() or values.is_complex()):
            return values.amax(1)
        real = as_real(values)
        wide = self.of(real.to(compute_dtype(real.dtype)))
        mean = (torch.view_as_complex(wide) if values.is_complex() else wide).to(values.dtype)
        same = (values == before[:, None]).all(1)
        return torch.where(like(same.flatten(2).all(2) if same.dim() > 2 else same, mean), before, mean)


def _by_node(
    shares: Sequence[Mapping[int, float]], device: torch.device
) -> tuple[list[tuple[float, ...]], list[float | Tensor]]:
    """Return the shares of every node in all replicas, and as numbers or tensors to multiply with."""
    by_node = list(zip(*(of_replica.values() for of_replica in shares), strict=True))
    return by_node, [
        row[0] if len(set(row)) == 1 else torch.tensor(row, dtype=torch.float64, device=device) for row in by_node
    ]


def like(values: Tensor, x: Tensor) -> Tensor:
    """Return values of leading dimensions with as many dimensions as x."""
    return values.reshape(values.shape + (1,) * (x.dim() - values.dim()))


def all_finite(values: Sequence[Tensor]) -> Tensor:
    """Return which nodes of which configurations have only finite values: [replicas, nodes, configurations]."""
    finite: Tensor | None = None
    for v in values:
        own = v.reshape(*v.shape[:3], -1)
        if not own.shape[-1]:
            continue
        low, high = own.amin(-1), own.amax(-1)  # NaN is the least and the largest
        here = low.isfinite() & high.isfinite()
        finite = here if finite is None else finite & here
    assert finite is not None
    return finite
