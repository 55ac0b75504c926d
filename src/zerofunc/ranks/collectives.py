"""Page collectives over one mesh axis or both, and small exchanges: what all other files communicate through.

An :class:`Axis` is one axis of the device mesh with three process groups over the same ranks: one for gathers, one for
reductions, and a gloo group on which ranks agree on what comes next (agreement.py).
"""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from zerofunc.ranks.agreement import DivergenceError, Reductions, all_gather
from zerofunc.ranks.buffers import BufferPool
from zerofunc.ranks.process_groups import (
    DEFAULT_TIMEOUT_S,
    Groups,
    Work,
    background_group_over,
    default_timeout_s,
    groups_over,
    join_processes,
    joined_ranks,
    ranks_along,
    world_group,
)

__all__ = [
    "DEFAULT_TIMEOUT_S", "Axes", "Axis", "DivergenceError", "Done", "Work", "axes_of", "join_processes", "joined_ranks"
]  # fmt: skip


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
    tensors: tuple[torch.Tensor, ...] = ()

    def wait(self) -> None:
        """Block until the result may be used."""
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise self.axis.lost(self.label, error) from error
        if self.finish is not None:
            self.finish()


class Owned:
    """A collective under way as its owner holds it. Where the owner goes without waiting, it is kept elsewhere."""

    def __init__(self, pending: Pending, kept: list[Work], *tensors: torch.Tensor) -> None:
        self._pending = pending
        self._left_behind = weakref.finalize(self, _keep, kept, pending, tensors)
        self._left_behind.atexit = False

    def wait(self) -> None:
        """Block until the result may be used."""
        try:
            self._pending.wait()
        finally:
            self._left_behind.detach()


def _keep(kept: list[Work], pending: Pending, tensors: tuple[torch.Tensor, ...]) -> None:
    kept.append(replace(pending, tensors=tensors))


