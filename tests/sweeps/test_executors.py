"""Batches of the same points give the same bits in other processes, also where one of these is killed."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import tailopt
from tailopt.sweeps import executors
from tailopt.sweeps.problem import problems
from tailopt.sweeps.training import Job, Trainer
from tailopt.tasks.synthetic import Synthetic

ARGUMENTS = {
    "space": {"ilr": [0.01, 0.05, 0.1, 0.2, 0.3]}, "seeds": 1, "report_seeds": 1, "rounds": 3, "batch": 2,
    "progress": False,
}  # fmt: skip


@dataclass(frozen=True)
class Deadly(Synthetic):
    """A task whose first evaluation outside of this process kills the process."""

    marker: str = ""
    parent: int = 0

    def evaluate(self, model: torch.nn.Module, seed: int) -> Mapping[str, float]:
        if self.parent and os.getpid() != self.parent and not Path(self.marker).exists():
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().evaluate(model, seed)


def deadly(folder: Path) -> Deadly:
    return Deadly(samples=60, dimension=4, marker=str(folder / "killed"), parent=os.getpid())


def same(executor: str, task: Deadly, workers: int) -> None:
    here = tailopt.sweep(task, "avg-sgd", **ARGUMENTS)
    there = tailopt.sweep(task, "avg-sgd", executor=executor, workers=workers, **ARGUMENTS)
    assert [repr(t) for t in here.trials] == [repr(t) for t in there.trials]
    assert len(there.trials) == 5 and here.best == there.best
    assert Path(task.marker).exists(), "a worker was killed"


@pytest.mark.slow
def test_processes_give_the_same_bits_after_a_kill(tmp_path: Path) -> None:
    same("processes", deadly(tmp_path), workers=1)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason='Ray is not installed: pip install "tailopt-torch[ray]"'
)
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_ray_gives_the_same_bits_after_a_kill(tmp_path: Path) -> None:
    import ray

    try:
        same("ray", deadly(tmp_path), workers=2)
    finally:
        ray.shutdown()


def test_a_missing_ray_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r'executor="ray" needs Ray, the extra \[ray\]: .*install'):
        tailopt.sweep("gaussian", "avg-sgd", executor="ray", **ARGUMENTS)


def test_what_cannot_be_sent_is_refused_before_anything_runs() -> None:
    options = {"rounds": 2, "local_steps": 1, "nodes": 2, "batches": lambda node, round, step, generator: None}
    with pytest.raises(ValueError, match=r"cannot be pickled .*lambda.*at the top of a module"):
        tailopt.sweep(
            torch.nn.Linear(2, 1), "avg-sgd", space={"ilr": [0.1]}, executor="processes", loss=max, progress=False,
            **options,
        )  # fmt: skip


def test_workers_that_never_finish_end_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def submit(self, *_: object) -> object:
            future: Future = Future()
            future.set_exception(BrokenProcessPool())
            return future

    tuning, _ = problems(Synthetic(samples=60, dimension=4), dict.fromkeys(KEYS))
    pool = executors.Processes(Trainer(Job(tuning, (0,), "avg-sgd", None, "auto")).job, 1)
    monkeypatch.setattr(pool, "_started", Broken)
    with pytest.raises(RuntimeError, match="ended 3 times .*__main__"):
        list(pool.outcomes([(0, {"ilr": 0.1})], 1, 1))


KEYS = (
    "loss", "data", "batches", "nodes", "rounds", "local_steps", "local_epochs", "batch_size", "weights",
    "participation", "participants", "sampling", "proximal", "projection", "schedules", "evaluate", "test",
    "metric", "lower_is_better", "device", "precision",
)  # fmt: skip
