"""Steps that are rounded stochastically: which settings they can have, and where their random bits come from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tailopt.clipping.stochastic_rounding import StochasticRounding
from tailopt.optimizers.groups import Group


def check_rounding(group: Group) -> None:
    """Raise for a seed of stochastic rounding that is none, and for steps that cannot be rounded so."""
    seed = group["stochastic_rounding"]
    if seed is None:
        return
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"Invalid stochastic_rounding: {seed!r}; need None, or a seed: an integer from 0 to 2^63 - 1.")
    for other in ("capturable", "differentiable"):
        if group[other]:
            raise ValueError(
                f"Invalid stochastic_rounding: {seed} with {other}=True; need {other}=False, because the random bits "
                "of a step depend on its number, which the host counts. Or round to the nearest, with None."
            )


def rounding_of(group: Group, params: Sequence[Tensor]) -> StochasticRounding | None:
    """Where the random bits of a group's next step come from; None where all is rounded to the nearest."""
    if group["stochastic_rounding"] is None or not any(p.dtype == torch.bfloat16 for p in params):
        return None
    if torch.compiler.is_compiling():
        raise RuntimeError("A step with stochastic_rounding cannot be compiled. Call step() itself, or set it to None.")
    return StochasticRounding(group["stochastic_rounding"], group.get("roundings", 0))


def count_rounding(groups: Iterable[Group]) -> None:
    """Count a step that was taken, in the groups that round stochastically."""
    for group in groups:
        if group.get("stochastic_rounding") is not None:
            group["roundings"] = group.get("roundings", 0) + 1
