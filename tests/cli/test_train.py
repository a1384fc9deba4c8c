"""Real nodes under torchrun, and their replay."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tailopt.cli import train
from tailopt.cli.main import main
from tailopt.rounds.drops import Drops

ROOT = Path(__file__).parents[2]


def torchrun(words: list[str], here: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    return subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example of the help text, as it stands."""
    here = tmp_path_factory.mktemp("train")
    program, *words = shlex.split(train.EXAMPLE.replace("\\\n", " "))
    assert program == "torchrun"
    done = torchrun(["--standalone", *words], here)
    assert done.returncode == 0, done.stderr
    assert "round 10/10" in done.stderr and "wrote runs/real" in done.stdout
    return here / "runs" / "real"


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_replay_has_the_same_bits(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(finished)]) == 0
    assert "10 rounds replayed: every tensor has the recorded bits" in capsys.readouterr().out


def test_lost_contributions_and_a_robust_mean_are_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, *words = shlex.split(train.EXAMPLE.replace("\\\n", " "))
    more = ["--drops", "0.5", "--on_drop", "keep", "--aggregate", "trimmed-mean"]
    done = torchrun(["--standalone", *words, *more], tmp_path)
    assert done.returncode == 0, done.stderr
    assert main(["verify", str(tmp_path / "runs" / "real")]) == 0
    assert "10 rounds replayed: every tensor has the recorded bits" in capsys.readouterr().out
    lines = (tmp_path / "runs" / "real" / "history.jsonl").read_text().splitlines()
    lost = [[entry["node"] for entry in json.loads(line)["excluded"]] for line in lines]
    drops = Drops(3, 0.5, seed=0)
    assert lost == [sorted(drops.draw(t)) for t in range(1, 11)] and any(lost)


def test_the_history_is_that_of_a_simulation(finished: Path) -> None:
    rows = [json.loads(line) for line in (finished / "history.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == list(range(1, 11))
    assert rows[-1]["metrics"]["error"] < rows[0]["metrics"]["error"]
    assert rows[0]["participants"] == [0, 1, 2] and rows[0]["excluded"] == []


def test_a_flipped_bit_is_named(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = finished / "digests.jsonl"
    before = path.read_text()
    rows = [json.loads(line) for line in before.splitlines()]
    rows[6]["tensors"]["weight"] = "0" * 64
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    try:
        assert main(["verify", str(finished)]) == 1
    finally:
        path.write_text(before)
    assert "6 rounds are equal; the first difference is in round 7, tensor weight" in capsys.readouterr().out


def test_without_torchrun(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["train", "--task", "syntoken", "--out", "runs/x"]) == 2
    assert "start it as `torchrun --nproc-per-node 3 -m tailopt train ...`" in capsys.readouterr().err


def test_a_simulation_is_no_recorded_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "run --task syntoken --preset small --algorithm avg-sgd --ilr 0.1 --rounds 1 --quiet --out"
    assert main([*words.split(), str(tmp_path / "x")]) == 0
    assert main(["verify", str(tmp_path / "x")]) == 2
    assert "has no digests.jsonl: it is not a run of `tailopt train`" in capsys.readouterr().err
