"""The cases of bits.py: what is run, and the digests of what it leaves. Only public names of tailopt are used."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tailopt
from tailopt import faults, schedules

NODES, RANKS, ROUNDS, STEPS, BATCH = 3, 2, 4, 3, 8
STOP = STEPS + 2  # local steps before a run is stopped: in the middle of round 2
Digests = dict[str, Any]

ALGORITHMS = {
    "avg-sgd": ("avg", "sgd"),
    "avg-l2clip": ("avg", "l2clip"),
    "avg-biclip-l2": ("avg", "biclip-l2"),
    "avg-biclip": ("avg", "biclip"),
    "avg-adagrad": ("avg", "adagrad"),
    "avg-adam": ("avg", "adam"),
    "adagrad-sgd": ("adagrad", "sgd"),
    "rmsprop-sgd": ("rmsprop", "sgd"),
    "adam-sgd": ("adam", "sgd"),
    "adam-l2clip": ("adam", "l2clip"),
    "adagrad-biclip": ("adagrad", "biclip"),
    "rmsprop-biclip": ("rmsprop", "biclip"),
    "adam-biclip": ("adam", "biclip"),
    "adam-biclip-l2": ("adam", "biclip-l2"),
    "adam2": ("adam", "adam"),
    "bi2clip": ("biclip", "biclip"),
    "bi2clip-l2": ("biclip-l2", "biclip-l2"),
    "diloco": ("nesterov", "adamw"),
}
OUTER: dict[str, dict[str, float]] = {
    "avg": {},
    "nesterov": {"olr": 0.7, "momentum": 0.8},
    "biclip": {"olr": 0.5, "o_u": 0.05, "o_d": 0.01},
    "biclip-l2": {"olr": 0.5, "o_u": 0.1, "o_d": 0.01},
    **{name: {"olr": 0.05, "oeps": 1e-3} for name in ("adagrad", "rmsprop", "adam")},
}
INNER: dict[str, dict[str, float]] = {
    "sgd": {"ilr": 0.02},
    "l2clip": {"ilr": 0.05, "i_u": 0.5},
    "biclip-l2": {"ilr": 0.05, "i_u": 0.5, "i_d": 0.05},
    "biclip": {"ilr": 0.05, "i_u": 0.2, "i_d": 0.01},
    "adagrad": {"ilr": 0.02, "ieps": 1e-3},
    "adam": {"ilr": 0.01, "ieps": 1e-3},
    "adamw": {"ilr": 0.01, "ieps": 1e-3, "weight_decay": 0.05},
}
AGGREGATES = ("median-norm", "trimmed-mean", "coordinate-median", "centred-clipping")


# ---- models, data, algorithms ----


def algorithm(name: str, **settings: Any) -> tailopt.Algorithm:
    outer, inner = ALGORITHMS[name]
    return tailopt.algorithm(name, **{**OUTER[outer], **INNER[inner], **settings})


def model(kind: str) -> nn.Module:
    """A network of one kind, with the same weights in every process."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 13), nn.Tanh(), nn.Linear(13, 4), nn.Tanh(), nn.Linear(4, 1))
    match kind:
        case "buffers":  # and dropout, which draws from torch's generator
            return nn.Sequential(
                nn.Linear(5, 13), nn.BatchNorm1d(13), nn.Dropout(0.2), nn.Tanh(), nn.Linear(13, 4), nn.Linear(4, 1)
            )
        case "large":  # one tensor of several blocks of a norm, chunks of a kernel, and partitions of the nodes
            return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 8000), nn.Tanh(), nn.Linear(8000, 1))
        case "frozen":
            plain[0].weight.requires_grad_(False)
            plain[2].bias.requires_grad_(False)
            return plain
        case "tied":
            plain = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1))
            plain[2].weight = plain[0].weight
            return plain
        case "float64":
            return plain.double()
        case "bfloat16":
            return plain.bfloat16()
        case "plain":
            return plain
    raise ValueError(f"Unknown kind of model: {kind!r}.")


def batch(generator: torch.Generator, node: int, size: int = BATCH) -> tuple[Tensor, Tensor]:
    """Inputs, and targets with heavy-tailed noise that differ between the nodes."""
    x = torch.randn(size, 5, generator=generator)
    noise = torch.randn(size, 1, generator=generator) / torch.rand(size, 1, generator=generator).clamp(min=0.02)
    return x, x.sum(1, keepdim=True) + 0.1 * noise + 0.2 * node


