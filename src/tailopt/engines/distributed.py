"""Real nodes: `tailopt.NestedOptimizer` for any training loop under torchrun, every process group member a node.

After exactly `local_steps` completed inner steps the nodes exchange what they moved and take the outer step together
(`exchange.py`); the same round as in a simulation, with the same bits. A node that does not take part in a round takes
no step in it: `step()` returns only when its own next round begins, and until then it serves the exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from tailopt.algorithms import Algorithm
from tailopt.engines.exchange import Exchange, Wire
from tailopt.engines.sequential import Buffers, real
from tailopt.optimizers.biclip import BiClip
from tailopt.optimizers.l2clip import L2Clip
from tailopt.rounds.guard import Bound, bound
from tailopt.rounds.participants import Chooser, Participants, Sampling, how_many
from tailopt.rounds.round import Report
from tailopt.rounds.settings import Settings
from tailopt.rules.adagrad import ADAGRAD
from tailopt.rules.adam import ADAM, ADAMW, fresh
from tailopt.rules.biclip import BICLIP
from tailopt.rules.l2clip import BICLIP_L2
from tailopt.rules.rule import Numbers, Rule, State


class Node:
    """This process as a node: its parameters, the synchronised weights, its part of the outer state."""

    def __init__(self, wire: Wire, names: Sequence[str], params: Sequence[Tensor], buffers: Buffers | None) -> None:
        self.params = list(params)
        self.buffers = buffers
        own = self.local()
        self.exchange = Exchange(wire, list(names), [p.shape for p in own], [p.dtype for p in own])
        self.x = torch.zeros(self.exchange.layout.total, dtype=self.exchange.dtype)
        self.outer: list[State] = [{} for _ in self.exchange.segments]
        self.average: Tensor | None = None
        self.round = 0
        self._views = self.exchange.layout.views(self.x, self.exchange.shapes)
        for view, p in zip(self._views, own, strict=True):
            view.copy_(p)

    def local(self) -> list[Tensor]:
        """This rank's part of every parameter, as real tensors that share its memory."""
        return [real(_local(p)) for p in self.params]

    @torch.no_grad()
    def start(self) -> None:
        """Every node's weights are node 0's: the first round starts from the same vector."""
        wire = self.exchange.wire
        for flat in (self.x, *(self.buffers.now().values() if self.buffers else ())):
            if flat.numel():
                dist.broadcast(flat, dist.get_global_rank(wire.group, 0), group=wire.group)
        self.load()

    @torch.no_grad()
    def load(self) -> None:
        """Put the synchronised weights into the parameters."""
        for view, p in zip(self._views, self.local(), strict=True):
            p.copy_(view)

    @torch.no_grad()
    def close(
        self,
        who: Participants,
        limits: Mapping[int, Bound],
        outer: Rule,
        numbers: Numbers,
        projection: float | None = None,
        guard: bool = True,
        loss: float = float("nan"),
        send: bool = False,
    ) -> Report:
        """End the round: exchange displacements, take the outer step, load the new weights.

        send: the outer second moment travels with the weights.
        """
        exchange = self.exchange
        starts = torch.zeros_like(self.x)
        deltas = exchange.layout.views(exchange.delta, exchange.shapes)
        begun = exchange.layout.views(starts, exchange.shapes)
        for view, p, d, s in zip(self._views, self.local(), deltas, begun, strict=True):
            s.copy_(view.to(p.dtype))
            torch.sub(p.to(exchange.dtype), s, out=d)
        buffers = self.buffers.now() if self.buffers else {}
        report, mean = exchange.close(self.round + 1, who, self.x, starts, buffers, limits, loss, guard)
        exchange.outer(self.x, self.outer, outer, numbers, projection)
        if send:
            self.second_moment = self._gathered("exp_avg_sq")
        self.round += 1
        if self.average is not None:
            self.average[exchange.mine].lerp_(self.x[exchange.mine], 2.0 / (self.round + 1))
        if self.buffers:
            self.buffers.load(mean)
        self.load()
        return report

    second_moment: Tensor | None = None

    def _gathered(self, name: str) -> Tensor:
        """A tensor of the outer state, from everybody's stretch."""
        flat = torch.zeros_like(self.x)
        for part, state in zip(self.exchange.cut(flat), self.outer, strict=True):
            if name in state:
                part.copy_(state[name])
        self.exchange.share(flat)
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
                self.rule.step(own, grads, states, numbers)
        return loss


def _chosen(value: Any, moving: Sequence[int]) -> Any:
    return [value[i] for i in moving] if isinstance(value, list) else value


