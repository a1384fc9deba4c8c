"""What happens in one simulated run, drawn from its seed: nodes, settings, and faults."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

NODE_FAULTS = ("crash", "stop", "pause", "cut", "raise", "slow", "nan", "flip", "disagree", "sleeps", "drop", "early")
LINK_FAULTS = ("corrupt", "corrupt again", "delay", "drop", "duplicate", "reorder")


@dataclass(frozen=True)
class NodeFault:
    """Something that goes wrong on a node.

    Args:
        kind: what.
        node: where.
        operation: before which of the node's operations (store, message, wait) it strikes.
        seconds: for how long.
        round: in which round, for what strikes the node's weights or program.
    """

    kind: str
    node: int
    operation: int = 0
    seconds: float = 0.0
    round: int = 0


@dataclass(frozen=True)
class LinkFault:
    """Something that happens to one message.

    Args:
        kind: what.
        sender, receiver: of the message.
        message: its number, among those of the sender to the receiver.
        amount: seconds, or which bit as a fraction of the message.
    """

    kind: str
    sender: int
    receiver: int
    message: int
    amount: float


@dataclass(frozen=True)
class Plan:
    """One run.

    Args:
        nodes, rounds, local_steps: of the run.
        participants: how many take part in each round.
        timeout, stall_timeout: of all nodes.
        agent: whether the agent of torchrun serves the store and ends all nodes when one is gone; else node 0 does.
        outer: the outer rule.
        bound: the kind of the bound by which nodes are judged; None for no bound.
        stated: nodes state their own bounds.
        aggregate: in place of the mean.
        sizes: elements of every tensor.
        node_faults, link_faults: what goes wrong.
    """

    seed: int
    nodes: int
    rounds: int
    local_steps: int
    participants: int
    timeout: float
    stall_timeout: float | None
    agent: bool
    outer: str
    bound: str | None
    stated: bool
    aggregate: str | None
    sizes: tuple[int, ...]
    node_faults: list[NodeFault] = field(default_factory=list)
    link_faults: list[LinkFault] = field(default_factory=list)


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    luck = random.Random(f"plan {seed}")
    nodes = luck.choice((2, 2, 3, 3, 3, 4, 4, 5, 6, 7))
    everybody = luck.random() < 0.7
    plan = Plan(
        seed=seed,
        nodes=nodes,
        rounds=luck.choice((1, 2, 2, 3)),
        local_steps=luck.choice((1, 2)),
        participants=nodes if everybody else luck.randint(1, nodes),
        timeout=luck.choice((3.0, 4.0, 6.0)),
        stall_timeout=luck.choice((None, None, 4.0, 8.0)),
        agent=luck.random() < 0.3,
        outer=luck.choice(("avg", "avg", "nesterov", "biclip-l2", "adam")),
        bound=luck.choice((None, "coordinate", "coordinate", "norm")),
        stated=luck.random() < 0.4,
        aggregate=luck.choice((None, None, None, "median-norm", "trimmed-mean")),
        sizes=tuple(luck.choice((1, 5, 15, 16, 31, 32)) for _ in range(luck.randint(1, 8))),
    )
    count = luck.choice((0, 1, 1, 1, 1, 1, 2, 2, 3))
    for _ in range(count):
        if luck.random() < 0.5:
            plan.node_faults.append(_node_fault(luck, plan))
        else:
            plan.link_faults.extend(_link_fault(luck, plan))
    return plan


def _node_fault(luck: random.Random, plan: Plan) -> NodeFault:
    kind, node = luck.choice(NODE_FAULTS), luck.randrange(plan.nodes)
    # a run of three rounds takes 100 to 400 operations
    operation = int(luck.choice((30, 150, 400)) * luck.random()) + 1
    seconds = luck.choice((0.5, 1.5, 0.9 * plan.timeout, 1.5 * plan.timeout, 3 * plan.timeout))
    return NodeFault(kind, node, operation, seconds, luck.randint(1, plan.rounds))


def _link_fault(luck: random.Random, plan: Plan) -> list[LinkFault]:
    kind = luck.choice(LINK_FAULTS)
    sender, receiver = luck.sample(range(plan.nodes), 2)
    message = int(luck.choice((4, 12, 30)) * luck.random()) + 1
    seconds = luck.choice((0.3, 1.5, 0.8 * plan.timeout, 2 * plan.timeout, 6 * plan.timeout))
    amount = luck.random() if kind.startswith("corrupt") else seconds
    if kind == "corrupt again":  # a link that damages everything from some message on
        return [LinkFault("corrupt", sender, receiver, k, luck.random()) for k in range(message, message + 40)]
    return [LinkFault(kind, sender, receiver, message, amount)]
