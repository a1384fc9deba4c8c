"""The last words of nodes that must end: the node, the round and the command are the last thing they print."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tailopt
from tests.distributed import forked

pytest.importorskip("resource", reason="processes are forked")

HERE = "tests.distributed.test_last_words"
ROOT = Path(__file__).parents[2]


def endless(rank: int, run: str | None = None, sleeper: int | None = None, **settings: Any) -> None:
    """Rounds without end; a node may stop making progress, though it lives."""
    torch.manual_seed(0)
    net = nn.Linear(5, 3)
    algorithm = tailopt.algorithm("avg-biclip", ilr=0.05, i_u=1.0, i_d=0.1)
    keeping = {"run": run, "resume": True} if run is not None else {}
    opt = tailopt.NestedOptimizer.from_algorithm(net, algorithm, local_steps=3, timeout=5.0, **keeping, **settings)
    while True:
        opt.zero_grad()
        net(torch.randn(4, 5)).square().mean().backward()
        opt.step()
        if opt.node.round == 2 and opt.total_steps == 7:
            print("ready", flush=True)
            while rank == sleeper:
                time.sleep(0.1)
        time.sleep(0.01)


def last_words(said: str) -> list[str]:
    """The block with which a node ends, line by line."""
    lines = said.rstrip().splitlines()
    assert re.fullmatch("-{79}", lines[-1]), said
    first = max(i for i, line in enumerate(lines[:-1]) if re.fullmatch("-{79}", line))
    return lines[first + 1 : -1]


@pytest.mark.parametrize("keeps", [True, False], ids=["with a run folder", "without"])
def test_the_last_thing_a_node_prints_is_who_is_gone_and_how_to_go_on(
    server: forked.Server, tmp_path: Path, keeps: bool
) -> None:
    run = {"run": str(tmp_path / "run")} if keeps else {}
    with server.start(f"{HERE}:endless", 3, **run) as nodes:
        until = time.monotonic() + 40
        while not all("ready" in nodes.said(rank) for rank in range(3)) and time.monotonic() < until:
            time.sleep(0.02)
        nodes.signal(2, signal.SIGKILL)
        assert nodes.wait([0, 1], 25.0), [nodes.said(rank) for rank in range(3)]
        for rank in (0, 1):
            words = last_words(nodes.said(rank))
            assert re.match(r"tailopt: node 2 is gone in round \d+: its connection is closed, and no sign", words[0])
            expected = (
                r"The last good checkpoint is that after round \d+: .*round-\d{6}\." if keeps else "There is no run"
            )
            assert re.match(expected, words[1])
            assert words[2].startswith("To go on, run again: ") and "tests.distributed.forked" in words[2]


SCRIPT = """
import sys
from tests.distributed.test_last_words import endless
from tailopt.distributed.rendezvous import connect
import torch, torch.distributed as dist
torch.set_num_threads(1)
connect(30.0)
endless(dist.get_rank(), sys.argv[1])
"""


def test_nodes_that_torchrun_ends_say_which_node_was_killed(tmp_path: Path) -> None:
    """torchrun ends the others at once, before they could notice by themselves."""
    script, run = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", "--monitor-interval=0.1"]
    command += ["--master-port", str(forked.free_port()), "--redirects=3", "--log-dir", str(tmp_path / "logs")]
    command += [str(script), str(run)]
    with subprocess.Popen(command, env=forked.environment(), cwd=ROOT, stderr=subprocess.PIPE, text=True) as agent:
        try:
            logs = _logs(tmp_path, "stdout.log", "ready")
            pid = _child(agent.pid, rank=1)
            os.kill(pid, signal.SIGKILL)
            assert agent.wait(60) != 0
        finally:
            agent.kill()
    assert len(logs) == 3
    for rank in (0, 2):
        said = next((tmp_path / "logs").glob(f"**/{rank}/stderr.log")).read_text()
        words = last_words(said)
        assert re.match(r"tailopt: node 1 is gone in round \d+: ", words[0]), said
        assert re.match(r"The last good checkpoint is that after round \d+: ", words[1])
        assert words[2] == f"To go on, run again: {shlex.join(command)}"


def _logs(folder: Path, name: str, text: str, seconds: float = 60.0) -> list[Path]:
    """The logs of all three nodes, once each of them holds a text."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        logs = [path for path in folder.glob(f"logs/**/{name}") if text in path.read_text()]
        if len(logs) == 3:
            return logs
        time.sleep(0.05)
    raise AssertionError({str(p): p.read_text() for p in folder.glob("logs/**/*.log")})


