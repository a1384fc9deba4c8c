"""Small runs whose arithmetic is exact, so that folders written on another machine hold the bits of this one.

Every weight, gradient and momentum is a short sum of powers of two: no operation rounds, whatever the order of its
terms and whether it is fused. Run as a script, `python old_runs.py FOLDER` makes the two interrupted run folders of
`fixtures/`; they were made by commit 7a2b36c, which wrote no run id, no digest of the configuration and no chain.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tailopt

NODES, ROUNDS, STEPS = 2, 5, 2


class Point(torch.nn.Module):
    """Two parameters and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.tensor([3.0, -1.0], dtype=torch.float64))
        self.b = torch.nn.Parameter(torch.tensor([[0.5], [2.0]], dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, target: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        return torch.stack([(self.a - target).square().sum(), (self.b - target).square().diagonal().sum()]).sum() / 8


def batches(node: int, round: int, step: int, generator: torch.Generator | None = None) -> torch.Tensor:
    return torch.tensor([float(node + round % 3), float(step - node)], dtype=torch.float64)


def algorithm() -> tailopt.Algorithm:
    return tailopt.Algorithm(
        outer=torch.optim.SGD,
        inner=torch.optim.SGD,
        outer_settings={"lr": 1.0, "momentum": 0.5},
        inner_settings={"lr": 0.5, "momentum": 0.5},
        inner_state="keep",
    )


def simulated(run: Path | None, rounds: int = ROUNDS, stop: int | None = None, **more: Any) -> tailopt.Result:
    """A simulation; `stop`: the round in which it breaks off."""

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(batch)
        return found

    def given(node: int, round: int, step: int, generator: torch.Generator) -> torch.Tensor:
        if (round, step) == (stop, 1):
            raise InterruptedError
        return batches(node, round, step)

    return tailopt.simulate(
        Point(),
        algorithm(),
        loss=loss,
        batches=given,
        nodes=NODES,
        rounds=rounds,
        local_steps=STEPS,
        average=False,
        run=run,
        progress=False,
        **more,
    )


def one_node(rank: int, out: str, run: str, stop: int | None, settings: dict[str, Any]) -> None:
    """A real node; it writes its weights, or its error, and what it was warned of."""
    torch.set_num_threads(1)
    model, said, error = Point(), [], ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=NODES)
            given = {"rounds": ROUNDS, "timeout": 20.0, **settings}
            opt = tailopt.NestedOptimizer.from_algorithm(model, algorithm(), local_steps=STEPS, run=run, **given)
            while not opt.finished:
                t, step = opt.node.round + 1, opt.total_steps % STEPS
                if (t, step) == (stop, 1):
                    opt.checkpoint()
                    os._exit(3)
                opt.zero_grad()
                found = model(batches(rank, t, step))
                found.backward()
                opt.report(float(found.detach()))
                opt.step()
            dist.barrier()
        except Exception as caught_error:
            error = f"{type(caught_error).__name__}: {caught_error}"
        said = [str(w.message) for w in caught]
    state = {name: value.tolist() for name, value in model.state_dict().items()}
    Path(out, f"{rank}.json").write_text(json.dumps({"state": state, "said": said, "error": error}))
    os._exit(0)


def with_nodes(out: Path, run: Path, stop: int | None = None, **settings: Any) -> list[dict[str, Any]]:
    """Two real nodes; what each of them said, nothing where they stopped."""
    out.mkdir()
    context = multiprocessing.get_context("fork")
    nodes = [context.Process(target=one_node, args=(k, str(out), str(run), stop, settings)) for k in range(NODES)]
    for node in nodes:
        node.start()
    for node in nodes:
        node.join()
    return [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]


def make(folder: Path) -> None:
    """The folders of `fixtures/`."""
    with contextlib.suppress(InterruptedError):
        simulated(folder / "simulation", stop=4, keep=2)
    assert with_nodes(folder / "out", folder / "nodes", stop=4, resume=False, keep=2) == []


if __name__ == "__main__":
    make(Path(sys.argv[1]))
