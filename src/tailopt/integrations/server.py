"""A federation from the server's side: options, checked once, and rounds over a network up to their number."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from tailopt.algorithms import Algorithm
from tailopt.arguments import check_counts, check_seconds, did_you_mean
from tailopt.engines.batches import FunctionBatches
from tailopt.engines.loop import Reporting
from tailopt.engines.model_state import trainable_parameters
from tailopt.engines.simulate import Result, RunFolderOptions, Simulation
from tailopt.integrations.agreed_settings import agreed_settings
from tailopt.integrations.federation import FederatedPolicy, Federation, Network, ServerOptions
from tailopt.integrations.privacy import Privacy
from tailopt.rounds.hyperparameters import AlgorithmHyperparameters

REPORTING = ("evaluate", "evaluate_every", "checkpoint_every", "keep", "loggers", "progress")
# options of rounds that only a simulation has, or that are decided elsewhere
NOT_HERE = {"rounds", "inner_state", "drops", "on_drop", "local_epochs", "lost"}
OF_ROUNDS = sorted({field.name for field in dataclasses.fields(FederatedPolicy) if field.init} - NOT_HERE)


class FederationServer:
    """The rounds of an algorithm over clients; `tailopt.integrations.flower.TailOPT` describes the arguments.

    Attributes:
        model: that is trained, in place.
        algorithm: of the federation.
        privacy: how its means are made private, or None.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        algorithm: Algorithm,
        *,
        nodes: int,
        local_steps: int,
        schedules: Any = None,
        run: str | os.PathLike[str] | None = None,
        resume: bool = False,
        privacy: Privacy | None = None,
        connect_timeout: float = 60.0,
        describe: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        weights = options.pop("weights", None)
        for name in sorted(options.keys() - {*REPORTING, *OF_ROUNDS}):
            hint = did_you_mean(name, (*REPORTING, *OF_ROUNDS))
            raise TypeError(f"Invalid {name}: {options[name]!r}; a federation has no such option{hint} Leave it out.")
        check_counts(nodes=nodes, local_steps=local_steps)
        check_seconds(connect_timeout=connect_timeout)
        if privacy is not None and not isinstance(privacy, Privacy):
            raise TypeError(
                f"Invalid privacy: {privacy!r}; need a Privacy, such as Privacy(clip=0.5, noise=4.0), or None."
            )
        if isinstance(weights, str):
            raise ValueError(
                f"Invalid weights: {weights!r}; need a number for each client, or None for equal ones: a server does "
                "not take the clients' word for what they weigh."
            )
        self.model, self.algorithm, self.privacy = model, algorithm, privacy
        self._schedules, self._connect_timeout = schedules, connect_timeout
        shown = {"progress": False, **{name: options.pop(name) for name in REPORTING if name in options}}
        self._reporting = Reporting(title=algorithm.name, **shown)
        # a run that is resumed with another noise would have no epsilon
        stored = {} if privacy is None else {"privacy": dataclasses.asdict(privacy)}
        self._records = RunFolderOptions(run, resume, stored, describe or {})
        self._policy = FederatedPolicy(
            rounds=None,
            inner_state=algorithm.inner_state,
            nodes=nodes,
            local_steps=local_steps,
            weights=() if weights is None else tuple(weights),
            **options,
        )
        if privacy is not None:
            privacy.check(model, algorithm, self._policy)

    def train(self, network: Network, rounds: int) -> Result:
        """Run up to a round; a resumed run goes on to that number."""
        policy = replace(self._policy, rounds=rounds, lost=set())
        assert policy.local_steps is not None and policy.nodes is not None
        names = list(trainable_parameters(self.model))
        hyperparameters = AlgorithmHyperparameters(self.algorithm, self._schedules, names)
        server = ServerOptions(
            network=network,
            settings=agreed_settings(
                self.model,
                self.algorithm,
                hyperparameters,
                policy.nodes,
                policy.local_steps,
                policy.seed,
                policy.proximal,
            ),
            policy=policy,
            folder=None if self._records.folder is None else Path(self._records.folder),
            checkpoint_every=self._reporting.checkpoint_every,
            connect_timeout=self._connect_timeout,
            privacy=self.privacy,
        )
        simulation = Simulation(
            self.model,
            self.algorithm,
            policy,
            loss=_on_clients,
            batches=FunctionBatches(_on_clients, policy.nodes, policy.local_steps, policy.seed),
            schedules=self._schedules,
            device=None,
            precision=None,
            engine=partial(Federation, server=server),
        )
        return simulation.run(self._reporting, self._records, inplace=True)


def _on_clients(*args: Any, **kwargs: Any) -> NoReturn:
    """Stand in for the loss and the data, which a server has not."""
    raise TypeError("The server of a federation has no data: clients take the local steps.")
