"""The programs of the Triton kernel: what one of its thousands of small programs does with its chunk of one tensor.

A launch gets three tables. `chunks` holds a pair [tensor, number of the chunk in it] for every program; `tensors` holds
[address of p, of g, of m, elements, row] for every tensor; `rows` holds the hyperparameters in the type of the
arithmetic, in the order of `kernel.table_row`. So one launch serves tensors of many sizes and groups, and neither a
schedule nor a gradient at another address compiles anything.

Each of these choices was measured on an H200. A program takes one or two blocks without a loop. A full chunk has no
mask: one whose limit comes from memory makes every load scalar, for 1.4 times the time in fp32 and 3 times in bf16.
What is left over is walked in small blocks: as one block it needed 80 to 92 registers, which all programs pay for.
`multiple_of` stands between the cast of an address to a pointer and the first offset, or bf16 is read two bytes at a
time.

What is fused is written as `fma`. The launch sets `enable_fp_fusion=False`, so that nothing else is. A sign is changed
by a product with -1: `-x` is 0 - x to Triton, which is +0 for a zero of either sign.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Columns of `tensors`, and of `rows` (the order of `kernel.table_row`).
TAIL = tl.constexpr(512)
TENSOR_COLUMNS = tl.constexpr(5)
ROW_COLUMNS = tl.constexpr(13)

COPY, NEGATED, DECAY, LIMIT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit(do_not_specialize_on_alignment=["skips"])
def step_programs(
    tensors,
    chunks,
    rows,
    skips,
    P: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    COMPUTE: tl.constexpr,
    RESCALES: tl.constexpr,
    MOMENTUM: tl.constexpr,
    ALIGNED: tl.constexpr,
    SKIPS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """p <- fma(-lr, clip(g), p * decay) in one chunk of one tensor; with momentum also m.

    skips: a flag for every tensor that is to stay as it is, read where SKIPS.
    """
    entry = chunks + tl.program_id(0) * 2
    which = tl.load(entry)
    start = tl.load(entry + 1).to(tl.int64) * (BLOCK * BLOCKS)  # a tensor may have more than 2^31 elements
    tensor = tensors + which * TENSOR_COLUMNS
    p = tl.load(tensor).to(tl.pointer_type(P))
    g = tl.load(tensor + 1).to(tl.pointer_type(G))
    m = tl.load(tensor + 2).to(tl.pointer_type(M))
    left = tl.minimum(tl.load(tensor + 3) - start, BLOCK * BLOCKS).to(tl.int32)
    row = rows + tl.load(tensor + 4) * ROW_COLUMNS
    clip = row + 6 if RESCALES else row + 3  # scale, norm, target; or u, d, dead zone
    step = (tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(clip), tl.load(clip + 1), tl.load(clip + 2))
    if MOMENTUM:
        mean = (tl.load(row + 9), tl.load(row + 10), tl.load(row + 11), tl.load(row + 12))
    else:
        mean = step
    if ALIGNED:
        p = tl.multiple_of(p, 16)
        g = tl.multiple_of(g, 16)
        m = tl.multiple_of(m, 16)
    p += start
    g += start
    m += start
    if SKIPS:
        left = tl.where(tl.load(skips + which) != 0, 0, left)
    if left >= BLOCK * BLOCKS:
        for block in tl.static_range(BLOCKS):
            offsets = block * BLOCK + tl.arange(0, BLOCK)
            _step_block(p + offsets, g + offsets, m + offsets, None, step, mean, COMPUTE, RESCALES, MOMENTUM)
    else:
        first = 0
        while first < left:
            offsets = first + tl.arange(0, TAIL)
            inside = offsets < left
            _step_block(p + offsets, g + offsets, m + offsets, inside, step, mean, COMPUTE, RESCALES, MOMENTUM)
            first += TAIL


@triton.jit
def _step_block(p, g, m, mask, step, mean, COMPUTE: tl.constexpr, RESCALES: tl.constexpr, MOMENTUM: tl.constexpr):
    """One block of a chunk: the arithmetic of `reference.momentum` and `reference.step`.

    p, g, m: pointers to its elements; step, mean: the numbers of the tensor's row.
    """
    negative_lr, decay, sign, first, second, third = step
    old = tl.load(p, mask=mask).to(COMPUTE)
    x = tl.load(g, mask=mask).to(COMPUTE) * sign
    if MOMENTUM:
        beta, rest, limit, correction = mean
        x = tl.where(x < -limit, limit * -1.0, x)  # NaN passes
        x = tl.where(x > limit, limit, x)
        x = tl.fma(x, tl.zeros_like(x) + rest, tl.load(m, mask=mask).to(COMPUTE) * beta)
        tl.store(m, x.to(m.dtype.element_ty), mask=mask)
        x = _divided(x, correction, COMPUTE)
    if RESCALES:
        scale, norm, target = first, second, third
        c = _divided(x * scale, norm, COMPUTE) * target
        c = tl.where(c == 0, 0.0, c)  # +0 for -0: a zero moves nothing, not even -0
    else:
        u, d, dead_zone = first, second, third
        magnitude = tl.abs(x)
        c = tl.minimum(tl.maximum(magnitude, d), u)
        c = tl.where(x < 0, c * -1.0, c)
        unmoved = tl.where(x == x, 0.0, x)  # +0 for the dead zone and for zeros of both signs, NaN for NaN
        c = tl.where(magnitude > dead_zone, c, unmoved)
    new = tl.fma(c, tl.zeros_like(c) + negative_lr, old * decay)
    tl.store(p, new.to(p.dtype.element_ty), mask=mask)


@triton.jit
def _divided(x, y, COMPUTE: tl.constexpr):
    """x / y, rounded once: in fp32 a plain division may be approximate."""
    if COMPUTE.is_fp32():
        return tl.div_rn(x, tl.zeros_like(x) + y)
    else:
        return x / y


@triton.jit
def scalar_programs(sources, operands, rows, COMPUTE: tl.constexpr):
    """Fill the numbers of `rows` that only the device knows: one program for each.

    sources: [place in rows, address, whether it is fp64, what to do with the number] for each of them;
    operands: what it is multiplied or divided by, in the type of the arithmetic.
    """
    i = tl.program_id(0)
    source = sources + i * 4
    address, wide, how = tl.load(source + 1), tl.load(source + 2), tl.load(source + 3)
    if wide != 0:
        x = tl.load(address.to(tl.pointer_type(tl.float64))).to(COMPUTE)
    else:
        x = tl.load(address.to(tl.pointer_type(tl.float32))).to(COMPUTE)
    operand = tl.load(operands + i)
    if how == NEGATED:
        x = x * -1.0
    elif how == DECAY:
        x = 1 - x * operand
    elif how == LIMIT:
        x = _divided(x, operand, COMPUTE)
    tl.store(rows + tl.load(source), x)


@triton.jit
def look_programs(
    tensors,
    chunks,
    largest,
    nonfinite,
    G: tl.constexpr,
    COMPUTE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Read a chunk of a gradient: its largest finite magnitude, one number for every program, and what is not finite.

    nonfinite: a count for every tensor. Integers are added, so the order in which programs come does not matter.
    """
    entry = chunks + tl.program_id(0) * 2
    which = tl.load(entry)
    start = tl.load(entry + 1).to(tl.int64) * (BLOCK * BLOCKS)
    tensor = tensors + which * TENSOR_COLUMNS
    g = tl.load(tensor + 1).to(tl.pointer_type(G))
    left = tl.minimum(tl.load(tensor + 3) - start, BLOCK * BLOCKS).to(tl.int32)
    if ALIGNED:
        g = tl.multiple_of(g, 16)
    g += start
    top = tl.max(tl.zeros([BLOCK], COMPUTE), axis=0)
    bad = tl.sum(tl.zeros([BLOCK], tl.int32), axis=0)
    if left >= BLOCK * BLOCKS:
        for block in tl.static_range(BLOCKS):
            x = tl.load(g + block * BLOCK + tl.arange(0, BLOCK)).to(COMPUTE)
            top, bad = _seen(x, top, bad)
    else:
        first = 0
        while first < left:
            offsets = first + tl.arange(0, TAIL)
            x = tl.load(g + offsets, mask=offsets < left, other=0.0).to(COMPUTE)
            top, bad = _seen(x, top, bad)
            first += TAIL
    tl.store(largest + tl.program_id(0), top)
    if bad > 0:
        tl.atomic_add(nonfinite + which, bad.to(tl.int64))


@triton.jit
def _seen(x, top, bad):
    """The largest finite magnitude so far, and the number of elements so far that are not finite."""
    magnitude = tl.abs(x)
    finite = magnitude < float("inf")
    largest = tl.max(tl.where(finite, magnitude, 0.0), axis=0)
    return tl.maximum(top, largest), bad + tl.sum(tl.where(finite, 0, 1), axis=0)
