"""Small federations: every algorithm with settings, clients by number, and a Grid whose clients are in this process."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tailopt
from tailopt.algorithms import ALGORITHMS
from tailopt.integrations.flower import Client, TailOPT, client_app
from tailopt.records import checkpoints

NODES, ROUNDS, STEPS, BATCH = 5, 5, 3, 4
SETTINGS = {
    "ilr": 0.05,
    "olr": 0.3,
    "ieps": 1e-3,
    "oeps": 1e-2,
    "i_u": 0.8,
    "i_d": 0.1,
    "o_u": 0.05,
    "o_d": 0.01,
    "momentum": 0.8,
    "weight_decay": 0.05,
}
OUTER_NAMES = {"adagrad": ("olr", "oeps"), "rmsprop": ("olr", "oeps"), "adam": ("olr", "oeps")}


def algorithm(name: str, **more: Any) -> tailopt.Algorithm:
    """An algorithm with those of `SETTINGS` that it needs."""
    outer, inner = ALGORITHMS[name]
    clips, adaptive = ("biclip", "biclip-l2"), ("adagrad", "rmsprop", "adam")
    names = ["ilr"]
    names += ["i_u", "i_d"] if inner in clips else ["i_u"] if inner == "l2clip" else []
    names += ["ieps"] if inner in ("adagrad", "adam", "adamw") else []
    names += ["weight_decay"] if inner == "adamw" else []
    names += ["olr"] if outer != "avg" else []
    names += ["oeps"] if outer in adaptive else ["o_u", "o_d"] if outer in clips else []
    names += ["momentum"] if outer == "nesterov" else []
    return tailopt.algorithm(name, **{key: SETTINGS[key] for key in names}, **more)


def model() -> nn.Module:
    """Two layers with dropout, so that the draws of the model count, and BatchNorm, so that buffers do."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))


def squares(net: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    found: Tensor = (net(x).squeeze(-1) - y).square().mean()
    return found


def data(node: int, poisoned: int | None = None) -> TensorDataset:
    """The samples of a node; a poisoned one has a NaN."""
    source = torch.Generator().manual_seed(node)
    x = torch.randn(42 + 4 * node, 6, generator=source)
    if node == poisoned:
        x[3] = float("nan")
    return TensorDataset(x, x.sum(-1) + node)


def simulated(algo: tailopt.Algorithm, rounds: int = ROUNDS, **more: Any) -> tailopt.Result:
    """What `simulate` makes of the same federation."""
    given: dict[str, Any] = {
        "loss": squares,
        "data": [data(node) for node in range(NODES)],
        "batch_size": BATCH,
        "local_steps": STEPS,
        "rounds": rounds,
        "progress": False,
        "seed": 3,
    }
    return tailopt.simulate(model(), algo, **given | more)


def client(algo: tailopt.Algorithm, node: int, **more: Any) -> Client:
    given: dict[str, Any] = {
        "node": node,
        "nodes": NODES,
        "loss": squares,
        "data": data(node),
        "batch_size": BATCH,
        "local_steps": STEPS,
        "seed": 3,
    }
    return Client(**{"model": model(), "algorithm": algo} | given | more)


def digest(net: nn.Module) -> str:
    return checkpoints.digest(dict(net.state_dict()))


class LocalGrid(Grid):
    """SuperNodes in this process, one after another; replies come in the order of their ids, which is nobody's.

    Args:
        apps: the ClientApp of every partition.

    Attributes:
        offline: partitions that are not connected now.
        late: (partition, round) whose replies come after the timeout.
    """

    def __init__(self, apps: dict[int, ClientApp]) -> None:
        # what Flower's own processes set before a ServerApp is loaded
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.apps = apps
        self.ids = {partition: 1000 - 7 * partition for partition in apps}
        self.contexts = {
            partition: Context(1, self.ids[partition], {"partition-id": partition}, RecordDict(), {})
            for partition in apps
        }
        self.offline: set[int] = set()
        self.late: set[tuple[int, int]] = set()
        self.asked: list[int] = []

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        return [id for partition, id in self.ids.items() if partition not in self.offline]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        assert timeout is not None
        replies = []
        for message in sorted(messages, key=lambda m: m.metadata.dst_node_id):
            partition = next(p for p, id in self.ids.items() if id == message.metadata.dst_node_id)
            message.metadata.__dict__["_message_id"] = str(uuid.uuid4())
            if message.metadata.message_type == "query":
                self.asked.append(partition)
            try:
                reply = self.apps[partition](message, self.contexts[partition])
            except Exception as error:
                reply = Message(Error(code=2, reason=f"{type(error).__name__}: {error}"), reply_to=message)
            if (partition, round_of(message)) not in self.late:
                replies.append(reply)
        return replies


def round_of(message: Message) -> int:
    """The round that a train message is about; 0 for a query."""
    return int(json.loads(message.content["config"]["request"])["round"]) if "config" in message.content else 0


def grid(algo: tailopt.Algorithm, build: Callable[..., Client] = client, nodes: int = NODES, **more: Any) -> LocalGrid:
    return LocalGrid({node: client_app(lambda context, node=node: build(algo, node, **more)) for node in range(nodes)})


def federated(
    algo: tailopt.Algorithm, over: LocalGrid | None = None, rounds: int = ROUNDS, **more: Any
) -> tuple[nn.Module, list[dict[str, Any]]]:
    """The model and the history of a federation."""
    trained = more.pop("model", None) or model()
    given: dict[str, Any] = {"nodes": NODES, "local_steps": STEPS, "seed": 3, "connect_timeout": 0.5}
    strategy = TailOPT(trained, algo, **given | more)
    strategy.start(over or grid(algo), num_rounds=rounds, timeout=60)
    assert strategy.result is not None
    return trained, strategy.result.history


def same(found: tuple[nn.Module, list[dict[str, Any]]], expected: tailopt.Result) -> bool:
    """Whether all weights and buffers have the same bits, and the histories are equal."""
    return digest(found[0]) == digest(expected.model) and _text(found[1]) == _text(expected.history)


def _text(rows: list[dict[str, Any]]) -> str:
    return json.dumps(rows, sort_keys=True)  # as text, NaN equals NaN; rows that were read from a file are sorted
