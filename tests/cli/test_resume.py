"""`tailopt resume`: the same file as if nothing had happened, after a kill too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import tailopt
from tailopt.cli.main import main

SOURCE = Path(tailopt.__file__).parents[1]
SMALL = ["--task", "syntoken", "--preset", "small", "--nodes", "3", "--local_steps", "2", "--quiet"]
# kept inner state, outer state and partial participation: what a careless checkpoint would lose
ALGORITHM = ["--algorithm", "diloco", "--ilr", "1e-2", "--ieps", "1e-8", "--olr", "0.7", "--momentum", "0.9"]
WORDS = [*SMALL, *ALGORITHM, "--weight_decay", "0.01", "--participation", "0.7"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def started(*words: str) -> subprocess.Popen[str]:
    """`tailopt run` as a process of its own, once its first rounds are in the history."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    process = subprocess.Popen(
        [sys.executable, "-m", "tailopt", "run", *words],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        # a test runner in the background ignores Ctrl-C, and so would its children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    history, until = Path("stopped/history.jsonl"), time.monotonic() + 120
    while not history.is_file() or history.read_bytes().count(b"\n") < 3:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < until
        time.sleep(0.005)
    return process


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_killed_run_gives_the_same_history() -> None:
    process = started(*WORDS, "--rounds", "100", "--checkpoint_every", "4", "--out", "stopped")
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    done = Path("stopped/history.jsonl").read_bytes().count(b"\n")
    assert done < 100, "it was killed too late to show anything"
    assert main(["resume", "stopped", "--quiet"]) == 0
    assert main(["run", *WORDS, "--rounds", "100", "--checkpoint_every", "4", "--out", "whole"]) == 0
    assert Path("stopped/history.jsonl").read_bytes() == Path("whole/history.jsonl").read_bytes()


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals")
def test_ctrl_c_says_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    process = started(*WORDS, "--rounds", "400", "--out", "stopped")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    done = Path("stopped/history.jsonl").read_bytes().count(b"\n")
    assert err == f"Stopped after round {done} of 400. Continue with: tailopt resume stopped\n"
    assert main(["resume", "stopped", "--rounds", str(done + 2), "--quiet"]) == 0
    assert f"round {done + 2}: loss" in capsys.readouterr().out


def test_further_than_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *WORDS, "--rounds", "2", "--out", "a"]) == 0
    assert main(["resume", "a", "--rounds", "5", "--quiet"]) == 0
    assert main(["run", *WORDS, "--rounds", "5", "--out", "b"]) == 0
    assert Path("a/history.jsonl").read_bytes() == Path("b/history.jsonl").read_bytes()
    capsys.readouterr()
    assert main(["resume", "a"]) == 2
    assert "Invalid rounds: got 2; a has 5 already. Give more: --rounds 10" in capsys.readouterr().err
    assert main(["resume", "b"]) == 0
    assert "warning: The run has 5 rounds already" in capsys.readouterr().err


def test_what_cannot_be_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", "nowhere"]) == 2
    assert "nowhere is not a run folder" in capsys.readouterr().err
    model, loss = torch.nn.Linear(1, 1), lambda model, batch: model(batch).square().mean()
    tailopt.simulate(model, tailopt.algorithm("avg-sgd", ilr=0.1), loss=loss, nodes=1, rounds=1, local_steps=1,
                     batches=lambda *_: torch.ones(1, 1), run="python", progress=False)  # fmt: skip
    assert main(["resume", "python"]) == 2
    assert "python names no task: it was run from Python" in capsys.readouterr().err


def test_a_changed_configuration_is_refused_until_it_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *WORDS, "--rounds", "2", "--out", "a"]) == 0
    config = Path("a/config.toml")
    before = config.read_text()
    config.write_text(before.replace("ilr = 0.01", "ilr = 0.03"))
    assert config.read_text() != before
    capsys.readouterr()
    for words in (["resume", "a", "--rounds", "4", "--quiet"], ["list", "runs", "a"], ["compare", "a"]):
        assert main(words) == 2 or words[0] == "list", words  # which goes on with the other runs
        found = capsys.readouterr()
        said = found.out + found.err
        assert (
            "a/config.toml is not what the run was written with, as run.json has it: algorithm.ilr is 0.03, and was "
            "0.01" in said
        )
        assert words[0] == "list" or "tailopt resume a --accept-config" in said  # which has a line for each run
    config.write_text(before.replace("ilr = 0.01", "ilr = -3"))
    assert main(["resume", "a", "--rounds", "4", "--quiet", "--accept-config"]) == 2  # and nothing was accepted
    assert not Path("a/config-changes.jsonl").exists()
    config.write_text(before.replace("ilr = 0.01", "ilr = 0.03"))
    assert main(["resume", "a", "--rounds", "4", "--quiet", "--accept-config"]) == 0
    assert "accepted: algorithm.ilr is 0.03, and was 0.01" in capsys.readouterr().err
    assert main(["resume", "a", "--rounds", "5", "--quiet"]) == 0
    assert main(["list", "runs", "."]) == main(["compare", "a"]) == 0
    assert Path("a/history.jsonl").read_bytes().count(b"\n") == 5


@pytest.mark.parametrize("words", [["resume", "a", "--rounds", "4"], ["list", "runs", "a"], ["compare", "a"]])
def test_a_changed_history_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *WORDS, "--rounds", "2", "--out", "a"]) == 0
    rows = Path("a/history.jsonl").read_bytes()
    Path("a/history.jsonl").write_bytes(rows.replace(b'"error": 4', b'"error": 3'))
    assert Path("a/history.jsonl").read_bytes() != rows
    capsys.readouterr()
    code, said = main(words), capsys.readouterr()
    assert code == 2 or words[0] == "list"  # which goes on with the other runs
    assert "a/history.jsonl is not what was written: its first 2 rows do not fit" in said.out + said.err
