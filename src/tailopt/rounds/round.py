"""One round, as a function of explicit state:

    1. who takes part                       participants.py
    2. each from x, z local steps           an engine's business; what arrives is a Contribution
    3. the guard                            guard.py
    4. delta = sum of share * displacement  in ascending node order
    5. the outer step: x from x and delta   the outer rule, on -delta
    6. projection onto a ball, if asked for
    7. the iterate average, if asked for

Contributions are streamed through one accumulator: a round needs the memory of one node however many there are.
A robust aggregate (robust.py) in the place of step 4 holds them all at once instead.
The order of additions, and their roundings, are the same for every engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tailopt.rounds.blocks import norm
from tailopt.rounds.drops import Dropped, empty
from tailopt.rounds.guard import Bound, Exclusion, judge, within
from tailopt.rounds.participants import Participants
from tailopt.rounds.robust import Aggregate, Displacements, coordinate_median
from tailopt.rules.rule import Numbers, Rule, State

PIECE = 1 << 20  # elements that are scaled at once


@dataclass
class Synchronised:
    """What is common to all nodes after a round.

    weights are kept in the arithmetic's type (fp32 for bf16 and fp16), buffers in their own. flat: one tensor that
    holds all weights, which are views of it; None where their types differ.
    """

    names: list[str]
    weights: list[Tensor]
    buffers: dict[str, Tensor]
    outer: list[State]
    average: list[Tensor] | None = None
    round: int = 0
    flat: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Own:
    """Where a node goes on from whose contribution was lost, with `on_drop="keep"`: copies in the model's own types."""

    weights: list[Tensor]
    buffers: dict[str, Tensor]


@dataclass(slots=True)
class Contribution:
    """What one node did in a round.

    delta: in the arithmetic's type; flat: all of it as one tensor, laid out like that of the synchronised weights, or
    None; inner: its optimizer's state, where it is kept; own: where it ended, if it goes on from there.
    """

    node: int
    start: Sequence[Tensor]
    delta: Sequence[Tensor]
    buffers: Mapping[str, Tensor]
    loss: float
    limit: Bound
    steps: int = 0
    inner: list[State] | None = None
    statistics: Any = None
    flat: Tensor | None = None
    own: Own | None = None


@dataclass
class Report:
    """What happened in a round; losses and statistics of the nodes that counted, inner states of the sound ones.

    own: where those go on from whose contributions were lost, if it is not from the synchronised weights.
    Real nodes add: seconds of their local steps, remarks about nodes that differ from the others, whether this may be
    the last round, and notes about weights that a node had to load again.
    """

    excluded: list[Exclusion] = field(default_factory=list)
    used: dict[int, float] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    inner: dict[int, list[State]] = field(default_factory=dict)
    statistics: list[Any] = field(default_factory=list)
    own: dict[int, Own] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    remarks: dict[int, str] = field(default_factory=dict)
    last: bool = False
    notes: list[str] = field(default_factory=list)

    def loss(self) -> float:
        """The mean over the nodes that counted, with their weights; NaN where nothing arrived."""
        return sum(self.used[i] * loss for i, loss in self.losses.items()) if self.used else math.nan


class EveryoneExcluded(RuntimeError):
    """No displacement of a round could be used."""

    @classmethod
    def of(cls, t: int, excluded: Sequence[Exclusion]) -> EveryoneExcluded:
        """With the reasons of all of them."""
        reasons = "; ".join(map(str, excluded)) or "nobody with a weight above 0 took part"
        return cls(f"Round {t}: no displacement can be used: {reasons}.")


@dataclass
class Collected:
    """The mean displacement and mean buffers of a round, with what happened on the way.

    Where every contribution was lost there is no mean: delta is empty, and the buffers are those of before.
    """

    delta: list[Tensor]
    buffers: dict[str, Tensor]
    report: Report


