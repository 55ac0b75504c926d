"""Process groups: joining the others, and groups of our own, whatever groups the program has made before."""

from __future__ import annotations

import datetime
import functools
import hashlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store  # which torch.distributed does not export to type checkers
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from zerofunc.ranks.agreement import Channel

DEFAULT_TIMEOUT_S = 600.0


def joined_ranks() -> tuple[int, int] | None:
    """Local. This process's rank and the number of ranks; None where torch.distributed is not started."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None


def join_processes(backend: str | None = None, timeout_s: float | None = None, init_method: str | None = None) -> int:
    """Collective. Start torch.distributed where it is not started; the number of ranks. Without RANK, one rank.

    Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as :func:`zerofunc.ranks.launch.init_distributed` leaves them.
    A single rank needs no port.

    Args:
        backend: By default the accelerator's own (NCCL), or gloo where there is none.
        timeout_s: Seconds after which a rank that waits for others raises; torch.distributed's default if None.
        init_method: A URL where the ranks meet, instead of MASTER_ADDR and MASTER_PORT.

    Raises:
        RuntimeError: If the ranks do not meet.
    """
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            return 1
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        meeting = {"store": HashStore()} if size == 1 and init_method is None else {"init_method": init_method}
        try:
            dist.init_process_group(
                backend or ("gloo" if accelerator is None else dist.get_default_backend_for_device(accelerator)),
                rank=rank,
                world_size=size,
                timeout=None if timeout_s is None else datetime.timedelta(seconds=timeout_s),
                **meeting,
            )
        except RuntimeError as error:
            place = init_method or f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise RuntimeError(
                f"rank {rank} of {size} did not meet the others at {place}: {str(error).splitlines()[0][:200]}. Start "
                f"all {size} processes (under SLURM by srun), and let every host reach that address."
            ) from error
        if timeout_s is not None:
            _timeouts_of(world_group())["default"] = timeout_s
    return dist.get_world_size()


def world_group() -> dist.ProcessGroup:
    """Local. The group of all ranks."""
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup)
    return world


def default_timeout_s() -> float:
    """Local. Seconds that a rank waits where nothing else is said: those of ``init_distributed``, or 600."""
    return _timeouts_of(world_group()).get("default", DEFAULT_TIMEOUT_S) if dist.is_initialized() else DEFAULT_TIMEOUT_S


@functools.lru_cache(maxsize=1)
def _timeouts_of(world: dist.ProcessGroup) -> dict[str, float]:
    return {}


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Block until the result may be used."""


@dataclass(frozen=True)
class Groups:
    """Three groups over the same ranks, shared by all modules that are sharded over them.

    Attributes:
        gather: For gathers and broadcasts of pages.
        reduce: For reductions of pages.
        channel: Where ranks agree on what comes next.
        forsaken: Gathers under way whose owner is gone. Their memory must stay until they have ended: gloo delivers no
            further message to a rank that has given up the memory of one, and NCCL would write into what others use.
        given_up: Likewise reductions, which other ranks may never have started, so that nobody waits for them.
    """

    gather: dist.ProcessGroup
    reduce: dist.ProcessGroup
    channel: Channel
    forsaken: list[Work] = field(default_factory=list)
    given_up: list[Work] = field(default_factory=list)


@functools.lru_cache(maxsize=64)
def groups_over(world: dist.ProcessGroup, ranks: tuple[int, ...], backend: str, timeout_s: float) -> Groups:
    """Collective over ``ranks`` at the first call; other ranks need not call it."""
    gather, reduce = (_new_group(world, ranks, backend, timeout_s, kind) for kind in ("gather", "reduce"))
    control = _new_group(world, ranks, "gloo", timeout_s, "control")
    channel = Channel(control, ranks, timeout_s, default_store(world))
    return Groups(gather, reduce, channel)


@functools.lru_cache(maxsize=64)
def background_group_over(world: dist.ProcessGroup, ranks: tuple[int, ...], timeout_s: float) -> dist.ProcessGroup:
    """Collective over ``ranks`` at the first call. A gloo group for one other thread."""
    return _new_group(world, ranks, "gloo", timeout_s, "background")


def default_store(world: dist.ProcessGroup) -> Store:
    """Local. The key-value store that the ranks met at."""
    store: Store = distributed_c10d._world.pg_map[world][1]
    return store


def _new_group(
    world: dist.ProcessGroup, ranks: tuple[int, ...], backend: str, timeout_s: float, kind: str
) -> dist.ProcessGroup:
    """Collective over ``ranks``. A group with a name that these ranks alone decide.

    ``torch.distributed.new_group`` names a group by how many groups this process is in, which differs between ranks as
    soon as the program has made a group of some of them.
    """
    members = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    name = distributed_c10d.GroupName(f"zerofunc/{kind}/{members}/{next(_numbers(world, ranks))}")
    made, _ = distributed_c10d._new_process_group_helper(
        len(ranks), ranks.index(dist.get_rank()), list(ranks), dist.Backend(backend), default_store(world), name,
        timeout=datetime.timedelta(seconds=timeout_s), device_id=world.bound_device_id, group_desc=f"zerofunc {kind}",
    )  # fmt: skip
    distributed_c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    assert isinstance(made, dist.ProcessGroup)
    return made


@functools.lru_cache(maxsize=256)
def _numbers(world: dist.ProcessGroup, ranks: tuple[int, ...]) -> Iterator[int]:
    return itertools.count()


def ranks_along(mesh: DeviceMesh, dim: int | None) -> tuple[int, ...]:
    """Local. The ranks on this process's line along one axis of a mesh, or all ranks of the mesh, in its order.

    Raises:
        ValueError: If this process is not part of the mesh.
    """
    place = mesh.get_coordinate()
    if place is None:
        raise ValueError(f"rank {dist.get_rank()} is not part of the mesh {mesh.mesh.tolist()}; only its ranks shard")
    line = mesh.mesh if dim is None else mesh.mesh[tuple(slice(None) if d == dim else p for d, p in enumerate(place))]
    return tuple(line.flatten().tolist())
