"""Federations in Flower's own simulation, which runs clients as Ray actors: the bits of `simulate`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tailopt.algorithms import ALGORITHMS

pytest.importorskip("flwr", reason="flwr needs Python 3.11")

ROOT = Path(__file__).parents[2]
OFFLINE = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}


def check(case: str) -> list[dict[str, Any]]:
    """Compare what `simulated.py` found; returns the history."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.integrations.simulated", case],
        env={**os.environ, **OFFLINE, "PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=450,
    )
    found = [line for line in run.stdout.splitlines() if line.startswith("FOUND ")]
    assert run.returncode == 0 and found, f"{run.stdout}\n{run.stderr}"
    federation, simulation = json.loads(found[0].removeprefix("FOUND "))
    said = [line for line in run.stderr.splitlines() if "Round" in line or "refused" in line]
    assert json.dumps(federation) == json.dumps(simulation), said
    history: list[dict[str, Any]] = federation["history"]
    return history


def excluded(history: list[dict[str, Any]]) -> list[list[tuple[int, str]]]:
    return [[(e["node"], e["reason"]) for e in row["excluded"]] for row in history]


@pytest.mark.slow
def test_three_of_five_clients_have_the_bits_of_a_simulation() -> None:
    assert all(len(row["participants"]) == 3 for row in check("3 of 5"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_the_bits_of_a_simulation(name: str) -> None:
    assert excluded(check(name)) == [[], [], [], [], []]


@pytest.mark.slow
def test_a_robust_mean_has_the_bits_of_a_simulation() -> None:
    assert len(check("median-norm")) == 5


@pytest.mark.slow
def test_a_nan_is_excluded_by_name() -> None:
    assert all(who == [(3, "not finite")] for who in excluded(check("nan")) if who)


@pytest.mark.slow
def test_a_client_that_crashes_loses_its_contribution() -> None:
    assert excluded(check("crash")) == [[], [], [], [(1, "dropped")], [(1, "dropped")]]


@pytest.mark.slow
def test_a_late_reply_is_a_lost_contribution() -> None:
    assert (2, "dropped") in excluded(check("late"))[2]
