"""The Triton kernel on a CUDA device: the bits of the reference, no waiting, one launch, graphs, streams, memory.

When all of this passes, "triton" may come first in `dispatch.BY_DEFAULT["cuda"]`.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tailopt
from tailopt.clipping import reference
from tailopt.clipping.dispatch import KERNELS, update
from tailopt.clipping.kernels import triton_runtime
from tailopt.clipping.kernels.kernel import StepGroup
from tailopt.clipping.reference import ClipByValue, Momentum, StepHyperparameters
from tailopt.clipping.step_cache import StepCache
from tailopt.clipping.stochastic_rounding import StochasticRounding
from tests.clipping.test_dispatch import HPARAMS, same_bits, special
from tests.contracts.test_gpu import nothing_waits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
PAIRS = [(d, d) for d in DTYPES] + [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
SIZES = [*range(70), 511, 512, 513, 1023, 1024, 1025, 2047, 2048, 2049, 4095, 4096, 4097, 65_535, 65_537, 1_000_003]


def pairs_of(params: list[Tensor], grads: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(params, grads, strict=True))


def on_device(x: Tensor, offset: int) -> Tensor:
    """A copy on the device, so many elements after an aligned address."""
    buffer = torch.empty(x.numel() + offset, dtype=x.dtype, device="cuda")
    view = buffer[offset:]
    view.copy_(x)
    return view


@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("dtypes", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}".replace("torch.", ""))
@pytest.mark.parametrize("kernel", ["triton", "foreach", "single"])
def test_has_the_bits_of_the_reference(kernel: str, dtypes: tuple[torch.dtype, torch.dtype], offset: int) -> None:
    params, grads = [special(n, dtypes[0], n) for n in SIZES], [special(n, dtypes[1], n + 1) for n in SIZES]
    device_grads = [on_device(g, offset) for g in grads]
    wrong = []
    for how, hparams in HPARAMS.items():
        found = [on_device(p, offset) for p in params]
        if KERNELS[kernel].refuses(found[-1], device_grads[-1], hparams):
            assert kernel == "foreach"
            continue
        with torch.no_grad():
            KERNELS[kernel].run([StepGroup(found, device_grads, hparams)])
        for (p, g), after in zip(pairs_of(params, grads), found, strict=True):
            if not same_bits(after.cpu(), reference.step(p, g, hparams)):
                wrong.append((how, p.numel()))
    assert not wrong


@pytest.mark.parametrize("dtypes", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}".replace("torch.", ""))
def test_momentum_has_the_bits_of_the_reference(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    dtype, momentum_dtype = dtypes
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for how in ("plain", "decay", "maximize", "dead zone", "zero", "tiny"):
        ps = [special(n, dtype, n) for n in SIZES]
        ms = [torch.zeros(n, dtype=momentum_dtype) for n in SIZES]
        device_ps, device_ms, cache = [p.cuda() for p in ps], [m.cuda() for m in ms], StepCache()
        for k in (1, 2, 3):
            hparams = HPARAMS[how]._replace(momentum=Momentum.at(0.9, k))
            gs = [special(n, dtype, n + k) for n in SIZES]
            update([StepGroup(device_ps, [g.cuda() for g in gs], hparams, momenta=device_ms)], "triton", cache)
            for i, (p, g, m) in enumerate(zip(ps, gs, ms, strict=True)):
                ms[i], mean = reference.momentum(m, g, hparams, wide)
                ps[i] = reference.step(p, mean, hparams)
            assert all(same_bits(a.cpu(), b) for a, b in zip(device_ps, ps, strict=True)), (how, k)
            assert all(same_bits(a.cpu(), b) for a, b in zip(device_ms, ms, strict=True)), (how, k)


def parameters(device: str, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(300, 70), (70,), (1,), (5, 4, 3), (0,), (4099,)]
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(device, dtype)) for s in shapes]


def give_gradients(*several: list[torch.nn.Parameter], seed: int = 1, factor: float = 1.0) -> None:
    for params in several:
        generator = torch.Generator().manual_seed(seed)
        for p in params:
            p.grad = (torch.randn(p.shape, generator=generator) * factor).to(p.device, p.dtype)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "decay": {"weight_decay": 0.1, "maximize": True},
    "momentum": {"momentum": 0.9, "weight_decay": 0.1, "maximize": True},
    "momentum in bf16": {"momentum": 0.9, "momentum_dtype": torch.bfloat16},
    "momentum, capturable": {"momentum": 0.9, "capturable": True},
    "dead zone": {"dead_zone": 0.05},
    'dead zone "auto"': {"dead_zone": "auto"},
    "skip": {"nonfinite": "skip"},
    "momentum, skip": {"nonfinite": "skip", "momentum": 0.9},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SETTINGS)
def test_the_optimizer_has_the_bits_of_the_cpu_and_never_waits(name: str, dtype: torch.dtype) -> None:
    if "bf16" in name and dtype == torch.float64:
        pytest.skip("a momentum of doubles is a double")
    here, there = parameters("cpu", dtype), parameters("cuda", dtype)
    on_cpu = tailopt.BiClip(here, 0.03, 0.5, 0.1, **{**SETTINGS[name], "capturable": False})
    on_gpu = tailopt.BiClip(there, 0.03, 0.5, 0.1, **SETTINGS[name], fused=True)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(opt, 0.9) for opt in (on_cpu, on_gpu)]
    for k in range(5):
        give_gradients(here, there, seed=k)
        if "skip" in name and k == 2:
            here[1].grad[3] = there[1].grad[3] = math.nan
        on_cpu.step()
        if k == 0:
            on_gpu.step()  # compiles
        else:
            with nothing_waits():
                on_gpu.step()
        for schedule in schedules:
            schedule.step()
    for p, q in zip(here, there, strict=True):
        if dtype == torch.float64 and ("capturable" in name or "momentum, skip" in name):
            torch.testing.assert_close(q.cpu(), p, rtol=1e-14, atol=1e-15)  # the device's own beta^k
        else:
            assert same_bits(q.cpu(), p)


@pytest.mark.parametrize("kernel", ["triton", "single"])
def test_stochastic_rounding_has_the_bits_of_the_reference(kernel: str) -> None:
    hparams = HPARAMS["decay"]._replace(rounding=StochasticRounding(seed=2**40, step=3))
    slots = list(range(7, 7 + len(SIZES)))
    params, grads = ([special(n, torch.bfloat16, n + s) for n in SIZES] for s in (0, 1))
    for offset in (0, 1):
        found = [on_device(p, offset) for p in params]
        with torch.no_grad():
            KERNELS[kernel].run([StepGroup(found, [on_device(g, offset) for g in grads], hparams, slots)])
        for p, g, after, slot in zip(params, grads, found, slots, strict=True):
            assert same_bits(after.cpu(), reference.step(p, g, hparams, slot)), p.numel()


def test_counts_are_those_of_the_cpu_and_the_same_in_every_run() -> None:
    seen = []
    for device in ("cpu", "cuda", "cuda"):
        params = parameters(device, torch.float32)
        opt = tailopt.BiClip(params, 0.03, 0.5, 0.1, statistics="counts", fused=True)
        for k in range(4):
            give_gradients(params, seed=k)
            opt.step()
        seen.append(list(opt.statistics().values()))
    assert seen[1] == seen[2]
    for a, b in zip(seen[0], seen[1], strict=True):
        assert replace(a, squares=0.0) == replace(b, squares=0.0)
        assert a.squares == pytest.approx(b.squares, rel=1e-12)


@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_l2clip_is_that_of_the_cpu_and_never_waits(scope: str) -> None:
    here, there = parameters("cpu", torch.float32), parameters("cuda", torch.float32)
    opts = [tailopt.L2Clip(params, 0.1, 0.5, 0.1, scope=scope, fused=True) for params in (here, there)]
    for k in range(4):
        give_gradients(here, there, seed=k)
        opts[0].step()
        if k == 0:
            opts[1].step()
        else:
            with nothing_waits():
                opts[1].step()
    for p, q in zip(here, there, strict=True):
        torch.testing.assert_close(q.cpu(), p, rtol=1e-6, atol=1e-7)


def test_clipped_copies_are_those_of_the_operator() -> None:
    params, plain = parameters("cuda", torch.bfloat16), parameters("cuda", torch.bfloat16)
    give_gradients(params, plain)
    opt = tailopt.Clipped(torch.optim.AdamW(params, lr=0.1, fused=True), u=0.5, d=0.1)
    inner = torch.optim.AdamW(plain, lr=0.1, fused=True)
    for p in plain:
        p.grad = tailopt.biclip(p.grad, 0.5, 0.1)
    for _ in range(3):
        opt.step()
        inner.step()
    assert all(map(same_bits, params, plain))


def test_raise_waits_once_and_moves_nothing() -> None:
    params = parameters("cuda", torch.float32)
    give_gradients(params)
    opt = tailopt.BiClip(params, 0.1, 0.5, 0.1, nonfinite="raise", fused=True)
    opt.step()
    params[5].grad[[7, 9]] = math.inf
    before = [p.detach().clone() for p in params]
    with pytest.raises(FloatingPointError, match="5: 2 of 4099"):
        opt.step()
    assert all(map(torch.equal, params, before))
    events = launched(opt.step, raises=FloatingPointError)
    assert sum("Memcpy DtoH" in name for name in events) == 1


def launched(step: Callable[[], object], raises: type[Exception] | None = None) -> list[str]:
    """The names of what a step enqueues."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        if raises is None:
            step()
        else:
            with pytest.raises(raises):
                step()
        torch.cuda.synchronize()
    return [event.name for event in profiler.events() if event.device_type == DeviceType.CUDA]


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}, {"dead_zone": 1e-8}], ids=str)
def test_one_launch_without_memory_for_all_groups(settings: dict[str, Any]) -> None:
    params = [torch.nn.Parameter(torch.randn(n, device="cuda")) for n in [100_000] * 20 + [7] * 20]
    for p in params:
        p.grad = torch.randn_like(p)
    opt = tailopt.BiClip(
        [{"params": params[:9]}, {"params": params[9:], "lr": 0.5}], 0.1, 0.5, 0.1, fused=True, **settings
    )
    for _ in range(12):
        opt.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    names = launched(opt.step)
    assert [name for name in names if "step_programs" in name] == names
    assert len(names) == 1
    assert torch.cuda.max_memory_allocated() - before <= 0.02 * sum(p.numel() for p in params)


