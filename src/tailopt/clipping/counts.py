"""What a pass over gradients can count, and how it is read.

A pass adds to `Counters` (seven words per tensor, and a histogram on request); nothing is read before `statistics()` is
called, so on a GPU nothing waits. `Counts` is what is read. `count_in_torch` is the pass in plain torch, for tensors
that the C kernel does not take; it counts the same things from the same elements.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tailopt.clipping.dtensor import is_dtensor
from tailopt.clipping.freed_storage import check_not_freed
from tailopt.clipping.operators import check_thresholds, compute_dtype, real_parts
from tailopt.native.calls import DTYPES, addresses, dtype_codes, sizes
from tailopt.native.clip import NO_MOMENTUM, Counters, StepTable, TensorTable
from tailopt.native.library import loaded

if TYPE_CHECKING:
    from tailopt.clipping.kernels.triton_counts import PartialCounts

COMPLETE_BELOW = 65_536  # every element of a smaller tensor enters a histogram
STRIDE = 32  # of a larger tensor, one cache line in so many
LINE = 64  # bytes
PIECE = 1 << 24  # elements that `moved_and_raised` holds a copy of
BATCHES = 10  # at least, for a standardised gradient
EXPONENT = 127  # octave k of a histogram holds 2^(k-127) <= |x| < 2^(k-126)


@dataclass(frozen=True)
class Counts:
    """What was seen of one tensor (or, added up, of several) since the last reading.

    Attributes:
        elements: coordinates seen, over all steps.
        zero: |g| <= dead_zone (with the default, exact zeros): left unmoved.
        below: dead_zone < |g| <= d: raised to d.
        above: |g| >= u and not below, infinities too: cut to u.
        nonfinite: NaN and infinities.
        squares: sum of g^2 over finite elements.
        largest: max |g| over finite elements.
        skipped: steps in which `nonfinite="skip"` left the tensor as it was.
        octaves: elements by octave, `octaves[k]` those with 2^(k-127) <= |g| < 2^(k-126); octave 0 holds everything
            smaller, 255 what is not finite. From a fixed sample of large tensors; empty unless asked for.
        logs: sum of log2|g| over the same elements, for octaves 1 to 254; 0 for the two others.
    """

    elements: int = 0
    zero: int = 0
    below: int = 0
    above: int = 0
    nonfinite: int = 0
    squares: float = 0.0
    largest: float = 0.0
    skipped: int = 0
    octaves: tuple[int, ...] = field(default=(), repr=False)
    logs: tuple[float, ...] = field(default=(), repr=False)

    def __add__(self, other: Counts) -> Counts:
        def both(a: Sequence[float], b: Sequence[float]) -> tuple[float, ...]:
            return tuple(x + y for x, y in zip(a, b, strict=True)) if a and b else tuple(a or b)

        plain = {
            f.name: getattr(self, f.name) + getattr(other, f.name)
            for f in fields(self)
            if f.name not in ("largest", "octaves", "logs")
        }
        return Counts(
            **plain,
            largest=max(self.largest, other.largest),
            octaves=both(self.octaves, other.octaves),  # type: ignore[arg-type]
            logs=both(self.logs, other.logs),
        )

    @property
    def rms(self) -> float:
        """Root of the mean square of the finite elements."""
        finite = self.elements - self.nonfinite
        return math.sqrt(self.squares / finite) if finite else 0.0

    def quantile(self, q: float) -> float:
        """The magnitude below which a share q of the nonzero finite elements lies, from the histogram.

        Inside an octave the position follows from the octave's mean logarithm: the density of log2|g| is taken to be a
        straight line with that mean. On 100,000 Gaussian, Student-t, Cauchy and lognormal numbers the result is within
        1.5 % of `torch.quantile` for q from 0.05 to 0.97, and the median within 0.5 %; the median of 5,000 gradient
        elements of a regression is within 1.2 %. Where a density ends abruptly inside an octave the error is larger,
        but always below a factor of 2. Zeros are left out, because an embedding has a zero gradient wherever a token
        was not seen; so are magnitudes below 2^-126.

        Args:
            q: in [0, 1]; 0.5 is the median.

        Returns:
            The quantile, or NaN if no element is nonzero and finite.

        Examples:
            >>> random = torch.Generator().manual_seed(0)
            >>> g = torch.randn(50_000, generator=random)
            >>> round(count([g], u=1, d=0)[0].quantile(0.5), 3), round(float(g.abs().median()), 3)
            (0.676, 0.678)
        """
        if not 0 <= q <= 1:
            raise ValueError(f"Invalid q: {q}; need a share of the elements in [0, 1]. The median is 0.5.")
        if not self.octaves:
            raise ValueError("There is no histogram in these counts; ask for it with statistics=True.")
        wanted, seen = q * sum(self.octaves[1:255]), 0
        for k in range(1, 255):
            n = self.octaves[k]
            if n and seen + n >= wanted:
                mean = min(max(self.logs[k] / n - (k - EXPONENT), 0.0), 1.0)
                return min(math.pow(2.0, k - EXPONENT + _place((wanted - seen) / n, mean)), self.largest)
            seen += n
        return math.nan

    def hill(self, tail: float = 0.01) -> float:
        """Hill's estimate of the tail index alpha, P(|g| > x) ~ x^-alpha, from the largest `tail` of the sample.

        The tail starts at the octave edge that leaves at least that share above it. Where all elements have one
        distribution, an index below 2 means an infinite variance. Coordinates of a gradient have not: pooled, Gaussian
        coordinates with unequal scales have a low index too, 1.6 where the logarithms of the scales are normal with
        deviation 1.5, and 1.1 with 2.5 (a true Student t with 1.5 degrees of freedom: 1.5). Ask for the index of
        `standardised` gradients before you conclude anything about the noise.

        Examples:
            >>> random = torch.Generator().manual_seed(0)
            >>> z, s = (torch.randn(1_000_000, generator=random) for _ in range(2))
            >>> scales = {deviation: torch.exp(deviation * s) for deviation in (0.0, 1.5, 2.5)}
            >>> [round(count([z * scale], u=1, d=0, complete=True)[0].hill(), 1) for scale in scales.values()]
            [6.2, 1.6, 1.1]
        """
        if not self.octaves:
            raise ValueError("There is no histogram in these counts; ask for it with statistics=True.")
        seen = sum(self.octaves[:255])
        count, logs = 0, 0.0
        for k in range(254, 0, -1):
            count, logs = count + self.octaves[k], logs + self.logs[k]
            if count and count >= tail * seen:
                excess = logs - count * (k - EXPONENT)
                return count / (excess * math.log(2)) if excess > 0 else math.inf
        return math.nan


def _place(share: float, mean: float) -> float:
    """Where in [0, 1] a share of the mass lies below, for a density with this mean that is a straight line.

    The line is 1 + slope*(x - 1/2) with slope = 12*(mean - 1/2). With a mean outside [1/3, 2/3] it would be negative
    somewhere, and the density is a triangle at the nearer end instead.
    """
    if mean > 0.5:
        return 1 - _place(1 - share, 1 - mean)
    if mean < 1 / 3:  # falls to 0 at 3*mean
        return 3 * mean * (1 - math.sqrt(1 - share))
    slope = 12 * (mean - 0.5)  # in [-2, 0]; share = x + slope/2 * (x^2 - x)
    linear = 1 - slope / 2
    return 2 * share / (linear + math.sqrt(max(linear * linear + 2 * slope * share, 0.0)))


def read(counters: Counters) -> list[Counts]:
    """The counters as plain numbers, one `Counts` per slot. Waits for the device."""
    integers, reals = counters.integers.tolist(), counters.reals.tolist()
    octaves = counters.bins.tolist() if counters.bins is not None else None
    fractions = counters.logs.tolist() if counters.logs is not None else None
    result = []
    for i, (whole, real) in enumerate(zip(integers, reals, strict=True)):
        counts = Counts(*whole, *real)
        if octaves is not None and fractions is not None:
            pairs = enumerate(zip(octaves[i], fractions[i], strict=True))
            logs = [fraction / 65536 + number * (k - EXPONENT) for k, (number, fraction) in pairs]
            logs[0] = logs[-1] = 0.0  # these octaves have no common exponent
            counts = replace(counts, octaves=tuple(octaves[i]), logs=tuple(logs))
        result.append(counts)
    return result


def count(
    tensors: Iterable[Tensor] | Mapping[str, Tensor], u: float, d: float, dead_zone: float = 0.0, complete: bool = False
) -> dict[str | int, Counts]:
    """Count what BiClip with these thresholds would do to the gradients of any optimizer, in one read of them.

    Args:
        tensors: dense tensors, or a mapping from names to them; of a DTensor this rank's shard is counted.
        u, d, dead_zone: as in `biclip`; numbers.
        complete: put every element into the histogram, not one cache line in 32 of the larger tensors.

    Examples:
        >>> counts = count({"w": torch.tensor([0.0, 0.01, 0.5, 3.0])}, u=1.0, d=0.1)["w"]
        >>> counts.zero, counts.below, counts.above, counts.largest
        (1, 1, 1, 3.0)
    """
    check_thresholds(u, d, dead_zone)
    named: Mapping[str | int, Tensor] = tensors if isinstance(tensors, Mapping) else dict(enumerate(tensors))  # type: ignore[assignment]
    result: dict[str | int, Counts] = {}
    for name, tensor in named.items():
        local = tensor.to_local() if is_dtensor(tensor) else tensor
        counters = Counters.empty(1, histogram=True, device=local.device)
        counters.sample_offset = -1 if complete else 0
        add([local], [0], (u, d, dead_zone), counters)
        result[name] = read(counters)[0]
    return result


def standardised(gradients: Tensor | Sequence[Tensor]) -> Tensor:
    """Every coordinate centred by its median over batches and divided by its median absolute deviation, as one vector.

        (g - median of g) / median of |g - median of g|        by coordinate, over batches at the same weights

    What is left of a pool of coordinates is the shape of their noise, without their scales: `hill()` of its `count`
    tells heavy tails from unequal scales. Medians, because a sample deviation of n batches lets no value exceed
    sqrt(n), which would cut the tail that is asked about.

    Args:
        gradients: of one parameter, or of some of its coordinates, over batches: [batches, ...] or a list. 50 batches
            are enough; with 10 the medians' own noise still makes a tail (index 3.3 for Gaussian noise).

    Returns:
        The coordinates of all batches whose deviation is not 0, in fp32 (fp64 for fp64).

    Examples:
        >>> random = torch.Generator().manual_seed(0)
        >>> scales = torch.exp(2.5 * torch.randn(20_000, generator=random))
        >>> noise = torch.randn(50, 20_000, generator=random) * scales
        >>> [round(count([x], u=1, d=0, complete=True)[0].hill(), 1) for x in (noise, standardised(noise))]
        [1.1, 6.7]
    """
    stacked = gradients if isinstance(gradients, Tensor) else torch.stack([real_parts(g) for g in gradients])
    if stacked.ndim < 1 or stacked.shape[0] < BATCHES:
        batches = stacked.shape[0] if stacked.ndim else 0
        raise ValueError(
            f"Invalid gradients: {batches} batches; need {BATCHES} or more, better 50: the median of a few deviations "
            "is so uncertain that it makes a heavy tail of its own."
        )
    centred, deviation = centred_and_deviation(real_parts(stacked).detach().reshape(stacked.shape[0], -1))
    return (centred / deviation)[:, deviation > 0].reshape(-1)


def centred_and_deviation(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[batches, coordinates] less the median of each coordinate, and the medians of the magnitudes that are left.

    Examples:
        >>> centred_and_deviation(torch.tensor([[1.0, 5.0], [2.0, 5.0], [9.0, 6.0]]))
        (tensor([[-1.,  0.],
                [ 0.,  0.],
                [ 7.,  1.]]), tensor([1., 0.]))
    """
    rows = rows.to(compute_dtype(rows.dtype))
    centred = rows - rows.median(0).values
    return centred, centred.abs().median(0).values


