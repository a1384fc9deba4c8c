"""A row of the history as numbers by name, for tools that know nothing else.

    loss                           of the round
    metrics/error                  what `evaluate` returned
    thresholds/inner/u             thresholds that are "auto"; thresholds/inner/u/3 where every tensor has its own
    gradients/weight/above         the statistics of a tensor
    nodes/3/steps, /weight         of a participant; /drawn where it was drawn more than once, with its weight per draw
    nodes/3/value, /bound          of a node that was left out: what was measured, and what is possible

Together with `row_texts`, this is everything that a row has: no number is rounded, summed up or left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from tailopt.arguments import is_number

Number = int | float
_NAMES = {"statistics": "gradients"}


def row_numbers(row: Mapping[str, Any]) -> dict[str, Number]:
    """Return every number of a row by its name; truth values are 0 and 1.

    Examples:
        >>> row = {"round": 4, "loss": 0.5, "participants": [0, 2], "steps": [5, 5], "weights": [0.5, 0.5],
        ...        "excluded": [], "metrics": {"error": 0.25}, "statistics": {}}
        >>> row_numbers(row)
        {'loss': 0.5, 'metrics/error': 0.25, 'nodes/0/steps': 5, 'nodes/2/steps': 5, 'nodes/0/weight': 0.5,
         'nodes/2/weight': 0.5}
    """
    return {name: value for name, value in _leaves(row) if not isinstance(value, str)}


def row_texts(row: Mapping[str, Any]) -> dict[str, str]:
    """Return every text of a row by its name: the reasons of exclusions, and metrics that are no numbers.

    Examples:
        >>> left_out = {"node": 2, "tensor": "weight", "value": float("inf"), "bound": None, "reason": "not finite"}
        >>> row_texts({"round": 4, "participants": [2], "steps": [5], "weights": [0.0], "excluded": [left_out]})
        {'nodes/2/tensor': 'weight', 'nodes/2/reason': 'not finite'}
    """
    return {name: value for name, value in _leaves(row) if isinstance(value, str)}


def _leaves(row: Mapping[str, Any]) -> Iterator[tuple[str, Number | str]]:
    for key, value in row.items():
        if key not in ("round", "participants", "steps", "weights", "excluded"):
            yield from _nested(_NAMES.get(key, key), value)
    drawn = list(row.get("participants", ()))
    for key, name in (("steps", "steps"), ("weights", "weight")):
        for node, value in dict(zip(drawn, row.get(key, ()), strict=False)).items():
            yield f"nodes/{node}/{name}", value
    yield from ((f"nodes/{node}/drawn", times) for node, times in Counter(drawn).items() if times > 1)
    for entry in row.get("excluded", ()):
        for key in ("tensor", "value", "bound", "reason"):
            yield from _nested(f"nodes/{entry['node']}/{key}", entry.get(key))


def _nested(name: str, value: Any) -> Iterator[tuple[str, Number | str]]:
    if isinstance(value, Mapping | list | tuple):
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _nested(f"{name}/{key}", part)
    elif is_number(value) or isinstance(value, str):
        yield name, value
    elif isinstance(value, bool):
        yield name, int(value)
