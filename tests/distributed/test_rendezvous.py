"""Nodes that cannot meet: every one of them ends in time, and names the node for which it is."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tailopt
from tailopt.distributed.rendezvous import address_of, connect
from tests.distributed import forked

pytest.importorskip("resource", reason="processes are forked")

HERE = "tests.distributed.test_rendezvous"
TIMEOUT = 4.0
WITHIN = 20.0  # seconds for all of it: torch's own limit is 30 minutes


def dies_after_the_roll_call(rank: int, who: int) -> None:
    """A node that is gone when torch connects the nodes: as by the out-of-memory killer."""
    if rank == who:
        dist.init_process_group = lambda *arguments, **settings: os._exit(7)  # type: ignore[assignment]
    connect(TIMEOUT)


dies_after_the_roll_call.connects_itself = True  # type: ignore[attr-defined]


@pytest.mark.parametrize("who", [1])
def test_a_node_that_dies_after_the_roll_call_is_named(server: forked.Server, who: int) -> None:
    ends = server.run(f"{HERE}:dies_after_the_roll_call", 3, WITHIN, who=who)
    assert ends[who].status == 7
    for rank in {0, 1, 2} - {who}:
        assert ends[rank].status == 1, ends[rank].said
        assert re.search(f"NodeLost: Node {who} came to the roll call and then was gone", ends[rank].said)


def joins(rank: int) -> int:
    connect(TIMEOUT)
    return dist.get_world_size()


joins.connects_itself = True  # type: ignore[attr-defined]


@pytest.mark.parametrize(("odd", "count"), [(2, 4), (0, 2)])
def test_nodes_that_were_started_for_other_numbers_of_nodes_are_named(
    server: forked.Server, odd: int, count: int
) -> None:
    environment = lambda rank: {"WORLD_SIZE": str(count if rank == odd else 3)}  # noqa: E731
    with server.start(f"{HERE}:joins", 3, environment) as nodes:
        assert nodes.wait([0, 1, 2], WITHIN), [nodes.said(rank) for rank in range(3)]
        ends = [nodes.end(rank) for rank in range(3)]
    for end in ends:
        assert end.status == 1, end.said
        (said,) = re.findall(r"Disagreement: (.*)", end.said)
        assert f"WORLD_SIZE={count}" in said or f"for {count}." in said, said
        assert re.search(rf"node {odd}\b", said, re.IGNORECASE), said


def waits(rank: int) -> float:
    """A node that keeps the others waiting for longer than the meeting may take."""
    connect(TIMEOUT)
    small = torch.zeros(1)
    begun = time.monotonic()
    if rank:
        time.sleep(TIMEOUT + 1.5)
        dist.send(small, 0)
    else:
        dist.recv(small, 1)
    return time.monotonic() - begun


waits.connects_itself = True  # type: ignore[attr-defined]


@pytest.mark.slow
def test_exchanges_keep_torchs_own_limit(server: forked.Server) -> None:
    ends = server.run(f"{HERE}:waits", 2)
    assert [end.status for end in ends] == [0, 0], [end.said for end in ends]
    assert all(end.value > TIMEOUT for end in ends)


# ---- a name server that does not answer ----


class NameServer:
    """Knows no name, until it is told to be silent."""

    ADDRESS = ("127.0.0.53", 53)

    def __init__(self) -> None:
        self.asked_in_vain = 0
        self._silent = False
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(self.ADDRESS)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                query, sender = self._socket.recvfrom(512)
                if query == b"be silent":
                    self._silent = True
                    self._socket.sendto(b"silent", sender)
                elif self._silent:
                    self.asked_in_vain += 1
                else:
                    self._socket.sendto(query[:2] + b"\x81\x83" + query[4:6] + bytes(6) + query[12:], sender)


def loses_the_name_server(rank: int, resolv_conf: str) -> float:
    """Two nodes whose name server falls silent when they have met; how long the next store connection takes."""
    os.environ.pop("RES_OPTIONS", None)  # glibc's limits: two attempts of five seconds
    new_mounts = 0x00020000  # CLONE_NEWNS
    assert ctypes.CDLL(None, use_errno=True).unshare(new_mounts) == 0, os.strerror(ctypes.get_errno())
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "--bind", resolv_conf, "/etc/resolv.conf"], check=True)
    connect(60.0)
    dist.barrier()
    if rank == 0:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as order:
            order.settimeout(10.0)
            order.sendto(b"be silent", NameServer.ADDRESS)
            order.recv(16)
    dist.barrier()
    net = torch.nn.Linear(2, 1)
    begun = time.monotonic()
    opt = tailopt.NestedOptimizer(torch.optim.SGD(net.parameters(), 0.1), local_steps=1, timeout=TIMEOUT, model=net)
    took = time.monotonic() - begun
    net(torch.ones(1, 2)).sum().backward()
    opt.step()
    return took


loses_the_name_server.connects_itself = True  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root has a port 53")
def test_a_silent_name_server_is_no_dead_node(server: forked.Server, tmp_path: Path) -> None:
    try:
        names = NameServer()
    except OSError as error:
        pytest.skip(f"{NameServer.ADDRESS} is taken: {error}")
    resolv_conf = tmp_path / "resolv.conf"
    resolv_conf.write_text(f"nameserver {NameServer.ADDRESS[0]}\n")
    ends = server.run(f"{HERE}:loses_the_name_server", 2, resolv_conf=str(resolv_conf))
    assert [end.status for end in ends] == [0, 0], [end.said for end in ends]
    assert names.asked_in_vain
    assert max(end.value for end in ends) > TIMEOUT


# ---- one interface ----


def listens(rank: int) -> list[str]:
    """Who listens on the store's port, and where gloo's connections are."""
    connect(TIMEOUT, interface="lo")
    dist.barrier()
    port = int(os.environ["MASTER_PORT"])
    found = _listening(port)
    dist.barrier()
    return [*found, os.environ["GLOO_SOCKET_IFNAME"]]


listens.connects_itself = True  # type: ignore[attr-defined]


def _listening(port: int) -> list[str]:
    """The local addresses that listen on a port, from the kernel."""
    rows = []
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(path) as file:
            rows += [line.split() for line in file.readlines()[1:]]
    return sorted({row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port})


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="needs the kernel's table of sockets")
def test_the_store_listens_on_one_interface_alone(server: forked.Server) -> None:
    ends = server.run(f"{HERE}:listens", 2)
    assert [end.status for end in ends] == [0, 0], [end.said for end in ends]
    assert ends[0].value == ["0100007F", "lo"]  # 127.0.0.1, and not 0.0.0.0 or ::


def test_an_interface_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(ValueError, match=r"Invalid interface: 'wg7' has no IPv4 address here .*; need one of: .*lo"):
        connect(interface="wg7")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(ValueError, match=r"'lo'; torchrun's agent serves the store, on every interface.*firewall"):
        connect(interface="lo")


@pytest.mark.skipif(shutil.which("ip") is None, reason="there is no `ip` to ask")
def test_the_address_of_an_interface_is_the_systems() -> None:
    said = subprocess.run(["ip", "-4", "-o", "address"], capture_output=True, text=True, check=True).stdout
    name, address = said.split()[1], said.split()[3].split("/")[0]
    assert address_of(name) == address
