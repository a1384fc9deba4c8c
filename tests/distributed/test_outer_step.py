"""The outer step on a node's partition, piece by piece: the bits of the rule on the whole, for every outer rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tailopt.distributed import outer_step
from tailopt.rules.rule import ParamState
from tailopt.rules.table import OUTER

NUMBERS: dict[str, dict[str, Any]] = {
    "avg": {},
    "sgd": {"lr": 0.7, "momentum": 0.9},
    "nesterov": {"lr": 0.7, "momentum": 0.9},
    "biclip": {"lr": 0.7, "u": 0.5, "d": 0.1, "dead_zone": 0.0},
    "biclip-l2": {"lr": 0.7, "u": 0.5, "d": 0.1, "scope": "global", "norm": 3.0},
    "adagrad": {"lr": 0.7, "eps": 1e-3},
    "rmsprop": {"lr": 0.7, "eps": 1e-3},
    "adam": {"lr": 0.7, "eps": 1e-3, "betas": (0.9, 0.99), "bias_correction": True},
    "yogi": {"lr": 0.7, "eps": 1e-3},
}
SIZES = (0, 1, outer_step.PIECE - 1, outer_step.PIECE, 2 * outer_step.PIECE + 17)


@pytest.mark.parametrize("by_tensor", [False, True], ids=["one lr", "lr by tensor and coordinate"])
@pytest.mark.parametrize("name", OUTER)
def test_pieces_have_the_bits_of_the_whole(name: str, by_tensor: bool) -> None:
    rule, numbers = OUTER[name], {**OUTER[name].defaults, **NUMBERS[name]}
    source = torch.Generator().manual_seed(0)
    if by_tensor and name not in ("avg", "biclip-l2"):
        numbers["lr"] = [torch.rand(n, generator=source) if i % 2 else 0.5 for i, n in enumerate(SIZES)]
    whole = [torch.randn(n, generator=source) for n in SIZES]
    pieces = [x.clone() for x in whole]
    states: list[ParamState] = [{} for _ in SIZES]
    others: list[ParamState] = [{} for _ in SIZES]
    for _ in range(4):
        delta = [torch.randn(n, generator=source) for n in SIZES]
        outer_step.outer_step(rule, pieces, [d.clone() for d in delta], others, numbers)
        rule.step(whole, [-d for d in delta], states, numbers)
    for x, y, state, other in zip(whole, pieces, states, others, strict=True):
        assert torch.equal(x, y)
        assert state.keys() == other.keys()
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[key])), key
