"""The rounds of a batch of configurations: local steps of all nodes of all of them, means, and outer steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tailopt.algorithms import Algorithm
from tailopt.clipping.operators import compute_dtype
from tailopt.engines.batches import BatchSource, LossFunction
from tailopt.engines.configuration_settings import ConfigurationHyperparameters
from tailopt.engines.model_state import Buffers, as_real, trainable
from tailopt.engines.sequential import PRECISIONS
from tailopt.engines.sequential import _with_location as with_location
from tailopt.engines.stacked_batches import NodeBatches
from tailopt.engines.stacked_model import StackedModel
from tailopt.engines.stacked_round import StackedNodes, StackedRound
from tailopt.engines.stacked_rules import StackedSteps
from tailopt.rounds.guard import NOT_FINITE
from tailopt.rounds.hyperparameters import AlgorithmHyperparameters
from tailopt.rounds.policy import RoundPolicy
from tailopt.rules.adam import initial_adam_state
from tailopt.rules.rule import State

Measure = Callable[[int, Mapping[str, Tensor]], Mapping[str, Tensor]]


class Ended(NamedTuple):
    """When a configuration ended, and why."""

    round: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Configurations:
    """What all configurations share: the model, its loss, data and rounds.

    Args:
        policy: with a number of rounds; without drops, robust means and iterate averages.
        measure: called after every round, or None.
    """

    model: torch.nn.Module
    loss: LossFunction
    batches: BatchSource
    policy: RoundPolicy
    schedules: Any
    device: torch.device
    precision: str | None
    measure: Measure | None

    @property
    def rounds(self) -> int:
        """How many rounds there are."""
        assert self.policy.rounds is not None
        return self.policy.rounds


class ConfigurationBatch:
    """Configurations that train side by side.

    Attributes:
        losses: [configurations, rounds]; NaN where one had ended.
        measured: by name, likewise.
        final_buffers: by name, [configurations, ...].
        ended: the configurations that ended early.
    """

    def __init__(self, task: Configurations, algorithms: Sequence[Algorithm]) -> None:
        self._task, self._algorithm, n = task, algorithms[0], len(algorithms)
        self._model = copy.deepcopy(task.model).to(task.device)
        if not self._model.training:  # otherwise the modes are the user's: a frozen BatchNorm stays frozen
            self._model.train()
        self.names, self._params = trainable(self._model)
        self._program = StackedModel(self._model, task.loss, PRECISIONS[task.precision], configurations=True)
        parts = [as_real(p.detach()) for p in self._params]
        each = [AlgorithmHyperparameters(a, task.schedules, self.names) for a in algorithms]
        self._hparams = ConfigurationHyperparameters(each, parts)
        self._x = [p.to(compute_dtype(p.dtype)).expand(n, *p.shape).clone() for p in parts]
        self._buffers: dict[str, Tensor] = {}  # those that the model changes, [configurations, ...]
        self._inner = StackedSteps(each[0].inner.rule, leading=2)
        self._outer = StackedSteps(each[0].outer.rule, leading=1)
        self._outer.begin_alike([{} for _ in parts], n)
        self._kept: dict[int, list[State]] = {}  # inner states that nodes keep, of all configurations
        self._stack: list[Tensor] = []
        self._steps_done = [0] * task.batches.nodes
        self._alive = list(range(n))
        self._final = [x.clone() for x in self._x]
        self.final_buffers: dict[str, Tensor] = {}
        self.losses = torch.full((n, task.rounds), torch.nan, dtype=torch.float64)
        self.measured: dict[str, Tensor] = {}
        self.ended: dict[int, Ended] = {}

    def weights(self) -> dict[str, Tensor]:
        """Return the last weights of every configuration, in the parameters' own types."""
        rows = zip(self.names, self._final, self._params, strict=True)
        return {name: torch.view_as_complex(x) if p.is_complex() else x.to(p.dtype) for name, x, p in rows}

    @torch.no_grad()
    def train(self) -> None:
        """Run all rounds."""
        for t in range(1, self._task.rounds + 1):
            self._round(t)
            if not self._alive:
                break
        self._store(range(len(self._alive)))

    # --- One round ---------------------------------------------------------------------------------------------------

    def _round(self, t: int) -> None:
        task = self._task
        shares = task.policy.draw(t).shares
        sources = self._sources(t, list(shares))
        nodes = self._stacked(len(sources))
        self._begin_inner(t, list(shares))
        losses = StackedRound(
            program=self._program,
            inner=self._inner,
            hparams_at=self._hparams.inner_at,
            plain_loss=self._plain_loss,
            seed=task.policy.seed,
            device=task.device,
        ).run(nodes, sources, t)
        for source in sources:
            self._steps_done[source.node] += source.steps
        deltas = self._displacements(nodes.weights)
        counted = _finite([*deltas, *(b for b in nodes.buffers.values() if b.is_floating_point())])
        total = self._end_diverged(t, counted, shares)
        mean = _NodeMean(list(shares.values()), None if bool(counted.all()) else counted, total)
        step = [mean.of(d) for d in deltas]
        self._buffers = {name: mean.of_buffer(b, self._buffers[name]) for name, b in nodes.buffers.items()}
        self.losses[self._alive, t - 1] = mean.of(losses).cpu()
        if self._algorithm.inner_state == "keep":
            self._kept |= {
                node: [
                    {k: v.clone() if isinstance(v, Tensor) else v for k, v in s.items()} for s in self._inner.state(i)
                ]
                for i, node in enumerate(shares)
            }
        gone = (total == 0).tolist()
        if any(gone):
            step = self._drop([c for c, ends in enumerate(gone) if not ends], step)
        if not self._alive:
            return
        self._outer.step(None, self._x, [d.neg_() for d in step], self._hparams.outer_at(t))
        if task.policy.projection_radius is not None:
            _project(self._x, task.policy.projection_radius)
        self._measure(t)

    def _sources(self, t: int, nodes: Sequence[int]) -> list[NodeBatches]:
        """Return the batches of a round; before the first one, find out which buffers the model changes."""
        task = self._task
        sources = [NodeBatches(task.batches, i, t, self._steps_done[i], task.policy.seed) for i in nodes]
        if t == 1:
            try:
                self._program.find_changing_buffers(self._model, sources[0].peek(task.device))
            except Exception as error:
                raise with_location(error, sources[0].node, t, 0) from error.__cause__
            start = Buffers(self._model).tensors()
            n = len(self._alive)
            self._buffers = {name: torch.stack([start[name]] * n) for name in self._program.changing}
            self.final_buffers = {name: b.clone() for name, b in self._buffers.items()}
        return sources

    def _stacked(self, nodes: int) -> StackedNodes:
        """Return the nodes at the beginning of a round: each at the weights of its configuration."""
        shape = (nodes, len(self._alive))
        if not self._stack or self._stack[0].shape[:2] != shape:
            self._stack = [torch.empty(shape + p.shape, dtype=p.dtype, device=p.device) for p in self._params]
        for whole, x in zip(self._stack, self._x, strict=True):
            as_real(whole).copy_(x)
        return StackedNodes(list(self._stack), {n: torch.stack([b] * nodes) for n, b in self._buffers.items()})

    def _begin_inner(self, t: int, nodes: Sequence[int]) -> None:
        """Give the inner steps their states: kept ones, the outer second moment, or none."""
        algorithm, count = self._algorithm, len(nodes)
        if algorithm.inner_state == "keep":
            self._inner.begin([self._kept.get(node, [{} for _ in self._x]) for node in nodes])
        elif algorithm.send_preconditioner and t > 1:
            step = 0 if algorithm.send_preconditioner == "raw" else t - 1
            like = [as_real(w) for w in self._stack]
            moments = zip(like, self._outer.tensors("exp_avg_sq"), strict=True)
            states = [
                initial_adam_state(w, torch.zeros_like(w) if v is None else v.expand_as(w), step) for w, v in moments
            ]
            self._inner.begin_alike(states, count)
        else:
            self._inner.begin_alike([{} for _ in self._x], count)

    def _displacements(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Return how far every node moved, in the compute type; in the memory of the weights where they have it."""
        moved = []
        for w, x in zip(map(as_real, weights), self._x, strict=True):
            moved.append(w.sub_(x) if w.dtype == x.dtype else w.to(x.dtype) - x.to(w.dtype).to(x.dtype))
        return moved

    def _end_diverged(self, t: int, counted: Tensor, shares: Mapping[int, float]) -> Tensor:
        """Return the sum of the shares that count, by configuration; end those in which it is 0."""
        if bool(counted.all()):
            return torch.ones(len(self._alive), dtype=torch.float64, device=counted.device)
        weights = torch.tensor(list(shares.values()), dtype=torch.float64, device=counted.device)[:, None]
        total = torch.where(counted, weights, 0.0).sum(0)
        total = torch.where(counted.all(0), 1.0, total)  # exactly 1 where all counted
        if self._algorithm.inner_state == "keep":
            # the nodes that do not count would go back to the states before the round, which are gone
            total = torch.where(counted.all(0), total, 0.0)
        for c in (total == 0).nonzero().flatten().tolist():
            at = (~counted[:, c]).nonzero().flatten().tolist()
            nodes = ", ".join(str(list(shares)[i]) for i in at)
            self.ended[self._alive[c]] = Ended(t, f"Round {t}: {NOT_FINITE}: the displacements of nodes {nodes}.")
        return total

    def _drop(self, staying: list[int], step: list[Tensor]) -> list[Tensor]:
        """Leave the configurations that ended at their last weights, and go on with the others."""
        self._store(sorted(set(range(len(self._alive))) - set(staying)))
        index = torch.tensor(staying, dtype=torch.int64, device=self._task.device)
        self._x = [x.index_select(0, index) for x in self._x]
        self._buffers = {name: b.index_select(0, index) for name, b in self._buffers.items()}
        self._outer.select(index)
        self._kept = {
            node: [{k: v.index_select(0, index) if isinstance(v, Tensor) else v for k, v in s.items()} for s in states]
            for node, states in self._kept.items()
        }
        self._alive = [self._alive[c] for c in staying]
        if staying:
            self._hparams = self._hparams.select(staying)
        return [d.index_select(0, index) for d in step]

    def _store(self, which: Sequence[int]) -> None:
        """Write the weights and buffers of some configurations into the result."""
        numbers = [self._alive[c] for c in which]
        for final, x in zip(self._final, self._x, strict=True):
            final[numbers] = x[list(which)]
        for name, b in self._buffers.items():
            self.final_buffers[name][numbers] = b[list(which)]

    def _measure(self, t: int) -> None:
        if self._task.measure is None:
            return
        for key, values in self._task.measure(t, dict(zip(self.names, self._x, strict=True))).items():
            if key not in self.measured:
                self.measured[key] = torch.full_like(self.losses, torch.nan)
            self.measured[key][self._alive, t - 1] = values.detach().to("cpu", torch.float64)

    def _plain_loss(self, batch: Any) -> None:
        with torch.enable_grad():
            self._task.loss(self._model, batch)


@dataclass(frozen=True)
class _NodeMean:
    """The weighted mean over nodes of [nodes, configurations, ...], in ascending order, as `rounds.mean` takes it.

    shares: of the nodes; counted: [nodes, configurations], None where all count; total: the sum of the shares that
    count, by configuration.
    """

    shares: Sequence[float]
    counted: Tensor | None
    total: Tensor

    def of(self, values: Tensor) -> Tensor:
        """Return the mean, [configurations, ...]; a configuration of which nothing counts has 0."""
        acc: Tensor | None = None
        for i, share in enumerate(self.shares):
            term = values[i] * share
            if self.counted is not None:
                counts = self.counted[i].reshape(-1, *[1] * (term.dim() - 1))
                term = torch.where(counts, term, torch.zeros_like(term))
            acc = term if acc is None else acc.add_(term)
        assert acc is not None
        if self.counted is None:
            return acc
        total = torch.where(self.total == 0, 1.0, self.total)
        return acc.div_(total.to(acc.dtype).reshape(-1, *[1] * (acc.dim() - 1)))

    def of_buffer(self, values: Tensor, before: Tensor) -> Tensor:
        """Return the mean of a floating-point buffer, and the maximum of an integer one; unchanged ones stay."""
        if not (values.is_floating_point() or values.is_complex()):
            return values.amax(0)
        real = as_real(values)
        wide = self.of(real.to(compute_dtype(real.dtype)))
        mean = (torch.view_as_complex(wide) if values.is_complex() else wide).to(values.dtype)
        same = (values == before).transpose(0, 1).flatten(1).all(1)
        return torch.where(same.reshape(-1, *[1] * (mean.dim() - 1)), before, mean)


def _finite(values: Sequence[Tensor]) -> Tensor:
    """Return which nodes of which configurations have only finite values: [nodes, configurations]."""
    finite: Tensor | None = None
    for v in values:
        own = v.reshape(*v.shape[:2], -1)
        if not own.shape[-1]:
            continue
        low, high = own.amin(-1), own.amax(-1)  # NaN is the least and the largest
        here = low.isfinite() & high.isfinite()
        finite = here if finite is None else finite & here
    assert finite is not None
    return finite


def _project(weights: Sequence[Tensor], radius: float) -> None:
    """Scale every configuration by min(1, radius / its norm)."""
    squares = torch.stack([x.double().square().flatten(1).sum(1) for x in weights]).sum(0)
    factor = (radius / squares.sqrt()).clamp(max=1.0)
    for x in weights:
        x.mul_(factor.to(x.dtype).reshape(-1, *[1] * (x.dim() - 1)))
