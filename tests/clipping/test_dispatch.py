"""Every kernel against the reference: the same bits, at every size where a loop changes its mind."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tailopt.clipping import dispatch, reference
from tailopt.clipping.counts import StatisticsRecorder
from tailopt.clipping.dispatch import KERNELS, update, which
from tailopt.clipping.kernels.chunked import CHUNK
from tailopt.clipping.kernels.kernel import StepGroup, table_row
from tailopt.clipping.reference import ClipByValue, ScaleToNorm, StepHyperparameters
from tailopt.native import library as native
from tailopt.native.clip import Counters, StepTable

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SIZES = [*range(70), 127, 128, 129, 255, 256, 257, 511, 512, 513, 1023, 1025, 4095, 4097, 65535, 65536, 65537]
SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -1e-40, 1e-45, 0.1, -0.1, 0.5, -0.5, 3e38, -3e38]
fused_in_torch = torch.backends.cpu.get_cpu_capability() != "DEFAULT"
needs_fma = pytest.mark.skipif(not fused_in_torch, reason="this processor has no fused multiply-add")

HPARAMS = {
    "plain": StepHyperparameters(ClipByValue(0.5, 0.1), lr=0.01),
    "sign": StepHyperparameters(ClipByValue(0.3, 0.3), lr=0.7),
    "identity": StepHyperparameters(ClipByValue(math.inf, 0.0), lr=0.3),
    "zero": StepHyperparameters(ClipByValue(0.0, 0.0), lr=0.3),
    "decay": StepHyperparameters(ClipByValue(0.5, 0.1), lr=0.013, weight_decay=0.1),
    "maximize": StepHyperparameters(ClipByValue(0.5, 0.1), lr=0.01, maximize=True),
    "dead zone": StepHyperparameters(ClipByValue(0.5, 0.1, 0.05), lr=0.01),
    "dead zone above d": StepHyperparameters(ClipByValue(0.5, 0.1, 0.5), lr=0.01, weight_decay=0.3),
    "infinite d": StepHyperparameters(ClipByValue(math.inf, math.inf), lr=1e-3),
    "tiny": StepHyperparameters(ClipByValue(1e-42, 1e-44), lr=1.0),
    "rescaled": StepHyperparameters(ScaleToNorm(1.0, 7.3, 0.9), lr=0.01),
    "rescaled down": StepHyperparameters(ScaleToNorm(2.0**-126, 3.0, 0.9), lr=0.01, weight_decay=0.1, maximize=True),
}


def special(n: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Normal numbers of many magnitudes, a fifth of them special."""
    generator = torch.Generator().manual_seed(seed)
    x = (
        torch.randn(n, generator=generator, dtype=torch.float64)
        * 10 ** torch.randint(-6, 2, (n,), generator=generator).double()
    )
    picked = torch.tensor(SPECIAL, dtype=torch.float64)[torch.randint(len(SPECIAL), (n,), generator=generator)]
    return torch.where(torch.rand(n, generator=generator) < 0.2, picked, x).to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, -0 and 0 apart; any NaN equals any NaN."""
    nan = torch.isnan(a) & torch.isnan(b)
    return bool((nan | ((a == b) & (torch.signbit(a) == torch.signbit(b)))).all())


def differing(p: Tensor, g: Tensor, after: Tensor, hparams: StepHyperparameters) -> str:
    want = reference.step(p, g, hparams)
    if same_bits(after, want):
        return ""
    i = int(((after != want) & ~(torch.isnan(after) & torch.isnan(want))).flatten().nonzero()[0])
    values = {"p": p, "g": g, "want": want, "got": after}
    return f"at {i} of {p.numel()}: " + " ".join(f"{name}={t.flatten()[i]}" for name, t in values.items())


@functools.cache
def samples(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters and gradients of every size, cut from one tensor each."""
    total = sum(SIZES)
    return list(special(total, dtype, 1).split(SIZES)), list(special(total, dtype, 2).split(SIZES))


@functools.cache
def expected(how: str, dtype: torch.dtype) -> list[Tensor]:
    """The reference acts on each element alone, so it may see all sizes at once."""
    params, grads = samples(dtype)
    return list(reference.step(torch.cat(params), torch.cat(grads), HPARAMS[how]).split(SIZES))


