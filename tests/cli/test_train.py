"""Real nodes under torchrun, and their replay."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tailopt.cli import train
from tailopt.cli.main import main
from tailopt.engines.replay import recorded_digests
from tailopt.records import checkpoints, history
from tailopt.records.checked_json import with_digest
from tailopt.rounds.drops import Drops
from tests.distributed import forked

ROOT = Path(__file__).parents[2]


def torchrun(words: list[str], here: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    return subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example of the help text, unchanged."""
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


@pytest.mark.slow
def test_lost_contributions_and_a_robust_mean_are_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, *words = shlex.split(train.EXAMPLE.replace("\\\n", " "))
    more = ["--drops", "0.5", "--on_drop", "keep", "--aggregate", "trimmed-mean", "--proximal", "0.5"]
    done = torchrun(["--standalone", *words, *more], tmp_path)
    assert done.returncode == 0, done.stderr
    assert main(["verify", str(tmp_path / "runs" / "real")]) == 0
    assert "10 rounds replayed: every tensor has the recorded bits" in capsys.readouterr().out
    lines = (tmp_path / "runs" / "real" / "history.jsonl").read_text().splitlines()
    lost = [[entry["node"] for entry in json.loads(line)["excluded"]] for line in lines]
    drops = Drops(3, 0.5, seed=0)
    assert lost == [sorted(drops.draw(t)) for t in range(1, 11)] and any(lost)


def test_a_used_folder_is_refused_in_the_words_of_the_shell(finished: Path) -> None:
    _, *words = shlex.split(train.EXAMPLE.replace("\\\n", " "))
    before = {path: path.read_bytes() for path in finished.iterdir() if path.is_file()}
    done = torchrun(["--standalone", *words], finished.parents[1])
    assert done.returncode != 0
    assert "Pass --resume to go on with the run in it" in done.stderr and "resume=True" not in done.stderr
    assert {path: path.read_bytes() for path in finished.iterdir() if path.is_file()} == before


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals")
@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    """Once, by node 0: in a terminal Ctrl-C reaches torchrun and all nodes, and torchrun tells the nodes again."""
    _, *words = shlex.split(train.EXAMPLE.replace("\\\n", " "))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *words, "--rounds", "100000"],
        cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stderr is not None
    try:
        while not (line := process.stderr.readline()).startswith("round 2/"):
            assert line, "it has ended"
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert said.count("tailopt: stopped.") == 1 and "The last good checkpoint is" in said
    [again] = re.findall("To go on, run again: (.*)", said)
    assert again.endswith("--rounds 100000 --resume")
    done = torchrun(["--standalone", *words, "--rounds", str(rounds_of(tmp_path) + 1), "--resume"], tmp_path)
    assert done.returncode == 0, done.stderr


def rounds_of(here: Path) -> int:
    return len((here / "runs" / "real" / "history.jsonl").read_text().splitlines())


