"""The steps that momenta have taken, and what a step with momentum needs to know of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tailopt.clipping.kernels.kernel import StepGroup
from tailopt.clipping.reference import Momentum


def momentum_numbers(beta: float, step_counts: Sequence[Tensor], clamps: bool) -> list[Momentum]:
    """The numbers of the next step of every momentum: one object for all that have taken as many steps."""
    if not step_counts:
        return []
    if torch.compiler.is_compiling():
        return [Momentum(beta, 1 - beta ** (count.double() + 1), clamps) for count in step_counts]
    if not all(count.is_cpu for count in step_counts):
        corrections = 1 - beta ** (torch.stack(list(step_counts)).double() + 1)  # a few launches for all of them
        return [Momentum(beta, correction, clamps) for correction in corrections.unbind()]
    counts = torch.stack(list(step_counts)).tolist()
    by_count = {k: Momentum.at(beta, int(k) + 1)._replace(clamps=clamps) for k in dict.fromkeys(counts)}
    return [by_count[k] for k in counts]


def by_step_count(
    batch: StepGroup, momenta: list[Tensor], step_counts: list[Tensor], each: Sequence[Momentum]
) -> list[StepGroup]:
    """The batch with its momenta, or several: one for each number of steps; one for all where the device knows it."""
    params, grads, hparams, slots, *_ = batch
    if isinstance(each[0].correction, Tensor):
        corrections = [one.correction for one in each if isinstance(one.correction, Tensor)]
        hparams = hparams._replace(momentum=each[0]._replace(correction=1.0))
        return [StepGroup(params, grads, hparams, slots, momenta, step_counts, corrections)]
    if len(each) == 1 or all(one is each[0] for one in each):
        hparams = hparams._replace(momentum=each[0])
        return [StepGroup(params, grads, hparams, slots, momenta, step_counts)]
    whole = StepGroup(params, grads, hparams, slots, momenta, step_counts)
    result = []
    for of_count in dict.fromkeys(each):
        part = whole.only([i for i, other in enumerate(each) if other is of_count])
        result.append(part._replace(hparams=hparams._replace(momentum=of_count)))
    return result
