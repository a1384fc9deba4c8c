"""What one node writes to the run folder and reads from it again: its own half of a checkpoint, the history, the log.

`checkpointing.py` writes and reads together with the other nodes; this file says what of this node goes into it.
"""

from __future__ import annotations

import atexit
import functools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tailopt.arguments import check_counts, check_flags, check_function, checked_loggers
from tailopt.distributed.all_ranks import AllRanks
from tailopt.distributed.checkpointing import CheckpointCoordinator, Resumed
from tailopt.distributed.exchange_types import ExchangeReport
from tailopt.distributed.local_round import LocalRound
from tailopt.distributed.node import Node
from tailopt.distributed.resume_checks import FirstInputs, Rates, rates
from tailopt.distributed.rng_state import restore_rng_states, rng_states
from tailopt.distributed.shared_state import restore
from tailopt.loggers.protocol import RunStart, begin, end, run_name
from tailopt.records.run_config import as_stored, in_sections, storable
from tailopt.rounds.clipping_counts import check_statistics
from tailopt.rounds.round import DivergedState

NO_RUN_FOLDER = "There is no run folder, so the run begins again: give NestedOptimizer run=... and resume=True."


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """What a run of real nodes writes.

    Args:
        folder: the run folder, or None.
        resume: whether the run continues from its last checkpoint.
        checkpoint_every: rounds between checkpoints; None where only the user writes them.
        keep: how many checkpoints.
        extra: what this node's checkpoints hold besides.
        describe: what the configuration contains besides.
        statistics: whether the history has what local steps clip; "histograms": also by magnitude.
        loggers: told of the run and of every row of its history.
    """

    folder: str | os.PathLike[str] | None
    resume: bool
    checkpoint_every: int | None
    keep: int
    extra: Callable[[], Mapping[str, Any]] | None
    describe: Mapping[str, Any]
    statistics: bool | str
    loggers: Sequence[Callable[[dict[str, Any]], None]]

    def __post_init__(self) -> None:
        check_counts(checkpoint_every=1 if self.checkpoint_every is None else self.checkpoint_every, keep=self.keep)
        check_flags(resume=self.resume)
        check_statistics(self.statistics)
        check_function("extra", self.extra, "a function of no arguments that returns a mapping, or None")
        object.__setattr__(self, "loggers", checked_loggers(self.loggers))
        if self.resume and self.folder is None:
            raise ValueError("Invalid resume: there is no run folder to go on from. Give it as `run`.")


