"""The examples that a user copies run unchanged."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]


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


def test_a_loop_that_is_killed_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """Killed in the middle, and started again by the same command; the scheduler and the data are where they were."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}

    def command(folder: str) -> list[str]:
        return [*torchrun, str(ROOT / "examples/resume_nodes.py"), str(tmp_path / folder)]

    killed = subprocess.Popen(command("killed"), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        history, until = tmp_path / "killed" / "history.jsonl", time.monotonic() + 120
        while not history.is_file() or history.read_bytes().count(b"\n") < 3:
            assert killed.poll() is None and time.monotonic() < until
            time.sleep(0.005)
    finally:
        agent = psutil.Process(killed.pid)
        for process in [agent, *agent.children(recursive=True)]:  # all at once, as by a power cut
            process.kill()
        killed.wait()
    assert history.read_bytes().count(b"\n") < 40, "it was killed too late to show anything"
    said = {}
    for folder in ("killed", "whole"):
        done = subprocess.run(
            command(folder), env=environment, capture_output=True, text=True, timeout=180, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "start again" not in done.stderr and "Was the scheduler restored" not in done.stderr
        said[folder] = done.stdout
    assert "goes on after round" in said["killed"] and "goes on" not in said["whole"]
    assert weights_of(said["killed"]) == weights_of(said["whole"]) != set()
    assert len(weights_of(said["whole"])) == 1


def test_the_two_node_example_is_short_enough_to_copy() -> None:
    assert len((ROOT / "examples/two_nodes.py").read_text(encoding="utf-8").splitlines()) < 60
