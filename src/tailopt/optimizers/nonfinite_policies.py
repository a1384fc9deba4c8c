"""What a non-finite gradient does to its parameter: the policies by name, and what "skip" and "raise" are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from tailopt.clipping.kernels.kernel import StepGroup

POLICIES = ("propagate", "skip", "raise")


def skip_where(batch: StepGroup, verdict: Tensor) -> StepGroup:
    """The batch that stays as it is where the verdict is true."""
    verdicts = verdict.expand(len(batch.params))
    return batch._replace(skips=verdicts.clone() if batch.skips is None else batch.skips | verdicts)


def shared_by_scope(bad: Tensor, scopes: Sequence[int]) -> Tensor:
    """Verdicts of tensors, where those of one scope share theirs."""
    if len(set(scopes)) == len(scopes):
        return bad
    each = bad.unbind()
    of_scope: dict[int, Tensor] = {}
    for scope, verdict in zip(scopes, each, strict=True):
        of_scope[scope] = of_scope[scope] | verdict if scope in of_scope else verdict
    return torch.stack([of_scope[scope] for scope in scopes])


def raise_for_nonfinite(
    strict: Sequence[int], owners: Sequence[Tensor], counts: Tensor, names: Callable[[], Mapping[int, str | int]]
) -> None:
    """Raise if a gradient that must be finite is not; waits for the device.

    Args:
        strict: positions of these gradients among all.
        owners: the parameter of each gradient.
        counts: how many elements of each gradient are not finite.
        names: gives the names of parameters, by id.
    """
    if not strict:
        return
    each = counts.tolist()
    bad = [k for k in strict if each[k]]
    if not bad:
        return
    by_id = names()
    elements = [f"{by_id[id(owners[k])]!r}: {each[k]} of {owners[k].numel()}" for k in bad]
    raise FloatingPointError(
        f"Non-finite gradient elements in {', '.join(elements)}. No parameter was moved. "
        'Look at the batch, or use nonfinite="skip".'
    )
