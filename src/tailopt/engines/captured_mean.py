"""The mean displacement of many nodes as a captured program.

One pass over the nodes' weights, where plain operations are thousands of launches and five passes. It is the mean of
all nodes. Where it is not finite, some of them must be left out: the caller looks for them and takes the mean of the
others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tailopt.engines.captured_program import CapturedProgram
from tailopt.engines.captured_steps import CapturedPrograms, Compiled


def mean_displacements(
    programs: CapturedPrograms,
    weights: Sequence[Tensor],
    start: Sequence[Tensor],
    buffers: Sequence[Tensor],
    shares: Tensor,
) -> tuple[Tensor, list[Tensor]] | None:
    """Return whether everything is finite, as a tensor, and the means; None where torch refuses the program.

    Args:
        programs: where it is kept.
        weights: of the nodes, real: [replicas * nodes, configurations, *shape].
        start: where they began: [replicas, configurations, *shape], in the compute type.
        buffers: those of floating-point types: [replicas * nodes, configurations, ...].
        shares: [replicas, nodes], in float64.

    The means lie in memory of the graph: they are gone when the next ones are computed.
    """
    if "mean" in programs.refused:
        return None
    tensors = [*weights, *start, *buffers]
    key = "mean", tuple((t.shape, t.dtype) for t in tensors), shares.shape
    if key not in programs.compiled:
        if programs.are_enough("mean"):
            return None
        n = len(weights)
        programs.compiled[key] = Compiled(
            CapturedProgram(lambda flat: _means(flat[:n], flat[n : 2 * n], flat[2 * n : -1], flat[-1])), []
        )
    found = programs.run(key, [*weights, *start], [*buffers, shares])
    return None if found is None else (found[0], found[1:])


def _means(
    weights: Sequence[Tensor], start: Sequence[Tensor], buffers: Sequence[Tensor], shares: Tensor
) -> list[Tensor]:
    """Return whether all is finite, and the mean displacement of every parameter.

    An infinite or missing number in a displacement is one in the mean too, so that the means tell.

    Examples:
        >>> moved, x = torch.tensor([[3.0], [5.0]]), torch.tensor([[1.0]])
        >>> _means([moved], [x], [], torch.tensor([[0.5, 0.5]]))
        [tensor(True), tensor([[3.]])]
    """
    means = []
    for w, x in zip(weights, start, strict=True):
        own = w.unflatten(0, (len(x), -1))
        at = x[:, None]
        delta = own - at if w.dtype == x.dtype else own.to(x.dtype) - at.to(w.dtype).to(x.dtype)
        of_nodes = shares.to(x.dtype).reshape(shares.shape + (1,) * (delta.dim() - 2))
        means.append((delta * of_nodes).sum(1))
    finite = [values.isfinite().all() for values in (*means, *buffers)]
    return [torch.stack(finite).all(), *means]
