"""A step with a kept cache gives the bits of the reference, whatever changed since the last step."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tailopt.clipping import reference, step_cache
from tailopt.clipping.dispatch import update
from tailopt.clipping.kernels.kernel import StepGroup
from tailopt.clipping.reference import ClipByValue, ScaleToNorm, StepHyperparameters
from tailopt.clipping.step_cache import StepCache

fused_in_torch = torch.backends.cpu.get_cpu_capability() != "DEFAULT"
DTYPES = [torch.float32, torch.bfloat16, torch.float16] + ([torch.float64] if fused_in_torch else [])
SHAPES = [(), (1,), (0,), (7,), (3, 5), (5, 3), (33,)]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def check_step(batches: list[StepGroup], cache: StepCache | None) -> None:
    expected = [[reference.step(p, g, b.hparams) for p, g in zip(b.params, b.grads, strict=True)] for b in batches]
    update(batches, cache=cache)
    for batch, after in zip(batches, expected, strict=True):
        for p, x in zip(batch.params, after, strict=True):
            assert torch.equal(p, x) and torch.equal(torch.signbit(p), torch.signbit(x))


@pytest.fixture(params=["with guards", "without guards"])
def guards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's comparison of tensors, and a torch that lacks it."""
    if request.param == "without guards":
        monkeypatch.setattr(step_cache, "_comparison", lambda tensors: None)


@pytest.mark.usefixtures("guards")
def test_strides_types_sizes_and_swapped_tensors_are_noticed() -> None:
    """The same address with other strides, another type, another size, a swapped tensor."""
    cache, hparams = StepCache(), StepHyperparameters(ClipByValue(0.5, 0.1), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(6, 4, generator=generator)

    def steps(p: Tensor, g: Tensor) -> None:
        expected = reference.step(p, g, hparams)
        update([StepGroup([p], [g], hparams)], None, cache)
        assert torch.equal(p, expected)

    for _ in range(2):
        steps(p, torch.randn(6, 4, generator=generator))
    flipped = p.view(4, 6).t()  # the same address and size
    for _ in range(2):
        steps(flipped, torch.randn(6, 4, generator=generator))
        steps(p, torch.randn(4, 6, generator=generator).t())
    steps(p.double(), torch.randn(6, 4, generator=generator).double())
    steps(torch.randn(24, generator=generator), torch.randn(24, generator=generator))
    steps(p, torch.randn(6, 4, generator=generator))


CHANGES = ["nothing", "memory", "dtype", "list", "order", "lr", "thresholds", "tensor lr", "kind", "split", "decay"]


@settings(deadline=None, max_examples=120)
@given(
    changes=st.lists(st.sampled_from(CHANGES), min_size=1, max_size=12),
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=5),
    seed=st.integers(0, 2**31),
)
def test_any_sequence_of_changes_gives_the_bits_of_the_reference(
    changes: list[str], shapes: list[tuple[int, ...]], seed: int
) -> None:
    """Memory, types, the list of tensors, lr, thresholds, the kind of clip and the batches change between steps."""
    random = torch.Generator().manual_seed(seed)
    draw = lambda: float(torch.rand((), generator=random, dtype=torch.float64))  # noqa: E731
    dtype, lr, clip, decay, parts = torch.float32, 0.1, ClipByValue(0.5, 0.1), 0.0, 1
    params = [random_tensor(shape, dtype, seed + i) for i, shape in enumerate(shapes)]
    cache, hparams = StepCache(), StepHyperparameters(clip, lr)
    for i, change in enumerate(["nothing", *changes]):
        if change == "memory":  # a model moved: other addresses, the same everything else
            params = [p.clone() for p in params]
        elif change == "dtype":
            params = [p.to(DTYPES[int(draw() * len(DTYPES))]) for p in params]
        elif change == "list":
            params = params[1:] if len(params) > 1 and draw() < 0.5 else [*params, random_tensor((4,), dtype, seed + i)]
        elif change == "order":
            params = params[::-1]
        elif change in ("lr", "thresholds", "tensor lr", "kind", "decay"):
            lr, u = draw(), draw()
            clip = ScaleToNorm(1.0, 1 + u, u) if change == "kind" else ClipByValue(u, u * draw())  # type: ignore[assignment]
            decay = draw() if change == "decay" else 0.0
            hparams = StepHyperparameters(clip, torch.tensor(lr) if change == "tensor lr" else lr, decay)
        elif change == "split":
            parts = 1 + parts % 3
        grads = [random_tensor(tuple(p.shape), p.dtype, seed + 100 * i + k) for k, p in enumerate(params)]  # new ones
        cuts = [len(params) * k // parts for k in range(parts + 1)]
        spans = list(zip(cuts, cuts[1:], strict=False))
        check_step([StepGroup(params[a:b], grads[a:b], hparams) for a, b in spans], cache)


@pytest.mark.parametrize("parts", [1, 3])
def test_a_tensor_lr_that_changes_in_place_is_read_in_every_step(parts: int) -> None:
    cache, lr = StepCache(), torch.tensor(0.1)
    params, hparams = [torch.zeros(5) for _ in range(3)], StepHyperparameters(ClipByValue(0.5, 0.1), lr)
    for value in (0.1, 0.2, 0.2, 0.0):
        lr.fill_(value)
        grads = [torch.ones(5) for _ in params]
        cut = 3 // parts
        check_step([StepGroup(params[i : i + cut], grads[i : i + cut], hparams) for i in range(0, 3, cut)], cache)


def test_the_same_numbers_in_other_steps_and_signs_of_zero() -> None:
    """A schedule makes a new `StepHyperparameters` every time; -0 is another learning rate than 0."""
    cache, p = StepCache(), torch.tensor([-0.0, 0.0, 1.0])
    for lr in (0.0, -0.0, 0.0, 0.5, 0.5, math.nextafter(0.5, 1)):
        check_step(
            [StepGroup([p], [torch.tensor([1.0, -1.0, 2.0])], StepHyperparameters(ClipByValue(0.5, 0.1), lr))], cache
        )


def test_one_cache_serves_the_gradients_of_many_nodes() -> None:
    """One model, node after node: the same parameters, other gradients, at addresses that are used again."""
    cache, params = StepCache(), [torch.zeros(50), torch.zeros(3, 3)]
    for node in range(6):
        grads = [random_tensor(tuple(p.shape), p.dtype, node) for p in params]
        check_step([StepGroup(params, grads, StepHyperparameters(ClipByValue(0.5, 0.1), 0.1))], cache)
        del grads


@pytest.mark.usefixtures("guards")
def test_a_parameter_that_appears_twice_steps_twice() -> None:
    cache, p, hparams = StepCache(), torch.zeros(50_000), StepHyperparameters(ClipByValue(0.5, 0.1), 1.0)
    for count in (1, 2, 2, 1):
        before = p.clone()
        update([StepGroup([p] * count, [torch.ones(50_000)] * count, hparams)], cache=cache)
        assert torch.equal(p, before - 0.5 * count)


@pytest.mark.usefixtures("guards")
def test_freed_memory_is_noticed_with_a_warm_cache() -> None:
    cache, hparams = StepCache(), StepHyperparameters(ClipByValue(0.5, 0.1), 1.0)
    params, grads = [torch.zeros(8), torch.zeros(9)], [torch.ones(8), torch.ones(9)]
    for _ in range(2):
        update([StepGroup(params, grads, hparams)], cache=cache)
    grads[1].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="has no memory"):
        update([StepGroup(params, grads, hparams)], cache=cache)
    params[0].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="has no memory"):
        update([StepGroup(params, [torch.ones(8), torch.ones(9)], hparams)], cache=cache)


