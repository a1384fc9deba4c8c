"""Packages that only some of this library needs: what to say where one is missing.

    raise missing("Figures need matplotlib", "matplotlib", "studies") from None

The command that is shown works where this package came from: a checkout or a wheel on this machine can be installed
again with an extra; otherwise the missing package is named itself, because an index may not have this one.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

DISTRIBUTION = "tailopt-torch"


def missing(what: str, package: str, extra: str) -> ImportError:
    """The error for a package that is not installed.

    Args:
        what: what needs which package, as a sentence without its end.
        package: the package's name at the index, several with a space between them.
        extra: the extra of this project that has it.
    """
    return ImportError(f"{what}: {install_command(package, extra)}")


def install_command(package: str, extra: str) -> str:
    """A command that installs the package, for the environment of this interpreter."""
    origin = _origin()
    if origin is None:
        return f"{_pip()} install {package}"
    path, editable = origin
    return f"{_pip()} install {'-e ' if editable else ''}{shlex.quote(f'{path}[{extra}]')}"


def _pip() -> str:
    """pip by its short name where that is the one of this interpreter: without an activated environment it is not."""
    found = shutil.which("pip")
    if found is not None and Path(found).parent == Path(sys.executable).parent:
        return "pip"
    return f"{shlex.quote(sys.executable)} -m pip"


def _origin() -> tuple[Path, bool] | None:
    """The checkout or wheel on this machine that was installed, and whether editable; None where there is none."""
    from importlib import metadata  # here: it takes milliseconds, and `import tailopt` never needs it

    try:
        recorded = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:  # a folder on the path, such as PYTHONPATH=src
        return None
    origin = json.loads(recorded) if recorded else {}
    address = urlsplit(origin.get("url", ""))
    path = Path(url2pathname(address.path))
    there = path.is_file() or (path / "pyproject.toml").is_file()
    if address.scheme != "file" or not there or "vcs_info" in origin:
        return None
    return path, bool(origin.get("dir_info", {}).get("editable"))
