"""Gradient release with FSDP2, in two real processes: the bits of sharded training without it.

FSDP2 reduces a gradient over the ranks, and then calls the hooks of the sharded parameter itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tailopt import BiClip, L2Clip, release_gradients
from tests.contracts.two_ranks import Ranks

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "numbers": (BiClip, {"lr": 0.05, "u": 0.3, "d": 0.1, "momentum": 0.9}),
    "nothing set": (BiClip, {}),  # the size of a tensor is a sum over the ranks, inside backward
    "norms": (L2Clip, {"lr": 0.05, "u": 0.3, "d": 0.1, "scope": "tensor"}),  # so is a norm
    "norms, auto": (L2Clip, {"lr": 0.05, "u": "auto", "d": "auto", "scope": "tensor"}),
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.stop()


def sharded() -> Any:
    """The last layer has one row: the second rank holds no element of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1))
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model


def backward(model: Any, x: Tensor) -> None:
    model(x).square().sum().backward()


def on_both_ranks(name: str, bucket_bytes: int, how: str) -> str:
    """Trains with and without release; returns what differs, if anything does."""
    cls, settings = OPTIMIZERS[name]
    models = sharded(), sharded()
    optimizers = [cls(model.parameters(), **settings) for model in models]
    handle = release_gradients(models[1], optimizers[1], bucket_bytes=bucket_bytes)
    random = torch.Generator().manual_seed(1 + torch.distributed.get_rank())
    for _ in range(54 if "auto" in name or "nothing" in name else 3):
        batches = torch.randn(2, 4, 5, generator=random)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            if how == "no sync":
                model.set_requires_gradient_sync(False)
                backward(model, batches[0])
                model.set_requires_gradient_sync(True)
            elif how == "accumulate" and model is models[1]:
                with handle.accumulate():
                    backward(model, batches[0])
            elif how == "accumulate":
                backward(model, batches[0])
            backward(model, batches[1])
            if model is models[1] and any(p.grad is not None for p in model.parameters()):
                return "a gradient is left after backward"
            optimizer.step()
    for i, pair in enumerate(zip(*(model.parameters() for model in models), strict=True)):
        a, b = (p.to_local() for p in pair)
        if not torch.equal(a, b):
            return f"parameter {i} differs by {(a - b).abs().max()}"
    try:
        backward(models[1], batches[0])
        backward(models[1], batches[1])
    except RuntimeError as error:
        return "" if "A second backward pass" in str(error) else str(error)
    return "a second backward pass was not refused"


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bucket_bytes", [0, 1 << 20])
def test_release_with_fsdp2(ranks: Ranks, name: str, bucket_bytes: int) -> None:
    assert ranks.run(on_both_ranks, name, bucket_bytes, "one batch") == ["", ""]


@pytest.mark.parametrize("how", ["no sync", "accumulate"])
def test_micro_batches_with_fsdp2(ranks: Ranks, how: str) -> None:
    assert ranks.run(on_both_ranks, "numbers", 100, how) == ["", ""]