def run(kernel: str, pairs: Sequence[tuple[Tensor, Tensor]], hparams: StepHyperparameters) -> list[Tensor]:
    params = [p.clone(memory_format=torch.preserve_format) for p, _ in pairs]
    KERNELS[kernel].run([StepGroup(params, [g for _, g in pairs], hparams)])
    return params


@needs_fma
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", HPARAMS)
@pytest.mark.parametrize("kernel", [name for name in KERNELS if name != "triton"])  # test_triton.py, test_gpu_triton.py
def test_equals_the_reference_bit_for_bit(kernel: str, how: str, dtype: torch.dtype) -> None:
    hparams = HPARAMS[how]
    pairs = list(zip(*samples(dtype), strict=True))
    refused = KERNELS[kernel].refuses(*pairs[-1], hparams)
    if how == "infinite d" and kernel in ("chunked", "foreach") or how.startswith("dead zone") and kernel == "foreach":
        assert refused
        return
    assert not refused
    for (p, g), after, want in zip(pairs, run(kernel, pairs, hparams), expected(how, dtype), strict=True):
        assert same_bits(after, want), differing(p, g, after, hparams)


@needs_fma
@needs_fma
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 4, 17), (3, 4, 5, 7), (4, 40)])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_rows_have_the_bits_of_each_row(shape: tuple[int, ...], decay: float, dtype: torch.dtype) -> None:
    """Numbers of 4 configurations, along the second dimension or the first."""
    p, g = (special(math.prod(shape), dtype, seed).reshape(shape) for seed in (1, 2))
    k = shape.index(4)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    u, share, lr = (torch.rand(4, generator=torch.Generator().manual_seed(s)).to(wide) for s in (1, 2, 3))
    trailing = [1] * (len(shape) - k - 1)
    tensors = [t.reshape(4, *trailing) for t in (u, u * share, lr)]
    hparams = StepHyperparameters(ClipByValue(tensors[0], tensors[1], 0.01), tensors[2], decay)
    assert which(p, g, hparams).kernel.name == "rows"
    (after,) = run("rows", [(p, g)], hparams)
    for c in range(4):
        # a 0-dim lr, since the decay of a tensor is formed in the type of the arithmetic
        own = StepHyperparameters(ClipByValue(float(u[c]), float(u[c] * share[c]), 0.01), lr[c], decay)
        index = (slice(None),) * k + (c,)
        assert not differing(p[index], g[index], after[index], own)


