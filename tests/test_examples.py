"""The examples that a user copies run unchanged."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[1]
LIBRARIES = {"trainer_nodes": "transformers", "accelerate_nodes": "accelerate", "lightning_nodes": "lightning"}
ROUNDS = {"resume_nodes": 40, **dict.fromkeys(LIBRARIES, 12)}


def test_two_nodes_under_torchrun() -> None:
    """Real torchrun, two processes: the loss decreases, and both nodes end with the same weights."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [*torchrun, "examples/two_nodes.py"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    losses = [float(value) for value in re.findall(r"round \d+: loss (\d+\.\d{4})", done.stdout)]
    assert len(losses) == 6
    assert losses[-1] < losses[0] / 5
    # two processes write into one pipe: their lines may run together
    weights = dict(re.findall(r"node (\d): weights ([0-9a-f]{16})", done.stdout))
    assert weights.keys() == {"0", "1"}
    assert weights["0"] == weights["1"]


def weights_of(said: str) -> set[str]:
    """The digests that nodes print; their lines may run together in the pipe."""
    return {*re.findall(r"weights ([0-9a-f]{16})", said)}


@pytest.mark.parametrize(
    ("example", "run"),
    [
        ("resume_nodes", ""),
        pytest.param("trainer_nodes", "nodes", marks=pytest.mark.slow),
        pytest.param("accelerate_nodes", "nodes", marks=pytest.mark.slow),
        pytest.param("lightning_nodes", "nodes", marks=pytest.mark.slow),
    ],
)
def test_a_loop_that_is_killed_goes_on_to_the_same_bits(example: str, run: str, tmp_path: Path) -> None:
    """Killed in the middle, and started again by the same command; the scheduler and the data are where they were."""
    if example in LIBRARIES:
        pytest.importorskip(LIBRARIES[example])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}

    def command(folder: str) -> list[str]:
        return [*torchrun, str(ROOT / f"examples/{example}.py"), str(tmp_path / folder)]

    killed = subprocess.Popen(command("killed"), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        history, until = tmp_path / "killed" / run / "history.jsonl", time.monotonic() + 120
        while not history.is_file() or history.read_bytes().count(b"\n") < 3:
            assert killed.poll() is None and time.monotonic() < until
            time.sleep(0.005)
    finally:
        agent = psutil.Process(killed.pid)
        for process in [agent, *agent.children(recursive=True)]:  # all at once, as by a power cut
            process.kill()
        killed.wait()
    assert history.read_bytes().count(b"\n") < ROUNDS[example], "it was killed too late to show anything"
    said = {}
    for folder in ("killed", "whole"):
        done = subprocess.run(
            command(folder), env=environment, capture_output=True, text=True, timeout=180, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "start again" not in done.stderr and "Was the scheduler restored" not in done.stderr
        said[folder] = done.stdout
    if example == "resume_nodes":
        assert "goes on after round" in said["killed"] and "goes on" not in said["whole"]
    else:
        begun = {folder: re.findall(r"node \d begins after (step \d+|\S+)", text) for folder, text in said.items()}
        assert len(begun["killed"]) == len(begun["whole"]) == 2
        assert not set(begun["killed"]) & {"None", "step 0"} and set(begun["whole"]) <= {"None", "step 0"}
    assert weights_of(said["killed"]) == weights_of(said["whole"]) != set()
    assert len(weights_of(said["whole"])) == 1


@pytest.mark.parametrize("example", ["two_nodes", *LIBRARIES])
def test_the_node_examples_are_short_enough_to_copy(example: str) -> None:
    assert len((ROOT / f"examples/{example}.py").read_text(encoding="utf-8").splitlines()) < 60