def collect(
    state: Synchronised,
    contributions: Iterable[Contribution],
    who: Participants,
    guard: bool = True,
    aggregate: Aggregate | None = None,
    lost: Collection[int] = (),
) -> Collected:
    """Steps 2 to 4: judge what arrives and add it up. `state` is read, never changed.

    aggregate: a robust one in the mean's place, for equal shares; floating buffers then take the coordinate median.
    lost: nodes whose contributions do not arrive. Nobody judges them, and their inner states move on.
    """
    report = Report()
    mean: _Sum | _Held = _Sum()
    buffers = BufferMean()
    counted: dict[int, float] = {}
    counting = _judged(state, _arrived(contributions, lost, report), guard, report)
    if aggregate is not None:
        counting = _without_outliers(counting, aggregate, report)
        combine = aggregate.combine()
        mean = mean if combine is None else _Held(combine)
        buffers = BufferMean.median()
    for c in counting:
        share = counted[c.node] = who.shares[c.node]
        mean.add(c.delta if c.flat is None else [c.flat], share)
        buffers.add(c.buffers, share)
        report.losses[c.node] = c.loss
        if c.inner is not None:
            report.inner[c.node] = c.inner
        if c.statistics is not None:
            report.statistics.append(c.statistics)
    if not any(counted.values()):
        if not empty(report.excluded):
            raise EveryoneExcluded.of(state.round + 1, report.excluded)
        report.losses, report.statistics = {}, []
        return Collected([], state.buffers, report)
    whole = 1.0 if not report.excluded else math.fsum(counted.values())
    report.used = {i: share / whole for i, share in counted.items()}
    delta = mean.result(whole)
    if delta[0].shape != state.weights[0].shape:  # it was added up as one tensor
        delta = [delta[0].as_strided(w.shape, w.stride(), w.storage_offset()) for w in state.weights]
    return Collected(delta, buffers.result(whole, state.buffers), report)


def _arrived(contributions: Iterable[Contribution], lost: Collection[int], report: Report) -> Iterator[Contribution]:
    """Those that are not lost; a node's samplers and inner state move on, whether it counts or not."""
    for c in contributions:
        report.steps[c.node] = c.steps
        if c.node not in lost:
            yield c
            continue
        report.excluded.append(Dropped.of(c.node))
        if c.inner is not None:
            report.inner[c.node] = c.inner
        if c.own is not None:
            report.own[c.node] = c.own


def _judged(
    state: Synchronised, contributions: Iterable[Contribution], guard: bool, report: Report
) -> Iterator[Contribution]:
    """Those that the guard lets pass, one by one."""
    for c in contributions:
        found = None
        if guard and not (c.flat is not None and not c.buffers and within(c.flat, c.limit)):
            found = judge(c.node, c.delta, c.start, state.names, c.limit, c.buffers, state.buffers)
        if found is None:
            yield c
        else:
            report.excluded.append(found)


def _without_outliers(
    contributions: Iterable[Contribution], aggregate: Aggregate, report: Report
) -> Iterator[Contribution]:
    """All of them copied, since each is gone when the next one is asked for; then those that the aggregate keeps."""
    held = [
        replace(
            c, flat=None, delta=[d.clone() for d in c.delta], buffers={name: b.clone() for name, b in c.buffers.items()}
        )
        for c in contributions
    ]
    far = aggregate.outliers([c.delta for c in held], [c.node for c in held]) if held else []
    report.excluded += far
    left_out = {e.node for e in far}
    yield from (c for c in held if c.node not in left_out)


def finish(
    state: Synchronised, found: Collected, outer: Rule, numbers: Numbers, projection: float | None = None
) -> None:
    """Steps 5 to 7: `state` moves on to the next synchronised weights. The collected mean is used up."""
    state.buffers = found.buffers
    if found.report.used:  # nothing arrived: nothing moves
        outer_step(state, found.delta, outer, numbers)
        if projection is not None:
            project(state.weights, projection)
    state.round += 1
    if state.average is not None:
        # x~ = sum of r x_r over sum of r: the share of the last one is r / (1 + ... + r)
        torch._foreach_lerp_(state.average, state.weights, 2.0 / (state.round + 1))


