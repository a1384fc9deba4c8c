"""A disk of a few megabytes that any process of this user can write to, and that can be full.

It is a tmpfs in a mount namespace of its own, reached through `/proc/<process>/root`: a write that it has no room for
fails in the kernel with "No space left on device", and the user's own disk keeps its room.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from tailopt.arguments import whole_number
from tailopt.faults.spaces import Space

BALLAST = ".ballast"
MOST = 1 << 30  # bytes that `fill` is willing to write
BLOCK = 1 << 16


class Disk:
    """A small disk, with a path for the run folder. No root is needed where user namespaces are permitted.

        with faults.Disk(16 << 20) as disk:
            subprocess.run(["torchrun", "--nproc-per-node", "3", "train.py", "--out", str(disk.path / "run")])

    The path goes through a link that must not be resolved: what `Path.resolve` makes of it is another folder.

    Args:
        size: in bytes.

    Raises:
        Unavailable: the system does not permit it; the message says what is missing.
    """

    def __init__(self, size: int = 16 << 20) -> None:
        whole_number("size", size, low=1 << 16, high=MOST, hint="It is a number of bytes from 64 KiB to 1 GiB.")
        self._point = tempfile.mkdtemp(prefix="tailopt-disk-")
        try:
            mount = f"mount -t tmpfs -o size={size},mode=700 tailopt {shlex.quote(self._point)}"
            self._space = Space("mount", mount)
        except BaseException:
            os.rmdir(self._point)
            raise
        self.path = Path(f"/proc/{self._space.pid}/root{self._point}")

    def fill(self) -> None:
        """Leave no room."""
        fill(self.path)

    def empty(self) -> None:
        """Give the room back that `fill` took."""
        empty(self.path)

    def close(self) -> None:
        """Remove it, with all that is on it."""
        self._space.close()
        with contextlib.suppress(OSError):
            os.rmdir(self._point)

    def __enter__(self) -> Disk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def fill(folder: str | os.PathLike[str]) -> None:
    """Write zeros into a folder until its disk is full; refused where that would be more than 1 GiB."""
    check(folder)
    try:
        with open(Path(folder, BALLAST), "ab", buffering=0) as file:
            while True:
                file.write(bytes(BLOCK))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


def empty(folder: str | os.PathLike[str]) -> None:
    """Remove what `fill` wrote."""
    Path(folder, BALLAST).unlink(missing_ok=True)


def check(folder: str | os.PathLike[str]) -> None:
    """Refuse a folder whose disk has too much room to fill."""
    room = shutil.disk_usage(folder).total
    if room > MOST:
        raise ValueError(
            f"Invalid folder: {os.fspath(folder)} is on a disk of {room / (1 << 30):.1f} GiB, which others may need; "
            "need one of at most 1 GiB. Put the run folder on a faults.Disk."
        )
