"""Models and loops that tests of gradient release share: the same loop with and without it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tailopt import release_gradients

VOCABULARY, WIDTH = 37, 24


class Decoder(nn.Module):
    """An embedding, whose weight is also the last layer's, and blocks of matrices, vectors and a scalar."""

    def __init__(self, blocks: int = 3, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(blocks)
        )
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = h + self.scale * block(h)
        return self.head(h)


def decoder(dtype: torch.dtype = torch.float32, tied: bool = True, seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(tied=tied).to(dtype)


def batches(n: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(VOCABULARY, (4, 6), generator=generator) for _ in range(2)) for _ in range(n)]  # type: ignore[misc]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())


Build = Callable[[nn.Module], torch.optim.Optimizer]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    release: bool,
    *,
    micro: int = 1,
    bucket_bytes: int = 5_000,
    loss: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor] = loss_of,
    schedule: Any = None,
    start: int = 0,
) -> None:
    """A plain loop; with release, gradients are looked for after every backward pass."""
    handle = release_gradients(model, optimizer, bucket_bytes=bucket_bytes) if release else None
    data = batches((start + steps) * micro)[start * micro :]
    for i in range(steps):
        optimizer.zero_grad()
        for k in range(micro):
            last = k == micro - 1
            with handle.accumulate() if handle and not last else contextlib.nullcontext():
                (loss(model, data[i * micro + k]) / micro).backward()
        if handle:
            assert all(p.grad is None for group in optimizer.param_groups for p in group["params"])
        optimizer.step()
        if schedule is not None:
            schedule.step()
    if handle:
        handle.remove()


def same_bits(a: Any, b: Any, where: str = "") -> None:
    """Equal to the bit, tensors and what is around them; a difference is named."""
    assert type(a) is type(b), where
    if isinstance(a, Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape, where
        assert torch.equal(a.detach().flatten().view(torch.uint8), b.detach().flatten().view(torch.uint8)), where
    elif isinstance(a, dict):
        assert set(a) == set(b), where  # a state has entries in the order of the first updates
        for key in a:
            same_bits(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same_bits(x, y, f"{where}[{i}]")
    else:
        assert a == b, where


@contextlib.contextmanager
def pair(model: nn.Module, build: Build) -> Iterator[tuple[tuple[nn.Module, Any], tuple[nn.Module, Any]]]:
    """Two copies of a model with optimizers of their own: after the block they are equal in every bit."""
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    a, b = (first, build(first)), (second, build(second))
    yield a, b
    same_bits(list(first.state_dict().values()), list(second.state_dict().values()), "weights")
    same_bits(a[1].state_dict(), b[1].state_dict(), "optimizer")
