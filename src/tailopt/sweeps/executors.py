"""Where batches of points are trained: in this process, in other processes, or as tasks of Ray.

All of them train the same batches by the same code, so that batches of the same points give the same bits everywhere
(with as many threads of torch). This process alone writes the record. A worker that is killed takes only unrecorded
batches with it, and these run again.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol
from uuid import uuid4

import torch

from tailopt.arguments import check_choice, whole_number
from tailopt.optional import require
from tailopt.sweeps.training import Job, NumberedPoint, Outcome, Trainer

EXECUTORS = ("local", "processes", "ray")
MOST_FAILURES = 3  # in a row, without a batch between them

_trainer: Trainer | None = None  # of a worker process


class Executor(Protocol):
    """Trains points in batches."""

    workers: int

    def outcomes(self, points: Sequence[NumberedPoint], batch: int, at_once: int) -> Iterator[Outcome]:
        """Train points in batches, so many at once; yields what each batch leaves, as it is done."""

    def close(self) -> None:
        """Let go of processes."""


def make_executor(name: str, trainer: Trainer, workers: int | None) -> Executor:
    """Return an executor by its name.

    workers: other processes; by default as many as the processors hold with this process's number of threads each.
    """
    check_choice("executor", name, EXECUTORS)
    if workers is None:
        workers = max(1, (os.cpu_count() or 1) // torch.get_num_threads())
    whole_number("workers", workers, low=1)
    if name == "local":
        return Local(trainer)
    return (Processes if name == "processes" else Ray)(trainer.job, workers)


class Local:
    """This process: one batch after another."""

    workers = 1

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def outcomes(self, points: Sequence[NumberedPoint], batch: int, at_once: int) -> Iterator[Outcome]:
        """Train one batch after another; where the memory held fewer points, later batches are smaller as well."""
        left = list(points)
        while left:
            outcome = self._trainer.train(left[:batch], at_once)
            left = left[batch:]
            batch = min(batch, outcome.batch)
            yield outcome

    def close(self) -> None:
        """Do nothing."""


class Processes:
    """Other processes of this machine, started by spawn."""

    def __init__(self, job: Job, workers: int) -> None:
        self.workers = workers
        check_can_be_sent(job)
        self._arguments = (job, torch.get_num_threads())
        self._pool: ProcessPoolExecutor | None = None

    def outcomes(self, points: Sequence[NumberedPoint], batch: int, at_once: int) -> Iterator[Outcome]:
        """Train batches side by side in the workers; those of a killed worker are trained again."""
        left = batches_of(points, batch)
        failures = 0
        while left:
            running, left = self._submit(left, at_once)
            while running:
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    part = running.pop(future)
                    try:
                        outcome = future.result()
                    except BrokenProcessPool:
                        left.append(part)
                        continue
                    failures = 0
                    yield outcome
            if left:
                failures += 1
                self.close()
                if failures == MOST_FAILURES:
                    raise RuntimeError(worker_died(failures))
                left.sort(key=lambda part: part[0][0])

    def _submit(
        self, parts: list[list[NumberedPoint]], at_once: int
    ) -> tuple[dict[Future[Outcome], list[NumberedPoint]], list[list[NumberedPoint]]]:
        """Give batches to the workers; returns them, and those that came too late, because a worker was killed."""
        running: dict[Future[Outcome], list[NumberedPoint]] = {}
        for position, part in enumerate(parts):
            try:
                running[self._started().submit(_train_in_worker, part, at_once)] = part
            except BrokenProcessPool:
                return running, parts[position:]
        return running, []

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")  # threads of torch do not survive a fork
            self._pool = ProcessPoolExecutor(self.workers, context, _start_worker, self._arguments)
        return self._pool


class Ray:
    """Tasks of Ray, on this machine or on the cluster that `ray.init` has connected to."""

    def __init__(self, job: Job, workers: int) -> None:
        self.workers = workers
        self._ray: Any = require("ray", 'executor="ray" needs Ray, the extra [ray]', extra="ray")
        threads = torch.get_num_threads()
        if not self._ray.is_initialized():
            self._ray.init(num_cpus=workers * threads, include_dashboard=False, log_to_driver=False)
        self._shared = (uuid4().hex, self._ray.put(job), threads)
        # Ray would run a task of a killed worker again by itself; here it is counted, so that it ends some time
        self._train = self._ray.remote(num_cpus=threads, max_retries=0)(_train_in_ray)

    def outcomes(self, points: Sequence[NumberedPoint], batch: int, at_once: int) -> Iterator[Outcome]:
        """Train batches as tasks, as many at a time as there are workers; those of a killed one are trained again."""
        left, running, failures = batches_of(points, batch), dict[Any, list[NumberedPoint]](), 0
        while left or running:
            while left and len(running) < self.workers:
                part = left.pop(0)
                running[self._train.remote(*self._shared, part, at_once)] = part
            (reference, *_), _ = self._ray.wait(list(running), num_returns=1)
            part = running.pop(reference)
            try:
                outcome = self._ray.get(reference)
            except self._ray.exceptions.RayTaskError as error:
                raise error.cause if getattr(error, "cause", None) is not None else error from None
            except self._ray.exceptions.RayError:  # the worker, or its machine, is gone
                failures += 1
                if failures == MOST_FAILURES:
                    raise RuntimeError(worker_died(failures)) from None
                left.insert(0, part)
                continue
            failures = 0
            yield outcome

    def close(self) -> None:
        """Leave Ray running: it may be the user's."""


def batches_of(points: Sequence[NumberedPoint], batch: int) -> list[list[NumberedPoint]]:
    """Cut points into batches.

    Examples:
        >>> [len(part) for part in batches_of([(i, {}) for i in range(5)], 2)]
        [2, 2, 1]
    """
    return [list(points[start : start + batch]) for start in range(0, len(points), batch)]


def check_can_be_sent(job: Job) -> None:
    """Refuse a job that other processes cannot be sent. Ray takes any function."""
    try:
        ForkingPickler.dumps(job)
    except Exception as error:
        raise ValueError(
            'Invalid executor: "processes" sends the model, the loss and the data to other processes, and they '
            f"cannot be pickled ({error}). Define functions by `def` at the top of a module, or take "
            'executor="local".'
        ) from error


def worker_died(times: int) -> str:
    """Return the message for workers that never finish a batch."""
    return (
        f"Worker processes ended {times} times before they finished a batch of trials: they were killed, perhaps for "
        "memory, or the script that calls tailopt.sweep starts it again in every worker. Give a smaller batch or "
        "fewer workers, and put the call under `if __name__ == '__main__':`."
    )


def _start_worker(job: Job, threads: int) -> None:
    global _trainer
    threading.Thread(target=_end_with_parent, name="tailopt parent", daemon=True).start()
    torch.set_num_threads(threads)
    _trainer = Trainer(job)


def _end_with_parent() -> None:
    """End this process when the one that started it is gone: a killed parent cannot end its workers."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _train_in_worker(points: Sequence[NumberedPoint], at_once: int) -> Outcome:
    assert _trainer is not None
    return _trainer.train(points, at_once)


_trainers: dict[str, Trainer] = {}  # of a worker of Ray, which may serve several sweeps; the last one


def _train_in_ray(sweep: str, job: Job, threads: int, points: Sequence[NumberedPoint], at_once: int) -> Outcome:
    if sweep not in _trainers:
        torch.set_num_threads(threads)
        _trainers.clear()
        _trainers[sweep] = Trainer(job)
    return _trainers[sweep].train(points, at_once)