@dataclass
class Axis:
    """One mesh axis: the ranks that a page is split over, or replicated over.

    Attributes:
        size: Number of ranks on the axis.
        rank: This process's place on it.
        groups: Its process groups; None for a single rank.
        moved_bytes: Bytes that this rank has sent for parameters and gradients, by the ring algorithms' count.
    """

    size: int
    rank: int
    groups: Groups | None = None
    moved_bytes: int = 0
    _pieces: BufferPool = field(default_factory=BufferPool)

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

    @property
    def timeout_s(self) -> float:
        """Seconds after which a rank that waits alone raises."""
        return self.groups.channel.timeout_s if self.groups is not None else math.inf

    # -- agreement ----------------------------------------------------------------------------------------------

    def agree(self, label: str) -> None:
        """Collective. Check that every rank is about to do what ``label`` says.

        Raises:
            DivergenceError: On every rank that still runs, with each rank's label, when they differ or when a rank
                does not arrive within the time-out.
        """
        if self.groups is not None:
            while self.groups.forsaken:  # all ranks have started them
                self.groups.forsaken.pop().wait()
            self.groups.channel.agree(label)

    def number_module(self) -> int:
        """Local, the same on all ranks. A number for another module that is sharded over the axis."""
        return self.groups.channel.next_number() if self.groups is not None else 0

    def add_reductions(self, reductions: Reductions) -> None:
        """Local. Let agreements of the axis's ranks speak of these reductions; see Note [Order of collectives]."""
        if self.groups is not None:
            self.groups.channel.add(reductions)

    def other_reductions(self, reductions: Reductions) -> list[Reductions]:
        """Local. Those of other modules on the axis."""
        return self.groups.channel.others(reductions) if self.groups is not None else []

    def ask(self, reductions: Reductions) -> None:
        """Collective. Have all ranks start these reductions, as many as this rank wishes."""
        if self.groups is not None:
            self.groups.channel.ask(reductions)

    @property
    def is_gloo(self) -> bool:
        """Whether gloo carries the axis's reductions."""
        return self.groups is not None and dist.get_backend(self.groups.reduce) == "gloo"

    def lost(self, label: str, error: Exception) -> DivergenceError:
        """The error to raise when a rank did not take part in ``label``."""
        assert self.groups is not None
        return self.groups.channel.lost(label, error)

    def any(self, flags: torch.Tensor) -> torch.Tensor:
        """Collective. Elementwise maximum over ranks of a small uint8 CPU tensor, in place; ranks have agreed."""
        if self.groups is not None:
            try:
                dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.groups.channel.group)
            except RuntimeError as error:
                raise self.lost("exchange of flags", error) from error
        return flags

    # -- pages ----------------------------------------------------------------------------------------------------

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, label: str) -> Work:
        """Collective. Start gathering every rank's ``shard`` [n] into ``full`` [size * n], ranks agreeing first."""
        if self.groups is None:
            if full.data_ptr() != shard.data_ptr():
                full.copy_(shard)
            return Done()
        self.agree(label)
        self.moved_bytes += shard.nbytes * (self.size - 1)
        group = self.groups.gather
        if dist.get_backend(group) == "gloo":
            pieces = full.view(self.size, -1)
            if pieces[self.rank].data_ptr() != shard.data_ptr():
                pieces[self.rank].copy_(shard)
            works = self._exchange([shard] * self.size, list(pieces), group, _tag(label))
        else:
            works = [all_gather(full, shard, group=group, async_op=True)]
        return Owned(Pending(works, self, label), self.groups.forsaken, full, shard)

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, label: str) -> Work:
        """Collective. Start summing ``full`` [size * n] over ranks into this rank's ``shard`` [n]; ranks have agreed.

        The reductions of a backward have labels of their own: on gloo a rank may start some before the others do.
        """
        if self.groups is None:
            shard.copy_(full)
            return Done()
        self.moved_bytes += full.nbytes * (self.size - 1) // self.size
        group = self.groups.reduce
        if dist.get_backend(group) != "gloo":
            works = [_reduce_scatter(shard, full, group=group, async_op=True)]
            return Owned(Pending(works, self, label), self.groups.given_up, full, shard)
        mine = full.view(self.size, -1)
        others = self._pieces.take(full.numel() - shard.numel(), full.dtype, full.device).view(self.size - 1, -1)
        pieces = [others[peer - (peer > self.rank)] if peer != self.rank else shard for peer in range(self.size)]
        works = self._exchange(list(mine), pieces, group, _tag(label))

        def add() -> None:
            torch.sum(others, 0, out=shard).add_(mine[self.rank])

        return Owned(Pending(works, self, label, add), self.groups.given_up, full, shard, others)

    def _exchange(
        self, sent: list[torch.Tensor], received: list[torch.Tensor], group: dist.ProcessGroup, tag: int
    ) -> list[Any]:
        """Collective. Start sending ``sent[peer]`` to every other rank of the axis, and receiving from each.

        Messages of one tag arrive in the order in which they are sent. gloo's own all-gather takes twice the time of
        this, and its reduce-scatter three times.
        """
        works = []
        for offset in range(1, self.size):
            to, source = (self.rank + offset) % self.size, (self.rank - offset) % self.size
            if sent[to].numel():
                works.append(dist.isend(sent[to], group=group, group_dst=to, tag=tag))
            if received[source].numel():
                works.append(dist.irecv(received[source], group=group, group_src=source, tag=tag))
        return works

    def all_to_all(self, received: list[torch.Tensor], sent: list[torch.Tensor], label: str) -> Work:
        """Collective. Start sending ``sent[rank]`` to each rank, and receiving ``received[rank]``.

        Pieces are 1-D, of any lengths; what one rank sends is as long as what the other expects, which ranks have
        agreed on before.
        """
        self.moved_bytes += sum(piece.nbytes for rank, piece in enumerate(sent) if rank != self.rank)
        if self.groups is None:
            received[self.rank].copy_(sent[self.rank])
            return Done()
        group = self.groups.gather
        if dist.get_backend(group) != "gloo":
            return Pending([dist.all_to_all(received, sent, group=group, async_op=True)], self, label)
        received[self.rank].copy_(sent[self.rank])
        return Pending(self._exchange(sent, received, group, _tag(label)), self, label)

    def broadcast_object(self, value: Any, label: str, source: int) -> Any:
        """Collective. What the axis's rank ``source`` gives, tensors on the CPU; ranks agree first. Not counted."""
        if self.groups is None:
            return value
        self.agree(label)
        values = [pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, value)]
        try:
            dist.broadcast_object_list(values, group=self.groups.channel.group, group_src=source)
        except RuntimeError as error:
            raise self.lost(label, error) from error
        return values[0]

    def gather_objects(self, value: Any, label: str) -> list[Any]:
        """Collective. What each rank of the axis gives, ranks agreeing first; small things, not counted."""
        values = [value] * self.size
        if self.groups is not None:
            self.agree(label)
            try:
                dist.all_gather_object(values, value, group=self.groups.channel.group)
            except RuntimeError as error:
                raise self.lost(label, error) from error
        return values

    def all_reduce(self, tensor: torch.Tensor, label: str) -> Work:
        """Collective. Start summing ``tensor`` over ranks in place; every rank starts these in the same order."""
        if self.groups is None:
            return Done()
        self.moved_bytes += 2 * tensor.nbytes * (self.size - 1) // self.size
        work = dist.all_reduce(tensor, group=self.groups.reduce, async_op=True)
        return Owned(Pending([work], self, label), self.groups.given_up, tensor)

    def sum(self, value: torch.Tensor, label: str) -> torch.Tensor:
        """Collective. Sum of a small tensor over ranks, in place; not counted as moved."""
        if self.groups is not None:
            group = self.groups.channel.group if value.device.type == "cpu" else self.groups.reduce
            Pending([dist.all_reduce(value, group=group, async_op=True)], self, label).wait()
        return value

    def broadcast(self, tensor: torch.Tensor, label: str, source: int = 0) -> None:
        """Collective. Replace ``tensor`` by the one of the axis's rank ``source``, ranks agreeing first."""
        if self.groups is None:
            return
        self.agree(label)
        try:
            dist.broadcast(tensor, group=self.groups.gather, group_src=source)
        except RuntimeError as error:
            raise self.lost(label, error) from error


