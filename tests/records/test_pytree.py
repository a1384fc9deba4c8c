"""Nested state apart and together again: exactly, or refused by its place."""

from __future__ import annotations

import json
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tailopt.records import history
from tailopt.records.checkpoints import pack, unpack
from tailopt.records.pytree import tensor_names

leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.integers(0, 9).map(torch.tensor)
keys = st.text() | st.integers() | st.booleans() | st.none() | st.sampled_from(["$tensor", "$tuple", "$dict", "$float"])
states = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=20,
)


def shown(value: Any) -> str:
    """A value with its types and the order of its dicts; `repr` of a float is exact."""
    return f"{value.dtype}{value.tolist()}" if isinstance(value, Tensor) else _shown(value)


def _shown(value: Any) -> str:
    if type(value) is dict:
        return "{" + ", ".join(f"{key!r}: {shown(item)}" for key, item in value.items()) + "}"
    if type(value) in (list, tuple):
        return type(value).__name__ + "(" + ", ".join(map(shown, value)) + ")"
    return repr(value)


def count(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(count, value.values()))
    return sum(map(count, value)) if isinstance(value, (list, tuple)) else isinstance(value, Tensor)


@given(states)
def test_state_comes_back_through_a_file(state: Any) -> None:
    tensors, rest = pack(state)
    assert len(tensors) == count(state)  # no two under one name
    text = json.dumps(history.encode(rest, "rest"), allow_nan=False)
    assert shown(unpack(tensors, history.decode(json.loads(text)))) == shown(state)
    assert shown(unpack(tensors, rest)) == shown(state)


def test_the_state_of_an_optimizer() -> None:
    model = nn.Linear(2, 3)
    adam = torch.optim.Adam(model.parameters(), lr=0.1, betas=(0.8, 0.9))
    model(torch.ones(1, 2)).sum().backward()
    adam.step()
    tensors, rest = pack(adam.state_dict(), "inner")
    assert "inner.state[0].exp_avg" in tensors
    other = torch.optim.Adam(model.parameters())
    other.load_state_dict(unpack(tensors, rest))
    assert shown(other.state_dict()) == shown(adam.state_dict())


def test_tensors_are_the_same_memory_without_their_graph() -> None:
    weight = nn.Parameter(torch.ones(2))
    tensors, _ = pack([weight])
    assert type(tensors["state[0]"]) is Tensor and not tensors["state[0]"].requires_grad
    assert tensors["state[0]"].data_ptr() == weight.data_ptr()


def test_dicts_of_any_kind_come_back_as_dict() -> None:
    assert shown(unpack(*pack(OrderedDict(b=1, a=2)))) == "{'b': 1, 'a': 2}"


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {"inner": [0, 1, 2, {"foo": lambda: 0}]},
            r"^state\.inner\[3\]\.foo is a function; only tensors and plain values",
        ),
        ({"0.weight": object()}, r"^state\['0\.weight'\] is an object;"),
        ([{1, 2}], r"^state\[0\] is a set;"),
        ((b"bytes",), r"^state\[0\] is a bytes;"),
        ([Point(1, 2)], r"^state\[0\] is a Point;"),
        ({"a": {(1, 2): 3}}, r"^state\.a has the key \(1, 2\), a tuple;"),
    ],
)
def test_anything_else_is_refused_by_its_place(state: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        pack(state)


def test_a_tensor_that_is_not_there_is_named() -> None:
    _, rest = pack({"w": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"has a tensor 'state\.w'; the tensors are 'other'"):
        unpack({"other": torch.zeros(1)}, rest)


def test_the_tensors_of_a_packed_state() -> None:
    tensors, packed = pack({"a": (torch.ones(1), 2), 0: [torch.ones(2), {"b": torch.ones(3)}]})
    assert sorted(tensor_names(packed)) == sorted(tensors) and len(tensors) == 3