def test_a_schedule_and_other_addresses_compile_nothing() -> None:
    from triton import knobs

    compiled: list[object] = []
    params = parameters("cuda", torch.float32)
    opt = tailopt.BiClip(params, 0.1, 0.5, 0.1, fused=True)
    give_gradients(params)
    opt.step()
    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = lambda *_, **__: compiled.append(1)
    try:
        for k in range(5):
            give_gradients(params, seed=k)
            opt.param_groups[0].update(lr=0.1 / (k + 1), u=1.0 + k, weight_decay=0.1 * k)
            opt.step()
        tailopt.BiClip([torch.nn.Parameter(p.detach().clone()) for p in params[:3]], 0.1, 0.5, 0.1, fused=True)
    finally:
        knobs.runtime.jit_cache_hook = before
    assert not compiled


def test_2_31_elements_and_one() -> None:
    n = 2**31 + 1
    if torch.cuda.mem_get_info()[0] < 5 * n:
        pytest.skip("needs 10 GB on the device")
    p, g = (
        torch.zeros(n, dtype=torch.bfloat16, device="cuda"),
        torch.full((n,), 0.25, dtype=torch.bfloat16, device="cuda"),
    )
    update([StepGroup([p], [g], StepHyperparameters(ClipByValue(1.0, 0.0), 1.0))], "triton", StepCache())
    assert int((p == -0.25).sum()) == n
    del p, g
    torch.cuda.empty_cache()