def add(
    grads: Sequence[Tensor], slots: Sequence[int], thresholds: tuple[float, float, float], counters: Counters
) -> None:
    """Count these gradients into their slots; those that the C kernel takes in one pass of it."""
    kernel = loaded()
    by_kernel = [
        i for i, g in enumerate(grads) if kernel and g.device.type == "cpu" and g.dtype in DTYPES and is_gap_free(g)
    ]
    if kernel and by_kernel:
        dense = [grads[i] for i in by_kernel]
        grad_addresses = addresses(dense)
        check_not_freed(dense, grad_addresses)
        tensors = TensorTable((), grad_addresses, sizes(dense), dtype_codes(dense))
        step_table = StepTable((0.0, 1.0, 0.0, *thresholds, 1.0, 1.0, 1.0, *NO_MOMENTUM), [0] * len(dense))
        kernel.clip.run_at("count", tensors, step_table, counters, [slots[i] for i in by_kernel])
    for i in set(range(len(grads))).difference(by_kernel):
        count_in_torch(grads[i], slots[i], thresholds, counters)


def is_gap_free(g: Tensor) -> bool:
    """Whether the elements lie in memory without gaps, in any order: a pass over it sees each of them once."""
    if g.is_neg():  # then memory holds the negatives
        return False
    return g.layout == torch.strided and (g.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(g))


