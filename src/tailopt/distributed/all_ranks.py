"""All ranks of all nodes, and how they decide something together: each does its part and hears how it went everywhere.

Whatever could fail on one rank (a full disk, a damaged file) is told to all in a small message before any of them acts
on it, so that all ranks go on, or all end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tailopt.distributed.interfaces import blocking
from tailopt.distributed.transport import Transport

TEXT_BYTES = 1000  # of a message between ranks


class Answer(NamedTuple):
    """How a rank's part went, and what it has to tell: a result, or its error."""

    code: int
    text: str


DONE, FAILED, FATAL = 0, 1, 2  # FAILED: the run can go on without it; FATAL: all ranks must end


@dataclass(frozen=True)
class AllRanks:
    """All ranks of all nodes, by one number each: node * ranks + rank. Where a node is one process, the nodes.

    Args:
        across: reaches the same rank of every node.
        inside: reaches the ranks of this node.
    """

    across: Transport
    inside: Transport | None = None

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks per node."""
        return 1 if self.inside is None else self.inside.nodes

    @property
    def number(self) -> int:
        """The number of this rank among all."""
        return self.across.node * self.ranks_per_node + (0 if self.inside is None else self.inside.node)

    @property
    def count(self) -> int:
        """The number of ranks of all nodes."""
        return self.across.nodes * self.ranks_per_node

    def gather(self, mine: Tensor) -> Tensor:
        """Every rank's small tensor, stacked by number."""
        rows = blocking(self.across.gather(mine))
        return rows if self.inside is None else blocking(self.inside.gather(rows)).transpose(0, 1).flatten(0, 1)

    def name_of(self, number: int) -> str:
        """A rank in words."""
        return f"node {number // self.ranks_per_node}" + (
            f", rank {number % self.ranks_per_node}" if self.ranks_per_node > 1 else ""
        )

    def failures(self, answers: Sequence[Answer]) -> str | None:
        """Which ranks failed, in words; None where none did."""
        texts = [f"{self.name_of(number)}: {answer.text}" for number, answer in enumerate(answers) if answer.code]
        return "; ".join(texts) or None

    def all_ranks_do(self, work: Callable[[], Any], *harmless: type[Exception]) -> list[Answer]:
        """Do something on every rank and hear how it went everywhere.

        An error that is not one of `harmless` ends the run: it is raised here where it is this rank's own, and as a
        RuntimeError that names the rank on all others.
        """
        error: Exception | None = None
        try:
            mine = Answer(DONE, work() or "")
        except Exception as caught:
            error = caught
            mine = Answer(FAILED if isinstance(error, harmless) else FATAL, f"{error}")
        answers = [_decoded(row) for row in self.gather(_encoded(mine)).tolist()]
        if error is not None and mine.code == FATAL:
            raise error
        for number, answer in enumerate(answers):
            if answer.code == FATAL:
                raise RuntimeError(f"{self.name_of(number).capitalize()}: {answer.text}")
        return answers


def _encoded(answer: Answer) -> Tensor:
    """As bytes: code, length in two bytes, text. All messages have the same length: gloo ends a process otherwise."""
    data = answer.text.encode()[:TEXT_BYTES]
    return torch.tensor([answer.code, len(data) % 256, len(data) // 256, *data.ljust(TEXT_BYTES)], dtype=torch.uint8)


def _decoded(row: Sequence[int]) -> Answer:
    return Answer(row[0], bytes(row[3 : 3 + row[1] + 256 * row[2]]).decode(errors="ignore"))
