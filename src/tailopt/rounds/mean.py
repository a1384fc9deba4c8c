"""Means over the nodes of a round: of displacements, and of buffers.

    acc = share * delta of the first node that counts, then acc + (share * delta), two roundings each
    divided by the sum of the shares that counted, only where a participant did not count

The order of the nodes is ascending, so that every engine and topology produces the same bits. Nodes are streamed
through one accumulator; a robust mean (robust.py) needs all displacements at once and buffers them instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from tailopt.rounds.robust import Displacements, coordinate_median

CHUNK = 1 << 20  # elements that are scaled at once


class WeightedMean:
    """The weighted mean of displacements, in the memory of one of them."""

    def __init__(self) -> None:
        self._acc: list[Tensor] = []

    def add(self, delta: Sequence[Tensor], share: float) -> None:
        """Add one node's displacement; a large tensor in chunks, so that no further copy of a model is needed."""
        # not add(alpha=share), which is a fused multiply-add on some processors
        if not self._acc:
            self._acc = [d * _factor(share, d.dtype) for d in delta]
            return
        for acc, d in zip(self._acc, delta, strict=True):
            factor = _factor(share, d.dtype)
            if d.numel() <= CHUNK or not (acc.is_contiguous() and d.is_contiguous()):
                acc.add_(d * factor)
                continue
            for a, chunk in zip(acc.view(-1).split(CHUNK), d.view(-1).split(CHUNK), strict=True):
                a.add_(chunk * factor)

    def result(self, total_share: float) -> list[Tensor]:
        """Return the mean; `total_share` is 1 where every participant counted."""
        if total_share != 1.0:
            for acc in self._acc:  # by a tensor: some devices divide by a number through its reciprocal
                acc.div_(torch.tensor(total_share, dtype=torch.float64).to(acc))
        return self._acc


@lru_cache(maxsize=1024)
def _factor(share: float, dtype: torch.dtype) -> Tensor:
    """Return a share as a tensor, cast once: torch takes longer to multiply a small tensor by a Python number."""
    return torch.tensor(share, dtype=dtype)


class CollectedMean:
    """A mean that needs all displacements at once. They must not change until the result is taken."""

    def __init__(self, mean_function: Callable[[Displacements], list[Tensor]]) -> None:
        self._combine = mean_function
        self._displacements: list[Sequence[Tensor]] = []

    def add(self, delta: Sequence[Tensor], share: float) -> None:
        """Keep one node's displacement; a robust mean ignores shares."""
        self._displacements.append(delta)

    def result(self, total_share: float) -> list[Tensor]:
        """Return the mean."""
        return self._combine(self._displacements)


class BufferMean:
    """The mean of the model's buffers: floating-point ones are averaged, integer ones take the maximum.

    A buffer that no node changed stays as it is: the mean of a constant would round, and 0 * inf is NaN.

    Args:
        before: the buffers with which the round began.
    """

    def __init__(
        self, before: Mapping[str, Tensor], new_mean: Callable[[], WeightedMean | CollectedMean] = WeightedMean
    ) -> None:
        self._before, self._new_mean = before, new_mean
        self._changed: set[str] = set()
        self._means: dict[str, WeightedMean | CollectedMean] = {}
        self._maxima: dict[str, Tensor] = {}

    @classmethod
    def median(cls, before: Mapping[str, Tensor]) -> BufferMean:
        """Take the coordinate median of floating-point buffers: what goes with a robust mean of displacements."""
        return cls(before, partial(CollectedMean, coordinate_median))

    def add(self, buffers: Mapping[str, Tensor], share: float) -> None:
        """Add one node's buffers."""
        for name, buffer in buffers.items():
            if not torch.equal(buffer, self._before[name]):
                self._changed.add(name)
            if buffer.is_floating_point() or buffer.is_complex():
                real = torch.view_as_real(buffer) if buffer.is_complex() else buffer
                wide = real.to(torch.float64 if real.dtype == torch.float64 else torch.float32)
                self._means.setdefault(name, self._new_mean()).add([wide], share)
            elif name in self._maxima:
                self._maxima[name] = torch.maximum(self._maxima[name], buffer)
            else:
                self._maxima[name] = buffer.clone()

    def result(self, total_share: float, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean buffers, in the types and the order of `like`."""
        by_name: dict[str, Tensor] = dict(self._maxima)
        for name, mean in self._means.items():
            if name not in self._changed:
                by_name[name] = self._before[name]
                continue
            (value,) = mean.result(total_share)
            by_name[name] = (torch.view_as_complex(value) if like[name].is_complex() else value).to(like[name].dtype)
        return {name: by_name[name] for name in like}