class NestedOptimizer(Optimizer):
    """Local steps by any optimizer; after every `local_steps` of them the nodes synchronise.

        x_i <- inner steps from x;    delta = sum of w_i (x_i - x);    x <- outer step(x, delta)

    `param_groups` and `state` are the inner optimizer's own, so schedulers, scalers and checkpoints see that one. Every
    process of the group is a node. Construct it on all nodes, after `torch.distributed.init_process_group`; the weights
    of node 0 are everybody's.

    Args:
        optimizer: the inner optimizer.
        outer: a name (avg, sgd, nesterov, biclip, biclip-l2, adagrad, rmsprop, adam) or a class of torch.optim.
        outer_settings: its settings: olr, o_u, o_d, oeps, momentum, outer_betas, bias_correction.
        local_steps: inner steps of a round.
        model: for the names of parameters and for buffers; without it parameters are called 0, 1, ... and buffers stay
            local.
        group: the nodes; by default all processes.
        weight: of this node in the mean.
        participation, participants, sampling, seed, projection, guard: as in `tailopt.simulate`.
        inner_state: "keep", or "reset" to make the inner optimizer's state anew in every round.
        rounds: after so many the run is `finished`; needed where not everybody takes part in every round, so that
            nobody waits for nodes that have left.

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
        group: dist.ProcessGroup | None = None,
        weight: float = 1.0,
        participation: float | Chooser = 1.0,
        participants: int | None = None,
        sampling: str = "uniform",
        seed: int = 0,
        guard: bool = True,
        projection: float | None = None,
        inner_state: str = "keep",
        average: bool = False,
        rounds: int | None = None,
        settings: Settings | None = None,
        algorithm: Algorithm | None = None,
    ) -> None:
        if isinstance(local_steps, bool) or not isinstance(local_steps, int) or local_steps < 1:
            raise ValueError(f"Invalid local_steps: {local_steps!r}; need a whole number, 1 or more.")
        if inner_state not in ("keep", "reset"):
            raise ValueError(f'Invalid inner_state: {inner_state!r}; need "keep" or "reset".')
        if not dist.is_initialized():
            raise RuntimeError(
                "There are no other nodes: call torch.distributed.init_process_group() first, under torchrun."
            )
        self.optimizer = optimizer
        self.local_steps, self._guard, self._projection, self._inner_state = local_steps, guard, projection, inner_state
        self._algorithm = algorithm or Algorithm(outer, "sgd", outer_settings or {}, {"ilr": 0.0})
        names, params = _named(optimizer, model)
        self._settings = settings
        self._outer_settings = settings or Settings(self._algorithm, None, names)
        wire = Wire.of(group)
        weights = wire.gather(torch.tensor([float(weight)], dtype=torch.float64)).reshape(-1).tolist()
        count = how_many(wire.nodes, participation, participants)
        self._sampling = Sampling(tuple(weights), count, sampling, seed)
        self.node = Node(wire, names, params, Buffers(model) if model is not None else None)
        if average:
            self.node.average = torch.zeros_like(self.node.x)
        self.node.start()
        self.rounds = rounds
        self._taken = [0] * wire.nodes  # local steps of every node
        self.history: list[dict[str, Any]] = []
        self._done: list[Numbers] = []
        self._loss = float("nan")
        self._hooks_made()
        self._await_own_round()

    def _hooks_made(self) -> None:
        """What the base class would have set; the groups and the state are the inner optimizer's."""
        from collections import OrderedDict

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
        if self._settings is not None:
            for group in self.optimizer.param_groups:
                group.update(self._settings.inner(t, self._taken[self.node.exchange.wire.node] + len(self._done)))
        self._done.append(self._numbers())
        loss = self.optimizer.step(closure) if closure is not None else self.optimizer.step()
        if len(self._done) == self.local_steps:
            self._close()
            self._await_own_round()
        return loss

    def report(self, loss: float) -> None:
        """The loss of this round on this node, for the history."""
        self._loss = loss

    def synchronize(self) -> None:
        """End the round now, with the local steps that have been taken: after the last batch, or to evaluate."""
        if self._done:
            self._close()
            self._await_own_round()

    # ---- rounds ----

    def _await_own_round(self) -> None:
        """Serve the rounds that this node does not take part in."""
        self._begin()
        while not self.finished and self.node.exchange.wire.node not in self._sampling.draw(self.node.round + 1).shares:
            self._close()
            self._begin()

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

    def _close(self) -> None:
        t = self.node.round + 1
        who = self._sampling.draw(t)
        report = self.node.close(
            who,
            {node: self._limit(t, node) for node in who.shares},
            self._outer_settings.outer_rule,
            self._outer_settings.outer(t),
            self._projection,
            self._guard,
            self._loss,
            bool(self._algorithm.send_preconditioner),
        )
        for node in who.shares:
            self._taken[node] += self.local_steps
        times = {i: who.drawn.count(i) for i in who.shares}
        self.history.append(
            {
                "round": t,
                "loss": sum(report.used[i] * loss for i, loss in report.losses.items()),
                "participants": who.drawn,
                "weights": [report.used.get(i, 0.0) / times[i] for i in who.drawn],
                "excluded": [e.as_dict() for e in report.excluded],
            }
        )

    def _limit(self, t: int, node: int) -> Bound:
        """How far a node can have moved: from the agreed settings, or from the steps of this node's inner optimizer."""
        if self._settings is not None:
            return self._settings.limit(t, self._taken[node], self.local_steps)
        rule = _rule_of(self.optimizer)
        if rule is None or not self._done:
            return Bound(None)
        return bound(rule, self._done)

    def _numbers(self) -> Numbers:
        """What the inner optimizer steps with now, by parameter where groups differ."""
        groups = self.optimizer.param_groups
        words = ("lr", "u", "d", "eps", "weight_decay", "betas", "momentum", "scope")
        found: dict[str, Any] = {}
        for word in words:
            values = [group[word] for group in groups if word in group]
            if len(values) == len(groups):
                same = all(value is values[0] or value == values[0] for value in values[1:])
                each = [v for group, v in zip(groups, values, strict=True) for p in group["params"] if p.requires_grad]
                found[word] = values[0] if same else each
        found["bias_correction"] = True
        return found


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
    to_local = getattr(p, "to_local", None)
    return (to_local() if to_local is not None else p).detach()
