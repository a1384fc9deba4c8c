"""The rules of ARCHITECTURE.md: rooms in order, no junk drawers, torch alone, no dead paths."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "tailopt"
FILES = sorted(PACKAGE.rglob("*.py"))
JUNK = {"utils", "util", "misc", "common", "helpers", "base", "core"}


def rooms():
    """The rooms in the order of ARCHITECTURE.md's table."""
    section = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").split("## The rooms", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^\| `(\w+)(?:/|\.py)` \|", section, flags=re.MULTILINE)


def room_of(path):
    """The room a file stands in; None for the root's own files, which stand after all rooms."""
    first = path.relative_to(PACKAGE).parts[0]
    return None if first in ("__init__.py", "__main__.py") else first.removesuffix(".py")


def imports(tree, package):
    """Absolute dotted names of what a module imports; `from a import b` gives a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = package[: len(package) - node.level + 1] if node.level else []
            stem = [*origin, *([node.module] if node.module else [])]
            yield from (".".join([*stem, alias.name]) for alias in node.names)


def imported_rooms(path, source):
    """The rooms a file imports; "tailopt" for the root itself, which stands after all of them."""
    package = ["tailopt", *path.relative_to(PACKAGE).parent.parts]
    for dotted in imports(ast.parse(source), package):
        parts = dotted.split(".")
        if parts[0] == "tailopt":
            known = len(parts) > 1 and ((PACKAGE / parts[1]).is_dir() or (PACKAGE / f"{parts[1]}.py").is_file())
            yield parts[1] if known else "tailopt"


def test_the_table_lists_the_rooms_there_are():
    there = {room_of(path) for path in FILES} - {None}
    assert sorted(rooms()) == sorted(there)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_a_room_imports_only_rooms_above_it(path):
    order, room = rooms(), room_of(path)
    if room is None:
        return
    allowed = order[: order.index(room) + 1]
    later = [other for other in imported_rooms(path, path.read_text(encoding="utf-8")) if other not in allowed]
    assert not later, f"{path.relative_to(ROOT)} imports {later}; {room} may import {allowed}"


# The library without these could be a wheel of its own; only the command line needs them.
REPRODUCTION = {"tasks", "sweeps", "figures", "studies", "report"}
LIBRARY = [path for path in FILES if room_of(path) not in {*REPRODUCTION, "cli"} and path.name != "__main__.py"]


# The root names `tailopt.sweep`, and imports it when it is first used: the test in a process of its own covers that.
ROOMS_OF_LIBRARY = [path for path in LIBRARY if room_of(path) is not None]


@pytest.mark.parametrize("path", ROOMS_OF_LIBRARY, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_the_library_imports_nothing_of_tasks_and_studies(path):
    """Neither at the top of a file, nor in a function, nor by a name in a string."""
    source = path.read_text(encoding="utf-8")
    assert not REPRODUCTION & {*imported_rooms(path, source), *rooms_in_strings(source)}


def rooms_in_strings(source):
    """The rooms that strings of a file name, as for importlib."""
    strings = [n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return [room for text in strings for room in re.findall(r"^tailopt\.(\w+)[\w.]*$", text)]


# Refuses to import the rooms named in ROOMS, then imports every module named in MODULES.
WITHOUT_STUDIES = """
class Refusing:
    def find_spec(self, name, path=None, target=None):
        assert name.split(".")[:2] not in [["tailopt", room] for room in ROOMS], f"{name} was imported"

sys.meta_path.insert(0, Refusing())
for module in MODULES:
    try:
        __import__(module)
    except ImportError as error:  # a package that is not installed here
        assert not (error.name or "").startswith("tailopt"), error
"""


def test_every_module_of_the_library_can_be_imported_without_tasks_and_studies():
    modules = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in LIBRARY]
    given = f"ROOMS, MODULES = {sorted(REPRODUCTION)!r}, {modules!r}"
    program = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})\n{given}\n{WITHOUT_STUDIES}"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


def test_figures_are_the_only_way_to_matplotlib():
    """There the command that installs it is named where it is missing, and figures are drawn into files."""
    importers = [
        path.relative_to(PACKAGE).as_posix()
        for path in FILES
        for dotted in imports(ast.parse(path.read_text(encoding="utf-8")), ["tailopt"])
        if dotted.split(".")[0] == "matplotlib"
    ]
    assert set(importers) == {"figures/style.py"}


def test_a_name_in_a_string_is_seen():
    assert rooms_in_strings('importlib.import_module("tailopt.studies.glue")') == ["studies"]
    assert rooms_in_strings('"tailopt.studies run here"') == []


def test_every_spelling_of_an_import_is_seen():
    path = PACKAGE / "clipping" / "operators.py"
    for source in (
        "import tailopt.optimizers.biclip",
        "from tailopt import optimizers",
        "from tailopt.optimizers import BiClip",
        "from ..optimizers import BiClip",
        "from .. import optimizers",
        "def later():\n    from tailopt.optimizers.biclip import BiClip",
    ):
        assert list(imported_rooms(path, source)) == ["optimizers"], source
    assert list(imported_rooms(path, "from tailopt import BiClip")) == ["tailopt"]
    assert list(imported_rooms(path, "from . import reference\nfrom .reference import step")) == ["clipping"] * 2


def test_no_junk_drawers():
    names = {part.removesuffix(".py") for path in FILES for part in path.relative_to(PACKAGE).parts}
    assert not names & JUNK


# Hides every installed distribution but torch and what torch itself requires, then imports, steps and looks around.
TORCH_ALONE = """
import importlib.metadata as metadata, re, sys

def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()

allowed, todo = set(), ["torch"]
while todo:
    name = normal(todo.pop())
    if name in allowed:
        continue
    allowed.add(name)
    try:
        required = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        continue
    todo += [re.match(r"[\\w.-]+", r).group() for r in required if "extra ==" not in r]
allowed.add("tailopt-torch")
blocked = {
    top for top, owners in metadata.packages_distributions().items()
    if not {normal(owner) for owner in owners} & allowed and top not in sys.stdlib_module_names
}
assert {"numpy", "pytest"} <= blocked, sorted(blocked)

class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, fullname, path=None, target=None):
        return None if fullname.split(".")[0] in blocked else self.finder.find_spec(fullname, path, target)

sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path if hasattr(finder, "find_spec")]
import torch
before = set(sys.modules)
import tailopt
new = {name for name in set(sys.modules) - before if name.split(".")[0] not in sys.stdlib_module_names}
assert all(name.split(".")[0] in ("tailopt", "torch") for name in new), sorted(new)
assert "torch._dynamo" not in new, "seconds for every user; torch._disable_dynamo does not import it"

p = torch.nn.Parameter(torch.ones(3))
p.grad = torch.ones(3)
tailopt.BiClip([p], lr=0.5, u=0.5, d=0.0).step()
assert p.tolist() == [0.75] * 3, p
assert "numpy" not in sys.modules
"""


def test_import_needs_torch_alone_and_is_light():
    """Nothing third-party is imported, nor a slow part of torch that `import torch` leaves out (torch._dynamo)."""
    program = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})\n{TORCH_ALONE}"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_named_paths_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    words = set(re.findall(r"`([\w./-]+)`", text))
    paths = {w for w in words if "/" in w or Path(w).suffix in {".py", ".md", ".c", ".toml", ".txt", ".yml", ".cff"}}
    assert paths, "no path found: has the way of writing them changed?"
    # The table of rooms names them from inside the package.
    assert sorted(p for p in paths if not (ROOT / p).exists() and not (PACKAGE / p).exists()) == []