def test_channels_last_complex_and_an_expanded_gradient() -> None:
    hparams, cache = HPARAMS["decay"], StepCache()
    p, g = (special(240, torch.float32, s).view(2, 3, 8, 5).to(memory_format=torch.channels_last) for s in (1, 2))
    pz, gz = (torch.view_as_complex(special(100, torch.float32, s).view(50, 2)) for s in (3, 4))
    pe, ge = special(60, torch.float32, 5).view(6, 10), special(10, torch.float32, 6).expand(6, 10)
    found = [p.cuda(), pz.cuda(), pe.cuda()]
    with torch.no_grad():
        update([StepGroup(found, [g.cuda(), gz.cuda(), ge.cuda()], hparams)], "triton", cache)
    assert same_bits(found[0].cpu(), reference.step(p, g, hparams))
    assert same_bits(
        torch.view_as_real(found[1].cpu()), reference.step(torch.view_as_real(pz), torch.view_as_real(gz), hparams)
    )
    assert same_bits(found[2].cpu(), reference.step(pe, ge, hparams))


def assert_stepped(before: list[Tensor], params: list[torch.nn.Parameter]) -> None:
    """The parameters took one step of lr=0.1, u=0.5, d=0.1."""
    hparams = StepHyperparameters(ClipByValue(0.5, 0.1), 0.1)
    for p, q in zip(params, before, strict=True):
        assert same_bits(p.cpu(), reference.step(q.cpu(), p.grad.cpu(), hparams))


