"""No DDP across nodes: it averages their gradients in every step, and so makes all of them one.

Trainer, Accelerate and Lightning wrap a model by themselves where there is more than one process, after the optimizer
was built and without a word. So the model is looked at twice: when the optimizer is built, and in the first forward
pass that is trained on, which runs inside DDP if anything has wrapped the model by then. DDP inside one node, over
ranks of which only one is of the nodes' group, is no fault.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle


def refuse_data_parallel(model: nn.Module | None, nodes: dist.ProcessGroup | None) -> None:
    """Raise ValueError where DDP averages the gradients of several nodes, here or in the first forward pass."""
    if model is None:
        return
    look = _FirstForward(frozenset(dist.get_process_group_ranks(nodes)))
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            look.refuse(module)
    look.handle = model.register_forward_pre_hook(look)


class _FirstForward:
    """Looks at the first forward pass with gradients; an object and not a closure, so that the model can be pickled.

    Args:
        nodes: the ranks that are nodes.
    """

    def __init__(self, nodes: frozenset[int]) -> None:
        self._nodes = nodes
        self.handle: RemovableHandle | None = None

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        wrapper = DistributedDataParallel._get_active_ddp_module()
        if wrapper is not None:
            self.refuse(wrapper)
        if self.handle is not None:
            self.handle.remove()

    def refuse(self, wrapper: DistributedDataParallel) -> None:
        """Raise where a wrapper spans several nodes."""
        shared = sorted(self._nodes & set(dist.get_process_group_ranks(wrapper.process_group)))
        if len(shared) > 1:
            raise ValueError(
                f"Invalid model: it is wrapped in DistributedDataParallel over ranks {shared}, which averages the "
                "gradients of these nodes in every step. Leave it unwrapped. Trainer, Accelerate and Lightning do so "
                "after connect() of tailopt.integrations.nodes, called before anything of theirs is built."
            )
