"""Text files of a task: plain, compressed (.gz, .xz) or in a zip file. `hub` has data sets by public name."""

from __future__ import annotations

import gzip
import io
import lzma
import zipfile
from collections.abc import Mapping, Sequence
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
    """Read the text of a file, decompressed by its ending. Line ends stay as they are."""
    open_file = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with open_file(path, "rb") as file:  # type: ignore[operator]
        content: bytes = file.read()
    return content.decode("utf-8")


class Folder:
    """Files by name in a folder or in a zip file; in the zip, folders before the name do not matter.

    Examples:
        >>> Folder.of(Path(__file__).parent).has("files.py")
        True
    """

    def __init__(self, path: Path, members: Mapping[str, Path | str]) -> None:
        self.path = path
        self._members = members  # by name: a path, or a name inside the zip file

    @staticmethod
    def of(path: Path, within: str = "") -> Folder:
        """Open a folder or a zip file; where it has a folder called `within`, that one."""
        if path.is_dir():
            inside = path / within if (path / within).is_dir() else path
            return Folder(path, {p.name: p for p in sorted(inside.iterdir()) if p.is_file()})
        if path.is_file() and zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                members = [name for name in archive.namelist() if name[-1] != "/"]
            members = [name for name in members if within and f"/{within}/" in f"/{name}"] or members
            return Folder(path, {name.rsplit("/", 1)[-1]: name for name in members})
        raise FileNotFoundError(
            f"Invalid data: {str(path)!r} is neither a folder nor a zip file. Give the path of one."
        )

    def names(self) -> list[str]:
        """Return the names of all files, sorted."""
        return sorted(self._members)

    def has(self, name: str) -> bool:
        """Whether there is a file of this name, compressed or not."""
        return any(name + ending in self._members for ending in ENDINGS)

    def text(self, name: str) -> str:
        """Read a file by its name without the ending of a compression."""
        for ending in ENDINGS:
            if (member := self._members.get(name + ending)) is not None:
                return read(member) if isinstance(member, Path) else self._unzipped(member)
        raise FileNotFoundError(
            f"Invalid data: {self.path} has no {name}; it has {', '.join(self.names()) or 'nothing'}."
        )

    def _unzipped(self, name: str) -> str:
        with zipfile.ZipFile(self.path) as archive, archive.open(name) as file:
            return io.TextIOWrapper(file, "utf-8", newline="").read()


def lines(text: str) -> list[str]:
    """Split a text into lines. Only line feeds end one: other separators can be inside a sentence of aligned files.

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
