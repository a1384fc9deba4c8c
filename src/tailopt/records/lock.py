"""One writer for a run folder: lock.json says who it is.

    {"host", "boot", "pid_namespace", "pid", "started", "run", "since", "token", "count"}

The file is written in full under a hidden name and put in place by a hard link, which fails where a lock exists. Where
links are not supported it is created by O_EXCL, and may be empty for a moment: an empty one counts as held until it is
60 s old. While the writer lives, a thread raises `count` every 10 s, in place, in the very file that has its token: a
lock that another process took over is never touched.

    held by a process of the same boot and pid namespace    until that process is gone
    held by any other                                       until `count` has not changed for 60 s of the reader's clock

A lock that is not held any more is renamed to a unique name, and its token is compared with the one that was judged: a
lock that somebody else took meanwhile is put back. Then a new one is linked. On one machine the whole of it happens
under a lock of the folder (flock), so that nobody sees the moment between. A writer compares the token before every row
and every manifest: one that was stopped for a minute, and whose run another machine took over, ends with an error.
Between that look and the write a few microseconds remain, in which a process can be stopped and lose its lock: only a
file system with fencing could close that gap.

Readers need no lock. A forked child holds none of its parent's.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import socket
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from uuid import uuid4

from tailopt.records import disk

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = "lock.json"
BEAT = 10.0  # seconds between two raises of the count
PATIENCE = 60.0  # seconds after which a count that has not changed, or an empty lock, is nobody's
GRACE = 1.0  # seconds in which a process that was just killed may end
REAPPEAR = 2.0  # seconds in which a lock comes back that was taken up by mistake
_MOST = 1 << 16  # bytes of a lock that are read
_UNLINKABLE = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)

_mine: dict[str | bytes, Path] = {}  # by token, the locks that this process holds


class Locked(RuntimeError):
    """Another writer holds the run folder."""


class LostLock(RuntimeError):
    """Another process took the run folder over, or its lock was removed."""


class Lock:
    """A run folder that is held for writing; `release` lets it go, and so do its end as an object and the process's.

    Examples:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> lock = Lock(folder, "4f7a")
        >>> Lock(folder, "4f7a")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        tailopt.records.lock.Locked: ... is being written by process ...
        >>> lock.release()
        >>> Lock(folder, "4f7a").release()
    """

    def __init__(self, folder: Path, run: str) -> None:
        self.path = folder / LOCK
        self.token = uuid4().hex
        self._pid = os.getpid()
        _take(self.path, {**_myself(), "run": run, "token": self.token, "count": 0})
        _mine[self.token] = self.path
        stopped = threading.Event()
        threading.Thread(target=_beat, args=(self.path, self.token, stopped), name="tailopt lock", daemon=True).start()
        self._end = weakref.finalize(self, _release, self.path, self.token, self._pid, stopped)

    def check(self) -> None:
        """Raise LostLock unless this process still holds the folder."""
        if os.getpid() != self._pid:
            raise LostLock(
                f"{self.path} belongs to process {self._pid}, and this is {os.getpid()}, forked from it. Write in the "
                "process that began the run."
            )
        found = _read(self.path)
        until = time.monotonic() + REAPPEAR
        while found is None and time.monotonic() < until:  # somebody who judged an older lock puts this one back
            time.sleep(0.01)
            found = _read(self.path)
        if found is not None and found.get("token") == self.token:
            return
        who = "it was removed" if found is None else f"it is held by {told(found)}"
        raise LostLock(
            f"This process holds {self.path} no more: {who}. Nothing more is written here. If the run should go on in "
            "this process, stop the other one and resume."
        )

    def release(self) -> None:
        """Let the folder go; again does nothing."""
        self._end()


def told(holder: dict[str, Any]) -> str:
    """Who holds a lock, in words."""
    keys = ("pid", "host", "since", "run")
    pid, host, since, run = (str(holder.get(key, "unknown"))[:80] for key in keys)
    return f"process {pid} on {host} since {since} (run {run})"


def _take(path: Path, mine: dict[str, Any]) -> None:
    """Put a lock in place, waiting until a silent one is known to be nobody's."""
    watch: tuple[bytes, float] | None = None  # what the lock held when it was first seen so, and when
    began, told_so = time.monotonic(), False
    while True:
        with _alone(path.parent):
            if _put(path, mine):
                return
            data = _bytes(path)
            if data is None:  # released in between
                continue
            now = time.monotonic()
            if watch is None or watch[0] != data:
                if watch is not None and data and _parsed(data):
                    raise _locked(path, data)  # its count was raised, or it is another's: somebody lives there
                watch = data, now
            alive = _alive(path, data)
            if alive is True and now - began >= GRACE:
                raise _locked(path, data)
            if alive is False or (alive is None and now - watch[1] >= PATIENCE):
                _take_over(path, data, mine)
                return
        if alive is None and not told_so:
            told_so = True
            warnings.warn(
                f"{path} is held by {told(_parsed(data))}, and whether that process lives cannot be seen from here. "
                f"Waiting up to {PATIENCE:.0f} s for a sign of life.",
                UserWarning,
                stacklevel=5,
            )
        if alive and _token(data) in _mine:
            gc.collect()  # an optimizer that nobody can reach any more, but that refers to itself, holds nothing
        time.sleep(0.02 if alive else min(0.5, PATIENCE / 10))


def _take_over(path: Path, judged: bytes, mine: dict[str, Any]) -> None:
    """Replace a lock that is nobody's; Locked where somebody else was faster."""
    taken = disk.hidden(path)
    try:
        os.rename(path, taken)
    except FileNotFoundError:
        pass  # somebody else took it up, or it was released
    else:
        data = _bytes(taken) or b""
        if _token(data) != _token(judged):
            with contextlib.suppress(FileExistsError):
                _link(taken, path)
            taken.unlink(missing_ok=True)
            raise _locked(path, data)
        taken.unlink(missing_ok=True)
    if not _put(path, mine):
        raise _locked(path, _bytes(path) or b"")