def test_rows_refuse_what_they_cannot_take() -> None:
    p, g = torch.zeros(4, 32), torch.ones(4, 32)
    hparams = StepHyperparameters(ClipByValue(torch.ones(4, 1), 0.0), 0.1)
    assert which(p, g, hparams).kernel.name == "rows"
    assert "shorter than 16" in which(p, g, StepHyperparameters(ClipByValue(torch.ones(32), 0.0), 0.1)).why
    assert "not contiguous" in which(p.t(), g.t(), StepHyperparameters(ClipByValue(torch.ones(32, 1), 0.0), 0.1)).why
    assert (
        "differentiated"
        in which(p, g, StepHyperparameters(ClipByValue(torch.ones(4, 1, requires_grad=True), 0.0), 0.1)).why
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunked_at_its_edges(dtype: torch.dtype) -> None:
    for n in (CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3):
        p, g = special(n, dtype, 1), special(n, dtype, 2)
        (after,) = run("chunked", [(p, g)], HPARAMS["decay"])
        assert not (wrong := differing(p, g, after, HPARAMS["decay"])), wrong


needs_kernel = pytest.mark.skipif(native.loaded() is None, reason="the C kernel was not built")


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", ["plain", "decay", "maximize", "dead zone above d"])
def test_every_instruction_set_and_thread_count_agree(how: str, dtype: torch.dtype) -> None:
    library = native.loaded()
    assert library is not None
    pairs = [(special(n, dtype, n), special(n, dtype, n + 1)) for n in (5, 1000, 70_000, 200_001)]
    numbers = table_row(HPARAMS[how], torch.float64 if dtype == torch.float64 else torch.float32)
    seen = []
    for instruction_set in library.instruction_sets:
        for threads in (1, 2, 3):
            params = [p.clone() for p, _ in pairs]
            counters = Counters.empty(len(pairs), histogram=True)
            counters.sample_offset = 7
            grads = [g for _, g in pairs]
            step_table = StepTable(numbers, [0] * 4)
            library.clip.run(
                "biclip", params, grads, step_table, counters=counters, instruction_set=instruction_set, threads=threads
            )
            seen.append((params, counters))
            for (p, g), after in zip(pairs, params, strict=True):
                assert not (wrong := differing(p, g, after, HPARAMS[how])), (instruction_set, threads, wrong)
    for _, counters in seen[1:]:
        assert torch.equal(counters.table, seen[0][1].table)
        assert torch.equal(counters.bins, seen[0][1].bins) and torch.equal(counters.logs, seen[0][1].logs)


@needs_kernel
@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_every_element_steps_once_whoever_takes_it(threads: int) -> None:
    """More than 100 units, which threads take several at a time, some of them across the end of a tensor."""
    library = native.loaded()
    assert library is not None
    grads = [torch.ones(n, dtype=torch.bfloat16) for n in (3_000_000, 5, 70_000, 0, 4_000_001, 65_536, 1)]
    params = [torch.zeros_like(g) for g in grads]
    counters = Counters.empty(len(grads), histogram=True)
    numbers = table_row(StepHyperparameters(ClipByValue(1.0, 1.0), lr=1.0), torch.float32)
    step_table = StepTable(numbers, [0] * len(grads))
    library.clip.run("biclip", params, grads, step_table, counters=counters, threads=threads)
    for k, p in enumerate(params):
        assert (p == -1).all()
        assert counters.integers[k].tolist() == [p.numel(), 0, p.numel(), 0, 0]
        assert counters.reals[k, 0] == p.numel() and counters.bins is not None and counters.bins[k].sum() == p.numel()


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
def test_one_element_that_is_not_finite_is_counted_wherever_it_is(value: float, dtype: torch.dtype) -> None:
    library = native.loaded()
    assert library is not None
    numbers = table_row(HPARAMS["plain"], torch.float64 if dtype == torch.float64 else torch.float32)
    for instruction_set in library.instruction_sets:
        for i in range(70):
            g = torch.arange(1, 71).to(dtype)
            g[i] = value
            counters = Counters.empty(1)
            args = "biclip", [torch.zeros_like(g)], [g], StepTable(numbers, [0])
            library.clip.run(*args, counters=counters, instruction_set=instruction_set)
            finite = g[g.isfinite()].double()
            where = (instruction_set, i)
            assert counters.integers[0].tolist() == [70, 0, 0, 69 + math.isinf(value), 1], where
            assert counters.reals[0].tolist() == [float((finite**2).sum()), float(finite.max())], where


shapes = st.lists(st.integers(0, 7), min_size=0, max_size=4).map(tuple)


@needs_fma
@settings(max_examples=60)
@given(
    st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=6),
    st.sampled_from(list(HPARAMS)),
    st.data(),
)
def test_any_list_of_tensors_by_default(kinds: list, how: str, data: st.DataObject) -> None:
    """Mixed types and shapes, transposed, strided, expanded: whatever kernel a tensor gets, the bits are the same."""
    hparams = HPARAMS[how]
    params, grads, before = [], [], []
    for k, (shape, dtype) in enumerate(kinds):
        n = math.prod(shape)
        p, g = special(n, dtype, k).reshape(shape), special(n, dtype, k + 9).reshape(shape)
        layout = data.draw(
            st.sampled_from(["plain", "transposed grad", "transposed both", "gaps", "expanded", "mixed type"])
        )
        if layout.startswith("transposed"):
            g = g.mT.contiguous().mT if g.ndim > 1 else g
            if layout.endswith("both"):
                p = p.mT.contiguous().mT if p.ndim > 1 else p
        elif layout == "gaps":
            g = torch.stack([g, g], dim=-1)[..., 0]
            p = torch.stack([p, p], dim=-1)[..., 0]
        elif layout == "expanded" and g.ndim:
            g = g[:1].expand(shape) if shape[0] else g
        elif layout == "mixed type" and dtype == torch.float32:
            g = g.bfloat16()
        params.append(p)
        grads.append(g)
        before.append(p.clone())
    update([StepGroup(params, grads, hparams)])
    for p, g, start in zip(params, grads, before, strict=True):
        assert same_bits(p, reference.step(start, g, hparams))


