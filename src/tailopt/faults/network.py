"""Machines of a network that are network namespaces of this one: their cables can be pulled while a run goes on.

    node 0 --+
    node 1 --+-- a bridge in a namespace of its own        10.203.0.1, 10.203.0.2, ...
    node 2 --+

A cut is one at the bridge: nothing arrives, nobody is told, and the node itself still sees its link as up. That is what
a partition looks like from inside, and what no closed connection and no signal can stand for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType

from tailopt.arguments import whole_number
from tailopt.faults.spaces import Space, run

CABLE = "TAILOPT_CABLE"
BRIDGE, DEVICE, NET = "bridge", "eth0", "10.203.0"


class Network:
    """A network of nodes on this machine, which reaches nothing outside.

    It needs Linux with `ip` (iproute2) and `unshare` (util-linux), and no root where user namespaces are permitted.

        with faults.Network(3) as network:
            nodes = [subprocess.Popen(network.command(k, ["python", "train.py"])) for k in range(3)]
            network.cut(2)

    Args:
        nodes: how many.

    Raises:
        Unavailable: the system does not permit it; the message says what is missing.
    """

    def __init__(self, nodes: int) -> None:
        self.nodes = whole_number("nodes", nodes, low=1, high=250)
        self._spaces: list[Space] = []
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        hub = self._hub = Space("net")
        self._spaces.append(hub)
        run(hub.command(["ip", "link", "add", BRIDGE, "up", "type", "bridge"]))
        for k in range(self.nodes):
            space = Space("net", around=hub)
            self._spaces.append(space)
            ends = ["type", "veth", "peer", "name", DEVICE, "netns", str(space.pid)]
            run(hub.command(["ip", "link", "add", _cable(k), *ends]))
            run(hub.command(["ip", "link", "set", _cable(k), "up", "master", BRIDGE]))
            run(space.command(["ip", "address", "add", f"{self.address(k)}/24", "dev", DEVICE]))
            for device in (DEVICE, "lo"):
                run(space.command(["ip", "link", "set", device, "up"]))

    def address(self, node: int) -> str:
        """Of a node, for MASTER_ADDR."""
        return f"{NET}.{self._checked(node) + 1}"

    def command(self, node: int, command: Sequence[str]) -> list[str]:
        """The command, to be run on a node: in its namespace, with gloo and NCCL told to use its device."""
        told = [f"{key}={value}" for key, value in self._told(node).items()]
        return self._spaces[1 + node].command(["env", *told, *command])

    def enter(self, node: int) -> None:
        """Move this process to a node, for programs that fork their nodes: before it has a thread or a connection."""
        os.environ.update(self._told(node))
        self._spaces[1 + node].enter()

    def cut(self, node: int) -> None:
        """Pull the cable of a node."""
        run(self._hub.command(["ip", "link", "set", _cable(self._checked(node)), "nomaster"]))

    def mend(self, node: int) -> None:
        """Put it back."""
        run(self._hub.command(["ip", "link", "set", _cable(self._checked(node)), "master", BRIDGE]))

    def close(self) -> None:
        """Take it down, once the processes in it have ended."""
        for space in reversed(self._spaces):
            space.close()
        self._spaces.clear()

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _told(self, node: int) -> dict[str, str]:
        """What a process on a node finds in its environment."""
        cable = f"{self._hub.pid} {_cable(self._checked(node))}"
        return {"GLOO_SOCKET_IFNAME": DEVICE, "NCCL_SOCKET_IFNAME": DEVICE, CABLE: cable}

    def _checked(self, node: int) -> int:
        if node not in range(self.nodes):
            raise ValueError(f"Invalid node: {node!r}; need one of 0 to {self.nodes - 1}.")
        return node


def cut_own() -> None:
    """Pull the cable of the node that this process runs on."""
    hub, cable = _own()
    run(["nsenter", "--target", hub, "--net", "--", "ip", "link", "set", cable, "nomaster"])


def check_own() -> None:
    """Refuse a process that runs on no node of a `Network`."""
    _own()


def _own() -> tuple[str, str]:
    found = os.environ.get(CABLE, "").split()
    if len(found) != 2:
        raise ValueError(
            "Invalid Partition: this process is on no node of a faults.Network, so there is no cable to pull. Start it "
            "with the command line that Network.command gives."
        )
    return found[0], found[1]


def _cable(node: int) -> str:
    return f"node{node}"
