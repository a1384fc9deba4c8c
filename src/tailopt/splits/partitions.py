"""Splitting the samples of one dataset among nodes: pure functions of their arguments and a seed.

    iid         shuffled, sizes that differ by at most one
    power_law   shuffled, the size of node i proportional to (i + 1)**-exponent
    dirichlet   the shares of the nodes in each class ~ Dirichlet(alpha, ..., alpha)
    by_source   one node for each distinct source (an author, a hospital, a device)

A part is a vector of sample indices (int64, ascending), one part per node; every sample is in exactly one part. Shares
become whole numbers by rounding the largest remainders up.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Hashable, Iterable, Mapping, Sequence, Sized
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from tailopt.arguments import whole_number
from tailopt.seeds import generator

Parts = Sequence[Tensor] | Mapping[Any, Tensor]

_T = TypeVar("_T")


def iid(samples: int, nodes: int, seed: int = 0) -> list[Tensor]:
    """Deal samples 0 to `samples` - 1 to the nodes at random, in parts whose sizes differ by at most one.

    Examples:
        >>> [part.tolist() for part in iid(7, nodes=3)]
        [[1, 2, 6], [4, 5], [0, 3]]
    """
    samples, nodes = _check_counts(samples, nodes)
    return _ascending(_shuffled(samples, seed, "iid").tensor_split(nodes))


def power_law(samples: int, nodes: int, exponent: float = 1.0, seed: int = 0) -> list[Tensor]:
    """Deal samples at random in parts of unequal size: the share of node i is proportional to (i + 1)**-exponent.

    Shares become sizes by largest remainder; a node that would get none receives one sample of the largest node. Sizes
    do not grow with the node's number.

    Args:
        exponent: 0 (equal sizes) or more; 1 is Zipf's law.

    Examples:
        >>> [len(part) for part in power_law(1000, nodes=5)]
        [438, 219, 146, 109, 88]
    """
    samples, nodes = _check_counts(samples, nodes)
    if not 0 <= exponent < math.inf:
        raise ValueError(f"Invalid exponent: got {exponent}; need 0 <= exponent < inf. 0 gives nodes of equal size.")
    sizes = _apportion(samples, [float(rank) ** -exponent for rank in range(1, nodes + 1)])
    for giver, taker in _transfers(sizes, at_least=1):
        sizes[giver] -= 1
        sizes[taker] += 1
    return _ascending(_shuffled(samples, seed, "power-law").split(sizes))


def dirichlet(
    labels: Sequence[Hashable] | Tensor, nodes: int, alpha: float, seed: int = 0, at_least: int = 1
) -> list[Tensor]:
    """Split with skewed classes: the shares of the nodes in each class are drawn from Dirichlet(alpha, ..., alpha).

    Small `alpha` gives almost every class to a single node; for large `alpha` all nodes have the same mixture. Sizes
    differ too. While a node has fewer than `at_least` samples, it receives a random sample of the largest node; shares
    are never drawn again, so this ends for every alpha.

    Args:
        labels: the class of each sample: numbers or strings, a list, an array or a 1-D tensor.
        alpha: 0 < alpha < inf; 0.1 to 1 are common.
        at_least: the smallest size a node may have, 1 or more.

    Examples:
        >>> labels = [0] * 50 + [1] * 50
        >>> [torch.tensor(labels)[part].bincount(minlength=2).tolist() for part in dirichlet(labels, 3, alpha=0.3)]
        [[46, 5], [1, 45], [3, 0]]
        >>> [torch.tensor(labels)[part].bincount(minlength=2).tolist() for part in dirichlet(labels, 3, alpha=1000.0)]
        [[17, 17], [17, 17], [16, 16]]
    """
    classes = _positions(_values(labels, "labels"), "labels")
    at_least = whole_number("at_least", at_least, low=1, convert=True)
    _, nodes = _check_counts(sum(map(len, classes.values())), nodes, at_least)
    if not 0 < alpha < math.inf:
        raise ValueError(f"Invalid alpha: got {alpha}; need 0 < alpha < inf. For even mixtures use iid.")
    random = generator(seed, "dirichlet")
    members: list[list[int]] = [[] for _ in range(nodes)]
    for positions in classes.values():
        sizes = _apportion(len(positions), _dirichlet_shares(nodes, alpha, random))
        shuffled = torch.tensor(positions)[torch.randperm(len(positions), generator=random)]
        for indices, share in zip(members, shuffled.split(sizes), strict=True):
            indices += share.tolist()
    for giver, taker in _transfers([len(indices) for indices in members], at_least):
        indices = members[giver]
        members[taker].append(indices.pop(int(torch.randint(len(indices), (), generator=random))))
    return _ascending(torch.tensor(indices, dtype=torch.int64) for indices in members)


def by_source(sources: Iterable[Hashable] | Tensor) -> dict[Any, Tensor]:
    """Return one part per distinct source, by name, in the order in which the sources first appear.

    Args:
        sources: where each sample comes from: names or numbers, any hashable values.

    Examples:
        >>> parts = by_source(["Plato", "Hume", "Plato", "Kant"])
        >>> {name: part.tolist() for name, part in parts.items()}
        {'Plato': [0, 2], 'Hume': [1], 'Kant': [3]}
    """
    values = _values(sources, "sources")
    if not values:
        raise ValueError("Invalid sources: got none; need the source of each sample.")
    return {name: torch.tensor(positions) for name, positions in _positions(values, "sources").items()}


def subsets(dataset: Dataset[_T] | Sequence[_T], parts: Parts) -> list[Subset[_T]]:
    """Return the datasets of the nodes: one `torch.utils.data.Subset` of the dataset per part.

    `parts` may come from any function of this module (the values of a dict are used in its order), or be the user's:
    indices in [0, len(dataset)). Then a sample may be in several parts, or in none.

    Examples:
        >>> [list(subset) for subset in subsets(["a", "b", "c"], [torch.tensor([2, 0]), torch.tensor([1])])]
        [['c', 'a'], ['b']]
    """
    parts_in_order = list(parts.values()) if isinstance(parts, Mapping) else list(parts)
    samples = len(cast(Sized, dataset))
    # Plain lists: not every dataset accepts a 0-dim tensor as an index.
    by_node = [[operator.index(i) for i in (p.tolist() if isinstance(p, Tensor) else p)] for p in parts_in_order]
    for node, indices in enumerate(by_node):
        wrong = next((i for i in indices if not 0 <= i < samples), None)
        if wrong is not None:
            raise ValueError(
                f"Invalid parts: node {node} has sample {wrong}; need numbers from 0 to {samples - 1}, the samples of "
                "the dataset. Was it split by the length of another one?"
            )
    return [Subset(cast("Dataset[_T]", dataset), indices) for indices in by_node]


def _check_counts(samples: int, nodes: int, at_least: int = 1) -> tuple[int, int]:
    samples = whole_number("samples", samples, low=1, convert=True)
    nodes = whole_number("nodes", nodes, low=1, convert=True)
    if nodes * at_least > samples:
        need = "at least one sample" if at_least == 1 else f"at least {at_least} samples"
        raise ValueError(
            f"Invalid nodes: got nodes={nodes} for {samples} samples; need {need} per node, so 1 <= nodes <= "
            f"{samples // at_least}. Take fewer nodes{' or a smaller at_least' if at_least > 1 else ''}."
        )
    return samples, nodes


def _shuffled(samples: int, seed: int, purpose: str) -> Tensor:
    return torch.randperm(samples, generator=generator(seed, purpose))


def _ascending(parts: Iterable[Tensor]) -> list[Tensor]:
    return [part.sort().values for part in parts]


def _apportion(total: int, shares: Sequence[float]) -> list[int]:
    """Return whole numbers that sum to `total`, proportional to `shares`; the largest remainders are rounded up."""
    whole = math.fsum(shares)
    quotas = [total * (share / whole) for share in shares]
    sizes = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(sizes)), key=lambda i: sizes[i] - quotas[i])  # stable: the first node wins a tie
    for i in by_remainder[: total - sum(sizes)]:
        sizes[i] += 1
    return sizes


def _transfers(sizes: Sequence[int], at_least: int) -> list[tuple[int, int]]:
    """Return (giver, taker) of single samples after which every size is `at_least` or more.

    The largest node gives; of several, the last. Needs sum(sizes) >= at_least * len(sizes): then the largest node
    always has a sample to spare.
    """
    largest = [(-size, -node) for node, size in enumerate(sizes)]
    heapq.heapify(largest)
    moves = []
    for taker, size in enumerate(sizes):
        for _ in range(at_least - size):
            negative, node = largest[0]
            heapq.heapreplace(largest, (negative + 1, node))
            moves.append((-node, taker))
    return moves


def _dirichlet_shares(nodes: int, alpha: float, random: torch.Generator) -> list[float]:
    """Draw once from Dirichlet(alpha, ..., alpha), by logarithms of gamma variables.

    Gamma(alpha) = Gamma(alpha + 1) * U**(1 / alpha). For alpha = 0.001 most of these are below the smallest double:
    without logarithms, the shares would be 0/0 instead of 1 for one node and 0 for the others.
    """
    gamma = torch._standard_gamma(torch.full((nodes,), alpha + 1.0, dtype=torch.float64), generator=random)
    uniform = 1.0 - torch.rand(nodes, dtype=torch.float64, generator=random)  # in (0, 1]
    logs = gamma.log() + uniform.log() / alpha
    # If all logarithms overflow (alpha below 1e-307), the node with the largest uniform number gets everything.
    shares = torch.softmax(logs, 0) if logs.isfinite().any() else (uniform == uniform.max()).double()
    return cast("list[float]", shares.tolist())


def _values(values: Iterable[Hashable] | Tensor, name: str) -> list[Any]:
    """Return tensors, arrays and lists of 0-dim tensors as plain values: tensors hash by identity, not by value."""
    dimensions = getattr(values, "ndim", 1)
    if dimensions != 1:
        raise ValueError(f"Invalid {name}: got {dimensions} dimensions; need 1, one value per sample.")
    plain = values.tolist() if hasattr(values, "tolist") else values
    return [value.item() if isinstance(value, Tensor) else value for value in plain]


def _positions(values: Sequence[Any], name: str) -> dict[Any, list[int]]:
    """Return the positions of each distinct value, by first appearance."""
    positions: dict[Any, list[int]] = {}
    for i, value in enumerate(values):
        try:
            positions.setdefault(value, []).append(i)
        except TypeError as error:
            raise ValueError(
                f"Invalid {name}: sample {i} has a {type(value).__name__}; need hashable values, such as numbers, "
                "strings or tuples."
            ) from error
        if value != value:
            raise ValueError(f"Invalid {name}: sample {i} has {value}; need values that equal themselves.")
    return positions
