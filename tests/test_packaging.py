"""What is built is what its name says: sdist, wheels with and without a compiler, installed into fresh environments.

Nothing is downloaded: builds are not isolated, and the fresh environments see this one's torch through a .pth file.
"""

import importlib.metadata
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

import tailopt

ROOT = Path(__file__).parents[1]
LIBRARY = "tailopt/native/_cpu.abi3.so"

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="checks names and linkage as on Linux"),
    pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="runs in a source tree"),
]
needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")

STEPS = ROOT / "tests" / "installed_wheel.py"


def run(*command, **environment):
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "CC", "CFLAGS", "LDSHARED")}
    result = subprocess.run(
        [str(word) for word in command], env=env | environment, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result


def names(archive):
    """File names in a wheel or sdist, the sdist's without their first folder."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.namelist()
    with tarfile.open(archive) as sdist:
        return [member.name.split("/", 1)[1] for member in sdist.getmembers() if member.isfile()]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """An sdist, made in a copy of the tree with a stale library in it, which must not travel."""
    folder = tmp_path_factory.mktemp("sdist")
    skipped = shutil.ignore_patterns(".*", "build", "dist", "site", "*.egg-info", "__pycache__", "*.so")
    shutil.copytree(ROOT, folder / "tree", ignore=skipped)
    (folder / "tree/src" / LIBRARY).write_bytes(b"stale")
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", folder, folder / "tree")
    (archive,) = folder.glob("*.tar.gz")
    return archive


def build(sdist, folder, **environment):
    """A wheel from the sdist, in an unpacked copy of its own. Returns (wheel, unpacked tree)."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "tree", filter="data")
    (tree,) = (folder / "tree").iterdir()
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation")
    run(*pip, "--wheel-dir", folder / "wheels", tree, **environment)
    (wheel,) = (folder / "wheels").iterdir()
    return wheel, tree


def install(wheel, folder):
    """The Python of a fresh environment that holds the wheel and sees this environment's torch."""
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env")
    python = folder / "env/bin/python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    (site,) = (folder / "env/lib").glob("python*/site-packages")
    # Folders of a .pth file are searched, but their own .pth files are not read: an editable tailopt stays out.
    (site / "torch_of_the_tests.pth").write_text(str(Path(torch.__file__).parents[1]))
    return python


def complaints(result):
    return [line for line in result.stderr.splitlines() if "Warning:" in line and "kernel" in line]


def test_the_version_is_written_once():
    assert importlib.metadata.version("tailopt-torch") == tailopt.__version__, "install again: the version changed"
    for page in ("pyproject.toml", "setup.py", "CITATION.cff", "docs/conf.py"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert not re.search(r"""^\s*version\s*[:=]\s*["']?\d""", text, flags=re.MULTILINE), page


def test_metadata_has_authors_and_links():
    metadata = importlib.metadata.metadata("tailopt-torch")
    assert metadata["Author"] == "The tailopt developers"
    links = dict(link.split(", ", 1) for link in metadata.get_all("Project-URL", []))
    assert links and all(address.startswith("https://") for address in links.values())
    assert not any("example" in address for address in links.values())


def test_sdist_holds_sources_and_tests_and_no_library(sdist):
    there = names(sdist)
    for path in (
        "pyproject.toml", "setup.py", "LICENSE", "README.md", "src/tailopt/py.typed", "tests/test_packaging.py",
        *(f"src/tailopt/native/{name}" for name in ("clip.c", "flat.c", "library.c", "elements.h", "biclip_bf16.h")),
    ):  # fmt: skip
        assert path in there
    assert not [path for path in there if path.endswith((".so", ".pyc"))]


@needs_compiler
def test_wheel_with_the_kernel(sdist, tmp_path):
    wheel, _ = build(sdist, tmp_path)
    assert wheel.name.startswith(f"tailopt_torch-{tailopt.__version__}-cp310-abi3-linux_")
    there = names(wheel)
    assert {LIBRARY, "tailopt/py.typed"} <= set(there)
    assert not [path for path in there if path.endswith(".c") or path.startswith("tests")]

    with zipfile.ZipFile(wheel) as archive:
        library = archive.read(LIBRARY)
    assert b"PyInit_" not in library
    assert b"\0libgomp.so.1\0" in library, "OpenMP by its plain soname, so that torch's copy is used"
    if shutil.which("readelf"):
        (tmp_path / "_cpu.so").write_bytes(library)
        dynamic = run("readelf", "--dynamic", "--wide", tmp_path / "_cpu.so").stdout
        assert "RPATH" not in dynamic
        assert "RUNPATH" not in dynamic
        assert "python" not in dynamic

    python = install(wheel, tmp_path)
    result = run(python, "-W", "always", STEPS, OMP_NUM_THREADS="1")
    assert str(tmp_path) in result.stdout
    assert complaints(result) == []
    assert "There is no C kernel" not in run(python, "-m", "tailopt", "doctor").stdout


def test_wheel_without_a_compiler(sdist, tmp_path):
    # The version is read without importing the package, which would need torch at build time.
    (tmp_path / "no_torch").mkdir()
    (tmp_path / "no_torch/torch.py").write_text("raise ImportError('the build imports torch')")
    wheel, tree = build(sdist, tmp_path, CC="/bin/false", PYTHONPATH=str(tmp_path / "no_torch"))
    assert wheel.name == f"tailopt_torch-{tailopt.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [path for path in archive.namelist() if path.endswith(".dist-info/WHEEL")]
        assert b"Root-Is-Purelib: true" in archive.read(metadata)
    assert not [path for path in names(wheel) if "_cpu" in path]

    python = install(wheel, tmp_path)
    result = run(python, "-W", "always", STEPS, OMP_NUM_THREADS="1")
    assert str(tmp_path) in result.stdout
    assert len(complaints(result)) == 1, result.stderr
    assert "There is no C kernel: it was not built" in run(python, "-m", "tailopt", "doctor").stdout

    # A library that an earlier build left behind does not stand in for the one that failed.
    (built,) = (tree / "build").glob("lib*")
    (built / LIBRARY).write_bytes(b"stale")
    os.utime(built / LIBRARY, (0, 0))
    wheel.unlink()
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation")
    run(*pip, "--wheel-dir", wheel.parent, tree, CC="/bin/false")
    assert [path.name for path in wheel.parent.iterdir()] == [wheel.name]
    assert not [path for path in names(wheel) if "_cpu" in path]


@pytest.mark.slow
@needs_compiler
def test_wheel_where_the_compiler_refuses_openmp(sdist, tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\ncase " $* " in *" -fopenmp "*) exit 1;; esac\nexec gcc "$@"\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    wheel, _ = build(sdist, tmp_path, CC=str(compiler))
    assert "-cp310-abi3-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        assert b"libgomp" not in archive.read(LIBRARY)
