"""A run folder: the settings of a run, where it ran, and its results.

    run/  config.toml           the settings; a folder is a run if it has this file; see `run_config.py`
          run.json              the run's id, and config.toml as it was written; see `identity.py`
          config-changes.jsonl  accepted changes of config.toml, if there were any
          environment.json      versions, processor, devices; see `environment.py`
          history.jsonl         one row per round: equal runs have equal files
          history.seal.json     the digest of these rows; see `ledger.py`
          times.jsonl           the seconds of each round by phase, see `phase_clock.py`, and on real nodes what node 0
                                sent; separate, because they differ between equal runs
          log.txt               messages, with the time of day
          lock.json             which process writes here now; see `lock.py`
          checkpoints/          see `checkpoints.py`

One process writes; any number may read meanwhile. Everything that a kill can interrupt is written so that it can be
continued. Settings, history and checkpoints are checked whenever they are read. Nothing depends on the environment, the
times and the log, and no digest covers them: if one of them cannot be read, there is a warning and no error.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Collection, Mapping
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

from tailopt.records import checkpoints, disk, history
from tailopt.records.checked_json import DamagedRecord
from tailopt.records.environment import environment
from tailopt.records.identity import (
    CHANGES,
    RUN,
    SEAL,
    Identity,
    accept_change,
    check_config,
    check_provenance,
    find_identity,
    manifests_without_provenance,
    new_id,
    new_identity,
    repair_identity,
    write_identity,
)
from tailopt.records.ledger import Chain, Ledger, Provenance
from tailopt.records.lock import LOCK, Lock
from tailopt.records.run_config import (
    CONFIG,
    as_stored,
    by_setting,
    config_digest,
    config_text,
    describe_difference,
    in_sections,
    parse_config,
    to_toml,
)

ENVIRONMENT, HISTORY, TIMES, LOG = "environment.json", "history.jsonl", "times.jsonl", "log.txt"
# What `create` writes before config.toml: alone in a folder, these files are what a kill left of it.
_WRITTEN_FIRST = (ENVIRONMENT, SEAL, RUN, LOCK)
_HIDDEN_PREFIXES = tuple(f".{name}." for name in (*_WRITTEN_FIRST, CONFIG))


class Run:
    """One run folder: `create` makes a new one, `open` reads an existing one.

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
    identity: Identity | None  # None in a folder by a version without ids, until it is resumed

    def __init__(self, path: Path, config: dict[str, Any], digest: str, identity: Identity | None) -> None:
        self.path, self.config, self.identity = path, config, identity
        self.lock: Lock | None = None  # None for readers
        self._times_are_whole = False  # whether times.jsonl is known to end with a complete line
        self._config_digest = digest  # of config.toml as this process read it: later edits do not concern it
        id, chain = (identity.id, identity.history_chain_when_id_was_given) if identity else (None, None)
        self.ledger = Ledger(path / HISTORY, id, chain)

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        config: Mapping[str, Any],
        environment: Mapping[str, Any],
        id: str | None = None,
    ) -> Run:
        """Make the folder of a new run; a folder that is not empty is refused.

        Args:
            path: the folder; it and its parents are made if they are missing.
            config: settings, as TOML can hold them: strings, numbers, booleans, lists (tuples become lists), dicts.
                TOML has no None: such a setting is left out.
            environment: plain values, such as those of `environment()`.
            id: of the run; by default a random one.
        """
        folder = Path(path)
        _refuse_if_used(folder)
        text = to_toml(config)
        facts = json.dumps(history.encode(dict(environment), "environment"), indent=2, sort_keys=True, allow_nan=False)
        identity = new_identity(text, id or new_id())
        folder.mkdir(parents=True, exist_ok=True)
        disk.replace(folder / ENVIRONMENT, facts.encode() + b"\n")
        Ledger(folder / HISTORY, identity.id).begin()
        write_identity(folder, identity)
        disk.replace(folder / CONFIG, text.encode())  # last: from here on it is a run
        return cls.open(folder)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Run:
        """Return the run in a folder. Nothing is written, so it is safe while the run goes on.

        Raises:
            DamagedRecord: config.toml or run.json differs from what was written. If the manifests have what a damaged
                run.json said, there is only a warning.
        """
        folder = Path(path)
        if not is_run(folder):
            contents = history.quoted_names(p.name for p in folder.iterdir()) if folder.is_dir() else "no such folder"
            raise FileNotFoundError(
                f"{folder} is not a run folder: it has no {CONFIG} ({contents}). Pass the folder that was given as "
                "`run`."
            )
        data = disk.read(folder / CONFIG)
        identity = find_identity(folder, data)
        if identity is None:
            text = config_text(folder / CONFIG, data)
        else:
            text = check_config(folder, identity, data)
        return cls(folder, in_sections(parse_config(folder / CONFIG, text)), config_digest(data), identity)

    @cached_property
    def environment(self) -> dict[str, Any]:
        """The environment in which the run was begun; empty, with a warning, if the file cannot be read."""
        file = self.path / ENVIRONMENT
        try:
            facts = history.decode(json.loads(disk.read(file)))
            if type(facts) is not dict:
                raise TypeError(f"{facts!r:.60} is not a table")
            return facts
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            warnings.warn(
                f"{file} cannot be read ({type(error).__name__}: {error}). Nothing depends on it; bring it back from a "
                "copy to know where the run was begun.",
                UserWarning,
                stacklevel=3,
            )
            return {}

    # Checkpoints

    @property
    def provenance(self) -> Provenance:
        """What a checkpoint records of this run and of the rows written so far."""
        if self.identity is None:
            self._give_identity()
        assert self.identity is not None
        return Provenance(self.identity.id, self._config_digest, self.ledger.chain)

    @property
    def checkpoint_origin(self) -> checkpoints.CheckpointOrigin:
        """What `checkpoints.save` needs to know of this run."""
        return checkpoints.CheckpointOrigin(self.provenance, self.check_lock)

    def check_checkpoint(self, snapshot: checkpoints.Snapshot, path: Path) -> None:
        """Raise if a checkpoint is of another run, or if the history is not the one that precedes the checkpoint."""
        if self.identity is not None:
            check_provenance(self.path, self.identity, path, snapshot.provenance)
        self.ledger.check(snapshot.provenance and snapshot.provenance.history_chain)

    def require_no_rows(self) -> None:
        """Raise if rounds were recorded, for a run without checkpoints: only the user can decide to begin again."""
        if rows := len(self.history()):
            raise FileNotFoundError(
                f"{self.path / checkpoints.FOLDER} holds no checkpoint, and {self.path / HISTORY} has {rows} rows. "
                "Bring the checkpoints back from a copy, or begin again in another folder."
            )

    # The lock

    def acquire_lock(self) -> None:
        """Make this process the writer of the folder, if it is not yet; Locked if there is another."""
        if self.lock is None:
            self.lock = Lock(self.path, "" if self.identity is None else self.identity.id)

    def check_lock(self) -> None:
        """Raise LostLock if another process took the folder over; called before anything is written."""
        if self.lock is not None:
            self.lock.check()

    def close(self) -> None:
        """Release the lock, so that other processes can write here."""
        if self.lock is not None:
            self.lock.release()
            self.lock = None

    # History, times and log

    def append(self, row: Mapping[str, Any], seconds: Mapping[str, Any]) -> None:
        """Add the row of one round to the history, and its times to times.jsonl.

        A kill of the process loses nothing once this returns; a power cut may until `sync`.

        Args:
            row: plain values, with `round` greater than that of the row before; see `history.encode`.
            seconds: durations by phase, and what else differs between equal runs, under any names but `round`.
        """
        number = row.get("round")
        if type(number) is not int:
            raise ValueError(f"Invalid row: got round={number!r}; need an int. Say which round the row is about.")
        if "round" in seconds:
            raise ValueError(f"Invalid seconds: got the key 'round' ({seconds['round']!r}); the row has it. Rename it.")
        last = self.last_round()
        if number <= last:
            raise ValueError(
                f"Invalid row: got round={number}; need more than {last}, the last round in {self.path}. "
                f"Call rewind({number - 1}) first to run it again."
            )
        # both lines are encoded before one is written: a row that JSON cannot hold changes nothing
        row_line, times_line = history.line(row), history.line({**seconds, "round": number})
        self.check_lock()
        self.ledger.append(row_line, number)
        if not self._times_are_whole:
            history.drop_torn_line(self.path / TIMES)
        self._times_are_whole = False  # if the disk is full, a part of the line may be written
        history.append_bytes(self.path / TIMES, times_line)
        self._times_are_whole = True

    def last_round(self) -> int:
        """Return the round of the last row; -1 if there is none. For the process that writes: cuts torn lines off."""
        if self.identity is None:
            self._give_identity()
        return self.ledger.chain.round

    def history(self) -> list[dict[str, Any]]:
        """Return all rows, checked, equal to what was appended."""
        return self.ledger.read()

    def times(self) -> list[dict[str, Any]]:
        """Return the seconds of every round, without lines that cannot be read; a kill may have cost the last one."""
        rows = []
        for number, text in enumerate(history.complete_lines(self.path / TIMES), start=1):
            try:
                rows += history.parse_lines(self.path / TIMES, [text], first=number)
            except ValueError as error:
                warnings.warn(f"{error} It is passed over.", UserWarning, stacklevel=2)
        return rows

    def rewind(self, round: int, recorded: Chain | None = None) -> None:
        """Drop the rows after `round`, to go on from an older checkpoint.

        Each file changes atomically. A kill between the two leaves times of rounds that the history lacks; the same
        call repairs that. A folder by a version without ids gets one here.

        recorded: the chain of the rows up to `round`, if the checkpoint has it.
        """
        self.ledger.rewind(round, recorded)
        times = [row for row in self.times() if row["round"] <= round]
        after = b"".join(map(history.line, times))
        if (self.path / TIMES).is_file() and disk.read(self.path / TIMES) != after:
            disk.replace(self.path / TIMES, after)
        if self.identity is None:
            self._give_identity()
        else:
            repair_identity(self.path, self.identity)

    def _give_identity(self) -> None:
        """Write run.json and the seal for a folder by a version without them, and warn of what nobody could check."""
        data = disk.read(self.path / CONFIG)
        rows = self.ledger.chain
        text = config_text(self.path / CONFIG, data)
        self.identity = new_identity(text, new_id(), manifests_without_provenance(self.path), rows)
        write_identity(self.path, self.identity)
        self.ledger = Ledger(self.path / HISTORY, self.identity.id, rows)
        self.ledger.rewind(rows.round, rows)  # writes the seal
        message = (
            f"{self.path} was begun by an older version, without a run id, a digest of {CONFIG} and one of {HISTORY}: "
            f"whether the settings and the first {rows.rows} rows are those of the run could not be checked. From here "
            "on they are."
        )
        warnings.warn(message, UserWarning, stacklevel=4)
        self.log(message)

    def log(self, text: str) -> None:
        """Add a line to the log, with the time of day (UTC)."""
        now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
        history.append_bytes(self.path / LOG, f"{now}  {text}\n".encode())

    def sync(self) -> None:
        """Wait until history and times are on the disk; called before a checkpoint that follows them is written."""
        self.ledger.sync()
        if (self.path / TIMES).is_file():
            disk.sync(self.path / TIMES)
        disk.sync(self.path)


