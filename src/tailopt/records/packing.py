"""Nested state as named tensors and a plain rest, and back exactly.

    pack({"lr": 0.1, "moments": [t]})  ->  {"state.moments[0]": t}, {"lr": 0.1, "moments": [{"$tensor": ...}]}

The tensors go into the files of a checkpoint, the rest into its `meta`. Functions and objects are refused by their
place in the state: nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tailopt.records.history import child, kind, known


def pack(state: Any, name: str = "state") -> tuple[dict[str, Tensor], Any]:
    """Take the tensors out of a nested state: they by name, and the plain rest with their names in their places.

    State is made of dicts, lists and tuples with tensors, None, bool, int, float and str. Dicts of any kind come back
    as dict. Tensors are not copied, and one that stands in two places comes back as two. The rest can go into `meta`;
    in it {"$tensor": name}, {"$tuple": [...]} and {"$dict": [[key, value], ...]} stand for what JSON has not.

    Args:
        state: what to save.
        name: begins the names of the tensors, and of values in messages.

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
    return tensors, _packed(state, name, tensors)


def unpack(tensors: Mapping[str, Tensor], packed: Any) -> Any:
    """The state that `pack` took apart; `tensors` may hold others too.

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
                    f"The state has a tensor {name!r}; the tensors are {known(tensors)}. Pass those it was packed with."
                )
            return tensors[name]
        case {"$tuple": list(items)}:
            return tuple(unpack(tensors, item) for item in items)
        case {"$dict": list(pairs)}:
            return {key: unpack(tensors, item) for key, item in pairs}
    return {key: unpack(tensors, item) for key, item in packed.items()}


def names(packed: Any) -> list[str]:
    """The tensors that a packed state is made of, in its order.

    Examples:
        >>> names({"lr": 0.1, "moments": [{"$tensor": "state.moments[0]"}]})
        ['state.moments[0]']
    """
    if type(packed) is list:
        return [name for item in packed for name in names(item)]
    if type(packed) is not dict:
        return []
    if packed.keys() == {"$tensor"}:
        return [packed["$tensor"]]
    return [name for item in packed.values() for name in names(item)]


def _packed(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """The plain rest of a value; its tensors are added to `tensors`."""
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Tensor):
        tensors[path] = value.detach()
        return {"$tensor": path}
    if type(value) in (list, tuple):
        items = [_packed(item, f"{path}[{index}]", tensors) for index, item in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    if isinstance(value, dict):
        if strange := [key for key in value if key is not None and type(key) not in (bool, int, float, str)]:
            raise TypeError(
                f"{path} has the key {strange[0]!r}, {kind(strange[0])}; keys are strings or plain numbers. Use a name."
            )
        pairs = [[key, _packed(item, child(path, key), tensors)] for key, item in value.items()]
        as_it_is = all(type(key) is str and not key.startswith("$") for key in value)
        return dict(pairs) if as_it_is else {"$dict": pairs}
    raise TypeError(
        f"{path} is {kind(value)}; only tensors and plain values can be saved. Leave it out, or save the numbers it is "
        "made from."
    )
