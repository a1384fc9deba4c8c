"""A run folder: what was asked, on what machine, what came of it.

    run/  config.toml           the settings; its presence makes the folder a run
          run.json              the run's id, and config.toml as it was written; see `identity.py`
          config-changes.jsonl  changes of config.toml that were accepted, if there were any
          environment.json      versions, processor, devices
          history.jsonl         one row a round: equal runs have equal files
          history.seal.json     the digest of these rows; see `ledger.py`
          times.jsonl           the seconds of each round, apart for that reason
          log.txt               words, with the time of day
          lock.json             who writes here now; see `lock.py`
          checkpoints/          see `checkpoints.py`

One process writes; any number may read meanwhile. What a kill can interrupt is written so that it can be continued.
Settings, history and checkpoints are checked whenever they are read. Nothing depends on the environment, the times and
the log, and they are in no digest: where one of them cannot be read a warning says so, and nothing else happens.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import warnings
from collections.abc import Collection, Mapping
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tailopt.records import checkpoints, disk, history, identity
from tailopt.records.identity import CHANGES, CONFIG, RUN, SEAL, Identity, needed
from tailopt.records.ledger import Chain, Ledger, Stamp
from tailopt.records.lock import LOCK, Lock
from tailopt.records.seals import DamagedRecord
from tailopt.records.shards import digest

ENVIRONMENT, HISTORY, TIMES, LOG = "environment.json", "history.jsonl", "times.jsonl", "log.txt"
# What `create` writes before config.toml: alone in a folder these are what a kill left of it.
BEGUN = (ENVIRONMENT, SEAL, RUN, LOCK)
_HIDDEN = tuple(f".{name}." for name in (*BEGUN, CONFIG))


class Run:
    """One run folder: made by `create`, found again by `open`.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "first"
        >>> run = Run.create(path, {"algorithm": "bi2clip", "rounds": 2}, environment())
        >>> run.append({"round": 1, "loss": 0.5}, {"inner": 0.01})
        >>> run.append({"round": 2, "loss": 0.25}, {"inner": 0.01})
        >>> run.rewind(1)
        >>> Run.open(path).history()
        [{'loss': 0.5, 'round': 1}]
    """

    path: Path
    config: dict[str, Any]
    identity: Identity | None  # None in a folder from before there were ids, until it is resumed

    def __init__(self, path: Path, config: dict[str, Any], digest: str, known: Identity | None) -> None:
        self.path, self.config, self.identity = path, config, known
        self.lock: Lock | None = None  # None for readers
        self._whole = False  # whether times.jsonl is known to end with a whole line
        self._digest = digest  # of config.toml: an edit while the run goes on is none of this process's
        self.ledger = Ledger(path / HISTORY, known.id, known.since) if known else Ledger(path / HISTORY, None)

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        config: Mapping[str, Any],
        environment: Mapping[str, Any],
        id: str | None = None,
    ) -> Run:
        """Make the folder of a new run; one that holds anything already is refused.

        Args:
            path: the folder; it and its parents are made where they are missing.
            config: settings, as TOML can hold them: strings, numbers, booleans, lists (tuples become lists), dicts.
                TOML has no None: such a setting is left out.
            environment: plain values, such as those of `environment()`.
            id: of the run; by default a random one.
        """
        folder = Path(path)
        _refuse_if_used(folder)
        text = _toml(config)
        facts = json.dumps(history.encode(dict(environment), "environment"), indent=2, sort_keys=True, allow_nan=False)
        known = identity.made(text, id or identity.fresh_id())
        folder.mkdir(parents=True, exist_ok=True)
        disk.replace(folder / ENVIRONMENT, facts.encode() + b"\n")
        Ledger(folder / HISTORY, known.id).begin()
        identity.write(folder, known)
        disk.replace(folder / CONFIG, text.encode())  # last: from here on it is a run
        return cls.open(folder)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Run:
        """The run in a folder. Nothing is written, so that a running one may be looked at.

        Raises:
            DamagedRecord: config.toml or run.json is not what was written; a run.json that the manifests can tell is
                warned of.
        """
        folder = Path(path)
        if not is_run(folder):
            there = history.known(p.name for p in folder.iterdir()) if folder.is_dir() else "no such folder"
            raise FileNotFoundError(
                f"{folder} is not a run folder: it has no {CONFIG} ({there}). Pass the folder that was given as `run`."
            )
        data = disk.read(folder / CONFIG)
        known = identity.of(folder, data)
        if known is None:
            text = identity.decoded(folder / CONFIG, data)
        else:
            text = identity.check_settings(folder, known, data)
        return cls(folder, identity.settings(folder / CONFIG, text), identity.digest(data), known)

    @cached_property
    def environment(self) -> dict[str, Any]:
        """On what machine the run was begun; empty, with a warning, where that cannot be read."""
        file = self.path / ENVIRONMENT
        try:
            facts = history.decode(json.loads(disk.read(file)))
            if type(facts) is not dict:
                raise TypeError(f"{facts!r:.60} is no table")
            return facts
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            warnings.warn(
                f"{file} cannot be read ({type(error).__name__}: {error}). Nothing depends on it; bring it back from a "
                "copy to know where the run was begun.",
                UserWarning,
                stacklevel=3,
            )
            return {}

    @property
    def stamp(self) -> Stamp:
        """What a checkpoint says of this run and of what has been written."""
        if self.identity is None:
            self._adopt()
        assert self.identity is not None
        return Stamp(self.identity.id, self._digest, self.ledger.chain)

    def check(self, snapshot: checkpoints.Snapshot, path: Path) -> None:
        """Refuse a checkpoint of another run, and a history that is not the one before the checkpoint."""
        if self.identity is not None:
            identity.check_stamp(self.path, self.identity, path, snapshot.stamp)
        self.ledger.check(snapshot.stamp and snapshot.stamp.history)

    def hold(self) -> None:
        """Make this process the writer of the folder, if it is not; Locked where there is another."""
        if self.lock is None:
            self.lock = Lock(self.path, self._id())

    def check_lock(self) -> None:
        """Raise LostLock where another process took the folder over: before anything is written."""
        if self.lock is not None:
            self.lock.check()

    def close(self) -> None:
        """Let other processes write here."""
        if self.lock is not None:
            self.lock.release()
            self.lock = None

    def _id(self) -> str:
        return "" if self.identity is None else self.identity.id

    def refuse_rows_alone(self) -> None:
        """Raise where rounds were done and no checkpoint is left of them: to begin again is for the user to decide."""
        if rows := len(self.history()):
            raise FileNotFoundError(
                f"{self.path / checkpoints.FOLDER} holds no checkpoint, and {self.path / HISTORY} has {rows} rows. "
                "Bring the checkpoints back from a copy, or begin again in another folder."
            )

    def append(self, row: Mapping[str, Any], seconds: Mapping[str, Any]) -> None:
        """Add the row of one round to the history, and its times to theirs.

        The lines are with the system when this returns (a kill of the process loses nothing), and on the disk after
        `sync`.

        Args:
            row: plain values, with `round` greater than that of the row before; see `history.encode`.
            seconds: what took how long, under any names but `round`.
        """
        number = row.get("round")
        if type(number) is not int:
            raise ValueError(f"Invalid row: got round={number!r}; need an int. Say which round the row is about.")
        if "round" in seconds:
            raise ValueError(f"Invalid seconds: got the key 'round' ({seconds['round']!r}); the row has it. Rename it.")
        last = self.last()
        if number <= last:
            raise ValueError(
                f"Invalid row: got round={number}; need more than {last}, the last round in {self.path}. "
                f"Call rewind({number - 1}) first to run it again."
            )
        lines = history.line(row), history.line({**seconds, "round": number})  # both are sound before one is written
        self.check_lock()
        self.ledger.append(lines[0], number)
        if not self._whole:
            history.mend(self.path / TIMES)
        self._whole = False  # where the disk is full, a part of the line may be there
        history.write(self.path / TIMES, lines[1])
        self._whole = True

    def last(self) -> int:
        """The round of the last row; -1 where there is none. For the process that writes: torn lines are cut off."""
        if self.identity is None:
            self._adopt()
        return self.ledger.chain.round

    def history(self) -> list[dict[str, Any]]:
        """All rows, as they were appended, checked; tuples were refused, so they are equal to what was given."""
        return self.ledger.read()

    def times(self) -> list[dict[str, Any]]:
        """The seconds of every round; a kill may have cost the last one. Lines that cannot be read are left out."""
        found = []
        for number, text in enumerate(history.whole_lines(self.path / TIMES), start=1):
            try:
                found += history.parsed(self.path / TIMES, [text], first=number)
            except ValueError as error:
                warnings.warn(f"{error} It is passed over.", UserWarning, stacklevel=2)
        return found

    def rewind(self, round: int, known: Chain | None = None) -> None:
        """Drop what came after `round`, to go on from an older checkpoint.

        Each file changes at once. A kill between the two leaves times of rounds that the history has not; the same
        call mends that. A folder from before there were ids becomes a run with one here.

        known: what the checkpoint says of the history up to it.
        """
        self.ledger.rewind(round, known)
        times = [row for row in self.times() if row["round"] <= round]
        after = b"".join(map(history.line, times))
        if (self.path / TIMES).is_file() and disk.read(self.path / TIMES) != after:
            disk.replace(self.path / TIMES, after)
        if self.identity is None:
            self._adopt()
        else:
            identity.mend(self.path, self.identity)

    def _adopt(self) -> None:
        """Give a folder from before there were ids what it lacks, and say what nobody could check."""
        data = disk.read(self.path / CONFIG)
        rows = self.ledger.chain
        text = identity.decoded(self.path / CONFIG, data)
        self.identity = identity.made(text, identity.fresh_id(), identity.seals(self.path), rows)
        identity.write(self.path, self.identity)
        self.ledger = Ledger(self.path / HISTORY, self.identity.id, rows)
        self.ledger.rewind(rows.round, rows)  # writes the seal
        said = (
            f"{self.path} was begun by an older version, without a run id, a digest of {CONFIG} and one of {HISTORY}: "
            f"whether the settings and the first {rows.rows} rows are those of the run could not be checked. From here "
            "on they are."
        )
        warnings.warn(said, UserWarning, stacklevel=4)
        self.log(said)

    def log(self, text: str) -> None:
        """Add a line of words, with the time of day (UTC)."""
        now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
        history.write(self.path / LOG, f"{now}  {text}\n".encode())

    def sync(self) -> None:
        """Wait until history and times are on the disk: before a checkpoint that follows them is written."""
        self.ledger.sync()
        if (self.path / TIMES).is_file():
            disk.sync(self.path / TIMES)
        disk.sync(self.path)


def is_run(path: str | os.PathLike[str]) -> bool:
    """Whether there is a run in a folder, to be opened."""
    return (Path(path) / CONFIG).is_file()


def opened(
    path: str | os.PathLike[str], config: Mapping[str, Any], resume: bool, free: Collection[str] = ("rounds",)
) -> Run:
    """A new run folder, or with `resume` the one that is there, if it is of the same run.

    free: settings that may be others in a resumed run; the log says which were.
    """
    folder = Path(path)
    if resume and is_run(folder):
        for name in (HISTORY, SEAL, TIMES, LOG, CHANGES):
            disk.refuse_strange(folder / name)
        id = Run.open(folder)._id()
    else:
        _refuse_if_used(folder)
        _toml(config)
        id = identity.fresh_id()
        folder.mkdir(parents=True, exist_ok=True)
    lock = Lock(folder, id)  # from here on nobody else changes anything
    try:
        if resume and is_run(folder):
            found = _same_run(folder, config, free)
        else:
            found = Run.create(folder, config, environment(), id)
    except BaseException:
        lock.release()
        raise
    found.lock = lock
    return found


def _same_run(folder: Path, config: Mapping[str, Any], free: Collection[str]) -> Run:
    """The run in a folder, if its settings are these."""
    found = Run.open(folder)
    others = []
    for key in sorted(config.keys() | found.config.keys()):
        then, now = found.config.get(key), as_stored(config.get(key))
        if then == now or (then is None and now in ({}, None)):
            continue
        if key not in free:
            raise ValueError(
                f"This run cannot be resumed with another {key}: it is {then!r} in {folder}, and {now!r} here. "
                "Use the same, or another run folder."
            )
        others.append(f"{key} = {now!r}, where {CONFIG} has {then!r}")
    found.environment  # noqa: B018  # warns where it is damaged
    if others:
        found.log(f"resumed with {'; '.join(others)}")
    return found


def accept_config(path: str | os.PathLike[str]) -> list[list[Any]] | None:
    """Accept a change that was made to config.toml by hand: the run goes on with it from its last checkpoint.

    Returns [setting, before, after] for each setting that is another one; None where nothing had changed.
    """
    folder = Path(path)
    if not is_run(folder):
        Run.open(folder)  # which says what is wrong
    lock = Lock(folder, "")
    try:
        last = checkpoints.latest(folder)
        round = checkpoints.at(last)[0] if last is not None else 0
        difference = identity.accept(folder, round)
        if difference is not None:
            Run.open(folder).log(f"accepted after round {round} that in {CONFIG} {identity.told(difference)}")
        return difference
    finally:
        lock.release()


def storable(value: Any) -> Any:
    """A setting as a run folder can hold it: small tensors as lists, what is code by its name.

    Examples:
        >>> storable({"u": torch.tensor([0.5, 1.0]), "betas": (0.9, 0.99), "chooser": max})
        {'u': [0.5, 1.0], 'betas': [0.9, 0.99], 'chooser': 'function max'}
    """
    if isinstance(value, Tensor):
        if value.numel() <= 64:
            return value.tolist()
        return f"tensor of shape {tuple(value.shape)}, sha256 {digest({'value': value})[:16]}"
    if isinstance(value, Mapping):
        return {str(k): storable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [storable(v) for v in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if callable(value) and hasattr(value, "__qualname__"):
        return f"function {value.__qualname__}"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))  # an address is another one in the next process


def as_stored(value: Any) -> Any:
    """A setting as it comes back from a run folder: tuples as lists, and TOML has no None.

    Examples:
        >>> as_stored({"betas": (0.9, 0.99), "radius": None})
        {'betas': [0.9, 0.99]}
    """
    if isinstance(value, Mapping):
        return {k: as_stored(v) for k, v in value.items() if v is not None}
    return [as_stored(v) for v in value] if isinstance(value, list | tuple) else value


def environment() -> dict[str, Any]:
    """What a run depends on beside its settings: versions, processor, threads, devices.

    Examples:
        >>> sorted(environment())
        ['cuda', 'instruction_set', 'platform', 'processor', 'python', 'tailopt', 'threads', 'torch']
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        # The root imports the rooms, not they it; by now it is there.
        "tailopt": str(getattr(sys.modules.get("tailopt"), "__version__", "unknown")),
        "platform": platform.platform(),
        "processor": _processor(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "cuda": {"version": torch.version.cuda, "devices": [torch.cuda.get_device_name(i) for i in devices]}
        if devices
        else None,
    }


