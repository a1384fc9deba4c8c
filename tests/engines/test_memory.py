"""The memory of one node, the model and one accumulator, however many nodes there are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODEL = 32.0  # MiB: eight million parameters in fp32

SCRIPT = """
import resource, sys, torch, tailopt
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(8)))
algorithm = tailopt.algorithm("avg-biclip", ilr=0.1, i_u=1e-3, i_d=0.0)
def run(nodes):
    tailopt.simulate(model, algorithm, loss=lambda m, x: m(x).square().mean(), nodes=nodes, rounds=2, local_steps=1,
                     batches=lambda node, round, step, generator: torch.ones(1, 1024), progress=False)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(int(sys.argv[1]))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def peak(nodes: int) -> float:
    """MiB above what the process had before the simulation, its own model among them."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "MALLOC_MMAP_THRESHOLD_": "65536",
    }  # what is freed is given back
    command = [sys.executable, "-c", SCRIPT, str(nodes)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=True)
    return float(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux alone")
def test_memory_does_not_grow_with_the_nodes() -> None:
    few, many = peak(2), peak(12)
    assert many < few + MODEL / 2
    # the node's copy, its gradients, the synchronised weights, the accumulator; and what a first backward pass brings
    assert many < 4 * MODEL + 40
