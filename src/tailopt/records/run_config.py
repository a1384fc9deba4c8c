"""config.toml: how the settings of a run are stored, read, and compared.

    in_sections   settings -> [task], [algorithm], [run], [schedules]: the layout of every configuration, also that of a
                  file for `tailopt run`, `sweep` and `train`. Folders by older versions have a flat layout, read by it
    storable      any setting -> what TOML can hold: tensors as lists, functions by name
    to_toml       settings -> text; a setting that TOML cannot hold raises an error that names it
    parse_config  text -> settings
    difference    two sets of settings -> [dotted name, before, after] for each that differs

`identity.py` knows whether the file is still the one that was written.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tailopt.optional import require
from tailopt.records.history import child_path, type_name
from tailopt.records.tensor_bytes import digest

CONFIG = "config.toml"
OF_THE_ALGORITHM = ("inner_state", "send_preconditioner", "numbers")  # besides its name and its settings
_ABSENT = object()


def in_sections(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return flat settings in sections; what is in sections already, and what names no optimizer, is left as it is.

    A user's own entries that are no section are in [run].

    Examples:
        >>> in_sections({"algorithm": "avg-sgd", "settings": {"ilr": 0.1}, "rounds": 5, "task": {"name": "syntoken"}})
        {'task': {'name': 'syntoken'}, 'algorithm': {'name': 'avg-sgd', 'ilr': 0.1}, 'run': {'rounds': 5}}
        >>> in_sections({"outer": "biclip", "settings": {"olr": 1.0}, "inner": "AdamW", "rounds": 5})
        {'algorithm': {'outer': 'biclip', 'inner': 'AdamW', 'olr': 1.0}, 'run': {'rounds': 5}}
    """
    rest = dict(config)
    if isinstance(rest.get("algorithm"), str):
        algorithm = {"name": rest.pop("algorithm")}
    elif {"outer", "inner"} <= rest.keys():
        algorithm = {"outer": rest.pop("outer"), "inner": rest.pop("inner")}
    else:
        return rest
    task = {}
    if isinstance(rest.get("task"), Mapping | str):  # a program may describe its task by a word
        described = rest.pop("task")
        task = {"task": {"name": described} if isinstance(described, str) else described}
    settings = rest.pop("settings", None)
    algorithm |= settings if isinstance(settings, Mapping) else {}
    algorithm |= {key: rest.pop(key) for key in OF_THE_ALGORITHM if key in rest}
    schedules = {"schedules": rest.pop("schedules")} if isinstance(rest.get("schedules"), Mapping) else {}
    return {**task, "algorithm": algorithm, "run": rest, **schedules}


def storable(value: Any) -> Any:
    """Return a setting as a run folder can hold it: small tensors as lists, functions and classes by their name.

    Examples:
        >>> import torch
        >>> storable({"u": torch.tensor([0.5, 1.0]), "betas": (0.9, 0.99), "chooser": max})
        {'u': [0.5, 1.0], 'betas': [0.9, 0.99], 'chooser': 'function max'}
    """
    if isinstance(value, Tensor):
        if value.numel() <= 64:
            return value.tolist()
        return f"tensor of shape {tuple(value.shape)}, sha256 {digest({'value': value})[:16]}"
    if isinstance(value, Mapping):
        return {str(k): storable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [storable(v) for v in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if callable(value) and hasattr(value, "__qualname__"):
        return f"function {value.__qualname__}"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))  # an address differs in the next process


def as_stored(value: Any) -> Any:
    """Return a setting as it comes back from a run folder: tuples as lists, and no None, which TOML lacks.

    Examples:
        >>> as_stored({"betas": (0.9, 0.99), "radius": None})
        {'betas': [0.9, 0.99]}
    """
    if isinstance(value, Mapping):
        return {k: as_stored(v) for k, v in value.items() if v is not None}
    return [as_stored(v) for v in value] if isinstance(value, list | tuple) else value


def to_toml(config: Mapping[str, Any]) -> str:
    """Return settings as TOML."""
    return str(require("tomli_w", "Run folders need tomli_w", extra="runs").dumps(_toml_value(dict(config), "config")))


def _toml_value(value: Any, path: str) -> Any:
    """Return a value as TOML can hold it; TypeError with the path of what it cannot hold."""
    if type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value)
    if type(value) in (list, tuple):
        return [_toml_value(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict):
        if invalid := [key for key in value if type(key) is not str]:
            raise TypeError(f"{path} has the key {invalid[0]!r}, {type_name(invalid[0])}; keys are strings.")
        return {key: _toml_value(item, child_path(path, key)) for key, item in value.items() if item is not None}
    raise TypeError(
        f"{path} is {type_name(value)}; only bool, int, float, str, lists and dicts can be written to {CONFIG}. "
        "Write its name, or leave it out."
    )


def parse_config(path: Path, text: str) -> dict[str, Any]:
    """Return the settings in TOML text; path: the file that messages name."""
    package = "tomllib" if sys.version_info >= (3, 11) else "tomli"
    toml = require(package, f"Run folders need {package}", extra="runs")
    try:
        settings: dict[str, Any] = toml.loads(text)
        return settings
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not TOML ({error}). Repair it, or bring it back from a copy.") from error


def config_text(path: Path, data: bytes) -> str:
    """Return the content of config.toml as text; path: the file that messages name."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}). Repair it, or bring it back from a copy.") from error


def config_digest(data: bytes) -> str:
    """Return the sha256 of the content of config.toml."""
    return hashlib.sha256(data).hexdigest()


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[list[Any]]:
    """Return [name, before, after] for each setting that differs; both by dotted names, None for an absent one.

    Examples:
        >>> difference({"ilr": 0.5, "rounds": 3}, {"ilr": 0.7, "rounds": 3, "guard": True})
        [['ilr', 0.5, 0.7], ['guard', None, True]]
    """
    names = [*before, *(name for name in after if name not in before)]
    return [
        [name, before.get(name), after.get(name)]
        for name in names
        if before.get(name, _ABSENT) != after.get(name, _ABSENT)
    ]


def by_dotted_name(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings in one level; an empty table is a setting too, and a date becomes its text.

    Examples:
        >>> by_dotted_name({"rounds": 3, "settings": {"ilr": 0.5}})
        {'rounds': 3, 'settings.ilr': 0.5}
    """
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            flat |= by_dotted_name(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, bool | int | float | str | list | dict) else str(value)
    return flat


def by_setting(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of all sections by their own names, as `--name` of the command line has them.

    Examples:
        >>> by_setting({"algorithm": {"name": "avg-sgd", "ilr": 0.1}, "run": {"rounds": 5}, "task": {"name": "x"}})
        {'algorithm': 'avg-sgd', 'ilr': 0.1, 'rounds': 5, 'task': {'name': 'x'}}
    """
    found: dict[str, Any] = {}
    for section, table in config.items():
        if section == "algorithm" and isinstance(table, Mapping):
            found |= {"algorithm" if key == "name" else key: value for key, value in table.items()}
        elif section == "run" and isinstance(table, Mapping):
            found |= table
        else:
            found[section] = table
    return found


def describe_difference(differences: list[list[Any]]) -> str:
    """Return the result of `difference` in words.

    Examples:
        >>> describe_difference([["settings.ilr", 0.5, 0.7], ["guard", None, True]])
        'settings.ilr is 0.7, and was 0.5; guard is True, and was not there'
    """
    words = [
        f"{key} is {'not there' if now is None else repr(now)}, and was {'not there' if then is None else repr(then)}"
        for key, then, now in differences
    ]
    return "; ".join(words) or "the settings are the same, in other bytes"
