"""The time to end a round over loopback, relative to a plain gloo all_reduce of the same bytes.

    python benchmarks/exchange.py [--runs 5] [--repetitions 15] [--write]

    the exchange alone   partitions to their owners, the sum in node order, new weights back
    the whole round      displacement, checksum, guard, exchange, outer step (Nesterov), load

Every process is a node with one thread. A repetition runs all competitors in random order, the same on every node, each
after a barrier. The time of a competitor is that of the slowest node, and a ratio compares two times of one repetition.
A run is the median over its repetitions. A run whose control, a second plain all_reduce, is off by more than 5 % is
discarded and repeated. The tables contain the median over the remaining runs, with minimum and maximum. --write puts
them into benchmarks/RESULTS.md.

If torchft is installed, further runs of the same processes compare its DiLoCo sync with the whole round: one tensor at
a time, which is its default, and all tensors in one bucket. Its servers then run too, so these figures have their own
table.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from cpu_step import TOLERANCE, gpt2_shapes, machine, put
from torch import Tensor

from tailopt.distributed import flat_kernels
from tailopt.distributed.exchange_types import JudgingCriteria, Statement
from tailopt.distributed.gloo import GlooTransport
from tailopt.distributed.interfaces import blocking
from tailopt.distributed.node import Node
from tailopt.rounds.guard import Bound
from tailopt.rounds.hyperparameters import outer_hyperparameters
from tailopt.rounds.participants import Sampling
from tailopt.rounds.policy import RoundPolicy

SHAPES = {"2.1M": gpt2_shapes(4, 128, 4, 9984, 256), "25M": gpt2_shapes(5, 512, 4, 16384, 1024)}
BARE, CONTROL, ALONE, ROUND = "all_reduce", "all_reduce again", "the exchange alone", "the whole round"
GOALS = {
    (ALONE, "2.1M", 2): 1.3,
    (ALONE, "2.1M", 4): 1.3,
    (ALONE, "25M", 2): 1.15,
    (ALONE, "25M", 4): 1.15,
    (ROUND, "2.1M", 2): 2.3,
    (ROUND, "2.1M", 4): 2.1,
    (ROUND, "25M", 2): 1.8,
    (ROUND, "25M", 4): 1.8,
}
COMMAND = "python benchmarks/exchange.py --write"
TORCHFT = importlib.util.find_spec("torchft") is not None
THEIRS = {"torchft, one tensor at a time": False, "torchft, one bucket": True}
Run = dict[str, float]  # competitor -> ratio to the plain all_reduce; the all_reduce itself in milliseconds
MOVED = 1e-3  # the most that a coordinate moves in a round: the bound for the guard


def competitors(size: str) -> tuple[dict[str, Callable[[], None]], Callable[[], None]]:
    """The competitors, and a function that moves the weights before a round."""
    transport = GlooTransport.of()
    source = torch.Generator().manual_seed(transport.node)
    params = [torch.randn(shape, generator=source) for shape in SHAPES[size]]
    noise = [torch.rand(shape, generator=source).sub_(0.5).mul_(MOVED) for shape in SHAPES[size]]
    node = Node(transport, [str(i) for i in range(len(params))], params, None)
    node.start()
    who = Sampling((1.0,) * transport.nodes, transport.nodes, "uniform", 0).draw(1)
    bound = Bound("coordinate", MOVED, 0.0, 1)
    said, criteria = Statement(1, bound, 0.0), JudgingCriteria(expected_bound=lambda node, steps: bound)
    policy = RoundPolicy(rounds=None, local_steps=1, inner_state="keep")
    outer = outer_hyperparameters("nesterov", {"olr": 0.7, "momentum": 0.9}, node.exchange.names)
    part = node.exchange
    flat = torch.zeros(part.layout.total)

    def alone() -> None:
        outgoing = [part.delta[part.layout.partition(k)] for k in range(transport.nodes)]
        blocking(part.transport.exchange(outgoing, part.received))
        flat_kernels.mean(part.received, list(who.shares.values()), 1.0)
        blocking(part.all_gather_partitions(node.x))

    def whole() -> None:
        report = node.close_round(who, said, criteria, outer, policy)
        assert not report.settlement.excluded

    def move() -> None:
        torch._foreach_add_(params, noise)

    bare = {name: lambda: dist.all_reduce(flat) for name in (BARE, CONTROL)}
    return {**bare, ALONE: alone, ROUND: whole}, move


def torchft_syncs(size: str) -> tuple[dict[str, Callable[[], None]], Callable[[], None], list[object]]:
    """DiLoCo syncs of torchft on their own parameters, how to move these, and objects that must stay alive."""
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    nodes, limit = dist.get_world_size(), datetime.timedelta(seconds=60)
    steps: dict[str, Callable[[], None]] = {}
    moving: list[Tensor] = []
    alive: list[object] = []
    for name, bucket in THEIRS.items():
        address = [""]
        if dist.get_rank() == 0:
            alive.append(lighthouse := LighthouseServer("[::]:0", nodes, join_timeout_ms=10_000))
            address = [lighthouse.address()]
        dist.broadcast_object_list(address)
        model = torch.nn.ParameterList(torch.zeros(shape) for shape in SHAPES[size])
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        manager = Manager(
            pg=ProcessGroupGloo(timeout=limit),
            load_state_dict=model.load_state_dict,
            state_dict=model.state_dict,
            min_replica_size=nodes,
            use_async_quorum=False,
            rank=0,
            world_size=1,
            store_addr="localhost",
            store_port=store.port,
            hostname="localhost",
            lighthouse_addr=address[0],
            replica_id=f"{name} {dist.get_rank()}",
            init_sync=False,
            heartbeat_interval=datetime.timedelta(seconds=1),
        )
        inner = torch.optim.SGD(model.parameters(), lr=0.0)  # without gradients it only calls the sync
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        sync = DiLoCo(manager, [model], inner, outer, 1, pin_memory=False, use_bucketization=bucket)
        alive += [store, manager, sync.__enter__()]
        moving += [p.data for p in model.parameters()]

        def one(inner: torch.optim.Optimizer = inner, manager: Manager = manager) -> None:
            before = manager.current_step()
            inner.step()
            assert manager.current_step() == before + 1, "torchft did not commit"

        steps[name] = one
    noise = [torch.rand_like(p).sub_(0.5).mul_(MOVED) for p in moving]
    return steps, lambda: torch._foreach_add_(moving, noise), alive


def run(steps: dict[str, Callable[[], None]], move: Callable[[], None], repetitions: int) -> list[dict[str, float]]:
    """The slowest node's time of each competitor, per repetition; the same list on every node."""
    rows = []
    for _ in range(repetitions):
        row: dict[str, float] = {}
        move()
        for name in random.sample(list(steps), len(steps)):
            dist.barrier()
            start = time.perf_counter()
            steps[name]()
            row[name] = time.perf_counter() - start
        times = torch.tensor([row[name] for name in steps], dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        rows.append(dict(zip(steps, times.tolist(), strict=True)))
    return rows


def medians(rows: list[dict[str, float]]) -> Run:
    """The ratio of each competitor to the plain all_reduce, and the time of the all_reduce in milliseconds."""
    found = {name: statistics.median(row[name] / row[BARE] for row in rows) for name in rows[0] if name != BARE}
    return {**found, BARE: statistics.median(row[BARE] for row in rows) * 1e3}


def counted(
    steps: dict[str, Callable[[], None]], move: Callable[[], None], runs: int, repetitions: int, what: str
) -> tuple[list[Run], int]:
    """A number of runs whose control is near 1, and how many runs were discarded."""
    good: list[Run] = []
    thrown = 0
    while len(good) < runs and thrown <= 10 * runs:
        found = medians(run(steps, move, repetitions))
        if abs(found[CONTROL] - 1) <= TOLERANCE:
            good.append(found)
        else:
            thrown += 1
        if dist.get_rank() == 0:
            print(f"  {what}, run {len(good)} of {runs}: control {found[CONTROL]:.3f}", file=sys.stderr)
    return good, thrown


def node_main(rank: int, nodes: int, size: str, store: str, runs: int, repetitions: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=nodes)
    random.seed(0)  # the same order on every node
    steps, move = competitors(size)
    run(steps, move, 3)  # warm: connections, caches, the outer state
    good, thrown = counted(steps, move, runs, repetitions, f"{nodes} x {size}")
    theirs: list[Run] = []
    alive: list[object] = []
    away = 0
    if TORCHFT:
        more, move_more, alive = torchft_syncs(size)
        both = {name: step for name, step in steps.items() if name != ALONE} | more

        def move_both() -> None:
            move()
            move_more()

        run(both, move_both, 3)
        theirs, away = counted(both, move_both, runs, repetitions, f"{nodes} x {size}, torchft")
    if rank == 0:
        print(json.dumps({"good": good, "thrown": thrown, "theirs": theirs, "away": away}), flush=True)
    dist.barrier()
    if alive:
        os._exit(0)  # torchft's servers and groups do not end in a fixed order
    dist.destroy_process_group()


def measure(nodes: int, size: str, runs: int, repetitions: int) -> tuple[list[Run], int, list[Run], int]:
    """Start the nodes: the runs that count and the number of discarded ones, and the same for torchft."""
    with tempfile.TemporaryDirectory() as here:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RUST_LOG": "error"}
        processes = []
        for rank in range(nodes):
            command = [sys.executable, __file__, "--node", str(rank), str(nodes), size, f"{here}/store"]
            command += ["--runs", str(runs), "--repetitions", str(repetitions)]
            processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        try:
            printed = [process.communicate()[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    if any(process.returncode for process in processes):
        raise SystemExit(f"{nodes} x {size}: a node ended with an error.")
    found = json.loads(printed[0])
    return found["good"], found["thrown"], found["theirs"], found["away"]


def rows_of(names: Sequence[str], nodes: int, size: str, good: list[Run], thrown: int) -> list[str]:
    """The lines of a table."""
    lines = []
    for name in names:
        goal = GOALS.get((name, size, nodes))
        start, end = f"| {name} | {nodes} x {size} |", f"| {f'<= {goal}' if goal else ''} |"
        if good:
            milliseconds = statistics.median(run[BARE] for run in good)
            seen = f"{spread(good, CONTROL)} | {milliseconds:.3g} | {len(good)}, {thrown} |"
            lines.append(f"{start} {spread(good, name)} {end} {seen}")
        else:
            lines.append(f"{start} not known {end} | | 0, {thrown} |")
    return lines


def spread(good: list[Run], name: str) -> str:
    values = [run[name] for run in good]
    return f"**{statistics.median(values):.2f}** [{min(values):.2f}, {max(values):.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--repetitions", type=int, default=15, help="repetitions of all competitors in a run")
    parser.add_argument("--nodes", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--sizes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--write", action="store_true", help="put the tables into benchmarks/RESULTS.md")
    parser.add_argument("--node", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.node:
        rank, nodes, size, store = arguments.node
        node_main(int(rank), int(nodes), size, store, arguments.runs, arguments.repetitions)
        return
    head = f"{machine()} {arguments.repetitions} repetitions per run; load {os.getloadavg()[0]:.1f} at the start."
    columns = [
        "| | nodes x parameters | ratio to all_reduce: median [least, most] | goal | control | all_reduce, ms "
        "| runs counted, discarded |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    ours, beside = list(columns), list(columns)
    print("\n".join([head, "", *columns]), flush=True)
    for size in arguments.sizes:
        for nodes in arguments.nodes:
            good, thrown, theirs, away = measure(nodes, size, arguments.runs, arguments.repetitions)
            ours += (more := rows_of((ALONE, ROUND), nodes, size, good, thrown))
            if TORCHFT:
                beside += (rest := rows_of((ROUND, *THEIRS), nodes, size, theirs, away))
                more += rest
            print("\n".join(more), flush=True)
    if not arguments.write:
        return
    put("\n".join([f"`{COMMAND}`: {head}", "", *ours, ""]), "exchange", "The exchange between real nodes")
    if TORCHFT:
        version = importlib.metadata.version("torchft")
        how = f"`{COMMAND}`, with torchft {version} and torch's SGD with Nesterov momentum outside: {head}"
        put("\n".join([how, "", *beside, ""]), "torchft", "The same, compared with torchft")


if __name__ == "__main__":
    main()
