"""Two real processes in one gloo group, kept between tests, in which functions of a test module run together.

A test calls ``ranks.run(function, *args)`` and gets what each rank returned, in order. An exception on a rank comes
back with its traceback; a hang is ended after ``timeout`` seconds, and the next call starts new processes.
"""

import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

SIZE = 2


class Ranks:
    def __init__(self) -> None:
        self.processes: list[Any] = []
        self.ends: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        if not self.processes:
            self.start()
        for end in self.ends:
            end.send_bytes(pickle.dumps((function, args)))
        answers: dict[int, tuple[str, Any]] = {}
        while len(answers) < SIZE:
            waiting = [end for r, end in enumerate(self.ends) if r not in answers]
            ready = wait(waiting, timeout)
            if not ready:
                self.stop()
                silent = [r for r in range(SIZE) if r not in answers]
                said = "".join(f"\nrank {r}: {a[1]}" for r, a in answers.items() if a[0] == "error")
                raise TimeoutError(f"ranks {silent} did not finish {function.__name__} within {timeout} s{said}")
            for end in ready:
                try:
                    answer = pickle.loads(end.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    answer = ("error", "the process died")
                answers[self.ends.index(end)] = answer  # type: ignore[arg-type]
                if answer[0] == "error":
                    timeout = 3.0  # the other rank may be waiting for this one
        if any(kind == "error" for kind, _ in answers.values()):
            self.stop()
            raise AssertionError(
                "\n".join(f"rank {r}: {a}" for r, (kind, a) in sorted(answers.items()) if kind == "error")
            )
        return [answers[r][1] for r in range(SIZE)]

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        store = os.path.join(tempfile.mkdtemp(prefix="ranks-"), "store")
        for rank in range(SIZE):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.ends.append(ours)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for end in self.ends:
            end.close()
        self.processes, self.ends = [], []


def serve(rank: int, store: str, end: Connection) -> None:
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=SIZE, timeout=timedelta(seconds=50)
    )
    while True:
        try:
            function, args = pickle.loads(end.recv_bytes())
        except EOFError:  # the test process went away
            return
        try:
            answer = ("ok", function(*args))
        except BaseException:
            answer = ("error", traceback.format_exc())
        end.send_bytes(pickle.dumps(answer))
