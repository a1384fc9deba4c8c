"""Trials: what one point did with one seed, and the folder that keeps them.

    sweep.json      what decides the trials, the route, and how many ran side by side; the first line is a digest
    trials.jsonl    a line for every trial, in the JSON of `records.history`, each with a digest of its own
    lock.json       the process that writes

All trials of a batch are written at once, and each line says how many belong to its batch. What a kill leaves of a
batch is cut off when the sweep is resumed, and the whole batch runs again: no trial is lost, and none is there twice.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tailopt.records import disk, history
from tailopt.records.checked_json import DamagedRecord, read_verified, with_digest
from tailopt.records.environment import environment
from tailopt.records.identity import new_id
from tailopt.records.lock import LOCK, Lock
from tailopt.records.run_config import by_dotted_name, describe_difference, difference

SWEEP, TRIALS = "sweep.json", "trials.jsonl"
FORMAT = 1
_CHECK = b', "check": "'


@dataclass(frozen=True)
class Rung:
    """What was measured after a round: the mean loss of its local steps, and the metrics."""

    round: int
    loss: float
    metrics: Mapping[str, float]

    def value(self, metric: str) -> float:
        """Return the metric that settings are chosen by."""
        return self.loss if metric == "loss" and metric not in self.metrics else self.metrics[metric]


@dataclass(frozen=True)
class Trial:
    """One point with one seed.

    Attributes:
        number: of the point.
        split: "tuning" or "report".
        rungs: what was measured, round by round; the last one is the end, unless the trial ended early.
        ended: the reason why it ended early; empty if it did not.
        route: how it was run: "vmap", "sequential", ...
    """

    number: int
    seed: int
    split: str
    settings: Mapping[str, Any]
    rungs: tuple[Rung, ...]
    ended: str
    route: str

    def value(self, metric: str) -> float:
        """Return the metric at the last rung; NaN where nothing was measured."""
        return self.rungs[-1].value(metric) if self.rungs else math.nan

    @property
    def halved(self) -> bool:
        """Whether neighbours were better; a trial that ended for another reason had diverged."""
        return self.ended.startswith("halving")

    def row(self) -> dict[str, Any]:
        """Return the trial as plain values."""
        return {
            "trial": self.number,
            "seed": self.seed,
            "split": self.split,
            "settings": dict(self.settings),
            "rungs": [{"round": r.round, "loss": r.loss, "metrics": dict(r.metrics)} for r in self.rungs],
            "ended": self.ended,
            "route": self.route,
        }

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Trial:
        """Return the trial of a row."""
        rungs = tuple(Rung(r["round"], r["loss"], r["metrics"]) for r in row["rungs"])
        return cls(row["trial"], row["seed"], row["split"], row["settings"], rungs, row["ended"], row["route"])


def batch_lines(trials: Sequence[Trial]) -> bytes:
    """Return the lines of a batch of trials."""
    lines = []
    for place, trial in enumerate(trials):
        text = history.line({**trial.row(), "place": place, "of": len(trials)})[:-2]  # without "}\n"
        lines.append(text + _CHECK + _digest(text) + b'"}\n')
    return b"".join(lines)


def parse_line(line: bytes) -> dict[str, Any]:
    """Return the row of a line; ValueError if it does not fit its digest."""
    text, found, check = line.rstrip(b"\n").rpartition(_CHECK)
    if not found or check != _digest(text) + b'"}':
        raise ValueError("does not fit its digest")
    row: dict[str, Any] = history.decode(json.loads(text + b"}"))
    return row


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest()[:16].encode()


class TrialFolder:
    """The folder of a sweep, which this process writes.

    Args:
        config: what decides the trials; a folder with another one is refused.
        resume: go on with the trials that the folder has.
    """

    def __init__(self, folder: str | os.PathLike[str], config: Mapping[str, Any], resume: bool) -> None:
        self.path = Path(folder)
        self._file = self.path / TRIALS
        config = json.loads(json.dumps(history.encode(dict(config), "sweep")))
        if (self.path / SWEEP).exists() and not resume:
            raise FileExistsError(f"{self.path} holds a sweep. Pass resume=True to go on with it, or another folder.")
        _refuse_other_contents(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = Lock(self.path, new_id())
        try:
            self._head = self._checked_head(config)
            self.trials = self._read()
        except BaseException:
            self._lock.release()
            raise

    @property
    def route(self) -> dict[str, str] | None:
        """The name of the route and its reason; None before the first batch."""
        route: dict[str, str] | None = self._head["route"]
        return route

    @property
    def batch(self) -> int | None:
        """How many points are trained at a time; None before that is known, or where all of them were."""
        batch: int | None = self._head["batch"]
        return batch

    @property
    def compared(self) -> int | None:
        """How many points halving compares with each other; None before that is known, or without halving."""
        compared: int | None = self._head["compared"]
        return compared

    def set_compared(self, count: int) -> None:
        """Record how many points halving compares: a sweep that was stopped runs the others in the same groups."""
        self._replace_head(compared=count)

    def set_route(self, name: str, reason: str, batch: int | None) -> None:
        """Record how trials are run; a resumed sweep runs them in the same way. batch: None where all were one."""
        self._replace_head(route={"name": name, "reason": reason}, batch=batch)

    def _replace_head(self, **changes: Any) -> None:
        head = {**self._head, **changes}
        if head != self._head:
            self._head = head
            disk.replace(self.path / SWEEP, with_digest(head))

    def append(self, trials: Sequence[Trial]) -> None:
        """Record a batch of trials; once this returns, a kill or a power cut does not lose them."""
        self._lock.check()
        history.append_bytes(self._file, batch_lines(trials))
        disk.sync(self._file)
        self.trials += trials

    def write_page(self, name: str, text: str) -> None:
        """Write a page about the sweep."""
        disk.replace(self.path / name, text.encode())

    def close(self) -> None:
        """Let other processes write."""
        self._lock.release()

    def _checked_head(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return what sweep.json says, after its configuration was compared; write it where there is none."""
        path = self.path / SWEEP
        if not path.exists():
            if self._file.exists():
                raise DamagedRecord(f"{path} is missing, and {self._file} has trials. Bring it back from a copy.")
            head: dict[str, Any] = {
                "format": FORMAT,
                "config": config,
                "environment": environment(),
                "route": None,
                "batch": None,
                "compared": None,
            }
            disk.replace(path, with_digest(head))
            return head
        try:
            head = read_verified(path)
        except ValueError as error:
            raise DamagedRecord(f"{path} {error}. Bring it back from a copy, or begin in another folder.") from error
        head.pop("sha256")
        if head["format"] != FORMAT:
            raise ValueError(
                f"{path} has format {head['format']}, and this version of tailopt reads {FORMAT}. Use the version that "
                "wrote it, or another folder."
            )
        changed = difference(by_dotted_name(head["config"]), by_dotted_name(config))
        if changed:
            raise ValueError(
                f"{self.path} holds another sweep: {describe_difference(changed)}. Use the same, or another folder."
            )
        return head

    def _read(self) -> list[Trial]:
        """Return the trials of whole batches; what is left of others is removed from the file."""
        lines = history.complete_lines(self._file)
        torn = self._file.exists() and self._file.stat().st_size > sum(map(len, lines))
        kept: list[bytes] = []
        trials: list[Trial] = []
        damaged: list[int] = []
        known: set[tuple[int, int, str]] = set()
        start = 0
        while start < len(lines):
            rows, stop = _batch_at(lines, start)
            found = [] if rows is None else list(map(Trial.from_row, rows))
            keys = {(trial.number, trial.seed, trial.split) for trial in found}
            if rows is None or keys & known:  # as where a file was put together of two copies
                damaged.append(start + 1)
            else:
                kept += lines[start:stop]
                trials += found
                known |= keys
            start = stop
        if damaged and damaged[-1] <= len(lines) - 1 and not torn:
            warnings.warn(
                f"{self._file}, line {damaged[0]}: what is left of a batch of trials, damaged, or there twice. It is "
                "left out, and what is missing runs again.",
                stacklevel=2,
            )
        if damaged or torn:
            disk.replace(self._file, b"".join(kept))
        return trials


def _refuse_other_contents(folder: Path) -> None:
    """Raise if a folder without a sweep holds anything else; what a kill left of a new sweep does not count."""
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file; need a folder. Pass another path.")
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    others = {name for name in names if name not in (LOCK, TRIALS) and not name.startswith(".")}
    if others and SWEEP not in names:
        raise FileExistsError(
            f"{folder} holds other things than a sweep: {history.quoted_names(others)}. Pass another folder."
        )


def _batch_at(lines: Sequence[bytes], start: int) -> tuple[list[dict[str, Any]] | None, int]:
    """Return the rows of the batch that begins at a line, or None if they are not whole; and where the next begins."""
    rows: list[dict[str, Any]] = []
    for number in range(start, len(lines)):
        try:
            row = parse_line(lines[number])
        except (ValueError, KeyError, TypeError):
            return None, max(number + 1, start + 1)
        if row["place"] != len(rows):  # the next batch began before this one was whole
            return None, number if number > start else start + 1
        rows.append(row)
        if len(rows) == row["of"]:
            return rows, number + 1
    return None, len(lines)
