"""How far each node of a round can have moved, as all nodes agree on it before any displacement is judged.

    agreed   the settings are the same on all nodes (`from_algorithm`): the bound of every node follows from them and
             from the steps that it states. A header that states another bound excludes its sender.
    stated   the inner optimizer is the user's, and a scheduler may follow the local loss: every header states a digest
             of the node's bound. Where digests differ, the bounds are gathered, and each node is judged by its own
             statement, whose coefficients per step are capped at ten times the lower median of all participants.

Both follow from the headers, which all nodes hold alike, so that no node's own settings decide about another node.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tailopt.distributed.header import Header, digest_of_bound
from tailopt.rounds.guard import Bound
from tailopt.rules.rule import value_for_param

CAP = 10.0  # times the lower median of all participants
_KINDS = (None, "coordinate", "norm", "tensor norm")


@dataclass
class NodeBounds:
    """The bound of every participant, the nodes that stated another one than agreed, and what is worth a warning."""

    by_node: dict[int, Bound]
    wrong: set[int] = field(default_factory=set)
    warnings_by_node: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundHeaders:
    """The headers of a round, and what follows from them about its participants.

    Args:
        t: the round.
        headers: of all nodes.
        participants: the nodes that take part.
        diverged: participants that continue from weights of their own: nothing bounds their displacement.
        most_steps: local steps that a node may take in a round.
    """

    t: int
    headers: Sequence[Header]
    participants: Collection[int]
    diverged: Collection[int] = ()
    most_steps: float = math.inf

    @property
    def bounded(self) -> list[int]:
        """The participants whose displacement has a bound."""
        return [node for node in self.participants if node not in self.diverged]

    def plausible_steps(self, node: int) -> int:
        """Local steps as a header states them; 0 where they cannot be true: the guard then leaves the node out."""
        steps = self.headers[node].steps
        return steps if 0 <= steps <= self.most_steps else 0


async def agreed_bounds(
    round_headers: RoundHeaders,
    expected_bound: Callable[[int, int], Bound],
    this_bound: Bound,
    tensors: int,
    gather: Callable[[Tensor], Awaitable[Tensor]],
) -> NodeBounds:
    """Bounds from agreed settings.

    Args:
        round_headers: of the round, with its participants.
        expected_bound: (node, steps) -> its bound.
        this_bound: this node's, as its header states it.
        tensors: how many there are.
        gather: every node's tensor, stacked; called on all nodes or on none.
    """
    headers, bounded, diverged = round_headers.headers, round_headers.bounded, round_headers.diverged
    warnings_by_node = _step_warnings(round_headers)
    by_node = {
        node: Bound(None) if node in diverged else expected_bound(node, round_headers.plausible_steps(node))
        for node in round_headers.participants
    }
    digests = {id(bound): digest_of_bound(bound) for bound in by_node.values()}  # most nodes share one
    wrong = {node for node in bounded if headers[node].bound_digest != digests[id(by_node[node])]}
    if len({headers[node].bound_digest for node in bounded}) > 1:
        # the last digit of a cosine may be another one on another machine: that is no other setting
        rows = (await gather(torch.tensor(encoded(this_bound, tensors), dtype=torch.float64))).tolist()
        wrong = {node for node in wrong if not _close(rows[node], encoded(by_node[node], tensors))}
    if 2 * len(wrong) > len(bounded):
        # If more than half look wrong, this node's own settings are the odd ones, so it excludes nobody: its bounds are
        # infinite. They are of the same kind, because norm bounds need an extra gather that every node must join.
        by_node = {node: Bound(bound.kind, math.inf, 0.0, bound.steps) for node, bound in by_node.items()}
        return NodeBounds(by_node, warnings_by_node=warnings_by_node)
    return NodeBounds(by_node, wrong, warnings_by_node)


def _close(stated: Sequence[float], expected: Sequence[float]) -> bool:
    return all(map(lambda a, b: a == b or math.isclose(a, b, rel_tol=1e-6), stated, expected))


async def stated_bounds(
    round_headers: RoundHeaders, this_bound: Bound, names: Sequence[str], gather: Callable[[Tensor], Awaitable[Tensor]]
) -> NodeBounds:
    """Bounds as the nodes state them.

    Args:
        round_headers: of the round, with its participants.
        this_bound: this node's.
        names: of all tensors.
        gather: every node's tensor, stacked; called on all nodes or on none.
    """
    headers, bounded, participants = round_headers.headers, round_headers.bounded, round_headers.participants
    warnings_by_node = _step_warnings(round_headers)
    digests = {headers[node].bound_digest for node in bounded}
    # a node that does not take part, or is diverged, may have another bound than the others: it needs to hear theirs
    if len({headers[node].bound_digest for node in participants}) <= 1 and len(participants) == len(headers):
        return NodeBounds(
            {node: Bound(None) if node in round_headers.diverged else this_bound for node in participants},
            warnings_by_node=warnings_by_node,
        )
    if digests <= {digest_of_bound(Bound(None))}:  # nothing bounds these optimizers
        return NodeBounds(dict.fromkeys(participants, Bound(None)), warnings_by_node=warnings_by_node)
    rows = (await gather(torch.tensor(encoded(this_bound, len(names)), dtype=torch.float64))).tolist()
    steps = {node: headers[node].steps for node in participants}
    capped, medians = cap({node: rows[node] for node in bounded}, steps)
    for node, (i, value) in _other_coefficients(rows, headers, bounded, medians).items():
        warnings_by_node.setdefault(
            node,
            f"Node {node} steps with other settings: in round {round_headers.t} one local step moves "
            f"{names[i % len(names)]} by up to {value:.3g} there, and {medians[i]:.3g} is the lower median of all "
            f"nodes. Each node is judged by its own settings, up to {CAP:g} times the median.",
        )
    return NodeBounds({node: capped.get(node, Bound(None)) for node in participants}, warnings_by_node=warnings_by_node)


def encoded(bound: Bound, tensors: int) -> list[float]:
    """A bound as numbers: its kind, then the two coefficients of every tensor; infinite where nothing bounds it.

    Examples:
        >>> encoded(Bound("coordinate", [0.5, 0.25], 0.0, 5), 2)
        [1.0, 0.5, 0.25, 0.0, 0.0]
    """
    if bound.kind is None:
        return [0.0, *[math.inf] * tensors, *[0.0] * tensors]
    numbers = [_magnitude(value_for_param(value, i)) for value in (bound.constant, bound.slope) for i in range(tensors)]
    return [float(_KINDS.index(bound.kind)), *numbers]


def cap(rows: Mapping[int, Sequence[float]], steps: Mapping[int, int]) -> tuple[dict[int, Bound], list[float]]:
    """Each node's own bound, with its coefficients per step at most `CAP` times the lower median, and those medians.

    Examples:
        >>> rows = {0: [1.0, 5.0, 0.0], 1: [1.0, 5.0, 0.0], 2: [1.0, 500.0, 0.0]}
        >>> capped, medians = cap(rows, {0: 5, 1: 5, 2: 5})
        >>> [bound.constant for bound in capped.values()], medians
        ([[5.0], [5.0], [50.0]], [1.0, 0.0])
    """
    kind = Counter(int(row[0]) for row in rows.values() if 0 < row[0] < len(_KINDS)).most_common(1)[0][0]
    tensors = (len(next(iter(rows.values()))) - 1) // 2
    per_step = {node: [_number(value) / max(steps[node], 1) for value in row[1:]] for node, row in rows.items()}
    medians = [sorted(column)[(len(column) - 1) // 2] for column in zip(*per_step.values(), strict=True)]
    capped = {}
    for node, values in per_step.items():
        least = [min(value, CAP * median) * steps[node] for value, median in zip(values, medians, strict=True)]
        constants: Any = least[:tensors]
        slopes: Any = least[tensors:]
        if _KINDS[kind] == "norm":  # one number for all tensors, as the nodes stated it
            constants, slopes = max(constants), max(slopes)
        # one group of parameters may be unbounded: the guard takes an infinite coefficient for its tensors
        unbounded = all(math.isinf(value) for value in least[:tensors])
        capped[node] = Bound(None) if unbounded else Bound(_KINDS[kind], constants, slopes, steps[node])
    return capped, medians


def _other_coefficients(
    rows: Sequence[Sequence[float]], headers: Sequence[Header], nodes: Sequence[int], medians: Sequence[float]
) -> dict[int, tuple[int, float]]:
    """Nodes whose coefficients per step differ from the median: the first such coefficient, and its value."""
    differing = {}
    for node in nodes:
        values = [_number(value) / max(headers[node].steps, 1) for value in rows[node][1:]]
        pairs = enumerate(zip(values, medians, strict=True))
        other = [(i, value) for i, (value, median) in pairs if not _close([value], [median])]
        if other:
            differing[node] = other[0]
    return differing


def _step_warnings(round_headers: RoundHeaders) -> dict[int, str]:
    """Remarks about nodes that took another number of local steps than most."""
    steps = {node: round_headers.headers[node].steps for node in round_headers.participants}
    counts = Counter(steps.values())
    if len(counts) <= 1:
        return {}
    usual = min(counts, key=lambda taken: (-counts[taken], -taken))
    return {
        node: f"Node {node} took {taken} local steps in round {round_headers.t}, where {usual} are usual. Call "
        "synchronize() on all nodes after the same step, or give every node its own weight."
        for node, taken in steps.items()
        if taken != usual
    }


def _magnitude(value: Any) -> float:
    """The largest that a coefficient can be: thresholds may be tensors."""
    if isinstance(value, Tensor):
        return float(value.detach().abs().max()) if value.numel() else 0.0
    return abs(float(value))


def _number(value: float) -> float:
    """A coefficient that arrived; NaN bounds nothing."""
    return math.inf if math.isnan(value) else abs(value)
