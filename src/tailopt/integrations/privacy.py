"""Differential privacy of whole clients: a mean of clipped displacements, with noise that the server adds.

    |delta_i|_2 <= C                  each client clips its displacement; the guard excludes by name whose is longer
    delta = (sum of delta_i) / k + N(0, (z C / k)^2)      with k as planned, also when clients fail or are excluded

Replacing one client by another moves the sum by at most 2 C, so noise of standard deviation z C is that of a Gaussian
mechanism with noise multiplier z / 2. The outer step, the ball and the average only see what was released. What a run
folder says about rounds (losses, metrics, who failed) is not private.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from tailopt.algorithms import Algorithm
from tailopt.arguments import check_counts, check_flags, is_number, whole_number
from tailopt.optional import require
from tailopt.rounds.block_norm import norm
from tailopt.rounds.guard import Bound, check_displacement
from tailopt.rounds.policy import RoundPolicy
from tailopt.rounds.round import Contribution, GlobalState


@dataclass(frozen=True)
class Privacy:
    """How a mean is made differentially private.

    Args:
        clip: C, the largest L2 norm of a client's displacement over all its parameters.
        noise: z: the noise that is added to the sum has standard deviation z C in every coordinate.

    Examples:
        >>> Privacy(clip=1.0, noise=0.0).epsilon(delta=1e-5, rounds=10, nodes=100, participants=10)
        inf
    """

    clip: float
    noise: float

    def __post_init__(self) -> None:
        if not is_number(self.clip) or not 0 < self.clip < math.inf:
            raise ValueError(f"Invalid clip: {self.clip!r}; need a norm above 0.")
        if not is_number(self.noise) or not 0 <= self.noise < math.inf:
            raise ValueError(f"Invalid noise: {self.noise!r}; need a multiple of clip, 0 or more.")

    def check(self, model: torch.nn.Module, algorithm: Algorithm, policy: RoundPolicy) -> None:
        """Refuse what the guarantee does not cover, before anything is sent."""
        reasons = {
            "Invalid weights: privacy needs equal ones, which are public": len(set(policy.weights)) > 1,
            f"Invalid mean: {policy.robust_mean}; privacy needs the weighted one, whose sensitivity is known": (
                policy.robust_mean is not None
            ),
            f"Invalid sampling: {policy.sampling!r}; a client that is drawn twice counts twice": (
                policy.sampling != "uniform"
            ),
            "Invalid participation: the accountant knows a fixed number of clients, not a function": callable(
                policy.participation
            ),
            "Invalid guard: it must check that displacements are clipped": not policy.guard,
            "Invalid model: its buffers would be sent without noise. Use layers without them, such as GroupNorm": any(
                True for _ in model.buffers()
            ),
            'Invalid thresholds: "auto" inside would send statistics of gradients without noise. Give numbers': (
                algorithm.hparams("inner").get("u") == "auto"
            ),
            f"Invalid algorithm: {algorithm.name} sends second moments beside the weights, which the clipping of "
            "Flower's clients does not expect": bool(algorithm.send_preconditioner),
        }
        for reason, applies in reasons.items():
            if applies:
                raise ValueError(f"{reason}.")

    def bound(self, steps: int) -> Bound:
        """Return what the guard checks: the norm of the displacement."""
        return Bound("norm", self.clip, 0.0, steps)

    def released(
        self, arrived: Mapping[int, Contribution], planned: int, state: GlobalState
    ) -> dict[int, Contribution]:
        """Return contributions whose mean over those that count is the released one; others are left to the guard.

        planned: the number of participants that were drawn.
        """
        counted = {
            node: c
            for node, c in arrived.items()
            if check_displacement(node, c.delta, c.start, state.names, c.movement_bound, {}) is None
        }
        if not counted:
            return dict(arrived)
        total = [torch.zeros_like(w, dtype=torch.float64) for w in state.weights]
        for c in counted.values():
            # the guard allows for rounding; the sensitivity must not
            scale = min(1.0, self.clip / max(norm(c.delta), 1e-300))
            torch._foreach_add_(total, [d.double() for d in c.delta], alpha=scale)
        mean = []
        for t, w in zip(total, state.weights, strict=True):
            # from the operating system: noise that follows from the seed of the run would hide nothing
            source = torch.Generator().manual_seed(secrets.randbits(63))
            drawn = torch.randn(t.shape, generator=source, dtype=torch.float64).to(t.device)
            mean.append(((t + self.noise * self.clip * drawn) / planned).to(w.dtype))
        released = {node: replace(c, delta=mean, movement_bound=Bound(None)) for node, c in counted.items()}
        return {**arrived, **released}

    def epsilon(
        self, *, delta: float, rounds: int, nodes: int, participants: int | None = None, secret_sampling: bool = True
    ) -> float:
        """Return the epsilon of a run, by Renyi differential privacy (the package dp-accounting).

        Neighbours are two federations in which one client is another one. Sampling amplifies only against somebody who
        does not know who took part: clients hold the seed that decides this.

        Args:
            delta: the probability with which the bound may fail.
            rounds: of the run.
            nodes: how many clients there are.
            participants: of every round, drawn uniformly; None for all.
            secret_sampling: whether who took part is unknown to whom the guarantee is against; otherwise, epsilon is
                that of a client that took part in every round.
        """
        check_counts(rounds=rounds, nodes=nodes)
        check_flags(secret_sampling=secret_sampling)
        if not is_number(delta) or not 0 < delta < 1:
            raise ValueError(f"Invalid delta: {delta!r}; need a probability between 0 and 1, such as 1 / nodes ** 1.1.")
        count = nodes if participants is None else whole_number("participants", participants, low=1, high=nodes)
        if self.noise == 0:
            return math.inf
        sentence = "The accountant needs dp-accounting"
        accounting = require("dp_accounting", sentence, extra="privacy", package="dp-accounting")
        rdp = require("dp_accounting.rdp", sentence, extra="privacy", package="dp-accounting")
        event = accounting.GaussianDpEvent(self.noise / 2)
        if secret_sampling and count < nodes:
            event = accounting.SampledWithoutReplacementDpEvent(nodes, count, event)
        accountant = rdp.RdpAccountant(neighboring_relation=accounting.NeighboringRelation.REPLACE_ONE)
        accountant.compose(event, rounds)
        return float(accountant.get_epsilon(delta))
