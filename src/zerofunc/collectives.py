"""The only file that communicates: page collectives over one mesh axis, and the check that ranks run the same program.

An :class:`Axis` is one axis of the device mesh with three process groups over the same ranks: one for gathers, one
for reductions, and a gloo group for control messages. Before each gather, and once per backward, ranks exchange a
small header on the control group. Ranks that have diverged see different headers there and raise
:class:`DivergenceError` with every rank's own words, instead of mixing each other's data or waiting forever.
"""

from __future__ import annotations

import datetime
import functools
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore  # torch.distributed's, which it does not export to type checkers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils import _pytree as pytree

from zerofunc.buffers import BufferPool

DEFAULT_TIMEOUT_S = 600.0


class DivergenceError(RuntimeError):
    """Ranks ran different programs, or one of them is gone: the message says what each waited for."""


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Block until the result may be used."""


@dataclass(frozen=True)
class Done:
    """A collective that needed no communication."""

    def wait(self) -> None:
        """Return at once."""


@dataclass(frozen=True)
class Pending:
    """A collective under way on a process group; failures are raised as :class:`DivergenceError`."""

    works: Sequence[Any]
    axis: Axis
    label: str
    finish: Callable[[], object] | None = None

    def wait(self) -> None:
        """Block until the result may be used."""
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise self.axis.lost(self.label, error) from error
        if self.finish is not None:
            self.finish()


@dataclass
class Axis:
    """One mesh axis: the ranks that a page is split over, or replicated over.

    Attributes:
        size: Number of ranks on the axis.
        rank: This process's place on it.
        moved_bytes: Bytes that this rank has sent for parameters and gradients, by the ring algorithms' count.
    """

    size: int
    rank: int
    gather_group: dist.ProcessGroup | None = None
    reduce_group: dist.ProcessGroup | None = None
    control_group: dist.ProcessGroup | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S
    moved_bytes: int = 0
    _control: dict[str, torch.Tensor] = field(default_factory=dict)
    _pieces: BufferPool = field(default_factory=BufferPool)
    _tag: int = 0

    def __deepcopy__(self, memo: dict[int, object]) -> Axis:
        """The same axis: process groups are not copied."""
        return self

    @property
    def buffer_bytes(self) -> int:
        """Bytes allocated for the pieces of a reduce-scatter."""
        return self._pieces.nbytes

    def free_buffers(self) -> None:
        """Free the idle ones of those."""
        self._pieces.clear()

    # -- agreement ----------------------------------------------------------------------------------------------

    def agree(self, label: str) -> None:
        """Collective. Check that every rank is about to do what ``label`` says.

        Raises:
            DivergenceError: On every rank that still runs, with each rank's label, when they differ or when a rank
                does not arrive within the time-out.
        """
        if self.size == 1:
            return
        if not self._control:
            self._control = {
                "mine": torch.zeros(1, dtype=torch.int64),
                "all": torch.zeros(self.size, dtype=torch.int64),
            }
        mine, everyone = self._control["mine"], self._control["all"]
        mine[0] = zlib.crc32(label.encode())
        try:
            _all_gather(everyone, mine, group=self.control_group, async_op=False)
        except RuntimeError as error:
            raise self.lost(label, error) from error
        if len(set(everyone.tolist())) > 1:
            raise DivergenceError(
                "ranks run different programs. " + "; ".join(self._labels(label)) + ". Every rank must call the "
                "same parts of a sharded model in the same order: run the branch on all ranks, keep its parameters on "
                "one page (unsplit) or gathered (zerofunc.gathered), and loop over zerofunc.join(engine, loader) where "
                "ranks have different numbers of batches."
            )

    def lost(self, label: str, error: Exception) -> DivergenceError:
        """The error to raise when a rank did not take part in ``label``."""
        return DivergenceError(
            f"rank {self.rank} of {self.size} waited at {label}, and another rank did not come within "
            f"{self.timeout_s:g} s or has ended ({str(error).splitlines()[0][:200]}). If it ran out of batches, loop "
            "over zerofunc.join(engine, loader); if it took another branch, run that inside zerofunc.gathered(module)."
        )

    def _labels(self, label: str) -> list[str]:
        labels: list[Any] = [None] * self.size
        dist.all_gather_object(labels, label, group=self.control_group)
        return [f"rank {rank}: {text}" for rank, text in enumerate(labels)]

    def any(self, flags: torch.Tensor) -> torch.Tensor:
        """Collective. Elementwise maximum over ranks of a small uint8 CPU tensor, in place."""
        if self.size > 1:
            try:
                dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.control_group)
            except RuntimeError as error:
                raise self.lost("exchange of flags", error) from error
        return flags

    # -- pages ----------------------------------------------------------------------------------------------------

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, label: str) -> Work:
        """Collective. Start gathering every rank's ``shard`` [n] into ``full`` [size * n], ranks agreeing first."""
        self.agree(label)
        if self.size == 1:
            if full.data_ptr() != shard.data_ptr():
                full.copy_(shard)
            return Done()
        self.moved_bytes += shard.nbytes * (self.size - 1)
        if dist.get_backend(self.gather_group) == "gloo":
            pieces = full.view(self.size, -1)
            if pieces[self.rank].data_ptr() != shard.data_ptr():
                pieces[self.rank].copy_(shard)
            return Pending(self._exchange([shard] * self.size, list(pieces), self.gather_group), self, label)
        return Pending([_all_gather(full, shard, group=self.gather_group, async_op=True)], self, label)

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, label: str) -> Work:
        """Collective. Start summing ``full`` [size * n] over ranks into this rank's ``shard`` [n].

        Reductions are issued in an order that does not depend on the program (see reduction.py), so ranks need not
        agree before each of them.
        """
        if self.size == 1:
            shard.copy_(full)
            return Done()
        self.moved_bytes += full.nbytes * (self.size - 1) // self.size
        if dist.get_backend(self.reduce_group) != "gloo":
            return Pending([_reduce_scatter(shard, full, group=self.reduce_group, async_op=True)], self, label)
        mine = full.view(self.size, -1)
        others = self._pieces.take(full.numel() - shard.numel(), full.dtype, full.device).view(self.size - 1, -1)
        pieces = [others[peer - (peer > self.rank)] if peer != self.rank else shard for peer in range(self.size)]
        works = self._exchange(list(mine), pieces, self.reduce_group)

        def add() -> None:
            torch.sum(others, 0, out=shard).add_(mine[self.rank])

        return Pending(works, self, label, add)

    def _exchange(
        self, sent: list[torch.Tensor], received: list[torch.Tensor], group: dist.ProcessGroup | None
    ) -> list[Any]:
        """Collective. Start sending ``sent[peer]`` to every other rank of the axis, and receiving from each.

        gloo's own all-gather takes twice the time of this, and its reduce-scatter three times.
        """
        self._tag = (self._tag + 1) % (1 << 20)
        works = []
        for offset in range(1, self.size):
            to, source = (self.rank + offset) % self.size, (self.rank - offset) % self.size
            if sent[to].numel():
                works.append(dist.isend(sent[to], group=group, group_dst=to, tag=self._tag))
            if received[source].numel():
                works.append(dist.irecv(received[source], group=group, group_src=source, tag=self._tag))
        return works

    def all_to_all(self, received: list[torch.Tensor], sent: list[torch.Tensor], label: str) -> Work:
        """Collective. Start sending ``sent[rank]`` to each rank, and receiving ``received[rank]``.

        Pieces are 1-D, of any lengths; what one rank sends is as long as what the other expects, which ranks have
        agreed on before.
        """
        self.moved_bytes += sum(piece.nbytes for rank, piece in enumerate(sent) if rank != self.rank)
        if self.size > 1 and dist.get_backend(self.gather_group) != "gloo":
            return Pending([dist.all_to_all(received, sent, group=self.gather_group, async_op=True)], self, label)
        received[self.rank].copy_(sent[self.rank])
        return Pending(self._exchange(sent, received, self.gather_group), self, label)

    def broadcast_object(self, value: Any, label: str, source: int) -> Any:
        """Collective. What the axis's rank ``source`` gives, tensors on the CPU; ranks agree first. Not counted."""
        self.agree(label)
        if self.size == 1:
            return value
        values = [pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, value)]
        try:
            dist.broadcast_object_list(values, group=self.control_group, group_src=source)
        except RuntimeError as error:
            raise self.lost(label, error) from error
        return values[0]

    def gather_objects(self, value: Any, label: str) -> list[Any]:
        """Collective. What each rank of the axis gives, ranks agreeing first; small things, not counted."""
        self.agree(label)
        values = [value] * self.size
        if self.size > 1:
            try:
                dist.all_gather_object(values, value, group=self.control_group)
            except RuntimeError as error:
                raise self.lost(label, error) from error
        return values

    def all_reduce(self, tensor: torch.Tensor, label: str) -> Work:
        """Collective. Start summing ``tensor`` over ranks in place."""
        if self.size == 1:
            return Done()
        self.moved_bytes += 2 * tensor.nbytes * (self.size - 1) // self.size
        return Pending([dist.all_reduce(tensor, group=self.reduce_group, async_op=True)], self, label)

    def sum(self, value: torch.Tensor, label: str) -> torch.Tensor:
        """Collective. Sum of a small tensor over ranks, in place; not counted as moved."""
        if self.size > 1:
            group = self.control_group if value.device.type == "cpu" else self.reduce_group
            Pending([dist.all_reduce(value, group=group, async_op=True)], self, label).wait()
        return value

    def broadcast(self, tensor: torch.Tensor, label: str, source: int = 0) -> None:
        """Collective. Replace ``tensor`` by the one of the axis's rank ``source``, ranks agreeing first."""
        self.agree(label)
        if self.size == 1:
            return
        assert self.gather_group is not None
        try:
            dist.broadcast(tensor, group=self.gather_group, group_src=source)
        except RuntimeError as error:
            raise self.lost(label, error) from error


