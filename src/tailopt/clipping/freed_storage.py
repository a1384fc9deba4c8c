"""Tensors whose storage was freed: a kernel that gets addresses would write into memory that is not theirs.

FSDP1 frees parameters by `untyped_storage().resize_(0)`; the tensor keeps its shape. torch's fused optimizers raise
then, and so do the kernels here. Every step looks at the addresses, and at a storage only if its address is suspicious.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tailopt.clipping.operators import is_transformed

# A freed storage is at address 0, and a view into it at the view's offset. Memory in use lies far above, except in a
# process without address randomisation: there the storages are checked, which is slower and just as safe.
SUSPICIOUS = 1 << 32


def check_not_freed(tensors: Sequence[Tensor], addresses: Sequence[int] | None = None) -> None:
    """Raise a RuntimeError for a tensor that has elements but whose storage was freed.

    addresses: those of the tensors, if they are known; then only storages at suspicious addresses are checked.
    """
    if addresses is not None and min(addresses, default=SUSPICIOUS) >= SUSPICIOUS:
        return
    for t in tensors:
        if is_freed(t):
            raise RuntimeError(
                f"A tensor of shape {tuple(t.shape)} and {t.dtype} has no memory: its storage holds "
                f"{t.untyped_storage().nbytes()} bytes. It was freed or resized (FSDP1 does so with parameters that "
                "are not in use); no parameter was moved. Step on tensors that hold their elements."
            )


def is_freed(t: Tensor) -> bool:
    """Whether a plain tensor reaches beyond its storage."""
    if type(t) not in (Tensor, torch.nn.Parameter) or t.layout != torch.strided or is_transformed(t) or not t.numel():
        return False
    last = t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return t.untyped_storage().nbytes() < (last + 1) * t.element_size()
