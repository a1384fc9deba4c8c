"""The tail index of noise over batches: P(|x| > t) ~ t^-alpha, from numbers of which many belong to the same batch.

    H(k)      = mean of log(x / t) over the k largest magnitudes x, t the largest that is left: Hill's estimate
    1 / alpha = 2 H(k / 2) - H(k)        cancels an error of H that grows in proportion to k

H(k) is off by c * k^r. For stable laws and Student's t with 2 degrees of freedom r is 1; elsewhere it is taken to be.

Coordinates of one batch are no independent numbers, since one odd sample moves all of them. So the standard error is
that of a mean over batches, and a tail has to come from many of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

# The relative standard error that is wanted: the tail is the smallest share that has it. Of the most that counts as a
# tail, where Hill's estimate is furthest off, twice as much is accepted.
PRECISION = 0.05
SHARES = (1e-3, 0.1)  # the least and the most of the numbers that count as their tail
WIDEST = 0.25  # where a smaller share comes from too few batches
BATCHES = 30  # that a tail comes from, at least; a quarter of all where there are fewer than 120
# Of the correction, which assumes how the error of H grows with k. With 0.5 the interval covers 88 % of the time in the
# worst case (alpha-stable 1.7, 100 coordinates, 256 batches, 60 seeds), with 0.7 in 92 %; with 1 it is needlessly wide.
ALLOWANCE = 0.7
# Up to this share the allowance is the same for both ends. What a correction in proportion to k leaves grows with the
# square of k, and makes the index too large: beyond, the lower end has an allowance that grows so. With 23 coordinates,
# 256 batches and 100 seeds it covers Student's t 3 in 97 % instead of 71 %, and calls as much heavy.
EVEN_ALLOWANCE = 0.05
BATCHES_OF_DEEPEST = 10
ENOUGH_FOR_PLOT = 2**16  # numbers
SHARE_OF_FEW = 0.15
LEVEL = 0.95  # a quantile for each end: a 90 % interval


@dataclass(frozen=True)
class TailIndex:
    """A tail index with a 90 % interval.

    Attributes:
        index: the estimate; infinite where magnitudes fall off faster than any power.
        low, high: the interval; 0 and infinity where nothing is known.
        share: of the numbers that are the tail.
        points: how many these are.
        batches: how many batches they come from, in effect: (sum of n_b)^2 / sum of n_b^2.
        deepest_low: the lower end of Hill's estimate from the least share that can be used. Where bounded noise hides a
            heavy tail, that one sees it first.
        largest_batch: the part of the least share that is from one batch.
        shares, hill: Hill's estimate by share, without a correction: the stability plot.
    """

    index: float
    low: float
    high: float
    share: float = math.nan
    points: int = 0
    batches: float = 0.0
    deepest_low: float = 0.0
    largest_batch: float = math.nan
    shares: tuple[float, ...] = field(default=(), repr=False)
    hill: tuple[float, ...] = field(default=(), repr=False)

    @property
    def heavy(self) -> bool:
        """Whether the whole interval is below 2, where the variance is infinite."""
        return self.high < 2

    @property
    def light(self) -> bool:
        """Whether the whole interval is above 2, and the largest magnitudes alone do not speak against it."""
        return self.low > 2 and self.deepest_low > 2

    def hill_at(self, share: float) -> float:
        """Hill's plain estimate at the nearest share; NaN without one.

        Examples:
            >>> TailIndex(1.5, 1.4, 1.6, shares=(0.001, 0.01), hill=(1.4, 1.7)).hill_at(0.02)
            1.7
        """
        pairs = zip(self.shares, self.hill, strict=True)
        return min(pairs, key=lambda pair: abs(math.log(pair[0] / share)), default=(share, math.nan))[1]


UNKNOWN = TailIndex(math.nan, 0.0, math.inf)


def tail_index(values: Tensor) -> TailIndex:
    """Estimate the tail index of magnitudes, all of one scale.

    Args:
        values: [batches, coordinates], or [batches].

    Examples:
        >>> random = torch.Generator().manual_seed(0)
        >>> pareto = torch.rand(256, 1000, generator=random) ** (-1 / 1.5)
        >>> found = tail_index(pareto)
        >>> round(found.index, 1), found.low < 1.5 < found.high, found.heavy
        (1.5, True, True)
    """
    rows = values.detach().abs().reshape(values.shape[0], -1)
    least, most = SHARES
    result = UNKNOWN
    for widest in (4 * least, most, WIDEST):  # the largest magnitudes are sorted, no more of them than are needed
        tails = _tails(rows, widest)
        if tails is None:
            continue
        enough = tails.batches >= min(BATCHES, rows.shape[0] / 4)
        precise = enough & (tails.error <= PRECISION * (1 + tails.points / (most * rows.numel())) * tails.inverse.abs())
        chosen = int(precise.int().argmax()) if precise.any() else len(tails.points) - 1
        result = _interval(tails, chosen, rows.numel())
        if precise.any() or (widest == most and enough.any()):
            break
    return _with_wider_shares(result, rows)


def tail_index_of_few(numbers: Tensor) -> TailIndex:
    """Hill's estimate from independent numbers that are too few to be corrected, such as norms.

    The interval is the smallest that holds those from the largest 15 % and from half as many. Gaussian numbers have
    about 3 there, so this tells heavy tails from others only where they are far apart.
    """
    top = numbers.detach().abs().reshape(-1).double().sort(descending=True).values
    points = max(10, round(SHARE_OF_FEW * len(top)))
    if points >= len(top) or not float(top[points]) > 0:
        return UNKNOWN
    sizes = torch.arange(5, max(len(top) // 3, points + 1))
    logs = top.clamp(min=torch.finfo(top.dtype).tiny).log()
    hill = (logs.cumsum(0)[sizes - 1] / sizes - logs[sizes]).clamp(min=1e-9)
    ends = [_ends(float(hill[k - 5]), float(hill[k - 5]) / math.sqrt(k), k) for k in (points, points // 2)]
    low = min(end[0] for end in ends)
    return TailIndex(
        index=1 / float(hill[points - 5]),
        low=low,
        high=max(end[1] for end in ends),
        share=points / len(top),
        points=points,
        batches=float(points),
        deepest_low=low,
        shares=tuple((sizes / len(top)).tolist()),
        hill=tuple((1 / hill).tolist()),
    )


def _ends(
    inverse: float, error: float, batches: float, of_low: float = 0.0, of_high: float = 0.0
) -> tuple[float, float]:
    """The interval of an index from that of its inverse; `of_low` and `of_high` are what its ends allow for beside."""
    half = student_quantile(LEVEL, batches - 1) * error
    low, high = inverse + math.hypot(half, of_low), inverse - math.hypot(half, of_high)
    return (1 / low if low > 0 else math.inf, 1 / high if high > 0 else math.inf)


def _with_wider_shares(found: TailIndex, rows: Tensor) -> TailIndex:
    """The stability plot, continued to the most that counts as a tail: from some of the columns, if there are many."""
    if not found.shares or found.shares[-1] >= SHARES[1] / 2:
        return found
    some = rows[:, :: max(1, rows.numel() // ENOUGH_FOR_PLOT)]
    tails = _tails(some, SHARES[1])
    if tails is None:
        return found
    wider = zip((tails.points / some.numel()).tolist(), (1 / tails.hill).tolist(), strict=True)
    more = [(share, index) for share, index in wider if share > found.shares[-1]]
    shares, hill = (tuple(column) for column in zip(*more, strict=True)) if more else ((), ())
    return replace(found, shares=found.shares + shares, hill=found.hill + hill)


class _Tails(NamedTuple):
    """Estimates for tails of increasing size; all are tensors over the sizes."""

    points: Tensor
    hill: Tensor  # H(k)
    hill_error: Tensor  # standard errors
    inverse: Tensor  # 1 / alpha
    error: Tensor
    batches: Tensor
    largest_batch: Tensor


def _tails(rows: Tensor, widest: float) -> _Tails | None:
    """Estimates from the least share to the widest; None where these are too few numbers."""
    n, numbers = rows.shape[0], rows.numel()
    most = int(widest * numbers)
    least = max(10, int(SHARES[0] * numbers))
    if most < 2 * least:
        return None
    top = rows.reshape(-1).topk(most + 1)
    most = min(most, int((top.values > 0).sum()) - 1)
    halvings = int(2 * math.log2(max(most, 1) / least))
    if halvings < 2:
        return None
    sizes = [round(most * 0.5 ** (i / 2)) for i in range(halvings, -1, -1)]
    logs, batch = top.values.double().log(), top.indices // rows.shape[1]
    # by size and batch: how many points, and the sum of their logarithms
    piece = torch.bucketize(torch.arange(most), torch.tensor(sizes), right=True)
    cell = piece.to(batch.device) * n + batch[:most]
    empty = logs.new_zeros(len(sizes) * n)
    count = empty.index_add(0, cell, torch.ones_like(logs[:most])).view(-1, n).cumsum(0)
    total = empty.index_add(0, cell, logs[:most]).view(-1, n).cumsum(0)
    points = torch.tensor(sizes, dtype=torch.float64, device=logs.device)
    excess = total - count * logs[sizes][:, None]
    hill = excess.sum(1) / points
    # what each batch contributes to the deviation of H from its mean
    influence = (excess - hill[:, None] * count) / points[:, None]
    # Batches that agree by chance, or are few, must not make an error smaller than that of independent numbers.
    hill_error = _error(influence).maximum(hill / points.sqrt())
    inverse = 2 * hill[:-2] - hill[2:]
    error = _error(2 * influence[:-2] - influence[2:]).maximum(inverse.abs() * (5 / points[2:]).sqrt())
    batches, largest = points.square() / count.square().sum(1), count.amax(1) / points
    columns = (points[2:], hill[2:], hill_error[2:], inverse, error, batches[2:], largest[2:])
    return _Tails(*(column.cpu() for column in columns))


def _error(influence: Tensor) -> Tensor:
    """The standard error of a sum over batches."""
    n = influence.shape[1]
    return (influence.square().sum(1) * n / max(n - 1, 1)).sqrt()


def _interval(tails: _Tails, chosen: int, numbers: int) -> TailIndex:
    inverse, hill, error, batches = (
        float(column[chosen]) for column in (tails.inverse, tails.hill, tails.error, tails.batches)
    )
    share, allowance = float(tails.points[chosen]) / numbers, ALLOWANCE * (inverse - hill)
    low, high = _ends(inverse, error, batches, allowance * max(1.0, share / EVEN_ALLOWANCE) ** 2, allowance)
    usable = tails.batches >= BATCHES_OF_DEEPEST
    deepest = int(usable.int().argmax()) if usable.any() else chosen
    hill_there, error_there, batches_there = (
        float(column[deepest]) for column in (tails.hill, tails.hill_error, tails.batches)
    )
    return TailIndex(
        index=1 / inverse if inverse > 0 else math.inf,
        low=low,
        high=high,
        share=share,
        points=int(tails.points[chosen]),
        batches=batches,
        deepest_low=_ends(hill_there, error_there, batches_there)[0],
        largest_batch=float(tails.largest_batch[0]),
        shares=tuple((tails.points / numbers).tolist()),
        hill=tuple((1 / tails.hill).tolist()),
    )


def student_quantile(q: float, df: float) -> float:
    """A quantile of Student's t, by the expansion of Cornish and Fisher; within 2 % from 3 degrees of freedom on.

    Examples:
        >>> [round(student_quantile(0.95, df), 2) for df in (5, 30, 1e9)]
        [2.01, 1.7, 1.64]
    """
    z = math.sqrt(2) * float(torch.erfinv(torch.tensor(2 * q - 1, dtype=torch.float64)))
    df = max(df, 3.0)
    first = (z**3 + z) / (4 * df)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * df**3)
    return z + first + second + third
