"""What all nodes must have in common, compared before the first exchange.

gloo ends the process in C++ where sizes differ, so the comparison goes through the store: every node posts its facts,
waits for those of all others and compares them. A difference is the same error on all nodes.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from tailopt.distributed.errors import Disagreement
from tailopt.distributed.heartbeat import DRAIN_S
from tailopt.distributed.interfaces import Call, Clock, Store
from tailopt.distributed.membership import Membership
from tailopt.distributed.roll_call import StoreOwner, absent_nodes, await_keys, await_nodes, check_given_up, give_up
from tailopt.records.tensor_bytes import tensor_bytes

ENVIRONMENT = "environment"

StartCall = Callable[[Coroutine[Any, Any, Any]], Call]


@dataclass(frozen=True)
class FactExchange:
    """How the nodes of a group tell each other their facts.

    Args:
        store: of the group.
        clock: the time.
        node, nodes: this node's number, and how many there are.
        timeout: how long to wait for the facts of all nodes.
        store_owner: who serves the store.
    """

    store: Store
    clock: Clock
    node: int
    nodes: int
    timeout: float
    store_owner: StoreOwner

    async def gather(self, facts: Mapping[str, Any]) -> tuple[list[dict[str, Any]], int]:
        """The facts of every node, and the number of this comparison, for `confirm_read`."""
        # several optimizers, one after another, on every node alike
        number = await self.store.add(f"made/{self.node}", 1)
        await self.store.set(f"facts/{number}/{self.node}", json.dumps(facts))
        given_up = self.store.under(f"{number}")
        prefix, look = f"facts/{number}", partial(check_given_up, given_up)
        missing = await await_nodes(self.store, self.clock, prefix, self.nodes, self.timeout, look)
        if missing:
            sentence = absent_nodes(missing, self.node, self.nodes, self.timeout, self.store_owner)
            await give_up(given_up, sentence)
        texts = [await self.store.get(f"facts/{number}/{k}") for k in range(self.nodes)]
        return [json.loads(text) for text in texts], number

    async def confirm_read(self, number: int) -> None:
        """Wait until every node has read the facts: a node that ends at once might take the store with it."""
        try:
            await self.store.set(f"read/{number}/{self.node}", "")
            await await_keys(self.store, self.clock, f"read/{number}", range(self.nodes), DRAIN_S)
        except RuntimeError:  # the store is gone with a node that was faster; this node has read all facts
            return


async def agree(
    facts: Mapping[str, Any], exact: bool, exchange: FactExchange, membership: Membership, start: StartCall
) -> tuple[list[dict[str, Any]], str]:
    """Compare facts with all nodes: all nodes go on, or all raise the same `Disagreement`.

    Args:
        facts: name -> numbers, strings, lists and mappings; the rest as `as_fact`.
        exact: refuse nodes whose environment (torch, instruction set, threads) differs.
        exchange: how the nodes tell each other.
        membership: waits for it.
        start: begins a coroutine that may block for ever.

    Returns:
        The environments of all nodes, and how they differ in words; empty where they do not.
    """
    mine = {**{key: as_fact(value) for key, value in facts.items()}, "exact": exact, ENVIRONMENT: environment()}
    by_node, number = await membership.watch(start(exchange.gather(mine)), detect=False)
    environments = [facts_of_node.pop(ENVIRONMENT) for facts_of_node in by_node]
    wrong = difference(by_node)
    unlike = difference([{ENVIRONMENT: of_node} for of_node in environments])
    if wrong or (exact and unlike):
        await membership.watch(start(exchange.confirm_read(number)), detect=False)
        remedy = "Start all nodes with the same code and settings" if wrong else "exact=True needs equal machines"
        raise Disagreement(f"{wrong or unlike} {remedy}.")
    return environments, unlike


def as_fact(value: Any) -> Any:
    """A value as JSON that is equal on two nodes where the value is: tensors by their digest, functions by name.

    Examples:
        >>> as_fact({"u": 0.5, "betas": (0.9, 0.999), "dtype": torch.float32, "of": torch.optim.SGD})
        {'betas': [0.9, 0.999], 'dtype': 'float32', 'of': 'torch.optim.sgd.SGD', 'u': 0.5}
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): as_fact(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, Sequence):
        return [as_fact(entry) for entry in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Tensor):
        tensor = value.detach().cpu()
        if not tensor.dim():
            return tensor.item() if not tensor.is_complex() else str(tensor.item())
        digest = hashlib.sha256(tensor_bytes(tensor.contiguous().reshape(-1))).hexdigest()
        return f"{shape(value)} sha256:{digest[:12]}"
    named = value if hasattr(value, "__qualname__") else type(value)  # an object's repr may hold its address
    return f"{named.__module__}.{named.__qualname__}"


def without_local_settings(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without what may differ between nodes: device, weight, paths, loggers, progress and timeouts.

    Examples:
        >>> without_local_settings({"rounds": 3, "device": "cuda:1", "task": {"name": "texts", "data": "/here"}})
        {'rounds': 3, 'task': {'name': 'texts'}}
    """
    return {
        key: without_local_settings(value) if isinstance(value, Mapping) else value
        for key, value in configuration.items()
        if key not in _LOCAL and not (key in _MAYBE_PATHS and os.path.exists(os.path.expanduser(str(value))))
    }


_LOCAL = {"weight", "device", "data", "loggers", "progress", "timeout", "stall_timeout"}
_MAYBE_PATHS = {"model", "tokenizer"}  # or names of the hub, which must be the same


def shape(value: Tensor) -> str:
    """Type and shape of a tensor.

    Examples:
        >>> shape(torch.zeros(3, 4))
        'float32[3, 4]'
    """
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def environment() -> dict[str, Any]:
    """What the bits of a run depend on beside its settings."""
    return {
        "torch": torch.__version__,
        "instruction set": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
    }


def difference(everyone: Sequence[Mapping[str, Any]]) -> str:
    """The first fact in which a node differs from node 0, as a sentence; empty where all agree.

    Examples:
        >>> difference([{"local_steps": 5}, {"local_steps": 5}, {"local_steps": 3}])
        'Node 2 disagrees with node 0 on local_steps: it has 3, and node 0 has 5.'
    """
    for node, facts in enumerate(everyone):
        differing = first_difference(dict(everyone[0]), dict(facts))
        if differing is not None:
            where, first, other = differing
            return f"Node {node} disagrees with node 0 on {where}: it has {other}, and node 0 has {first}."
    return ""


def first_difference(a: Any, b: Any, where: str = "") -> tuple[str, str, str] | None:
    """Where two values differ first, and how: the name, and both values as text; None where they are equal."""
    if isinstance(a, dict) and isinstance(b, dict):
        pairs = [(f"{where}, {key}" if where else key, a.get(key, _ABSENT), b.get(key, _ABSENT)) for key in {**a, **b}]
    elif isinstance(a, list) and isinstance(b, list):
        pairs = [(f"{where}, entry {i}", x, y) for i, (x, y) in enumerate(zip_longest(a, b, fillvalue=_ABSENT))]
    else:
        x, y = (str(v) if v is _ABSENT else json.dumps(v) for v in (a, b))  # as text: NaN equals NaN
        return (where, x, y) if x != y else None
    return next((pair for key, x, y in pairs if (pair := first_difference(x, y, key)) is not None), None)


class _Absent:
    def __str__(self) -> str:
        return "none"


_ABSENT = _Absent()
