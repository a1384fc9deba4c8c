"""The rounds of a batch of configurations: local steps of all nodes of all of them, means, and outer steps.

A replica is one seed: a start, nodes with data, and who takes part. Replicas run side by side too: weights are stacked
as [replicas, configurations, *shape], and as [replicas * nodes, configurations, *shape] during local steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tailopt.algorithms import Algorithm
from tailopt.arguments import check_choice, check_function
from tailopt.clipping.operators import compute_dtype
from tailopt.engines.batches import BatchSource, LossFunction
from tailopt.engines.captured_mean import mean_displacements
from tailopt.engines.captured_steps import CapturedPrograms, CapturedSteps
from tailopt.engines.configuration_mean import NodeMean, all_finite, like
from tailopt.engines.configuration_settings import ConfigurationHyperparameters
from tailopt.engines.model_state import Buffers, as_real, trainable_parameters
from tailopt.engines.routes import CHOICES, COMPILED, VMAP, Route
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
from tailopt.rules.rule import ParamState

PLAIN = Route(VMAP, "all configurations and nodes as one program")
Measure = Callable[[int, Mapping[str, Tensor]], Mapping[str, Tensor]]
Judge = Callable[[int, Tensor, Mapping[str, Tensor]], Mapping[int, str]]


class ReplicasDiffer(ValueError):
    """Seeds that cannot run side by side."""


class Ended(NamedTuple):
    """When a configuration ended, and why."""

    round: int
    reason: str


class _Begun(NamedTuple):
    """A round before its first step."""

    shares: Sequence[Mapping[int, float]]
    members: list[tuple[int, int]]
    sources: list[NodeBatches]


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
        measure: (round, weights and changing buffers by name as [replicas, configurations, *shape]) -> numbers by
            name, each [replicas, configurations]; called after every round with the configurations that have not
            ended, or None.
        judge: (round, losses, what was measured), both of this round as [replicas, configurations] -> the positions of
            the configurations that end here, with the reason; called after `measure`, or None. Only side by side.
        route: one of `routes.CHOICES`.
    """

    replicas: tuple[Replica, ...]
    loss: LossFunction
    schedules: Any = None
    device: torch.device = torch.device("cpu")
    precision: str | None = None
    measure: Measure | None = None
    route: str = "auto"
    judge: Judge | None = None

    def __post_init__(self) -> None:
        check_choice("route", self.route, CHOICES)
        check_choice("precision", self.precision, tuple(PRECISIONS))
        check_function("loss", self.loss, "a function (model, batch) that returns a scalar tensor")
        check_function("measure", self.measure, "a function of the round and the stacked weights, or None")

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

    Args:
        route: which local steps take first; `self.route` says what they took.
        programs: those that earlier batches of the same task compiled.
    """

    def __init__(
        self,
        task: Configurations,
        algorithms: Sequence[Algorithm],
        route: Route = PLAIN,
        programs: CapturedPrograms | None = None,
    ) -> None:
        self._task, self._algorithm, n = task, algorithms[0], len(algorithms)
        self._models = [copy.deepcopy(replica.model).to(task.device) for replica in task.replicas]
        self._model = self._models[0]
        if not self._model.training:  # otherwise the modes are the user's: a frozen BatchNorm stays frozen
            self._model.train()
        trained = trainable_parameters(self._model)
        self.names, self._params = list(trained), list(trained.values())
        self._program = StackedModel(self._model, task.loss, PRECISIONS[task.precision], configurations=True)
        starts = [[as_real(p.detach()) for p in trainable_parameters(model).values()] for model in self._models]
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
        self._first_route = route
        self._proximal = task.replicas[0].policy.proximal
        self._captured: CapturedSteps | None = None
        if route.name == COMPILED:
            self._captured = CapturedSteps(self._program, self._inner, programs, bool(self._proximal))
        # optimizer states by replica and node, of all configurations
        self._kept: dict[tuple[int, int], list[ParamState]] = {}
        self._stack: list[Tensor] = []
        self._ahead: dict[int, _Begun] = {}  # of the next round
        self._shares: tuple[Any, Tensor] | None = None  # the last ones, and as a tensor
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
            self.run_round(t)
            if not self._alive:
                break
        self._store(range(len(self._alive)))
        if self._captured is not None:
            self._captured.programs.release()

    @property
    def route(self) -> Route:
        """How the local steps ran, and why this way."""
        return self._first_route if self._captured is None else self._captured.route

    def run_round(self, t: int) -> None:
        """Run round t, after those before it."""
        task = self._task
        shares, members, sources = self._begun(t)
        nodes = self._stacked(len(shares[0]))
        self._begin_inner(t, members)
        losses = StackedRound(
            program=self._program,
            inner=self._inner,
            hparams_at=self._hparams.inner_at,
            plain_loss=self._plain_loss,
            seed=task.replicas[0].policy.seed,
            device=task.device,
            proximal=self._proximal,
            captured=self._captured,
        ).run(nodes, sources, t)
        for (r, node), source in zip(members, sources, strict=True):
            self._steps_done[r][node] += source.steps
        captured = self._captured_means(nodes, shares)
        self._draw_ahead(t + 1)
        if captured is not None and bool(captured[0]):
            mean, step = NodeMean.of_everybody(shares, task.device), captured[1]
        else:
            deltas = self._displacements(nodes.weights)
            floating = [self._by_replica(b) for b in nodes.buffers.values() if b.is_floating_point()]
            counted = all_finite([*deltas, *floating])
            mean = NodeMean.of_shares(shares, counted, self._algorithm.inner_state != "keep")
            step = [mean.of(d) for d in deltas]
        self._end_diverged(t, mean, shares)
        by_configuration = mean.of(self._by_replica(losses))
        self.losses[:, self._alive, t - 1] = torch.where(self._running, by_configuration, torch.nan).cpu()
        if self._algorithm.inner_state == "keep":
            self._kept |= {member: _copied(self._inner.state(row)) for row, member in enumerate(members)}
        buffers = {name: mean.of_buffer(self._by_replica(b), self._buffers[name]) for name, b in nodes.buffers.items()}
        self._outer_step(t, step, buffers)
        self._end_judged(t)

    def _begun(self, t: int) -> _Begun:
        """Return who takes part in a round, with their batches."""
        if t in self._ahead:
            return self._ahead.pop(t)
        shares = [replica.policy.draw(t).shares for replica in self._task.replicas]
        _check_equally_many(shares, t)
        members = [(r, node) for r, of_replica in enumerate(shares) for node in of_replica]
        return _Begun(shares, members, self._sources(t, members))

    def _draw_ahead(self, t: int) -> None:
        """Draw the batches of the next round while a GPU computes; what goes wrong is raised in that round."""
        if self._task.device.type == "cpu" or t > self._task.rounds:
            return
        with suppress(Exception):
            self._ahead[t] = self._begun(t)
            for source in self._ahead[t].sources:
                source.peek(self._task.device)

    def _captured_means(
        self, nodes: StackedNodes, shares: Sequence[Mapping[int, float]]
    ) -> tuple[Tensor, list[Tensor]] | None:
        """Return whether everything is finite, and the mean displacements; None off the compiled route."""
        if self._captured is None or self._captured.route.name != COMPILED:
            return None
        numbers = tuple(tuple(of_replica.values()) for of_replica in shares)
        if self._shares is None or self._shares[0] != numbers:
            self._shares = numbers, torch.tensor(numbers, dtype=torch.float64, device=self._task.device)
        floating = [b for b in nodes.buffers.values() if b.is_floating_point()]
        weights = [as_real(w) for w in nodes.weights]
        return mean_displacements(self._captured.programs, weights, self._x, floating, self._shares[1])

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
        torch._foreach_neg_(step)
        self._outer.step(None, self._x, step, self._hparams.outer_at(t))
        if radius is not None:
            _project(self._x, radius)
        if not everything:
            for x, old in zip(self._x, before, strict=True):
                x.copy_(torch.where(like(self._running, x), x, old))
            buffers = {name: torch.where(like(self._running, b), b, self._buffers[name]) for name, b in buffers.items()}
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
        start = [as_real(w).clone() for w in self._stack] if self._proximal else ()
        return StackedNodes(list(self._stack), {n: _for_nodes(b, nodes) for n, b in self._buffers.items()}, start)

    def _by_replica(self, values: Tensor) -> Tensor:
        """Return [replicas * nodes, ...] as [replicas, nodes, ...]."""
        return values.view(len(self._models), -1, *values.shape[1:])

    def _begin_inner(self, t: int, members: Sequence[tuple[int, int]]) -> None:
        """Give the inner steps their states: kept ones, the outer second moment, or none."""
        algorithm = self._algorithm
        if algorithm.inner_state == "keep":
            self._inner.begin([self._kept.get(member, [{} for _ in self._x]) for member in members])
            return
        states: list[ParamState] = [{} for _ in self._x]
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

    def _end_diverged(self, t: int, mean: NodeMean, shares: Sequence[Mapping[int, float]]) -> None:
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

    def _end_judged(self, t: int) -> None:
        """End the configurations that the judge of the task gives up."""
        if self._task.judge is None or not self._alive:
            return
        measured = {key: values[:, self._alive, t - 1] for key, values in self.measured.items()}
        losing = self._task.judge(t, self.losses[:, self._alive, t - 1], measured)
        if not losing:
            return
        for c, reason in losing.items():
            for r in self._running[:, c].nonzero().flatten().tolist():
                self.ended[r, self._alive[c]] = Ended(t, reason)
        staying = [c for c in range(len(self._alive)) if c not in losing]
        self._drop(torch.tensor(staying, dtype=torch.int64, device=self._task.device), [], {})

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
        state = {**dict(zip(self.names, self._x, strict=True)), **self._buffers}
        for key, values in self._task.measure(t, state).items():
            if key not in self.measured:
                self.measured[key] = torch.full_like(self.losses, torch.nan)
            left = torch.where(self._running, values.detach().double(), torch.nan)
            self.measured[key][:, self._alive, t - 1] = left.cpu()

    def _plain_loss(self, batch: Any) -> None:
        with torch.enable_grad():
            self._task.loss(self._model, batch)


def _for_nodes(values: Tensor, nodes: int) -> Tensor:
    """Return [replicas, ...] as [replicas * nodes, ...]: a copy for each node."""
    return values.repeat_interleave(nodes, dim=0)


def _copied(states: Sequence[ParamState]) -> list[ParamState]:
    return [{k: v.clone() if isinstance(v, Tensor) else v for k, v in s.items()} for s in states]


def _project(weights: Sequence[Tensor], radius: float) -> None:
    """Scale every configuration by min(1, radius / its norm)."""
    squares = torch.stack([x.double().square().flatten(2).sum(2) for x in weights]).sum(0)
    factor = (radius / squares.sqrt()).clamp(max=1.0)
    for x in weights:
        x.mul_(like(factor, x).to(x.dtype))


def _check_equally_many(shares: Sequence[Mapping[int, float]], t: int) -> None:
    """Refuse replicas of which unequally many nodes take part."""
    counts = [len(of_replica) for of_replica in shares]
    if len(set(counts)) > 1:
        raise ReplicasDiffer(
            f"Invalid participation: by seed, {min(counts)} to {max(counts)} nodes take part in round {t}; side by "
            "side they need to be equally many. Run the seeds in separate calls."
        )


def _check_same_constants(models: Sequence[torch.nn.Module], changing: Collection[str]) -> None:
    """Refuse replicas that differ in what is not trained."""
    first, *others = ({**dict(model.named_parameters()), **dict(model.named_buffers())} for model in models)
    for r, other in enumerate(others, 1):
        for name, value in other.items():
            if name not in changing and not torch.equal(value, first[name]):
                raise ReplicasDiffer(
                    f"Invalid models: seed number {r} has another {name} than the first, which is not trained; side by "
                    "side they share it. Run the seeds in separate calls."
                )
