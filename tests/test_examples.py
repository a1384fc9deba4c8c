"""The examples that a user copies run unchanged."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

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


def test_the_two_node_example_is_short_enough_to_copy() -> None:
    assert len((ROOT / "examples/two_nodes.py").read_text(encoding="utf-8").splitlines()) < 60
