"""What test_lost.py runs: groups of three nodes with a run folder, of which one meets a fault that may end it.

As a program with a folder as its argument it runs all scenes at once, and forks the nodes, so that torch is imported
once; with a scene as JSON it is one node, as torchrun starts it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import shutil
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tailopt
from tailopt import faults
from tailopt.distributed.rendezvous import connect
from tailopt.records import checkpoints
from tailopt.seeds import generator

NODES, ROUNDS, STEPS, STRUCK = 3, 6, 2, 3  # STRUCK: the round of the fault
TIMEOUT, WATCHDOG = 10.0, 60.0
Scene = dict[str, Any]
FAULTS: dict[str, Callable[[Scene], faults.Fault]] = {
    "crash": lambda scene: faults.Crash({STRUCK}),
    "hard crash": lambda scene: faults.Crash({STRUCK}, hard=True),
    "kill": lambda scene: faults.Kill({STRUCK}),
    "stop": lambda scene: faults.Stop({STRUCK}),
    "partition": lambda scene: faults.Partition({STRUCK}),
    "disk full": lambda scene: faults.DiskFull({STRUCK, STRUCK + 1}, Path(scene["run"]).parent),
}
SCENES: dict[str, Scene] = {
    "clean": {},
    "disk full": {"fault": "disk full", "node": 1},
    "crash": {"fault": "crash", "node": 1},
    "hard crash": {"fault": "hard crash", "node": 1},
    "kill": {"fault": "kill", "node": 0},
    "stop": {"fault": "stop", "node": 2},
    "partition": {"network": True, "fault": "partition", "node": 0},
    "cut from outside": {"network": True, "node": 2, "endless": True},
}


# ---- a node ----


def train(node: int, scene: Scene) -> str:
    """The digest of the weights after the last round."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 500), nn.Tanh(), nn.Linear(500, 3))
    algorithm = tailopt.algorithm("adam-biclip", ilr=0.05, i_u=0.5, i_d=0.05, olr=0.1, oeps=1e-3)
    keeping = {"run": scene["run"], "resume": True, "keep": 9}
    rounds = None if scene.get("endless") else ROUNDS
    opt = tailopt.NestedOptimizer.from_algorithm(
        net, algorithm, local_steps=STEPS, rounds=rounds, timeout=TIMEOUT, **keeping
    )
    if opt.resumed is not None:
        print(f"resumed after round {opt.resumed.round}", flush=True)
    elif "fault" in scene and node == scene["node"]:
        faults.inject(opt, FAULTS[scene["fault"]](scene))
    while not opt.finished:
        t = opt.node.round + 1
        if t == STRUCK:
            print(f"ready {time.monotonic()}", flush=True)  # one clock for all processes of a machine
        for step in range(STEPS):
            source = generator(0, "batch", t, node, step)
            x, y = torch.randn(8, 7, generator=source), torch.randn(8, 3, generator=source) + node
            opt.zero_grad()
            ((net(x) - y).square().mean() * 0.02).backward()
            opt.step()
    return checkpoints.digest(net.state_dict())


def one_node(scene: Scene) -> None:
    torch.set_num_threads(1)
    connect(timeout=60.0)  # two dozen processes start at once
    node = dist.get_rank()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = {"digest": train(node, scene), "warned": [str(w.message) for w in said]}
    Path(scene["out"], f"{node}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


# ---- all scenes ----


class Stage:
    """The nodes of a scene, forked; their words and the times of their ends."""

    def __init__(self, name: str, here: Path, stack: ExitStack) -> None:
        self.scene, self.here = {**SCENES[name], "out": str(here), "run": str(here / "run")}, here
        here.mkdir()
        self.network = stack.enter_context(faults.Network(NODES)) if self.scene.get("network") else None
        self.disk = stack.enter_context(faults.Disk(4 << 20)) if name == "disk full" else None
        if self.disk is not None:
            self.scene["run"] = str(self.disk.path / "run")
        self.ended: dict[int, tuple[int, float]] = {}
        self.cut: float | None = None
        self.pids: dict[int, int] = {}

    def start(self) -> bool:
        """Fork the nodes; True in one of them."""
        address, port = ("127.0.0.1", free_port()) if self.network is None else (self.network.address(0), 29500)
        for node in range(NODES):
            pid = os.fork()
            if pid == 0:
                for stream in (1, 2):
                    os.dup2(os.open(self.here / f"{node}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
                if self.network is not None:
                    self.network.enter(node)
                os.environ.update(RANK=f"{node}", WORLD_SIZE=f"{NODES}", MASTER_ADDR=address, MASTER_PORT=f"{port}")
                return True
            self.pids[node] = pid
        return False

    def said(self, node: int) -> str:
        path = self.here / f"{node}.log"
        return path.read_text() if path.exists() else ""

    def look(self) -> bool:
        """See who has ended, and do what is due; whether there is nobody left."""
        for node, pid in self.pids.items():
            if node not in self.ended and (status := os.waitpid(pid, os.WNOHANG))[0]:
                self.ended[node] = os.waitstatus_to_exitcode(status[1]), time.monotonic()
        if self.cut is None and self.scene.get("endless") and all("ready" in self.said(n) for n in self.pids):
            assert self.network is not None
            self.cut = time.monotonic()
            self.network.cut(self.scene["node"])
        if self.scene.get("fault") == "stop" and len(self.ended) == NODES - 1:
            os.kill(self.pids[self.scene["node"]], signal.SIGCONT)
        return len(self.ended) == NODES

    def found(self) -> list[dict[str, Any]]:
        """Of every node: status, words, seconds from the fault to its end, None where it had to be killed."""
        for node, pid in self.pids.items():
            if node not in self.ended:
                os.kill(pid, signal.SIGKILL)
        if self.disk is not None:
            shutil.copytree(self.disk.path / "run", self.here / "run")
        struck = self.cut
        if struck is None and "ready" in (text := self.said(self.scene.get("node", 0))):
            struck = float(text.split("ready ")[1].split()[0])
        rows = []
        for node in range(NODES):
            status, end = self.ended.get(node, (None, None))
            seconds = None if end is None or struck is None else end - struck
            rows.append({"status": status, "said": self.said(node), "seconds": seconds})
        return rows


def every_scene(here: Path) -> Scene | None:
    """Run them and write what came of it; in a node, its scene."""
    for late in ("torch.distributed.tensor", "torch._dynamo", "tomli_w"):  # else every node imports them anew
        importlib.import_module(late)
    gc.freeze()  # else every node, as it ends, touches what it shares with this process, and copies it
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        stages: dict[str, Stage] = {}
        for name in SCENES:
            try:
                stages[name] = Stage(name, here / name, stack)
            except faults.Unavailable as error:
                found[name] = f"{error}"
        for stage in stages.values():
            if stage.start():
                stack.pop_all()  # the networks and disks are the parent's to close
                return stage.scene
        until = time.monotonic() + WATCHDOG
        while time.monotonic() < until:
            over = [stage.look() for stage in stages.values()]
            if all(over):
                break
            time.sleep(0.02)
        found |= {name: stage.found() for name, stage in stages.items()}
    (here / "found.json").write_text(json.dumps(found))
    return None


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


if __name__ == "__main__":
    scene = json.loads(sys.argv[1]) if sys.argv[1].startswith("{") else every_scene(Path(sys.argv[1]))
    if scene is not None:
        one_node(scene)