# ---- CUDA graphs ----


def warmed_up(step: Callable[[], object]) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}, {"nonfinite": "skip"}, {"dead_zone": "auto"}], ids=str)
def test_a_captured_step_has_the_bits_of_an_eager_one(settings: dict[str, Any]) -> None:
    """Gradients at their old addresses, a tensor lr; eager steps at other addresses between the replays."""
    eager, captured = parameters("cuda", torch.float32), parameters("cuda", torch.float32)
    give_gradients(eager, captured)
    lrs = [torch.tensor(0.03, device="cuda") for _ in range(2)]
    opts = [
        tailopt.BiClip(params, lr, 0.5, 0.1, weight_decay=0.1, capturable=True, fused=True, **settings)
        for params, lr in zip((eager, captured), lrs, strict=True)
    ]
    for opt in opts:
        warmed_up(opt.step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        opts[1].step()
    for k in range(4):
        for lr in lrs:
            lr.fill_(0.03 / (k + 1))
        opts[0].step()
        graph.replay()
        old = [p.grad for p in captured]
        for p in (*eager, *captured):
            p.grad = torch.full_like(p, 0.3)
        for opt in opts:
            opt.step()
        for p, g in zip(captured, old, strict=True):
            p.grad = g
        for p, q in zip(eager, captured, strict=True):
            p.grad = q.grad
    assert all(map(same_bits, eager, captured))


def test_a_whole_iteration_in_a_graph() -> None:
    """Gradients of the graph's own pool: their addresses are known while it is captured."""
    torch.manual_seed(0)
    models = [
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).cuda() for _ in range(2)
    ]
    models[1].load_state_dict(models[0].state_dict())
    opts = [tailopt.BiClip(m.parameters(), 0.01, 0.5, 0.1, capturable=True, fused=True) for m in models]
    x = torch.randn(32, 64, device="cuda")

    def iteration(model: torch.nn.Module, opt: torch.optim.Optimizer) -> None:
        opt.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        opt.step()

    for model, opt in zip(models, opts, strict=True):
        warmed_up(lambda model=model, opt=opt: iteration(model, opt))
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    opts[1].zero_grad(set_to_none=True)
    for graph in graphs:  # two graphs, neither of which may need the other
        with torch.cuda.graph(graph):
            iteration(models[1], opts[1])
    for k in range(4):
        x.copy_(torch.randn(32, 64, generator=torch.Generator().manual_seed(k)))
        iteration(models[0], opts[0])
        graphs[1 - k % 2].replay()
    iteration(models[0], opts[0])
    iteration(models[1], opts[1])  # eager again
    assert all(map(same_bits, models[0].parameters(), models[1].parameters()))


