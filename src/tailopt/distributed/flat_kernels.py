"""What a node does with displacements, each in one pass over memory: by the C kernel, or by torch with the same bits.

    displacement        delta = p - x, with the checksum and the largest magnitude of every partition
    checksum_and_max    the checksum and the largest magnitude of what arrived
    load                p = x, with the checksum of every partition
    mean                sum of share * displacement over the total share, in node order, two roundings per node
    mean_and_sgd_step   the outer rules avg, sgd and nesterov on minus the mean, which then need not be written

The kernel takes contiguous fp32 tensors on the CPU; torch takes everything else. `alloc_huge_pages` returns large pages
for large buffers, where the system has them.

A checksum is a sum over the 32-bit words of a partition, two for each element of fp64, modulo 2^64:

    sum of word[i] * key[i mod 1024] * page_key[i div 1024]        all keys odd, those of a page all different

A word of 0 counts 0, so padding can be left out. Any change within one word and any exchange of two words of a page is
seen, whatever the keys: the difference of the words and its factor are both below 2^32 and not 0, and a page's key is
odd. Any other change (paired flips, reversed or exchanged blocks, what lies one place further) is missed with a
probability of about 2^-31.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
from array import array
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from tailopt.distributed.layout import Segment
from tailopt.native import library
from tailopt.native.calls import addresses, sizes
from tailopt.native.flat import DescentPieces, Pieces, WeightedSum
from tailopt.rules.rule import Hyperparameters, ParamState, Rule, value_for_param
from tailopt.rules.sgd import AVG, NESTEROV, SGD

PIECE = 1 << 18  # elements that torch scales at once: what stays in the cache is not written back
PAGE = 1 << 21  # bytes of a large page
PLACES = 1024  # words that have checksum keys of their own, as in flat.c


def alloc_huge_pages(count: int, dtype: torch.dtype) -> Tensor:
    """Zeros in large pages: looking up the addresses of small pages, twice over in a virtual machine, takes time.

    Examples:
        >>> alloc_huge_pages(3, torch.float32)
        tensor([0., 0., 0.])
    """
    size = count * dtype.itemsize
    if size < PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(count, dtype=dtype)
    memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the memory
    start = -whole.data_ptr() % PAGE
    return whole[start : start + size].view(dtype)


class ChecksumAndMax(NamedTuple):
    """A flat tensor's checksum as a signed number, and its largest magnitude; NaN or inf where an element is."""

    checksum: int = 0
    max_abs: float = 0.0


class Rows(NamedTuple):
    """The displacements of several nodes, their shares, and the total share by which their sum is divided."""

    tensors: Sequence[Tensor]
    shares: Sequence[float]
    total_share: float


class SegmentTable(tuple[Segment, ...]):
    """Segments with what the kernel needs to know of them, kept from round to round: small models notice the time.

    Addresses are kept with what they were computed from, and computed again where a tensor has moved.
    """

    counts: array[int]
    offsets_in_partition: array[int]  # of each segment, in the partition that it belongs to
    nodes: array[int]
    _params: tuple[list[int], array[int]]
    _flat: dict[int, array[int]]

    @classmethod
    def of(cls, segments: Iterable[Segment], cuts: Sequence[int]) -> SegmentTable:
        """Segments of a flat buffer in which node k reduces cuts[k] to cuts[k + 1]."""
        if isinstance(segments, SegmentTable):
            return segments
        table = cls(segments)
        table.counts = array("q", [s.count for s in table])
        table.offsets_in_partition = array("q", [s.start - cuts[s.node] for s in table])
        table.nodes = array("i", [s.node for s in table])
        table._params, table._flat = ([], array("Q")), {}
        return table

    def in_params(self, params: Sequence[Tensor]) -> array[int]:
        """The addresses of the segments in fp32 parameters."""
        addresses = list(map(Tensor.data_ptr, params))
        if addresses != self._params[0]:
            self._params = addresses, array("Q", [addresses[s.tensor] + 4 * s.offset for s in self])
        return self._params[1]

    def in_flat(self, flat: Tensor) -> array[int]:
        """The addresses of the segments in a flat fp32 buffer."""
        begin = flat.data_ptr()
        if begin not in self._flat:
            latest = list(self._flat.items())[-1:]  # a round has two: weights and displacements
            self._flat = {**dict(latest), begin: array("Q", [begin + 4 * s.start for s in self])}
        return self._flat[begin]


def checksum_and_max(x: Tensor) -> ChecksumAndMax:
    """One pass over a flat tensor: its checksum and its largest magnitude.

    Examples:
        >>> checksum_and_max(torch.tensor([1.0, -3.0])).max_abs
        3.0
    """
    kernel = library.loaded()
    if kernel is None or not _kernel_takes([x]):
        return ChecksumAndMax(checksum(x), _max_abs(x))
    return ChecksumAndMax(*_stats_at(kernel, x.data_ptr(), x.numel()))


