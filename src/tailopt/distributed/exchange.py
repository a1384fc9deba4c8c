"""The exchange of a round between real nodes: one flat buffer, every element summed once, in node order.

Each node owns a stretch of the flat buffer. It receives that stretch of every node's displacement, point to point, and
judges it; verdicts are exchanged, so that an exclusion is unanimous; then it adds up in ascending node order, takes the
outer step on its stretch (the outer state lives there too), and sends the new weights back:

    header      round, node, weight, steps, digests (header.py)             to everybody
    shards      stretch k of my displacement to node k                      right behind it, point to point
    bounds      where the nodes state different ones (limits.py)            to everybody, else not at all
    verdicts    damaged, not finite, beyond the bound: about every node     to everybody
    sum, step   my stretch: weighted mean, outer rule, projection           no traffic, but for norms
    weights     my stretch to everybody                                     point to point

Before the first of them the header goes alone, to see that all have as many elements. The next header says what each
node loaded of the new weights, and what each owner sent: a node that loaded something else is left out of that round,
and gets the weights again before they are used for anything.

Stretches are cut at the blocks over which norms are summed, so the bits are those of the simulation, and depend on
neither the number of nodes nor the topology.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tailopt.clipping.operators import arithmetic
from tailopt.clipping.shards import by_ranks, local_part
from tailopt.clipping.step_cache import StepCache
from tailopt.distributed import flat_kernels, limits
from tailopt.distributed.flat_kernels import Look, Span, Spans
from tailopt.distributed.header import Damaged, Header, at_meeting, bound_word, damaged, word_of
from tailopt.distributed.peers import Peers, on_cpu
from tailopt.distributed.rendezvous import named
from tailopt.distributed.verdicts import Row, Verdict, pairs_that_differ, unanimous, verdict_row
from tailopt.records.shards import memory
from tailopt.rounds.block_norm import BLOCK, root
from tailopt.rounds.guard import BEYOND, SLACK, Bound, Exclusion, check_displacement, exceeded_norm
from tailopt.rounds.mean import BufferMean
from tailopt.rounds.participants import Participants
from tailopt.rounds.robust import Aggregate
from tailopt.rounds.settle import Settlement, settle
from tailopt.rules.rule import Hyperparameters, Rule, State, per_param

PIECE = 4 * BLOCK  # elements: an outer rule's four arrays of them fit the cache of a core
MESSAGE = 1 << 20  # elements, about: smaller ones cost turns, larger ones make others wait
DIGEST = 8  # bytes
ALIKE = "Call checkpoint() on every node, after the same step."
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


@dataclass
class Wire:
    """The group of the nodes, by node number. Everything that is sent goes through here, so that faults can too."""

    group: dist.ProcessGroup
    node: int
    nodes: int
    peers: Peers | None = None

    @classmethod
    def of(
        cls,
        group: dist.ProcessGroup | None = None,
        timeout: float | None = None,
        stall_timeout: float | None = None,
    ) -> Wire:
        """The nodes of a process group, by default of all processes; watched, where a timeout is given."""
        group = group or dist.group.WORLD
        assert group is not None
        group = on_cpu(group)
        peers = Peers(group, timeout, stall_timeout) if timeout is not None else None
        return cls(group, dist.get_rank(group), dist.get_world_size(group), peers)

    def _watched(self, traffic: Callable[[], object]) -> None:
        if self.peers is None:
            traffic()
        else:
            self.peers.call(traffic)

    def gather(self, mine: Tensor) -> Tensor:
        """Everybody's small tensor, stacked in node order; each travels with a digest of its bytes.

        What nodes decide together follows from these: a bit that flips on the way to one of them must not go unnoticed.
        """
        plain = mine.contiguous().reshape(-1).view(torch.uint8)
        out, rows = self._stacked(torch.cat([plain, _digest(plain)]))
        # point to point: gloo's all_gather is a ring, whose turns take twice as long with four nodes
        self._watched(lambda: self._swap(([rows[self.node]] * self.nodes, rows)))
        for sender, row in enumerate(rows):
            if not torch.equal(_digest(row[:-DIGEST]), row[-DIGEST:]):
                raise damaged("a small message", sender, self.node)
        return out[:, :-DIGEST].contiguous().view(mine.dtype).view(self.nodes, *mine.shape)

    def broadcast(self, flat: Tensor) -> None:
        """Everybody's tensor becomes node 0's."""
        if flat.numel():
            self._watched(lambda: dist.broadcast(flat, dist.get_global_rank(self.group, 0), group=self.group))

    def swap(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """Send outgoing[k] to node k and receive incoming[k] from it, for all others; what is empty is left out."""
        self._watched(lambda: self._swap((outgoing, incoming)))

    def announce(self, head: Header, outgoing: Sequence[Tensor] = (), incoming: Sequence[Tensor] = ()) -> list[Header]:
        """Everybody's header, in node order, and right behind each what belongs to it, as by `swap`."""
        out, rows = self._stacked(head.packed())
        behind = [(outgoing, incoming)] if outgoing else []
        self._watched(lambda: self._swap(([rows[self.node]] * self.nodes, rows), *behind))
        return [Header.unpacked(words, sender, self.node) for sender, words in enumerate(out.tolist())]

    def _stacked(self, mine: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Room for everybody's tensor, whole and by node, with this node's in it."""
        out = mine.new_empty((self.nodes, *mine.shape))
        out[self.node] = mine
        return out, list(out.view(self.nodes, -1).unbind(0))

    def _swap(self, *turns: tuple[Sequence[Tensor], Sequence[Tensor]]) -> None:
        """Several (outgoing, incoming), all under way at once; between two nodes they keep this order."""
        others = [(self.node + k) % self.nodes for k in range(1, self.nodes)]  # not everybody turns to the same first
        # all that is expected before anything is sent: gloo's thread receives then while this one sends, and what
        # finds nobody waiting would first have to ask
        works = [self.group.recv([part], k, 0) for _, incoming in turns for k, part in _messages(incoming, others)]
        works += [self.group.send([part], k, 0) for outgoing, _ in turns for k, part in _messages(outgoing, others)]
        for work in works:
            work.wait()
            if self.peers is not None:
                self.peers.message_done()


def _digest(plain: Tensor) -> Tensor:
    """The digest of bytes, as bytes."""
    return torch.tensor([word_of(memory(plain))], dtype=torch.int64).view(torch.uint8)


def _messages(tensors: Sequence[Tensor], others: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """What goes to or comes from each, in turns: large tensors in several messages, empty ones in none."""
    parts = {k: tensors[k].split(_message(tensors[k].numel())) for k in others if tensors[k].numel()}
    for turn in range(max(map(len, parts.values()), default=0)):
        yield from ((k, cut[turn]) for k, cut in parts.items() if turn < len(cut))


def _message(count: int) -> int:
    """How many elements of so many go in one message: all messages of a stretch are of about the same size."""
    return -(-count // max(round(count / MESSAGE), 1))


@dataclass(frozen=True)
class Statement:
    """What a node says about its part of a round.

    Args:
        steps: local steps that it took.
        bound: how far it can have moved by them.
        loss: of these steps.
        seconds: that they took.
        structure: a digest of which parameters it trains.
        last: whether this may be the last round: the new weights are then compared at once.
    """

    steps: int = 0
    bound: Bound = Bound(None)
    loss: float = math.nan
    seconds: float = 0.0
    structure: int = 0
    last: bool = False


@dataclass(frozen=True)
class Terms:
    """What a round is judged by.

    Args:
        guard: whether displacements beyond the bound are left out.
        expected: (node, steps) -> its bound, where the settings are agreed; else nodes state their own.
        free: participants without a bound: they continue from weights of their own.
        most_steps: local steps that a node may take in a round.
        robust: a robust mean instead of the weighted one.
    """

    guard: bool = True
    expected: Callable[[int, int], Bound] | None = None
    free: Collection[int] = ()
    most_steps: float = math.inf
    robust: Aggregate | None = None


@dataclass
class ExchangeReport:
    """What real nodes know of a round, the same on all of them.

    Args:
        settlement: who counted.
        seconds: that the local steps of every participant took.
        remarks: about nodes that differ from the others.
        last: whether this may be the last round.
        notes: about weights that a node had to load again.
    """

    settlement: Settlement
    seconds: dict[int, float]
    remarks: dict[int, str]
    last: bool
    notes: list[str] = field(default_factory=list)


@dataclass
class Exchange:
    """One node's part of every exchange; holds the buffers.

    Args:
        wire: how to reach the others.
        names: of all tensors.
        shapes: of this rank's parts of them.
        kinds: the types of the parameters; the arithmetic is in fp32, or in fp64 where all of them are.
        shards: how to reach the other ranks of this node, where its parameters are sharded.
        owners: then, the parameters themselves.
    """

    wire: Wire
    names: list[str]
    shapes: list[torch.Size]
    kinds: list[torch.dtype]
    shards: Wire | None = None
    owners: Sequence[Tensor] = ()

    def __post_init__(self) -> None:
        kinds = {arithmetic(kind) for kind in self.kinds}
        if len(kinds) != 1:
            raise ValueError(f"Invalid model: parameters in {len(kinds)} types; need all in fp64, or none of them.")
        (self.dtype,) = kinds
        self.layout = Layout(tuple(shape.numel() for shape in self.shapes), self.wire.nodes)
        self.mine = self.layout.stretch(self.wire.node)
        self.segments = self.layout.segments(self.wire.node)
        self.delta = flat_kernels.room(self.layout.total, self.dtype)
        length = self.mine.stop - self.mine.start
        # of every node: what it moved in this stretch; this node's own is where it was formed
        rows = [flat_kernels.room(length, self.dtype) for _ in range(self.wire.nodes - 1)]
        here = self.wire.node
        self._received = [*rows[:here], self.delta[self.mine], *rows[here:]]
        self.mean = self._received[here]
        self._looks = [Look()] * self.wire.nodes
        self._sum: _Sum | None = None
        self._agreed = False
        self._outer_cache = StepCache()
        self._sent = Look()  # of this node's stretch of the weights, as it sent them
        self._loaded = (0,) * self.wire.nodes  # digests of every stretch of the weights, as loaded
        # (owner, receiver) that differed -> the round whose weights they were
        self._strained: dict[tuple[int, int], int] = {}
        self._pieces = [(s.start - self.mine.start, s.stop - s.start) for s in self.segments]
        spans = (
            Span(s.tensor, s.start - self.layout.offsets[s.tensor], s.start, s.stop - s.start, k)
            for k in range(self.wire.nodes)
            for s in self.layout.segments(k)
        )
        self._spans = Spans.of(spans, self.layout.cuts)
        self._blocks = [self._blocks_of(k) for k in range(self.wire.nodes)]
        spread = by_ranks(self.owners)
        self._sharded = {i for groups, members in spread.items() if groups for i in members}
        if self.shards is not None:
            sizes = self.shards.gather(torch.tensor(self.layout.sizes, dtype=torch.int64))
            self._shard_layouts = [Layout(tuple(row), self.wire.nodes) for row in sizes.tolist()]

    def moved(self, params: Sequence[Tensor], x: Tensor) -> None:
        """Form `self.delta`: how far this node's parameters are from the synchronised weights."""
        self._looks = flat_kernels.moved(params, x, self.delta, self._spans, self.layout.cuts)

    def load(self, params: Sequence[Tensor], x: Tensor) -> None:
        """Put the synchronised weights into the parameters, and note what was loaded."""
        self._loaded = tuple(flat_kernels.load(params, x, self._spans, self.layout.cuts))

    def restart(self, x: Tensor) -> None:
        """The weights are from a checkpoint or from node 0, and have not been sent by those who own them."""
        self._sent, self._strained = Look(flat_kernels.checksum(x[self.mine])), {}

    @property
    def loaded(self) -> list[int]:
        """Digests of every stretch of the weights with which this node began its round."""
        return list(self._loaded)

    @loaded.setter
    def loaded(self, digests: Sequence[int]) -> None:
        self._loaded = tuple(digests)

    def ahead(self, i: int) -> int | None:
        """How much of a tensor the ranks of this node before this one hold; None where every rank holds all of it."""
        if self.shards is None or i not in self._sharded:
            return None
        return sum(layout.sizes[i] for layout in self._shard_layouts[: self.shards.node])

    def cut(self, flat: Tensor) -> list[Tensor]:
        """This node's stretch of a flat buffer, by tensor."""
        return [flat[s.start : s.stop] for s in self.segments]

    def close(
        self,
        t: int,
        who: Participants,
        x: Tensor,
        buffers: Mapping[str, Tensor],
        before: Mapping[str, Tensor],
        said: Statement,
        terms: Terms,
    ) -> tuple[ExchangeReport, dict[str, Tensor]]:
        """Judge what was moved; then `outer` can add it up and take the step.

        x: the synchronised weights, flat, from which `moved` went; before: the buffers as the round began. Returns the
        report, the same on every node, and the mean buffers. Where every contribution was lost, nobody counts and
        there is no mean.
        """
        heads = self._swapped(t, who, said, terms)
        differing = self._other_weights(t - 1, heads)
        self._load_again(x, heads, differing)
        everyone = self._everyones(buffers)
        bounds = self._bounds(t, who, heads, said, terms)
        verdicts = self._verdicts(t, who, heads, x, bounds, differing, everyone, before, terms)
        settlement = self._settle(t, who, heads, verdicts, terms)
        report = ExchangeReport(
            settlement,
            seconds={node: heads[node].seconds for node in who.shares},
            remarks=bounds.remarks,
            last=any(head.confirm for head in heads),
        )
        if not settlement.counted:
            return report, dict(before)
        rows, whole, robust = [self._received[i] for i in settlement.counted], settlement.total_share, terms.robust
        combine = robust.combine(self._length) if robust is not None else None
        if combine is None:
            self.mean, self._sum = rows[0], _Sum(rows, list(settlement.counted.values()), whole)
        else:
            (self.mean,), self._sum = combine([[row] for row in rows]), None
        into = BufferMean() if robust is None else BufferMean.median()
        return report, _mean_buffers(into, everyone, settlement.counted, whole, buffers)

    def _settle(
        self,
        t: int,
        who: Participants,
        heads: Sequence[Header],
        verdicts: Mapping[int, Exclusion],
        terms: Terms,
    ) -> Settlement:
        """Turn verdicts into who counts; a robust mean may exclude further nodes."""
        excluded = [verdicts[node] for node in who.shares if node in verdicts]
        sound = [node for node in who.shares if node not in verdicts]
        if terms.robust is not None and sound:
            excluded += terms.robust.outliers([[self._received[i]] for i in sound], sound, self._length)
        steps = {node: _within(heads[node].steps, terms.most_steps) for node in who.shares}
        return settle(t, who, steps, excluded, {node: head.loss for node, head in enumerate(heads)})

    def _length(self, delta: Sequence[Tensor]) -> float:
        """The norm of a displacement of which every node has its stretch; all nodes ask at once."""
        (stretch,) = delta
        return root(self.norms(stretch))

    def outer(
        self, x: Tensor, states: Sequence[State], rule: Rule, numbers: Hyperparameters, radius: float | None
    ) -> None:
        """The mean, the outer step and the projection on this node's stretch of x; then everybody gets everybody's."""
        more: dict[str, Any] = {}
        if rule.needs_norm:
            if self._sum is not None:  # the norm needs all of it first
                self._sum.form(0, self.mean.numel())
                self._sum = None
            squares = self.norms(self.mean)
            by_tensor = numbers.get("scope") == "tensor"
            more["norm"] = [root([squares[s.tensor]]) for s in self.segments] if by_tensor else root(squares)
        mine, by_segment = x[self.mine], {**self._by_segment(numbers), **more}
        if self._sum is None or not self._sum.descended(rule, mine, states, by_segment, self._pieces):
            _step(rule, self.cut(x), self._parts(self.mean), states, by_segment, self._negative, self._outer_cache)
        if radius is not None:
            length = root(self.norms(mine))
            if length > radius:
                mine.mul_(radius / length)
        self._sent = flat_kernels.look(mine)
        self.share(x)

    def _negative(self, i: int, d: Tensor, cut: slice) -> Tensor:
        """A piece of the i-th segment's negated mean; added up only now, so that the step finds it in the cache."""
        piece = d[cut]
        if self._sum is None:
            return piece.neg_()
        self._sum.form(self._pieces[i][0] + cut.start, piece.numel(), negative=True)
        return piece

    def share(self, flat: Tensor) -> None:
        """Everybody's stretch of a flat buffer to everybody."""
        mine = flat[self.mine]
        incoming = [flat[self.layout.stretch(k)] for k in range(self.wire.nodes)]
        self.wire.swap([mine] * self.wire.nodes, incoming)

    def share_compared(self, flat: Tensor) -> None:
        """`share` what no later header speaks of: compared at once, and sent once more where it arrived differently."""
        sent = flat_kernels.checksum(flat[self.mine])
        differing: list[tuple[int, int]] = []
        for _ in range(2):
            self.share(flat)
            loaded = [flat_kernels.checksum(flat[self.layout.stretch(k)]) for k in range(self.wire.nodes)]
            rows = self.wire.gather(torch.tensor([sent, *loaded], dtype=torch.int64)).tolist()
            differing = pairs_that_differ([row[0] for row in rows], {k: row[1:] for k, row in enumerate(rows)})
            if not differing:
                return
        raise damaged("the outer state, twice,", *differing[0])

    def norms(self, stretch: Tensor) -> list[float]:
        """The sum of squares of every tensor, from blocks added in block order: the same on every node."""
        return self._assembled(self.wire.gather(self._block_sums(stretch)))

    def _parts(self, stretch: Tensor) -> list[Tensor]:
        """This node's stretch by tensor, padding left out."""
        return [stretch[start : start + count] for start, count in self._pieces]

    def _blocks_of(self, node: int) -> list[int]:
        """The tensor to which each block of a node's stretch belongs."""
        return [s.tensor for s in self.layout.segments(node) for _ in range(-(-(s.stop - s.start) // BLOCK))]

    def _block_sums(self, stretch: Tensor) -> Tensor:
        """Of this node's stretch, padded to the length of the longest."""
        found = torch.zeros(max(map(len, self._blocks)), dtype=torch.float64)
        sums = [(block.double() ** 2).sum() for part in self._parts(stretch) for block in part.split(BLOCK)]
        if sums:
            torch.stack(sums, out=found[: len(sums)])
        return found

    def _assembled(self, sums: Tensor) -> list[float]:
        """Block sums of all stretches as sums by tensor, in block order, then in the order of a node's ranks."""
        found = [0.0] * len(self.names)
        for tensors, row in zip(self._blocks, sums.tolist(), strict=True):
            for tensor, value in zip(tensors, row, strict=False):  # the row is padded
                found[tensor] += value
        if self.shards is None:
            return found
        rows = self.shards.gather(torch.tensor(found, dtype=torch.float64)).tolist()
        return [
            _in_order(column) if i in self._sharded else column[0] for i, column in enumerate(zip(*rows, strict=True))
        ]

    def _by_segment(self, numbers: Hyperparameters) -> dict[str, Any]:
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
        if s.tensor in self._sharded:
            value = local_part(value, self.owners[s.tensor])
        return value.expand(self.shapes[s.tensor]).reshape(-1)[s.start - offset : s.stop - offset].to(self.delta.device)

    def _head(self, t: int, part: bool, share: float, said: Statement) -> Header:
        """This node's header."""
        return Header(
            round=t,
            node=self.wire.node,
            elements=self.layout.total,
            sends=int(part),
            weight=share,
            loss=said.loss,
            steps=said.steps,
            bound=bound_word(said.bound),
            structure=said.structure,
            confirm=int(said.last),
            seconds=said.seconds,
            sent=self._sent.checksum,
            finite=int(self._sent.top < math.inf),
            checksums=tuple(seen.checksum if part else 0 for seen in self._looks),
            weights=self._loaded,
        )

    def _swapped(self, t: int, who: Participants, said: Statement, terms: Terms) -> list[Header]:
        """Everybody's header; this stretch of the displacement of all who take part is in `_received` then.

        Another number of elements ends the run; another round or node is left out later.
        """
        part = self.wire.node in who.shares
        head, nothing = self._head(t, part, who.shares.get(self.wire.node, 0.0), said), self.delta[:0]
        if not self._agreed:  # asked once, on its own: gloo ends a process that gets more than it expects
            self._agree(t, who, self.wire.announce(head), terms)
            self._agreed = True
        outgoing = [self.delta[self.layout.stretch(k)] if part else nothing for k in range(self.wire.nodes)]
        incoming = [row if k in who.shares else nothing for k, row in enumerate(self._received)]
        return self._agree(t, who, self.wire.announce(head, outgoing, incoming), terms)

    def _agree(self, t: int, who: Participants, heads: list[Header], terms: Terms) -> list[Header]:
        """The headers, where all nodes end a round, with as many elements and the weights that this node knows."""
        for k, head in enumerate(heads):
            if head.round < 0:
                raise Damaged(f"Node {k} writes a checkpoint while node {self.wire.node} ends round {t}. {ALIKE}")
            share = who.shares.get(k, 0.0)
            if head.elements != self.layout.total:
                wrong = f"{head.elements} elements, and {self.layout.total} were expected"
            elif head.weight != share:
                wrong = f"a weight of {head.weight:g}, and {share:g} was expected"
            else:
                continue
            raise Damaged(f"Round {t}: node {k} came with {wrong}. Restart all nodes from the last checkpoint.")
        if len({head.structure for head in heads}) > 1:
            raise OtherParameters
        if terms.guard:
            _check_finite(t - 1, heads)
        return heads

    # the weights of the round before, as they were sent and as they were loaded

    def meet(self, round: int, step: int, x: Tensor, guard: bool) -> tuple[list[Header], list[tuple[int, int]]]:
        """Meet all nodes before a checkpoint or after the last round: nodes that loaded other weights load them again.

        Returns the headers, and (owner, receiver) of what was loaded again; the headers alone, where the nodes are not
        at the same step.
        """
        heads = self.wire.announce(at_meeting(self._head(0, False, 0.0, Statement()), round, step))
        if any((head.round, head.steps) != (-1 - round, step) for head in heads):
            return heads, []
        if guard:
            _check_finite(round, heads)
        differing, began_from = self._other_weights(round, heads), self._loaded
        self._load_again(x, heads, differing)
        if step:  # local steps were taken from the other weights: the end of the round must leave them out
            self._loaded = began_from
        return heads, differing

    def _other_weights(self, round: int, heads: Sequence[Header]) -> list[tuple[int, int]]:
        """(owner, receiver) where a receiver loaded other weights of a round than the owner sent.

        The same pair in two rounds in a row ends the run.
        """
        loaded = {k: head.weights for k, head in enumerate(heads)}
        differing = pairs_that_differ([head.sent for head in heads], loaded)
        again = [pair for pair in differing if self._strained.get(pair) == round - 1]
        self._strained.update(dict.fromkeys(differing, round))
        if again:
            raise Damaged(
                f"{other_weights(*again[0], round)}, for the second round in a row. {AT_FAULT} Check them, and restart "
                "all nodes from the last checkpoint."
            )
        return differing

    def _load_again(self, x: Tensor, heads: Sequence[Header], differing: Sequence[tuple[int, int]]) -> None:
        """Give partitions of the weights again to nodes that hold others, from a node that holds the right ones.

        All nodes have the same headers, so all know who sends and who receives.
        """
        here, nothing = self.wire.node, x[:0]
        for owner in sorted({owner for owner, _ in differing}):
            wrong = {receiver for other, receiver in differing if other == owner}
            donor = next((k for k in (owner, *range(self.wire.nodes)) if k not in wrong), None)
            if donor is None:
                raise Damaged(
                    f"No node holds the weights that node {owner} sent. Restart all nodes from the last checkpoint."
                )
            part = x[self.layout.stretch(owner)]
            outgoing = [part if here == donor and k in wrong else nothing for k in range(self.wire.nodes)]
            incoming = [part if here in wrong and k == donor else nothing for k in range(self.wire.nodes)]
            self.wire.swap(outgoing, incoming)
            if here in wrong and flat_kernels.checksum(part) != heads[owner].sent:
                raise damaged("what was sent again of the weights", donor, here)
        if any(receiver == here for _, receiver in differing):
            self._loaded = tuple(head.sent for head in heads)

    # verdicts

    def _bounds(
        self, t: int, who: Participants, heads: Sequence[Header], said: Statement, terms: Terms
    ) -> limits.Limits:
        """How far each participant can have moved."""
        if terms.expected is None:
            return limits.stated(t, heads, who.shares, said.bound, terms.free, self.names, self.wire.gather)
        nodes, tensors = who.shares, len(self.names)
        return limits.agreed(t, heads, nodes, terms.expected, said.bound, terms.free, tensors, self.wire.gather)

    def _verdicts(
        self,
        t: int,
        who: Participants,
        heads: Sequence[Header],
        x: Tensor,
        bounds: limits.Limits,
        differing: Sequence[tuple[int, int]],
        buffers: Sequence[Mapping[str, Tensor]],
        before: Mapping[str, Tensor],
        terms: Terms,
    ) -> dict[int, Exclusion]:
        """Whom everybody leaves out, and why: the worst that anybody saw."""
        places = [*self.names, *(buffers[0] if buffers else ())]
        mine = torch.zeros(self.wire.nodes, 4, dtype=torch.float64)
        owners = {receiver: owner for owner, receiver in reversed(differing)}
        for node in who.shares:
            found = self._by_header(t, node, heads[node], bounds, owners.get(node), terms)
            if found is None:
                found = self._by_displacement(node, heads[node], x, bounds, buffers[node], before, places, terms.guard)
            if found is not None:
                mine[node] = torch.tensor(found, dtype=torch.float64)
        all_seen, judges = self.wire.gather(mine), list(range(self.wire.nodes))
        if self.shards is not None:  # what one rank of a node saw, all of them act on
            all_seen, judges = self.shards.gather(all_seen).flatten(0, 1), judges * self.shards.nodes
        rows = [[tuple(about) for about in judge] for judge in all_seen.tolist()]
        verdicts = unanimous(t, list(who.shares), rows, judges, places)
        if terms.guard:
            self._judge_norms(who, x, bounds.by_node, verdicts)
        return verdicts

    def _by_header(
        self, t: int, node: int, head: Header, bounds: limits.Limits, sender: int | None, terms: Terms
    ) -> Row | None:
        """What a header alone decides. Everybody has the same headers, so everybody decides the same."""
        if not head.sends:
            return verdict_row(Verdict.DROPPED)
        if head.round != t:
            return verdict_row(Verdict.OTHER_ROUND, value=float(head.round), bound=float(t))
        if head.node != node:
            return verdict_row(Verdict.OTHER_NODE, value=float(head.node), bound=float(node))
        if sender is not None:
            return verdict_row(Verdict.OTHER_WEIGHTS, value=float(sender))
        if terms.guard and not 0 <= head.steps <= terms.most_steps:
            return verdict_row(Verdict.TOO_MANY_STEPS, value=float(head.steps), bound=terms.most_steps)
        if terms.guard and node in bounds.wrong:
            return verdict_row(Verdict.OTHER_SETTINGS)
        return None

    def _by_displacement(
        self,
        node: int,
        head: Header,
        x: Tensor,
        bounds: limits.Limits,
        buffers: Mapping[str, Tensor],
        before: Mapping[str, Tensor],
        places: Sequence[str],
        guard: bool,
    ) -> Row | None:
        """What this node's stretch of a displacement decides."""
        received = self._received[node]
        seen = self._looks[node] if node == self.wire.node else flat_kernels.look(received)
        if node != self.wire.node and seen.checksum != head.checksums[self.wire.node]:
            return verdict_row(Verdict.DAMAGED)
        found = self._judged(node, received, seen.top, x, bounds.by_node[node], buffers, before) if guard else None
        if found is None:
            return None
        code = Verdict.NOT_FINITE if found.bound is None else Verdict.BEYOND_BOUND
        return verdict_row(code, places.index(found.tensor), found.value, found.bound or 0.0)

    def _judged(
        self,
        node: int,
        row: Tensor,
        top: float,
        x: Tensor,
        limit: Bound,
        buffers: Mapping[str, Tensor],
        before: Mapping[str, Tensor] | None,
    ) -> Exclusion | None:
        """The guard's word about a node's buffers and this stretch of its displacement; norms come later."""
        if _plainly_within(top, limit):
            return check_displacement(node, [], [], [], Bound(None), buffers, before)
        names = [self.names[s.tensor] for s in self.segments]
        begun = [part.to(self.kinds[s.tensor]) for part, s in zip(self.cut(x), self.segments, strict=True)]
        return check_displacement(node, self._parts(row), begun, names, self._limit_by_segment(limit), buffers, before)

    def _judge_norms(
        self, who: Participants, x: Tensor, limits: Mapping[int, Bound], verdicts: dict[int, Exclusion]
    ) -> None:
        """Bounds on norms need all stretches: block sums are gathered, and everybody decides alike."""
        for node in who.shares:
            limit = limits[node]
            if limit.kind not in ("norm", "tensor norm"):
                continue
            squares = self.norms(self._received[node])
            whole = limit.kind == "norm"
            moved = [root(squares)] if whole else [root([s]) for s in squares]
            if node in verdicts or all(length <= float(per_param(limit.a, i)) for i, length in enumerate(moved)):
                continue
            tensors = self._begun(x)
            groups = [[piece for pieces in tensors for piece in pieces]] if whole else tensors
            for i, (length, group) in enumerate(zip(moved, groups, strict=True)):
                own = limit if whole else Bound(limit.kind, per_param(limit.a, i), per_param(limit.c, i), limit.steps)
                most = exceeded_norm(length, group, own)
                if most is not None:
                    name = "all tensors" if whole else self.names[i]
                    verdicts[node] = Exclusion(node, name, length, most, BEYOND)
                    break

    def _begun(self, x: Tensor) -> list[list[Tensor]]:
        """Where the round began, by tensor, in the parameters' own types: the parts of all ranks of this node."""
        if self.shards is None:
            return [[v.to(kind)] for v, kind in zip(self.layout.views(x, self.shapes), self.kinds, strict=True)]
        padded = x.new_zeros(max(layout.total for layout in self._shard_layouts))
        padded[: x.numel()] = x
        rows = list(zip(self._shard_layouts, self.shards.gather(padded), strict=True))
        found = []
        for i, kind in enumerate(self.kinds):
            ranks = rows if i in self._sharded else rows[:1]
            found.append([row[at.offsets[i] : at.offsets[i] + at.sizes[i]].to(kind) for at, row in ranks])
        return found

    def _limit_by_segment(self, limit: Bound) -> Bound:
        if limit.kind != "coordinate":
            return Bound(None)
        a, c = (self._by_segment({"value": value})["value"] for value in (limit.a, limit.c))
        return Bound(limit.kind, a, c, limit.steps)

    def _everyones(self, buffers: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """The buffers of every node. They are small; every node adds them up by itself."""
        found: list[dict[str, Tensor]] = [{} for _ in range(self.wire.nodes)]
        plain = {name: torch.view_as_real(b.resolve_conj()) if b.is_complex() else b for name, b in buffers.items()}
        for kind in dict.fromkeys(b.dtype for b in plain.values()):  # one message a type, however many buffers
            names = [name for name, b in plain.items() if b.dtype == kind]
            rows = self.wire.gather(torch.cat([plain[name].reshape(-1) for name in names]))
            for name, parts in zip(names, rows.split([plain[name].numel() for name in names], dim=1), strict=True):
                for node, part in enumerate(parts):
                    value = part.view(plain[name].shape)
                    found[node][name] = torch.view_as_complex(value) if buffers[name].is_complex() else value
        return [{name: one[name] for name in buffers} for one in found]


AT_FAULT = "Either of them or the link between them is at fault."


def other_weights(owner: int, receiver: int, round: int) -> str:
    """What happened between two nodes, in words.

    Examples:
        >>> other_weights(0, 2, 5)
        'Node 2 loaded other weights than node 0 sent at the end of round 5'
    """
    if owner == receiver:
        return f"The weights that node {owner} sent at the end of round {round} changed in its own memory"
    return f"Node {receiver} loaded other weights than node {owner} sent at the end of round {round}"


class OtherParameters(Exception):
    """The nodes do not train the same parameters any more; who does what is in their facts."""


def _check_finite(t: int, heads: Sequence[Header]) -> None:
    """End the run where an owner took an outer step to weights that are not finite: named by its own header."""
    owners = [k for k, head in enumerate(heads) if not head.finite]
    if owners:
        raise Damaged(
            f"Round {t} ended with weights that are not finite, in the partition of {named(owners)}. Lower the outer "
            "learning rate; where it is always one node, look at its memory. The last checkpoint is from before."
        )


def _within(steps: int, most: float) -> int:
    """Local steps as a header states them, if they can be true; the node is left out otherwise."""
    return steps if 0 <= steps <= most else 0


def _plainly_within(top: float, limit: Bound) -> bool:
    """Whether the largest magnitude shows that the guard would find nothing: finite, and below the least bound.

    Half the slack leaves room for the roundings of the exact test, which reads the weights too.
    """
    if not top < math.inf:  # NaN too
        return False
    if limit.kind != "coordinate":
        return True
    floors = limit.a if isinstance(limit.a, list) else [limit.a]
    return not any(isinstance(a, Tensor) for a in floors) and top <= min(floors) * (1 + SLACK / 2)


@dataclass(frozen=True)
class _Sum:
    """A weighted mean that is still to be formed, in the memory of the first row."""

    rows: Sequence[Tensor]
    shares: Sequence[float]
    whole: float

    def form(self, start: int, count: int, negative: bool = False) -> None:
        """Add up so many elements."""
        flat_kernels.mean([row[start : start + count] for row in self.rows], self.shares, self.whole, negative)

    def descended(
        self,
        rule: Rule,
        x: Tensor,
        states: Sequence[State],
        numbers: Hyperparameters,
        pieces: Sequence[tuple[int, int]],
    ) -> bool:
        """Add up and take a plain step at once, where the kernel can."""
        return flat_kernels.descend(rule, x, states, numbers, self.rows, self.shares, self.whole, pieces)


def _negated(i: int, d: Tensor, cut: slice) -> Tensor:
    return d[cut].neg_()


def _step(
    rule: Rule,
    own: Sequence[Tensor],
    delta: Sequence[Tensor],
    states: Sequence[State],
    numbers: Hyperparameters,
    negative: Callable[[int, Tensor, slice], Tensor] = _negated,
    cache: StepCache | None = None,
) -> None:
    """The outer step on the negated displacement, which is used up; `negative` gives a piece of the i-th.

    A rule with state goes piece by piece, once it has it: several passes over what then is in the cache, and no
    temporary tensors of the size of a parameter; less than half the time. It is elementwise, so the bits are the same.
    """
    names = rule.state_names
    if not own:  # a node without a stretch
        return
    if not names or any(name not in state for state in states for name in names):
        rule.step(own, [negative(i, d, slice(0, d.numel())) for i, d in enumerate(delta)], states, numbers, cache)
        return
    for i, (x, d, state) in enumerate(zip(own, delta, states, strict=True)):
        mine = {key: per_param(value, i) for key, value in numbers.items()}
        rest = {key: value for key, value in state.items() if key not in names}
        for k in range(0, max(x.numel(), 1), PIECE):
            cut = slice(k, k + PIECE)
            piece = {**rest, **{name: state[name][cut] for name in names}}
            here = {key: v[cut] if isinstance(v, Tensor) and v.dim() else v for key, v in mine.items()}
            rule.step([x[cut]], [negative(i, d, cut)], [piece], here)
        state.update({key: piece[key] for key in rest})  # counters; the tensors were changed where they are


def _mean_buffers(
    mean: BufferMean,
    everyone: Sequence[Mapping[str, Tensor]],
    shares: Mapping[int, float],
    whole: float,
    like: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    for node, share in shares.items():
        mean.add(everyone[node], share)
    return mean.result(whole, like)


def _in_order(values: Sequence[float]) -> float:
    """One rounded addition after another; Python's own `sum` compensates from version 3.12 on."""
    total = 0.0
    for value in values:
        total += value
    return total
