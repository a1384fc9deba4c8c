"""The server's engine in a federation: displacements come from clients, each of which has the data of one node.

    1. everyone who is new says which node it is, and what it was started with; others than the server has are refused
    2. the participants get the global weights, and reply with theirs
    3. what arrived is a displacement, checked by the guard; what is missing or cannot be read is a lost contribution

Settings decide how far a client can have moved, its reply does not: the steps that it says it took count for nothing.
How messages travel is a `Network`, so that none of this depends on a framework.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tailopt.engines.replay import DigestRecorder
from tailopt.engines.sequential import LocalTraining, Sequential
from tailopt.integrations.agreed_settings import disagreement, settings_digest
from tailopt.integrations.kept_states import last_state_rounds
from tailopt.integrations.privacy import Privacy
from tailopt.records.folder import Run, is_run
from tailopt.rounds.auto_thresholds import checked_statistics, statistics_from_plain
from tailopt.rounds.guard import Bound
from tailopt.rounds.participants import Participants
from tailopt.rounds.policy import RoundPolicy
from tailopt.rounds.round import Contribution, GlobalState, RoundResult
from tailopt.thresholds import Statistics

POLL_S = 0.5  # between two looks at who is connected
LONGEST_REASON = 400  # characters of what a client said that are logged


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """What a client needs to take the local steps of a round.

    Args:
        round: its number, from 1.
        settings: the digest of what both sides agreed on.
        steps_done: local steps of this node before the round.
        state_round: after which round its inner optimizer had the state that it goes on from; 0 for none.
        checkpoint: the last round that the server has saved.
        thresholds: the state of inner thresholds that are "auto"; None where they are not.
        tensors: the global weights and buffers by name.
        second_moments: of the outer optimizer, by name, where nodes start from them.
    """

    round: int
    settings: str
    steps_done: int
    state_round: int
    checkpoint: int
    thresholds: Mapping[str, Any] | None
    tensors: Mapping[str, Tensor]
    second_moments: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class TrainReply:
    """What a client did: its weights and buffers after the local steps, and the mean loss of these.

    Args:
        state_round: after which round its inner optimizer had the state that it began with; 0 for none.
        thresholds: the statistics of its gradients, from which thresholds that are "auto" follow.
    """

    tensors: Mapping[str, Tensor]
    loss: float
    state_round: int = 0
    thresholds: list[dict[str, Any]] | None = None


class Network(Protocol):
    """How a server reaches clients. Failures are values: the text says what went wrong."""

    def connected(self) -> set[int]:
        """Return the addresses of the clients that are connected now."""

    def ask(self, addresses: Collection[int]) -> dict[int, tuple[int, dict[str, Any]] | str]:
        """Ask clients which node they are and what they were started with, and wait a limited time."""

    def train(self, requests: Mapping[int, TrainRequest]) -> dict[int, TrainReply | str]:
        """Send requests, and wait a limited time for the replies."""


@dataclass(frozen=True, kw_only=True)
class FederatedPolicy(RoundPolicy):
    """The options of rounds whose losses nobody draws: `lost` is filled while replies come in."""

    lost: set[int] = field(default_factory=set, repr=False)

    def draw_drops(self, t: int) -> set[int]:
        """Return the nodes whose contributions to this round are lost, as far as that is known."""
        return self.lost


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What the engine knows beside the model.

    Args:
        network: reaches the clients.
        settings: that a client must have been started with.
        policy: of the rounds.
        folder: the run folder, or None.
        checkpoint_every: rounds between checkpoints.
        connect_timeout: seconds to wait for clients, before the first round for all of them, then for one of a round.
        privacy: how the mean is made differentially private, or None.
    """

    network: Network
    settings: Mapping[str, Any]
    policy: FederatedPolicy
    folder: Path | None
    checkpoint_every: int
    connect_timeout: float
    privacy: Privacy | None


