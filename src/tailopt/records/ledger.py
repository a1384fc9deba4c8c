"""JSON lines that cannot change unnoticed: a digest of all rows is kept next to the file.

    h_0 = sha256(""),    h_t = sha256(h_{t-1} + row t, newline included)

    history.jsonl         the rows
    history.seal.json     the seal: the run, the number of rows, the round of the last one and its h; rewritten per row

The row is written first, and counts once the seal is written. A kill between the two leaves one complete or torn row
beyond the seal: that is no damage, and readers skip it. Any other mismatch is damage. A checkpoint holds the same three
numbers, so a resume needs no seal: it checks the rows up to the checkpoint, cuts the others off and writes the seal
again. While rows are being cut off, the seal is marked ("cut"), and readers skip what is beyond it.

The seal has a fixed length and is overwritten in one system call, which a kill does not interrupt. Renaming a new one
over it would take as long as two rounds of a small simulation, because ext4 then starts to write to the disk.

For a folder by an older version, the chain is computed over all rows that exist when it is first resumed. From then on
these rows must not change.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tailopt.records import disk, history
from tailopt.records.checked_json import DamagedRecord, read_verified, with_digest

_ATTEMPTS = 5  # of a reader, while another process writes
_LATE_ROWS = 3  # further looks at rows that are fewer than the seal says
_SEAL_BYTES = 512


class Chain(NamedTuple):
    """The rows of a file in three numbers."""

    rows: int = 0
    round: int = -1  # of the last row
    sha256: str = hashlib.sha256(b"").hexdigest()

    def extended(self, line: bytes, round: int) -> Chain:
        """Return the chain with one more row.

        Examples:
            >>> Chain().extended(b'{"round": 1}\\n', 1)[:2]
            (1, 1)
        """
        return Chain(self.rows + 1, round, _next_digest(self.sha256, line))

    @classmethod
    def from_json(cls, value: Any) -> Chain:
        """Return the chain that was stored as a list; ValueError if it is malformed."""
        rows, round, digest = value
        if type(rows) is not int or type(round) is not int or type(digest) is not str or rows < 0:
            raise ValueError(f"{value!r} is not a chain: need [rows, round, sha256]")
        return cls(rows, round, digest)


class Provenance(NamedTuple):
    """To which run, configuration and history a checkpoint belongs; part of its manifest."""

    run: str
    config_digest: str  # the sha256 of config.toml
    history_chain: Chain

    @classmethod
    def from_json(cls, value: Any) -> Provenance:
        """Return the provenance that was stored as a list; ValueError if it is malformed."""
        run, config, chain = value
        if type(run) is not str or type(config) is not str:
            raise ValueError(f"{value!r} is no provenance: need [run, config, chain]")
        return cls(run, config, Chain.from_json(chain))


class Ledger:
    """A file of JSON lines and its seal.

    Args:
        path: of the lines.
        run: the id of the run; None in a folder by a version without ids, whose rows are not checked.
        history_chain_when_id_was_given: the chain of the rows in an older version's folder, used in place of a seal
            that does not exist yet.

    Examples:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "history.jsonl"
        >>> ledger = Ledger(file, "4f7a")
        >>> ledger.begin()
        >>> for t in (1, 2):
        ...     ledger.append(history.line({"round": t}), t)
        >>> _ = file.write_bytes(file.read_bytes().replace(b"2", b"3"))
        >>> Ledger(file, "4f7a").read()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        tailopt.records.checked_json.DamagedRecord: ...history.jsonl is not what was written: its first 2 rows do ...
    """

    def __init__(self, path: Path, run: str | None, history_chain_when_id_was_given: Chain | None = None) -> None:
        self.path, self.run, self.history_chain_when_id_was_given = path, run, history_chain_when_id_was_given
        self.seal = path.with_suffix(".seal.json")
        self._chain: Chain | None = None  # None until this process first writes, and after a write that failed

    def begin(self) -> None:
        """Write the seal of a file without rows."""
        self._write_seal(Chain(), durable=True)

    def read(self) -> list[dict[str, Any]]:
        """Return all rows, checked."""
        return history.parse_lines(self.path, self.lines())

    def lines(self) -> list[bytes]:
        """Return all complete lines, checked. The seal is read before and after them: a writer may be at work."""
        for attempt in range(_ATTEMPTS):
            time.sleep(0.01 * attempt)
            before, lines, after = self._read_seal(), history.complete_lines(self.path), self._read_seal()
            if before is None or after is None:
                return lines
            (chain, cut), (later, _) = before, after
            problem = self._mismatch(lines, chain)
            if not problem and not cut and len(lines) > later.rows + 1:
                problem = (
                    f"it has {len(lines)} rows, and {later.rows} were written with their digest, of which a kill can "
                    "cost one"
                )
            if not problem:
                return lines[: chain.rows]
            # Nobody wrote in between, so the mismatch will stay. But a file system that processes see through caches of
            # their own may show the seal before the rows: too few rows are looked at again.
            if before == after and attempt >= (_LATE_ROWS if len(lines) < chain.rows else 0):
                break
        raise self._damaged(problem)

    @property
    def chain(self) -> Chain:
        """The chain of all rows that count. For the process that writes: rows beyond the seal are cut off."""
        if self._chain is None:
            history.drop_torn_line(self.path)
            lines = self.lines()
            if len(lines) < len(history.complete_lines(self.path)):
                self._replace_lines(lines)
            self._chain = chain_of(self.path, lines)
        return self._chain

    def append(self, line: bytes, round: int) -> None:
        """Add a row, then its digest. A kill loses neither once this returns; a power cut may until `sync`."""
        chain = self.chain.extended(line, round)
        self._chain = None
        history.append_bytes(self.path, line)
        self._write_seal(chain)
        self._chain = chain

    def check(self, recorded: Chain | None) -> None:
        """Raise unless the rows that a checkpoint recorded exist; without a checkpoint, check all rows by the seal."""
        if recorded is None:
            self.lines()
        elif problem := self._mismatch(history.complete_lines(self.path), recorded):
            raise self._damaged(problem)

    def rewind(self, round: int, recorded: Chain | None = None) -> None:
        """Drop the rows after a round; the rows before are checked first, and keep their bytes.

        recorded: the chain up to that round, if a checkpoint has it.
        """
        if recorded is None:
            lines = self.lines()
            rows = history.parse_lines(self.path, lines)
            lines = lines[: sum(row["round"] <= round for row in rows)]
            recorded = chain_of(self.path, lines)
        else:
            lines = history.complete_lines(self.path)
            if problem := self._mismatch(lines, recorded):
                raise self._damaged(problem)
            lines = lines[: recorded.rows]
        seal = self._read_seal_or_warn()
        if self.path.is_file() and disk.read(self.path) != b"".join(lines):
            # Marked first: a kill between the two writes must not make the rows beyond the seal look like damage.
            if self.run is not None:
                self._write_seal(recorded, cut=True, durable=True)
            self._replace_lines(lines)
            seal = None
        if self.run is not None and seal != (recorded, False):
            self._write_seal(recorded, durable=True)
        for leftover in self.path.parent.glob(f".{self.seal.name}.*"):
            leftover.unlink(missing_ok=True)
        self._chain = recorded if self.run is not None else None

    def sync(self) -> None:
        """Wait until both files are on the disk; the caller syncs the folder."""
        for path in (self.path, self.seal):
            if path.is_file():
                disk.sync(path)

    def _mismatch(self, lines: Sequence[bytes], chain: Chain) -> str:
        """Describe how lines differ from a chain; empty if they do not."""
        if len(lines) < chain.rows:
            return f"it has {len(lines)} whole rows, and {chain.rows} were written"
        if _digest(lines[: chain.rows]) != chain.sha256:
            return f"its first {chain.rows} rows do not fit their digest"
        return ""

    def _replace_lines(self, lines: Iterable[bytes]) -> None:
        disk.replace(self.path, b"".join(lines))

    def _write_seal(self, chain: Chain, cut: bool = False, durable: bool = False) -> None:
        """Write the seal: in place, or by a rename if it must be on the disk (`durable`) or has another length."""
        if self.run is None:
            return
        data = with_digest({"run": self.run, "chain": list(chain), "cut": cut}, _SEAL_BYTES)
        if durable or len(data) != _SEAL_BYTES or not disk.overwrite(self.seal, data):
            disk.replace(self.seal, data)

    def _read_seal(self) -> tuple[Chain, bool] | None:
        """Return the chain, and whether rows beyond it are being cut off; None in a folder by an older version."""
        if self.run is None:
            return None
        for attempt in range(_ATTEMPTS):  # a reader may see half of a seal that is being overwritten
            time.sleep(0.002 * attempt)
            try:
                body = read_verified(self.seal)
                if body["run"] != self.run:
                    raise ValueError(f"is of the run {body['run']!r}, and run.json of {self.run}")
                if type(body["cut"]) is not bool:
                    raise ValueError(f"says cut={body['cut']!r}")
                return Chain.from_json(body["chain"]), body["cut"]
            except FileNotFoundError:
                if self.history_chain_when_id_was_given is not None:
                    return self.history_chain_when_id_was_given, False
                problem = "is missing"
                break
            except (ValueError, KeyError, TypeError) as error:
                problem = str(error)
        raise DamagedRecord(
            f"{self.seal} {problem}, so {self.path.name} cannot be checked. Bring it back from a copy; a resume of the "
            "run checks the rows by its checkpoint, and writes it again."
        )

    def _read_seal_or_warn(self) -> tuple[Chain, bool] | None:
        try:
            return self._read_seal()
        except DamagedRecord as error:
            warnings.warn(f"{error} That is being done.", UserWarning, stacklevel=5)
            return None

    def _damaged(self, problem: str) -> DamagedRecord:
        return DamagedRecord(
            f"{self.path} is not what was written: {problem}. Bring it back from a copy, or remove the checkpoints "
            "that are newer than the damage and resume the run, which cuts the rows after its checkpoint; or begin "
            "again in another folder."
        )


def chain_of(path: Path, lines: Sequence[bytes]) -> Chain:
    """Return the chain of the lines of a file."""
    last = history.parse_lines(path, lines[-1:], first=len(lines))
    return Chain(len(lines), last[0]["round"] if last else -1, _digest(lines))


def _digest(lines: Iterable[bytes]) -> str:
    digest = Chain().sha256
    for line in lines:
        digest = _next_digest(digest, line)
    return digest


def _next_digest(digest: str, line: bytes) -> str:
    return hashlib.sha256(digest.encode() + line).hexdigest()
