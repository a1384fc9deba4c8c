"""The local steps of many nodes at once.

In every step, nodes whose batches have one shape, whose optimizer states count the same steps and whose hyperparameters
are the same go through the program together. Usually these are all nodes; where some differ, each kind of them runs by
itself, with the numbers that it would have alone. Nothing is padded, so any loss is right.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tailopt.engines.captured_steps import CapturedSteps
from tailopt.engines.routes import VmapRefused
from tailopt.engines.sequential import _with_location as with_location
from tailopt.engines.sequential import seed_torch
from tailopt.engines.stacked_batches import NodeBatches, signature, stacked
from tailopt.engines.stacked_model import StackedGradients, StackedModel
from tailopt.engines.stacked_rules import InnerSteps, Rows
from tailopt.rounds.proximal import proximal_gradient
from tailopt.rules.rule import Hyperparameters
from tailopt.seeds import derive_seed, step_seed


@dataclass
class StackedNodes:
    """The nodes of a round: weights by parameter, and the buffers that the model changes; nodes come first.

    start: the weights at the beginning of the round, where a proximal term needs them: real, and either of all nodes
        or with one entry for all of them.
    """

    weights: list[Tensor]
    buffers: dict[str, Tensor]
    start: Sequence[Tensor] = ()

    def start_of(self, rows: Rows) -> list[Tensor]:
        """Return the weights at the beginning of the round of some nodes."""
        return [x if rows is None or len(x) == 1 else x.index_select(0, rows) for x in self.start]


@dataclass(frozen=True, kw_only=True)
class StackedRound:
    """Takes the local steps of a round.

    Args:
        program: losses and gradients of all nodes.
        inner: the inner steps.
        hparams_at: (round, local steps taken so far) -> hyperparameters.
        plain_loss: the loss of the model itself on one node's batch. It runs where the program fails, to tell an error
            of the model from one of vmap.
        seed: of the run.
        device: where the nodes compute.
        proximal: the factor of the proximal term, or 0.
        watch: called before each step with rows, weights, gradients and hyperparameters; for statistics.
        captured: takes the steps of all nodes at once by compiled programs, or None.
    """

    program: StackedModel
    inner: InnerSteps
    hparams_at: Callable[[int, int], Hyperparameters]
    plain_loss: Callable[[Any], None]
    seed: int
    device: torch.device
    proximal: float = 0.0
    watch: Callable[[list[int], Sequence[Tensor], Sequence[Tensor | None], Hyperparameters], None] | None = None
    captured: CapturedSteps | None = None

    def run(self, nodes: StackedNodes, sources: Sequence[NodeBatches], t: int) -> Tensor:
        """Take all local steps of round t, in place; returns the mean loss of every node, in float64."""
        seed = derive_seed(self.seed, "model", t)
        total: Tensor | None = None
        for step in range(max(source.steps for source in sources)):
            members: dict[Hashable, list[int]] = {}
            batches: dict[int, Any] = {}
            for row, source in enumerate(sources):
                if step < source.steps:
                    try:
                        batches[row] = source.next(self.device)
                    except Exception as error:
                        raise with_location(error, source.node, t, step) from error.__cause__
                    hparams = self.hparams_at(t, source.steps_done + step)
                    key = signature(batches[row]), id(hparams), self.inner.kind(row)
                    members.setdefault(key, []).append(row)
            seed_torch(step_seed(seed, step), self.device)
            for rows in members.values():
                hparams = self.hparams_at(t, sources[rows[0]].steps_done + step)
                everybody = len(rows) == len(sources)
                index = None if everybody else torch.tensor(rows, device=self.device)
                try:
                    losses = self._step(nodes, rows, index, stacked([batches[row] for row in rows]), hparams)
                except VmapRefused as error:
                    self._blame_the_model([(sources[row].node, batches[row]) for row in rows], t, step)
                    raise error from error.__cause__
                except ValueError as error:
                    raise with_location(error, sources[rows[0]].node, t, step) from error.__cause__
                if total is None:
                    total = torch.zeros((len(sources), *losses.shape[1:]), dtype=torch.float64, device=self.device)
                if index is None:
                    total += losses.double()
                else:
                    total.index_add_(0, index, losses.double())
        assert total is not None
        return total / self._step_counts(sources).reshape(-1, *[1] * (total.dim() - 1))

    def _step_counts(self, sources: Sequence[NodeBatches]) -> Tensor:
        steps = [float(source.steps) for source in sources]
        if len(set(steps)) == 1:  # filled on the device: a copy to it would wait for all steps
            return torch.full((len(steps),), steps[0], dtype=torch.float64, device=self.device)
        return torch.tensor(steps, dtype=torch.float64, device=self.device)

    def _step(self, nodes: StackedNodes, rows: list[int], index: Rows, batch: Any, hparams: Hyperparameters) -> Tensor:
        weights, buffers = nodes.weights, nodes.buffers
        if index is not None:
            weights = [w.index_select(0, index) for w in weights]
            buffers = {name: b.index_select(0, index) for name, b in buffers.items()}
        if self.captured is not None and index is None and self.watch is None:
            taken = self.captured.step(weights, buffers, batch, hparams)
            if taken is not None:
                nodes.buffers.update(taken.buffers)
                return taken.losses
        losses, grads, new_buffers = self._gradients(weights, buffers, batch, everybody=index is None)
        if self.proximal:
            grads = [
                None if g is None else proximal_gradient(g, w, x0, self.proximal)
                for g, w, x0 in zip(grads, weights, nodes.start_of(index), strict=True)
            ]
        if self.watch is not None:
            self.watch(rows, weights, grads, hparams)
        self.inner.step(index, weights, grads, hparams)
        if index is None:
            nodes.buffers.update(new_buffers)
            return losses
        for whole, part in zip(nodes.weights, weights, strict=True):
            whole.index_copy_(0, index, part)
        for name, part in new_buffers.items():
            nodes.buffers[name].index_copy_(0, index, part)
        return losses

    def _gradients(
        self, weights: Sequence[Tensor], buffers: Mapping[str, Tensor], batch: Any, everybody: bool
    ) -> StackedGradients:
        if self.captured is not None:
            if everybody:
                found = self.captured.gradients(weights, buffers, batch)
                if found is not None:
                    return found
            else:
                self.captured.skip("not all nodes had batches of one shape")
        return self.program.gradients(weights, buffers, batch)

    def _blame_the_model(self, batches: Sequence[tuple[int, Any]], t: int, step: int) -> None:
        """Raise the error that the model itself has with a node's batch, if it has one."""
        for node, batch in batches:
            try:
                self.plain_loss(batch)
            except Exception as error:
                raise with_location(error, node, t, step) from error.__cause__