def count_in_torch(g: Tensor, slot: int, thresholds: tuple[float | Tensor, ...], counters: Counters) -> None:
    """The counting pass in torch, on the gradient's device, without a synchronisation."""
    g = real_parts(g)
    u, d, dead = (t.to(compute_dtype(g.dtype)) if isinstance(t, Tensor) else t for t in thresholds)
    a = g.detach().to(compute_dtype(g.dtype)).abs()
    low, unmoved = a <= d, a <= dead
    finite = torch.isfinite(a)
    magnitudes = torch.where(finite, a, 0)
    elements = torch.full((), a.numel(), device=a.device)
    sums = (unmoved, low & ~unmoved, (a >= u) & ~low & ~unmoved, ~finite)
    counters.integers[slot] += torch.stack([elements, *(s.sum() for s in sums)])
    reals = counters.reals
    reals[slot, 0] += magnitudes.double().square().sum()
    if a.numel():
        reals[slot, 1] = torch.maximum(reals[slot, 1], magnitudes.amax().double())
    if counters.bins is not None and counters.logs is not None and a.numel():
        if a.numel() >= COMPLETE_BELOW and counters.sample_offset >= 0:
            a = a.reshape(-1)[_sampled(a.numel(), LINE // g.element_size(), counters.sample_offset, a.device)]
        octave, cell = _octave_and_cell(a.reshape(-1))
        log2 = (
            torch.log2(1 + (torch.arange(1024, dtype=torch.float64, device=a.device) + 0.5) / 1024) * 65536 + 0.5
        ).long()
        counters.bins[slot] += torch.zeros_like(counters.bins[slot]).index_add_(0, octave, torch.ones_like(octave))
        counters.logs[slot] += torch.zeros_like(counters.logs[slot]).index_add_(0, octave, log2[cell])


def moved_and_raised(g: Tensor, d: float | Tensor, dead_zone: float | Tensor) -> tuple[Tensor, Tensor]:
    """How many coordinates are beyond the dead zone, and how many of these are at or below d; no synchronisation.

    These are `elements - zero` and `below` of `Counts`, counted in pieces if the thresholds are numbers, so that the
    check needs little memory beside the gradients.
    """
    g = real_parts(g.detach())
    thresholds = [t.to(compute_dtype(g.dtype)) if isinstance(t, Tensor) else t for t in (d, dead_zone)]
    plain = g.is_contiguous() and not any(isinstance(t, Tensor) and t.ndim for t in thresholds)
    moved, raised = torch.zeros(2, dtype=torch.int64, device=g.device).unbind()
    for piece in g.view(-1).split(PIECE) if plain else [g]:
        a = piece.to(compute_dtype(g.dtype)).abs()
        beyond = ~(a <= thresholds[1])  # NaN too
        moved += beyond.sum()
        raised += (beyond & (a <= thresholds[0])).sum()
    return moved, raised


def _sampled(n: int, line: int, offset: int, device: torch.device) -> Tensor:
    """Positions of every STRIDE-th line from line `offset` on; as indices, since a mask would wait for its count."""
    first = torch.arange(offset * line, n, STRIDE * line, device=device)
    positions = (first[:, None] + torch.arange(line, device=device)).reshape(-1)
    left = (n - offset * line) % (STRIDE * line)  # elements from the last sampled line on
    return positions[: positions.numel() - max(0, line - left)] if left else positions


def _octave_and_cell(a: Tensor) -> tuple[Tensor, Tensor]:
    """The exponent of non-negative numbers, as a float's, and ten bits of mantissa. fp64 is cut, not rounded."""
    if a.dtype == torch.float64:
        bits = a.view(torch.int64)
        exponent, mantissa = bits >> 52, (bits >> 42) & 1023
        octave = (exponent - 1023 + EXPONENT).clamp(0, 254)
        return torch.where(exponent == 2047, 255, octave), mantissa
    bits = a.view(torch.int32).long()
    return bits >> 23, (bits >> 13) & 1023


class StatisticsRecorder:
    """An optimizer's statistics: the counters that its passes add to, by device, and which sample comes next.

    A slot is a parameter's position in the optimizer: the row of the counters that it has.

    Args:
        mode: "counts" (no histogram), "sampled" or "complete".
        n_slots: how many parameters there are; a pass may begin with more.
    """

    def __init__(self, mode: str, n_slots: int = 0) -> None:
        self.mode = mode
        self._n_slots = n_slots
        self._passes = 0  # moves the sampled line; kept with the statistics, so that runs repeat
        self._counters: dict[torch.device, Counters] = {}
        self._skipped: dict[torch.device, Tensor] = {}
        self._partial: list[PartialCounts] = []

    def begin_pass(self, n_slots: int) -> None:
        """Prepare for the counts of one more step over so many parameters."""
        self._passes += 1
        self._n_slots = n_slots

    def counters(self, device: torch.device) -> Counters:
        """Where a pass on this device counts."""
        counters = self._counters.get(device)
        if counters is None or counters.table.shape[0] < self._n_slots:
            grown = Counters.empty(self._n_slots, self.mode != "counts", device)
            if counters is not None:  # a group was added: keep what was counted
                for new, old in zip(
                    (grown.table, grown.bins, grown.logs), (counters.table, counters.bins, counters.logs), strict=True
                ):
                    if new is not None and old is not None:
                        new[: old.shape[0]] = old
            self._counters[device] = counters = grown
        counters.sample_offset = -1 if self.mode == "complete" else (self._passes - 1) % STRIDE
        return counters

    def count_by(self, partial: Sequence[PartialCounts]) -> None:
        """From now on these are counted into; what others have counted is added to the counters."""
        for one in self._partial:
            if one not in partial:
                one.add_to(self.counters(one.device))
        self._partial = list(partial)

    def gather(self) -> None:
        """Move what was counted into rows of programs to the counters; the rows begin again at zero."""
        for one in self._partial:
            one.add_to(self.counters(one.device))

    def copy(self) -> StatisticsRecorder:
        """A recorder that has counted the same, and counts on by itself."""
        self.gather()
        other = copy.copy(self)
        other._counters, other._skipped = copy.deepcopy((self._counters, self._skipped))
        other._partial = []
        return other

    def skip(self, slots: Sequence[int], n_slots: int, verdicts: Tensor) -> None:
        """Count a skipped step where a verdict is true: bools on their device, one for each slot."""
        counter = self._skipped.get(verdicts.device)
        if counter is None or counter.numel() < n_slots:
            grown = torch.zeros(n_slots, dtype=torch.int64, device=verdicts.device)
            if counter is not None:
                grown[: counter.numel()] = counter
            self._skipped[verdicts.device] = counter = grown
        if list(slots) == list(range(slots[0], slots[0] + len(slots))):
            counter[slots[0] : slots[0] + len(slots)] += verdicts
            return
        for slot, verdict in zip(slots, verdicts.unbind(), strict=True):
            counter[slot] += verdict

    def take(self, n_slots: int) -> list[Counts]:
        """Everything counted since the last call, slot by slot; the counters start again at zero."""
        total = [Counts()] * n_slots
        self.gather()
        for counters in self._counters.values():
            for i, counts in enumerate(read(counters)):
                total[i] = total[i] + counts
        for counter in self._skipped.values():
            for i, skipped in enumerate(counter.tolist()):
                total[i] = total[i] + Counts(skipped=skipped)
        self._counters.clear()
        self._skipped.clear()
        return total
