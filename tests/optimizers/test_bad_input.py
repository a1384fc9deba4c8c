"""What no optimizer can use is refused in words, before any parameter moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tailopt
from tailopt import BiClip, Clipped, L2Clip
from tailopt.clipping.freed_storage import is_freed
from tests.distributed import forked

HERE = "tests.optimizers.test_bad_input"

SETTINGS = [
    ({"lr": "1"}, r"Invalid learning rate: '1'; need 0 <= lr < inf\."),
    ({"lr": True}, r"Invalid learning rate: True; need 0 <= lr < inf\."),
    ({"lr": "0.1"}, r"Invalid learning rate: '0\.1'; need 0 <= lr < inf\."),
    ({"lr": [0.1]}, r"Invalid learning rate: \[0\.1\]; need 0 <= lr < inf\."),
    ({"weight_decay": None}, r"Invalid weight_decay value: None; need 0 <= weight_decay < inf\."),
    ({"weight_decay": "0.1"}, r"Invalid weight_decay value: '0\.1'"),
    ({"weight_decay": True}, "Invalid weight_decay value: True"),
    ({"u": "1"}, r"Invalid thresholds: u='1'; need a number or a tensor with 0 <= u <= inf\."),
    ({"u": [1.0, 2.0]}, r"Invalid thresholds: u=\[1\.0, 2\.0\]; need a number or a tensor with 0 <= u <= inf\."),
    ({"u": True}, "Invalid thresholds: u=True; need"),
    ({"d": "0.1"}, r"Invalid thresholds: d='0\.1'; need a number or a tensor with 0 <= d <= u\."),
    ({"d": False}, "Invalid thresholds: d=False; need"),
    ({"d": (0.1, 0.2)}, r"Invalid thresholds: d=\(0\.1, 0\.2\); need"),
]
ZONES = [
    ({"dead_zone": None}, "Invalid thresholds: dead_zone=None; need a number or a tensor with 0 <= dead_zone <= u"),
    ({"dead_zone": True}, "Invalid thresholds: dead_zone=True; need"),
    ({"dead_zone": [0.1]}, r"Invalid thresholds: dead_zone=\[0\.1\]; need"),
    ({"dead_zone": "0.1"}, r"Invalid dead_zone: '0\.1'; need a number with 0 <= dead_zone <= u, or \"auto\"\."),
]
AUTO = [
    ({"u": "auto", "d": 0.1}, r"Invalid thresholds: d=0\.1 with u='auto'; need d='auto' or d=0"),
    ({"u": "auto", "d": "auto", "scale": "last"}, r"Invalid scale: 'last'; need one of 'first', 'follow'\."),
    ({"u": float("inf"), "d": "auto"}, r"Invalid thresholds: u=inf with d='auto'; need a finite u"),
]
CASES = [(cls, *case) for cls in (BiClip, L2Clip) for case in (*SETTINGS, *AUTO)]
CASES += [(BiClip, *case) for case in ZONES] + [
    (BiClip, {"u": 1.0, "relative": True}, r"Invalid relative: True with u=1\.0; need u='auto'"),
    (L2Clip, {"u": None}, "Invalid thresholds: u=None; need"),
    (L2Clip, {"d": None}, "Invalid thresholds: d=None; need"),
]


@pytest.mark.parametrize(("cls", "bad", "said"), CASES)
def test_settings_that_are_no_numbers(cls: type[torch.optim.Optimizer], bad: dict[str, Any], said: str) -> None:
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    with pytest.raises(ValueError, match=said):
        cls([p], **bad)
    opt = cls([p], lr=0.1, u=1.0, d=0.1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=said):
        opt.add_param_group({"params": [q], **bad})
    opt.param_groups[0].update(bad)
    with pytest.raises(ValueError, match=said):
        opt.step()
    assert p.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("u", ["1", [1.0], None, True])
def test_the_operators_and_the_algorithms_say_it_too(u: Any) -> None:
    with pytest.raises(ValueError, match="Invalid thresholds: u="):
        tailopt.biclip(torch.ones(2), u, 0.0)
    with pytest.raises(ValueError, match="Invalid thresholds: i_u="):
        tailopt.algorithm("avg-biclip", ilr=0.1, i_u=u, i_d=0.0)


@pytest.mark.parametrize(
    ("name", "bad", "said"),
    [
        ("sgd-sgd", {"olr": 1.0, "momentum": "x"}, "Invalid momentum: 'x'; need 0 <= momentum < 1"),
        ("adam-sgd", {"olr": 1.0, "oeps": 0.1, "outer_betas": None}, "Invalid outer_betas: None; need two numbers"),
        ("adam-sgd", {"olr": 1.0, "oeps": 0.1, "outer_betas": ("a", "b")}, "Invalid outer_betas"),
    ],
)
def test_other_settings_of_algorithms(name: str, bad: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tailopt.algorithm(name, ilr=0.1, **bad)


# ---- integers ----

MAKERS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "BiClip": lambda params: BiClip(params, lr=0.1),
    "BiClip, foreach": lambda params: BiClip(params, lr=0.1, foreach=True),
    "BiClip, single": lambda params: BiClip(params, lr=0.1, foreach=False),
    "BiClip, fused": lambda params: BiClip(params, lr=0.1, fused=True),
    "L2Clip": lambda params: L2Clip(params, lr=0.1),
    "Clipped": lambda params: Clipped(torch.optim.SGD(params, lr=0.1), u=1.0, d=0.1),
}


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("name", MAKERS)
def test_a_step_on_integers_is_refused_as_by_sgd(name: str, dtype: torch.dtype) -> None:
    whole, real = torch.ones(3, dtype=dtype), nn.Parameter(torch.ones(3))
    opt = MAKERS[name]([real, whole])  # accepted, as long as it has no gradient
    real.grad = torch.ones(3)
    opt.step()
    assert real[0] < 1
    before = real.detach().clone()
    whole.grad = torch.ones(3, dtype=dtype)
    with pytest.raises(RuntimeError, match="alpha must not be a floating" if name == "SGD" else str(dtype)):
        opt.step()
    assert whole.tolist() == torch.ones(3, dtype=dtype).tolist()
    if name != "SGD":
        assert torch.equal(real, before), "before anything moved"


# ---- freed memory ----

KINDS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "torch": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
    "BiClip": lambda params: BiClip(params, lr=0.1),
    "fused": lambda params: BiClip(params, lr=0.1, fused=True),
    "single": lambda params: BiClip(params, lr=0.1, foreach=False),
    "L2Clip": lambda params: L2Clip(params, lr=0.1),
}


def step_on_freed_memory(rank: int, kind: str, what: str, warm: bool, offset: int) -> dict[str, Any]:
    other, p = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(100_000)[offset:])
    other.grad, p.grad = torch.ones(3), torch.ones(100_000)[offset:]
    opt = KINDS[kind]([other, p])
    if warm:
        opt.step()
    before = other.tolist()
    (p if what == "parameter" else p.grad).untyped_storage().resize_(0)
    try:
        opt.step()
    except RuntimeError as error:
        return {"said": str(error), "moved": other.tolist() != before}
    return {"said": "", "moved": True}


step_on_freed_memory.connects_itself = True  # type: ignore[attr-defined]


@pytest.mark.parametrize("warm", [False, True], ids=["first step", "later step"])
@pytest.mark.parametrize("what", ["parameter", "gradient"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_storage_that_was_freed_raises_and_is_not_touched(
    server: forked.Server, kind: str, what: str, warm: bool
) -> None:
    """In a process of its own, since what is wrong ends it."""
    (end,) = server.run(f"{HERE}:step_on_freed_memory", 1, kind=kind, what=what, warm=warm, offset=0)
    assert end.status == 0 and end.value["said"], end.said
    if kind != "torch":
        assert not end.value["moved"], "before anything moved"
        words = "A tensor of shape (100000,) and torch.float32 has no memory: its storage holds 0 bytes"
        assert words in end.value["said"]


@pytest.mark.parametrize("what", ["parameter", "gradient"])
def test_a_view_into_a_freed_storage_is_no_better(server: forked.Server, what: str) -> None:
    (end,) = server.run(f"{HERE}:step_on_freed_memory", 1, kind="BiClip", what=what, warm=True, offset=50_000)
    assert end.status == 0 and "has no memory" in end.value["said"], end.said


def test_what_is_freed() -> None:
    whole = torch.ones(6, 4)
    for t in (whole, whole[2:], whole.t(), whole[:, ::2], whole.expand(3, 6, 4), torch.ones(0), torch.ones(())):
        assert not is_freed(t)
    row = torch.ones(6, 4)[5]
    row.untyped_storage().resize_(23 * 4)
    assert is_freed(row) and not is_freed(row[:3])


def test_a_storage_that_has_its_memory_again_steps_again() -> None:
    p = nn.Parameter(torch.ones(1000))
    p.grad = torch.ones(1000)
    opt = BiClip([p], lr=0.5)
    opt.step()
    p.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="has no memory"):
        opt.step()
    p.untyped_storage().resize_(4000)
    p.data.fill_(1.0)
    opt.step()
    assert p.tolist() == [0.5] * 1000