@needs_fma
def test_several_batches_in_one_pass_keep_their_own_numbers() -> None:
    batches, want = [], []
    for k, how in enumerate(("plain", "decay", "dead zone", "maximize")):
        ps, gs = [special(100, d, k) for d in DTYPES], [special(100, d, k + 5) for d in DTYPES]
        want += [reference.step(p, g, HPARAMS[how]) for p, g in zip(ps, gs, strict=True)]
        batches.append(StepGroup(ps, gs, HPARAMS[how]))
    update(batches)
    assert all(same_bits(p, w) for p, w in zip((p for b in batches for p in b.params), want, strict=True))


@pytest.mark.parametrize("kernel", ["single", "foreach"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_numbers_are_within_an_ulp(kernel: str, dtype: torch.dtype) -> None:
    p, g = torch.randn(1000).to(dtype), torch.randn(1000).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    lr, u, d = (torch.tensor(v, dtype=wide) for v in (0.03, 0.5, 0.1))
    (after,) = run(kernel, [(p, g)], StepHyperparameters(ClipByValue(u, d), lr=lr, weight_decay=0.1))
    want = reference.step(p, g, StepHyperparameters(ClipByValue(0.5, 0.1), lr=0.03, weight_decay=0.1))
    ulp = torch.finfo(dtype).eps * (p.abs() + 1) + torch.finfo(wide).eps * 0.03 * 0.5
    assert ((after - want).abs() <= ulp).all()


def test_version_counters_move_so_that_autograd_notices() -> None:
    w = torch.nn.Parameter(torch.randn(5))
    loss = (w * w).sum()
    with torch.no_grad():
        update([StepGroup([w], [torch.ones(5)], HPARAMS["plain"])])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_which_names_the_kernel_and_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    p, g, hparams = torch.zeros(4, 4), torch.ones(4, 4), HPARAMS["plain"]
    if native.loaded() is not None:
        assert which(p, g, hparams).kernel.name == "c"
    assert "lie differently" in which(p, g.t().contiguous().t(), hparams).why
    assert which(p, g.to_sparse(), hparams).kernel.name == "single"
    assert "dimensions" in which(p, g, StepHyperparameters(ClipByValue(torch.ones(4, 1), 0.0), 0.1)).why
    monkeypatch.setattr(native, "loaded", lambda: None)
    monkeypatch.setattr(native, "why_missing", lambda: "no compiler")
    choice = which(p, g, hparams)
    assert choice.kernel.name == "chunked" and "no compiler" in choice.why


def test_the_missing_kernel_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "loaded", lambda: None)
    monkeypatch.setattr(native, "why_missing", lambda: "no compiler")
    monkeypatch.setattr(dispatch, "_warned", False)
    p = torch.zeros(4)
    with pytest.warns(UserWarning, match="no compiler"):
        update([StepGroup([p], [torch.ones(4)], HPARAMS["plain"])])
    update([StepGroup([p], [torch.ones(4)], HPARAMS["plain"])])  # a second warning would be an error here
    assert torch.allclose(p, torch.full((4,), -0.01))


def test_a_recorder_counts_the_same_in_every_kernel() -> None:
    g = special(70_001, torch.float32, 3)
    seen = []
    for kernel in (None, "single", "chunked"):
        recorder = StatisticsRecorder("sampled")
        recorder.begin_pass(1)
        update([StepGroup([torch.zeros(70_001)], [g], HPARAMS["dead zone"], [0])], kernel, None, recorder)
        seen.append(recorder.take(1)[0])
    assert seen[1] == seen[2]
    for name in ("elements", "zero", "below", "above", "nonfinite", "largest", "octaves", "logs"):
        assert getattr(seen[0], name) == getattr(seen[1], name), name
    assert math.isclose(seen[0].squares, seen[1].squares, rel_tol=1e-12)
