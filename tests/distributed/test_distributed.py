"""Real processes over gloo against the simulation: the same bits, for every algorithm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tailopt
from tests.distributed import nodes

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=[3, pytest.param(4, marks=pytest.mark.slow)])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str]]]:
    """What every process saw."""
    here, count = tmp_path_factory.mktemp("nodes"), request.param
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "tests.distributed.nodes"]
    processes = [
        subprocess.Popen([*command, str(rank), str(count), str(here / "store"), str(here)], env=environment, cwd=ROOT)
        for rank in range(count)
    ]
    try:
        assert [process.wait(300) for process in processes] == [0] * count
    finally:
        for process in processes:
            process.kill()
    return [json.loads((here / f"{rank}.json").read_text()) for rank in range(count)]


@pytest.mark.parametrize("case", nodes.CASES)
@pytest.mark.parametrize("name", nodes.NAMES)
def test_the_same_bits_as_the_simulation(name: str, case: str, trained: list[dict[str, list[str]]]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    by_round: list[str] = []
    try:
        result = tailopt.simulate(
            nodes.model(),
            nodes.algorithm(name),
            loss=nodes.loss,
            batches=nodes.batches,
            nodes=len(trained),
            rounds=nodes.ROUNDS,
            local_steps=nodes.STEPS,
            evaluate=lambda model: by_round.append(nodes.digest(model)) or {},  # type: ignore[func-returns-value]
            progress=False,
            **nodes.CASES[case],
        )
    finally:
        torch.set_num_threads(threads)
    expected = {str(row["round"]): seen for row, seen in zip(result.history, by_round, strict=True)}
    for saw in trained:
        *rounds, last = saw[f"{name}, {case}"]
        assert last == by_round[-1]
        for text in rounds:
            number, seen = text.split()
            assert seen == expected[number], f"round {number}"
