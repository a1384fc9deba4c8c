"""Thresholds that do nothing are warned of once; tuned ones, and those of sign descent, never."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tailopt import BiClip, L2Clip
from tailopt.clipping import counts

IDLE = "BiClip's thresholds do nothing for tensor"


def language(seed: int = 0) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A bigram model over 512 tokens that learns a fixed map, as a model and a function that gives the next loss."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    vocabulary = 512
    model = nn.Sequential(nn.Embedding(vocabulary, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, vocabulary))
    following = torch.randperm(vocabulary, generator=generator)

    def loss() -> Tensor:
        tokens = torch.randint(vocabulary, (256,), generator=generator)
        return nn.functional.cross_entropy(model(tokens), following[tokens])

    return model, loss


def train(opt: torch.optim.Optimizer, loss: Callable[[], Tensor], steps: int, scheduler: Any = None) -> list[float]:
    losses = []
    for _ in range(steps):
        opt.zero_grad()
        value = loss()
        value.backward()
        opt.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(value.item())
    return losses


def told(run: Callable[[], Any], about: str = IDLE) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [w for w in caught if about in str(w.message)]


def one(gradient: float, weight: float = 1.0, n: int = 2000) -> nn.Parameter:
    p = nn.Parameter(torch.full((n,), weight))
    p.grad = torch.full((n,), gradient)
    return p


# ---- what the warning is for ----


def test_large_thresholds_with_the_learning_rate_of_adamw_warn_once_in_the_first_step() -> None:
    model, loss = language()
    opt = BiClip(model.named_parameters(), lr=1e-4, u=1.0)
    losses: list[float] = []
    (warning,) = told(lambda: losses.extend(train(opt, loss, 120)))
    assert losses[0] - losses[-1] < 0.01 * losses[0], "it is true: nothing is learned"
    text = str(warning.message)
    assert "tensor '0.weight': in step 1, 100.0% of its nonzero gradient coordinates" in text
    assert "lr*d = 1e-06 is less than 0.0001 of the RMS weight 1." in text
    assert "Raise lr, or lower u and d" in text and "statistics=True" in text
    assert warning.filename == __file__, "at the line that called step()"


def test_a_tuned_run_never_warns() -> None:
    model, loss = language()
    opt = BiClip(model.named_parameters(), lr=5.0, u=1e-3, d=1e-4)
    losses: list[float] = []
    assert told(lambda: losses.extend(train(opt, loss, 2001))) == []
    assert losses[-1] < 0.2 * losses[0], "and it learns"


def test_sign_descent_never_warns() -> None:
    model, loss = language()
    opt = BiClip(model.named_parameters(), lr=1e-4, u=1e-2, d=1e-2)
    assert told(lambda: train(opt, loss, 120)) == []


@pytest.mark.parametrize(
    "warm_up",
    [
        lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda t: min(t / 50, 1.0)),
        lambda opt: torch.optim.lr_scheduler.LinearLR(opt, 1e-6, 1.0, 50),
        lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, 1.0, 200, div_factor=1e5, cycle_momentum=False),
    ],
    ids=["LambdaLR", "LinearLR", "OneCycleLR"],
)
def test_a_warm_up_is_judged_by_the_rate_that_it_leads_to(warm_up: Callable[[Any], Any]) -> None:
    p = one(1e-6)
    opt = BiClip([p], lr=1.0, u=1.0, d=1e-2)
    scheduler = warm_up(opt)
    assert opt.param_groups[0]["lr"] < 1e-4, "the first steps would be called idle"
    for _ in range(12):
        opt.step()
        scheduler.step()
    low = BiClip([one(1e-6)], lr=1e-4, u=1.0, d=1e-2)
    torch.optim.lr_scheduler.LambdaLR(low, lambda t: min(t / 50, 1.0))
    low.param_groups[0]["lr"] = 1e-5
    with pytest.warns(UserWarning, match="lr\\*d = 1e-06"):
        low.step()


@pytest.mark.parametrize("due", [1, 10, 100, 1000, 2000])
def test_the_steps_that_are_looked_at_on_the_cpu(due: int) -> None:
    p = one(1e-6)
    opt = BiClip([p], lr=1.0, d=1e-2)
    for step in range(1, 2002):
        opt.param_groups[0]["lr"] = 1e-5 if step == due else 1.0
        if step == due:
            with pytest.warns(UserWarning, match=f"in step {due}, 100.0%"):
                opt.step()
            continue
        opt.step()


def test_nothing_is_looked_at_between_these_steps() -> None:
    opt = BiClip([one(1e-6)], lr=1e-5, d=1e-2)
    for step in range(1, 1999):
        opt.param_groups[0]["lr"] = 1.0 if step in (1, 10, 100, 1000) else 1e-5
        opt.step()


def test_several_tensors_are_counted_in_one_warning() -> None:
    (warning,) = told(BiClip([one(1e-3), one(0.5), one(1e-4), one(1e-5)], lr=1e-5, d=1e-2).step)
    assert f"{IDLE} 0 and 2 more: in step 1" in str(warning.message)


# ---- the conditions, one by one ----


@pytest.mark.parametrize(
    ("gradient", "settings", "idle"),
    [
        (1e-3, {"lr": 1e-5, "d": 1e-2}, True),
        (1e-2, {"lr": 1e-5, "d": 1e-2}, True),  # at d
        (2e-2, {"lr": 1e-5, "d": 1e-2}, False),  # above it
        (1e-3, {"lr": 1e-2, "d": 1e-2}, False),  # lr*d is 1e-4 of the weights
        (1e-3, {"lr": 0.99e-2, "d": 1e-2}, True),
        (1e-3, {"lr": 1e-5, "d": 1.0}, False),  # d = u
        (1e-3, {"lr": 1e-5, "d": 0.0}, False),  # ordinary clipping
        (1e-3, {"lr": 0.0, "d": 1e-2}, False),  # switched off
        (0.0, {"lr": 1e-5, "d": 1e-2}, False),  # nothing moves
        (1e-3, {"lr": 1e-5, "d": 1e-2, "dead_zone": 1e-3}, False),  # nor here
        (float("nan"), {"lr": 1e-5, "d": 1e-2}, False),
        (1e-3, {"lr": torch.tensor(1e-5), "u": torch.tensor(1.0), "d": torch.tensor(1e-2)}, True),
        (1e-3, {"lr": 1e-5, "u": torch.ones(2000), "d": torch.full((2000,), 1e-2)}, True),
        (1e-3, {"lr": 1e-5, "u": torch.full((2000,), 1e-2), "d": torch.full((2000,), 1e-2)}, False),
        (1e-3, {"lr": 1e-5, "d": 1e-2, "foreach": True}, True),
        (1e-3, {"lr": 1e-5, "d": 1e-2, "fused": True}, True),
        (1e-3, {"lr": 1e-5, "d": 1e-2, "maximize": True, "statistics": True}, True),
    ],
)
def test_when_it_warns(gradient: float, settings: dict[str, Any], idle: bool) -> None:
    assert len(told(BiClip([one(gradient)], **{"u": 1.0, **settings}).step)) == idle


@pytest.mark.parametrize("above", [2, 3])
def test_the_share_is_999_of_a_thousand_nonzero_coordinates(above: int) -> None:
    p = one(1e-3, n=4000)
    assert p.grad is not None
    p.grad[2000:] = 0.0  # these do not count
    p.grad[:above] = 0.5
    assert len(told(BiClip([p], lr=1e-5, d=1e-2).step)) == (above == 2)


def test_weights_that_are_all_zero_or_not_finite_have_no_scale() -> None:
    for weight in (0.0, float("inf"), float("nan")):
        assert told(BiClip([one(1e-3, weight)], lr=1e-5, d=1e-2).step) == []


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp64", "complex", "sparse", "strided", "empty", "none", "frozen"])
def test_every_kind_of_gradient_is_looked_at_or_left_alone(kind: str) -> None:
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64, "complex": torch.complex64}
    p = nn.Parameter(torch.ones(60, 40, dtype=dtypes.get(kind, torch.float32)))
    p.grad = torch.full_like(p, 1e-3)
    if kind == "sparse":
        p.grad = p.grad.to_sparse()
    if kind == "strided":
        p = nn.Parameter(torch.ones(40, 60).t())
        p.grad = torch.full((60, 80), 1e-3)[:, ::2]
    if kind == "empty":
        p = nn.Parameter(torch.ones(0))
        p.grad = torch.ones(0)
    if kind == "none":
        p.grad = None
    if kind == "frozen":
        p = nn.Parameter(torch.ones(60, 40), requires_grad=False)
    assert len(told(BiClip([p], lr=1e-5, d=1e-2).step)) == (kind not in ("empty", "none", "frozen"))


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_both_ways_to_count_find_the_same(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts, "PIECE", 64)  # pieces
    g = torch.randn(size, generator=torch.Generator().manual_seed(size)) ** 3
    g[::5] = 0.0
    g[::9] = float("nan")
    moved, raised = counts.moved_and_raised(g, 0.5, 0.01)
    seen = counts.count([g], u=1.0, d=0.5, dead_zone=0.01)[0]
    assert (int(moved), int(raised)) == (seen.elements - seen.zero, seen.below)


# ---- it is no part of the optimizer's state, and changes nothing ----


def test_the_statistics_and_the_weights_keep_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for looking in (True, False):
        model, loss = language()
        opt = BiClip(model.named_parameters(), lr=1e-4, u=1.0, statistics="complete")
        if not looking:
            monkeypatch.setattr(opt._threshold_check, "due", lambda: False)
        told(lambda opt=opt, loss=loss: train(opt, loss, 12))
        found.append((opt.statistics(), [p.detach().clone() for p in model.parameters()]))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


def test_copies_and_saved_states_know_nothing_of_it() -> None:
    opt = BiClip([one(1e-3)], lr=1e-5, d=1e-2)
    assert len(told(opt.step)) == 1
    assert told(opt.step) == []
    assert set(opt.state_dict()["param_groups"][0]) == {*opt.defaults, "params"}
    assert opt.state_dict()["state"] == {}
    for twin in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        for group in twin.param_groups:
            for p in group["params"]:
                p.grad = torch.full_like(p, 1e-3)
        assert len(told(twin.step)) == 1, "another optimizer, which has not warned yet"


def test_where_warnings_are_errors_nothing_has_moved_and_the_next_step_goes_on() -> None:
    p = one(1e-3)
    opt = BiClip([p], lr=1e-5, d=1e-2)
    with pytest.raises(UserWarning, match=IDLE):
        opt.step()
    assert p.tolist() == [1.0] * 2000
    opt.step()
    assert p[0] < 1.0


def test_a_compiled_step_looks_at_nothing() -> None:
    torch._dynamo.reset()
    p = one(1e-3)
    opt = BiClip([p], lr=1e-5, d=1e-2)
    plain = BiClip.step.__wrapped__.__wrapped__  # type: ignore[attr-defined]
    step = torch.compile(lambda: plain(opt), backend="eager", fullgraph=True)
    with torch.no_grad():
        for _ in range(3):
            step()
    assert opt._threshold_check._steps == 0
    torch._dynamo.reset()


def test_settings_that_are_differentiated_are_looked_at_without_their_graph() -> None:
    numbers = {k: torch.tensor(v, requires_grad=True) for k, v in {"lr": 1e-5, "u": 1.0, "d": 1e-2}.items()}
    p = torch.ones(2000, requires_grad=True).clone()
    p.grad = torch.full((2000,), 1e-3)
    opt = BiClip([torch.ones(1)], differentiable=True, weight_decay=0.1, **numbers)
    opt.param_groups[0]["params"] = [p]
    with pytest.warns(UserWarning, match=IDLE):
        opt.step()
    p.sum().backward()
    assert numbers["d"].grad is not None


def test_a_step_that_the_scaler_leaves_out_is_not_counted() -> None:
    p = one(1e-3)
    opt = BiClip([p], lr=1e-5, d=1e-2, fused=True)
    opt.found_inf = torch.ones(())  # type: ignore[attr-defined]
    opt.step()
    assert opt._threshold_check._steps == 0


# ---- weight decay ----


@pytest.mark.parametrize("cls", [BiClip, L2Clip])
@pytest.mark.parametrize("lr", [2.0, torch.tensor(2.0)], ids=["number", "tensor"])
def test_a_decay_that_leaves_nothing_is_warned_of_once(cls: type[torch.optim.Optimizer], lr: Any) -> None:
    p = one(0.5)
    opt = cls([p], lr=lr, weight_decay=0.5)  # type: ignore[call-arg]
    with pytest.warns(UserWarning, match=r"lr\*weight_decay = 1 is 1 or more: .* by 1 - lr\*weight_decay = 0\."):
        opt.step()
    opt.step()
    opt.param_groups[0]["weight_decay"] = 0.6
    opt.step()


@pytest.mark.parametrize("cls", [BiClip, L2Clip])
def test_a_decay_below_one_is_not(cls: type[torch.optim.Optimizer]) -> None:
    opt = cls([one(0.5)], lr=2.0, weight_decay=0.49)  # type: ignore[call-arg]
    opt.step()
    opt.param_groups[0]["lr"] = 3.0
    with pytest.warns(UserWarning, match=r"lr\*weight_decay = 1\.47"):
        opt.step()


# ---- nothing was counted ----


def test_statistics_that_were_not_asked_for_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"built with statistics=False\. Build it with statistics=True"):
        BiClip([one(1.0)]).statistics()
    with pytest.raises(RuntimeError, match="L2Clip counts skipped steps alone"):
        L2Clip([one(1.0)]).statistics()
    assert BiClip([one(1.0)], nonfinite="skip").statistics()[0].skipped == 0
