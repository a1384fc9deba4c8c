"""`connect`: how the processes of a run become a process group.

    store       node 0 serves it, or torchrun's agent does; everything here goes through it
    roll call   every node says that it is here and how many nodes it was started for (roll_call.py)
    group       torch connects every node with every other

Each of the three has the same limit in time, and where it runs out, the missing node is named.
"""

from __future__ import annotations

import datetime
import os
import socket
import time
from typing import Any

import torch.distributed as dist

from tailopt.distributed.errors import Disagreement, NodeLost, first_line, named
from tailopt.distributed.interfaces import Clock, Store, blocking
from tailopt.distributed.roll_call import GATHER_S, PAUSE_S, answered, find_absent, incarnation, roll_call
from tailopt.distributed.threads import (
    CommThread,
    SystemClock,
    TorchStore,
    agent_serves,
    call_with_limit,
    store_owner,
    this_process,
)

_DIST: Any = dist  # torch does not export the types of its stores


def connect(timeout: float = 60.0, backend: str = "gloo", interface: str | None = None) -> None:
    """`torch.distributed.init_process_group` under torchrun, with a roll call first: a node that is missing is named.

    Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them. Where torchrun starts the nodes again
    (`--max-restarts`) and keeps its store, as it does by default, gloo would otherwise find the addresses of the dead.

    Args:
        timeout: seconds for each of: the store answers, all nodes have come, all are connected. Later exchanges have
            torch's own limit; `NestedOptimizer(timeout=...)` watches them.
        backend: as for `init_process_group`.
        interface: the name of a network interface, such as "wg0". Where node 0 serves the store, it listens on that
            interface alone, and gloo connects over it. By default both use every interface. Where torchrun's agent
            serves the store, this is refused: the agent listens on every interface.

    Raises:
        NodeLost: the store does not answer, a node does not come, or it is gone before all are connected.
        Disagreement: another process is this node already, or nodes were started with different numbers of nodes.
    """
    words = {key: os.environ.get(key) for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    absent = [key for key, value in words.items() if not value]
    if absent:
        raise ValueError(f"Invalid environment: {', '.join(absent)} not set. Start every node with torchrun.")
    rank, nodes, port = (int(words[key] or 0) for key in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    host, serves = words["MASTER_ADDR"] or "", rank == 0 and not agent_serves()
    if interface is not None:
        _use_interface(interface, port)
    whole = _open_store(host, port, serves, timeout, interface)
    calls, clock = TorchStore(whole.clone()).under("roll call"), SystemClock()  # a connection that nobody else blocks

    owner = store_owner(whole)

    async def come() -> tuple[TorchStore, int]:
        turn = await incarnation(calls, rank, *this_process())
        await roll_call(calls.under(f"{turn}"), clock, rank, nodes, timeout, owner)
        return calls.under(f"{turn}"), turn

    comm = CommThread()
    try:
        came = comm.start(lambda _: blocking(come()))
        call, turn = blocking(answered(came, clock, timeout + 2 * GATHER_S, owner, rank))
        comm.stop()
    except RuntimeError as error:
        if isinstance(error, NodeLost | Disagreement):
            raise
        raise NodeLost(
            f"The store at {host}:{port} was lost during the roll call: {first_line(error)}. Start all nodes again."
        ) from error
    group_store = _DIST.PrefixStore(f"group {turn}", whole)
    why, cause = _init_group(group_store, rank, nodes, timeout, backend)
    if why:
        blocking(_name_absent(call, clock, (rank, nodes), timeout, why, cause))


def _open_store(host: str, port: int, serves: bool, timeout: float, interface: str | None) -> Any:
    """The store that all nodes share: served here, or somewhere else."""
    limit = datetime.timedelta(seconds=timeout)
    try:
        if not serves:
            _wait_for_port(host, port, timeout)
            return _DIST.TCPStore(host, port, None, False, limit, wait_for_workers=False)
        if interface is None:
            return _DIST.TCPStore(host, port, None, True, limit, wait_for_workers=False, multi_tenant=True)
        listening = socket.create_server((address_of(interface), port), backlog=128)
        address = listening.getsockname()[0]
        # the store takes the socket over, and closes it
        return _DIST.TCPStore(
            address, port, None, True, limit, wait_for_workers=False, master_listen_fd=listening.detach()
        )
    except (RuntimeError, OSError) as error:
        what = "be opened: does node 0 run already?" if serves else "be reached. Is node 0 running, and the port open?"
        raise NodeLost(f"The store at {host}:{port} cannot {what} (waited {timeout:g} s)") from error


def _init_group(store: Any, rank: int, nodes: int, timeout: float, backend: str) -> tuple[str, BaseException | None]:
    """Connect all nodes; why they could not be connected, empty where they are.

    A thread does it, since gloo has one limit for connecting and for every exchange after it, and a round may wait for
    a slow node much longer than the nodes wait for each other here.
    """

    def join() -> bool:
        dist.init_process_group(backend, store=store, rank=rank, world_size=nodes)
        return True

    try:
        if call_with_limit(join, timeout, "connect"):
            return "", None
    except RuntimeError as error:  # another kind is the caller's, such as a backend that does not exist
        return first_line(error), error
    return f"waited {timeout:g} s", None


async def _name_absent(
    store: Store, clock: Clock, node_of: tuple[int, int], timeout: float, why: str, cause: BaseException | None
) -> None:
    """Raise `NodeLost` about nodes that could not be connected; one that is gone since the roll call is named."""
    try:
        absent = await find_absent(store, clock, *node_of, timeout)
    except RuntimeError:
        raise NodeLost(f"The store is gone since the roll call ({why}). Start all nodes again.") from cause
    if absent:
        raise NodeLost(
            f"{named(absent).capitalize()} came to the roll call and then was gone, before all nodes were connected "
            f"({why}). Look at its own output, and start all nodes again."
        ) from cause
    raise NodeLost(
        f"The nodes are all here, and could not connect to each other ({why}). Check names, firewalls and "
        "GLOO_SOCKET_IFNAME."
    ) from cause


def _use_interface(name: str, port: int) -> None:
    """Refuse an interface that cannot be used, then let gloo use it."""
    if agent_serves():
        raise ValueError(
            f"Invalid interface: {name!r}; torchrun's agent serves the store, on every interface, so that it cannot be "
            f"bound to one. Close port {port} on the others with a firewall and set GLOO_SOCKET_IFNAME={name} for the "
            "exchange, or start the processes without torchrun."
        )
    address_of(name)
    os.environ["GLOO_SOCKET_IFNAME"] = name


def address_of(interface: str) -> str:
    """The IPv4 address of a network interface of this machine.

    Examples:
        >>> address_of("lo")
        '127.0.0.1'
    """
    try:
        import fcntl
    except ImportError:  # Windows
        raise ValueError(f"Invalid interface: {interface!r}; this system cannot be asked for its address.") from None
    request = interface.encode()[:15].ljust(40, b"\0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket.fileno(), 0x8915, request)  # SIOCGIFADDR
        except OSError as error:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise ValueError(
                f"Invalid interface: {interface!r} has no IPv4 address here ({error.strerror}); need one of: {known}."
            ) from None
    return socket.inet_ntoa(answer[20:24])


def _wait_for_port(host: str, port: int, timeout: float) -> None:
    """Wait until the port accepts connections: torch itself would try for four times as long as it is told to."""
    until = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host, port), max(until - time.monotonic(), PAUSE_S)).close()
            return
        except OSError:
            if time.monotonic() + PAUSE_S > until:
                raise
            time.sleep(PAUSE_S)
