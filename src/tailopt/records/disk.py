"""Files that a kill or a power cut cannot leave half written.

    write under a hidden name -> fsync -> rename -> fsync the folder

A rename within a folder happens or does not; whoever reads sees the old content or the new. Folders are removed the
other way round: renamed to a hidden name first, so that no half-emptied one is ever mistaken for a whole one. Hidden
names that a kill leaves behind mean nothing and may be removed at any time.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from uuid import uuid4


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


def remove(folder: Path) -> None:
    """Remove a folder, all at once for whoever looks."""
    doomed = hidden(folder)
    os.replace(folder, doomed)
    shutil.rmtree(doomed)


def hidden(path: Path) -> Path:
    """A name beside `path` that nobody reads and nobody else uses."""
    return path.with_name(f".{path.name}.{uuid4().hex[:12]}")
