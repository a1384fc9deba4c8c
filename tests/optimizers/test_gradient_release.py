"""`release_gradients`: the bits of a loop without it, with every setting that it takes; refusals; the handle."""

from __future__ import annotations

import copy
import io
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import tailopt
from tailopt import BiClip, L2Clip, release_gradients
from tests.optimizers.released import batches, decoder, loss_of, pair, same_bits, train

NUMBERS = {"lr": 0.03, "u": 0.02, "d": 0.005}
SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "numbers": (BiClip, NUMBERS),
    "decay, maximize": (BiClip, {**NUMBERS, "weight_decay": 0.1, "maximize": True}),
    "dead zone": (BiClip, {**NUMBERS, "dead_zone": 1e-3}),
    "momentum": (BiClip, {**NUMBERS, "momentum": 0.9}),
    "momentum in bf16": (BiClip, {**NUMBERS, "momentum": 0.9, "momentum_dtype": torch.bfloat16}),
    "counts": (BiClip, {**NUMBERS, "statistics": "counts"}),
    "histogram": (BiClip, {**NUMBERS, "statistics": True}),
    "complete": (BiClip, {**NUMBERS, "statistics": "complete", "momentum": 0.5}),
    "tensor lr": (BiClip, {**NUMBERS, "lr": torch.tensor(0.03)}),
    "foreach": (BiClip, {**NUMBERS, "foreach": True}),
    "single": (BiClip, {**NUMBERS, "foreach": False}),
    "fused": (BiClip, {**NUMBERS, "fused": True}),
    "stochastic rounding": (BiClip, {**NUMBERS, "stochastic_rounding": 7, "momentum": 0.9}),
    "nothing set": (BiClip, {}),
    "auto": (BiClip, {"lr": 1e-3}),
    "auto, follow, momentum": (BiClip, {"lr": 1e-3, "scale": "follow", "momentum": 0.9, "weight_decay": 0.01}),
    "auto, statistics": (BiClip, {"lr": 1e-3, "statistics": True}),
    "norms": (L2Clip, {"lr": 0.03, "u": 0.05, "d": 0.01, "scope": "tensor", "weight_decay": 0.1}),
    "norms, auto": (L2Clip, {"lr": 0.01, "u": "auto", "d": "auto", "scope": "tensor"}),
}


def build(name: str, model: nn.Module) -> Any:
    cls, settings = SETTINGS[name]
    return cls(model.named_parameters(), **settings)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("bucket_bytes", [0, 5_000, 1 << 30])
def test_the_bits_of_a_loop_without_release(name: str, bucket_bytes: int) -> None:
    """In calibration, past its end, and past the next look at the gradients: 50, 100."""
    steps = 103 if "auto" in name or "nothing" in name else 12
    with pair(decoder(), lambda model: build(name, model)) as ((a, plain), (b, released)):
        train(a, plain, steps, release=False)
        train(b, released, steps, release=True, bucket_bytes=bucket_bytes)
        if SETTINGS[name][1].get("statistics"):
            assert plain.statistics() == released.statistics()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["numbers", "momentum", "stochastic rounding", "auto", "norms"])
def test_the_bits_in_other_types(name: str, dtype: torch.dtype) -> None:
    with pair(decoder(dtype), lambda model: build(name, model)) as ((a, plain), (b, released)):
        train(a, plain, 54, release=False)
        train(b, released, 54, release=True)


@pytest.mark.parametrize("name", ["numbers", "momentum", "nothing set", "norms, auto"])
def test_a_checkpoint_in_the_middle_continues_with_the_same_bits(name: str) -> None:
    """Saved during calibration and after it; from a loop with release into one without, and the other way round."""
    for middle in (20, 60):
        for first in (False, True):
            with pair(decoder(), lambda model: build(name, model)) as ((a, plain), (b, released)):
                train(a, plain, 110, release=False)
                train(b, released, middle, release=first)
                file = io.BytesIO()
                torch.save([b.state_dict(), released.state_dict()], file)
                file.seek(0)
                weights, state = torch.load(file, weights_only=True)
                other = decoder(seed=5)
                other.load_state_dict(weights)
                again = build(name, other)
                again.load_state_dict(state)
                train(other, again, 110 - middle, release=not first, start=middle)
                b.load_state_dict(other.state_dict())
                released.load_state_dict(again.state_dict())


