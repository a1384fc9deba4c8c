"""One of four real nodes is broken in twenty-one rounds: it is left out and named, and all agree to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults import broken

ROOT = Path(__file__).parents[2]
NODES = 4
REASONS = {
    "NaN": "not finite",
    "inf": "not finite",
    "flip on the way": "damaged on the way",
    "flip in memory, beyond the bound": "beyond what its optimizer can move",
    "stale": "of another round",
    "duplicate": "of another node",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    here = tmp_path_factory.mktemp("broken")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "tests.faults.broken"]
    processes = [
        subprocess.Popen([*command, str(rank), str(NODES), str(here / "store"), str(here)], env=environment, cwd=ROOT)
        for rank in range(NODES)
    ]
    try:
        assert [process.wait(240) for process in processes] == [0] * NODES
    finally:
        for process in processes:
            process.kill()
    return [json.loads((here / f"{rank}.json").read_text()) for rank in range(NODES)]


@pytest.mark.parametrize("case", broken.CASES)
def test_everybody_has_the_same_weights(case: str, trained: list[dict[str, Any]]) -> None:
    assert all(saw[case]["weights"] == trained[0][case]["weights"] for saw in trained)
    assert all(saw[case]["excluded"] == trained[0][case]["excluded"] for saw in trained if case not in ("NaN",))


@pytest.mark.parametrize("case", REASONS)
def test_the_broken_node_is_left_out_and_named(case: str, trained: list[dict[str, Any]]) -> None:
    for saw in trained:
        for number, excluded in enumerate(saw[case]["excluded"], 1):
            named = [(entry["node"], entry["reason"]) for entry in excluded]
            assert named == ([(broken.BROKEN, REASONS[case])] if number in broken.LATE else []), f"round {number}"


def test_a_flip_within_the_bound_cannot_be_seen(trained: list[dict[str, Any]]) -> None:
    assert not any(trained[0]["flip in memory, within it"]["excluded"])


@pytest.mark.parametrize("case", REASONS)
def test_the_run_ends_near_the_clean_one(case: str, trained: list[dict[str, Any]]) -> None:
    """Three of four nodes train on, on other batches than all four: near, not equal."""
    clean = trained[0]["clean"]["loss"]
    assert trained[0][case]["loss"] == pytest.approx(clean, rel=0.5)


def test_a_slow_node_changes_nothing(trained: list[dict[str, Any]]) -> None:
    assert trained[0]["slow"]["weights"] == trained[0]["clean"]["weights"]
