"""What the processes of test_drops.py run: real gloo nodes whose contributions get lost, digests by round."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tailopt
from tailopt import faults
from tailopt.seeds import generator
from tests.distributed import nodes
from tests.distributed.nodes import STEPS, algorithm, digest, loss, model

NODES, ROUNDS = 4, 6
LOST = {2: {1}, 3: {1, 3}, 4: {0, 1, 2, 3}, 5: {0}}  # in round 4 nothing arrives; node 1 is apart for three rounds
POISONED = (2, 3)  # node and round of a batch that is not finite
ALGORITHMS = ("avg-biclip", "diloco", "adam2", "avg-l2clip", "bi2clip")
ROBUST = ("median-norm", "trimmed-mean", "coordinate-median", "centred-clipping")
CASES: dict[str, dict[str, Any]] = {
    **{f"{name}, {on_drop}": {"on_drop": on_drop} for name in ALGORITHMS for on_drop in ("sync", "keep")},
    "diloco, keep, two of them": {"on_drop": "keep", "participants": 2},
    "diloco, keep, projected": {"on_drop": "keep", "projection": 2.0, "average": True},
    **{f"diloco, {aggregate}": {"aggregate": aggregate} for aggregate in ROBUST},
    "diloco, keep, trimmed-mean": {"on_drop": "keep", "aggregate": "trimmed-mean"},
    "diloco, poisoned": {},
    "diloco, keep, poisoned": {"on_drop": "keep"},
}


def lost(case: str) -> dict[int, set[int]]:
    """Whose contributions are lost in which round; nobody's in the cases about something else."""
    return LOST if "sync" in case or "keep" in case else {}


def drops(case: str) -> Any:
    """The same for the simulation."""
    return lambda t, source: lost(case).get(t, ())


def batches(case: str) -> Any:
    """Those of the other tests; some nodes far off, where a robust aggregate should see it."""

    def drawn(node: int, round: int, step: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
        x, y = nodes.batches(node, round, step, source)
        if "poisoned" in case and (node, round, step) == (*POISONED, STEPS - 1):
            x[0, 0] = float("nan")
        return (x, y * 30 if node == 1 and round % 2 else y) if any(name in case for name in ROBUST) else (x, y)

    return drawn


def rounds(
    case: str, node: int, seen: dict[int, str], stop: tuple[int, int] | None = None, **settings: Any
) -> tailopt.NestedOptimizer:
    """Train; `seen` gets the digest of the synchronised model after every round. stop: leave after (round, step)."""
    net, given = model(), batches(case)
    opt = tailopt.NestedOptimizer.from_algorithm(
        net,
        algorithm(case.split(",")[0]),
        local_steps=STEPS,
        rounds=ROUNDS,
        loggers=[lambda row: seen.__setitem__(row["round"], digest(net))],
        **CASES[case],
        **settings,
    )
    faults.inject(opt, faults.Drop({t for t, who in lost(case).items() if node in who}))
    begun = opt.resumed.step if opt.resumed is not None else 0
    while not opt.finished:
        t = opt.node.round + 1
        for step in range(begun, STEPS):
            opt.zero_grad()
            loss(net, given(node, t, step, generator(0, "batch", t, node, step))).backward()
            opt.step()
            if stop == (t, step):
                if step < STEPS - 1:
                    opt.checkpoint()
                return opt
        begun = 0
    seen[-1] = digest(net)
    return opt


def main(rank: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NODES)
    found: dict[str, Any] = {}
    for case in CASES:
        seen: dict[int, str] = {}
        opt = rounds(case, rank, seen)
        found[case] = {"digests": seen, "history": [row["excluded"] for row in opt.history]}
    for number, stop in enumerate([(3, STEPS - 1), (4, 0), (4, STEPS - 1), (5, 1)]):
        for case in ("diloco, keep", "avg-biclip, keep"):
            seen, folder = {}, f"{out}/run {case} {number}"
            rounds(case, rank, seen, stop, run=folder)
            rounds(case, rank, seen, run=folder, resume=True)
            found[f"{case}, resumed {stop}"] = {"digests": seen}
    Path(f"{out}/{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
