"""The Triton kernel under Triton's interpreter, which runs its programs on the CPU: the bits of the reference.

Run by `make interpreter`, in a process of its own: Triton decides when it is imported whether it interprets. What only
a device shows (its own arithmetic, streams, graphs, memory, time) is in tests/contracts/test_gpu_triton.py.
"""

from __future__ import annotations

import gc
import math
import os
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tailopt
from tailopt.clipping import launch_tables, reference
from tailopt.clipping.counts import StatisticsRecorder
from tailopt.clipping.dispatch import KERNELS, update, which
from tailopt.clipping.kernels import triton, triton_runtime
from tailopt.clipping.kernels.kernel import StepGroup
from tailopt.clipping.launch_tables import Kind, Scalar
from tailopt.clipping.reference import ClipByValue, Momentum, ScaleToNorm, StepHyperparameters
from tailopt.clipping.step_cache import StepCache
from tailopt.clipping.stochastic_rounding import StochasticRounding
from tests.clipping.test_dispatch import HPARAMS, same_bits, special
from tests.optimizers.released import decoder, pair, train

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton's interpreter is off: `make interpreter` runs these tests", allow_module_level=True)
interpreter = pytest.importorskip("triton.runtime.interpreter", reason="Triton is not installed")
tl = pytest.importorskip("triton.language")

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities and NaN
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
PAIRS = [(d, d) for d in DTYPES] + [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
SIZES = [0, 1, 7, 1023, 1024, 1025, 2047, 2048, 2049, 4095, 4096, 4097]


@pytest.fixture(autouse=True, scope="module")
def _arithmetic_of_a_device() -> Any:
    """The interpreter rounds a fused multiply-add twice, and cuts an fp32 number to bf16; a device rounds both once."""
    builder = interpreter.InterpreterBuilder
    cast = builder.cast_impl

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        a, b, c = (torch.from_numpy(t.data.copy()) for t in (x, y, z))
        assert bool((b == b.flatten()[0]).all()), "the second factor is a number of the step"
        result = reference.fma(b.flatten()[0], a, c).numpy()
        return interpreter.TensorHandle(result, z.dtype.scalar)

    def rounded(self: Any, src: Any, to: Any) -> Any:
        types = src.dtype.scalar, to.scalar
        if types == (tl.float32, tl.bfloat16):
            narrow = torch.from_numpy(src.data.copy()).bfloat16()
            return interpreter.TensorHandle(narrow.view(torch.uint16).numpy(), tl.bfloat16)
        if types == (tl.bfloat16, tl.float32):  # it loses what is below the range of normal numbers
            wide = torch.from_numpy(src.data.copy()).view(torch.bfloat16).float()
            return interpreter.TensorHandle(wide.numpy(), tl.float32)
        return cast(self, src, to)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_fma", fma)
        patch.setattr(builder, "cast_impl", rounded)
        for name in ("create_fp_trunc", "create_fp_ext"):
            patch.setattr(builder, name, rounded)
        yield


def stepped(groups: list[StepGroup], cache: StepCache | None = None) -> list[StepGroup]:
    """The groups on copies of their parameters and momenta, after a step of the Triton kernel."""
    copies = [
        group._replace(
            params=[p.clone(memory_format=torch.preserve_format) for p in group.params],
            momenta=[m.clone(memory_format=torch.preserve_format) for m in group.momenta],
        )
        for group in groups
    ]
    update(copies, "triton", cache)
    return copies


@pytest.mark.parametrize("dtypes", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}".replace("torch.", ""))
@pytest.mark.parametrize("how", HPARAMS)
def test_equals_the_reference_bit_for_bit(how: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    params = [special(n, dtypes[0], n) for n in SIZES]
    grads = [special(n, dtypes[1], n + 1) for n in SIZES]
    (after,) = stepped([StepGroup(params, grads, HPARAMS[how])])
    for p, g, found in zip(params, grads, after.params, strict=True):
        assert same_bits(found, reference.step(p, g, HPARAMS[how])), p.numel()


@pytest.mark.parametrize("dtypes", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}".replace("torch.", ""))
@pytest.mark.parametrize("how", ["decay", "maximize", "dead zone", "zero", "tiny"])
@pytest.mark.parametrize("clamps", [True, False])
def test_momentum_equals_the_reference(how: str, dtypes: tuple[torch.dtype, torch.dtype], clamps: bool) -> None:
    dtype, momentum_dtype = dtypes
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    ps = [special(n, dtype, n) for n in SIZES]
    ms = [torch.where(torch.isfinite(m := special(n, momentum_dtype, n + 2)), m, 0) for n in SIZES]
    for k in (1, 7):
        hparams = HPARAMS[how]._replace(momentum=Momentum.at(0.9, k)._replace(clamps=clamps))
        gs = [special(n, dtype, n + k) for n in SIZES]
        (after,) = stepped([StepGroup(ps, gs, hparams, momenta=ms)])
        for i, (p, g, m) in enumerate(zip(ps, gs, ms, strict=True)):
            new, mean = reference.momentum(m, g, hparams, wide)
            assert same_bits(after.momenta[i], new) and same_bits(after.params[i], reference.step(p, mean, hparams))
        ps, ms = after.params, list(after.momenta)


layouts = st.sampled_from(
    ["plain", "unaligned", "transposed both", "channels last", "transposed grad", "expanded", "gaps"]
)
kinds = st.tuples(st.integers(0, 60), st.sampled_from(PAIRS), layouts)


@settings(max_examples=25)
@given(st.lists(st.tuples(st.sampled_from(list(HPARAMS)), st.lists(kinds, max_size=4)), min_size=1, max_size=4))
def test_any_list_of_groups(groups: list) -> None:
    """Mixed types, alignments and layouts; what the kernel does not take goes to another one, with the same bits."""
    batches = []
    for how, tensors in groups:
        params, grads = [], []
        for k, (n, (dtype, grad_dtype), layout) in enumerate(tensors):
            p, g = special(n * 24 + 1, dtype, k)[1:], special(n * 24 + 1, grad_dtype, k + 9)[1:]
            if layout != "unaligned":
                p, g = p.clone(), g.clone()
            if layout == "transposed both":
                p, g = p.view(-1, 24).t(), g.view(-1, 24).t()
            elif layout == "channels last":
                p, g = (t.view(-1, 2, 3, 4).to(memory_format=torch.channels_last) for t in (p, g))
            elif layout == "transposed grad":
                p, g = p.view(-1, 24), g.view(24, -1).t()
            elif layout == "expanded":
                g = g[:1].expand(p.shape) if n else g
            elif layout == "gaps":
                g = torch.stack([g, g], dim=1)[:, 0]
            params.append(p)
            grads.append(g)
        batches.append(StepGroup(params, grads, HPARAMS[how]))
    for batch, after in zip(batches, stepped(batches), strict=True):
        for p, g, found in zip(batch.params, batch.grads, after.params, strict=True):
            assert same_bits(found, reference.step(p, g, batch.hparams))


def test_one_launch_for_all_tensors_and_groups_of_a_kind() -> None:
    groups = [
        StepGroup(
            [special(n, dtype, n) for n in (5, 0, 3000)], [special(n, dtype, n) for n in (5, 0, 3000)], HPARAMS[how]
        )
        for how in ("plain", "decay")
        for dtype in (torch.float32, torch.bfloat16)
    ]
    cache = StepCache()
    stepped(groups, cache)
    launches = cache.launch_tables.launches(groups, cache)
    assert [(launch.kind.dtype, len(launch.sizes), launch.chunks.shape[0]) for launch in launches] == [
        (torch.float32, 4, 6),
        (torch.bfloat16, 4, 4),
    ]


def test_what_has_not_changed_is_not_sent_again() -> None:
    """Unchanged: nothing. A schedule: the rows. A gradient elsewhere: the addresses. A list: everything."""
    cache = StepCache()
    hparams = HPARAMS["plain"]
    params, grads = [special(n, torch.float32, n) for n in (5, 3000)], [special(n, torch.float32, n) for n in (5, 3000)]

    def sent(params: list[Tensor], grads: list[Tensor], hparams: StepHyperparameters) -> int:
        before = cache.launch_tables._staging.sent
        want = [reference.step(p, g, hparams) for p, g in zip(params, grads, strict=True)]
        update([StepGroup(params, grads, hparams)], "triton", cache)
        assert all(map(same_bits, params, want))
        return cache.launch_tables._staging.sent - before

    assert sent(params, grads, hparams) == 4
    assert sent(params, grads, hparams) == 0
    assert sent(params, grads, hparams._replace(lr=0.5)) == 1
    assert sent(params, grads, hparams._replace(lr=-0.0)) == 1
    assert sent(params, grads, hparams._replace(lr=0.0)) == 1  # another learning rate than -0
    assert sent(params, grads, StepHyperparameters(*hparams._replace(lr=0.0))) == 0  # another object, the same numbers
    assert sent(params, [g.clone() for g in grads], hparams) == 2
    assert sent(params[1:], grads[1:], hparams) == 4
    unaligned = [special(3001, torch.float32, 1)[1:]]
    assert sent(params[1:], unaligned, hparams) == 3  # the chunks are the same


def test_no_step_relies_on_what_a_captured_one_has_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It arrives when the graph is replayed; a table that a graph reads is not given back."""
    cache, hparams = StepCache(), HPARAMS["plain"]
    params, static = [torch.zeros(2100)], [special(2100, torch.float32, 1)]
    tables = cache.launch_tables

    def sent(grads: list[Tensor], capturing: bool, lr: float = 0.01) -> int:
        before = tables._staging.sent
        monkeypatch.setattr(launch_tables, "_is_capturing", lambda: capturing)
        update([StepGroup(params, grads, hparams._replace(lr=lr))], "triton", cache)
        return tables._staging.sent - before

    assert sent(static, False) == 4
    kept = len(launch_tables._captured)
    assert sent(static, True) == 0  # the tables are on the device already
    assert launch_tables._captured[kept][2] is tables._launches[0].tensors
    other = [g.clone() for g in static]
    own = tables._launches[0].tensors, tables._launches[0].rows
    for _ in range(2):
        assert sent(other, True, lr=0.5) == 2
        assert launch_tables._captured[-1][2] is not own[0]
    assert (tables._launches[0].tensors, tables._launches[0].rows) == own
    assert sent(other, False, lr=0.5) == 2
    assert sent(other, False, lr=0.5) == 0
    assert sent(other, True, lr=0.5) == 0


CHANGES = ["nothing", "memory", "dtype", "list", "lr", "tensor lr", "kind", "split", "decay", "other kernel"]


@settings(max_examples=25)
@given(st.lists(st.sampled_from(CHANGES), min_size=1, max_size=8), st.integers(0, 2**31))
def test_any_sequence_of_changes_with_one_cache(changes: list[str], seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    draw = lambda: float(torch.rand((), generator=random, dtype=torch.float64))  # noqa: E731
    hparams, parts, cache, kernel = HPARAMS["plain"], 1, StepCache(), "triton"
    params = [special(n, torch.float32, seed % 1000 + n) for n in (3, 0, 1500, 33)]
    for i, change in enumerate(["nothing", *changes]):
        kernel = "c" if change == "other kernel" else "triton"
        if change == "memory":
            params = [p.clone() for p in params]
        elif change == "dtype":
            params = [p.to(DTYPES[int(draw() * 4)]) for p in params]
        elif change == "list":
            params = [*params[1:], special(20, torch.float32, i)]
        elif change in ("lr", "tensor lr", "kind", "decay"):
            clip: Any = ScaleToNorm(1.0, 1 + draw(), draw()) if change == "kind" else ClipByValue(1.0, draw())
            lr: Any = torch.tensor(draw()) if change == "tensor lr" else draw()
            hparams = StepHyperparameters(clip, lr, draw() if change == "decay" else 0.0)
        elif change == "split":
            parts = 1 + parts % 3
        cuts = [len(params) * k // parts for k in range(parts + 1)]
        grads = [special(p.numel(), p.dtype, seed % 1000 + i) for p in params]
        groups = [StepGroup(params[a:b], grads[a:b], hparams) for a, b in zip(cuts, cuts[1:], strict=False)]
        want = [reference.step(p, g, hparams) for p, g in zip(params, grads, strict=True)]
        update(groups, kernel, cache)
        assert all(map(same_bits, params, want)), change


def test_a_parameter_that_appears_twice_steps_twice() -> None:
    p, g = torch.zeros(3000), torch.ones(3000)
    update([StepGroup([p, p], [g, g], StepHyperparameters(ClipByValue(0.5, 0.1), 1.0))], "triton", StepCache())
    assert torch.equal(p, torch.full_like(p, -1.0))


def test_a_skipped_tensor_keeps_its_bits_and_its_momentum() -> None:
    params, momenta = [torch.ones(2100) for _ in range(3)], [torch.ones(2100) for _ in range(3)]
    hparams = StepHyperparameters(ClipByValue(0.5, 0.0), 1.0, momentum=Momentum.at(0.5, 1))
    verdicts = torch.tensor([False, True, False])
    group = StepGroup(params, [torch.ones(2100)] * 3, hparams, momenta=momenta, skips=verdicts)
    update([group], "triton", StepCache())
    assert [p[-1].item() for p in params] == [0.5, 1.0, 0.5]
    assert [m[-1].item() for m in momenta] == [1.0, 1.0, 1.0]
    everything = torch.ones(3, dtype=torch.bool)  # as where GradScaler found an infinity
    update([group._replace(grads=[torch.zeros(2100)] * 3, skips=everything)], "triton", StepCache())
    assert [p[-1].item() for p in params] == [0.5, 1.0, 0.5] and momenta[0][-1] == 1.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", ["triton", None, "single"])
def test_blank_parameters_are_filled_with_the_clipped_gradient(kernel: str | None, dtype: torch.dtype) -> None:
    """By a step of lr = -1 from -0, whatever the memory held: the kernel does not read it."""
    for how in ("plain", "dead zone", "zero", "maximize"):
        hparams = HPARAMS[how]._replace(lr=-1.0)
        grads = [special(n, dtype, n) for n in (0, 3, 700, 2500)]
        params = [torch.full_like(g, math.nan) for g in grads]
        update([StepGroup(params, grads, hparams, blank=True)], kernel, StepCache())
        for p, g in zip(params, grads, strict=True):
            clip = hparams.clip
            want = tailopt.biclip(-g if hparams.maximize else g, clip.u, clip.d, clip.dead_zone)
            assert same_bits(p, want)


@pytest.mark.parametrize("dtypes", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}".replace("torch.", ""))
def test_counts_as_the_other_kernels(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Over several steps, with a list that changes in between; squares to 1e-12 and the same in every run."""
    sizes = [0, 3, 511, 513, 2500, 5000]
    seen = []
    for kernel in ("single", "triton", "triton"):
        recorder, cache = StatisticsRecorder("counts"), StepCache()
        for k in range(4):
            slots = list(range(len(sizes))) if k < 3 else [5, 2]
            params = [torch.zeros(sizes[i], dtype=dtypes[0]) for i in slots]
            grads = [special(sizes[i], dtypes[1], i + k) for i in slots]
            recorder.begin_pass(len(sizes))
            update([StepGroup(params, grads, HPARAMS["dead zone"], slots)], kernel, cache, recorder)
        seen.append((recorder.take(len(sizes)), recorder.take(len(sizes))))
    (wanted, nothing), (found, later), (again, _) = seen
    assert found == again and later == nothing
    for a, b in zip(wanted, found, strict=True):
        assert replace(a, squares=0.0) == replace(b, squares=0.0)
        assert a.squares == pytest.approx(b.squares, rel=1e-12)


def test_a_skipped_tensor_is_not_counted() -> None:
    recorder = StatisticsRecorder("counts")
    group = StepGroup([torch.zeros(5), torch.zeros(5)], [torch.ones(5)] * 2, HPARAMS["plain"], [0, 1])
    recorder.begin_pass(2)
    update([group._replace(skips=torch.tensor([True, False]))], "triton", StepCache(), recorder)
    assert [counts.elements for counts in recorder.take(2)] == [0, 5]


def test_stochastic_rounding_as_in_the_reference() -> None:
    """By every kernel that takes it, aligned and not, in memory order."""
    hparams = HPARAMS["decay"]._replace(rounding=StochasticRounding(seed=5, step=3))
    params = [special(n, torch.bfloat16, n) for n in (0, 1, 7, 513, 4097, 9000)]
    grads = [special(p.numel(), torch.bfloat16, 2) for p in params]
    for cut in (lambda x: x[1:], lambda x: x[1:].view(20, 30).t()):
        params.append(cut(special(601, torch.bfloat16, 1)))
        grads.append(cut(special(601, torch.bfloat16, 2)))
    slots = list(range(3, 3 + len(params)))
    for kernel in ("triton", "single"):
        found = [p.clone(memory_format=torch.preserve_format) for p in params]
        update([StepGroup(found, grads, hparams, slots)], kernel)
        for p, g, after, slot in zip(params, grads, found, slots, strict=True):
            assert same_bits(after, reference.step(p, g, hparams, slot)), (kernel, p.shape)


def test_skips_with_tensors_without_elements_and_other_groups() -> None:
    hparams, cache = StepHyperparameters(ClipByValue(0.5, 0.0), 1.0), StepCache()
    sizes = [[0, 3, 2100], [5], [0, 7]]
    groups = [StepGroup([torch.zeros(n) for n in some], [torch.ones(n) for n in some], hparams) for some in sizes]
    for first in (True, False):
        flags = torch.tensor([first, not first, first]), None, torch.tensor([first, not first])
        before = [[p.clone() for p in group.params] for group in groups]
        update([group._replace(skips=own) for group, own in zip(groups, flags, strict=True)], "triton", cache)
        for own, old, group in zip(flags, before, groups, strict=True):
            for i, (p, q) in enumerate(zip(old, group.params, strict=True)):
                assert torch.equal(q, p if own is not None and own[i] else p - 0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_look_at_gradients_finds_the_largest_and_what_is_not_finite(dtype: torch.dtype) -> None:
    cache = StepCache()
    grads = [special(n, dtype, n) for n in (0, 7, 2048, 5000)] + [special(4097, torch.float32, 3)[1:]]
    for _ in range(2):
        seen = triton.look(grads, cache)
        assert seen is not None
        finite = torch.cat([g[g.isfinite()].double() for g in grads])
        assert seen[0] == finite.abs().max() and seen[0].dtype == torch.float64
        assert seen[1].tolist() == [int((~g.isfinite()).sum()) for g in grads]
        grads = [g.clone() * 0.5 for g in grads]
        squares = triton.sum_of_squares([torch.where(g.isfinite(), g, 0) for g in grads], StepCache())
        wanted = sum(float((g[g.isfinite()].double() ** 2).sum()) for g in grads)
        assert (squares is None) == (dtype == torch.float64)
        assert squares is None or float(squares) == pytest.approx(wanted, rel=1e-12)
    assert triton.look([grads[1].to_sparse()], StepCache()) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_numbers_that_only_the_device_knows_are_rounded_as_in_the_reference(dtype: torch.dtype) -> None:
    values = [torch.tensor(v, dtype=t) for t in (torch.float32, torch.float64) for v in (0.03, -0.0, 1e-40, 0.7)]
    hows = [
        (launch_tables.COPY, 0.0),
        (launch_tables.NEGATED, 0.0),
        (launch_tables.DECAY, 0.1),
        (launch_tables.LIMIT, 0.1),
    ]
    scalars = [Scalar(i, v, how, x) for i, (v, (how, x)) in enumerate((v, h) for v in values for h in hows)]
    count, compute = len(scalars), triton_runtime.triton_type(dtype)
    numbers = torch.tensor([0.0] * count + [s.operand for s in scalars], dtype=torch.float64).to(dtype)
    sources = torch.tensor(launch_tables._addresses_of(scalars))
    triton_runtime.programs().scalar_programs[(count,)](sources, numbers[count:], numbers, COMPUTE=compute)
    hparams = StepHyperparameters(ClipByValue(1.0, 0.0), 0.0, 0.1, momentum=Momentum(0.9, 1.0))
    for i, (_, value, how, _) in enumerate(scalars):
        want = {
            launch_tables.COPY: reference.rounded(value, dtype),
            launch_tables.NEGATED: -reference.rounded(value, dtype),
            launch_tables.DECAY: hparams._replace(lr=value).decay(dtype),
            launch_tables.LIMIT: hparams._replace(clip=ClipByValue(value, 0.0)).gradient_limit(dtype),
        }[how]
        if how == launch_tables.LIMIT:  # 1 - 0.9 is not quite 0.1
            want = value.to(dtype) / reference.rounded(0.1, dtype)
        assert same_bits(numbers[i], want)  # type: ignore[arg-type]


def test_a_tensor_of_more_than_2_31_elements_is_walked_with_64_bits() -> None:
    """The last chunk of one, without the memory before it: its address is where the tensor would begin."""
    p, g = torch.ones(2048), torch.full((2048,), 0.25)
    chunk = 2**21 + 3
    start = chunk * 2048 * 4
    sizes = chunk * 2048 + 1000
    tensors = torch.tensor([p.data_ptr() - start, g.data_ptr() - start, 0, sizes, 0, 0, 0])
    rows = torch.tensor([-1.0, 1.0, 1.0, 1.0, 0.0, 0.0] + [1.0] * 7)
    f32 = tl.float32
    triton_runtime.programs().step_programs[(1,)](
        tensors,
        torch.tensor([0, chunk], dtype=torch.int32),
        rows,
        *(tensors, tensors, tensors, rows),
        *(f32, f32, f32, f32, False, False, True, False, False, False, False, 2048, 1),
    )
    assert torch.equal(p, torch.cat([torch.full((1000,), 0.75), torch.ones(1048)]))


def test_chunks_cover_every_element_once_and_those_that_are_not_full_come_first() -> None:
    kind = Kind(torch.device("cpu"), torch.float32, torch.float32, None, False, False, False, False, True)
    table = launch_tables._chunk_table([1, 2048, 2049, 5000], kind)
    assert table.tolist() == [[0, 0], [2, 1], [3, 2], [1, 0], [2, 0], [3, 0], [3, 1]]


@pytest.mark.parametrize("threshold", ["number", "tensor"])
def test_a_cache_keeps_no_tensor_alive(threshold: str) -> None:
    u: Any = 0.5 if threshold == "number" else torch.tensor(0.5)
    cache, params, grads = StepCache(), [torch.zeros(8)], [torch.ones(8)]
    for _ in range(2):
        update([StepGroup(params, grads, StepHyperparameters(ClipByValue(u, 0.1), 1.0))], "triton", cache)
    watched = [weakref.ref(t) for t in (*params, *grads, *([u] if threshold == "tensor" else []))]
    del params, grads, u
    gc.collect()
    assert [ref() for ref in watched] == [None] * len(watched)


def test_what_it_refuses_and_why() -> None:
    p, g, hparams = torch.zeros(4, 4), torch.ones(4, 4), HPARAMS["plain"]
    assert which(p, g, hparams, "triton").kernel.name == "triton"
    for other, why in (
        (g.to_sparse(), "sparse"),
        (g.t().contiguous().t(), "lie differently"),
        (g[:1].expand(4, 4), "lie differently"),
        (g.double(), "fp64 only with fp64"),
        (g.to(torch.float8_e5m2), "float8"),
        (torch._neg_view(g), "lazily negated"),
    ):
        assert why in which(p, other, hparams, "triton").why
    assert "dimensions" in which(p, g, StepHyperparameters(ClipByValue(torch.ones(4, 1), 0.0), 0.1), "triton").why
    assert which(p, g, hparams).kernel.name != "triton"  # not by default
    assert "not on meta" in which(p.to("meta"), g.to("meta"), hparams, "triton").why


def test_version_counters_move_so_that_autograd_notices() -> None:
    w = torch.nn.Parameter(torch.randn(5))
    loss = (w * w).sum()
    with torch.no_grad():
        update([StepGroup([w], [torch.ones(5)], HPARAMS["plain"])], "triton")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_infinite_dead_zone_passes_nothing_but_nan() -> None:
    g = torch.tensor([math.inf, -math.inf, math.nan, 1.0, -0.0])
    hparams = StepHyperparameters(ClipByValue(math.inf, 0.0, math.inf), 1.0)
    p = torch.tensor([-0.0] * 5)
    (after,) = stepped([StepGroup([p], [g], hparams)])
    assert same_bits(after.params[0], reference.step(p, g, hparams))


def test_complex_parameters_step_as_pairs_of_reals_whose_tables_are_kept() -> None:
    p, g = (torch.view_as_complex(special(100, torch.float32, s).reshape(50, 2)) for s in (1, 2))
    cache = StepCache()
    for sends in (4, 0):
        before = cache.of_parts.launch_tables._staging.sent
        want = reference.step(torch.view_as_real(p), torch.view_as_real(g), HPARAMS["decay"])
        update([StepGroup([p], [g], HPARAMS["decay"])], "triton", cache)
        assert same_bits(torch.view_as_real(p), want)
        assert cache.of_parts.launch_tables._staging.sent - before == sends


@pytest.mark.parametrize("settings", [{"nonfinite": "skip"}, {"dead_zone": "auto"}, {"nonfinite": "raise"}], ids=str)
def test_policies_as_by_the_c_kernel(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    from tailopt.clipping import dispatch

    results = []
    for kernels in (dispatch.FUSED["cpu"], ("triton",)):
        monkeypatch.setitem(dispatch.FUSED, "cpu", kernels)
        params = [torch.nn.Parameter(torch.ones(n)) for n in (3, 0, 2100)]
        opt = tailopt.BiClip(params, 0.1, 0.5, 0.1, fused=True, **settings)
        for k in range(3):
            for i, p in enumerate(params):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i + k))
                p.grad[:1] = 1e-9 if k else p.grad[:1]
            if k == 1 and "nonfinite" in settings:
                params[2].grad[7:9] = math.nan
            if k == 1 and settings == {"nonfinite": "raise"}:
                with pytest.raises(FloatingPointError, match="2: 2 of 2100"):
                    opt.step()
            else:
                opt.step()
        skipped = [c.skipped for c in opt.statistics().values()] if settings == {"nonfinite": "skip"} else []
        results.append((params, skipped))
    assert all(map(same_bits, results[0][0], results[1][0])) and results[0][1] == results[1][1]


@pytest.mark.parametrize("settings", [{}, {"nonfinite": "skip"}, {"scope": "tensor"}, {"weight_decay": 0.1}], ids=str)
def test_l2clip_as_by_the_c_kernel(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm to 1e-12 in fp64, so its quotients in fp32 to an ulp."""
    from tailopt.clipping import dispatch

    results = []
    for kernels in (dispatch.FUSED["cpu"], ("triton",)):
        monkeypatch.setitem(dispatch.FUSED, "cpu", kernels)
        params = [torch.nn.Parameter(torch.ones(n)) for n in (3, 0, 2100)]
        opt = tailopt.L2Clip(params, 0.1, 0.5, 0.1, fused=True, **settings)
        for k in range(3):
            for i, p in enumerate(params):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i + k))
            if k == 1 and "nonfinite" in settings:
                params[2].grad[7] = math.inf
            opt.step()
        results.append(params)
    for p, q in zip(*results, strict=True):
        torch.testing.assert_close(q, p, rtol=1e-6, atol=1e-7)


def test_the_optimizer_with_momentum_and_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many steps of BiClip through the kernel, as if it were the default here, and through the C kernel."""
    from tailopt.clipping import dispatch

    monkeypatch.setitem(dispatch.FUSED, "cpu", ("triton",))
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(n, generator=generator) for n in (3, 700, 0, 2100)]
    results = []
    for fused in (None, True):
        params = [torch.nn.Parameter(p.clone()) for p in start]
        opt = tailopt.BiClip(
            [{"params": params[:2]}, {"params": params[2:], "lr": 0.3}], 0.1, 0.5, 0.1, momentum=0.9, fused=fused
        )
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
        for k in range(6):
            for p in params:
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(k))
            opt.step()
            schedule.step()
        results.append(params)
    assert all(map(same_bits, *results))
    assert "triton" in KERNELS


RELEASED: dict[str, tuple[Any, dict[str, Any]]] = {
    "numbers": (tailopt.BiClip, {"weight_decay": 0.1}),
    "counts": (tailopt.BiClip, {"momentum": 0.9, "statistics": "counts"}),
    "stochastic rounding": (tailopt.BiClip, {"stochastic_rounding": 7}),
    "norms": (tailopt.L2Clip, {"scope": "tensor", "u": "auto", "d": "auto"}),  # these keep the norms in fp64
}


@pytest.mark.parametrize("bucket_bytes", [0, 5_000])
@pytest.mark.parametrize("name", RELEASED)
def test_gradient_release_has_the_bits_of_whole_steps(
    name: str, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tailopt.clipping import dispatch

    monkeypatch.setitem(dispatch.FUSED, "cpu", ("triton",))
    cls, settings = RELEASED[name]
    dtype = torch.bfloat16 if name == "stochastic rounding" else torch.float32

    def build(model: torch.nn.Module) -> Any:
        return cls(model.named_parameters(), **{"lr": 0.03, "u": 0.02, "d": 0.005, **settings}, fused=True)

    with pair(decoder(dtype), build) as ((a, plain), (b, released)):
        train(a, plain, 3, release=False)
        train(b, released, 3, release=True, bucket_bytes=bucket_bytes)
        if "statistics" in settings:
            for one, other in zip(plain.statistics().values(), released.statistics().values(), strict=True):
                # each is added up by the programs of its own steps, in another order
                assert one.squares == pytest.approx(other.squares, rel=1e-12)
                assert replace(one, squares=0.0) == replace(other, squares=0.0)


def test_a_released_step_that_is_given_up_leaves_no_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    from tailopt.clipping import dispatch

    monkeypatch.setitem(dispatch.FUSED, "cpu", ("triton",))
    model = torch.nn.Linear(40, 50, bias=False)
    opt = tailopt.BiClip(model.named_parameters(), 0.1, 0.5, 0.1, fused=True, statistics="counts")

    def backward(fails: bool) -> None:
        h = torch.ones(3, 40, requires_grad=True) * 1
        h.register_hook(lambda g: g * (1 // (not fails)))
        model(h).sum().backward()

    with tailopt.release_gradients(model, opt, bucket_bytes=0):
        backward(fails=False)
        opt.step()
        with pytest.raises(ZeroDivisionError):
            backward(fails=True)
        with pytest.warns(UserWarning, match="A backward pass ended with an error. 1 of 1 parameters"):
            backward(fails=False)
        opt.step()
    assert opt.statistics()["weight"].elements == 2 * 2000
