"""Small Python files, as a corpus for studies that train on text."""

from __future__ import annotations

from pathlib import Path


def python_files(folder: Path, count: int) -> Path:
    """Write so many different files of some 1,000 bytes; returns the folder."""
    folder.mkdir()
    for i in range(count):
        (folder / f"m{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * 20, encoding="utf-8")
    return folder
