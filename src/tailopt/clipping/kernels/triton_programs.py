"""The programs of the Triton kernel: what one of its thousands of small programs does with its chunk of one tensor.

A launch gets three tables. `chunks` holds a pair [tensor, number of the chunk in it] for every program; `tensors` holds
[address of p, of g, of m, elements, row, first program, slot] for every tensor; `rows` holds the hyperparameters in the
type of the arithmetic, in the order of `kernel.table_row`. So one launch serves tensors of many sizes and groups, and
neither a schedule nor a gradient at another address compiles anything.

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
FIRST, SECOND = tl.constexpr(0x7FEB352D), tl.constexpr(0x846CA68B)  # as in stochastic_rounding
TENSOR_COLUMNS = tl.constexpr(7)
ROW_COLUMNS = tl.constexpr(13)

COPY, NEGATED, DECAY, LIMIT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit(do_not_specialize_on_alignment=["skips"])
def step_programs(
    tensors,
    chunks,
    rows,
    skips,
    keys,
    counts,
    sums,
    P: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    COMPUTE: tl.constexpr,
    RESCALES: tl.constexpr,
    MOMENTUM: tl.constexpr,
    ALIGNED: tl.constexpr,
    SKIPS: tl.constexpr,
    BLANK: tl.constexpr,
    ROUNDS: tl.constexpr,
    COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """p <- fma(-lr, clip(g), p * decay) in one chunk of one tensor; with momentum also m.

    skips: a flag for every tensor that is to stay as it is, read where SKIPS. BLANK: p holds nothing yet, and counts as
    -0. keys: of the random bits of every row, read where ROUNDS (stochastically). counts, sums: what this program has
    counted so far, added to where COUNTS, as `Counters` has it.
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
    if ROUNDS:
        key = keys + tl.load(tensor + 4) * 2
        slot = tl.load(tensor + 6).to(tl.uint32)
        seed = (_mix(tl.load(key).to(tl.uint32) ^ (slot * FIRST)), tl.load(key + 1).to(tl.uint32))
    else:
        seed = None
    if SKIPS:
        left = tl.where(tl.load(skips + which) != 0, 0, left)
    low = tl.sum(tl.zeros([TAIL], tl.int32), axis=0)  # two counts in one number
    high, squares, top = low, low.to(tl.float64), low.to(COMPUTE)
    if left >= BLOCK * BLOCKS:
        for block in tl.static_range(BLOCKS):
            at = block * BLOCK + tl.arange(0, BLOCK)
            noise = _noise(start + block * BLOCK, seed, BLOCK) if ROUNDS else None
            x = _step_block(p + at, g + at, m + at, None, noise, step, mean, COMPUTE, RESCALES, MOMENTUM, BLANK)
            if COUNTS:
                low, high, squares, top = _counted(x, None, step, low, high, squares, top)
    else:
        first = 0
        while first < left:
            at = first + tl.arange(0, TAIL)
            noise = _noise(start + first, seed, TAIL) if ROUNDS else None
            x = _step_block(p + at, g + at, m + at, at < left, noise, step, mean, COMPUTE, RESCALES, MOMENTUM, BLANK)
            if COUNTS:
                low, high, squares, top = _counted(x, at < left, step, low, high, squares, top)
            first += TAIL
    if COUNTS:  # noqa: SIM102 (Triton takes a constant and a condition apart)
        if left > 0:
            place = tl.load(tensor + 5) + tl.load(entry + 1)
            _add(counts + place * 5, left)
            _add(counts + place * 5 + 1, low & 0xFFFF)
            _add(counts + place * 5 + 2, low >> 16)
            _add(counts + place * 5 + 3, high & 0xFFFF)
            _add(counts + place * 5 + 4, high >> 16)
            _add(sums + place * 2, squares)
            tl.store(sums + place * 2 + 1, tl.maximum(tl.load(sums + place * 2 + 1), top.to(tl.float64)))


@triton.jit
def _add(address, value):
    tl.store(address, tl.load(address) + value)


@triton.jit
def _counted(x, mask, step, low, high, squares, top):
    """What was counted so far and in this block: (zero, below), (above, not finite), squares and the maximum."""
    u, d, dead_zone = step[3], step[4], step[5]
    magnitude = tl.abs(x)
    if mask is not None:
        magnitude = tl.where(mask, magnitude, 0.0)
    finite = magnitude < float("inf")
    zero = magnitude <= dead_zone
    below = (magnitude <= d) & (magnitude > dead_zone)
    above = (magnitude >= u) & (magnitude > d) & (magnitude > dead_zone)
    first = zero.to(tl.int32) + below.to(tl.int32) * 65536
    second = above.to(tl.int32) + tl.where(finite, 0, 65536)
    if mask is not None:
        first = tl.where(mask, first, 0)
        second = tl.where(mask, second, 0)
    magnitude = tl.where(finite, magnitude, 0.0)
    wide = magnitude.to(tl.float64)
    low += tl.sum(first, axis=0)
    high += tl.sum(second, axis=0)
    return low, high, squares + tl.sum(wide * wide, axis=0), tl.maximum(top, tl.max(magnitude, axis=0))


