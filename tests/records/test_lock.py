"""One writer: a second one is refused with the facts, a dead one's lock is taken over once, a lost lock is noticed."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tailopt.records import lock as locks
from tailopt.records.lock import LOCK, Lock, Locked, LostLock
from tests.records.old_runs import NODES, simulated, with_nodes

pytestmark = pytest.mark.skipif(not Path("/proc/self/ns/pid").exists(), reason="processes are told apart by /proc")
ROOT = Path(__file__).parents[2]
forked = multiprocessing.get_context("fork")


def content(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / LOCK).read_text()))


def by_hand(folder: Path, **facts: Any) -> None:
    """A lock as a process of another machine would have written it."""
    mine = {**locks._this_process(), "run": "r", "token": "t", "count": 0}
    (folder / LOCK).write_bytes(locks._encode({**mine, "host": "elsewhere", "boot": "another boot", **facts}))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "STALE_AFTER_S", 0.5)
    monkeypatch.setattr(locks, "REAPPEAR_S", 0.1)


@contextlib.contextmanager
def process(folder: Path, code: str) -> Iterator[subprocess.Popen[str]]:
    """Python code in a process of its own, once it has printed its first line."""
    start = (
        f"import os, sys, time\nfrom pathlib import Path\nfrom tailopt.records import lock\nF = Path({str(folder)!r})\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-u", "-c", start + code]
    found = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert found.stdout is not None and found.stderr is not None
        assert found.stdout.readline() == "ready\n", found.stderr.read()
        yield found
    finally:
        found.kill()
        found.communicate()


HOLD = "held = lock.Lock(F, 'run-id')\nprint('ready')\ntime.sleep(100)\n"


# Who is refused


def test_what_stands_in_a_lock(tmp_path: Path) -> None:
    held = Lock(tmp_path, "run-id")
    found = content(tmp_path)
    assert found["pid"] == os.getpid() and found["run"] == "run-id" and found["token"] == held.token
    assert found["boot"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert found["pid_namespace"] == os.readlink("/proc/self/ns/pid") and found["count"] == 0
    assert found["host"] and found["started"] > 0 and found["since"].endswith("UTC")
    held.check()
    held.release()
    held.release()
    assert list(tmp_path.iterdir()) == []


def test_a_second_writer_is_refused_with_the_facts(tmp_path: Path) -> None:
    with process(tmp_path, HOLD) as holder:
        since = content(tmp_path)["since"]
        with pytest.raises(Locked) as refused:
            Lock(tmp_path, "run-id")
        said = str(refused.value)
        assert f"process {holder.pid} on {locks._this_process()['host']} since {since} (run run-id)" in said
        assert "stop it" in said and content(tmp_path)["pid"] == holder.pid
        holder.kill()
        Lock(tmp_path, "run-id").release()  # at once; the process was not waited for, and is still in the table


def test_twice_in_one_process(tmp_path: Path) -> None:
    held = Lock(tmp_path, "a")
    with pytest.raises(Locked, match="It is this process: end the run, or delete the optimizer"):
        Lock(tmp_path, "a")
    held.check()
    del held
    Lock(tmp_path, "a").release()


def test_an_optimizer_that_is_unreachable_holds_nothing(tmp_path: Path) -> None:
    class Owner:
        def __init__(self) -> None:
            self.lock, self.itself = Lock(tmp_path, "a"), self

    gc.disable()
    try:
        Owner()
        assert (tmp_path / LOCK).exists()
        Lock(tmp_path, "a").release()
    finally:
        gc.enable()


def test_the_end_of_a_process_releases_it(tmp_path: Path) -> None:
    with process(tmp_path, "held = lock.Lock(F, 'a')\nprint('ready')\n") as ended:
        assert ended.wait(30) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_became_another_one_holds_nothing(tmp_path: Path) -> None:
    again = "from tailopt.records import lock; from pathlib import Path; import sys; "
    again += "held = lock.Lock(Path(sys.argv[1]), 'b'); print(Path(sys.argv[1], 'lock.json').read_text(), flush=True)"
    code = (
        f"held = lock.Lock(F, 'a')\nprint('ready')\nos.execv(sys.executable, [sys.executable, '-c', {again!r}, str(F)])"
    )
    with process(tmp_path, code) as replaced:
        out, err = replaced.communicate(timeout=60)
    assert json.loads(out)["run"] == "b", err


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_what_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / LOCK
    {"pipe": lambda: os.mkfifo(path), "link": lambda: path.symlink_to("x"), "folder": path.mkdir}[kind]()
    with pytest.raises(ValueError, match=r"lock\.json is a .*; need a regular file\. Remove it"):
        Lock(tmp_path, "a")


# A lock that is nobody's


def contender(folder: str, start: Any, told: Any) -> None:
    start.wait()
    try:
        held = Lock(Path(folder), str(os.getpid()))
        won = True
    except Locked:
        won = False
    told.put(won)
    start.wait()  # all have tried
    if won:
        held.check()
        told.put("still")
    start.wait()
    os._exit(0)


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("times", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_one_of_many_takes_over(tmp_path: Path, links: bool, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not links:
        without_links(monkeypatch)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    started = locks._started(dead.pid)
    dead.wait()
    many = 8
    for number in range(times):
        by_hand(tmp_path, boot=locks._boot(), pid=dead.pid, started=started, token=f"dead {number}")
        start, told = forked.Barrier(many, timeout=60), forked.SimpleQueue()
        processes = [forked.Process(target=contender, args=(str(tmp_path), start, told)) for _ in range(many)]
        for one in processes:
            one.start()
        for one in processes:
            one.join(120)
            assert one.exitcode == 0
        said = []
        while not told.empty():
            said.append(told.get())
        assert said.count(True) == 1 and said.count(False) == many - 1 and said.count("still") == 1, said
        assert {p.name for p in tmp_path.iterdir()} == {LOCK}  # the winner ended without a word


def test_another_machine_that_is_silent_is_taken_over_after_a_while(tmp_path: Path, impatient: None) -> None:
    by_hand(tmp_path)
    began = time.monotonic()
    with pytest.warns(UserWarning, match=r"held by process \d+ on elsewhere since .*Waiting up to 0 s") as said:
        held = Lock(tmp_path, "a")
    assert time.monotonic() - began >= 0.5 and len(said) == 1
    held.check()
    held.release()


def test_the_same_boot_in_another_pid_namespace_is_another_machine(tmp_path: Path, impatient: None) -> None:
    by_hand(tmp_path, boot=locks._boot(), pid_namespace="pid:[1]", pid=2**22 + 7)  # no such process here
    with pytest.warns(UserWarning, match="Waiting"):
        Lock(tmp_path, "a").release()


def test_another_machine_that_lives_is_not(tmp_path: Path, impatient: None) -> None:
    by_hand(tmp_path)
    ended = threading.Event()

    def raise_count() -> None:
        count = 0
        while not ended.wait(0.2):
            count += 1
            by_hand(tmp_path, count=count)

    thread = threading.Thread(target=raise_count)
    thread.start()
    try:
        with pytest.warns(UserWarning, match="Waiting"), pytest.raises(Locked, match="on elsewhere since"):
            Lock(tmp_path, "a")
    finally:
        ended.set()
        thread.join()
    assert content(tmp_path)["host"] == "elsewhere"


def test_a_lock_that_somebody_else_took_meanwhile_is_put_back(tmp_path: Path) -> None:
    by_hand(tmp_path, token="judged")
    judged = (tmp_path / LOCK).read_bytes()
    (tmp_path / LOCK).unlink()
    held = Lock(tmp_path, "faster")
    with pytest.raises(Locked, match=r"\(run faster\)"):
        locks._take_over(tmp_path / LOCK, judged, {**locks._this_process(), "run": "slower", "token": "s", "count": 0})
    held.check()
    assert [p.name for p in tmp_path.iterdir()] == [LOCK]
    held.release()


@pytest.mark.parametrize("garbage", [b"\0\0\0", b"[" * 10**5, b'"x"\n', b'{"pid": 1e999, "token": {}}\n'])
def test_a_damaged_lock_does_not_block(tmp_path: Path, garbage: bytes, impatient: None) -> None:
    (tmp_path / LOCK).write_bytes(garbage)
    with pytest.warns(UserWarning, match="Waiting"):
        Lock(tmp_path, "a").release()


# Where there are no links


def without_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)


def test_without_links_a_file_is_created_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_links(monkeypatch)
    held = Lock(tmp_path, "a")
    with pytest.raises(Locked):
        Lock(tmp_path, "a")
    held.check()
    held.release()
    assert list(tmp_path.iterdir()) == []


def test_an_empty_lock_is_held_until_it_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    without_links(monkeypatch)
    (tmp_path / LOCK).touch()
    os.utime(tmp_path / LOCK, (time.time() - 100, time.time() - 100))
    Lock(tmp_path, "a").release()  # at once
    (tmp_path / LOCK).touch()
    began = time.monotonic()
    with pytest.warns(UserWarning, match="Waiting"):
        Lock(tmp_path, "a").release()
    assert time.monotonic() - began > 0.3
    (tmp_path / LOCK).touch()
    threading.Timer(0.2, by_hand, (tmp_path,)).start()  # its writer was slow
    with pytest.warns(UserWarning, match="Waiting"), pytest.raises(Locked, match="elsewhere"):
        Lock(tmp_path, "a")


# A lock that is lost


def test_a_stopped_writer_notices_that_it_was_taken_over(tmp_path: Path, impatient: None) -> None:
    code = "lock._boot = lambda: 'another boot'\nlock.HEARTBEAT_S = 0.05\n"
    code += "held = lock.Lock(F, 'first')\nprint('ready')\n"
    code += "while not (F / 'go').exists(): time.sleep(0.01)\n"
    code += "try:\n    held.check()\n    print('mine')\nexcept lock.LostLock as error:\n    print(error)\n"
    with process(tmp_path, code) as holder:
        until = time.monotonic() + 20
        while content(tmp_path)["count"] < 2:
            assert time.monotonic() < until
            time.sleep(0.02)
        with pytest.warns(UserWarning, match="Waiting"), pytest.raises(Locked):
            Lock(tmp_path, "second")  # its count rises
        holder.send_signal(signal.SIGSTOP)
        with pytest.warns(UserWarning, match="Waiting"):
            held = Lock(tmp_path, "second")
        before = (tmp_path / LOCK).read_bytes()
        holder.send_signal(signal.SIGCONT)
        time.sleep(0.3)  # beats of the one that lost it
        assert (tmp_path / LOCK).read_bytes() == before
        (tmp_path / "go").touch()
        out, _ = holder.communicate(timeout=30)
        assert f"lock.json: it is held by process {os.getpid()} on " in out and "(run second)" in out
    held.check()
    held.release()


def test_the_count_is_raised_while_the_process_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "HEARTBEAT_S", 0.02)
    held = Lock(tmp_path, "a")
    until = time.monotonic() + 20
    while content(tmp_path)["count"] < 3:
        assert time.monotonic() < until
        time.sleep(0.02)
    held.check()
    held.release()
    time.sleep(0.1)
    assert list(tmp_path.iterdir()) == []  # no beat brings it back


def test_a_removed_lock_is_lost(tmp_path: Path, impatient: None) -> None:
    held = Lock(tmp_path, "a")
    (tmp_path / LOCK).unlink()
    with pytest.raises(LostLock, match=r"no longer holds .*: it was removed"):
        held.check()
    other = Lock(tmp_path, "b")
    held.release()
    other.check()  # the end of the one does not release the other's
    other.release()


def test_a_lock_that_comes_back_is_not_lost(tmp_path: Path) -> None:
    held = Lock(tmp_path, "a")
    (tmp_path / LOCK).rename(tmp_path / "taken up")
    threading.Timer(0.2, (tmp_path / "taken up").rename, (tmp_path / LOCK,)).start()
    held.check()
    held.release()


def child(held: Lock, told: Any) -> None:
    try:
        held.check()
    except LostLock as error:
        told.put(str(error))
    held.release()
    gc.collect()


def test_a_forked_child_neither_holds_nor_releases(tmp_path: Path) -> None:
    held = Lock(tmp_path, "a")
    told = forked.SimpleQueue()
    one = forked.Process(target=child, args=(held, told))
    one.start()
    one.join(30)
    assert one.exitcode == 0
    assert "forked from it" in told.get()
    held.check()
    held.release()


# Runs


SIMULATE = """
from tests.records import old_runs
def batches(*given, before=old_runs.batches):
    if given[1] == 3:
        print('ready')
        while not (F.parent / 'go').exists(): time.sleep(0.01)
    return before(*given)
