"""Packages that only some of this library needs: import one, or raise an error with the command that installs it.

    matplotlib = require("matplotlib", "Figures need matplotlib", extra="studies")

The command depends on how this library was installed. A checkout or a wheel on this machine can be installed again with
an extra; otherwise the command installs the missing package itself, because an index may not have this library.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

DISTRIBUTION = "tailopt-torch"


def require(module: str, sentence: str, extra: str, package: str | None = None, at_least: str | None = None) -> Any:
    """Import a module of an optional package.

    Args:
        module: its dotted name, such as "PIL.Image".
        sentence: who needs which package, without a full stop; the error message begins with it.
        extra: the extra of this project that has the package.
        package: the name of the package at the index, where it differs from the first part of the module's name;
            several names are separated by spaces.
        at_least: the oldest version that will do, such as "1.27"; only where older ones are likely to be installed.

    Raises:
        ImportError: the package is missing or too old; the message ends with the command that installs it.

    Examples:
        >>> require("json", "Records need json", extra="runs").dumps([1])
        '[1]'
    """
    package = package or module.partition(".")[0].replace("_", "-")
    if at_least is not None:
        sentence = f"{sentence} {at_least} or newer (extra [{extra}]), and {_installed(package) or 'none'} is installed"
    try:
        imported = importlib.import_module(module)
    except ImportError as error:
        raise missing(sentence, package, extra) from error
    if at_least is not None and _numbers(_installed(package)) < _numbers(at_least):
        raise missing(sentence, f"--upgrade {package}", extra)
    return imported


def _installed(package: str) -> str:
    """Return the version of an installed package; empty where it is not installed."""
    from importlib import metadata  # here: it takes milliseconds, and `import tailopt` never needs it

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> list[int]:
    """Return the numbers that a version begins with: 1.27.0rc1 gives [1, 27, 0]."""
    return [int(number) for number in re.match(r"[\d.]*", version)[0].split(".") if number]  # type: ignore[index]


def missing(what: str, package: str, extra: str) -> ImportError:
    """Return the error for a package that is not installed; `require` describes the arguments."""
    return ImportError(f"{what}: {install_command(package, extra)}")


def install_command(package: str, extra: str) -> str:
    """Return a command that installs the package into the environment of this interpreter."""
    origin = _origin()
    if origin is None:
        return f"{_pip()} install {package}"
    path, editable = origin
    return f"{_pip()} install {'-e ' if editable else ''}{shlex.quote(f'{path}[{extra}]')}"


def _pip() -> str:
    """Return `pip` where that belongs to this interpreter; without an activated environment it does not."""
    program = shutil.which("pip")
    if program is not None and Path(program).parent == Path(sys.executable).parent:
        return "pip"
    return f"{shlex.quote(sys.executable)} -m pip"


def _origin() -> tuple[Path, bool] | None:
    """Return the checkout or wheel on this machine that was installed, and whether editable; None without one."""
    from importlib import metadata  # here: it takes milliseconds, and `import tailopt` never needs it

    try:
        recorded = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:  # a folder on the path, such as PYTHONPATH=src
        return None
    origin = json.loads(recorded) if recorded else {}
    address = urlsplit(origin.get("url", ""))
    path = Path(url2pathname(address.path))
    exists = path.is_file() or (path / "pyproject.toml").is_file()
    if address.scheme != "file" or not exists or "vcs_info" in origin:
        return None
    return path, bool(origin.get("dir_info", {}).get("editable"))
