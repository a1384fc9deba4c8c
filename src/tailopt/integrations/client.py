"""The local steps of a federation's client: those that `simulate` takes for the same node, with the same draws."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Any

import torch

from tailopt.algorithms import Algorithm
from tailopt.arguments import check_choice, check_counts, check_function, checked_seed, whole_number
from tailopt.engines.batches import BatchFunction, BatchSource, FunctionBatches, LossFunction, OwnBatches
from tailopt.engines.model_state import trainable_parameters
from tailopt.engines.sequential import PRECISIONS, LocalTraining, Sequential
from tailopt.engines.simulate import restoring_global_rng
from tailopt.evaluation import modes_of, restore_modes
from tailopt.integrations.agreed_settings import agreed_settings, settings_digest
from tailopt.integrations.federation import TrainReply, TrainRequest
from tailopt.integrations.kept_states import StateFolder, keep_state, state_after
from tailopt.rounds.auto_thresholds import plain_statistics
from tailopt.rounds.hyperparameters import AlgorithmHyperparameters
from tailopt.rounds.participants import Participants
from tailopt.rounds.proximal import checked_proximal


class Client:
    """One node of a federation, with its own data.

    Args:
        model: of the same kind as the server's; its trained weights come from there.
        algorithm: the same as the server's.
        node: its number, from 0: on Flower, `context.node_config["partition-id"]`.
        nodes: how many there are.
        loss: (model, batch) -> a scalar tensor.
        data: a Dataset or DataLoader with this node's samples; or
        batches: (node, round, step, generator) -> batch.
        local_steps: in every round.
        batch_size: with a Dataset.
        proximal, schedules, seed: the same as the server's.
        device: where the local steps are taken; by default where the model is.
        precision: None or "bf16" (autocast).
        states: a folder for the inner optimizer's states where the algorithm keeps them: one folder for each run. By
            default they are in the memory of the SuperNode, and last as long as the run of Flower.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        algorithm: Algorithm,
        *,
        node: int,
        nodes: int,
        loss: LossFunction,
        local_steps: int,
        data: Any = None,
        batches: BatchFunction | None = None,
        batch_size: int | None = None,
        proximal: float = 0.0,
        schedules: Any = None,
        seed: int = 0,
        device: torch.device | str | None = None,
        precision: str | None = None,
        states: str | os.PathLike[str] | None = None,
    ) -> None:
        check_counts(nodes=nodes, local_steps=local_steps)
        check_function("loss", loss, "a function (model, batch) that returns a scalar tensor")
        check_choice("precision", precision, tuple(PRECISIONS))
        self.node, seed = whole_number("node", node, low=0, high=nodes - 1), checked_seed(seed)
        proximal = checked_proximal(proximal)
        self._states = None if states is None else StateFolder(states, self.node)
        self._hyperparameters = AlgorithmHyperparameters(algorithm, schedules, list(trainable_parameters(model)))
        self.settings = agreed_settings(model, algorithm, self._hyperparameters, nodes, local_steps, seed, proximal)
        if (data is None) == (batches is None):
            raise ValueError(
                f"Invalid data: {'none' if data is None else 'two sources'}; give data, a Dataset or DataLoader, or "
                "batches, a function; one of the two."
            )
        source: BatchSource = (
            FunctionBatches(batches, nodes, local_steps, seed)
            if batches is not None
            else OwnBatches(data, node, nodes, local_steps, batch_size, seed)
        )
        if source.not_repeatable_because:
            raise ValueError(
                f"Invalid data: {source.not_repeatable_because}, so a round could not be repeated when the server is "
                "restarted. Use a map-style dataset without a sampler."
            )
        self._device = torch.device(device) if device is not None else next(model.parameters()).device
        self._model = model.to(self._device)
        self._training = LocalTraining(
            algorithm=algorithm,
            inner_hyperparameters=self._hyperparameters.inner,
            loss=loss,
            batches=source,
            seed=seed,
            proximal=proximal,
            device=self._device,
            precision=precision,
        )

    def train(self, request: TrainRequest, kept: MutableMapping[str, bytes]) -> TrainReply:
        """Take the local steps of a round.

        kept: the states after earlier rounds, by round, where the client has no folder for them; `train` changes it.
        """
        if request.settings != settings_digest(self.settings):
            raise ValueError(f"The settings of node {self.node} are not those with which it joined: restart it.")
        modes = modes_of(self._model)
        try:
            return self._trained(request, kept if self._states is None else self._states)
        finally:
            restore_modes(modes)

    def _trained(self, request: TrainRequest, kept: MutableMapping[str, bytes]) -> TrainReply:
        engine, node, t = Sequential(self._model, self._training), self.node, request.round
        state = engine.initial_state(average=False)
        state.round = t - 1
        for name, weight in zip(state.names, state.weights, strict=True):
            weight.copy_(request.tensors[name])
        state.buffers = {name: request.tensors[name].to(b.device, b.dtype) for name, b in state.buffers.items()}
        for name, outer in zip(state.names, state.outer_state, strict=True):
            if name in request.second_moments:
                outer["exp_avg_sq"] = request.second_moments[name].to(self._device)
        auto_thresholds = self._hyperparameters.inner.auto_thresholds
        if auto_thresholds is not None:
            auto_thresholds.load_state(request.thresholds or {})
        engine.steps_done[node] = request.steps_done
        optimizer_state, state_round = state_after(kept, request.state_round)
        if optimizer_state is not None:
            engine.optimizer_states[node] = optimizer_state
        with restoring_global_rng(self._device), torch.no_grad():
            # a "diverged" state holds the weights themselves: their sum with a displacement would be rounded
            c = next(engine.contributions(state, Participants([node], {node: 1.0}), diverging=[node]))
        assert c.diverged_state is not None
        if c.optimizer_state is not None:
            keep_state(kept, t, c.optimizer_state, request.checkpoint)
        thresholds = c.threshold_statistics
        return TrainReply(
            tensors={**dict(zip(state.names, c.diverged_state.weights, strict=True)), **c.diverged_state.buffers},
            loss=c.loss,
            state_round=state_round,
            thresholds=None if thresholds is None else [plain_statistics(s) for s in thresholds],
        )