def _all_gather(full: torch.Tensor, shard: torch.Tensor, *, group: dist.ProcessGroup | None, async_op: bool) -> Any:
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    return gather(full, shard, group=group, async_op=async_op)


def _reduce_scatter(shard: torch.Tensor, full: torch.Tensor, *, group: dist.ProcessGroup | None, async_op: bool) -> Any:
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    return scatter(shard, full, group=group, async_op=async_op)


def joined_ranks() -> tuple[int, int] | None:
    """Local. This process's rank and the number of ranks; None where torch.distributed is not started."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None


def join_processes(backend: str | None = None, timeout_s: float | None = None, init_method: str | None = None) -> int:
    """Collective. Start torch.distributed where it is not started; the number of ranks. Without RANK, one rank.

    Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as :func:`zerofunc.launch.init_distributed` leaves them. A
    single rank needs no port.

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
    return dist.get_world_size()


# -- axes of a mesh ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axes:
    """The two axes of data parallelism: pages are split over ``shard`` and copied over ``replicate``."""

    shard: Axis
    replicate: Axis

    @property
    def num_ranks(self) -> int:
        """Number of ranks that gradients are averaged over."""
        return self.shard.size * self.replicate.size

    @property
    def rank(self) -> int:
        """This process's place among all ranks."""
        return self.replicate.rank * self.shard.size + self.shard.rank

    @property
    def moved_bytes(self) -> int:
        """Bytes sent by this rank for parameters and gradients."""
        return self.shard.moved_bytes + self.replicate.moved_bytes

    def agree(self, label: str) -> None:
        """Collective. :meth:`Axis.agree` over all ranks of both axes."""
        self.shard.agree(label)
        self.replicate.agree(label)

    def any(self, flags: torch.Tensor) -> torch.Tensor:
        """Collective. :meth:`Axis.any` over all ranks of both axes."""
        return self.replicate.any(self.shard.any(flags))

    def sum(self, value: torch.Tensor, label: str) -> torch.Tensor:
        """Collective. :meth:`Axis.sum` over all ranks of both axes."""
        return self.replicate.sum(self.shard.sum(value, label), label)

    def gather_objects(self, value: Any, label: str) -> list[Any]:
        """Collective. What each rank gives, in the ranks' order."""
        rows = self.replicate.gather_objects(self.shard.gather_objects(value, label), label)
        return [one for row in rows for one in row]

    def background_group(self) -> dist.ProcessGroup | None:
        """Collective at its first call. A gloo group over all ranks, for one other thread; None for a single rank."""
        if self.num_ranks == 1:
            return None
        ranks = tuple(self.gather_objects(dist.get_rank(), "a group for another thread"))
        timeout_s = max(axis.timeout_s for axis in (self.shard, self.replicate) if axis.size > 1)
        return _background_group(_world(), ranks, timeout_s)

    def broadcast(self, tensor: torch.Tensor, label: str, source: int = 0) -> None:
        """Collective. Replace ``tensor`` by the one of the mesh's rank ``source``."""
        self.shard.broadcast(tensor, label, source % self.shard.size)
        self.replicate.broadcast(tensor, label, source // self.shard.size)


def axes_of(mesh: DeviceMesh | None, *, replicate_all: bool, timeout_s: float) -> Axes:
    """Collective. The axes of ``mesh``, with process groups of their own.

    Args:
        mesh: One axis (shard) or two (replicate x shard). None means all ranks on the shard axis, or a single rank
            where torch.distributed is not initialised.
        replicate_all: Put every rank on the replicate axis (stage 0).
        timeout_s: Seconds after which a rank that waits alone raises.

    Raises:
        ValueError: If the mesh has more than two axes.
    """
    if mesh is None:
        if not dist.is_initialized():
            return Axes(Axis(1, 0), Axis(1, 0))
        device = torch.accelerator.current_accelerator()
        kind = device.type if device is not None and dist.get_backend() != "gloo" else "cpu"
        mesh = init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("shard",))
    if mesh.ndim > 2:
        raise ValueError(f"mesh has {mesh.ndim} axes; expected (shard) or (replicate, shard)")
    names = [_axis(mesh, dim, timeout_s) for dim in range(mesh.ndim)]
    replicate, shard = (Axis(1, 0), names[0]) if mesh.ndim == 1 else (names[0], names[1])
    if not replicate_all:
        return Axes(shard, replicate)
    if replicate.size == 1:
        return Axes(Axis(1, 0), shard)
    return Axes(Axis(1, 0), _axis(mesh._flatten(), 0, timeout_s))


