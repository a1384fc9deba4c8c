"""What a run is, from a TOML file and the command line: strict keys in, plain arguments of the library out.

    [task]       name, preset, and the task's own settings
    [algorithm]  name, and its settings; settings = "paper:QNLI" begins with the paper's best ones
    [run]        rounds, nodes, local_steps, seed ...: the arguments of `simulate`
    [schedules]  ilr = {power = -0.5}, a list of such to multiply them; theory = 1.5 for those of the theorem

A file is read into tables, the command line is laid over them, `resolve` fills in what nobody said. What a run folder
holds is the resolved whole, and can be read again.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import sys
import types
import typing
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tailopt import schedules as scheduling
from tailopt.algorithms import ALGORITHMS, FIXED, PUBLIC, REQUIRED, Algorithm, algorithm
from tailopt.optional import missing
from tailopt.paper import paper_settings
from tailopt.rules.table import INNER, OUTER
from tailopt.tasks.table import TASKS, task
from tailopt.tasks.task import Task
from tailopt.theory import theory

Tables = dict[str, dict[str, Any]]
Pairs = Sequence[tuple[str, str | None]]  # a setting of the command line and its text; None where none was given

SECTIONS = ("task", "algorithm", "run", "schedules")
# An option that is no setting but stands for one.
SHORT = {"task": "task.name", "algorithm": "algorithm.name", "model": "task.pretrained"}
# kind -> the function that makes it, and what may stand beside it
SCHEDULES: Mapping[str, tuple[Callable[..., scheduling.Schedule], tuple[str, ...]]] = {
    "power": (scheduling.power, ("per", "shift")),
    "warmup": (scheduling.warmup, ("per", "start")),
    "cosine": (scheduling.cosine, ("per", "floor")),
}
PAPER = "paper:"


@dataclass(frozen=True)
class RunSettings:
    """The arguments of `simulate` that a file can hold. None where the task decides, or where it means "not"."""

    rounds: int | None = None
    nodes: int | None = None
    local_steps: int | None = None
    local_epochs: int | None = None
    batch_size: int | None = None
    weights: str | list[float] = "equal"  # or "samples", or a number for each node
    participation: float = 1.0
    participants: int | None = None
    sampling: str = "uniform"
    drops: float = 0.0
    on_drop: str = "sync"
    projection: float | None = None
    average: bool = False
    guard: bool = True
    aggregate: str = "mean"
    engine: str = "auto"
    device: str | None = None
    precision: str | None = None
    seed: int = 0
    evaluate_every: int = 1
    statistics: bool = False
    checkpoint_every: int = 1
    keep: int = 3

    def __post_init__(self) -> None:
        """Hold every value to its type; ranges are the library's to judge."""
        for name, hint in typing.get_type_hints(RunSettings).items():
            object.__setattr__(self, name, _typed(f"run.{name}", getattr(self, name), hint))
        if self.device is not None and self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(f"Invalid run.device: got {self.device!r}; torch sees no CUDA device here. Leave it out.")


@dataclass(frozen=True)
class Configuration:
    """One run, resolved: nothing is left to a default.

    Attributes:
        task: name, preset and every setting of the task.
        algorithm: name and settings.
        run: the arguments of `simulate`.
        schedules: as written; `made_schedules` makes them.
    """

    task: Mapping[str, Any]
    algorithm: Mapping[str, Any]
    run: RunSettings
    schedules: Mapping[str, Any]

    def problem(self) -> Task:
        """The task."""
        return _made_task(self.task)

    def method(self) -> Algorithm:
        """The algorithm."""
        return algorithm(**self.algorithm)

    def made_schedules(self) -> dict[str, scheduling.Scheduled]:
        """The schedules by setting; the theorem's where others are not given."""
        given = {key: _schedule(key, entry) for key, entry in self.schedules.items() if key != "theory"}
        if "theory" not in self.schedules:
            return dict(given)
        # powers go through the theorem, so that a condition that they break is named
        powers = {key: s for key, s in given.items() if isinstance(s, scheduling.Power)}
        return {**theory(self.algorithm["name"], self.schedules["theory"], biased=False, **powers).schedules, **given}

    def record(self) -> dict[str, Any]:
        """What a run folder holds beside what `simulate` writes there itself."""
        settings = dataclasses.asdict(self.run)
        if not self.run.drops:  # so in folders from before
            del settings["drops"]
        return {
            **settings,
            "task": dict(self.task),
            "schedules": dict(self.schedules),
        }


