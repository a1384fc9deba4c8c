"""The weighted mean and the outer step on one partition, with the bits of the whole model.

Both are elementwise, so they can go piece by piece through memory: a piece is added up when the outer rule needs it,
and is then still in the cache of the core.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from tailopt.clipping.step_cache import StepCache
from tailopt.distributed import flat_kernels
from tailopt.rounds.block_norm import BLOCK
from tailopt.rules.rule import Hyperparameters, ParamState, Rule, value_for_param

PIECE = 4 * BLOCK  # elements: the four arrays of an outer rule then fit the cache of a core

NegatedPiece = Callable[
    [int, Tensor, slice], Tensor
]  # (segment, its mean displacement, which piece) -> minus the piece


@dataclass(frozen=True)
class PendingMean:
    """A weighted mean that is still to be formed, in the memory of the first row.

    Args:
        rows: every counted node's displacement in this partition.
        shares: of these nodes.
        total_share: by which the sum is divided.
    """

    rows: Sequence[Tensor]
    shares: Sequence[float]
    total_share: float

    def form(self, start: int, count: int, negative: bool = False) -> None:
        """Add up so many elements."""
        rows = [row[start : start + count] for row in self.rows]
        flat_kernels.mean(rows, self.shares, self.total_share, negative)

    def sgd_step(
        self,
        rule: Rule,
        x: Tensor,
        states: Sequence[ParamState],
        hparams: Hyperparameters,
        segment_ranges: Sequence[tuple[int, int]],
    ) -> bool:
        """Add up and take the outer step in one pass; False where the kernel cannot, and nothing has changed."""
        return flat_kernels.mean_and_sgd_step(
            rule, x, states, hparams, flat_kernels.Rows(self.rows, self.shares, self.total_share), segment_ranges
        )


def negate_piece(segment: int, mean: Tensor, piece: slice) -> Tensor:
    """Minus a piece of a mean that is complete."""
    return mean[piece].neg_()


def outer_step(
    rule: Rule,
    weights: Sequence[Tensor],
    means: Sequence[Tensor],
    states: Sequence[ParamState],
    hparams: Hyperparameters,
    negated: NegatedPiece = negate_piece,
    cache: StepCache | None = None,
) -> None:
    """Take the outer step on the negated mean displacement, by segment; the mean is used up.

    Once its state exists, a rule with state steps in pieces that fit the cache, without temporary tensors of the size
    of a parameter: that takes less than half the time. The rule is elementwise, so the bits are the same.
    """
    names = rule.state_names
    if not weights:  # the partition of this node is empty
        return
    if not names or any(name not in state for state in states for name in names):
        rule.step(weights, [negated(i, d, slice(0, d.numel())) for i, d in enumerate(means)], states, hparams, cache)
        return
    for segment, (x, mean, state) in enumerate(zip(weights, means, states, strict=True)):
        # a list has one entry per segment here, where other callers have one per parameter
        of_segment = {key: value_for_param(value, segment) for key, value in hparams.items()}
        scalars = {key: value for key, value in state.items() if key not in names}
        for k in range(0, max(x.numel(), 1), PIECE):
            cut = slice(k, k + PIECE)
            piece = {**scalars, **{name: state[name][cut] for name in names}}
            of_piece = {key: v[cut] if isinstance(v, Tensor) and v.dim() else v for key, v in of_segment.items()}
            rule.step([x[cut]], [negated(segment, mean, cut)], [piece], of_piece)
        state.update({key: piece[key] for key in scalars})  # the tensors were changed in place
