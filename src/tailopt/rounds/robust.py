"""Means that a minority of broken nodes cannot move far, for inner optimizers that the guard has no bound for.

    median-norm         the mean of the displacements whose norm is at most `multiple` times the median norm
    trimmed-mean        by coordinate: the mean without the largest and the smallest `share` of the values
    coordinate-median   by coordinate: the middle value, or the mean of the two in the middle
    centred-clipping    v <- v + mean of clip(delta_i - v, radius), several times, from the coordinate median

All of them need every displacement at once, so a round holds as many copies of the model as nodes take part, and all
ignore weights: a broken node must not be able to weigh more. They help where fewer than half of the nodes are broken
(trimmed-mean: fewer than are trimmed at an end). Where none is broken they cost something: a rare but correct
displacement is lost as well.
A value that is not a number counts as the largest. Norms are those of `tailopt.rounds.block_norm`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tailopt.clipping.operators import compute_dtype
from tailopt.rounds.block_norm import norm
from tailopt.rounds.guard import Exclusion

Displacements = Sequence[Sequence[Tensor]]  # nodes, then tensors
Length = Callable[[Sequence[Tensor]], float]  # the norm of a whole displacement, also where a node holds a part of it
CHUNK = 1 << 18  # elements of a tensor that are sorted at a time: sorting needs four times their memory


def median_norm(displacements: Displacements, multiple: float = 3.0) -> list[Tensor]:
    """The mean of the displacements whose norm is at most `multiple` times the median norm.

    With an even number of nodes the median is the lower of the two in the middle. If nobody is left out, the result has
    the bits of the plain mean with equal weights. A displacement that is opposed but not longer than the others counts.

    Args:
        multiple: 1 or more.

    Examples:
        >>> nodes = [[torch.tensor([x])] for x in (1.0, 2.0, 3.0, 1e9)]
        >>> median_norm(nodes)
        [tensor([2.])]
    """
    wide = _wide(displacements)
    far = outliers_by_norm(wide, multiple)
    near = [delta for i, delta in enumerate(wide) if i not in far]
    if not near:
        raise ValueError(f"Invalid displacements: of {len(wide)}, half or more are not numbers.")
    total = list(torch._foreach_mul(near[0], 1 / len(near)))
    for delta in near[1:]:  # product and sum rounded apart, as in the plain mean
        torch._foreach_add_(total, torch._foreach_mul(delta, 1 / len(near)))
    return total


def outliers_by_norm(
    displacements: Displacements, multiple: float = 3.0, length: Length = norm
) -> dict[int, tuple[float, float]]:
    """Return the displacements that `median_norm` leaves out, by index: their norm, and the largest that counts."""
    if not 1 <= multiple < math.inf:
        raise ValueError(f"Invalid multiple: got {multiple}; need 1 <= multiple < inf. 3 leaves out clear outliers.")
    norms = [length(delta) for delta in displacements]
    limit = multiple * _lower_median(norms)
    return {i: (long, limit) for i, long in enumerate(norms) if not long <= limit}


def trimmed_mean(displacements: Displacements, share: float = 0.2) -> list[Tensor]:
    """Take, by coordinate, the mean of what remains when a share of the values is cut off at each end.

    Of n nodes floor(share * n) are cut off at each end; with three or more nodes at least one, since less protects
    nobody.

    Args:
        share: above 0, below 0.5.

    Examples:
        >>> nodes = [[torch.tensor([x])] for x in (1.0, 2.0, 3.0, 4.0, -1e9)]
        >>> trimmed_mean(nodes)
        [tensor([2.])]
    """
    if not 0 < share < 0.5:
        raise ValueError(f"Invalid share: got {share}; need 0 < share < 0.5. 0.2 bears one broken node of five.")
    n = len(displacements)
    cut = min(max(1, int(share * n)), (n - 1) // 2)
    return _by_coordinate(displacements, lambda rows: _mean(rows[cut : n - cut]))


def coordinate_median(displacements: Displacements) -> list[Tensor]:
    """Take, by coordinate, the middle value; with an even number of nodes, the mean of the two in the middle.

    Examples:
        >>> nodes = [[torch.tensor([x, -x])] for x in (1.0, 2.0, 1e9)]
        >>> coordinate_median(nodes)
        [tensor([ 2., -2.])]
    """
    n = len(displacements)
    return _by_coordinate(displacements, lambda rows: _mean(rows[(n - 1) // 2 : n // 2 + 1]))


def centred_clipping(displacements: Displacements, radius: float | None = None, iterations: int = 3) -> list[Tensor]:
    """Find a centre that every displacement pulls at, none by more than `radius`.

        v <- v + 1/n sum of (delta_i - v) min(1, radius / |delta_i - v|)

    The rule of Karimireddy, He and Jaggi (2021), with one norm over all tensors. They start from the result of the
    round before; this starts from the coordinate median, so it needs no state and a bad round leaves no trace.

    Args:
        radius: above 0. None takes the median distance to the start (the lower one of two).
        iterations: 1 or more. The result is within iterations * radius of the coordinate median.

    Examples:
        >>> nodes = [[torch.tensor([x])] for x in (1.0, 2.0, 3.0, 4.0, 1e9)]
        >>> centred_clipping(nodes, iterations=1)
        [tensor([3.])]
    """
    return _centred(displacements, radius, iterations)


def _centred(
    displacements: Displacements, radius: float | None = None, iterations: int = 3, length: Length = norm
) -> list[Tensor]:
    if radius is not None and not 0 < radius < math.inf:
        raise ValueError(f"Invalid radius: got {radius}; need 0 < radius < inf, or None for the median distance.")
    if isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 1:
        raise ValueError(f"Invalid iterations: got {iterations!r}; need a whole number, 1 or more. 3 are usual.")
    wide = _wide(displacements)
    centre = coordinate_median(wide)
    if radius is None:
        radius = _lower_median([length(torch._foreach_sub(delta, centre)) for delta in wide])
    for _ in range(iterations):
        pull = [torch.zeros_like(c) for c in centre]
        for delta in wide:
            away = torch._foreach_sub(delta, centre)
            far = length(away)
            if far <= radius:
                torch._foreach_add_(pull, away)
            elif far < math.inf:  # what is infinitely far has no direction, and pulls at nothing
                torch._foreach_add_(pull, torch._foreach_mul(away, radius / far))
        torch._foreach_add_(centre, torch._foreach_div(pull, float(len(wide))))
    return centre


AGGREGATES: Mapping[str, Callable[..., list[Tensor]]] = MappingProxyType(
    {
        "median-norm": median_norm,
        "trimmed-mean": trimmed_mean,
        "coordinate-median": coordinate_median,
        "centred-clipping": centred_clipping,
    }
)


@dataclass(frozen=True, init=False)
class Aggregate:
    """One of `AGGREGATES` with its parameters, checked at construction.

    Examples:
        >>> robust = Aggregate("trimmed-mean", share=0.3)
        >>> robust([[torch.tensor([x])] for x in (1.0, 2.0, 1e9)])
        [tensor([2.])]
        >>> print(robust)
        trimmed-mean(share=0.3)
    """

    name: str
    parameters: tuple[tuple[str, Any], ...]

    def __init__(self, name: str, **parameters: Any) -> None:
        if name not in AGGREGATES:
            raise ValueError(f"Invalid aggregate: {name!r}; need one of {', '.join(map(repr, AGGREGATES))}.")
        known = list(inspect.signature(AGGREGATES[name]).parameters)[1:]
        for parameter in parameters:
            if parameter not in known:
                takes = f"it takes {', '.join(known)}" if known else "it takes none"
                raise ValueError(f"Invalid parameter of {name}: {parameter!r}; {takes}.")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "parameters", tuple(sorted(parameters.items())))
        self([[torch.zeros(1)]])  # values out of range are refused here, not after a round of work

    def __call__(self, displacements: Displacements) -> list[Tensor]:
        """Combine the displacements of all nodes into one, in fp32 (fp64 for fp64)."""
        return AGGREGATES[self.name](displacements, **dict(self.parameters))

    def __str__(self) -> str:
        parameters = ", ".join(f"{key}={value!r}" for key, value in self.parameters)
        return f"{self.name}({parameters})" if parameters else self.name

    def mean_function(self, length: Length = norm) -> Callable[[Displacements], list[Tensor]] | None:
        """Return the function that replaces the mean once outliers are gone; None where the mean itself remains.

        length: measures a displacement; the tensors handed in may then be partitions of what it measures.
        """
        if self.name == "median-norm":
            return None
        if self.name == "centred-clipping":
            return partial(_centred, length=length, **dict(self.parameters))
        return partial(AGGREGATES[self.name], **dict(self.parameters))

    def outliers(self, displacements: Displacements, nodes: Sequence[int], length: Length = norm) -> list[Exclusion]:
        """Return the nodes that it leaves out as a whole: median-norm may exclude some, the others exclude nobody."""
        if self.name != "median-norm":
            return []
        outliers = outliers_by_norm(displacements, **dict(self.parameters), length=length)
        reason = "far above the median norm"
        return [Outlier(nodes[i], "all tensors", *lengths, reason) for i, lengths in outliers.items()]


@dataclass(frozen=True)
class Outlier(Exclusion):
    """A displacement much longer than the others; `bound` is the longest that counts, not the longest possible."""

    def __str__(self) -> str:
        return f"node {self.node}: {self.reason} in {self.subject} ({self.value:.3g}, up to {self.bound:.3g} counts)"


def resolve(aggregate: str | Aggregate, weights: Sequence[float] = (), sampling: str = "uniform") -> Aggregate | None:
    """Return None for "mean", or the robust mean of that name; refuse weights that it would have to ignore."""
    if aggregate == "mean":
        return None
    if not isinstance(aggregate, Aggregate):
        if not isinstance(aggregate, str) or aggregate not in AGGREGATES:
            known = ", ".join(map(repr, ("mean", *AGGREGATES)))
            raise ValueError(f"Invalid aggregate: {aggregate!r}; need one of {known}.")
        aggregate = Aggregate(aggregate)
    if len(set(weights)) > 1:
        raise ValueError(
            f"Invalid weights: from {min(weights)} to {max(weights)} with aggregate {str(aggregate)!r}, which ignores "
            'them; need equal ones. Leave `weights` out, or use aggregate="mean".'
        )
    if sampling == "proportional":
        raise ValueError(
            f"Invalid sampling: 'proportional' with aggregate {str(aggregate)!r}, which ignores weights: a node drawn "
            'twice would count once. Use sampling="uniform", or aggregate="mean".'
        )
    return aggregate


def _wide(displacements: Displacements) -> list[list[Tensor]]:
    """Return the displacements in the compute type; refuse shapes that differ."""
    if not displacements:
        raise ValueError("Invalid displacements: there are none; need those of one node or more.")
    shapes = [[tuple(x.shape) for x in delta] for delta in displacements]
    for i, node_shapes in enumerate(shapes):
        if node_shapes != shapes[0]:
            raise ValueError(
                f"Invalid displacements: shapes {node_shapes} at index {i}, {shapes[0]} at index 0; need the same."
            )
    return [[x.detach().to(compute_dtype(x.dtype)) for x in delta] for delta in displacements]


def _by_coordinate(displacements: Displacements, reduced: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Apply a function to the sorted values of every coordinate; rows ascend."""
    results = []
    for values in zip(*_wide(displacements), strict=True):
        flat = [x.reshape(-1) for x in values]
        result = torch.empty_like(flat[0])
        parts = zip(result.split(CHUNK), *(x.split(CHUNK) for x in flat), strict=True)
        for into, *rows in parts if result.numel() else ():
            into.copy_(reduced(torch.stack(rows).sort(dim=0).values))
        results.append(result.reshape(values[0].shape))
    return results


def _mean(rows: Tensor) -> Tensor:
    """Add row after row in float64, so that the bits depend on neither the order of nodes nor the partitions."""
    total = rows[0].double()
    for row in rows[1:]:
        total = total + row
    return total.div_(len(rows)).to(rows.dtype)


def _lower_median(values: Sequence[float]) -> float:
    """Return the median; of an even number the lower one, which is an honest value if a majority is honest."""
    return sorted(values, key=lambda value: (math.isnan(value), value))[(len(values) - 1) // 2]
