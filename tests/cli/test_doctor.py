"""`tailopt doctor`: what it says is so, and what is missing has a command."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

import tailopt
from tailopt.cli import doctor
from tailopt.cli.main import main
from tailopt.native import library

REQUIRED = [
    'rich>=13; extra == "runs"',
    'tomli>=2; python_version < "3.2" and extra == "runs"',
    'tomli>=2; python_version < "3.99" and extra == "old"',
    'tailopt-torch[runs]; extra == "studies"',
    'no-such-package>=1; extra == "studies"',
    'torch>=99; extra == "future"',
    'mypy>=1; extra == "dev"',
    "torch>=2.11",
]


def test_it_shows_versions_kernels_and_threads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    facts = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line}
    assert facts["tailopt"] == [tailopt.__version__] and facts["torch"] == [torch.__version__]
    assert facts["folder"] == [str(Path(tailopt.__file__).parent)]
    assert facts["threads"][:3] == ["of", "torch", f"{torch.get_num_threads()}"]
    (row,) = [line.split() for line in out.splitlines() if line.startswith("float32 on cpu")]
    assert row[3] == ("c" if library.loaded() is not None else "chunked")
    assert out.splitlines()[-1].startswith("wrote nothing; ")


def test_without_the_kernel_it_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(library, "_load", lambda: (None, "it was not built: no compiler worked."))
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "There is no C kernel: it was not built: no compiler worked." in out
    assert "chunked" in next(line for line in out.splitlines() if line.startswith("float32 on cpu"))


def test_missing_packages_have_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: REQUIRED)
    monkeypatch.setattr(
        metadata, "version", lambda name: {"rich": "13.9", "torch": "2.13.0+cpu"}.get(name) or absent(name)
    )
    rows, missing = doctor.extras()
    assert rows == [
        ["runs", "rich", ">=13", "13.9"],
        ["old", "tomli", ">=2", "-"],
        ["studies", "no-such-package", ">=1", "-"],
        ["future", "torch", ">=99", "2.13.0+cpu"],
    ]
    assert [line.split(":")[0] for line in missing] == [
        "The extra old lacks tomli",
        "The extra studies lacks no-such-package",
        "The extra future lacks torch",
    ]
    assert all("pip install" in line for line in missing)


def absent(name: str) -> str:
    raise metadata.PackageNotFoundError(name)


def test_a_folder_on_the_path_has_no_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", absent)
    rows, (line,) = doctor.extras()
    assert rows == [] and "only on Python's path" in line


def test_only_for_older_python() -> None:
    assert doctor._only_for_older_python(f"python_version < '{sys.version_info[0]}.{sys.version_info[1]}'")
    assert not doctor._only_for_older_python("python_version < '9.9'")
