"""The errors with which a meeting of nodes or a run ends, and words about nodes."""

from __future__ import annotations

from collections.abc import Sequence


class NodeLost(RuntimeError):
    """A node is gone; the message names it and the round. The process ends a few seconds later, even if this is caught.

    gloo never releases the thread that waits for the node, so an orderly end is impossible: a few seconds after the
    error was raised, or at the end of the program if that comes first, the process exits with status 1.
    """


class Disagreement(RuntimeError):
    """The nodes were not started with the same model, algorithm or settings; the message has node, fact and values."""


class ConnectionFailed(RuntimeError):
    """The connection to a node closed or timed out.

    Args:
        peer: the node at the other end.
        message: what the transport reported.
        timed_out: whether nothing came for too long; the connection itself may be sound.
    """

    def __init__(self, peer: int, message: str, timed_out: bool = False) -> None:
        super().__init__(message)
        self.peer, self.timed_out = peer, timed_out


def named(nodes: Sequence[int]) -> str:
    """Nodes in words.

    Examples:
        >>> named([2]), named([0, 2])
        ('node 2', 'nodes 0, 2')
    """
    return f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {', '.join(map(str, nodes))}"


def first_line(error: BaseException | None) -> str:
    """The first line of an error's message."""
    return str(error).strip().splitlines()[0].rstrip(".") if error is not None and str(error).strip() else repr(error)


def in_round(round: int) -> str:
    """When something happened, in words.

    Examples:
        >>> in_round(3), in_round(0)
        ('in round 3', 'before the first round')
    """
    return f"in round {round}" if round else "before the first round"