class Federation(Sequential):
    """Contributions of clients.

    Args:
        model: holds the global weights.
        training: of every client; the server has no data of it.
        server: the rest.
    """

    def __init__(self, model: torch.nn.Module, training: LocalTraining, server: ServerOptions) -> None:
        super().__init__(model, training)
        self._server, self._hyperparameters = server, training.inner_hyperparameters
        self._send_second_moments = bool(training.algorithm.send_preconditioner)
        self._keeps_states = training.algorithm.inner_state == "keep"
        self._digest_of_settings = settings_digest(server.settings)
        self._steps_of_round = training.batches.steps(0)
        self._addresses: dict[int, int] = {}  # of every node that is connected
        self._refused: dict[int, str] = {}  # by address
        self._logged: set[str] = set()
        self._state: GlobalState | None = None  # None before the first round of this process
        self._state_rounds: dict[int, int] = {}
        self._digests = None if server.folder is None else DigestRecorder(server.folder, model)

    def contributions(
        self, state: GlobalState, participants: Participants, diverging: Collection[int] = ()
    ) -> Iterator[Contribution]:
        """Let the clients of the next round train; yield what arrived, in ascending order of nodes."""
        server, nodes = self._server, list(participants.shares)
        self._connect(state, nodes)
        self._model_state.load(state)
        start = self._model_state.weights_in_own_types(state)
        addresses = {node: self._addresses[node] for node in nodes if node in self._addresses}
        replies = server.network.train({address: self._request(state, node) for node, address in addresses.items()})
        arrived: dict[int, Contribution] = {}
        for node in nodes:
            reply = replies.get(addresses[node], "no reply in time") if node in addresses else "it has no client here"
            try:
                if isinstance(reply, str):
                    raise ValueError(reply)
                arrived[node] = self._contribution(state, start, node, reply)
            except Exception as error:  # what a hostile reply raises costs that client its contribution, and no other
                self._log(f"Round {state.round + 1}: no contribution of node {node}: {error}")
        server.policy.lost.clear()
        server.policy.lost.update(set(nodes) - arrived.keys())
        if server.privacy is not None:
            arrived = server.privacy.released(arrived, len(nodes), state)
        for node in nodes:
            yield arrived[node] if node in arrived else self._nothing(node)

    def keep_node_states(self, result: RoundResult) -> None:
        """Remember what clients keep, and record the digests of the weights after the round."""
        super().keep_node_states(result)
        assert self._state is not None
        self._state_rounds.update(last_state_rounds([result.settlement.history_row({}, {})]))
        if self._digests is not None:
            self.load_into_model(self._state)
            self._digests.record(result.settlement.round)

    # Who is there

    def _connect(self, state: GlobalState, nodes: Collection[int]) -> None:
        """Wait for clients: before the first round for all, later for one of this round at least."""
        first, everybody = self._state is None, range(len(self.steps_done))
        if first and state.round and self._server.folder is not None and is_run(self._server.folder):
            rows = Run.open(self._server.folder).history()
            self._state_rounds = last_state_rounds(row for row in rows if row["round"] <= state.round)
        self._state = state
        deadline = time.monotonic() + self._server.connect_timeout
        while True:
            self._roll_call()
            missing = [node for node in (everybody if first else nodes) if node not in self._addresses]
            if not missing or (not first and len(missing) < len(nodes)):
                return
            if time.monotonic() > deadline or len(missing) <= len(self._refused):
                break
            time.sleep(POLL_S)
        if all(node in missing for node in nodes):
            reasons = "; ".join(self._refused.values()) or f"{len(missing)} of them are not connected"
            raise ConnectionError(
                f"Round {state.round + 1}: none of its clients answered in {self._server.connect_timeout:g} s: "
                f"{reasons}. Start them with the settings of the server, and resume the run."
            )
        self._log(
            f"Round {state.round + 1} begins without {missing}: no client of these nodes is connected and agrees."
        )

    def _roll_call(self) -> None:
        """Ask everyone who is new, or was refused, which node it is; who has a node keeps it while connected."""
        connected = self._server.network.connected()
        self._addresses = {node: address for node, address in self._addresses.items() if address in connected}
        unknown = connected - set(self._addresses.values())
        self._refused = {address: why for address, why in self._refused.items() if address in unknown}
        answers = self._server.network.ask(sorted(unknown)) if unknown else {}
        for address in sorted(unknown & answers.keys()):
            answer = answers[address]
            why = answer if isinstance(answer, str) else self._reason_to_refuse(*answer)
            if not why and not isinstance(answer, str):
                self._addresses[answer[0]] = address
                self._refused.pop(address, None)
                continue
            named = f"client {address}" if isinstance(answer, str) else f"node {answer[0]}"
            self._refused[address] = one_line(f"{named} is refused: {why}")
            self._log(f"{self._refused[address]}. The others go on.")

    def _reason_to_refuse(self, node: int, settings: Mapping[str, Any]) -> str:
        nodes = len(self.steps_done)
        if not 0 <= node < nodes:
            return f"its partition is {node}, and there are the nodes 0 to {nodes - 1}"
        if node in self._addresses:
            return f"another client that is connected has partition {node}"
        try:
            return disagreement(self._server.settings, settings)
        except Exception as error:  # as in `contributions`
            return f"its settings cannot be read ({type(error).__name__}: {error})"

    # Messages

    def _request(self, state: GlobalState, node: int) -> TrainRequest:
        auto_thresholds, every = self._hyperparameters.auto_thresholds, self._server.checkpoint_every
        moments: dict[str, Tensor] = {}
        if self._send_second_moments:
            pairs = zip(state.names, state.outer_state, strict=True)
            moments = {name: s["exp_avg_sq"] for name, s in pairs if "exp_avg_sq" in s}
        return TrainRequest(
            round=state.round + 1,
            settings=self._digest_of_settings,
            steps_done=self.steps_done[node],
            state_round=self._state_rounds.get(node, 0) if self._keeps_states else 0,
            checkpoint=state.round - state.round % every,
            thresholds=None if auto_thresholds is None else auto_thresholds.state(),
            tensors={**dict(zip(state.names, state.weights, strict=True)), **state.buffers},
            second_moments=moments,
        )

    def _contribution(self, state: GlobalState, start: Sequence[Tensor], node: int, reply: TrainReply) -> Contribution:
        """Return what a reply contributes; ValueError where its tensors are not those of the model."""
        t, steps_done = state.round + 1, self.steps_done[node]
        sent = {**dict(zip(state.names, state.weights, strict=True)), **state.buffers}
        for name, tensor in sent.items():
            if name not in reply.tensors or reply.tensors[name].shape != tensor.shape:
                raise ValueError(f"its reply has no tensor {name} of shape {tuple(tensor.shape)}")
            found = reply.tensors[name].dtype  # mods of Flower send other floating-point types than they were given
            if found != tensor.dtype and not (found.is_floating_point and tensor.is_floating_point()):
                raise ValueError(f"its reply has {name} as {found}, and the model as {tensor.dtype}")
        got = {name: reply.tensors[name].to(tensor.device, tensor.dtype) for name, tensor in sent.items()}
        wanted = self._request(state, node).state_round
        if reply.state_round != wanted:
            before = f"that of round {reply.state_round}" if reply.state_round else "an empty one"
            self._log(f"Round {t}: node {node} lost its inner state of round {wanted}, and began with {before}.")
        bound = self._hyperparameters.bound(t, steps_done, self._steps_of_round)
        if self._server.privacy is not None:
            bound = self._server.privacy.bound(self._steps_of_round)
        pairs = zip(state.names, start, state.weights, strict=True)
        return Contribution(
            node=node,
            start=start,
            delta=[got[name] - s.to(w.dtype) for name, s, w in pairs],
            buffers={name: got[name] for name in state.buffers},
            loss=float(reply.loss),
            movement_bound=bound,
            steps=self._steps_of_round,
            threshold_statistics=self._statistics(reply, len(state.names)),
        )

    def _statistics(self, reply: TrainReply, n_params: int) -> list[Statistics] | None:
        """Return what thresholds that are "auto" follow from; None where none is."""
        auto_thresholds = self._hyperparameters.auto_thresholds
        if auto_thresholds is None:
            return None
        if reply.thresholds is None:
            raise ValueError(f"its reply has no statistics of its gradients, and the {n_params} tensors need them")
        wanted = auto_thresholds.recorder(n_params).statistics()
        return checked_statistics([*map(statistics_from_plain, reply.thresholds)], wanted, self._steps_of_round)

    def _nothing(self, node: int) -> Contribution:
        """Stand in for a contribution that is lost: its steps count, nothing else does."""
        return Contribution(
            node=node, start=[], delta=[], buffers={}, loss=0.0, movement_bound=Bound(None), steps=self._steps_of_round
        )

    def _log(self, text: str) -> None:
        """Log a text once, in Flower's log and in the run folder."""
        text = one_line(text)
        if text in self._logged:
            return
        self._logged.add(text)
        logging.getLogger("flwr").warning(text)
        if self._server.folder is not None and is_run(self._server.folder):
            Run.open(self._server.folder).log(text)


def one_line(text: str) -> str:
    """Return a text, a part of which a client wrote, as one line of limited length: it cannot forge a line of the log.

    Examples:
        >>> one_line("node 1 is refused: \\x1b[2Jits model\\n2026-01-01  resumed")
        'node 1 is refused: [2Jits model 2026-01-01 resumed'
    """
    printable = "".join(c if c.isprintable() else " " for c in text[: 2 * LONGEST_REASON])
    line = " ".join(printable.split())
    return line if len(line) <= LONGEST_REASON else f"{line[:LONGEST_REASON]}..."