def _axis(mesh: DeviceMesh, dim: int, timeout_s: float) -> Axis:
    size = mesh.size(dim)
    if size == 1:
        return Axis(1, 0)
    group = mesh.get_group(dim)
    ranks = tuple(dist.get_process_group_ranks(group))
    backend = dist.get_backend(group)
    gather_group, reduce_group, control_group = _groups_over(_world(), ranks, backend, timeout_s)
    return Axis(size, dist.get_rank(group), gather_group, reduce_group, control_group, timeout_s)


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup)
    return world


@functools.lru_cache(maxsize=64)
def _background_group(world: dist.ProcessGroup, ranks: tuple[int, ...], timeout_s: float) -> dist.ProcessGroup:
    timeout = datetime.timedelta(seconds=timeout_s)
    made = dist.new_group(list(ranks), timeout=timeout, backend="gloo", use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


@functools.lru_cache(maxsize=64)
def _groups_over(
    world: dist.ProcessGroup, ranks: tuple[int, ...], backend: str, timeout_s: float
) -> tuple[dist.ProcessGroup, dist.ProcessGroup, dist.ProcessGroup]:
    """Collective at the first call. Groups for gathers, reductions and control, shared by all sharded modules."""

    def new_group(kind: str) -> dist.ProcessGroup:
        timeout = datetime.timedelta(seconds=timeout_s)
        made = dist.new_group(list(ranks), timeout=timeout, backend=kind, use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup)
        return made

    return new_group(backend), new_group(backend), new_group("gloo")
