"""How the nodes of a run meet: `connect`, and the errors with which a meeting or a run can end.

    store       node 0 serves it, or torchrun's agent does; everything here goes through it
    roll call   every node says that it is here and how many nodes it was started for
    group       torch connects every node with every other

Each of the three has the same limit in time, and where it runs out, the node that is missing is named.
"""

from __future__ import annotations

import atexit
import datetime
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

Store = Any  # torch does not export the types of its stores
_DIST: Any = dist

PAUSE = 0.1  # seconds between two looks at the store
GATHERING = 5.0  # seconds in which the nodes that are left tell each other that they live
_SELF = uuid.uuid4().hex


class NodeLost(RuntimeError):
    """A node is gone; the message names it and the round. The process ends a few seconds later, whoever catches this.

    gloo never lets go of the thread that waits for the node, so an orderly end is impossible: a few seconds after the
    error was raised, or at the end of the program if that comes first, the process exits with status 1.
    """


class Disagreement(RuntimeError):
    """The nodes were not started with the same model, algorithm or settings; the message has node, fact and values."""


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
    whole = _store(host, port, serves, timeout, interface)
    call = _DIST.PrefixStore("roll call", whole.clone())  # a connection of its own, which nobody else blocks
    turn = turn_of(call, rank)
    call = _DIST.PrefixStore(f"{turn}", call)
    try:
        _roll_call(call, rank, nodes, timeout)
    except RuntimeError as error:
        if isinstance(error, NodeLost | Disagreement):
            raise
        raise NodeLost(
            f"The store at {host}:{port} was lost during the roll call: {first_line(error)}. Start all nodes again."
        ) from error
    _init_group(call, _DIST.PrefixStore(f"group {turn}", whole), rank, nodes, timeout, backend)


def _store(host: str, port: int, serves: bool, timeout: float, interface: str | None) -> Store:
    """The store that all nodes share: served here, or somewhere else."""
    limit = datetime.timedelta(seconds=timeout)
    try:
        if not serves:
            _knock(host, port, timeout)
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


def _roll_call(call: Store, rank: int, nodes: int, timeout: float) -> None:
    """Wait until all nodes are here; a node that was started for another number of them ends it for all."""
    first, count = json.loads(call.compare_set("size", "", json.dumps([rank, nodes])))
    if count != nodes:
        call.set(
            "refused",
            f"Node {rank} was started for {nodes} nodes (WORLD_SIZE={nodes}), and node {first} for {count}. "
            "Start all nodes with the same number.",
        )
    else:
        call.set(f"here/{rank}", "")
    until = time.monotonic() + timeout
    missing = list(range(nodes))
    while missing and time.monotonic() < until:
        missing = awaited(call, "here", missing, 2 * PAUSE)
        if call.check(["refused"]):
            call.set(f"read/{rank}", "")
            if rank == 0:  # which may take the store with it: the others read first
                awaited(call, "read", range(nodes), GATHERING)
            raise Disagreement(call.get("refused").decode())
    if missing:
        raise NodeLost(absent_nodes(missing, nodes, timeout))


def _init_group(call: Store, store: Store, rank: int, nodes: int, timeout: float, backend: str) -> None:
    """Connect all nodes; where one is gone since the roll call, name it.

    A thread does it, since gloo has one limit for connecting and for every exchange after it, and a round may wait for
    a slow node much longer than the nodes wait for each other here.
    """
    failed: list[BaseException] = []

    def join() -> None:
        try:
            dist.init_process_group(backend, store=store, rank=rank, world_size=nodes)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=join, name="tailopt connect", daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        _STUCK.append(thread)
    elif not failed:
        return
    elif not isinstance(failed[0], RuntimeError):  # such as a backend that does not exist
        raise failed[0]
    cause = failed[0] if failed else None
    why = first_line(cause) if cause else f"waited {timeout:g} s"
    try:
        call.set(f"lives/{rank}", "")
        gone = awaited(call, "lives", range(nodes), GATHERING)
        call.set(f"told/{rank}", "")
        if rank == 0:  # which may take the store with it: the others look first
            awaited(call, "told", [k for k in range(nodes) if k not in gone], timeout)
    except RuntimeError:
        raise NodeLost(f"The store is gone since the roll call ({why}). Start all nodes again.") from cause
    if gone:
        raise NodeLost(
            f"{named(gone).capitalize()} came to the roll call and then was gone, before all nodes were connected "
            f"({why}). Look at its own output, and start all nodes again."
        ) from cause
    raise NodeLost(
        f"The nodes are all here, and could not connect to each other ({why}). Check names, firewalls and "
        "GLOO_SOCKET_IFNAME."
    ) from cause


_STUCK: list[threading.Thread] = []  # in torch's C++, for as long as its own limit


@atexit.register
def _leave_stuck_threads() -> None:
    """End the process although a thread cannot be ended: coming back while the interpreter goes would abort it."""
    if any(thread.is_alive() for thread in _STUCK):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)


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


# ---- shared with what watches the nodes later ----


def turn_of(store: Store, node: int) -> int:
    """How often this node has come to this store: torchrun may keep it for the nodes that it starts again.

    A second process that is this node at the same time is refused.
    """
    own = f"process {os.getpid()} on {socket.gethostname()} ({_SELF})"
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    there = store.compare_set(f"who/{node}/{start}", "", own).decode()
    if there != own:
        first, second = (text.rpartition(" (")[0] for text in (there, own))
        raise Disagreement(
            f"Node {node} came twice: as {first}, and now as {second}. "
            "Give every process its own rank, and every run a fresh store."
        )
    return int(store.add(f"turn/{node}", 1))


def awaited(store: Store, prefix: str, nodes: Sequence[int], timeout: float) -> list[int]:
    """Wait for a key of each of these nodes; the nodes that have none at the end."""
    missing, until, pause = list(nodes), time.monotonic() + timeout, 0.005
    while True:
        missing = [k for k in missing if not store.check([f"{prefix}/{k}"])]
        if not missing or time.monotonic() >= until:
            return missing
        time.sleep(pause)
        pause = min(2 * pause, PAUSE)


def absent_nodes(missing: Sequence[int], nodes: int, timeout: float) -> str:
    """The sentence about nodes that did not come."""
    return (
        f"Only {nodes - len(missing)} of {nodes} nodes came within {timeout:g} s; missing: {named(missing)}. "
        "Start all of them, or lower the number of nodes."
    )


def named(nodes: Sequence[int]) -> str:
    """Nodes in words.

    Examples:
        >>> named([2]), named([0, 2])
        ('node 2', 'nodes 0, 2')
    """
    return f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {', '.join(map(str, nodes))}"


def first_line(error: BaseException | None) -> str:
    """What an error says, without what follows the first line."""
    return str(error).strip().splitlines()[0].rstrip(".") if error is not None and str(error).strip() else repr(error)


def _knock(host: str, port: int, timeout: float) -> None:
    """Wait until somebody listens there: torch itself would try for four times as long as it is told to."""
    until = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host, port), max(until - time.monotonic(), PAUSE)).close()
            return
        except OSError:
            if time.monotonic() + PAUSE > until:
                raise
            time.sleep(PAUSE)


def agent_serves() -> bool:
    """Whether torchrun's agent serves the store, and not node 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
