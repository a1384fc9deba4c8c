"""JSON lines that cannot change unnoticed: a digest of each row with all rows before it stands beside the file.

    h_0 = sha256(""),    h_t = sha256(h_{t-1} + row t, newline included)

    history.jsonl         the rows
    history.seal.json     the run, how many rows, the round of the last, h of it; written again after every row

The row is written first, and counts when the seal is. A kill between the two leaves one whole row, or a torn one,
beyond the seal: no damage, and readers pass over it. Anything else that does not fit is damage. A checkpoint holds the
same three numbers, so a resume needs no seal: it checks the rows up to the checkpoint, cuts the others off and writes
the seal again. While rows are cut off the seal says so, and readers pass over what is beyond it.

The seal has a fixed length and is overwritten in one call of the system, which a kill does not interrupt. To rename a
new one over it would take as long as two rounds of a small simulation: ext4 then starts to write to the disk.

The chain starts at the first row, also in a folder whose first rows were written before there were chains: what these
rows were when the run was first resumed is what later readers hold them to.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tailopt.records import disk, history
from tailopt.records.seals import DamagedRecord, sealed, unsealed

_ATTEMPTS = 5  # of a reader that meets a writer
_LENGTH = 512  # of a seal


class Chain(NamedTuple):
    """Rows in three numbers."""

    rows: int = 0
    round: int = -1  # of the last row
    sha256: str = hashlib.sha256(b"").hexdigest()

    def then(self, line: bytes, round: int) -> Chain:
        """With one more row.

        Examples:
            >>> Chain().then(b'{"round": 1}\\n', 1)[:2]
            (1, 1)
        """
        return Chain(self.rows + 1, round, _next(self.sha256, line))

    @classmethod
    def stated(cls, found: Any) -> Chain:
        """From JSON; ValueError for what is none."""
        rows, round, digest = found
        if type(rows) is not int or type(round) is not int or type(digest) is not str or rows < 0:
            raise ValueError(f"{found!r} is no chain")
        return cls(rows, round, digest)


class Stamp(NamedTuple):
    """Of which run a checkpoint is, by which configuration, after which history; it stands in the manifest."""

    run: str
    config: str  # sha256 of config.toml
    history: Chain

    @classmethod
    def stated(cls, found: Any) -> Stamp:
        """From JSON; ValueError for what is none."""
        run, config, chain = found
        if type(run) is not str or type(config) is not str:
            raise ValueError(f"{found!r} is no stamp")
        return cls(run, config, Chain.stated(chain))


class Ledger:
    """A file of JSON lines and its seal.

    Args:
        path: of the lines.
        run: the id of the run; None in a folder from before there were ids, whose rows are not checked.
        since: what is taken for the seal where there is none yet.

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
        tailopt.records.seals.DamagedRecord: ...history.jsonl is not what was written: its first 2 rows do not fit ...
    """

    def __init__(self, path: Path, run: str | None, since: Chain | None = None) -> None:
        self.path, self.run, self.since = path, run, since
        self.seal = path.with_suffix(".seal.json")
        self._chain: Chain | None = None  # None until this process first writes, and after a write that failed

    def begin(self) -> None:
        """Write the seal of a file without rows."""
        self._write(Chain(), wait=True)

    def read(self) -> list[dict[str, Any]]:
        """All rows, checked."""
        return history.parsed(self.path, self.lines())

    def lines(self) -> list[bytes]:
        """All whole lines, checked; the seal is read before and after, since a run may be going on."""
        for attempt in range(_ATTEMPTS):
            time.sleep(0.01 * attempt)
            before, lines, after = self._sealed(), history.whole_lines(self.path), self._sealed()
            if before is None or after is None:
                return lines
            (chain, cut), (later, _) = before, after
            wrong = self._wrong(lines, chain)
            if not wrong and not cut and len(lines) > later.rows + 1:
                wrong = (
                    f"it has {len(lines)} rows, and {later.rows} were written with their digest, of which a kill can "
                    "cost one"
                )
            if not wrong:
                return lines[: chain.rows]
            if before == after:
                break
        raise self._damaged(wrong)

    @property
    def chain(self) -> Chain:
        """For the process that writes: of all rows that count. What is beyond them is cut off."""
        if self._chain is None:
            history.mend(self.path)
            lines = self.lines()
            if len(lines) < len(history.whole_lines(self.path)):
                self._cut(lines)
            self._chain = chained(self.path, lines)
        return self._chain

    def append(self, line: bytes, round: int) -> None:
        """Add a row, then its digest. Both are with the system when this returns, and on the disk after `sync`."""
        chain = self.chain.then(line, round)
        self._chain = None
        history.write(self.path, line)
        self._write(chain)
        self._chain = chain

    def check(self, known: Chain | None) -> None:
        """Raise unless the rows that a checkpoint knows are there; without one, all rows by the seal."""
        if known is None:
            self.lines()
        elif wrong := self._wrong(history.whole_lines(self.path), known):
            raise self._damaged(wrong)

    def rewind(self, round: int, known: Chain | None = None) -> None:
        """Drop the rows after a round; what stays keeps its bytes, and is checked before.

        known: the chain up to that round, as a checkpoint says it.
        """
        if known is None:
            lines = self.lines()
            rows = history.parsed(self.path, lines)
            lines = lines[: sum(row["round"] <= round for row in rows)]
            known = chained(self.path, lines)
        else:
            lines = history.whole_lines(self.path)
            if wrong := self._wrong(lines, known):
                raise self._damaged(wrong)
            lines = lines[: known.rows]
        found = self._sealed_or_warn()
        if self.path.is_file() and disk.read(self.path) != b"".join(lines):
            if self.run is not None:
                self._write(known, cut=True, wait=True)
            self._cut(lines)
            found = None
        if self.run is not None and found != (known, False):
            self._write(known, wait=True)
        for leftover in self.path.parent.glob(f".{self.seal.name}.*"):
            leftover.unlink(missing_ok=True)
        self._chain = known if self.run is not None else None

    def sync(self) -> None:
        """Wait until all of it is on the disk; the folder is for the caller."""
        for path in (self.path, self.seal):
            if path.is_file():
                disk.sync(path)

    def _wrong(self, lines: Sequence[bytes], chain: Chain) -> str:
        if len(lines) < chain.rows:
            return f"it has {len(lines)} whole rows, and {chain.rows} were written"
        if _folded(lines[: chain.rows]) != chain.sha256:
            return f"its first {chain.rows} rows do not fit their digest"
        return ""

    def _cut(self, lines: Iterable[bytes]) -> None:
        disk.replace(self.path, b"".join(lines))

    def _write(self, chain: Chain, cut: bool = False, wait: bool = False) -> None:
        if self.run is None:
            return
        data = sealed({"run": self.run, "chain": list(chain), "cut": cut}, _LENGTH)
        if wait or len(data) != _LENGTH or not disk.overwrite(self.seal, data):
            disk.replace(self.seal, data)

    def _sealed(self) -> tuple[Chain, bool] | None:
        """What the seal says, and whether rows beyond it are being cut off; None in a folder from before."""
        if self.run is None:
            return None
        for attempt in range(_ATTEMPTS):  # a reader may see half of a seal that is being overwritten
            time.sleep(0.002 * attempt)
            try:
                body = unsealed(self.seal)
                if body["run"] != self.run:
                    raise ValueError(f"is of the run {body['run']!r}, and run.json of {self.run}")
                if type(body["cut"]) is not bool:
                    raise ValueError(f"says cut={body['cut']!r}")
                return Chain.stated(body["chain"]), body["cut"]
            except FileNotFoundError:
                if self.since is not None:
                    return self.since, False
                wrong = "is missing"
                break
            except (ValueError, KeyError, TypeError) as error:
                wrong = str(error)
        raise DamagedRecord(
            f"{self.seal} {wrong}, so {self.path.name} cannot be checked. Bring it back from a copy; a resume of the "
            "run checks the rows by its checkpoint, and writes it again."
        )

    def _sealed_or_warn(self) -> tuple[Chain, bool] | None:
        try:
            return self._sealed()
        except DamagedRecord as error:
            warnings.warn(f"{error} That is being done.", UserWarning, stacklevel=5)
            return None

    def _damaged(self, wrong: str) -> DamagedRecord:
        return DamagedRecord(
            f"{self.path} is not what was written: {wrong}. Bring it back from a copy, or remove the checkpoints that "
            "are newer than the damage and resume the run, which cuts the rows after its checkpoint; or begin again in "
            "another folder."
        )


def chained(path: Path, lines: Sequence[bytes]) -> Chain:
    """The chain of lines."""
    last = history.parsed(path, lines[-1:], first=len(lines))
    return Chain(len(lines), last[0]["round"] if last else -1, _folded(lines))


def _folded(lines: Iterable[bytes]) -> str:
    digest = Chain().sha256
    for line in lines:
        digest = _next(digest, line)
    return digest


def _next(digest: str, line: bytes) -> str:
    return hashlib.sha256(digest.encode() + line).hexdigest()
