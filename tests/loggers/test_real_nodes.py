"""Loggers on real nodes: told on every node, once, also where the program ends before the run does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tailopt
from tailopt.loggers import RunStart
from tests.distributed import forked

pytest.importorskip("resource", reason="processes are forked")
HERE = "tests.loggers.test_real_nodes"


class File:
    """Writes what it is told to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def _note(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(text + "\n")

    def begin(self, run: RunStart) -> None:
        self._note(json.dumps([run.name, run.round, run.node, run.config["algorithm"]["name"]]))

    def __call__(self, row: dict[str, Any]) -> None:
        self._note(json.dumps([row["round"], row["loss"]]))

    def end(self) -> None:
        self._note("end")


def train(rank: int, folder: str, rounds: int | None) -> list[dict[str, Any]]:
    """Three rounds on this node; without `rounds` the program ends, and the run has no end."""
    net = nn.Linear(5, 3)
    algorithm = tailopt.algorithm("avg-biclip", ilr=0.05, i_u=1.0, i_d=0.1)
    opt = tailopt.NestedOptimizer.from_algorithm(
        net, algorithm, local_steps=2, rounds=rounds, run=f"{folder}/run", loggers=[File(Path(folder) / f"{rank}.txt")]
    )
    for _ in range(6):
        opt.zero_grad()
        loss = net(torch.randn(4, 5)).square().mean()
        loss.backward()
        opt.report(loss.item())
        opt.step()
    return opt.history


@pytest.mark.parametrize("rounds", [3, None])
def test_every_node_is_told_once(server: forked.Server, rounds: int | None, tmp_path: Path) -> None:
    ends = server.run(f"{HERE}:train", 2, folder=str(tmp_path), rounds=rounds)
    assert [end.status for end in ends] == [0, 0], [end.said for end in ends]
    for rank, end in enumerate(ends):
        rows = [[row["round"], row["loss"]] for row in end.value]
        first, *told, last = (tmp_path / f"{rank}.txt").read_text().splitlines()
        assert json.loads(first) == ["run", 0, rank, "avg-biclip"]
        assert [json.loads(text) for text in told] == rows and [row[0] for row in rows] == [1, 2, 3]
        assert last == "end"
