"""Trials of a sweep, as loggers are told of them: each is a run of its own, told when its batch is done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tailopt.loggers.protocol import RowFunction, RunStart, run_name, told
from tailopt.records.run_config import as_stored, in_sections
from tailopt.sweeps.trials import Trial


def tell(
    loggers: Sequence[RowFunction], trials: Iterable[Trial], name: str, config: Mapping[str, Any], folder: Path | None
) -> None:
    """Tell loggers of trials that are done.

    A row has what was measured at a rung (round, loss, metrics), and which trial it is of (point, seed, split).

    Args:
        name: of the sweep, where it has no folder.
        config: what all trials share.

    Examples:
        >>> from tailopt.sweeps.trials import Rung
        >>> trial = Trial(3, 0, "tuning", {"ilr": 0.1}, (Rung(5, 0.5, {"error": 0.25}),), "", "vmap")
        >>> tell([print], [trial], "avg-sgd", {}, None)
        {'round': 5, 'loss': 0.5, 'metrics': {'error': 0.25}, 'point': 3, 'seed': 0, 'split': 'tuning'}
    """
    if not loggers:
        return
    for trial in trials:
        kind = "point" if trial.split == "tuning" else trial.split
        start = RunStart(
            name=run_name(folder, name),
            config=as_stored(in_sections({**config, "settings": dict(trial.settings), "seed": trial.seed})),
            trial=f"{kind}-{trial.number}-seed-{trial.seed}",
            folder=folder,
        )
        with told(loggers, start):
            for rung in trial.rungs:
                measured = {"round": rung.round, "loss": rung.loss, "metrics": dict(rung.metrics)}
                for logger in loggers:
                    logger({**measured, "point": trial.number, "seed": trial.seed, "split": trial.split})