old_runs.batches = batches
old_runs.simulated(F, resume=True)
"""


def test_two_resumes_of_one_run(tmp_path: Path) -> None:
    whole = simulated(tmp_path / "whole").history
    run = tmp_path / "run"
    with process(run, SIMULATE) as holder:
        files = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
        with pytest.raises(Locked, match=rf"is being written by process {holder.pid} on"):
            simulated(run, resume=True)
        with pytest.raises(FileExistsError):
            simulated(run)
        assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == files
        holder.kill()
        assert simulated(run, resume=True).history == whole  # at once
    assert not (run / LOCK).exists()


def test_a_run_that_was_taken_over_writes_nothing_more(tmp_path: Path, impatient: None) -> None:
    run = tmp_path / "run"
    before: dict[Path, bytes] = {}

    def logger(row: dict[str, Any]) -> None:
        if row["round"] == 2:
            by_hand(run)
            before.update({p: p.read_bytes() for p in run.rglob("*") if p.is_file()})

    with pytest.raises(LostLock, match="is held by process .* on elsewhere"):
        simulated(run, loggers=[logger])
    after = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    assert after == before


def test_a_failed_run_releases_its_folder(tmp_path: Path) -> None:
    with pytest.raises(InterruptedError):
        simulated(tmp_path / "run", stop=2)
    assert not (tmp_path / "run" / LOCK).exists()
    with pytest.raises(ValueError, match="another seed"):
        simulated(tmp_path / "run", resume=True, seed=7)
    assert not (tmp_path / "run" / LOCK).exists()
    assert len(simulated(tmp_path / "run", resume=True).history) == 5


def test_real_nodes_are_refused_together(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with process(run, SIMULATE) as holder:
        files = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
        answers = with_nodes(tmp_path / "out", run, resume=True)
        assert len(answers) == NODES
        assert all(f"is being written by process {holder.pid} on" in answer["error"] for answer in answers), answers
        assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == files


def test_real_nodes_wait_for_node_0_longer_than_their_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 0 takes over the lock of another machine; the others see signs of life from it meanwhile."""
    monkeypatch.setattr(locks, "STALE_AFTER_S", 8.0)
    run = tmp_path / "run"
    with_nodes(tmp_path / "first", run, rounds=2)
    assert not (run / LOCK).exists()  # all rounds are done
    by_hand(run)
    answers = with_nodes(tmp_path / "out", run, resume=True, timeout=3.0)
    assert [answer["error"] for answer in answers] == ["", ""], answers
    assert "Waiting up to 8 s" in answers[0]["said"][0] and len((run / "history.jsonl").read_bytes().splitlines()) == 5
