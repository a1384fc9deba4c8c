"""Real nodes for tests: one process imports torch once, then forks every node that a test asks for.

    with forked.server() as server:
        ends = server.run("tests.distributed.test_steps:trained", nodes=3, local_steps=4)

The function is called on every node as `function(rank, **arguments)` inside a process group that `connect` made; what
it returns comes back as JSON. Importing torch takes seconds of processor time, and tests start dozens of nodes.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """The environment of processes that tests start: one thread, and this source tree."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}


@dataclass(frozen=True)
class End:
    """How a node ended: its exit status (None: it still ran and was killed), what it returned, what it printed."""

    status: int | None
    value: Any
    said: str
    seconds: float


class Nodes:
    """The nodes of one test, while they run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.pids, self.begun = folder, dict[int, int](), time.monotonic()

    def said(self, rank: int) -> str:
        """What a node has printed so far."""
        path = self.folder / f"{rank}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a node that still runs."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[rank], number)

    def status(self, rank: int) -> int | None:
        """The exit status of a node; None while it runs."""
        path = self.folder / f"{rank}.status"
        return int(path.read_text()) if path.exists() else None

    def wait(self, ranks: list[int], seconds: float) -> bool:
        """Wait until these nodes have ended; False where one of them still runs."""
        until = time.monotonic() + seconds
        while any(self.status(rank) is None for rank in ranks):
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
        return True

    def end(self, rank: int) -> End:
        """How a node ended."""
        value, status = self.folder / f"{rank}.json", self.status(rank)
        end = (self.folder / f"{rank}.status").stat().st_mtime if status is not None else time.time()
        seconds = end - (self.folder / "begun").stat().st_mtime
        return End(status, json.loads(value.read_text()) if value.exists() else None, self.said(rank), seconds)


class Server:
    """Forks nodes on request."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process, self._folder, self._runs = process, folder, 0

    @contextlib.contextmanager
    def start(
        self, function: str, nodes: int, environment: Callable[[int], dict[str, str]] | None = None, **arguments: Any
    ) -> Iterator[Nodes]:
        """Nodes that run a function; those that still run at the end are killed."""
        self._runs += 1
        here = self._folder / f"{self._runs:04d}"
        here.mkdir()
        (here / "begun").touch()
        running, port = Nodes(here), free_port()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        for rank in range(nodes):
            own = {"RANK": f"{rank}", "WORLD_SIZE": f"{nodes}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
            own |= environment(rank) if environment else {}
            job = {"function": function, "folder": str(here), "rank": rank, "environment": own, "arguments": arguments}
            print(json.dumps(job), file=self._process.stdin, flush=True)
            running.pids[rank] = int(self._process.stdout.readline())
        try:
            yield running
        finally:
            for rank in running.pids:
                if running.status(rank) is None:
                    running.signal(rank, signal.SIGKILL)

    def run(self, function: str, nodes: int, seconds: float = 60.0, **arguments: Any) -> list[End]:
        """Run a function on nodes that nobody disturbs, and wait for all of them."""
        with self.start(function, nodes, **arguments) as running:
            running.wait(list(running.pids), seconds)
            return [running.end(rank) for rank in running.pids]


@contextlib.contextmanager
def server() -> Iterator[Server]:
    """A process that forks nodes, for as many tests as like to use it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [sys.executable, "-m", "tests.distributed.forked"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, env=environment(), cwd=ROOT, text=True, **pipes) as process:  # type: ignore[call-overload]
            try:
                yield Server(process, Path(folder))
            finally:
                process.kill()


def free_port() -> int:
    """A port that nobody uses at the moment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _serve() -> dict[str, Any]:
    """Fork a node for every line of the input, and write down how each ended; returns in the node, with its job."""
    import torch

    import tailopt

    # first uses import a lot; a node must not do it again
    assert torch.optim.SGD([torch.zeros(1)], lr=0.1).param_groups and tailopt.__version__
    for module in ("torch.distributed.tensor", "tomli_w"):
        importlib.import_module(module)
    jobs: dict[int, dict[str, Any]] = {}
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG) if jobs else (0, 0)
        if ended:
            job = jobs.pop(ended)
            path = Path(job["folder"], f"{job['rank']}.status")
            path.with_suffix(".part").write_text(str(os.waitstatus_to_exitcode(status)))
            path.with_suffix(".part").rename(path)
        elif select.select([sys.stdin], [], [], 0.02)[0]:
            line = sys.stdin.readline()
            if not line:
                raise SystemExit
            job = json.loads(line)
            pid = os.fork()
            if pid:
                jobs[pid] = job
                print(pid, flush=True)
                continue
            for stream in (1, 2):
                log = os.path.join(job["folder"], f"{job['rank']}.log")
                os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
            os.environ.update(job["environment"])
            return dict(job)


def _node(job: dict[str, Any]) -> None:
    import torch

    from tailopt.distributed.rendezvous import connect

    torch.set_num_threads(1)
    module, _, name = job["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    if not getattr(function, "connects_itself", False):
        connect(20.0)
    value = function(job["rank"], **job["arguments"])
    path = Path(job["folder"], f"{job['rank']}.json")
    path.write_text(json.dumps(value))


if __name__ == "__main__":
    _node(_serve())
