"""Nodes one after another on one model: the memory of one node, however many there are.

A node starts from the global weights, takes its local steps, and the model's memory then becomes its displacement. The
optimizer states that nodes keep wait in host memory.

Before every local step torch's global generator is seeded by (seed, round, node, step), and Python's and numpy's before
every node's round, so that dropout and augmentations do not depend on what ran before.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tailopt.algorithms import Algorithm
from tailopt.clipping.step_cache import StepCache
from tailopt.engines.batches import BatchSource, LossFunction, batch_digest, to_device
from tailopt.engines.model_state import ModelState, as_real
from tailopt.engines.routes import VMAP, Route
from tailopt.evaluation import evaluating
from tailopt.rounds.block_norm import sequential_sum
from tailopt.rounds.clipping_counts import ClippingCounter, history_statistics
from tailopt.rounds.gradient_statistics import GradientRecorder, clipped_by_step
from tailopt.rounds.guard import Bound
from tailopt.rounds.hyperparameters import RuleHyperparameters
from tailopt.rounds.participants import Participants
from tailopt.rounds.proximal import proximal_gradient
from tailopt.rounds.round import Contribution, DivergedState, GlobalState, RoundResult
from tailopt.rules.adam import initial_adam_state
from tailopt.rules.rule import Hyperparameters, ParamState
from tailopt.seeds import derive_seed, step_seed

PRECISIONS = {None: None, "fp32": None, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """What every node does in its local steps.

    Args:
        algorithm: whose inner rule takes the steps.
        inner_hyperparameters: that rule and its hyperparameters in every round and local step.
        loss: (model, batch) -> a scalar tensor.
        batches: of every node.
        seed: of the run.
        device: where the model is.
        precision: a key of `PRECISIONS`.
        proximal: the factor of the proximal term, or 0.
        statistics: whether the gradients' coordinates are counted; "histograms": also by magnitude.
        resumable: whether the first batch of a round is remembered, to be asked for again when the run is resumed.
        route: of an engine that trains all nodes at once.
    """

    algorithm: Algorithm
    inner_hyperparameters: RuleHyperparameters
    loss: LossFunction
    batches: BatchSource
    seed: int
    device: torch.device
    precision: str | None = None
    proximal: float = 0.0
    statistics: bool | str = False
    resumable: bool = False
    route: Route = Route(VMAP, "asked for")

    def clipping_counter(self, n_params: int) -> ClippingCounter | None:
        """Return what counts the gradients of a node in a round; None where nothing is counted."""
        return ClippingCounter(self.statistics, n_params) if self.statistics else None


class Sequential:
    """Local steps on one model, node after node.

    Attributes:
        steps_done: local steps that every node has taken since the run began.
        optimizer_states: the inner optimizer's state of every node that keeps one, on the CPU.
        diverged_states: weights and buffers of every node that continues from its own, on the CPU.
        repeatability_probe: the first batch of the last finished round, as (node, round, taken, digest): a run
            that is resumed asks for it again, and its digest must be the same.
    """

    def __init__(self, model: torch.nn.Module, training: LocalTraining) -> None:
        self.model, self._training = model, training
        self._device, self._seed = training.device, training.seed
        self._autocast_dtype = PRECISIONS[training.precision]
        if not model.training:  # otherwise the modes are the user's: a frozen BatchNorm stays frozen
            model.train()
        self._model_state = ModelState(model)
        self._step_cache = StepCache()
        self.steps_done = [0] * training.batches.nodes
        self.optimizer_states: dict[int, list[ParamState]] = {}
        self.diverged_states: dict[int, DivergedState] = {}
        self.repeatability_probe: dict[str, Any] = {}
        self._pending_probe: dict[str, Any] = {}  # of the round that is under way

    def initial_state(self, average: bool) -> GlobalState:
        """Return the state before the first round."""
        return self._model_state.global_state(average)

    def contributions(
        self, state: GlobalState, participants: Participants, diverging: Collection[int] = ()
    ) -> Iterator[Contribution]:
        """Train every participant of the next round, in ascending order.

        A contribution aliases the model's memory: use it before you advance the iterator.

        diverging: nodes that start their next round from the weights that they end this one with.
        """
        for node in participants.shares:
            yield self._local_round(state, node, node in diverging)

    def _local_round(self, state: GlobalState, node: int, diverges: bool) -> Contribution:
        t, training, model_state = state.round + 1, self._training, self._model_state
        model_state.load(state)
        start = model_state.weights_in_own_types(state)
        diverged = self.diverged_states.get(node)
        if diverged is not None:  # its displacement is still measured from the global weights
            model_state.load_diverged(diverged)
        steps_done, steps = self.steps_done[node], training.batches.steps(node)
        optimizer_state = self._optimizer_state_at_start(state, node)
        # a node that did not start from the global weights may have come from anywhere: nothing bounds it
        movement_bound = training.inner_hyperparameters.bound(t, steps_done, steps) if diverged is None else Bound(None)
        n_params, auto_thresholds = len(model_state.params), training.inner_hyperparameters.auto_thresholds
        clipping_counter = training.clipping_counter(n_params)
        threshold_recorder = None if auto_thresholds is None else auto_thresholds.recorder(n_params)
        losses = self._local_steps(node, t, start, optimizer_state, clipping_counter, threshold_recorder)
        diverged_state = model_state.diverged_state() if diverges else None
        keeps_state = training.algorithm.inner_state == "keep"
        delta, flat = model_state.take_displacement(state, start)
        return Contribution(
            node=node,
            start=start,
            delta=delta,
            flat=flat,
            buffers=model_state.buffers.tensors(),
            loss=_mean(losses),
            movement_bound=movement_bound,
            steps=steps,
            optimizer_state=[copied_to(s, "cpu") for s in optimizer_state] if keeps_state else None,
            diverged_state=diverged_state,
            statistics=None if clipping_counter is None else clipping_counter.counts(),
            threshold_statistics=None if threshold_recorder is None else threshold_recorder.statistics(),
        )

    def _local_steps(
        self,
        node: int,
        t: int,
        start: Sequence[Tensor],
        optimizer_state: Sequence[ParamState],
        clipping_counter: ClippingCounter | None,
        threshold_recorder: GradientRecorder | None,
    ) -> list[Tensor]:
        """Take the local steps of a node's round, which began with the weights `start`; returns their losses."""
        params, steps_done, steps = self._model_state.params, self.steps_done[node], self._training.batches.steps(node)
        hparams_at = self._training.inner_hyperparameters.at
        seed = derive_seed(self._seed, "model", t, node)
        seed_python_and_numpy(seed)
        batches = self._training.batches.batches(node, t, steps_done, steps)
        losses = []
        for step in range(steps):
            seed_torch(step_seed(seed, step), self._device)
            try:
                batch = next(batches)
                if self._training.resumable and self._pending_probe.get("round") != t:
                    digest = batch_digest(batch)
                    self._pending_probe = {"node": node, "round": t, "taken": steps_done, "digest": digest}
                losses.append(self._backward(to_device(batch, self._device), params))
            except Exception as error:
                raise _with_location(error, node, t, step) from error.__cause__
            if self._training.proximal:
                self._add_proximal_term(start)
            self._inner_step(params, optimizer_state, hparams_at(t, steps_done + step), clipping_counter)
            if threshold_recorder is not None:
                self._record_clipped(params, optimizer_state, threshold_recorder, steps_done + step)
        for p in params:
            p.grad = None
        return losses

    def _optimizer_state_at_start(self, state: GlobalState, node: int) -> list[ParamState]:
        """Return the inner optimizer's state with which a node starts its round."""
        algorithm, weights = self._training.algorithm, self._model_state.weights
        if algorithm.inner_state == "keep" and node in self.optimizer_states:
            return [copied_to(s, self._device) for s in self.optimizer_states[node]]
        if algorithm.send_preconditioner and state.round:
            # raw: the algorithm turns off the correction of the second moment, so Adam counts its steps from 0
            step = 0 if algorithm.send_preconditioner == "raw" else state.round
            moments = [
                s.get("exp_avg_sq", torch.zeros_like(w)) for w, s in zip(weights, state.outer_state, strict=True)
            ]
            return [initial_adam_state(w, v, step) for w, v in zip(weights, moments, strict=True)]
        return [{} for _ in weights]

    def _backward(self, batch: Any, params: Sequence[torch.nn.Parameter]) -> Tensor:
        for p in params:
            p.grad = None
        with torch.enable_grad(), self._autocast():
            loss = self._training.loss(self.model, batch)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{type(loss).__name__}"
            raise ValueError(f"Invalid loss: {got}; need a scalar tensor, such as the mean over the batch.")
        if not loss.requires_grad:
            raise ValueError("Invalid loss: it depends on no trainable parameter. Was it detached, or is all frozen?")
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def _add_proximal_term(self, start: Sequence[Tensor]) -> None:
        """Replace every gradient; a parameter that the loss did not reach has none, and does not move."""
        for p, x0 in zip(self._model_state.params, start, strict=True):
            if p.grad is not None:
                p.grad = proximal_gradient(p.grad, p, x0, self._training.proximal)

    def _inner_step(
        self,
        params: Sequence[torch.nn.Parameter],
        states: Sequence[ParamState],
        hparams: Hyperparameters,
        clipping_counter: ClippingCounter | None,
    ) -> None:
        weights = self._model_state.weights
        grads = [g for p in params if (g := p.grad) is not None]
        all_move = len(grads) == len(params)
        moving = range(len(params)) if all_move else [i for i, p in enumerate(params) if p.grad is not None]
        if any(map(Tensor.is_complex, grads)):
            grads = [as_real(g) for g in grads]
        if not all_move:  # a parameter that the loss did not reach keeps its value and its state
            hparams = {k: [v[i] for i in moving] if isinstance(v, list) else v for k, v in hparams.items()}
            weights, states = [weights[i] for i in moving], [states[i] for i in moving]
        if clipping_counter is not None:
            thresholds = self._training.inner_hyperparameters.rule.thresholds(weights, grads, hparams)
            clipping_counter.add(moving, grads, thresholds)
        if weights:
            self._training.inner_hyperparameters.rule.step(weights, grads, states, hparams, self._step_cache)

    def _record_clipped(
        self,
        params: Sequence[torch.nn.Parameter],
        states: Sequence[ParamState],
        recorder: GradientRecorder,
        steps_done: int,
    ) -> None:
        """Record what a step clipped, from which thresholds that are "auto" follow."""
        assert self._training.inner_hyperparameters.auto_thresholds is not None
        moving = [i for i, p in enumerate(params) if p.grad is not None]
        grads = [as_real(g) for p in params if (g := p.grad) is not None]
        momentum = self._training.inner_hyperparameters.auto_thresholds.momentum
        recorder.add(moving, clipped_by_step(grads, [states[i] for i in moving], momentum), steps_done)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._autocast_dtype)

    def keep_node_states(self, result: RoundResult) -> None:
        """Take over what the nodes keep after a round.

        The steps of every participant count. A node that the guard or a robust mean excluded keeps the optimizer state
        from before the round; one whose contribution was lost keeps its new one.
        """
        # The probe is stored only now that its round has finished. If a round fails on bad data and the user repairs
        # them, a probe of that round would wrongly refuse the resume.
        self.repeatability_probe = self._pending_probe
        for node, steps in result.settlement.steps.items():
            self.steps_done[node] += steps
            self.diverged_states.pop(node, None)
        self.diverged_states.update(result.node_states.diverged_states)
        self.optimizer_states.update(result.node_states.optimizer_states)

    def evaluate(self, state: GlobalState, function: Callable[[torch.nn.Module], Mapping[str, Any]]) -> dict[str, Any]:
        """Return the user's metrics of the global model, in evaluation mode."""
        self.load_into_model(state)
        seed = derive_seed(self._seed, "evaluate", state.round)
        seed_python_and_numpy(seed)
        seed_torch(seed, self._device)
        with evaluating(self.model):
            metrics = function(self.model)
        if not isinstance(metrics, Mapping):
            raise TypeError(
                f"Invalid evaluate: it returned {type(metrics).__name__}; need a mapping from names to numbers, such "
                'as {"accuracy": 0.9}.'
            )
        return {str(key): value.item() if isinstance(value, Tensor) else value for key, value in dict(metrics).items()}

    @torch.no_grad()
    def load_into_model(self, state: GlobalState) -> None:
        """Load the global weights and buffers into the model."""
        self._model_state.load(state)

    def check_repeatable(self) -> None:
        """Ask for the first batch of the last round again, and refuse to continue where it differs."""
        if not self.repeatability_probe:
            return
        node, t, steps_done = (self.repeatability_probe[key] for key in ("node", "round", "taken"))
        seed = derive_seed(self._seed, "model", t, node)
        seed_python_and_numpy(seed)
        seed_torch(step_seed(seed, 0), self._device)
        batch = next(iter(self._training.batches.batches(node, t, steps_done, 1)))
        if batch_digest(batch) != self.repeatability_probe["digest"]:
            raise ValueError(
                f"This run cannot be resumed: the batch of node {node}, round {t}, step 0 differs from what it was. "
                "Draw all randomness from the generator that the batch function is given, and leave the data as they "
                "were."
            )

    def statistics_row(self, result: RoundResult, names: Sequence[str]) -> dict[str, Any]:
        """Return the gradient statistics of a round, by tensor, for the history."""
        return history_statistics(names, result.statistics, self._training.statistics)


