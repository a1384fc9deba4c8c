"""What the page "Whom you trust" says of the store: a stranger who reaches its port can end a run."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
NODE = """
import time, torch, tailopt
from tailopt.distributed.rendezvous import connect

torch.set_num_threads(1)
connect(timeout=30)
model = torch.nn.Linear(2, 1)
optimizer = tailopt.NestedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), local_steps=1, model=model)
while True:
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    time.sleep(0.05)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.skipif(not hasattr(dist.TCPStore, "list_keys"), reason="this torch cannot list the keys of a store")
def test_a_stranger_at_the_port_of_the_store_can_end_the_run() -> None:
    port = free_port()
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    shared["PYTHONPATH"] = str(ROOT / "src")
    nodes = [
        subprocess.Popen(
            [sys.executable, "-c", NODE], env=shared | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        stranger, until, signs = None, time.monotonic() + 60, []
        while len(signs) < 2 and time.monotonic() < until:
            time.sleep(0.5)
            try:
                stranger = stranger or dist.TCPStore("127.0.0.1", port, is_master=False)
                signs = [key for key in stranger.list_keys() if re.search(r"tailopt/[\d-]+/\d+/sign/\d$", key)]
            except RuntimeError:  # not yet served
                continue
        assert len(signs) == 2 and stranger is not None
        key = re.sub(r"tailopt/[\d-]+/(\d+)/sign/\d$", r"tailopt/\1/verdict", signs[0])
        stranger.set(key, json.dumps({"nodes": [1], "round": 7, "reason": "a stranger says so"}))
        said = [node.communicate(timeout=60)[1] for node in nodes]
        assert all(node.returncode != 0 for node in nodes)
        assert any("a stranger says so" in text for text in said)  # node 0 may take the store away before node 1 looks
    finally:
        for node in nodes:
            node.kill()
            node.wait()
