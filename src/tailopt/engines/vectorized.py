"""All nodes of a round at once: one batched program instead of node after node.

A round has the results of the sequential engine up to rounding, wherever the model draws nothing at random: the same
batches, the same inner rule, the same guard, mean and records. With dropout every node has its own masks, drawn in
another order. It needs the memory of all participants at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tailopt.clipping.operators import compute_dtype
from tailopt.engines.batches import batch_digest
from tailopt.engines.captured_steps import CapturedSteps
from tailopt.engines.model_state import as_real
from tailopt.engines.routes import COMPILED, Route
from tailopt.engines.sequential import PRECISIONS, LocalTraining, Sequential, copied_to
from tailopt.engines.sequential import _with_location as with_location
from tailopt.engines.stacked_batches import NodeBatches
from tailopt.engines.stacked_model import StackedModel
from tailopt.engines.stacked_round import StackedNodes, StackedRound
from tailopt.engines.stacked_rules import InnerSteps, SeparateSteps, StackedSteps
from tailopt.rounds.clipping_counts import ClippingCounter
from tailopt.rounds.guard import Bound
from tailopt.rounds.participants import Participants
from tailopt.rounds.round import Contribution, DivergedState, GlobalState
from tailopt.rules.rule import Hyperparameters


class Vectorized(Sequential):
    """Local steps of all participants as one program; everything between rounds is the sequential engine's."""

    def __init__(self, model: torch.nn.Module, training: LocalTraining) -> None:
        if training.inner_hyperparameters.auto_thresholds is not None:
            raise ValueError(
                'Invalid engine: "vectorized" with i_u="auto", whose statistics are recorded node by node. Take '
                'engine="sequential", or give i_u and i_d as numbers.'
            )
        super().__init__(model, training)
        self._program = StackedModel(model, training.loss, PRECISIONS[training.precision])
        rule = training.inner_hyperparameters.rule
        stackable = isinstance(training.algorithm.inner, str) and not rule.needs_whole_tensors
        self._inner: InnerSteps = StackedSteps(rule) if stackable else SeparateSteps(rule)
        compiled = training.route.name == COMPILED
        self._captured = CapturedSteps(self._program, self._inner, None, bool(training.proximal)) if compiled else None
        self._stack: list[Tensor] = []  # the memory of the stacked weights, used again in every round
        self._model_is_known = False
        self._counters: list[ClippingCounter] = []

    @property
    def route(self) -> Route:
        """How the steps of the nodes ran, and why this way."""
        return self._training.route if self._captured is None else self._captured.route

    def contributions(
        self, state: GlobalState, participants: Participants, diverging: Collection[int] = ()
    ) -> Iterator[Contribution]:
        """Train all participants of the next round, and yield what each of them contributes, in ascending order."""
        nodes, t, training = list(participants.shares), state.round + 1, self._training
        self._model_state.load(state)
        start = self._model_state.weights_in_own_types(state)
        batches = training.batches
        sources = [NodeBatches(batches, node, t, self.steps_done[node], self._seed) for node in nodes]
        self._look_at_first_batch(sources[0], t)
        self._program.load_constants(state.buffers)
        stacked = self._stacked(state, start, nodes)
        self._inner.begin([self._optimizer_state_at_start(state, node) for node in nodes])
        self._counters = [c for _ in nodes if (c := training.clipping_counter(len(start))) is not None]
        losses = self._round().run(stacked, sources, t).tolist()
        self._program.check_constants(state.buffers)
        new_diverged = {r: self._diverged_state(stacked, state, r) for r, node in enumerate(nodes) if node in diverging}
        deltas = _displacements(stacked.weights, start)
        for row, (node, source) in enumerate(zip(nodes, sources, strict=True)):
            optimizer_state = None
            if training.algorithm.inner_state == "keep":
                optimizer_state = [copied_to(s, "cpu") for s in self._inner.state(row)]
            movement_bound = training.inner_hyperparameters.bound(t, source.steps_done, source.steps)
            if node in self.diverged_states:  # it did not start from the global weights: nothing bounds it
                movement_bound = Bound(None)
            yield Contribution(
                node=node,
                start=start,
                delta=[d[row] for d in deltas],
                buffers=_buffers(stacked, state, row),
                loss=losses[row],
                movement_bound=movement_bound,
                steps=source.steps,
                optimizer_state=optimizer_state,
                diverged_state=new_diverged.get(row),
                statistics=self._counters[row].counts() if self._counters else None,
            )

    def _round(self) -> StackedRound:
        return StackedRound(
            program=self._program,
            inner=self._inner,
            hparams_at=self._training.inner_hyperparameters.at,
            plain_loss=self._plain_loss,
            seed=self._seed,
            device=self._device,
            proximal=self._training.proximal,
            watch=self._count if self._training.statistics else None,
            captured=self._captured,
        )

    def _stacked(self, state: GlobalState, start: Sequence[Tensor], nodes: Sequence[int]) -> StackedNodes:
        """Return the participants at the beginning of a round: at the global weights, or at weights of their own."""
        params = self._model_state.params
        if not self._stack or len(self._stack[0]) != len(nodes):
            self._stack = [torch.empty((len(nodes), *p.shape), dtype=p.dtype, device=p.device) for p in params]
        for whole, at in zip(self._stack, start, strict=True):
            as_real(whole).copy_(at)
        changing = self._program.changing
        buffers = {name: torch.stack([state.buffers[name]] * len(nodes)) for name in changing}
        for row, node in enumerate(nodes):
            if (diverged := self.diverged_states.get(node)) is not None:
                for whole, own in zip(self._stack, diverged.weights, strict=True):
                    as_real(whole)[row].copy_(own)
                for name in changing:
                    buffers[name][row].copy_(diverged.buffers[name])
        return StackedNodes(list(self._stack), buffers, [x[None] for x in start] if self._training.proximal else ())

    def _diverged_state(self, nodes: StackedNodes, state: GlobalState, row: int) -> DivergedState:
        weights = [as_real(w)[row].to("cpu", copy=True) for w in nodes.weights]
        buffers = _buffers(nodes, state, row)
        return DivergedState(weights, {name: b.to("cpu", copy=True) for name, b in buffers.items()})

    def _look_at_first_batch(self, source: NodeBatches, t: int) -> None:
        """Remember the first batch of a round for a resumed run; look at the model with the first of all."""
        try:
            batch = source.peek(self._device)
            if not self._model_is_known:
                self._program.look_at(self.model, batch)
                self._model_is_known = True
        except Exception as error:
            raise with_location(error, source.node, t, 0) from error.__cause__
        if self._training.resumable:
            digest = batch_digest(source.first_batch)
            self._pending_probe = {"node": source.node, "round": t, "taken": source.steps_done, "digest": digest}

    def _plain_loss(self, batch: Any) -> None:
        self._backward(batch, self._model_state.params)

    def _count(
        self, rows: list[int], weights: Sequence[Tensor], grads: Sequence[Tensor | None], hparams: Hyperparameters
    ) -> None:
        moving = [i for i, g in enumerate(grads) if g is not None]
        chosen: Mapping[str, Any] = {
            k: [v[i] for i in moving] if isinstance(v, list) else v for k, v in hparams.items()
        }
        rule = self._training.inner_hyperparameters.rule
        for k, row in enumerate(rows):
            own = [as_real(g[k]) for g in grads if g is not None]
            thresholds = rule.thresholds([as_real(weights[i][k]) for i in moving], own, chosen)
            self._counters[row].add(moving, own, thresholds)


def _buffers(nodes: StackedNodes, state: GlobalState, row: int) -> dict[str, Tensor]:
    """Return the buffers of one node; those that nobody changes are the global ones."""
    return {name: nodes.buffers[name][row] if name in nodes.buffers else b for name, b in state.buffers.items()}


def _displacements(weights: Sequence[Tensor], start: Sequence[Tensor]) -> list[Tensor]:
    """Return how far the nodes moved, in the compute type; in the memory of the weights where they have that type."""
    moved = []
    for w, s in zip(map(as_real, weights), start, strict=True):
        wide = compute_dtype(w.dtype)
        moved.append(w.sub_(s) if w.dtype == wide else w.to(wide) - s.to(wide))
    return moved
