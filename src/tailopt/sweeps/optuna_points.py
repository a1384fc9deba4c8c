"""Points that Optuna proposes by what earlier ones did, a generation at a time.

A generation is proposed by a sampler with a seed of its own, from a study that holds all earlier points: so it depends
on the space, the seed and the recorded values alone, and a resumed sweep proposes what it proposed before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tailopt.optional import require
from tailopt.seeds import derive_seed
from tailopt.sweeps.points import Settings, SpaceLike, dimensions_of, exceeds
from tailopt.sweeps.result import Tried
from tailopt.sweeps.space import Range, settings_at

GENERATION = 16  # points that are proposed, and trained, together
MOST_DROPPED = 1000  # in a generation, before the space counts as empty


class OptunaPoints:
    """Proposes points of a space with ranges or lists.

    Args:
        lower_is_better: of the values that are told.

    Attributes:
        dropped: how many proposals were passed over, because their lower threshold exceeds the upper one.
    """

    def __init__(
        self, algorithm: str, space: SpaceLike, seed: int, lower_is_better: bool, fixed: Mapping[str, Any]
    ) -> None:
        sentence = 'sampler="optuna" needs Optuna, the extra [optuna]'
        self._optuna: Any = require("optuna", sentence, extra="optuna")
        self._distributions = {key: self._distribution(value) for key, value in dimensions_of(space).items()}
        self._seed, self._fixed = (seed, f"optuna {algorithm}"), fixed
        self._direction = "minimize" if lower_is_better else "maximize"
        self._told: list[Any] = []
        self._generation = 0
        self.dropped = 0

    def propose(self, count: int) -> list[tuple[Mapping[str, Any], Settings]]:
        """Return new points: the parameters that Optuna knows, and the settings that they stand for."""
        seed = derive_seed(*self._seed, self._generation) % 2**32
        self._generation += 1
        optuna = self._optuna
        before = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            # constant_liar: points of one generation keep away from each other
            sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
            study = optuna.create_study(sampler=sampler, direction=self._direction)
            study.add_trials(self._told)
            found: list[tuple[Mapping[str, Any], Settings]] = []
            dropped = 0
            while len(found) < count:
                trial = study.ask(self._distributions)
                settings = settings_at(dict(trial.params), self._fixed)
                if exceeds({**self._fixed, **settings}):
                    study.tell(trial, state=optuna.trial.TrialState.FAIL)
                    dropped += 1
                    if dropped == MOST_DROPPED:
                        raise ValueError(
                            f"Invalid space: in {dropped} of {dropped + len(found)} points d exceeds u; need d <= u. "
                            'Search the lower threshold as a share of the upper one: {"i_share": Range(0.03, 1.0)}.'
                        )
                else:
                    found.append((dict(trial.params), settings))
        finally:
            optuna.logging.set_verbosity(before)
        self.dropped += dropped
        return found

    def tell(self, parameters: Sequence[Mapping[str, Any]], tried: Sequence[Tried]) -> None:
        """Say what points did, in the order in which they were proposed; those that ended early count as pruned."""
        states = self._optuna.trial.TrialState
        for own, one in zip(parameters, tried, strict=True):
            reached = {one.rounds: one.value} if one.halved else {}
            complete = not one.ended and one.value == one.value
            self._told.append(
                self._optuna.trial.create_trial(
                    params=dict(own),
                    distributions=self._distributions,
                    state=states.COMPLETE if complete else states.PRUNED,
                    value=one.value if complete else None,
                    intermediate_values=reached,
                )
            )

    def _distribution(self, value: Any) -> Any:
        kinds = self._optuna.distributions
        if isinstance(value, Range):
            return kinds.FloatDistribution(value.low, value.high, log=value.log)
        return kinds.CategoricalDistribution(tuple(value))
