"""An update rule as a torch optimizer: the inner optimizer that `NestedOptimizer.from_algorithm` builds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tailopt.clipping.dtensor import is_dtensor, local_part, over_shards, positions_by_process_groups
from tailopt.clipping.step_cache import StepCache
from tailopt.distributed.mesh import local_tensor
from tailopt.engines.model_state import as_real
from tailopt.rounds.block_norm import root_of_sum, sum_of_squares
from tailopt.rounds.clipping_counts import ClippingCounter
from tailopt.rules.rule import Hyperparameters, Rule


class RuleOptimizer(Optimizer):
    """Steps by a rule; parameters may be DTensors, of which this rank steps its shard.

    Args:
        params: to step.
        rule: the update rule.
        hparams: its hyperparameters; a list has one entry per parameter.

    Attributes:
        clipping_counter: counts what steps clip, or None.
    """

    clipping_counter: ClippingCounter | None = None

    def __init__(self, params: Iterable[Tensor], rule: Rule, hparams: Hyperparameters) -> None:
        self.rule = rule
        self._step_caches: defaultdict[int, StepCache] = defaultdict(StepCache)  # by group
        params = list(params)
        if rule.needs_whole_tensors and any(map(is_dtensor, params)):
            raise ValueError(
                f"Invalid algorithm: the inner rule {rule.name} steps on whole matrices, and the parameters of this "
                "node are sharded over its ranks. Do not shard them, or take another inner rule, such as adamw."
            )
        super().__init__(params, dict(hparams))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; returns what the closure returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        first = 0
        for k, group in enumerate(self.param_groups):
            self._step_group(group, self._step_caches[k], first)
            first += len(group["params"])
        return loss

    def _step_group(self, group: dict[str, Any], cache: StepCache, first: int) -> None:
        """Step the parameters of a group; first: the position of its first parameter in the optimizer."""
        moving = [i for i, p in enumerate(group["params"]) if p.grad is not None]
        if not moving:
            return
        params = [group["params"][i] for i in moving]
        names = [name for name in group if name not in ("params", "param_names")]
        hparams = {name: _entries(group[name], moving) for name in names}
        local, grads = [as_real(local_tensor(p)) for p in params], [as_real(local_tensor(p.grad)) for p in params]
        if any(map(is_dtensor, params)):
            hparams = {name: _local_entries(value, params) for name, value in hparams.items()}
            if self.rule.needs_norm:
                hparams["norm"] = gradient_norms(params, grads, hparams.get("scope") == "tensor")
        if self.clipping_counter is not None:
            self.clipping_counter.add([first + i for i in moving], grads, self.rule.thresholds(local, grads, hparams))
        self.rule.step(local, grads, [self.state[p] for p in params], hparams, cache)


def _entries(value: Any, indices: Sequence[int]) -> Any:
    """Return the entries of a list at these indices; a value that all parameters share stays as it is."""
    return [value[i] for i in indices] if isinstance(value, list) else value


def _local_entries(value: Any, params: Sequence[Tensor]) -> Any:
    """Return a hyperparameter with its tensors cut like the sharded parameters against which they broadcast."""
    if isinstance(value, Tensor) and value.dim():
        value = [value] * len(params)
    if not isinstance(value, list):
        return value
    cut = [isinstance(v, Tensor) and v.dim() > 0 and is_dtensor(p) for v, p in zip(value, params, strict=True)]
    return [local_part(v, p) if c else v for v, p, c in zip(value, params, cut, strict=True)]


def gradient_norms(params: Sequence[Tensor], grads: Sequence[Tensor], per_tensor: bool) -> float | list[float]:
    """Return the norm of a gradient of which this rank has a shard, or the norm of each of its tensors."""
    sums = torch.tensor([sum_of_squares(g) for g in grads], dtype=torch.float64)
    for groups, members in positions_by_process_groups(params).items():
        sums[members] = over_shards(sums[members], groups, lambda shards: shards.sum(0))
    return [root_of_sum([s]) for s in sums.tolist()] if per_tensor else root_of_sum(sums.tolist())
