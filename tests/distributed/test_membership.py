"""Real processes that disagree, die, stop, leave or never come: all others end in time, and say who it was.

Importing torch takes seconds of processor time, and there are dozens of processes: one imports it and forks the nodes.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tailopt
from tailopt.distributed.errors import Disagreement
from tailopt.distributed.gloo import GlooTransport
from tailopt.distributed.interfaces import blocking
from tailopt.distributed.membership import Timeouts
from tailopt.distributed.rendezvous import connect
from tailopt.schedules import cosine, power, warmup

ROOT = Path(__file__).parents[2]


def late(factor: float) -> Callable[[int], float]:
    """Other values from round 3 on."""
    return lambda t: 0.1 * (factor if t >= 3 else 1.0)


TIMEOUT = 5.0
SHORT = 3.0  # for those who wait in vain
SETTINGS = {"ilr": 0.1, "olr": 0.5, "oeps": 1e-3, "i_u": 0.5, "i_d": 0.1}
# what node 1 does differently: (to the model, to the algorithm, to the optimizer), and what the message must contain
DIFFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "shape": ({"wide": 5}, r"parameters, entry 0: it has \"0.weight: float32\[5, 3\]\", and node 0 has .*\[4, 3\]"),
    "name": ({"deep": True}, r"parameters, entry 0: it has \"0.0.weight: .*, and node 0 has \"0.weight"),
    "dtype": ({"dtype": "float64"}, r"it has \"0.weight: float64.*, and node 0 has \"0.weight: float32"),
    "buffers": ({"running": False}, r"buffers, entry 0: it has none, and node 0 has \"1.running_mean: float32\[4\]\""),
    "algorithm": ({"name": "rmsprop-biclip"}, r'algorithm: it has "rmsprop-biclip", and node 0 has "adam-biclip"'),
    "setting": ({"i_u": 0.6}, r"inner, u: it has 0.6, and node 0 has 0.5"),
    "local_steps": ({"local_steps": 3}, r"local_steps: it has 3, and node 0 has 2"),
    "rounds": ({"rounds": 5}, r"rounds: it has 5, and node 0 has 3"),
    "participants": ({"participants": 1}, r"participants: it has 1, and node 0 has 2"),
    "sampling": ({"sampling": "proportional"}, r'sampling: it has "proportional", and node 0 has "uniform"'),
    "seed": ({"seed": 1}, r"seed: it has 1, and node 0 has 0"),
    "proximal": ({"proximal": 0.5}, r"proximal: it has 0.5, and node 0 has 0.0"),
    "projection": ({"projection": 2.0}, r"projection: it has 2.0, and node 0 has null"),
    "guard": ({"guard": False}, r"guard: it has false, and node 0 has true"),
    "inner_state": ({"inner_state": "keep"}, r'inner_state: it has "keep", and node 0 has "reset"'),
    "exact": ({"exact": True}, r"exact: it has true, and node 0 has false"),
}
# schedules of node 0 and of node 1, all of them equal in round 1, and what the message must contain
SCHEDULES: dict[str, tuple[Any, Any, str]] = {
    "another length": (cosine(3), cosine(6), r"schedules, ilr, round 2: it has 0.0933.*, and node 0 has 0.075"),
    "in the last round only": (late(1.0), late(0.5), r"schedules, ilr, round 3: it has 0.05, and node 0 has 0.1\."),
    "counted by steps": (power(-1.0), power(-1.0, per="step"), r"schedules, ilr, round 1: it has none, and node 0 has"),
    "only here": (None, warmup(1), r"schedules, ilr: it has {.*}, and node 0 has none"),
}


# ---- what a node runs ----


def model(wide: int = 4, deep: bool = False, running: bool = True, dtype: str = "float32") -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(wide, track_running_stats=running)
    layers: list[nn.Module] = [nn.Linear(3, wide), norm, nn.Linear(wide, 2)]
    if deep:
        layers[0] = nn.Sequential(layers[0])
    return nn.Sequential(*layers).to(getattr(torch, dtype))


def optimizer(net: nn.Module, name: str = "adam-biclip", i_u: float = 0.5, **settings: Any) -> tailopt.NestedOptimizer:
    algorithm = tailopt.algorithm(name, **{**SETTINGS, "i_u": i_u})
    settings = {"local_steps": 2, "rounds": 3, "timeout": TIMEOUT, **settings}
    return tailopt.NestedOptimizer.from_algorithm(net, algorithm, **settings)


def steps(net: nn.Module, opt: tailopt.NestedOptimizer, count: int, pause: float = 0.0) -> None:
    for _ in range(count):
        opt.zero_grad()
        net(torch.randn(4, 3)).square().sum().backward()
        opt.step()
        time.sleep(pause)


def disagree(node: int) -> dict[str, Any]:
    """Every difference, one optimizer after another; then one that agrees."""
    said: dict[str, Any] = {}
    for what, (change, _) in DIFFERENCES.items():
        change = dict(change) if node == 1 else {}
        shape = {key: change.pop(key) for key in ("wide", "deep", "running", "dtype") if key in change}
        try:
            optimizer(model(**shape), **change)
        except Disagreement as error:
            said[what] = str(error)
    for what, (*both, _) in SCHEDULES.items():
        try:
            optimizer(model(), schedules=None if both[node] is None else {"ilr": both[node]})
        except Disagreement as error:
            said[what] = str(error)
    try:
        optimizer(model(), participation=lambda t, source: [0] if (t, node) == (2, 1) else [0, 1])
    except Disagreement as error:
        said["chooser"] = str(error)
    torch.set_num_threads(1 + node)
    try:
        optimizer(model(), exact=True)
    except Disagreement as error:
        said["environment"] = str(error)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net = model()
        opt = optimizer(net)
    said["warned"] = [str(w.message) for w in caught]
    torch.set_num_threads(1)
    steps(net, opt, 6)
    said["trained"] = len(opt.history)
    said["costs"] = costs(opt.node.exchange.transport)
    return said


def costs(watched: GlooTransport) -> list[float]:
    """Seconds of a small exchange, not watched and watched: the least of many, in turns, since machines are busy."""
    transports, small, found = (GlooTransport.of(), watched), torch.zeros(8), [float("inf")] * 2
    for _ in range(200):
        for k, transport in enumerate(transports):
            begun = time.perf_counter()
            blocking(transport.gather(small))
            found[k] = min(found[k], time.perf_counter() - begun)
    return found


def train(node: int, what: str) -> None:
    """Rounds without end, and on one node something that goes wrong; "ready" once they run."""
    if what == "absent" and node == 1:
        time.sleep(60)
    net = model()
    if what == "own loop":
        inner = torch.optim.SGD(net.parameters(), lr=0.1 * (1 + node))
        tailopt.NestedOptimizer(inner, local_steps=2, model=net, timeout=TIMEOUT)
    opt = optimizer(net, rounds=None, timeout=SHORT if what == "absent" else TIMEOUT)
    steps(net, opt, 4)
    say("ready")
    if what == "raises" and node == 1:
        raise ArithmeticError("the data of this node are gone")
    if what == "leaves" and node == 1:
        return
    if what == "local" and node != 2:
        opt.local_steps = 10**9  # never comes to an exchange
    try:
        steps(net, opt, 10**6, 0.01)
    except RuntimeError:
        if what == "caught" and node != 2:
            print("caught", flush=True)
            time.sleep(60)  # the program does not end by itself
        raise


def say(text: str) -> None:
    """A line in one write: `print` takes several under torchrun, and the lines of two nodes run into each other."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(what: str) -> None:
    torch.set_num_threads(1)
    # NCCL's group has no backend for tensors of the CPU either
    connect(SHORT if what == "connect" else TIMEOUT, backend="cuda:gloo" if what == "no cpu" else "gloo")
    node = dist.get_rank()
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if start is not None:
        say(f"start {start} of node {node}")
        what = "raises" if start == "0" else "rounds"
    if what == "disagree":
        print(json.dumps(disagree(node)), flush=True)
        dist.destroy_process_group()
    elif what in ("rounds", "no cpu"):
        net = model()
        opt = optimizer(net)
        steps(net, opt, 6)
        say(f"trained {len(opt.history)}")
    elif what != "connect":
        train(node, what)


