"""Federations on Flower: the rounds of this library on a ServerApp, the local steps of `simulate` on ClientApps.

    server    TailOPT(model, algorithm, nodes=5, local_steps=10).start(grid, num_rounds=20)
    client    app = client_app(lambda context: Client(model, algorithm, node=..., nodes=5, loss=..., data=...))

A query asks every SuperNode once for its partition and settings. A train message carries the global weights, and its
reply those of the client. Replies count in the order of partitions, whenever they arrive: with the same settings every
round has the bits of `simulate`, where a reply that is late, missing or an error is a lost contribution.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from tailopt.algorithms import Algorithm
from tailopt.arguments import check_seconds
from tailopt.engines.simulate import Result as SimulationResult
from tailopt.integrations.client import Client
from tailopt.integrations.federation import TrainReply, TrainRequest
from tailopt.integrations.privacy import Privacy
from tailopt.integrations.server import FederationServer
from tailopt.optional import require

require("flwr", "Federations need flwr", extra="flower", at_least="1.27")  # first: older versions lack what follows

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.serverapp import Grid  # noqa: E402
from flwr.serverapp.strategy import Result, Strategy  # noqa: E402

__all__ = ["Client", "Privacy", "TailOPT", "client_app"]

T = TypeVar("T")
TENSORS = ("tensors", "second_moments")  # fields of a request that are sent as arrays; the others as JSON
KEPT = "tailopt"  # where a client keeps its inner states, in its context
CLIP = "clipping_norm"  # the name under which `flwr.clientapp.mod.fixedclipping_mod` looks for it


class TailOPT(Strategy):
    """A strategy that runs the rounds of an algorithm over the SuperNodes, with the records of `simulate`.

    Args:
        model: that is trained, in place; clients have the same.
        algorithm: its outer rule steps here, its inner one on the clients.
        nodes: how many clients there are. Their partitions are 0 to nodes - 1.
        local_steps: of a client in a round.
        options: `privacy`, or None; `connect_timeout`, the seconds to wait for clients, before the first round for all,
            later for one; and of `simulate`: schedules, the options of rounds except lost contributions and epochs
            (weights are numbers), run, resume, evaluate, evaluate_every, checkpoint_every, keep, loggers, progress,
            describe. A run with a folder and `resume` goes on from its last checkpoint.

    Attributes:
        result: of the run, as `simulate` returns it; None before its end.
    """

    def __init__(
        self, model: torch.nn.Module, algorithm: Algorithm, *, nodes: int, local_steps: int, **options: Any
    ) -> None:
        self.result: SimulationResult | None = None
        self._server = FederationServer(model, algorithm, nodes=nodes, local_steps=local_steps, **options)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run up to round `num_rounds`.

        Args:
            grid: reaches the SuperNodes.
            initial_arrays: a state_dict from which to start instead of the model's.
            num_rounds: in all: a resumed run goes on to that number.
            timeout: seconds that a message and its reply may take; a later reply is lost.
            train_config, evaluate_config, evaluate_fn: not used. Give `evaluate` to the strategy.
        """
        if train_config is not None or evaluate_config is not None or evaluate_fn is not None:
            raise ValueError("TailOPT takes no train_config, evaluate_config or evaluate_fn. Give it `evaluate`.")
        check_seconds(timeout=timeout)
        model, privacy = self._server.model, self._server.privacy
        if initial_arrays is not None:
            model.load_state_dict(initial_arrays.to_torch_state_dict())
        config = {} if privacy is None else {CLIP: float(privacy.clip)}
        self.result = self._server.train(FlowerNetwork(grid, timeout, config), num_rounds)
        rows = self.result.history
        return Result(
            arrays=ArrayRecord(_sendable(model.state_dict())),
            train_metrics_clientapp={row["round"]: MetricRecord({"loss": row["loss"]}) for row in rows},
            evaluate_metrics_serverapp={row["round"]: MetricRecord(row["metrics"]) for row in rows if row["metrics"]},
        )

    def summary(self) -> None:
        """Log what is run."""
        logging.getLogger("flwr").info("TailOPT: %s", self._server.algorithm)

    def configure_train(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: `start` runs the rounds, and a strategy around this one would bypass the guard."""
        raise TypeError("TailOPT cannot be wrapped in another strategy. For differential privacy, give it `privacy`.")

    aggregate_train = configure_evaluate = aggregate_evaluate = configure_train


class FlowerNetwork:
    """Requests and replies as Flower's messages; config: further entries of train messages."""

    def __init__(self, grid: Grid, timeout: float, config: Mapping[str, Any]) -> None:
        self._grid, self._timeout, self._config = grid, timeout, config

    def connected(self) -> set[int]:
        """Return the ids of the SuperNodes that are connected now."""
        return set(self._grid.get_node_ids())

    def ask(self, addresses: Collection[int]) -> dict[int, tuple[int, dict[str, Any]] | str]:
        """Ask SuperNodes which node they are and what they were started with."""
        return self._exchange(MessageType.QUERY, dict.fromkeys(addresses, RecordDict()), _answer)

    def train(self, requests: Mapping[int, TrainRequest]) -> dict[int, TrainReply | str]:
        """Send requests, and wait for the replies."""
        return self._exchange(MessageType.TRAIN, {a: self._packed(request) for a, request in requests.items()}, _reply)

    def _packed(self, request: TrainRequest) -> RecordDict:
        plain = {f.name: getattr(request, f.name) for f in dataclasses.fields(request) if f.name not in TENSORS}
        content = RecordDict({"config": ConfigRecord({"request": json.dumps(plain), **self._config})})
        for name in TENSORS:
            if tensors := getattr(request, name):
                content[name] = ArrayRecord(_sendable(tensors))
        return content

    def _exchange(
        self, kind: str, contents: Mapping[int, RecordDict], read: Callable[[RecordDict], T]
    ) -> dict[int, T | str]:
        messages = [Message(content, address, kind, ttl=self._timeout) for address, content in contents.items()]
        found: dict[int, T | str] = {}
        for message in self._grid.send_and_receive(messages, timeout=self._timeout) if messages else ():
            address = message.metadata.src_node_id
            if address not in contents or address in found:
                continue  # of nobody who was asked, or a second reply
            try:
                found[address] = (message.error.reason or "an error") if message.has_error() else read(message.content)
            except Exception as error:  # whatever bytes can make it raise
                found[address] = f"its reply cannot be read ({type(error).__name__}: {error})"
        return found


def client_app(build: Callable[[Context], Client], mods: Sequence[Callable[..., Message]] = ()) -> ClientApp:
    """Return the ClientApp of a federation.

    Args:
        build: returns this SuperNode's client; called for every message, so keep what takes long, such as its data.
        mods: of Flower, around the training: `fixedclipping_mod` where the server has `privacy`.
    """
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        client = build(context)
        answer = ConfigRecord({"node": client.node, "settings": json.dumps(client.settings)})
        return Message(RecordDict({"answer": answer}), reply_to=message)

    @app.train(mods=list(mods))
    def train(message: Message, context: Context) -> Message:
        content, kept = message.content, dict[str, Any](context.state.config_records.get(KEPT, {}))
        plain = json.loads(str(content.config_records["config"]["request"]))
        arrays: dict[str, Any] = {
            n: content.array_records[n].to_torch_state_dict() if n in content else {} for n in TENSORS
        }
        reply = build(context).train(TrainRequest(**plain, **arrays), kept)
        context.state[KEPT] = ConfigRecord(kept)
        said = {"loss": reply.loss, "state_round": reply.state_round, "thresholds": reply.thresholds}
        answer = RecordDict({"reply": ConfigRecord({"reply": json.dumps(said)})})
        answer["tensors"] = ArrayRecord(_sendable(reply.tensors))
        return Message(answer, reply_to=message)

    return app


def _answer(content: RecordDict) -> tuple[int, dict[str, Any]]:
    answer = content.config_records["answer"]
    return int(str(answer["node"])), dict(json.loads(str(answer["settings"])))


def _reply(content: RecordDict) -> TrainReply:
    said = json.loads(str(content.config_records["reply"]["reply"]))
    return TrainReply(tensors=content.array_records["tensors"].to_torch_state_dict(), **said)


def _sendable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of types that numpy, and so Flower, has; every bfloat16 is a float32."""
    return {name: t.float() if t.dtype == torch.bfloat16 else t for name, t in tensors.items()}
