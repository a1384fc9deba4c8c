"""Real nodes: `tailopt.NestedOptimizer` for any training loop under torchrun, every process group member a node.

After exactly `local_steps` completed inner steps the nodes exchange what they moved and take the outer step together
(`exchange.py`); the same round as in a simulation, with the same bits. A node that does not take part in a round takes
no step in it: `step()` returns only when its own next round begins, and until then it serves the exchanges.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from tailopt.algorithms import Algorithm
from tailopt.arguments import (
    check_counts,
    check_flags,
    check_function,
    check_projection,
    checked_loggers,
    checked_seed,
)
from tailopt.clipping.shards import by_ranks, is_dtensor, local_part, over_shards
from tailopt.distributed import flat_kernels
from tailopt.distributed.checkpointing import (
    Crew,
    Keeper,
    Resumed,
    all_excluded,
    counted,
    described,
    generators,
    load_inner,
    one_by_one,
    restore,
    set_generators,
)
from tailopt.distributed.exchange import AT_FAULT, Exchange, OtherParameters, Statement, Terms, Wire, other_weights
from tailopt.distributed.header import PROTOCOL, word_of
from tailopt.distributed.peers import Disagreement, comparable, shape
from tailopt.distributed.resume_checks import FirstInputs, Rates, rates
from tailopt.engines.sequential import Buffers, real
from tailopt.optimizers.biclip import BiClip
from tailopt.optimizers.l2clip import L2Clip
from tailopt.rounds import robust
from tailopt.rounds.blocks import root, squares
from tailopt.rounds.drops import DROPPED, ON_DROP
from tailopt.rounds.guard import Bound, bound
from tailopt.rounds.participants import Chooser, Participants, Sampling, check_weight, checked_weights, how_many
from tailopt.rounds.round import EveryoneExcluded, Own, Report
from tailopt.rounds.settings import Settings
from tailopt.rules.adagrad import ADAGRAD
from tailopt.rules.adam import ADAM, ADAMW, fresh
from tailopt.rules.biclip import BICLIP
from tailopt.rules.l2clip import BICLIP_L2
from tailopt.rules.rule import Numbers, Rule, State

NO_RUN_FOLDER = "There is no run folder, so the run begins again: give NestedOptimizer run=... and resume=True."
UNSYNCHRONISED = "which is not synchronised"
COMPARED = 8  # rounds of which nodes tell each other whom a function chooses


class Node:
    """This process as a node: its parameters, the synchronised weights, its part of the outer state."""

    def __init__(self, wire: Wire, names: Sequence[str], params: Sequence[Tensor], buffers: Buffers | None) -> None:
        self.params = list(params)
        self.buffers = buffers
        self._simple = not any(is_dtensor(p) or p.is_complex() for p in self.params)
        own = self.local()
        shapes, kinds = [p.shape for p in own], [p.dtype for p in own]
        self.exchange = Exchange(wire, list(names), shapes, kinds, _shards(wire.group, self.params), self.params)
        self.x = flat_kernels.room(self.exchange.layout.total, self.exchange.dtype)
        self.outer: list[State] = [{} for _ in self.exchange.segments]
        self.average: Tensor | None = None
        self.round = 0
        self.own: Own | None = None  # where this node goes on from, if that is not from the synchronised weights
        self._views = self.exchange.layout.views(self.x, self.exchange.shapes)
        self._before: dict[str, Tensor] = {}
        torch._foreach_copy_(self._views, own)

    def local(self) -> list[Tensor]:
        """This rank's part of every parameter, as real tensors that share its memory."""
        if self._simple:  # asked for twice a round: small models notice
            return [p.detach() for p in self.params]
        return [real(_local(p)) for p in self.params]

    @torch.no_grad()
    def start(self) -> None:
        """Every node's weights are node 0's: the first round starts from the same vector."""
        wire = self.exchange.wire
        buffers = self._buffers()
        for flat in (self.x, *buffers.values()):
            wire.broadcast(flat)
        self._load_buffers(buffers)
        self.restart()

    def restart(self) -> None:
        """Begin with synchronised weights that no round has sent: node 0's, or those of a checkpoint."""
        self.load()
        self.exchange.restart(self.x)

    @torch.no_grad()
    def load(self) -> None:
        """Put the synchronised weights into the parameters."""
        self.exchange.load(self.local(), self.x)

    def confirm(self, guard: bool) -> list[str]:
        """Meet the others after what may be the last round: a node that loaded other weights loads them again.

        Returns what is worth a warning.
        """
        _, differing = self.exchange.meet(self.round, 0, self.x, guard)
        return self.loaded_again(differing)

    def loaded_again(self, differing: Sequence[tuple[int, int]]) -> list[str]:
        """Put weights that came again into the parameters, and say between which nodes they differed."""
        if any(receiver == self.exchange.wire.node for _, receiver in differing):
            self.load()
        return [f"{other_weights(*pair, self.round)}; it has loaded them again. {AT_FAULT}" for pair in differing]

    def _buffers(self) -> dict[str, Tensor]:
        """The buffers where the exchange is, on the CPU: themselves, or copies."""
        return {name: b.cpu().contiguous() for name, b in self.buffers.now().items()} if self.buffers else {}

    def _load_buffers(self, values: Mapping[str, Tensor]) -> None:
        """Put buffers into the model, and remember how the round begins."""
        if self.buffers:
            self.buffers.load(values)
            self._before = {name: b.clone() for name, b in self._buffers().items()}

    def begun_buffers(self) -> Mapping[str, Tensor]:
        """The buffers as the round began: the same on every node."""
        return self._before

    def begin_with(self, buffers: Mapping[str, Tensor]) -> None:
        """The buffers of a round that begins."""
        self._load_buffers(buffers)

    @torch.no_grad()
    def close(
        self,
        who: Participants,
        said: Statement,
        terms: Terms,
        outer: Rule,
        numbers: Numbers,
        projection: float | None = None,
        send: bool = False,
        on_drop: str = "sync",
    ) -> Report:
        """End the round: exchange displacements, take the outer step, load the new weights.

        send: the outer second moment travels with the weights. With on_drop "keep", what this node had is set aside
        where its contribution was lost.
        """
        exchange = self.exchange
        if exchange.wire.node in who.shares:
            exchange.moved(self.local(), self.x)
        report, mean = exchange.close(self.round + 1, who, self.x, self._buffers(), self._before, said, terms)
        if exchange.wire.node in who.shares:
            lost = any(e.node == exchange.wire.node and e.reason == DROPPED for e in report.excluded)
            self.own = self._copied() if lost and on_drop == "keep" else None
        if report.used:  # where nothing arrived, nothing moves
            exchange.outer(self.x, self.outer, outer, numbers, projection)
        if send:
            self.second_moment = self._gathered("exp_avg_sq")
        self.round += 1
        if self.average is not None:
            self.average[exchange.mine].lerp_(self.x[exchange.mine], 2.0 / (self.round + 1))
        self._load_buffers(mean)
        self.load()
        if report.last:
            report.notes = self.confirm(terms.guard)
        return report

    second_moment: Tensor | None = None

    def _copied(self) -> Own:
        buffers = {name: b.clone() for name, b in self.buffers.now().items()} if self.buffers else {}
        return Own([p.clone() for p in self.local()], buffers)

    @torch.no_grad()
    def go_on(self) -> None:
        """Begin a round of one's own: from the synchronised weights, or from what was set aside."""
        if self.own is not None:
            torch._foreach_copy_(self.local(), self.own.weights)
            if self.buffers:
                self.buffers.load(self.own.buffers)

    def _gathered(self, name: str) -> Tensor:
        """A tensor of the outer state, from everybody's stretch."""
        flat = torch.zeros_like(self.x)
        for part, state in zip(self.exchange.cut(flat), self.outer, strict=True):
            if name in state:
                part.copy_(state[name])
        self.exchange.share_compared(flat)
        return flat

    def preconditioned(self, step: int) -> list[State]:
        """Adam's state of a node that begins a round with the outer second moment."""
        assert self.second_moment is not None
        parts = self.exchange.layout.views(self.second_moment, self.exchange.shapes)
        return [fresh(p, v, step) for p, v in zip(self.local(), parts, strict=True)]


