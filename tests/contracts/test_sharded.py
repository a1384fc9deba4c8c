"""Sharded parameters step like whole ones: FSDP2, tensor-parallel placements and ZeRO, in two real processes.

Each ``on_*`` function runs on both ranks at the same time and returns plain numbers; the tests compare them.
"""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from tailopt import BiClip, L2Clip
from tests.contracts.optimizer_table import BITES, IMPLEMENTATIONS, every_implementation, ulps
from tests.contracts.two_ranks import Ranks

PLACEMENTS: dict[str, Placement] = {"rows": Shard(0), "columns": Shard(1), "replicated": Replicate()}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.stop()


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def network(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "uneven":  # one row: the second rank holds no element of the last layer
        model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))
    else:
        model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))
    return model


def whole(p: Tensor) -> Tensor:
    return (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()


# --- FSDP2 --------------------------------------------------------------------------------------------------------


def on_fsdp(name: str, kind: str, kwargs: dict[str, Any], by_layer: bool) -> dict[str, Any]:
    """Three steps of a sharded model and of a whole one, on the same batch on every rank."""
    cls = {"BiClip": BiClip, "L2Clip": L2Clip}[name]
    plain, sharded = network(kind), network(kind)
    for layer in (sharded[0], sharded[2]):
        fully_shard(layer, mesh=mesh())
    fully_shard(sharded, mesh=mesh())
    local = [p.to_local().numel() for p in sharded.parameters()]  # type: ignore[attr-defined]

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        if by_layer:
            return [
                {"params": model[0].parameters()},
                {"params": model[2].parameters(), "u": kwargs["u"] / 2, "d": 0.0},
            ]
        return [{"params": model.parameters()}]

    a, b = cls(groups(plain), **{**kwargs, **IMPLEMENTATIONS["single"]}), cls(groups(sharded), **kwargs)
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
    start = [p.detach().clone() for p in plain.parameters()]
    for _ in range(3):
        for model, opt in ((plain, a), (sharded, b)):
            opt.zero_grad()
            model(x).pow(2).sum().backward()
            opt.step()
    pairs = [(p.detach(), whole(q)) for p, q in zip(plain.parameters(), sharded.parameters(), strict=True)]
    return {
        "ulps": max(ulps(p, q) for p, q in pairs),
        "relative": max(float((p - q).norm() / (p - s).norm()) for (p, q), s in zip(pairs, start, strict=True)),
        "moved": all(not torch.equal(s, q) for s, (_, q) in zip(start, pairs, strict=True)),
        "local": local,
        "sharded": all(isinstance(p, DTensor) and isinstance(p.grad, DTensor) for p in sharded.parameters()),
    }


@every_implementation
@pytest.mark.parametrize("kind", ["even", "uneven"])
def test_fsdp2_biclip_is_exactly_the_unsharded_step(ranks, impl, kind):
    kwargs = {**BITES[BiClip], "lr": 0.01, "weight_decay": 0.1, **IMPLEMENTATIONS[impl]}
    for rank, result in enumerate(ranks.run(on_fsdp, "BiClip", kind, kwargs, True)):
        assert result["sharded"]
        assert result["moved"]
        assert result["ulps"] == 0
        if kind == "uneven" and rank == 1:
            assert 0 in result["local"], "this rank holds an empty shard"


@every_implementation
@pytest.mark.parametrize("kind", ["even", "uneven"])
@pytest.mark.parametrize("scope", ["global", "group", "tensor"])
def test_fsdp2_l2clip_sees_the_norm_over_all_shards(ranks, impl, kind, scope):
    kwargs = {"lr": 0.25, "u": 0.5, "d": 0.1, "scope": scope, **IMPLEMENTATIONS[impl]}
    for result in ranks.run(on_fsdp, "L2Clip", kind, kwargs, True):
        assert result["sharded"]
        assert result["moved"]
        # 1e-6 of a step, and the roundings of the parameters themselves: three steps of an ulp beside steps of 0.1
        assert result["relative"] < 3e-6


# --- Norms, exactly -----------------------------------------------------------------------------------------------


def on_norm(placement: str, scope: str, impl: str) -> list[float]:
    """One step from zero, so that the parameters are the clipped gradients: the factor u/n as each rank sees it."""
    m, where = mesh(), PLACEMENTS[placement]
    gen = torch.Generator().manual_seed(0)
    grads = [torch.randn(s, generator=gen) * k for s, k in (((6, 4), 1.0), ((3, 2), 100.0), ((1, 6), 10.0))]
    params = []
    for g in grads:
        p = distribute_tensor(torch.zeros(g.shape), m, [where]).requires_grad_()
        p.grad = distribute_tensor(g, m, [where])
        params.append(p)
    groups = [{"params": params[:2]}, {"params": params[2:], "u": 0.25}]
    L2Clip(groups, lr=1.0, u=0.5, scope=scope, **IMPLEMENTATIONS[impl]).step()
    out = []
    for p, g in zip(params, grads, strict=True):
        ratio = (-whole(p) / g).double()
        assert (ratio.max() - ratio.min()) / ratio.mean() < 1e-6, "one factor for a tensor, on every rank"
        out.append(ratio.mean().item())
    return out


@pytest.mark.parametrize("impl", ["default", "foreach"])
@pytest.mark.parametrize("scope", ["global", "group", "tensor"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_norm_is_that_of_the_whole(ranks, placement, scope, impl):
    gen = torch.Generator().manual_seed(0)
    grads = [torch.randn(s, generator=gen) * k for s, k in (((6, 4), 1.0), ((3, 2), 100.0), ((1, 6), 10.0))]
    n = [g.double().norm().item() for g in grads]
    norms = {
        "tensor": n,
        "group": [(n[0] ** 2 + n[1] ** 2) ** 0.5] * 2 + [n[2]],
        "global": [(n[0] ** 2 + n[1] ** 2 + n[2] ** 2) ** 0.5] * 3,
    }[scope]
    expected = [u / k for u, k in zip((0.5, 0.5, 0.25), norms, strict=True)]
    first, second = ranks.run(on_norm, placement, scope, impl)
    assert first == pytest.approx(expected, rel=1e-6)
    assert second == first


def on_missing_gradients() -> list[float]:
    """The first rank has gradients, the second none at all: it must still take part in the sum, or the first waits."""
    m = mesh()
    p = distribute_tensor(torch.zeros(4, 2), m, [Shard(0)]).requires_grad_()
    empty = distribute_tensor(torch.zeros(1, 3), m, [Shard(0)]).requires_grad_()
    opt = L2Clip([{"params": [p]}, {"params": [empty]}], lr=1.0, u=0.5)
    opt.step()  # no gradients anywhere
    p.grad = distribute_tensor(torch.ones(4, 2), m, [Shard(0)])
    empty.grad = distribute_tensor(torch.ones(1, 3), m, [Shard(0)])
    opt.step()
    return [whole(p)[0, 0].item(), whole(empty)[0, 0].item()]


def test_a_rank_without_elements_takes_part(ranks):
    for result in ranks.run(on_missing_gradients):
        assert result == pytest.approx([-0.5 / 11**0.5] * 2, rel=1e-6)


# --- Placements of gradients that differ from the parameter's ------------------------------------------------------


def on_placements(name: str, of_p: str, of_g: str, impl: str) -> tuple[int, bool]:
    cls = {"BiClip": BiClip, "L2Clip": L2Clip}[name]
    m, rank = mesh(), dist.get_rank()
    gen = torch.Generator().manual_seed(0)
    start = torch.rand(6, 4, generator=gen) + 2
    addends = [torch.randn(6, 4, generator=gen) for _ in range(dist.get_world_size())]
    total = sum(addends[1:], addends[0])
    p = distribute_tensor(start.clone(), m, [PLACEMENTS[of_p]]).requires_grad_()
    if of_g == "partial":
        p.grad = DTensor.from_local(addends[rank], m, [Partial()])
    else:
        p.grad = distribute_tensor(total, m, [PLACEMENTS[of_g]])
    version, before = p.grad._version, p.grad.to_local().clone()
    plain = start.clone().requires_grad_()
    plain.grad = total
    cls([p], **BITES[cls], **IMPLEMENTATIONS[impl]).step()
    cls([plain], **BITES[cls], **IMPLEMENTATIONS["single"]).step()
    untouched = p.grad._version == version and torch.equal(p.grad.to_local(), before)
    return ulps(whole(p), plain), untouched


@pytest.mark.parametrize("name", ["BiClip", "L2Clip"])
@pytest.mark.parametrize("impl", ["default", "foreach", "fused"])
@pytest.mark.parametrize(
    ("of_p", "of_g"),
    [
        ("replicated", "partial"),
        ("rows", "partial"),
        ("columns", "rows"),
        ("rows", "replicated"),
        ("replicated", "rows"),
    ],
)
def test_gradients_with_another_placement_are_summed_and_moved(ranks, name, impl, of_p, of_g):
    """The local part of a partial gradient is only this rank's addend."""
    for distance, untouched in ranks.run(on_placements, name, of_p, of_g, impl):
        assert distance <= (4 if name == "L2Clip" else 0)
        assert untouched


# --- What is decided over the whole -------------------------------------------------------------------------------


def on_dead_zone(impl: str) -> list[list[float]]:
    """The largest element lies with the first rank, dust with the second, and dust in a second group."""
    m = mesh()
    big = torch.tensor([[1000.0, 1.0], [1e-5, 1e-2]])  # 4 eps of 1000 is 4.8e-4
    other = torch.tensor([[1e-5], [1e-3]])
    params = [distribute_tensor(torch.zeros_like(g), m, [Shard(0)]).requires_grad_() for g in (big, other)]
    for p, g in zip(params, (big, other), strict=True):
        p.grad = distribute_tensor(g, m, [Shard(0)])
    opt = BiClip([{"params": [p]} for p in params], lr=1.0, u=1.0, d=0.25, dead_zone="auto", **IMPLEMENTATIONS[impl])
    opt.step()
    return [whole(p).flatten().tolist() for p in params]


@every_implementation
def test_the_automatic_dead_zone_is_reduced_over_shards(ranks, impl):
    for result in ranks.run(on_dead_zone, impl):
        assert result == [[-1.0, -1.0, 0.0, -0.25], [0.0, -0.25]]


def on_nonfinite(name: str, policy: str) -> tuple[list[bool], str]:
    """A NaN in the first rank's shard of the second tensor."""
    cls = {"BiClip": BiClip, "L2Clip": L2Clip}[name]
    m = mesh()
    grads = [torch.ones(4, 2), torch.ones(4, 2)]
    grads[1][0, 0] = float("nan")
    params = []
    for g in grads:
        p = distribute_tensor(torch.zeros(4, 2), m, [Shard(0)]).requires_grad_()
        p.grad = distribute_tensor(g, m, [Shard(0)])
        params.append(p)
    said = ""
    try:
        cls(params, lr=1.0, u=0.5, nonfinite=policy, **({"scope": "tensor"} if cls is L2Clip else {})).step()
    except Exception as error:
        said = type(error).__name__
    return [bool(p.to_local().any()) for p in params], said  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["BiClip", "L2Clip"])
def test_a_nonfinite_shard_skips_the_tensor_on_every_rank(ranks, name):
    assert ranks.run(on_nonfinite, name, "skip") == [([True, False], "")] * 2


@pytest.mark.parametrize("name", ["BiClip", "L2Clip"])
def test_a_nonfinite_shard_raises_on_every_rank_before_anything_moved(ranks, name):
    (first, said), (second, also) = ranks.run(on_nonfinite, name, "raise")
    assert first == second == [False, False]
    assert said
    assert also == said


def on_scaler(name: str, impl: str, unscale: bool, overflow: bool) -> dict[str, Any]:
    """A scaled step of a sharded model; where asked, one element of the first rank's gradients is infinite."""
    cls = {"BiClip": BiClip, "L2Clip": L2Clip}[name]
    plain, sharded = network("uneven"), network("uneven")
    fully_shard(sharded, mesh=mesh())
    kwargs = {**BITES[cls], "lr": 0.01}
    a, b = cls(plain.parameters(), **kwargs), cls(sharded.parameters(), **kwargs, **IMPLEMENTATIONS[impl])
    start = [whole(p) for p in sharded.parameters()]
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
    plain(x).pow(2).sum().backward()
    a.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(sharded(x).pow(2).sum()).backward()
    if overflow and dist.get_rank() == 0:
        sharded[0].weight.grad.to_local()[0, 0] = float("inf")
    if unscale:
        scaler.unscale_(b)
    scaler.step(b)
    scaler.update()
    end = [whole(p) for p in sharded.parameters()]
    return {
        "ulps": max(ulps(p.detach(), q) for p, q in zip(plain.parameters(), end, strict=True)),
        "still": [torch.equal(p, q) for p, q in zip(start, end, strict=True)],
        "scale": scaler.get_scale(),
    }


@pytest.mark.parametrize("name", ["BiClip", "L2Clip"])
@pytest.mark.parametrize("impl", ["default", "fused"])
@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_ first"])
def test_a_scaler_over_shards(ranks, name, impl, unscale):
    for result in ranks.run(on_scaler, name, impl, unscale, False):
        assert result["ulps"] <= (8 if name == "L2Clip" else 0)
        assert not any(result["still"])
        assert result["scale"] == 1024.0
    for result in ranks.run(on_scaler, name, impl, unscale, True):
        assert all(result["still"]), "an overflow on one rank stops them all"
        assert result["scale"] == 512.0


# --- ZeRO ---------------------------------------------------------------------------------------------------------


def on_zero() -> dict[str, Any]:
    plain, model = network("even"), network("even")
    kwargs = {**BITES[BiClip], "lr": 0.01, "weight_decay": 0.1}
    a, b = (
        BiClip(plain.parameters(), **kwargs),
        ZeroRedundancyOptimizer(model.parameters(), optimizer_class=BiClip, **kwargs),
    )
    start = copy.deepcopy(plain)
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (a, b)]
    for _ in range(3):
        for net, opt in ((plain, a), (model, b)):
            opt.zero_grad()
            net(x).pow(2).sum().backward()
            opt.step()
        for s in schedules:
            s.step()
    b.consolidate_state_dict(to=0)
    saved = b.state_dict() if dist.get_rank() == 0 else None
    if saved is not None:
        BiClip(plain.parameters()).load_state_dict(saved)
    return {
        "equal": all(torch.equal(p, q) for p, q in zip(plain.parameters(), model.parameters(), strict=True)),
        "moved": all(not torch.equal(p, q) for p, q in zip(start.parameters(), model.parameters(), strict=True)),
        "u": saved["param_groups"][0]["u"] if saved is not None else None,
        "lr": b.param_groups[0]["lr"],
    }


def test_zero_redundancy_optimizer_takes_biclip(ranks):
    first, second = ranks.run(on_zero)
    assert first["equal"]
    assert second["equal"]
    assert first["moved"]
    assert second["moved"]
    assert first["u"] == BITES[BiClip]["u"]
    assert first["lr"] == second["lr"] == 0.01 * 0.5**3
