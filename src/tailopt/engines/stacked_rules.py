"""Inner steps of stacked nodes: the rules of one node on tensors with leading dimensions, and the states they keep.

Most of the time all nodes take the same step. Where they differ (a node has taken more steps and its Adam counts them,
a node has no batch left), some of them step: their rows are taken out, stepped on and put back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tailopt.clipping.operators import compute_dtype
from tailopt.clipping.step_cache import StepCache
from tailopt.engines.model_state import as_real
from tailopt.rules.rule import Hyperparameters, ParamState, Rule, is_active, value_for_param

Rows = Tensor | None  # the nodes that step, as an index; None: all of them


class InnerSteps(Protocol):
    """Takes inner steps of stacked nodes and keeps their states."""

    def begin(self, states: Sequence[list[ParamState]]) -> None:
        """Start a round with the states of the nodes, in the order in which they are stacked."""

    def kind(self, row: int) -> object:
        """Return what nodes must have in common to step together."""

    def step(
        self, rows: Rows, weights: Sequence[Tensor], grads: Sequence[Tensor | None], hparams: Hyperparameters
    ) -> None:
        """Step, in place, on the weights of these nodes, which are stacked in the order of `rows`."""

    def state(self, row: int) -> list[ParamState]:
        """Return the states of one node."""


class StackedSteps:
    """Steps of a rule on all nodes at once.

    Args:
        rule: one of the tables of rules.
        leading: how many leading dimensions the weights have.
    """

    def __init__(self, rule: Rule, leading: int = 1) -> None:
        self.rule, self._leading = rule, leading
        self._cache = StepCache()
        self._tensors: list[dict[str, Tensor]] = []  # by parameter: what all nodes have, stacked
        self._plain: list[list[ParamState]] = []  # by node and parameter: other values, and None for each tensor it has

    def begin(self, states: Sequence[list[ParamState]]) -> None:
        """Stack the states of the nodes."""
        self._tensors = [{} for _ in states[0]]
        shared: list[list[ParamState]] = []
        self._plain = []
        for row, of_node in enumerate(states):
            plain = [{k: None if isinstance(v, Tensor) else v for k, v in s.items()} for s in of_node]
            alike = next((other for other in shared if other == plain), None)
            if alike is None:
                shared.append(plain)
            self._plain.append(alike if alike is not None else plain)
            for stacked, s in zip(self._tensors, of_node, strict=True):
                for key, value in s.items():
                    if isinstance(value, Tensor):
                        _stack_into(stacked, key, value, row, len(states))

    def begin_alike(self, states: list[ParamState], nodes: int) -> None:
        """Start a round in which all nodes have the same plain values; tensors are stacked already."""
        self._tensors = [{k: v for k, v in s.items() if isinstance(v, Tensor)} for s in states]
        plain = [{k: None if isinstance(v, Tensor) else v for k, v in s.items()} for s in states]
        self._plain = [plain] * nodes

    def kind(self, row: int) -> object:
        """Return the identity of the plain values: nodes that share them have the same."""
        return id(self._plain[row])

    def step(
        self, rows: Rows, weights: Sequence[Tensor], grads: Sequence[Tensor | None], hparams: Hyperparameters
    ) -> None:
        """Step on all nodes, or on some rows."""
        members = range(len(self._plain)) if rows is None else rows.tolist()
        plain = self._plain[members[0]]
        states = [self._taken(i, plain[i], rows) for i in range(len(weights))]
        moving = [i for i, g in enumerate(grads) if g is not None]
        # a parameter that the loss did not reach keeps its value and its state
        chosen = {k: [v[i] for i in moving] if isinstance(v, list) else v for k, v in hparams.items()}
        self._rule_step(
            [as_real(weights[i]) for i in moving],
            [as_real(g) for g in grads if g is not None],
            [states[i] for i in moving],
            chosen,
            self._cache if rows is None else None,
        )
        for i in moving:
            self._put_back(i, states[i], rows)
        after = [{k: None if isinstance(v, Tensor) else v for k, v in s.items()} for s in states]
        if after != plain:
            for row in members:
                self._plain[row] = after

    def keeps_state(self, hparams: Hyperparameters) -> bool:
        """Return whether a step leaves something for the next one; momentum that is 0 does not."""
        names = self.rule.state_names
        return bool(names) and (names != ("momentum_buffer",) or is_active(hparams.get("momentum", 0.0)))

    def step_without_state(
        self, weights: Sequence[Tensor], grads: Sequence[Tensor | None], hparams: Hyperparameters
    ) -> None:
        """Step on all nodes by a rule that keeps no state: nothing but the weights changes, so it can be traced."""
        moving = [i for i, g in enumerate(grads) if g is not None]
        chosen = {k: [v[i] for i in moving] if isinstance(v, list) else v for k, v in hparams.items()}
        states: list[ParamState] = [{} for _ in moving]
        gradients = [as_real(g) for g in grads if g is not None]
        self._rule_step([as_real(weights[i]) for i in moving], gradients, states, chosen, None)
        if any(states):
            raise RuntimeError(f"the rule {self.rule.name} keeps a state")

    def state(self, row: int) -> list[ParamState]:
        """Return views of one node's states."""
        return [
            {key: tensors[key][row] if value is None else value for key, value in plain.items()}
            for tensors, plain in zip(self._tensors, self._plain[row], strict=True)
        ]

    def tensors(self, key: str) -> list[Tensor | None]:
        """Return one tensor of the state for every parameter, of all nodes; None before the first step."""
        return [tensors.get(key) for tensors in self._tensors]

    def select(self, configurations: Tensor) -> None:
        """Keep the states of some configurations, which are the second dimension, and forget the others."""
        self._tensors = [
            {key: t.index_select(1, configurations) for key, t in tensors.items()} for tensors in self._tensors
        ]

    def _rule_step(
        self,
        weights: list[Tensor],
        grads: list[Tensor],
        states: list[ParamState],
        hparams: Mapping[str, Any],
        cache: StepCache | None,
    ) -> None:
        if not weights:
            return
        hparams = with_node_dead_zones(weights, grads, hparams, self._leading)
        if self.rule.needs_norm:
            self.rule.step(weights, grads, states, {**hparams, "leading": self._leading}, cache)
        elif not any(isinstance(value, list) for value in hparams.values()):
            self.rule.step(weights, grads, states, hparams, cache)
        else:
            for i, (w, g, s) in enumerate(zip(weights, grads, states, strict=True)):
                self.rule.step([w], [g], [s], {k: value_for_param(v, i) for k, v in hparams.items()})

    def _taken(self, i: int, plain: ParamState, rows: Rows) -> ParamState:
        tensors = self._tensors[i]
        return {
            key: value if value is not None else tensors[key] if rows is None else tensors[key].index_select(0, rows)
            for key, value in plain.items()
        }

    def _put_back(self, i: int, state: ParamState, rows: Rows) -> None:
        stacked = self._tensors[i]
        for key, value in state.items():
            if not isinstance(value, Tensor):
                continue
            if rows is None:
                stacked[key] = value
                continue
            if key not in stacked:
                stacked[key] = value.new_zeros((len(self._plain), *value.shape[1:]))
            stacked[key].index_copy_(0, rows, value)