class RuleOptimizer(Optimizer):
    """An update rule as an optimizer: the inner optimizer that `NestedOptimizer.from_algorithm` builds."""

    def __init__(self, params: Iterable[Tensor], rule: Rule, numbers: Numbers) -> None:
        self.rule = rule
        super().__init__(params, dict(numbers))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; returns what the closure returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            every = group["params"]
            moving = [i for i, p in enumerate(every) if p.grad is not None]
            numbers = {
                key: _chosen(value, moving) for key, value in group.items() if key not in ("params", "param_names")
            }
            params = [every[i] for i in moving]
            states = [self.state[p] for p in params]
            if params:
                own, grads = [real(_local(p)) for p in params], [real(_local(p.grad)) for p in params]
                if any(map(is_dtensor, params)):
                    numbers = {key: _shares(value, params) for key, value in numbers.items()}
                    if self.rule.name in ("biclip-l2", "l2clip"):
                        numbers["norm"] = _norms(params, grads, numbers.get("scope") == "tensor")
                self.rule.step(own, grads, states, numbers)
        return loss


def _shares(value: Any, params: Sequence[Tensor]) -> Any:
    """A number, with tensors cut like the parameters against which they broadcast."""
    if isinstance(value, Tensor) and value.dim():
        value = [value] * len(params)
    if not isinstance(value, list):
        return value
    cut = [isinstance(v, Tensor) and v.dim() > 0 and is_dtensor(p) for v, p in zip(value, params, strict=True)]
    return [local_part(v, p) if c else v for v, p, c in zip(value, params, cut, strict=True)]


