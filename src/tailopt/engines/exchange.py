"""The exchange of a round between real nodes: one flat buffer, every element summed once, in node order.

Each node owns a stretch of the flat buffer. It receives that stretch of every node's displacement, point to point, and
judges it; verdicts are exchanged, so that an exclusion is unanimous; then it adds up in ascending node order, takes the
outer step on its stretch (the outer state lives there too), and sends the new weights back:

    header      round, node, weight, elements, a checksum of every stretch      all gather, before anything large
    shards      stretch k of my displacement to node k                          point to point
    verdicts    damaged, not finite, beyond the bound: about every node         all gather
    sum, step   my stretch: weighted mean, outer rule, projection               no traffic, but for norms
    weights     my stretch to everybody                                         point to point

Stretches are cut at the blocks over which norms are summed, so the bits are those of the simulation, and depend on
neither the number of nodes nor the topology.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tailopt.clipping.operators import arithmetic
from tailopt.rounds.blocks import BLOCK, root
from tailopt.rounds.guard import Bound, Exclusion, exceeded, judge
from tailopt.rounds.participants import Participants
from tailopt.rounds.round import BufferMean, EveryoneExcluded, Report
from tailopt.rules.rule import Numbers, Rule, State, of

ALIGNMENT = 16  # elements: a cache line of fp32, and an even count, so that checksums can read pairs


@dataclass(frozen=True)
class Segment:
    """A stretch of one tensor in the flat buffer."""

    tensor: int
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """Where tensors lie in the flat buffer, and which stretch of it each node owns."""

    sizes: tuple[int, ...]
    nodes: int
    offsets: tuple[int, ...] = field(init=False)
    total: int = field(init=False)
    cuts: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in self.sizes]
        ends = list(accumulate(padded, initial=0))
        object.__setattr__(self, "offsets", tuple(ends[:-1]))
        object.__setattr__(self, "total", ends[-1])
        # a cut may lie where a block of a tensor begins
        starts = [o + k for o, size in zip(ends[:-1], self.sizes, strict=True) for k in range(0, max(size, 1), BLOCK)]
        starts = sorted({*starts, ends[-1]})
        cuts = [0]
        for k in range(1, self.nodes):
            i = bisect.bisect_left(starts, self.total * k // self.nodes)
            near = min(starts[max(i - 1, 0) : i + 1], key=lambda s, k=k: abs(s - self.total * k / self.nodes))  # type: ignore[misc]
            cuts.append(max(cuts[-1], near))
        object.__setattr__(self, "cuts", (*cuts, self.total))

    def stretch(self, node: int) -> slice:
        """What a node owns."""
        return slice(self.cuts[node], self.cuts[node + 1])

    def segments(self, node: int) -> list[Segment]:
        """The stretch of a node by tensor, padding left out."""
        low, high = self.cuts[node], self.cuts[node + 1]
        found = []
        for i, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            start, stop = max(low, offset), min(high, offset + size)
            if start < stop:
                found.append(Segment(i, start, stop))
        return found

    def views(self, flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
        """The tensors inside a flat buffer."""
        rows = zip(self.offsets, self.sizes, shapes, strict=True)
        return [flat[offset : offset + size].view(shape) for offset, size, shape in rows]


class Damaged(RuntimeError):
    """What arrived cannot be used, and not because of a displacement: the run must end."""


@dataclass
class Wire:
    """The group of the nodes, by node number. Everything that is sent goes through here, so that faults can too."""

    group: dist.ProcessGroup
    node: int
    nodes: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None) -> Wire:
        """The nodes of a process group; by default of all processes."""
        group = group or dist.group.WORLD
        assert group is not None
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    def gather(self, mine: Tensor) -> Tensor:
        """Everybody's small tensor, stacked in node order."""
        out = mine.new_empty((self.nodes, *mine.shape))
        dist.all_gather(list(out.unbind(0)), mine.contiguous(), group=self.group)
        return out

    def swap(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """Send outgoing[k] to node k and receive incoming[k] from it, for all others; what is empty is left out."""
        others = [(self.node + k) % self.nodes for k in range(1, self.nodes)]
        works = []
        for k in others:
            if incoming[k].numel():
                works.append(dist.irecv(incoming[k], dist.get_global_rank(self.group, k), group=self.group))
        for k in others:
            if outgoing[k].numel():
                works.append(dist.isend(outgoing[k], dist.get_global_rank(self.group, k), group=self.group))
        for work in works:
            if work is not None:
                work.wait()


def checksum(x: Tensor) -> int:
    """The sum of the 64-bit words, modulo 2^64: any single flipped bit changes it. Needs an even count of fp32."""
    return int(x.view(torch.int64).sum()) if x.numel() else 0


@dataclass
class Exchange:
    """One node's part of every exchange; holds the buffers.

    Args:
        wire: how to reach the others.
        names: of all tensors.
        shapes: of this rank's parts of them.
        kinds: the types of the parameters; the arithmetic is in fp32, or in fp64 where all of them are.
    """

    wire: Wire
    names: list[str]
    shapes: list[torch.Size]
    kinds: list[torch.dtype]

    def __post_init__(self) -> None:
        (self.dtype,) = {arithmetic(kind) for kind in self.kinds}
        self.layout = Layout(tuple(shape.numel() for shape in self.shapes), self.wire.nodes)
        self.mine = self.layout.stretch(self.wire.node)
        self.segments = self.layout.segments(self.wire.node)
        self.delta = torch.zeros(self.layout.total, dtype=self.dtype)
        length = self.mine.stop - self.mine.start
        self._received = torch.zeros(self.wire.nodes, length, dtype=self.dtype)

    def cut(self, flat: Tensor) -> list[Tensor]:
        """This node's stretch of a flat buffer, by tensor."""
        return [flat[s.start : s.stop] for s in self.segments]

    def close(
        self,
        t: int,
        who: Participants,
        x: Tensor,
        starts: Tensor,
        buffers: Mapping[str, Tensor],
        limits: Mapping[int, Bound],
        loss: float,
        guard: bool = True,
    ) -> tuple[Report, dict[str, Tensor]]:
        """Judge and add up: afterwards this node's stretch of `self.delta` is the mean displacement.

        x: the synchronised weights, flat; starts: the same in the parameters' own type, as they were when the round
        began. Returns the report, the same on every node, and the mean buffers.
        """
        part = self.wire.node in who.shares
        if not part:
            self.delta.zero_()
        heads = self._headers(t, part, loss)
        outgoing = [self.delta[self.layout.stretch(k)] for k in range(self.wire.nodes)]
        self.wire.swap(outgoing, list(self._received))
        self._received[self.wire.node].copy_(self.delta[self.mine])
        everyone = self._everyones(buffers)
        report = Report(steps={})
        verdicts = self._verdicts(who, heads, starts, limits, everyone, guard)
        for node, share in who.shares.items():
            if node in verdicts:
                report.excluded.append(verdicts[node])
            else:
                report.used[node] = share
                report.losses[node] = _float(int(heads[node, 4]))
        if not any(report.used.values()):
            reasons = "; ".join(map(str, report.excluded)) or "nobody with a weight above 0 took part"
            raise EveryoneExcluded(f"Round {t}: no displacement can be used: {reasons}.")
        whole = 1.0 if not report.excluded else sum(report.used.values())
        mine = self.delta[self.mine]
        _add_up(mine, {i: self._received[i] for i in report.used}, report.used, whole)
        mean = _mean_buffers(everyone, report.used, whole, buffers)
        report.used = {i: share / whole for i, share in report.used.items()}
        return report, mean

    def outer(self, x: Tensor, states: Sequence[State], rule: Rule, numbers: Numbers, radius: float | None) -> None:
        """The outer step and the projection on this node's stretch of x; then everybody gets everybody's."""
        more: dict[str, Any] = {}
        if rule.name in ("biclip-l2", "l2clip"):
            norms = self.norms(self.delta)
            more["norm"] = [norms[s.tensor] for s in self.segments] if numbers.get("scope") == "tensor" else root(norms)
            if isinstance(more["norm"], list):
                more["norm"] = [n**0.5 for n in more["norm"]]
        own = self.cut(x)
        delta = self.cut(self.delta)
        if own:
            torch._foreach_neg_(delta)
            rule.step(own, delta, states, {**self._by_segment(numbers), **more})
        if radius is not None:
            length = root(self.norms(x))
            if length > radius and own:
                torch._foreach_mul_(own, radius / length)
        self.share(x)

    def share(self, flat: Tensor) -> None:
        """Everybody's stretch of a flat buffer to everybody."""
        mine = flat[self.mine]
        incoming = [flat[self.layout.stretch(k)] for k in range(self.wire.nodes)]
        self.wire.swap([mine] * self.wire.nodes, incoming)

    def norms(self, flat: Tensor) -> list[float]:
        """The sum of squares of every tensor, from blocks added in block order: the same on every node."""
        return self._assembled(self.wire.gather(self._block_sums(flat[self.mine])))

    def _block_sums(self, stretch: Tensor) -> Tensor:
        """Of this node's stretch, padded to the length of the longest."""
        sums = torch.zeros(self._most_blocks(), dtype=torch.float64)
        k = 0
        for s in self.segments:
            for block in stretch[s.start - self.mine.start : s.stop - self.mine.start].split(BLOCK):
                sums[k] = (block.double() ** 2).sum()
                k += 1
        return sums

    def _most_blocks(self) -> int:
        counts = [sum(-(-(s.stop - s.start) // BLOCK) for s in self.layout.segments(k)) for k in range(self.wire.nodes)]
        return max(counts, default=0)

    def _assembled(self, sums: Tensor) -> list[float]:
        """Block sums of all stretches as sums by tensor, in block order."""
        found = [0.0] * len(self.names)
        for node, row in enumerate(sums.tolist()):
            values = iter(row)
            for s in self.layout.segments(node):
                for _ in range(-(-(s.stop - s.start) // BLOCK)):
                    found[s.tensor] += next(values)
        return found

    def _by_segment(self, numbers: Numbers) -> dict[str, Any]:
        """Numbers with an entry for each parameter, as one with an entry for each segment."""
        found: dict[str, Any] = {}
        for word, value in numbers.items():
            if isinstance(value, list):
                value = [self._threshold(value[s.tensor], s) for s in self.segments]
            elif isinstance(value, Tensor) and value.dim():
                value = [self._threshold(value, s) for s in self.segments]
            found[word] = value
        return found

    def _threshold(self, value: Any, s: Segment) -> Any:
        """A threshold that broadcasts against the tensor, as the stretch of it that this node owns."""
        if not isinstance(value, Tensor) or not value.dim():
            return value
        offset = self.layout.offsets[s.tensor]
        return value.expand(self.shapes[s.tensor]).reshape(-1)[s.start - offset : s.stop - offset]

    def _headers(self, t: int, part: bool, loss: float) -> Tensor:
        """Everybody's header, checked: the same round, everybody once, the same number of elements."""
        sums = [checksum(self.delta[self.layout.stretch(k)]) for k in range(self.wire.nodes)]
        mine = torch.tensor([t, self.wire.node, self.layout.total, int(part), _bits(loss), *sums], dtype=torch.int64)
        heads = self.wire.gather(mine)
        for k, head in enumerate(heads.tolist()):
            for what, position, expected in (("round", 0, t), ("node", 1, k), ("elements", 2, self.layout.total)):
                if head[position] != expected:
                    raise Damaged(
                        f"Round {t}: node {k} came with {what} {head[position]}, and {expected} was expected. "
                        "Restart all nodes from the last checkpoint."
                    )
        return heads

    def _verdicts(
        self,
        who: Participants,
        heads: Tensor,
        starts: Tensor,
        limits: Mapping[int, Bound],
        buffers: Sequence[Mapping[str, Tensor]],
        guard: bool,
    ) -> dict[int, Exclusion]:
        """Whom everybody leaves out, and why: the worst that anybody saw."""
        mine = torch.zeros(self.wire.nodes, 4, dtype=torch.float64)
        names = [self.names[s.tensor] for s in self.segments]
        begun = [part.to(self.kinds[s.tensor]) for part, s in zip(self.cut(starts), self.segments, strict=True)]
        for node in who.shares:
            row = self._received[node]
            if node != self.wire.node and checksum(row) != int(heads[node, 5 + self.wire.node]):
                mine[node] = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
                continue
            if not guard:
                continue
            parts = [row[s.start - self.mine.start : s.stop - self.mine.start] for s in self.segments]
            limit = self._limit_by_segment(limits[node])
            found = judge(node, parts, begun, names, limit, {})
            if found is not None:
                code = 2.0 if found.bound is None else 3.0
                tensor = float(self.names.index(found.tensor))
                mine[node] = torch.tensor([code, tensor, found.value, found.bound or 0.0], dtype=torch.float64)
        everyone = self.wire.gather(mine)
        verdicts: dict[int, Exclusion] = {}
        for node in who.shares:
            rows = [row for row in everyone[:, node].tolist() if row[0]]
            if rows:
                code, tensor, value, most = min(rows, key=lambda r: (r[0], r[1], r[3] - abs(r[2])))
                verdicts[node] = Exclusion(
                    node, self.names[int(tensor)], value, most if code == 3.0 else None, _REASONS[int(code)]
                )
            elif guard:
                found = judge(node, [], [], [], Bound(None), buffers[node])
                if found is not None:
                    verdicts[node] = found
        if guard:
            self._judge_norms(who, starts, limits, verdicts)
        return verdicts

    def _judge_norms(
        self, who: Participants, starts: Tensor, limits: Mapping[int, Bound], verdicts: dict[int, Exclusion]
    ) -> None:
        """Bounds on norms need all stretches: block sums are gathered, and everybody decides alike."""
        for node in who.shares:
            limit = limits[node]
            if limit.kind not in ("norm", "tensor norm"):
                continue
            squares = self._assembled(self.wire.gather(self._block_sums(self._received[node])))
            if node in verdicts:
                continue
            moved = [root(squares)] if limit.kind == "norm" else [s**0.5 for s in squares]
            tensors = [v.to(k) for v, k in zip(self.layout.views(starts, self.shapes), self.kinds, strict=True)]
            groups = [tensors] if limit.kind == "norm" else [[t] for t in tensors]
            for i, (length, group) in enumerate(zip(moved, groups, strict=True)):
                own = Bound(limit.kind, of(limit.a, i), of(limit.c, i), limit.steps) if len(groups) > 1 else limit
                most = exceeded(length, group, own)
                if most is not None:
                    name = "all tensors" if limit.kind == "norm" else self.names[i]
                    verdicts[node] = Exclusion(node, name, length, most, _REASONS[3])
                    break

    def _limit_by_segment(self, limit: Bound) -> Bound:
        if limit.kind != "coordinate":
            return Bound(None)
        a, c = (self._by_segment({"value": value})["value"] for value in (limit.a, limit.c))
        return Bound(limit.kind, a, c, limit.steps)

    def _everyones(self, buffers: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """The buffers of every node. They are small; every node adds them up by itself."""
        found: list[dict[str, Tensor]] = [{} for _ in range(self.wire.nodes)]
        for name, buffer in buffers.items():
            plain = torch.view_as_real(buffer) if buffer.is_complex() else buffer
            for node, value in enumerate(self.wire.gather(plain.reshape(-1)).unbind(0)):
                value = value.view(plain.shape)
                found[node][name] = torch.view_as_complex(value) if buffer.is_complex() else value
        return found


_REASONS = {1: "damaged on the way", 2: "not finite", 3: "beyond what its optimizer can move"}


def _add_up(mine: Tensor, received: Mapping[int, Tensor], shares: Mapping[int, float], whole: float) -> None:
    """mine <- the weighted mean: the first, then one after another with two roundings each."""
    for number, (node, share) in enumerate(shares.items()):
        scaled = received[node].mul_(share)
        if number == 0:
            mine.copy_(scaled)
        else:
            mine.add_(scaled)
    if whole != 1.0:
        mine.div_(torch.tensor(whole, dtype=torch.float64).to(mine))


def _mean_buffers(
    everyone: Sequence[Mapping[str, Tensor]], shares: Mapping[int, float], whole: float, like: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    mean = BufferMean()
    for node, share in shares.items():
        mean.add(everyone[node], share)
    return mean.result(whole, like)


def _bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