@pytest.mark.parametrize("threshold", ["number", "tensor"])
def test_a_cache_keeps_no_tensor_alive(threshold: str) -> None:
    u: Any = 0.5 if threshold == "number" else torch.tensor(0.5)
    cache, params, grads = StepCache(), [torch.zeros(8)], [torch.ones(8)]
    for _ in range(2):
        update([StepGroup(params, grads, StepHyperparameters(ClipByValue(u, 0.1), 1.0))], cache=cache)
    watched = [weakref.ref(t) for t in (*params, *grads, *([u] if threshold == "tensor" else []))]
    del params, grads, u
    gc.collect()
    assert [ref() for ref in watched] == [None] * len(watched)
    check_step([StepGroup([torch.zeros(8)], [torch.ones(8)], StepHyperparameters(ClipByValue(0.5, 0.1), 1.0))], cache)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_of_a_cache_is_empty(copied: Any) -> None:
    cache, p = StepCache(), torch.zeros(8)
    update([StepGroup([p], [torch.ones(8)], StepHyperparameters(ClipByValue(0.5, 0.1), 1.0))], cache=cache)
    assert len(cache.param_addresses) == 1 and len(copied(cache).param_addresses) == 0


def test_a_single_step_prepares_nothing_for_a_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(tensors: list[Tensor]) -> None:
        raise AssertionError("nobody will ask again")

    monkeypatch.setattr(step_cache, "_comparison", refuse)
    check_step([StepGroup([torch.zeros(8)], [torch.ones(8)], StepHyperparameters(ClipByValue(0.5, 0.1), 1.0))], None)