def _norms(params: Sequence[Tensor], grads: Sequence[Tensor], by_tensor: bool) -> Any:
    """The norm of a gradient of which this rank has a part, or of each of its tensors."""
    sums = torch.tensor([squares(g) for g in grads], dtype=torch.float64)
    for groups, members in by_ranks(params).items():
        sums[members] = over_shards(sums[members], groups, lambda parts: parts.sum(0))
    return [root([s]) for s in sums.tolist()] if by_tensor else root(sums.tolist())


def _chosen(value: Any, moving: Sequence[int]) -> Any:
    return [value[i] for i in moving] if isinstance(value, list) else value


class NestedOptimizer(Optimizer):
    """Local steps by any optimizer; after every `local_steps` of them the nodes synchronise.

        x_i <- inner steps from x;    delta = sum of w_i (x_i - x);    x <- outer step(x, delta)

    `param_groups` and `state` are the inner optimizer's own, so schedulers, scalers and checkpoints see that one. Every
    process is a node, or every rank of `mesh`. Construct it on all nodes, after `torch.distributed.init_process_group`;
    the weights of node 0 are everybody's.

    Args:
        optimizer: the inner optimizer.
        outer: a name (avg, sgd, nesterov, biclip, biclip-l2, adagrad, rmsprop, adam) or a class of torch.optim.
        outer_settings: its settings: olr, o_u, o_d, oeps, momentum, outer_betas, bias_correction.
        local_steps: inner steps of a round.
        model: for the names of parameters and for buffers; without it parameters are called 0, 1, ... and buffers stay
            local.
        mesh: the nodes: a DeviceMesh of one dimension, such as `mesh["node"]`, or a process group; by default all
            processes.
        weight: of this node in the mean.
        participation, participants, sampling, seed, projection, average, guard, aggregate: as in `tailopt.simulate`.
        on_drop: where this node goes on when its contribution to a round is lost: "sync", from the synchronised
            weights, or "keep", from its own; then its next displacement is everything since, and only its finiteness
            is judged.
        inner_state: "keep", or "reset" to make the inner optimizer's state anew in every round.
        rounds: after so many the run is `finished`; needed where not everybody takes part in every round, so that
            nobody waits for nodes that have left.
        timeout: for how many seconds a node may show no sign of life; then all others end with `NodeLost`, which names
            it. A slow node shows signs of life: after this time a warning names it.
        stall_timeout: for how many seconds a node may show signs of life and make no progress (no local step) while
            others wait for it; then they end with `NodeLost`. By default for as long as it likes.
        exact: refuse nodes whose torch, instruction set or number of threads differ; else that is warned of, since a
            replay of the run could not have its exact bits.
        run: a folder that all nodes share, for configuration, history and checkpoints. `resume` goes on from its last
            sound checkpoint, or begins where there is none; `resumed` then says where. Build it last: it gives weights,
            inner state, learning rates and torch's generators back.
        checkpoint_every, keep: rounds between checkpoints, and how many are kept.
        extra: a function of no arguments: what this node's checkpoints at the ends of rounds hold besides, such as the
            position in the data: tensors and plain values. It comes back as `resumed.extra`.
        describe: what else stands in the run folder's configuration. All nodes must give the same, except for devices
            and paths of data.
        loggers: functions that are given every row of the history, at the end of its round.

    Examples:
        Under `torchrun --nproc-per-node 2`, see examples/two_nodes.py.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        outer: str | type[Optimizer] = "avg",
        outer_settings: Mapping[str, Any] | None = None,
        *,
        local_steps: int,
        model: torch.nn.Module | None = None,
        mesh: DeviceMesh | dist.ProcessGroup | None = None,
        weight: float = 1.0,
        participation: float | Chooser = 1.0,
        participants: int | None = None,
        sampling: str = "uniform",
        seed: int = 0,
        guard: bool = True,
        aggregate: str | robust.Aggregate = "mean",
        on_drop: str = "sync",
        projection: float | None = None,
        inner_state: str = "keep",
        average: bool = False,
        rounds: int | None = None,
        timeout: float = 60.0,
        stall_timeout: float | None = None,
        exact: bool = False,
        run: str | os.PathLike[str] | None = None,
        resume: bool = False,
        checkpoint_every: int = 1,
        keep: int = 3,
        extra: Callable[[], Mapping[str, Any]] | None = None,
        describe: Mapping[str, Any] | None = None,
        loggers: Sequence[Callable[[dict[str, Any]], None]] = (),
        settings: Settings | None = None,
        algorithm: Algorithm | None = None,
    ) -> None:
        check_counts(local_steps=local_steps, checkpoint_every=checkpoint_every, keep=keep)
        if rounds is not None:
            check_counts(rounds=rounds)
        if inner_state not in ("keep", "reset"):
            raise ValueError(f'Invalid inner_state: {inner_state!r}; need "keep" or "reset".')
        if on_drop not in ON_DROP:
            raise ValueError(f'Invalid on_drop: {on_drop!r}; need "sync" or "keep".')
        robust.chosen(aggregate, sampling=sampling)
        check_flags(guard=guard, average=average, exact=exact, resume=resume)
        check_projection(projection)
        check_function("extra", extra, "a function of no arguments that returns a mapping, or None")
        check_weight(weight, dist.get_rank() if dist.is_initialized() else 0)
        loggers, seed = checked_loggers(loggers), checked_seed(seed)
        if resume and run is None:
            raise ValueError("Invalid resume: there is no run folder to go on from. Give it as `run`.")
        if not dist.is_initialized():
            raise RuntimeError(
                "There are no other nodes: call torch.distributed.init_process_group() first, under torchrun."
            )
        self.optimizer = optimizer
        self._checkpoint_every, self._extra = (checkpoint_every if run is not None else None), extra
        self.local_steps, self._guard, self._projection, self._inner_state = local_steps, guard, projection, inner_state
        self._on_drop, self._aggregate = on_drop, robust.chosen(aggregate)
        self._apart: set[int] = set()  # nodes that go on from weights of their own
        self._remarked: set[int] = set()  # nodes that were warned about
        self._flags: tuple[Any, int] = (None, 0)  # which parameters train, and a digest of it
        self._began = time.perf_counter()  # of this node's local steps
        self._inner_before: Any = None  # this node's inner state as its round began, for one that is excluded
        self._algorithm = algorithm or Algorithm(outer, "sgd", outer_settings or {}, {"ilr": 0.0})
        names, params = _named(optimizer, model)
        self._settings = settings
        self._outer_settings = settings or Settings(self._algorithm, None, names)
        group = _across(mesh)
        _shards(group, params)  # before anybody is asked: the ranks of a node have nothing to agree on
        wire = Wire.of(group, timeout, stall_timeout)
        self._peers = wire.peers
        held = Buffers(model) if model is not None else None
        self._sampling = Sampling((), how_many(wire.nodes, participation, participants), sampling, seed)
        self.rounds = rounds
        if self._peers is not None:  # before the first collective: gloo ends the process where sizes differ
            facts = self._facts(wire.nodes, names, params, held, average)
            self._peers.agree({**facts, "resume": resume, "configuration": comparable(describe or {})}, exact)
        weights = wire.gather(torch.tensor([float(weight)], dtype=torch.float64)).reshape(-1).tolist()
        self._sampling = replace(self._sampling, weights=checked_weights(weights, wire.nodes))
        robust.chosen(aggregate, self._sampling.weights, sampling)
        self.node = Node(wire, names, params, held)
        self._structure()
        self._flags_at_start = self._flags[0]
        if average:
            self.node.average = torch.zeros_like(self.node.x)
        self.node.start()
        self._taken = [0] * wire.nodes  # local steps of every node
        self.history: list[dict[str, Any]] = []
        self._done: list[Numbers] = []
        self._loss = float("nan")
        self._loggers = tuple(loggers)
        self._hooks_made()
        self.resumed: Resumed | None = None
        self._brought: dict[str, Any] | None = {}  # what `extra` would give, while nobody can have set it up yet
        self._rates: Rates | None = None
        self._inputs: FirstInputs | None = None
        self._first_inputs: list[int] = []
        self._keeper = self._keeper_of(run, resume, keep, participation, participants, describe)
        if self._peers is not None:
            self._peers.can_go_on_from(_last_good(self._keeper))
        in_the_middle = self._gone_on(resume)
        if model is not None and self._keeper is not None:
            self._inputs = FirstInputs(model, self._first_inputs, self.resumed is not None, in_the_middle)
        if not in_the_middle:
            self._await_own_round()
        elif self._inputs is not None:
            self._inputs.begin()
        self._brought = None

    def _facts(
        self, nodes: int, names: Sequence[str], params: Sequence[Tensor], buffers: Buffers | None, average: bool
    ) -> dict[str, Any]:
        """What must be the same on all nodes."""
        algorithm, settings = self._algorithm, self._settings
        shapes = [f"{name}: {shape(real(_local(p)))}" for name, p in zip(names, params, strict=True)]
        words = ("params", "param_names")
        groups = [{k: v for k, v in group.items() if k not in words} for group in self.optimizer.param_groups]
        return {
            "protocol": PROTOCOL,
            "parameters": shapes,
            "buffers": [f"{name}: {shape(b)}" for name, b in buffers.now().items()] if buffers else [],
            "algorithm": algorithm.name if settings is not None else f"{type(self.optimizer).__name__} inside",
            "outer": {"rule": algorithm.outer, **self._outer_settings.outer(1)},
            "inner": settings.inner(1, 0) if settings is not None else groups,
            "inner_state": self._inner_state,
            "send_preconditioner": algorithm.send_preconditioner,
            "local_steps": self.local_steps,
            "rounds": self.rounds,
            "schedules": {} if settings is None else settings.scheduled(self.rounds, self.local_steps),
            "participants": self._sampling.compared(nodes, min(self.rounds or COMPARED, COMPARED)),
            "sampling": self._sampling.kind,
            "seed": self._sampling.seed,
            "projection": self._projection,
            "guard": self._guard,
            "aggregate": "mean" if self._aggregate is None else str(self._aggregate),
            "on_drop": self._on_drop,
            "average": average,
            "checkpoint_every": self._checkpoint_every,
        }

    def _hooks_made(self) -> None:
        """What the base class would have set; the groups and the state are the inner optimizer's."""
        self._optimizer_step_pre_hooks: Any = OrderedDict()
        self._optimizer_step_post_hooks: Any = OrderedDict()
        self._optimizer_state_dict_pre_hooks: Any = OrderedDict()
        self._optimizer_state_dict_post_hooks: Any = OrderedDict()
        self._optimizer_load_state_dict_pre_hooks: Any = OrderedDict()
        self._optimizer_load_state_dict_post_hooks: Any = OrderedDict()

    @classmethod
    def from_algorithm(
        cls, model: torch.nn.Module, algorithm: Algorithm, *, schedules: Any = None, **settings: Any
    ) -> NestedOptimizer:
        """Build the inner optimizer too, from an algorithm; the way to adam2, and to the simulation's very bits."""
        pairs = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        at = Settings(algorithm, schedules, [name for name, _ in pairs])
        inner = RuleOptimizer([p for _, p in pairs], algorithm.rule("inner"), at.inner(1, 0))
        settings.setdefault("inner_state", algorithm.inner_state)
        return cls(inner, algorithm.outer, model=model, settings=at, algorithm=algorithm, **settings)

    # the inner optimizer's own

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the inner optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the inner optimizer."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Those of the inner optimizer."""
        return self.optimizer.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the inner optimizer does it."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """That of the inner optimizer; outer state is checkpointed by round."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the inner optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One inner step; every `local_steps`-th also ends the round."""
        t = self.node.round + 1
        if self._peers is not None:
            self._peers.at(t, len(self._done))
            self._peers.check()
        if self._settings is not None:
            for group in self.optimizer.param_groups:
                group.update(self._settings.inner(t, self._taken[self.node.exchange.wire.node] + len(self._done)))
        elif self._rates is not None:
            self._rates.check(self.optimizer)
        numbers = self._numbers()
        loss = self.optimizer.step(closure) if closure is not None else self.optimizer.step()
        # only now: a step that raised is no step, and a caller who catches that goes on in the same round
        self._done.append(numbers)
        if len(self._done) >= self.local_steps:
            self._close()
            self._await_own_round()
        return loss

    def report(self, loss: float) -> None:
        """The loss of this round on this node, for the history."""
        self._loss = loss

    def synchronize(self) -> None:
        """End the round now, with the local steps that have been taken: after the last batch, or to evaluate."""
        if self._done:
            self._close(last=True)
            self._await_own_round()

    # ---- rounds ----

    def _await_own_round(self) -> None:
        """Serve the rounds that this node does not take part in."""
        self._begin()
        self._began = time.perf_counter()
        while not self.finished and self.node.exchange.wire.node not in self._sampling.draw(self.node.round + 1).shares:
            self._close()
            self._begin()
        if not self.finished:
            self.node.go_on()
            self._remember()
            self._began = time.perf_counter()
            if self._inputs is not None:
                self._inputs.begin()

    def _remember(self) -> None:
        """A kept inner state as the round begins: to that it goes back where this node is excluded."""
        if self._inner_state == "keep" and (self._guard or self._aggregate is not None):
            self._inner_before = copy.deepcopy(self.optimizer.state_dict()["state"])

    def _forget(self) -> None:
        """Undo what this round did to the inner state."""
        if self._inner_state == "keep" and self._inner_before is not None:
            load_inner(self.optimizer, {**self.optimizer.state_dict(), "state": self._inner_before})

    @property
    def finished(self) -> bool:
        """Whether all `rounds` are done; never, where their number was not given."""
        return self.rounds is not None and self.node.round >= self.rounds

    def _begin(self) -> None:
        self._done = []
        if self._inner_state == "reset":
            self.optimizer.state.clear()
            if self._algorithm.send_preconditioner and self.node.round:
                step = 0 if self._algorithm.send_preconditioner == "raw" else self.node.round
                for p, state in zip(self.node.params, self.node.preconditioned(step), strict=True):
                    self.optimizer.state[p] = state

    def _close(self, last: bool = False) -> None:
        """End the round with all nodes. last: it may be the last one, so that the new weights are compared at once."""
        t = self.node.round + 1
        if self._peers is not None:
            self._peers.at(t, len(self._done))
        who = self._sampling.draw(t)
        if self._inputs is not None:
            self._inputs.end(t)
        said = Statement(
            len(self._done),
            self._own_bound(t),
            self._loss,
            time.perf_counter() - self._began,
            self._structure(),
            last or t == self.rounds,
        )
        expected = None if self._settings is None else functools.partial(self._agreed_bound, t)
        try:
            report = self.node.close(
                who,
                said,
                Terms(self._guard, expected, self._apart, self.local_steps, self._aggregate),
                self._outer_settings.outer_rule,
                self._outer_settings.outer(t),
                self._projection,
                bool(self._algorithm.send_preconditioner),
                self._on_drop,
            )
        except EveryoneExcluded as error:
            raise all_excluded(error, self._keeper) from None
        except OtherParameters:
            raise self._other_parameters(t) from None
        for node, steps in report.steps.items():
            self._taken[node] += steps
        if self.node.exchange.wire.node in {e.node for e in report.excluded if e.reason != DROPPED}:
            self._forget()
        times = {i: who.drawn.count(i) for i in who.shares}
        self.history.append(
            {
                "round": t,
                "loss": report.loss(),
                "participants": who.drawn,
                "steps": [report.steps[i] for i in who.drawn],
                "weights": [report.used.get(i, 0.0) / times[i] for i in who.drawn],
                "excluded": [e.as_dict() for e in report.excluded],
                "metrics": {},
                "statistics": {},
            }
        )
        self._set_apart(self.history[-1])
        self._warn(t, report)
        if self._flags[0] != self._flags_at_start:
            self._refuse_unsynchronised(t)
        for logger in self._loggers:
            logger(self.history[-1])
        self._keep_round(report)

    def _warn(self, t: int, report: Report) -> None:
        """Warn about nodes that do not count in a round, and once about each node that differs from the others."""
        texts = [f"Round {t} goes on without {e}." for e in report.excluded if e.reason != DROPPED]
        for node, text in report.remarks.items():
            if node not in self._remarked:
                self._remarked.add(node)
                texts.append(text)
        texts += report.notes
        for text in texts:
            warnings.warn(text, UserWarning, stacklevel=4)
            if self._keeper is not None:
                self._keeper.log(text)

    # ---- the parameters that are trained ----

    def _structure(self) -> int:
        """A digest of which parameters train: a parameter that is frozen or added on one node only is noticed."""
        flags = tuple((id(p), p.requires_grad) for group in self.optimizer.param_groups for p in group["params"])
        if flags != self._flags[0]:
            self._flags = flags, word_of(json.dumps(self._trained()).encode())
        return self._flags[1]

    def _trained(self) -> list[str]:
        """The parameters of every group that train, by name; what is not synchronised is called so."""
        names = {id(p): name for name, p in zip(self.node.exchange.names, self.node.params, strict=True)}
        return [
            f"group {k}: {names.get(id(p), f'{shape(_local(p))}, {UNSYNCHRONISED}')}"
            for k, group in enumerate(self.optimizer.param_groups)
            for p in group["params"]
            if p.requires_grad
        ]

    def _refuse_unsynchronised(self, t: int) -> None:
        """Parameters that were added or unfrozen on all nodes alike would train on each node by itself."""
        added = [text for text in self._trained() if text.endswith(UNSYNCHRONISED)]
        if added:
            raise ValueError(
                f"Round {t}: {added[0]}: it was added or unfrozen after the NestedOptimizer was built. Build it again "
                "with all parameters that train."
            )

    def _other_parameters(self, t: int) -> RuntimeError:
        """The error on all nodes when they do not train the same parameters any more."""
        if self._peers is not None:
            try:
                self._peers.agree({"parameters that train": self._trained()})
            except Disagreement as error:
                return Disagreement(f"Round {t}: {error}")
        return Disagreement(f"Round {t}: the nodes do not train the same parameters any more. Start all of them again.")

    def _set_apart(self, row: Mapping[str, Any]) -> None:
        """Who goes on from where, after a round; all nodes know, since the guard has no bound for such a one."""
        if self._on_drop == "keep":
            lost = {e["node"] for e in row["excluded"] if e["reason"] == DROPPED}
            self._apart = (self._apart - set(row["participants"])) | lost

    @property
    def taken(self) -> int:
        """Local steps that this node has taken over the whole run."""
        return self._taken[self.node.exchange.wire.node] + len(self._done)

    # ---- records ----

    def checkpoint(self, extra: Mapping[str, Any] | None = None) -> bool:
        """Write a checkpoint now, in the middle of a round or at its end; on every node, after the same local step.

        Returns whether it was written: a full disk is warned of, and the run goes on with the one before. At the ends
        of rounds they are written without asking, every `checkpoint_every` rounds.

        Args:
            extra: what of this node comes back as `resumed.extra`, such as the position in the data: tensors and plain
                values. By default what the function `extra` gives.
        """
        if self._keeper is None:
            raise ValueError("There is no run folder to write a checkpoint to. Give it as `run`.")
        wire, count = self.node.exchange.wire, self._sampling.count
        if not self.finished and (callable(count) or count < wire.nodes or self._sampling.kind != "uniform"):
            raise ValueError(
                "Not every node takes part in every round, so the others could not write their part now. Checkpoints "
                "at the ends of rounds are written without asking; give what they should hold besides as `extra` when "
                "the optimizer is built."
            )
        return self._save(len(self._done), extra)

    def _keeper_of(
        self,
        run: str | os.PathLike[str] | None,
        resume: bool,
        keep: int,
        participation: float | Chooser,
        participants: int | None,
        describe: Mapping[str, Any] | None,
    ) -> Keeper | None:
        """The run folder, opened by all nodes; None where there is none."""
        if run is None:
            return None
        sampling = self._sampling
        facts = {
            **described(self._algorithm, self._settings, self.optimizer),
            "inner_state": self._inner_state,
            "rounds": self.rounds,
            "local_steps": self.local_steps,
            "nodes": self.node.exchange.wire.nodes,
            "weights": list(sampling.weights),
            "participation": participation,
            "participants": participants,
            "sampling": sampling.kind,
            "projection": self._projection,
            "average": self.node.average is not None,
            "guard": self._guard,
            # None: so in folders from before
            "aggregate": None if self._aggregate is None else str(self._aggregate),
            "on_drop": None if self._on_drop == "sync" else self._on_drop,
            "seed": sampling.seed,
            **(describe or {}),
        }
        keeper = Keeper(Crew(self.node.exchange.wire, self.node.exchange.shards), Path(run), keep, self._guard)
        keeper.open(facts, resume)
        return keeper

    def _gone_on(self, resume: bool) -> bool:
        """Go on from the last checkpoint, or write the first; whether this is in the middle of a round."""
        if self._keeper is None:
            return False
        found = self._keeper.resume(self.node) if resume else None
        if found is None:
            self._save(0)
            return False
        snapshot, path = found
        nodes, step = self.node.exchange.wire.nodes, snapshot.step or 0
        own = restore(snapshot, self.node)
        self.node.restart()
        if self._algorithm.send_preconditioner and self.node.round:
            self.node.second_moment = self.node._gathered("exp_avg_sq")
        self._taken = [*snapshot.meta["taken"], *[0] * nodes][:nodes]
        self.history = self._keeper.history(self.node.round)
        for row in self.history:
            self._set_apart(row)
        self._apart &= set(range(min(nodes, int(snapshot.meta["writers"]))))  # the others start fresh
        if own is not None:
            self._restore_own(own, step)
        extra = own["extra"] if own is not None else {}
        self._brought = dict(extra)
        if self.node.round or step:
            self.resumed = Resumed(self.node.round, step, extra, int(snapshot.meta["writers"]), path)
        return step > 0

    def _keep_round(self, report: Report) -> None:
        if self._keeper is not None and self._checkpoint_every is not None:
            self._keeper.record(self.history[-1], report.seconds)
            if self.finished or self.node.round % self._checkpoint_every == 0:
                self._save(0)

    def _save(self, step: int, extra: Mapping[str, Any] | None = None) -> bool:
        assert self._keeper is not None
        return self._keeper.save(self.node, step, lambda: self._own(step, extra), self._taken)

    def _own(self, step: int, extra: Mapping[str, Any] | None) -> dict[str, Any]:
        """What this node keeps to itself; in the middle of a round that is more."""
        if extra is None:
            extra = self._brought if self._brought is not None else self._extra() if self._extra else {}
        inner = self.optimizer.state_dict()
        if not step and self._inner_state == "reset":
            inner = {**inner, "state": {}}
        own = {
            "optimizer": inner,
            "loss": self._loss,
            "random": generators(self._device()),
            "extra": dict(extra),
            "first_inputs": self._inputs.first if self._inputs is not None else self._first_inputs,
        }
        if self.node.own is not None:
            own["own"] = {"weights": self.node.own.weights, "buffers": self.node.own.buffers}
        if step:
            own["inner_before"] = self._inner_before
            own["done"] = counted(self._done)
            own["weights"] = dict(zip(self.node.exchange.names, self.node.local(), strict=True))
            own["buffers"] = dict(self.node.buffers.now()) if self.node.buffers else {}
            own["loaded"] = self.node.exchange.loaded
        return own

    @torch.no_grad()
    def _restore_own(self, own: Mapping[str, Any], step: int) -> None:
        fresh = rates(self.optimizer)
        load_inner(self.optimizer, own["optimizer"])
        self._rates = Rates(fresh, rates(self.optimizer))
        self._first_inputs = list(own.get("first_inputs", []))  # not in older checkpoints
        self._loss = own["loss"]
        self.node.own = Own(**own["own"]) if "own" in own else None
        set_generators(own["random"], self._device())
        if step:
            self._inner_before = own.get("inner_before")
            self._done = one_by_one(own["done"])
            self.node.exchange.loaded = own.get("loaded", self.node.exchange.loaded)  # not in older checkpoints
            for name, p in zip(self.node.exchange.names, self.node.local(), strict=True):
                p.copy_(own["weights"][name])
            if self.node.buffers:
                self.node.buffers.load(own["buffers"])

    def _device(self) -> torch.device:
        return self.node.params[0].device if self.node.params else torch.device("cpu")

    def _own_bound(self, t: int) -> Bound:
        """How far this node can have moved, by the steps that it took."""
        if not self._done or not self._guard:
            return Bound(None)
        if self._settings is not None:
            return self._agreed_bound(t, self.node.exchange.wire.node, len(self._done))
        rule = _rule_of(self.optimizer)
        return Bound(None) if rule is None else bound(rule, self._done)

    def _agreed_bound(self, t: int, node: int, steps: int) -> Bound:
        """How far a node can have moved in so many steps, by the agreed settings."""
        assert self._settings is not None
        return self._settings.limit(t, self._taken[node], steps) if self._guard else Bound(None)

    def _numbers(self) -> Numbers:
        """What the inner optimizer steps with now, by parameter where groups differ."""
        groups = self.optimizer.param_groups
        words = ("lr", "u", "d", "eps", "weight_decay", "betas", "momentum", "scope")
        found: dict[str, Any] = {}
        for word in words:
            values = [group[word] for group in groups if word in group]
            if len(values) == len(groups):
                same = all(value is values[0] or value == values[0] for value in values[1:])
                # for every parameter that is exchanged, also for one that was frozen since
                of_group = {id(p): v for group, v in zip(groups, values, strict=True) for p in group["params"]}
                found[word] = values[0] if same else [of_group.get(id(p), values[0]) for p in self.node.params]
        found["bias_correction"] = True
        return found


