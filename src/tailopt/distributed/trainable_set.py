"""Which parameters train: the same on all nodes, and all of them synchronised, in every round.

A parameter may be frozen or added after the nodes have met. A digest of what trains is in every header, so that a
difference between nodes ends the round with an error that names the parameter.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tailopt.distributed.agreement import shape
from tailopt.distributed.errors import Disagreement
from tailopt.distributed.header import PROTOCOL, digest64
from tailopt.distributed.mesh import local_tensor
from tailopt.distributed.threads import Peers
from tailopt.engines.model_state import Buffers, as_real

UNSYNCHRONISED = "which is not synchronised"


def named_parameters(optimizer: Optimizer, model: torch.nn.Module | None) -> tuple[list[str], list[Tensor]]:
    """Return names and parameters of an optimizer that train; without a model they are called 0, 1, ..."""
    if any(isinstance(group.get("u"), str) for group in optimizer.param_groups):
        raise ValueError(
            "Invalid optimizer: u='auto' is chosen from the gradients of one process, and nodes would choose "
            "different thresholds. Build it with NestedOptimizer.from_algorithm(model, tailopt.algorithm('avg-biclip', "
            "ilr=..., i_u='auto', i_d='auto'), ...), or give u and d as numbers."
        )
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if model is None:
        return [str(i) for i in range(len(params))], params
    names = {id(p): name for name, p in model.named_parameters()}
    missing = [i for i, p in enumerate(params) if id(p) not in names]
    if missing:
        raise ValueError(f"Invalid model: parameter {missing[0]} of the optimizer is not one of the model's.")
    return [names[id(p)] for p in params], params


def described_sizes(names: Sequence[str], params: Sequence[Tensor], buffers: Buffers | None) -> dict[str, Any]:
    """Return what must fit before a byte is exchanged: the protocol, and the sizes of everything."""
    return {
        "protocol": PROTOCOL,
        "parameters": [f"{n}: {shape(as_real(local_tensor(p)))}" for n, p in zip(names, params, strict=True)],
        "buffers": [f"{name}: {shape(b)}" for name, b in buffers.tensors().items()] if buffers else [],
    }


class TrainableSet:
    """The parameters of an optimizer that train (requires_grad), looked at again in every round.

    Args:
        optimizer: the inner one.
        names, params: of the parameters that are exchanged.
    """

    def __init__(self, optimizer: Optimizer, names: Sequence[str], params: Sequence[Tensor]) -> None:
        self._optimizer = optimizer
        self._names = {id(p): name for name, p in zip(names, params, strict=True)}
        self._flags: Any = None
        self._digest = 0
        self.digest()
        self._flags_at_start = self._flags

    def digest(self) -> int:
        """Return a digest of which parameters train now."""
        flags = tuple((id(p), p.requires_grad) for group in self._optimizer.param_groups for p in group["params"])
        if flags != self._flags:
            self._flags, self._digest = flags, digest64(json.dumps(self.described()).encode())
        return self._digest

    def described(self) -> list[str]:
        """Return the parameters of every group that train, by name; one that is not exchanged is called so."""
        return [
            f"group {k}: {self._names.get(id(p), f'{shape(local_tensor(p))}, {UNSYNCHRONISED}')}"
            for k, group in enumerate(self._optimizer.param_groups)
            for p in group["params"]
            if p.requires_grad
        ]

    def check_all_parameters_exchanged(self, t: int) -> None:
        """Raise if a parameter that trains was added or unfrozen after construction: it would never be exchanged.

        Where all nodes added the same one, their digests agree, so only this check finds it.
        """
        if self._flags == self._flags_at_start:
            return
        added = [text for text in self.described() if text.endswith(UNSYNCHRONISED)]
        if added:
            raise ValueError(
                f"Round {t}: {added[0]}: it was added or unfrozen after the NestedOptimizer was built. Build it again "
                "with all parameters that train."
            )

    def disagreement(self, t: int, peers: Peers | None) -> RuntimeError:
        """Return the error for all nodes when they do not train the same parameters any more."""
        if peers is not None:
            try:
                peers.agree({"parameters that train": self.described()})
            except Disagreement as error:
                return Disagreement(f"Round {t}: {error}")
        return Disagreement(f"Round {t}: the nodes do not train the same parameters any more. Start all of them again.")
