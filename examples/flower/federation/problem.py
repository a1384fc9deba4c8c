"""What server and clients share: the model, the algorithm and the loss. The data are the clients' own."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import tailopt


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def algorithm(config) -> tailopt.Algorithm:
    names = ("ilr", "i_u", "i_d", "olr", "o_u", "o_d")
    return tailopt.algorithm(config["algorithm"], **{name: config[name] for name in names})


def loss(net: nn.Module, batch) -> torch.Tensor:
    x, y = batch
    return nn.functional.huber_loss(net(x).squeeze(-1), y)


def samples(source: int, count: int) -> TensorDataset:
    """A regression with heavy-tailed noise; a client would read its own files here."""
    generator = torch.Generator().manual_seed(source)
    x = torch.randn(count, 8, generator=generator)
    noise = torch.randn(count, generator=generator) / torch.rand(count, generator=generator).clamp(min=1e-3).sqrt()
    return TensorDataset(x, x.sum(-1).sin() + 0.1 * noise)
