"""Stochastic rounding: the bits are random enough, the mean is kept, a run repeats, and no step is lost."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import tailopt
from tailopt.clipping import reference
from tailopt.clipping.reference import ClipByValue, StepHyperparameters
from tailopt.clipping.stochastic_rounding import StochasticRounding, random_halves, rounded_to_bf16

N = 1 << 21
DEVIATION = math.sqrt((65536**2 - 1) / 12)  # of a number that is uniform on 0 ... 65535


def halves(seed: int = 0, step: int = 0, tensor: int = 0, first: int = 0) -> torch.Tensor:
    return random_halves(torch.arange(first, first + N), StochasticRounding(seed, step), tensor)


def standard(x: torch.Tensor) -> torch.Tensor:
    return (x.double() - 32767.5) / DEVIATION


CASES = {"first": {}, "seed": {"seed": 2**40}, "step": {"step": 1}, "tensor": {"tensor": 7}, "far": {"first": 2**34}}


@pytest.mark.parametrize("name", CASES)
def test_bits_are_uniform_and_neighbours_are_independent(name: str) -> None:
    """Within 5 deviations of what is expected of independent numbers, which one run in a million exceeds."""
    h = halves(**CASES[name])
    counts = torch.bincount(h, minlength=65536).double()
    chi_square = float(((counts - N / 65536) ** 2 / (N / 65536)).sum())
    assert abs(chi_square - 65535) < 5 * math.sqrt(2 * 65535)
    x = standard(h)
    assert abs(float(x.mean())) < 5 / math.sqrt(N)
    for lag in (1, 2, 3, 64, 512, 2048):
        assert abs(float((x[lag:] * x[:-lag]).mean())) < 5 / math.sqrt(N - lag), lag
    for bit in range(16):
        assert abs(float((h >> bit & 1).double().mean()) - 0.5) < 2.5 / math.sqrt(N), bit


@pytest.mark.parametrize(
    "other", [{"step": 1}, {"step": 2}, {"tensor": 1}, {"tensor": 2}, {"seed": 1}, {"first": 2**33}]
)
def test_steps_tensors_and_seeds_have_bits_of_their_own(other: dict[str, int]) -> None:
    assert abs(float((standard(halves()) * standard(halves(**other))).mean())) < 5 / math.sqrt(N)


@pytest.mark.parametrize("share", [0.0, 1 / 65536, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("start", [1.0, -3.0, 1e-38, 2.0**-130])
def test_keeps_the_mean(start: float, share: float) -> None:
    """Over a million elements: to 5 deviations of a coin with that probability."""
    low = torch.tensor(start, dtype=torch.bfloat16)
    high = (low.view(torch.int16) + 1).view(torch.bfloat16)
    x = (low.double() + share * (high.double() - low.double())).float()
    exact = float((x.double() - low.double()) / (high.double() - low.double()))
    up = rounded_to_bf16(x.expand(1_000_000).contiguous(), StochasticRounding(3, 4), 5) == high
    assert abs(float(up.double().mean()) - exact) <= 5 * math.sqrt(exact * (1 - exact) / 1e6)


def test_what_bf16_holds_stays_and_nothing_else_becomes_special() -> None:
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    after = rounded_to_bf16(every.float(), StochasticRounding(0, 0), 0)
    assert torch.equal(after.isnan(), every.isnan())
    assert torch.equal(after[~every.isnan()].view(torch.int16), every[~every.isnan()].view(torch.int16))


def test_a_tensor_in_other_strides_has_the_bits_of_its_places_in_memory() -> None:
    x = torch.full((30, 40), 1 + 2**-9)
    rounding = StochasticRounding(1, 2)
    assert torch.equal(rounded_to_bf16(x.t(), rounding, 3), rounded_to_bf16(x, rounding, 3).t())


def test_a_step_below_half_a_unit_is_lost_by_nearest_rounding_and_kept_by_this() -> None:
    """1,000 steps of 1e-4 from 1, whose neighbours are 1 - 1/256 and 1 + 1/128: in fp32 they lead to 0.9."""
    ends = {}
    for seed in (None, 0):
        p = torch.nn.Parameter(torch.ones(10_000, dtype=torch.bfloat16))
        p.grad = torch.ones_like(p)
        opt = tailopt.BiClip([p], lr=1e-4, u=1.0, d=0.0, stochastic_rounding=seed)
        for _ in range(1000):
            opt.step()
        ends[seed] = float(p.detach().double().mean())
    assert ends[None] == 1.0
    assert ends[0] == pytest.approx(0.9, abs=1e-3)


def model() -> list[torch.nn.Parameter]:
    dtypes = (torch.bfloat16, torch.float32, torch.bfloat16)
    return [torch.nn.Parameter(torch.linspace(-1, 1, 300).to(dtype)) for dtype in dtypes]


def run(opt: torch.optim.Optimizer, params: list[torch.nn.Parameter], steps: range) -> None:
    for k in steps:
        for i, p in enumerate(params):
            p.grad = torch.randn(300, generator=torch.Generator().manual_seed(10 * k + i)).to(p.dtype)
        opt.step()


@pytest.mark.parametrize(
    "settings", [{}, {"momentum": 0.9}, {"statistics": True}, {"foreach": True}, {"fused": True}], ids=str
)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(settings: dict) -> None:
    numbers = {"lr": 1e-3, "u": 0.5, "d": 0.1, "weight_decay": 0.01, **settings}
    whole, params = model(), model()
    run(tailopt.BiClip(whole, **numbers, stochastic_rounding=9), whole, range(6))
    first = tailopt.BiClip(params, **numbers, stochastic_rounding=9)
    run(first, params, range(3))
    state = copy.deepcopy(first.state_dict())
    second = tailopt.BiClip(params, **numbers)
    second.load_state_dict(state)
    run(second, params, range(3, 6))
    assert all(map(torch.equal, params, whole))
    other = model()
    run(tailopt.BiClip(other, **numbers, stochastic_rounding=10), other, range(6))
    assert [torch.equal(a, b) for a, b in zip(other, whole, strict=True)] == [False, True, False]


@pytest.mark.parametrize("kernel_flags", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_every_kernel_rounds_as_the_reference(kernel_flags: dict) -> None:
    params = model()
    before = [p.detach().clone() for p in params]
    run(tailopt.BiClip(params, lr=1e-3, u=0.5, d=0.1, **kernel_flags, stochastic_rounding=9), params, range(1))
    for slot, (p, q) in enumerate(zip(before, params, strict=True)):
        hparams = StepHyperparameters(ClipByValue(0.5, 0.1), 1e-3, rounding=StochasticRounding(9, 0))
        assert q.grad is not None
        assert torch.equal(q, reference.step(p, q.grad, hparams, slot))


@pytest.mark.parametrize("bad", [True, -1, 0.5, "yes", 2**63])
def test_a_seed_that_is_none_is_refused(bad: object) -> None:
    with pytest.raises(ValueError, match=r"Invalid stochastic_rounding: .*; need None, or a seed"):
        tailopt.BiClip(model(), lr=0.1, u=1.0, d=0.1, stochastic_rounding=bad)


@pytest.mark.parametrize("other", ["capturable", "differentiable"])
def test_steps_whose_number_the_host_does_not_count_are_refused(other: str) -> None:
    with pytest.raises(ValueError, match=f"with {other}=True; need {other}=False"):
        tailopt.BiClip(model(), lr=0.1, u=1.0, d=0.1, stochastic_rounding=0, **{other: True})
