"""Rows in a chain: every change is found, and a kill between a row and its digest is no change."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tailopt.records import disk, history
from tailopt.records.checked_json import DamagedRecord
from tailopt.records.ledger import Chain, Ledger, chain_of

ROOT = Path(__file__).parents[2]
ID = "a" * 32


def line(t: int) -> bytes:
    return history.line({"round": t, "loss": 1.0 / t})


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    found = Ledger(tmp_path / "history.jsonl", ID)
    found.begin()
    for t in range(1, 6):
        found.append(line(t), t)
    return found


def again(ledger: Ledger) -> Ledger:
    """As another process sees it."""
    return Ledger(ledger.path, ID)


def test_the_chain_is_the_formula(ledger: Ledger) -> None:
    import hashlib

    digest = hashlib.sha256(b"").hexdigest()
    for t in range(1, 6):
        digest = hashlib.sha256(digest.encode() + line(t)).hexdigest()
    assert ledger.chain == again(ledger).chain == Chain(5, 5, digest)
    assert [row["round"] for row in again(ledger).read()] == [1, 2, 3, 4, 5]


def test_a_flipped_bit_of_rows_or_seal_is_found(ledger: Ledger) -> None:
    for file in (ledger.path, ledger.seal):
        data = file.read_bytes()
        for index in range(random.randrange(4), len(data), 4):  # every fourth byte, others in every run
            file.write_bytes(data[:index] + bytes([data[index] ^ 1 << index % 8]) + data[index + 1 :])
            with pytest.raises(DamagedRecord, match=f"{file.name} .*from a copy"):
                again(ledger).lines()
        file.write_bytes(data)
    again(ledger).lines()


@pytest.mark.parametrize("rows", [[1, 2, 3, 4], [1, 2, 2, 3, 4, 5], [1, 3, 2, 4, 5], [], [1, 2, 3, 4, 5, 6, 7]])
def test_rows_that_are_lost_doubled_swapped_or_too_many_are_found(ledger: Ledger, rows: list[int]) -> None:
    ledger.path.write_bytes(b"".join(map(line, rows)))
    with pytest.raises(DamagedRecord, match=r"history\.jsonl is not what was written: .*rows"):
        again(ledger).read()


@pytest.mark.parametrize("beyond", [line(6), line(6)[:9], b""])
def test_one_row_beyond_the_seal_is_a_kill(ledger: Ledger, beyond: bytes) -> None:
    with ledger.path.open("ab") as file:
        file.write(beyond)
    found = again(ledger)
    assert len(found.read()) == 5
    found.append(line(7), 7)
    assert [row["round"] for row in again(ledger).read()] == [1, 2, 3, 4, 5, 7]


def test_a_checkpoint_knows_the_rows_before_it(ledger: Ledger) -> None:
    known = chain_of(ledger.path, [line(1), line(2), line(3)])
    ledger.seal.unlink()
    with ledger.path.open("ab") as file:
        file.write(b"garbage\n" * 3)
    found = again(ledger)
    with pytest.raises(DamagedRecord, match=r"history\.seal\.json is missing"):
        found.read()
    with pytest.warns(UserWarning, match=r"history\.seal\.json is missing.*That is being done"):
        found.rewind(3, known)
    assert again(ledger).chain == known
    ledger.path.write_bytes(line(1) + line(3) + line(2))
    with pytest.raises(DamagedRecord, match="its first 3 rows do not fit"):
        again(ledger).rewind(3, known)
    assert ledger.path.read_bytes() == line(1) + line(3) + line(2)  # nothing was cut


def test_a_seal_of_another_run_is_refused(ledger: Ledger) -> None:
    with pytest.raises(DamagedRecord, match=f"is of the run '{ID}', and run.json of bbb"):
        Ledger(ledger.path, "bbb").read()


def test_a_kill_in_the_middle_of_cutting_is_no_damage(ledger: Ledger) -> None:
    before = ledger.path.read_bytes()
    ledger.rewind(2)
    ledger._write_seal(ledger.chain, cut=True)  # as it stands when the rows are not cut yet
    ledger.path.write_bytes(before)
    assert [row["round"] for row in again(ledger).read()] == [1, 2]
    found = again(ledger)
    found.append(line(3), 3)
    assert [row["round"] for row in again(ledger).read()] == [1, 2, 3]


def test_a_row_whose_digest_did_not_fit_on_the_disk(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(disk, "overwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            ledger.append(line(6), 6)
    assert len(again(ledger).read()) == 5 and ledger.chain.rows == 5
    ledger.append(line(6), 6)
    assert again(ledger).chain == ledger.chain and ledger.chain.rows == 6


WRITER = """
import sys
from itertools import count
from pathlib import Path
from tailopt.records import disk, history
from tailopt.records.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]), sys.argv[2])
luck = __import__("random").Random(int(sys.argv[3]))
while True:
    t = ledger.chain.round + 1 if ledger.chain.rows else 1
    ledger.append(history.line({"round": t, "loss": 1.0 / t}), t)
    if luck.random() < 0.05:
        ledger.rewind(max(1, t - luck.randrange(5)))
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_readers_of_a_running_and_of_a_killed_writer_find_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    Ledger(path, ID).begin()
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    luck = random.Random(0)
    reads = 0
    for number in range(4):
        command = [sys.executable, "-c", WRITER, str(path), ID, str(number)]
        process = subprocess.Popen(command, env=environment)
        until = time.monotonic() + 60
        while not path.exists() and time.monotonic() < until:
            time.sleep(0.01)
        moment = time.monotonic() + luck.uniform(0.05, 0.2) + (1.5 if number == 0 else 1.2)
        while time.monotonic() < moment:
            rows = [row["round"] for row in Ledger(path, ID).read()]
            assert rows == list(range(1, len(rows) + 1))
            reads += 1
        assert process.poll() is None
        process.kill()
        process.wait()
        rows = [row["round"] for row in Ledger(path, ID).read()]
        assert rows == list(range(1, len(rows) + 1))
        Ledger(path, ID).rewind(20)
    assert reads > 30
