"""Which processes are nodes, and which are ranks of one node.

mesh["node"]     one dimension of a DeviceMesh, or a process group: its members are the nodes
FSDP2 inside     the parameters are sharded over another dimension: its members are the ranks of one node
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tailopt.clipping.dtensor import is_dtensor, positions_by_process_groups
from tailopt.distributed.data_parallel import refuse_data_parallel


def local_tensor(p: Tensor) -> Tensor:
    """Return this rank's shard of a parameter, or all of one that is not sharded; it shares the memory."""
    return (p.to_local() if is_dtensor(p) else p).detach()


def require_process_group() -> None:
    """Raise where torch.distributed was not initialised."""
    if not dist.is_initialized():
        raise RuntimeError(
            "There are no other nodes: call torch.distributed.init_process_group() first, under torchrun."
        )


def node_group(mesh: DeviceMesh | dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the process group of the nodes; None stands for all processes."""
    if not isinstance(mesh, DeviceMesh):
        return mesh
    if mesh.ndim != 1:
        names = f" ({', '.join(mesh.mesh_dim_names)})" if mesh.mesh_dim_names else ""
        raise ValueError(
            f"Invalid mesh: it has {mesh.ndim} dimensions{names}; need one, that across the nodes. "
            'Give that one, such as mesh=mesh["node"].'
        )
    return mesh.get_group()


def check_nodes(nodes: dist.ProcessGroup | None, params: Sequence[Tensor], model: nn.Module | None) -> None:
    """Raise where the parameters are sharded over nodes, or DDP makes several nodes one."""
    rank_group(nodes, params)
    refuse_data_parallel(model, nodes)


def rank_group(nodes: dist.ProcessGroup | None, params: Sequence[Tensor]) -> dist.ProcessGroup | None:
    """Return the process group of this node's ranks, where its parameters are sharded over several."""
    sharded_over = {groups for groups in positions_by_process_groups(params) if groups}
    if not sharded_over:
        return None
    if len(sharded_over) > 1 or len(next(iter(sharded_over))) > 1:
        raise ValueError(
            "Invalid parameters: they are sharded over several process groups of a node; need one. "
            "Shard all of them over one dimension of the mesh, and replicate over the others."
        )
    ((group,),) = sharded_over
    assert isinstance(group, dist.ProcessGroup)
    inside, across = (set(dist.get_process_group_ranks(g)) for g in (group, nodes))
    if len(inside & across) > 1:
        raise ValueError(
            f"Invalid mesh: ranks {sorted(inside & across)} hold shards of one node, and cannot be nodes themselves. "
            'Give the dimension across the nodes, such as mesh=mesh["node"].'
        )
    return group
