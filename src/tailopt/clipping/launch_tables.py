"""The tables that a launch of the Triton kernel reads: where tensors are, which program takes what, with what numbers.

One launch serves all tensors of one kind: device, types, alignment. Its tables stay on the device. What changes between
two steps is sent again and nothing else: addresses when a tensor has moved, numbers when a schedule has changed them;
they travel through pinned memory, so that nothing waits. A number that only the device knows (a tensor lr, a dead zone
from the gradients) is filled in there, in every step.

A table is never written twice by the host: what changes is a new table. So a CUDA graph keeps those that it was
captured with, whatever later steps send. They are kept alive for the rest of the process, since nothing tells when a
graph is gone.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tailopt.clipping.kernels.kernel import StepGroup, table_row
from tailopt.clipping.operators import Number, compute_dtype
from tailopt.clipping.reference import ClipByValue, ScaleToNorm, StepHyperparameters

if TYPE_CHECKING:
    from tailopt.clipping.kernels.triton_counts import PartialCounts
    from tailopt.clipping.step_cache import StepCache

TENSOR_COLUMNS = 7  # addresses of p, g and m, elements, row, first program, slot: as in triton_programs
WIDEST_LOAD = 16  # bytes; a tensor at another address is read element by element
# What a program does with a number that it fills in, as in triton_programs.
COPY, NEGATED, DECAY, LIMIT = range(4)


class Kind(NamedTuple):
    """What the tensors of one launch have in common."""

    device: torch.device
    dtype: torch.dtype
    grad_dtype: torch.dtype
    momentum_dtype: torch.dtype | None
    rescales: bool  # by a norm, and not by value
    skips: bool  # some may have to stay as they are
    blank: bool  # parameters hold nothing yet
    rounds: bool  # stochastically
    aligned: bool

    @property
    def compute_dtype(self) -> torch.dtype:
        """The type of the arithmetic."""
        return compute_dtype(self.dtype)

    @property
    def blocks(self) -> tuple[int, int]:
        """Elements of a block, and how many blocks a program takes."""
        return blocks(self.dtype, self.grad_dtype, self.momentum_dtype is not None)


def blocks(dtype: torch.dtype, grad_dtype: torch.dtype, momentum: bool = False) -> tuple[int, int]:
    """Elements of a block, and how many blocks a program takes, by what was fastest on an H200 without momentum.

    Relative to a flat pass over as many elements, 124M and 1.5B parameters: fp32 1.011 and 1.005, bf16 1.025 and 1.004
    (in one block of 4096: 1.23 and 1.20), fp32 with bf16 gradients 1.03 and 1.025. fp64 and momentum were not measured.
    """
    if dtype == torch.float64 or grad_dtype != dtype or momentum:
        return 1024, 1
    return (2048, 1) if dtype == torch.float32 else (2048, 2)


class Scalar(NamedTuple):
    """A number that only the device knows: its place among the rows, and what becomes of it on the way there."""

    place: int
    value: Tensor
    how: int = COPY
    operand: float = 0.0


@dataclass
class Launch:
    """One launch, and its tables on the device."""

    kind: Kind
    positions: list[int]  # of its tensors, among all of the step
    groups: list[int]  # the group of each of them
    sizes: list[int]
    places: Tensor  # the same as `positions`
    chunks: Tensor
    tensors: Tensor
    rows: Tensor  # with the operands of `sources` behind them
    keys: Tensor | None = None  # of the random bits, two for every row
    sources: Tensor | None = None  # where numbers come from that only the device knows
    operands: int = 0  # where they begin in `rows`
    first_programs: list[int] = field(default_factory=list)  # where the programs of each tensor begin
    made_of: tuple[bytes, list[int]] = (b"", [])  # what rows and sources were made of
    stream: int = 0  # the last one that read the tables
    partial_counts: PartialCounts | None = None  # where its programs count

    def tables(self) -> list[Tensor]:
        """Its tables."""
        tables = self.places, self.chunks, self.tensors, self.rows, self.keys, self.sources
        return [table for table in tables if table is not None]


class LaunchTables:
    """The launches of a step, kept from one step to the next; a step cache owns them."""

    def __init__(self) -> None:
        self._launches: list[Launch] = []
        self._groups: tuple[object, ...] = ()  # sizes, and what else the division into launches depends on
        self._addresses: tuple[list[int], ...] = ()
        self._aligned: list[bool] = []
        self._staging = Staging()

    def launches(self, groups: Sequence[StepGroup], cache: StepCache) -> list[Launch]:
        """The launches of this step, with tables up to date. The cache has looked at the tensors of these groups."""
        if not _is_capturing():
            self._update(groups, cache)
            self._staging.reserve(self._launches)
            return self._launches
        # What is sent here arrives when the graph is replayed: no other step may rely on it.
        before = self._groups, self._addresses, self._aligned, [replace(launch) for launch in self._launches]
        sent = self._staging.sent
        self._update(groups, cache)
        captured = self._launches
        _captured.extend(launch.tables() for launch in captured)
        if self._staging.sent != sent:
            self._groups, self._addresses, self._aligned, self._launches = before
            cache.forget_hparams()
        return captured

    def _update(self, groups: Sequence[StepGroup], cache: StepCache) -> None:
        """Send what has changed since the last step."""
        now = cache.param_addresses, cache.grad_addresses, cache.momentum_addresses
        features = tuple(map(_features, groups))
        known = bool(self._groups) and self._groups[0] is cache.sizes and self._groups[1] == features
        if not known or any(new is not old for new, old in zip(now, self._addresses, strict=True)):
            aligned = _aligned([some for some in now if some])
            if not known or aligned != self._aligned:
                self._arrange(groups, cache.sizes, _kinds(groups, aligned))
                self._aligned, known = aligned, False
            for launch in self._launches:
                launch.tensors = self._staging.send(_tensor_table(launch, groups, now), launch.kind.device)
            self._groups, self._addresses = (cache.sizes, features), now
        if not known or not cache.same_hparams_as_last_call(groups):
            for launch in self._launches:
                self._send_numbers(launch, groups)
            cache.remember_hparams(groups)

    def _arrange(self, groups: Sequence[StepGroup], sizes: Sequence[int], kinds: list[Kind]) -> None:
        """Divide the tensors that have elements into launches."""
        group_of = [k for k, group in enumerate(groups) for _ in group.params]
        chunks = {_chunk_key(launch.kind, launch.sizes): launch.chunks for launch in self._launches}
        self._launches = []
        for kind in dict.fromkeys(kinds):
            positions = [i for i, other in enumerate(kinds) if other == kind and sizes[i]]
            own_sizes = [sizes[i] for i in positions]
            if not positions:
                continue
            same = chunks.get(_chunk_key(kind, own_sizes))
            table = self._staging.send(_chunk_table(own_sizes, kind), kind.device) if same is None else same
            places = self._staging.send(torch.tensor(positions, dtype=torch.int64, device="cpu"), kind.device)
            nothing = table.new_empty(0)
            own_groups = [group_of[i] for i in positions]
            each = programs_of(own_sizes, kind)
            launch = Launch(kind, positions, own_groups, own_sizes, places, table, nothing, nothing)
            launch.first_programs = (each.cumsum(0) - each).tolist()
            self._launches.append(launch)

    def _send_numbers(self, launch: Launch, groups: Sequence[StepGroup]) -> None:
        """Send the rows if a number has changed, and the addresses of those on the device if one has."""
        numbers, scalars = _rows(launch, groups)
        numbers += [0.0] * (-len(numbers) % 4)  # so that the operands begin at a multiple of 16 bytes
        operands = len(numbers)
        numbers += [scalar.operand for scalar in scalars]
        made_of = array("d", numbers).tobytes(), _addresses_of(scalars)
        if made_of[0] != launch.made_of[0]:
            rounded = torch.tensor(numbers, dtype=torch.float64, device="cpu").to(launch.kind.compute_dtype)
            launch.rows, launch.operands = self._staging.send(rounded, launch.kind.device), operands
        if made_of[1] != launch.made_of[1]:
            addresses = torch.tensor(made_of[1], dtype=torch.int64, device="cpu")
            launch.sources = self._staging.send(addresses, launch.kind.device) if scalars else None
        launch.made_of = made_of
        if launch.kind.rounds:  # other ones in every step
            keys = [groups[k].hparams.rounding for k, _ in dict.fromkeys(_row_keys(launch, groups))]
            table = torch.tensor([key.keys() if key else (0, 0) for key in keys], dtype=torch.int64, device="cpu")
            launch.keys = self._staging.send(table, launch.kind.device)


_captured: list[list[Tensor]] = []


class Staging:
    """The way of small tables to a device: through pinned memory, so that nothing waits."""

    SPARES = 4  # pinned buffers for a step that is captured, in which none can be allocated

    def __init__(self) -> None:
        self._spares: list[Tensor] = []
        self._reserved_at = 0
        self.sent = 0  # tables

    def send(self, values: Tensor, device: torch.device) -> Tensor:
        """A table with these values on the device."""
        self.sent += 1
        if device.type == "cpu":
            return values
        capturing = _is_capturing()
        size = values.numel() * values.element_size()
        spare = next((one for one in self._spares if one.numel() >= size), None) if capturing else None
        if spare is None:
            pinned = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
        else:
            self._spares = [one for one in self._spares if one is not spare]
            pinned = spare[:size].view(values.dtype).view(values.shape)
        pinned.copy_(values)
        table = torch.empty(values.shape, dtype=values.dtype, device=device)
        table.copy_(pinned, non_blocking=True)
        if capturing:
            _captured.append([pinned])  # every replay reads it again
        return table

    def reserve(self, launches: Sequence[Launch]) -> None:
        """Allocate what a step needs that is captured later."""
        if self.sent == self._reserved_at or not launches or launches[0].kind.device.type == "cpu":
            return
        self._reserved_at = self.sent
        size = max(256, *(t.numel() * t.element_size() for launch in launches for t in launch.tables()[2:]))
        self._spares = [spare for spare in self._spares if spare.numel() >= size]
        while len(self._spares) < self.SPARES:
            self._spares.append(torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True))


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _features(group: StepGroup) -> tuple[object, ...]:
    """What the launches of a group depend on, beside its tensors."""
    hparams, own_rows = group.hparams, bool(group.corrections)
    flags = hparams.rounding is None, group.skips is None, group.blank, own_rows
    return len(group.params), type(hparams.clip), flags, tuple(group.slots)


def _aligned(columns: Sequence[Sequence[int]]) -> list[bool]:
    """Whether each tensor can be read in the widest words, and its gradient and its momentum too."""
    if len(columns) == 2:  # as in most steps, many of which have gradients at other addresses
        return [not (p | g) % WIDEST_LOAD for p, g in zip(*columns, strict=True)]
    return [not any(address % WIDEST_LOAD for address in each) for each in zip(*columns, strict=True)]


def _kinds(groups: Sequence[StepGroup], aligned: Sequence[bool]) -> list[Kind]:
    """The kind of every tensor."""
    known: dict[tuple[object, ...], Kind] = {}
    kinds: list[Kind] = []
    for group in groups:
        rescales, skips = isinstance(group.hparams.clip, ScaleToNorm), group.skips is not None
        for i, (p, g) in enumerate(zip(group.params, group.grads, strict=True)):
            momentum_dtype = group.momenta[i].dtype if group.momenta else None
            rounds = group.hparams.rounding is not None and p.dtype == torch.bfloat16
            features = rescales, skips, group.blank, rounds, aligned[len(kinds)]
            key = (p.device, p.dtype, g.dtype, momentum_dtype, *features)
            if key not in known:
                known[key] = Kind(*key)
            kinds.append(known[key])
    return kinds


def _chunk_key(kind: Kind, sizes: Sequence[int]) -> tuple[object, ...]:
    """All that a table of chunks depends on."""
    return kind.device, kind.blocks, tuple(sizes)


def programs_of(sizes: Sequence[int], kind: Kind) -> Tensor:
    """How many programs each tensor takes."""
    block, count = kind.blocks
    return torch.tensor([-(-size // (block * count)) for size in sizes], dtype=torch.int64, device="cpu")


def _chunk_table(sizes: Sequence[int], kind: Kind) -> Tensor:
    """[tensor, number of the chunk in it] for every program."""
    block, count = kind.blocks
    programs = programs_of(sizes, kind)
    tensor = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), programs)
    number = torch.arange(len(tensor), device="cpu") - (programs.cumsum(0) - programs)[tensor]
    table = torch.stack([tensor, number], dim=1).to(torch.int32)
    # Those that are not full take longer, so they begin first.
    full = (number + 1) * (block * count) <= torch.tensor(sizes, dtype=torch.int64, device="cpu")[tensor]
    return torch.cat([table[~full], table[full]])


def _tensor_table(launch: Launch, groups: Sequence[StepGroup], addresses: Sequence[list[int]]) -> Tensor:
    """[address of p, of g, of m, elements, row, first program, slot] for every tensor."""
    table = [0] * (len(launch.positions) * TENSOR_COLUMNS)
    for column, some in enumerate(addresses):
        if some:
            table[column::TENSOR_COLUMNS] = [some[i] for i in launch.positions]
    table[3::TENSOR_COLUMNS] = launch.sizes
    keys = _row_keys(launch, groups)
    row = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    table[4::TENSOR_COLUMNS] = [row[key] for key in keys]
    table[5::TENSOR_COLUMNS] = launch.first_programs
    slots = [slot for group in groups for slot in (group.slots or [0] * len(group.params))]
    table[6::TENSOR_COLUMNS] = [slots[i] for i in launch.positions]
    return torch.frombuffer(array("q", table), dtype=torch.int64)


def _row_keys(launch: Launch, groups: Sequence[StepGroup]) -> list[tuple[int, int]]:
    """What row each tensor reads: (group, -1), or (group, position) where every tensor has a number of its own."""
    pairs = zip(launch.groups, launch.positions, strict=True)
    return [(k, i if groups[k].corrections else -1) for k, i in pairs]


def _rows(launch: Launch, groups: Sequence[StepGroup]) -> tuple[list[float], list[Scalar]]:
    """The rows, with 0 for numbers that only the device knows, and those numbers."""
    starts = [0, *accumulate(len(group.params) for group in groups)]
    row_of_group: dict[int, tuple[list[float], list[Scalar]]] = {}
    numbers: list[float] = []
    scalars: list[Scalar] = []
    for k, position in dict.fromkeys(_row_keys(launch, groups)):
        if k not in row_of_group:
            row_of_group[k] = _row(groups[k].hparams, launch.kind.compute_dtype)
        row, own = row_of_group[k]
        first = len(numbers)
        numbers += row
        scalars += [scalar._replace(place=first + scalar.place) for scalar in own]
        if position >= 0:
            scalars.append(Scalar(first + 12, groups[k].corrections[position - starts[k]]))
    return numbers, scalars


def _row(hparams: StepHyperparameters, dtype: torch.dtype) -> tuple[list[float], list[Scalar]]:
    """A row of `table_row` with a sign in place of `maximize`, and the numbers of it that only the device knows."""
    scalars: list[Scalar] = []

    def known(value: Number, place: int, how: int = COPY) -> Number:
        if not isinstance(value, Tensor) or value.is_cpu:
            return value
        scalars.append(Scalar(place, value, how))
        return 0.0

    lr, momentum, clip = hparams.lr, hparams.momentum, hparams.clip
    if isinstance(lr, Tensor) and not lr.is_cpu and hparams.weight_decay:
        scalars.append(Scalar(1, lr, DECAY, hparams.weight_decay))
    if momentum is not None:
        if isinstance(clip, ClipByValue) and isinstance(clip.u, Tensor) and not clip.u.is_cpu and momentum.clamps:
            scalars.append(Scalar(11, clip.u, LIMIT, 1 - momentum.beta))
        momentum = momentum._replace(correction=known(momentum.correction, 12))
    first = 3 if isinstance(clip, ClipByValue) else 6
    clip = type(clip)(*(known(value, first + i) for i, value in enumerate(clip)))
    row = list(
        table_row(StepHyperparameters(clip, known(lr, 0, NEGATED), hparams.weight_decay, False, momentum), dtype)
    )
    row[2] = -1.0 if hparams.maximize else 1.0
    return row, scalars


def _addresses_of(scalars: Sequence[Scalar]) -> list[int]:
    """[place, address, whether it is fp64, what becomes of it] for each, as `scalar_programs` reads them."""
    table: list[int] = []
    for place, value, how, _ in scalars:
        table += (place, value.data_ptr(), int(value.dtype == torch.float64), how)
    return table
