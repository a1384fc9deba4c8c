"""What a simulated node runs: the production protocol from the roll call to its departure, on a few elements."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tailopt.distributed.agreement import FactExchange, agree
from tailopt.distributed.exchange import Exchange
from tailopt.distributed.exchange_types import JudgingCriteria, Statement
from tailopt.distributed.heartbeat import DRAIN_S, Heartbeat
from tailopt.distributed.membership import EXIT_AFTER_S, Membership, Timeouts
from tailopt.distributed.roll_call import GATHER_S, LOOKUP_S, StoreOwner, answered, incarnation, roll_call
from tailopt.distributed.weight_sync import AT_FAULT, other_weights
from tailopt.rounds.drops import DROPPED
from tailopt.rounds.guard import Bound
from tailopt.rounds.participants import Sampling
from tailopt.rounds.robust import Aggregate
from tailopt.rules.rule import ParamState
from tailopt.rules.table import OUTER
from tests.distributed.simulation.network import Network, SimulatedCall, SimulatedStore, SimulatedTransport, StoreServer
from tests.distributed.simulation.plan import NodeFault, Plan
from tests.distributed.simulation.scheduler import Process

STEP = 0.125  # at most, by a coordinate in a local step
NUMBERS: dict[str, dict[str, Any]] = {
    "avg": {},
    "nesterov": {"lr": 0.5, "momentum": 0.5},
    "biclip-l2": {"lr": 0.5, "u": 0.5, "d": 0.1, "scope": "global"},
    "adam": {"lr": 0.1, "eps": 1e-3, "betas": (0.9, 0.99), "bias_correction": True},
}


@dataclass
class Record:
    """What one node did and said, for the invariants."""

    rows: dict[int, str] = field(default_factory=dict)  # round -> who counted, and why others did not
    used: dict[int, list[int]] = field(default_factory=dict)  # round -> the nodes that counted
    confirmed: dict[int, str] = field(default_factory=dict)  # round -> digest of its weights, once they are compared
    said: list[str] = field(default_factory=list)  # errors, warnings and last words
    error: str = ""
    finished: bool = False
    waits: list[tuple[float, float, int]] = field(default_factory=list)
    progress: list[float] = field(default_factory=list)  # when a local step ended, or a message arrived


class SimulatedNode:
    """One node.

    Args:
        plan: of the run.
        process: of this node.
        network: to the others.
        server: of the store.
        strike: told about faults of this node that happen.
    """

    def __init__(self, plan: Plan, process: Process, network: Network, server: StoreServer, strike: Any) -> None:
        self.plan, self.process, self.network, self.record = plan, process, network, Record()
        self._strike = strike
        self._store = SimulatedStore(server, network, process)
        self._owner = StoreOwner() if plan.agent else StoreOwner("Node 0, which serves the store,", 0)
        self.membership: Membership | None = None
        self._terminating = False
        self._faults = [fault for fault in plan.node_faults if fault.node == process.node]

    # the process

    async def main(self) -> None:
        """Run the program, and end as a process does."""
        error: BaseException | None = None
        try:
            await self._program()
            self.record.finished = True
        except Exception as raised:
            error = raised
            self.record.error = type(raised).__name__
            self.record.said.append(str(raised))
            self.process.scheduler.note(f"node {self.process.node} raises {type(raised).__name__}: {raised}")
        if self.membership is not None:
            await self.membership.depart(error)
            await self._last_sign()
        self.process.end(0 if error is None else 1)

    async def _last_sign(self) -> None:
        """Wait for the heartbeat to end, as a process waits for the thread."""
        until = self.process.now() + DRAIN_S
        while not self._beating.done and self.process.now() < until:
            await self.process.sleep(0.05)

    def schedule(self, error: RuntimeError, last_words: str) -> None:
        """End the process soon; the interface `ProcessExit`."""
        self.record.said.append(last_words.split("\n")[1])
        scheduler = self.process.scheduler
        scheduler.at(scheduler.time + EXIT_AFTER_S, partial(self.process.end, 1))

    def terminate(self) -> None:
        """SIGTERM: torchrun tells a node to end."""
        if self.process.alive and not self._terminating:
            self._terminating = True
            self.process.spawn(self._terminated())

    async def _terminated(self) -> None:
        if self.membership is not None and not self._beating.done and self.record.error != "NodeLost":
            words = await self.membership.explain_sigterm()
            self.record.said.append(words.split("\n")[1])
            await self._last_sign()
        self.process.end(143)

    # the program

    async def _program(self) -> None:
        plan, process, node = self.plan, self.process, self.process.node
        await self._late(0)
        call = self._store.under("roll call")

        async def come() -> None:
            turn = await incarnation(call, node, f"process {node} (id)", "0")
            await roll_call(call.under(f"{turn}"), process, node, plan.nodes, plan.timeout, self._owner)

        await answered(SimulatedCall(process, come()), process, plan.timeout + 2 * GATHER_S, self._owner, node)
        group_store = self._store.under("group")
        heartbeat = Heartbeat(group_store, self._store.under("run"), node, plan.nodes, process)
        limit = plan.timeout + LOOKUP_S
        await answered(SimulatedCall(process, heartbeat.poll()), process, limit, self._owner, node)
        timeouts = Timeouts(plan.timeout, plan.stall_timeout)
        membership = Membership(heartbeat, process, self, timeouts, self._owner, self.record.said.append)
        self._beating = process.spawn(heartbeat.beat())
        self.membership = membership
        facts = {"rounds": plan.rounds, "local_steps": 99 if self._has("disagree") else plan.local_steps}
        exchange = FactExchange(group_store, process, node, plan.nodes, plan.timeout, self._owner)
        await agree(facts, False, exchange, membership, lambda work: SimulatedCall(process, work))
        transport = SimulatedTransport(self.network, process, membership)
        self.record.waits, self.record.progress = transport.waits, transport.progress
        await self._train(transport, heartbeat, membership)

    async def _train(self, transport: SimulatedTransport, heartbeat: Heartbeat, membership: Membership) -> None:
        plan, node = self.plan, transport.node
        shapes = [torch.Size([size]) for size in plan.sizes]
        exchange = Exchange(transport, [f"w{i}" for i in range(len(shapes))], shapes, [torch.float32] * len(shapes))
        params = [torch.full(shape, 1.0 + node) for shape in shapes]
        x = torch.zeros(exchange.layout.total)
        for view, p in zip(exchange.layout.views(x, shapes), params, strict=True):
            view.copy_(p)
        await exchange.start([x])
        exchange.load(params, x)
        exchange.reset_sent_digest(x)
        states: list[ParamState] = [{} for _ in exchange.own_segments]
        sampling = chooser(plan)
        rule = OUTER[plan.outer]
        for t in range(1, plan.rounds + 1):
            participants, steps = sampling.draw(t), 0
            if node in participants.shares:
                for step in range(plan.local_steps):
                    heartbeat.round, heartbeat.step = t, step
                    await membership.check()
                    await self._local_step(t, step, params)
                steps = plan.local_steps
                self._damage(t, params)
                exchange.measure_displacement(params, x)
            heartbeat.round, heartbeat.step = t, steps
            if self._has("early", t):
                return
            statement = Statement(steps, self._bound(steps), float(node), 0.0, 0, t == plan.rounds)
            if self._has("drop", t):
                exchange.transport = _Dropping(transport)
            report, _ = await exchange.exchange_and_settle(t, participants, x, {}, {}, statement, self._criteria())
            exchange.transport = transport
            self.record.confirmed[t - 1] = digest(exchange.layout.views(x, shapes))
            settlement = report.settlement
            row = sorted(settlement.weights.items()), [e.as_dict() for e in settlement.excluded]
            self.record.rows[t] = repr(row)  # as text: NaN differs from itself
            self.record.used[t] = list(settlement.weights)
            self.record.said += [str(e) for e in settlement.excluded if e.reason != DROPPED]
            if settlement.counted_shares:
                numbers = {**rule.defaults, **NUMBERS[plan.outer]}
                await exchange.take_outer_step(x, states, rule, numbers, None)
            exchange.load(params, x)
            if report.may_be_last:
                _, differing = await exchange.compare_weights_at_barrier(t, 0, x, True)
                if any(receiver == node for _, receiver in differing):
                    exchange.load(params, x)
                self.record.said += [f"{other_weights(*pair, t)}. {AT_FAULT}" for pair in differing]
                self.record.confirmed[t] = digest(exchange.layout.views(x, shapes))

    async def _local_step(self, t: int, step: int, params: list[Tensor]) -> None:
        await self.process.sleep(0.05)
        await self._late(t)
        if self._has("raise", t):
            self._strike("raise", self.process.node)
            raise ArithmeticError("the data of this node are bad")
        for p, moved in zip(params, local_step(self.plan, t, self.process.node, step), strict=True):
            p.add_(moved)
        self.record.progress.append(self.process.now())

    def _damage(self, t: int, params: list[Tensor]) -> None:
        """What the guard is there for."""
        for kind in damage(self.plan, t, self.process.node, params):
            self._strike(kind, self.process.node)

    async def _late(self, t: int) -> None:
        """A node that takes its time; before the first round it comes late."""
        for fault in self._faults:
            if fault.kind in ("slow", "sleeps") and fault.round == t + (fault.kind == "slow"):
                self._strike(fault.kind, self.process.node)
                await self.process.sleep(fault.seconds)

    def _has(self, kind: str, t: int | None = None) -> bool:
        found = any(fault.kind == kind and t in (None, fault.round) for fault in self._faults)
        if found and kind in ("disagree", "drop", "early"):
            self._strike(kind, self.process.node)
        return found

    def _bound(self, steps: int) -> Bound:
        return bound(self.plan, steps)

    def _criteria(self) -> JudgingCriteria:
        plan = self.plan
        expected = None if plan.stated else lambda node, steps: bound(plan, steps)
        aggregate = Aggregate(plan.aggregate) if plan.aggregate else None
        return JudgingCriteria(True, expected, (), plan.local_steps, aggregate)


class _Dropping(SimulatedTransport):
    """Sends a header that says that the contribution is lost."""

    def __init__(self, transport: SimulatedTransport) -> None:
        vars(self).update(vars(transport))

    async def exchange_with_header(self, header: Any, outgoing: Any = (), incoming: Any = ()) -> Any:
        """With the lost contribution."""
        return await super().exchange_with_header(header._replace(contributes=0), outgoing, incoming)


def chooser(plan: Plan) -> Sampling:
    """Who takes part in a round, with what weight."""
    return Sampling((1.0 / plan.nodes,) * plan.nodes, plan.participants, "uniform", plan.seed)


def bound(plan: Plan, steps: int) -> Bound:
    """How far a node can have moved in so many steps."""
    if plan.bound is None or not steps:
        return Bound(None)
    most = STEP if plan.bound == "coordinate" else STEP * sum(plan.sizes) ** 0.5
    return Bound(plan.bound, most * steps, 0.0, steps)


def local_step(plan: Plan, t: int, node: int, step: int) -> list[Tensor]:
    """How far a node moves in a local step: exact binary fractions, within the bound."""
    source = torch.Generator().manual_seed(((plan.seed * 31 + t) * 31 + node) * 31 + step)
    count = sum(plan.sizes)
    # none of them far longer than the others: a robust aggregate must find no honest node to leave out
    sizes = torch.randint(5, 9, (count,), generator=source).float() / 8 * STEP
    return list((sizes if node % 3 else -sizes).split(list(plan.sizes)))


def damage(plan: Plan, t: int, node: int, params: list[Tensor]) -> list[str]:
    """What faults do to a node's weights before the exchange; the guard is there for these."""
    kinds = [fault.kind for fault in plan.node_faults if (fault.node, fault.round) == (node, t)]
    if "nan" in kinds:
        params[0][0] = float("nan")
    if "flip" in kinds:
        params[-1].view(torch.int32)[-1] ^= 1 << 30
    return [kind for kind in kinds if kind in ("nan", "flip")]


def digest(weights: list[Tensor]) -> str:
    """Of weights, without the padding between them."""
    return hashlib.blake2b(torch.cat(weights).numpy().tobytes(), digest_size=8).hexdigest()


def faults_of(plan: Plan, node: int) -> list[NodeFault]:
    """The faults that strike a node's process."""
    return [f for f in plan.node_faults if f.node == node and f.kind in ("crash", "stop", "pause", "cut")]
