"""Tasks that are not of the library: by path, module or entry point; what is missing is named; nothing runs early."""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailopt.tasks import own
from tailopt.tasks.own import description, file_digest, find, installed, located
from tailopt.tasks.table import is_own, presets_of, task

EXAMPLE = (Path(__file__).parents[2] / "examples" / "my_task.py").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Loading a file leaves its module and its folder behind, on purpose."""
    modules = {*sys.modules}
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(own, "_loaded", {})
    yield
    for name in {*sys.modules} - modules:
        del sys.modules[name]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "some_task.py"
    path.write_text(EXAMPLE)
    return path


def test_a_class_in_a_file(file: Path) -> None:
    found = find(f"{file}:Line")
    assert found.settings == {"samples": 400, "noise": 0.1}
    assert presets_of(f"{file}:Line") == {"default": {}, "small": {"samples": 40}}
    assert found.sha256 == file_digest(f"{file}:Line") == hashlib.sha256(EXAMPLE.encode()).hexdigest()
    built = task(f"{file}:Line", "small", noise=0.5)
    assert (built.samples, built.noise, len(built.nodes(0, 4))) == (40, 0.5, 4)
    assert description(built) == {"class": "some_task:Line", "sha256": found.sha256, "samples": 40, "noise": 0.5}
    assert pickle.loads(pickle.dumps(built)) == built  # by the name of its module, which workers find on sys.path


def test_the_reference_holds_from_every_folder(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    assert find("some_task.py:Line").reference == f"{file}:Line" == located("some_task.py:Line")


def test_an_edited_file_is_run_again(file: Path) -> None:
    before = find(f"{file}:Line")
    file.write_text(EXAMPLE.replace("samples: int = 400", "samples: int = 500"))  # of the same size: no stale .pyc
    after = find(f"{file}:Line")
    assert (before.settings["samples"], after.settings["samples"]) == (400, 500)
    assert before.sha256 != after.sha256
    assert find(f"{file}:Line").factory is after.factory


def test_a_class_in_a_module(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(file.parent)
    assert task("some_task:Line", samples=7).samples == 7
    assert find("some_task:Line").sha256 == file_digest("some_task:Line")


def test_an_installed_task(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = file.parent / "lines-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: lines\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[{own.GROUP}]\nline = some_task:Line\nsyntoken = nowhere:Nothing\n")
    monkeypatch.syspath_prepend(file.parent)
    assert installed() == {"line": "some_task:Line", "syntoken": "nowhere:Nothing"}
    assert is_own("line") and not is_own("syntoken")  # the library's own names come first
    assert "some_task" not in sys.modules, "listing loads nothing"
    assert task("line", "small").samples == 40
    assert find("line").reference == "line"
    with pytest.raises(ValueError, match="unknown task 'lime'; did you mean 'line'"):
        task("lime")


METHODS = ("model", "nodes", "loss", "evaluate")
CLASS = "class A:\n" + "".join(f"    def {name}(self): ...\n" for name in METHODS)


@pytest.mark.parametrize(
    ("text", "attribute", "message"),
    [
        ("", ":A", "A is not there in .*t_here.py.* Its classes: none"),
        ("class Task: ...\n", ":Tsk", "Tsk is not there in .*; did you mean 'Task'"),
        ("def A(): ...\n", ":A", "A is no class in"),
        (
            "class A:\n    def model(self): ...\n",
            ":A",
            r"t_here.py:A lacks nodes and loss and evaluate. A task has name, d",
        ),
        (CLASS, ":A", r"t_here.py:A lacks name and defaults. A task has name, defaults"),
        (
            CLASS + "    name, defaults = 'a', {'nodes': 3}\n",
            ":A",
            r"the defaults of .* are {'nodes': 3}; need a tailopt",
        ),
        (CLASS + "    def __init__(self, width): ...\n", ":A", "the setting width of .*:A has no default. Give it one"),
        (CLASS + "    def __init__(self, code=''): ...\n", ":A", "has a setting code, which has a meaning of its own"),
        ("1 / 0\n", ":A", r"t_here.py cannot be run \(ZeroDivisionError: division by zero\). --traceback shows"),
        ("class A: ...\n", "", r"t_here.py' names no class. Name it too: --task .*t_here.py:A\."),
    ],
)
def test_what_is_missing_is_named(text: str, attribute: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t_here.py"
    path.write_text(text)
    with pytest.raises((ValueError, TypeError), match=message):
        task(f"{path}{attribute}")


def test_files_and_modules_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"there is no file .*nowhere.py'. Give it as --task FILE.py:CLASS"):
        task("nowhere.py:A")
    (tmp_path / "local_only.py").write_text("")
    for look in (task, file_digest):
        with pytest.raises(ValueError, match=r"no module 'local_only'. A file .* --task local_only.py:A\."):
            look("local_only:A")
    (tmp_path / "statistics.py").write_text("")
    __import__("statistics")
    with pytest.raises(ValueError, match=r"statistics.py is taken, .* another module statistics here. Rename the file"):
        task("statistics.py:A")


def test_a_function_of_a_module_is_never_called(tmp_path: Path) -> None:
    """A config.toml from somebody else must not be able to call what is installed."""
    with pytest.raises(ValueError, match="getoutput is no class in subprocess"):
        task("subprocess:getoutput", cmd=f"touch {tmp_path}/called")
    with pytest.raises(TypeError, match="subprocess:Popen lacks model and nodes"):
        task("subprocess:Popen", args=["touch", f"{tmp_path}/called"])
    assert not (tmp_path / "called").exists()
