"""Is the gradient noise of a model heavy-tailed, and what would help? `diagnose` looks at batches and moves nothing.

    g_bj                    coordinate j of the gradient of batch b, all at the same weights
    z_bj = (g_bj - m_j) / s_j    m_j the median over batches, s_j the median of |g_bj - m_j|

1. tails of coordinates   the tail index of z: does one coordinate have outliers over batches?
2. tails of norms         the tail index of ||g_b - m|| over batches, the alpha of the theorems
3. unequal scales         the s_j. They alone give g - m a tail index below 2 where the noise is Gaussian.

`tails` has the estimator, `diagnosis` what is said about the numbers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from tailopt.arguments import checked_seed, whole_number
from tailopt.calibration import QUICK, ElementCounts, backward, check_model_and_loss, unchanged
from tailopt.clipping.counts import centred_and_deviation
from tailopt.clipping.dtensor import is_dtensor
from tailopt.clipping.operators import real_parts
from tailopt.diagnosis import BATCHES_FOR_NORMS, Diagnosis, Noise
from tailopt.engines.batches import LossFunction, to_device
from tailopt.engines.model_state import trainable_parameters
from tailopt.progress import Progress
from tailopt.seeds import generator
from tailopt.tails import UNKNOWN, TailIndex, tail_index, tail_index_of_few
from tailopt.thresholds import CALIBRATION, Thresholds, choose

FEWEST_BATCHES, DEFAULT_BATCHES = 32, 256
MOST_COORDINATES = 2**20
# By default one of 512 in the model: the estimates need no more, and they must take less time than the gradients.
SHARE_OF_MODEL, DEFAULT_RANGE = 1 / 512, (2**11, 2**16)
LEAST_OF_TENSOR = 16
SPARSE = 0.25  # a coordinate that is 0 in more batches than this has no scale that the others could be compared with
UPPER = 0.9  # the quantile of a coordinate's own magnitudes that is a second scale
COORDINATES_OF_OPINION = 2**14
CURVE = 60  # points of the curves for figures


def diagnose(
    model: nn.Module,
    loss: LossFunction,
    batches: Iterable[Any],
    *,
    count: int = DEFAULT_BATCHES,
    coordinates: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Diagnosis:
    """Tell whether the gradient noise of a model is heavy-tailed at its present weights, and what would help.

        z = (g - median over batches of g) / median over batches of |g - median|         by coordinate

    Noise is heavy-tailed here if the 90 % interval of the tail index of z is below 2: then its variance is infinite,
    as far as these batches show. Coordinates, norms of gradients and scales of coordinates are told apart.

    Weights, buffers, modes, gradients and the states of random generators are what they were before, also after an
    error; only the batches are consumed. A model in evaluation mode is looked at in training mode, so that dropout is
    part of the noise.

    Args:
        model: its parameters with `requires_grad` count.
        loss: (model, batch) -> a scalar tensor.
        batches: at least 32 different ones, better 256; for the norms at least 128. Not the same data over and over:
            an outlier that comes back with every pass is a smaller tail than new data have.
        count: how many of them are used, where there are more.
        coordinates: how many coordinates are looked at, at most 2^20; by default one of 512, from 2,048 to 65,536
            of them, and all of a smaller model. At least 16 of each tensor.
        seed: of the choice of coordinates.
        progress: whether progress is shown when it takes more than two seconds.

    Raises:
        ValueError: fewer than 32 batches with finite gradients, no parameter to train, or a loss that is no scalar.

    Examples:
        >>> random = torch.Generator().manual_seed(0)
        >>> cauchy = torch.randn(256, 200, generator=random) / torch.randn(256, 200, generator=random)
        >>> model = nn.Linear(200, 1, bias=False)
        >>> found = diagnose(model, lambda model, noise: model(noise).sum(), cauchy)  # the gradient is the noise
        >>> found.finding, found.certainty, round(found.overall.tails.index, 1)
        ('heavy', 'high', 1.0)
        >>> found = diagnose(model, lambda model, noise: model(noise).sum(), torch.randn(256, 200, generator=random))
        >>> found.finding, found.overall.tails.low > 2
        ('light', True)
    """
    check_model_and_loss(model, loss)
    params = trainable_parameters(model)
    sharded = [name for name, p in params.items() if is_dtensor(p)]
    if sharded:
        raise ValueError(f"Invalid model: {sharded[0]} is sharded (DTensor); diagnose one whose parameters are whole.")
    count = whole_number("count", count, low=FEWEST_BATCHES)
    size = sum(p.numel() for p in params.values())
    if coordinates is None:
        coordinates = int(min(max(SHARE_OF_MODEL * size, DEFAULT_RANGE[0]), DEFAULT_RANGE[1]))
    coordinates = whole_number("coordinates", coordinates, low=1, high=MOST_COORDINATES)
    sampled = sampled_coordinates(params, coordinates, checked_seed(seed), LEAST_OF_TENSOR)
    rows, seen, nonfinite = _gradients(model, loss, islice(batches, count), params, sampled, progress and count)
    if len(rows) < FEWEST_BATCHES:
        left = f" with finite gradients, and {nonfinite} without" if nonfinite else ""
        raise ValueError(
            f"Invalid batches: there are {len(rows)}{left}; need {FEWEST_BATCHES} or more, better {count}. "
            + ("Look for what makes them infinite or NaN first." if nonfinite else "Was the iterator used up?")
        )
    if not bool(rows.any()):
        raise ValueError(
            f"Invalid loss: the gradients of all {len(rows)} batches are 0, so there is no noise. Is the loss "
            "connected to the model?"
        )
    return _diagnosis(rows, params, sampled, choose(seen.read()), nonfinite)


def sampled_coordinates(
    params: Mapping[str, Tensor], coordinates: int, seed: int = 0, least: int = 1
) -> dict[str, Tensor]:
    """Which elements of which tensor are looked at, in proportion to the sizes: one at random in each of equal pieces.

    Args:
        least: of each tensor, where it has as many.

    Examples:
        >>> layer = nn.Linear(9, 10)
        >>> {name: len(elements) for name, elements in sampled_coordinates(dict(layer.named_parameters()), 10).items()}
        {'weight': 9, 'bias': 1}
    """
    sizes = {name: real_parts(p.detach()).numel() for name, p in params.items()}
    share = min(1.0, coordinates / max(1, sum(sizes.values())))
    source = generator(seed, "sampled coordinates")
    chosen = {}
    for name, n in sizes.items():
        wanted = min(n, max(least, round(n * share)))
        edges = torch.arange(wanted + 1) * n // max(wanted, 1)
        inside = torch.rand(wanted, generator=source, dtype=torch.float64) * edges.diff()
        chosen[name] = edges[:-1] + inside.long()
    return chosen


def _gradients(
    model: nn.Module,
    loss: LossFunction,
    batches: Iterable[Any],
    params: Mapping[str, nn.Parameter],
    sampled: Mapping[str, Tensor],
    shown: int,
) -> tuple[Tensor, ElementCounts, int]:
    """The sampled coordinates by batch, the counts of the first 50, and how many batches were not finite."""
    tensors = list(params.values())
    device = tensors[0].device
    places = [sampled[name].to(p.device) for name, p in params.items()]
    exact = any(p.dtype in (torch.float64, torch.complex128) for p in tensors)
    seen, nonfinite = ElementCounts(tensors, 0.0), 0
    rows: list[Tensor] = []
    start = time.monotonic()
    with unchanged(model, device), Progress(shown=bool(shown)) as bar:
        for batch in batches:
            backward(model, loss, to_device(batch, device), tensors)
            found = {i: p.grad for i, p in enumerate(tensors) if p.grad is not None}
            if not _finite(found.values()):
                nonfinite += 1
                continue
            if len(rows) < CALIBRATION:
                seen.add(found)
            parts = [_elements(found.get(i), place, exact).to(device) for i, place in enumerate(places)]
            rows.append(torch.cat(parts).cpu())
            del found  # or these gradients would still be there while the next are computed
            if time.monotonic() - start > QUICK:
                bar.update(len(rows) + nonfinite, shown, "batches of the diagnosis")
    return torch.stack(rows) if rows else torch.zeros(0, sum(map(len, places))), seen, nonfinite


def _finite(gradients: Iterable[Tensor]) -> bool:
    """Whether there is no NaN and no infinity. A sum that is finite has none in it, and is much the quickest test."""
    values = [real_parts(g) for g in gradients]
    if not values:
        return True
    device = values[0].device
    if bool(torch.stack([g.sum().to(device, torch.float32) for g in values]).isfinite().all()):
        return True
    return all(bool(g.isfinite().all()) for g in values)


def _elements(gradient: Tensor | None, places: Tensor, exact: bool) -> Tensor:
    """Elements of a gradient; zeros where there is none, as for a part of the model that was not used."""
    kind = torch.float64 if exact else torch.float32
    if gradient is None:
        return torch.zeros(len(places), dtype=kind, device=places.device)
    dense = gradient.to_dense() if gradient.layout != torch.strided else gradient
    return real_parts(dense.detach()).reshape(-1).index_select(0, places).to(kind)


# --- From gradients to numbers ----------------------------------------------------------------------------------------


def _diagnosis(
    rows: Tensor, params: Mapping[str, Tensor], sampled: Mapping[str, Tensor], thresholds: Thresholds, nonfinite: int
) -> Diagnosis:
    numbers = _Coordinates.of(rows)
    layers, shares, start = {}, [], 0
    for i, (name, p) in enumerate(params.items()):
        own = slice(start, start + len(sampled[name]))
        start = own.stop
        u, d, _ = thresholds.numbers(i)
        shares.append(_clipped_and_lifted(rows[:, own], u, d))
        layers[name] = numbers.part(own).noise(real_parts(p.detach()).numel(), shares[-1])
    overall = numbers.noise(sum(noise.elements for noise in layers.values()), torch.stack(shares).sum(0))
    norms = torch.linalg.vector_norm(numbers.centred, dim=1, dtype=torch.float64)
    gram, agreement = _gram(rows)
    return Diagnosis(
        layers=layers,
        overall=overall,
        u=thresholds.u,
        d=thresholds.d,
        norms=tail_index_of_few(norms) if len(rows) >= BATCHES_FOR_NORMS else UNKNOWN,
        second_opinion=numbers.second_opinion(),
        agreement=agreement,
        batches=len(rows),
        nonfinite=nonfinite,
        gram=gram,
        survival=numbers.survival(),
    )


@dataclass(frozen=True)
class _Coordinates:
    """Coordinates by batch, less their medians, with what tells which of them have a scale."""

    centred: Tensor  # [batches, coordinates]
    deviation: Tensor
    zeros: Tensor  # the share of batches in which a coordinate is 0

    @classmethod
    def of(cls, rows: Tensor) -> _Coordinates:
        return cls(*centred_and_deviation(rows), (rows == 0).sum(0) / len(rows))

    def part(self, own: slice) -> _Coordinates:
        return _Coordinates(self.centred[:, own], self.deviation[own], self.zeros[own])

    @property
    def scaled(self) -> Tensor:
        """Whether a coordinate has a scale."""
        return (self.deviation > 0) & (self.zeros <= SPARSE)

    def standardised(self) -> Tensor:
        return self.centred[:, self.scaled] / self.deviation[self.scaled]

    def noise(self, elements: int, clipped_and_lifted: Tensor) -> Noise:
        zero, constant = self.zeros == 1, (self.deviation == 0) & (self.zeros < 1)
        z = self.standardised()
        clipped, lifted, nonzero = clipped_and_lifted.tolist()
        return Noise(
            elements=elements,
            sampled=len(zero),
            zero=int(zero.sum()),
            constant=int(constant.sum()),
            sparse=int(((self.deviation > 0) & (self.zeros > SPARSE)).sum()),
            tails=tail_index(z) if z.numel() else UNKNOWN,
            pooled=tail_index(self.centred[:, ~zero]) if not bool(zero.all()) else UNKNOWN,
            kurtosis=_kurtosis(z),
            scales=_quantiles(self.deviation[self.scaled], (0.1, 0.5, 0.9)),
            clipped=clipped / nonzero if nonzero else math.nan,
            lifted=lifted / nonzero if nonzero else math.nan,
        )

    def second_opinion(self) -> TailIndex:
        """The tail index of coordinates that are each divided by a high quantile of their own magnitudes."""
        magnitudes = self.centred[:, self.scaled].abs()
        magnitudes = magnitudes[:, :: -(-magnitudes.shape[1] // COORDINATES_OF_OPINION) or 1]
        if not magnitudes.numel():
            return UNKNOWN
        return tail_index(magnitudes / magnitudes.kthvalue(int(UPPER * len(magnitudes)), 0).values)

    def survival(self) -> dict[float, float]:
        """A magnitude of standardised coordinates -> the share of them that exceeds it."""
        logs = self.standardised().abs().log10().reshape(-1)
        if not logs.numel() or not bool((logs > -1).any()):
            return {}
        low, high = -1.0, float(logs.max()) + 1e-6
        counts = torch.histc(logs, CURVE, low, high).double()
        above = counts.flip(0).cumsum(0).flip(0) / logs.numel()
        edges = torch.linspace(low, high, CURVE + 1, dtype=torch.float64)[:-1]
        return {10**edge: share for edge, share in zip(edges.tolist(), above.tolist(), strict=True) if share > 0}


def _clipped_and_lifted(rows: Tensor, u: float, d: float) -> Tensor:
    """How many elements are cut to u, how many are raised to d, and how many are not 0."""
    magnitudes = rows.abs()
    low, nonzero = magnitudes <= d, magnitudes > 0
    return torch.stack([((magnitudes >= u) & ~low).sum(), (low & nonzero).sum(), nonzero.sum()])


def _kurtosis(z: Tensor) -> float:
    """The median over columns of the excess kurtosis."""
    if not z.numel():
        return math.nan
    centred = z - z.mean(0)
    centred = centred / centred.abs().amax(0)  # the fourth power of an outlier is too large for fp32
    squares = centred.square()
    return float((squares.square().mean(0) / squares.mean(0).square() - 3).median())


def _quantiles(values: Tensor, shares: tuple[float, float, float]) -> tuple[float, float, float]:
    if not len(values):
        return (math.nan, math.nan, math.nan)
    ordered = values.sort().values
    low, middle, high = (float(ordered[round(q * (len(values) - 1))]) for q in shares)
    return low, middle, high


def _gram(rows: Tensor) -> tuple[Tensor, float]:
    """The inner products of the rows, and the mean cosine between two of them."""
    lengths = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    directions = rows / lengths.clamp(min=torch.finfo(rows.dtype).tiny)[:, None].to(rows.dtype)
    cosines = (directions @ directions.T).double()
    n = len(rows)
    agreement = float((cosines.sum() - cosines.diagonal().sum()) / (n * (n - 1)))
    return cosines * lengths[:, None] * lengths, agreement