def is_run(path: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a run."""
    return (Path(path) / CONFIG).is_file()


def open_run(
    path: str | os.PathLike[str], config: Mapping[str, Any], resume: bool, may_differ: Collection[str] = ("rounds",)
) -> Run:
    """Create a run folder, or with `resume` open the existing one if it is of the same run; this process locks it.

    may_differ: settings that a resumed run may change; the log records which were changed.
    """
    folder = Path(path)
    if resume and is_run(folder):
        for name in (HISTORY, SEAL, TIMES, LOG, CHANGES):
            disk.require_regular_file(folder / name)
        identity = Run.open(folder).identity
        id = "" if identity is None else identity.id
    else:
        _refuse_if_used(folder)
        to_toml(config)  # raises if it cannot be stored, before there is a folder
        id = new_id()
        folder.mkdir(parents=True, exist_ok=True)
    lock = Lock(folder, id)  # from here on no other process changes anything
    try:
        if resume and is_run(folder):
            run = _same_run(folder, config, may_differ)
        else:
            run = Run.create(folder, config, environment(), id)
    except BaseException:
        lock.release()
        raise
    run.lock = lock
    return run


def _same_run(folder: Path, config: Mapping[str, Any], may_differ: Collection[str]) -> Run:
    """Return the run in a folder; ValueError if its settings are not these."""
    run = Run.open(folder)
    changed = []
    before, after = by_setting(run.config), by_setting(as_stored(config))
    for key in sorted(before.keys() | after.keys()):
        then, now = before.get(key), after.get(key)
        if then == now or (then is None and now in ({}, None)):
            continue
        if key not in may_differ:
            raise ValueError(
                f"This run cannot be resumed with another {key}: it is {then!r} in {folder}, and {now!r} here. "
                "Use the same, or another run folder."
            )
        changed.append(f"{key} = {now!r}, where {CONFIG} has {then!r}")
    run.environment  # noqa: B018  # warns if it is damaged
    if changed:
        run.log(f"resumed with {'; '.join(changed)}")
    return run


def accept_config(path: str | os.PathLike[str]) -> list[list[Any]] | None:
    """Accept a change that was made to config.toml by hand: the run goes on with it from its last checkpoint.

    Returns [setting, before, after] for each setting that differs; None if nothing had changed.
    """
    folder = Path(path)
    if not is_run(folder):
        Run.open(folder)  # raises, and says what is wrong
    lock = Lock(folder, "")
    try:
        last = checkpoints.latest(folder)
        round = checkpoints.round_and_step(last)[0] if last is not None else 0
        differences = accept_change(folder, round)
        if differences is not None:
            Run.open(folder).log(f"accepted after round {round} that in {CONFIG} {describe_difference(differences)}")
        return differences
    finally:
        lock.release()


def _refuse_if_used(folder: Path) -> None:
    """Raise if a folder holds anything; what a kill left of `create` does not count."""
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file; need a folder. Pass another path.")
    contents = {p.name for p in folder.iterdir()} if folder.is_dir() else set()
    if CONFIG not in contents and contents & {HISTORY, checkpoints.FOLDER}:
        raise DamagedRecord(
            f"{folder / CONFIG} is missing, and {folder} holds a run. Bring it back from a copy ({RUN} has its text as "
            '"text"), or begin in another folder.'
        )
    contents = {name for name in contents if name not in _WRITTEN_FIRST and not name.startswith(_HIDDEN_PREFIXES)}
    if contents:
        raise FileExistsError(
            f"{folder} is not empty: it holds {history.quoted_names(contents)}. Pass resume=True to go on with the run "
            "in it, or another folder for a new run."
        )
