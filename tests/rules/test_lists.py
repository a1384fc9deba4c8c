"""Steps over lists: the bits of one tensor after another, whatever the window."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tailopt.rules import lists
from tailopt.rules.lists import scale_, windows
from tailopt.rules.rule import ParamState
from tailopt.rules.table import INNER, OUTER
from tests.rules.test_rules import SHAPES, gradients, tensors

RULES = [INNER["sgd"], OUTER["nesterov"], INNER["adagrad"], OUTER["rmsprop"], INNER["adamw"], INNER["biclip+adam"]]
NUMBERS = {"lr": 0.05, "eps": 1e-6, "momentum": 0.9, "u": 0.8, "d": 0.1}
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


@given(sizes=st.lists(st.integers(0, 1 << 22), max_size=12))
def test_windows_are_the_whole_list_in_order_and_none_is_larger(sizes: list[int]) -> None:
    x = torch.empty(1 << 22, dtype=torch.uint8)
    some = [x[:size] for size in sizes]
    slices = list(windows(some))
    assert [i for window in slices for i in range(len(sizes))[window]] == list(range(len(sizes)))
    for window in slices:
        assert sum(sizes[window]) <= lists.CPU_WINDOW and len(sizes[window]) > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("in_parts", [False, True], ids=["one window", "a window each"])
def test_a_list_has_the_bits_of_its_tensors(rule, dtype, device, in_parts, monkeypatch) -> None:
    if in_parts:
        monkeypatch.setattr(lists, "CPU_WINDOW", 1)
        monkeypatch.setattr(lists, "GPU_WINDOW", 1)
    rates = [0.05 / (i + 1) for i in range(len(SHAPES))]
    hparams = {**rule.defaults, **NUMBERS, "lr": rates, "weight_decay": 0.1}
    together, alone = ([x.to(device) for x in tensors(0, dtype)] for _ in range(2))
    states, own = ([ParamState() for _ in SHAPES] for _ in range(2))
    for grads in gradients(dtype):
        on_device = [g.to(device) for g in grads]
        rule.step(together, on_device, states, hparams)
        for p, g, state, rate in zip(alone, on_device, own, rates, strict=True):
            rule.step([p], [g], [state], {**hparams, "lr": rate})
    for a, b in zip(together, alone, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_factor_is_not_rounded_to_the_type_of_the_tensors(dtype: torch.dtype) -> None:
    x = torch.linspace(0.1, 3, 37).to(dtype)
    listed = [x.clone(), x[:5].clone()]
    scale_(listed, 0.999)
    for a, b in zip(listed, (x, x[:5]), strict=True):
        assert torch.equal(a, b.mul(0.999))
