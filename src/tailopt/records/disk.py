"""Files that a kill or a power cut cannot leave half written.

    write under a hidden name -> fsync -> rename -> fsync the folder

A rename within a folder is atomic: a reader sees the old content or the new. Folders are removed the other way round:
they get a hidden name first, so that a half-emptied folder is never mistaken for a complete one. Hidden names that a
kill leaves behind mean nothing and may be removed at any time.
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


def open_regular_file(path: Path, flags: int, follow: bool = False) -> int:
    """Open a regular file and return its descriptor.

    Anything else raises ValueError: a pipe at once, without waiting for its other end, and a symbolic link unless
    `follow` is set.
    """
    flags |= getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    if not follow:
        require_regular_file(path)  # O_NOFOLLOW below is for a link that appears in between
        flags |= getattr(os, "O_NOFOLLOW", 0)
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError:
        require_regular_file(path, follow)  # names a pipe that nobody reads
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        require_regular_file(path, follow)
    return descriptor


def read(path: Path) -> bytes:
    """Return the content of a regular file, or of the one that a link leads to."""
    with os.fdopen(open_regular_file(path, os.O_RDONLY, follow=True), "rb") as file:
        return file.read()


def require_regular_file(path: Path, follow: bool = False) -> None:
    """Raise ValueError if the name belongs to anything but a regular file; a name that is free is fine."""
    try:
        mode = (path.stat() if follow else path.lstat()).st_mode
    except OSError:
        return
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "not a regular file")
        raise ValueError(f"{path} is {kind}; need a regular file. Remove it, or bring the file back from a copy.")


def sync(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk (fsync)."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open a folder, and its file system journals names itself
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, data: bytes) -> None:
    """Give a file new content atomically, and wait until it is on the disk."""
    temporary = hidden_path(path)
    try:
        temporary.write_bytes(data)
        sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def overwrite(path: Path, data: bytes) -> bool:
    """Give a file new content of the same length in one system call; return False if its length differs.

    A kill leaves the old content or the new one; a power cut may leave a part of each. Nothing waits for the disk.
    """
    try:
        descriptor = open_regular_file(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        if os.fstat(descriptor).st_size != len(data):
            return False
        return os.write(descriptor, data) == len(data)
    finally:
        os.close(descriptor)


def remove_folder(folder: Path) -> None:
    """Remove a folder; for readers it disappears at once."""
    doomed = hidden_path(folder)
    os.replace(folder, doomed)
    shutil.rmtree(doomed)


def hidden_path(path: Path) -> Path:
    """Return a unique hidden name in the folder of `path`, which no reader looks at."""
    return path.with_name(f".{path.name}.{uuid4().hex[:12]}")