def test_the_history_is_that_of_a_simulation(finished: Path) -> None:
    rows = [json.loads(line) for line in (finished / "history.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == list(range(1, 11))
    assert rows[-1]["metrics"]["error"] < rows[0]["metrics"]["error"]
    assert rows[0]["participants"] == [0, 1, 2] and rows[0]["excluded"] == []


def test_a_flipped_bit_is_named(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = finished / "digests.jsonl"
    before, seal = path.read_bytes(), path.with_suffix(".seal.json").read_bytes()
    rows = [json.loads(line) for line in before.splitlines()]
    rows[6]["tensors"]["weight"] = "0" * 64
    ledger = recorded_digests(finished)
    ledger.rewind(0)
    for row in rows:
        ledger.append(history.line(row), row["round"])
    try:
        assert main(["verify", str(finished)]) == 1
    finally:
        path.write_bytes(before)
        path.with_suffix(".seal.json").write_bytes(seal)
    assert "6 rounds are equal; the first difference is in round 7, tensor weight" in capsys.readouterr().out


def test_recorded_digests_that_changed_are_no_difference_of_the_run(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("digests.jsonl", "history.jsonl", "config.toml"):
        path = finished / name
        before = path.read_bytes()
        path.write_bytes(before.replace(b"1", b"2", 1))
        try:
            assert main(["verify", str(finished)]) == 2
        finally:
            path.write_bytes(before)
        said = capsys.readouterr()
        assert f"{name} is not what" in said.err and "from a copy" in said.err and "first difference" not in said.out


@pytest.mark.slow
def test_a_recorded_run_from_before_there_were_seals_is_replayed(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "old"
    shutil.copytree(finished, run)
    for name in ("run.json", "history.seal.json", "digests.seal.json"):
        (run / name).unlink()
    for path in checkpoints.list_checkpoints(run):
        body = json.loads((path / "manifest.json").read_text())
        del body["sha256"], body["run"]
        (path / "manifest.json").write_bytes(with_digest(body))
    assert main(["verify", str(run)]) == 0
    assert "10 rounds replayed" in capsys.readouterr().out
    _, *words = shlex.split(train.EXAMPLE.replace("\\\n", " ").replace("--rounds 10", "--rounds 11"))
    done = torchrun(["--standalone", *words[:-1], str(run), "--resume"], tmp_path)
    assert done.returncode == 0 and done.stderr.count("was begun by an older version") == 1, done.stderr
    assert main(["verify", str(run)]) == 0
    assert "11 rounds replayed" in capsys.readouterr().out
    digests = (run / "digests.jsonl").read_bytes()
    (run / "digests.jsonl").write_bytes(digests.replace(b"0", b"1", 1))
    assert main(["verify", str(run)]) == 2  # from the resume on they are checked


# ---- nodes that were started with other settings ----


def started(rank: int, out: str, more: list[str], also: list[str]) -> int:
    """`tailopt train` as one node; node 1 has other options."""
    words = "train --task syntoken --preset small --algorithm avg-biclip --ilr 0.5 --i_u 0.1 --i_d 0.01 --rounds 2"
    return main([*words.split(), "--quiet", "--timeout", "20", "--out", out, *also, *(more if rank == 1 else [])])


started.connects_itself = True  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--noise", "gaussian"], 'configuration, task, noise: it has "gaussian", and node 0 has "student-t"'),
        (["--df", "3"], "configuration, task, df: it has 3.0, and node 0 has 1.5"),
        (["--samples", "600"], "configuration, task, samples: it has 600, and node 0 has"),
        (["--batch_size", "7"], "configuration, batch_size: it has 7, and node 0 has"),
        (["--evaluate_every", "2"], "configuration, evaluate_every: it has 2, and node 0 has 1"),
        (["--resume"], "resume: it has true, and node 0 has false"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_every_setting_is_compared(server: forked.Server, tmp_path: Path, more: list[str], said: str) -> None:
    for end in server.run("tests.cli.test_train:started", 2, out=str(tmp_path / "run"), more=more, also=[]):
        assert end.status == 0 and end.value == 2, end.said  # what a shell would see
        assert f"Node 1 disagrees with node 0 on {said}" in end.said, end.said


def test_what_belongs_to_a_node_may_differ(server: forked.Server, tmp_path: Path) -> None:
    more = ["--timeout", "30", "--device", "cpu"]
    ends = server.run("tests.cli.test_train:started", 2, out=str(tmp_path / "run"), more=more, also=[])
    assert [(end.status, end.value) for end in ends] == [(0, 0)] * 2, [end.said for end in ends]


def test_without_torchrun(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["train", "--task", "syntoken", "--out", "runs/x"]) == 2
    assert "start it as `torchrun --nproc-per-node 3 -m tailopt train ...`" in capsys.readouterr().err


def test_a_simulation_is_no_recorded_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "run --task syntoken --preset small --algorithm avg-sgd --ilr 0.1 --rounds 1 --quiet --out"
    assert main([*words.split(), str(tmp_path / "x")]) == 0
    assert main(["verify", str(tmp_path / "x")]) == 2
    assert "has no digests.jsonl: it is not a run of `tailopt train`" in capsys.readouterr().err
