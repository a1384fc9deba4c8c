"""A disk of a few megabytes that any process of this user can write to, and that can be full.

It is a tmpfs in a mount namespace of its own, reached through `/proc/<process>/root`. A write for which it has no room
fails in the kernel with "No space left on device"; the user's own disk is not touched.
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
from tailopt.faults.namespaces import Namespace

BALLAST = ".ballast"
MAX_BYTES = 1 << 30  # of a disk that `fill` is willing to fill
BLOCK_BYTES = 1 << 16


class Disk:
    """A small disk, with a path for the run folder. No root is needed where user namespaces are permitted.

        with faults.Disk(16 << 20) as disk:
            subprocess.run(["torchrun", "--nproc-per-node", "3", "train.py", "--out", str(disk.path / "run")])

    The path goes through a link that must not be resolved: `Path.resolve` turns it into another folder.

    Args:
        size: in bytes.

    Raises:
        Unavailable: the system does not permit it; the message says why.
    """

    def __init__(self, size: int = 16 << 20) -> None:
        whole_number("size", size, low=1 << 16, high=MAX_BYTES, hint="It is a number of bytes from 64 KiB to 1 GiB.")
        self._mount_point = tempfile.mkdtemp(prefix="tailopt-disk-")
        try:
            mount = f"mount -t tmpfs -o size={size},mode=700 tailopt {shlex.quote(self._mount_point)}"
            self._namespace = Namespace("mount", mount)
        except BaseException:
            os.rmdir(self._mount_point)
            raise
        self.path = Path(f"/proc/{self._namespace.pid}/root{self._mount_point}")

    def fill(self) -> None:
        """Fill the disk, so that no further byte can be written."""
        fill(self.path)

    def empty(self) -> None:
        """Remove what `fill` wrote."""
        empty(self.path)

    def close(self) -> None:
        """Remove the disk, with everything on it."""
        self._namespace.close()
        with contextlib.suppress(OSError):
            os.rmdir(self._mount_point)

    def __enter__(self) -> Disk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def fill(folder: str | os.PathLike[str]) -> None:
    """Write zeros into a folder until its disk is full; ValueError for a disk of more than 1 GiB."""
    check_small(folder)
    try:
        with open(Path(folder, BALLAST), "ab", buffering=0) as file:
            while True:
                file.write(bytes(BLOCK_BYTES))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


def empty(folder: str | os.PathLike[str]) -> None:
    """Remove what `fill` wrote."""
    Path(folder, BALLAST).unlink(missing_ok=True)


def check_small(folder: str | os.PathLike[str]) -> None:
    """Raise ValueError if the disk of a folder is too large to be filled."""
    size = shutil.disk_usage(folder).total
    if size > MAX_BYTES:
        raise ValueError(
            f"Invalid folder: {os.fspath(folder)} is on a disk of {size / (1 << 30):.1f} GiB, which others may need; "
            "need one of at most 1 GiB. Put the run folder on a faults.Disk."
        )
