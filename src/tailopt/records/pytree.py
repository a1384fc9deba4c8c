"""Nested state as a flat dict of named tensors plus plain values, and back again exactly.

    pack({"lr": 0.1, "moments": [t]})  ->  {"state.moments[0]": t}, {"lr": 0.1, "moments": [{"$tensor": ...}]}

The tensors go into the files of a checkpoint, the plain values into its `meta`. Functions and objects raise an error
that names their path in the state: nothing is pickled. (`torch.utils._pytree` would keep the structure in a `TreeSpec`,
which has no stable form in JSON.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tailopt.records.history import child_path, quoted_names, type_name


def pack(state: Any, name: str = "state") -> tuple[dict[str, Tensor], Any]:
    """Separate a nested state into its tensors, by name, and the plain values, with tensor names in their places.

    State is made of dicts, lists and tuples with tensors, None, bool, int, float, str and torch.dtype. Dicts of any
    type come back as dict. Tensors are not copied; a tensor that occurs twice comes back as two. The plain values can
    go into `meta`: {"$tensor": name}, {"$dtype": name}, {"$tuple": [...]} and {"$dict": [[key, value], ...]}
    represent what JSON lacks.

    Args:
        state: what to save.
        name: the prefix of tensor names, and of paths in messages.

    Examples:
        >>> import torch
        >>> pack({"lr": 0.1, "betas": (0.9, 0.99), "moments": [torch.zeros(2)]})
        ({'state.moments[0]': tensor([0., 0.])},
         {'lr': 0.1, 'betas': {'$tuple': [0.9, 0.99]}, 'moments': [{'$tensor': 'state.moments[0]'}]})
        >>> pack({"schedule": print})
        Traceback (most recent call last):
        TypeError: state.schedule is a builtin_function_or_method; only tensors and plain values can be saved. Leave it
        out, or save the numbers it is made from.
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _without_tensors(state, name, tensors)


def unpack(tensors: Mapping[str, Tensor], packed: Any) -> Any:
    """Return the state that `pack` separated; `tensors` may contain further tensors.

    Examples:
        >>> import torch
        >>> unpack(*pack({"betas": (0.9, 0.99), 0: torch.tensor(1)}))
        {'betas': (0.9, 0.99), 0: tensor(1)}
    """
    if type(packed) is list:
        return [unpack(tensors, item) for item in packed]
    if type(packed) is not dict:
        return packed
    match packed:
        case {"$tensor": str(name)}:
            if name not in tensors:
                raise ValueError(
                    f"The state has a tensor {name!r}; the tensors are {quoted_names(tensors)}. Pass those it was "
                    "packed with."
                )
            return tensors[name]
        case {"$dtype": str(name)}:
            return dtype_named(name)
        case {"$tuple": list(items)}:
            return tuple(unpack(tensors, item) for item in items)
        case {"$dict": list(pairs)}:
            return {key: unpack(tensors, item) for key, item in pairs}
    return {key: unpack(tensors, item) for key, item in packed.items()}


def tensor_names(packed: Any) -> list[str]:
    """Return the names of the tensors in a packed state, in its order.

    Examples:
        >>> tensor_names({"lr": 0.1, "moments": [{"$tensor": "state.moments[0]"}]})
        ['state.moments[0]']
    """
    if type(packed) is list:
        return [name for item in packed for name in tensor_names(item)]
    if type(packed) is not dict:
        return []
    if packed.keys() == {"$tensor"}:
        return [packed["$tensor"]]
    return [name for item in packed.values() for name in tensor_names(item)]


def dtype_named(name: str) -> torch.dtype:
    """Return the type of torch with this name; ValueError for any other attribute of torch."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"The state has a dtype {name!r}, which this torch does not have.")
    return dtype


def _without_tensors(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return a value with names in place of its tensors, which are added to `tensors`."""
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Tensor):
        tensors[path] = value.detach()
        return {"$tensor": path}
    if type(value) in (list, tuple):
        items = [_without_tensors(item, f"{path}[{index}]", tensors) for index, item in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    if isinstance(value, dict):
        if invalid := [key for key in value if key is not None and type(key) not in (bool, int, float, str)]:
            raise TypeError(
                f"{path} has the key {invalid[0]!r}, {type_name(invalid[0])}; keys are strings or plain numbers. Use a "
                "name."
            )
        pairs = [[key, _without_tensors(item, child_path(path, key), tensors)] for key, item in value.items()]
        # keys that JSON would change, or that look like one of the markers above, need the list of pairs
        unambiguous = all(type(key) is str and not key.startswith("$") for key in value)
        return dict(pairs) if unambiguous else {"$dict": pairs}
    raise TypeError(
        f"{path} is {type_name(value)}; only tensors and plain values can be saved. Leave it out, or save the numbers "
        "it is made from."
    )
