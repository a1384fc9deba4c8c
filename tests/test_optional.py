"""What is said where an optional package is missing: a command that works where this package came from."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tailopt.optional import DISTRIBUTION, missing, require

ROOT = Path(__file__).parents[1]
METADATA = f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: 0.1.0\nProvides-Extra: runs\n"


def said(folder: Path, origin: object) -> str:
    """The last line of `tailopt run` in a process without tomli-w, where the package was installed from `origin`."""
    site = folder / "site"
    record = site / "tailopt_torch-0.1.0.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text(METADATA)
    if origin is not None:
        (record / "direct_url.json").write_text(json.dumps(origin))
    (site / "sitecustomize.py").write_text("import sys\nsys.modules['tomli_w'] = None\n")
    words = "run --task syntoken --preset small --algorithm avg-sgd --ilr 0.1 --rounds 1 --quiet --out run"
    env = os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{ROOT / 'src'}"}
    result = subprocess.run(
        [sys.executable, "-m", "tailopt", *words.split()], cwd=folder, env=env, capture_output=True, text=True
    )
    assert result.returncode == 2, result.stderr
    return result.stderr.splitlines()[-1]


def checkout(folder: Path) -> Path:
    made = folder / "a checkout"
    made.mkdir()
    (made / "pyproject.toml").write_text('[project]\nname = "tailopt-torch"\nversion = "0.1.0"\n')
    return made


def wheel(folder: Path) -> Path:
    """The least that pip takes for a wheel."""
    made = folder / "tailopt_torch-0.1.0-py3-none-any.whl"
    inside = "tailopt_torch-0.1.0.dist-info"
    with zipfile.ZipFile(made, "w") as file:
        file.writestr(f"{inside}/METADATA", METADATA)
        file.writestr(f"{inside}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{inside}/RECORD", "")
    return made


@pytest.mark.parametrize("editable", [True, False])
def test_a_checkout_is_installed_again_with_the_extra(tmp_path: Path, editable: bool) -> None:
    made = checkout(tmp_path)
    line = said(tmp_path, {"url": made.as_uri(), "dir_info": {"editable": True} if editable else {}})
    assert line.startswith("tailopt run: Run folders need tomli_w: ")
    *_, pip, install = line.rpartition("pip install ")
    assert shlex.split(install) == [*(["-e"] if editable else []), f"{made}[runs]"], pip


def test_a_wheel_is_installed_again_with_the_extra(tmp_path: Path) -> None:
    line = said(tmp_path, {"url": wheel(tmp_path).as_uri(), "archive_info": {}})
    command = shlex.split(line.partition("Run folders need tomli_w: ")[2])
    if command[0] == "pip":
        command[:1] = [sys.executable, "-m", "pip"]
    # pip takes it, extra and all; nothing is fetched, and nothing installed
    options = ["--dry-run", "--no-deps", "--no-index", "--target", str(tmp_path / "target")]
    result = subprocess.run([*command, *options], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Would install tailopt-torch-0.1.0" in result.stdout


@pytest.mark.parametrize(
    "origin",
    [
        None,  # from an index
        {"url": "file:///no/such/checkout", "dir_info": {}},  # moved away since
        {"url": "https://example.org/tailopt_torch-0.1.0-py3-none-any.whl", "archive_info": {}},
        {"url": "https://example.org/tailopt.git", "vcs_info": {"vcs": "git", "commit_id": "0" * 40}},
    ],
)
def test_otherwise_the_package_itself_is_named(tmp_path: Path, origin: object) -> None:
    assert said(tmp_path, origin).endswith("pip install tomli-w")


def test_pip_is_that_of_this_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "pip"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert f"{sys.executable} -m pip install " in str(missing("It needs x", "x", "runs"))


def test_a_module_of_a_missing_package_is_asked_for_by_the_name_at_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    assert require("json.decoder", "It needs json", extra="runs").JSONDecodeError is json.JSONDecodeError
    monkeypatch.setitem(sys.modules, "not_there", None)
    for package, words in ((None, "not-there"), ("one two", "one two")):
        monkeypatch.setattr("tailopt.optional._origin", lambda: None)
        with pytest.raises(ImportError, match=f"^It needs more: .*pip install {words}$"):
            require("not_there.inside", "It needs more", extra="runs", package=package)
        monkeypatch.setattr("tailopt.optional._origin", lambda: (Path("/here"), True))
        with pytest.raises(ImportError, match=r"^It needs more: .*pip install -e '/here\[runs\]'$"):
            require("not_there.inside", "It needs more", extra="runs", package=package)


def test_there_is_one_place_that_says_how_to_install() -> None:
    saying = [p.name for p in (ROOT / "src").rglob("*.py") if re.search(r"pip install|tailopt-torch\[", p.read_text())]
    assert saying == []
