"""Momentum: every kernel has the bits of the reference, and one outlier is forgotten as the clamp promises."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tailopt
from tailopt.clipping.dispatch import KERNELS, update
from tailopt.clipping.kernels.kernel import StepGroup
from tailopt.clipping.reference import ClipByValue, Momentum, StepHyperparameters

PAIRS = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float64, torch.float64),
]
HPARAMS = {
    "plain": StepHyperparameters(ClipByValue(1.0, 0.1), 0.1),
    "decay, maximize": StepHyperparameters(ClipByValue(0.5, 0.5), 0.1, 0.1, True),
    "dead zone": StepHyperparameters(ClipByValue(1.0, 0.3, 0.2), 0.1),
    "u infinite": StepHyperparameters(ClipByValue(math.inf, 0.0), 0.1),
}


def gradients(n: int, dtype: torch.dtype) -> list[Tensor]:
    source = torch.Generator().manual_seed(n)
    grads = [torch.randn(n, generator=source).mul(3).to(dtype) for _ in range(3)]
    grads[1][0] = math.inf
    grads[2][n // 2] = math.nan
    grads[0][-1] = 0.0
    return grads


def stepped(
    kernel: str, hparams: StepHyperparameters, n: int, dtype: torch.dtype, momentum_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    p = torch.linspace(-2, 2, n).to(dtype)
    m = torch.zeros(n, dtype=momentum_dtype)
    for k, g in enumerate(gradients(n, dtype), 1):
        update([StepGroup([p], [g], hparams._replace(momentum=Momentum.at(0.9, k)), momenta=[m])], kernel)
    return p, m


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    assert a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan())
    filled = [x.masked_fill(x.isnan(), 7.0) for x in (a, b)]
    assert torch.equal(*filled)


@pytest.mark.parametrize("n", [1, 1023, 70_001])
@pytest.mark.parametrize("dtypes", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}".replace("torch.", ""))
@pytest.mark.parametrize("name", HPARAMS)
def test_every_kernel_has_the_bits_of_the_reference(name: str, dtypes: tuple[torch.dtype, torch.dtype], n: int) -> None:
    expected = stepped("reference", HPARAMS[name], n, *dtypes)
    for kernel in (name for name in KERNELS if name != "triton"):  # test_triton.py, test_gpu_triton.py
        for found, wanted in zip(stepped(kernel, HPARAMS[name], n, *dtypes), expected, strict=True):
            assert_same_bits(found, wanted)


def test_every_instruction_set_of_the_c_kernel_has_the_same_bits() -> None:
    from tailopt.clipping.kernels.kernel import table_row
    from tailopt.native import library
    from tailopt.native.calls import addresses, dtype_codes, sizes
    from tailopt.native.clip import Counters, StepTable, TensorTable

    kernel = library.loaded()
    if kernel is None:
        pytest.skip(library.why_missing())
    hparams = HPARAMS["plain"]._replace(momentum=Momentum.at(0.9, 3))
    g = gradients(200_001, torch.float32)[0]
    seen = []
    for instruction_set in kernel.instruction_sets:
        for threads in (1, 2):
            p, m = torch.ones_like(g), torch.full_like(g, 0.5)
            tensors = TensorTable(
                addresses([p]), addresses([g]), sizes([g]), dtype_codes([g]), addresses([m]), dtype_codes([m])
            )
            counters = Counters.empty(1, histogram=True)
            counters.sample_offset = 5
            step_table = StepTable(table_row(hparams, torch.float32), [0])
            kernel.clip.run_at("momentum", tensors, step_table, counters, [0], instruction_set, threads)
            assert counters.bins is not None
            seen.append((p, m, counters.table.clone(), counters.bins.clone()))
    for found in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found, seen[0], strict=True))
    assert 0 < int(seen[0][3].sum()) < 200_001 / 16


def optimizer(p: Tensor, **settings: Any) -> tailopt.BiClip:
    return tailopt.BiClip([p], **{"lr": 1.0, "u": 0.5, "d": 0.0, "momentum": 0.9, **settings})


@pytest.mark.parametrize("outlier", [math.inf, -math.inf, 1e6 * 0.5])
def test_one_outlier_moves_a_coordinate_at_full_speed_for_one_step(outlier: float) -> None:
    """It adds at most u to m, which then fades; without the clamp it would stay above u for about 110 steps."""
    p = torch.nn.Parameter(torch.zeros(1))
    opt = optimizer(p)
    moves, unclamped, m = [], [], 0.0
    for k in range(400):
        g = outlier if k == 200 else 0.0
        p.grad = torch.tensor([g])
        before = p.item()
        opt.step()
        moves.append(abs(p.item() - before))
        m = 0.9 * m + 0.1 * min(max(g, -1e6 * 0.5), 1e6 * 0.5)
        unclamped.append(min(abs(m), 0.5))
    assert moves[:200] == [0.0] * 200
    assert sum(move >= 0.5 * (1 - 1e-6) for move in moves) == 1
    assert moves[201] == pytest.approx(0.45) and moves[230] == pytest.approx(0.5 * 0.9**30, rel=1e-4)
    assert sum(move >= 0.5 for move in unclamped) > 100


def test_the_first_step_is_that_of_the_gradient() -> None:
    """m / (1 - beta) is the gradient itself, where the clamp does nothing."""
    p, q = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(4))
    p.grad = q.grad = torch.tensor([0.1, -0.2, 0.7, -3.0])
    optimizer(p).step()
    optimizer(q, momentum=0.0).step()
    torch.testing.assert_close(p, q, rtol=1e-6, atol=0)


def test_statistics_refer_to_the_mean() -> None:
    p = torch.nn.Parameter(torch.zeros(4))
    opt = optimizer(p, d=0.2, statistics="counts")
    for g in ([1.0, 0.1, 0.0, -4.0], [-1.0, 0.1, 0.0, -4.0]):
        p.grad = torch.tensor(g)
        opt.step()
    counts = opt.statistics()[0]
    # the means: 1, 0.1, 0, -4, then -0.05, 0.1, 0, -4
    assert (counts.elements, counts.zero, counts.below, counts.above) == (8, 2, 3, 3)


def test_without_momentum_there_is_no_state() -> None:
    p = torch.nn.Parameter(torch.zeros(3))
    p.grad = torch.ones(3)
    opt = optimizer(p, momentum=0.0)
    opt.step()
    assert not opt.state and opt.state_dict()["state"] == {}


@pytest.mark.parametrize(
    ("dtype", "momentum_dtype", "kept"),
    [
        (torch.float32, None, torch.float32),
        (torch.bfloat16, None, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float64, None, torch.float64),
        (torch.float32, torch.bfloat16, torch.bfloat16),
    ],
)
def test_a_momentum_keeps_its_type_through_a_checkpoint(dtype: Any, momentum_dtype: Any, kept: Any) -> None:
    """torch's own load_state_dict would round it to the parameter's."""
    p, q = torch.nn.Parameter(torch.zeros(3, dtype=dtype)), torch.nn.Parameter(torch.zeros(3, dtype=dtype))
    opt, other = optimizer(p, momentum_dtype=momentum_dtype), optimizer(q, momentum_dtype=momentum_dtype)
    p.grad = torch.tensor([0.1, 0.2, 0.3], dtype=dtype)
    opt.step()
    other.load_state_dict(opt.state_dict())
    m, loaded = opt.state[p]["momentum_buffer"], other.state[q]["momentum_buffer"]
    assert m.dtype == loaded.dtype == kept and torch.equal(m, loaded)
    assert other.state[q]["step"].item() == 1


def test_a_skipped_tensor_keeps_its_momentum_and_its_count() -> None:
    p, q = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    opt = tailopt.BiClip([p, q], lr=0.1, u=1.0, d=0.0, momentum=0.9, nonfinite="skip")
    p.grad = q.grad = torch.ones(2)
    opt.step()
    m = opt.state[p]["momentum_buffer"].clone()
    p.grad = torch.tensor([math.nan, 1.0])
    opt.step()
    assert torch.equal(opt.state[p]["momentum_buffer"], m) and opt.state[p]["step"].item() == 1
    assert opt.state[q]["step"].item() == 2
    p.grad = torch.ones(2)
    opt.step()  # two tensors with different counts in one step
    assert (opt.state[p]["step"].item(), opt.state[q]["step"].item()) == (2, 3)
    torch.testing.assert_close(p.detach(), torch.full((2,), -0.2))


@pytest.mark.parametrize("momentum", [1.0, -0.1, math.nan, "0.9", True, None])
def test_a_momentum_that_cannot_be(momentum: Any) -> None:
    with pytest.raises(ValueError, match=r"Invalid momentum: .*; need 0 <= momentum < 1"):
        optimizer(torch.nn.Parameter(torch.zeros(1)), momentum=momentum)


def test_a_momentum_dtype_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"Invalid momentum_dtype: torch.int32; need a floating torch.dtype"):
        optimizer(torch.nn.Parameter(torch.zeros(1)), momentum_dtype=torch.int32)


def test_sparse_gradients_are_refused_before_anything_moves() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    p = torch.nn.Parameter(torch.ones(2))
    opt = tailopt.BiClip([p, table.weight], lr=0.1, u=1.0, d=0.0, momentum=0.9)
    (table(torch.tensor([1])).sum() + p.sum()).backward()
    with pytest.raises(RuntimeError, match="Momentum needs dense gradients"):
        opt.step()
    assert p.tolist() == [1.0, 1.0] and not opt.state


@pytest.mark.parametrize("u", [torch.tensor(0.5), torch.tensor([0.2, 1.0, 0.5])])
def test_thresholds_that_are_tensors(u: Tensor) -> None:
    p, q = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3))
    opts = optimizer(p, u=u), optimizer(q, u=u, foreach=False)
    for g in ([9.0, -0.1, 0.3], [0.0, 0.1, 5.0]):
        p.grad, q.grad = torch.tensor(g), torch.tensor(g)
        for opt in opts:
            opt.step()
    assert torch.equal(p, q)
    assert (p.detach().abs() <= 2 * u).all()


def test_a_dead_zone_for_rounding_noise() -> None:
    p = torch.nn.Parameter(torch.zeros(2))
    opt = optimizer(p, d=0.1, dead_zone="auto")
    p.grad = torch.tensor([1.0, 1e-9])
    opt.step()
    assert p[0].item() < 0 and p[1].item() == 0


def test_a_momentum_of_another_shape_is_refused() -> None:
    p = torch.nn.Parameter(torch.zeros(2, 3))
    opt = optimizer(p)
    opt.state[p] = {"momentum_buffer": torch.zeros(3, 2), "step": torch.zeros(())}
    p.grad = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"the momentum of a parameter of shape \(2, 3\) has shape \(3, 2\)"):
        opt.step()


def test_a_sparse_gradient_of_a_later_group_stops_all_groups() -> None:
    table, p = torch.nn.Embedding(4, 2, sparse=True), torch.nn.Parameter(torch.ones(2))
    opt = tailopt.BiClip([{"params": [p]}, {"params": table.parameters(), "momentum": 0.9}], lr=0.1)
    (table(torch.tensor([1])).sum() + p.sum()).backward()
    with pytest.raises(RuntimeError, match="Momentum needs dense gradients"):
        opt.step()
    assert p.tolist() == [1.0, 1.0]
