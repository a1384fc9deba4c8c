"""What nodes decide about each other's displacements, as they tell each other, and which exclusion follows from it.

Every node judges its own partition of every displacement. Verdicts are gathered, and the worst one about a node holds
for all, so that an exclusion is unanimous.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from tailopt.distributed.errors import named
from tailopt.distributed.exchange_types import JudgingCriteria
from tailopt.distributed.header import ExchangeAborted, Header
from tailopt.rounds.drops import Dropped
from tailopt.rounds.guard import BEYOND, NOT_FINITE, Exclusion


class Verdict(IntEnum):
    """What one node decided about another node's displacement; of several, the smallest one above 0 counts."""

    SOUND = 0
    DAMAGED = 1
    NOT_FINITE = 2
    BEYOND_BOUND = 3
    OTHER_ROUND = 4
    OTHER_NODE = 5
    DROPPED = 6
    OTHER_SETTINGS = 7
    TOO_MANY_STEPS = 8
    OTHER_WEIGHTS = 9


VerdictRow = tuple[float, float, float, float]  # verdict, tensor, observed, expected
SOUND: VerdictRow = (0.0, 0.0, 0.0, 0.0)

_ABOUT_A_TENSOR = (Verdict.NOT_FINITE, Verdict.BEYOND_BOUND)
_REASONS = {
    Verdict.NOT_FINITE: NOT_FINITE,
    Verdict.BEYOND_BOUND: BEYOND,
    Verdict.OTHER_ROUND: "of another round",
    Verdict.OTHER_NODE: "of another node",
    Verdict.OTHER_SETTINGS: "states other settings than agreed",
    Verdict.TOO_MANY_STEPS: "states more local steps than agreed",
}


DAMAGED = "damaged on the way"


@dataclass(frozen=True)
class DamagedOnTheWay(Exclusion):
    """A displacement that arrived differently at some nodes."""

    @classmethod
    def of(cls, node: int, receivers: Sequence[int]) -> DamagedOnTheWay:
        """With the nodes that received something else than was sent."""
        return cls(node, f"what arrived at {named(sorted(set(receivers)))}", 0.0, None, DAMAGED)

    def __str__(self) -> str:
        return (
            f"node {self.node}: {self.subject} is not what it sent ({self.reason}); either of the nodes or the link "
            "between them is at fault"
        )


@dataclass(frozen=True)
class BeganFromOtherWeights(Exclusion):
    """A node that began the round from other weights than it was sent."""

    @classmethod
    def of(cls, node: int, owner: int) -> BeganFromOtherWeights:
        """With the owner of the partition, which sent its weights."""
        return cls(node, f"weights of node {owner}", 0.0, None, "began from other weights than were sent")

    def __str__(self) -> str:
        return (
            f"node {self.node}: it began from other {self.subject} than were sent; either of the two nodes or the link "
            "between them is at fault"
        )


def verdict_row(verdict: Verdict, tensor: int = 0, observed: float = 0.0, expected: float = 0.0) -> VerdictRow:
    """A verdict as it is sent.

    observed, expected: a magnitude and its bound, the round or node that a header states and the right one, or steps
    and the most there may be.
    """
    return float(verdict), float(tensor), observed, expected


def header_verdict(
    t: int, node: int, header: Header, wrong_weights_owner: int | None, wrong_bound: bool, criteria: JudgingCriteria
) -> VerdictRow | None:
    """What a header alone decides about a node. All nodes have the same headers, so all decide the same.

    Args:
        t: the round.
        node: the node that the header came from.
        header: as it arrived.
        wrong_weights_owner: owner of a partition of which the judged node loaded other weights than the owner sent;
            None if all match.
        wrong_bound: whether it stated another bound than agreed.
        criteria: what the round is judged by.
    """
    if not header.contributes:
        return verdict_row(Verdict.DROPPED)
    if header.round != t:
        return verdict_row(Verdict.OTHER_ROUND, observed=float(header.round), expected=float(t))
    if header.node != node:
        return verdict_row(Verdict.OTHER_NODE, observed=float(header.node), expected=float(node))
    if wrong_weights_owner is not None:
        return verdict_row(Verdict.OTHER_WEIGHTS, observed=float(wrong_weights_owner))
    if criteria.guard and not 0 <= header.steps <= criteria.most_steps:
        return verdict_row(Verdict.TOO_MANY_STEPS, observed=float(header.steps), expected=criteria.most_steps)
    if criteria.guard and wrong_bound:
        return verdict_row(Verdict.OTHER_SETTINGS)
    return None