def _tag(label: str) -> int:
    """What tells the messages of an operation from those of others on the same group."""
    return zlib.crc32(label.encode()) & 0x7FFFFFFF


def _reduce_scatter(shard: torch.Tensor, full: torch.Tensor, *, group: dist.ProcessGroup | None, async_op: bool) -> Any:
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    return scatter(shard, full, group=group, async_op=async_op)


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

    @property
    def main(self) -> Axis:
        """The axis that gradients are reduced over first: that of shards, or else that of copies."""
        return self.shard if self.shard.size > 1 else self.replicate

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

    def background(self) -> Background:
        """Collective at its first call. Exchanges over all ranks, for one other thread."""
        if self.num_ranks == 1:
            return Background(None, self)
        ranks = tuple(self.gather_objects(dist.get_rank(), "a group for another thread"))
        timeout_s = max(axis.timeout_s for axis in (self.shard, self.replicate) if axis.size > 1)
        return Background(background_group_over(world_group(), ranks, timeout_s), self)

    def broadcast(self, tensor: torch.Tensor, label: str, source: int = 0) -> None:
        """Collective. Replace ``tensor`` by the one of the mesh's rank ``source``."""
        self.shard.broadcast(tensor, label, source % self.shard.size)
        self.replicate.broadcast(tensor, label, source // self.shard.size)


@dataclass(frozen=True)
class Background:
    """Exchanges between the ranks of some axes beside what they do otherwise, by a group of its own."""

    group: dist.ProcessGroup | None
    axes: Axes

    def gather_objects(self, value: Any, label: str) -> list[Any]:
        """Collective. What each rank gives, by the ranks' order; small things, not counted.

        Raises:
            DivergenceError: If a rank does not come within the time-out, or has ended.
        """
        values = [value] * self.axes.num_ranks
        if self.group is not None:
            try:
                dist.all_gather_object(values, value, group=self.group)
            except RuntimeError as error:
                axis = max((self.axes.shard, self.axes.replicate), key=lambda axis: axis.size)
                raise axis.lost(label, error) from error
        return values


def axes_of(mesh: DeviceMesh | None, *, replicate_all: bool, timeout_s: float | None = None) -> Axes:
    """Collective. The axes of ``mesh``, with process groups of their own.

    Args:
        mesh: One axis (shard) or two (replicate x shard). None means all ranks on the shard axis, or a single rank
            where torch.distributed is not initialised.
        replicate_all: Put every rank on the replicate axis (stage 0).
        timeout_s: Seconds after which a rank that waits alone raises; by default those of ``init_distributed``.

    Raises:
        ValueError: If the mesh has more than two axes, or this process is not part of it.
    """
    timeout_s = default_timeout_s() if timeout_s is None else timeout_s
    if mesh is None:
        if not dist.is_initialized():
            return Axes(Axis(1, 0), Axis(1, 0))
        all_ranks = _axis(tuple(range(dist.get_world_size())), dist.get_backend(), timeout_s)
        return Axes(Axis(1, 0), all_ranks) if replicate_all else Axes(all_ranks, Axis(1, 0))
    if mesh.ndim > 2:
        raise ValueError(f"mesh has {mesh.ndim} axes; expected (shard) or (replicate, shard)")
    everyone = ranks_along(mesh, None)
    backend = dist.get_backend(mesh.get_group(0))
    if replicate_all:
        return Axes(Axis(1, 0), _axis(everyone, backend, timeout_s))
    lines = [_axis(ranks_along(mesh, dim), backend, timeout_s) for dim in range(mesh.ndim)]
    return Axes(lines[-1], lines[0] if mesh.ndim == 2 else Axis(1, 0))


def _axis(ranks: tuple[int, ...], backend: str, timeout_s: float) -> Axis:
    groups = groups_over(world_group(), ranks, backend, timeout_s) if len(ranks) > 1 else None
    return Axis(len(ranks), ranks.index(dist.get_rank()), groups)
