"""How nodes fail: functions that name the nodes of a round, and the shares that failing nodes have on average.

The first three give what `simulate(participation=...)` takes: (round, generator) -> the nodes that take part.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from tailopt.rounds.participants import Chooser
from tailopt.seeds import generator


def independent(nodes: int, away: float) -> Chooser:
    """In every round every node is away with the same probability; if all would be, one random node takes part.

    Examples:
        >>> present = independent(1000, away=0.25)(1, torch.Generator().manual_seed(0))
        >>> 700 < len(list(present)) < 800
        True
    """

    def present(t: int, source: torch.Generator) -> list[int]:
        numbers = torch.rand(nodes, generator=source, dtype=torch.float64)
        nodes_present: list[int] = (numbers >= away).nonzero().flatten().tolist()
        return nodes_present or [int(numbers.argmax())]

    return present


def bursts(nodes: int, away: float, stretch: float, seed: int) -> Chooser:
    """A node that fails stays away for a while: one two-state Markov chain per node, with these means.

        P(back | away) = r = 1 / stretch,    P(away | present) = f = r * away / (1 - away)

    The state is a function of (seed, round) alone. One number u per node and round moves both states at once: u < f
    leads to away and u > 1 - r to present, from either state; otherwise nothing changes. So the last round whose u
    decided gives the state, and the chain has no beginning: it is stationary from the first round on. If all would be
    away, one random node takes part.

    Examples:
        >>> chosen = bursts(4, away=0.5, stretch=10, seed=0)
        >>> anything = torch.Generator()
        >>> chosen(50, anything) == chosen(50, anything), [t for t in range(1, 30) if 3 not in chosen(t, anything)]
        (True, [12, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29])
    """
    back = 1 / stretch
    fail = back * away / (1 - away)
    if not 0 < fail <= 1 - back:
        raise ValueError(
            f"Invalid bursts: away={away}, stretch={stretch}; need 0 < away < 1 and stretch >= 1 / (1 - away). "
            "Shorter absences than chance would give cannot be drawn this way; use independent failures."
        )

    @functools.lru_cache(maxsize=4096)
    def numbers(t: int) -> list[float]:
        drawn: list[float] = torch.rand(nodes, generator=generator(seed, "bursts", t), dtype=torch.float64).tolist()
        return drawn

    def is_present(node: int, t: int) -> bool:
        while fail <= (u := numbers(t)[node]) <= 1 - back:
            t -= 1  # below 1 too: the rounds before the first have their numbers like any other
        return u > 1 - back

    def present(t: int, source: torch.Generator) -> list[int]:
        nodes_present = [node for node in range(nodes) if is_present(node, t)]
        return nodes_present or [int(torch.randint(nodes, (), generator=source))]

    return present


def always(nodes: int, missing: Sequence[int]) -> Chooser:
    """The same nodes are missing in every round."""
    nodes_present = [node for node in range(nodes) if node not in missing]
    return lambda t, source: nodes_present


def expected_shares(weights: Tensor, away: float) -> Tensor:
    """E[s_i] under `independent` failures: the normalised weights of the nodes present, over all sets of nodes.

    Examples:
        >>> expected_shares(torch.tensor([0.8, 0.2], dtype=torch.float64), away=0.5)  # often alone
        tensor([0.5750, 0.4250], dtype=torch.float64)
    """
    n = len(weights)
    shares = torch.full_like(weights, away**n / n)  # nobody is present: one random node takes part
    for present in itertools.product((False, True), repeat=n):
        if any(present):
            left = weights * torch.tensor(present)
            shares += away ** present.count(False) * (1 - away) ** present.count(True) * left / left.sum()
    return shares


def own_clock_shares(weights: Tensor, draws: int) -> Tensor:
    """Shares where nodes are drawn by weight, and learning rates fall by 1/t with the node's own steps.

    A node takes part in a share 1 - (1 - p_i)^draws of the rounds, so its learning rate is larger by the inverse.
    """
    shares = weights / (1 - (1 - weights) ** draws)
    return shares / shares.sum()