def _put(path: Path, mine: dict[str, Any]) -> bool:
    """Put a lock where there is none; whether that was so."""
    disk.refuse_strange(path)
    if path.exists():
        return False
    data = _written(mine)
    fresh = disk.hidden(path)
    try:
        fresh.write_bytes(data)
        os.link(fresh, path)
        return True
    except FileExistsError:
        return fresh.stat().st_nlink > 1  # NFS repeats a request whose answer was lost
    except (OSError, AttributeError) as error:
        if isinstance(error, OSError) and error.errno not in _UNLINKABLE:
            raise
    finally:
        fresh.unlink(missing_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    except FileExistsError:
        return False
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
    except OSError:  # a full disk: an empty lock would keep everybody out for a minute
        path.unlink(missing_ok=True)
        raise
    return True


def _link(source: Path, path: Path) -> None:
    """A lock back in its place; by a copy where links are not supported."""
    try:
        os.link(source, path)
    except FileExistsError:
        raise
    except (OSError, AttributeError):
        with open(path, "xb") as file:
            file.write(source.read_bytes())


def _written(lock: dict[str, Any]) -> bytes:
    """A lock as its bytes; the count has a fixed width and comes last, so that it can be raised in place."""
    text = json.dumps({key: value for key, value in lock.items() if key != "count"})
    return f'{text[:-1]}, "count": {lock["count"]:>20}}}\n'.encode()


def _beat(path: Path, token: str, stopped: threading.Event) -> None:
    count = 0
    while not stopped.wait(BEAT):
        count += 1
        with contextlib.suppress(OSError, ValueError):  # a disk that is away for a moment; the next write finds out
            descriptor = disk.opened(path, os.O_RDWR)
            try:
                data = os.read(descriptor, _MOST)
                if _token(data) == token:  # this very file is ours, wherever it may be renamed to meanwhile
                    os.lseek(descriptor, len(data) - 22, os.SEEK_SET)
                    os.write(descriptor, f"{count:>20}".encode())
            finally:
                os.close(descriptor)


def _release(path: Path, token: str, pid: int, stopped: threading.Event) -> None:
    if os.getpid() != pid:
        return  # a forked child's end is not the parent's, and there the event may be locked for ever
    stopped.set()
    _mine.pop(token, None)
    with contextlib.suppress(OSError, ValueError), _alone(path.parent):
        if _token(_bytes(path) or b"") == token:
            path.unlink()


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other process of this machine takes or releases a lock here; where that is not to be had, without it."""
    descriptor = None
    if fcntl is not None:
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY)
    try:
        until = time.monotonic() + 5.0  # a child that was forked in between may keep it; nobody waits for ever
        while descriptor is not None and time.monotonic() < until:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.002)
            except OSError:  # this file system has none
                break
        yield
    finally:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


# Who is who


def _myself() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "boot": _boot(),
        "pid_namespace": _pid_namespace(),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "since": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"),
    }


def _alive(path: Path, data: bytes) -> bool | None:
    """Whether a lock is held; None where that can only be seen by its count."""
    if not data:
        return None if _age(path) < PATIENCE else False
    lock = _parsed(data)
    same = (lock.get("boot"), lock.get("pid_namespace")) == (_boot(), _pid_namespace())
    pid, started = lock.get("pid"), lock.get("started")
    if not same or not _boot() or type(pid) is not int or type(started) is not int or pid < 1:
        return None
    if (pid, started) == (os.getpid(), _started(os.getpid())):
        return _token(data) in _mine  # else it was this process before it became another program
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # it is somebody else's, and there
    now = _started(pid)
    return None if now is None else now == started


def _boot() -> str | None:
    """The id of this boot of the machine; None where there is none, as on macOS and Windows."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _pid_namespace() -> str | None:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _started(pid: int) -> int | None:
    """When a process was started, in ticks of this boot; -1: it has ended, or runs no more code; None: not known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        exiting = int(fields[6]) & 4  # PF_EXITING: a large one takes seconds to give its memory back
        return -1 if fields[0] in (b"Z", b"X") or exiting else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def _age(path: Path) -> float:
    """How old a file is, by the clock of its disk."""
    fresh = disk.hidden(path)
    try:
        fresh.write_bytes(b"")
        return fresh.stat().st_mtime - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
    finally:
        fresh.unlink(missing_ok=True)


# What stands in a lock


def _bytes(path: Path) -> bytes | None:
    try:
        descriptor = disk.opened(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        return os.read(descriptor, _MOST)
    finally:
        os.close(descriptor)


def _parsed(data: bytes) -> dict[str, Any]:
    """What a lock says; nothing where it cannot be read."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _read(path: Path) -> dict[str, Any] | None:
    data = _bytes(path)
    return None if data is None else _parsed(data)


def _token(data: bytes) -> str | bytes:
    """Of the lock in these bytes; the bytes themselves where it has none."""
    found = _parsed(data).get("token")
    return found if isinstance(found, str) else data


def _locked(path: Path, data: bytes) -> Locked:
    holder = _parsed(data)
    here = holder.get("pid") == os.getpid() and _token(data) in _mine
    remedy = (
        "It is this process: end the run, or delete the optimizer, that began there before."
        if here
        else "Wait until that run has ended, or stop it; a run that was killed is taken over by itself."
    )
    return Locked(f"{path.parent} is being written by {told(holder)}, as {path.name} says. {remedy}")