def _last_good(keeper: Keeper | None) -> Callable[[], str]:
    """What the last words say about checkpoints; the run folder of an optimizer that is gone is not kept open by it."""
    if keeper is None:
        return lambda: NO_RUN_FOLDER
    known = weakref.ref(keeper)
    return lambda: now.last_good() if (now := known()) is not None else ""


def _rule_of(optimizer: Optimizer) -> Rule | None:
    """The rule whose reach bounds an optimizer, for those that have one."""
    table: dict[type, Rule] = {
        BiClip: BICLIP,
        L2Clip: BICLIP_L2,
        torch.optim.Adam: ADAM,
        torch.optim.AdamW: ADAMW,
        torch.optim.Adagrad: ADAGRAD,
    }
    return table.get(type(optimizer))


def _named(optimizer: Optimizer, model: torch.nn.Module | None) -> tuple[list[str], list[Tensor]]:
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if model is None:
        return [str(i) for i in range(len(params))], params
    names = {id(p): name for name, p in model.named_parameters()}
    missing = [i for i, p in enumerate(params) if id(p) not in names]
    if missing:
        raise ValueError(f"Invalid model: parameter {missing[0]} of the optimizer is not one of the model's.")
    return [names[id(p)] for p in params], params


def _local(p: Tensor) -> Tensor:
    """A sharded parameter's local part; any other's own memory."""
    return (p.to_local() if is_dtensor(p) else p).detach()