def checksum(x: Tensor) -> int:
    """The checksum of a flat tensor of fp32 or fp64.

    Examples:
        >>> checksum(torch.tensor([1.0, 2.0])) != checksum(torch.tensor([2.0, 1.0]))
        True
    """
    kernel = library.loaded()
    if kernel is None or not x.is_cpu or not x.is_contiguous():
        return _checksum(x)
    return _stats_at(kernel, x.data_ptr(), x.nbytes // 4)[0]


def _stats_at(kernel: library.Library, address: int, words: int) -> tuple[int, float]:
    pieces = Pieces(array("q", [words]), array("q", [0]), array("i", [0]), 1)
    (checksum_,), (max_abs,) = kernel.flat.displacement(None, None, array("Q", [address]), pieces)
    return checksum_, max_abs


def _max_abs(x: Tensor) -> float:
    if not x.numel():
        return 0.0
    low, high = torch.aminmax(x)
    return float(torch.maximum(-low, high))


def _checksum(x: Tensor) -> int:
    """The same in torch, in pieces of whole pages."""
    total = x.new_zeros((), dtype=torch.int64)
    keys = _keys().to(x.device)
    for k, part in enumerate(x.contiguous().view(torch.int32).split(PIECE)):
        words, first = part.to(torch.int64) & 0xFFFFFFFF, PLACES + k * (PIECE // PLACES)
        pages = -(-words.numel() // PLACES)
        words = torch.nn.functional.pad(words, (0, pages * PLACES - words.numel())).view(pages, PLACES)
        page_keys = _mixed(torch.arange(first, first + pages, device=x.device)) | 1
        total += ((words * keys).sum(1) * page_keys).sum()
    return int(total)


@functools.cache
def _keys() -> Tensor:
    return _shifted(_mixed(torch.arange(PLACES)), 32) | 1


def _mixed(i: Tensor) -> Tensor:
    """The i-th numbers of SplitMix64, as flat.c has them; int64 multiplies and adds modulo 2^64."""
    z = (i + 1) * -0x61C8864680B583EB
    z = (z ^ _shifted(z, 30)) * -0x40A7B892E31B1A47
    z = (z ^ _shifted(z, 27)) * -0x6B2FB644ECCEEE15
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """z >> bits as of an unsigned number."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def displacement(
    params: Sequence[Tensor], x: Tensor, delta: Tensor, segments: Sequence[Segment], cuts: Sequence[int]
) -> list[ChecksumAndMax]:
    """delta = params - x in the flat buffer, of which node k reduces cuts[k] to cuts[k + 1]; stats of every partition.

    x is rounded to a parameter's own type first: its rounding is no movement.
    """
    nodes = len(cuts) - 1
    kernel = library.loaded()
    if kernel is None or not _kernel_takes([x, delta, *params]):
        lines = [p.reshape(-1) for p in params]
        for s in segments:
            d, begun = (flat[s.start : s.stop] for flat in (delta, x))
            p = lines[s.tensor][s.offset : s.offset + s.count]
            torch.sub(p.to(d), begun.to(p.dtype).to(d), out=d)
        return [checksum_and_max(delta[cuts[k] : cuts[k + 1]]) for k in range(nodes)]
    table = SegmentTable.of(segments, cuts)
    pieces = Pieces(table.counts, table.offsets_in_partition, table.nodes, nodes)
    where = table.in_params(params), table.in_flat(x), table.in_flat(delta)
    return list(map(ChecksumAndMax, *kernel.flat.displacement(*where, pieces)))


def load(params: Sequence[Tensor], x: Tensor, segments: Sequence[Segment], cuts: Sequence[int]) -> list[int]:
    """params = x, rounded to each parameter's own type; the checksum of every partition of x.

    x: the flat buffer, of which node k reduces cuts[k] to cuts[k + 1], with zeros between the tensors. The kernel reads
    x once; where torch copies, the checksums are a pass of their own.
    """
    nodes = len(cuts) - 1
    kernel = library.loaded()
    if kernel is None or not _kernel_takes([x, *params]):
        begins = {s.tensor: s.start - s.offset for s in segments}  # tensors without elements have no segment
        views = [x[start : start + params[i].numel()].view(params[i].shape) for i, start in begins.items()]
        if views:
            torch._foreach_copy_([params[i] for i in begins], views)
        return [checksum(x[cuts[k] : cuts[k + 1]]) for k in range(nodes)]
    table = SegmentTable.of(segments, cuts)
    pieces = Pieces(table.counts, table.offsets_in_partition, table.nodes, nodes)
    checksums = kernel.flat.load(table.in_params(params), table.in_flat(x), pieces)
    torch.autograd.graph.increment_version(params)  # the kernel writes behind autograd's back
    return list(checksums)


def mean(rows: Sequence[Tensor], shares: Sequence[float], total_share: float, negative: bool = False) -> Tensor:
    """The weighted mean of flat tensors, or its negative, in the memory of the first.

    Examples:
        >>> mean([torch.tensor([2.0]), torch.tensor([6.0])], [0.25, 0.25], 0.5)
        tensor([4.])
    """
    first = rows[0]
    kernel = library.loaded()
    if kernel is None or not _kernel_takes(rows):
        return _mean(rows, shares, total_share, negative)
    summed = WeightedSum(addresses(rows), array("f", shares), total_share)
    kernel.flat.mean(summed, negative, first.data_ptr(), first.numel())
    return first


def _mean(rows: Sequence[Tensor], shares: Sequence[float], total_share: float, negative: bool) -> Tensor:
    scaled = rows[0].new_empty(min(rows[0].numel(), PIECE))
    divisor = torch.tensor(total_share, dtype=torch.float64).to(scaled)
    for acc, *others in zip(*(row.split(PIECE) for row in rows), strict=True):
        acc.mul_(shares[0])
        for part, share in zip(others, shares[1:], strict=True):
            acc.add_(torch.mul(part, share, out=scaled[: part.numel()]))
        if total_share != 1.0:
            acc.div_(divisor)
        if negative:
            acc.neg_()
    return rows[0]


def mean_and_sgd_step(
    rule: Rule,
    x: Tensor,
    states: Sequence[ParamState],
    numbers: Hyperparameters,
    rows: Rows,
    pieces: Sequence[tuple[int, int]],
) -> bool:
    """The outer step of pieces of flat x, (start, count) in it as in every row; False where torch has to take it."""
    kernel, momentum = library.loaded(), numbers.get("momentum", 0.0)
    lr = (
        [1.0 if rule is AVG else value_for_param(numbers["lr"], i) for i in range(len(pieces))]
        if rule in _SGD_RULES
        else []
    )
    if kernel is None or not lr or any(isinstance(number, Tensor) for number in (momentum, *lr)):
        return False
    fused = _fused()
    velocities = [state["momentum_buffer"] for state in states if "momentum_buffer" in state] if momentum else []
    if (
        fused is None
        or (momentum and len(velocities) < len(pieces))
        or not _kernel_takes([x, *velocities, *rows.tensors])
    ):
        return False
    begin = x.data_ptr()
    descent = DescentPieces(
        array("q", [start for start, _ in pieces]),
        array("q", [count for _, count in pieces]),
        array("Q", [begin + 4 * start for start, _ in pieces]),
        addresses(velocities) if velocities else None,
        array("f", [-one for one in lr]),
    )
    summed = WeightedSum(addresses(rows.tensors), array("f", rows.shares), rows.total_share)
    kernel.flat.descend(summed, descent, momentum, rule is NESTEROV, fused)
    return True


@functools.cache
def _fused() -> bool | None:
    """Whether torch's addition of a multiple is a fused multiply-add here; None where it is neither one nor two steps.

    It is with AVX2 and AVX512, and is not without; tried, since a torch of another processor may do as it likes.
    """
    kernel = library.loaded()
    assert kernel is not None
    source = torch.Generator().manual_seed(0)
    g, x, v = torch.randn(3, 1003, generator=source).unbind()
    expected = x.clone(), v.clone()
    NESTEROV.step([expected[0]], [-g], [{"momentum_buffer": expected[1]}], {"lr": 0.7, "momentum": 0.9})
    one = array("f", [1.0])
    for fused in (True, False):
        got = x.clone(), v.clone()
        to, with_v, neg_lr = addresses(got[:1]), addresses(got[1:]), array("f", [-0.7])
        piece = DescentPieces(array("q", [0]), sizes([g]), to, with_v, neg_lr)
        kernel.flat.descend(WeightedSum(addresses([g]), one, 1.0), piece, 0.9, True, fused)
        if all(map(torch.equal, got, expected)):
            return fused
    return None


_SGD_RULES = (AVG, SGD, NESTEROV)


def _kernel_takes(tensors: Sequence[Tensor]) -> bool:
    """Whether the kernel takes all of them; small models notice how it is asked."""
    return (
        set(map(_DTYPE, tensors)) <= {torch.float32}
        and all(map(_ON_CPU, tensors))
        and all(map(Tensor.is_contiguous, tensors))
    )


_DTYPE, _ON_CPU = attrgetter("dtype"), attrgetter("is_cpu")