class SeparateSteps:
    """Steps of a rule that cannot step on stacked tensors, or may not: a class of torch.optim; node after node."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._states: list[list[ParamState]] = []

    def begin(self, states: Sequence[list[ParamState]]) -> None:
        """Take over the states of the nodes."""
        self._states = [list(of_node) for of_node in states]

    def kind(self, row: int) -> object:
        """Return the same for all: they never step together."""
        return None

    def step(
        self, rows: Rows, weights: Sequence[Tensor], grads: Sequence[Tensor | None], hparams: Hyperparameters
    ) -> None:
        """Step on one node after another."""
        moving = [i for i, g in enumerate(grads) if g is not None]
        chosen = {k: [v[i] for i in moving] if isinstance(v, list) else v for k, v in hparams.items()}
        for k, row in enumerate(range(len(self._states)) if rows is None else rows.tolist()):
            params = [as_real(weights[i][k]) for i in moving]
            gradients = [as_real(g[k]) for g in grads if g is not None]
            if params:
                self.rule.step(params, gradients, [self._states[row][i] for i in moving], chosen)

    def state(self, row: int) -> list[ParamState]:
        """Return the states of one node."""
        return self._states[row]


def with_node_dead_zones(
    weights: Sequence[Tensor], grads: Sequence[Tensor], hparams: Mapping[str, Any], leading: int
) -> Mapping[str, Any]:
    """Resolve dead_zone="auto" for every node: 4 * eps * its largest gradient over all tensors, at most u."""
    zone = hparams.get("dead_zone")
    if not isinstance(zone, str):
        return hparams
    tops = [g.abs().reshape(*g.shape[:leading], -1).double() for g in grads]
    finite = [torch.where(t.isfinite(), t, 0.0).amax(-1) if t.shape[-1] else t.new_zeros(t.shape[:-1]) for t in tops]
    top = torch.stack(finite).amax(0)
    zones = []
    for i, w in enumerate(weights):
        of_tensor = 4 * torch.finfo(compute_dtype(w.dtype)).eps * top
        of_tensor = of_tensor.reshape(top.shape + (1,) * (w.dim() - leading))
        u = value_for_param(hparams.get("u", 1.0), i)  # that of sign is 1
        zones.append(torch.minimum(of_tensor, u.to(top) if isinstance(u, Tensor) else torch.full_like(of_tensor, u)))
    return {**hparams, "dead_zone": zones}


def _stack_into(stacked: dict[str, Tensor], key: str, value: Tensor, row: int, rows: int) -> None:
    if key not in stacked:
        stacked[key] = value.new_zeros((rows, *value.shape))
    stacked[key][row] = value