def test_a_graph_outlives_its_optimizer() -> None:
    params = parameters("cuda", torch.float32)
    give_gradients(params)
    opt = tailopt.BiClip(params, 0.1, 0.5, 0.1, capturable=True, fused=True)
    warmed_up(opt.step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        opt.step()
    before = [p.detach().clone() for p in params]
    del opt
    gc.collect()
    filler = [torch.full((n,), -1, dtype=torch.int64, device="cuda") for n in range(1, 500)]
    graph.replay()
    torch.cuda.synchronize()
    for p, q in zip(params, before, strict=True):
        assert same_bits(
            p.cpu(), reference.step(q.cpu(), p.grad.cpu(), StepHyperparameters(ClipByValue(0.5, 0.1), 0.1))
        )
    assert len(filler) == 499


# ---- streams and lifetimes ----


def test_tables_live_until_a_late_step_on_another_stream_has_read_them() -> None:
    params = parameters("cuda", torch.float32)
    give_gradients(params)
    opt = tailopt.BiClip(params, 0.1, 0.5, 0.1, fused=True)
    opt.step()
    torch.cuda.synchronize()
    before = [p.detach().clone() for p in params]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(int(2e8))
        opt.step()
    del opt
    gc.collect()
    filler = [torch.full((n,), -1, dtype=torch.int64, device="cuda") for n in range(1, 500)]
    torch.cuda.synchronize()
    for p, q in zip(params, before, strict=True):
        assert same_bits(
            p.cpu(), reference.step(q.cpu(), p.grad.cpu(), StepHyperparameters(ClipByValue(0.5, 0.1), 0.1))
        )
    assert len(filler) == 499


def test_numbers_that_change_while_steps_are_queued_reach_their_own_step() -> None:
    here, there = parameters("cpu", torch.float32), parameters("cuda", torch.float32)
    give_gradients(here, there)
    opts = [tailopt.BiClip(params, 0.1, 0.5, 0.1, fused=True) for params in (here, there)]
    opts[1].step()
    opts[0].step()
    torch.cuda.synchronize()
    torch.cuda._sleep(int(1e9))  # so that all of them are queued
    for k in range(50):
        for opt in opts:
            opt.param_groups[0]["lr"] = 0.1 / (k + 1)
            opt.step()
    assert all(same_bits(q.cpu(), p) for p, q in zip(here, there, strict=True))


# ---- GradScaler ----


def test_a_scaler_is_not_waited_for_and_finds_unscaled_gradients() -> None:
    params, plain = parameters("cuda", torch.float32), parameters("cuda", torch.float32)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    scaler.scale(torch.zeros((), device="cuda"))
    opt = tailopt.BiClip(params, 0.1, 0.5, 0.1, fused=True)
    reference_step = tailopt.BiClip(plain, 0.1, 0.5, 0.1)
    give_gradients(params, factor=1024.0)
    give_gradients(plain)
    for _ in range(2):
        scaler.step(opt)
        scaler.update()
        reference_step.step()
        assert all(map(same_bits, params, plain))
        assert all(same_bits(p.grad, q.grad) for p, q in zip(params, plain, strict=True))
        give_gradients(params, factor=1024.0)
    before = [p.detach().clone() for p in params]
    params[0].grad[0, 0] = math.inf
    grads = [p.grad.clone() for p in params]
    with nothing_waits():
        scaler.step(opt)
    assert all(map(torch.equal, params, before)) and all(map(torch.equal, [p.grad for p in params], grads))
    scaler.update()
    assert scaler.get_scale() == 512.0


def test_it_is_not_the_default_yet() -> None:
    p = torch.zeros(4, device="cuda")
    assert not triton_runtime.why_missing(p.device)
    from tailopt.clipping.dispatch import which

    assert which(p, p, HPARAMS["plain"]).kernel.name == "foreach"
    assert which(p, p, HPARAMS["plain"], "fused").kernel.name == "triton"