def check_auto_thresholds(t: int, headers: Sequence[Header]) -> None:
    """Raise where a node began the round with other automatic thresholds: all nodes compute them from the same sums."""
    digests = [header.auto_thresholds_digest for header in headers]
    usual = Counter(digests).most_common(1)[0][0]
    others = [node for node, digest in enumerate(digests) if digest != usual]
    if others:
        raise ExchangeAborted(
            f"Round {t}: {named(others)} began with other automatic thresholds than most nodes, though all of them "
            "follow from the same statistics. Restart all nodes from the last checkpoint."
        )


def merge_verdicts(
    t: int,
    nodes: Sequence[int],
    by_judge: Sequence[Sequence[VerdictRow]],
    judges: Sequence[int],
    tensor_and_buffer_names: Sequence[str],
) -> dict[int, Exclusion]:
    """The nodes that all leave out of a round, and why.

    Args:
        t: the round.
        nodes: the participants.
        by_judge: of every judge, a row about every node.
        judges: the node of each judge: a node may have several ranks.
        tensor_and_buffer_names: tensors and buffers, by number.
    """
    for judge, rows in zip(judges, by_judge, strict=True):
        for about, row in enumerate(rows):
            _check(t, judge, about, row, len(tensor_and_buffer_names))
    excluded: dict[int, Exclusion] = {}
    for node in nodes:
        rows = [rows[node] for rows in by_judge if rows[node][0]]
        receivers = [k for k, rows in zip(judges, by_judge, strict=True) if rows[node][0] == Verdict.DAMAGED]
        if receivers:
            excluded[node] = DamagedOnTheWay.of(node, receivers)
        elif rows:
            excluded[node] = _exclusion(
                node, min(rows, key=lambda r: (r[0], r[1], r[3] - abs(r[2]))), tensor_and_buffer_names
            )
    return excluded


def _check(t: int, judge: int, about: int, row: VerdictRow, tensor_and_buffer_names: int) -> None:
    """Raise if a verdict cannot be valid, and name its sender: acting on it would exclude a node for no reason."""
    code, tensor = row[0], row[1]
    known = code in tuple(Verdict)
    if known and (code not in _ABOUT_A_TENSOR or (tensor.is_integer() and 0 <= tensor < tensor_and_buffer_names)):
        return
    what = f"code {code:g}" if not known else f"tensor {tensor:g} of {tensor_and_buffer_names}"
    raise ExchangeAborted(
        f"Round {t}: node {judge} sent a verdict about node {about} that cannot be read ({what}). Does it run another "
        "version? Restart all nodes from the last checkpoint."
    )


def _exclusion(node: int, row: VerdictRow, tensor_and_buffer_names: Sequence[str]) -> Exclusion:
    verdict, tensor, observed, expected = Verdict(int(row[0])), int(row[1]), row[2], row[3]
    if verdict is Verdict.DROPPED:
        return Dropped.of(node)
    if verdict is Verdict.OTHER_WEIGHTS:
        return BeganFromOtherWeights.of(node, int(observed))
    subject = tensor_and_buffer_names[tensor] if verdict in _ABOUT_A_TENSOR else "what arrived"
    bound = expected if verdict is Verdict.BEYOND_BOUND else None
    return Exclusion(node, subject, observed, bound, _REASONS[verdict])


def pairs_that_differ(
    sent_digests: Sequence[int], loaded_digests: Mapping[int, Sequence[int]]
) -> list[tuple[int, int]]:
    """(owner, receiver) of every partition that a node loaded differently from what its owner says it sent.

    Examples:
        >>> pairs_that_differ([7, 8], {0: [7, 8], 1: [7, 9]})
        [(1, 1)]
    """
    return [
        (owner, receiver)
        for receiver, digests in loaded_digests.items()
        for owner, digest in enumerate(digests)
        if digest != sent_digests[owner]
    ]