def outer_step(state: Synchronised, delta: list[Tensor], outer: Rule, numbers: Numbers) -> None:
    """x from x and the mean displacement: the outer rule on the negated displacement, which is used up."""
    more = {}
    if outer.name in ("biclip-l2", "l2clip"):
        by_tensor = numbers.get("scope") == "tensor"
        more["norm"] = [norm([d]) for d in delta] if by_tensor else norm(delta)
    torch._foreach_neg_(delta)
    outer.step(state.weights, delta, state.outer, {**numbers, **more})


def project(weights: Sequence[Tensor], radius: float) -> None:
    """x <- x * min(1, radius / |x|), one norm over all tensors."""
    length = norm(weights)
    if length > radius:
        torch._foreach_mul_(list(weights), radius / length)


class _Sum:
    """acc = share * delta of the first, then acc + (share * delta) with two roundings."""

    def __init__(self) -> None:
        self._acc: list[Tensor] = []

    def add(self, delta: Sequence[Tensor], share: float) -> None:
        """Add one; a large tensor in pieces, so that no further copy of a model is needed."""
        # not add(alpha=share), which is a fused multiply-add on some processors
        if not self._acc:
            self._acc = [d * share for d in delta]
            return
        for acc, d in zip(self._acc, delta, strict=True):
            if d.numel() <= PIECE or not (acc.is_contiguous() and d.is_contiguous()):
                acc.add_(d * share)
                continue
            for a, part in zip(acc.view(-1).split(PIECE), d.view(-1).split(PIECE), strict=True):
                a.add_(part * share)

    def result(self, whole: float) -> list[Tensor]:
        """The sum; divided by the weight that counted, where somebody did not."""
        if whole != 1.0:
            for acc in self._acc:  # by a tensor: some devices divide by a number through its reciprocal
                acc.div_(torch.tensor(whole, dtype=torch.float64).to(acc))
        return self._acc


class _Held:
    """In the place of a sum: what needs all displacements at once. They must not change until the result is taken."""

    def __init__(self, combine: Callable[[Displacements], list[Tensor]]) -> None:
        self._combine = combine
        self._all: list[Sequence[Tensor]] = []

    def add(self, delta: Sequence[Tensor], share: float) -> None:
        self._all.append(delta)

    def result(self, whole: float) -> list[Tensor]:
        return self._combine(self._all)


class BufferMean:
    """Floating buffers are averaged like displacements, integer ones take the maximum."""

    def __init__(self, mean: Callable[[], _Sum | _Held] = _Sum) -> None:
        self._mean = mean
        self._means: dict[str, _Sum | _Held] = {}
        self._others: dict[str, Tensor] = {}

    @classmethod
    def median(cls) -> BufferMean:
        """With the coordinate median of the floating ones: what goes with a robust aggregate."""
        return cls(partial(_Held, coordinate_median))

    def add(self, buffers: Mapping[str, Tensor], share: float) -> None:
        for name, buffer in buffers.items():
            if buffer.is_floating_point() or buffer.is_complex():
                real = torch.view_as_real(buffer) if buffer.is_complex() else buffer
                wide = real.to(torch.float64 if real.dtype == torch.float64 else torch.float32)
                self._means.setdefault(name, self._mean()).add([wide], share)
            elif name in self._others:
                self._others[name] = torch.maximum(self._others[name], buffer)
            else:
                self._others[name] = buffer.clone()

    def result(self, whole: float, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = dict(self._others)
        for name, mean in self._means.items():
            (value,) = mean.result(whole)
            found[name] = (torch.view_as_complex(value) if like[name].is_complex() else value).to(like[name].dtype)
        return {name: found[name] for name in like}
