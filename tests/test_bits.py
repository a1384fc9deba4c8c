"""benchmarks/bits.py: equal versions have equal digests, and one changed bit is reported."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("resource", reason="the script forks its processes")
pytest.importorskip("tomli_w", reason="the cases write run folders")

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "bits.py"


@pytest.fixture(scope="module")
def bits() -> Iterator[ModuleType]:
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        yield importlib.import_module("bits")
    finally:
        sys.path.remove(str(SCRIPT.parent))


@pytest.fixture(scope="module")
def cases(bits: ModuleType) -> ModuleType:
    return importlib.import_module("bits_cases")


def called(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.slow  # records and compares twice
def test_only_what_changed_is_reported(tmp_path: Path) -> None:
    record, cases = tmp_path / "before.json", ("--only", "[sn]*/avg-biclip")
    written = called("--write", str(record), *cases, "--keep", str(tmp_path / "runs"))
    assert written.returncode == 0, written.stderr
    recorded = json.loads(record.read_text())
    kinds = ("simulate", "simulate-resumed", "nodes", "nodes-resumed")
    assert recorded["cases"].keys() == {f"{kind}/avg-biclip" for kind in kinds}
    assert not any("error" in digests for digests in recorded["cases"].values())
    assert (tmp_path / "runs" / "nodes" / "avg-biclip" / "config.toml").exists()
    recorded["cases"]["nodes/avg-biclip"]["checkpoints"]["round-000002"] = "0" * 64
    record.write_text(json.dumps(recorded))
    compared = called("--compare", str(record), *cases)
    assert compared.returncode == 1
    assert compared.stdout.splitlines()[2:] == ["nodes/avg-biclip: checkpoints differ: round-000002"]


def test_one_bit_of_a_weight_changes_the_digest(cases: ModuleType) -> None:
    net = cases.model("plain")
    before = cases.weights_digest(net)
    with torch.no_grad():
        net[0].weight.view(torch.int32)[0, 0] ^= 1
    assert cases.weights_digest(net) != before


def test_a_manifest_counts_without_what_is_random(cases: ModuleType, tmp_path: Path) -> None:
    def digest(seal: str, run_id: str, rounds: int) -> str:
        manifest = {"sha256": seal, "round": rounds, "run": [run_id, "config", [rounds, rounds, seal]]}
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))
        return str(cases.checkpoint_digest(tmp_path))

    assert digest("a", "b", 2) == digest("c", "d", 2)
    assert digest("a", "b", 2) != digest("a", "b", 3)


def test_differences_name_the_case_and_the_digest(bits: ModuleType) -> None:
    before = {"a": {"weights": "1", "history": "2"}, "b": {"weights": "3"}}
    assert bits.differences(before, before) == []
    after = {"a": {"weights": "1", "history": "9"}, "b": {"error": "ValueError: no"}, "c": {}}
    assert bits.differences(before, after) == [
        "a: history differs",
        "b: error was None, is ValueError: no",
        "b: weights differs",
        "c: not in the recorded file",
    ]
