"""A task that is not part of this library: a class in a file, in a module, or in an installed package.

    my_task.py:MyTask          a class in a file, by the file's path
    my_package.tasks:MyTask    a class in a module that Python can import
    my-task                    what an installed package calls it in the entry-point group `tailopt.tasks`

The class follows `tailopt.tasks.Task`. Its settings are the parameters of its constructor, each with a plain default;
`presets`, a class attribute, may have more of them by name: {"small": {"width": 8}}. Only classes are taken: a function
that is named in a file from somebody else would be called before it could be looked at.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tailopt.arguments import did_you_mean
from tailopt.records.run_config import storable
from tailopt.tasks.task import Defaults, Task

GROUP = "tailopt.tasks"
METHODS = ("model", "nodes", "loss", "evaluate")
NEEDS = (
    "A task has name, defaults (a tailopt.tasks.Defaults), model(seed), nodes(seed, n), loss(model, batch) and "
    "evaluate(model, seed)."
)
RESERVED = ("name", "preset", "code")
PLAIN = (bool, int, float, str, torch.dtype)
_loaded: dict[str, str] = {}  # the module of a file -> the sha256 of what was run


@dataclass(frozen=True)
class OwnTask:
    """A task's class with what can be set.

    Attributes:
        reference: by which it can be found again, from any folder.
        sha256: of the file that has the class.
        settings: with their defaults.
        presets: name -> settings that differ; the first is that of the defaults.
    """

    reference: str
    factory: Callable[..., Task]
    sha256: str
    settings: Mapping[str, Any]
    presets: Mapping[str, Mapping[str, Any]]

    def build(self, preset: str, **settings: Any) -> Task:
        """Create the task, and check that it is one."""
        task = self.factory(**{**self.presets[preset], **settings})
        if missing := [name for name in ("name", "defaults") if not hasattr(task, name)]:
            raise TypeError(f"Invalid task: {self.reference} lacks {' and '.join(missing)}. {NEEDS}")
        if not isinstance(task.defaults, Defaults):
            raise TypeError(
                f"Invalid task: the defaults of {self.reference} are {task.defaults!r}; need a tailopt.tasks.Defaults."
            )
        return task


def leads_to_a_class(name: str) -> bool:
    """Whether a name says where the class of a task is; nothing is loaded.

    Examples:
        >>> leads_to_a_class("my_task.py:MyTask"), leads_to_a_class("glue/mrpc")
        (True, False)
    """
    return ":" in name or name.endswith(".py") or name in installed()


def installed() -> Mapping[str, str]:
    """The tasks of installed packages: name -> module:class. Nothing is loaded."""
    return _installed(tuple(sys.path))


@functools.cache  # reading the metadata of all packages takes tens of milliseconds
def _installed(path: tuple[str, ...]) -> Mapping[str, str]:
    from importlib import metadata

    return {point.name: point.value for point in metadata.entry_points(group=GROUP)}


def located(name: str, folder: str | os.PathLike[str] = ".") -> str:
    """A reference that holds from every folder: a file's path becomes absolute; a relative one is below `folder`.

    Examples:
        >>> located("my_task.py:MyTask", "/home/me"), located("my_package:MyTask", "/home/me")
        ('/home/me/my_task.py:MyTask', 'my_package:MyTask')
    """
    place, _, attribute = name.rpartition(":")
    return f"{os.path.abspath(os.path.join(folder, place))}:{attribute}" if place.endswith(".py") else name


def find(name: str) -> OwnTask:
    """Load the class that a name leads to, running its file; raises with what is missing."""
    place, _, attribute = installed().get(name, name).rpartition(":")
    if not place or not attribute:
        raise ValueError(_without_class(name))
    module, sha256 = _from_file(Path(place)) if place.endswith(".py") else _from_module(place, attribute)
    reference = name if name in installed() else located(name)
    factory = getattr(module, attribute, None)
    if not isinstance(factory, type):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        problem = "is no class" if hasattr(module, attribute) else "is not there"
        raise ValueError(
            f"Invalid task: {attribute} {problem} in {place}{did_you_mean(attribute, classes)} "
            f"Its classes: {', '.join(classes) or 'none'}."
        )
    if missing := [method for method in METHODS if not callable(getattr(factory, method, None))]:
        raise TypeError(f"Invalid task: {reference} lacks {' and '.join(missing)}. {NEEDS}")
    presets = {"default": {}, **getattr(factory, "presets", {})}
    return OwnTask(reference, factory, sha256, _settings(factory, reference), presets)


def file_digest(name: str) -> str:
    """The sha256 of the file that has a task's class, without running that file."""
    place = installed().get(name, name).rpartition(":")[0]
    if place.endswith(".py"):
        return hashlib.sha256(_read(Path(place))).hexdigest()
    try:
        spec = importlib.util.find_spec(place)  # imports the packages around the module
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        raise ValueError(_no_module(place, name.rpartition(":")[2]))
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()


