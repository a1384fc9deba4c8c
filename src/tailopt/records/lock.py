"""One writer per run folder: lock.json names the process.

    {"host", "boot", "pid_namespace", "pid", "started", "run", "since", "token", "count"}

The file is written in full under a hidden name and put in place by a hard link, which fails if a lock exists. On disks
without hard links it is created by O_EXCL, and may be empty for a moment: an empty one counts as held until it is 60 s
old. While the writer lives, a thread raises `count` every 10 s. It writes in place, and only into the file that has its
token, so it never touches a lock that another process took over.

    held by a process of the same boot and pid namespace    until that process is gone
    held by any other process                               until `count` has not changed for 60 s of the reader's clock

Taking over a stale lock: it is renamed to a unique name, and its token is compared with the one that was examined; a
lock that another process took meanwhile is put back. Then a new one is linked. Processes of one machine do all this
under a lock of the folder (flock), so that none of them sees an intermediate state. A writer compares the token before
every row and every manifest: a writer that was stopped for a minute, while another machine took over its run, ends with
an error. Between that comparison and the write, a few microseconds remain in which a process can be stopped and lose
its lock: only a file system with fencing could close that gap.

Readers need no lock. A forked child does not hold the locks of its parent.
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
HEARTBEAT_S = 10.0  # between two raises of the count
STALE_AFTER_S = 60.0  # a count that has not changed for so long, or an empty lock of that age, is nobody's
EXIT_GRACE_S = 1.0  # for a process that was just killed to disappear
REAPPEAR_S = 2.0  # for another process to put back a lock that it renamed by mistake
_MAX_BYTES = 1 << 16  # of a lock that are read
_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)

_held_here: dict[str | bytes, Path] = {}  # by token, the locks that this process holds


class Locked(RuntimeError):
    """Another writer holds the run folder."""


class LostLock(RuntimeError):
    """Another process took the run folder over, or its lock was removed."""


class Lock:
    """The lock of a run folder, held until `release`, until the object is collected, or until the process ends.

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
        _acquire(self.path, {**_this_process(), "run": run, "token": self.token, "count": 0})
        _held_here[self.token] = self.path
        stopped = threading.Event()
        threading.Thread(
            target=_heartbeat, args=(self.path, self.token, stopped), name="tailopt lock", daemon=True
        ).start()
        self._finalizer = weakref.finalize(self, _release, self.path, self.token, self._pid, stopped)

    def check(self) -> None:
        """Raise LostLock unless this process still holds the folder."""
        if os.getpid() != self._pid:
            raise LostLock(
                f"{self.path} belongs to process {self._pid}, and this is {os.getpid()}, forked from it. Write in the "
                "process that began the run."
            )
        holder = _read(self.path)
        deadline = time.monotonic() + REAPPEAR_S
        # A process that examined an older lock may have renamed this one, and then puts it back.
        while holder is None and time.monotonic() < deadline:
            time.sleep(0.01)
            holder = _read(self.path)
        if holder is not None and holder.get("token") == self.token:
            return
        why = "it was removed" if holder is None else f"it is held by {describe_holder(holder)}"
        raise LostLock(
            f"This process no longer holds {self.path}: {why}. Nothing more is written here. If the run should go on "
            "in this process, stop the other one and resume."
        )

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        self._finalizer()


def describe_holder(holder: dict[str, Any]) -> str:
    """Return in words which process holds a lock."""
    keys = ("pid", "host", "since", "run")
    pid, host, since, run = (str(holder.get(key, "unknown"))[:80] for key in keys)
    return f"process {pid} on {host} since {since} (run {run})"


def _acquire(path: Path, lock: dict[str, Any]) -> None:
    """Put a lock in place; wait for an existing one whose holder cannot be seen until it is known to be stale."""
    first_seen: tuple[bytes, float] | None = None  # the content of the existing lock, and since when it is that
    began, warned = time.monotonic(), False
    while True:
        with _folder_lock(path.parent):
            if _create(path, lock):
                return
            data = _bytes(path)
            if data is None:  # released in between
                continue
            now = time.monotonic()
            if first_seen is None or first_seen[0] != data:
                if first_seen is not None and data and _parse(data):
                    raise _locked(path, data)  # its count was raised, or it is a new lock: that process lives
                first_seen = data, now
            alive = _alive(path, data)
            # A process that was killed a moment ago may still be listed, so a live one is believed after the grace.
            if alive is True and now - began >= EXIT_GRACE_S:
                raise _locked(path, data)
            if alive is False or (alive is None and now - first_seen[1] >= STALE_AFTER_S):
                _take_over(path, data, lock)
                return
        if alive is None and not warned:
            warned = True
            warnings.warn(
                f"{path} is held by {describe_holder(_parse(data))}, and whether that process lives cannot be seen "
                f"from here. Waiting up to {STALE_AFTER_S:.0f} s for a sign of life.",
                UserWarning,
                stacklevel=5,
            )
        if alive and _token(data) in _held_here:
            gc.collect()  # releases the lock of an unreachable optimizer that refers to itself
        time.sleep(0.02 if alive else min(0.5, STALE_AFTER_S / 10))


def _take_over(path: Path, examined: bytes, lock: dict[str, Any]) -> None:
    """Replace a stale lock; Locked if another process was faster."""
    renamed = disk.hidden_path(path)
    try:
        os.rename(path, renamed)
    except FileNotFoundError:
        pass  # another process renamed it, or it was released
    else:
        data = _bytes(renamed) or b""
        if _token(data) != _token(examined):  # not the stale lock: another process took over in between
            with contextlib.suppress(FileExistsError):
                _restore(renamed, path)
            renamed.unlink(missing_ok=True)
            raise _locked(path, data)
        renamed.unlink(missing_ok=True)
    if not _create(path, lock):
        raise _locked(path, _bytes(path) or b"")


