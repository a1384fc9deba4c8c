"""The optimizers on a CUDA device: the same results as on the CPU, and nothing waits for the device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import tailopt
from tailopt.clipping.dispatch import KERNELS
from tailopt.clipping.kernels.kernel import StepGroup
from tailopt.clipping.reference import ClipByValue, StepHyperparameters
from tailopt.thresholds import CALIBRATION, Thresholds

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SETTINGS = {"lr": 0.03, "u": 0.5, "d": 0.1}
SHAPES = [(300, 70), (70,), (1,), (5, 4, 3), (0,)]
OPTIMIZERS = {
    "biclip": (tailopt.BiClip, {}),
    "biclip, decay": (tailopt.BiClip, {"weight_decay": 0.1, "maximize": True}),
    "biclip, dead zone": (tailopt.BiClip, {"dead_zone": "auto"}),
    "biclip, skip": (tailopt.BiClip, {"nonfinite": "skip"}),
    "biclip, statistics": (tailopt.BiClip, {"statistics": True}),
    "biclip, momentum": (tailopt.BiClip, {"momentum": 0.9, "weight_decay": 0.1, "maximize": True}),
    "biclip, momentum, skip": (tailopt.BiClip, {"momentum": 0.9, "nonfinite": "skip"}),
    "l2clip": (tailopt.L2Clip, {}),
    "l2clip, tensor": (tailopt.L2Clip, {"scope": "tensor", "weight_decay": 0.1}),
    "l2clip, skip": (tailopt.L2Clip, {"nonfinite": "skip"}),
}


@contextmanager
def nothing_waits() -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the mode announces itself as a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def parameters(device: str, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator).to(device, dtype)) for s in SHAPES]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(device, dtype)
    return params


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """Two roundings of a parameter and one of a step, per step taken."""
    return {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("foreach", [None, True, False])
def test_as_on_the_cpu_without_waiting(name: str, dtype: torch.dtype, foreach: bool | None) -> None:
    cls, more = OPTIMIZERS[name]
    here, there = parameters("cpu", dtype), parameters("cuda", dtype)
    cls(here, **SETTINGS, **more).step()
    opt = cls(there, **SETTINGS, **more, foreach=foreach)
    with nothing_waits():
        opt.step()
    for p, q in zip(here, there, strict=True):
        torch.testing.assert_close(q.cpu(), p, **tolerance(dtype))
    if "statistics" in more:
        wanted = tailopt.count([p.grad for p in here], 0.5, 0.1)  # type: ignore[misc]
        got = opt.statistics()
        for i, counts in wanted.items():
            assert (got[i].zero, got[i].below, got[i].above) == (counts.zero, counts.below, counts.above)
            assert got[i].octaves == counts.octaves and got[i].largest == counts.largest


@pytest.mark.parametrize("kernel", ["foreach", "single"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_kernels_are_within_an_ulp_of_the_reference(kernel: str, dtype: torch.dtype) -> None:
    p, g = torch.randn(10_000).to(dtype), torch.randn(10_000).to(dtype)
    g[:5] = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf")])
    hparams = StepHyperparameters(ClipByValue(0.5, 0.1), lr=0.03, weight_decay=0.1)
    want, got = p.clone(), p.cuda()
    KERNELS["reference"].run([StepGroup([want], [g], hparams)])
    KERNELS[kernel].run([StepGroup([got], [g.cuda()], hparams)])
    torch.testing.assert_close(got.cpu(), want, equal_nan=True, **tolerance(dtype))


@pytest.mark.parametrize("cls", [tailopt.BiClip, tailopt.L2Clip])
def test_tensors_on_the_device_are_read_there(cls: type) -> None:
    plain, there = parameters("cuda", torch.float32), parameters("cuda", torch.float32)
    cls(plain, **SETTINGS).step()
    opt = cls(there, **{k: torch.tensor(v, device="cuda") for k, v in SETTINGS.items()})
    with nothing_waits():
        opt.step()
    for p, q in zip(plain, there, strict=True):
        torch.testing.assert_close(q, p, rtol=1e-6, atol=1e-7)


AUTO = {
    "biclip": tailopt.BiClip,
    "biclip, momentum": lambda params, **more: tailopt.BiClip(params, **more, momentum=0.9),
    "biclip, skip": lambda params, **more: tailopt.BiClip(params, **more, nonfinite="skip"),
    "biclip, momentum, skip": lambda params, **more: tailopt.BiClip(params, **more, momentum=0.9, nonfinite="skip"),
    "l2clip": tailopt.L2Clip,
    "l2clip, tensor": lambda params, **more: tailopt.L2Clip(params, **more, scope="tensor"),
    "l2clip, skip": lambda params, **more: tailopt.L2Clip(params, **more, nonfinite="skip"),
    "clipped": lambda params, lr, **more: tailopt.Clipped(torch.optim.AdamW(params, lr=lr), **more),
}


@pytest.mark.parametrize("name", AUTO)
def test_auto_chooses_as_on_the_cpu_and_reads_the_device_at_the_end_of_calibration_alone(name: str) -> None:
    here, there = parameters("cpu", torch.float32), parameters("cuda", torch.float32)
    for params, device in ((here, "cpu"), (there, "cuda")):  # of this size a histogram is a sample
        params.append(torch.nn.Parameter(torch.zeros(400, 300, device=device)))
    on_cpu, on_gpu = (AUTO[name](params, lr=0.01, u="auto", d="auto") for params in (here, there))
    generator = torch.Generator().manual_seed(1)
    for step in range(CALIBRATION + 20):
        for k, (p, q) in enumerate(zip(here, there, strict=True)):
            p.grad = torch.randn(p.shape, generator=generator) * 10.0**-k
            q.grad = p.grad.cuda()
        on_cpu.step()
        if step == CALIBRATION - 1:
            assert on_gpu.thresholds == []
            on_gpu.step()
        else:
            with nothing_waits():
                on_gpu.step()
    wanted, got = (Thresholds.from_state(opt.param_groups[0]["thresholds"]) for opt in (on_cpu, on_gpu))
    for key in ("u1", "u", "d"):
        assert getattr(got, key) == pytest.approx(getattr(wanted, key), rel=1e-5)
    for p, q in zip(here, there, strict=True):
        torch.testing.assert_close(q.cpu(), p, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("momentum_dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("capturable", [False, True])
def test_momentum_over_several_steps(capturable: bool, momentum_dtype: torch.dtype | None) -> None:
    here, there = parameters("cpu", torch.float32), parameters("cuda", torch.float32)
    settings = {**SETTINGS, "momentum": 0.9, "momentum_dtype": momentum_dtype}
    opts = tailopt.BiClip(here, **settings), tailopt.BiClip(there, **settings, capturable=capturable)
    for _ in range(5):
        opts[0].step()
        with nothing_waits():
            opts[1].step()
    for p, q in zip(here, there, strict=True):
        torch.testing.assert_close(q.cpu(), p, rtol=1e-5, atol=1e-6)
        assert opts[1].state[q]["momentum_buffer"].dtype == (momentum_dtype or torch.float32)
        assert opts[1].state[q]["step"].item() == 5 and opts[1].state[q]["step"].is_cuda == capturable


def test_a_captured_momentum_counts_its_steps_on_the_device() -> None:
    eager, captured = parameters("cuda", torch.float32), parameters("cuda", torch.float32)
    opt = tailopt.BiClip(captured, **SETTINGS, momentum=0.9, capturable=True)
    start = [p.detach().clone() for p in captured]
    with torch.cuda.stream(torch.cuda.Stream()):
        opt.step()
    torch.cuda.synchronize()
    for p, s in zip(captured, start, strict=True):
        p.data.copy_(s)
        opt.state[p]["momentum_buffer"].zero_()
        opt.state[p]["step"].zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        opt.step()
    reference = tailopt.BiClip(eager, **SETTINGS, momentum=0.9)
    for _ in range(4):
        graph.replay()
        reference.step()
    for p, q in zip(eager, captured, strict=True):
        torch.testing.assert_close(q, p, rtol=1e-6, atol=1e-6)
        assert opt.state[q]["step"].item() == 4


def test_a_skipped_tensor_keeps_its_momentum_on_the_device() -> None:
    params = parameters("cuda", torch.float32)
    opt = tailopt.BiClip(params, **SETTINGS, momentum=0.9, nonfinite="skip")
    opt.step()
    before = opt.state[params[1]]["momentum_buffer"].clone()
    assert params[1].grad is not None
    params[1].grad[0] = float("nan")
    with nothing_waits():
        opt.step()
    assert torch.equal(opt.state[params[1]]["momentum_buffer"], before)
    assert [opt.state[p]["step"].item() for p in params[:3]] == [2, 1, 2]


def test_thresholds_that_cross_on_the_device_are_counted_not_waited_for() -> None:
    d = torch.tensor(0.1, device="cuda")
    opt = tailopt.BiClip(parameters("cuda", torch.float32), lr=0.1, u=torch.tensor(0.5, device="cuda"), d=d)
    with nothing_waits():
        opt.step()
        d.fill_(0.9)
        opt.step()
        opt.step()
    assert opt.violations() == 2
    with pytest.raises(ValueError, match="need 0 <= d <= u"):
        tailopt.BiClip(parameters("cuda", torch.float32), lr=0.1, u=torch.tensor(0.5, device="cuda"), d=d)


@pytest.mark.parametrize("name", ["biclip", "biclip, decay", "l2clip"])
def test_a_captured_step_replays_with_the_scheduled_lr(name: str) -> None:
    cls, more = OPTIMIZERS[name]
    eager, captured = parameters("cuda", torch.float32), parameters("cuda", torch.float32)
    lr = torch.tensor(0.03, device="cuda")
    opt = cls(captured, lr=lr, u=0.5, d=0.1, capturable=True, **more)
    side = torch.cuda.Stream()
    start = [p.detach().clone() for p in captured]
    with torch.cuda.stream(side):
        opt.step()
    torch.cuda.synchronize()
    for p, s in zip(captured, start, strict=True):
        p.data.copy_(s)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        opt.step()
    reference = cls(eager, lr=0.03, u=0.5, d=0.1, **more)
    for k in range(3):
        lr.fill_(0.03 / (k + 1))
        reference.param_groups[0]["lr"] = 0.03 / (k + 1)
        graph.replay()
        reference.step()
    for p, q in zip(eager, captured, strict=True):
        torch.testing.assert_close(q, p, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cls", [tailopt.BiClip, tailopt.L2Clip])
def test_a_scaler_skips_and_unscales(cls: type) -> None:
    params = parameters("cuda", torch.float32)
    plain = parameters("cuda", torch.float32)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    scaler.scale(torch.zeros((), device="cuda"))
    opt = cls(params, **SETTINGS)
    for p in params:
        p.grad.mul_(1024.0)  # type: ignore[union-attr]
    scaler.step(opt)
    scaler.update()
    cls(plain, **SETTINGS).step()
    for p, q in zip(plain, params, strict=True):
        torch.testing.assert_close(q, p)
    params[0].grad[0, 0] = float("inf")  # type: ignore[index]
    before = params[1].detach().clone()
    scaler.step(opt)
    assert torch.equal(params[1], before)


def test_fused_says_what_it_cannot_take() -> None:
    params = [torch.nn.Parameter(torch.zeros(3, dtype=torch.float8_e5m2, device="cuda"))]
    params[0].grad = torch.zeros_like(params[0])
    with pytest.raises(RuntimeError, match="`fused=True` requires all the params to be floating point Tensors"):
        tailopt.BiClip(params, lr=0.1, u=1.0, d=0.1, fused=True).step()


def idle_on(device: str = "cuda") -> tuple[Tensor, tailopt.BiClip]:
    p = torch.nn.Parameter(torch.ones(1 << 20, device=device))
    p.grad = torch.full_like(p, 1e-3)
    return p, tailopt.BiClip([p], lr=1e-5, u=1.0, d=1e-2)


def test_idle_thresholds_are_warned_of_at_a_later_step_without_waiting() -> None:
    p, opt = idle_on()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            opt.step()  # the first use of a kernel loads it, which waits
    p, opt = idle_on()
    torch.cuda.synchronize()
    torch.cuda._sleep(int(5e9))  # seconds: the counts cannot have arrived in the next steps
    with nothing_waits():
        for _ in range(5):
            opt.step()
    assert opt._threshold_check._queued
    torch.cuda.synchronize()
    with pytest.warns(UserWarning, match="in step 1, 100.0% .* RMS weight 1\\."), nothing_waits():
        opt.step()
    opt.step()


def test_on_a_device_the_first_and_the_tenth_step_are_looked_at() -> None:
    for due in (1, 10):
        p, opt = idle_on()
        for step in range(1, 13):
            opt.param_groups[0]["lr"] = 1e-5 if step == due else 1.0
            if step == due + 1:
                with pytest.warns(UserWarning, match=f"in step {due}, "):
                    opt.step()
            else:
                opt.step()
            torch.cuda.synchronize()
    p, opt = idle_on()
    for step in range(1, 1100):
        opt.param_groups[0]["lr"] = 1.0 if step in (1, 10) else 1e-5
        opt.step()
    torch.cuda.synchronize()
    opt.step()


def test_settings_on_the_device_are_compared_there() -> None:
    p = torch.nn.Parameter(torch.ones(4, 500, device="cuda"))
    p.grad = torch.full_like(p, 1e-3)
    numbers = {"lr": 1e-5, "u": 1.0, "d": 1e-2}
    opt = tailopt.BiClip([p], **{k: torch.tensor(v, device="cuda") for k, v in numbers.items()}, dead_zone="auto")
    with nothing_waits():
        opt.step()
    torch.cuda.synchronize()
    with pytest.warns(UserWarning, match="in step 1, "):
        opt.step()
    rows = {"u": torch.ones(4, 1, device="cuda"), "d": torch.full((4, 1), 1e-2, device="cuda")}
    opt = tailopt.BiClip([p], lr=1e-5, **rows)
    opt.step()
    torch.cuda.synchronize()
    with pytest.warns(UserWarning, match="in step 1, "):
        opt.step()


def test_a_captured_step_is_not_looked_at() -> None:
    p, opt = idle_on()
    opt.param_groups[0]["capturable"] = True
    opt.param_groups[0]["lr"] = 1.0
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(9):
            opt.step()
    torch.cuda.current_stream().wait_stream(side)
    opt.param_groups[0]["lr"] = 1e-5
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        opt.step()  # the tenth
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    opt.step()
    assert not opt._threshold_check._queued
    assert abs(p[0].item() - (1.0 - 9 * 1e-2 - 4 * 1e-7)) < 1e-6