def read(path: str | Path) -> Tables:
    """The tables of a TOML file, or of the configuration in a run folder; unknown keys are refused."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"Invalid configuration: there is no file {str(path)!r}. Give the path of a TOML file.")
    try:
        return sections(_toml().loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def sections(found: Mapping[str, Any]) -> Tables:
    """A file's content as checked tables; the flat layout of a run folder is understood too.

    Examples:
        >>> sections({"task": {"name": "syntoken"}, "algorithm": "avg-sgd", "settings": {"ilr": 0.1}, "rounds": 5})
        {'task': {'name': 'syntoken'}, 'algorithm': {'name': 'avg-sgd', 'ilr': 0.1}, 'run': {'rounds': 5},
         'schedules': {}}
    """
    tables = recorded(found) if isinstance(found.get("algorithm"), str) else dict(found)
    named = tables.get("algorithm")
    own = algorithm_settings(named.get("name") if isinstance(named, Mapping) else None)
    for section in tables:
        if section not in SECTIONS:
            raise ValueError(f"Unknown section: {section!r}{_nearest(section, SECTIONS)} Known: {', '.join(SECTIONS)}.")
        if not isinstance(tables[section], Mapping):
            raise ValueError(
                f"Invalid {section}: got {tables[section]!r}; need a table. Write [{section}] and its settings below."
            )
        for key in tables[section]:
            known = plain_keys(section) | ({*_algorithm_keys()} if section == "schedules" else set())
            _check_key(section, key, known, known - (_algorithm_keys() - own))
    return {section: dict(tables.get(section, {})) for section in SECTIONS}


def override(tables: Tables, pairs: Pairs) -> Tables:
    """The command line laid over the tables.

    Examples:
        >>> override(sections({}), [("noise", "none"), ("i_u", "1e-3"), ("schedules.ilr.power", "-0.5")])
        {'task': {'noise': 'none'}, 'algorithm': {'i_u': 0.001}, 'run': {}, 'schedules': {'ilr': {'power': -0.5}}}
    """
    tables = {section: dict(tables.get(section, {})) for section in SECTIONS}
    named = [text for option, text in pairs if SHORT.get(option, option) == "algorithm.name"]
    own = algorithm_settings(named[-1] if named else tables["algorithm"].get("name"))
    for option, text in pairs:
        section, key, *deeper = _address(option, own)
        table: dict[str, Any] = tables[section]
        for name in (key, *deeper)[:-1]:
            below = table.get(name)
            table[name] = dict(below) if isinstance(below, Mapping) else {}
            table = table[name]
        if text is None:
            if section != "run" or typing.get_type_hints(RunSettings)[key] is not bool:
                raise ValueError(f"--{option} needs a value. Write --{option} VALUE.")
            text = "true"
        last = (key, *deeper)[-1]
        # "none" takes a setting of the file away; where it is a word of the setting itself, as in noise, it stays
        if text.lower() == "none" and section != "task":
            table.pop(last, None)
        else:
            table[last] = value(text)
    return tables


def resolve(tables: Tables) -> Configuration:
    """The whole configuration, with the defaults of task and paper filled in; refuses what cannot be run."""
    chosen = _resolved_task(tables["task"])
    problem = _made_task(chosen)
    method = _resolved_algorithm(tables["algorithm"])
    given, fallback = tables["run"], problem.defaults
    usual: dict[str, Any] = {
        "rounds": fallback.rounds,
        "nodes": fallback.nodes,
        "batch_size": fallback.batch_size,
        "weights": fallback.weights or "equal",
    }
    if "local_steps" not in given and "local_epochs" not in given:
        usual |= {"local_steps": fallback.local_steps, "local_epochs": fallback.local_epochs}
    if "participants" not in given and "participation" not in given:
        usual["participants"] = fallback.participants
    resolved = Configuration(chosen, method, RunSettings(**{**usual, **given}), dict(tables["schedules"]))
    resolved.method()
    with warnings.catch_warnings():  # a condition that schedules break is said when they are used, and once
        warnings.simplefilter("ignore")
        resolved.made_schedules()
    return resolved


def value(text: str) -> Any:
    """What a text of the command line says: a TOML value, a number, numbers with commas, or itself.

    Examples:
        >>> value("1e-3"), value("-.5"), value("none"), value("1,2"), value("{power = -0.5}"), value("True")
        (0.001, -0.5, 'none', [1, 2], {'power': -0.5}, True)
    """
    if text in ("True", "False"):
        return text == "True"
    try:
        found = _toml().loads(f"value = {text}")
        if found.keys() == {"value"} and isinstance(found["value"], bool | int | float | str | list | dict):
            return found["value"]
    except ValueError:
        pass
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    parts = [value(part) for part in text.split(",")] if "," in text else []
    return parts if parts and all(isinstance(part, int | float) for part in parts) else text


def split(arguments: Sequence[str], own: Mapping[str, bool]) -> tuple[list[str], list[tuple[str, str | None]]]:
    """A command's own arguments, and the settings among them as pairs.

    Args:
        arguments: of the command line, behind the command's name.
        own: options of the command itself, with whether a value follows them.

    Examples:
        >>> split(["a.toml", "--ilr", "-1e-3", "--out", "runs/a", "--average"], {"--out": True})
        (['a.toml', '--out', 'runs/a'], [('ilr', '-1e-3'), ('average', None)])
    """
    rest: list[str] = []
    pairs: list[tuple[str, str | None]] = []
    queue = list(arguments)
    while queue:
        word = queue.pop(0)
        name, equals, text = word.partition("=")
        if not word.startswith("--") or word == "--" or name in own:
            rest.append(word)
            if own.get(name, False) and not equals and queue:
                rest.append(queue.pop(0))
        else:
            follows = bool(queue) and not queue[0].startswith("--")
            pairs.append((name[2:].replace("-", "_"), text if equals else queue.pop(0) if follows else None))
    return rest, pairs


def plain_keys(section: str) -> set[str]:
    """The settings of a section, of whatever task and algorithm."""
    return {
        "task": {"name", "preset", *(key for name in TASKS for key in task_settings(name))},
        "algorithm": {"name", "settings", *_algorithm_keys()},
        "run": {field.name for field in dataclasses.fields(RunSettings)},
        "schedules": {"theory"},
    }[section]


def task_settings(name: str) -> dict[str, Any]:
    """A task's own settings with their values in its preset "paper"; types of tensors by their name."""
    made = task(name)
    found = {}
    for field in dataclasses.fields(typing.cast(Any, made)):
        held = getattr(made, field.name)
        try:
            TASKS[name](**{field.name: held})
        except TypeError:  # the table gives it already
            continue
        if isinstance(held, bool | int | float | str | torch.dtype):
            found[field.name] = _plain(held)
    return found


