"""``deepspeed.comm``: torch.distributed for the script's own communication; nothing of zerofunc goes through it."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.distributed import (
    P2POp,
    ProcessGroup,
    ReduceOp,
    all_gather,
    all_gather_into_tensor,
    all_gather_object,
    all_reduce,
    all_to_all,
    all_to_all_single,
    barrier,
    batch_isend_irecv,
    broadcast,
    broadcast_object_list,
    destroy_process_group,
    gather,
    irecv,
    is_available,
    is_initialized,
    isend,
    monitored_barrier,
    new_group,
    recv,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
    send,
)

from zerofunc.compat.deepspeed.launch import init_distributed

__all__ = [
    "P2POp",
    "ProcessGroup",
    "ReduceOp",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "gather",
    "get_all_ranks_from_group",
    "get_global_rank",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "init_distributed",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
]


def get_rank(group: ProcessGroup | None = None) -> int:
    """This process's number; 0 in a process that was started alone."""
    return dist.get_rank(group) if is_initialized() else 0


def get_world_size(group: ProcessGroup | None = None) -> int:
    """Number of processes; 1 in a process that was started alone."""
    return dist.get_world_size(group) if is_initialized() else 1


def get_local_rank() -> int:
    """This process's number on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> ProcessGroup | None:
    """The group of all processes."""
    return dist.group.WORLD


def get_global_rank(group: ProcessGroup | None = None, group_rank: int = 0) -> int:
    """The number among all processes of the one that is ``group_rank`` in ``group``."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: ProcessGroup | None = None) -> list[int]:
    """The numbers among all processes of those in ``group``."""
    return dist.get_process_group_ranks(group)
