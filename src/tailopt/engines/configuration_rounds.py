"""The rounds of a batch of configurations: local steps of all nodes of all of them, means, and outer steps.

A replica is one seed: a start, nodes with data, and who takes part. Replicas run side by side too: weights are stacked
as [replicas, configurations, *shape], and as [replicas * nodes, configurations, *shape] during local steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
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
class Replica:
    """What belongs to one seed.

    Args:
        model: at the start.
        batches: of its nodes.
        policy: with a number of rounds; without drops, robust means and iterate averages.
    """

    model: torch.nn.Module
    batches: BatchSource
    policy: RoundPolicy


@dataclass(frozen=True, kw_only=True)
class Configurations:
    """What all configurations share: replicas with equally many rounds and nodes, and the loss.

    Args:
        measure: (round, weights by name as [replicas, configurations, *shape]) -> numbers by name, each [replicas,
            configurations]; called after every round, or None.
    """

    replicas: tuple[Replica, ...]
    loss: LossFunction
    schedules: Any
    device: torch.device
    precision: str | None
    measure: Measure | None

    @property
    def rounds(self) -> int:
        """How many rounds there are."""
        rounds = self.replicas[0].policy.rounds
        assert rounds is not None
        return rounds

    @property
    def not_repeatable_because(self) -> str:
        """Why batches cannot be asked for again; empty if they can."""
        return next(filter(None, (replica.batches.not_repeatable_because for replica in self.replicas)), "")


class ConfigurationBatch:
    """Configurations that train side by side.

    Attributes:
        losses: [replicas, configurations, rounds]; NaN where one had ended.
        measured: by name, likewise.
        final_buffers: by name, [replicas, configurations, ...].
        ended: those that ended early, by replica and configuration.
    """

    def __init__(self, task: Configurations, algorithms: Sequence[Algorithm]) -> None:
        self._task, self._algorithm, n = task, algorithms[0], len(algorithms)
        self._models = [copy.deepcopy(replica.model).to(task.device) for replica in task.replicas]
        self._model = self._models[0]
        if not self._model.training:  # otherwise the modes are the user's: a frozen BatchNorm stays frozen
            self._model.train()
        self.names, self._params = trainable(self._model)
        self._program = StackedModel(self._model, task.loss, PRECISIONS[task.precision], configurations=True)
        starts = [[as_real(p.detach()) for p in trainable(model)[1]] for model in self._models]
        each = [AlgorithmHyperparameters(a, task.schedules, self.names) for a in algorithms]
        self._hparams = ConfigurationHyperparameters(each, starts[0])
        self._x = [
            torch.stack([p.to(compute_dtype(p.dtype)).expand(n, *p.shape) for p in of_replicas])
            for of_replicas in zip(*starts, strict=True)
        ]
        self._buffers: dict[str, Tensor] = {}  # those that the model changes, [replicas, configurations, ...]
        self._inner = StackedSteps(each[0].inner.rule, leading=2)
        self._outer = StackedSteps(each[0].outer.rule, leading=2)
        self._outer.begin_alike([{} for _ in self._x], len(self._models))
        self._kept: dict[tuple[int, int], list[State]] = {}  # inner states by replica and node, of all configurations
        self._stack: list[Tensor] = []
        self._steps_done = [[0] * replica.batches.nodes for replica in task.replicas]
        self._alive = list(range(n))  # the configurations that are still in the batch
        self._running = torch.ones(len(self._models), n, dtype=torch.bool, device=task.device)
        self._final = [x.clone() for x in self._x]
        self.final_buffers: dict[str, Tensor] = {}
        self.losses = torch.full((len(self._models), n, task.rounds), torch.nan, dtype=torch.float64)
        self.measured: dict[str, Tensor] = {}
        self.ended: dict[tuple[int, int], Ended] = {}

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

    def _round(self, t: int) -> None:
        task = self._task
        shares = [replica.policy.draw(t).shares for replica in task.replicas]
        _check_equally_many(shares, t)
        members = [(r, node) for r, of_replica in enumerate(shares) for node in of_replica]
        sources = self._sources(t, members)
        nodes = self._stacked(len(shares[0]))
        self._begin_inner(t, members)
        losses = StackedRound(
            program=self._program,
            inner=self._inner,
            hparams_at=self._hparams.inner_at,
            plain_loss=self._plain_loss,
            seed=task.replicas[0].policy.seed,
            device=task.device,
        ).run(nodes, sources, t)
        for (r, node), source in zip(members, sources, strict=True):
            self._steps_done[r][node] += source.steps
        deltas = self._displacements(nodes.weights)
        floating = [self._by_replica(b) for b in nodes.buffers.values() if b.is_floating_point()]
        counted = _finite([*deltas, *floating])
        mean = _NodeMean.of_shares(shares, counted, self._algorithm.inner_state != "keep")
        self._end_diverged(t, mean, shares)
        by_configuration = mean.of(self._by_replica(losses))
        self.losses[:, self._alive, t - 1] = torch.where(self._running, by_configuration, torch.nan).cpu()
        if self._algorithm.inner_state == "keep":
            self._kept |= {member: _copied(self._inner.state(row)) for row, member in enumerate(members)}
        buffers = {name: mean.of_buffer(self._by_replica(b), self._buffers[name]) for name, b in nodes.buffers.items()}
        self._outer_step(t, [mean.of(d) for d in deltas], buffers)

    def _outer_step(self, t: int, step: list[Tensor], buffers: dict[str, Tensor]) -> None:
        """Move every configuration that is running; one that has ended stays where it is."""
        staying = self._running.any(0)
        if not bool(staying.all()):
            index = staying.nonzero().flatten()
            step, buffers = self._drop(index, step, buffers)
        if not self._alive:
            return
        radius = self._task.replicas[0].policy.projection_radius
        everything = bool(self._running.all())
        before = [] if everything else [x.clone() for x in self._x]
        self._outer.step(None, self._x, [d.neg_() for d in step], self._hparams.outer_at(t))
        if radius is not None:
            _project(self._x, radius)
        if not everything:
            for x, old in zip(self._x, before, strict=True):
                x.copy_(torch.where(_like(self._running, x), x, old))
            buffers = {
                name: torch.where(_like(self._running, b), b, self._buffers[name]) for name, b in buffers.items()
            }
        self._buffers = buffers
        self._measure(t)

    def _sources(self, t: int, members: Sequence[tuple[int, int]]) -> list[NodeBatches]:
        """Return the batches of a round; before the first one, look at what the model does."""
        task, sources = self._task, []
        for r, node in members:
            replica = task.replicas[r]
            sources.append(NodeBatches(replica.batches, node, t, self._steps_done[r][node], replica.policy.seed))
        if t == 1:
            try:
                self._program.look_at(self._model, sources[0].peek(task.device))
            except Exception as error:
                raise with_location(error, sources[0].node, t, 0) from error.__cause__
            _check_same_constants(self._models, {*self.names, *self._program.changing})
            starts, n = [Buffers(model).tensors() for model in self._models], len(self._alive)
            for name in self._program.changing:
                self._buffers[name] = torch.stack([b[name].expand(n, *b[name].shape) for b in starts])
            self.final_buffers = {name: b.clone() for name, b in self._buffers.items()}
        return sources

    def _stacked(self, nodes: int) -> StackedNodes:
        """Return the nodes at the beginning of a round: each at the weights of its configuration."""
        shape = (len(self._models) * nodes, len(self._alive))
        if not self._stack or self._stack[0].shape[:2] != shape:
            self._stack = [torch.empty(shape + p.shape, dtype=p.dtype, device=p.device) for p in self._params]
        for whole, x in zip(self._stack, self._x, strict=True):
            self._by_replica(as_real(whole)).copy_(x[:, None])
        return StackedNodes(list(self._stack), {n: _for_nodes(b, nodes) for n, b in self._buffers.items()})

    def _by_replica(self, values: Tensor) -> Tensor:
        """Return [replicas * nodes, ...] as [replicas, nodes, ...]."""
        return values.view(len(self._models), -1, *values.shape[1:])

    def _begin_inner(self, t: int, members: Sequence[tuple[int, int]]) -> None:
        """Give the inner steps their states: kept ones, the outer second moment, or none."""
        algorithm = self._algorithm
        if algorithm.inner_state == "keep":
            self._inner.begin([self._kept.get(member, [{} for _ in self._x]) for member in members])
            return
        states: list[State] = [{} for _ in self._x]
        if algorithm.send_preconditioner and t > 1:
            step, nodes = 0 if algorithm.send_preconditioner == "raw" else t - 1, len(members) // len(self._models)
            for i, (w, v) in enumerate(zip(map(as_real, self._stack), self._outer.tensors("exp_avg_sq"), strict=True)):
                # a parameter that the outer rule has not moved yet has no second moment
                states[i] = initial_adam_state(w, torch.zeros_like(w) if v is None else _for_nodes(v, nodes), step)
        self._inner.begin_alike(states, len(members))

    def _displacements(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Return how far every node moved, in the compute type; in the memory of the weights where they have it."""
        moved = []
        for w, x in zip(map(self._by_replica, map(as_real, weights)), self._x, strict=True):
            start = x[:, None]
            moved.append(w.sub_(start) if w.dtype == x.dtype else w.to(x.dtype) - start.to(w.dtype).to(x.dtype))
        return moved

    def _end_diverged(self, t: int, mean: _NodeMean, shares: Sequence[Mapping[int, float]]) -> None:
        """End the configurations of which nothing counts."""
        if mean.counted is None:
            return
        ending = self._running & (mean.total == 0)
        for r, c in ending.nonzero().tolist():
            wrong = (~mean.counted[r, :, c]).nonzero().flatten().tolist()
            nodes = ", ".join(str(list(shares[r])[i]) for i in wrong)
            reason = f"Round {t}: {NOT_FINITE}: the displacements of nodes {nodes}."
            self.ended[r, self._alive[c]] = Ended(t, reason)
        self._running = self._running & ~ending

    def _drop(
        self, index: Tensor, step: list[Tensor], buffers: dict[str, Tensor]
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Leave the configurations that ended at their last weights, and go on with the others."""
        staying = index.tolist()
        self._store(sorted(set(range(len(self._alive))) - set(staying)))
        self._x = [x.index_select(1, index) for x in self._x]
        self._buffers = {name: b.index_select(1, index) for name, b in self._buffers.items()}
        self._running = self._running.index_select(1, index)
        self._outer.select(index)
        self._kept = {
            member: [
                {k: v.index_select(0, index) if isinstance(v, Tensor) else v for k, v in s.items()} for s in states
            ]
            for member, states in self._kept.items()
        }
        self._alive = [self._alive[c] for c in staying]
        if staying:
            self._hparams = self._hparams.select(staying)
        return [d.index_select(1, index) for d in step], {n: b.index_select(1, index) for n, b in buffers.items()}

    def _store(self, which: Sequence[int]) -> None:
        """Write the weights and buffers of some configurations into the result."""
        numbers = [self._alive[c] for c in which]
        for final, x in zip(self._final, self._x, strict=True):
            final[:, numbers] = x[:, list(which)]
        for name, b in self._buffers.items():
            self.final_buffers[name][:, numbers] = b[:, list(which)]

    def _measure(self, t: int) -> None:
        if self._task.measure is None:
            return
        for key, values in self._task.measure(t, dict(zip(self.names, self._x, strict=True))).items():
            if key not in self.measured:
                self.measured[key] = torch.full_like(self.losses, torch.nan)
            left = torch.where(self._running, values.detach().double(), torch.nan)
            self.measured[key][:, self._alive, t - 1] = left.cpu()

    def _plain_loss(self, batch: Any) -> None:
        with torch.enable_grad():
            self._task.loss(self._model, batch)


@dataclass(frozen=True)
class _NodeMean:
    """The weighted mean over nodes of [replicas, nodes, configurations, ...], in ascending order, as `rounds.mean`.

    shares: of the nodes, a number each, or [replicas] where they differ; counted: [replicas, nodes, configurations],
    None where all count; total: the sum of the shares that count, [replicas, configurations].
    """

    shares: Sequence[float | Tensor]
    counted: Tensor | None
    total: Tensor

    @classmethod
    def of_shares(cls, shares: Sequence[Mapping[int, float]], counted: Tensor, some: bool) -> _NodeMean:
        """Return the mean of those that count; unless `some`, a configuration counts with all nodes or with none."""
        by_node = list(zip(*(of_replica.values() for of_replica in shares), strict=True))
        numbers = [
            row[0] if len(set(row)) == 1 else torch.tensor(row, dtype=torch.float64, device=counted.device)
            for row in by_node
        ]
        if bool(counted.all()):
            return cls(numbers, None, torch.ones((), device=counted.device))
        weights = torch.tensor(by_node, dtype=torch.float64, device=counted.device).mT[:, :, None]
        everybody = counted.all(1)
        total = torch.where(counted, weights, 0.0).sum(1) if some else torch.zeros_like(everybody, dtype=torch.float64)
        return cls(numbers, counted, torch.where(everybody, 1.0, total))  # exactly 1 where all count

    def of(self, values: Tensor) -> Tensor:
        """Return the mean, [replicas, configurations, ...]; a configuration of which nothing counts has 0."""
        acc: Tensor | None = None
        for i, share in enumerate(self.shares):
            one = values[:, i]
            term = one * (_like(share, one).to(one.dtype) if isinstance(share, Tensor) else share)
            if self.counted is not None:
                term = torch.where(_like(self.counted[:, i], term), term, torch.zeros_like(term))
            acc = term if acc is None else acc.add_(term)
        assert acc is not None
        if self.counted is None:
            return acc
        return acc.div_(_like(torch.where(self.total == 0, 1.0, self.total), acc).to(acc.dtype))

    def of_buffer(self, values: Tensor, before: Tensor) -> Tensor:
        """Return the mean of a floating-point buffer, and the maximum of an integer one; unchanged ones stay."""
        if not (values.is_floating_point() or values.is_complex()):
            return values.amax(1)
        real = as_real(values)
        wide = self.of(real.to(compute_dtype(real.dtype)))
        mean = (torch.view_as_complex(wide) if values.is_complex() else wide).to(values.dtype)
        same = (values == before[:, None]).all(1)
        return torch.where(_like(same.flatten(2).all(2) if same.dim() > 2 else same, mean), before, mean)


def _like(values: Tensor, x: Tensor) -> Tensor:
    """Return values of leading dimensions with as many dimensions as x."""
    return values.reshape(values.shape + (1,) * (x.dim() - values.dim()))


def _for_nodes(values: Tensor, nodes: int) -> Tensor:
    """Return [replicas, ...] as [replicas * nodes, ...]: a copy for each node."""
    return values.repeat_interleave(nodes, dim=0)


def _copied(states: Sequence[State]) -> list[State]:
    return [{k: v.clone() if isinstance(v, Tensor) else v for k, v in s.items()} for s in states]


def _finite(values: Sequence[Tensor]) -> Tensor:
    """Return which nodes of which configurations have only finite values: [replicas, nodes, configurations]."""
    finite: Tensor | None = None
    for v in values:
        own = v.reshape(*v.shape[:3], -1)
        if not own.shape[-1]:
            continue
        low, high = own.amin(-1), own.amax(-1)  # NaN is the least and the largest
        here = low.isfinite() & high.isfinite()
        finite = here if finite is None else finite & here
    assert finite is not None
    return finite


def _project(weights: Sequence[Tensor], radius: float) -> None:
    """Scale every configuration by min(1, radius / its norm)."""
    squares = torch.stack([x.double().square().flatten(2).sum(2) for x in weights]).sum(0)
    factor = (radius / squares.sqrt()).clamp(max=1.0)
    for x in weights:
        x.mul_(_like(factor, x).to(x.dtype))


def _check_equally_many(shares: Sequence[Mapping[int, float]], t: int) -> None:
    """Refuse replicas of which unequally many nodes take part."""
    counts = [len(of_replica) for of_replica in shares]
    if len(set(counts)) > 1:
        raise ValueError(
            f"Invalid participation: by seed, {min(counts)} to {max(counts)} nodes take part in round {t}; side by "
            "side they need to be equally many. Run the seeds in separate calls."
        )


def _check_same_constants(models: Sequence[torch.nn.Module], changing: Collection[str]) -> None:
    """Refuse replicas that differ in what is not trained."""
    first, *others = ({**dict(model.named_parameters()), **dict(model.named_buffers())} for model in models)
    for r, other in enumerate(others, 1):
        for name, value in other.items():
            if name not in changing and not torch.equal(value, first[name]):
                raise ValueError(
                    f"Invalid models: seed number {r} has another {name} than the first, which is not trained; side by "
                    "side they share it. Run the seeds in separate calls."
                )