def _toml() -> types.ModuleType:
    package = "tomllib" if sys.version_info >= (3, 11) else "tomli"
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise missing(f"The command line needs {package}", package, "runs") from error


def recorded(found: Mapping[str, Any]) -> dict[str, Any]:
    """The flat layout of a run folder, in sections, unchecked: a run from Python may hold anything beside the usual."""
    rest = dict(found)
    rest.pop("numbers", None)  # of two optimizers of torch: the same as their settings, under torch's names
    tables: dict[str, Any] = {"task": rest.pop("task", {})}
    tables["algorithm"] = {"name": rest.pop("algorithm"), **rest.pop("settings", {})}
    tables["algorithm"] |= {key: rest.pop(key) for key in ("inner_state", "send_preconditioner") if key in rest}
    tables["schedules"] = rest.pop("schedules", {})
    return {**tables, "run": rest}


def _algorithm_keys() -> set[str]:
    words = {
        PUBLIC[level].get(word, word)
        for level, table in (("outer", OUTER), ("inner", INNER))
        for rule in table.values()
        for word in (*rule.settings, *rule.options)
    }
    return words | {"inner_state", "send_preconditioner"}


def algorithm_settings(name: Any) -> set[str]:
    """The settings that an algorithm has; those of all where the name is none that can be told apart.

    Examples:
        >>> sorted(algorithm_settings("avg-biclip"))
        ['dead_zone', 'i_d', 'i_u', 'ilr', 'inner_state', 'weight_decay']
    """
    plain = str(name).strip().lower()
    pairs = {f"{outer}-{inner}": (outer, inner) for outer in OUTER for inner in INNER} | {**ALGORITHMS}
    if plain not in pairs:
        return _algorithm_keys()
    levels = zip(("outer", "inner"), pairs[plain], (OUTER, INNER), strict=True)
    return {"inner_state", *REQUIRED.get(plain, ()), *(["send_preconditioner"] if plain == "adam2" else [])} | {
        PUBLIC[level].get(word, word)
        for level, rule, table in levels
        for word in (*table[rule].settings, *(w for w in table[rule].options if w not in FIXED[level]))
    }


