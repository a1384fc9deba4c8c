"""Text files of a task: plain, compressed (.gz, .xz) or in a zip file. `hub` has data sets by public name."""

from __future__ import annotations

import gzip
import io
import lzma
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ENDINGS = ("", ".gz", ".xz")


def without_compression(name: str) -> str:
    """Return the name of a file without the ending of its compression.

    Examples:
        >>> without_compression("train.tsv.gz"), without_compression("train.tsv")
        ('train.tsv', 'train.tsv')
    """
    return name.removesuffix(".gz").removesuffix(".xz")


def read(path: Path) -> str:
    """The text of a file, decompressed by its ending. Line ends stay as they are."""
    opened = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with opened(path, "rb") as file:  # type: ignore[operator]
        found: bytes = file.read()
    return found.decode("utf-8")


class Folder:
    """Files by name in a folder or in a zip file; in the zip, folders before the name do not matter.

    Examples:
        >>> Folder.of(Path(__file__).parent).has("files.py")
        True
    """

    def __init__(self, path: Path, names: dict[str, Any]) -> None:
        self.path, self._names = path, names

    @staticmethod
    def of(path: Path, within: str = "") -> Folder:
        """A folder, or a zip file; where it has a folder called `within`, that one."""
        if path.is_dir():
            inside = path / within if (path / within).is_dir() else path
            return Folder(path, {p.name: p for p in sorted(inside.iterdir()) if p.is_file()})
        if path.is_file() and zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                every = [name for name in archive.namelist() if name[-1] != "/"]
            kept = [name for name in every if within and f"/{within}/" in f"/{name}"] or every
            return Folder(path, {name.rsplit("/", 1)[-1]: name for name in kept})
        raise FileNotFoundError(
            f"Invalid data: {str(path)!r} is neither a folder nor a zip file. Give the path of one."
        )

    def names(self) -> list[str]:
        """Of all files."""
        return sorted(self._names)

    def has(self, name: str) -> bool:
        """Whether there is such a file, compressed or not."""
        return any(name + ending in self._names for ending in ENDINGS)

    def text(self, name: str) -> str:
        """What stands in a file."""
        for ending in ENDINGS:
            if (found := self._names.get(name + ending)) is not None:
                return read(found) if isinstance(found, Path) else self._unzipped(found)
        raise FileNotFoundError(
            f"Invalid data: {self.path} has no {name}; it has {', '.join(self.names()) or 'nothing'}."
        )

    def content(self, name: str) -> bytes:
        """The bytes of a file."""
        found = self._names[name]
        if isinstance(found, Path):
            return found.read_bytes()
        with zipfile.ZipFile(self.path) as archive:
            return archive.read(found)

    def _unzipped(self, name: str) -> str:
        with zipfile.ZipFile(self.path) as archive, archive.open(name) as file:
            return io.TextIOWrapper(file, "utf-8", newline="").read()


def lines(text: str) -> list[str]:
    """The lines of a text; only line feeds end one, as in the files that line up with each other.

    Examples:
        >>> lines("a\\u2028b\\r\\nc\\n")
        ['a\\u2028b', 'c']
    """
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []


def check_columns(rows: Any, needed: Sequence[str], where: str) -> None:
    """Refuse data without one of the columns that are needed."""
    for name in needed:
        if name not in rows:
            raise ValueError(f"Invalid data: {where} has no column {name!r}; it has {', '.join(rows)}.")