def _child(agent: int, rank: int) -> int:
    """The process of a rank, by its environment."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "environ").read_bytes().split(b"\0")
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == agent and f"RANK={rank}".encode() in words:
                return int(folder.name)
    raise AssertionError(f"no rank {rank} under {agent}")


def test_a_node_that_is_told_to_end_says_how_to_go_on(server: forked.Server, tmp_path: Path) -> None:
    with server.start(f"{HERE}:endless", 2, run=str(tmp_path / "run")) as nodes:
        until = time.monotonic() + 40
        while not all("ready" in nodes.said(rank) for rank in range(2)) and time.monotonic() < until:
            time.sleep(0.02)
        for rank in range(2):
            nodes.signal(rank, signal.SIGTERM)
        assert nodes.wait([0, 1], 25.0), [nodes.said(rank) for rank in range(2)]
        said = [nodes.said(rank) for rank in range(2)]
        assert [nodes.status(rank) for rank in range(2)] == [-signal.SIGTERM] * 2, said
    assert re.match(r"tailopt: this node was told to end \(SIGTERM\) in round \d+", last_words(said[0])[0]), said


def forks(rank: int) -> list[Any]:
    """A node whose forked children are told to end, and whose data are loaded by workers."""
    net = nn.Linear(5, 3)
    algorithm = tailopt.algorithm("avg-biclip", ilr=0.05, i_u=1.0, i_d=0.1)
    opt = tailopt.NestedOptimizer.from_algorithm(net, algorithm, local_steps=2, rounds=2)
    context = multiprocessing.get_context("fork")
    child = context.Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join(10)
    loader = torch.utils.data.DataLoader(
        torch.randn(16, 5), batch_size=4, num_workers=1, multiprocessing_context=context
    )
    for x in loader:
        opt.zero_grad()
        net(x).square().mean().backward()
        opt.step()
    return [child.exitcode, opt.finished]


def test_children_of_a_node_end_when_they_are_told_to_and_the_node_goes_on(server: forked.Server) -> None:
    ends = server.run(f"{HERE}:forks", 2)
    assert [(end.status, end.value) for end in ends] == [(0, [-signal.SIGTERM, True])] * 2, [end.said for end in ends]


OTHERS = """
import asyncio, os, signal, sys, time
from tailopt.distributed.last_words import on_sigterm
from tailopt.distributed.threads import start_daemon

on_sigterm(lambda: "last words", lambda target, *args: start_daemon(target, "sigterm", *args))
if sys.argv[1] == "own":
    signal.signal(signal.SIGTERM, lambda *_: print("saved", flush=True))
if sys.argv[1] == "asyncio":
    async def use() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, print)
        loop.remove_signal_handler(signal.SIGUSR1)
    asyncio.run(use())
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(1.0)
print("still there", flush=True)
"""


@pytest.mark.parametrize(
    ("what", "status", "said"),
    [("nothing", -signal.SIGTERM, ""), ("own", 0, "saved\nstill there\n"), ("asyncio", -signal.SIGTERM, "")],
)
def test_other_users_of_signals_are_left_alone(what: str, status: int, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OTHERS, what], env=forked.environment(), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (status, said), done.stderr
    assert ("last words" in done.stderr) == (status != 0)


# ---- nodes that live and do nothing ----


def test_a_node_that_makes_no_progress_is_named_where_a_limit_was_set(server: forked.Server) -> None:
    with server.start(f"{HERE}:endless", 3, sleeper=1, stall_timeout=4.0) as nodes:
        assert nodes.wait([0, 2], 40.0), [nodes.said(rank) for rank in range(3)]
        for rank in (0, 2):
            expected = (
                r"tailopt: node 1 is gone in round 3: it shows signs of life, and no progress after \d local steps"
            )
            assert re.match(expected, last_words(nodes.said(rank))[0]), nodes.said(rank)


def test_without_a_limit_it_is_waited_for_and_named_in_a_warning(server: forked.Server) -> None:
    with server.start(f"{HERE}:endless", 2, sleeper=1) as nodes:
        until = time.monotonic() + 40
        while "has waited for node 1" not in nodes.said(0) and time.monotonic() < until:
            time.sleep(0.1)
        assert re.search(r"Round 3 has waited for node 1 for \d+ s: it shows signs of life", nodes.said(0))
        assert [nodes.status(rank) for rank in range(2)] == [None, None]


def slow(rank: int, run: str) -> None:
    """Node 1 takes its time in every step."""
    net = nn.Linear(50, 30)
    algorithm = tailopt.algorithm("avg-biclip", ilr=0.05, i_u=1.0, i_d=0.1)
    opt = tailopt.NestedOptimizer.from_algorithm(net, algorithm, local_steps=2, rounds=3, run=run)
    while not opt.finished:
        opt.zero_grad()
        net(torch.randn(4, 50)).square().mean().backward()
        time.sleep(0.2 if rank == 1 else 0.0)
        opt.step()


def test_the_slowest_node_is_named_in_the_log(server: forked.Server, tmp_path: Path) -> None:
    ends = server.run(f"{HERE}:slow", 3, run=str(tmp_path / "run"))
    assert [end.status for end in ends] == [0, 0, 0], [end.said for end in ends]
    (line,) = [text for text in (tmp_path / "run" / "log.txt").read_text().splitlines() if "slowest" in text]
    assert re.search(r"round 1: node 1 is the slowest: its local steps took 0\.4\d* s, and", line), line
    times = [json.loads(text) for text in (tmp_path / "run" / "times.jsonl").read_text().splitlines()]
    assert [row["slowest_node"] for row in times] == [1, 1, 1]
    for row in times:
        phases = {name: row[name] for name in ("local", "wait", "exchange", "outer", "checkpoint")}
        assert min(phases.values()) >= 0.0
        # node 0 waits for most of what the slowest node trains
        assert phases["local"] >= 0.4 and 0.3 <= phases["wait"] <= phases["local"]
        without_waiting = sum(phases.values()) - phases["wait"]
        assert without_waiting <= row["round_seconds"] + 0.05, row
        # node 0 sends what the others reduce of its displacement, and its part of the new weights to both of them
        elements = 50 * 30 + 30
        assert 4 * elements < row["bytes_sent"] <= 2 * 4 * elements + 4000, row