def _address(option: str, own: set[str]) -> list[str]:
    """Where an option of the command line stands: section, key, and keys below that.

    Args:
        own: the settings of the algorithm that is named; only these are suggested.
    """
    parts = SHORT.get(option, option).split(".")
    others = _algorithm_keys() - own
    if parts[0] in SECTIONS and len(parts) > 1:
        known = plain_keys(parts[0]) | (_algorithm_keys() if parts[0] == "schedules" else set())
        _check_key(parts[0], parts[1], known, known - others)
        return parts
    homes = [section for section in SECTIONS if parts[0] in plain_keys(section)]
    if len(homes) > 1:
        spelled = " or ".join(f"--{section}.{parts[0]}" for section in homes)
        raise ValueError(f"Ambiguous setting: --{option} is in {' and '.join(homes)}. Write {spelled}.")
    if not homes:
        known = {key for section in SECTIONS for key in plain_keys(section)} | {*SHORT, *EXTRA_OPTIONS}
        near = _nearest(option, known - others)
        raise ValueError(f"Unknown option: --{option}{near} Known: {', '.join(sorted(known))}.")
    return [homes[0], *parts]


# What `tailopt run` takes beside settings; here so that a slip of the keyboard finds it.
EXTRA_OPTIONS = ("out", "quiet", "traceback", "help")


def _check_key(section: str, key: str, known: Collection[str], near: Collection[str] | None = None) -> None:
    if key not in known:
        nearest = _nearest(key, known if near is None else near)
        raise ValueError(f"Unknown setting: {section}.{key}{nearest} [{section}] knows {', '.join(sorted(known))}.")


def _nearest(name: str, known: Iterable[str]) -> str:
    """What was probably meant: the closest word, or all that are equally close, as ilr and olr are to lr."""

    def likeness(word: str) -> float:
        return difflib.SequenceMatcher(None, word, name).ratio()

    near = difflib.get_close_matches(name, list(known), n=5)
    best = sorted(word for word in near if likeness(word) == likeness(near[0]))
    return f"; did you mean {' or '.join(map(repr, best))}?" if best else "."


def _resolved_task(table: Mapping[str, Any]) -> dict[str, Any]:
    name = str(table.get("name", ""))
    if name not in TASKS:
        given = f"unknown task {name!r}" if name else "no task is named"
        near = _nearest(name, TASKS)
        raise ValueError(f"Invalid task: {given}{near} Give one of {', '.join(TASKS)}: --task {next(iter(TASKS))}.")
    usual = task_settings(name)
    for key in table:
        if key not in ("name", "preset"):
            _check_key(f"task {name}", key, usual)
    typed = {key: _typed(f"task.{key}", given, type(usual[key])) for key, given in table.items() if key in usual}
    preset = _typed("task.preset", table.get("preset", "paper"), str)
    made = task(name, preset, **_unplain(name, typed))
    return {"name": name, "preset": preset, **{key: _plain(getattr(made, key)) for key in usual}}


def _made_task(resolved: Mapping[str, Any]) -> Task:
    settings = {key: held for key, held in resolved.items() if key not in ("name", "preset")}
    return task(resolved["name"], resolved["preset"], **_unplain(resolved["name"], settings))


