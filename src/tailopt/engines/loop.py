"""The round loop that all engines share; it handles recording, resuming, evaluation and progress.

An engine only produces the displacements of a round. Nothing of the state changes while it does, so whatever ends a run
in the middle of a round (an error, Ctrl-C, a kill) leaves the end of the round before it, and a run that continues from
there has the bits of a run that was never stopped.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tailopt.arguments import check_counts, check_flags, check_function, checked_loggers
from tailopt.clipping.step_cache import StepCache
from tailopt.engines.engine import Engine, Evaluate
from tailopt.engines.snapshots import check, restore, save
from tailopt.loggers.protocol import RowFunction, RunStart, run_name, told
from tailopt.progress import RoundProgress
from tailopt.records import checkpoints
from tailopt.records.folder import Run
from tailopt.records.lock import LostLock
from tailopt.records.phase_clock import PhaseClock
from tailopt.rounds.auto_thresholds import AutoThresholdsByLevel
from tailopt.rounds.clipping_counts import check_statistics
from tailopt.rounds.drops import DROPPED
from tailopt.rounds.hyperparameters import RuleHyperparameters
from tailopt.rounds.policy import RoundPolicy
from tailopt.rounds.round import GlobalState, RoundMean, RoundResult, finish_round, statistics_of_outer_step
from tailopt.rounds.settle import EveryoneExcluded


@dataclass(frozen=True, kw_only=True)
class Reporting:
    """What a run shows and writes while it runs.

    Args:
        title: of the progress line.
        evaluate: model -> metrics, every `evaluate_every` rounds and after the last.
        statistics: whether the history has gradient statistics; "histograms": also their magnitudes.
        checkpoint_every: rounds between checkpoints.
        keep: how many checkpoints.
        loggers: told of the run and of every row of its history.
        progress: whether a progress line is shown.
    """

    title: str
    evaluate: Evaluate | None = None
    evaluate_every: int = 1
    statistics: bool | str = False
    checkpoint_every: int = 1
    keep: int = 3
    loggers: Sequence[RowFunction] = ()
    progress: bool = True

    def __post_init__(self) -> None:
        check_counts(evaluate_every=self.evaluate_every, checkpoint_every=self.checkpoint_every, keep=self.keep)
        check_flags(progress=self.progress)
        check_statistics(self.statistics)
        check_function("evaluate", self.evaluate, "a function of the model that returns a mapping of numbers, or None")
        object.__setattr__(self, "loggers", checked_loggers(self.loggers))


class Loop:
    """Runs rounds until the policy's number is reached.

    Args:
        engine: produces the displacements.
        policy: of the rounds.
        outer_hyperparameters: the outer rule and its hyperparameters in every round.
        auto_thresholds: the thresholds of both rules that are "auto".
        reporting: what is shown and written.
        run: the run folder, or None.
    """

    def __init__(
        self,
        engine: Engine,
        policy: RoundPolicy,
        outer_hyperparameters: RuleHyperparameters,
        auto_thresholds: AutoThresholdsByLevel,
        reporting: Reporting,
        run: Run | None = None,
    ) -> None:
        assert policy.rounds is not None
        self.rounds = policy.rounds
        self.history: list[dict[str, Any]] = []
        self._engine, self._policy, self._reporting, self._run = engine, policy, reporting, run
        self._outer_hyperparameters, self._auto_thresholds = outer_hyperparameters, auto_thresholds
        self._outer_cache = StepCache()
        self._clock = PhaseClock()
        self._in_outer_step = False  # while the state has parts of two rounds
        self._state_is_ahead = False  # while the state contains a round whose row is not in the history yet

    def resume(self, state: GlobalState) -> None:
        """Continue from the last checkpoint of the run folder; from the beginning, where it has none."""
        run = self._run
        assert run is not None
        snapshot = checkpoints.load_latest(run.path, lambda snapshot, path: check(run, snapshot, path))
        if snapshot is None:
            run.require_no_rows()
            return
        restore(snapshot, state, self._engine, self._auto_thresholds)
        self._engine.check_repeatable()  # before newer checkpoints and rows are deleted
        checkpoints.rewind(run.path, state.round)
        run.rewind(state.round, snapshot.provenance and snapshot.provenance.history_chain)
        self.history = run.history()
        run.log(f"resumed after round {state.round}")
        if state.round >= self.rounds:
            warnings.warn(
                f"The run has {state.round} rounds already; nothing is left to do.", UserWarning, stacklevel=4
            )

    def go(self, state: GlobalState, config: Mapping[str, Any]) -> None:
        """Run until `rounds` are done, or until something stops it; then the model has the last whole round.

        config: the settings, for loggers.
        """
        folder = None if self._run is None else self._run.path
        name = run_name(folder, self._reporting.title)
        start = RunStart(name=name, config=config, round=state.round, folder=folder)
        # the round of the last checkpoint; -1 in a run that begins: its state before round 1 is saved first
        saved = state.round if self.history or state.round else -1
        every = self._reporting.checkpoint_every
        try:
            if saved < 0:
                saved = self._save(state)
            with (
                told(self._reporting.loggers, start),
                RoundProgress(self._reporting.title, state.round, self.rounds, self._reporting.progress) as line,
            ):
                while state.round < self.rounds:
                    row = self._one_round(state)
                    if self._run is not None and (state.round == self.rounds or state.round % every == 0):
                        saved = self._save(state)
                    line.show(row)
                    for logger in self._reporting.loggers:
                        logger(row)
        except BaseException as error:
            saved = self._save_what_is_whole(state, saved, error)
            if isinstance(error, EveryoneExcluded):
                last = (
                    ""
                    if self._run is None
                    else checkpoints.describe_last_checkpoint(self._run.path, checkpoints.latest(self._run.path))
                )
                raise error.ending_run(last) from None
            raise
        finally:
            # If an outer step was interrupted, `state` is half updated, but the model still holds the last finished
            # round, and must not be overwritten.
            if not self._in_outer_step:
                self._engine.load_into_model(state)

    def _one_round(self, state: GlobalState) -> dict[str, Any]:
        t, policy, lap = state.round + 1, self._policy, self._clock.lap
        lap()  # loggers and progress
        participants, lost = policy.draw(t), policy.draw_drops(t)
        hparams, auto_thresholds_entry = self._outer_hyperparameters.at(t), self._auto_thresholds.history_entry()
        with torch.no_grad():
            mean = RoundMean(state, participants, policy, lost)
            diverging = lost if policy.dropped_nodes_diverge else ()
            for contribution in self._engine.contributions(state, participants, diverging):
                lap("local")
                mean.add(contribution)
                lap("mean")
            result = mean.result()
            lap("mean")
            self._engine.load_into_model(state)  # so that an outer step that is interrupted can be undone
            self._in_outer_step = self._state_is_ahead = True
            finish_round(state, result, self._outer_hyperparameters.rule, hparams, policy, self._outer_cache)
            self._in_outer_step = False
            self._update_auto_thresholds(state, result)
        self._engine.keep_node_states(result)
        lap("outer")
        row = {**self._row(state, result), **auto_thresholds_entry}
        lap("evaluate")
        if self._run is not None:
            self._run.append(row, self._clock.take())
        self.history.append(row)
        self._state_is_ahead = False
        for excluded in result.settlement.excluded:
            if excluded.reason != DROPPED:  # a simulation drops what the user asked it to drop
                self._warn(f"Round {t} goes on without {excluded}.")
        return row

    def _update_auto_thresholds(self, state: GlobalState, result: RoundResult) -> None:
        """Compute the next round's thresholds, where they are "auto", from what this round clipped."""
        levels = self._auto_thresholds
        outer = [] if levels.outer is None else statistics_of_outer_step(state, result, levels.outer)
        for text in levels.update_from(result.settlement, result.threshold_statistics, outer):
            # any other text says that nothing could be chosen: every gradient so far was zero or not finite
            if text not in levels.choice_messages:
                self._warn(text)
            elif self._run is not None:
                self._run.log(text)

    def _row(self, state: GlobalState, result: RoundResult) -> dict[str, Any]:
        metrics: dict[str, Any] = {}
        reporting, t = self._reporting, state.round
        if reporting.evaluate is not None and (t == self.rounds or t % reporting.evaluate_every == 0):
            metrics = self._engine.evaluate(state, reporting.evaluate)
        statistics = self._engine.statistics_row(result, state.names) if reporting.statistics else {}
        return result.settlement.history_row(metrics, statistics)

    def _warn(self, text: str) -> None:
        warnings.warn(text, UserWarning, stacklevel=6)
        if self._run is not None:
            self._run.log(text)

    def _save(self, state: GlobalState) -> int:
        if self._run is None:
            return state.round
        self._clock.lap()
        self._run.check_lock()
        self._run.sync()
        save(self._run, state, self._engine, self._auto_thresholds)
        checkpoints.prune(self._run.path, self._reporting.keep)
        self._clock.lap("checkpoint")
        return state.round

    def _save_what_is_whole(self, state: GlobalState, saved: int, error: BaseException) -> int:
        """Save the last whole round of a run that an error ends, and log the error; returns the round that is saved."""
        if self._run is None or isinstance(error, LostLock):  # a lost lock: the folder belongs to another process
            return saved
        # `state` may contain a round that has no row in the history yet. It is not saved then, and the last checkpoint
        # stays the newest.
        recorded = self.history[-1]["round"] if self.history else 0
        whole = state.round == recorded and not self._state_is_ahead
        if whole and state.round > saved and not isinstance(error, checkpoints.DamagedCheckpoint):
            saved = self._save(state)
        notes = " ".join(getattr(error, "__notes__", ()))
        self._run.log(f"stopped after round {saved}: {type(error).__name__}: {error} {notes}".rstrip())
        return saved