def description(task: Task) -> Any:
    """What a record says about a task; of one from a file also which code that was."""
    module = type(task).__module__
    if module not in _loaded:
        return storable(task)
    values = {key: storable(value) for key, value in vars(task).items() if isinstance(value, PLAIN)}
    return {"class": f"{module}:{type(task).__qualname__}", "sha256": _loaded[module], **values}


def _settings(factory: type, reference: str) -> dict[str, Any]:
    """The parameters of the constructor that have a plain default."""
    found = {}
    for parameter in inspect.signature(factory).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.default is parameter.empty:
            raise TypeError(f"Invalid task: the setting {parameter.name} of {reference} has no default. Give it one.")
        if parameter.name in RESERVED:
            raise TypeError(
                f"Invalid task: {reference} has a setting {parameter.name}, which has a meaning of its own "
                f"in [task], as have {', '.join(RESERVED)}. Give it another name."
            )
        if isinstance(parameter.default, PLAIN):
            found[parameter.name] = parameter.default
    return found


def _from_file(path: Path) -> tuple[ModuleType, str]:
    """Run a file as a module under its own name, with its folder on sys.path, as `python FILE` has it.

    The module is kept in sys.modules, and the folder on sys.path, so that worker processes find the class too.
    """
    path = Path(os.path.abspath(path))
    source = _read(path)
    sha256 = hashlib.sha256(source).hexdigest()
    name, before = path.stem, sys.modules.get(path.stem)
    if before is not None and getattr(before, "__file__", None) != str(path):
        raise ValueError(
            f"Invalid task: the name {path.name} is taken, since Python has loaded another module {name} here. "
            "Rename the file."
        )
    if before is not None and _loaded.get(name) == sha256:
        return before, sha256
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)  # what the digest is of, and no stale .pyc
    except Exception as error:
        del sys.modules[name]
        raise ValueError(
            f"Invalid task: {path} cannot be run ({type(error).__name__}: {error}). --traceback shows the line."
        ) from error
    _loaded[name] = sha256
    return module, sha256


def _from_module(place: str, attribute: str) -> tuple[ModuleType, str]:
    try:
        module = importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports one that is not
        raise ValueError(_no_module(place, attribute)) from error
    origin = getattr(module, "__file__", None)
    sha256 = hashlib.sha256(Path(origin).read_bytes()).hexdigest() if origin else ""
    _loaded[module.__name__] = sha256
    return module, sha256


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise FileNotFoundError(f"Invalid task: there is no file {str(path)!r}. Give it as --task FILE.py:CLASS.")
    return path.read_bytes()


def _no_module(place: str, attribute: str) -> str:
    file = Path(*place.split(".")).with_suffix(".py")
    hint = f"{file}:{attribute}" if file.is_file() else f"FILE.py:{attribute}"
    return f"Invalid task: Python finds no module {place!r}. A file is given by its path: --task {hint}."


def _without_class(name: str) -> str:
    """What to say of a file without a class; its classes are read from its text, which is not run."""
    path = Path(name.rstrip(":"))
    classes = [node.name for node in ast.parse(_read(path)).body if isinstance(node, ast.ClassDef)]
    example = classes[0] if classes else "CLASS"
    return f"Invalid task: {name!r} names no class. Name it too: --task {path}:{example}."
