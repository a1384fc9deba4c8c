"""Facts that nodes compare: equal values agree after their way through JSON, and any other value is found."""

from __future__ import annotations

import json
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from tailopt.distributed.agreement import as_fact, difference

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(min_size=1), values, max_size=4))
def test_the_same_facts_agree_after_their_way_through_json(facts: dict[str, Any]) -> None:
    sent = json.loads(json.dumps(as_fact(facts)))
    assert difference([sent, json.loads(json.dumps(as_fact(facts)))]) == ""


@given(st.dictionaries(st.sampled_from("abc"), values, min_size=1), st.sampled_from("abc"), values)
def test_any_other_value_is_found(facts: dict[str, Any], key: str, value: Any) -> None:
    first, second = as_fact(facts), as_fact({**facts, key: value})
    same = json.dumps(first) == json.dumps(second)
    assert (difference([first, first, second]) == "") == same
    assert same or difference([first, first, second]).startswith(f"Node 2 disagrees with node 0 on {key}")


def test_tensors_are_compared_by_their_elements() -> None:
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])
    assert as_fact(a) == as_fact(a.clone()) != as_fact(b)
    assert as_fact(torch.tensor(0.5)) == 0.5
