"""Files that a kill or a power cut cannot leave half written.

    write under a hidden name -> fsync -> rename -> fsync the folder

A rename within a folder happens or does not; whoever reads sees the old content or the new. Folders are removed the
other way round: renamed to a hidden name first, so that no half-emptied one is ever mistaken for a whole one. Hidden
names that a kill leaves behind mean nothing and may be removed at any time.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from uuid import uuid4

_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFDIR: "a folder",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def opened(path: Path, flags: int, follow: bool = False) -> int:
    """A descriptor of a regular file. A pipe is refused and never waited for, a link only where `follow` says so."""
    flags |= getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    if not follow:
        refuse_strange(path)  # O_NOFOLLOW below is for a link that appears in between
        flags |= getattr(os, "O_NOFOLLOW", 0)
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError:
        refuse_strange(path, follow)  # a pipe that nobody reads
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        refuse_strange(path, follow)
    return descriptor


def read(path: Path) -> bytes:
    """The content of a regular file, or of one that a link leads to."""
    with os.fdopen(opened(path, os.O_RDONLY, follow=True), "rb") as file:
        return file.read()


def refuse_strange(path: Path, follow: bool = False) -> None:
    """Raise where something else than a regular file has that name."""
    try:
        mode = (path.stat() if follow else path.lstat()).st_mode
    except OSError:
        return
    if not stat.S_ISREG(mode):
        what = _KINDS.get(stat.S_IFMT(mode), "no regular file")
        raise ValueError(f"{path} is {what}; need a regular file. Remove it, or bring the file back from a copy.")


def sync(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders, and keeps names safe itself
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, data: bytes) -> None:
    """Give a file new content, all at once."""
    fresh = hidden(path)
    try:
        fresh.write_bytes(data)
        sync(fresh)
        os.replace(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    sync(path.parent)


def overwrite(path: Path, data: bytes) -> bool:
    """Give a file new content of the same length, in one call of the system; False where it has another length.

    A kill leaves the old content or the new, a power cut may leave a part of each. Nothing waits for the disk.
    """
    try:
        descriptor = opened(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        if os.fstat(descriptor).st_size != len(data):
            return False
        return os.write(descriptor, data) == len(data)
    finally:
        os.close(descriptor)


def remove(folder: Path) -> None:
    """Remove a folder, all at once for whoever looks."""
    doomed = hidden(folder)
    os.replace(folder, doomed)
    shutil.rmtree(doomed)


def hidden(path: Path) -> Path:
    """A name beside `path` that nobody reads and nobody else uses."""
    return path.with_name(f".{path.name}.{uuid4().hex[:12]}")