def batch_of_round(node: int, round: int, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return batch(generator, node)


def loss(net: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
    x, y = (value.to(next(net.parameters()).dtype) for value in pair)
    return (net(x) - y).square().mean()


def datasets(nodes: int) -> list[torch.utils.data.TensorDataset]:
    """One per node, of unequal sizes that the batch size does not divide."""
    generator = torch.Generator().manual_seed(1)
    return [torch.utils.data.TensorDataset(*batch(generator, i, 17 + 5 * i)) for i in range(nodes)]


def some_nodes(round: int, generator: torch.Generator) -> list[int]:
    """A participation function: two nodes that depend on the round."""
    return sorted({round % NODES, (round + 1) % NODES})


def lost_nodes(round: int, generator: torch.Generator) -> list[int]:
    """A drop function: one node in the rounds 2 and 3."""
    return [1] if round in (2, 3) else []


# ---- digests ----


def digest_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def tensor_digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The sha256 of names, types, shapes and bytes."""
    whole = hashlib.sha256()
    for name, tensor in tensors:
        value = tensor.detach().cpu().contiguous()
        whole.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        whole.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def weights_digest(net: nn.Module | None) -> str | None:
    if net is None:
        return None
    values = net.state_dict().items()
    return tensor_digest((name, t.full_tensor() if hasattr(t, "full_tensor") else t) for name, t in values)


def manifest_without_ids(text: str) -> Any:
    """A manifest less its seal, the run id and the chain of the history's digests, which are random in every run."""
    manifest = json.loads(text)
    manifest.pop("sha256", None)
    if isinstance(manifest.get("run"), list):
        _, config, (rows, last, _) = manifest["run"]
        manifest["run"] = [config, rows, last]
    return manifest


def checkpoint_digest(folder: Path) -> str:
    """Of the names and bytes of a checkpoint's files; of the manifest, what is not random, in its order."""
    contents = []
    for path in sorted(folder.rglob("*")):
        if path.name == "manifest.json":
            # not sorted: the order of tensors in a manifest is a part of the format
            contents.append([path.name, json.dumps(manifest_without_ids(path.read_text()))])
        elif path.is_file():
            contents.append([str(path.relative_to(folder)), hashlib.sha256(path.read_bytes()).hexdigest()])
    return digest_of(contents)


def folder_digests(run: Path) -> Digests:
    """What a run folder holds, less times, environment and what is random in every run."""
    folders = sorted(path for path in (run / "checkpoints").glob("*") if path.is_dir())
    return {
        "history": hashlib.sha256((run / "history.jsonl").read_bytes()).hexdigest(),
        "checkpoints": {path.name: checkpoint_digest(path) for path in folders},
        "config": hashlib.sha256((run / "config.toml").read_bytes()).hexdigest(),
    }


# ---- simulations ----


class Stopped(Exception):
    """Ends a simulation in the middle of a round."""


def simulated(
    run: Path,
    name: str,
    kind: str = "plain",
    settings: Mapping[str, Any] | None = None,
    stop: bool = False,
    **more: Any,
) -> Digests:
    """Simulate an algorithm; with `stop`, break it off in the middle of round 3 and resume it."""
    options: dict[str, Any] = {"rounds": ROUNDS, "progress": False, "keep": ROUNDS, **more}
    if "local_epochs" not in options:
        options.setdefault("local_steps", STEPS)
    if "data" not in options:
        options = {"batches": batch_of_round, "nodes": NODES, **options}
    calls = 0

    def broken_off(net: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > 2 * NODES * STEPS + STEPS + 1:
            raise Stopped
        return loss(net, pair)

    algo = algorithm(name, **(settings or {}))
    if stop:
        try:
            tailopt.simulate(model(kind), algo, loss=broken_off, run=run, **options)
        except Stopped:
            options["resume"] = True
    options.setdefault("loss", loss)
    result = tailopt.simulate(model(kind), algo, run=run, **options)
    folder = folder_digests(run)
    weights = [weights_digest(result.model), weights_digest(result.average)]
    return {**folder, "weights": digest_of(weights), "history": digest_of([folder["history"], result.history])}


def spoiled(net: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
    """A loss whose gradient is not a number where the targets are large, as on node 2."""
    value = loss(net, pair)
    return value * float("nan") if float(pair[1].mean()) > 90 else value


def batch_of_a_sick_node(node: int, round: int, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x, y = batch(generator, node)
    return x, y + 100.0 * (node == 2 and round in (2, 3))


def simulations() -> dict[str, Callable[[Path], Digests]]:
    cases: dict[str, Callable[[Path], Digests]] = {}
    for name in ALGORITHMS:
        cases[f"simulate/{name}"] = partial(simulated, name=name, data=datasets(NODES), batch_size=BATCH)
        cases[f"simulate-resumed/{name}"] = partial(simulated, name=name, kind="buffers", stop=True)
    options: dict[str, dict[str, Any]] = {
        "participation": {"participation": 0.6, "nodes": 5},
        "participation-function": {"participation": some_nodes},
        "proportional": {"participants": 2, "sampling": "proportional", "weights": [1.0, 2.0, 3.0]},
        "weights": {"weights": [1.0, 2.5, 0.5]},
        "weights-samples": {"data": datasets(NODES), "batch_size": BATCH, "weights": "samples"},
        "local-epochs": {"data": datasets(NODES), "batch_size": BATCH, "local_epochs": 1},
        "drops-sync": {"drops": 0.5},
        "drops-keep": {"drops": 0.5, "on_drop": "keep"},
        "drops-function-keep": {"drops": lost_nodes, "on_drop": "keep", "stop": True},
        "projection": {"projection": 1.5},
        "proximal": {"proximal": 0.5, "stop": True},
        "average": {"average": True, "stop": True},
        "statistics": {"statistics": True},
        "evaluate": {"evaluate": lambda net: {"size": float(next(net.parameters()).abs().sum())}},
        "no-guard": {"guard": False},
        "not-a-number": {"loss": spoiled, "batches": batch_of_a_sick_node},
        "schedule": {"schedules": {"ilr": schedules.power(-0.5)}},
        "schedule-per-step": {"schedules": {"ilr": schedules.cosine(20, per="step")}},
        "schedule-product": {"schedules": {"ilr": schedules.warmup(2) * schedules.power(-0.25)}},
        "bf16-autocast": {"precision": "bf16"},
        "seed": {"seed": 7, "kind": "buffers"},
        **{f"{kind}-model": {"kind": kind} for kind in ("large", "frozen", "tied", "float64", "bfloat16", "buffers")},
        **{aggregate: {"aggregate": aggregate, "nodes": 5} for aggregate in AGGREGATES},
    }
    for name in ("bi2clip", "adam2", "diloco", "bi2clip-l2"):
        for option, more in options.items():
            cases[f"simulate-option/{name}/{option}"] = partial(simulated, name=name, **more)
    by_pattern = {"i_u": {"0.*": 0.1, "*": torch.tensor(0.3)}, "o_u": {"*.bias": 0.02, "*": 0.05}}
    cases["simulate-option/bi2clip/thresholds-by-pattern"] = partial(simulated, name="bi2clip", settings=by_pattern)
    for scope in ("tensor", "global"):
        scoped = partial(simulated, name="bi2clip-l2", settings={"scope": scope})
        cases[f"simulate-option/bi2clip-l2/scope-{scope}"] = scoped
    return cases


# ---- real nodes ----


def trained(
    run: Path,
    build: Callable[..., tailopt.NestedOptimizer],
    kind: str = "plain",
    stop: bool = False,
    sharded: bool = False,
    fault: tuple[int, faults.Fault] | None = None,
    synchronize: bool = False,
    **more: Any,
) -> Digests:
    """Train on this process; with `stop`, write a checkpoint in the middle of a round and resume from it."""
    rank = dist.get_rank()
    options: dict[str, Any] = {"rounds": ROUNDS, "local_steps": STEPS, "keep": 2 * ROUNDS, "timeout": 120.0, **more}
    mesh: Any = None
    if sharded:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (dist.get_world_size() // RANKS, RANKS), mesh_dim_names=("node", "shard"))
        options["mesh"] = mesh["node"]

    def attempt(stop_after: int | None) -> tuple[nn.Module, list[Any]]:
        net = model(kind)
        if mesh is not None:
            from torch.distributed.fsdp import fully_shard

            net = fully_shard(net, mesh=mesh["shard"])
        torch.manual_seed(100 + rank)
        place = {"steps": 0}
        opt = build(net, run=run, resume=stop and stop_after is None, extra=lambda: dict(place), **options)
        if fault is not None and fault[0] == rank:
            faults.inject(opt, fault[1])
        if opt.resumed is not None:
            place["steps"] = opt.resumed.extra["steps"]
        while not opt.finished:
            pair = batch(torch.Generator().manual_seed(1000 * rank + place["steps"]), rank)
            opt.zero_grad()
            value = loss(net, pair)
            opt.report(float(value.detach()))
            value.backward()
            place["steps"] += 1
            opt.step()
            if place["steps"] == stop_after:
                assert opt.checkpoint(), "The checkpoint was not written."
                break
            if synchronize and place["steps"] == STOP:
                opt.synchronize()
        return net, opt.history

    if stop:
        attempt(STOP)
        gc.collect()  # an optimizer that is still reachable holds the lock of its folder
        dist.barrier()
    net, history = attempt(None)
    dist.barrier()
    digests = folder_digests(run) if rank == 0 else {}
    return {
        **digests,
        "weights": weights_digest(net),
        "history": digest_of([digests.get("history"), history]),
    }


def from_algorithm(net: nn.Module, name: str, settings: Mapping[str, Any], **options: Any) -> tailopt.NestedOptimizer:
    return tailopt.NestedOptimizer.from_algorithm(net, algorithm(name, **settings), **options)


def around(
    net: nn.Module, inner: str, outer: Any, settings: dict[str, float], **options: Any
) -> tailopt.NestedOptimizer:
    """A NestedOptimizer around an inner optimizer that a user brings."""
    kinds: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "AdamW": lambda: torch.optim.AdamW(net.parameters(), lr=0.01),
        "SGD": lambda: torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9),
        "BiClip": lambda: tailopt.BiClip(net.parameters(), lr=0.05, u=0.2, d=0.01),
        "L2Clip": lambda: tailopt.L2Clip(net.parameters(), lr=0.05, u=0.5),
    }
    return tailopt.NestedOptimizer(kinds[inner](), outer, settings, model=net, **options)


def real_nodes() -> dict[str, Callable[[Path], Digests]]:
    cases: dict[str, Callable[[Path], Digests]] = {}
    for name in ALGORITHMS:
        build = partial(from_algorithm, name=name, settings={})
        cases[f"nodes/{name}"] = partial(trained, build=build)
        cases[f"nodes-resumed/{name}"] = partial(trained, build=build, kind="buffers", stop=True)
    options: dict[str, dict[str, Any]] = {
        "participation": {"participation": 0.6},
        "participation-function": {"participation": some_nodes},
        "proportional": {"participants": 2, "sampling": "proportional"},
        "drop-sync": {"fault": (1, faults.Drop(rounds={2, 3}))},
        "drop-keep": {"fault": (1, faults.Drop(rounds={2, 3})), "on_drop": "keep"},
        "not-a-number": {"fault": (2, faults.NotANumber(rounds={2}))},
        "damaged": {"fault": (1, faults.BitFlip(rounds={2}))},
        "stale": {"fault": (0, faults.Stale(rounds={3}))},
        "projection": {"projection": 1.5},
        "proximal": {"proximal": 0.5, "stop": True},
        "average": {"average": True, "stop": True},
        "no-guard": {"guard": False},
        "synchronize": {"synchronize": True},
        "checkpoint-every-2": {"checkpoint_every": 2, "seed": 7},
        **{f"{kind}-model": {"kind": kind} for kind in ("large", "frozen", "tied", "float64", "bfloat16")},
        **{aggregate: {"aggregate": aggregate} for aggregate in AGGREGATES},
    }
    for name in ("bi2clip", "diloco", "bi2clip-l2"):
        build = partial(from_algorithm, name=name, settings={})
        for option, more in options.items():
            cases[f"nodes-option/{name}/{option}"] = partial(trained, build=build, **more)
        for kind, schedule in (("round", schedules.power(-0.5)), ("step", schedules.cosine(20, per="step"))):
            scheduled = partial(build, schedules={"ilr": schedule})
            cases[f"nodes-option/{name}/schedule-per-{kind}"] = partial(trained, build=scheduled, stop=True)
    for outer in ("nesterov", "adam", "biclip", "biclip-l2"):
        for inner in ("AdamW", "SGD", "BiClip", "L2Clip"):
            build = partial(around, inner=inner, outer=outer, settings=OUTER[outer])
            cases[f"nodes-own/{inner}/{outer}"] = partial(trained, build=build, stop=True)
            if outer == "nesterov":
                cases[f"nodes-own/{inner}/reset"] = partial(trained, build=build, inner_state="reset")
    build = partial(around, inner="AdamW", outer=torch.optim.Adam, settings={"lr": 0.02})
    cases["nodes-own/AdamW/torch.optim.Adam"] = partial(trained, build=build, kind="buffers", stop=True)
    return cases


def sharded_nodes() -> dict[str, Callable[[Path], Digests]]:
    cases: dict[str, Callable[[Path], Digests]] = {}
    for name in ALGORITHMS:
        build = partial(from_algorithm, name=name, settings={})
        cases[f"fsdp2/{name}"] = partial(trained, build=build, sharded=True)
        cases[f"fsdp2-resumed/{name}"] = partial(trained, build=build, sharded=True, stop=True)
    for inner in ("AdamW", "BiClip", "L2Clip"):
        build = partial(around, inner=inner, outer="adam", settings=OUTER["adam"])
        cases[f"fsdp2-own/{inner}/adam"] = partial(trained, build=build, sharded=True, projection=1.5, average=True)
    return cases


SECTIONS: tuple[tuple[int, Callable[[], dict[str, Callable[[Path], Digests]]]], ...] = (
    (1, simulations),
    (NODES, real_nodes),
    (2 * RANKS, sharded_nodes),
)
