"""Nodes inside training loops of other projects: what Trainer, Accelerate and Lightning have in common there.

    connect()          the nodes meet; to every library that asks afterwards, each process is alone
    NodeCheckpoints    the loop writes its checkpoint on every node, and then the nodes write theirs, which names it

These libraries take the processes of a run for replicas of one model: they wrap it in DDP, deal the data out and let
rank 0 write. Nodes are no replicas, so the variables of torchrun that tell of other processes are taken away. A run
goes on from the nodes' newest checkpoint: it has weights, states, outer state and the round. The loop's own checkpoint
of the same step has what only the loop knows: its schedule, its counters, and its position in the data.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tailopt.distributed import rendezvous
from tailopt.distributed.header import digest64
from tailopt.distributed.interfaces import blocking
from tailopt.distributed.nested_optimizer import NestedOptimizer

# What torchrun sets and libraries read. TORCHELASTIC_RUN_ID stays: the last words of a node ask for it.
OF_PROCESSES = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
)


def connect(timeout: float = 60.0, backend: str = "gloo") -> int:
    """Connect the nodes, as `tailopt.connect`, then let other libraries see this process alone; returns its number.

    Call it first, before TrainingArguments, an Accelerator or a Trainer is built. It removes torchrun's variables
    (RANK, WORLD_SIZE and the like) from the environment of this process. A process group that exists already is kept.

    Args:
        timeout, backend: as for `tailopt.connect`.
    """
    if not dist.is_initialized():
        rendezvous.connect(timeout, backend)
    for name in OF_PROCESSES:
        os.environ.pop(name, None)
    return dist.get_rank()


class NodeCheckpoints:
    """Checkpoints of the nodes, each of which names the checkpoint that the loop wrote at the same step.

    Args:
        optimizer: of this node. Its run does not end by a number of rounds, and writes no checkpoint unasked: the loop
            does both.

    Raises:
        ValueError: `rounds` or `checkpoint_every` of the optimizer are numbers.
    """

    def __init__(self, optimizer: NestedOptimizer) -> None:
        if not isinstance(optimizer, NestedOptimizer):
            raise ValueError(
                f"Invalid optimizer: got {type(optimizer).__name__}; need a tailopt.NestedOptimizer around it."
            )
        if optimizer.rounds is not None:
            raise ValueError(
                f"Invalid rounds: {optimizer.rounds}; need None, since the loop ends the run: leave out rounds, and "
                "give the loop the number of steps. All nodes take part in all rounds then."
            )
        options = optimizer._records.options
        if options.folder is not None and options.checkpoint_every is not None:
            raise ValueError(
                f"Invalid checkpoint_every: {options.checkpoint_every}; need None, so that every checkpoint of the "
                "nodes goes with one of the loop. Build NestedOptimizer(..., checkpoint_every=None)."
            )
        self.optimizer = optimizer
        self.has_run = options.folder is not None
        self._written: int | None = None  # the step of the last one
        self._warned = False

    @property
    def resume_from(self) -> str | None:
        """The checkpoint of the loop, on this node, with which the run goes on; None where the run begins."""
        resumed = self.optimizer.resumed
        if resumed is None:
            return None
        path = str(resumed.extra.get("checkpoint", ""))
        if not path or not Path(path).exists():
            raise FileNotFoundError(
                f"The run goes on from {resumed.path}, which node {dist.get_rank()} wrote together with "
                f"{path or 'no checkpoint of its loop'}, and that is not there. Bring it back, or begin again in "
                "another run folder."
            )
        return path

    def check_step(self, step: int) -> None:
        """Raise where the loop does not go on at the step of the nodes' checkpoint."""
        resumed = self.optimizer.resumed
        of_nodes = 0 if resumed is None else resumed.extra.get("step", 0)
        if step != of_nodes:
            raise ValueError(
                f"The loop goes on after step {step}, and the nodes after step {of_nodes}. Resume the loop from "
                f"{'the beginning' if resumed is None else self.resume_from}, and give the optimizer resume=True "
                "where the run has begun."
            )

    def check_same(self, facts: Mapping[str, Any]) -> None:
        """Raise `Disagreement` on all nodes where their loops differ in facts, by name."""
        if self.optimizer._peers is not None:
            self.optimizer._peers.agree(facts)

    def check_own_folder(self, name: str, folder: str | os.PathLike[str]) -> None:
        """Raise on all nodes where two of them write to one folder; `name` is that of the setting."""
        where = f"{socket.gethostname()}:{os.path.realpath(folder)}"
        digests = blocking(self.optimizer.node.exchange.transport.gather(torch.tensor([digest64(where.encode())])))
        by_node = digests.reshape(-1).tolist()
        same = [node for node, digest in enumerate(by_node) if by_node.count(digest) > 1]
        if same:
            raise ValueError(
                f"Invalid {name}: nodes {', '.join(map(str, same))} write their own checkpoints to one folder, here "
                f"{os.fspath(folder)}; need one for each node. Add the number of the node to it: "
                f'f"{os.path.normpath(folder)}/node-{{node}}", with node = connect().'
            )

    def warn_inside_round(self, what: str, step: int) -> None:
        """Warn once where an evaluation, of that name, is of the weights of this node alone."""
        local_steps = self.optimizer.local_steps
        if step % local_steps and not self._warned:
            self._warned = True
            warnings.warn(
                f"The {what} after step {step} is in the middle of a round: it is that of this node's own weights. For "
                f"those of all nodes let it follow multiples of local_steps={local_steps}.",
                UserWarning,
                stacklevel=3,
            )

    def write(self, checkpoint: str | os.PathLike[str], step: int, extra: Mapping[str, Any] | None = None) -> None:
        """Write the nodes' checkpoint, after the loop has written its own; on all nodes, after the same step."""
        if self.has_run and self._written != step:
            self.optimizer.checkpoint({"checkpoint": os.path.abspath(checkpoint), "step": step, **(extra or {})})
            self._written = step