@pytest.mark.parametrize("name", ["numbers", "nothing set", "momentum", "norms"])
def test_micro_batches_add_up(name: str) -> None:
    with pair(decoder(), lambda model: build(name, model)) as ((a, plain), (b, released)):
        train(a, plain, 6, release=False, micro=3)
        train(b, released, 6, release=True, micro=3)


def test_groups_have_their_own_settings_and_schedulers_go_on() -> None:
    def grouped(model: nn.Module) -> Any:
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim <= 1]
        return BiClip(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "u": "auto", "d": 0.0}], **NUMBERS
        )

    with pair(decoder(), grouped) as ((a, plain), (b, released)):
        for model, optimizer, release in ((a, plain, False), (b, released, True)):
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # such as "lr_scheduler.step() before optimizer.step()"
                train(model, optimizer, 55, release, schedule=schedule)
        assert plain.param_groups[0]["lr"] == released.param_groups[0]["lr"] < 0.03


def test_step_hooks_run_once_in_every_step() -> None:
    model = decoder()
    optimizer = BiClip(model.parameters(), **NUMBERS)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(model, optimizer, 3, release=True)
    assert calls == ["before", "after"] * 3


def test_gradients_are_gone_while_backward_still_runs() -> None:
    """When the first layer's gradient is computed, those of the last layers do not exist any more."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    optimizer = BiClip(model.parameters(), **NUMBERS)
    seen = []
    model[0].weight.register_hook(lambda _: seen.append([p.grad is not None for p in model[1:].parameters()]))
    moved = model[7].weight.detach().clone()
    model[0].weight.register_hook(lambda _: seen.append(bool((model[7].weight != moved).any())))
    with release_gradients(model, optimizer, bucket_bytes=1000):
        model(torch.randn(3, 64)).sum().backward()
        optimizer.step()
    assert seen == [[False] * 14, True]


def test_thresholds_that_do_nothing_are_warned_of_as_without_release() -> None:
    def message(release: bool) -> str:
        model = decoder()
        with pytest.warns(UserWarning, match="thresholds do nothing") as caught:
            train(model, BiClip(model.named_parameters(), lr=1e-6, u=1e9, d=1.0), 2, release)
        assert caught[0].filename.endswith("released.py")
        return str(caught[0].message)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a warning that is raised is raised after the step
        model = decoder()
        optimizer = BiClip(model.named_parameters(), lr=1e-6, u=1e9, d=1.0)
        release_gradients(model, optimizer)
        loss_of(model, batches(1)[0]).backward()
        with pytest.raises(UserWarning, match="thresholds do nothing"):
            optimizer.step()
        loss_of(model, batches(1)[0]).backward()
        optimizer.step()
    both = [re.search(r"for tensor '(.*)' and (\d+) more: in step 1", message(release)) for release in (False, True)]
    first, more = zip(*(found.groups() for found in both if found), strict=True)
    assert more == ("16", "16")  # as many tensors; which is named first depends on their order
    assert set(first) <= {name for name, _ in decoder().named_parameters()}


# ---- which parameters ----


def test_parameters_without_gradient_stay_and_frozen_ones_may_train_later() -> None:
    def first_block_frozen(model: nn.Module) -> Any:
        model.blocks[0].requires_grad_(False)
        return BiClip(model.parameters(), **NUMBERS, weight_decay=0.1)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        h = model.embedding(batch[0])
        return (model.blocks[2](model.blocks[0](h)) - 1).square().mean()  # block 1 has no part in it

    with pair(decoder(), first_block_frozen) as ((a, plain), (b, released)):
        for model, optimizer, release in ((a, plain, False), (b, released, True)):
            before = [p.clone() for p in model.blocks[1].parameters()]
            train(model, optimizer, 2, release, loss=loss)
            assert all(map(torch.equal, before, model.blocks[1].parameters()))
        handle = release_gradients(b, released, bucket_bytes=0)
        for i, batch in enumerate(batches(4)):
            for model, optimizer in ((a, plain), (b, released)):
                if i == 1:
                    model.blocks[0].requires_grad_(True)
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                if optimizer is released and i > 1:  # hooked by the step after it began to train
                    assert all(p.grad is None for p in model.parameters())
                optimizer.step()
        handle.remove()


def test_parameters_of_one_side_only() -> None:
    """Those of the model that another optimizer has keep gradients; those of the optimizer alone are released."""
    with pair(decoder(), lambda m: BiClip([*m.blocks.parameters()], **NUMBERS)) as ((a, plain), (b, released)):
        temperatures = [nn.Parameter(torch.ones(())) for _ in range(2)]
        for model, optimizer, t in ((a, plain, temperatures[0]), (b, released, temperatures[1])):
            optimizer.add_param_group({"params": [t]})
            others = torch.optim.SGD([model.embedding.weight, model.scale], lr=0.1)
            handle = release_gradients(model, optimizer) if optimizer is released else None
            for batch in batches(3):
                others.zero_grad()
                optimizer.zero_grad()
                (loss_of(model, batch) * t).backward()
                assert model.embedding.weight.grad is not None
                assert handle is None or t.grad is None
                others.step()
                optimizer.step()
        same_bits(temperatures[0], temperatures[1])


def test_two_optimizers_release_the_gradients_of_one_model() -> None:
    def both(model: Any) -> tuple[Any, Any]:
        rest = [p for p in model.parameters() if not any(p is q for q in model.blocks.parameters())]
        return BiClip(model.blocks.parameters(), **NUMBERS), L2Clip(rest, lr=0.1, u=0.1, scope="tensor")

    a, b = decoder(), decoder()
    plain, released = both(a), both(b)
    handles = [release_gradients(b, optimizer) for optimizer in released]
    for batch in batches(3):
        for model, optimizers in ((a, plain), (b, released)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(model, batch).backward()
            for optimizer in optimizers:
                optimizer.step()
    assert len(handles) == 2
    same_bits(list(a.state_dict().values()), list(b.state_dict().values()))


def test_a_group_that_is_added_later_is_released_too() -> None:
    model = decoder()
    optimizer = BiClip(model.blocks.parameters(), **NUMBERS)
    with release_gradients(model, optimizer):
        optimizer.add_param_group({"params": [model.scale]})
        for batch in batches(2):
            before = model.scale.clone()
            model.scale.grad = None
            loss_of(model, batch).backward()
            optimizer.step()
            assert not torch.equal(before, model.scale)
        assert model.scale.grad is None


def test_a_parameter_that_leaves_the_optimizer_keeps_its_gradient() -> None:
    model = decoder()
    optimizer = BiClip(model.parameters(), **NUMBERS)
    with release_gradients(model, optimizer):
        gone = optimizer.param_groups[0]["params"].pop()
        for batch in batches(2):
            before = gone.detach().clone()
            loss_of(model, batch).backward()
            assert [p.grad is not None for p in model.parameters()].count(True) == 1
            optimizer.step()
            assert torch.equal(before, gone)


def test_a_group_that_is_added_between_backward_and_step() -> None:
    with pair(decoder(), lambda m: BiClip(m.blocks.parameters(), **NUMBERS)) as ((a, plain), (b, released)):
        release_gradients(b, released)
        for model, optimizer in ((a, plain), (b, released)):
            loss_of(model, batches(1)[0]).backward()
            optimizer.add_param_group({"params": [model.scale], "u": 0.1})
            optimizer.step()


# ---- the handle ----


def test_remove_restores_ordinary_steps() -> None:
    with pair(decoder(), lambda m: BiClip(m.parameters(), **NUMBERS)) as ((a, plain), (b, released)):
        train(a, plain, 4, release=False)
        train(b, released, 2, release=True)
        train(b, released, 2, release=False, start=2)
        assert b.scale.grad is not None
        assert not released._step_supports_amp_scaling
    handle = release_gradients(b, released)
    handle.remove()
    handle.remove()  # harmless


@pytest.mark.parametrize("when", ["accumulating", "before step"])
def test_remove_in_the_middle_of_a_step_loses_nothing(when: str) -> None:
    one, two = batches(2)
    with pair(decoder(), lambda m: BiClip(m.parameters(), **NUMBERS, momentum=0.9)) as ((a, plain), (b, released)):
        for batch in (one, two):
            loss_of(a, batch).backward()
        plain.step()
        with release_gradients(b, released, bucket_bytes=5_000) as handle:
            with handle.accumulate():
                loss_of(b, one).backward()
            if when == "accumulating":
                handle.remove()
            loss_of(b, two).backward()
            if when == "before step":
                handle.remove()
        released.step()
        assert released._released is None
        plain.zero_grad()
        released.zero_grad()
        train(a, plain, 1, release=False)
        train(b, released, 1, release=False)


def test_a_handle_that_nobody_keeps_still_releases() -> None:
    model = decoder()
    optimizer = BiClip(model.parameters(), **NUMBERS)
    release_gradients(model, optimizer)
    loss_of(model, batches(1)[0]).backward()
    assert model.scale.grad is None
    optimizer.step()


def test_without_its_optimizer_a_model_has_ordinary_gradients() -> None:
    import gc
    import weakref

    model = decoder()
    optimizer = BiClip(model.parameters(), **NUMBERS)
    release_gradients(model, optimizer)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    loss_of(model, batches(1)[0]).backward()
    assert model.scale.grad is not None


def test_copies_and_pickles_are_not_released() -> None:
    model = decoder()
    optimizer = BiClip(model.parameters(), **NUMBERS)
    handle = release_gradients(model, optimizer)
    file = io.BytesIO()
    torch.save((model, optimizer), file)
    file.seek(0)
    for other, its in (copy.deepcopy((model, optimizer)), torch.load(file, weights_only=False)):
        loss_of(other, batches(1)[0]).backward()
        assert other.scale.grad is not None
        assert model.scale.grad is None
        before = other.scale.clone()
        its.step()
        assert not torch.equal(before, other.scale)
    handle.remove()


def test_state_dicts_wait_for_the_end_of_the_step() -> None:
    model = decoder()
    optimizer = BiClip(model.parameters(), **NUMBERS, momentum=0.9, statistics=True)
    saved = optimizer.state_dict()
    with release_gradients(model, optimizer):
        loss_of(model, batches(1)[0]).backward()
        with pytest.raises(RuntimeError, match=r"state_dict\(\) between backward and optimizer.step\(\)"):
            optimizer.state_dict()
        with pytest.raises(RuntimeError, match=r"load_state_dict\(\) between backward"):
            optimizer.load_state_dict(saved)
        with pytest.raises(RuntimeError, match=r"state_dict\(\) between backward and optimizer.step\(\)"):
            tailopt.named_state_dict(model, optimizer)
        with pytest.raises(RuntimeError, match=r"statistics\(\) between backward and optimizer.step\(\)"):
            optimizer.statistics()
        optimizer.step()
        assert optimizer.statistics()
        assert optimizer.state_dict()["state"]


# ---- refusals ----


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), "got SGD; need a BiClip, or an L2Clip with scope='tensor'"),
        (lambda p: tailopt.Clipped(torch.optim.SGD(p, lr=0.1), u=1.0, d=0.0), "around another optimizer: release that"),
        (lambda p: L2Clip(p), "scope='global' clips a norm over several parameters"),
        (lambda p: L2Clip(p, scope="group"), "scope='group' clips a norm"),
        (lambda p: BiClip(p, nonfinite="skip"), "nonfinite='skip' decides before any parameter moves"),
        (lambda p: BiClip(p, nonfinite="raise"), "nonfinite='raise'"),
        (lambda p: BiClip(p, dead_zone="auto"), "dead_zone='auto' needs the largest of all gradients"),
        (lambda p: BiClip(p, differentiable=True), "differentiable=True keeps all gradients"),
    ],
)
def test_what_needs_all_gradients_is_refused(build: Any, message: str) -> None:
    model = decoder()
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        release_gradients(model, build(model.parameters()))
    loss_of(model, batches(1)[0]).backward()
    assert model.scale.grad is not None  # no hook was left


def test_a_setting_that_is_refused_later_stops_before_anything_moves() -> None:
    model = decoder()
    optimizer = BiClip(model.parameters(), **NUMBERS)
    before = copy.deepcopy(model.state_dict())
    with release_gradients(model, optimizer, bucket_bytes=0):
        for key, value, message in (
            ("nonfinite", "skip", "nonfinite='skip'"),
            ("lr", -1.0, "Invalid learning rate: -1.0"),
        ):
            good = optimizer.param_groups[0][key]
            optimizer.param_groups[0][key] = value
            with pytest.raises(ValueError, match=message):
                loss_of(model, batches(1)[0]).backward()
            same_bits(dict(model.state_dict()), dict(before))
            optimizer.param_groups[0][key] = good
            optimizer.zero_grad()
        loss_of(model, batches(1)[0]).backward()
        optimizer.step()


def test_invalid_arguments() -> None:
    model = decoder()
    optimizer = BiClip(model.parameters(), **NUMBERS)
    with pytest.raises(ValueError, match="none of its parameters is one of the"):
        release_gradients(decoder(), optimizer)
    with pytest.raises(ValueError, match="got generator; need the torch.nn.Module"):
        release_gradients(model.parameters(), optimizer)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Invalid bucket_bytes: -1"):
        release_gradients(model, optimizer, bucket_bytes=-1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own word about the duplicate
        twice = BiClip([model.scale, model.scale], **NUMBERS)
    with pytest.raises(ValueError, match="in the optimizer twice"):
        release_gradients(model, twice)
    lazy = nn.LazyLinear(3)
    of_lazy = BiClip(lazy.parameters(), **NUMBERS)
    for _ in range(2):  # and nothing is left behind
        with pytest.raises(ValueError, match="has no shape yet. Call the model once"):
            release_gradients(lazy, of_lazy)
    release_gradients(model, optimizer)
    with pytest.raises(ValueError, match=r"released already. Call remove\(\)"):
        release_gradients(model, optimizer)


def test_a_closure_is_refused() -> None:
    model = decoder()
    optimizer = BiClip(model.parameters(), **NUMBERS)
    with release_gradients(model, optimizer), pytest.raises(RuntimeError, match=r"step\(closure\) computes gradients"):
        optimizer.step(lambda: 0.0)


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_a_scaler_is_refused_by_the_step(fused: bool | None, unscale: bool) -> None:
    model = decoder()
    optimizer = BiClip(model.parameters(), **NUMBERS, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    handle = release_gradients(model, optimizer)
    scaler.scale(loss_of(model, batches(1)[0])).backward()
    if unscale:
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="A GradScaler decides after backward"):
        scaler.step(optimizer)
    optimizer.step()
    handle.remove()
    assert getattr(optimizer, "_step_supports_amp_scaling", False) is bool(fused)
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    with release_gradients(model, optimizer):
        disabled.scale(loss_of(model, batches(1)[0])).backward()
        disabled.step(optimizer)


@pytest.mark.parametrize("lr", [0.03, torch.tensor(0.03)], ids=["number", "tensor"])
def test_settings_that_change_between_backward_and_step_are_noticed(lr: Any) -> None:
    model = decoder()
    optimizer = BiClip(model.parameters(), **{**NUMBERS, "lr": lr})
    with release_gradients(model, optimizer, bucket_bytes=0):
        loss_of(model, batches(1)[0]).backward()
        if isinstance(lr, float):
            optimizer.param_groups[0]["lr"] = 0.01
        else:
            optimizer.param_groups[0]["lr"].fill_(0.01)
        with pytest.raises(RuntimeError, match="Settings changed between backward and optimizer.step.*lr of group 0"):
            optimizer.step()
        loss_of(model, batches(1)[0]).backward()
        optimizer.param_groups[0]["u"] = float(optimizer.param_groups[0]["u"])  # the same number
        optimizer.step()