def _create(path: Path, lock: dict[str, Any]) -> bool:
    """Put a lock in place if there is none; return whether it did."""
    disk.require_regular_file(path)
    if path.exists():
        return False
    data = _encode(lock)
    temporary = disk.hidden_path(path)
    try:
        temporary.write_bytes(data)
        os.link(temporary, path)
        return True
    except FileExistsError:
        # NFS repeats a request whose answer was lost: then the link that exists is our own.
        return temporary.stat().st_nlink > 1
    except (OSError, AttributeError) as error:
        if isinstance(error, OSError) and error.errno not in _NO_HARD_LINKS:
            raise
    finally:
        temporary.unlink(missing_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    except FileExistsError:
        return False
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
    except OSError:  # a full disk: an empty lock would keep every process out for a minute
        path.unlink(missing_ok=True)
        raise
    return True


def _restore(renamed: Path, path: Path) -> None:
    """Put a lock back in its place; by a copy on disks without hard links."""
    try:
        os.link(renamed, path)
    except FileExistsError:
        raise
    except (OSError, AttributeError):
        with open(path, "xb") as file:
            file.write(renamed.read_bytes())


def _encode(lock: dict[str, Any]) -> bytes:
    """Return a lock as bytes; the count has a fixed width and comes last, so that it can be raised in place."""
    text = json.dumps({key: value for key, value in lock.items() if key != "count"})
    return f'{text[:-1]}, "count": {lock["count"]:>20}}}\n'.encode()


def _heartbeat(path: Path, token: str, stopped: threading.Event) -> None:
    """Raise the count of a lock until it is released."""
    count = 0
    while not stopped.wait(HEARTBEAT_S):
        count += 1
        # A disk may be away for a moment; if it stays away, the next row raises an error.
        with contextlib.suppress(OSError, ValueError):
            descriptor = disk.open_regular_file(path, os.O_RDWR)
            try:
                data = os.read(descriptor, _MAX_BYTES)
                if _token(data) == token:  # the open file is ours, even if another process renames it now
                    os.lseek(descriptor, len(data) - 22, os.SEEK_SET)
                    os.write(descriptor, f"{count:>20}".encode())
            finally:
                os.close(descriptor)


def _release(path: Path, token: str, pid: int, stopped: threading.Event) -> None:
    if os.getpid() != pid:
        return  # a forked child must not release its parent's lock, and in it the event may be locked for ever
    stopped.set()
    _held_here.pop(token, None)
    with contextlib.suppress(OSError, ValueError), _folder_lock(path.parent):
        if _token(_bytes(path) or b"") == token:
            path.unlink()


@contextlib.contextmanager
def _folder_lock(folder: Path) -> Iterator[None]:
    """Keep other processes of this machine from taking or releasing a lock here, if the system can do that."""
    descriptor = None
    if fcntl is not None:
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + 5.0  # a child that was forked meanwhile may keep it for ever
        while descriptor is not None and time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.002)
            except OSError:  # this file system has no flock
                break
        yield
    finally:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


# Processes


def _this_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "boot": _boot(),
        "pid_namespace": _pid_namespace(),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "since": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"),
    }


def _alive(path: Path, data: bytes) -> bool | None:
    """Whether the process that wrote a lock lives; None if only the count can show that."""
    if not data:
        return None if _age(path) < STALE_AFTER_S else False
    lock = _parse(data)
    same = (lock.get("boot"), lock.get("pid_namespace")) == (_boot(), _pid_namespace())
    pid, started = lock.get("pid"), lock.get("started")
    if not same or not _boot() or type(pid) is not int or type(started) is not int or pid < 1:
        return None
    if (pid, started) == (os.getpid(), _started(os.getpid())):
        return _token(data) in _held_here  # if not, this process wrote it before it called exec
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # another user's process, and it exists
    now = _started(pid)
    return None if now is None else now == started


def _boot() -> str | None:
    """Return the id of this boot of the machine; None if the system has none (macOS, Windows)."""
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
    """Return when a process was started, in ticks of this boot; -1 if it runs no more code, None if that is unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        exiting = int(fields[6]) & 4  # PF_EXITING: a large process takes seconds to free its memory
        return -1 if fields[0] in (b"Z", b"X") or exiting else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def _age(path: Path) -> float:
    """Return how old a file is, by the clock of its disk, which may be another machine's."""
    temporary = disk.hidden_path(path)
    try:
        temporary.write_bytes(b"")
        return temporary.stat().st_mtime - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
    finally:
        temporary.unlink(missing_ok=True)


# The content of a lock


def _bytes(path: Path) -> bytes | None:
    try:
        descriptor = disk.open_regular_file(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        return os.read(descriptor, _MAX_BYTES)
    finally:
        os.close(descriptor)


def _parse(data: bytes) -> dict[str, Any]:
    """Return the content of a lock; empty if it cannot be read."""
    try:
        lock = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return lock if isinstance(lock, dict) else {}


def _read(path: Path) -> dict[str, Any] | None:
    data = _bytes(path)
    return None if data is None else _parse(data)


def _token(data: bytes) -> str | bytes:
    """Return the token of a lock; the bytes themselves if it has none, so that two such locks can be compared."""
    token = _parse(data).get("token")
    return token if isinstance(token, str) else data


def _locked(path: Path, data: bytes) -> Locked:
    holder = _parse(data)
    here = holder.get("pid") == os.getpid() and _token(data) in _held_here
    remedy = (
        "It is this process: end the run, or delete the optimizer, that began there before."
        if here
        else "Wait until that run has ended, or stop it; a run that was killed is taken over by itself."
    )
    return Locked(f"{path.parent} is being written by {describe_holder(holder)}, as {path.name} says. {remedy}")
