"""The oracle itself, against exact rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tailopt.clipping.reference import ClipByValue, ScaleToNorm, StepHyperparameters, fma, step

fused_in_torch = torch.backends.cpu.get_cpu_capability() != "DEFAULT"
single = st.floats(width=32, allow_nan=False, allow_infinity=False)
double = st.floats(min_value=-1e100, max_value=1e100, allow_nan=False)


def nearest_single(x: Fraction) -> float:
    """The fp32 number nearest to x, ties to even, found by comparing exact distances."""
    guess = torch.tensor(float(x), dtype=torch.float64).float()
    if not math.isfinite(guess.item()):
        return guess.item()
    inf = torch.tensor(math.inf)
    around = [guess, torch.nextafter(guess, inf), torch.nextafter(guess, -inf)]
    finite = [g for g in around if math.isfinite(g.item())]

    def distance(g: torch.Tensor) -> tuple[Fraction, int]:
        return abs(Fraction(g.item()) - x), g.view(torch.int32).item() & 1

    return min(finite, key=distance).item()


@given(single, single, single)
def test_fma_rounds_once_in_fp32(a: float, b: float, c: float) -> None:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if abs(exact) > Fraction(torch.finfo(torch.float32).max):
        return
    got = fma(*(torch.tensor([v], dtype=torch.float32) for v in (a, b, c)))
    assert got.item() == nearest_single(exact)


@pytest.mark.skipif(not fused_in_torch, reason="this processor has no fused multiply-add")
@given(double, double, double)
def test_fma_rounds_once_in_fp64(a: float, b: float, c: float) -> None:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    got = fma(torch.tensor(a, dtype=torch.float64), *(torch.full((8,), v, dtype=torch.float64) for v in (b, c)))
    assert set(got.tolist()) == {float(exact)}


def test_fma_two_roundings_would_differ() -> None:
    # 2^-24 + 2^-54 is just above the middle between 1 and its neighbour; rounded to fp64 first it becomes the middle
    a = torch.tensor([2.0**-24 * (1 + 2.0**-23)])
    b = torch.tensor([1 + 2.0**-23])
    assert fma(a, b, torch.tensor([1.0])).item() == 1 + 2.0**-23


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_closed_forms(dtype: torch.dtype) -> None:
    p, g = torch.ones(4, dtype=dtype), torch.tensor([2.0, -0.5, 0.0, -0.0], dtype=dtype)
    sign = step(p, g, StepHyperparameters(ClipByValue(u=0.25, d=0.25), lr=1.0))
    assert sign.tolist() == [0.75, 1.25, 1.0, 1.0]
    identity = step(p, g, StepHyperparameters(ClipByValue(u=math.inf, d=0.0), lr=0.5))
    assert identity.tolist() == [0.0, 1.25, 1.0, 1.0]
    decayed = step(p, torch.zeros_like(p), StepHyperparameters(ClipByValue(1.0, 0.5), lr=0.5, weight_decay=0.5))
    assert decayed.tolist() == [0.75] * 4
    up = step(p, g, StepHyperparameters(ClipByValue(u=0.25, d=0.25), lr=1.0, maximize=True))
    assert up.tolist() == [1.25, 0.75, 1.0, 1.0]
    assert step(p, g, StepHyperparameters(ScaleToNorm(1.0, 1.0, 1.0), lr=0.0)).tolist() == p.tolist()


def test_a_zero_gradient_keeps_minus_zero() -> None:
    p, g = torch.tensor([-0.0, -0.0]), torch.tensor([0.0, -0.0])
    for clip in (ClipByValue(1.0, 0.5), ScaleToNorm(1.0, 1.0, 1.0)):
        for maximize in (False, True):
            after = step(p, g, StepHyperparameters(clip, lr=0.1, maximize=maximize))
            assert torch.signbit(after).all()


def test_bf16_rounds_once_at_the_store() -> None:
    p = torch.tensor([1.0], dtype=torch.bfloat16)
    # 1 - 0.00390625 is the midpoint between two bf16 numbers; the lost lr bits of a bf16 product would move it
    after = step(p, torch.tensor([1.0], dtype=torch.bfloat16), StepHyperparameters(ClipByValue(1.0, 0.0), lr=0.0039))
    assert after.item() == torch.tensor(1.0 - torch.tensor(0.0039).item()).bfloat16().item()
