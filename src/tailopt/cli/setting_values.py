"""Values of settings: what a text of the command line means, and checks of types with messages that name the setting.

Ranges are not checked here: the library function that uses a setting checks its range.
"""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Mapping
from typing import Any

import torch

from tailopt.optional import require

_TYPE_WORDS = {int: "a whole number", float: "a number", str: "a word", bool: "true or false", types.NoneType: "none"}
# Settings of an algorithm that are not plain numbers.
_ALGORITHM_TYPES: Mapping[str, tuple[type, ...]] = {
    "scope": (str,),
    "scale": (str,),
    "inner_state": (str,),
    "send_preconditioner": (bool, str),
    "bias_correction": (bool,),
    "adjust_lr_fn": (str,),
}
_NUMBER_PAIRS = ("inner_betas", "outer_betas")


def parse_value(text: str) -> Any:
    """Interpret a text of the command line as a TOML value, a number, numbers with commas, or else as the text itself.

    Examples:
        >>> parse_value("1e-3"), parse_value("-.5"), parse_value("none"), parse_value("1,2")
        (0.001, -0.5, 'none', [1, 2])
        >>> parse_value("{power = -0.5}"), parse_value("True")
        ({'power': -0.5}, True)
    """
    if text in ("True", "False"):
        return text == "True"
    try:
        document = parse_toml(f"value = {text}")
        # A text with a line break could hold further keys; dates and times are no settings.
        if document.keys() == {"value"} and isinstance(document["value"], bool | int | float | str | list | dict):
            return document["value"]
    except ValueError:
        pass
    # TOML refuses some numbers that Python accepts, such as -.5 and 007.
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    parts = [parse_value(part) for part in text.split(",")] if "," in text else []
    return parts if parts and all(isinstance(part, int | float) for part in parts) else text


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a TOML document; raises ValueError for text that is not TOML."""
    package = "tomllib" if sys.version_info >= (3, 11) else "tomli"
    document: dict[str, Any] = require(package, f"The command line needs {package}", extra="runs").loads(text)
    return document


def check_type(name: str, value: Any, hint: Any) -> Any:
    """Return a value that has the type of a hint, or one type of a union; whole numbers become floats where needed.

    Examples:
        >>> check_type("run.participation", 1, float), check_type("run.rounds", None, int | None)
        (1.0, None)
    """
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for kind in kinds:
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if typing.get_origin(kind) is list and isinstance(value, list | tuple):
            return [check_type(f"{name}[{i}]", item, typing.get_args(kind)[0]) for i, item in enumerate(value)]
        if kind in (bool, int, str, types.NoneType) and type(value) is kind:
            return value
    need = " or ".join(_TYPE_WORDS.get(kind, "a list of numbers") for kind in kinds)
    raise ValueError(f"Invalid {name}: got {value!r}; need {need}.")


def check_algorithm_value(key: str, value: Any) -> None:
    """Raise unless the algorithm can judge the value: most settings are numbers, a few are words or pairs."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if key in _ALGORITHM_TYPES:
        valid = isinstance(value, _ALGORITHM_TYPES[key])
    elif key in _NUMBER_PAIRS:
        valid = isinstance(value, list | tuple) and all(isinstance(entry, int | float) for entry in value)
    elif key == "adamw_on":
        valid = isinstance(value, str) or (isinstance(value, list) and all(isinstance(entry, str) for entry in value))
    else:
        per_tensor = key.endswith(("_u", "_d")) and isinstance(value, Mapping)
        valid = number or per_tensor or (key.endswith(("_u", "_d", "dead_zone")) and value == "auto")
    if not valid:
        need = "a word" if key in _ALGORITHM_TYPES else "a number"
        if key in _NUMBER_PAIRS:
            need = "two numbers, as in 0.9,0.99"
        if key == "adamw_on":
            need = "a pattern of parameter names such as *emb*, or a list of them"
        raise ValueError(f"Invalid {key}: got {value!r}; need {need}. Write --{key} VALUE.")


def dtype_as_name(value: Any) -> Any:
    """Write a torch.dtype as its name, such as "float32"; leave every other value as it is."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def dtype_from_name(key: str, name: Any) -> torch.dtype:
    """The torch.dtype of a name; raises for anything else."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"Invalid task.{key}: got {name!r}; need a type of torch, such as float32 or float64.")
    return dtype
