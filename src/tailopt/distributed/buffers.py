"""A model's buffers, such as the statistics of BatchNorm, of all nodes: they are small and travel whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tailopt.distributed.transport import Transport
from tailopt.rounds.mean import BufferMean


async def gather_buffers(transport: Transport, buffers: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The buffers of every node. Every node adds them up by itself."""
    by_node: list[dict[str, Tensor]] = [{} for _ in range(transport.nodes)]
    # the digest of a message is taken over real numbers
    as_real = {name: torch.view_as_real(b.resolve_conj()) if b.is_complex() else b for name, b in buffers.items()}
    for kind in dict.fromkeys(b.dtype for b in as_real.values()):  # one message per type, however many buffers
        names = [name for name, b in as_real.items() if b.dtype == kind]
        rows = await transport.gather(torch.cat([as_real[name].reshape(-1) for name in names]))
        for name, parts in zip(names, rows.split([as_real[name].numel() for name in names], dim=1), strict=True):
            for node, part in enumerate(parts):
                value = part.view(as_real[name].shape)
                by_node[node][name] = torch.view_as_complex(value) if buffers[name].is_complex() else value
    return [{name: one[name] for name in buffers} for one in by_node]


def mean_buffers(
    mean: BufferMean,
    by_node: Sequence[Mapping[str, Tensor]],
    shares: Mapping[int, float],
    total_share: float,
    like: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """The mean of the counted nodes' buffers, in the types of `like`."""
    for node, share in shares.items():
        mean.add(by_node[node], share)
    return mean.result(total_share, like)
