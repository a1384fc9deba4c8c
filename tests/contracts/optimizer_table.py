"""The optimizers, the ways to ask for them and the options they take: what the contract tests loop over.

A new optimizer is a row in ``OPTIONS``; a new implementation is a row in ``IMPLEMENTATIONS``.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tailopt import BiClip, L2Clip

OPTIMIZERS = (BiClip, L2Clip)

IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "single": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}

# Thresholds that bite on both sides of standard normal gradients, and steps far above any rounding.
BITES: dict[type, dict[str, Any]] = {
    BiClip: {"lr": 0.25, "u": 0.75, "d": 0.5},
    L2Clip: {"lr": 0.25, "u": 2.0, "d": 1.0},
}

COMMON: list[dict[str, Any]] = [
    {},
    {"lr": 0.01},
    {"weight_decay": 0.1},
    {"maximize": True},
    {"weight_decay": 0.1, "maximize": True},
    {"u": 0.5, "d": 0.1},
    {"u": float("inf"), "d": 0.0},
    {"nonfinite": "skip"},
    {"nonfinite": "raise"},
]
OPTIONS: dict[type, list[dict[str, Any]]] = {
    BiClip: [
        *COMMON,
        {"u": 0.5, "d": 0.5},
        {"dead_zone": 1e-3},
        {"dead_zone": "auto"},
        {"momentum": 0.9},
        {"momentum": 0.5, "weight_decay": 0.1, "maximize": True},
        {"momentum": 0.9, "nonfinite": "skip"},
    ],
    L2Clip: [*COMMON, {"scope": "group"}, {"scope": "tensor"}],
}


def option_id(options: dict[str, Any]) -> str:
    return ",".join(f"{k}={v}" for k, v in options.items()) or "defaults"


def class_id(value: Any) -> str | None:
    return value.__name__ if isinstance(value, type) else None


every_optimizer = pytest.mark.parametrize("cls", OPTIMIZERS, ids=class_id)
every_implementation = pytest.mark.parametrize("impl", IMPLEMENTATIONS)
every_option = pytest.mark.parametrize(
    ("cls", "options"),
    [pytest.param(c, o, id=f"{c.__name__}-{option_id(o)}") for c in OPTIMIZERS for o in OPTIONS[c]],
)
every_option_but_tensor_scope = pytest.mark.parametrize(
    ("cls", "options"),
    [
        pytest.param(c, o, id=f"{c.__name__}-{option_id(o)}")
        for c in OPTIMIZERS
        for o in OPTIONS[c]
        if o.get("scope") != "tensor"
    ],
)


def fresh(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """Leaves of magnitude 2 to 3, so that a step does not carry an element across zero and ulps stay comparable."""
    gen = torch.Generator().manual_seed(seed)
    out = []
    for shape in shapes:
        x = torch.rand(shape, generator=gen, dtype=torch.float64) + 2
        out.append((x * torch.where(torch.rand(shape, generator=gen) < 0.5, -1, 1)).to(dtype).requires_grad_())
    return out


def gradients(params: list[Tensor], seed: int = 1) -> None:
    """Standard normal gradients of the parameters' types."""
    gen = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=gen, dtype=torch.float64).to(p.dtype)


def ulps(a: Tensor, b: Tensor) -> int:
    """The largest distance between two tensors, in representable numbers; NaN counts as equal to NaN."""
    assert a.dtype == b.dtype and a.shape == b.shape, f"{a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
    if a.numel() == 0:
        return 0
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    nan = a.isnan() & b.isnan()

    def rank(x: Tensor) -> Tensor:  # the integers in the order of the numbers; ±0 share one
        bits = x.detach().contiguous().view(width).to(torch.int64)
        lowest = torch.iinfo(width).min
        return torch.where(bits < 0, lowest - bits, bits)

    return int((rank(a) - rank(b)).abs().masked_fill(nan, 0).max())


def pairs(a: list[Tensor], b: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(a, b, strict=True)
