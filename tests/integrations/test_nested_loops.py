"""Nested training in Trainer, Accelerate and Lightning, under torchrun: the bits of NestedOptimizer in a plain loop."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.forked import ROOT, environment
from tests.integrations import loops

NODES = 2


@pytest.mark.parametrize("library", loops.LOOPS)
def test_nested_runs_have_the_bits_of_a_plain_loop(library: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NODES}"]
    done = subprocess.run(
        [*command, "-m", "tests.integrations.nested_loops", library, str(tmp_path)],
        env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    nodes = [json.loads((tmp_path / f"{node}.json").read_text()) for node in range(NODES)]
    for bf16 in ("False", "True"):
        one, other = (found[bf16] for found in nodes)
        for found in (one, other):
            assert found["local"] == found["replayed"]
            assert found["end"] == found["end replayed"]
            assert found["history"] == found["history replayed"]
            assert [row["steps"] for row in found["history"]] == [[4, 4], [4, 4], [3, 3]]
            assert found["names"] == ["body.2.weight", "body.2.bias", "head.weight", "head.bias"]
            assert found["seen"] == [4, 4, 2] * 3 + [4, 4]  # the third step of an epoch has what is left of it
        assert one["end"] == other["end"]
        # Inside a round the nodes go their own ways: no DDP. Each sees all of its own data, and no other's.
        assert not set(one["local"]) & set(other["local"])
        assert [len(found["rows"]) for found in (one, other)] == [loops.ROWS] * NODES
        assert not set(one["rows"]) & set(other["rows"])
    assert nodes[0]["True"]["end"] != nodes[0]["False"]["end"]
