"""Folders for the tests of reports: real runs, a real sweep, and a study as its files."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch

import tailopt
from tailopt.records import history
from tailopt.records.folder import Run
from tailopt.records.ledger import Chain

HOSTILE = "</script><script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\">"
FIXED = {"olr": 1.0, "i_d": 0.01, "o_u": 1.0, "o_d": 0.01}
NODE_TIMES = {"local": 0.1, "wait": 0.02, "exchange": 0.05, "outer": 0.01, "bytes_sent": 40_000}


def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - 1).square().mean()


def batches(node: int, round: int, step: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(8, 4, generator=generator)


def simulated(folder: Path, algorithm: tailopt.Algorithm, seed: int, **more: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
    tailopt.simulate(
        model, algorithm, loss=loss, batches=batches, nodes=4, rounds=12, local_steps=2, seed=seed, participation=0.5,
        drops=0.2, statistics="histograms", run=folder, progress=False, checkpoint_every=6,
        evaluate=lambda m: {"error": m[0].weight.norm(), "accuracy": 0.5 + seed / 10}, **more,
    )  # fmt: skip


def study(folder: Path) -> None:
    """What a comparison leaves."""
    folder.mkdir(parents=True, exist_ok=True)
    budget = [{"trials": n, "mean": 1 / n, "median": 1 / n, "low": 0.9 / n, "high": 1.2 / n} for n in (1, 5, 20)]
    runs = [{"seed": seed, "metrics": {"accuracy": 0.9}, "curve": [], "losses": [1.0, 0.5, 0.4]} for seed in (0, 1)]
    cells = [
        {"column": "MRPC", "algorithm": name, "settings": {}, "runs": runs, "trials": [], "budget_curve": budget}
        for name in ("bi2clip", "adam2")
    ]
    (folder / "results.json").write_text(json.dumps({"plan": {}, "cells": cells}))
    (folder / "table.md").write_text("# GLUE\n\n| | MRPC |\n| --- | ---: |\n| bi2clip | 90.1 ± 0.5 |\n\n- Two seeds.\n")


def everything(folder: Path) -> Path:
    """Runs over seeds, a run of real nodes, a sweep and a study."""
    biclip = tailopt.algorithm("avg-biclip", ilr=0.1, i_u=0.5, i_d=0.01)
    for seed in (0, 1):
        simulated(folder / "runs" / f"biclip-{seed}", biclip, seed)
        simulated(folder / "runs" / f"sgd-{seed}", tailopt.algorithm("avg-sgd", ilr=0.1), seed)
    recorded(folder / "runs" / "nodes", 30)
    tailopt.sweep(
        "gaussian", "bi2clip", space={"ilr": [0.01, 0.1, 0.3], "i_u": [0.5, 1.0]}, settings=FIXED,
        seeds=1, report_seeds=2, rounds=3, progress=False, run=folder / "sweep",
    )  # fmt: skip
    for name in ("second", "third", "fourth"):
        shutil.copytree(folder / "sweep", folder / name)
    study(folder / "study")
    return folder


def recorded(folder: Path, rounds: int, nodes: int = 3, **settings: Any) -> Run:
    """A run of real nodes as its files, without training: as many rounds as one likes in little time."""
    config = {"algorithm": "avg-biclip", "settings": {"ilr": 0.2, "i_u": 0.5}, "rounds": rounds, "seed": 0, **settings}
    run = Run.create(folder, config, {"torch": "2.13.0"})
    chain, lines, times = Chain(), [], []
    for t in range(1, rounds + 1):
        bad = {"node": 1, "tensor": "0.weight", "value": math.nan, "bound": 0.5, "reason": "not finite"}
        row = {
            "round": t, "loss": 2 / t, "participants": list(range(nodes)), "steps": [5] * nodes,
            "weights": [1 / nodes] * nodes, "excluded": [bad] if t % 7 == 0 else [],
            "metrics": {"error": 1 / t} if t % 5 == 0 else {}, "statistics": {},
        }  # fmt: skip
        lines.append(history.line(row))
        chain = chain.extended(lines[-1], t)
        times.append(history.line({"round": t, "round_seconds": 0.2, **NODE_TIMES}))
    (folder / "history.jsonl").write_bytes(b"".join(lines))
    (folder / "times.jsonl").write_bytes(b"".join(times))
    run.ledger.rewind(rounds, chain)  # seals the rows that were written at once
    return run
