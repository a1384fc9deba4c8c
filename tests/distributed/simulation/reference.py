"""The weights that a run must have, from who counted in which round: whole tensors, no nodes, no messages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from tailopt.rounds.block_norm import norm
from tailopt.rounds.robust import Aggregate
from tailopt.rules.rule import ParamState
from tailopt.rules.table import OUTER
from tests.distributed.simulation.nodes import NUMBERS, chooser, damage, digest, local_step
from tests.distributed.simulation.plan import Plan


def weights_by_round(plan: Plan, used: Mapping[int, Sequence[int]]) -> dict[int, str]:
    """The digest of the weights after every round of which it is known who counted, and before the first."""
    x = [torch.ones(size) for size in plan.sizes]
    states: list[ParamState] = [{} for _ in x]
    digests, rule, numbers = {0: digest(x)}, OUTER[plan.outer], {**OUTER[plan.outer].defaults, **NUMBERS[plan.outer]}
    for t in range(1, plan.rounds + 1):
        if t not in used:
            break
        shares = chooser(plan).draw(t).shares
        if used[t]:
            rows = [_displacement(plan, t, node, x) for node in used[t]]
            everybody = list(shares) == list(used[t])
            total = 1.0 if everybody else math.fsum(shares[node] for node in used[t])
            mean = _mean(plan, rows, [shares[node] for node in used[t]], total)
            more = {"norm": norm(mean)} if plan.outer == "biclip-l2" else {}
            rule.step(x, [-m for m in mean], states, {**numbers, **more})
        digests[t] = digest(x)
    return digests


def _displacement(plan: Plan, t: int, node: int, x: list[torch.Tensor]) -> list[torch.Tensor]:
    params = [w.clone() for w in x]
    for step in range(plan.local_steps):
        for p, moved in zip(params, local_step(plan, t, node, step), strict=True):
            p.add_(moved)
    damage(plan, t, node, params)
    return [p - w for p, w in zip(params, x, strict=True)]


def _mean(plan: Plan, rows: list[list[torch.Tensor]], weights: list[float], total: float) -> list[torch.Tensor]:
    if plan.aggregate not in (None, "median-norm"):
        return Aggregate(plan.aggregate)(rows)
    sums = [d * weights[0] for d in rows[0]]
    for row, weight in zip(rows[1:], weights[1:], strict=True):
        sums = [acc + d * weight for acc, d in zip(sums, row, strict=True)]
    return sums if total == 1.0 else [acc / total for acc in sums]
