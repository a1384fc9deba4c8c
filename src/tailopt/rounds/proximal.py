"""FedProx's proximal term (Li et al., Federated Optimization in Heterogeneous Networks, arXiv 1812.06127).

Every node minimises its loss plus mu/2 |x - start|^2, where start are the global weights of the round. So a local step
uses g + mu (x - start), formed after accumulation and unscaling, and before anything is clipped.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tailopt.arguments import is_number
from tailopt.clipping.operators import compute_dtype


def proximal_gradient(g: Tensor, x: Tensor, start: Tensor, mu: float) -> Tensor:
    """Return g + mu (x - start) as a new tensor: formed in the compute type, and rounded once to the type of g.

    A sparse gradient becomes dense: the term is not 0 where it has no entry.

    Args:
        start: may broadcast; of a complex parameter as pairs of reals.

    Examples:
        >>> proximal_gradient(torch.tensor([1.0, 1.0]), torch.tensor([3.0, 5.0]), torch.tensor([3.0, 3.0]), mu=0.5)
        tensor([1., 2.])
    """
    if g.is_complex():
        pairs = torch.view_as_real(g.resolve_conj()), torch.view_as_real(x.detach().resolve_conj())
        return torch.view_as_complex(proximal_gradient(*pairs, start, mu))
    wide = compute_dtype(x.dtype)
    term = x.to(wide) - start.to(wide)
    # two roundings, for the same bits everywhere: `add` with alpha is a fused multiply-add on some processors
    term.mul_(mu).add_(g.to_dense() if g.is_sparse else g)
    return term.to(g.dtype)


def checked_proximal(mu: Any) -> float:
    """Return the factor of the proximal term as a float, or raise ValueError."""
    if not is_number(mu) or not 0 <= mu < math.inf:
        raise ValueError(
            f"Invalid proximal: {mu!r}; need a finite number of 0 or more, the factor of x - start in every local "
            "step. Give 0 for no proximal term."
        )
    return float(mu)
