"""The networks and disks that faults need: real ones, with and without root, and nothing of them is left."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tailopt import faults
from tailopt.faults import namespaces, small_disk

ASK = """
import socket, sys
with socket.socket() as own:
    own.settimeout(0.5)
    print(own.connect_ex((sys.argv[1], 9)))
"""


@pytest.fixture(params=["as root", "in a user namespace"])
def rights(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "as root" and os.name == "posix" and os.geteuid():
        pytest.skip("not root")
    if request.param != "as root":
        monkeypatch.setattr(namespaces, "_allowed", lambda kind: False)


@contextmanager
def permitted() -> Iterator[None]:
    try:
        yield
    except faults.Unavailable as error:
        pytest.skip(str(error))


def asked(network: faults.Network, source: int, target: int) -> str:
    """How a connection to a port where nobody listens fails: refused by the node, or never answered."""
    command = network.command(source, [sys.executable, "-S", "-c", ASK, network.address(target)])
    code = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return {errno.ECONNREFUSED: "reached", errno.EAGAIN: "silence"}.get(code, errno.errorcode[code])


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(10_000))


@pytest.mark.usefixtures("rights")
def test_a_cable_is_pulled_and_put_back() -> None:
    with permitted():
        network = faults.Network(3)
    with network:
        assert asked(network, 0, 2) == "reached"
        network.cut(2)
        assert [asked(network, 0, 2), asked(network, 2, 1), asked(network, 0, 1)] == ["silence", "silence", "reached"]
        network.mend(2)
        assert asked(network, 2, 1) == "reached"
        holders = [namespace.process for namespace in network._namespaces]
        assert [holder.poll() for holder in holders] == [None] * 4
    assert None not in [holder.poll() for holder in holders]
    network.close()


@pytest.mark.usefixtures("rights")
def test_a_node_pulls_its_own_cable() -> None:
    with permitted():
        network = faults.Network(2)
    with network, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a fork beside threads; the child runs next to nothing
        child = os.fork()
        if child == 0:
            try:
                network.enter(1)
                faults.Partition({1}).before(None)  # type: ignore[arg-type]
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert asked(network, 0, 1) == "silence"


@pytest.mark.usefixtures("rights")
def test_a_disk_is_full_and_has_room_again(tmp_path: Path) -> None:
    with permitted():
        disk = faults.Disk(1 << 20)
    with disk:
        (disk.path / "before").write_bytes(b"1" * 5000)
        disk.fill()
        for path in (disk.path / "new", disk.path / "before"):
            with pytest.raises(OSError, match="No space left on device"):
                grow(path)
        disk.empty()
        (disk.path / "new").write_bytes(bytes(100_000))
        assert (disk.path / "before").read_bytes()[:5000] == b"1" * 5000
        point = Path(disk._mount_point)
        assert point.is_dir() and not list(point.iterdir())  # the files are on the disk, not in the folder below
    assert not disk.path.exists() and not point.exists()
    disk.close()


def test_a_large_disk_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_disk, "MAX_BYTES", 1 << 12)
    with pytest.raises(ValueError, match=r"Invalid folder: .* GiB, which others may need; need one of at most"):
        faults.DiskFull({1}, tmp_path)
    with pytest.raises(ValueError, match="Invalid folder"):
        small_disk.fill(tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="Invalid folder: ''; need one on a small disk"):
        faults.DiskFull({1})


def test_a_process_outside_has_no_cable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAILOPT_CABLE", raising=False)
    with pytest.raises(ValueError, match=r"Invalid Partition: .*Start it with the command line that Network.command"):
        faults.Partition({1})


@pytest.mark.parametrize("nodes", [0, 251, 2.0, True])
def test_numbers_of_nodes(nodes: int) -> None:
    with pytest.raises(ValueError, match=r"Invalid nodes: .*; need a whole number from 1 to 250"):
        faults.Network(nodes)


@pytest.mark.parametrize("size", [0, 1 << 31, 1e6])
def test_sizes_of_disks(size: int) -> None:
    with pytest.raises(ValueError, match=r"Invalid size: .*; need .* It is a number of bytes from 64 KiB to 1 GiB"):
        faults.Disk(size)


def test_what_the_system_says_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform == "linux":
        with permitted(), pytest.raises(faults.Unavailable, match="not permitted here: .*no such command"):
            namespaces.Namespace("mount", "{ echo no such command >&2; false; }")
        monkeypatch.setenv("PATH", "/nowhere")
        with pytest.raises(faults.Unavailable, match=r"unshare is not installed: it is part of util-linux"):
            faults.Network(2)
    monkeypatch.setattr(sys, "platform", "plan9")
    with pytest.raises(faults.Unavailable, match="There are no namespaces on plan9"):
        faults.Disk()