def _across(mesh: DeviceMesh | dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The process group of the nodes."""
    if not isinstance(mesh, DeviceMesh):
        return mesh
    if mesh.ndim != 1:
        names = f" ({', '.join(mesh.mesh_dim_names)})" if mesh.mesh_dim_names else ""
        raise ValueError(
            f"Invalid mesh: it has {mesh.ndim} dimensions{names}; need one, that across the nodes. "
            'Give that one, such as mesh=mesh["node"].'
        )
    return mesh.get_group()


def _shards(across: dist.ProcessGroup | None, params: Sequence[Tensor]) -> Wire | None:
    """The other ranks of this node, where its parameters are sharded over several."""
    spread = {groups for groups in by_ranks(params) if groups}
    if not spread:
        return None
    if len(spread) > 1 or len(next(iter(spread))) > 1:
        raise ValueError(
            "Invalid parameters: they are sharded over several process groups of a node; need one. "
            "Shard all of them over one dimension of the mesh, and replicate over the others."
        )
    ((group,),) = spread
    inside, nodes = (set(dist.get_process_group_ranks(g)) for g in (group, across))
    if len(inside & nodes) > 1:
        raise ValueError(
            f"Invalid mesh: ranks {sorted(inside & nodes)} hold shards of one node, and cannot be nodes themselves. "
            'Give the dimension across the nodes, such as mesh=mesh["node"].'
        )
    return Wire.of(group)