def seed_torch(value: int, device: torch.device) -> None:
    """Seed torch's global generator of the CPU, and of the device."""
    torch.default_generator.manual_seed(value)
    if device.type != "cpu":
        module = torch.get_device_module(device)
        with module.device(device):  # it may be another one than the current device
            module.manual_seed(value)


def seed_python_and_numpy(value: int) -> None:
    """Seed Python's generator, and numpy's where somebody uses it."""
    random.seed(value)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(value % 2**32)


# What torch.optim's classes keep on the CPU; every other tensor of a state is where the parameter is.
COUNTERS = frozenset({"step", "mu_product"})


def copied_to(state: ParamState, device: torch.device | str) -> ParamState:
    """Copy a parameter's state to a device; counters stay on the CPU, where torch's optimizers want them."""

    def copied(key: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach().to("cpu" if key in COUNTERS else device, copy=True)

    return {key: copied(key, value) for key, value in state.items()}


def _mean(losses: Sequence[Tensor]) -> float:
    """Add the losses in float64, one after another; a device is waited for once."""
    values = [x.item() for x in losses] if losses[0].is_cpu else torch.stack(list(losses)).tolist()
    return sequential_sum(values) / len(values)


def _with_location(error: Exception, node: int, t: int, step: int) -> Exception:
    """Add node, round and local step to an error of the user's own functions."""
    place = f"in node {node}, round {t}, local step {step}"
    if isinstance(error, StopIteration):
        return RuntimeError(f"The data ended {place}.")
    if isinstance(error, ValueError) and str(error).startswith("Invalid loss"):
        return ValueError(f"{error} This was {place}.")
    if hasattr(error, "add_note"):
        error.add_note(f"This was {place}.")
    return error