def _plain(held: Any) -> Any:
    return str(held).removeprefix("torch.") if isinstance(held, torch.dtype) else held


def _unplain(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Names of tensor types back into types."""
    made = task(name)
    found = dict(settings)
    for key, held in settings.items():
        if isinstance(getattr(made, key), torch.dtype):
            found[key] = getattr(torch, held, None)
            if not isinstance(found[key], torch.dtype):
                raise ValueError(f"Invalid task.{key}: got {held!r}; need a type of torch, such as float32 or float64.")
    return found


def _resolved_algorithm(table: Mapping[str, Any]) -> dict[str, Any]:
    settings = {key: given for key, given in table.items() if given is not None}
    name, base = settings.pop("name", None), settings.pop("settings", None)
    if not isinstance(name, str):
        raise ValueError(
            "Invalid algorithm: none is named. Give one: --algorithm avg-biclip (`tailopt list algorithms`)."
        )
    if base is not None:
        if not isinstance(base, str) or not base.startswith(PAPER):
            raise ValueError(f"Invalid settings: got {base!r}; need paper:DATASET, such as paper:QNLI.")
        settings = {**paper_settings(name, base.removeprefix(PAPER)), **settings}
    for key, given in settings.items():
        _check_setting(key, given)
    return {"name": algorithm(name, **settings).name, **settings}


def _check_setting(key: str, given: Any) -> None:
    """A kind of value that the algorithm can judge: numbers, or what else that setting takes."""
    words: dict[str, tuple[type, ...]] = {
        "scope": (str,),
        "inner_state": (str,),
        "send_preconditioner": (bool, str),
        "bias_correction": (bool,),
    }
    lists = {"inner_betas", "outer_betas"}
    number = isinstance(given, int | float) and not isinstance(given, bool)
    if key in words:
        fine = isinstance(given, words[key])
    elif key in lists:
        fine = isinstance(given, list | tuple) and all(isinstance(entry, int | float) for entry in given)
    else:
        thresholds = key.endswith(("_u", "_d")) and isinstance(given, Mapping)
        fine = number or thresholds or (key == "dead_zone" and given == "auto")
    if not fine:
        need = "two numbers, as in 0.9,0.99" if key in lists else "a word" if key in words else "a number"
        raise ValueError(f"Invalid {key}: got {given!r}; need {need}. Write --{key} VALUE.")


def _schedule(key: str, entry: Any) -> scheduling.Schedule:
    """One schedule from its table, or the product of a list of them."""
    if isinstance(entry, list) and entry:
        made = [_schedule(key, part) for part in entry]
        result = made[0]
        for part in made[1:]:
            result = result * part
        return result
    kinds = [kind for kind in SCHEDULES if isinstance(entry, Mapping) and kind in entry]
    if len(kinds) != 1:
        raise ValueError(
            f"Invalid schedules.{key}: got {entry!r}; need a table with one of {', '.join(SCHEDULES)}, "
            f"such as {key} = {{power = -0.5}}."
        )
    (kind,) = kinds
    make, beside = SCHEDULES[kind]
    for name, given in entry.items():
        _check_key(f"schedules.{key}", name, (kind, *beside))
        if name != "per" and (isinstance(given, bool) or not isinstance(given, int | float)):
            raise ValueError(f"Invalid schedules.{key}.{name}: got {given!r}; need a number.")
    return make(entry[kind], **{name: entry[name] for name in beside if name in entry})


def _typed(name: str, given: Any, hint: Any) -> Any:
    """A value of a type, or of one of a union; whole numbers pass as floats."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for kind in kinds:
        if kind is float and isinstance(given, int | float) and not isinstance(given, bool):
            return float(given)
        if typing.get_origin(kind) is list and isinstance(given, list | tuple):
            return [_typed(f"{name}[{i}]", item, typing.get_args(kind)[0]) for i, item in enumerate(given)]
        if kind in (bool, int, str, types.NoneType) and type(given) is kind:
            return given
    words = {int: "a whole number", float: "a number", str: "a word", bool: "true or false", types.NoneType: "none"}
    need = " or ".join(words.get(kind, "a list of numbers") for kind in kinds)
    raise ValueError(f"Invalid {name}: got {given!r}; need {need}.")
