"""A network of nodes on this machine, one network namespace each, whose cables can be pulled while a run goes on.

    node 0 --+
    node 1 --+-- a bridge in a namespace of its own        10.203.0.1, 10.203.0.2, ...
    node 2 --+

A cable is cut at the bridge: nothing arrives, no connection is closed, and the node itself still sees its link as up.
That is what a network partition looks like from inside; neither a closed connection nor a signal can imitate it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType

from tailopt.arguments import whole_number
from tailopt.faults.namespaces import Namespace, run

CABLE_VARIABLE = "TAILOPT_CABLE"  # of the environment: the process of the bridge's namespace, and the node's cable
BRIDGE, DEVICE, SUBNET = "bridge", "eth0", "10.203.0"


class Network:
    """A network of nodes on this machine, without a connection to the outside.

    It needs Linux with `ip` (iproute2) and `unshare` (util-linux), and no root where user namespaces are permitted.

        with faults.Network(3) as network:
            nodes = [subprocess.Popen(network.command(k, ["python", "train.py"])) for k in range(3)]
            network.cut(2)

    Args:
        nodes: how many.

    Raises:
        Unavailable: the system does not permit it; the message says why.
    """

    def __init__(self, nodes: int) -> None:
        self.nodes = whole_number("nodes", nodes, low=1, high=250)
        self._namespaces: list[Namespace] = []  # the bridge's, then the nodes'
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        hub = self._hub = Namespace("net")
        self._namespaces.append(hub)
        run(hub.command(["ip", "link", "add", BRIDGE, "up", "type", "bridge"]))
        for k in range(self.nodes):
            namespace = Namespace("net", share_user_ns_with=hub)
            self._namespaces.append(namespace)
            ends = ["type", "veth", "peer", "name", DEVICE, "netns", str(namespace.pid)]
            run(hub.command(["ip", "link", "add", _cable(k), *ends]))
            run(hub.command(["ip", "link", "set", _cable(k), "up", "master", BRIDGE]))
            run(namespace.command(["ip", "address", "add", f"{self.address(k)}/24", "dev", DEVICE]))
            for device in (DEVICE, "lo"):
                run(namespace.command(["ip", "link", "set", device, "up"]))

    def address(self, node: int) -> str:
        """Return the address of a node, for MASTER_ADDR."""
        return f"{SUBNET}.{self._checked(node) + 1}"

    def command(self, node: int, command: Sequence[str]) -> list[str]:
        """Return a command line that runs a command on a node; gloo and NCCL will use the node's device."""
        variables = [f"{key}={value}" for key, value in self._variables(node).items()]
        return self._namespaces[1 + node].command(["env", *variables, *command])

    def enter(self, node: int) -> None:
        """Move this process to a node, for programs that fork their nodes; before it has threads or connections."""
        os.environ.update(self._variables(node))
        self._namespaces[1 + node].enter()

    def cut(self, node: int) -> None:
        """Pull the cable of a node."""
        run(self._hub.command(["ip", "link", "set", _cable(self._checked(node)), "nomaster"]))

    def mend(self, node: int) -> None:
        """Plug the cable of a node in again."""
        run(self._hub.command(["ip", "link", "set", _cable(self._checked(node)), "master", BRIDGE]))

    def close(self) -> None:
        """Take the network down, once the processes in it have ended."""
        for namespace in reversed(self._namespaces):
            namespace.close()
        self._namespaces.clear()

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _variables(self, node: int) -> dict[str, str]:
        """Return the environment variables of a process on a node."""
        cable = f"{self._hub.pid} {_cable(self._checked(node))}"
        return {"GLOO_SOCKET_IFNAME": DEVICE, "NCCL_SOCKET_IFNAME": DEVICE, CABLE_VARIABLE: cable}

    def _checked(self, node: int) -> int:
        if node not in range(self.nodes):
            raise ValueError(f"Invalid node: {node!r}; need one of 0 to {self.nodes - 1}.")
        return node


def cut_this_node() -> None:
    """Pull the cable of the node that this process runs on."""
    hub, cable = _this_cable()
    run(["nsenter", "--target", hub, "--net", "--", "ip", "link", "set", cable, "nomaster"])


def check_on_network() -> None:
    """Raise ValueError if this process runs on no node of a `Network`."""
    _this_cable()


def _this_cable() -> tuple[str, str]:
    """Return the process of the bridge's namespace, and the cable of the node that this process runs on."""
    parts = os.environ.get(CABLE_VARIABLE, "").split()
    if len(parts) != 2:
        raise ValueError(
            "Invalid Partition: this process is on no node of a faults.Network, so there is no cable to pull. Start it "
            "with the command line that Network.command gives."
        )
    return parts[0], parts[1]


def _cable(node: int) -> str:
    return f"node{node}"