@triton.jit
def _step_block(
    p,
    g,
    m,
    mask,
    noise,
    step,
    mean,
    COMPUTE: tl.constexpr,
    RESCALES: tl.constexpr,
    MOMENTUM: tl.constexpr,
    BLANK: tl.constexpr,
):
    """One block of a chunk: the arithmetic of `reference.momentum` and `reference.step`; returns what was clipped.

    p, g, m: pointers to its elements; noise: what is added before the lower half of the bits is cut, or None;
    step, mean: the numbers of the tensor's row.
    """
    negative_lr, decay, sign, first, second, third = step
    x = tl.load(g, mask=mask).to(COMPUTE) * sign
    if BLANK:
        decayed = tl.zeros_like(x) * -1.0
    else:
        decayed = tl.load(p, mask=mask).to(COMPUTE) * decay
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
    new = tl.fma(c, tl.zeros_like(c) + negative_lr, decayed)
    narrow = new.to(p.dtype.element_ty)
    if noise is not None:
        upper = ((new.to(tl.uint32, bitcast=True) + noise) >> 16).to(tl.uint16)
        narrow = tl.where(new == new, upper.to(tl.bfloat16, bitcast=True), narrow)
    tl.store(p, narrow, mask=mask)
    return x


@triton.jit
def _noise(first, seed, SIZE: tl.constexpr):
    """16 random bits for every element of a block, as `stochastic_rounding.random_halves` has them."""
    pairs = (first >> 1) + tl.arange(0, SIZE // 2)
    h = _mix(pairs.to(tl.uint32) ^ seed[0])
    h = _mix(h + seed[1] + (pairs >> 32).to(tl.uint32) * SECOND)
    return tl.interleave(h & 0xFFFF, h >> 16)


@triton.jit
def _mix(x):
    """`stochastic_rounding._mix`."""
    x = (x ^ (x >> 16)) * FIRST
    x = (x ^ (x >> 15)) * SECOND
    return x ^ (x >> 16)


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
def sum_programs(counts, sums, tensors, slots, integers, reals, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Add what the programs of one tensor have counted to its row of `Counters`, always in the same order."""
    which = tl.program_id(0)
    tensor = tensors + which * 2  # its first program, and how many it has
    place, end = tl.load(tensor), tl.load(tensor) + tl.load(tensor + 1)
    row = tl.load(slots + which) * COLUMNS
    columns = tl.arange(0, 8)
    total = tl.zeros([8], tl.int64)
    squares = tl.zeros([WIDTH], tl.float64)
    top = tl.zeros([WIDTH], tl.float64)
    while place < end:
        at = place + tl.arange(0, WIDTH)
        cells = (at * 5)[:, None] + columns[None, :]
        inside = (at < end)[:, None] & (columns < 5)[None, :]
        total += tl.sum(tl.load(counts + cells, mask=inside, other=0), axis=0)
        squares += tl.load(sums + at * 2, mask=at < end, other=0.0)
        top = tl.maximum(top, tl.load(sums + at * 2 + 1, mask=at < end, other=0.0))
        place += WIDTH
    own = columns < 5
    tl.store(integers + row + columns, tl.load(integers + row + columns, mask=own, other=0) + total, mask=own)
    _add(reals + row + 5, tl.sum(squares, axis=0))
    tl.store(reals + row + 6, tl.maximum(tl.load(reals + row + 6), tl.max(top, axis=0)))


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


@triton.jit
def square_programs(
    tensors, chunks, sums, G: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    """The sum of squares of a chunk of a gradient in fp64, one number for every program."""
    entry = chunks + tl.program_id(0) * 2
    start = tl.load(entry + 1).to(tl.int64) * (BLOCK * BLOCKS)
    tensor = tensors + tl.load(entry) * TENSOR_COLUMNS
    g = tl.load(tensor + 1).to(tl.pointer_type(G))
    left = tl.minimum(tl.load(tensor + 3) - start, BLOCK * BLOCKS).to(tl.int32)
    if ALIGNED:
        g = tl.multiple_of(g, 16)
    g += start
    total = tl.sum(tl.zeros([TAIL], tl.float64), axis=0)
    if left >= BLOCK * BLOCKS:
        for block in tl.static_range(BLOCKS):
            x = tl.load(g + block * BLOCK + tl.arange(0, BLOCK)).to(tl.float64)
            total += tl.sum(x * x, axis=0)
    else:
        first = 0
        while first < left:
            offsets = first + tl.arange(0, TAIL)
            x = tl.load(g + offsets, mask=offsets < left, other=0.0).to(tl.float64)
            total += tl.sum(x * x, axis=0)
            first += TAIL
    tl.store(sums + tl.program_id(0), total)