class NodeRecords:
    """The run folder, as this node uses it.

    Args:
        options: where and how often to write.
        node: whose weights are written.
        local_round: its inner optimizer.
        guard: whether weights that are not finite end the run before they are written.

    Attributes:
        steps_before_round: local steps of every node, over all completed rounds.
        history: a row per round.
        resumed: where the run continued, or None.
    """

    def __init__(self, options: RecordOptions, node: Node, local_round: LocalRound, guard: bool) -> None:
        self.options, self._node, self._local_round = options, node, local_round
        self._config: dict[str, Any] = {}
        self._end_loggers = functools.partial(end, options.loggers)
        self.steps_before_round = [0] * node.nodes
        self.history: list[dict[str, Any]] = []
        self.resumed: Resumed | None = None
        self.writers = node.nodes  # that wrote the checkpoint from which this run continued
        # Until `allow_extra()` is called, checkpoints store this value instead of calling the user's `extra()`, because
        # the user's program may not have restored its state yet. Afterwards it is None.
        self._resumed_extra: dict[str, Any] | None = {}
        self._rates: Rates | None = None
        self._inputs: FirstInputs | None = None
        self._saved_input_digests: list[int] = []
        self._coordinator: CheckpointCoordinator | None = None
        if options.folder is not None:
            ranks = AllRanks(node.exchange.transport, node.exchange.rank_transport)
            self._coordinator = CheckpointCoordinator(ranks, Path(options.folder), options.keep, guard)

    @property
    def last_checkpoint_sentence(self) -> Callable[[], str]:
        """A function that returns a sentence about where the run can go on from. It keeps no folder open."""
        if self._coordinator is None:
            return lambda: NO_RUN_FOLDER
        known = weakref.ref(self._coordinator)
        return lambda: now.last_checkpoint_sentence() if (now := known()) is not None else ""

    @property
    def coordinator(self) -> CheckpointCoordinator | None:
        """What writes together with the other nodes; None where there is no run folder."""
        return self._coordinator

    def open(self, config: Mapping[str, Any]) -> None:
        """Open the run folder on all nodes, where there is one."""
        self._config = in_sections({**config, **self.options.describe})
        if self._coordinator is not None:
            self._coordinator.open(self._config, self.options.resume)

    def resume_or_start(self) -> bool:
        """Continue from the last checkpoint, or write the first; returns whether this is in the middle of a round."""
        if self._coordinator is None:
            return False
        newest = self._coordinator.resume(self._node) if self.options.resume else None
        if newest is None:
            self.save(0)
            return False
        snapshot, path = newest
        nodes, step, self.writers = self._node.nodes, snapshot.step or 0, int(snapshot.meta["writers"])
        saved = restore(snapshot, self._node)
        self._node.restart()
        self.steps_before_round = [*snapshot.meta["taken"], *[0] * nodes][:nodes]
        self.history = self._coordinator.history(self._node.round)
        if saved is not None:
            self._load_local(saved, step)
        extra = saved["extra"] if saved is not None else {}
        self._resumed_extra = dict(extra)
        if self._node.round or step:
            self.resumed = Resumed(self._node.round, step, extra, self.writers, path)
        return step > 0

    def begin_loggers(self) -> None:
        """Tell loggers that the run begins, or goes on after a resume; the end of the process ends them too."""
        node, folder = self._node, None if self.options.folder is None else Path(self.options.folder)
        algorithm = self._config["algorithm"]
        name = run_name(folder, str(algorithm.get("name", algorithm.get("inner"))))
        rank = AllRanks(node.exchange.transport, node.exchange.rank_transport).number
        config = as_stored(storable(self._config))
        run = RunStart(name=name, config=config, round=node.round, folder=folder, node=rank)
        begin(self.options.loggers, run)
        if self.options.loggers:
            atexit.register(self._end_loggers)

    def tell(self, row: dict[str, Any]) -> None:
        """Give a row of the history to the loggers."""
        for logger in self.options.loggers:
            logger(row)

    def watch_inputs(self, model: torch.nn.Module | None, in_the_middle: bool) -> None:
        """Compare the first inputs of this node after a resume with those of the run's beginning."""
        if model is not None and self._coordinator is not None:
            self._inputs = FirstInputs(model, self._saved_input_digests, self.resumed is not None, in_the_middle)

    def allow_extra(self) -> None:
        """Let checkpoints call the user's `extra` from now on: the program that it reads continues from here."""
        self._resumed_extra = None

    def watch_first_batch(self) -> None:
        """Look at the first inputs of the round that begins."""
        if self._inputs is not None:
            self._inputs.begin()

    def warn_if_data_restart(self, t: int) -> None:
        """Read what was looked at in round t, and warn where the data start again."""
        if self._inputs is not None:
            self._inputs.end(t)

    def warn_if_rates_not_restored(self) -> None:
        """Warn where learning rates after a resume are those of a new run."""
        if self._rates is not None:
            self._rates.check(self._local_round.optimizer)

    def record(self, row: dict[str, Any], report: ExchangeReport, finished: bool) -> None:
        """Add a row to the history of the run folder, and write a checkpoint where one is due."""
        if self._coordinator is not None:
            self._coordinator.record(row, report)
            every = self.options.checkpoint_every
            if finished or (every is not None and self._node.round % every == 0):
                self.save(0)
        if finished:
            atexit.unregister(self._end_loggers)
            self._end_loggers()

    def log(self, text: str) -> None:
        """Write a line to the log of the run folder."""
        if self._coordinator is not None:
            self._coordinator.log(text)

    def save(self, step: int, extra: Mapping[str, Any] | None = None) -> bool:
        """Write a checkpoint with all nodes, `step` local steps into the next round; returns whether it was written."""
        assert self._coordinator is not None
        return self._coordinator.save(self._node, step, lambda: self._saved_local(step, extra), self.steps_before_round)

    def _saved_local(self, step: int, extra: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return what a checkpoint holds of this node alone; in the middle of a round that is more."""
        node = self._node
        if extra is None:
            extra = self._resumed_extra
        if extra is None:
            extra = self.options.extra() if self.options.extra is not None else {}
        saved = {
            **self._local_round.saved_optimizer(in_the_middle=step > 0),
            "random": rng_states(node.device),
            "extra": dict(extra),
            "first_inputs": self._inputs.first if self._inputs is not None else self._saved_input_digests,
        }
        if node.diverged_state is not None:
            # the weights from which a diverged node continues; the global ones are in the shared part
            saved["own"] = {"weights": node.diverged_state.weights, "buffers": node.diverged_state.buffers}
        if step:
            saved |= self._local_round.saved_steps()
            saved["weights"] = dict(zip(node.exchange.names, node.local_tensors(), strict=True))
            saved["buffers"] = dict(node.buffers.tensors()) if node.buffers else {}
            saved["loaded"] = node.exchange.loaded_digests
        return saved

    @torch.no_grad()
    def _load_local(self, saved: Mapping[str, Any], step: int) -> None:
        node, optimizer = self._node, self._local_round.optimizer
        rates_of_a_new_run = rates(optimizer)
        self._local_round.load_saved(saved, in_the_middle=step > 0)
        self._rates = Rates(rates_of_a_new_run, rates(optimizer))
        self._saved_input_digests = list(saved.get("first_inputs", []))  # older checkpoints lack it
        node.diverged_state = DivergedState(**saved["own"]) if "own" in saved else None
        restore_rng_states(saved["random"], node.device)
        if step:
            if "loaded" in saved:  # older checkpoints lack it
                node.exchange.restore_loaded_digests(saved["loaded"])
            for name, p in zip(node.exchange.names, node.local_tensors(), strict=True):
                p.copy_(saved["weights"][name])
            if node.buffers:
                node.buffers.load(saved["buffers"])
