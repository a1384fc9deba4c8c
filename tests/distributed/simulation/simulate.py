"""One simulated run of the node protocol from a seed, and the invariants that must hold in it.

    1   no node waits longer than the timeout for a node without signs of life; with `stall_timeout`, for any node
    2   nodes that finish a round agree to the bit
    3   no honest node is named alone, and of a named pair at least one end or the link was faulty

A run also ends in bounded time, and without faults it finishes. `python -m tests.distributed.simulation.simulate SEED`
replays one with its trace; `--seeds 10000 --jobs 2` runs many.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import torch

from tailopt.distributed.heartbeat import DRAIN_S, HEARTBEAT_S
from tests.distributed.simulation.network import GLOO_TIMEOUT_S, Network, StoreServer
from tests.distributed.simulation.nodes import Record, SimulatedNode, faults_of
from tests.distributed.simulation.plan import Plan, draw
from tests.distributed.simulation.reference import weights_by_round
from tests.distributed.simulation.scheduler import Crashed, Process, Scheduler

# from the moment when silence is long enough to the NodeLost: two polls, posting the verdict, the others reading it
SLACK_S = 3 * HEARTBEAT_S + 2 * DRAIN_S
END_S = 4 * GLOO_TIMEOUT_S
NODES = re.compile(r"\b[Nn]odes? (\d+(?:, \d+)*)")


@dataclass
class Outcome:
    """What happened in a run.

    Args:
        plan: of the run.
        records: of every node.
        struck: (kind, node) and (kind, sender, receiver) of faults that happened.
        silent: (node, from, to) without signs of life.
        ended: whether it ended in bounded time.
        trace: what happened, where that was asked for.
    """

    plan: Plan
    records: list[Record]
    struck: list[tuple[str, ...] | tuple[str, int] | tuple[str, int, int]] = field(default_factory=list)
    silent: list[tuple[int, float, float]] = field(default_factory=list)
    ended: bool = True
    trace: list[str] = field(default_factory=list)

    @property
    def faulty_nodes(self) -> set[int]:
        """Nodes that were struck by a fault of their own."""
        return {int(fault[1]) for fault in self.struck if len(fault) == 2}

    @property
    def faulty_links(self) -> set[frozenset[int]]:
        """Pairs of nodes between which a message was struck."""
        return {frozenset((int(fault[1]), int(fault[2]))) for fault in self.struck if len(fault) == 3}


def simulate(plan: Plan, trace: bool = False) -> Outcome:
    """Run the protocol on all nodes of a plan."""
    scheduler = Scheduler(random.Random(f"order {plan.seed}"))
    scheduler.trace = [] if trace else None
    outcome = Outcome(plan, [])

    def strike(*fault: object) -> None:
        outcome.struck.append(fault)  # type: ignore[arg-type]
        scheduler.note(f"fault {fault}")

    def at_operation(process: Process, number: int) -> None:
        for fault in faults_of(plan, process.node):
            if fault.operation == number:
                strike(fault.kind, process.node)
                _strike_process(fault.kind, fault.seconds, process, network, outcome)

    processes = [Process(scheduler, node, at_operation) for node in range(plan.nodes)]
    network = Network(scheduler, processes, random.Random(f"latency {plan.seed}"), strike)
    for fault in plan.link_faults:
        network.links[fault.sender, fault.receiver].faults[fault.message] = fault.kind, fault.amount
    server = StoreServer(None if plan.agent else processes[0])
    nodes = [SimulatedNode(plan, process, network, server, strike) for process in processes]
    for node, process in zip(nodes, processes, strict=True):
        process.on_end.append(partial(scheduler.note, f"process {process.node} ends"))
        if plan.agent:
            process.on_end.append(partial(_tell_others, scheduler, process, nodes))
        process.spawn(node.main())
    outcome.ended = scheduler.run(END_S) or not any(p.alive and not p.stopped for p in processes)
    outcome.records = [node.record for node in nodes]
    for process in processes:
        if not process.alive:
            outcome.silent.append((process.node, process.ended_at, math.inf))
    outcome.trace = scheduler.trace or []
    for record in outcome.records:
        record.waits = list(record.waits)  # what is closed now adds to the list of its transport
    for process in processes:
        process.close()
    return outcome


def _strike_process(kind: str, seconds: float, process: Process, network: Network, outcome: Outcome) -> None:
    scheduler, begun = process.scheduler, process.scheduler.time
    if kind == "crash":
        process.end(-9)
        raise Crashed
    if kind == "cut":
        network.cut_off.add(process.node)
        outcome.silent.append((process.node, begun, math.inf))
        return
    process.stop()
    until = begun + seconds if kind == "pause" else math.inf
    outcome.silent.append((process.node, begun, until))
    if kind == "pause":
        scheduler.at(until, process.resume)


def _tell_others(scheduler: Scheduler, ended: Process, nodes: Iterable[SimulatedNode]) -> None:
    """The agent of torchrun ends all nodes when one of them fails."""
    if ended.exit_code:
        for node in nodes:
            scheduler.at(scheduler.time + 0.3, node.terminate)


# invariants


def violations(outcome: Outcome) -> list[str]:
    """What does not hold in a run; nothing, where all is well."""
    found = [] if outcome.ended else ["the run does not end"]
    found += _waits(outcome) + _agreement(outcome) + _names(outcome)
    if not outcome.struck and not all(record.finished for record in outcome.records):
        found.append("a run without faults does not finish")
    return found


def _waits(outcome: Outcome) -> list[str]:
    found, plan = [], outcome.plan
    progress = sorted(moment for record in outcome.records for moment in record.progress)
    own_silence = {node for node, _, _ in outcome.silent if node in outcome.faulty_nodes}
    for node, record in enumerate(outcome.records):
        if node in own_silence:  # a pause of its own is not the wait's fault
            continue
        for begun, ended, t in record.waits:
            for other, since, until in outcome.silent:
                waited = min(ended, until) - max(begun, since)
                clean = other not in outcome.faulty_nodes and outcome.records[other].finished
                if other != node and not clean and waited > plan.timeout + SLACK_S:
                    found.append(f"node {node} waited {waited:.1f} s from {begun:.1f} on for silent node {other}")
            # before the first round there is no limit: a node may wait for a run folder
            if t and plan.stall_timeout is not None:
                moments = [begun, *(moment for moment in progress if begun < moment < ended), ended]
                longest = max(b - a for a, b in zip(moments, moments[1:], strict=False))
                if longest > plan.stall_timeout + SLACK_S:
                    found.append(f"node {node} waited {longest:.1f} s for nodes that live and do nothing")
    return found


def _agreement(outcome: Outcome) -> list[str]:
    found = []
    for what in ("rows", "confirmed"):
        seen: dict[int, tuple[int, object]] = {}
        for node, record in enumerate(outcome.records):
            for t, value in getattr(record, what).items():
                first, known = seen.setdefault(t, (node, value))
                if known != value:
                    found.append(f"{what} of round {t} differ: node {first} {known}, node {node} {value}")
    used = max((record.used for record in outcome.records), key=len)
    expected = weights_by_round(outcome.plan, used)
    for node, record in enumerate(outcome.records):
        wrong = [t for t, value in record.confirmed.items() if value != expected.get(t, value)]
        if wrong:
            found.append(f"node {node} has other weights after round {wrong[0]} than follow from who counted")
    return found


def _names(outcome: Outcome) -> list[str]:
    found = []
    for node, record in enumerate(outcome.records):
        for text in record.said:
            named = {int(k) for group in NODES.findall(text) for k in group.split(", ")}
            links = {pair for pair in outcome.faulty_links if pair <= named}
            if named and not named & outcome.faulty_nodes and not links:
                found.append(f"node {node} names {sorted(named)}, which are honest: {text}")
    return found


# many seeds


def check(seed: int) -> list[str]:
    """The violations of a seed; an error of the simulation counts as one."""
    try:
        return violations(simulate(draw(seed)))
    except Exception as error:
        return [f"the simulation fails with {type(error).__name__}: {error}"]


def _checked(seed: int) -> tuple[int, list[str]]:
    torch.set_num_threads(1)
    return seed, check(seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int, nargs="?", help="replay this one")
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.seed is not None:
        outcome = simulate(draw(arguments.seed), trace=True)
        print(outcome.plan, *outcome.trace, sep="\n")
        for node, record in enumerate(outcome.records):
            print(node, record.finished, record.error, *record.said, sep="\n   ")
        print("struck", outcome.struck)
        raise SystemExit("\n".join(violations(outcome)) or 0)
    begun, bad = time.perf_counter(), 0
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        for seed, found in pool.imap(_checked, seeds, chunksize=20):
            if found:
                bad += 1
                print(seed, *found, sep="\n   ", flush=True)
    print(f"{len(seeds)} seeds, {bad} with violations, {time.perf_counter() - begun:.0f} s", file=sys.stderr)
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