def forks() -> str:
    """Fork a node for every line of the input, and write down how each ended; in the node, what it is to run."""
    optimizer_of_torch = torch.optim.SGD([torch.zeros(1)], lr=0.1)  # its first use imports a lot
    assert optimizer_of_torch.param_groups
    logs: dict[int, str] = {}
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG) if logs else (0, 0)
        if ended:
            Path(f"{logs.pop(ended)}.status").write_text(str(os.waitstatus_to_exitcode(status)))
        elif select.select([sys.stdin], [], [], 0.02)[0]:
            line = sys.stdin.readline()
            if not line:
                raise SystemExit
            what, log, environment = json.loads(line)
            pid = os.fork()
            if pid:
                logs[pid] = log
                print(pid, flush=True)
                continue
            os.environ.update(environment)
            for stream in (1, 2):
                os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
            return str(what)


# ---- starting and watching them ----


class Nodes:
    """Processes; `ended` proves that nobody hangs."""

    def __init__(self, factory: subprocess.Popen[str], what: str, here: Path, ranks: list[int], count: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.factory, self.what, self.here, self.count = factory, what, here, count
        self.logs: list[Path] = []
        self.pids: list[int] = []
        for rank in ranks:
            self.start(rank)

    def start(self, rank: int) -> None:
        own = {"RANK": rank, "WORLD_SIZE": self.count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port}
        log = self.here / f"{len(self.logs)}.log"
        assert self.factory.stdin is not None
        assert self.factory.stdout is not None
        print(
            json.dumps([self.what, str(log), {k: str(v) for k, v in own.items()}]), file=self.factory.stdin, flush=True
        )
        self.pids.append(int(self.factory.stdout.readline()))
        self.logs.append(log)

    def said(self, i: int) -> str:
        return self.logs[i].read_text() if self.logs[i].exists() else ""

    def status(self, i: int) -> int | None:
        path = Path(f"{self.logs[i]}.status")
        return int(text) if path.exists() and (text := path.read_text()) else None

    def signal(self, i: int, number: signal.Signals) -> None:
        os.kill(self.pids[i], number)

    def ready(self) -> None:
        until = time.monotonic() + 60
        while not all("ready" in self.said(i) for i in range(len(self.logs))):
            assert time.monotonic() < until, [self.said(i) for i in range(len(self.logs))]
            time.sleep(0.05)

    def ended(self, which: list[int], seconds: float, code: int = 1) -> list[str]:
        """What each said, once all of them have ended with this status."""
        until = time.monotonic() + seconds
        for i in which:
            while self.status(i) is None:
                if time.monotonic() > until:
                    pytest.fail(f"process {i} still runs after {seconds} s:\n{self.said(i)}")
                time.sleep(0.05)
            assert self.status(i) == code, self.said(i)
        return [self.said(i) for i in which]


@pytest.fixture(scope="module")
def factory() -> Iterator[subprocess.Popen[str]]:
    path = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    with subprocess.Popen(
        [sys.executable, "-m", "tests.distributed.test_membership"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


@contextmanager
def running(factory: subprocess.Popen[str], what: str, here: Path, ranks: list[int], count: int = 3) -> Iterator[Nodes]:
    nodes = Nodes(factory, what, here, ranks, count)
    try:
        yield nodes
    finally:
        for i, pid in enumerate(nodes.pids):
            if nodes.status(i) is None:
                os.kill(pid, signal.SIGKILL)


# ---- agreement ----


@pytest.fixture(scope="module")
def disagreed(factory: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    with running(factory, "disagree", tmp_path_factory.mktemp("disagree"), [0, 1], 2) as nodes:
        printed = nodes.ended([0, 1], 60, code=0)
        # torch may warn about the store after it, where node 0 ends first
        return [json.loads(next(line for line in said.splitlines() if line.startswith("{"))) for said in printed]


@pytest.mark.parametrize("what", DIFFERENCES)
def test_every_node_names_what_differs(what: str, disagreed: list[dict[str, Any]]) -> None:
    for said in disagreed:
        assert re.search(DIFFERENCES[what][1], said[what]), said[what]
        assert said[what].startswith("Node 1 disagrees with node 0 on ")


@pytest.mark.parametrize("what", SCHEDULES)
def test_schedules_are_compared_beyond_the_first_round(what: str, disagreed: list[dict[str, Any]]) -> None:
    for said in disagreed:
        assert re.search(rf"Node 1 disagrees with node 0 on {SCHEDULES[what][2]}", said[what]), said[what]


def test_functions_that_choose_are_compared_by_whom_they_choose(disagreed: list[dict[str, Any]]) -> None:
    for said in disagreed:
        assert said["chooser"].startswith("Node 1 disagrees with node 0 on participants, round 2"), said["chooser"]


def test_other_threads_are_warned_of_once_and_refused_where_bits_count(disagreed: list[dict[str, Any]]) -> None:
    for said in disagreed:
        assert "environment, threads: it has 2, and node 0 has 1" in said["environment"]
    first, second = (said["warned"] for said in disagreed)
    assert len(first) == 1
    assert re.search("threads: it has 2, and node 0 has 1.*replay", first[0])
    assert second == []


def test_after_all_that_nodes_that_agree_still_train(disagreed: list[dict[str, Any]]) -> None:
    assert [said["trained"] for said in disagreed] == [3, 3]


def test_watching_costs_less_than_a_millisecond(disagreed: list[dict[str, Any]]) -> None:
    for said in disagreed:
        bare, watched = said["costs"]
        assert watched - bare < 1e-3  # a bare one takes 0.1 ms


def test_a_group_that_carries_no_tensors_of_the_cpu_gets_one_beside_it(
    factory: subprocess.Popen[str], tmp_path: Path
) -> None:
    with running(factory, "no cpu", tmp_path, [0, 1], 2) as nodes:
        assert all("trained 3" in said for said in nodes.ended([0, 1], 40, code=0))


# ---- nodes that go ----


@pytest.mark.parametrize("victim", [0, 2])  # node 0 serves the store
def test_a_killed_node_is_named(factory: subprocess.Popen[str], victim: int, tmp_path: Path) -> None:
    with running(factory, "train", tmp_path, [0, 1, 2]) as nodes:
        nodes.ready()
        nodes.signal(victim, signal.SIGKILL)
        for said in nodes.ended([i for i in range(3) if i != victim], 10):
            assert re.search(rf"NodeLost: Node {victim}\b.* is gone in round \d+: ", said), said


def test_a_stopped_node_is_named(factory: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    with ExitStack() as stack:
        both = [
            stack.enter_context(running(factory, "train", tmp_path_factory.mktemp("stopped"), [0, 1, 2]))
            for _ in range(2)
        ]
        for victim, nodes in enumerate(both):  # in the first group node 0, which serves the store, in the second node 1
            nodes.ready()
            nodes.signal(victim, signal.SIGSTOP)
        for victim, nodes in enumerate(both):
            expected = rf"NodeLost: Node {victim}\b.* is gone in round \d+: no (sign of life|answer) for 5 s"
            for said in nodes.ended([i for i in range(3) if i != victim], TIMEOUT + 5):
                assert re.search(expected, said), said
            nodes.signal(victim, signal.SIGCONT)
        for victim, nodes in enumerate(both):
            nodes.ended([victim], 10)


def test_an_error_in_the_program_of_a_node_is_told_to_the_others(
    factory: subprocess.Popen[str], tmp_path: Path
) -> None:
    with running(factory, "raises", tmp_path, [0, 1, 2]) as nodes:
        nodes.ready()
        for said in nodes.ended([0, 2], 6):
            expected = r"NodeLost: Node 1 is gone in round 3: it failed with ArithmeticError: the data of this node"
            assert re.search(expected, said), said


def test_a_node_that_ends_before_the_others_is_named(factory: subprocess.Popen[str], tmp_path: Path) -> None:
    with running(factory, "leaves", tmp_path, [0, 1], 2) as nodes:
        nodes.ready()
        nodes.ended([1], 30, code=0)  # however long the machine takes to end a process
        assert re.search("NodeLost: Node 1 is gone in round 3: it has left", nodes.ended([0], 8)[0])


def test_whoever_catches_the_error_ends_all_the_same(factory: subprocess.Popen[str], tmp_path: Path) -> None:
    with running(factory, "caught", tmp_path, [0, 1, 2]) as nodes:
        nodes.ready()
        nodes.signal(2, signal.SIGKILL)
        for said in nodes.ended([0, 1], 14):
            assert "caught" in said
            assert re.search(r"tailopt: Node 2 is gone in round \d+: .* This process still ran", said), said


def test_nodes_in_local_steps_hear_of_it(factory: subprocess.Popen[str], tmp_path: Path) -> None:
    with running(factory, "local", tmp_path, [0, 1, 2]) as nodes:
        nodes.ready()
        nodes.signal(2, signal.SIGKILL)
        for said in nodes.ended([0, 1], TIMEOUT + 6):
            assert "NodeLost: Node 2 is gone in round 3: no sign of life for 5 s" in said


def test_torchrun_starts_the_nodes_anew(tmp_path: Path) -> None:
    # its agent keeps the store, and what the dead nodes wrote into it
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=1"]
    command = [sys.executable, *command, "-m", "tests.distributed.test_membership", "torchrun"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    said = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert said.returncode == 0, said.stderr
    assert re.search("NodeLost: Node 1 is gone in round 3: it failed with ArithmeticError", said.stderr), said.stderr
    assert said.stdout.count("start 1 of node") == 2
    assert said.stdout.count("trained 3") == 2


# ---- nodes that do not come ----


@pytest.fixture(scope="module")
def waiting(factory: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[str]]]:
    """What those who wait in vain said; all of them wait at the same time."""
    scenes = {"missing": ("connect", [0, 2]), "idle": ("absent", [0, 1, 2]), "no store": ("connect", [1])}
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(running(factory, what, tmp_path_factory.mktemp("waiting"), ranks))
            for name, (what, ranks) in scenes.items()
        }
        yield {
            name: nodes.ended([0, 2] if name == "idle" else [*range(len(nodes.pids))], 30)
            for name, nodes in started.items()
        }


@pytest.mark.parametrize("scene", ["missing", "idle"])  # never there; connected, and built no optimizer
def test_a_node_that_does_not_come_is_named(scene: str, waiting: dict[str, list[str]]) -> None:
    assert len(waiting[scene]) == 2
    for said in waiting[scene]:
        assert "NodeLost: Only 2 of 3 nodes came within 3 s; missing: node 1." in said


def test_a_store_that_is_not_there(waiting: dict[str, list[str]]) -> None:
    (said,) = waiting["no store"]
    assert re.search(r"NodeLost: The store at 127.0.0.1:\d+ cannot be reached. Is node 0 running", said)


def test_a_node_that_comes_twice_is_refused_and_the_first_goes_on(
    factory: subprocess.Popen[str], tmp_path: Path
) -> None:
    with running(factory, "train", tmp_path, [0, 1], 2) as nodes:
        nodes.ready()
        nodes.start(1)
        assert re.search(r"Disagreement: Node 1 came twice: as process \d+ on .* and now as", nodes.ended([2], 20)[0])
        assert [nodes.status(i) for i in range(2)] == [None, None]


def test_two_user_optimizers_that_differ(factory: subprocess.Popen[str], tmp_path: Path) -> None:
    with running(factory, "own loop", tmp_path, [0, 1], 2) as nodes:
        for said in nodes.ended([0, 1], 25):
            assert (
                "Disagreement: Node 1 disagrees with node 0 on inner, entry 0, lr: it has 0.2, and node 0 has" in said
            )


# ---- in one process ----


def test_a_timeout_shorter_than_a_few_beats_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Invalid timeout: 0.5; need a number of seconds, 3 or more"):
        Timeouts(0.5)


def test_without_torchrun_connecting_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match=r"Invalid environment: RANK.* not set. Start every node with torchrun"):
        connect()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else forks())
