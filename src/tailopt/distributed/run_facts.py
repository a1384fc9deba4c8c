"""What a run of real nodes is started with: what must be equal on all nodes, and what its config.toml says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from tailopt.algorithms import Algorithm
from tailopt.distributed.agreement import without_local_settings
from tailopt.distributed.node_records import RecordOptions
from tailopt.engines.simulate import algorithm_config
from tailopt.records.run_config import storable
from tailopt.rounds.auto_thresholds import AutoThresholdsByLevel
from tailopt.rounds.hyperparameters import AlgorithmHyperparameters, RuleHyperparameters
from tailopt.rounds.policy import RoundPolicy


@dataclass(frozen=True)
class RunFacts:
    """The two levels of a run, as this node was given them.

    Args:
        optimizer: the inner optimizer.
        algorithm: from which it was made; None where the inner optimizer is the user's.
        agreed: hyperparameters of both rules, made from the algorithm; None without one.
        outer: the outer rule and its hyperparameters.
        auto_thresholds: those of both rules that are "auto".
        statistics: whether the history has what local steps clip.
    """

    optimizer: Optimizer
    algorithm: Algorithm | None
    agreed: AlgorithmHyperparameters | None
    outer: RuleHyperparameters
    auto_thresholds: AutoThresholdsByLevel
    statistics: bool | str

    def __post_init__(self) -> None:
        if self.statistics and self.agreed is None:
            raise ValueError(
                f"Invalid statistics: {self.statistics!r}; nodes do not know what an inner optimizer of yours clips, "
                f"here {type(self.optimizer).__name__}. Build NestedOptimizer by from_algorithm, or give it "
                "BiClip(statistics=True) and call its statistics()."
            )

    @property
    def send_second_moment(self) -> bool | str:
        """Whether the outer second moment travels with the weights, and how."""
        return False if self.algorithm is None else self.algorithm.send_preconditioner

    def shared(self, policy: RoundPolicy, options: RecordOptions) -> dict[str, Any]:
        """Return what must be the same on all nodes."""
        agreed, algorithm, keys = self.agreed, self.algorithm, ("params", "param_names")
        groups = [{k: v for k, v in group.items() if k not in keys} for group in self.optimizer.param_groups]
        return {
            "algorithm": algorithm.name if algorithm is not None else f"{type(self.optimizer).__name__} inside",
            "outer": {"rule": self.outer.rule.name, **self.outer.at(1)},
            "inner": groups if agreed is None else agreed.inner.at(1),
            "send_preconditioner": self.send_second_moment,
            "thresholds": self.auto_thresholds.settings(),
            "schedules": {} if agreed is None else agreed.sampled_schedules(policy.rounds, policy.local_steps or 0),
            **policy.as_facts(),
            "statistics": self.statistics,
            "checkpoint_every": None if options.folder is None else options.checkpoint_every,
            "resume": options.resume,
            "configuration": without_local_settings(options.describe),
        }

    def config(self, policy: RoundPolicy) -> dict[str, Any]:
        """Return what the run folder says about the run; of an inner optimizer that the user built, its class."""
        # Named only where there are statistics: the digest of config.toml is that of older versions otherwise.
        counted = {"statistics": self.statistics} if self.statistics else {}
        if self.algorithm is not None and self.agreed is not None:
            of_levels = {**algorithm_config(self.algorithm), "schedules": self.agreed.schedules()}
        else:
            inner = type(self.optimizer).__name__
            of_levels = {"outer": self.outer.rule.name, "settings": storable(self.outer.base), "inner": inner}
        return {**of_levels, **policy.as_config(), **counted}