def _processor() -> str:
    """The processor's name as it is sold; `platform` knows it on some systems only."""
    facts = Path("/proc/cpuinfo")
    if facts.is_file():
        for text in facts.read_text(encoding="utf-8", errors="replace").splitlines():
            if text.startswith("model name"):
                return text.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _refuse_if_used(folder: Path) -> None:
    """Nothing is ever written over a run; what a kill left of `create` itself is nothing."""
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file; need a folder. Pass another path.")
    there = {p.name for p in folder.iterdir()} if folder.is_dir() else set()
    if CONFIG not in there and there & {HISTORY, checkpoints.FOLDER}:
        raise DamagedRecord(
            f"{folder / CONFIG} is missing, and {folder} holds a run. Bring it back from a copy (in {RUN} it stands as "
            '"text"), or begin in another folder.'
        )
    if there := {name for name in there if name not in BEGUN and not name.startswith(_HIDDEN)}:
        raise FileExistsError(
            f"{folder} is not empty: it holds {history.known(there)}. Pass resume=True to go on with the run in it, or "
            "another folder for a new run."
        )


def _toml(config: Mapping[str, Any]) -> str:
    """Settings as TOML."""
    return str(needed("tomli_w").dumps(_settings(dict(config), "config")))


def _settings(value: Any, path: str) -> Any:
    """Settings as TOML can hold them; what it cannot is named."""
    if type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value)
    if type(value) in (list, tuple):
        return [_settings(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict):
        if strange := [key for key in value if type(key) is not str]:
            raise TypeError(f"{path} has the key {strange[0]!r}, {history.kind(strange[0])}; keys are strings.")
        return {key: _settings(item, history.child(path, key)) for key, item in value.items() if item is not None}
    raise TypeError(
        f"{path} is {history.kind(value)}; only bool, int, float, str, lists and dicts can be written to {CONFIG}. "
        "Write its name, or leave it out."
    )
