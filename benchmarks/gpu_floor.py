"""The floor of a step on a GPU: flat Triton passes that move as many bytes, over one buffer and in full blocks.

The fastest of several shapes is the floor. Nothing is clipped, no table is read, and there is no mask.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCKS = (512, 1024, 2048, 4096)
WARPS = 4


@triton.jit
def axpy(p, g, BLOCK: tl.constexpr):
    """p <- p - 0.001 g: two reads, one write."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    new = tl.load(p + i).to(tl.float32) - tl.load(g + i).to(tl.float32) * 1e-3
    tl.store(p + i, new.to(p.dtype.element_ty))


@triton.jit
def axpy_with_mean(p, g, m, BLOCK: tl.constexpr):
    """m <- 0.9 m + 0.1 g, p <- p - 0.001 m: three reads, two writes."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mean = tl.load(m + i).to(tl.float32) * 0.9 + tl.load(g + i).to(tl.float32) * 0.1
    tl.store(m + i, mean.to(m.dtype.element_ty))
    tl.store(p + i, (tl.load(p + i).to(tl.float32) - mean * 1e-3).to(p.dtype.element_ty))


def floors(
    elements: int, dtype: torch.dtype, grad_dtype: torch.dtype | None = None, momentum: bool = False
) -> dict[str, Callable[[], object]]:
    """Name -> one pass over so many elements; each has the word "floor" in its name."""
    p, g = (torch.zeros(elements, dtype=t, device="cuda") for t in (dtype, grad_dtype or dtype))
    m = torch.zeros(elements, dtype=torch.float32, device="cuda") if momentum else None

    def triton_pass(block: int) -> Callable[[], object]:
        grid = (elements // block,)  # what is left over is less than one part in 10,000
        if m is not None:
            return lambda: axpy_with_mean[grid](p, g, m, BLOCK=block, num_warps=WARPS)
        return lambda: axpy[grid](p, g, BLOCK=block, num_warps=WARPS)

    def torch_pass() -> Tensor:
        return p.add_(g, alpha=-1e-3)

    passes: dict[str, Callable[[], object]] = {
        f"floor, Triton, {block} elements": triton_pass(block) for block in BLOCKS
    }
    return passes if momentum or g.dtype != dtype else {"floor, torch add_": torch_pass, **passes}
