"""The states that a client's inner optimizer had after some rounds, as bytes: in Flower's context, or in a folder.

A server that is stopped goes on from its last checkpoint, and asks for rounds again that the client has taken already.
So a client keeps its state after every round since that checkpoint, and the last one before it. The server knows which
of them a node goes on from (`last_state_rounds`): after a round in which the guard excluded the node, the one before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tailopt.optional import require
from tailopt.records import disk
from tailopt.records.pytree import pack, unpack
from tailopt.rounds.drops import DROPPED
from tailopt.rules.rule import ParamState

_LAYOUT = "layout"


class StateFolder(MutableMapping[str, bytes]):
    """States by round, as files of one node of one run, which outlive its processes.

    Examples:
        >>> import tempfile
        >>> kept = StateFolder(tempfile.mkdtemp(), node=3)
        >>> kept["12"] = b"state"
        >>> list(kept), kept["12"], sorted(path.name for path in kept.folder.iterdir())
        (['12'], b'state', ['node-3-round-12.safetensors'])
    """

    def __init__(self, folder: str | os.PathLike[str], node: int) -> None:
        self.folder, self._prefix = Path(folder), f"node-{node}-round-"
        self.folder.mkdir(parents=True, exist_ok=True)

    def __getitem__(self, round: str) -> bytes:
        try:
            return self._path(round).read_bytes()
        except FileNotFoundError:
            raise KeyError(round) from None

    def __setitem__(self, round: str, state: bytes) -> None:
        disk.replace(self._path(round), state)

    def __delitem__(self, round: str) -> None:
        self._path(round).unlink()

    def __iter__(self) -> Iterator[str]:
        found = self.folder.glob(f"{self._prefix}*.safetensors")
        return iter([path.stem.removeprefix(self._prefix) for path in found])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def _path(self, round: str) -> Path:
        return self.folder / f"{self._prefix}{int(round)}.safetensors"


def state_after(kept: MutableMapping[str, bytes], t: int) -> tuple[list[ParamState] | None, int]:
    """Return the newest state from round t or earlier, and its round; None and 0 where there is none."""
    last = max((int(round) for round in kept if int(round) <= t), default=0)
    return (_from_bytes(kept[str(last)]) if last else None), last


def keep_state(kept: MutableMapping[str, bytes], t: int, states: Sequence[ParamState], checkpoint: int) -> None:
    """Keep the state after round t, and forget those that no server can ask for.

    checkpoint: the last round that the server has saved.
    """
    oldest = max((int(round) for round in kept if int(round) <= checkpoint), default=0)
    for round in [round for round in kept if not oldest <= int(round) < t]:
        del kept[round]
    kept[str(t)] = _as_bytes(states)


def last_state_rounds(rows: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """Return, for every node, the round whose state it goes on from, by the rows of a history.

    Examples:
        >>> last_state_rounds([
        ...     {"round": 1, "participants": [0, 1], "excluded": []},
        ...     {"round": 2, "participants": [0, 1], "excluded": [{"node": 1, "reason": "not finite"}]},
        ... ])
        {0: 2, 1: 1}
    """
    last: dict[int, int] = {}
    for row in rows:
        refused = {e["node"] for e in row["excluded"] if e["reason"] != DROPPED}
        last.update({node: row["round"] for node in row["participants"] if node not in refused})
    return last


def _as_bytes(states: Sequence[ParamState]) -> bytes:
    tensors, packed = pack(list(states), "inner")
    layout = torch.frombuffer(bytearray(json.dumps(packed).encode()), dtype=torch.uint8)
    stored = {**{name: tensor.contiguous() for name, tensor in tensors.items()}, _LAYOUT: layout}
    return bytes(_safetensors().save(stored))


def _from_bytes(data: bytes) -> list[ParamState]:
    tensors = _safetensors().load(data)
    layout = json.loads(bytes(tensors.pop(_LAYOUT).tolist()))
    states: list[ParamState] = unpack(tensors, layout)
    return states


def _safetensors() -> Any:
    return require("safetensors.torch", "Clients that keep their inner state need safetensors", extra="flower")
