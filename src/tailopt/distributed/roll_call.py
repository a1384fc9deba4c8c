"""How nodes find each other in the store: each says that it is here, and how many nodes it was started for."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tailopt.distributed.errors import Disagreement, NodeLost, named
from tailopt.distributed.interfaces import Call, Clock, Store

PAUSE_S = 0.1  # between two looks at the store
LOOK_S = 1.0  # what lies between two looks at the clock counts as so much at most: the rest was a pause
GATHER_S = 5.0  # in which the nodes that are left tell each other that they live
# torch asks the name server for the name at the other end of a new connection, on both ends. Where that server does not
# answer, the first such question of a process takes 10 s (resolv.conf: two attempts of 5 s), and the store answers
# nobody meanwhile. That is no sign of a dead node.
LOOKUP_S = 20.0


@dataclass(frozen=True)
class StoreOwner:
    """Which process serves the store.

    Args:
        words: in words, at the beginning of a sentence.
        node: its number; None where it is no node, such as the agent of torchrun.
    """

    words: str = "The store"
    node: int | None = None


async def answered(call: Call, clock: Clock, seconds: float, store_owner: StoreOwner, node: int) -> Any:
    """The result of a conversation with the store; `NodeLost` where it has no answer for so long.

    A store whose machine is gone without closing the connection never answers, and torch would wait for ever. A pause
    of this machine is not counted: the store could not answer in it.
    """
    waited, last_look = 0.0, clock.now()
    while not await call.wait(min(LOOK_S, seconds - waited)):
        waited, last_look = waited + min(clock.now() - last_look, LOOK_S), clock.now()
        if waited >= seconds:
            remote = store_owner.node not in (None, node)
            blame = f"; it or the link from node {node} to it is at fault" if remote else ""
            raise NodeLost(
                f"{store_owner.words} has not answered for {seconds:g} s before the first round{blame}. Start all "
                "nodes again."
            )
    if call.error is not None:
        raise call.error
    return call.value


async def roll_call(store: Store, clock: Clock, node: int, nodes: int, timeout: float, store_owner: StoreOwner) -> None:
    """Wait until all nodes are here; a node that was started for another number of nodes ends it for all."""
    first, count = json.loads(await store.compare_set("size", json.dumps([node, nodes])))
    if count != nodes:
        await store.set(
            "refused",
            f"Node {node} was started for {nodes} nodes (WORLD_SIZE={nodes}), and node {first} for {count}. "
            "Start all nodes with the same number.",
        )
    else:
        await store.set(f"here/{node}", "")

    async def look() -> None:
        if await store.check("refused"):
            await store.set(f"read/{node}", "")
            if node == 0:  # which may take the store with it: the others read first
                await await_keys(store, clock, "read", range(nodes), GATHER_S)
            raise Disagreement(await store.get("refused"))
        await check_given_up(store)

    missing = await await_nodes(store, clock, "here", nodes, timeout, look)
    if missing:
        await give_up(store, absent_nodes(missing, node, nodes, timeout, store_owner))


async def await_nodes(
    store: Store, clock: Clock, prefix: str, nodes: int, timeout: float, look: Callable[[], Awaitable[None]]
) -> list[int]:
    """Wait for a key of every node; `look` may end it early. Returns the nodes that have none at the end.

    A pause of this process or of the store is not counted: the others may have been unable to write their keys.
    """
    missing, waited, last_look = list(range(nodes)), 0.0, clock.now()
    while missing and waited < timeout:
        missing = await await_keys(store, clock, prefix, missing, 2 * PAUSE_S)
        await look()
        waited, last_look = waited + min(clock.now() - last_look, LOOK_S), clock.now()
    return missing


async def give_up(store: Store, sentence: str) -> None:
    """Raise `NodeLost` about nodes that did not come.

    The first node that gives up posts its sentence, and all others raise the same: else they would miss that node.
    """
    raise NodeLost(await store.compare_set("given up", sentence))


async def check_given_up(store: Store) -> None:
    """Raise `NodeLost` where another node has given up already."""
    if await store.check("given up"):
        raise NodeLost(await store.get("given up"))


async def find_absent(store: Store, clock: Clock, node: int, nodes: int, timeout: float) -> list[int]:
    """The nodes that are gone since the roll call, where the nodes could not connect to each other."""
    await store.set(f"lives/{node}", "")
    absent = await await_keys(store, clock, "lives", range(nodes), GATHER_S)
    await store.set(f"told/{node}", "")
    if node == 0:  # which may take the store with it: the others look first
        await await_keys(store, clock, "told", [k for k in range(nodes) if k not in absent], timeout)
    return absent


async def incarnation(store: Store, node: int, process: str, start: str) -> int:
    """How often this node has come to this store: torchrun may keep it for the nodes that it starts again.

    A second process that is this node at the same time is refused.

    Args:
        store: the store.
        node: this node's number.
        process: this process in words that no other process has, with what identifies it in brackets at the end.
        start: how often torchrun has started the nodes.
    """
    known = await store.compare_set(f"who/{node}/{start}", process)
    if known != process:
        first, second = (text.rpartition(" (")[0] for text in (known, process))
        raise Disagreement(
            f"Node {node} came twice: as {first}, and now as {second}. "
            "Give every process its own rank, and every run a fresh store."
        )
    return await store.add(f"turn/{node}", 1)


async def await_keys(store: Store, clock: Clock, prefix: str, nodes: Sequence[int], timeout: float) -> list[int]:
    """Wait for a key of each of these nodes; the nodes that have none at the end."""
    missing, until, pause = list(nodes), clock.now() + timeout, 0.005
    while True:
        missing = [k for k in missing if not await store.check(f"{prefix}/{k}")]
        if not missing or clock.now() >= until:
            return missing
        await clock.sleep(pause)
        pause = min(2 * pause, PAUSE_S)


def absent_nodes(missing: Sequence[int], node: int, nodes: int, timeout: float, store_owner: StoreOwner) -> str:
    """The sentence of a node about others that did not come."""
    # A node that is cut off itself sees nobody else come. Where the process that serves the store stood still, nodes
    # that waited for its answer have given it up, and are missing when it goes on.
    serves = store_owner.node not in (None, node)
    where = f"node {node}, and of node {store_owner.node}, which serves the store" if serves else f"node {node}"
    return (
        f"Only {nodes - len(missing)} of {nodes} nodes came within {timeout:g} s; missing: {named(missing)}. "
        f"Start all of them, check the network of {where}, or lower the number of nodes."
    )
